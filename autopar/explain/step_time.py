"""The predicted seconds of a step, by stream and kind."""

from __future__ import annotations

from autopar.explain.page import Section
from autopar.explain.quantities import GIB, bytes_text, percent, seconds_text
from autopar.plan import Optimizer, Plan
from autopar.solver.cost import PASSES, STATE_PASSES

KINDS = {
    "compute_s": ("compute", "forward and backward; each op as long as its FLOPs or its bytes take"),
    "again_compute_s": ("  made again", "of compute: forward once more of what backward lacks"),
    "optimizer_s": ("optimizer", ""),  # see `_passes`
    "exposed_s": ("exposed communication", "compute waits for it, or stands still beside it"),
    "again_exposed_s": ("  made again", "of exposed communication: collectives run once more"),
    "waits_s": ("waiting for parameters", "communication of parameters and gradients that nothing runs beside"),
    "send_s": ("waiting for other stages", "while what crosses is under way"),
    "bubble_s": ("bubble", "nothing to do: the pipeline fills and drains, stages differ"),
    "hidden_s": ("hidden communication", "of parameters and gradients: runs beside compute and optimizer"),
}


def step_time(plan: Plan) -> Section:
    """The section of time."""
    step, parts = plan.predicted.step_time_s, plan.predicted.parts
    if step is None:
        return Section("Time of a step", ())
    rows = [
        (name, seconds_text(parts[key]), percent(parts[key], step), remark or _passes(plan.optimizer))
        for key, (name, remark) in KINDS.items()
        if key in parts and (parts[key] or not key.startswith("again"))
    ]
    staged = "bubble_s" in parts
    if waits := _waits(plan):
        rows.append(("not hidden", seconds_text(waits), percent(waits, step), "hidden communication beyond compute"))
    remark = "exposed + max(compute + optimizer, hidden)" if rows else ""
    if staged:
        remark = "the mean rank's, all but hidden, as its schedule is simulated"
    rows.append(("step", seconds_text(step), "100.0 %", remark))
    return Section("Time of a step", tuple(rows), ("kind", "time", "of the step", ""))


def _passes(optimizer: Optimizer) -> str:
    states = set(optimizer.states.values())
    if len(states) == 1 and set(*states) <= {"param"}:
        return f"{optimizer.name}: {PASSES + STATE_PASSES * len(*states)} passes over the resting bytes"
    return f"{optimizer.name}: {PASSES} passes over the resting bytes, {STATE_PASSES} over its states"


def _waits(plan: Plan) -> float:
    """Seconds by which hidden communication outlasts what it is to hide beside."""
    parts = plan.predicted.parts
    if "bubble_s" in parts:
        return 0.0  # they are among the parts
    return max(0.0, parts.get("hidden_s", 0.0) - parts.get("compute_s", 0.0) - parts.get("optimizer_s", 0.0))


def binds(plan: Plan) -> str:
    """What a plan's step consists of most, or the memory that it lacks."""
    peak, limit = plan.predicted.peak_mem_gib, plan.predicted.parts.get("memory_limit_bytes")
    if plan.fits is False and peak is not None and limit is not None:
        return f"memory: {bytes_text(peak * GIB - limit)} too much"
    step, parts = plan.predicted.step_time_s, plan.predicted.parts
    if not step or "compute_s" not in parts:
        return ""
    kinds = {"compute": parts["compute_s"], "optimizer": parts.get("optimizer_s", 0.0)}
    kinds["exposed communication"] = parts.get("exposed_s", 0.0)
    kinds["bubble"] = parts.get("bubble_s", 0.0)
    kinds["waiting for other stages"] = parts.get("send_s", 0.0)
    kinds["waiting for parameters"] = parts.get("waits_s", 0.0)
    if _waits(plan):
        kinds["communication of parameters and gradients"] = parts["hidden_s"]
    name = max(kinds, key=lambda kind: kinds[kind])
    return f"{name}, {percent(kinds[name], step)} of the step"
