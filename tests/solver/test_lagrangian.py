"""Bounds at any multipliers, the least memory, and what an evaluation says of itself."""

from __future__ import annotations

import numpy as np
import pytest
from random_problems import Counted, random_problem

from autopar.solver.evaluate import Evaluation
from autopar.solver.lagrangian import Multipliers, free_bound, least_memory, lower_bound, one_bound
from autopar.solver.problem import peak, totals


@pytest.mark.parametrize("block", range(4))
def test_every_multiplier_gives_a_valid_bound(block: int) -> None:
    rng = np.random.default_rng(block)
    for seed in range(15 * block, 15 * block + 15):
        problem = random_problem(seed)
        evaluation, optimum = Evaluation(problem), Counted(problem).optimum
        sizes = evaluation.transients()
        for _ in range(5):
            alpha, price, split = rng.random(), rng.choice([0.0, 0.1, 1.0, 10.0]) * rng.random(), rng.choice(sizes)
            ranges = [Multipliers(alpha, price, evaluation.least_transient(), split)]
            ranges += [Multipliers(1 - alpha, 0.5 * price, above) for above in sizes[sizes > split][:1]]
            assert lower_bound(problem, ranges, evaluation) <= optimum + 1e-9


def test_ranges_that_leave_a_transient_out_prove_nothing() -> None:
    for seed in range(20):
        problem = random_problem(seed)
        evaluation = Evaluation(problem)
        sizes = evaluation.transients()
        if sizes[-1] > evaluation.least_transient():
            assert lower_bound(problem, [Multipliers(1.0, 0.0, 0.0, sizes[-1] - 0.5)], evaluation) == 0.0
            assert lower_bound(problem, [], evaluation) == 0.0


def test_without_seconds_only_bytes_decide() -> None:
    m = Multipliers(0.0, 1.0, low=2.0, time=0.0)
    assert m.bound(least=9.0, limit=10.0) == np.inf
    assert m.bound(least=8.0, limit=10.0) == -np.inf


def test_the_least_memory_is_found() -> None:
    """Where something is made again bounds are none the less bounds."""
    reached = 0
    for seed in range(80):
        problem = random_problem(seed)
        counted = Counted(problem)
        bound, outcome = least_memory(Evaluation(problem))
        found = float(peak(totals(problem, outcome.assignment))) if bound < np.inf else np.inf
        assert bound <= counted.least_bytes <= found
        assert counted.again or bound == found
        reached += bound == found
    assert reached > 50


def test_bounds_for_the_search_hold() -> None:
    for seed in range(60):
        problem = random_problem(seed)
        counted, evaluation = Counted(problem), Evaluation(problem)
        for m in (Multipliers(0.3, 0.2, 3.0, 4.0), Multipliers(0.0, 1.0, time=0.0)):
            bound, again = one_bound(evaluation, [m])
            assert bound <= counted.optimum + 1e-9
            assert bound == pytest.approx(lower_bound(problem, again)) or bound == -np.inf
        free, again = free_bound(evaluation, [Multipliers(0.7, 5.0)])
        assert free <= counted.times.min(initial=np.inf) + 1e-9
        assert free == lower_bound(problem, again)


def test_an_outcome_costs_what_its_assignment_costs() -> None:
    rng = np.random.default_rng(0)
    for seed in range(60):
        problem = random_problem(seed)
        evaluation = Evaluation(problem)
        weights = np.array([*rng.random(5), 0.0, 0.0])
        outcome = evaluation.least(weights)
        counted = Counted(problem)
        least = (counted.total @ weights).min(initial=np.inf)
        assert outcome.value == pytest.approx(least)
        if least < np.inf:
            assert outcome.total.tolist() == totals(problem, outcome.assignment).tolist()
            assert float(weights @ outcome.total) == pytest.approx(least)
            again = evaluation.priced(outcome.assignment)
            assert again.total.tolist() == outcome.total.tolist() and again.assignment == outcome.assignment
        assert evaluation.least_transient() <= counted.total[:, 5].min(initial=np.inf)


def test_transients_above_the_cap_are_not_taken() -> None:
    for seed in range(40):
        problem = random_problem(seed)
        counted = Counted(problem)
        for high in (0.0, 3.0, 7.0):
            outcome = Evaluation(problem).least(np.array([1.0, 1, 0, 0, 0, 0, 0]), high)
            under = counted.total[counted.total[:, 5] <= high]
            assert outcome.value == (under[:, 0] + under[:, 1]).min(initial=np.inf)
