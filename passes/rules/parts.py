"""Ops that cut a dim in parts or join them: every part is cut alike, so the pieces stay where they are.

``x[(q + k + v)] -> q, k, v``: a rank holds its piece of each part.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import fx

from autopar.passes.rules.core import Dim, Dims, Rule, factors, localizes
from autopar.passes.rules.signature import NEVER, Call, dim_index, plain, put, read

aten = torch.ops.aten


def part_dim(name: str, lengths: tuple[int, ...]) -> Dim:
    """A dim cut along ``name`` in parts of these lengths; never, where a part has a single element."""
    if any(n < 2 for n in lengths):
        return NEVER
    return Dim((name,), lengths if len(lengths) > 1 else ())


def with_dim(dims: Dims, at: int, dim: Dim) -> Dims:
    """``dims`` with the one at ``at`` replaced."""
    return (*dims[:at], dim, *dims[at + 1 :])


@factors(
    aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default, aten.tensor_split.sections,
    aten.split_with_sizes_copy.default, aten.split_copy.Tensor,
)  # fmt: skip
def split(node: fx.Node) -> Rule:
    """``x[a (s + s + ...)] -> y[a s], z[a s], ...``"""
    call = read(node)
    shape = call.shape("self")
    dim = dim_index(call["dim"], len(shape))
    dims = plain("d", shape)
    lengths = tuple(int(r.shape[dim]) for r in call.results() if r is not None)
    cut = part_dim("s", lengths)
    result = with_dim(dims, dim, Dim(("s",)) if cut.factors else NEVER)
    return call.rule([result] * len(lengths), {"self": with_dim(dims, dim, cut)}, linear=[call.group("self")])


@localizes(aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default)
@localizes(aten.split_with_sizes_copy.default, aten.split_copy.Tensor)
def local_split(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The lengths of the local parts."""
    call = read(node)
    dim = dim_index(call["dim"], len(call.shape("self")))
    lengths = [r[dim] for r in sizes.results]
    if node.target in (aten.split.Tensor, aten.split_copy.Tensor):
        return put(node, args, kwargs, "split_size", lengths[0])
    name = "split_size" if node.target is aten.split.sizes else "split_sizes"
    return put(node, args, kwargs, name, lengths)


@factors(aten.cat.default, aten.concat.default)
def cat(node: fx.Node) -> Rule | None:
    """``x[a s], y[a s] -> z[a (s + s)]``, linear in all together."""
    call = read(node)
    shapes = [tuple(n.meta["val"].shape) for n in call["tensors"]]
    if len({len(s) for s in shapes}) > 1:
        return None  # torch skips empty vectors
    dim = dim_index(call["dim"], len(shapes[0]))
    dims = plain("d", shapes[0])
    lengths = tuple(s[dim] for s in shapes)
    cut = part_dim("s", lengths)
    operand = with_dim(dims, dim, Dim(("s",)) if cut.factors else NEVER)
    result = with_dim(dims, dim, cut)
    return call.rule(result, {"tensors": [operand] * len(shapes)}, linear=[call.group("tensors")])


@factors(aten.slice.Tensor, aten.narrow.default, aten.slice_copy.Tensor, aten.narrow_copy.default)
def cut_out(node: fx.Node) -> Rule:
    """``x[a (. + s + .)] -> y[a s]``: what lies before and behind is cut too, so the piece stays where it is. One in
    every few of a whole dim (gate and up projections that lie alternately): ``x[a (s .)] -> y[a s]``."""
    call = read(node)
    shape = call.shape("self")
    dim, start, end, step = bounds(call)
    dims = plain("d", shape)
    if _one_in_every(step, start, end, shape[dim]):
        operand, result = with_dim(dims, dim, Dim(("s", "t"))), with_dim(dims, dim, Dim(("s",)))
        sizes = {"s": shape[dim] // step, "t": step}
        return call.rule(result, {"self": operand}, linear=[call.group("self")], sizes=sizes, whole=["t"])
    inside, around = _cuts(call, dim, start, end, step)
    operand, result = with_dim(dims, dim, around), with_dim(dims, dim, inside)
    return call.rule(result, {"self": operand}, linear=[call.group("self")])


def _one_in_every(step: int, start: int, end: int, size: int) -> bool:
    """Whether a slice takes one element of each ``step``."""
    return step > 1 and size % step == 0 and size > step and start < step and end > size - step + start


@factors(aten.slice_scatter.default)
def put_in(node: fx.Node) -> Rule:
    """``x[a (. + s + .)], y[a s] -> z[a (. + s + .)]``."""
    call = read(node)
    dims = plain("d", call.shape("self"))
    dim, start, end, step = bounds(call)
    inside, around = _cuts(call, dim, start, end, step)
    whole, piece = with_dim(dims, dim, around), with_dim(dims, dim, inside)
    return call.rule(whole, {"self": whole, "src": piece}, linear=[call.group("self", "src")])


@factors(aten.select_scatter.default)
def put_one_in(node: fx.Node) -> Rule:
    """``x[a .], y[a] -> z[a .]``."""
    call = read(node)
    shape = call.shape("self")
    dim = dim_index(call["dim"], len(shape))
    dims = with_dim(plain("d", shape), dim, NEVER)
    piece = tuple(x for d, x in enumerate(dims) if d != dim)
    return call.rule(dims, {"self": dims, "src": piece}, linear=[call.group("self", "src")])


def bounds(call: Call) -> tuple[int, int, int, int]:
    """(dim, start, end, step) of a slice, counted from the left and inside the dim."""
    shape = call.shape("self")
    dim = dim_index(call["dim"], len(shape))
    if "length" in call.values:
        start = call["start"] % shape[dim] if shape[dim] else 0
        return dim, start, start + call["length"], 1
    start, end, step = slice(call["start"], call["end"], call["step"]).indices(shape[dim])
    return dim, start, max(start, end), step


def _cuts(call: Call, dim: int, start: int, end: int, step: int) -> tuple[Dim, Dim]:
    """The dim of the piece and of the tensor it is taken from. All slices that are taken of this tensor along this dim
    are cut alike: halves and quarters of one tensor fit together."""
    if step != 1 or start == end:
        return NEVER, NEVER
    size = call.shape("self")[dim]
    marks = {0, start, end, size}
    for user in call["self"].users:
        if user.op == "call_function" and user.target is aten.slice.Tensor and user.args[0] is call["self"]:
            other, lo, hi, _ = bounds(read(user))
            if other == dim:
                marks |= {lo, hi}
    edges = sorted(marks)
    around = part_dim("s", tuple(b - a for a, b in pairwise(edges)))
    inside = part_dim("s", tuple(b - a for a, b in pairwise(m for m in edges if start <= m <= end)))
    return (inside, around) if around.factors else (NEVER, NEVER)


@localizes(aten.slice.Tensor, aten.slice_scatter.default, aten.narrow.default)
@localizes(aten.slice_copy.Tensor, aten.narrow_copy.default)
def local_bounds(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Bounds move in proportion, as every part is cut alike."""
    call = read(node)
    dim, start, end, step = bounds(call)
    size, local = call.shape("self")[dim], sizes.operands[0][dim]
    if size == local:
        return args, kwargs
    if step > 1:
        return put(node, args, kwargs, "end", local)
    start, end = start * local // size, end * local // size
    args, kwargs = put(node, args, kwargs, "start", start)
    if "length" in call.values:
        return put(node, args, kwargs, "length", end - start)
    return put(node, args, kwargs, "end", end)
