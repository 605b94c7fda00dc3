"""Cuts of a pipeline whose ranks have several stages each: a bound of their step, and good cuts.

With G[r] the sum over a rank's stages, a step takes ``f * (sum of G) + (1 - f) * max of G`` and messages. For shares
w >= 0 that add up to 1 the largest G is no less than ``sum of w * G``, and what then is to be least is a sum over
stages alone: a shortest path. The best shares are found by cutting planes. Beside that, with any measure of units: if
all that ranks may hold of it within ``tau`` is less than what the units have, some rank takes more than ``tau``
(`least_fullest`); so few units a stage are seen to be no fraction.
"""

from __future__ import annotations

from math import inf

import numpy as np

from autopar.solver.backend import Model, minimise
from autopar.solver.problem import Array, Index, Pipeline
from autopar.solver.segments import Row

PLANES = 24
"""Shares of ranks that are tried."""
WIDTH = 0.5
"""Of the first box about them, relative."""
MOVES, TOGETHER = 60, 12
"""Improvements of cuts at most, and cuts that move together."""
PRECISION = 1e-4
"""At which the search for shares ends, relative."""


def of_ranks(pipeline: Pipeline, stages: Array) -> Array:
    """Sums over the stages of each rank, [..., ranks]."""
    return np.asarray(stages.reshape(*stages.shape[:-1], pipeline.virtual, pipeline.ranks).sum(-2))


def step(ranks: Array, f: float) -> Array:
    """``f * (sum of G) + (1 - f) * max of G`` of ranks [..., ranks]."""
    largest = ranks.max(-1)
    return np.asarray(f * ranks.sum(-1) + (1 - f) * np.where(np.isfinite(largest), largest, 0.0))


def at(row: Row, stages: Array, cuts: Index) -> Array:
    """What stages take by their costs [stages, starts, lengths] at each of several cuts [n, stages - 1]: [n, stages];
    infinite where a stage is empty."""
    n = len(cuts)
    edges = np.concatenate([np.zeros((n, 1), int), cuts, np.full((n, 1), row.units)], axis=1)
    lengths = np.diff(edges)
    found = stages[
        np.arange(len(stages)), np.clip(edges[:, :-1], 0, row.units - 1), np.clip(lengths, 1, row.longest) - 1
    ]
    return np.asarray(np.where(lengths > 0, found, inf))


def moved(
    row: Row, pipeline: Pipeline, stages: Array, f: float, cuts: tuple[int, ...]
) -> tuple[float, tuple[int, ...]]:
    """Better cuts by moving some in succession together, one or two units either way, while that helps: what they come
    to, without messages, and the cuts."""
    places = len(cuts)
    blocks = [(a, b) for a in range(places) for b in range(a, min(places, a + TOGETHER))]
    shifts = np.zeros((4 * len(blocks), places), int)
    for i, (a, b) in enumerate(blocks):
        for j, shift in enumerate((-2, -1, 1, 2)):
            shifts[4 * i + j, a : b + 1] = shift

    def values(every: Index) -> Array:
        return step(of_ranks(pipeline, at(row, stages, every)), f)

    now = np.array(cuts, int)
    value = float(values(now[None])[0])
    for _ in range(MOVES if places else 0):
        tried = values(now + shifts)
        if not tried.min() < value:
            break
        value, now = float(tried.min()), now + shifts[int(tried.argmin())]
    return value, tuple(int(k) for k in now)


def least_fullest(row: Row, pipeline: Pipeline, stages: Array, measure: Array) -> float:
    """Seconds that the fullest rank takes at least, by what ranks may hold of a measure (of each unit, above 0)."""
    before = np.concatenate([[0.0], measure.cumsum()])
    fronts = [_front(row, pipeline, stages, before, r) for r in range(pipeline.ranks)]
    levels = np.unique(np.concatenate([seconds for seconds, _ in fronts]))
    total = before[-1] * (1 - 1e-9)

    def enough(level: float) -> bool:
        held = [size[seconds <= level].max(initial=-inf) for seconds, size in fronts]
        return bool(sum(held) >= total)

    low, high = 0, len(levels)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(float(levels[middle])) else (middle + 1, high)
    return float(levels[low]) if low < len(levels) else inf


