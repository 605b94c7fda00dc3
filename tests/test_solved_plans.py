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

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 4},
    "llama": {"layers": 1, "sequence": 8, "batch": 4},
}
NEAR = 12  # plans near to each
LONG = {("llama", 4)}


def spec_of(name: str) -> ModelSpec:
    return ModelSpec(f"autopar.models.{name}:make", MODELS[name])


@cache
def subject_of(name: str) -> Subject:
    return Subject.of(spec_of(name), None, check=False)


def planned(name: str, cluster: Cluster, **pins: Any) -> Plan:
    return plan_training(subject_of(name).captured, Pins.parse(pins), cluster, {}).plan


@cache
def clusters(name: str, ranks: int) -> dict[str, Cluster]:
    """With little memory."""
    cluster = Cluster.local(ranks=ranks)
    found: dict[str, Cluster] = limits.limits(subject_of(name).captured, cluster, planned(name, cluster))
    return found


@cache
def short(name: str, ranks: int, memory: str) -> tuple[Cluster, Plan]:
    """A cluster with little memory and its plan."""
    less = clusters(name, ranks)[memory]
    return less, planned(name, less)


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, RankPool]]:
    with RankPool(request.param, timeout=240) as ranks:
        yield request.param, ranks


@pytest.mark.parametrize("name", MODELS)
def test_short_of_memory_plans_divide_and_equal_one_process(pool: tuple[int, RankPool], name: str) -> None:
    size, ranks = pool
    if (name, size) in LONG:
        pytest.skip(f"{name} on {size} ranks: minutes of planning, in `make exact-solved`")
    plans = [short(name, size, memory)[1] for memory in (("tight", "just") if size == 2 else ("just",))]
    results = verify_many(spec_of(name), size, plans, pool=ranks)
    for plan, result in zip(plans, results, strict=True):
        assert isinstance(result, VerifyResult) and result.ok, result
        assert plan.fits and plan.proof.gap is not None
        taken_off = [part for s in result.divided.values() for part in (s.flops, s.param_bytes, s.saved_bytes)]
        if plan.pp > 1:  # what stages take off the fullest rank
            held = [sum(f.parameters for f in plan.predicted.stages[r :: plan.pp]) for r in range(plan.pp)]
            taken_off.append(1 - max(held) / sum(held))
        assert max(part or 0.0 for part in taken_off) > 0.3, (result.divided, plan.pp)


@pytest.mark.parametrize("name", MODELS)
def test_no_plan_near_by_is_faster(name: str) -> None:
    for memory in ("tight", "just"):
        cluster, plan = short(name, 2, memory)
        assert plan.predicted.step_time_s is not None and plan.proof.gap is not None
        bound = plan.predicted.step_time_s * (1 - plan.proof.gap)
        near = [rivals.near(subject_of(name), plan, cluster, seed) for seed in range(NEAR)]
        fitting = [r for r in near if r is not None and r.nbytes <= cluster.limit]
        assert not [r for r in fitting if r.seconds * (1 + 1e-9) < bound]


@pytest.mark.parametrize("name", MODELS)
def test_a_byte_less_and_nothing_fits_but_more_nodes(name: str) -> None:
    just, plan = short(name, 2, "just")
    less = limits.with_memory(just, limits.peak(plan) - 1)
    with pytest.raises(NothingFits, match=r"no plan fits: .* needs .* of .* a rank, .* Nearest: nodes=") as error:
        planned(name, less)
    closest = error.value.plan
    assert closest is not None and closest.fits is False and limits.peak(closest) > less.limit
    nearest = closest.alternatives[0]
    assert nearest.kind == "nearest" and nearest.fits and nearest.change.startswith("nodes=")
    more = replace(less, nodes=int(nearest.change.removeprefix("nodes=")))
    assert planned(name, more, **{key: int(pin) for key, pin in nearest.pins.items()}).fits


def test_a_pinned_stage_that_does_not_fit_names_one_that_does() -> None:
    cluster, captured = Cluster.local(ranks=2), subject_of("mlp").captured
    pins = {"dp": 2, "zero": 0, "microbatches": 1}
    loose = planned("mlp", cluster, **pins)
    least = limits.leanest(captured, cluster, loose, Pins.parse(pins))
    less = limits.with_memory(cluster, limits.peak(least) - 1)
    with pytest.raises(NothingFits) as error:
        planned("mlp", less, **pins)
    assert error.value.plan is not None
    nearest = error.value.plan.alternatives[0]
    assert nearest.change.split("=")[0] in ("zero", "microbatches") and nearest.fits
    opened = {key: value for key, value in pins.items() if key != nearest.change.split("=")[0]}
    assert planned("mlp", less, **opened | {key: int(pin) for key, pin in nearest.pins.items()}).fits
