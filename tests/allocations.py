"""What the allocator says of a piece of a program: `torch.profiler`'s events, in order of time."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from typing import Any

import torch

MARK = "mark: "


def mark(name: str) -> None:
    """A new stretch of time begins."""
    with torch.profiler.record_function(MARK + name):
        pass


def fullest(run: Callable[[], Any]) -> list[tuple[str, int]]:
    """The most bytes alive in every stretch between two marks, over those alive at the first, which ``run`` sets at
    once. Memory of this process's allocator: what communication backends hold in memory of their own does not count."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
        run()
    events = list(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]
    marks = sorted((e.start_ns(), e.name().removeprefix(MARK)) for e in events if e.name().startswith(MARK))
    begun = [at for at, _ in marks]
    now, most = 0, [0] * len(marks)
    held = 0  # when the stretch began
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        stretch = max(0, bisect(begun, event.start_ns()) - 1)
        while held <= stretch:
            most[held] = max(most[held], now)
            held += 1
        now += event.nbytes()
        most[stretch] = max(most[stretch], now)
    return [(name, most[i]) for i, (_, name) in enumerate(marks)]


__all__ = ["fullest", "mark"]
