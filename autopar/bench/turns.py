"""Steps that are measured in turns on ranks of this machine, and how sure a median of their seconds is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from autopar.runtime.pool import RankPool


def pooled(names: Sequence[str], ranks: Callable[[str], int], timeout: float) -> Iterator[tuple[str, RankPool]]:
    """Every name with ranks that run, as many as it wants; those that want as many share them."""
    for count in sorted({ranks(name) for name in names}):
        with RankPool(count, timeout=timeout) as pool:
            yield from ((name, pool) for name in names if ranks(name) == count)


def in_turns(steps: Sequence[Callable[[], object]], about: float, rounds: tuple[int, int]) -> list[list[float]]:
    """Seconds of every step in each round, in which each runs once, in an order that changes. As many rounds as take
    ``about`` so many seconds, within ``rounds``. Collective."""
    took: list[list[float]] = [[] for _ in steps]
    begun = time.perf_counter()
    wanted = rounds[0]
    for turn in range(rounds[1]):
        if turn == rounds[0] // 3:
            each = torch.tensor((time.perf_counter() - begun) / turn)
            dist.all_reduce(each, dist.ReduceOp.MAX)
            wanted = int(min(max(about / float(each), rounds[0]), rounds[1]))
        if turn == wanted:
            break
        for which in (*range(turn % len(steps), len(steps)), *range(turn % len(steps))):
            dist.barrier()
            started = time.perf_counter()
            steps[which]()
            took[which].append(time.perf_counter() - started)
    return took


def interval(values: npt.NDArray[np.float64], share: float) -> tuple[float, float]:
    """Within which the median lies, in this share of all cases: by drawing the values anew."""
    draws = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), ((1 - share) / 2, (1 + share) / 2))
    return float(low), float(high)
