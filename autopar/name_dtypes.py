"""Ops that make floats of integers alone, or by default, say of which type; to widen a graph its literals suffice."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def name_dtypes(graph: fx.Graph) -> None:
    """Give constructors their dtype, integer operands of float results a cast, and a choice of two numbers two tensors.

    Example:
        ``arange(4.0); ids / 2`` -> ``arange(4.0, dtype=float32); to.dtype(ids, float32) / 2``
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and _chooses_float(node):
            _name(graph, node)


def _chooses_float(node: fx.Node) -> bool:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or not (val.dtype.is_floating_point or val.dtype.is_complex):
        return False
    if any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values())):
        return False
    operands = [n.meta.get("val") for n in node.all_input_nodes]
    flat = [v for o in operands for v in (o if isinstance(o, (tuple, list)) else (o,)) if isinstance(v, torch.Tensor)]
    return not any(v.is_floating_point() or v.is_complex() for v in flat)


def _name(graph: fx.Graph, node: fx.Node) -> None:
    dtype = node.meta["val"].dtype
    if node.target is aten.where.Scalar:
        _two_tensors(graph, node)
        return
    schema = getattr(node.target, "_schema", None)
    if schema is not None and any(a.name == "dtype" for a in schema.arguments):
        node.kwargs = {**node.kwargs, "dtype": dtype}
        return
    first = next(iter(node.all_input_nodes), None)
    if first is None or not isinstance(first.meta.get("val"), torch.Tensor):
        return
    with graph.inserting_before(node):
        cast = graph.call_function(aten.to.dtype, (first, dtype))
    cast.meta = {**node.meta, "val": first.meta["val"].to(dtype)}
    node.replace_input_with(first, cast)


def _two_tensors(graph: fx.Graph, node: fx.Node) -> None:
    """The choice between two numbers has no dtype to name."""
    condition, *numbers = (*node.args, *node.kwargs.values())
    dtype, made = node.meta["val"].dtype, []
    with graph.inserting_before(node):
        for number in numbers:
            kwargs: dict[str, Any] = {"dtype": dtype, "device": torch.device("cpu")}
            made.append(graph.call_function(aten.full.default, ([], number), kwargs))
            made[-1].meta = {**node.meta, "val": torch.empty((), dtype=dtype, device="meta")}
    node.target, node.args, node.kwargs = aten.where.self, (condition, *made), {}
