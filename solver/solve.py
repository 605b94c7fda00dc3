"""One candidate: the fastest assignment within the memory limit, with a proven bound.

1. Elimination under multipliers gives lower bounds and whole assignments (`lagrangian`).
2. An integer program mixes their patterns (`master`).
3. Where the gap is still above the target: states that no better assignment can use are dropped (`marginals`), and an
   integer program over the others (`ilp`) finds the best, or shows that there is none; if they are few enough.

A problem whose units are cut into stages is `solve_stages`'s.

>>> import numpy as np
>>> from autopar.solver.problem import Class, Problem, Unit, Variable
>>> x = Variable("x", "op", ("fast", "lean"), np.array([[1.0, 0, 0, 0, 8.0, 0, 0], [2.0, 0, 0, 0, 4.0, 0, 0]]))
>>> layer = Class("layer", (x,), (), ())
>>> answer = solve(Problem("toy", (), (layer,), (Unit(0, ()), Unit(0, ())), memory_limit=12.0))
>>> answer.status, answer.objective, sorted(answer.assignment.units)
('solved', 3.0, [(0,), (1,)])
>>> solve(Problem("toy", (), (layer,), (Unit(0, ()),), memory_limit=3.0)).least_bytes
4.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from autopar.solver.answer import Answer
from autopar.solver.evaluate import Evaluation
from autopar.solver.ilp import ROUNDING, columns_of, fewest_columns, solve_ilp
from autopar.solver.lagrangian import Pool, Range, bound_ranges, least_memory
from autopar.solver.marginals import below, state_bounds
from autopar.solver.master import mix
from autopar.solver.problem import Problem, peak, seconds, totals
from autopar.solver.solve_stages import solve_stages

__all__ = ["ILP_COLUMNS", "Answer", "solve"]

ILP_COLUMNS = 2_500
"""Columns up to which the integer program over states is tried (seconds)."""
ILP_WORK = 200_000
"""Columns times branch-and-bound nodes of that program at most."""
SHARES = (0.3, 0.6, 1.0)
"""Of the gap: states with bounds up to there are looked at, one share after the other."""
MIXED = 3
"""Ranges of transients, lowest bound first, whose patterns are mixed."""


def solve(
    problem: Problem,
    *,
    target_gap: float = 0.005,
    cutoff: float = inf,
    ilp_columns: int = ILP_COLUMNS,
    evaluation: Evaluation | None = None,
) -> Answer:
    """The fastest assignment within the limit, to within ``target_gap`` (relative) where that can be reached.

    ``cutoff``: seconds; stops as soon as the bound reaches them. ``evaluation``: of this problem, if there is one."""
    evaluation = evaluation or Evaluation(problem)
    if problem.pipeline is not None:
        return solve_stages(problem, target_gap, cutoff, evaluation, ilp_columns)
    pool = Pool(problem.memory_limit, cutoff=cutoff)
    ranges = bound_ranges(evaluation, pool, target_gap)
    bound = min(r.bound for r in ranges)
    if pool.best is None and bound < cutoff:
        pool.add(least_memory(evaluation, problem.memory_limit)[1])
    _mix(evaluation, pool, ranges, target_gap)
    stats: dict[str, float] = {"ranges": len(ranges), "gap_mixed": pool.gap(bound), "ilp": 0}
    if bound < inf and not pool.enough(bound, target_gap) and ilp_columns:
        bound = _polish(evaluation, pool, ranges, target_gap, ilp_columns, stats)
    answer = _answer(problem, evaluation, pool, ranges, bound)
    return replace(answer, deterministic=not pool.timed_out, stats={**stats, "evaluations": evaluation.evaluations})


def _mix(evaluation: Evaluation, pool: Pool, ranges: Sequence[Range], target_gap: float) -> None:
    bound = ranges[0].bound
    for r in ranges[:MIXED]:
        if r.bound == inf or pool.enough(bound, target_gap):
            return
        mix(evaluation, pool, r.multipliers, 0.02 * target_gap)


def _polish(
    evaluation: Evaluation,
    pool: Pool,
    ranges: Sequence[Range],
    target_gap: float,
    most: int,
    stats: dict[str, float],
) -> float:
    """Adds what the integer program finds among states whose own bound is low, first few of them, then all that an
    assignment better than the target needs; returns the bound. What was left out cannot be below the threshold."""
    problem, bound = evaluation.problem, ranges[0].bound
    if fewest_columns(problem) > most:
        return bound
    states = state_bounds(evaluation, ranges) if pool.best is not None else None
    for share in SHARES if states is not None else (1.0,):
        wanted = min(pool.seconds, pool.seconds * (1 - target_gap) * (1 + 2 * ROUNDING))
        threshold = bound + share * (wanted - bound) if pool.best is not None else inf
        allowed = None if states is None else below(states, threshold)
        columns = columns_of(problem, allowed)
        if columns > most:
            break
        stats["ilp"] = columns
        answer = solve_ilp(
            problem, gap=0.5 * target_gap, nodes=max(1, ILP_WORK // max(columns, 1)), allowed=allowed, cutoff=threshold
        )
        pool.timed_out |= answer.timed_out
        if answer.assignment is not None:
            pool.add(evaluation.priced(answer.assignment))
        bound = max(bound, min(answer.bound, threshold * (1 - ROUNDING)))
        if pool.enough(bound, target_gap):
            break
    return bound


def _answer(problem: Problem, evaluation: Evaluation, pool: Pool, ranges: Sequence[Range], bound: float) -> Answer:
    multipliers = tuple(r.multipliers for r in ranges)
    known = ranges[0].bound
    if pool.best is not None:
        total = totals(problem, pool.best.assignment)
        assert peak(total) <= problem.memory_limit, "an assignment that does not fit was taken"
        objective = float(seconds(total))
        known, bound = min(known, objective), min(bound, objective)
        return Answer("solved", objective, bound, pool.best.assignment, multipliers, known, exact=evaluation.exact)
    if pool.cutoff <= bound < inf:
        return Answer("cutoff", inf, bound, None, multipliers, known, exact=evaluation.exact)
    least_bound, least = least_memory(evaluation)
    legal = bool(np.isfinite(least.total).all())
    return Answer(
        "infeasible",
        inf,
        inf if least_bound > problem.memory_limit else bound,
        None,
        multipliers,
        known,
        least_bytes=float(peak(totals(problem, least.assignment))) if legal else inf,
        least_bound=least_bound,
        least_assignment=least.assignment if legal else None,
        exact=evaluation.exact,
    )
