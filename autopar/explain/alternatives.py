"""The next-best plans, or what would fit where nothing does."""

from __future__ import annotations

from autopar.explain.page import Section
from autopar.explain.quantities import GIB, bytes_text, difference, seconds_text
from autopar.plan import Alternative, Plan

COLUMNS = ("change", "step", "to this plan", "peak", "fits", "why")


def next_best(plan: Plan) -> Section:
    """The section of plans that were not chosen."""
    rows = tuple(_row(plan, a) for a in plan.alternatives if a.kind == "next")
    return Section("Next-best plans", rows, COLUMNS)


def nearest(plan: Plan) -> Section:
    """The section of changes after which a plan fits."""
    rows = tuple(_row(plan, a) for a in plan.alternatives if a.kind == "nearest")
    return Section("Nearest changes that fit", rows, COLUMNS)


def _row(plan: Plan, other: Alternative) -> tuple[str, ...]:
    step, ours = other.step_time_s, plan.predicted.step_time_s
    return (
        other.change,
        "" if step is None else seconds_text(step),
        "" if step is None or not ours else difference(step, ours),
        "" if other.peak_mem_gib is None else bytes_text(other.peak_mem_gib * GIB),
        "yes" if other.fits else "NO",
        other.why,
    )
