"""Seconds of a call that is made again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

LEAST, FEWEST, MOST = 0.03, 4, 200  # seconds and calls that a figure rests on


def seconds(call: Callable[[], object], device: torch.device, calls: int | None = None) -> float:
    """What ``call`` takes, in seconds, after one call that does not count.

    ``calls``: how many, the same on every rank, for calls that wait for other ranks; else as many as fit `LEAST`.
    """
    call()
    found: list[float] = []
    while len(found) < (calls or MOST):
        _wait(device)
        started = time.perf_counter()
        call()
        _wait(device)
        found.append(time.perf_counter() - started)
        if calls is None and len(found) >= FEWEST and sum(found) > LEAST:
            break
    return typical(found)


def typical(samples: Sequence[float]) -> float:
    """The lower quartile: what else runs on the machine only adds.

    >>> typical([3.0, 1.0, 2.0, 9.0, 8.0])
    2.0
    """
    return sorted(samples)[len(samples) // 4]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
