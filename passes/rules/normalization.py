"""Norms: what is normalised over stays whole; channels and leading dims split. Training-mode batch norm splits its
batch by a special that takes the statistics of the whole batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

import autopar.runtime.ops  # noqa: F401  (registers autopar::batch_norm)
from autopar.passes.facts import fact
from autopar.passes.rules.core import Dim, Rule, Special, factors, localizes
from autopar.passes.rules.signature import NEVER, Call, plain, put, read

if TYPE_CHECKING:
    from autopar.passes.emit import Emitter

aten = torch.ops.aten


@factors(aten.layer_norm.default, aten.rms_norm.default)
def layer_norm(node: fx.Node) -> Rule:
    """``x[a .], w[.], b[.] -> y[a .]``."""
    call = read(node)
    dims = _leading(call)
    return call.rule(dims, {"input": dims}, linear=[call.group("weight", "bias")])


@factors(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def layer_norm_with_statistics(node: fx.Node) -> Rule:
    """As `layer_norm`, and ``mean[a .], rstd[a .]``, which no weight scales."""
    call = read(node)
    dims = _leading(call)
    return call.rule([dims] * len(call.results()), {"input": dims})


@factors(aten._weight_norm_interface.default)
def weight_norm(node: fx.Node) -> Rule:
    """``v[. d .], g[1 d 1] -> w[. d .], norms[1 d 1]``: each slice of a weight is scaled to a length of its own."""
    call = read(node)
    own = [tuple(Dim(("d",)) if i == call["dim"] else NEVER for i in range(len(call.shape(n)))) for n in ("v", "g")]
    return call.rule(own, {"v": own[0], "g": own[1]})


def _leading(call: Call) -> tuple[Dim, ...]:
    shape = call.shape("input")
    normalised = len(call["normalized_shape"])
    return (*plain("d", shape[: len(shape) - normalised]), *(NEVER,) * normalised)


@factors(aten.group_norm.default)
def group_norm(node: fx.Node) -> Rule:
    """``x[n (g .) ...], w[(g .)], b[(g .)] -> y[n (g .) ...]``."""
    call = read(node)
    shape, groups = call.shape("input"), call["num_groups"]
    channel = Dim(tuple(f for f, n in (("g", groups), ("c", shape[1] // groups)) if n > 1))
    dims = (*plain("n", shape[:1]), channel, *(NEVER,) * (len(shape) - 2))
    return call.rule(
        dims,
        {"input": dims, "weight": (channel,), "bias": (channel,)},
        linear=[call.group("weight", "bias")],
        sizes={"g": groups, "c": shape[1] // groups},
        whole=["c"],
    )


@localizes(aten.group_norm.default)
def local_group_norm(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As many groups as the local channels hold."""
    call = read(node)
    groups = call["num_groups"] * sizes.operands[0][1] // call.shape("input")[1]
    return put(node, args, kwargs, "num_groups", groups)


@factors(aten.batch_norm.default)
def batch_norm(node: fx.Node) -> Rule | None:
    """``x[n c ...], w[c], b[c], mean[c], var[c] -> y[n c ...]``; only with running statistics are rows apart."""
    call = read(node)
    dims = plain("d", call.shape("input"))
    running = not call["training"] and call.has("running_mean")
    if not running:
        if call.has("running_mean"):
            return None  # writes its buffers
        dims = (NEVER, dims[1], *(NEVER,) * (len(dims) - 2))
    vectors = {n: (dims[1],) for n in ("weight", "bias", "running_mean", "running_var") if call.has(n)}
    groups = [call.group("weight", "bias")]
    if running:
        groups.append(call.group("input", "running_mean", "bias"))
    return call.rule(dims, {"input": dims, **vectors}, linear=groups)


@factors(aten.instance_norm.default)
def instance_norm(node: fx.Node) -> Rule | None:
    """``x[n c .], w[c], b[c] -> y[n c .]`` with statistics of its input; with running ones places are apart too."""
    call = read(node)
    if call["use_input_stats"] and call.has("running_mean"):
        return None  # writes its buffers
    dims = plain("d", call.shape("input"))
    groups = [call.group("weight", "bias")]
    if call["use_input_stats"]:
        dims = (*dims[:2], *(NEVER,) * (len(dims) - 2))
    else:
        groups.append(call.group("input", "running_mean", "bias"))
    vectors = {n: (dims[1],) for n in ("weight", "bias", "running_mean", "running_var") if call.has(n)}
    return call.rule(dims, {"input": dims, **vectors}, linear=groups)


