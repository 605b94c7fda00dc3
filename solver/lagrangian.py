"""Lower bounds of the step time under the memory limit, and good assignments on the way.

``T = exposed + max(compute, hidden) >= exposed + alpha * compute + (1 - alpha) * hidden`` for alpha in [0, 1]. For
assignments whose largest transient lies in [low, high] the limit says ``static + saved + low <= limit``, so for every
price per byte >= 0 and every assignment that fits

    T >= exposed + alpha * compute + (1 - alpha) * hidden + per_byte * (static + saved + low - limit),

whose least over all assignments without a transient above ``high`` is found by elimination. The ranges of the
multipliers cover every transient that occurs; the least of their bounds holds for the whole problem. (A price on each
transient instead would have to be split among equal units: they would no longer be one class, and the bound would see
their mean where the program needs their maximum.) A range is closed without seconds, ``time = 0``, where even the least
bytes exceed the limit. Inside a range multipliers are found by cutting planes (Kelley): a plane an assignment seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from autopar.solver.backend import Model, minimise
from autopar.solver.evaluate import Evaluation, Outcome
from autopar.solver.problem import (
    COMPUTE,
    EXPOSED,
    HIDDEN,
    RESOURCES,
    SAVED,
    STATIC,
    TRANSIENT,
    Array,
    Problem,
    peak,
    seconds,
)

ITERATIONS = 40
"""Evaluations of one range of transients at most."""
RANGES = 24
"""Ranges of transients at most."""


@dataclass(frozen=True)
class Multipliers:
    """Weights of one range of transients [low, high] (bytes): ``alpha`` of compute against hidden communication,
    ``per_byte`` in seconds a byte; ``time`` is 1, or 0 where bytes alone show that nothing in the range fits."""

    alpha: float
    per_byte: float
    low: float = 0.0
    high: float = inf
    time: float = 1.0

    def weights(self) -> Array:
        """Of every resource."""
        weights = np.zeros(len(RESOURCES))
        weights[[COMPUTE, EXPOSED, HIDDEN]] = self.time * self.alpha, self.time, self.time * (1.0 - self.alpha)
        weights[[STATIC, SAVED]] = self.per_byte
        return weights

    def bound(self, least: float, limit: float) -> float:
        """The lower bound (seconds) that the least weighted sum gives."""
        value = least - self.per_byte * (limit - self.low)
        if self.time:
            return value
        return inf if value > 0 else -inf


@dataclass
class Pool:
    """Assignments seen, and the fastest of those that fit. ``cutoff``: a bound of so many seconds is enough.
    ``timed_out``: a program of theirs was ended by the clock."""

    limit: float
    cutoff: float = inf
    seen: dict[tuple[float, ...], Outcome] = field(default_factory=dict)
    best: Outcome | None = None
    timed_out: bool = False

    def add(self, outcome: Outcome) -> None:
        """Remembers a legal assignment (one of those with equal totals)."""
        if not np.isfinite(outcome.total).all():
            return
        self.seen.setdefault(tuple(outcome.total.tolist()), outcome)
        if peak(outcome.total) <= self.limit and seconds(outcome.total) < self.seconds:
            self.best = outcome

    @property
    def seconds(self) -> float:
        """Of the best; infinite while none fits."""
        return inf if self.best is None else float(seconds(self.best.total))

    def enough(self, bound: float, gap: float) -> bool:
        """Whether a bound is within the gap of the best, or shows that the problem is not worth more work."""
        return bound >= min(self.seconds * (1 - gap), self.cutoff)

    def gap(self, bound: float) -> float:
        """Relative; 1 while nothing fits."""
        return 1.0 if self.best is None else 1 - bound / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Range:
    """What is known of the assignments whose largest transient lies in [low, high]: nothing is faster than ``bound``.

    ``largest``: the largest transient among the planes that hold the bound up; above ``low``, a split may help."""

    bound: float
    multipliers: Multipliers
    largest: float


def lower_bound(problem: Problem, multipliers: Iterable[Multipliers], evaluation: Evaluation | None = None) -> float:
    """Seconds that no assignment within the limit can beat, found anew from multipliers alone. 0 where their
    ranges leave a transient out."""
    evaluation = evaluation or Evaluation(problem)
    every = tuple(multipliers)
    sizes = evaluation.transients()
    needed = sizes[sizes >= evaluation.least_transient()]
    if not every or not all(any(m.low <= size <= m.high for m in every) for size in needed):
        return 0.0
    return min(m.bound(evaluation.bound(m.weights(), m.high), problem.memory_limit) for m in every)


def one_bound(evaluation: Evaluation, multipliers: Iterable[Multipliers]) -> tuple[float, tuple[Multipliers, ...]]:
    """The bound of one evaluation at the multipliers of another problem (their first), and the multipliers to give it
    again: over every transient of this one."""
    first = next(iter(multipliers))
    m = replace(first, low=evaluation.least_transient(), high=inf)
    return m.bound(evaluation.bound(m.weights()), evaluation.problem.memory_limit), (m,)


def free_bound(evaluation: Evaluation, multipliers: Iterable[Multipliers]) -> tuple[float, tuple[Multipliers, ...]]:
    """Seconds that no assignment can beat even without a memory limit, and the multipliers to give it again."""
    bound, (m,) = one_bound(evaluation, [replace(m, per_byte=0.0, time=1.0) for m in multipliers])
    return bound, (replace(m, low=0.0),)  # bytes cost nothing, so that any transient is covered


def bound_ranges(evaluation: Evaluation, pool: Pool, target_gap: float) -> list[Range]:
    """Ranges that cover every transient, split where one holds the bound down, until the gap is small."""
    sizes = evaluation.transients()
    done: list[Range] = []
    open_ = [bound_range(evaluation, pool, evaluation.least_transient(), inf, target_gap)]
    while open_ and len(open_) + len(done) < RANGES:
        worst = min(open_, key=lambda r: r.bound)
        m = worst.multipliers
        slack = m.per_byte * (worst.largest - m.low)
        if pool.enough(worst.bound, target_gap):
            break
        open_.remove(worst)
        inside = sizes[(sizes > m.low) & (sizes <= worst.largest)]
        if len(inside) == 0 or slack <= 0.1 * target_gap * worst.bound:
            done.append(worst)
            continue
        split = float(inside[inside >= (m.low + worst.largest) / 2][0])
        below = float(sizes[sizes < split].max(initial=m.low))
        open_.append(bound_range(evaluation, pool, m.low, below, target_gap))
        open_.append(bound_range(evaluation, pool, split, m.high, target_gap))
    return sorted(done + open_, key=lambda r: r.bound)


def bound_range(evaluation: Evaluation, pool: Pool, low: float, high: float, target_gap: float) -> Range:
    """The best multipliers for one range, by cutting planes."""
    limit = pool.limit
    best = Range(-inf, Multipliers(1.0, 0.0, low, high), low)

    def visit(m: Multipliers) -> Outcome:
        nonlocal best
        outcome = evaluation.least(m.weights(), high)
        pool.add(outcome)
        bound = m.bound(outcome.value, limit)
        if bound > best.bound:
            best = Range(bound, m, low)
        return outcome

    first = visit(Multipliers(1.0, 0.0, low, high))
    if not np.isfinite(first.value):
        return best
    scale = max(float(seconds(first.total)), 1e-12) if np.isfinite(first.total).all() else max(first.value, 1e-12)
    if not _fits(first, low, limit) and not any(_fits(o, low, limit) for o in _planes(pool, high)):
        lean = visit(Multipliers(1.0, 1e3 * scale / limit, low, high))
        if not _fits(lean, low, limit):
            visit(Multipliers(0.0, 1.0, low, high, time=0.0))
            if best.bound == inf:
                return best
    for _ in range(ITERATIONS):
        if pool.enough(best.bound, 0.2 * target_gap):
            break
        ceiling, alpha, per_byte = _highest(_planes(pool, high), low, limit, scale)
        if ceiling - best.bound <= max(0.02 * target_gap, 1e-9) * scale:
            break
        visit(Multipliers(alpha, per_byte, low, high))
    return Range(best.bound, best.multipliers, _largest(best, _planes(pool, high), limit, target_gap))


def _planes(pool: Pool, high: float) -> list[Outcome]:
    return [o for o in pool.seen.values() if o.total[TRANSIENT] <= high]


def _fits(outcome: Outcome, low: float, limit: float) -> bool:
    return bool(outcome.total[STATIC] + outcome.total[SAVED] + low <= limit)


def _value(outcome: Outcome, m: Multipliers, limit: float) -> float:
    return m.bound(float(m.weights() @ outcome.total), limit)


def _largest(best: Range, planes: Sequence[Outcome], limit: float, target_gap: float) -> float:
    """The largest transient of the planes near the bound; ``low`` where there is none."""
    m = best.multipliers
    near = [o for o in planes if _value(o, m, limit) <= best.bound + max(target_gap, 1e-9) * abs(best.bound)]
    return max((float(o.total[TRANSIENT]) for o in near), default=m.low)


def _highest(planes: Sequence[Outcome], low: float, limit: float, scale: float) -> tuple[float, float, float]:
    """The highest point under all planes: its height, alpha, price per byte."""
    model = Model()
    height = model.add(cost=-1.0, low=-1e6)
    alpha = model.add(high=1.0)
    price = model.add(high=1e6)
    for o in planes:
        t = o.total / scale
        over = (o.total[STATIC] + o.total[SAVED] + low - limit) / limit
        terms = [(height, 1.0), (alpha, float(t[HIDDEN] - t[COMPUTE])), (price, -float(over))]
        model.row(terms, high=float(t[EXPOSED] + t[HIDDEN]))
    values = minimise(model).values
    return (
        float(values[height]) * scale,
        float(np.clip(values[alpha], 0.0, 1.0)),
        max(0.0, float(values[price])) * scale / limit,
    )


def least_memory(evaluation: Evaluation, limit: float = -inf) -> tuple[float, Outcome]:
    """Bytes below which no assignment's peak can be, and the leanest assignment found; stops early where one fits
    ``limit``, or where the bytes are shown to exceed it. With the default limit, and exact: the least peak."""
    sizes = evaluation.transients()
    weights = np.zeros(len(RESOURCES))
    weights[[STATIC, SAVED]] = 1.0

    def visit(low: float, high: float) -> tuple[float, float, float, Outcome]:
        outcome = evaluation.least(weights, high)
        return outcome.value + low, low, high, outcome

    open_ = [visit(evaluation.least_transient(), inf)]
    best = open_[0][3]
    while True:
        worst = min(open_, key=lambda r: r[0])
        bound, low, high, outcome = worst
        if float(peak(best.total)) <= max(bound, limit) or bound == inf or 0 < limit < bound:
            return bound, best
        top = float(outcome.total[TRANSIENT])
        inside = sizes[(sizes > low) & (sizes <= top)]
        if len(inside) == 0:
            return bound, best
        open_.remove(worst)
        split = float(inside[inside >= (low + top) / 2][0])
        open_.append((bound - low + split, split, high, outcome))
        open_.append(visit(low, float(sizes[sizes < split].max(initial=low))))
        if _better(open_[-1][3], best):
            best = open_[-1][3]


def _better(one: Outcome, other: Outcome) -> bool:
    return bool(np.isfinite(one.total).all()) and not peak(one.total) >= peak(other.total)
