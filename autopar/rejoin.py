"""Tensors that code takes to a list of rows and joins again are one view, whatever the number of rows."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
SPLITS = (aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default)


def rejoin(graph: fx.Graph) -> None:
    """Replace ``cat`` and ``stack`` of all pieces of one ``unbind`` or ``split``, in order, by a copy of the whole in
    the shape that they make. Pieces that nothing else reads are then dead.

    Example:
        ``cat(list(x), 0)`` of x [4, 5, 6] -> ``flatten(clone(x), 0, 1)`` as [20, 6]
    """
    for node in list(graph.nodes):
        if node.target not in (aten.cat.default, aten.stack.default):
            continue
        found = _pieces_of(node.args[0])
        if found is None:
            continue
        with graph.inserting_before(node):
            whole = _joined(graph, node, *found)
        if whole is not None:
            node.replace_all_uses_with(whole)
            graph.erase_node(node)


def _pieces_of(pieces: Any) -> tuple[fx.Node, bool, int] | None:
    """What was taken to these pieces, whether by ``unbind``, and along which dim."""
    if not pieces or any(p.target is not operator.getitem for p in pieces):
        return None
    source = pieces[0].args[0]
    if any(p.args[0] is not source for p in pieces) or [p.args[1] for p in pieces] != list(range(len(pieces))):
        return None
    unbound = source.target is aten.unbind.int
    if not (unbound or source.target in SPLITS) or len(source.meta["val"]) != len(pieces):
        return None
    whole, dim = source.args[0], (*source.args, *source.kwargs.values(), 0)[1 if unbound else 2]
    return whole, unbound, dim % whole.meta["val"].dim()


def _joined(graph: fx.Graph, node: fx.Node, whole: fx.Node, unbound: bool, dim: int) -> fx.Node | None:
    stacks, at = node.target is aten.stack.default, (*node.args, *node.kwargs.values(), 0)[1]
    pieces = node.args[0]
    assert isinstance(at, int) and isinstance(pieces, (list, tuple))
    at %= node.meta["val"].dim()
    lengths = set() if unbound else {piece.meta["val"].shape[dim] for piece in pieces}  # type: ignore[union-attr]
    as_it_was = not (unbound or stacks) and at == dim
    if len(lengths) > 1 and not as_it_was:
        return None
    new = _call(graph, node, aten.clone.default, whole, memory_format=torch.contiguous_format)
    if as_it_was:
        return new
    if not unbound:  # equal pieces: as if unbound from a dim of their own
        shape = list(new.meta["val"].shape)
        shape[dim : dim + 1] = len(pieces), *lengths
        new = _call(graph, node, aten.view.default, new, shape)
    if at != dim:
        new = _call(graph, node, aten.movedim.int, new, dim, at)
    return new if stacks else _call(graph, node, aten.flatten.using_ints, new, at, at + 1)


def _call(graph: fx.Graph, like: fx.Node, target: Any, x: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, (x, *args), kwargs)
    with torch.no_grad():
        node.meta = {**like.meta, "val": target(x.meta["val"], *args, **kwargs)}
    return node
