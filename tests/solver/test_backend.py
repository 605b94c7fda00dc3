"""Our use of OR-Tools, and the traps that made it so: each trap is shown to be there, so that it is seen to go."""

from __future__ import annotations

import ctypes
import os
import sys
from math import inf
from typing import Any

import numpy as np
import pytest
from ortools.linear_solver import pywraplp
from ortools.math_opt.python import mathopt

from autopar.solver import backend
from autopar.solver.backend import Model, minimise


def knapsack() -> Model:
    """max 5x + 4y + 3z within 2x + 3y + z <= 5 and 4x + y + 2z <= 11, in whole numbers up to 3."""
    model = Model()
    x, y, z = (model.add(cost=-c, high=3.0, integer=True) for c in (5.0, 4.0, 3.0))
    model.row([(x, 2.0), (y, 3.0), (z, 1.0)], high=5.0)
    model.row([(x, 4.0), (y, 1.0), (z, 2.0)], high=11.0)
    return model


def half() -> Model:
    """min -x, 2x <= 3, x whole: -1, but -1.5 without integrality."""
    model = Model()
    x = model.add(cost=-1.0, high=5.0, integer=True)
    model.row([(x, 2.0)], high=3.0)
    return model


def test_integrality_is_kept() -> None:
    assert minimise(half()).objective == -1.0


def test_knapsack() -> None:
    solution = minimise(knapsack())
    every = np.indices((4, 4, 4)).reshape(3, -1)
    fits = (np.array([2, 3, 1]) @ every <= 5) & (np.array([4, 1, 2]) @ every <= 11)
    assert solution.status == "optimal"
    assert solution.objective == solution.bound == -(np.array([5, 4, 3]) @ every)[fits].max()


@pytest.mark.parametrize("name", ["HIGHS_LP", "PDLP"])
def test_trap_pywraplp_drops_integrality(name: str) -> None:
    solver = pywraplp.Solver.CreateSolver(name)
    x = solver.IntVar(0, 5, "x")
    solver.Add(2 * x <= 3)
    solver.Maximize(x)
    solver.Solve()
    assert x.solution_value() == pytest.approx(1.5, abs=1e-3)


def test_trap_mathopt_highs_refuses_one_thread() -> None:
    with pytest.raises(Exception):  # noqa: B017 (9.15 hides the reason behind an AttributeError)
        mathopt.solve(backend._mathopt(half()), mathopt.SolverType.HIGHS, params=mathopt.SolveParameters(threads=1))


def planes() -> Model:
    """A search for the highest point under six planes, with the wide bounds that keep it from being unbounded."""
    model = Model()
    height, alpha, price = model.add(cost=-1.0, low=-1e6), model.add(high=1.0), model.add(high=1e6)
    for a, p, high in (
        (-0.6489257192057679, -1.8268678258851183, 0.35107428079423214),
        (-0.28029100346416647, 0.7831780748968022, 1.0629999021656769),
        (-0.49738345406765855, 0.29429078649514895, 0.5312066571180943),
        (-0.5825289590452027, -0.09755848015899322, 0.42589506252164844),
        (-0.5202338280966464, 0.1675778956916922, 0.4973033168960417),
        (-0.5095486330926153, 0.14951709862270843, 0.5073025013073695),
    ):
        model.row([(height, 1.0), (alpha, a), (price, p)], high=high)
    return model


def test_trap_glop_gives_up_on_wide_bounds() -> None:
    result = mathopt.solve(backend._mathopt(planes()), mathopt.SolverType.GLOP)
    assert result.termination.reason == mathopt.TerminationReason.IMPRECISE
    assert minimise(planes()).status == "optimal"


def test_trap_cp_sat_rounds_continuous_columns() -> None:
    """Eight units of two patterns, and a continuous largest transient of order 0.01 within a limit of 0.6. CP-SAT works
    on integers: in these units it finds the program infeasible."""
    rng = np.random.default_rng(0)
    model = Model()
    largest = model.add()
    held = [(largest, 1.0)]
    for _ in range(8):
        pair = [model.add(cost=float(c), high=1.0, integer=True) for c in rng.random(2)]
        model.row([(y, 1.0) for y in pair], low=1.0, high=1.0)
        model.row([*zip(pair, rng.random(2) / 50), (largest, -1.0)], high=0.0)
        held += list(zip(pair, rng.random(2) / 8))
    model.row(held, high=0.6)
    assert minimise(model).status == "optimal"
    parameters = mathopt.SolveParameters(threads=1)
    result = mathopt.solve(backend._mathopt(model), mathopt.SolverType.CP_SAT, params=parameters)
    assert result.termination.reason == mathopt.TerminationReason.INFEASIBLE


def test_infeasible_and_empty() -> None:
    model = Model()
    x = model.add(integer=True)
    model.row([(x, 1.0)], low=0.25, high=0.75)
    solution = minimise(model)
    assert (solution.status, solution.bound, len(solution.values)) == ("infeasible", inf, 0)
    linear = Model()
    linear.row([(linear.add(cost=1.0), 1.0)], low=2.0)
    assert minimise(linear).objective == 2.0


def test_columns_that_repeat_in_a_row_are_added() -> None:
    model = Model()
    x = model.add(cost=-1.0)
    model.row([(x, 1.0), (x, 1.0)], high=3.0)
    assert minimise(model).values.tolist() == [1.5]


def test_a_row_without_columns_decides_alone() -> None:
    model = Model()
    model.add(cost=1.0, integer=True)
    model.row([], low=1.0)
    assert minimise(model).status == "infeasible"


def test_what_highs_prints_stays_out_of_standard_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It prints when it repairs a point it found, whatever it is told: ``autopar plan --json`` must stay JSON."""
    solve = mathopt.solve

    def noisy(*args: Any, **kwargs: Any) -> Any:
        ctypes.CDLL(None).puts(b"from C")
        os.write(1, b"to the descriptor\n")
        return solve(*args, **kwargs)

    monkeypatch.setattr(mathopt, "solve", noisy)
    minimise(knapsack())
    print("ours", flush=True)
    ctypes.CDLL(None).fflush(None)
    out, err = capfd.readouterr()
    assert out == "ours\n"
    assert "from C" in err
    assert "to the descriptor" in err


def test_solves_without_standard_output() -> None:
    """As under a service that closes it."""
    kept = os.dup(1)
    sys.stdout.flush()
    os.close(1)
    try:
        assert minimise(knapsack()).status == "optimal"
    finally:
        os.dup2(kept, 1)
        os.close(kept)
