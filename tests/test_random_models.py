"""48 small models drawn at random (``random_models.py``), each under random complete layouts and now and then a
plan for pins or the solver's own, in the stacked semantics. ``make exact-random`` runs 2,000, some on real ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import random_models
import torch
from stacked_judge import StackedJudge

HERE = Path(__file__).parent
SEEDS, GROUPS = 48, 12


@pytest.fixture(autouse=True)
def _exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time goes into a second export, which shows that the ops are those of any batch: here it is the
    first again. ``make exact-random`` has both."""
    module = sys.modules["autopar.capture"]
    made: dict[int, tuple[Any, Any]] = {}
    export = module.export_model

    def once(call: Any, *args: Any) -> Any:
        if id(call) not in made:
            made[id(call)] = call, export(call, *args)
        return made[id(call)][1]

    monkeypatch.setattr(module, "export_model", once)


@pytest.mark.parametrize("group", range(GROUPS))
def test_equal_to_one_process(group: int) -> None:
    for seed in range(group, SEEDS, GROUPS):
        judge = StackedJudge(*random_models.make(seed))
        for plan in random_models.plans(seed, 1):
            found = random_models.judged(judge, plan)
            assert found == "equal" or found.startswith("refused: "), f"{plan}: {found}"


def test_a_seed_is_a_model() -> None:
    (first, ins, _), (again, same, _) = random_models.make(11), random_models.make(11)
    assert len(first.steps) == len(again.steps) and all(torch.equal(a, b) for a, b in zip(ins, same))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    other, _, _ = random_models.make(12)
    assert [f.__code__ for f, _ in first.steps] == [f.__code__ for f, _ in again.steps]
    assert [f.__code__ for f, _ in first.steps] != [f.__code__ for f, _ in other.steps]


def test_a_wrong_change_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial sums that are not summed anywhere must show in nearly every model that has some."""
    from autopar.runtime import stacked

    nothing: Callable[[Any], Any] = lambda a: (stacked._same, stacked._same)
    monkeypatch.setitem(stacked._CHANGES, "start_all_reduce", nothing)
    found = []
    for seed in range(4):
        judge = StackedJudge(*random_models.make(seed))
        found += [random_models.judged(judge, plan) for plan in random_models.plans(seed, 2)]
    assert sum(f.startswith("not equal") for f in found) >= len(found) / 2, found
