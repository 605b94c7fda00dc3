"""Embedding lookups: indices and features split; the table itself, over its vocabulary, by a special."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

import autopar.runtime.ops  # noqa: F401  (registers autopar::embedding_shard)
from autopar.passes.facts import fact
from autopar.passes.rules.core import Dim, Rule, Special, factors
from autopar.passes.rules.signature import NEVER, plain, read

if TYPE_CHECKING:
    from autopar.passes.emit import Emitter

aten = torch.ops.aten


@factors(aten.embedding.default)
def embedding(node: fx.Node) -> Rule | None:
    """``w[. e], idx[a] -> y[a e]``; by the special ``vocabulary`` w is cut over its rows and y partial."""
    call = read(node)
    if call["scale_grad_by_freq"] or call["sparse"]:
        return None  # the gradient counts an index over all rows
    width = call.shape("weight")[1]
    e = Dim(("e",)) if width > 1 else NEVER
    index = plain("a", call.shape("indices"))
    named = {"weight": (NEVER, e), "indices": index}
    special = Special("vocabulary", (0, "R"), ("P",), lower_vocabulary, uneven=True)
    return call.rule((*index, e), named, linear=[call.group("weight")], specials=(special,))


def lower_vocabulary(emitter: Emitter, node: fx.Node, axis: int) -> Any:
    """The rows that this rank holds, zeros for the others; ``padding_idx`` stays a global index."""
    call = read(node)
    weight, index = emitter.operand(0), emitter.operand(1)
    strategy = fact(node).strategy
    assert strategy is not None and strategy.operands[0].dims[0].axes == (axis,), "one axis cuts the vocabulary"
    return emitter.call(
        torch.ops.autopar.embedding_shard.default, weight, index, emitter.start(0, 0), call["padding_idx"]
    )


@factors(aten.embedding_bag.padding_idx, aten.embedding_bag.default)
def embedding_bag(node: fx.Node) -> Rule | None:
    """``w[. e], idx[.], offsets[.] -> y[. e]``: where a bag begins counts through all indices. What else it returns is
    not to be read."""
    call = read(node)
    read_results = {user.args[1] for user in node.users if user.op == "call_function"}
    if call["scale_grad_by_freq"] or call["sparse"] or read_results != {0}:
        return None
    e = Dim(("e",)) if call.shape("weight")[1] > 1 else NEVER
    others = [(NEVER,) * r.dim() if r is not None else None for r in call.results()[1:]]
    return call.rule([(NEVER, e), *others], {"weight": (NEVER, e)})
