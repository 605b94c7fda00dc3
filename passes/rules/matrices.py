"""Linear algebra and other ops on items that fill the last dims: all dims before them are a batch, which splits.

A table says how many dims an item has in each operand and each result. Items are read whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes.rules.core import Dims, Rule, factors, localizes
from autopar.passes.rules.signature import NEVER, broadcast, plain, put, read

aten = torch.ops.aten

# Op: dims of an item of each tensor operand -> of each result; names after "linear" are the operands it is linear in.
ITEMS = """
    cholesky.default                        2 -> 2
    cholesky_inverse.default                2 -> 2
    cholesky_solve.default                  2 2 -> 2
    linalg_cholesky_ex.default              2 -> 2 0
    linalg_eig.default                      2 -> 1 2
    _linalg_eigh.default                    2 -> 1 2
    _linalg_eigvals.default                 2 -> 1
    _linalg_det.default                     2 -> 0 2 1
    _linalg_slogdet.default                 2 -> 0 0 2 1
    _linalg_svd.default                     2 -> 2 1 2
    _linalg_solve_ex.default                2 2 -> 2 2 1 0
    linalg_householder_product.default      2 1 -> 2
    linalg_inv_ex.default                   2 -> 2 0
    linalg_ldl_factor_ex.default            2 -> 2 1 0
    linalg_ldl_solve.default                2 1 2 -> 2
    linalg_lu.default                       2 -> 2 2 2
    linalg_lu_factor_ex.default             2 -> 2 1 0
    linalg_lu_solve.default                 2 1 2 -> 2
    linalg_matrix_exp.default               2 -> 2
    linalg_pinv.atol_rtol_tensor            2 0 0 -> 2
    linalg_qr.default                       2 -> 2 2
    linalg_solve_triangular.default         2 2 -> 2
    lu_unpack.default                       2 1 -> 2 2 2
    ormqr.default                           2 1 2 -> 2        linear other
    triangular_solve.default                2 2 -> 2 2
    matrix_exp.default                      2 -> 2
    _pdist_forward.default                  2 -> 1
"""


def _table(text: str) -> dict[Any, tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]]:
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        counts, _, linear = rest.partition("linear")
        before, _, after = counts.partition("->")
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload)
        found[op] = (tuple(map(int, before.split())), tuple(map(int, after.split())), tuple(linear.split()))
    return found


TABLE = _table(ITEMS)
PRODUCT_FROM = 25  # points: cdist takes distances by a matrix product where it has more


@factors(*TABLE)
def items(node: fx.Node) -> Rule | None:
    """``x[... . .] -> y[... .]``: batches are broadcast to those of the results. A batch dim that some result lacks is
    whole: that result would not be a sum of pieces. Results that were not asked for are empty."""
    call = read(node)
    before, after, linear = TABLE[node.target]
    outs = call.results()
    names = [n for n, slots in call.slots.items() if slots]
    shapes = {n: call.shape(n) for n in names}
    if any(0 in s for s in shapes.values()):
        return None
    if node.target is aten._linalg_solve_ex.default and shapes["B"] == shapes["A"][:-1]:
        before, after = (2, 1), (1, 2, 1, 0)  # B is a vector
    made = [(tuple(o.shape), n) for o, n in zip(outs, after, strict=True) if o is not None and o.numel()]
    if any(len(s) < n for s, n in made) or any(len(shapes[n]) < k for n, k in zip(names, before)):
        return None
    wide = max((_lead(s, n) for s, n in made), key=len, default=())
    batch = plain("b", wide)
    results = [_item(tuple(o.shape), n, batch, wide) if o is not None else None for o, n in zip(outs, after)]
    full = [r for r, o in zip(results, outs) if o is not None and o.numel()]
    whole = [f for d in batch for f in d.factors if any(d not in r for r in full if r is not None)]
    named = {n: _item(shapes[n], k, batch, wide) for n, k in zip(names, before)}
    return call.rule(results, named, linear=[call.group(n) for n in linear], whole=whole)


def _lead(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    return shape[: len(shape) - item]


def _item(shape: tuple[int, ...], item: int, batch: Dims, wide: tuple[int, ...]) -> Dims:
    if len(shape) < item:
        return (NEVER,) * len(shape)  # not asked for
    return (*broadcast(_lead(shape, item), batch, wide), *(NEVER,) * item)


@factors(aten.cdist.default)
def distances(node: fx.Node) -> Rule:
    """``x[a p .], y[a r .] -> z[a p r]``: every point is measured from every other."""
    call = read(node)
    x, y = call.shape("x1"), call.shape("x2")
    out = call.results()[0]
    assert out is not None
    dims = plain("d", out.shape)
    *_, p, r = dims
    batch, wide = dims[:-2], tuple(out.shape[:-2])
    named = {"x1": (*broadcast(x[:-2], batch, wide), p, NEVER), "x2": (*broadcast(y[:-2], batch, wide), r, NEVER)}
    return call.rule(dims, named)


@localizes(aten.cdist.default)
def same_distances(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Torch's choice between two formulas for Euclidean distances depends on sizes: that of the whole call is kept."""
    call = read(node)
    if call["p"] != 2 or call["compute_mode"] in (1, 2):
        return args, kwargs
    by_product = max(call.shape("x1")[-2], call.shape("x2")[-2]) > PRODUCT_FROM
    return put(node, args, kwargs, "compute_mode", 1 if by_product else 2)


@factors(aten.linalg_cross.default)
def cross(node: fx.Node) -> Rule:
    """``x[a .], y[a .] -> z[a .]``: the dim of three is whole."""
    call = read(node)
    out = call.results()[0]
    assert out is not None
    shape = tuple(out.shape)
    dims = plain("d", shape)
    dims = tuple(NEVER if d == call["dim"] % len(shape) else x for d, x in enumerate(dims))
    named = {n: broadcast(call.shape(n), dims, shape) for n in ("self", "other")}
    return call.rule(dims, named, linear=[call.group("self"), call.group("other")])


@factors(aten.block_diag.default, aten.trace.default)
def blocks(node: fx.Node) -> Rule:
    """Whole, and linear."""
    call = read(node)
    out = call.results()[0]
    assert out is not None
    return call.rule((NEVER,) * out.dim(), {}, linear=[frozenset(s for slots in call.slots.values() for s in slots)])
