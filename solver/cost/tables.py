"""Measured tables, interpolated in logarithms: seconds by size, seconds by shape.

>>> curve = Samples.of([(1e3, 1e-5), (1e6, 1e-3)])
>>> [f"{x:.2g}" for x in (curve.at(1e2), curve.at(1e5), curve.above(2e6))]
['1e-05', '0.00022', '0.002']
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Samples:
    """A curve through points, in logarithms of both; constant beyond its ends."""

    places: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]

    @staticmethod
    def of(points: Iterable[Sequence[float]]) -> Samples:
        """Through points (place, value), places ascending."""
        places, values = np.log(np.array(list(points), dtype=float)).T
        return Samples(places, values)

    def at(self, place: Any) -> Any:
        """Values at places (numbers or arrays), those of the ends beyond them."""
        return np.exp(np.interp(np.log(np.maximum(place, 1e-300)), self.places, self.values))

    def above(self, place: Any) -> Any:
        """As `at`, but proportional to the place beyond the last point: seconds by bytes."""
        return self.at(place) * np.maximum(1.0, np.asarray(place) / np.exp(self.places[-1]))


FURTHER = 64  # times smaller than measured a table reaches
CORNERS = np.array(list(product((0, 1), repeat=4)))


@dataclass(frozen=True)
class Grid:
    """Seconds of matmuls by batch, m, n, k: linear in the logarithms between the points.

    A larger matmul never takes less: seconds are lowered to the least of all larger ones. Beyond the largest sizes
    seconds grow as the FLOPs do; below the smallest they fall as they do between the two smallest. More matrices in a
    batch than measured count as more rows: tables show that ``batch * m`` is what fills a device.
    """

    axes: tuple[np.ndarray[Any, Any], ...]
    seconds: np.ndarray[Any, Any]

    @staticmethod
    def of(axes: Sequence[Sequence[int]], rates: Sequence[float]) -> Grid:
        """From FLOP/s, the last axis fastest."""
        logs = [np.log(np.array(a, dtype=float)) for a in axes]
        flops = np.log(2) + sum(np.meshgrid(*logs, indexing="ij"))
        seconds = _never_less(flops - np.log(np.array(rates, dtype=float)).reshape(flops.shape))
        for i, axis in enumerate(logs):
            if i and len(axis) > 1:
                first, second = (np.take(seconds, [j], i) for j in (0, 1))
                slope = np.clip((second - first) / (axis[1] - axis[0]), 0.0, 1.0)
                seconds = np.concatenate([first - slope * np.log(FURTHER), seconds], i)
                logs[i] = np.concatenate([[axis[0] - np.log(FURTHER)], axis])
        return Grid(tuple(logs), _never_less(seconds))

    def at(self, batch: Any, m: Any, n: Any, k: Any) -> Any:
        """Seconds of shapes (numbers or arrays)."""
        most = np.exp(self.axes[0][-1])
        rows = m * np.maximum(1.0, batch / most)
        wanted = [np.log(np.asarray(x, dtype=float)) for x in np.broadcast_arrays(np.minimum(batch, most), rows, n, k)]
        beyond = sum(np.maximum(x - axis[-1], 0.0) for x, axis in zip(wanted, self.axes))
        return np.exp(self._inside([np.clip(x, axis[0], axis[-1]) for x, axis in zip(wanted, self.axes)]) + beyond)

    def _inside(self, places: Any) -> Any:
        """Logarithm of seconds at places, an array for each axis, by the corners of the cell around each."""
        low, part = [], []
        for place, axis in zip(places, self.axes):
            i = np.clip(np.searchsorted(axis, place, side="right") - 1, 0, max(len(axis) - 2, 0))
            low.append(i)
            part.append((place - axis[i]) / (axis[i + 1] - axis[i]) if len(axis) > 1 else place * 0.0)
        ups = CORNERS.reshape(CORNERS.shape + (1,) * np.ndim(places[0]))
        weights = np.where(ups, part, 1 - np.asarray(part)).prod(1)
        index = tuple(np.minimum(i + ups[:, j], len(axis) - 1) for j, (i, axis) in enumerate(zip(low, self.axes)))
        return (weights * self.seconds[index]).sum(0)


def _never_less(seconds: Any) -> Any:
    """The least of all places that are no smaller on any axis."""
    for axis in range(seconds.ndim):
        seconds = np.flip(np.minimum.accumulate(np.flip(seconds, axis), axis), axis)
    return seconds
