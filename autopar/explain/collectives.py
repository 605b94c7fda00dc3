"""The collectives of a step."""

from __future__ import annotations

from autopar.explain.axes import axis_name
from autopar.explain.page import Section
from autopar.explain.quantities import bytes_text, seconds_text
from autopar.plan import Collective, Plan

COLUMNS = ("kind", "axis", "tier", "phase", "count", "bytes", "time", "")


def collectives(plan: Plan) -> Section:
    """The section of collectives; bytes count as nccl-tests counts them."""
    tiers = {a.name: f"{a.tier} ({a.size})" for a in plan.axes} | {"pp": f"{plan.schedule.tier} ({plan.pp})"}
    rows = []
    for c in plan.predicted.collectives:
        seconds = seconds_of(plan, c)
        time = "" if seconds is None else seconds_text(seconds)
        seen = "" if c.hidden is None else "hidden" if c.hidden else "exposed"
        head = (c.kind, axis_name(plan, c.axis), tiers.get(c.axis, ""), c.phase)
        rows.append((*head, f"{c.count:,}", bytes_text(c.bytes), time, seen))
    whose = "a rank of the busiest stage" if plan.pp > 1 else "a rank"
    note = f"In all {bytes_text(sum(c.bytes for c in plan.predicted.collectives))} {whose}, counted as nccl-tests does."
    return Section("Collectives a step", tuple(rows), COLUMNS, note)


def seconds_of(plan: Plan, c: Collective) -> float | None:
    """Seconds of all of them: as predicted, else by the wire of the axis; None where there is no wire."""
    if c.seconds is not None:
        return c.seconds
    wire = next((a.wire.get(c.kind) for a in plan.axes if a.name == c.axis), None)
    return None if wire is None else c.count * wire[0] + c.bytes * wire[1]
