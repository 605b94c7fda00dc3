"""Models of the structures that public code has (``structure_models.py``): captured as eager runs them, and equal to
one process under pinned plans and random layouts, in the stacked semantics."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import AutoparError

MODELS = Path(__file__).with_name("structure_models.py")
FOUND = re.findall(r"^@(structure|whole_batch)\ndef (\w+)", MODELS.read_text(), re.MULTILINE)
NAMES = [name for _, name in FOUND]
WHOLE_BATCH = {name for kind, name in FOUND if kind == "whole_batch"}
PLANS: list[dict[str, int]] = [
    {"tp": 2},
    {"dp": 2, "zero": 3},
    {"dp": 2, "tp": 2},
    {"dp": 2},
]
MICROBATCHES: list[dict[str, int]] = [
    {"dp": 2, "zero": 2, "microbatches": 3},
    {"tp": 2, "microbatches": 2},
    {"dp": 2, "tp": 2, "zero": 3, "microbatches": 2},
]


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_one_process(name: str, judge_of: Callable[[str], Any]) -> None:
    judge, index = judge_of(f"{MODELS}:{name}"), NAMES.index(name)
    judge.eager()
    judge.spec()
    judge.pinned(**PLANS[index % len(PLANS)])
    several = MICROBATCHES[index % len(MICROBATCHES)]
    if name in WHOLE_BATCH:
        with pytest.raises(AutoparError, match="needs the whole batch at once.*Set microbatches=1"):
            judge.pinned(**several)
    else:
        judge.pinned(**several)
    judge.random(index, (2, 2), microbatches=1 if name in WHOLE_BATCH or index % 2 else 2)
