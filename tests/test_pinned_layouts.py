"""A parameter rests as its pin says, the rest is solved around it, and the numbers stay those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autopar.build import apply
from autopar.choosing.plan_training import Planned, plan_training
from autopar.cluster import Cluster
from autopar.divided import divided
from autopar.errors import AutoparError
from autopar.pins import Pins

LLAMA, UP = "autopar.models.llama:make", "model.layers.1.mlp.up_proj.weight"
Judges = Callable[[str], Any]


def planned(judge: Any, pins: str) -> Planned:
    return plan_training(judge.captured, Pins.parse(pins), Cluster.local(ranks=4), {})


def rest(made: Planned, fqn: str, axis: str) -> str:
    """How a parameter rests on an axis, in the words of a plan."""
    at = [a.name for a in made.plan.axes].index(axis)
    return made.plan.parameters[fqn].rest.split()[at]


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (f"tp=2 layout.{UP}=tp:S1", {(UP, "tp"): "S1", (UP.replace(".1.", ".0."), "tp"): "S0"}),
        ("tp=2 layout.*.down_proj.weight=tp:R", {("model.layers.0.mlp.down_proj.weight", "tp"): "I", (UP, "tp"): "S0"}),
        (f"tp=2 layout.{UP}=dp:S1,tp:S0", {(UP, "dp"): "S1", (UP, "tp"): "S0"}),
        (f"pp=2 tp=2 layout.{UP}=tp:S1", {(UP, "tp"): "S1"}),
    ],
)
def test_it_rests_so_and_the_numbers_hold(pins: str, words: dict[tuple[str, str], str], judge_of: Judges) -> None:
    judge = judge_of(LLAMA)
    made = planned(judge, pins)
    assert {key: rest(made, *key) for key in words} == words
    judge.assert_equal(apply(made.plan, judge.prepared(made.plan.microbatches)), pins)
    assert (divided(made.plan, made.prepared)["tp"].flops or 0) > 0.3


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (f"tp=2 layout.{UP}=tp:S2", f"pin layout.{UP}=tp:S2: .* over tp=2. Legal: tp:S[01], tp:S[01]\\.$"),
        (f"zero=0 layout.{UP}=dp:S0", r"beside the other pins it may not rest so over dp=4. Legal: dp:R\.$"),
        ("layout.model.layers.9.mlp.up_proj.weight=dp:S0", "no parameter of Llama has that name, did you mean 'model"),
    ],
)
def test_what_may_not_be_is_refused_with_what_may(pins: str, message: str, judge_of: Judges) -> None:
    with pytest.raises(AutoparError, match=message) as caught:
        planned(judge_of(LLAMA), pins)
    assert "\n" not in str(caught.value)
