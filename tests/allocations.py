"""What the allocator says of a piece of a program: `torch.profiler`'s events, in order of time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
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
    blocks = _Blocks()
    for _, event, inside in sorted(events, key=lambda e: e[0]):
        if isinstance(event, str):
            found.append((event, blocks.nbytes))
            continue
        if event.alloc_size > 0:
            blocks.allocated(event.ptr, event.alloc_size, counts=not inside)
        else:
            blocks.freed(event.ptr, -event.alloc_size)
        if found:
            found[-1] = found[-1][0], max(found[-1][1], blocks.nbytes)
    return found


class _Blocks:
    """What is allocated. No event says what a thread of a backend frees; an allocation at the same place does."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.starts: list[int] = []
        self.sizes: dict[int, tuple[int, int]] = {}  # by start: (bytes, those of them that count)

    def allocated(self, start: int, size: int, counts: bool) -> None:
        at = bisect_right(self.starts, start)
        if at and self.starts[at - 1] + self.sizes[self.starts[at - 1]][0] > start:
            at -= 1
        while at < len(self.starts) and self.starts[at] < start + size:
            self.freed(self.starts[at], 0)
        self.starts.insert(at, start)
        self.sizes[start] = size, size if counts else 0
        self.nbytes += self.sizes[start][1]

    def freed(self, start: int, size: int) -> None:
        if start in self.sizes:
            del self.starts[bisect_left(self.starts, start)]
            _, size = self.sizes.pop(start)
        self.nbytes -= size


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
