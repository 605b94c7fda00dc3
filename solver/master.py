"""The best mix of patterns under the memory limit: one mixed-integer program over all units.

Columns: ``y[u, p]``, unit u does pattern p of its class (binary); ``z[v, s]``, shared variable v is in state s; the
largest transient ``P`` and the step time ``T``. Minimise T. Rows, in this order:

1. `one_pattern`: every unit does exactly one pattern;
2. `borders_agree`: units that touch a shared variable see the state that it is in (flow conservation along a chain);
3. `one_state`: a shared variable that no unit touches is in one state;
4. `streams`: T >= exposed + compute and T >= exposed + hidden;
5. `largest_transient`: P >= the transient of every unit's pattern, what it makes again included, and of every shared
   variable's state;
6. `memory`: static + saved + P <= limit.

The mix is only as good as its patterns; the proof is `lagrangian`'s bound, not this program's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from autopar.solver.backend import Model, minimise
from autopar.solver.evaluate import Evaluation, Outcome, Pattern, Point
from autopar.solver.lagrangian import Multipliers, Pool
from autopar.solver.problem import AGAIN, COMPUTE, EXPOSED, HIDDEN, SAVED, STATIC, TRANSIENT, Array, peak, seconds

NEAR = (0.5, 0.8, 1.25, 2.0)
"""Prices per byte beside the best one whose assignments are also mixed."""
SHIFTS = (0.1, 0.4)
"""Shifts of alpha, as a share of the way to 0 and to 1, whose assignments are also mixed."""
CROSSINGS = 36
"""Combinations of border states at most, of those that were seen, for which a unit's class is asked for a pattern."""
PATTERNS = 120
"""Patterns of a unit at most: those nearest to the Lagrangian's least."""


@dataclass
class Columns:
    """The columns of the program."""

    model: Model
    patterns: list[list[Pattern]]
    chosen: list[list[int]]
    states: list[dict[int, int]]
    largest: int
    time: int


def mix(evaluation: Evaluation, pool: Pool, multipliers: Multipliers, gap: float) -> Outcome | None:
    """Adds the best mix of patterns found to the pool; returns it (None where no mix of them fits)."""
    points = [Point(evaluation, m.weights(), m.high) for m in _near(multipliers)]
    for point in points:
        pool.add(point.outcome())
    patterns = gather(evaluation, list(pool.seen.values()), points, multipliers)
    for limit in (pool.limit, pool.limit * (1 - 1e-6)):
        outcome = _solve(evaluation, pool, patterns, limit, gap)
        if outcome is None:
            return None
        pool.add(outcome)
        if peak(outcome.total) <= pool.limit:
            return outcome
    return None


