"""When the actions of a step ran on this rank, for what it waited, and what it sent.

A `Recorder` puts itself between the executor of a schedule and its chunks and transport for one step. Steps that are
not recorded run as if there were none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.mesh import Ranks
from autopar.runtime.pipeline import Action, Chunk, Edge, Message, Pending, Pipeline, Spec, Transport


class Event(NamedTuple):
    """One action. ``begins`` and ``ends`` of its computation: seconds since the ranks stood at a barrier before the
    step; ``waited``: seconds before it for what other ranks send; ``received`` and ``sent``: bytes."""

    action: Action
    begins: float
    ends: float
    waited: float
    received: int
    sent: int


class Recorder:
    """Records steps on this rank; all ranks make one. ``events``: of the last step, in order."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.events: list[Event] = []
        self.seconds = 0.0  # of the last step on this rank
        self.origin = 0.0
        self.waited, self.received = 0.0, 0  # for the next action

    def begin(self) -> None:
        """A step begins: when all ranks are here; collective."""
        self.events = []
        dist.barrier(self.ranks.world)
        self.origin = 0.0
        self.origin = self.now()

    def end(self) -> None:
        """The step is over."""
        self.seconds = self.now()

    def now(self) -> float:
        """Seconds since the step began, when all that the device was given is done."""
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)
        return time.perf_counter() - self.origin

    def run(self, pipeline: Pipeline, chunks: Sequence[Chunk]) -> None:
        """`Pipeline.run`, recorded."""
        own = pipeline.transport
        pipeline.transport = _Transport(own, self)
        try:
            pipeline.run([_Chunk(chunk, number, self) for number, chunk in enumerate(chunks)])
        finally:
            pipeline.transport = own

    def gather(self) -> list[tuple[float, list[Event]]]:
        """Seconds and events of every rank's last step, on every rank; collective."""
        every: list[tuple[float, list[Event]]] = [(0.0, [])] * self.ranks.count
        dist.all_gather_object(every, (self.seconds, self.events), group=self.ranks.world)
        return every


@dataclass
class _Chunk:
    """A chunk whose actions are recorded."""

    chunk: Chunk
    number: int
    recorder: Recorder

    def forward(self, microbatch: int, received: dict[int, Tensor]) -> dict[int, Tensor]:
        begun = self.recorder.now()
        made = self.chunk.forward(microbatch, received)
        self._note("F", microbatch, begun)
        return made

    def backward(self, microbatch: int, gradients: dict[int, Tensor], part: str, last: bool) -> dict[int, Tensor]:
        begun = self.recorder.now()
        made = self.chunk.backward(microbatch, gradients, part, last)
        self._note(part, microbatch, begun)
        return made

    def _note(self, letter: str, microbatch: int, begun: float) -> None:
        own = self.recorder
        own.events.append(Event((letter, self.number, microbatch), begun, own.now(), own.waited, own.received, 0))
        own.waited, own.received = 0.0, 0


@dataclass
class _Transport:
    """A transport whose waits and bytes are recorded: of receives with the next action, of sends with the last."""

    inner: Transport
    recorder: Recorder

    def __post_init__(self) -> None:
        self.rank, self.device = self.inner.rank, self.inner.device

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return self.inner.gather(numbers)

    def open(self, edges: Sequence[Edge], ranks: int) -> None:
        self.inner.open(edges, ranks)

    def send(self, message: Message, tensor: Tensor) -> None:
        self.inner.send(message, tensor)
        events = self.recorder.events
        events[-1] = events[-1]._replace(sent=events[-1].sent + tensor.nbytes)

    def receive(self, message: Message, spec: Spec) -> Pending:
        return _Pending(self.inner.receive(message, spec), self.recorder)

    def drain(self) -> None:
        self.inner.drain()

    def fail(self, why: str) -> None:
        self.inner.fail(why)


@dataclass
class _Pending:
    inner: Pending
    recorder: Recorder

    def wait(self) -> Tensor:
        begun = self.recorder.now()
        tensor = self.inner.wait()
        self.recorder.waited += self.recorder.now() - begun
        self.recorder.received += tensor.nbytes
        return tensor


__all__ = ["Event", "Recorder"]
