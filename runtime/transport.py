"""A pipeline's messages over torch.distributed, in which no wait is without end.

Each way from one rank to another has a process group of its own, of the two: NCCL runs what one group is given in
order, so that sends both ways in one would wait for each other. On gloo only a wait finds out that something is done.
There the rank itself waits for what it needs; a thread looks up meanwhile whether another rank has failed or the time
is over, and then breaks the wait off; one more lets go of what has been sent. Who fails first is noted in the store,
and that line ends all ranks.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from autopar.runtime.mesh import RankError, Ranks
from autopar.runtime.pipeline import Edge, Message, Pending, Spec

FOREVER, AT_ONCE = timedelta(days=1), timedelta(milliseconds=1)
PATIENCE = 1.0  # seconds of a wait that are nothing special; then the rank says every so often for whom it waits
LOOK = 0.25  # seconds between two looks at a wait
REAP = 0.005  # seconds for which sends are left alone: most are done then, and the rank is hardly woken
TAGS = 1 << 30

_transports = itertools.count()  # all ranks make them in the same order, so the number is the same on all
_links: dict[tuple[dist.ProcessGroup | None, int, int, timedelta], Link] = {}


@dataclass(eq=False)
class Job:
    """A send or receive under way. ``work``: its dist.Work; ``begun``: when the wait for it began; ``error``: why it
    ended in vain."""

    transport: TorchTransport
    message: Message
    link: Link
    tensor: Tensor
    work: Any
    begun: float = 0.0
    error: str = ""

    def wait(self) -> Tensor:
        """See `autopar.runtime.pipeline.Pending`."""
        self.transport._finish(self)
        return self.tensor

    def run(self) -> None:
        """Until it is done, however long."""
        try:
            self.work.wait(FOREVER)
        except RuntimeError as error:
            self.error = _reason(error)

    def break_off(self, lasts: Callable[[], bool]) -> None:
        """End a wait of another thread: one whose time is over closes the connection, and so ends all waits on it."""
        while lasts():
            with suppress(RuntimeError):
                self.work.wait(AT_ONCE)


@dataclass(frozen=True)
class Here:
    """A receive of no elements, which is there at once."""

    tensor: Tensor

    def wait(self) -> Tensor:
        """See `autopar.runtime.pipeline.Pending`."""
        return self.tensor


class Link:
    """One way between this rank and a peer, which it sends or receives on.

    Its process group is not made by ``dist.new_group``, whose names count the groups of a process: ranks in the middle
    of a pipeline have more links than those at its ends.
    """

    def __init__(self, source: int, target: int, store: Store, device: torch.device, timeout: timedelta) -> None:
        self.sends = dist.get_rank() == source
        self.peer = target if self.sends else source
        self.tags = itertools.count()
        place = 0 if self.sends else 1
        if device.type == "cpu":
            self.group: Any = dist.ProcessGroupGloo(store, place, 2, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.group = dist.ProcessGroupNCCL(store, place, 2, options)

    def start(self, tensor: Tensor) -> Any:
        """Send the tensor, or receive into it. It is contiguous; it travels as bytes, as not every dtype does."""
        raw, tag = tensor.detach().reshape(-1).view(torch.uint8), next(self.tags) % TAGS
        return self.group.send([raw], 1, tag) if self.sends else self.group.recv([raw], 0, tag)


class Thread:
    """A thread for this process that sleeps unless it is woken."""

    def __init__(self, name: str, turn: Callable[[], bool]) -> None:
        self.name, self.turn = name, turn  # a turn of its work; whether there may be more
        self.awake, self.woken = False, threading.Event()
        self.thread: threading.Thread | None = None

    def wake(self) -> None:
        """There is work, which was noted before this is called: it costs nothing where the thread is awake."""
        if self.awake:
            return
        self.awake = True
        self.woken.set()
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self.thread.start()

    def _run(self) -> None:
        while True:
            if self.turn():
                continue
            self.awake = False
            if self.turn():  # it came before it could be seen that nobody is awake
                self.awake = True
                continue
            self.woken.wait()
            self.woken.clear()


class Watch:
    """Looks after the wait of this process's rank. It holds no job between two looks: what came is to be let go of."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.waits, self.seen, self.idle = 0, 0, 0  # waits so far, the last one seen, and looks since there was one
        self.thread = Thread("pipeline-watch", self.look)

    def over(self, job: Job) -> None:
        """Wait for a job."""
        job.begun = time.monotonic()
        self.waits += 1
        self.job = job
        self.thread.wake()
        job.run()
        self.job = None

    def look(self) -> bool:
        """At a wait that lasts since the last time. Whether there was one lately."""
        waits, waiting = self.waits, self.job is not None
        if waiting and waits == self.seen:
            self._last(self.job)
        self.seen = waits
        self.idle = 0 if waiting else self.idle + 1
        time.sleep(LOOK)
        return self.idle < PATIENCE / LOOK

    def _last(self, job: Job | None) -> None:
        if job is not None and job.transport._gives_up(job):
            job.break_off(lambda: self.job is job)


