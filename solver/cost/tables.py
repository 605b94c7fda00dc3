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

    def _inside(self, places: Sequence[Any]) -> Any:
        """Logarithm of seconds by the corners of the cell around each place."""
        low, part = [], []
        for place, axis in zip(places, self.axes):
            i = np.clip(np.searchsorted(axis, place, side="right") - 1, 0, max(len(axis) - 2, 0))
            width = axis[np.minimum(i + 1, len(axis) - 1)] - axis[i]
            low.append(i)
            part.append(np.where(width > 0, (place - axis[i]) / np.where(width > 0, width, 1.0), 0.0))
        total: Any = 0.0
        for corner in product((0, 1), repeat=len(self.axes)):
            weight: Any = 1.0
            for up, p in zip(corner, part):
                weight = weight * (p if up else 1 - p)
            index = tuple(np.minimum(i + up, len(a) - 1) for i, up, a in zip(low, corner, self.axes))
            total = total + weight * self.seconds[index]
        return total


def _never_less(seconds: Any) -> Any:
    """The least of all places that are no smaller on any axis."""
    for axis in range(seconds.ndim):
        seconds = np.flip(np.minimum.accumulate(np.flip(seconds, axis), axis), axis)
    return seconds
