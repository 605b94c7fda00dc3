"""Time against memory: the fastest plans found within ever fewer bytes a rank."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.explain.page import Row, Section
from autopar.explain.quantities import GIB, bytes_text, difference, seconds_text
from autopar.explain.why_not import Other
from autopar.plan import Plan

TITLE = "Time against memory"
COLUMNS = ("memory a rank", "step", "to this plan", "peak", "plan")


def pareto(plan: Plan, others: Iterable[Other]) -> Section:
    """The section of plans solved within ``others``' limits, the chosen one first; empty where none were."""
    found = [_row(plan, other) for other in others]
    limit = plan.predicted.parts.get("memory_limit_bytes", 0.0)
    first = _row(plan, Other(bytes_text(limit), plan))
    return Section(TITLE, (first, *found) if found else (), COLUMNS, "Each solved again, down from the chosen peak.")


def _row(plan: Plan, other: Other) -> Row:
    if other.plan is None or other.answer not in ("fits", "legal"):
        return other.pins, "", "", "", other.error or other.answer
    found = other.plan.predicted
    step, ours = found.step_time_s or 0.0, plan.predicted.step_time_s or 0.0
    peak = bytes_text((found.peak_mem_gib or 0.0) * GIB)
    return other.pins, seconds_text(step), difference(step, ours), peak, other.plan.one_line()
