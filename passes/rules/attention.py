"""Scaled dot product attention: batch, heads and queries split, and the value's head dim. A rank's causal queries get a
mask of where they stand, once for all layers, with keys and values whole.

With fewer key/value heads than ranks the heads are split by a special: keys and values are whole and every rank takes
those that its own query heads read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.passes.facts import RELAXED, fact
from autopar.passes.layout import WHOLE, Split, parts_before
from autopar.passes.rules.core import Dim, Rule, Special, factors, placed
from autopar.passes.rules.signature import NEVER, Call, broadcast, plain, read

if TYPE_CHECKING:
    from autopar.passes.emit import Emitter

aten = torch.ops.aten


@factors(aten.scaled_dot_product_attention.default)
def attention(node: fx.Node) -> Rule | None:
    """``q[b h l .], k[b h s .], v[b h s e], mask[b h l .] -> y[b h l e]``; h may have different sizes in q and k."""
    call = read(node)
    if call["dropout_p"] > 0 and RELAXED not in node.meta:
        return None  # draws random numbers
    q, k, v = call.shape("query"), call.shape("key"), call.shape("value")
    if not len(q) == len(k) == len(v) or len(q) < 3:
        return None
    lead = plain("b", q[:-2])
    if len(q) >= 4:
        lead = (*lead[:-1], Dim(("h",)) if q[-3] > 1 else NEVER)
    length = NEVER if q[-2] == 1 else Dim(("l",))
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
    positions = ("l",) if call["is_causal"] else ()
    specials = _grouped(call, q, k, v)
    return call.rule(result, named, linear=[call.group("value")], specials=specials, positions=positions)


@placed(aten.scaled_dot_product_attention.default)
def causal_from(emitter: Emitter, node: fx.Node) -> fx.Node:
    """Causal attention of this rank's queries."""
    return _attend(emitter, node, _bound(emitter, node))


def _bound(emitter: Emitter, node: fx.Node) -> dict[str, Any]:
    """The local arguments by name."""
    args, kwargs = emitter.args(node)
    return dict(zip([a.name for a in node.target._schema.arguments], args)) | kwargs  # type: ignore[union-attr]


def _attend(emitter: Emitter, node: fx.Node, bound: dict[str, Any]) -> fx.Node:
    """The op on local arguments; causal queries that are cut get a mask instead."""
    if bound.get("is_causal") and _queries(node).axes:
        bound |= {"attn_mask": _causal_mask(emitter, node), "is_causal": False}
    defaults: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}
    first = [bound.pop(name, defaults.get(name)) for name in ("query", "key", "value", *defaults)]
    return emitter.call(node.target, *first, **bound)


def _causal_mask(emitter: Emitter, node: fx.Node) -> fx.Node:
    """``[l s]``: -inf where a key stands behind a query of this rank's, else 0."""
    call, split = read(node), _queries(node)
    queries, keys = call.shape("query")[-2], call.shape("key")[-2]
    dtype = emitter.operand(call.slots["query"][0]).meta["val"].dtype

    def make() -> fx.Node:
        rows = emitter.positions(queries, split)
        behind = emitter.call(
            aten.gt.Tensor, emitter.positions(keys, WHOLE), emitter.call(aten.unsqueeze.default, rows, 1)
        )
        none = emitter.call(aten.zeros.default, list(emitter.shape(behind)), dtype=dtype, device=emitter.device)
        return emitter.call(aten.masked_fill.Scalar, none, behind, -math.inf)

    return emitter.once(("causal", queries, split, keys, dtype), make)


def _queries(node: fx.Node) -> Split:
    """How the queries are cut."""
    chosen = fact(node).strategy
    assert chosen is not None
    return chosen.operands[read(node).slots["query"][0]].dims[-2]


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
    k, v = (emitter.operand(call.slots[n][0]) for n in ("key", "value"))
    (heads,), _ = parts_before(axis, call.shape("query")[-3], split, emitter.mesh, emitter.coordinates)
    group = heads // emitter.shape(k)[-3]
    spans = [emitter.mesh.axes[axis].cut(0, heads, c) for c in range(emitter.n(axis))]
    read_by = [[h // group for h in range(lo, lo + n)] for lo, n in spans]
    wanted = read_by[emitter.c(axis)]
    shared = all(len({read.count(h) for h in read}) == 1 for read in read_by)
    most = max(map(len, read_by))
    bound = _bound(emitter, node)
    bound["key"], bound["value"] = (_take(emitter, x, wanted, shared, most) for x in (k, v))
    return _attend(emitter, node, bound)


def _take(emitter: Emitter, x: fx.Node, wanted: list[int], shared: bool, most: int) -> Any:
    """The heads that a rank's queries read: each once where on all ranks every one serves equally many, else one per
    query head (and none where another rank, of ``most``, has more: ranks run the same ops)."""
    if shared:
        return emitter.call(aten.slice.Tensor, x, -3, wanted[0], wanted[-1] + 1)
    spans = [(h, h + 1) for h in wanted] + [(0, 0)] * (most - len(wanted))
    picked = [emitter.call(aten.slice.Tensor, x, -3, *span) for span in spans]
    return emitter.call(aten.cat.default, picked, -3)
