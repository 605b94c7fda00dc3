"""Steps as they ran beside steps as predicted: `Parallel.measure`, its trace, and the line of ``compile(report=True)``.

Of a recorded step all ranks tell when each action of theirs ran (`runtime.timeline`), and one can write it as a trace
that chrome://tracing and ui.perfetto.dev show.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.runtime.program import Program
from autopar.runtime.timeline import Event, Recorder
from autopar.solver.simulate import Task, Timeline

T = TypeVar("T")

log = logging.getLogger("autopar")
REPORTED = 3  # the step that is reported: the first two warm up
KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


@dataclass(frozen=True)
class Measured:
    """One step of all ranks. ``events``: of each rank; ``seconds``: of the slowest, without the optimizer."""

    plan: Plan
    events: tuple[tuple[Event, ...], ...]
    seconds: float
    peak_bytes: int | None  # on the rank that needs most, where the device counts them

    @property
    def timeline(self) -> Timeline:
        """As the simulator writes its own: a computation a task, and on a row beside it the waits for other ranks."""
        tasks, starts = list[Task](), list[float]()
        for rank, events in enumerate(self.events):
            for event in events:
                (letter, chunk, m), took = event.action, event.ends - event.begins
                label = f"{letter}{chunk}.{m}"
                if event.waited:
                    told = f"{label} waits for {event.received} bytes"
                    tasks.append(Task(rank, "waits", event.waited, label=told, kind="waits"))
                    starts.append(event.begins - event.waited)
                told = f"{label}, {event.sent} bytes sent" if event.sent else label
                tasks.append(Task(rank, "compute", took, label=told, kind=KINDS[letter]))
                starts.append(event.begins)
        ends = [start + task.seconds for start, task in zip(starts, tasks)]
        return Timeline(tuple(tasks), np.array(starts), np.array(ends), ((),) * len(self.events))

    @property
    def idle(self) -> float:
        """Share of the step in which a rank runs none of its actions, averaged over the ranks: the bubble, waits for
        what other ranks send, and what comes before and after the schedule."""
        busy = [sum(e.ends - e.begins for e in events) for events in self.events]
        return 1 - sum(busy) / len(busy) / self.seconds

    def text(self) -> str:
        """A line: predicted against measured."""
        predicted, parts = self.plan.predicted, self.plan.predicted.parts
        seconds = (predicted.step_time_s or 0.0) - parts.get("optimizer_s", 0.0)
        line = f"predicted {seconds:.3g} s, measured {self.seconds:.3g} s a step without the optimizer"
        if self.plan.pp > 1:
            idle = (parts.get("bubble_s", 0.0) + parts.get("send_s", 0.0)) / seconds if seconds else 0.0
            line += f" (bubble {idle:.0%} predicted, {self.idle:.0%} measured)"
        line += f"; peak {predicted.peak_mem_gib or 0.0:.3g} GiB predicted"
        return line if self.peak_bytes is None else f"{line}, {self.peak_bytes / 2**30:.3g} GiB measured"

    def save_trace(self, path: str) -> None:
        """Write the step as a Chrome trace file: a process for each rank. Raises AutoparError where that cannot be."""
        self.timeline.trace(path, who="rank")


@dataclass
class Measuring:
    """What is to be measured. ``report``: whether the third step is logged; ``on``: whether all steps are kept."""

    report: bool = False
    on: bool = False
    steps: list[Measured] = field(default_factory=list)

    def run(self, program: Program, plan: Plan, step: Callable[[], T]) -> T:
        """A step, recorded where that is asked for."""
        reported = self.report and program.steps + 1 == REPORTED
        if not (self.on or reported):
            return step()
        recorder = program.recorder = Recorder(program.ranks)
        cuda = program.ranks.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(program.ranks.device)
        try:
            recorder.begin()
            made = step()
            recorder.end()
        finally:
            program.recorder = None
        peak = torch.cuda.max_memory_allocated(program.ranks.device) if cuda else -1
        peaks = [numbers[0] for numbers in program.ranks.gather_numbers([peak])]
        every = recorder.gather()
        seconds = max(seconds for seconds, _ in every)
        found = Measured(plan, tuple(tuple(events) for _, events in every), seconds, max(peaks) if cuda else None)
        if self.on:
            self.steps.append(found)
        if reported and program.ranks.rank == 0:
            _show()
            log.info("%s", found.text())
        return made


class Measures:
    """The part of `autopar.Parallel` that measures its steps."""

    _measuring: Measuring

    @contextmanager
    def measure(self) -> Iterator[list[Measured]]:
        """Record the steps within, one `Measured` each; collective. Every rank has those of all ranks.

        Example:
            ``with parallel.measure() as steps: parallel.step(tokens, labels)``, then ``steps[-1].text()`` or
            ``parallel.save_trace("step.json")``.
        """
        own = self._measuring
        own.on, own.steps = True, []
        try:
            yield own.steps
        finally:
            own.on = False

    def save_trace(self, path: str | Path) -> None:
        """Write the last step within `measure` as a Chrome trace file, all ranks in one; call it on one rank.

        Raises AutoparError where none was measured, or the file cannot be written.
        """
        if not self._measuring.steps:
            raise AutoparError("save_trace: no step was measured. Take one within `with parallel.measure():`.")
        self._measuring.steps[-1].save_trace(str(path))


def _show() -> None:
    """A report was asked for: where nobody has set up logging, it goes to stderr."""
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())
    if log.level == logging.NOTSET and not log.isEnabledFor(logging.INFO):
        log.setLevel(logging.INFO)


__all__ = ["Measured", "Measures", "Measuring"]
