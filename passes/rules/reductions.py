"""Ops along dims: a sum splits on the dims that it sums (its result is then partial); everything else that reads along
a dim (max, mean, softmax, cumsum, sort, ...) keeps that dim whole."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from autopar.passes.rules.core import Dim, Dims, Rule, factors
from autopar.passes.rules.signature import NEVER, Call, broadcast, dim_index, plain, read, without

aten = torch.ops.aten


def reduced(call: Call) -> tuple[int, ...]:
    """The dims that the call reads along: its ``dim`` argument, all dims where it has none or an empty one."""
    ndim = len(call.shape("self"))
    dim = call.values.get("dim")
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(ndim))
    return tuple(dim_index(d, ndim) for d in (dim if isinstance(dim, (list, tuple)) else (dim,)))


def after_reduction(dims: Dims, gone: tuple[int, ...], keep: bool) -> Dims:
    """Dims of the result of a reduction over ``gone``."""
    return without(dims, *gone) if keep else tuple(d for i, d in enumerate(dims) if i not in gone)


@factors(aten.sum.default, aten.sum.dim_IntList)
def total(node: fx.Node) -> Rule:
    """``x[a b] -> y[a]``, partial where b is split."""
    return _total(node, linear=True)


@factors(aten.nansum.default, aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def counted(node: fx.Node) -> Rule:
    """As `total`, of what is no number or 0: not linear."""
    return _total(node, linear=False)


def _total(node: fx.Node, *, linear: bool) -> Rule:
    call = read(node)
    dims = plain("d", call.shape("self"))
    result = after_reduction(dims, reduced(call), bool(call.values.get("keepdim")))
    return call.rule(result, {"self": dims}, linear=[call.group("self")] if linear else ())


@factors(aten.histc.default)
def histogram(node: fx.Node) -> Rule | None:
    """``x[a] -> y[.]``, partial over a; without bounds they are those of all elements."""
    call = read(node)
    dims = plain("d", call.shape("self")) if call["min"] < call["max"] else (NEVER,) * len(call.shape("self"))
    return call.rule((NEVER,), {"self": dims})


@factors(aten.mean.default, aten.mean.dim)
def average(node: fx.Node) -> Rule:
    """``x[a .] -> y[a]``: the denominator is the whole dim's."""
    return _along(node, linear=True)


@factors(
    aten.amax.default,
    aten.amin.default,
    aten.max.default,
    aten.min.default,
    aten.max.dim,
    aten.min.dim,
    aten.median.default,
    aten.median.dim,
    aten.prod.default,
    aten.prod.dim_int,
    aten.var.default,
    aten.var.dim,
    aten.var.correction,
    aten.std.default,
    aten.std.dim,
    aten.std.correction,
    aten.var_mean.default,
    aten.var_mean.dim,
    aten.var_mean.correction,
    aten.std_mean.correction,
    aten.logsumexp.default,
    aten.linalg_vector_norm.default,
    aten.norm.ScalarOpt_dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
    aten.aminmax.default,
    aten.nanmedian.default,
    aten.nanmedian.dim,
)
def extreme(node: fx.Node) -> Rule:
    """``x[a .] -> y[a]``: not a sum of pieces, or one whose gradient needs the whole."""
    return _along(node, linear=False)


def _along(node: fx.Node, *, linear: bool) -> Rule:
    call = read(node)
    gone = reduced(call)
    dims = without(plain("d", call.shape("self")), *gone)
    result = after_reduction(dims, gone, bool(call.values.get("keepdim")))
    return call.rule([result] * len(call.results()), {"self": dims}, linear=[call.group("self")] if linear else ())


@factors(
    aten.softmax.int,
    aten._softmax.default,
    aten._safe_softmax.default,
    aten.log_softmax.int,
    aten._log_softmax.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.sort.default,
    aten.sort.stable,
    aten.argsort.default,
    aten.argsort.stable,
    aten.topk.default,
    aten.kthvalue.default,
    aten.mode.default,
)
def scan(node: fx.Node) -> Rule:
    """``x[a .] -> y[a .]``: the dim that is read along is whole."""
    return _scan(node, linear=False)


@factors(aten.cumsum.default, aten.diff.default)
def linear_scan(node: fx.Node) -> Rule:
    """As `scan`, and linear: ``cumsum``, ``diff`` (with what it prepends and appends)."""
    return _scan(node, linear=True)


def _scan(node: fx.Node, *, linear: bool) -> Rule:
    call = read(node)
    shape = call.shape("self")
    dim = dim_index(call["dim"], len(shape))
    dims = without(plain("d", shape), dim)
    outs = [_scanned(dims, dim, out, call) for out in call.results()]
    named = {n: dims for n in ("self", "prepend", "append") if call.has(n)}
    return call.rule(outs, named, linear=[call.group("self", "prepend", "append")] if linear else ())


def _scanned(dims: Dims, dim: int, out: torch.Tensor | None, call: Call) -> Dims | None:
    """kthvalue and mode take the dim away unless told to keep it; the others keep it."""
    if out is None:
        return None
    return dims if out.dim() == len(dims) else after_reduction(dims, (dim,), False)


@factors(aten.cosine_similarity.default, aten.pairwise_distance.default)
def distance(node: fx.Node) -> Rule:
    """``x[a .], y[a .] -> z[a]``: vectors are whole."""
    call = read(node)
    shapes = {n: call.shape(n) for n in ("x1", "x2")}
    whole = tuple(map(max, zip_longest(*(s[::-1] for s in shapes.values()), fillvalue=1)))[::-1]
    gone = (dim_index(call.values.get("dim", -1), len(whole)),)
    dims = without(plain("d", whole), *gone)
    named = {n: broadcast(shape, dims, whole) for n, shape in shapes.items()}
    return call.rule(after_reduction(dims, gone, bool(call.values.get("keepdim"))), named)


@factors(aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
def transform(node: fx.Node) -> Rule:
    """``x[a .] -> y[a .]``, linear."""
    call = read(node)
    dims = without(plain("d", call.shape("self")), *reduced(call))
    return call.rule(dims, {"self": dims}, linear=[call.group("self")])


@factors(aten.renorm.default)
def renorm(node: fx.Node) -> Rule:
    """``x[. a] -> y[. a]``: everything but the one dim is a vector."""
    call = read(node)
    shape = call.shape("self")
    at = dim_index(call["dim"], len(shape))
    dims = without(plain("d", shape), *(d for d in range(len(shape)) if d != at))
    return call.rule(dims, {"self": dims})


@factors(aten.glu.default)
def glu(node: fx.Node) -> Rule:
    """``x[a (g + g)] -> y[a g]``: both halves are cut alike."""
    call = read(node)
    shape = call.shape("self")
    dim = dim_index(call["dim"], len(shape))
    half = shape[dim] // 2
    dims: list[Any] = list(plain("d", shape))
    result = [*dims]
    result[dim] = Dim(("g",)) if half > 1 else NEVER
    dims[dim] = Dim(("g",), (half, half)) if half > 1 else NEVER
    return call.rule(tuple(result), {"self": tuple(dims)})
