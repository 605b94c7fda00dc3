"""One candidate: the fastest assignment within the memory limit, with a proven bound.

1. Elimination under multipliers gives lower bounds and whole assignments (`lagrangian`).
2. An integer program mixes their patterns (`master`).
3. Small problems whose gap is still above the target: an integer program over every state (`ilp`).

>>> from autopar.solver.problem import Class, Problem, Unit, Variable
>>> x = Variable("x", "op", ("fast", "lean"), np.array([[1.0, 0, 0, 0, 8.0, 0], [2.0, 0, 0, 0, 4.0, 0]]))
>>> layer = Class("layer", (x,), (), ())
>>> answer = solve(Problem("toy", (), (layer,), (Unit(0, ()), Unit(0, ())), memory_limit=12.0))
>>> answer.status, answer.objective, sorted(answer.assignment.units)
('solved', 3.0, [(0,), (1,)])
>>> solve(Problem("toy", (), (layer,), (Unit(0, ()),), memory_limit=3.0)).least_bytes
4.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

import numpy as np

from autopar.solver.evaluate import Evaluation
from autopar.solver.lagrangian import Multipliers, Pool, Range, bound_ranges, least_memory
from autopar.solver.master import mix
from autopar.solver.problem import Assignment, Problem, peak, seconds, totals


@dataclass(frozen=True)
class Answer:
    """``objective``: seconds a step of ``assignment``, by `totals`; ``bound``: seconds that nothing can beat.

    ``status`` "infeasible": nothing was found that fits. Proven (``exact``) where ``least_bound`` exceeds the limit;
    ``least_bytes``: the peak of ``least_assignment``, the leanest found; no assignment's peak is below
    ``least_bound``. ``multipliers`` give ``bound`` again (`lagrangian.lower_bound`), but for what ``ilp`` in
    ``stats`` improved it to. ``exact``: elimination had to split no table."""

    status: Literal["solved", "infeasible"]
    objective: float
    bound: float
    assignment: Assignment | None
    multipliers: tuple[Multipliers, ...]
    least_bytes: float = inf
    least_bound: float = 0.0
    least_assignment: Assignment | None = None
    exact: bool = True
    stats: Mapping[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """1 - bound / objective."""
        return 0.0 if self.objective <= 0 or self.status == "infeasible" else 1 - self.bound / self.objective


def solve(problem: Problem, *, target_gap: float = 0.005, evaluation: Evaluation | None = None) -> Answer:
    """The fastest assignment within the limit, to within ``target_gap`` (relative) where that can be reached."""
    evaluation = evaluation or Evaluation(problem)
    pool = Pool(problem.memory_limit)
    ranges = bound_ranges(evaluation, pool, target_gap)
    bound = min(r.bound for r in ranges)
    if pool.best is None:
        least_bound, least = least_memory(evaluation, problem.memory_limit)
        pool.add(least)
        if pool.best is None:
            return _infeasible(problem, evaluation, ranges)
    stats: dict[str, float] = {"ranges": len(ranges)}
    if bound < pool.seconds * (1 - target_gap):
        for r in ranges[:3]:
            if bound < pool.seconds * (1 - target_gap) and np.isfinite(r.bound):
                mix(evaluation, pool, r.multipliers, target_gap * 0.1)
    assert pool.best is not None
    total = totals(problem, pool.best.assignment)
    assert peak(total) <= problem.memory_limit, "an assignment that does not fit was taken"
    objective = float(seconds(total))
    stats["evaluations"] = evaluation.evaluations
    return Answer(
        "solved",
        objective,
        min(bound, objective),
        pool.best.assignment,
        tuple(r.multipliers for r in ranges),
        exact=evaluation.exact,
        stats=stats,
    )


def _infeasible(problem: Problem, evaluation: Evaluation, ranges: list[Range]) -> Answer:
    bound, least = least_memory(evaluation)
    total = totals(problem, least.assignment)
    legal = bool(np.isfinite(total).all())
    return Answer(
        "infeasible",
        inf,
        min(r.bound for r in ranges),
        None,
        tuple(r.multipliers for r in ranges),
        least_bytes=float(peak(total)) if legal else inf,
        least_bound=bound,
        least_assignment=least.assignment if legal else None,
        exact=bound > problem.memory_limit,
        stats={"ranges": len(ranges), "evaluations": evaluation.evaluations},
    )
