"""What is known of one candidate with stages while it is solved, and its ranks at some cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from autopar.solver.backend import Model, minimise
from autopar.solver.placed import Placed, runs
from autopar.solver.problem import (
    AGAIN,
    COMPUTE,
    EXPOSED,
    HIDDEN,
    SAVED,
    STATIC,
    TRANSIENT,
    Array,
    seconds,
)
from autopar.solver.segments import Priced, Row
from autopar.solver.stage_bound import Cut, Prices, best_cut, good_cut, rank_share, run_bound

DEAREST = 1e6
"""Times the seconds of a rank: what the limit may be worth."""


@dataclass(eq=False)
class Staged:
    """What is known: prices, the bound that they give, and the fastest and leanest assignments found. ``lean``: which
    prices were visited for few bytes."""

    row: Row
    target_gap: float
    cutoff: float
    visited: list[tuple[Prices, Priced]] = field(default_factory=list)
    best: Placed | None = None
    leanest: Placed | None = None
    lean: list[int] = field(default_factory=list)
    timed_out: bool = False
    multipliers: tuple[Prices, ...] = ()
    cut: Cut = field(default_factory=lambda: Cut(0.0, inf, ()))

    def __post_init__(self) -> None:
        assert self.row.problem.pipeline is not None
        self.pipeline = self.row.problem.pipeline
        self.limit = self.row.problem.memory_limit
        self.share = min(1.0, self.pipeline.fill / self.pipeline.microbatches)
        self.stages = np.full((self.pipeline.stages, self.row.units, self.row.longest), -inf)
        self.chosen = [0] * self.pipeline.stages  # which prices a stage has, where ranks have several stages
        self._totals: dict[tuple[int, int, int], Array] = {}
        self._seen: dict[tuple[float, ...], int] = {}
        self.least: float | None = None  # bytes that no assignment's fullest rank goes below, once they are known
        self.unfit = np.zeros(self.stages.shape, bool)  # runs that nothing found makes fit, for the choice of cuts

    def visit(self, prices: Prices) -> int:
        """Prices the row, without transients above the limit; its place among those visited. Nothing new where it was
        priced so before."""
        prices = replace(prices, high=min(prices.high, self.limit))
        key = (*prices.weights().tolist(), prices.time, prices.high)
        if key in self._seen:
            return self._seen[key]
        number = self._seen[key] = len(self.visited)
        priced = Priced(self.row, prices.weights(), prices.high)
        self.visited.append((prices, priced))
        if self.pipeline.virtual == 1 and prices.high >= self.limit:
            for s, n in enumerate(self.pipeline.in_flight):
                np.maximum(self.stages[s], run_bound(priced, prices, n, self.limit), out=self.stages[s])
        elif number == 0:
            self.choose(range(self.pipeline.stages), [0] * self.pipeline.stages)
        return number

    def choose(self, stages: Sequence[int], numbers: Sequence[int]) -> None:
        """Gives stages of a rank of several the prices that their bounds are by."""
        for s, number in zip(stages, numbers, strict=True):
            prices, priced = self.visited[number]
            self.chosen[s] = number
            self.stages[s] = rank_share(priced, prices, self.pipeline.virtual, self.limit)

    def total(self, number: int, first: int, last: int) -> Array:
        """What a run takes at prices visited."""
        key = (number, first, last)
        if key not in self._totals:
            self._totals[key] = self.visited[number][1].total(first, last)
        return self._totals[key]

    @property
    def seconds(self) -> float:
        """Of the best; infinite while none fits."""
        return inf if self.best is None else self.best.seconds

    def enough(self, gap: float) -> bool:
        """Whether the bound is within the gap of the best, or shows that the problem is not worth more work."""
        return self.cut.bound >= min(self.seconds * (1 - gap), self.cutoff)

    def add(self, placed: Placed) -> None:
        """Remembers an assignment."""
        if not np.isfinite(placed.seconds):
            return
        if placed.peak <= self.limit and placed.seconds < self.seconds:
            self.best = placed
        if self.leanest is None or placed.peak < self.leanest.peak:
            self.leanest = placed

    def bound(self) -> None:
        """The bound that the prices give, and its cuts."""
        beyond = None
        if self.pipeline.virtual > 1:
            beyond = np.stack([self.visited[k][1].beyond for k in self.chosen])
        cut = best_cut(self.row, self.pipeline, self.stages, beyond)
        if self.unfit.any():
            cut = replace(cut, cuts=self.fitting() or cut.cuts)
        if cut.bound > self.cut.bound or not self.multipliers:
            several = self.pipeline.virtual > 1
            every = [prices for prices, _ in self.visited]
            of_stages = zip(self.chosen, cut.shares * self.pipeline.virtual, strict=False)
            self.multipliers = tuple(
                [replace(every[k], share=share) for k, share in of_stages]
                if several
                else [p for p in every if p.high >= self.limit]
            )
        self.cut = Cut(max(cut.bound, self.cut.bound), cut.value, cut.cuts)

    def fitting(self) -> tuple[int, ...]:
        """Cuts without runs that nothing found makes fit; none where all have one."""
        return good_cut(self.row, self.pipeline, np.where(self.unfit, inf, self.stages))

    def prices(self, stage: int, first: int, last: int) -> Prices:
        """Those by which the bound of a run as a stage is highest."""
        if self.pipeline.virtual > 1:
            return self.visited[self.chosen[stage]][0]
        length, n = min(last - first, self.row.longest) - 1, self.pipeline.in_flight[stage]

        def bound(number: int) -> float:
            prices, priced = self.visited[number]
            if not prices.time or prices.high < self.limit:
                return -inf
            return float(run_bound(priced, prices, n, self.limit)[first, length])

        return self.visited[max(range(len(self.visited)), key=bound)][0]

    def ranks(self) -> list[Rank]:
        """The ranks of the pipeline at the cuts of the bound."""
        every = runs(self.row, self.cut.cuts)
        return [
            Rank(self, tuple(range(r, len(every), self.pipeline.ranks)), every[r :: self.pipeline.ranks])
            for r in range(self.pipeline.ranks)
        ]


@dataclass(eq=False)
class Rank:
    """The stages of one rank of the pipeline: their numbers, and their runs of units."""

    of: Staged
    stages: tuple[int, ...]
    runs: list[tuple[int, int]]

    def __post_init__(self) -> None:
        floors = [float(self.of.row.floors[i, self._length(i, j)]) for i, j in self.runs]
        self.in_flight = [self.of.pipeline.in_flight[s] for s in self.stages]
        self.room = self.of.limit - sum(floors) / len(floors)
        self._known: dict[int, tuple[float, float, float]] = {}

    def _length(self, first: int, last: int) -> int:
        return min(last - first, self.of.row.longest) - 1

    @property
    def bound(self) -> float:
        """Seconds that it takes at least, as the bound has it."""
        return sum(
            float(self.of.stages[s][i, self._length(i, j)]) for s, (i, j) in zip(self.stages, self.runs, strict=True)
        )

    def prices(self, alphas: Sequence[float], per_byte: float, again: float = 0.0, high: float = inf) -> list[Prices]:
        """Of each stage, at so many seconds a byte of the limit."""
        return [
            Prices(alpha, per_byte, high=high, saved=per_byte * n, again=again)
            for alpha, n in zip(alphas, self.in_flight, strict=True)
        ]

    def totals(self, number: int) -> list[tuple[Array, float]]:
        """Of each stage at prices visited, and the bytes that count against ``room``."""
        found = []
        for (i, j), n in zip(self.runs, self.in_flight, strict=True):
            total = self.of.total(number, i, j)
            found.append((total, float(total[STATIC] + n * total[SAVED])))
        return found

    def point(self, number: int) -> tuple[float, float]:
        """Bytes and seconds at prices visited."""
        return self._sums(number)[:2]

    def fits(self, number: int) -> bool:
        """Whether the bytes of prices visited are within the limit, as the bound has them."""
        return self._sums(number)[2] <= self.room

    def _sums(self, number: int) -> tuple[float, float, float]:
        """Bytes, seconds, and bytes held, at prices visited."""
        if number not in self._known:
            totals = self.totals(number)
            working = max(float(t[TRANSIENT] + t[AGAIN]) for t, _ in totals)
            held = sum(h for _, h in totals)
            self._known[number] = (held + working, sum(float(seconds(t)) for t, _ in totals), held)
        return self._known[number]

    def slack(self) -> float:
        """Seconds that the bound of this rank may grow at most, by what is known."""
        known = [self.point(k)[1] for k in range(len(self.of.visited)) if self.fits(k)]
        return max(0.0, min(known, default=inf) - self.bound)

    def highest(self) -> tuple[float, list[Prices]]:
        """The highest point under all planes: seconds, and the prices of each stage there. A plane: what a stage takes
        at prices visited, as a function of prices."""
        limit = self.of.limit
        planes = [self.totals(k) for k in range(len(self.of.visited))]
        planes = [p for p in planes if all(np.isfinite(t).all() for t, _ in p)]
        scale = max((sum(float(seconds(t)) for t, _ in p) for p in planes), default=1.0) or 1.0
        model = Model()
        price = model.add(high=DEAREST, cost=self.room / limit)
        columns = [(model.add(cost=-1.0, low=-1e9), model.add(high=1.0)) for _ in self.stages]
        for c, (height, alpha) in enumerate(columns):
            for plane in planes:
                t = plane[c][0] / scale
                terms = [(height, 1.0), (alpha, float(t[HIDDEN] - t[COMPUTE])), (price, -plane[c][1] / limit)]
                model.row(terms, high=float(t[EXPOSED] + t[HIDDEN]))
        solution = minimise(model)
        if not len(solution.values):
            return inf, []
        values = solution.values
        if values[price] > 0.99 * DEAREST:  # no mix of planes fits
            return inf, []
        alphas = [min(1.0, max(0.0, float(values[alpha]))) for _, alpha in columns]
        return -solution.objective * scale, self.prices(alphas, max(0.0, float(values[price])) * scale / limit)

    def take(self, prices: Sequence[Prices]) -> list[int]:
        """Prices its stages, and bounds them by that if it is better."""
        before = self.bound
        numbers = [self.of.visit(p) for p in prices]
        if len(self.stages) > 1:
            chosen = [self.of.chosen[s] for s in self.stages]
            self.of.choose(self.stages, numbers)
            if self.bound < before:
                self.of.choose(self.stages, chosen)
        return numbers

    def has_room(self) -> bool:
        """Whether at any prices visited it fits; at lean ones, where there are some."""
        numbers = self.of.lean or range(len(self.of.visited))
        return any(self.point(k)[0] <= self.of.limit for k in numbers)

    def fullest(self) -> tuple[int, tuple[int, int]]:
        """The stage that needs most bytes at the prices at which the rank needs fewest, and its run."""
        number = min(self.of.lean or range(len(self.of.visited)), key=lambda k: self.point(k)[0])
        needs = [held for _, held in self.totals(number)]
        most = needs.index(max(needs))
        return self.stages[most], self.runs[most]

    def ladder(self) -> list[int]:
        """Prices visited, from the fastest down to those of fewer bytes, of which none is beaten by two others."""
        points = sorted((*self.point(k), k) for k in range(len(self.of.visited)))
        hull: list[tuple[float, float, int]] = []
        for b, t, k in points:
            if not np.isfinite(t) or (hull and t >= hull[-1][1]):
                continue
            while len(hull) > 1 and _above(hull[-2], hull[-1], (b, t, k)):
                hull.pop()
            hull.append((b, t, k))
        return [k for _, _, k in reversed(hull)]


def _above(a: tuple[float, float, int], b: tuple[float, float, int], c: tuple[float, float, int]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


__all__ = ["Rank", "Staged"]
