"""The integer program over every state, against counting."""

from __future__ import annotations

import re

import numpy as np
import pytest
from random_problems import Counted, random_problem

from autopar.solver import ilp, mixture
from autopar.solver.problem import peak, seconds, totals


@pytest.mark.parametrize("block", range(4))
def test_the_program_finds_the_optimum(block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        problem = random_problem(seed)
        optimum = Counted(problem).optimum
        answer = ilp.solve_ilp(problem)
        assert answer.proven
        if optimum == np.inf:
            assert answer.assignment is None and answer.bound == np.inf
            continue
        assert answer.assignment is not None
        total = totals(problem, answer.assignment)
        assert peak(total) <= problem.memory_limit
        assert float(seconds(total)) == answer.objective == optimum
        assert optimum * (1 - 2e-6) <= answer.bound <= optimum


def test_only_allowed_states_are_taken() -> None:
    for seed in range(30):
        problem = random_problem(seed)
        best = ilp.solve_ilp(problem)
        if best.assignment is None:
            continue
        allowed = [[np.array([s]) for s in states] for states in best.assignment.units]
        allowed.append([np.array([s]) for s in best.assignment.shared])
        again = ilp.solve_ilp(problem, allowed=allowed)
        assert again.assignment == best.assignment
        assert ilp.columns_of(problem, allowed) <= ilp.columns_of(problem)


@pytest.mark.parametrize("module", [ilp, mixture])
def test_rows_stand_in_the_order_of_the_docstring(module: object) -> None:
    listed = re.findall(r"^\d\. `(\w+)`", module.__doc__ or "", re.M)
    assert listed == [row.__name__ for row in module.ROWS]  # type: ignore[attr-defined]
    assert all(row.__doc__ for row in module.ROWS)  # type: ignore[attr-defined]
