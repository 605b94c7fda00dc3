"""The search over candidates with the solver of problems in it.

>>> import numpy as np
>>> from autopar.solver.problem import Class, Unit, Variable
>>> def pose(candidate):
...     m = candidate.microbatches
...     costs = np.array([[1.0 * m, 0, 0, 0, 8 / m, 0, 0], [2.0 * m, 0, 0, 0, 7 / m, 0, 0]])
...     x = Variable("x", "op", ("fast", "lean"), costs)
...     return Problem(str(candidate), (), (Class("layer", (x,), (), ()),), (Unit(0, ()),), memory_limit=6.0)
>>> found = search_problems(
...     [Candidate((), m) for m in (1, 2, 4)], quick_bound=lambda c: Quick(0.5), pose=pose, limit=6.0
... )
>>> [(o.candidate.microbatches, o.status, o.bound) for o in found.outcomes], found.best.seconds
([(1, 'memory', inf), (2, 'solved', 2.0), (4, 'dominated', 2.0)], 2.0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf

from autopar.solver.effort import Effort
from autopar.solver.evaluate import Evaluation
from autopar.solver.lagrangian import Multipliers, lower_bound
from autopar.solver.problem import Problem
from autopar.solver.search import Candidate, Found, Quick, search
from autopar.solver.solve import solve

Ranges = tuple[Multipliers, ...]


def search_problems(
    candidates: Iterable[Candidate],
    *,
    quick_bound: Callable[[Candidate], Quick],
    pose: Callable[[Candidate], Problem],
    limit: float,
    target_gap: float = 0.005,
    work_limit: float = inf,
    effort: Effort | None = None,
) -> Found[Problem]:
    """`search` over candidates that pose problems. ``limit``: bytes a rank; that of every problem posed."""
    ready = _Ready()

    def found_at(problem: Problem, multipliers: Ranges) -> tuple[float, Ranges]:
        wide = widened(multipliers)
        return lower_bound(problem, wide, ready.of(problem)), wide

    def free(problem: Problem, multipliers: Ranges) -> tuple[float, Ranges]:
        whole, evaluation = replace(problem, pipeline=None), ready.of(problem)
        alphas = dict.fromkeys([1.0, *(m.alpha for m in multipliers if m.time)])
        points = [(Multipliers(alpha, 0.0),) for alpha in list(alphas)[:3]]
        return max(((lower_bound(whole, p, evaluation), p) for p in points), key=lambda pair: pair[0])

    return search(
        candidates,
        quick_bound=quick_bound,
        pose=pose,
        solve=lambda problem, cutoff: solve(
            problem, target_gap=target_gap, cutoff=cutoff, evaluation=ready.of(problem)
        ),
        limit=limit,
        target_gap=target_gap,
        lower_bound=found_at,
        free_bound=free,
        work_limit=work_limit,
        effort=effort,
    )


def widened(multipliers: Iterable[Multipliers]) -> Ranges:
    """Ranges without gaps, from 0 up, so that they cover the transients of another problem as well.

    >>> [(m.low, m.high) for m in widened([Multipliers(1.0, 2.0, 6.0), Multipliers(1.0, 3.0, 2.0, 5.0)])]
    [(0.0, 5.0), (5.0, inf)]
    """
    found: list[Multipliers] = []
    for m in sorted(multipliers, key=lambda m: m.low):
        low = found[-1].high if found else 0.0
        found.append(Multipliers(m.alpha, m.per_byte, min(low, m.low), m.high, m.time))
    return tuple(found)


class _Ready:
    """The problem at hand, ready for evaluations; the one before is let go."""

    def __init__(self) -> None:
        self._problem: Problem | None = None
        self._evaluation: Evaluation | None = None

    def of(self, problem: Problem) -> Evaluation:
        if self._problem is not problem or self._evaluation is None:
            self._problem, self._evaluation = problem, Evaluation(problem)
        return self._evaluation