def gather(
    evaluation: Evaluation, outcomes: Sequence[Outcome], points: Sequence[Point], multipliers: Multipliers
) -> list[list[Pattern]]:
    """Patterns of each unit: those of the assignments seen, and the best between other border states that were seen."""
    units = evaluation.problem.units
    seen = [_often(o.assignment.shared[v] for o in outcomes) for v in range(len(evaluation.sizes))]
    classes: dict[int, dict[int, Pattern]] = {u.kind: {} for u in units}
    for o in outcomes:
        for p in o.patterns:
            classes[p.kind][id(p)] = p
    asked: set[tuple[int, tuple[int, ...]]] = set()
    for unit in units:
        asked.update((unit.kind, states) for states in _crossings([seen[b] for b in unit.borders]))
    for kind, states in sorted(asked):
        for point in points:
            p = point.between(kind, states)
            classes[kind][id(p)] = p
    weights = multipliers.weights()
    kept = {kind: _undominated(list(found.values()), weights) for kind, found in classes.items()}
    return [
        [p for p in kept[u.kind] if all(s in seen[b] for s, b in zip(p.borders, u.borders, strict=True))][:PATTERNS]
        for u in units
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


def _solve(
    evaluation: Evaluation, pool: Pool, patterns: list[list[Pattern]], limit: float, gap: float
) -> Outcome | None:
    columns = _columns(evaluation, patterns)
    if not all(columns.chosen) and evaluation.problem.units:
        return None
    scale = max(max((float(seconds(p.total)) for p in ps), default=0.0) for ps in patterns) if patterns else 1.0
    scale = max(scale * max(len(patterns), 1), 1e-12)
    for row in ROWS:
        row(columns, evaluation, scale, limit)
    solution = minimise(columns.model, gap=gap)
    pool.timed_out |= solution.timed_out
    if not len(solution.values):
        return None
    values = solution.values
    picked = [ps[int(np.argmax(values[c]))] for ps, c in zip(columns.patterns, columns.chosen, strict=True)]
    shared = [max(states, key=lambda s: values[states[s]]) for states in columns.states]
    for unit, p in zip(evaluation.problem.units, picked, strict=True):
        for b, s in zip(unit.borders, p.borders, strict=True):
            if shared[b] != s:
                return None
    return evaluation.outcome(float("nan"), shared, picked)


def _columns(evaluation: Evaluation, patterns: list[list[Pattern]]) -> Columns:
    model = Model()
    chosen = [[model.add(high=1.0, integer=True) for _ in ps] for ps in patterns]
    touched: dict[int, set[int]] = {}
    for unit, ps in zip(evaluation.problem.units, patterns, strict=True):
        for i, b in enumerate(unit.borders):
            touched.setdefault(b, set()).update(p.borders[i] for p in ps)
    states = []
    for v, size in enumerate(evaluation.sizes):
        free = v not in touched
        legal = np.asarray(np.isfinite(evaluation.problem.shared[v].costs).all(1))
        which = [s for s in sorted(range(size) if free else touched[v]) if legal[s]]
        states.append({s: model.add(high=1.0, integer=free) for s in which})
    return Columns(model, patterns, chosen, states, model.add(), model.add(cost=1.0))


def one_pattern(c: Columns, _: Evaluation, scale: float, limit: float) -> None:
    """sum_p y[u, p] = 1."""
    for chosen in c.chosen:
        c.model.row([(y, 1.0) for y in chosen], low=1.0, high=1.0)


def borders_agree(c: Columns, evaluation: Evaluation, scale: float, limit: float) -> None:
    """sum over p that see v in state s of y[u, p] = z[v, s]."""
    for unit, ps, chosen in zip(evaluation.problem.units, c.patterns, c.chosen, strict=True):
        for i, b in enumerate(unit.borders):
            states = {p.borders[i] for p in ps} | set(c.states[b])
            for s in sorted(states):
                terms = [(y, 1.0) for p, y in zip(ps, chosen, strict=True) if p.borders[i] == s]
                terms += [(c.states[b][s], -1.0)] if s in c.states[b] else []
                c.model.row(terms, low=0.0, high=0.0)


def one_state(c: Columns, evaluation: Evaluation, scale: float, limit: float) -> None:
    """sum_s z[v, s] = 1."""
    for states in c.states:
        c.model.row([(z, 1.0) for z in states.values()], low=1.0, high=1.0)


def streams(c: Columns, evaluation: Evaluation, scale: float, limit: float) -> None:
    """T >= exposed + compute, T >= exposed + hidden."""
    for stream in (COMPUTE, HIDDEN):
        terms = [(x, float(t[EXPOSED] + t[stream]) / scale) for x, t in _costs(c, evaluation)]
        c.model.row([(c.time, -1.0), *terms], high=0.0)


def largest_transient(c: Columns, evaluation: Evaluation, scale: float, limit: float) -> None:
    """P >= transient of what each unit does, and what it makes again for that, and of the state of each shared
    variable; only rows that can bind."""
    groups = [
        [(y, float(p.total[TRANSIENT] + p.total[AGAIN])) for y, p in zip(ys, ps, strict=True)]
        for ys, ps in zip(c.chosen, c.patterns, strict=True)
    ]
    for v, states in enumerate(c.states):
        costs = evaluation.problem.shared[v].costs
        groups.append([(z, float(costs[s, TRANSIENT])) for s, z in states.items()])
    least = max((min(t for _, t in g) for g in groups if g), default=0.0)
    c.model.row([(c.largest, 1.0)], low=least / limit)
    for group in groups:
        if max((t for _, t in group), default=0.0) > least:
            c.model.row([(c.largest, -1.0), *((x, t / limit) for x, t in group)], high=0.0)


def memory(c: Columns, evaluation: Evaluation, scale: float, limit: float) -> None:
    """static + saved + P <= limit."""
    terms = [(x, float(t[STATIC] + t[SAVED]) / limit) for x, t in _costs(c, evaluation)]
    c.model.row([(c.largest, 1.0), *terms], high=1.0)


ROWS = (one_pattern, borders_agree, one_state, streams, largest_transient, memory)


def _costs(c: Columns, evaluation: Evaluation) -> list[tuple[int, Array]]:
    """Every column that costs, with its resources."""
    costs = [(y, p.total) for ys, ps in zip(c.chosen, c.patterns) for y, p in zip(ys, ps, strict=True)]
    for v, states in enumerate(c.states):
        costs += [(z, evaluation.problem.shared[v].costs[s]) for s, z in states.items()]
    return costs
