"""Graphs too wide for one table (a dense net reads every earlier output): what is split stays below the optimum, the
check finds the same by code of its own, and no table is made that was not meant to be."""

import json
from dataclasses import replace

import numpy as np
import pytest
from random_problems import Counted, random_problem

from autopar.solver import recompute
from autopar.solver.check_proof import check
from autopar.solver.evaluate import Evaluation
from autopar.solver.file import Record, Saved
from autopar.solver.problem import EXPOSED, Class, Factor, Problem, Unit, Variable, totals
from autopar.solver.proof import proof_of
from autopar.solver.recompute import least, transients
from autopar.solver.recompute_integer import state_leasts
from autopar.solver.search import Candidate, Quick
from autopar.solver.solve import solve


def dense(layers: int, states: int, rows: int) -> Problem:
    """Every layer reads every earlier one, of whose ``states`` it sees ``rows``; a third of the changes cost."""
    rng = np.random.default_rng(0)
    every = np.arange(states)
    variables = tuple(
        Variable(f"v{i}", "op", tuple(map(str, every)), np.pad(rng.uniform(1, 9, (states, 1)), ((0, 0), (0, 6))))
        for i in range(layers)
    )
    factors = []
    for i in range(layers):
        for j in range(i):
            table = np.zeros((rows, rows, 7))
            table[..., EXPOSED] = rng.uniform(0, 3, (rows, rows)) * (rng.random((rows, rows)) < 0.3)
            factors.append(Factor((i, j), (every % rows, every % rows), table))
    layer = Class("dense", variables, tuple(factors), ())
    return Problem("dense", (), (layer,), (Unit(0, ()),), memory_limit=1e9)


@pytest.fixture(scope="module")
def wide():
    """A clique of 18 tensors with 3 layouts: 3 ** 17 entries without a split."""
    problem = dense(18, 3, 3)
    return problem, solve(problem, target_gap=0.5, ilp_columns=0)


def record(problem, answer):
    """Of a search for this problem alone."""
    return Record(
        Candidate(((2, 1),), 1),
        "solved",
        answer.multipliers_bound,
        seconds=answer.objective,
        quick=Quick(0.0),
        problem=problem,
        multipliers=tuple((m.alpha, m.per_byte, m.low, m.high, m.time) for m in answer.multipliers),
        assignment=answer.assignment,
    )


def test_a_clique_is_solved_with_an_honest_gap(wide):
    problem, answer = wide
    assert answer.status == "solved" and not answer.exact and 0 < answer.gap < 0.5
    assert totals(problem, answer.assignment)[:2].sum() == pytest.approx(answer.objective)


def test_the_check_finds_what_a_split_proves(wide):
    problem, answer = wide
    saved = Saved((record(problem, answer),), problem.memory_limit)
    assert check(json.loads(json.dumps(proof_of(saved))), saved) == []
    raised = replace(saved.records[0], bound=min(1.01 * answer.bound, answer.objective))
    lines = check(proof_of(Saved((raised,), problem.memory_limit)), Saved((raised,), problem.memory_limit))
    assert any("can be shown" in line for line in lines)


def test_a_hundred_tensors_with_one_layout_are_one_sum():
    """What pins leave: NumPy makes no table of a hundred dims."""
    problem = dense(100, 2, 1)
    answer = solve(problem)
    assert answer.exact and answer.gap == 0.0
    assert least(problem, np.array([1.0, 1, 0, 0, 0, 0, 0])) == pytest.approx(answer.objective, rel=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_the_check_splits_as_the_solver_does(seed, monkeypatch):
    monkeypatch.setattr(recompute, "WIDEST", 3)
    monkeypatch.setattr(recompute, "SPLIT", 1)
    problem = dense(5, 3, 2) if seed == 0 else random_problem(seed)
    counted = Counted(problem)
    rng = np.random.default_rng(seed)
    for high in (np.inf, float(rng.choice(transients(problem)[1]))):
        weights = np.append(rng.uniform(0, 2, 5), [0.0, 0.0])
        found = least(problem, weights, high)
        assert found == pytest.approx(Evaluation(problem, limit=3).least(weights, high).value, rel=1e-12)
        values = np.where(counted.total[:, 5] <= high, counted.total @ weights, np.inf)
        assert found <= values.min(initial=np.inf) * (1 + 1e-12)
        for place, states in enumerate(state_leasts(problem, weights, high)):
            for v, leasts in enumerate(states):
                picked = counted.picked(place, v)
                for s, value in enumerate(leasts):
                    assert value <= values[picked == s].min(initial=np.inf) * (1 + 1e-12)
