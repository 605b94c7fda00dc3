"""Models with routed experts, as captured: equal to one process, and tp=2 takes half of the FLOPs off a rank."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import experts_models
import pytest
import torch
import torch.nn.functional as F
from stacked_judge import StackedJudge
from torch import Tensor, nn

from autopar.build import apply
from autopar.choosing.plan_training import plan_training
from autopar.cluster import Cluster
from autopar.divided import divided
from autopar.errors import AutoparError
from autopar.loading import ModelSpec
from autopar.pins import Pins
from autopar.runtime.pool import RankPool
from autopar.verify import VerifyResult, verify_many

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers")

HERE = Path(__file__).parent
NAMES = [("mixtral", "batched_mm"), ("qwen3_moe", "grouped_mm"), ("gpt_oss", "batched_mm")]  # all: `make exact-ops`
PINNED: list[dict[str, int]] = [{"dp": 2, "tp": 2}, {"dp": 2, "zero": 3}, {"dp": 2, "microbatches": 2}]

pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def judge_of(name: str, experts: str, router_loss: bool = False) -> Any:
    model, args, kwargs = experts_models.make(name, experts, router_loss)
    return StackedJudge(model, args, kwargs)


@pytest.mark.parametrize(("name", "experts"), NAMES, ids=[" ".join(n) for n in NAMES])
def test_equal_to_one_process_and_divided(name: str, experts: str) -> None:
    judge = judge_of(name, experts)
    planned = plan_training(judge.captured, Pins.parse({"tp": 2}), Cluster.local(ranks=2), {})
    judge.assert_equal(apply(planned.plan, judge.prepared(1)), "tp=2")
    assert divided(planned.plan, planned.prepared)["tp"].flops >= 0.45
    for pins in PINNED:
        judge.pinned(**pins)
    judge.random(0)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_loss_that_balances_experts_needs_the_whole_batch(name: str) -> None:
    judge = judge_of(name, "grouped_mm", router_loss=True)
    judge.pinned(dp=2, tp=2)
    judge.random(0)
    with pytest.raises(AutoparError, match=r"modeling_\w+\.py:\d+\) needs the whole batch.*Set microbatches=1\."):
        judge.pinned(dp=2, microbatches=2)


class InHalf(nn.Module):
    """Torch's own grouped product, which has no kernel for float64."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        gate, ids = self.router(x).softmax(-1).max(-1)
        order = ids.argsort()
        ends = torch.histc(ids.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        y = F.grouped_mm(x[order], self.experts, offs=ends)
        return torch.empty_like(y).index_put((order,), y).mul(gate[:, None]).float().square().mean()


def test_torchs_own_product() -> None:
    judge = StackedJudge(InHalf().bfloat16(), (torch.randn(8, 8).bfloat16(),), {})
    assert any(n.target is torch.ops.autopar.grouped_mm.default for n in judge.graph.graph.nodes)
    for plan in ({"tp": 2}, {"dp": 2, "microbatches": 2}):
        judge.pinned(**plan)


def test_on_real_ranks() -> None:
    spec = ModelSpec(f"{HERE / 'experts_models.py'}:make", {"name": "mixtral", "experts": "grouped_mm"})
    with RankPool(2, timeout=240) as pool:
        for result in verify_many(spec, 2, [Pins.parse(p) for p in ({"tp": 2}, {"dp": 2, "zero": 3})], pool=pool):
            assert isinstance(result, VerifyResult) and result.ok, f"{result}"


@pytest.mark.parametrize(("name", "experts"), NAMES, ids=[" ".join(n) for n in NAMES])
def test_expert_parallel(name: str, experts: str) -> None:
    """Every rank has its part of the experts and rows of its own."""
    judge = judge_of(name, experts)
    for pins in ({"ep": 2}, {"dp": 2, "ep": 2, "zero": 3}, {"ep": 2, "tp": 2}, {"ep": 4, "microbatches": 2}):
        judge.pinned(**pins)
    planned = plan_training(judge.captured, Pins.parse({"ep": 2}), Cluster.local(ranks=2), {})
    judge.assert_equal(apply(planned.plan, judge.prepared(1)), "ep=2")
    mine = {n: p for n, p in planned.plan.parameters.items() if "experts." in n and len(p.shape) == 3}
    assert mine and all(p.rest == p.use == "S0" for p in mine.values())
    assert all(p.rest == "I" for n, p in planned.plan.parameters.items() if n not in mine)
    assert divided(planned.plan, planned.prepared)["ep"].flops >= 0.45


def test_who_has_no_experts_or_too_few() -> None:
    with pytest.raises(AutoparError, match=r"ep=8: .*experts\.\w+ has 4 experts, .* Legal: ep=1, ep=2, ep=4\."):
        judge_of("mixtral", "batched_mm").pinned(ep=8)
    with pytest.raises(AutoparError, match=r"pin ep=2: no parameter of this model holds the weights of several"):
        StackedJudge(nn.Sequential(nn.Linear(4, 4), Mean()), (torch.randn(4, 4),), {}).pinned(ep=2)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()
