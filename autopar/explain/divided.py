"""The share of work and memory that each axis takes off the busiest rank."""

from __future__ import annotations

from autopar.explain.page import Section
from autopar.plan import Plan

COLUMNS = ("axis", "FLOPs", "parameter bytes", "saved bytes", "ideal")


def divided(plan: Plan) -> Section:
    """The section of shares."""
    sizes = {a.name: a.size for a in plan.axes} | dict(plan.mesh)
    rows = []
    for name, s in sorted(plan.predicted.divided.items()):
        ideal = 1 - 1 / sizes[name] if name in sizes else None
        rows.append((name, *map(_share, (s.flops, s.param_bytes, s.saved_bytes, ideal))))
    return Section("Share that each axis takes off the busiest rank", tuple(rows), COLUMNS)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
