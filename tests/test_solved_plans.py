"""Plans of the solver where memory is short: they equal one process on real ranks, fit, divide, and are not slower than
their neighbours; where nothing fits, the change that is named makes it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import limits
import pytest
from exact import rivals

from autopar.choosing.plan_training import plan_training
from autopar.cluster import Cluster
from autopar.errors import NothingFits
from autopar.loading import ModelSpec
from autopar.pins import Pins
from autopar.plan import Plan
from autopar.runtime.pool import RankPool
from autopar.verify import Subject, VerifyResult, verify_many

SPEC = ModelSpec("autopar.models.mlp:make", {"batch": 4})  # others are in `make exact-solved`
NEAR = 12  # plans near to each


@cache
def subject() -> Subject:
    return Subject.of(SPEC, None, check=False)


def planned(cluster: Cluster, **pins: Any) -> Plan:
    return plan_training(subject().captured, Pins.parse(pins), cluster, {}).plan


@cache
def clusters(ranks: int) -> dict[str, Cluster]:
    """With little memory."""
    cluster = Cluster.local(ranks=ranks)
    found: dict[str, Cluster] = limits.limits(subject().captured, cluster, planned(cluster))
    return found


@cache
def short(ranks: int, memory: str) -> tuple[Cluster, Plan]:
    """A cluster with little memory and its plan."""
    less = clusters(ranks)[memory]
    return less, planned(less)


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, RankPool]]:
    with RankPool(request.param, timeout=240) as ranks:
        yield request.param, ranks


def test_short_of_memory_plans_divide_and_equal_one_process(pool: tuple[int, RankPool]) -> None:
    size, ranks = pool
    plans = [short(size, memory)[1] for memory in (("tight", "just") if size == 2 else ("just",))]
    results = verify_many(SPEC, size, plans, pool=ranks)
    for plan, result in zip(plans, results, strict=True):
        assert isinstance(result, VerifyResult) and result.ok, result
        assert plan.fits and plan.proof.gap is not None
        taken_off = [part for s in result.divided.values() for part in (s.flops, s.param_bytes, s.saved_bytes)]
        if plan.pp > 1:  # what stages take off the fullest rank
            held = [sum(f.parameters for f in plan.predicted.stages[r :: plan.pp]) for r in range(plan.pp)]
            taken_off.append(1 - max(held) / sum(held))
        assert max(part or 0.0 for part in taken_off) > 0.3, (result.divided, plan.pp)


def test_no_plan_near_by_is_faster() -> None:
    for memory in ("tight", "just"):
        cluster, plan = short(2, memory)
        assert plan.predicted.step_time_s is not None and plan.proof.gap is not None
        bound = plan.predicted.step_time_s * (1 - plan.proof.gap)
        near = [rivals.near(subject(), plan, cluster, seed) for seed in range(NEAR)]
        fitting = [r for r in near if r is not None and r.nbytes <= cluster.limit]
        assert not [r for r in fitting if r.seconds * (1 + 1e-9) < bound]


def test_a_byte_less_and_nothing_fits_but_more_nodes() -> None:
    just, plan = short(2, "just")
    less = limits.with_memory(just, limits.peak(plan) - 1)
    with pytest.raises(NothingFits, match=r"no plan fits: .* needs .* of .* a rank, .* Nearest: nodes=") as error:
        planned(less)
    closest = error.value.plan
    assert closest is not None and closest.fits is False and limits.peak(closest) > less.limit
    nearest = closest.alternatives[0]
    assert nearest.kind == "nearest" and nearest.fits and nearest.change.startswith("nodes=")
    more = replace(less, nodes=int(nearest.change.removeprefix("nodes=")))
    assert planned(more, **{key: int(pin) for key, pin in nearest.pins.items()}).fits


def test_a_pinned_stage_that_does_not_fit_names_one_that_does() -> None:
    cluster, captured = Cluster.local(ranks=2), subject().captured
    pins = {"dp": 2, "zero": 0, "microbatches": 1}
    loose = planned(cluster, **pins)
    least = limits.leanest(captured, cluster, loose, Pins.parse(pins))
    less = limits.with_memory(cluster, limits.peak(least) - 1)
    with pytest.raises(NothingFits) as error:
        planned(less, **pins)
    assert error.value.plan is not None
    nearest = error.value.plan.alternatives[0]
    assert nearest.change.split("=")[0] in ("zero", "microbatches") and nearest.fits
    opened = {key: value for key, value in pins.items() if key != nearest.change.split("=")[0]}
    assert planned(less, **opened | {key: int(pin) for key, pin in nearest.pins.items()}).fits
