"""PREPARE: views say literally what they make, and no dim is counted from the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autopar.passes.drop_noops import drop_dead
from autopar.passes.facts import call, is_tensor

aten = torch.ops.aten

RESHAPES = {
    aten.view.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int, aten.view_as.default,
    aten.reshape_as.default, aten.ravel.default, aten.squeeze.default, aten.squeeze.dims, aten.reshape.default,
}  # fmt: skip
EXPANDS = {aten.expand.default, aten.expand_as.default, aten.broadcast_to.default}
TRANSPOSES = {
    aten.t.default, aten.numpy_T.default, aten.mT.default, aten.adjoint.default, aten.swapaxes.default,
    aten.swapdims.default, aten.movedim.int, aten.movedim.intlist,
}  # fmt: skip
SPLITS = {
    aten.chunk.default, aten.split.Tensor, aten.split.sizes, aten.unsafe_split.Tensor, aten.unsafe_chunk.default,
    aten.unsafe_split_with_sizes.default, aten.tensor_split.sections, aten.tensor_split.indices,
    aten.split_with_sizes.default,
}  # fmt: skip
DIMS = ("dim", "dims", "dim0", "dim1", "axis")
NEW_DIM = {aten.unsqueeze.default, aten.stack.default}  # their dim counts the one they add


def views_to_reshapes(gm: fx.GraphModule) -> fx.GraphModule:
    """Write each family of views as one op with literal sizes: ``reshape``, ``expand``, ``permute``,
    ``split_with_sizes``, ``slice`` (its end inside the dim). Every argument that names a dim counts from 0. Views that
    change nothing go.

    Afterwards no size is -1, so that a size can be made local from the layout of its dim alone.

    Example:
        ``view(x, [-1, 8])`` of x [4, 2, 8] -> ``reshape(x, [8, 8])``; ``chunk(y, 2, -1)`` of y [4, 6] ->
        ``split_with_sizes(y, [3, 3], 1)``
    """
    graph = gm.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        with graph.inserting_before(node):
            new = _rewritten(graph, node)
        if new is not node:
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    drop_dead(graph)
    graph.lint()
    gm.recompile()
    return gm


def _rewritten(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """What stands for the node: itself with its dims counted from 0, an operand, or a node of the family's one op."""
    for family, rewrite in _FAMILIES:
        if node.target in family:
            return rewrite(graph, node)
    if isinstance(node.target, torch._ops.OpOverload):
        node.args, node.kwargs = _positive(node)
    return node


def _reshape(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return _literal(graph, node, aten.reshape.default)


def _expand(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return _literal(graph, node, aten.expand.default)


def _literal(graph: fx.Graph, node: fx.Node, target: Any) -> fx.Node:
    source, shape = node.args[0], list(node.meta["val"].shape)
    assert isinstance(source, fx.Node)
    if list(source.meta["val"].shape) == shape:
        return source
    if node.target is target and node.args == (source, shape) and not node.kwargs:
        return node
    return call(graph, target, (source, shape), like=node)


def _permute(graph: fx.Graph, node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    ndim = source.meta["val"].ndim
    probe = torch.empty(tuple(range(2, 2 + ndim)), device="meta")  # every dim its own length
    order = [length - 2 for length in node.target(probe, *node.args[1:], **node.kwargs).shape]  # type: ignore[operator]
    if order == list(range(ndim)):
        return source
    return call(graph, aten.permute.default, (source, order), like=node)


def _split(graph: fx.Graph, node: fx.Node) -> fx.Node:
    source, pieces = node.args[0], node.meta["val"]
    dim = _given(node, "dim") % source.meta["val"].ndim  # type: ignore[union-attr]
    lengths = [piece.shape[dim] for piece in pieces]
    new = call(graph, aten.split_with_sizes.default, (source, lengths, dim), like=node)
    return new


def _slice(graph: fx.Graph, node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dim = _given(node, "dim") % source.meta["val"].ndim
    size = source.meta["val"].shape[dim]
    if node.target is aten.narrow.default:
        start, step = _given(node, "start") % size if size else 0, 1
        end = start + _given(node, "length")
    else:
        start, end, step = slice(_given(node, "start"), _given(node, "end"), _given(node, "step")).indices(size)
        end = max(end, start)
    if (start, end, step) == (0, size, 1):
        return source
    args = (source, dim, start, end) if step == 1 else (source, dim, start, end, step)
    if node.target is aten.slice.Tensor and node.args == args:
        return node
    return call(graph, aten.slice.Tensor, args, like=node)


def _broadcast(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Each operand expanded for itself; the node, now unread, goes with what is dead."""
    for item in list(node.users):
        source: Any = node.args[0][item.args[1]]  # type: ignore[index]
        shape = list(item.meta["val"].shape)
        same = list(source.meta["val"].shape) == shape
        item.replace_all_uses_with(source if same else call(graph, aten.expand.default, (source, shape), like=node))
    return node


def _squeeze(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if is_tensor(node.args[0]) and node.args[0].meta["val"].shape == node.meta["val"].shape:  # type: ignore[union-attr]
        return node.args[0]  # type: ignore[return-value]
    node.args, node.kwargs = _positive(node)
    return node


def _select(graph: fx.Graph, node: fx.Node) -> fx.Node:
    source: Any
    source, dim, index = node.args
    shape = source.meta["val"].shape
    at: Any = dim
    node.args = (source, at % len(shape), index % shape[at])
    return node


def _given(node: fx.Node, name: str) -> Any:
    """The argument ``name`` of a call, or its default."""
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, argument.default_value)
    raise AssertionError(f"{node.target} has no argument {name}")


_FAMILIES: tuple[tuple[set[Any], Callable[[fx.Graph, fx.Node], fx.Node]], ...] = (
    (RESHAPES, _reshape),
    (EXPANDS, _expand),
    (TRANSPOSES, _permute),
    (SPLITS, _split),
    ({aten.slice.Tensor, aten.narrow.default}, _slice),
    ({aten.broadcast_tensors.default}, _broadcast),
    ({aten.squeeze.dim}, _squeeze),
    ({aten.select.int}, _select),
)


def _positive(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with every dim counted from 0."""
    ndim = _ndim(node)
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    if not ndim:
        return node.args, dict(node.kwargs)
    args = tuple(_count(a, ndim) if name in DIMS else a for name, a in zip(names, node.args))
    return args, {k: _count(a, ndim) if k in DIMS else a for k, a in node.kwargs.items()}


def counted_from_end(node: fx.Node) -> bool:
    """Whether an argument of the node counts a dim from the end."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    named = dict(zip((a.name for a in node.target._schema.arguments), node.args)) | dict(node.kwargs)
    dims = [named[name] for name in DIMS if name in named]
    return any(isinstance(d, int) and d < 0 for d in tree_leaves(dims)) and _ndim(node) > 0


def _ndim(node: fx.Node) -> int:
    """How many dims the dims in the node's arguments range over; 0 where there is no tensor to tell."""
    first = node.args[0] if node.args else None
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    if not is_tensor(first):
        return 0
    return int(first.meta["val"].ndim) + (node.target in NEW_DIM)  # type: ignore[union-attr]


def _count(dims: Any, ndim: int) -> Any:
    if isinstance(dims, bool) or not isinstance(dims, (int, Sequence)):
        return dims
    if isinstance(dims, int):
        return dims % ndim
    return [d % ndim if isinstance(d, int) else d for d in dims]
