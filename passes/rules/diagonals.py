"""Diagonals and triangles: the two dims whose indices are compared are whole, the others split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.passes.facts import fact, value
from autopar.passes.rules.core import Dim, Dims, Rule, Special, factors
from autopar.passes.rules.signature import NEVER, Call, dim_index, plain, put, read, without

if TYPE_CHECKING:
    from autopar.passes.emit import Emitter

aten = torch.ops.aten


@factors(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(node: fx.Node) -> Rule:
    """``x[a . .] -> y[a .]``, linear."""
    call = read(node)
    dims, kept = _compared(call, call.shape("self"))
    return call.rule((*kept, NEVER), {"self": dims}, linear=[call.group("self")])


@factors(aten.diag_embed.default)
def diagonal_matrix(node: fx.Node) -> Rule:
    """``x[a .] -> y[a . .]``, linear; the new dims stand where they are told."""
    call = read(node)
    shape = call.shape("self")
    lead = plain("d", shape[:-1])
    one, two = sorted(dim_index(call[n], len(shape) + 1) for n in ("dim1", "dim2"))
    result: list[Dim] = list(lead)
    result.insert(one, NEVER)
    result.insert(two, NEVER)
    return call.rule(tuple(result), {"self": (*lead, NEVER)}, linear=[call.group("self")])


@factors(aten.diagonal_scatter.default)
def diagonal_scatter(node: fx.Node) -> Rule:
    """``x[a . .], y[a .] -> z[a . .]``, linear in both together."""
    call = read(node)
    dims, kept = _compared(call, call.shape("self"))
    return call.rule(dims, {"self": dims, "src": (*kept, NEVER)}, linear=[call.group("self", "src")])


def _compared(call: Call, shape: tuple[int, ...]) -> tuple[Dims, Dims]:
    """The dims of a tensor of ``shape``, dim1 and dim2 of the call whole, and those that are neither."""
    gone = {dim_index(call[n], len(shape)) for n in ("dim1", "dim2")}
    dims = without(plain("d", shape), *gone)
    return dims, tuple(x for d, x in enumerate(dims) if d not in gone)


@factors(aten.tril.default, aten.triu.default)
def triangle(node: fx.Node) -> Rule:
    """``x[a . .] -> y[a . .]``, linear; rows or columns are cut by specials that move the diagonal."""
    call = read(node)
    shape = call.shape("self")
    rows, columns = len(shape) - 2, len(shape) - 1
    dims = without(plain("d", shape), rows, columns)
    specials = tuple(
        Special(name, (d,), (d,), lower_triangle) for name, d in (("rows", rows), ("columns", columns)) if shape[d] > 1
    )
    return call.rule(dims, {"self": dims}, linear=[call.group("self")], specials=specials)


def lower_triangle(emitter: Emitter, node: fx.Node, axis: int) -> Any:
    """The diagonal as seen from the first row and column of this rank's piece."""
    strategy, shape = fact(node).strategy, value(node).shape
    assert strategy is not None
    *_, rows, columns = strategy.operands[0].runs(shape, emitter.mesh, emitter.coordinates)
    assert len(rows) == len(columns) == 1, "a triangle is cut in one piece"
    args, kwargs = put(node, *emitter.args(node), "diagonal", read(node)["diagonal"] + rows[0][0] - columns[0][0])
    return emitter.call(node.target, *args, **kwargs)
