"""Scaled dot product attention: batch and heads split, queries too where nothing is causal, and the value's head dim.

With fewer key/value heads than ranks the heads are split by a special: keys and values are whole and every rank takes
those that its own query heads read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.passes.facts import fact
from autopar.passes.layout import parts_before
from autopar.passes.rules.core import Dim, Rule, Special, factors
from autopar.passes.rules.signature import NEVER, Call, broadcast, plain, read

if TYPE_CHECKING:
    from autopar.passes.emit import Emitter

aten = torch.ops.aten


@factors(aten.scaled_dot_product_attention.default)
def attention(node: fx.Node) -> Rule | None:
    """``q[b h l .], k[b h s .], v[b h s e], mask[b h l .] -> y[b h l e]``; h may have different sizes in q and k."""
    call = read(node)
    if call["dropout_p"] > 0:
        return None  # draws random numbers
    q, k, v = call.shape("query"), call.shape("key"), call.shape("value")
    if not len(q) == len(k) == len(v) or len(q) < 3:
        return None
    lead = plain("b", q[:-2])
    if len(q) >= 4:
        lead = (*lead[:-1], Dim(("h",)) if q[-3] > 1 else NEVER)
    length = NEVER if call["is_causal"] or q[-2] == 1 else Dim(("l",))
    e = Dim(("e",)) if v[-1] > 1 else NEVER
    result = (*lead, length, e)
    kv_lead = tuple(d if n > 1 else NEVER for d, n in zip(lead, k[:-2]))
    v_lead = tuple(d if n > 1 else NEVER for d, n in zip(lead, v[:-2]))
    named: dict[str, Any] = {
        "query": (*lead, length, NEVER),
        "key": (*kv_lead, NEVER, NEVER),
        "value": (*v_lead, NEVER, e),
    }
    if call.has("attn_mask"):
        scores = (*lead, length, NEVER)
        named["attn_mask"] = broadcast(call.shape("attn_mask"), scores, (*q[:-1], k[-2]))
    return call.rule(result, named, linear=[call.group("value")], specials=_grouped(call, q, k, v))


def _grouped(call: Call, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> tuple[Special, ...]:
    """Split query heads with whole keys and values: for grouped heads only (a single key head is no factor at all)."""
    if len(q) < 4 or not call["enable_gqa"] or k[-3] in (1, q[-3]) or k[-3] != v[-3]:
        return ()
    heads = len(q) - 3
    operands: list[str | int] = ["R"] * sum(len(s) for s in call.slots.values())
    operands[call.slots["query"][0]] = heads
    if call.has("attn_mask"):
        mask = call.shape("attn_mask")
        if len(mask) >= 3 and mask[-3] > 1:
            operands[call.slots["attn_mask"][0]] = len(mask) - 3
    return (Special("grouped-heads", tuple(operands), (heads,), lower_grouped_heads, uneven=True),)


def lower_grouped_heads(emitter: Emitter, node: fx.Node, axis: int) -> fx.Node:
    """Attention of this rank's query heads with the key and value heads they read, taken from whole ones.

    Another axis may split all heads by the factor h; it must then be the outer one on the query's head dim.
    """
    call = read(node)
    chosen = fact(node).strategy
    assert chosen is not None
    split = chosen.operands[call.slots["query"][0]].dims[-3]
    assert split.axes[-1:] == (axis,), "grouped-heads: its axis cuts the heads innermost"
    q, k, v = (emitter.operand(call.slots[n][0]) for n in ("query", "key", "value"))
    (heads,), _ = parts_before(axis, call.shape("query")[-3], split, emitter.mesh, emitter.coordinates)
    group = heads // emitter.shape(k)[-3]
    spans = [emitter.mesh.axes[axis].cut(0, heads, c) for c in range(emitter.n(axis))]
    read_by = [[h // group for h in range(lo, lo + n)] for lo, n in spans]
    wanted = read_by[emitter.c(axis)]
    shared = all(len({read.count(h) for h in read}) == 1 for read in read_by)
    most = max(map(len, read_by))
    args, kwargs = emitter.args(node)
    bound = dict(zip([a.name for a in node.target._schema.arguments], args)) | kwargs  # type: ignore[union-attr]
    bound["key"], bound["value"] = (_take(emitter, x, wanted, shared, most) for x in (k, v))
    q, k, v = bound.pop("query"), bound.pop("key"), bound.pop("value")
    mask, dropout, causal = bound.pop("attn_mask", None), bound.pop("dropout_p", 0.0), bound.pop("is_causal", False)
    result = emitter.call(node.target, q, k, v, mask, dropout, causal, **bound)
    assert isinstance(result, fx.Node)
    return result


def _take(emitter: Emitter, x: fx.Node, wanted: list[int], shared: bool, most: int) -> Any:
    """The heads that a rank's queries read: each once where on all ranks every one serves equally many, else one per
    query head (and none where another rank, of ``most``, has more: ranks run the same ops)."""
    if shared:
        return emitter.call(aten.slice.Tensor, x, -3, wanted[0], wanted[-1] + 1)
    spans = [(h, h + 1) for h in wanted] + [(0, 0)] * (most - len(wanted))
    picked = [emitter.call(aten.slice.Tensor, x, -3, *span) for span in spans]
    return emitter.call(aten.cat.default, picked, -3)
