"""Small models of many kinds (``small_models.py``) under pinned plans and random layouts, in the stacked semantics."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import AutoparError

MODELS = Path(__file__).with_name("small_models.py")
NAMES = re.findall(r"^@small\ndef (\w+)", MODELS.read_text(), re.MULTILINE)
PLANS: list[dict[str, int]] = [
    {"dp": 2},
    {"tp": 2},
    {"dp": 2, "tp": 2},
    {"dp": 2, "zero": 3},
    {"dp": 4, "zero": 1},
    {"tp": 2, "microbatches": 2},
]
MICROBATCHES = {"dp": 2, "tp": 2, "zero": 3, "microbatches": 3}
WHOLE_BATCH = {  # their loss, or a buffer, is no sum over rows
    "images_among_words", "batch_norm_variants", "info_nce_in_batch", "moe_balance_loss", "running_mean_of_batch",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_one_process(name: str, judge_of: Callable[[str], Any]) -> None:
    judge, index = judge_of(f"{MODELS}:{name}"), NAMES.index(name)
    judge.spec()
    plan = PLANS[index // 2 % len(PLANS)] if index % 2 else MICROBATCHES
    if name in WHOLE_BATCH:
        plan = PLANS[index % 5]
        with pytest.raises(AutoparError, match="needs the whole batch at once.*Set microbatches=1"):
            judge.pinned(**MICROBATCHES)
    judge.pinned(**plan)
    for seed in (index % 2, 2):
        judge.random(seed, (2,) if seed == 2 else (2, 2), microbatches=1 if name in WHOLE_BATCH or seed else 2)
