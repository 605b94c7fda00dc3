"""PREPARE: every node computes something, and casts have one form."""

from __future__ import annotations

from collections.abc import Collection
from functools import reduce
from typing import Any

import torch
from torch import fx

from autopar.passes.facts import call, is_tensor

aten = torch.ops.aten

ASSERTIONS = {
    aten._assert_tensor_metadata.default, aten._assert_async.default, aten._assert_async.msg,
    aten._assert_scalar.default, aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default,
}  # fmt: skip
IDENTITIES = {
    aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.lift.default,
    aten.contiguous.default, aten.clone.default, aten.positive.default,
}  # fmt: skip
CASTS = {
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default, aten._to_copy.default,
    aten.to.prim_Device, aten.to.prim_dtype, aten.to.prim_other,
}  # fmt: skip
DROPOUTS = {
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
}
FRESH = {
    aten.new_zeros.default: aten.zeros.default, aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default, aten.new_empty.default: aten.empty.memory_format,
}  # fmt: skip
READ_STRIDES = {aten.as_strided.default, aten.view.dtype, aten.view_as_complex.default}


def drop_noops(gm: fx.GraphModule) -> fx.GraphModule:
    """Take out assertions, copies, casts that change no dtype, dropout that drops nothing, ``x * 1``, ``x / 1``,
    ``x + 0`` of integers, slices of everything, what ``cat`` is given without elements (an empty cache of keys, say),
    and nodes that nobody reads. What casts remain are ``aten.to.dtype``; ``x.new_zeros(n)`` is ``zeros(n)``, as only
    the type of x is read.

    A copy stays where an op reads the strides of memory (``as_strided``, ``view_as_complex``). In a functional graph
    nothing else can tell a tensor from its copy.

    Example:
        ``b = contiguous(a); c = to.dtype(b, float32); d = dropout(c, 0.0, True); return d`` -> ``return a``
    """
    graph = gm.graph
    kept = trained(gm)
    for node in list(graph.nodes):
        if (node.op == "call_module" and node.target == "_guards_fn") or node.target in ASSERTIONS:
            graph.erase_node(node)
        elif node.target is aten.cat.default:
            _join(graph, node, kept)
        elif node.op == "call_function":
            _drop(graph, node)
    drop_dead(graph)
    graph.lint()
    gm.recompile()
    return gm


def trained(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes that depend on a parameter."""
    parameters = {name for name, _ in gm.named_parameters(remove_duplicate=False)}
    found = set[fx.Node]()
    for node in gm.graph.nodes:
        if (node.op == "get_attr" and node.target in parameters) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _join(graph: fx.Graph, node: fx.Node, reached: set[fx.Node]) -> None:
    """Take operands without elements out of a ``cat``; of one operand it is that operand, or its cast."""
    kept = joined(node, reached)
    if len(kept) > 1:
        node.args = (kept, *node.args[1:])
    elif kept[0].meta["val"].shape == node.meta["val"].shape:
        with graph.inserting_before(node):
            node.replace_all_uses_with(_cast(graph, node, kept[0]))
        graph.erase_node(node)


def joined(node: fx.Node, reached: Collection[fx.Node]) -> list[fx.Node]:
    """The operands that a ``cat`` needs: those with elements, and `trained` ones, which get a gradient of zeros."""
    given: Any = node.args[0]
    kept = [a for a in given if a.meta["val"].numel() or a in reached]
    if not kept:
        return list(given)
    dtype = reduce(torch.promote_types, (a.meta["val"].dtype for a in kept))
    return kept if len(kept) == 1 or dtype == node.meta["val"].dtype else list(given)


def _drop(graph: fx.Graph, node: fx.Node) -> None:
    source = node.args[0] if node.args else None
    if node.target in FRESH:
        how = {"dtype": node.meta["val"].dtype, "device": torch.device("cpu")}  # wherever it runs, it is that device
        with graph.inserting_before(node):
            node.replace_all_uses_with(call(graph, FRESH[node.target], node.args[1:], how, like=node))
        graph.erase_node(node)
    elif node.target in CASTS and is_tensor(node):
        assert isinstance(source, fx.Node)
        with graph.inserting_before(node):
            node.replace_all_uses_with(_cast(graph, node, source))
        graph.erase_node(node)
    elif isinstance(source, fx.Node) and is_noop(node):
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _cast(graph: fx.Graph, node: fx.Node, source: fx.Node) -> fx.Node:
    """``source`` itself, or its cast to what ``node`` is."""
    dtype = node.meta["val"].dtype
    if source.meta["val"].dtype == dtype:
        return source
    if node.target is aten.to.dtype and len(node.args) == 2 and not node.kwargs:
        return graph.node_copy(node)
    return call(graph, aten.to.dtype, (source, dtype), like=node)


def is_noop(node: fx.Node) -> bool:
    """Whether the node's value is that of its first operand, bit for bit."""
    args = node.args
    if node.target in IDENTITIES:
        return not any(u.target in READ_STRIDES for u in node.users)
    if node.target in DROPOUTS:
        return bool(args[1] == 0 or not args[2])
    if not _same(node) or node.kwargs:
        return False
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        return _is(args[1], 1)
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        return _is(args[1], 0) and not node.meta["val"].is_floating_point()  # -0.0 + 0 is 0.0
    return node.target is aten.slice.Tensor


def _same(node: fx.Node) -> bool:
    if not (is_tensor(node) and is_tensor(node.args[0])):
        return False
    mine, source = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
    return bool(mine.shape == source.shape and mine.dtype == source.dtype)


def _is(arg: Any, number: int) -> bool:
    return isinstance(arg, (int, float)) and not isinstance(arg, bool) and arg == number


def drop_dead(graph: fx.Graph) -> None:
    """Take out what nobody reads. Placeholders stay; fx's own sweep would keep attention, which it takes for random."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
