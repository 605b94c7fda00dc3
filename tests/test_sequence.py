"""Plans that cut the sequence, over an axis of its own and along the tensor axis: one process's numbers, divided."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.build import apply, prepare
from autopar.choosing.plan_training import Planned, plan_training
from autopar.cluster import Cluster
from autopar.divided import divided
from autopar.errors import AutoparError
from autopar.loading import ModelSpec
from autopar.pins import Pins
from autopar.verify import VerifyResult, verify_many

FILE = Path(__file__).with_name("sequence_models.py")
Judges = Callable[[str], Any]


def planned(judge: Any, pins: Pins) -> Planned:
    """The solver's plan on as many ranks as the pins name."""
    ranks = (pins.dp or 1) * (pins.tp or 1) * pins.sequence
    return plan_training(judge.captured, pins, Cluster.local(ranks=ranks), {})


@pytest.mark.parametrize("plan", ["sp=2", "dp=2 cp=2 microbatches=2 zero=3", "cp=2 tp=2"])
@pytest.mark.parametrize("model", ["block", "odd", "padded", "counted"])
def test_an_axis_of_its_own(model: str, plan: str, judge_of: Judges) -> None:
    """Also as completed from pins, where an eval program came first."""
    judge, pins = judge_of(f"{FILE}:{model}"), Pins.parse(plan)
    made = planned(judge, pins)
    graph = prepare(judge.captured, made.plan.microbatches, float64=True)
    judge.assert_equal(apply(made.plan, graph), plan)
    assert made.plan.mesh["cp"] == 2
    share = divided(made.plan, made.prepared)["cp"].flops
    assert share == pytest.approx(3 / 7 if model == "odd" else 1 / 2, abs=0.02), "the first rank has one token more"
    judge.pinned(**{key: int(value) for key, value in pins.given().items()})


def test_a_list_of_tokens_is_cut_between_sequences_where_another_axis_cuts_it(judge_of: Judges) -> None:
    judge = judge_of(f"{FILE}:tokens_listed")
    for plan in ("sp=2", "sp=2 dp=2"):
        made = planned(judge, Pins.parse(plan))
        judge.assert_equal(apply(made.plan, judge.prepared(made.plan.microbatches)), plan)
        assert divided(made.plan, made.prepared)[made.plan.axes[-1].display[0]].flops == 0.5


def test_rows_without_a_batch_are_the_sequence(judge_of: Judges) -> None:
    made = planned(judge_of(f"{FILE}:listed"), Pins.parse("sp=2"))
    assert divided(made.plan, made.prepared)["dp_replicate"].flops == 0.5


@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        ("pixels", "sp=2", r"pins: cp=2 divides no .* \(its 8 places are read together\). Pin dp or tp instead."),
        ("odd", "sp=5", "pins: cp=5 divides no .* of 7. Legal: cp=2, cp=3, cp=4, cp=7; or pin"),
        ("pixels", "tp=2 sp=true", "pin sp=true: no norm, dropout or addition .* over tp=2. Leave sp out."),
    ],
)
def test_what_cannot_be_cut_is_refused(model: str, plan: str, words: str, judge_of: Judges) -> None:
    with pytest.raises(AutoparError, match=words) as caught:
        planned(judge_of(f"{FILE}:{model}"), Pins.parse(plan))
    assert "\n" not in str(caught.value)


def test_on_real_ranks() -> None:
    plans = ["sp=2", "sp=2 zero=3 microbatches=2"]
    for result in verify_many(ModelSpec(f"{FILE}:odd"), 2, [Pins.parse(p) for p in plans]):
        assert isinstance(result, VerifyResult) and result.ok, result
