"""The fewest bytes of the fullest rank of a pipeline, over all cuts: what none goes below, and lean assignments."""

from __future__ import annotations

from math import inf

import numpy as np

from autopar.solver.placed import cheapest, runs
from autopar.solver.problem import AGAIN, SAVED, STATIC, TRANSIENT, Array
from autopar.solver.segments import Priced, Row
from autopar.solver.stage_bound import Prices, least_largest, least_sum
from autopar.solver.staged import Staged

CAPS = 5
"""Sizes of transients that are told apart where memory is short."""
KEPT = 2
"""Numbers of microbatches in flight for which the fewest bytes are found."""


def least_bytes(staged: Staged) -> float:
    """Bytes that no assignment's fullest rank goes below; looks for lean assignments when first asked."""
    if staged.least is None:
        staged.least = _least_bytes(staged)
    return staged.least


def _least_bytes(staged: Staged) -> float:
    """Bytes that no assignment's fullest rank goes below; looks for lean assignments on the way.

    A stage whose largest transient is above one cap and not above the next holds at least what is least without
    transients above the next, and the lower cap."""
    pipeline = staged.pipeline
    row = Row(staged.row.evaluation, staged.row.units)
    highs = [*reversed(caps(row, inf)), inf]
    some = some_in_flight(staged)
    again = pipeline.ranks / row.units
    plain = [[_held(row, n, 0.0, high) for n in some] for high in highs]
    priced = [[_held(row, n, again, high) for n in some] for high in highs]
    counted = again * pipeline.virtual * np.arange(1, row.longest + 1)
    held = []
    for n in pipeline.in_flight:
        best = np.full_like(row.floors, inf)
        for low, without, of in zip((0.0, *highs), plain, priced, strict=False):
            working = np.maximum(low, row.floors) / pipeline.virtual
            least = _between(n, some, [p.least for p in of]) / np.maximum(1.0, counted)
            least = least + np.maximum(0.0, 1 - counted) * working
            best = np.minimum(best, np.maximum(least, _between(n, some, [p.least for p in without]) + working))
        held.append(best)
    if pipeline.virtual == 1:
        bound, cuts = least_largest(row, pipeline, np.stack(held))
    else:
        total, cuts = least_sum(row, np.stack(held))
        bound = max(0.0, total / pipeline.ranks)
    if bound < inf:
        _leanest(staged, row, cuts, priced, some)
    return bound


def _between(in_flight: float, some: list[float], least: list[Array]) -> Array:
    """The fewest bytes for a number of microbatches between two for which they are known: as the least of sums that
    are linear in it they are concave, so no less than on the line between."""
    high = next(i for i, m in enumerate(some) if m >= in_flight)
    if some[high] == in_flight:
        return least[high]
    share = (in_flight - some[high - 1]) / (some[high] - some[high - 1])
    return (1 - share) * least[high - 1] + share * least[high]


def _held(row: Row, in_flight: float, again: float, high: float) -> Priced:
    """The fewest bytes, without transients above ``high``."""
    return Priced(row, Prices(0.0, 1.0, time=0.0, saved=in_flight, again=again).weights(), high)


def _leanest(staged: Staged, row: Row, cuts: tuple[int, ...], priced: list[list[Priced]], some: list[float]) -> None:
    """The assignment along these cuts where every stage has the cap with which it needs the fewest bytes."""
    found: list[Priced] = []
    for n, (i, j) in zip(staged.pipeline.in_flight, runs(row, cuts), strict=True):
        near = min(range(len(some)), key=lambda k: abs(some[k] - n))

        def nbytes(p: Priced, n: float = n, i: int = i, j: int = j) -> float:
            t = p.total(i, j)
            return float(t[STATIC] + n * t[SAVED] + t[TRANSIENT] + t[AGAIN])

        best = min((of[near] for of in priced), key=nbytes)
        found += [best] * (j - i)
    staged.add(cheapest(row, cuts, found))


def caps(row: Row, limit: float) -> list[float]:
    """Transients at which a range of them may end, below the limit, descending: some of those that units have."""
    every = row.evaluation.transients()
    every = every[(every < limit) & (every >= max(float(row.floors[:, 0].min()), 1e-12))]
    found = list[float]()
    for size in every[::-1].tolist():
        if not found or size <= found[-1] / 2:
            found.append(size)
    return found[-CAPS:]


def some_in_flight(staged: Staged) -> list[float]:
    """Some of the numbers of microbatches that stages keep, the least and the most among them."""
    every = sorted(set(staged.pipeline.in_flight))
    return sorted({every[round(i)] for i in np.linspace(0, len(every) - 1, min(len(every), KEPT))})


__all__ = ["caps", "least_bytes", "some_in_flight"]
