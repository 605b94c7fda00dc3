"""The whole solve against counting out every assignment, and against problems changed on purpose."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from random_problems import AGAIN, SAVED, STATIC, TRANSIENT, Counted, random_problem

from autopar.solver.evaluate import Evaluation
from autopar.solver.lagrangian import lower_bound
from autopar.solver.problem import Class, Factor, Problem, Unit, Variable, peak, seconds, totals
from autopar.solver.solve import Answer, solve

ROUNDING = 1e-6


def check(problem: Problem, answer: Answer, counted: Counted) -> None:
    """What an answer claims, against every assignment."""
    optimum = counted.optimum
    if optimum == np.inf:
        assert answer.status == "infeasible" and answer.assignment is None
        assert answer.least_bound <= counted.least_bytes <= answer.least_bytes
        assert counted.again or (answer.bound == np.inf and answer.least_bytes == answer.least_bound)
        if answer.least_assignment is not None:
            assert float(peak(totals(problem, answer.least_assignment))) == answer.least_bytes
        return
    assert answer.status == "solved" and answer.assignment is not None
    total = totals(problem, answer.assignment)
    assert peak(total) <= problem.memory_limit
    assert float(seconds(total)) == answer.objective >= optimum
    assert answer.bound <= optimum
    assert answer.multipliers_bound <= answer.bound
    assert answer.gap is not None and answer.gap <= 2 * ROUNDING
    assert answer.objective == optimum


@pytest.mark.parametrize("block", range(10))
def test_answers_equal_counting(block: int) -> None:
    for seed in range(32 * block, 32 * block + 32):
        problem = random_problem(seed)
        answer = solve(problem, target_gap=0.0)
        check(problem, answer, Counted(problem))
        if answer.multipliers_bound < np.inf:
            again = lower_bound(problem, answer.multipliers)
            assert again >= answer.multipliers_bound - ROUNDING * max(1.0, answer.multipliers_bound), seed


def test_the_random_problems_reach_every_case() -> None:
    problems = [random_problem(seed) for seed in range(100)]
    optima = [Counted(p).optimum for p in problems]
    assert 10 < sum(o == np.inf for o in optima) < 40
    assert any(len(set(u.borders)) < len(u.borders) for p in problems for u in p.units)  # a border twice
    tied = [sum(b in u.borders for u in p.units) > 2 for p in problems for b in range(len(p.shared))]
    assert any(tied)  # more than two units share one variable
    free = [Counted(p).times.min(initial=np.inf) for p in problems]
    assert sum(f < o < np.inf for f, o in zip(free, optima)) > 20  # the limit costs time


@pytest.mark.parametrize("seed", range(40))
def test_split_tables_leave_bounds_valid(seed: int) -> None:
    problem = random_problem(seed)
    optimum = Counted(problem).optimum
    answer = solve(problem, target_gap=0.0, ilp_columns=0, evaluation=Evaluation(problem, limit=3))
    assert answer.bound <= optimum
    if answer.assignment is not None:
        total = totals(problem, answer.assignment)
        assert peak(total) <= problem.memory_limit and float(seconds(total)) == answer.objective >= optimum
    else:
        assert answer.least_bound <= Counted(problem).least_bytes <= answer.least_bytes


@pytest.mark.parametrize("target", [0.3, 0.05])
def test_the_target_gap_is_kept(target: float) -> None:
    for seed in range(30):
        answer = solve(random_problem(seed), target_gap=target)
        assert answer.status == "infeasible" or (answer.gap is not None and answer.gap <= target + ROUNDING)


def test_two_runs_give_the_same() -> None:
    for seed in range(25):
        first, second = (solve(random_problem(seed), target_gap=0.0) for _ in range(2))
        assert first == second


def test_a_cutoff_ends_early() -> None:
    stopped = 0
    for seed in range(30):
        problem = random_problem(seed)
        optimum = Counted(problem).optimum
        if optimum in (0.0, np.inf):
            continue
        answer = solve(problem, target_gap=0.0, cutoff=0.5 * optimum)
        assert answer.status in ("solved", "cutoff")
        assert 0.5 * optimum <= answer.bound <= optimum
        stopped += answer.status == "cutoff"
    assert stopped


def without_state(variable: Variable, state: int) -> Variable:
    """The variable with a state that may no longer be taken."""
    costs = variable.costs.copy()
    costs[state] = np.inf
    return dataclasses.replace(variable, costs=costs)


def without_memory(variable: Variable, resource: int) -> Variable:
    costs = variable.costs.copy()
    costs[np.isfinite(costs).all(1), resource] = 0.0
    return dataclasses.replace(variable, costs=costs)


def own_changed(problem: Problem, change: object) -> list[Problem]:
    """The problem with one variable of one class changed, for each."""
    changed = []
    for k, kind in enumerate(problem.classes):
        for i, variable in enumerate(kind.variables):
            for new in change(variable):  # type: ignore[operator]
                variables = (*kind.variables[:i], new, *kind.variables[i + 1 :])
                classes = list(problem.classes)
                classes[k] = dataclasses.replace(kind, variables=variables)
                changed.append(dataclasses.replace(problem, classes=tuple(classes)))
    return changed


def strategies_dropped(problem: Problem) -> list[Problem]:
    return own_changed(problem, lambda v: [without_state(v, s) for s in range(len(v.states))])


def shared_states_dropped(problem: Problem) -> list[Problem]:
    return [
        dataclasses.replace(problem, shared=(*problem.shared[:i], without_state(v, s), *problem.shared[i + 1 :]))
        for i, v in enumerate(problem.shared)
        for s in range(len(v.states))
    ]


def memory_terms_dropped(problem: Problem) -> list[Problem]:
    return own_changed(problem, lambda v: [without_memory(v, r) for r in (STATIC, SAVED, TRANSIENT)])


def again_dropped(problem: Problem) -> list[Problem]:
    return own_changed(problem, lambda v: [without_memory(v, AGAIN)])


@pytest.mark.parametrize("mutate", [strategies_dropped, shared_states_dropped, memory_terms_dropped, again_dropped])
def test_a_wrong_price_is_caught(mutate: object) -> None:
    """One strategy, one state of a shared tensor, one memory term less in what the solver sees: where that moves the
    optimum, the comparison with the whole problem fails."""
    caught = 0
    for seed in range(150):
        problem = random_problem(seed)
        counted = Counted(problem)
        if counted.optimum == np.inf or caught == 10:
            continue
        matters = [m for m in mutate(problem) if Counted(m).optimum != counted.optimum]  # type: ignore[operator]
        for changed in matters[:1]:
            with pytest.raises(AssertionError):
                check(problem, solve(changed, target_gap=0.0), counted)
            caught += 1
    assert caught == 10


def test_nothing_at_all() -> None:
    answer = solve(Problem("empty", (), (), (), memory_limit=1.0))
    assert (answer.status, answer.objective, answer.bound) == ("solved", 0.0, 0.0)


def test_no_legal_assignment_is_infeasible() -> None:
    x = Variable("x", "op", ("a",), np.full((1, 7), np.inf))
    answer = solve(Problem("none", (), (Class("c", (x,), (), ()),), (Unit(0, ()),), memory_limit=1.0))
    assert answer.status == "infeasible" and answer.least_assignment is None and answer.bound == np.inf


def test_many_equal_units_mix_two_patterns() -> None:
    """64 units that are fast at 10 bytes or slow at 2: the limit of 400 bytes allows 34 fast ones."""
    costs = np.zeros((2, 7))
    costs[:, 0], costs[:, 4] = (1.0, 2.0), (10.0, 2.0)
    x = Variable("x", "tensor", ("S", "R"), np.zeros((2, 7)))
    op = Variable("op", "op", ("fast", "lean"), costs)
    table = np.zeros((2, 2, 7))
    table[0, 1, 1] = table[1, 0, 1] = 0.25
    every = np.arange(2)
    layer = Class(
        "layer", (op,), (Factor((1, 0), (every, np.zeros(2, int)), table), Factor((0, 2), (every, every), table)), "io"
    )
    units = tuple(Unit(0, (i, i + 1)) for i in range(64))
    problem = Problem("chain", (x,) * 65, (layer,), units, memory_limit=400.0)
    answer = solve(problem, target_gap=0.005)
    assert answer.status == "solved" and answer.gap is not None and answer.gap <= 0.005
    assert answer.assignment is not None
    assert sum(states == (0,) for states in answer.assignment.units) == 34
