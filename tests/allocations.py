"""What the allocator says of a piece of a program: `torch.profiler`'s events, in order of time."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from typing import Any

import torch


def fullest(steps: Sequence[Callable[[], Any]]) -> list[int]:
    """The most bytes alive during each step, over those alive before the first. Memory of the allocator of this
    process: what communication backends hold in memory of their own does not count."""
    begun: list[int] = []
    clock = torch.ones(1)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
        for step in steps:
            with torch.profiler.record_function("step"):
                clock.add_(1)
            step()
    events = list(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]
    begun = sorted(e.start_ns() for e in events if e.name() == "step")
    now, most = 0, [0] * len(begun)
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        step = max(0, bisect(begun, event.start_ns()) - 1)
        most[step] = max(most[step], now)
    return most


__all__ = ["fullest"]
