"""Lower bounds of the step of a problem with stages, over all cuts and assignments that fit.

With M microbatches, f = fill / M and G[r] = M * t[r], a step takes ``f * (sum of G + M * sends) + (1 - f) * max of G``
(`stages`; that is no less for another f <= 1 in the place of one above it, as the sum is no less than the largest). A
stage of units [i, j) that keeps n microbatches and fits has, for prices p of a byte held (``per_byte``) and q of a byte
kept of a microbatch (``saved``), and every alpha in [0, 1],

    G >= exposed + alpha * compute + (1 - alpha) * hidden + p * static + q * saved - u * (limit - floor)

where u = max(p, q / n): u * (static + n * saved) is no less than what is added, and no more than u * (limit - floor),
with ``floor`` the least largest transient of the run. The least of the right side is `Row`'s. So prices made for one
stage hold for all, and a stage's G is at least the largest of all of them (and zero). Without seconds (``time`` 0) a
value above zero shows that the run cannot be that stage. Transients above the limit may be left out (``high``).

Bytes made again count only in the fullest unit, W with its transient, and W >= floor. At a price w of each of them
(``again``) a run of l units adds w * l * W at most, so that what is added is no more than u * limit - (u - w * l) * W:
where w * l <= u, W may be replaced by floor, and beyond by limit.

The least step over all cuts then is a shortest path over (stage, unit), for each limit of the largest G; runs longer
than those priced cost no less than their beginning. The limits are searched by halving (`PRECISION`).

Where ranks have several stages (``virtual``), a rank's bytes are the sum over its stages, so that one price u must hold
for all of them: prices then come one a stage, in order, equal in ``per_byte`` on each rank and with ``saved`` no more
than ``per_byte * n``; each stage takes its share of ``limit`` and ``floor``, of which a rank has at least their mean.
What then of the fullest rank can be said is in `balance`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, inf

import numpy as np

from autopar.solver import balance
from autopar.solver.evaluate import Evaluation
from autopar.solver.lagrangian import Multipliers
from autopar.solver.problem import AGAIN, SAVED, Array, Index, Pipeline
from autopar.solver.segments import Priced, Row

PRECISION = 1e-4
"""Of the search over limits of the fullest rank, relative."""
HALVINGS = 40
ROUNDING = 1e-9
"""Relative difference that another order of additions explains."""


@dataclass(frozen=True)
class Prices(Multipliers):
    """Multipliers with prices of their own for a byte kept of one microbatch, ``saved``, and for a byte that a unit
    makes again, ``again`` (seconds a byte). ``share``: of the rank in the fullest one, where ranks have several
    stages."""

    saved: float = 0.0
    again: float = 0.0
    share: float = 0.0

    def weights(self) -> Array:
        """Of every resource."""
        weights = super().weights()
        weights[[SAVED, AGAIN]] = self.saved, self.again
        return weights

    def of_limit(self, in_flight: float) -> float:
        """What a byte of the limit is worth to a stage that keeps so many microbatches."""
        return max(self.per_byte, self.saved / in_flight) if self.saved else self.per_byte


def row_of(evaluation: Evaluation) -> Row:
    """The units of a problem with a pipeline in a row; runs of up to three times the mean are priced."""
    problem = evaluation.problem
    assert problem.pipeline is not None
    return Row(evaluation, 3 * ceil(len(problem.units) / problem.pipeline.stages) + 4)


def stages_bound(evaluation: Evaluation, multipliers: Iterable[Multipliers], *, even: bool = False) -> float:
    """Seconds that no cuts and no assignment within the limit beat, from multipliers alone: any of a problem whose
    ranks have one stage, one a stage where they have several (0 where these do not fit together). ``even``: the
    fullest rank is only compared with the plain mean of those with several stages, and what it holds."""
    problem, row = evaluation.problem, row_of(evaluation)
    pipeline, limit = problem.pipeline, problem.memory_limit
    assert pipeline is not None
    every = [p for p in map(prices_of, multipliers) if p.high >= limit]
    if row.units < pipeline.stages or not every:
        return inf if every else 0.0
    ready = {p: Priced(row, p.weights(), p.high) for p in dict.fromkeys(every)}
    if pipeline.virtual == 1:
        of = [np.max([run_bound(ready[p], p, n, limit) for p in ready], axis=0) for n in pipeline.in_flight]
    elif not _one_price_a_rank(pipeline, every):
        return 0.0
    else:
        of = [rank_share(ready[p], p, pipeline.virtual, limit) for p in every]
        return best_cut(row, pipeline, np.stack(of), np.stack([ready[p].beyond for p in every]), even=even).bound
    return best_cut(row, pipeline, np.stack(of)).bound


def free_bound(evaluation: Evaluation, multipliers: Iterable[Multipliers]) -> tuple[float, tuple[Prices, ...]]:
    """Seconds that nothing beats even without a memory limit, by the largest share of compute among some multipliers,
    and the multipliers to give it again."""
    assert evaluation.problem.pipeline is not None
    alpha = max((m.alpha for m in multipliers if m.time), default=1.0)
    found = (Prices(alpha, 0.0),) * (
        evaluation.problem.pipeline.stages if evaluation.problem.pipeline.virtual > 1 else 1
    )
    problem = replace(evaluation.problem, memory_limit=inf)
    return stages_bound(evaluation.of_limit(problem), found), found


def prices_of(multipliers: Multipliers) -> Prices:
    """The same as prices: a byte kept of a microbatch costs what one held does, if nothing else is said."""
    m = multipliers
    return m if isinstance(m, Prices) else Prices(m.alpha, m.per_byte, m.low, m.high, m.time, saved=m.per_byte)


def _one_price_a_rank(pipeline: Pipeline, prices: Sequence[Prices]) -> bool:
    if len(prices) != pipeline.stages or not all(p.time for p in prices):
        return False
    every = list(zip(prices, pipeline.in_flight, strict=True))
    return all(
        p.per_byte == prices[s % pipeline.ranks].per_byte and p.saved <= p.per_byte * n * (1 + ROUNDING)
        for s, (p, n) in enumerate(every)
    )


def run_bound(priced: Priced, prices: Prices, in_flight: float, limit: float) -> Array:
    """What each run takes at least as a stage by itself, [starts, lengths]: seconds of all microbatches."""
    worth = prices.of_limit(in_flight)
    value = priced.least - _most(priced.row, worth, prices.again, limit)
    if not prices.time:
        value = np.where(value > ROUNDING * worth * limit, inf, 0.0)
    return np.asarray(np.where(priced.row.floors > limit, inf, np.maximum(value, 0.0)))


def rank_share(priced: Priced, prices: Prices, virtual: int, limit: float) -> Array:
    """What each run adds at least to the seconds of a rank of several stages, [starts, lengths]."""
    share = _most(priced.row, prices.per_byte, prices.again * virtual, limit) / virtual
    value = priced.least - share
    return np.asarray(np.where(priced.row.floors > limit, inf, value))


def _most(row: Row, worth: float, again: float, limit: float) -> Array:
    """What the bytes of each run that fits are worth at most, [starts, lengths]."""
    if not worth:
        return np.zeros_like(row.floors)
    left = worth - again * np.arange(1, row.longest + 1)
    return np.asarray(worth * limit - np.where(left >= 0, left * row.floors, left * limit))


@dataclass(frozen=True, eq=False)
class Cut:
    """Cuts whose step has the least bound found, ``value``; no cuts' is below ``bound`` (both in seconds). ``shares``:
    of ranks in the fullest, where they have several stages."""

    bound: float
    value: float
    cuts: tuple[int, ...]
    shares: tuple[float, ...] = ()


def best_cut(row: Row, pipeline: Pipeline, stages: Array, beyond: Array | None = None, *, even: bool = False) -> Cut:
    """From [stages, starts, lengths]: what each run takes at least as each stage. ``beyond``: [stages, units + 1], what
    runs that are longer than those priced grow by at least, added up along the row (nothing, if not given)."""
    sends = pipeline.fill * row.sends
    f = min(1.0, pipeline.fill / pipeline.microbatches)
    paths = _Paths(row, stages, sends, beyond)
    low, cuts = paths.least_largest()
    if low == inf:
        return Cut(inf, inf, (), (1 / pipeline.ranks,) * pipeline.ranks)
    if pipeline.virtual > 1:
        value, cuts = balance.moved(row, pipeline, stages, f, cuts)
        bound, shares = _by_shares(paths, row, pipeline, f, cuts, 0 if even else balance.PLANES)
        bound = max(0.0, bound, _by_measure(paths, row, pipeline, f))
        return Cut(bound, value, cuts, tuple(shares.tolist()))
    paths.scaled([f] * len(stages))

    def at(most: float) -> tuple[float, float, tuple[int, ...]]:
        total, cuts = paths.least_sum(most)
        return total, float(paths.of(cuts).max()), cuts

    total, largest, cuts = at(inf)
    best = Cut(0.0, total + (1 - f) * largest, cuts)
    open_ = [(total + (1 - f) * low, low, largest, total)] if largest > low else []
    closed = best.value
    for _ in range(HALVINGS):
        if not open_:
            break
        worst = min(open_)
        if worst[0] >= best.value * (1 - PRECISION):
            break
        open_.remove(worst)
        _, below, above, total = worst
        middle = (below + above) / 2
        sum_, largest, cuts = at(middle)
        value = sum_ + (1 - f) * largest
        if value < best.value:
            best = Cut(0.0, value, cuts)
        closed = min(closed, value)
        if above > middle:
            open_.append((total + (1 - f) * middle, middle, above, total))
        if largest > below:
            open_.append((sum_ + (1 - f) * below, below, largest, sum_))
    return Cut(min([closed, *(o[0] for o in open_)]), best.value, best.cuts)


def cut_bounds(row: Row, pipeline: Pipeline, stages: Array, cuts: Index) -> Array:
    """Seconds that each of some cuts [n, stages - 1] takes at least, without messages."""
    f = min(1.0, pipeline.fill / pipeline.microbatches)
    return balance.step(balance.of_ranks(pipeline, balance.at(row, stages, cuts)), f)


def _by_shares(
    paths: _Paths, row: Row, pipeline: Pipeline, f: float, cuts: tuple[int, ...], tries: int
) -> tuple[float, Array]:
    """The bound where the fullest rank is no less than a weighted mean, at the best weights found, and these: from
    those at which no rank of these cuts would rather give a unit to another, on by cutting planes within ever smaller
    boxes. With no ``tries``: at equal weights."""
    shares = np.full(pipeline.ranks, 1 / pipeline.ranks)
    if tries:
        shares = balance.even(row, pipeline, paths.stages, f, cuts)
    best, width, planes = -inf, balance.WIDTH, list[tuple[float, Array]]()
    center = shares
    for _ in range(max(1, tries)):
        paths.scaled((f + (1 - f) * np.tile(shares, pipeline.virtual)).tolist())
        total, found = paths.least_sum()
        if total > best:
            best, center = total, shares
        else:
            width /= 2
        ranks = balance.of_ranks(pipeline, paths.of(found))
        planes.append((total - (1 - f) * float(shares @ ranks), ranks))
        height, shares = balance.best_shares(planes, f, center, width)
        if height - best <= balance.PRECISION * abs(best):
            break
    return best, center


def _by_measure(paths: _Paths, row: Row, pipeline: Pipeline, f: float) -> float:
    """The bound where the fullest rank holds its part of the units, measured by what a run grows by with each."""
    measure = np.diff(paths.beyond.mean(0))
    measure = measure + 1e-6 * (measure.sum() or 1.0) / row.units
    paths.scaled([f] * len(paths.stages))
    return paths.least_sum()[0] + (1 - f) * balance.least_fullest(row, pipeline, paths.stages, measure)


def good_cut(row: Row, pipeline: Pipeline, stages: Array) -> tuple[int, ...]:
    """Cuts of a step that has a low bound, found fast; none where there are none."""
    if pipeline.virtual == 1:
        return best_cut(row, pipeline, stages).cuts
    low, cuts = least_largest(row, pipeline, stages)
    f = min(1.0, pipeline.fill / pipeline.microbatches)
    return balance.moved(row, pipeline, stages, f, cuts)[1] if low < inf else ()


def least_largest(row: Row, pipeline: Pipeline, stages: Array) -> tuple[float, tuple[int, ...]]:
    """The least over all cuts of the largest stage, and such cuts."""
    return _Paths(row, stages, np.zeros_like(row.floors)).least_largest()


def least_sum(row: Row, stages: Array) -> tuple[float, tuple[int, ...]]:
    """The least sum of stages over all cuts, and such cuts."""
    return _Paths(row, stages, np.zeros_like(row.floors)).least_sum()


class _Paths:
    """Shortest paths over the cuts of a row. All costs by end: [stages, ends, lengths], infinite where a run would
    begin before the row does."""

    def __init__(self, row: Row, stages: Array, sends: Array, beyond: Array | None = None) -> None:
        self.stages = stages
        self.beyond = np.zeros((len(stages), row.units + 1)) if beyond is None else beyond
        self.units, self.lengths = row.units, row.longest
        ends, lengths = np.arange(row.units + 1)[:, None], np.arange(1, row.longest + 1)[None, :]
        starts = ends - lengths
        self._starts = np.maximum(starts, 0)
        at = (self._starts, np.broadcast_to(lengths - 1, starts.shape))
        self._stages = np.where(starts >= 0, stages[:, at[0], at[1]], inf)
        self._sends = sends[at]
        self._cost, self._grows = self._stages, self.beyond

    def scaled(self, shares: Sequence[float]) -> None:
        """What of each stage counts in a sum, beside its messages."""
        with np.errstate(invalid="ignore"):  # a share of nothing
            self._cost = np.where(np.isfinite(self._stages), np.array(shares)[:, None, None] * self._stages, inf)
            self._cost = self._cost + self._sends
        self._grows = np.array(shares)[:, None] * self.beyond

    def least_sum(self, most: float = inf) -> tuple[float, tuple[int, ...]]:
        """The least sum of costs where no stage takes more than ``most``."""
        cost = self._cost if most == inf else np.where(self._stages <= most, self._cost, inf)
        return self._walk(cost, np.add)

    def least_largest(self) -> tuple[float, tuple[int, ...]]:
        """The least largest stage."""
        return self._walk(self._stages, np.maximum)

    def of(self, cuts: tuple[int, ...]) -> Array:
        """What each stage takes."""
        found = []
        for s, (i, j) in enumerate(pairwise((0, *cuts, self.units))):
            n = min(j - i, self.lengths)
            found.append(self.stages[s, i, n - 1] + self.beyond[s, j] - self.beyond[s, i + n])
        return np.array(found)

    def _walk(self, cost: Array, join: np.ufunc) -> tuple[float, tuple[int, ...]]:
        """Joins costs along the best path: its cost, and the cuts (none where there is no path)."""
        best = [np.where(np.arange(self.units + 1) == 0, 0.0 if join is np.add else -inf, inf)]
        grows = self._grows if join is np.add else np.zeros_like(self._grows)
        for c, more in zip(cost, grows, strict=True):
            now = join(best[-1][self._starts], c).min(1, initial=inf)
            best.append(np.minimum(now, self._longer(best[-1], c, more, join)))
        total = float(best[-1][self.units])
        if not np.isfinite(total):
            return total, ()
        end, cuts = self.units, []
        for s in range(len(cost) - 1, 0, -1):
            end = self._start(best[s], cost[s], grows[s], join, end, best[s + 1][end])
            cuts.append(end)
        return total, tuple(reversed(cuts))

    def _longer(self, before: Array, cost: Array, grows: Array, join: np.ufunc) -> Array:
        """Paths whose last run is longer than those priced: it costs what its beginning does, and what it grows by."""
        found = np.full(self.units + 1, inf)
        n = self.lengths
        if n < self.units:
            ends = join(before[: self.units + 1 - n], cost[n:, -1])  # of a run of n units from each start
            found[n + 1 :] = np.minimum.accumulate(ends - grows[n:])[:-1] + grows[n + 1 :]
        return found

    def _start(self, before: Array, cost: Array, grows: Array, join: np.ufunc, end: int, value: float) -> int:
        """Where the last run of the best path to ``end`` begins."""
        row = join(before[self._starts[end]], cost[end])
        if row.min() == value:
            return int(self._starts[end][row.argmin()])
        n = self.lengths
        return int((join(before[: end - n], cost[n:end, -1]) - grows[n:end]).argmin())


__all__ = [
    "Cut",
    "Prices",
    "best_cut",
    "cut_bounds",
    "free_bound",
    "good_cut",
    "least_largest",
    "least_sum",
    "prices_of",
    "rank_share",
    "row_of",
    "run_bound",
    "stages_bound",
]
