"""Other plans that the reader asked about: what each would cost, or why it is illegal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autopar.explain.page import Section
from autopar.explain.quantities import GIB, bytes_text, seconds_text
from autopar.explain.step_time import binds
from autopar.plan import Plan

COLUMNS = ("instead", "answer", "step", "to this plan", "peak", "binds, and what changes")
KINDS = {"compute_s": "compute", "exposed_s": "exposed", "hidden_s": "hidden", "optimizer_s": "optimizer"}
TELLING = 0.01  # of the step: smaller changes are not named


@dataclass(frozen=True)
class Other:
    """``pins`` as text; ``plan`` with them (None: there is none, for the reason ``error``)."""

    pins: str
    plan: Plan | None
    error: str = ""
    fits: bool | None = None

    @property
    def answer(self) -> str:
        """``fits``, ``too large``, ``illegal``, or ``legal`` where it is not predicted whether it fits."""
        fits = self.plan.fits if self.fits is None and self.plan is not None else self.fits
        if self.plan is None and fits is None:
            return "illegal"
        return "legal" if fits is None else "fits" if fits else "too large"


def why_not(plan: Plan, others: Iterable[Other]) -> Section:
    """The section of other plans beside the chosen one."""
    rows = []
    for other in others:
        row = as_json(plan, other)
        step, peak, more = row["step_time_s"], row["peak_mem_gib"], row["difference"]
        time = "" if step is None else seconds_text(step)
        to_ours = "" if more is None else f"{100 * more:+.1f} %"
        reasons = "; ".join(filter(None, (row["binds"], ", ".join(row["changes"]), row["error"])))
        rows.append((other.pins, row["answer"], time, to_ours, "" if peak is None else bytes_text(peak * GIB), reasons))
    return Section("Why not", tuple(rows), COLUMNS)


def as_json(plan: Plan, other: Other) -> dict[str, Any]:
    """The same as JSON values; ``difference``: of the step, as a fraction of the chosen plan's."""
    found = other.plan
    step = found.predicted.step_time_s if found is not None else None
    ours = plan.predicted.step_time_s
    same = found is not None and (found.axes, found.classes, found.parameters, found.microbatches) == (
        plan.axes, plan.classes, plan.parameters, plan.microbatches
    )  # fmt: skip
    return {
        "pins": other.pins,
        "answer": other.answer,
        "plan": None if found is None else found.one_line(),
        "step_time_s": step,
        "peak_mem_gib": found.predicted.peak_mem_gib if found is not None else None,
        "difference": step / ours - 1 if step is not None and ours else None,
        "binds": "this is the chosen plan" if same else binds(found) if found is not None else "",
        "changes": [] if found is None or same else _changes(plan, found),
        "error": other.error or None,
    }


def _changes(plan: Plan, other: Plan) -> list[str]:
    """By how many seconds each kind differs, the largest first."""
    ours, theirs = plan.predicted.parts, other.predicted.parts
    step = plan.predicted.step_time_s or 0.0
    kinds = [(theirs[key] - ours[key], name) for key, name in KINDS.items() if key in ours and key in theirs]
    telling = sorted((k for k in kinds if abs(k[0]) > TELLING * step), key=lambda kind: -abs(kind[0]))
    return [f"{name} {'+' if more > 0 else '-'}{seconds_text(abs(more))}" for more, name in telling]