class Reaper:
    """Finds out what has been sent; this process's rank lets go of it when it sends again."""

    def __init__(self) -> None:
        self.sent: deque[Job] = deque()
        self.waited: deque[Job] = deque()  # for the one that is waited for
        self.done: deque[Job] = deque()
        self.lock = threading.Lock()  # held from when a job is taken until it is done
        self.thread = Thread("pipeline-sent", self.reap)

    @property
    def job(self) -> Job | None:
        """That is waited for."""
        with suppress(IndexError):
            return self.waited[0]
        return None

    def add(self, job: Job) -> None:
        """A send that has begun."""
        self.done.clear()
        self.sent.append(job)
        self.thread.wake()

    def reap(self) -> bool:
        """Wait for all sends there are. Whether there were some."""
        if not self.sent:
            return False
        time.sleep(REAP)
        while self.sent:
            with self.lock, suppress(IndexError):
                self.waited.append(self.sent.popleft())
                self.waited[0].run()
                if self.waited[0].error:
                    self.waited[0].transport.lost.append(self.waited[0])
                self.done.append(self.waited.pop())  # no name here has it: the allocator is told by the rank's thread
        return True

    def drain(self) -> None:
        """Wait for all sends there are, as the rank itself."""
        with suppress(IndexError):
            while True:
                self.sent.popleft().wait()
        while not self.lock.acquire(timeout=LOOK):
            if (job := self.job) is not None:
                job.begun = job.begun or time.monotonic()
                job.transport._gives_up(job)  # then it has been broken off
        self.lock.release()
        self.done.clear()

    def forget(self) -> None:
        """All sends there are, for good."""
        self.sent.clear()
        if (job := self.job) is not None:
            job.break_off(lambda: self.job is job)


def _reason(error: RuntimeError) -> str:
    """What gloo says, without where it says so."""
    return str(error).rpartition("] ")[2].partition(". ")[0][:200] or "no reason is given"


_watch, _reaper = Watch(), Reaper()


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
        self.sending: list[Job] = []  # on a GPU
        self.lost: list[Job] = []  # sends that ended in vain
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
                tensor = torch.zeros(1, device=self.device)
                job = Job(self, greeting, link, tensor, link.start(tensor))
            except dist.DistError as error:
                who = self._waits(greeting, link, time.monotonic() - begun)
                raise RankError(self._end(f"{who}, which did not come. Look at its own error first.")) from error
            self._finish(job)

    def send(self, message: Message, tensor: Tensor) -> None:
        """See `Transport`. The tensor is kept until it has been sent."""
        if not tensor.numel():
            return
        job = self._start(message, self._link(message), tensor.contiguous())
        if self.device.type == "cpu":
            _reaper.add(job)
        else:
            self.sending = [job for job in self.sending if not job.work.is_completed()] + [job]

    def receive(self, message: Message, spec: Spec) -> Pending:
        """See `Transport`."""
        shape, dtype = spec
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return self._start(message, self._link(message), tensor) if math.prod(shape) else Here(tensor)

    def drain(self) -> None:
        """See `Transport`."""
        while self.sending:
            self._finish(self.sending.pop())
        if self.device.type == "cpu":
            _reaper.drain()
        if self.lost:
            self._raise(self.lost[0])

    def fail(self, why: str) -> None:
        """See `Transport`. The first to fail is the one that all name."""
        self._end(f"rank {self.ids[self.rank]} failed with {why}")

    # -- waits ------------------------------------------------------------------------------------------------------

    def _link(self, message: Message) -> Link:
        return self.links[message.edge(len(self.ids))]

    def _start(self, message: Message, link: Link, tensor: Tensor) -> Job:
        try:
            return Job(self, message, link, tensor, link.start(tensor))
        except RuntimeError as error:  # the connection is lost already
            self._raise(Job(self, message, link, tensor, None, error=_reason(error)))

    def _finish(self, job: Job) -> None:
        """Wait for a job; on a GPU its stream does, and NCCL keeps the time."""
        if self.device.type != "cpu":
            job.work.wait()
            return
        _watch.over(job)
        if job.error or self.failure:
            self._raise(job)

    def _raise(self, job: Job) -> NoReturn:
        """The line of the rank that failed first, or that a job's connection was lost."""
        if not self._has_failed():
            lost = f", and the connection was lost ({job.error}). Look at that rank's own error first."
            self._end(self._waits(job.message, job.link, time.monotonic() - job.begun if job.begun else 0.0) + lost)
        raise RankError(self.failure)

    def _gives_up(self, job: Job) -> bool:
        """Whether a wait that lasts has to end, with the line for it."""
        waited = time.monotonic() - (job.begun or time.monotonic())
        if self._has_failed():
            return True
        if waited > PATIENCE:
            self._beat(job.link.peer)
        if waited < self.timeout.total_seconds():
            return False
        chain = self._chain(job.link.peer)
        if not self._has_failed():
            self._end(f"{self._waits(job.message, job.link, waited)}{chain}")
        return True

    def _has_failed(self) -> bool:
        """Whether a rank has failed; its line is this one's then."""
        if not self.failure:
            try:
                if self.store.check(["failed"]):
                    self._end(self.store.get("failed").decode())
            except RuntimeError:
                self._end("the store is gone: the process that held it has left")
        return bool(self.failure)

    def _end(self, why: str) -> str:
        """Note a failure unless there is one already; the first is the answer. The links are of no more use."""
        if not self.failure:
            self.failure = why
            with suppress(RuntimeError):
                self.failure = self.store.compare_set("failed", "", why).decode()
        for key in [key for key, link in _links.items() if link in self.links.values()]:
            _links.pop(key, None)
        _reaper.forget()
        return self.failure

    def _waits(self, message: Message, link: Link, waited: float) -> str:
        """Who waits for what."""
        back = message.gradient != link.sends  # the stage at this end is the message's source
        own, other = (message.source, message.target) if back else (message.target, message.source)
        what = "the first message" if message.number < 0 else message.what
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
