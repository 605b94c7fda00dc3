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
DECIDED = ("axes", "classes", "parameters", "microbatches", "stages", "schedule")
TELLING = 0.01  # of the step: smaller changes are not named


@dataclass(frozen=True)
class Other:
    """``pins`` as text; ``plan`` with them (None: there is none, for the reason ``error``). Where a plan file alone
    answers: the ``bound`` in seconds of all such plans, or that it is ``open``."""

    pins: str
    plan: Plan | None = None
    error: str = ""
    fits: bool | None = None
    bound: float | None = None
    open: bool = False

    @property
    def answer(self) -> str:
        """``fits``, ``too large``, ``illegal``, or ``legal`` where it is not predicted whether it fits; of a plan file
        alone also ``bounded`` and ``not known``."""
        fits = self.plan.fits if self.fits is None and self.plan is not None else self.fits
        if self.open or self.bound is not None:
            return "not known" if self.open else "bounded"
        if self.plan is None and fits is None:
            return "illegal"
        return "legal" if fits is None else "fits" if fits else "too large"


def why_not(plan: Plan, others: Iterable[Other]) -> Section:
    """The section of other plans beside the chosen one."""
    rows = []
    for other in others:
        row = as_json(plan, other)
        step, peak, more = row["step_time_s"], row["peak_mem_gib"], row["difference"]
        least = "at least " if row["bound_s"] is not None else ""
        seconds = row["bound_s"] if step is None else step
        time = "" if seconds is None else least + seconds_text(seconds)
        to_ours = "" if more is None else f"{least}{100 * more:+.1f} %"
        reasons = "; ".join(filter(None, (row["binds"], ", ".join(row["changes"]), row["error"])))
        rows.append((other.pins, row["answer"], time, to_ours, "" if peak is None else bytes_text(peak * GIB), reasons))
    return Section("Why not", tuple(rows), COLUMNS)


def as_json(plan: Plan, other: Other) -> dict[str, Any]:
    """The same as JSON values; ``difference``: of the step (or of its bound), as a fraction of the chosen plan's."""
    found = other.plan
    step = found.predicted.step_time_s if found is not None else None
    seconds = other.bound if step is None else step
    ours = plan.predicted.step_time_s
    same = found is not None and all(getattr(found, part) == getattr(plan, part) for part in DECIDED)
    return {
        "pins": other.pins,
        "answer": other.answer,
        "plan": None if found is None else found.one_line(),
        "step_time_s": step,
        "bound_s": other.bound,
        "peak_mem_gib": found.predicted.peak_mem_gib if found is not None else None,
        "difference": seconds / ours - 1 if seconds is not None and ours else None,
        "binds": "this is the chosen plan" if same else binds(found) if found is not None else "",
        "changes": [] if found is None or same else changes(plan, found),
        "error": other.error or None,
    }


def changes(plan: Plan, other: Plan) -> list[str]:
    """By how many seconds each kind differs, the largest first."""
    ours, theirs = plan.predicted.parts, other.predicted.parts
    step = plan.predicted.step_time_s or 0.0
    kinds = [(theirs[key] - ours[key], name) for key, name in KINDS.items() if key in ours and key in theirs]
    telling = sorted((k for k in kinds if abs(k[0]) > TELLING * step), key=lambda kind: -abs(kind[0]))
    return [f"{name} {'+' if more > 0 else '-'}{seconds_text(abs(more))}" for more, name in telling]
