"""Problems with stages against every assignment with every cut counted out, and against problems changed on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from chains import chain
from random_problems import random_problem
from random_stages import CountedStages, random_stages

from autopar.solver import stage_master
from autopar.solver.answer import Answer
from autopar.solver.evaluate import Evaluation
from autopar.solver.problem import RESOURCES, Pipeline, Problem, seconds
from autopar.solver.recompute_stages import Line, runs_at
from autopar.solver.segments import Priced, Row
from autopar.solver.solve import solve
from autopar.solver.stage_bound import Prices, free_bound, stages_bound
from autopar.solver.stages import peak_bytes, stage_totals, step_seconds

ROUNDING = 1e-6


def close(a: float, b: float) -> bool:
    return bool(a == b or (np.isfinite([a, b]).all() and abs(a - b) <= 1e-9 * max(abs(a), abs(b))))


def check(problem: Problem, answer: Answer, counted: CountedStages, gap: float = 2 * ROUNDING) -> None:
    """What an answer claims, against every assignment with every cut."""
    optimum = counted.optimum
    assert answer.multipliers_bound <= answer.bound
    if optimum == np.inf:
        assert answer.status == "infeasible" and answer.assignment is None
        assert answer.least_bound <= counted.least_bytes * (1 + 1e-9)
        if answer.least_assignment is not None:
            at = counted.number(answer.least_assignment)
            assert counted.peaks[at] == answer.least_bytes > problem.memory_limit
        return
    assert answer.bound <= optimum * (1 + 1e-9)
    assert answer.status == "solved" and answer.assignment is not None
    at = counted.number(answer.assignment)
    assert counted.peaks[at] <= problem.memory_limit and close(counted.times[at], answer.objective)
    assert answer.gap is not None and answer.gap <= gap
    assert answer.objective <= optimum * (1 + gap) + 1e-12


@pytest.mark.parametrize("block", range(10))
def test_answers_equal_counting(block: int) -> None:
    for seed in range(32 * block, 32 * block + 32):
        problem = random_stages(seed)
        counted = CountedStages(problem)
        answer = solve(problem, target_gap=0.0)
        check(problem, answer, counted)
        assert (answer.bound == np.inf) <= (counted.optimum == np.inf)
        evaluation = Evaluation(problem)
        again = stages_bound(evaluation, answer.multipliers)
        assert again >= answer.multipliers_bound * (1 - 1e-9) or answer.multipliers_bound == np.inf, seed
        free, _ = free_bound(evaluation, answer.multipliers)
        assert free <= counted.times.min(initial=np.inf) * (1 + 1e-9)


def test_the_random_problems_reach_every_case() -> None:
    problems = [random_stages(seed) for seed in range(80)]
    counted = [CountedStages(p) for p in problems]
    optima = [c.optimum for c in counted]
    assert 5 < sum(o == np.inf for o in optima) < 40
    assert sum(len(c.times) > 0 and c.times.min() < o < np.inf for c, o in zip(counted, optima, strict=True)) > 20
    assert any(p.pipeline is not None and p.pipeline.virtual == 2 for p in problems)
    rows = [Row(Evaluation(p), 9) for p in problems]
    assert any(row.long for row in rows) and any(not row.long for row in rows)
    tied = [v for row in rows for v in row.long if row.problem.shared[v].kind == "parameter"]
    assert tied and any(row.untouched for row in rows)
    assert any(max(map(len, row.links)) > 1 for row in rows)


@pytest.mark.parametrize("seed", range(40))
def test_without_integer_programs_over_states(seed: int) -> None:
    """Bounds hold, also where tables are split and runs are cut short; nothing found exceeds the memory."""
    problem = random_stages(seed)
    counted = CountedStages(problem)
    for evaluation in (Evaluation(problem), Evaluation(problem, limit=3)):
        answer = solve(problem, target_gap=0.0, ilp_columns=0, evaluation=evaluation)
        assert answer.bound <= counted.optimum * (1 + 1e-9)
        if answer.assignment is not None:
            at = counted.number(answer.assignment)
            assert counted.peaks[at] <= problem.memory_limit and close(counted.times[at], answer.objective)
        else:
            assert answer.least_bound <= counted.least_bytes <= answer.least_bytes


@pytest.mark.parametrize("seed", range(40))
def test_runs_cost_no_more_than_stages_do(seed: int) -> None:
    """Of the whole row without long variables exactly what elimination finds; of a part no more than the whole; of runs
    that are not priced no more than they take."""
    problem = random_stages(seed)
    evaluation = Evaluation(problem)
    weights = np.random.default_rng(seed).random(len(RESOURCES))
    weights[-2:] = 0.0
    row, short = Row(evaluation, len(problem.units)), Row(evaluation, 2)
    for high in (np.inf, 4.0, 1.0):
        found, again = Priced(row, weights, high).least, runs_at(Line(problem), weights, high).least
        for i, j in combinations(range(row.units + 1), 2):
            assert close(float(found[i, j - i - 1]), float(again[i, j]))
    priced, cut_short = Priced(row, weights), Priced(short, weights)
    least, whole = priced.least, evaluation.least(weights).value
    assert close(least[0, -1], whole) or (row.long and least[0, -1] < whole)
    assert np.array_equal(cut_short.least, least[:, :2])
    for i in range(row.units):
        for j in range(i + 1, row.units + 1):
            assert least[i, j - i - 1] <= least[0, -1] * (1 + 1e-9)
            total = priced.total(i, j)
            if not row.long and np.isfinite(least[i, j - i - 1]):
                assert close(float(weights @ total), float(least[i, j - i - 1]))
            if j - i > 2:
                grown = least[i, 1] + cut_short.beyond[j] - cut_short.beyond[i + 2]
                assert grown <= least[i, j - i - 1] * (1 + 1e-9)


@pytest.mark.parametrize("target", [0.3, 0.05])
def test_the_target_gap_is_kept(target: float) -> None:
    for seed in range(30):
        answer = solve(random_stages(seed), target_gap=target)
        assert answer.status == "infeasible" or (answer.gap is not None and answer.gap <= target + ROUNDING)


def test_a_cutoff_ends_early() -> None:
    stopped = 0
    for seed in range(40):
        problem = random_stages(seed)
        optimum = CountedStages(problem).optimum
        if optimum in (0.0, np.inf):
            continue
        answer = solve(problem, target_gap=0.0, cutoff=0.5 * optimum)
        assert answer.status in ("solved", "cutoff")
        assert 0.5 * optimum <= answer.bound <= optimum * (1 + 1e-9)
        stopped += answer.status == "cutoff"
    assert stopped


def test_two_runs_give_the_same() -> None:
    for seed in range(15):
        first, second = (solve(random_stages(seed), target_gap=0.0) for _ in range(2))
        assert first == second


# -- what is changed on purpose is noticed ----------------------------------------------------------------------------


def kept_once(problem: Problem) -> list[Problem]:
    pipeline = problem.pipeline
    assert pipeline is not None
    every = range(pipeline.stages)
    return [
        replace(
            problem,
            pipeline=replace(pipeline, in_flight=tuple(0.5 if s == t else n for t, n in enumerate(pipeline.in_flight))),
        )
        for s in every
    ]


def unsent(problem: Problem) -> list[Problem]:
    pipeline = problem.pipeline
    assert pipeline is not None
    return [replace(problem, pipeline=replace(pipeline, sends=tuple(0 * s for s in pipeline.sends)))]


def strategies_dropped(problem: Problem) -> list[Problem]:
    changed = []
    for k, kind in enumerate(problem.classes):
        for i, v in enumerate(kind.variables):
            for s in range(len(v.states)):
                only = v.only(np.arange(len(v.states)) != s)
                new = replace(kind, variables=(*kind.variables[:i], only, *kind.variables[i + 1 :]))
                changed.append(replace(problem, classes=(*problem.classes[:k], new, *problem.classes[k + 1 :])))
    return changed


def filled_less(problem: Problem) -> list[Problem]:
    assert problem.pipeline is not None
    return [replace(problem, pipeline=replace(problem.pipeline, fill=0.8 * problem.pipeline.fill))]


@pytest.mark.parametrize("mutate", [kept_once, unsent, strategies_dropped, filled_less])
def test_a_wrong_price_is_caught(mutate: Callable[[Problem], list[Problem]]) -> None:
    """One stage's microbatches in flight, messages, one strategy, the fill less in what the solver sees: where that
    moves the optimum, the comparison with the whole problem fails."""
    caught = 0
    for seed in range(200):
        problem = random_stages(seed)
        counted = CountedStages(problem)
        if caught == 5:
            break
        if counted.optimum == np.inf:
            continue
        matters = [m for m in mutate(problem) if not close(CountedStages(m).optimum, counted.optimum)]
        for changed in matters[:1]:
            with pytest.raises(AssertionError):
                check(problem, solve(changed, target_gap=0.0), counted)
            caught += 1
    assert caught == 5


def test_a_cut_that_is_left_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the best cut is at a place at which no stage may begin in the solver, it claims too much."""
    true_least, true_near = Priced.least.func, stage_master._near  # type: ignore[attr-defined]
    caught = 0
    for seed in range(200):
        problem = random_stages(seed)
        counted = CountedStages(problem)
        places = range(1, len(problem.units))
        missed = [k for k in places if CountedStages(problem, drop=k).optimum > counted.optimum * 1.001]
        if caught == 5:
            break
        if not missed:
            continue

        def least(priced: Priced, place: int = missed[0]) -> np.ndarray:
            found = true_least(priced).copy()
            found[place] = np.inf
            return found

        def near(row: Row, cut: int, place: int = missed[0]) -> list[int]:
            return [k for k in true_near(row, cut) if k != place]

        with monkeypatch.context() as patch:
            patch.setattr(Priced, "least", property(least))
            patch.setattr(
                stage_master, "_near", lambda row, cut, k=missed[0]: [c for c in true_near(row, cut) if c != k]
            )
            with pytest.raises(AssertionError):
                check(problem, solve(problem, target_gap=0.0), counted)
        caught += 1
    assert caught == 5


