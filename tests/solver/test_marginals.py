"""The bound of every state, against counting."""

from __future__ import annotations

import numpy as np
import pytest
from random_problems import Counted, random_problem

from autopar.solver.evaluate import Evaluation
from autopar.solver.lagrangian import Multipliers, Range
from autopar.solver.marginals import below, state_bounds


@pytest.mark.parametrize("limit", [4_000_000, 3])
def test_the_least_with_each_state(limit: int) -> None:
    """Equal to counting where elimination is exact, never above it where tables were split."""
    split = 0
    for seed in range(60):
        problem = random_problem(seed)
        counted, evaluation = Counted(problem), Evaluation(problem, limit)
        if not len(counted.times):
            continue
        m = Multipliers(0.7, 0.1)
        bounds = state_bounds(evaluation, [Range(0.0, m, 0.0)])
        assert bounds is not None
        sums = counted.total @ m.weights() - 0.1 * problem.memory_limit
        split += not evaluation.exact
        for i, found in enumerate([*bounds[-1], *(b for unit in bounds[:-1] for b in unit)]):
            true = np.array([sums[counted.states[i] == s].min(initial=np.inf) for s in range(len(found))])
            if evaluation.exact:
                assert np.allclose(found, true)
            else:
                assert (found <= true + 1e-9).all()
    assert split == 0 or limit == 3


def test_states_of_better_assignments_survive() -> None:
    dropped = 0
    for seed in range(60):
        problem = random_problem(seed)
        counted, evaluation = Counted(problem), Evaluation(problem)
        if counted.optimum == np.inf:
            continue
        bounds = state_bounds(evaluation, [Range(0.0, Multipliers(0.5, 0.2), 0.0)])
        assert bounds is not None
        threshold = 1.01 * counted.optimum + 1e-9
        allowed = below(bounds, threshold)
        flat = [*allowed[-1], *(a for unit in allowed[:-1] for a in unit)]
        better = counted.states[:, (counted.peaks <= problem.memory_limit) & (counted.times < threshold)]
        assert all(np.isin(states, a).all() for states, a in zip(better, flat))
        dropped += sum(len(b) - len(a) for bs, unit in zip(bounds, allowed) for b, a in zip(bs, unit))
    assert dropped > 100
