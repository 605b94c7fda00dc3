"""Tasks on streams: a discrete-event simulation in one pass, and what can be read off its timeline.

A stream of a rank runs its tasks one after the other, in the order of the list; a task also waits for those it names.
All of these stand before it in the list, so that one pass finds every start.

>>> work = [Task(0, "compute", 2.0, kind="forward"), Task(1, "data", 1.0, (0,), "send", "send")]
>>> work.append(Task(1, "compute", 2.0, (1,), kind="forward"))
>>> line = simulate(work)
>>> line.seconds, line.parts(1)
(5.0, {'forward': 2.0, 'send': 1.0, 'bubble': 2.0})
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.errors import AutoparError

Array: TypeAlias = npt.NDArray[np.float64]
Owned: TypeAlias = tuple[tuple[str, float], ...]

COMPUTE = "compute"
"""The stream whose idle time is exposed communication or bubble."""
BUBBLE = "bubble"


class Task(NamedTuple):
    """Something that keeps one stream of one rank busy for ``seconds``.

    ``after``: indices of earlier tasks that it waits for; ``kind``: what its seconds count as, but for those that
    ``inside`` gives to other kinds. ``allocates`` at its start and ``frees`` at its end: (owner, bytes).
    """

    rank: int
    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    label: str = ""
    kind: str = ""
    inside: Owned = ()
    allocates: Owned = ()
    frees: Owned = ()


@dataclass(frozen=True)
class Peak:
    """The most bytes a rank holds at once, when (seconds), and who owns them."""

    nbytes: float
    seconds: float
    owners: dict[str, float]


def simulate(tasks: Sequence[Task], static: Sequence[Owned] = (), staggered: bool = False) -> Timeline:
    """Runs ``tasks``: each starts when its stream and all it waits for are done. Time is linear in their number.

    ``static``: bytes by owner that each rank holds all the time. ``staggered``: see `Timeline.seconds`.
    Raises AutoparError for a task that waits for one that stands not before it.
    """
    free: dict[tuple[int, str], float] = {}
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    for i, (rank, stream, seconds, after, *_) in enumerate(tasks):
        at = free.get((rank, stream), 0.0)
        for j in after:
            if j >= i:
                raise AutoparError(
                    f"task {i} ({tasks[i].label}): waits for task {j}, which is not before it. List tasks in order."
                )
            if ends[j] > at:
                at = ends[j]
        starts[i] = at
        free[rank, stream] = ends[i] = at + seconds
    ranks = max(len(static), 1 + max((t.rank for t in tasks), default=-1))
    held = tuple(tuple(s) for s in static) + ((),) * (ranks - len(static))
    return Timeline(tuple(tasks), np.array(starts), np.array(ends), held, staggered)


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each task started and ended (seconds), and the bytes each rank holds all the time.

    ``staggered``: steps follow each other without meeting, so that the next one fills the pipeline while this one
    drains; a step then takes as long as its busiest rank is at it.
    """

    tasks: tuple[Task, ...]
    start: Array
    end: Array
    static: tuple[Owned, ...]
    staggered: bool = False

    @property
    def ranks(self) -> int:
        """How many ranks (of a pipeline: one stands for all that do the same)."""
        return len(self.static)

    @cached_property
    def _of_rank(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.ranks)]
        for i, task in enumerate(self.tasks):
            found[task.rank].append(i)
        return found

    def window(self, rank: int) -> tuple[float, float]:
        """From when to when a step lasts on a rank, seconds: all of it, or where steps are staggered, from its first
        computation to its last task."""
        if not self.staggered:
            return 0.0, float(self.end.max(initial=0.0))
        own = self._of_rank[rank]
        first = min((float(self.start[i]) for i in own if self.tasks[i].stream == COMPUTE), default=0.0)
        return first, max((float(self.end[i]) for i in own), default=first)

    @cached_property
    def seconds(self) -> float:
        """The time of the step."""
        return max((until - since for since, until in map(self.window, range(self.ranks))), default=0.0)

    def busy(self, rank: int) -> dict[str, float]:
        """Seconds by kind of all that a rank runs, exposed or not."""
        found: dict[str, float] = {}
        for i in self._of_rank[rank]:
            _count(self.tasks[i], found)
        return found

    def parts(self, rank: int) -> dict[str, float]:
        """What a rank's time goes to, by kind, in seconds that add up to those of the step: what its compute stream
        runs; while that waits, the communication then under way; and else "bubble"."""
        found: dict[str, float] = {}
        others: dict[str, list[int]] = {}
        working: list[int] = []
        for i in self._of_rank[rank]:
            if (task := self.tasks[i]).stream == COMPUTE:
                _count(task, found)
                working.append(i)
            elif task.seconds:
                others.setdefault(task.kind, []).append(i)
        for kind, seconds in self._exposed(self.window(rank), working, others).items():
            found[kind] = found.get(kind, 0.0) + seconds
        found[BUBBLE] = self.seconds - sum(found.values())
        return {kind: seconds for kind, seconds in found.items() if seconds or kind == BUBBLE}

    def _exposed(
        self, window: tuple[float, float], working: list[int], others: dict[str, list[int]]
    ) -> dict[str, float]:
        """Seconds by kind when a kind is under way and no earlier kind, nor the compute stream, is."""
        if not others:
            return {}
        used = [*working, *(i for own in others.values() for i in own)]
        times = np.unique(np.concatenate([self.start[used], self.end[used], window]).clip(*window))
        lengths, covered = np.diff(times), self._covered(times, working)
        found = {}
        for kind, own in others.items():
            here = self._covered(times, own) & ~covered
            found[kind] = float(lengths[here].sum())
            covered |= here
        return found

    def _covered(self, times: Array, tasks: list[int]) -> npt.NDArray[np.bool_]:
        """Whether one of ``tasks`` is under way between each two of ``times``."""
        begun = np.searchsorted(np.sort(self.start[tasks]), times[:-1], "right")
        over = np.searchsorted(np.sort(self.end[tasks]), times[:-1], "right")
        return np.asarray(begun > over)

    def mean_parts(self) -> dict[str, float]:
        """`parts`, averaged over the ranks."""
        found: dict[str, float] = {}
        for rank in range(self.ranks):
            for kind, seconds in self.parts(rank).items():
                found[kind] = found.get(kind, 0.0) + seconds / self.ranks
        return found

    @property
    def bubble(self) -> float:
        """Share of the step in which a rank has nothing to do, averaged over the ranks."""
        return self.mean_parts().get(BUBBLE, 0.0) / self.seconds if self.seconds else 0.0

    def _changes(self, rank: int) -> tuple[Array, Array, list[str]]:
        """Times, signed bytes and owners of all that changes a rank's memory, in order of time. At equal times what
        ends frees before what starts allocates; a task without duration allocates before it frees."""
        rows: list[tuple[float, int, float, str]] = []
        for i in self._of_rank[rank]:
            task = self.tasks[i]
            if task.allocates:
                at = float(self.start[i])
                rows += [(at, 1, nbytes, owner) for owner, nbytes in task.allocates]
            if task.frees:
                at, order = float(self.end[i]), 0 if task.seconds else 2
                rows += [(at, order, -nbytes, owner) for owner, nbytes in task.frees]
        rows.sort(key=lambda row: row[:2])
        return np.array([r[0] for r in rows]), np.array([r[2] for r in rows]), [r[3] for r in rows]

    def memory(self, rank: int) -> tuple[Array, Array]:
        """(times, bytes held from then on) of a rank, at every change."""
        times, changes, _ = self._changes(rank)
        base = sum(nbytes for _, nbytes in self.static[rank])
        return np.concatenate([[0.0], times]), base + np.concatenate([[0.0], np.cumsum(changes)])

    def peak(self, rank: int) -> Peak:
        """The most that a rank holds at once."""
        times, changes, owners = self._changes(rank)
        held = np.concatenate([[0.0], np.cumsum(changes)])
        top = int(held.argmax())
        found: dict[str, float] = {}
        for owner, nbytes in (*self.static[rank], *zip(owners[:top], changes[:top].tolist())):
            found[owner] = found.get(owner, 0.0) + nbytes
        least = 1e-9 * sum(found.values())  # what is left of sums and differences that should be nothing
        found = {owner: nbytes for owner, nbytes in found.items() if nbytes > least}
        return Peak(sum(found.values()), float(times[top - 1]) if top else 0.0, found)

    @property
    def worst(self) -> tuple[int, Peak]:
        """The rank that holds most, and its peak."""
        peaks = [self.peak(rank) for rank in range(self.ranks)]
        rank = max(range(self.ranks), key=lambda r: peaks[r].nbytes)
        return rank, peaks[rank]

    def trace(self, path: str, who: str = "stage") -> None:
        """Writes the events as a Chrome trace file, which chrome://tracing and ui.perfetto.dev show: a process for
        each rank, called ``who`` and its number, a row for each stream, a curve of the bytes held. Raises AutoparError
        where that cannot be."""
        lanes: dict[tuple[int, str], int] = {}
        events: list[dict[str, Any]] = []
        for task, start in zip(self.tasks, self.start.tolist()):
            lane = lanes.setdefault((task.rank, task.stream), len(lanes))
            shown = {"pid": task.rank, "tid": lane, "ts": start * 1e6, "dur": task.seconds * 1e6}
            events.append({"ph": "X", "name": task.label or task.kind, "cat": task.kind, **shown})
        for (rank, stream), lane in lanes.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": stream}})
        for rank in range(self.ranks):
            events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"{who} {rank}"}})
            for at, nbytes in zip(*(x.tolist() for x in self.memory(rank))):
                events.append({"ph": "C", "name": "bytes", "pid": rank, "ts": at * 1e6, "args": {"held": nbytes}})
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
        except OSError as error:
            raise AutoparError(f"--trace: cannot write {path} ({error.strerror or error}).") from None


def _count(task: Task, found: dict[str, float]) -> None:
    """Adds a task's seconds to those of their kinds."""
    rest = task.seconds
    for kind, seconds in task.inside:
        found[kind] = found.get(kind, 0.0) + seconds
        rest -= seconds
    found[task.kind] = found.get(task.kind, 0.0) + rest
