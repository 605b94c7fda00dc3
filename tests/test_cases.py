"""Cases from public bug reports (`tests/cases`, each with its sources) under their ``pp``, ``dp``, ``tp``, ``sp`` and
``zero`` plans, also with two microbatches: the numbers of one process, or the one refusal that ``REFUSED`` lists. All
run in the stacked semantics, pipelines and some others on real ranks."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import AutoparError
from autopar.loading import ModelSpec
from autopar.pins import Pins
from autopar.runtime.pool import RankPool
from autopar.verify import PRELOAD, VerifyResult, verify_many

FOLDER = Path(__file__).parent / "cases"
CASES = sorted(path.stem for path in FOLDER.glob("G*.py"))
NOTES = {"may_reject", "sync_bn"}  # of a plan, no pins: a refusal is right; statistics of the whole batch, our default
# ranks -> the cases whose plans without stages run on them too
REAL = {2: ("G01", "G03", "G04", "G24", "G26"), 3: (), 4: ("G05", "G30", "G39")}


def spec_of(case: str) -> ModelSpec:
    return ModelSpec(f"{FOLDER / case}.py:make")


def given_of(case: str) -> list[dict[str, Any]]:
    """The case's PLANS, read and not imported."""
    named = lambda n: isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "PLANS"
    body = ast.parse((FOLDER / f"{case}.py").read_text()).body
    (given,) = (ast.literal_eval(n.value) for n in body if named(n))
    plans: list[dict[str, Any]] = []
    for plan in ({k: v for k, v in p.items() if k not in NOTES} for p in given):
        plans += [plan] if plan not in plans else []
    return plans


def plans_of(case: str) -> list[dict[str, Any]]:
    """The case's PLANS, each also with two microbatches."""
    plans = given_of(case)
    more = (plan | {"microbatches": 2} for plan in plans if "microbatches" not in plan)
    return [*plans, *(plan for plan in more if plan not in plans)]


def ranks_of(plan: dict[str, Any]) -> int:
    return math.prod(int(plan.get(key, 1)) for key in ("pp", "dp", "ep", "tp", "cp", "sp"))


def runs_on(plan: dict[str, Any], size: int) -> bool:
    """Whether so many ranks run a plan: as many as it names, or any where it names none but what they make again."""
    return ranks_of(plan) == size or ("recompute" in plan and not {"pp", "dp", "ep", "tp", "cp", "sp"} & set(plan))


def real(case: str, size: int) -> list[dict[str, Any]]:
    """The plans of a case that run on so many real ranks: its pipelines with most ranks, and what ``REAL`` names."""
    plans = [p for p in plans_of(case) if refusal(case, p) is None]
    own = [p for p in given_of(case) if p in plans and "pp" in p and case[:3] != "G40"]  # the ranks import long for it
    most = max(map(ranks_of, own), default=0)
    others = [p for p in plans if "pp" not in p and runs_on(p, size) and case[:3] in REAL[size]]
    return [*(p for p in own if ranks_of(p) == most == size), *others]


def words(plan: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in plan.items())


# What a case allows to be refused: (case, keys that the plan has) -> what the one line says.
REFUSED = {
    ("G16", frozenset({"microbatches"})): "bn1: autopar.batch_norm.* needs the whole batch at once.* microbatches=1",
    ("G27", frozenset({"dp"})): "does not divide the batch of 7 rows. Legal on [23] ranks: dp=1 .* multiple of",
    ("G30", frozenset({"dp", "ep", "microbatches"})): "needs a batch of at least 8 rows, it has 4.*microbatches=1",
    ("G29", frozenset({"microbatches"})): "index.* needs the whole batch at once.* microbatches=1",
}


def refusal(case: str, plan: dict[str, Any]) -> str | None:
    """The words with which this plan must be refused; None: it must be equal."""
    named = {key for key, value in plan.items() if value != 1}
    found = [text for (name, keys), text in REFUSED.items() if name == case[:3] and keys <= named]
    return found[0] if found else None


# What is made again only ranks see: stacked, a body runs once.
EVERY = [
    pytest.param(case, plan, id=f"{case[:3]} {words(plan)}")
    for case in CASES
    for plan in plans_of(case)
    if "recompute" not in plan
]


@pytest.mark.parametrize(("case", "plan"), EVERY)
def test_stacked(case: str, plan: dict[str, Any], judge_of: Callable[[str], Any]) -> None:
    text = refusal(case, plan)
    if text is None:
        judge_of(spec_of(case).target).pinned(**plan)
        return
    with pytest.raises(AutoparError, match=text) as caught:
        judge_of(spec_of(case).target).pinned(**plan)
    assert "\n" not in str(caught.value)


def test_other_inputs_of_a_case(judge_of: Callable[[str], Any]) -> None:
    """An odd sequence length; the branch not taken; outputs that are a dict with None, of a public class."""
    for plan in plans_of("G34_norm_grads_sequence_parallel"):
        judge_of(f"{FOLDER}/G34_norm_grads_sequence_parallel.py:make_other").pinned(**plan)
    for case in ("G14_dict_none_flags", "G40_hf_llama_rope"):
        judge_of(f"{FOLDER / case}.py:make_raw").pinned(tp=2)
    judge_of(f"{FOLDER}/G21_data_dependent_branch.py:make_other").pinned(dp=2)


@pytest.fixture(scope="module", params=REAL, ids=[f"{n} ranks" for n in REAL])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, RankPool]]:
    with RankPool(request.param, timeout=240, preload=PRELOAD) as ranks:
        yield request.param, ranks


def test_on_real_ranks(pool: tuple[int, RankPool]) -> None:
    size, ranks = pool
    for case in CASES:
        plans = real(case, size)
        assert plans or case[:3] not in REAL[size], f"{case} has no plan for {size} ranks"
        if not plans:
            continue
        results = verify_many(spec_of(case), size, [Pins.parse(plan) for plan in plans], pool=ranks)
        for plan, result in zip(plans, results, strict=True):
            assert isinstance(result, VerifyResult) and result.ok, f"{case} {words(plan)}: {result}"
