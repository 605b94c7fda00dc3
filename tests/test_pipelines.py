"""Pipelines are equal to one process: every schedule, few and many microbatches, ties, long skips, frozen stages,
random ops, what is made again, ZeRO, and what a user reads of them. A slice of ``make exact-pipelines``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pipeline_models
import pytest
import torch
from stacked_judge import StackedJudge
from torch import Tensor

import autopar
from autopar import AutoparError, Cluster
from autopar.loading import ModelSpec
from autopar.pins import Pins
from autopar.runtime.parameters import is_here
from autopar.runtime.pool import RankPool
from autopar.verify import PRELOAD, VerifyResult, verify_many

FILE = Path(pipeline_models.__file__)


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], RankPool]]:
    made: dict[int, RankPool] = {}

    def of(ranks: int) -> RankPool:
        if ranks not in made:
            made[ranks] = RankPool(ranks, timeout=240, preload=PRELOAD)
        return made[ranks]

    yield of
    for pool in made.values():
        pool.close()


# ranks, model, its settings, pins: microbatches below, at and above the ranks of the pipeline
ROWS: list[tuple[int, str, dict[str, Any], list[str]]] = [
    (2, "tied", {"chance": 0.25}, [
        "pp=2 schedule=1f1b microbatches=2 cut=layers.1 recompute=full",
        "pp=2 schedule=interleaved vp=2 microbatches=3",
        "pp=2 schedule=zero_bubble microbatches=3 recompute=selective",
    ]),
    (4, "routed", {}, ["pp=2 dp=2 zero=3 schedule=gpipe microbatches=3"]),
    (4, "unet", {"chance": 0.25, "scales": 2}, [
        "pp=4 schedule=1f1b microbatches=3",
        "pp=2 dp=2 zero=3 schedule=zero_bubble microbatches=4 recompute=full",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "name", "settings", "plans"), ROWS, ids=[f"{r[1]} on {r[0]}" for r in ROWS])
def test_plans_are_equal_to_one_process(
    ranks: int, name: str, settings: dict[str, Any], plans: list[str], pools: Callable[[int], RankPool]
) -> None:
    spec = ModelSpec(f"{FILE}:{name}", settings)
    results = verify_many(spec, ranks, [Pins.parse(plan) for plan in plans], pool=pools(ranks))
    for plan, result in zip(plans, results, strict=True):
        assert isinstance(result, VerifyResult) and result.ok, f"{name} {plan}: {result}"


def test_larger_pipelines_in_one_process() -> None:
    """16 ranks and more, in the second semantics."""
    for built, pins in (
        (pipeline_models.tied(0.25), "pp=4 dp=2 tp=2 zero=2 microbatches=3"),
        (pipeline_models.tied(frozen=True), "pp=2 vp=2 dp=2 zero=3 microbatches=2"),
        (pipeline_models.unet(), "pp=8 tp=2 microbatches=2"),
        (pipeline_models.routed(), "pp=3 dp=2 tp=2 schedule=gpipe microbatches=3"),
    ):
        given = Pins.parse(pins)
        StackedJudge(*built).pinned(**{key: getattr(given, key) for key in given.named()})


def test_a_loss_of_the_whole_batch_needs_all_forwards_first() -> None:
    for pins in ("pp=2 schedule=1f1b microbatches=2", "pp=2 tp=1 schedule=zero_bubble microbatches=2"):
        with pytest.raises(AutoparError, match=r"aten\.\w+\.\w+ .*at once.* or pp and schedule=gpipe") as caught:
            model, args, _ = pipeline_models.routed()
            autopar.compile(model, Cluster.local(2), args=args, pins=pins)
        assert "\n" not in str(caught.value)


def used(rank: int, pins: str, name: str, settings: dict[str, Any], ranks: int) -> None:
    """A user's loop beside one process: outputs in training, gradients, outputs in eval mode, of other rows too."""
    model, args, _ = getattr(pipeline_models, name)(**settings)
    model.double()
    args = tuple(t.double() if t.is_floating_point() else t for t in args)
    alone = copy.deepcopy(model)
    parallel = autopar.compile(model, Cluster.local(ranks), args=args, pins=pins)
    for round_ in range(2):
        parallel.train()
        same(parallel.step_with_outputs(*args), made := alone.train()(*args))
        (made["loss"] if isinstance(made, dict) else made).backward()
        named, here = dict(parallel.named_parameters()), 0
        for fqn, p in alone.named_parameters():
            if not is_here(named[fqn]) or p.grad is None:
                assert named[fqn].grad is None, fqn
                continue
            here += 1
            same(named[fqn].grad.full_tensor(), p.grad)
        assert here, "a rank has parameters of its own stage"
        parallel.eval()
        alone.eval()
        for given in (args, tuple(t[:4] for t in args)):
            with torch.no_grad():
                same(parallel(*given), alone(*given))
        for each in (parallel, alone):
            with torch.no_grad():
                for p in each.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
        if round_ == 1:
            alone.zero_grad()


def same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-9, atol=1e-12)
        return
    assert found.keys() == wanted.keys()
    for key in wanted:
        same(found[key], wanted[key])


def test_outputs_gradients_and_eval_mode(pools: Callable[[int], RankPool]) -> None:
    pools(2).run(used, "pp=2 microbatches=4", "tied", {"frozen": True}, 2)
    pools(2).run(used, "pp=2 schedule=gpipe microbatches=3", "routed", {}, 2)
    pools(4).run(used, "pp=2 vp=2 tp=2 microbatches=3", "tied", {}, 4)
