"""What each axis takes off the busiest rank, counted from the emitted program.

Everything-replicated is always exact and never parallel, so exactness alone proves nothing. For every axis the program
of rank 0 (uneven cuts give the first ranks the most) is compared with the program of the same plan were the axis of
size 1; the ideal share is ``1 - 1/N``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from autopar.build import Prepared, apply, plan_mesh
from autopar.passes.layout import Mesh
from autopar.passes.lower import Local, lower, with_changes
from autopar.plan import Plan, Share
from autopar.run_on_fakes import run_on_fakes


@dataclass(frozen=True)
class Load:
    """What one rank has in a step: FLOPs of matmul, attention and convolution, forward and backward, as torch's counter
    has them; bytes of resting parameters; bytes that autograd saves in the largest microbatch, parameters apart."""

    flops: int
    param_bytes: int
    saved_bytes: int


def divided(plan: Plan, prepared: Prepared) -> dict[str, Share]:
    """The share of each axis of ranks, by its first display name.

    Example: ``divided(plan, prepared)["tp"].flops`` is 0.5 where two ranks halve every matmul.
    """
    mesh = plan_mesh(plan)
    whole = load(_program(plan, prepared, mesh))
    shares = {}
    for index, axis in enumerate(plan.axes):
        if axis.is_time:
            continue
        axes = [replace(a, size=1) if i == index else a for i, a in enumerate(mesh.axes)]
        without = load(_program(plan, prepared, Mesh(tuple(axes))))
        shares[axis.display[0] if axis.display else axis.name] = Share(
            flops=_off(whole.flops, without.flops),
            param_bytes=_off(whole.param_bytes, without.param_bytes),
            saved_bytes=_off(whole.saved_bytes, without.saved_bytes),
        )
    return shares


def _off(has: int, would_have: int) -> float:
    return 1 - has / would_have if would_have else 0.0


def _program(plan: Plan, prepared: Prepared, mesh: Mesh) -> Local:
    return lower(with_changes(apply(plan, prepared, mesh)), 0, {a.name: a.name for a in mesh.axes})


def load(local: Local) -> Load:
    """Count a rank's program by running it on fake tensors."""
    mesh = local.mesh
    shapes = [u.rest.local_shape(u.shape, mesh, local.coordinates) for u in local.parameters]
    sizes = [torch.Size(s).numel() * u.dtype.itemsize for s, u in zip(shapes, local.parameters, strict=True)]
    rows = (0,) if mesh.time is None else mesh.axes[mesh.time].rows
    ran = {r: run_on_fakes(local, graph) for r, graph in local.body.items()}
    return Load(
        flops=sum(ran[r].flops for r in rows),
        param_bytes=sum(sizes),
        saved_bytes=max(r.saved + r.gathered for r in ran.values()),
    )


__all__ = ["Load", "divided", "load"]
