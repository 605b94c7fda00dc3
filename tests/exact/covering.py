"""Pairwise covering arrays: few rows in which every legal pair of values of two factors is met."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def covering(factors: Mapping[str, Sequence[Any]], legal: Callable[[Row], bool], draw: random.Random) -> list[Row]:
    """Rows of a value each of all ``factors``; greedy, best of 50 random rows each time.

    ``legal``: of whole rows and of pairs; whatever pair it allows, some legal row must have.
    """
    keys = list(factors)
    left = {
        (a, i, b, j)
        for a, b in itertools.combinations(keys, 2)
        for i, j in itertools.product(range(len(factors[a])), range(len(factors[b])))
        if legal({a: factors[a][i], b: factors[b][j]})
    }
    rows: list[Row] = []
    while left:
        a, i, b, j = min(left)
        best: tuple[int, Row, set[Any]] = (-1, {}, set())
        for _ in range(50):
            at = {key: draw.randrange(len(values)) for key, values in factors.items()} | {a: i, b: j}
            row = {key: factors[key][k] for key, k in at.items()}
            if not legal(row):
                continue
            met = {(x, at[x], y, at[y]) for x, y in itertools.combinations(keys, 2)} & left
            best = max(best, (len(met), row, met), key=lambda found: found[0])
        assert best[0] > 0, f"no legal row has {a}={factors[a][i]} and {b}={factors[b][j]}"
        rows.append(best[1])
        left -= best[2]
    return rows