# -- long chains -------------------------------------------------------------------------------------------------------


def test_a_loose_chain_is_cut_evenly() -> None:
    problem = chain(20, 4, 8, limit=1e9)
    answer = solve(problem)
    assert answer.gap is not None and answer.gap <= 0.005 and answer.assignment is not None
    taken = seconds(stage_totals(problem, answer.assignment))
    assert taken.max() <= 1.1 * taken.mean()


@pytest.mark.parametrize(("virtual", "limit"), [(1, 60.0), (1, 45.0), (2, 40.0)])
def test_a_tight_chain_has_a_small_gap(virtual: int, limit: float) -> None:
    problem = chain(20, 4, 8, limit=limit, virtual=virtual)
    loose = solve(chain(20, 4, 8, limit=1e9, virtual=virtual))
    answer = solve(problem, target_gap=0.005)
    assert answer.status == "solved" and answer.assignment is not None
    assert answer.gap is not None and answer.gap <= 0.02 and answer.objective > loose.objective
    assert peak_bytes(problem, answer.assignment) <= limit
    assert step_seconds(problem, answer.assignment) == answer.objective
    if limit > 50:
        assert solve(problem, target_gap=0.005) == answer


def test_more_stages_than_units_fit_nowhere() -> None:
    answer = solve(chain(1, 8, 8, limit=1e9))
    assert (answer.status, answer.bound, answer.assignment) == ("infeasible", np.inf, None)


