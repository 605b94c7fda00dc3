"""PREPARE: a loss of all tokens but the last reads them all, so that the sequence keeps its length."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes.drop_noops import drop_dead
from autopar.passes.facts import call

aten, ops = torch.ops.aten, torch.ops.autopar
MOST = 4  # one row in so many may be added: each costs as much as one that counts


def shifted_losses_keep_length(gm: fx.GraphModule) -> fx.GraphModule:
    """``autopar.cross_entropy_sum`` of a slice of rows reads all of them; those that were cut off have labels that are
    ignored, which add nothing to the sum and get gradients of 0.

    Example:
        ``cross_entropy_sum(slice(h, 1, 0, 7), t)`` of h [2, 8, V] -> ``cross_entropy_sum(h, constant_pad_nd(t, [0, 1],
        ignore_index))``
    """
    graph = gm.graph
    for node in list(graph.nodes):
        while is_shifted(node):
            node = _lengthen(graph, node)
    drop_dead(graph)
    graph.lint()
    gm.recompile()
    return gm


def is_shifted(node: fx.Node) -> bool:
    """Whether the node is a loss of most of the rows of a tensor."""
    return node.target is ops.cross_entropy_sum.default and _slice_of(node.args[0]) is not None


def _slice_of(node: Any) -> fx.Node | None:
    """The slice of rows that ``node`` is, or is a cast of."""
    node = _in_place(node)
    if node.target is aten.to.dtype:
        return _slice_of(node.args[0])
    if node.target is not aten.slice.Tensor or len(node.args) != 4:
        return None
    whole, kept = node.args[0].meta["val"].shape, node.meta["val"].shape
    dim = node.args[1]
    most = dim < len(kept) - 1 and 0 < (whole[dim] - kept[dim]) * MOST <= whole[dim]
    return node if most else None


def _in_place(node: Any) -> Any:
    """What a tensor was before its dims changed places and came back."""
    x, order = node, list(range(node.meta["val"].ndim))
    while x.target in (aten.permute.default, aten.transpose.int):
        moved = list(range(len(order)))
        if x.target is aten.transpose.int:
            one, two = (d % len(order) for d in x.args[1:])
            moved[one], moved[two] = two, one
        else:
            moved = [d % len(order) for d in x.args[1]]
        order, x = [moved[d] for d in order], x.args[0]
        if order == sorted(order):
            return _in_place(x)
    return node


def _lengthen(graph: fx.Graph, node: fx.Node) -> fx.Node:
    logits, target, weight, ignore_index, smoothing = node.args
    cut = _slice_of(logits)
    assert cut is not None and isinstance(target, fx.Node)
    x, dim, start, _ = cut.args
    assert isinstance(x, fx.Node) and isinstance(dim, int) and isinstance(start, int)
    after = x.meta["val"].shape[dim] - start - cut.meta["val"].shape[dim]
    pads = [0, 0] * (target.meta["val"].ndim - 1 - dim) + [start, after]
    with graph.inserting_before(node):
        again = _cast(graph, logits, cut, x)
        labels = call(graph, aten.constant_pad_nd.default, (target, pads, ignore_index), like=node)
        args = (again, labels, weight, ignore_index, smoothing)
        new = call(graph, node.target, args, like=node)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def _cast(graph: fx.Graph, node: Any, cut: fx.Node, x: fx.Node) -> fx.Node:
    """``x`` with the casts that stand between the slice and ``node``."""
    node = _in_place(node)
    if node is cut:
        return x
    return call(graph, aten.to.dtype, (_cast(graph, node.args[0], cut, x), *node.args[1:]), like=node)


__all__ = ["is_shifted", "shifted_losses_keep_length"]
