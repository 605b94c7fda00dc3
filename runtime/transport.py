"""A pipeline's messages over torch.distributed, in which no wait is without end.

Each way from one rank to another has a process group of its own, of the two: NCCL runs what one group is given in
order, so that sends both ways in one would wait for each other. On gloo a thread for each way waits, as there only a
wait finds out that something is done, and cannot be broken off; the rank itself looks up meanwhile whether another has
failed. Who fails first is noted in the store, and that line ends all ranks.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from autopar.runtime.mesh import RankError, Ranks
from autopar.runtime.pipeline import Edge, Message, Spec

FOREVER = timedelta(days=1)  # for threads: their rank looks at the clock
PATIENCE = 1.0  # seconds of a wait that are nothing special; then the rank says every so often for whom it waits
TAGS = 1 << 30

_transports = itertools.count()  # all ranks make them in the same order, so the number is the same on all
_links: dict[tuple[dist.ProcessGroup | None, int, int, timedelta], Link] = {}


@dataclass
class Job:
    """A send or receive under way. ``error``: why it ended in vain."""

    work: Any  # a dist.Work
    tensor: Tensor | None
    done: threading.Event = field(default_factory=threading.Event)
    error: str = ""

    def wait(self, sends: bool) -> None:
        """Until it is done, however long. A send lets its tensor go."""
        try:
            self.work.wait(FOREVER)
        except RuntimeError as error:
            self.error = str(error).rpartition("] ")[2].partition(". ")[0][:200] or "no reason is given"
        if sends:
            self.work = self.tensor = None
        self.done.set()


class Link:
    """One way between this rank and a peer, which it sends or receives on.

    Its process group is not made by ``dist.new_group``, whose names count the groups of a process: ranks in the middle
    of a pipeline have more links than those at its ends.
    """

    def __init__(self, source: int, target: int, store: Store, device: torch.device, timeout: timedelta) -> None:
        self.sends = dist.get_rank() == source
        self.peer = target if self.sends else source
        self.tags = itertools.count()
        self.jobs: SimpleQueue[Job] | None = None
        place = 0 if self.sends else 1
        if device.type == "cpu":
            self.group: Any = dist.ProcessGroupGloo(store, place, 2, timeout)
            self.jobs = SimpleQueue()
            threading.Thread(target=self._wait, name=f"pipeline {source}-{target}", daemon=True).start()
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.group = dist.ProcessGroupNCCL(store, place, 2, options)

    def start(self, tensor: Tensor) -> Job:
        """Send the tensor, or receive into it. It is contiguous; it travels as bytes, as not every dtype does."""
        raw, tag = tensor.detach().reshape(-1).view(torch.uint8), next(self.tags) % TAGS
        job = Job(self.group.send([raw], 1, tag) if self.sends else self.group.recv([raw], 0, tag), tensor)
        if self.jobs is not None:
            self.jobs.put(job)
        return job

    def _wait(self) -> None:
        assert self.jobs is not None
        while True:
            self.jobs.get().wait(self.sends)


class TorchTransport:
    """`autopar.runtime.pipeline.Transport` of a real rank, one of ``ranks.column``; ``ranks.timeout`` is of each wait.

    All ranks make it, of all columns; nothing is connected before `open`.
    """

    def __init__(self, ranks: Ranks) -> None:
        assert ranks.column is not None, "one stage has nobody to send to"
        self.column, self.device, self.timeout = ranks.column, ranks.device, ranks.timeout
        self.ids = dist.get_process_group_ranks(ranks.column)
        self.rank = ranks.stage
        self.store = PrefixStore(f"pipeline/{next(_transports)}", ranks.store)
        self.links: dict[Edge, Link] = {}
        self.sending: list[tuple[Message, Job]] = []
        self.failure = ""
        self.beats = itertools.count()

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """See `Transport`."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        every = [torch.empty_like(own) for _ in self.ids]
        dist.all_gather(every, own, group=self.column)
        return [t.tolist() for t in every]

    def open(self, edges: Sequence[Edge], ranks: int) -> None:
        """See `Transport`. All take the edges in the same order, each with a first message, as NCCL connects in it."""
        assert ranks == len(self.ids), f"a schedule of {ranks} ranks for {len(self.ids)}"
        for edge in edges:
            if self.rank not in edge:
                continue
            source, target = (self.ids[rank] for rank in edge)
            key = (dist.group.WORLD, source, target, self.timeout)
            if key not in _links:
                store = PrefixStore(f"link/{source}-{target}", self.store)
                _links[key] = Link(source, target, store, self.device, self.timeout)
            self.links[edge] = link = _links[key]
            greeting, begun = Message(-1, -1, edge[0], edge[1], False), time.monotonic()
            try:
                job = link.start(torch.zeros(1, device=self.device))
            except dist.DistError as error:
                who = self._waits(greeting, link, time.monotonic() - begun)
                raise RankError(self._end(f"{who}, which did not come. Look at its own error first.")) from error
            self._finish(job, greeting, link)

    def send(self, message: Message, tensor: Tensor) -> None:
        """See `Transport`. The tensor is kept until it has been sent."""
        self.sending = [(m, job) for m, job in self.sending if job.error or not self._is_done(job)]
        if tensor.numel():
            self.sending.append((message, self._link(message).start(tensor.contiguous())))

    def receive(self, message: Message, spec: Spec) -> Posted:
        """See `Transport`."""
        shape, dtype = spec
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        link = self._link(message)
        return Posted(self, message, link, link.start(tensor) if math.prod(shape) else None, tensor)

    def drain(self) -> None:
        """See `Transport`."""
        while self.sending:
            message, job = self.sending.pop()
            self._finish(job, message, self._link(message))

    def fail(self, why: str) -> None:
        """See `Transport`. The first to fail is the one that all name."""
        self._end(f"rank {self.ids[self.rank]} failed with {why}")

    # -- waits ------------------------------------------------------------------------------------------------------

    def _link(self, message: Message) -> Link:
        return self.links[message.edge(len(self.ids))]

    def _is_done(self, job: Job) -> bool:
        return job.done.is_set() if self.device.type == "cpu" else job.work.is_completed()

    def _finish(self, job: Job, message: Message, link: Link) -> None:
        """Wait for a job; on a GPU its stream does, and NCCL keeps the time."""
        if self.device.type != "cpu":
            job.work.wait()
            return
        begun, pause = time.monotonic(), 0.05
        while not job.done.wait(pause):
            pause = min(2 * pause, PATIENCE / 2)
            waited = time.monotonic() - begun
            self._look()
            if waited >= self.timeout.total_seconds():
                chain = self._chain(link.peer)
                self._look()
                raise RankError(self._end(f"{self._waits(message, link, waited)}{chain}"))
            if waited > PATIENCE:
                self._beat(link.peer)
        if job.error:
            self._look()
            lost = f", and the connection was lost ({job.error}). Look at that rank's own error first."
            raise RankError(self._end(self._waits(message, link, time.monotonic() - begun) + lost))

    def _look(self) -> None:
        """Raise the line of the rank that failed first, if one has."""
        if not self.failure:
            try:
                if self.store.check(["failed"]):
                    self.failure = self.store.get("failed").decode()
            except RuntimeError:
                self.failure = "the store is gone: the process that held it has left"
        if self.failure:
            raise RankError(self._end(self.failure))

    def _end(self, why: str) -> str:
        """Note a failure unless there is one already; the first is the answer. The links are of no more use."""
        if not self.failure:
            self.failure = why
            with suppress(RuntimeError):
                self.failure = self.store.compare_set("failed", "", why).decode()
        for key in [key for key, link in _links.items() if link in self.links.values()]:
            del _links[key]
        return self.failure

    def _waits(self, message: Message, link: Link, waited: float) -> str:
        """Who waits for what."""
        back = message.gradient != link.sends  # the stage at this end is the message's source
        own, other = (message.source, message.target) if back else (message.target, message.source)
        what = f"microbatch {message.microbatch}'s {'gradient of ' if message.gradient else ''}value {message.number}"
        what = "the first message" if message.number < 0 else what
        who, peer = f"rank {self.ids[self.rank]} (stage {own})", f"rank {link.peer} (stage {other})"
        return f"{who}: waited {waited:.3g} s " + (
            f"for {peer} to take {what}" if link.sends else f"for {what} from {peer}"
        )

    # -- who is to blame --------------------------------------------------------------------------------------------

    def _beat(self, peer: int) -> None:
        """Note that this rank lives and waits for ``peer``."""
        with suppress(RuntimeError):
            self.store.set(f"waits/{self.ids[self.rank]}", f"{peer} {next(self.beats)}")

    def _beating(self) -> dict[int, str]:
        keys = {rank: f"waits/{rank}" for rank in self.ids}
        return {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}

    def _chain(self, peer: int) -> str:
        """For whom ``peer`` waits, and so on, as words that follow its name."""
        try:
            before = self._beating()
            for _ in range(3):
                self._beat(peer)
                time.sleep(PATIENCE / 2)
            after = self._beating()
        except RuntimeError:  # `_look` says that the store is gone
            return "."
        waits = {rank: int(note.split()[0]) for rank, note in after.items() if note != before.get(rank)}
        words, seen = "", [peer]
        while seen[-1] in waits:
            words += f", which waits for rank {waits[seen[-1]]}"
            if waits[seen[-1]] in seen:
                return f"{words}: a deadlock. Check the schedule."
            seen.append(waits[seen[-1]])
        return f"{words}, which neither waits nor sends. Look there first."


@dataclass(frozen=True)
class Posted:
    """A receive of `TorchTransport`; one of no elements is there at once, without a ``job``."""

    transport: TorchTransport
    message: Message
    link: Link
    job: Job | None
    tensor: Tensor

    def wait(self) -> Tensor:
        """See `autopar.runtime.pipeline.Pending`."""
        if self.job is not None:
            self.transport._finish(self.job, self.message, self.link)
        return self.tensor
