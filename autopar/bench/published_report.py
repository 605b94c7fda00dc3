"""What the prices of published rows are worth: errors, fits, ranks and regret, and the targets beside them.

Repeats of one layout by one source count once: predicted and measured figures are averaged over them first. An error
is (predicted - measured) / measured; its bias is the mean with its sign, the other figures are of its size.

>>> errors([("a", 1.1, 1.0), ("b", 0.8, 1.0)])
Errors(layouts=2, median=0.15, p90=0.19, worst=0.2, bias=-0.05, worst_at='b')
>>> spearman([1.0, 2.0, 4.0], [10.0, 30.0, 20.0])
0.5
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.bench.published_rows import RAN, Row

if TYPE_CHECKING:
    from autopar.pricing import PricedRow

LEAST_TENTH = 3  # layouts that the best tenth of a sweep has at least
DIGITS = 4  # of a relative error: more would be noise


@dataclass(frozen=True)
class Result:
    """A row with its price, or with the reason why it has none. ``took_s``: processor seconds that pricing it took."""

    row: Row
    priced: PricedRow | None = None
    reason: str | None = None
    took_s: float = 0.0

    @property
    def step_s(self) -> float | None:
        """Predicted seconds of a step; None where not priced."""
        return None if self.priced is None else self.priced.step_s

    @property
    def peak_gib(self) -> float | None:
        """Predicted GiB of the fullest rank; None where not priced."""
        return None if self.priced is None else self.priced.peak_gib

    @property
    def time_error(self) -> float | None:
        """Relative, with its sign; None where not priced or not measured."""
        return _relative(self.step_s, self.row.step_time_s)

    @property
    def memory_error(self) -> float | None:
        """Relative, with its sign; None where not priced or not measured."""
        return _relative(self.peak_gib, self.row.peak_mem_gib)


@dataclass(frozen=True)
class Errors:
    """Of some layouts, as fractions; ``worst_at``: the first row of the worst."""

    layouts: int
    median: float
    p90: float
    worst: float
    bias: float
    worst_at: str


@dataclass(frozen=True)
class Fits:
    """How many of the rows that ran, or ran out of memory, are predicted to fit, or not to."""

    ran_fit: int = 0
    ran_not: int = 0
    failed_fit: int = 0
    failed_not: int = 0

    @property
    def counts(self) -> Mapping[str, int]:
        """Rows: all, those that ran, those that failed."""
        ran, failed = self.ran_fit + self.ran_not, self.failed_fit + self.failed_not
        return {"all": ran + failed, "ran": ran, "failed": failed}

    @property
    def right(self) -> Mapping[str, float | None]:
        """The fraction of each that is predicted right."""
        right = {"all": self.ran_fit + self.failed_not, "ran": self.ran_fit, "failed": self.failed_not}
        return {name: round(right[name] / n, DIGITS) if n else None for name, n in self.counts.items()}


@dataclass(frozen=True)
class Sweep:
    """Layouts of one model, length and number of GPUs by one source. ``regret``: how much slower than the fastest
    measured is the one predicted to be fastest. ``place``: of the fastest measured among the predicted, from 1;
    ``within``: the best tenth, at least three. ``choice``: the fastest of those predicted to fit, failed runs included;
    its own regret, or None where that run failed."""

    source: str
    model: str
    gpus: int
    seq: int
    layouts: int
    spearman: float | None
    regret: float
    place: int
    within: int
    best: str
    predicted_best: str
    choice: str | None
    choice_regret: float | None


def errors(layouts: Iterable[tuple[str, float, float]]) -> Errors | None:
    """Of (name, predicted, measured) figures; None of none."""
    signed = {name: predicted / measured - 1 for name, predicted, measured in layouts}
    if not signed:
        return None
    sizes = {name: abs(error) for name, error in signed.items()}
    worst = max(sizes, key=lambda name: sizes[name])
    figures = (statistics.median(sizes.values()), float(np.percentile([*sizes.values()], 90)), sizes[worst])
    median, p90, most, bias = (round(x, DIGITS) for x in (*figures, statistics.fmean(signed.values())))
    return Errors(len(signed), median, p90, most, bias, worst)


def time_errors(results: Iterable[Result]) -> Errors | None:
    """Of step seconds, over the rows that are sound for it."""
    return errors(_averaged(_times(results)))


def time_errors_of_rows(results: Iterable[Result]) -> Errors | None:
    """The same with nothing averaged: a layout measured on many numbers of GPUs counts as often."""
    return errors((r.row.id, predicted, measured) for r, predicted, measured in _times(results) if measured)


def _times(results: Iterable[Result]) -> Iterable[tuple[Result, float, float | None]]:
    return ((r, r.priced.step_s, r.row.step_time_s) for r in results if r.priced and r.row.use.time)


def memory_errors(results: Iterable[Result]) -> Errors | None:
    """Of peak GiB, over the rows that are sound for it."""
    return errors(
        _averaged((r, r.priced.peak_gib, r.row.peak_mem_gib) for r in results if r.priced and r.row.use.memory)
    )


def fits(results: Iterable[Result]) -> Fits:
    """Predicted against what happened, over the rows that are sound for it."""
    pairs = [(r.row.status == RAN, r.priced.fits) for r in results if r.priced and r.row.use.fits]
    return Fits(*(pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))))


def sweeps(results: Iterable[Result]) -> list[Sweep]:
    """Every sweep with at least two layouts to rank."""
    groups: dict[tuple[str, str, int, int], list[Result]] = defaultdict(list)
    for result in results:
        if result.priced and (result.row.use.rank or result.row.use.fits):
            groups[result.row.source, result.row.model, result.row.gpus, result.row.seq].append(result)
    found = (_sweep(key, group) for key, group in groups.items())
    return [sweep for sweep in found if sweep is not None]


def _sweep(key: tuple[str, str, int, int], group: Sequence[Result]) -> Sweep | None:
    """Seconds a sequence, so that layouts with other batches compare."""
    ranked = [r for r in group if r.row.use.rank]
    layouts = _averaged(
        (r, r.priced.step_s / r.row.gbs, r.row.step_time_s and r.row.step_time_s / r.row.gbs)
        for r in ranked
        if r.priced
    )
    if len(layouts) < 2:
        return None
    measured = {name: figure for name, _, figure in layouts}
    fastest = min(measured.values())
    best = min(measured, key=lambda name: measured[name])
    predicted = min(layouts, key=lambda layout: layout[1])[0]
    fitting = [(r.priced.step_s / r.row.gbs, r.row.id, r.row) for r in group if r.priced and r.priced.fits]
    choice = min(fitting)[2] if fitting else None
    regret = choice.step_time_s / choice.gbs / fastest - 1 if choice and choice.step_time_s else None
    return Sweep(
        *key,
        layouts=len(layouts),
        spearman=spearman([x for _, x, _ in layouts], [y for _, _, y in layouts]),
        regret=round(measured[predicted] / fastest - 1, DIGITS),
        place=1 + sorted(layouts, key=lambda layout: layout[1]).index(next(x for x in layouts if x[0] == best)),
        within=max(LEAST_TENTH, len(layouts) // 10),
        best=best,
        predicted_best=predicted,
        choice=None if choice is None else choice.id,
        choice_regret=None if regret is None else round(regret, DIGITS),
    )


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Rank correlation, equal values sharing their mean rank; None where one side is constant."""
    first, second = _ranks(left), _ranks(right)
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return round(float(np.corrcoef(first, second)[0, 1]), DIGITS)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(x) + (order.count(x) - 1) / 2 for x in values]


def _averaged(figures: Iterable[tuple[Result, float, float | None]]) -> list[tuple[str, float, float]]:
    """(first row, predicted, measured) of each layout, means over its repeats."""
    groups: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for result, predicted, measured in figures:
        if measured is not None:
            groups[result.row.layout_key].append((result.row.id, predicted, measured))
    return [
        (rows[0][0], statistics.fmean(p for _, p, _ in rows), statistics.fmean(m for _, _, m in rows))
        for rows in groups.values()
    ]


def _relative(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1