def test_what_cannot_fit_is_proven() -> None:
    problem = chain(20, 4, 8, limit=20.0)
    answer = solve(problem)
    assert answer.status == "infeasible" and answer.bound == np.inf
    assert 20.0 < answer.least_bound <= answer.least_bytes * (1 + 1e-9)
    assert answer.least_assignment is not None
    assert peak_bytes(problem, answer.least_assignment) == answer.least_bytes
    enough = replace(problem, memory_limit=answer.least_bytes)
    assert solve(enough).status == "solved"


def test_prices_of_one_stage_hold_for_another() -> None:
    """Any prices are bounds for every stage, whatever it keeps."""
    for seed in range(60):
        problem = random_stages(seed)
        assert problem.pipeline is not None
        if problem.pipeline.virtual > 1:
            continue
        counted = CountedStages(problem)
        rng = np.random.default_rng(seed)
        some = [Prices(float(rng.random()), *(float(x) for x in 0.3 * rng.random(1))) for _ in range(3)]
        some = [replace(p, saved=rng.random() * p.per_byte * 4, again=rng.random() * p.per_byte) for p in some]
        assert stages_bound(Evaluation(problem), some) <= counted.optimum * (1 + 1e-9)


def test_one_stage_is_a_problem_without_stages() -> None:
    for seed in range(25):
        problem = random_problem(seed)
        sends = tuple(np.zeros(len(v.states)) for v in problem.shared)
        one = replace(problem, pipeline=Pipeline(1, 1, 1, 1.0, (1.0,), sends))
        staged, plain = solve(one, target_gap=0.0), solve(problem, target_gap=0.0)
        assert staged.status == plain.status and close(staged.objective, plain.objective)
        assert staged.assignment is None or staged.assignment.cuts == ()
