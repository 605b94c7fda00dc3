"""The best mix of patterns under the memory limit: gathers patterns of units, and asks `mixture` for the best of them.

The mix is only as good as its patterns; the proof is `lagrangian`'s bound, not this program's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np

from autopar.solver.evaluate import Evaluation, Outcome, Pattern, Point
from autopar.solver.lagrangian import Multipliers, Pool
from autopar.solver.mixture import best_mix
from autopar.solver.problem import Array, peak
from autopar.solver.runs import Run, States, runs_of

NEAR = (0.5, 0.8, 1.25, 2.0)
"""Prices per byte beside the best one whose assignments are also mixed."""
SHIFTS = (0.1, 0.4)
"""Shifts of alpha, as a share of the way to 0 and to 1, whose assignments are also mixed."""
CROSSINGS = 36
"""Combinations of border states at most, of those that were seen, for which a unit's class is asked for a pattern."""
PATTERNS = 120
"""Patterns of a group at most: those nearest to the Lagrangian's least."""
COLUMNS = 6_000
"""Columns of patterns at most, all groups together, unless each has `FEWEST`."""
FEWEST = 12
"""Patterns of each group that are always mixed."""


def mix(evaluation: Evaluation, pool: Pool, multipliers: Multipliers, gap: float) -> Outcome | None:
    """Adds the best mix of patterns found to the pool; returns it (None where no mix of them fits)."""
    points = [Point(evaluation, m.weights(), m.high) for m in _near(multipliers)]
    for point in points:
        pool.add(point.outcome())
    runs = runs_of(evaluation.problem)
    patterns = gather(evaluation, runs, list(pool.seen.values()), points, multipliers)
    for limit in (pool.limit, pool.limit * (1 - 1e-6)):
        outcome, timed_out = best_mix(evaluation, runs, patterns, limit, gap)
        pool.timed_out |= timed_out
        if outcome is None:
            return None
        pool.add(outcome)
        if peak(outcome.total) <= pool.limit:
            return outcome
    return None


def gather(
    evaluation: Evaluation,
    runs: Sequence[Run],
    outcomes: Sequence[Outcome],
    points: Sequence[Point],
    multipliers: Multipliers,
) -> list[list[Pattern]]:
    """Patterns of each group of units: those of the assignments seen, and the best between other border states that
    were seen."""
    units = evaluation.problem.units
    classes: dict[int, dict[int, Pattern]] = {u.kind: {} for u in units}
    for o in outcomes:
        for p in o.patterns:
            classes[p.kind][id(p)] = p
    groups = [g for run in runs for g in run.groups]
    seen = []
    for g in groups:
        borders = zip(*(units[u].borders for u in g.units), strict=True)
        seen.append([_often(o.assignment.shared[v] for o in outcomes for v in vs) for vs in borders])
    asked: set[tuple[int, States]] = set()
    for g, of in zip(groups, seen, strict=True):
        asked.update((g.kind, crossing) for crossing in _crossings(of))
    for kind, states in sorted(asked):
        for point in points:
            p = point.between(kind, states)
            classes[kind][id(p)] = p
    weights = multipliers.weights()
    kept = {kind: _undominated(list(found.values()), weights) for kind, found in classes.items()}
    most = max(FEWEST, min(PATTERNS, COLUMNS // max(1, len(groups))))
    return [
        [p for p in kept[g.kind] if all(s in states for s, states in zip(p.borders, of, strict=True))][:most]
        for g, of in zip(groups, seen, strict=True)
    ]


def _often(states: Iterable[int]) -> list[int]:
    """The states that occur, most often first."""
    counts = Counter(states)
    return sorted(counts, key=lambda s: (-counts[s], s))


def _crossings(seen: list[list[int]]) -> list[tuple[int, ...]]:
    """Combinations of states, those of frequent states first."""
    ranks = sorted(product(*(range(min(len(s), CROSSINGS)) for s in seen)), key=lambda r: (sum(r), r))
    return [tuple(s[i] for s, i in zip(seen, r, strict=True)) for r in ranks[:CROSSINGS]]


def _undominated(patterns: list[Pattern], weights: Array) -> list[Pattern]:
    """Legal patterns, the least weight first, without those that another with the same borders beats in everything."""
    legal = [p for p in patterns if np.isfinite(p.total).all()]
    legal.sort(key=lambda p: (float(weights @ p.total), p.borders, p.states))
    kept: dict[tuple[int, ...], list[Pattern]] = {}
    order = []
    for p in legal:
        beside = kept.setdefault(p.borders, [])
        if not any((q.total <= p.total).all() for q in beside):
            beside.append(p)
            order.append(p)
    return order


def _near(m: Multipliers) -> list[Multipliers]:
    """The best multipliers first, then others around them."""
    others = [(m.alpha, m.per_byte * f) for f in NEAR] + [(m.alpha * (1 - s), m.per_byte) for s in SHIFTS]
    others += [(m.alpha + (1 - m.alpha) * s, m.per_byte) for s in SHIFTS]
    points = dict.fromkeys([(m.alpha, m.per_byte), *others])
    return [Multipliers(alpha, price, m.low, m.high) for alpha, price in points]
