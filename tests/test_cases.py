"""Cases from public bug reports (`tests/cases`, each with its sources) under their ``dp``, ``tp`` and ``zero`` plans,
also with two microbatches: the numbers of one process. All run in the stacked semantics, some on real ranks."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.loading import ModelSpec
from autopar.pins import Pins
from autopar.runtime.pool import RankPool
from autopar.verify import VerifyResult, verify_many

FOLDER = Path(__file__).parent / "cases"
CASES = sorted(path.stem for path in FOLDER.glob("G*.py"))
SUPPORTED = {"dp", "tp", "sp", "zero", "microbatches"}
REAL = {2: ("G01", "G26"), 4: ("G05", "G39")}  # ranks -> the cases that run on them too


def spec_of(case: str) -> ModelSpec:
    return ModelSpec(f"{FOLDER / case}.py:make")


def plans_of(case: str) -> list[dict[str, Any]]:
    """The case's PLANS, read and not imported; each that is supported also with two microbatches."""
    named = lambda n: isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "PLANS"
    body = ast.parse((FOLDER / f"{case}.py").read_text()).body
    (given,) = (ast.literal_eval(n.value) for n in body if named(n))
    return [*given, *(plan | {"microbatches": 2} for plan in given if set(plan) <= SUPPORTED - {"microbatches"})]


def words(plan: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in plan.items())


EVERY = [pytest.param(case, plan, id=f"{case[:3]} {words(plan)}") for case in CASES for plan in plans_of(case)]


@pytest.mark.parametrize(("case", "plan"), EVERY)
def test_stacked(case: str, plan: dict[str, Any], judge_of: Callable[[str], Any]) -> None:
    later = sorted(set(plan) - SUPPORTED)
    if later:
        pytest.skip(f"{case[:3]} {words(plan)}: not supported yet: {', '.join(later)}")
    judge_of(spec_of(case).target).pinned(**plan)


@pytest.fixture(scope="module", params=REAL, ids=[f"{n} ranks" for n in REAL])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, RankPool]]:
    with RankPool(request.param, timeout=240) as ranks:
        yield request.param, ranks


def test_on_real_ranks(pool: tuple[int, RankPool]) -> None:
    size, ranks = pool
    for case in CASES:
        if case[:3] not in REAL[size]:
            continue
        plans = [p for p in plans_of(case) if set(p) <= SUPPORTED and p.get("dp", 1) * p.get("tp", 1) == size]
        assert plans, f"{case} has no plan for {size} ranks"
        results = verify_many(spec_of(case), size, [Pins.parse(plan) for plan in plans], pool=ranks)
        for plan, result in zip(plans, results, strict=True):
            assert isinstance(result, VerifyResult) and result.ok, f"{case} {words(plan)}: {result}"
