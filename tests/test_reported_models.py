"""The models of ``reported_models.py`` under pinned plans and random layouts, in the stacked semantics."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.build import apply
from autopar.choosing.plan_training import plan_training
from autopar.cluster import Cluster
from autopar.pins import Pins

MODELS = Path(__file__).with_name("reported_models.py")
NAMES = re.findall(r"^def (\w+)\(\) -> Built", MODELS.read_text(), re.MULTILINE)
PLANS: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 3},
    {"dp": 2, "tp": 2},
    {"dp": 2, "zero": 3, "microbatches": 2},
    {"tp": 2, "sp": True},
    {"tp": 4},
    {"dp": 2, "tp": 2, "zero": 2, "microbatches": 2},
]
FIGURES = Cluster.load("h100-dgx")  # where a reduce-scatter pays
WHOLE_BATCH = {"buffers_of_a_codebook"}  # they keep a mean over all rows


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_one_process(name: str, judge_of: Callable[[str], Any]) -> None:
    judge, index = judge_of(f"{MODELS}:{name}"), NAMES.index(name)
    judge.spec()
    for plan in (PLANS[index % len(PLANS)], PLANS[(index + 3) % len(PLANS)]):
        pins = {**plan, "microbatches": 1} if name in WHOLE_BATCH else plan
        cluster = replace(FIGURES, ranks_per_node=plan.get("dp", 1) * plan.get("tp", 1))
        made = plan_training(judge.captured, Pins.parse(pins), cluster, {}).plan
        judge.assert_equal(apply(made, judge.prepared(made.microbatches)), f"{pins}")
    judge.random(index, (2, 2) if index % 2 else (3,))
