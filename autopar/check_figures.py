"""What a plan's own figures must add up to: sums, products and quotients that a reader can do by hand.

>>> from autopar.plan import ModelId, Plan, Proof
>>> [str(c) for c in check_figures(Plan(ModelId("x"), proof=Proof(2.0, 1.5, 0.25)))]
['gap = 1 - bound / objective: 0.25']
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.plan import Plan

CLOSE = 1e-6  # relative: figures are sums of many floats
SECONDS = ("compute_s", "exposed_s", "hidden_s", "optimizer_s")
OF_PIPELINE = ("compute_s", "exposed_s", "waits_s", "send_s", "bubble_s", "optimizer_s")  # of the mean rank


@dataclass(frozen=True)
class Checked:
    """One figure of a plan, and what it must be; ``expected`` None: there is nothing to compare it with."""

    what: str
    found: float | None
    expected: float | None = None

    @property
    def ok(self) -> bool:
        """Whether both are the same up to rounding."""
        if self.found is None or self.expected is None:
            return self.found == self.expected
        return math.isclose(self.found, self.expected, rel_tol=CLOSE, abs_tol=1e-12)

    def __str__(self) -> str:
        return f"{self.what}: {_show(self.found)}" + ("" if self.ok else f", but that is {_show(self.expected)}")


def check_figures(plan: Plan) -> list[Checked]:
    """Every figure of the prediction and of the proof that follows from others."""
    return [*_prediction(plan), *_proof(plan)]


def _prediction(plan: Plan) -> Iterator[Checked]:
    predicted, parts = plan.predicted, plan.predicted.parts
    if owners := [nbytes for key, nbytes in parts.items() if key.startswith("peak_") and key.endswith("_bytes")]:
        total = sum(owners) / 2**30
        yield Checked("peak_mem_gib = sum of bytes / 2**30", predicted.peak_mem_gib, total)
    if "bubble_s" in parts and all(key in parts for key in OF_PIPELINE):
        step = sum(parts[key] for key in OF_PIPELINE)
        text = "step_time_s = compute + exposed + waits + sends + bubble + optimizer"
        yield Checked(text, predicted.step_time_s, step)
    elif all(key in parts for key in SECONDS):
        compute, exposed, hidden, optimizer = (parts[key] for key in SECONDS)
        step = exposed + max(compute + optimizer, hidden)
        yield Checked("step_time_s = exposed + max(compute + optimizer, hidden)", predicted.step_time_s, step)
    step_time = predicted.step_time_s
    if step_time and parts.get("peak_flops") and "model_flops" in parts and "mfu" in parts:
        mfu = parts["model_flops"] / (step_time * parts["peak_flops"])
        yield Checked("mfu = model_flops / (step_time_s * peak_flops)", parts["mfu"], mfu)


def _proof(plan: Plan) -> Iterator[Checked]:
    proof = plan.proof
    if proof.gap is not None:
        known = proof.objective and proof.bound is not None
        gap = max(0.0, 1 - proof.bound / proof.objective) if known and proof.bound and proof.objective else None
        yield Checked("gap = 1 - bound / objective", proof.gap, gap)


def _show(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.6g}"
