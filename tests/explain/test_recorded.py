"""Other pins, answered from a plan file alone: by its proof, never by a solver."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.explain.recorded import recorded
from autopar.explain.why_not import Other, as_json, why_not
from autopar.pins import Pins
from autopar.plan import Alternative, ModelId, Plan, PlanAxis, Predicted, Proof

PRUNED: list[dict[str, Any]] = [
    {"mesh": [[8, 1]], "microbatches": [1, 2], "by": "dominated", "bound": [2.0, 2.5]},
    {"mesh": [[2, 4], [4, 1]], "microbatches": 1, "by": "solved", "bound": 3.0},
    {"mesh": [[4, 1]], "microbatches": 2, "by": "roofline", "bound": 4.0, "pipe": [2, 1, "1f1b", 1.0]},
    {"mesh": [[4, 1]], "microbatches": 4, "by": "illegal", "bound": None, "why": "rows are read together"},
    {"mesh": [[2, 1]], "microbatches": 1, "by": "memory", "bound": None, "pipe": [4, 1, "1f1b", 1.0]},
]
NEXT = Alternative("next", "pp=2 dp_shard=4 zero=3 microbatches=2", step_time_s=5.0)
PLAN = Plan(
    ModelId("x"),
    axes=(PlanAxis("a", 8, "host", 1),),
    mesh={"dp_shard": 8},
    batch=8,
    predicted=Predicted(2.0, 1.0, {"memory_limit_bytes": 2.0**31}),
    proof=Proof(2.0, 2.0, 0.0, {"pruned": PRUNED}),
    alternatives=(NEXT,),
)


def answer(pins: str, plan: Plan = PLAN) -> Other:
    return recorded(plan, Pins.parse(pins.split()))


@pytest.mark.parametrize(
    ("pins", "said", "bound", "words"),
    [
        ("dp=8 pp=1 microbatches=1", "fits", None, ""),  # it is the chosen plan
        ("tp=4", "bounded", 3.0, "no such plan takes less: 1 candidates, 1 solved"),
        (
            "microbatches=2",
            "bounded",
            2.5,
            "2 candidates, 1 dominated, 1 roofline; pp=2 dp_shard=4 zero=3 microbatches=2",
        ),
        ("pp=2 microbatches=2", "bounded", 4.0, "takes 5.00 s"),
        ("zero=2", "bounded", 2.0, "6 candidates"),
        ("microbatches=4", "illegal", None, "rows are read together"),
        ("pp=4", "too large", None, "least bytes are above the limit"),
        ("tp=3", "illegal", None, "Legal: tp=1, tp=2, tp=4, tp=8."),
        ("schedule=gpipe", "illegal", None, "needs stages of a pipeline"),
        ("microbatches=3", "not known", None, "lists microbatches=1,2,4 and pp=1,2,4: autopar explain MODEL --why-not"),
    ],
)
def test_answers(pins: str, said: str, bound: float | None, words: str) -> None:
    found = answer(pins)
    assert (found.answer, found.bound) == (said, bound) and words in found.error and found.pins == pins


def test_a_plan_without_a_search_says_that_its_file_lists_nothing() -> None:
    assert "lists no candidates" in answer("tp=4", replace(PLAN, proof=Proof())).error


def test_a_bound_is_printed_as_one() -> None:
    row = as_json(PLAN, answer("tp=4"))
    assert row["bound_s"] == 3.0 and row["step_time_s"] is None and row["difference"] == 0.5
    (line,) = why_not(PLAN, [answer("tp=4")]).rows
    assert line[1:4] == ("bounded", "at least 3.00 s", "at least +50.0 %")
