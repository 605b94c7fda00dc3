"""Pools, interpolation and sampling: batch and channels split, the plane is whole (a halo would be a special)."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes.rules.core import Rule, factors, localizes
from autopar.passes.rules.signature import NEVER, Call, plain, put, read

aten = torch.ops.aten


@factors(
    aten.max_pool1d.default,
    aten.max_pool2d.default,
    aten.max_pool3d.default,
    aten.max_pool1d_with_indices.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    aten.adaptive_max_pool1d.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
)
def max_pool(node: fx.Node) -> Rule:
    """``x[n c . .] -> y[n c . .]``."""
    return _planes(read(node), linear=False)


@factors(
    aten.avg_pool1d.default,
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool2d.default,
    aten.upsample_nearest1d.default,
    aten.upsample_nearest1d.vec,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_linear1d.default,
    aten.upsample_linear1d.vec,
    aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d.vec,
    aten.upsample_bicubic2d.default,
    aten.upsample_bicubic2d.vec,
    aten._upsample_bilinear2d_aa.default,
    aten._upsample_bilinear2d_aa.vec,
    aten.upsample_nearest3d.default,
    aten.upsample_nearest3d.vec,
    aten.upsample_trilinear3d.default,
    aten.upsample_trilinear3d.vec,
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact1d.vec,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact2d.vec,
    aten._upsample_nearest_exact3d.default,
    aten._upsample_nearest_exact3d.vec,
    aten._upsample_bicubic2d_aa.default,
    aten._upsample_bicubic2d_aa.vec,
)
def average_pool(node: fx.Node) -> Rule:
    """As `max_pool`, and linear."""
    return _planes(read(node), linear=True)


@factors(aten.max_unpool2d.default, aten.max_unpool3d.default)
def unpool(node: fx.Node) -> Rule:
    """``x[n c . .], i[n c . .] -> y[n c . .]``: places count through one plane."""
    call = read(node)
    shape = call.shape("self")
    plane = 2 if node.target is aten.max_unpool2d.default else 3
    dims = (*plain("n", shape[: len(shape) - plane]), *(NEVER,) * plane)
    return call.rule(dims, {"self": dims, "indices": dims}, linear=[call.group("self")])


@factors(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def fractional_pool(node: fx.Node) -> Rule:
    """``x[n c . .], r[n c .] -> y[n c . .]``: r says where the windows of each plane begin."""
    call = read(node)
    shape = call.shape("self")
    plane = 2 if node.target is aten.fractional_max_pool2d.default else 3
    lead = plain("n", shape[: len(shape) - plane])
    dims = (*lead, *(NEVER,) * plane)
    draws = (*(lead if len(lead) == 2 else (NEVER, *lead)), NEVER)
    return call.rule([dims] * 2, {"self": dims, "random_samples": draws})


@factors(aten.grid_sampler.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def sample(node: fx.Node) -> Rule:
    """``x[n c . .], grid[n h w .] -> y[n c h w]``: every point reads the whole plane."""
    call = read(node)
    out = call.results()[0]
    assert out is not None
    dims = plain("n", out.shape)
    image, grid = (*dims[:2], *(NEVER,) * (len(dims) - 2)), (dims[0], *dims[2:], NEVER)
    return call.rule(dims, {"input": image, "grid": grid}, linear=[call.group("input")])


@factors(aten.affine_grid_generator.default)
def affine_grid(node: fx.Node) -> Rule:
    """``theta[n . .] -> y[n . . .]``."""
    call = read(node)
    out = call.results()[0]
    assert out is not None
    (n,) = plain("n", out.shape[:1])
    return call.rule((n, *(NEVER,) * (out.dim() - 1)), {"theta": (n, NEVER, NEVER)}, linear=[call.group("theta")])


@localizes(aten.affine_grid_generator.default)
def local_grid(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch of the size argument is the local one."""
    return put(node, args, kwargs, "size", [sizes.results[0][0], *read(node)["size"][1:]])


def _planes(call: Call, *, linear: bool) -> Rule:
    name = "self" if "self" in call.values else "input"
    shape = call.shape(name)
    overloaded = str(call.node.target).split(".")[1]
    plane = next(n for n in (1, 2, 3) if f"{n}d" in overloaded)
    dims = (*plain("n", shape[: len(shape) - plane]), *(NEVER,) * plane)
    return call.rule([dims] * len(call.results()), {name: dims}, linear=[call.group(name)] if linear else ())
