"""Settings that every test shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

# Ranks are processes that share few cores; one thread each. Read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["AUTOPAR_PROBE_CACHE"] = ""  # what an op does is seen anew, and nothing is left in the user's cache


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Every test draws the same numbers alone and in the whole run, and leaves no process group behind."""
    import torch
    import torch.distributed as dist

    torch.default_generator.manual_seed(0)  # the CPU's; `torch.manual_seed` prints the stack once for each other device
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def judge_of() -> Callable[[str], Any]:
    """``judge_of("FILE:factory")``: the model's `StackedJudge` (``stacked_judge.py``), captured once a session."""

    @cache
    def judge(target: str) -> Any:
        from stacked_judge import StackedJudge

        from autopar.loading import ModelSpec

        loaded = ModelSpec(target).load()
        return StackedJudge(loaded.model.train(), loaded.args, loaded.kwargs)

    return judge
