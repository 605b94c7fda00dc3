"""Recomputation on one rank, where units and their policies are all there is to choose: every combination counted out,
against the solver, and against what the program of its plan does."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from random_problems import Counted
from torch import Tensor, nn

from autopar.build import Prepared, prepare
from autopar.capture import capture
from autopar.choosing.again import POLICIES
from autopar.choosing.bounds import floor_of
from autopar.choosing.pose import Posed
from autopar.choosing.poser import Poser
from autopar.choosing.readback import plan_from
from autopar.choosing.solve import solved
from autopar.cluster import Cluster
from autopar.errors import AutoparError, NothingFits
from autopar.pins import Pins
from autopar.plan import Plan
from autopar.predict import predict
from autopar.solver.effort import Effort
from autopar.solver.problem import AGAIN, COMPUTE, SAVED, TRANSIENT, Assignment, Problem, peak, totals
from autopar.solver.solve import solve

WIDTH, ROWS = 256, 4096


class Block(nn.Module):
    """A residual block with a norm, two products and what lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + made


class Blocks(nn.Module):
    """Three of them, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = x.square().mean()
        return loss


@cache
def model() -> Prepared:
    with torch.device("meta"):
        captured = capture(Blocks(), (torch.zeros(ROWS, WIDTH),), {}, check=False)
    return prepare(captured, 1)


def cluster(limit: float | None = None) -> Cluster:
    """One rank of it."""
    one = replace(Cluster.load("h100-dgx"), ranks_per_node=1)
    if limit is None:
        return one
    memory = replace(one.chip.memory, value=float(int(limit)))
    return replace(one, chip=replace(one.chip, memory=memory, reserved=None))


@cache
def poser() -> Poser:
    return Poser(model(), cluster())


@cache
def posed() -> Posed:
    return poser().pose((), 1)


def within(problem: Problem, limit: float) -> Problem:
    return replace(problem, memory_limit=limit)


@cache
def counted() -> Counted:
    return Counted(posed().problem)


@cache
def limits() -> tuple[float, ...]:
    """From what the leanest assignment needs to what the fattest does."""
    peaks = np.unique(counted().peaks)
    return tuple(float(x) for x in peaks[np.linspace(0, len(peaks) - 1, 9).astype(int)])


def fastest(problem: Problem, limit: float) -> float:
    found = Counted(within(problem, limit))
    return float(found.times[found.peaks <= limit].min(initial=np.inf))


def test_units_and_policies() -> None:
    problem = posed().problem
    last = [problem.classes[u.kind].variables[-1] for u in problem.units]
    assert all(v.kind == "recompute" for v in last)
    assert [v.states for v in last].count(POLICIES) >= 3
    assert len(counted().times) == np.prod([len(v.states) for v in last])


@pytest.mark.parametrize("policies", list(itertools.product(POLICIES, repeat=2)), ids="-".join)
def test_a_policy_is_priced_as_the_program_has_it(policies: tuple[str, str]) -> None:
    """The first block does the one, all others the other."""
    found, chosen = posed(), []
    free = 0
    for unit in found.problem.units:
        *others, last = found.problem.classes[unit.kind].variables
        word = policies[min(free, 1)]
        free += len(last.states) > 1
        chosen.append((*(0 for _ in others), last.states.index(word) if word in last.states else 0))
    assignment = Assignment(tuple(0 for _ in found.problem.shared), tuple(chosen))
    assignment = best_shared(found.problem, assignment)
    total = totals(found.problem, assignment)
    times = poser().times(1)
    assert not isinstance(times, str)
    plan = plan_from(poser().body(1), found, assignment, times, cluster())
    parts = predict(plan, model(), cluster()).predicted.parts
    assert total[COMPUTE] == pytest.approx(parts["compute_s"] + parts["optimizer_s"], rel=1e-9)
    assert total[SAVED] == pytest.approx(parts["saved_bytes"], rel=1e-4)
    assert (parts.get("again_compute_s", 0.0) > 0) == (set(policies) != {"none"})


def best_shared(problem: Problem, assignment: Assignment) -> Assignment:
    """With every shared tensor in the legal state that costs least."""
    every = itertools.product(*(range(len(v.states)) for v in problem.shared))
    tried = [replace(assignment, shared=states) for states in every]
    return min(tried, key=lambda a: float(totals(problem, a)[[COMPUTE, SAVED, 1]].sum()))


def test_the_solver_finds_what_counting_finds() -> None:
    seen = set()
    for limit in limits():
        problem = within(posed().problem, limit)
        answer = solve(problem, target_gap=0.0)
        assert answer.objective == pytest.approx(fastest(problem, limit), rel=1e-12)
        assert answer.bound <= answer.objective and answer.assignment is not None
        assert float(peak(totals(problem, answer.assignment))) <= limit
        seen.add(tuple(states[-1] for states in answer.assignment.units))
    assert len(seen) >= 4 and tuple(0 for _ in problem.units) in seen  # what is made again depends on the limit


def test_a_quick_bound_knows_what_memory_costs() -> None:
    floor = floor_of(poser().body(1), cluster())
    quick = [floor.quick(1, 1, x) for x in limits()]
    assert all(q.seconds <= fastest(posed().problem, x) and q.bytes <= x for q, x in zip(quick, limits(), strict=True))
    assert quick[1].seconds > quick[-1].seconds == floor.quick(1, 1, np.inf).seconds


@pytest.mark.parametrize("policy", [1, 2])
def test_a_policy_that_is_missing_is_seen(policy: int) -> None:
    whole, classes = posed().problem, []
    for kind in whole.classes:
        *others, last = kind.variables
        kept = np.array([word != POLICIES[policy] for word in last.states])
        classes.append(replace(kind, variables=(*others, last.only(kept))))
    fewer = replace(whole, classes=tuple(classes))
    slower = [fastest(fewer, x) > fastest(whole, x) * (1 + 1e-9) for x in limits()]
    assert any(slower), "nothing is lost without it"
    at = limits()[slower.index(True)]
    assert not solve(within(fewer, at), target_gap=0.0).objective <= fastest(whole, at) * (1 + 1e-9)


@pytest.mark.parametrize("resource", [AGAIN, SAVED, TRANSIENT])
def test_bytes_that_are_not_priced_are_seen(resource: int) -> None:
    """Without them the solver takes plans that do not fit."""
    whole, classes = posed().problem, []
    for kind in whole.classes:
        variables = [replace(v, costs=without(v.costs, resource)) for v in kind.variables]
        factors = [replace(f, table=without(f.table, resource)) for f in kind.factors]
        classes.append(replace(kind, variables=tuple(variables), factors=tuple(factors)))
    less = replace(whole, classes=tuple(classes))
    answers = [(x, solve(within(less, x), target_gap=0.0)) for x in limits()]
    found = [(x, a.assignment) for x, a in answers if a.assignment is not None]
    assert any(float(peak(totals(whole, a))) > x for x, a in found)


def without(costs: np.ndarray, resource: int) -> np.ndarray:
    out = costs.copy()
    out[np.isfinite(out).all(-1), resource] = 0.0
    return out


def planned(pins: dict[str, str], limit: float | None = None) -> Plan:
    return solved(model().captured, cluster(limit), Pins.parse(pins), prepared=model(), effort=Effort(1e-9)).plan


def test_loose_memory_makes_nothing_again_and_tight_memory_does() -> None:
    loose = planned({"microbatches": "1"})
    assert loose.recompute == "none" and loose.predicted.peak_mem_gib is not None
    limit = 0.85 * loose.predicted.peak_mem_gib * 2**30
    with pytest.raises(NothingFits, match="Nearest: .*recompute not pinned") as error:
        planned({"microbatches": "1", "recompute": "none"}, limit)
    assert error.value.plan is not None
    (change,) = [a for a in error.value.plan.alternatives if a.why == "recompute not pinned"]
    assert change.fits and change.step_time_s is not None
    tight = planned({"microbatches": "1"}, limit)
    assert tight.fits and tight.recompute != "none"
    assert tight.predicted.step_time_s > loose.predicted.step_time_s  # type: ignore[operator]
    assert tight.predicted.parts["model_flops"] == loose.predicted.parts["model_flops"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pin_holds_for_every_unit(policy: str) -> None:
    plan = planned({"microbatches": "1", "recompute": policy})
    assert plan.recompute == policy and plan.pins["recompute"] == policy
    assert plan.proof.gap is not None and plan.proof.gap < 1e-6


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(AutoparError, match="pin recompute=some: not a legal value. Legal: none, selective, full."):
        Pins.parse({"recompute": "some"})
