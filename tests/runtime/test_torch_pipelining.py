"""A slice of ``tests/exact/torch_pipelining.py``: gradients of pipelines against torch's own, on two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from exact.torch_pipelining import CLOSE, Case, compiled, differs, planned

from autopar.runtime.pool import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout=60, preload=["torch.distributed.pipelining", "autopar.runtime.transport"]) as pool:
        yield pool


@pytest.mark.parametrize(("name", "microbatches"), [("gpipe", 3), ("1f1b", 5), ("interleaved", 4)])
def test_stages_that_autograd_runs_have_the_bits_of_torchs_pipelines(
    pool: RankPool, name: str, microbatches: int
) -> None:
    assert pool.run(differs, Case(2, name, microbatches, 8, 2, 3, torch.float64)) == [[], []]


def test_a_compiled_pipeline_has_the_gradients_of_torchs(pool: RankPool) -> None:
    case = Case(2, "interleaved", 2, 12, 2, 3, torch.float64)
    assert max(pool.run(compiled, planned(case), case)) <= CLOSE