@factors(torch.ops.autopar.batch_norm.default)
def batch_norm_in_training(node: fx.Node) -> Rule:
    """``x[. c ...], w[c], b[c], mean[c], var[c] -> y[. c ...], mean[c], var[c]``; specials cut rows, and
    the places of sequences."""
    call = read(node)
    shape = call.shape(_first(call))
    channel = Dim(("c",)) if shape[1] > 1 else NEVER
    dims = (NEVER, channel, *(NEVER,) * (len(shape) - 2))
    named = {n: dims if n == _first(call) else (channel,) for n in call.slots if call.has(n)}
    cut = (0, 2) if len(shape) == 3 else (0,)  # no other op cuts the places of images
    specials = tuple(_global_statistics(call, d) for d in cut if shape[d] > 1)
    return call.rule([dims, (channel,), (channel,)], named, specials=specials)


def _first(call: Call) -> str:
    return next(iter(call.slots))


def _global_statistics(call: Call, dim: int) -> Special:
    operands: list[str | int] = ["R"] * sum(len(s) for s in call.slots.values())
    operands[0] = dim
    name = f"global-statistics-{dim}" if dim else "global-statistics"
    return Special(name, tuple(operands), (dim, "R", "R"), lower_global_statistics, uneven=True, several=True)


def lower_global_statistics(emitter: Emitter, node: fx.Node, axis: int) -> Any:
    """Mean, then squared distance from it, both summed over the axes that cut rows or places: no difference of large
    sums. The number of elements is that of the whole batch and known; an axis that splits channels changes nothing."""
    call = read(node)
    shape = call.shape(_first(call))
    count = math.prod(shape) // shape[1]
    x, weight, bias, old_mean, old_var = (_local(emitter, call, n) for n in list(call.values)[:5])
    strategy = fact(node).strategy
    assert strategy is not None
    axes = [a for a, c in enumerate(strategy.choices) if c.kind == "special"]
    over = [0, *range(2, len(shape))]
    wide = torch.float64 if call.dtype(_first(call)) == torch.float64 else torch.float32
    y = x if call.dtype(_first(call)) == wide else emitter.call(aten.to.dtype, x, wide)
    mean = _mean(emitter, y, over, count, axes)
    centred = emitter.call(aten.sub.Tensor, y, mean)
    var = _mean(emitter, emitter.call(aten.mul.Tensor, centred, centred), over, count, axes)
    scale = emitter.call(aten.rsqrt.default, emitter.call(aten.add.Tensor, var, call["eps"]))
    y = emitter.call(aten.mul.Tensor, centred, scale)
    column = [1, -1, *[1] * (len(shape) - 2)]
    if weight is not None:
        y = emitter.call(aten.mul.Tensor, y, emitter.call(aten.reshape.default, weight, column))
    if bias is not None:
        y = emitter.call(aten.add.Tensor, y, emitter.call(aten.reshape.default, bias, column))
    if call.dtype(_first(call)) != wide:
        y = emitter.call(aten.to.dtype, y, call.dtype(_first(call)))
    unbiased = count / max(count - 1, 1)
    flat = [emitter.call(aten.reshape.default, emitter.call(aten.detach.default, s), [-1]) for s in (mean, var)]
    flat[1] = emitter.call(aten.mul.Tensor, flat[1], unbiased)
    moved = [
        _moved(emitter, old, new, call["momentum"]) if old is not None else new
        for old, new in zip((old_mean, old_var), flat)
    ]
    return emitter.call(tuple, [y, *moved])


def _local(emitter: Emitter, call: Call, name: str) -> Any:
    return emitter.operand(call.slots[name][0]) if call.has(name) else None


def _mean(emitter: Emitter, x: Any, over: list[int], count: int, axes: list[int]) -> Any:
    total = emitter.call(aten.sum.dim_IntList, x, over, True)
    for axis in axes:
        total = emitter.all_reduce(total, axis, dual="all_reduce")
    return emitter.call(aten.div.Tensor, total, count)


def _moved(emitter: Emitter, old: Any, new: Any, momentum: float) -> Any:
    kept = emitter.call(aten.mul.Tensor, emitter.call(aten.detach.default, old), 1 - momentum)
    return emitter.call(aten.add.Tensor, kept, emitter.call(aten.mul.Tensor, new, momentum))
