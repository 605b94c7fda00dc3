"""The solver's own plans: equal to one process, within memory, with a proof; and what is said where nothing fits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from exact import solved as table

from autopar.build import apply, prepare
from autopar.choosing.solve import Solver, solve_plan, solved
from autopar.cluster import Cluster
from autopar.errors import AutoparError, NothingFits
from autopar.pins import Pins
from autopar.plan import loads
from autopar.solver.pipes import NO_PIPE


@cache
def judge(name: str) -> Any:
    return table.judge_of(name)


SLOWER = pytest.mark.xfail(
    run=False,
    reason="on one mesh the problem counts too little of plans that cut the batch and too much of plans that divide "
    "work, so no number of bytes given to the search leads to the fastest plan that fits",
)


@pytest.mark.parametrize(
    ("name", "ranks"), [("mlp", 4), ("resnet", 2), pytest.param("small:lora_frozen_base", 2, marks=SLOWER)]
)
def test_plans_are_equal_and_fit_under_three_limits(name: str, ranks: int) -> None:
    for row in table.rows(name, ranks):
        assert not row.wrong, str(row)


def test_a_plan_of_repeated_layers() -> None:
    captured = judge("llama").captured
    found = solved(captured, Cluster.local(ranks=2), Pins(microbatches=2, zero=3), prepared=judge("llama").prepared(1))
    plan = found.plan
    assert plan.fits and plan.microbatches == 2 and plan.deterministic
    assert [u.kind for u in plan.units][1::2][:2] == [1, 1]  # both layers' halves do the same
    assert {p.gather for p in plan.parameters.values() if p.rest.startswith("S") and p.gather != "never"} <= {"use"}
    worst = judge("llama").distances(apply(plan, judge("llama").prepared(2)))[0]
    assert worst.rel < 1e-12, worst
    assert loads(plan.dumps()) == plan
    proof = plan.proof
    assert proof.bound is not None and proof.objective is not None and proof.gap is not None
    assert proof.bound <= proof.objective and proof.gap == pytest.approx(max(0.0, 1 - proof.bound / proof.objective))
    assert proof.scope["generated"] > 0


def test_the_same_plan_every_time() -> None:
    cluster, captured = Cluster.local(ranks=4), judge("mlp").captured
    assert solve_plan(captured, cluster).dumps() == solve_plan(captured, cluster).dumps()


def test_next_best_plans_are_other_plans() -> None:
    plan = solve_plan(judge("mlp").captured, Cluster.local(ranks=4))
    assert plan.alternatives and all(a.kind == "next" and a.step_time_s for a in plan.alternatives)
    assert len({a.change for a in plan.alternatives}) == len(plan.alternatives)


def test_where_nothing_fits_the_nearest_change_does() -> None:
    captured, roomy = judge("mlp").captured, Cluster.local(ranks=2)
    with pytest.raises(NothingFits) as lean:
        solved(captured, table.with_memory(roomy, 1e4), nearest=False)
    assert lean.value.plan is not None and lean.value.plan.predicted.peak_mem_gib is not None
    short = table.with_memory(roomy, 0.95 * lean.value.plan.predicted.peak_mem_gib * 2**30)
    with pytest.raises(NothingFits, match=r"no plan fits: .* needs .* of .* too many .*Nearest: nodes=2") as caught:
        solve_plan(captured, short)
    plan = caught.value.plan
    assert plan is not None and plan.fits is False
    (more,) = [a for a in plan.alternatives if a.change.startswith("nodes=")]
    assert more.kind == "nearest" and more.fits
    assert solve_plan(captured, replace(short, nodes=2)).fits


def test_a_pin_that_rules_all_out_is_refused() -> None:
    with pytest.raises(AutoparError, match="Set microbatches=1"):
        solve_plan(judge("resnet").captured, Cluster.local(ranks=2), Pins(microbatches=2))


def test_one_rank() -> None:
    plan = solve_plan(judge("mlp").captured, Cluster.local(ranks=1))
    assert plan.ranks == 1 and plan.fits


def test_candidates_are_meshes_and_divisors_of_the_batch() -> None:
    solver = Solver(judge("mlp").captured, Cluster.local(ranks=4), prepared=prepare(judge("mlp").captured, 1))
    assert dict(solver.candidates.tried)[NO_PIPE] == (((4, 1),), ((2, 2), (2, 1)))
    assert solver.candidates.microbatches[:2] == (1, 2)
