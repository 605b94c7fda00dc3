"""What the allocator says of a piece of a program: `torch.profiler`'s events, in order of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C._profiler import _EventType

MARK = "mark: "
BACKENDS = ("c10d::", "gloo:", "nccl:")  # what ops of communication backends are called
MESSAGES = ("gloo:send", "gloo:recv")  # which last until their message is there, whatever runs meanwhile


def mark(name: str) -> None:
    """A new stretch of time begins."""
    with torch.profiler.record_function(MARK + name):
        pass


def fullest(run: Callable[[], Any]) -> list[tuple[str, int]]:
    """The most bytes alive in every stretch between two marks, over those alive at the first, which ``run`` sets at
    once. What communication backends allocate for themselves, in ops called as `BACKENDS` says, does not count."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
        run()
    events = list(_events(profiler.profiler.kineto_results.experimental_event_tree(), False))  # type: ignore[union-attr]
    found: list[tuple[str, int]] = []
    now, theirs = 0, set[int]()
    for _, event, inside in sorted(events, key=lambda e: e[0]):
        if isinstance(event, str):
            found.append((event, now))
            continue
        if event.alloc_size > 0 and inside:
            theirs.add(event.ptr)
        if event.ptr in theirs:
            if event.alloc_size < 0:
                theirs.discard(event.ptr)
            continue
        now += event.alloc_size
        if found:
            found[-1] = found[-1][0], max(found[-1][1], now)
    return found


def _events(tree: Sequence[Any], inside: bool) -> Iterator[tuple[int, Any, bool]]:
    """(time, name of a mark or an allocation, whether a backend made it)."""
    for event in tree:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields, inside
        elif event.name.startswith(MARK):
            yield event.start_time_ns, event.name.removeprefix(MARK), inside
        theirs = event.name.startswith(BACKENDS) and not event.name.startswith(MESSAGES)
        yield from _events(event.children, inside or theirs)


__all__ = ["fullest", "mark"]
