"""`predict`: what a plan should cost, added up over the program that the plan makes of rank 0.

The program is emitted once; bytes come from its shapes and from what its units keep, seconds from the ops and changes
in it and the cluster's figures. No price of the solver is read: this checks them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from autopar.build import Prepared, apply, plan_mesh
from autopar.capture import Capture
from autopar.choosing.inside import seconds_inside
from autopar.cluster import Cluster
from autopar.count_collectives import count_collectives, microbatches
from autopar.dry_run import dry_run
from autopar.hardware import Chip
from autopar.passes.layout import Mesh
from autopar.passes.lower import Local, Lowerable, lower, with_changes
from autopar.plan import ADAMW, Plan
from autopar.predict_again import kept, repeated
from autopar.predict_bytes import predict_bytes
from autopar.predict_memory import OWNERS, predict_memory
from autopar.predict_seconds import Priced, cast_seconds, model_flops, moved_in, moved_on_entry, work_of
from autopar.price_launches import AxisSpan, Prices
from autopar.run_on_fakes import Ran, run_on_fakes
from autopar.runtime.run import units_of
from autopar.runtime.weights import ways_of
from autopar.solver.cost import step_time, update
from autopar.wires import with_wires

IN_PEAK = tuple(f"peak_{owner}_bytes" for owner in OWNERS)
"""Entries of `Predicted.parts` whose sum is the peak."""


def predict(plan: Plan, prepared: Prepared, cluster: Cluster) -> Plan:
    """The plan with seconds, bytes and collectives of a step filled in; needs no process group.

    ``predicted.parts`` are seconds (``*_s``), bytes of a rank (``*_bytes``; ``peak_*_bytes`` are those of the fullest
    moment, by owner), FLOPs of the whole model a step, FLOP/s of all ranks, ``mfu``, the one over the other, and
    ``tokens`` of a step where the model reads ids. Of what backward makes again ``again_compute_s`` and
    ``again_exposed_s``, which the other seconds contain, and ``again_flops``, which no other figure does. A plan
    without gradients (eval mode) is a forward alone; that of a pipeline is not predicted.

    Raises AutoparError where the plan, made elsewhere or edited, does not fit the model.
    """
    axes, train = {axis.name: axis.name for axis in plan.axes}, prepared.captured.training
    if plan.pp > 1:
        return _with_stages(plan, prepared, cluster) if train else plan
    model = with_changes(apply(plan, prepared))
    local = lower(model, 0, axes)
    # the plan's own wires decide on ways, not on seconds
    mesh = with_wires(plan_mesh(plan), [a.stride for a in plan.axes], cluster)
    ran = _reached(local) if train else run_on_fakes(local, local.body[max(local.body)], train=False)
    parts = predict_bytes(local, prepared.captured, ran, plan.optimizer)
    parts |= _seconds(plan, model, local, mesh, cluster.chip, train)
    if train:
        parts["saved_bytes"] = kept(local)
    if not train:
        parts["transient_bytes"] = ran.live
    peak = predict_memory(local, prepared.captured, int(parts["optimizer_bytes"]))
    parts |= {f"peak_{owner}_bytes": nbytes for owner, nbytes in peak.owners.items()}
    parts["optimizer_s"] = float(update(parts["gradients_bytes"], parts["optimizer_bytes"], cluster.chip.memory_rate))
    if train and cluster.chip.kernels:
        parts |= _kernel_by_kernel(plan, local, prepared.captured, cluster, parts)
    seconds = step_time(parts["compute_s"] + parts["optimizer_s"], parts["exposed_s"], parts["hidden_s"])
    parts |= _rates(model_flops(prepared.body, train=train), plan.ranks, cluster.chip, seconds)
    parts["memory_limit_bytes"] = cluster.limit
    parts |= _tokens(prepared.captured)
    predicted = replace(
        plan.predicted,
        step_time_s=float(seconds),
        peak_mem_gib=peak.nbytes / 2**30,
        peak_at=peak.where,
        parts={key: float(parts[key]) for key in sorted(parts)},
        collectives=count_collectives(local, axes, mesh, train=train),
        autograd=_left_to_autograd(local) if train else (),
    )
    return replace(plan, predicted=predicted)


def _with_stages(plan: Plan, prepared: Prepared, cluster: Cluster) -> Plan:
    from autopar.predict_stages import predict_stages

    plan, parts, locals = predict_stages(plan, prepared, cluster)
    seconds = plan.predicted.step_time_s or 0.0
    parts |= _rates(model_flops(prepared.body, train=True), plan.ranks, cluster.chip, seconds)
    parts["memory_limit_bytes"] = cluster.limit
    parts |= _tokens(prepared.captured)
    sorted_parts = {key: float(parts[key]) for key in sorted(parts)}
    autograd = tuple(dict.fromkeys(text for local in locals for text in _left_to_autograd(local)))
    return replace(plan, predicted=replace(plan.predicted, parts=sorted_parts, autograd=autograd))


def _reached(local: Local) -> Ran:
    """The parameters that get a gradient, as the program has it; what it keeps is `kept`."""
    return Ran(reached=frozenset(local.parameters[i].fqn for i in ways_of(local, units_of(local)).reached))


def _left_to_autograd(local: Local) -> tuple[str, ...]:
    """The units that could not be traced."""
    found = (fallback for run in units_of(local).values() for fallback in run.fallbacks)
    return tuple(dict.fromkeys(f"{f.fqn or 'model'}: {f.why}" for f in found))


def _seconds(plan: Plan, model: Lowerable, local: Local, mesh: Mesh, chip: Chip, train: bool) -> dict[str, float]:
    """Compute, exposed and hidden seconds of a step, and the working memory."""
    rows, priced = microbatches(local), Priced(mesh)
    times = sum(rows.values())
    share = sum(r * n for r, n in rows.items()) / max(rows) if mesh.time is not None else 1.0
    work = work_of(model.body, plan, priced, chip, train=train)
    again = repeated(model.body, model.recompute if train else (), plan, mesh, priced, chip)
    compute = share * (work.seconds + again.compute)
    moved = moved_in(model.body, plan, mesh, times, train=train) + moved_on_entry(local, mesh, times, train=train)
    compute += cast_seconds(local, times, chip, train=train)
    if model.prologue is not None:
        compute += work_of(model.prologue, plan, priced, chip, train=False).seconds
        moved += moved_in(model.prologue, plan, mesh, 1, train=False)
    found = {
        "compute_s": compute,
        "exposed_s": moved.exposed + times * (again.exposed + seconds_inside(model.body, mesh, train=train)),
        "hidden_s": moved.hidden,
        "transient_bytes": work.transient,
    }
    if plan.recompute != "none" and train:
        found |= {
            "again_compute_s": share * again.compute,
            "again_exposed_s": times * again.exposed,
            "again_flops": again.flops,
        }
    return found


def _kernel_by_kernel(
    plan: Plan, local: Local, captured: Capture, cluster: Cluster, parts: Mapping[str, float]
) -> dict[str, float]:
    """The same seconds where every kernel is measured (`autopar profile`), in the order in which the program launches
    them; of what they move the same part is hidden. ``live_bytes``: the most bytes of tensors alive at once."""
    ran = dry_run(local, captured)
    prices = Prices(cluster, {a.name: AxisSpan(a.size, a.stride) for a in plan.axes if not a.is_time})
    (compute, moved), (updated, _) = prices.seconds(ran.launches), prices.seconds(ran.optimizer)
    waited = parts["exposed_s"] + parts["hidden_s"]
    exposed = parts["exposed_s"] / waited if waited else 1.0
    adamw = plan.optimizer == ADAMW  # which is what ran
    other = parts["optimizer_bytes"] - 2 * parts["gradients_bytes"]
    return {
        "compute_s": compute,
        "exposed_s": moved * exposed,
        "hidden_s": moved * (1 - exposed),
        "optimizer_s": updated if adamw else parts["optimizer_s"],
        "live_bytes": ran.peak + other,
    }


def _rates(flops: Counter[str], ranks: int, chip: Chip, seconds: float) -> dict[str, float]:
    """Model FLOPs utilisation: FLOPs of the model over what all ranks could do in the same time, in the dtype that has
    most of them."""
    total = sum(flops.values())
    dtype = max(flops, key=lambda d: flops[d], default="fp32")
    peak = ranks * chip.peak(dtype)
    return {"model_flops": total, "peak_flops": peak, "mfu": total / (seconds * peak) if seconds else 0.0}


def _tokens(captured: Capture) -> dict[str, float]:
    """Tokens of the global batch, where the model reads ids: the first integer input ``[rows, positions]``."""
    integers = (torch.int32, torch.int64)
    ids = next((i for i in captured.inputs if i.batch and i.dtype in integers and len(i.shape) == 2), None)
    return {} if ids is None else {"tokens": float(math.prod(ids.shape))}


__all__ = ["IN_PEAK", "predict"]