def _front(row: Row, pipeline: Pipeline, stages: Array, before: Array, rank: int) -> tuple[Array, Array]:
    """What a rank may hold: seconds ascending, and the most of the measure that they allow."""
    seconds, size = np.zeros(1), np.zeros(1)
    for s in range(rank, pipeline.stages, pipeline.ranks):
        mine, held = _runs(row, stages[s], before, s, pipeline.stages)
        seconds, size = _best((seconds[:, None] + mine).ravel(), (size[:, None] + held).ravel())
    return seconds, size


def _runs(row: Row, costs: Array, before: Array, stage: int, count: int) -> tuple[Array, Array]:
    """The runs that a stage may be: their seconds and their measure. Those longer than what is priced count as the
    whole rest."""
    starts, lengths = np.indices(costs.shape)
    ends = starts + lengths + 1
    legal = (starts >= stage) & (ends <= row.units - (count - 1 - stage)) & np.isfinite(costs)
    legal &= (starts == 0) if stage == 0 else True
    longer = legal & (lengths == row.longest - 1)
    last = np.minimum(ends, row.units)
    size = before[np.where(longer, row.units, last)] - before[starts]
    if stage == count - 1:
        legal &= (ends == row.units) | longer
    return _best(costs[legal], size[legal])


def _best(seconds: Array, size: Array) -> tuple[Array, Array]:
    """Without those that others beat in both."""
    order = np.lexsort((-size, seconds))
    seconds, size = seconds[order], size[order]
    most = np.maximum.accumulate(size) if len(size) else size
    kept = np.ones(len(size), bool)
    kept[1:] = most[1:] > most[:-1]
    return seconds[kept], size[kept]


def even(row: Row, pipeline: Pipeline, stages: Array, f: float, cuts: tuple[int, ...]) -> Array:
    """Shares of ranks at which a unit more costs all ranks the same, about these cuts."""
    n = row.longest - 1
    edges = np.array([0, *cuts, row.units])
    starts, lengths = edges[:-1], np.minimum(np.diff(edges) - 1, n)
    every = np.arange(len(stages))
    wide = stages[every, starts, np.minimum(lengths + 1, np.minimum(n, row.units - starts - 1))]
    grows = wide - stages[every, starts, np.maximum(lengths - 1, 0)]
    each = of_ranks(pipeline, np.where(np.isfinite(grows), grows, 0.0))
    each = np.maximum(each, 1e-3 * max(float(each.max()), 1e-30))
    total = (f * pipeline.ranks + 1 - f) / (1 / each).sum()
    shares = np.maximum(total / each - f, 0.0)
    return np.asarray(shares / shares.sum() if shares.sum() > 0 else np.full(len(each), 1 / len(each)))


def best_shares(planes: list[tuple[float, Array]], f: float, center: Array, width: float) -> tuple[float, Array]:
    """The shares of ranks, within a box, at which the lowest of some paths is highest, and how high. A path: what it
    comes to without the fullest rank, and what ranks take."""
    ranks = len(planes[0][1])
    scale = max(max(float(np.abs(g).max()) for _, g in planes), 1e-30)
    model = Model()
    height = model.add(cost=-1.0, low=-1e9)
    sides = width * np.maximum(center, 1 / ranks)
    shares = [
        model.add(low=max(0.0, float(c - w)), high=min(1.0, float(c + w))) for c, w in zip(center, sides, strict=True)
    ]
    model.row([(w, 1.0) for w in shares], low=1.0, high=1.0)
    for fixed, g in planes:
        terms = [(w, -(1 - f) * float(x) / scale) for w, x in zip(shares, g, strict=True)]
        model.row([(height, 1.0), *terms], high=fixed / scale)
    values = minimise(model).values
    if not len(values):
        return -inf, center
    found = np.clip(values[shares], 0.0, None)
    return float(values[height]) * scale, found / found.sum()


__all__ = ["PLANES", "PRECISION", "WIDTH", "best_shares", "even", "least_fullest", "moved", "of_ranks", "step"]
