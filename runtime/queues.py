"""A pipeline's messages between threads of one process, with delays: what a schedule does under any timing.

For tests and for whoever runs all ranks of a pipeline in one process. Unlike processes, the threads notice at once when
all of them wait for what none has sent, and end with one line.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.runtime.mesh import RankError
from autopar.runtime.pipeline import Edge, Message, Spec

Place = tuple[Edge, int]
"""An edge, and the number of a message on it."""


class Sent(NamedTuple):
    """A message under way, which is there at the time ``comes``."""

    comes: float
    message: Message
    tensor: Tensor


class Hub:
    """What the threads of ``ranks`` ranks share. ``delay``: the seconds that a message takes, drawn anew for each;
    ``timeout``: of each wait, in seconds."""

    def __init__(self, ranks: int, delay: Callable[[], float] = lambda: 0.0, timeout: float = 60.0) -> None:
        self.ranks, self.delay, self.timeout = ranks, delay, timeout
        self.changed = threading.Condition()
        self.sent: dict[Place, Sent] = {}
        self.last: dict[Edge, float] = {}  # when the last message of an edge comes
        self.waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self.done: set[int] = set()
        self.gathered: dict[tuple[int, int], list[int]] = {}  # by round and rank
        self.failure = ""

    def transport(self, rank: int) -> QueueTransport:
        """One rank's end. ``rank``: its place in the pipeline."""
        return QueueTransport(self, rank)

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Until ``ready``, with the lock held. Raises RankError where a rank has failed, or nobody is left to send."""
        end = time.monotonic() + self.timeout
        self.waiting[rank] = ready, what
        self.look()
        while not ready():
            if time.monotonic() > end:
                self.end(f"rank {rank}: waited {self.timeout:g} s for {what}")
            if self.failure:
                raise RankError(self.failure)
            self.changed.wait(self.timeout)
        del self.waiting[rank]

    def look(self) -> None:
        """End all where everyone waits in vain, with the lock held."""
        if self.waiting and len(self.waiting.keys() | self.done) == self.ranks:
            waits = sorted((rank, what) for rank, (ready, what) in self.waiting.items() if not ready())
            if len(waits) == len(self.waiting):
                self.end("deadlock: " + ", ".join(f"rank {rank} waits for {what}" for rank, what in waits))

    def end(self, why: str) -> None:
        """All threads raise this line, the first that is given; with the lock held."""
        self.failure = self.failure or why
        self.changed.notify_all()


class QueueTransport:
    """`autopar.runtime.pipeline.Transport` of one thread. ``most``: the most receive buffers that were alive at once,
    each from when it is posted to when it is handed out."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank, self.device = hub, rank, torch.device("cpu")
        self.alive = self.most = self.rounds = 0
        self.posted: Counter[Edge] = Counter()
        self.counted: Counter[Edge] = Counter()  # sends

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """See `Transport`."""
        hub, number = self.hub, self.rounds
        self.rounds += 1
        places = [(number, rank) for rank in range(hub.ranks)]
        with hub.changed:
            hub.gathered[number, self.rank] = list(numbers)
            hub.changed.notify_all()
            hub.wait(self.rank, lambda: all(place in hub.gathered for place in places), "the numbers of all ranks")
            return [hub.gathered[place] for place in places]

    def open(self, edges: Sequence[Edge], ranks: int) -> None:
        """See `Transport`."""
        assert ranks == self.hub.ranks

    def send(self, message: Message, tensor: Tensor) -> None:
        """See `Transport`."""
        hub, edge = self.hub, message.edge(self.hub.ranks)
        with hub.changed:
            comes = max(time.monotonic() + hub.delay(), hub.last.get(edge, 0.0))  # none overtakes another
            hub.sent[edge, self.counted[edge]] = Sent(comes, message, tensor.detach().clone())
            hub.last[edge] = comes
            self.counted[edge] += 1
            hub.changed.notify_all()

    def receive(self, message: Message, spec: Spec) -> Posted:
        """See `Transport`."""
        edge = message.edge(self.hub.ranks)
        posted = Posted(self, message, spec, (edge, self.posted[edge]))
        self.posted[edge] += 1
        self.alive += 1
        self.most = max(self.most, self.alive)
        return posted

    def drain(self) -> None:
        """See `Transport`: a queue takes all at once."""

    def finish(self) -> None:
        """This rank's thread ends: where the others wait for it, they end too."""
        with self.hub.changed:
            self.hub.done.add(self.rank)
            self.hub.look()

    def fail(self, why: str) -> None:
        """See `Transport`."""
        with self.hub.changed:
            self.hub.end(f"rank {self.rank} failed with {why}")


class Posted(NamedTuple):
    """A receive that was posted: of the message at ``place``."""

    end: QueueTransport
    message: Message
    spec: Spec
    place: Place

    def wait(self) -> Tensor:
        """See `autopar.runtime.pipeline.Pending`."""
        hub = self.end.hub
        with hub.changed:
            hub.wait(self.end.rank, lambda: self.place in hub.sent, str(self.message))
            sent = hub.sent.pop(self.place)
        time.sleep(max(0.0, sent.comes - time.monotonic()))
        assert sent.message == self.message, f"rank {self.end.rank} expects {self.message} and gets {sent.message}"
        assert (tuple(sent.tensor.shape), sent.tensor.dtype) == self.spec, f"{self.message}: {sent.tensor.shape}"
        self.end.alive -= 1
        return sent.tensor
