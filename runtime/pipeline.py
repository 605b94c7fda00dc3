"""The schedule of a pipeline, run on one of its ranks: which chunk computes when, what it waits for and what it sends.

Stage ``c * ranks + r`` is chunk ``c`` of pipeline rank ``r``. A rank runs its actions in order. Each waits for what
other ranks send it and none waits for its own sends, so what deadlocks is known beforehand
(`autopar.solver.simulate.check`). On each way from one rank to another the receives are posted in the order of the
sends, those of the next action before the current one runs. Buffers are made when posted and let go when read: as many
live as the schedule has in flight, however many microbatches there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.mesh import RankError, blames_another
from autopar.runtime.parameters import digest

Action: TypeAlias = tuple[str, int, int]
"""A letter ("F" forward, "B" backward, or parted "I" input and "W" weight gradients), a chunk and a microbatch."""
Spec: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor on the wire."""
Edge: TypeAlias = tuple[int, int]
"""The pipeline ranks that a message leaves and reaches."""


@dataclass(frozen=True)
class Crossing:
    """A value that stage ``source`` makes and the stages ``targets`` (ascending, never the source) read.

    ``grad``: whether a gradient comes back, then from every target.
    """

    number: int
    source: int
    targets: tuple[int, ...]
    grad: bool


class Message(NamedTuple):
    """One tensor on its way: a value from ``source`` to the stage ``target``, or its ``gradient`` from ``target`` back.

    A rank that reads a value on several stages gets it once; ``target`` is the first of them.
    """

    number: int
    microbatch: int
    source: int
    target: int
    gradient: bool

    @property
    def what(self) -> str:
        """What it carries, in words."""
        return f"microbatch {self.microbatch}'s {'gradient of ' if self.gradient else ''}value {self.number}"

    def __str__(self) -> str:
        there, back = (self.target, self.source) if self.gradient else (self.source, self.target)
        return f"{self.what} from stage {there} to stage {back}"

    def edge(self, ranks: int) -> Edge:
        """The pipeline ranks it leaves and reaches."""
        there, back = self.source % ranks, self.target % ranks
        return (back, there) if self.gradient else (there, back)


class Pending(Protocol):
    """A receive that was posted."""

    def wait(self) -> Tensor:
        """The tensor, once it is there. Raises RankError where it does not come."""
        ...


class Transport(Protocol):
    """Carries messages between the ranks of one pipeline; ``rank`` is this one's place in it.

    The k-th `receive` of an edge gets the k-th `send` of it. What it hands out lies on ``device``.
    """

    rank: int
    device: torch.device

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """What every pipeline rank gave, by rank; all give equally many 64-bit integers."""
        ...

    def open(self, edges: Sequence[Edge], ranks: int) -> None:
        """Connect the ranks; collective, once. ``edges``: all that messages will take, sorted."""
        ...

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start to send. Returns at once; whoever made the tensor does not write to it any more."""
        ...

    def receive(self, message: Message, spec: Spec) -> Pending:
        """Make a buffer and start to receive into it."""
        ...

    def drain(self) -> None:
        """Wait until everything has been sent."""
        ...

    def fail(self, why: str) -> None:
        """Tell the other ranks that this one has failed."""
        ...


class Chunk(Protocol):
    """One stage of the model, as `Pipeline` runs it. The dicts that it is given are its own: nobody else holds them."""

    def forward(self, microbatch: int, received: dict[int, Tensor]) -> dict[int, Tensor]:
        """The values that cross from here, by number, from those that cross to here. All are detached."""
        ...

    def backward(self, microbatch: int, gradients: dict[int, Tensor], part: str, last: bool) -> dict[int, Tensor]:
        """Gradients of the values received, by number, from those of the values sent; one left out is zero.

        ``part``: "B" (all), "I" (of inputs only) or "W" (of weights, later: takes and gives nothing). ``last``:
        whether no more weight gradients follow in this step.
        """
        ...


class Pipeline:
    """Runs a schedule on this rank, over and over.

    ``schedule``: of every pipeline rank, the actions in order (forwards alone where nothing trains); ``crossings``:
    between all stages; ``specs(number, microbatch)``: shape and dtype of a value, and of its gradient, on the ranks of
    this pipeline.

    Example:
        ``pipeline = Pipeline([[("F", 0, 0), ("B", 0, 0)]], (), transport, specs)``, then each step
        ``pipeline.run([chunk])``.
    """

    def __init__(
        self,
        schedule: Sequence[Sequence[Action]],
        crossings: Sequence[Crossing],
        transport: Transport,
        specs: Callable[[int, int], Spec],
    ) -> None:
        self.schedule, self.crossings = schedule, tuple(sorted(crossings, key=lambda c: c.number))
        self.transport, self.specs = transport, cache(specs)  # asked for every message of every step
        self.ranks, self.rank = len(schedule), transport.rank
        self.actions = schedule[self.rank]
        self._made: dict[int, list[Crossing]] = {}
        self._read: dict[int, list[Crossing]] = {}
        for crossing in self.crossings:
            self._made.setdefault(crossing.source, []).append(crossing)
            for stage in crossing.targets:
                self._read.setdefault(stage, []).append(crossing)
        self._readers = {c.number: sum(t % self.ranks == self.rank for t in c.targets) for c in self.crossings}
        self._ways = self._messages()
        self._needed = {action: self.needed(action) for action in self.actions}
        self._sent = {action: self.sent(self.rank, action) for action in self.actions}
        weighs = {chunk: i for i, (letter, chunk, _) in enumerate(self.actions) if letter in "BW"}
        self._last = set(weighs.values())
        self._started = False

    def start(self) -> None:
        """Compare schedule, crossings and shapes over the ranks, and connect them; collective. `run` does it once.

        Raises AutoparError on every rank where two disagree.
        """
        edges = sorted(self._ways)
        microbatches = sorted({m for rank in self.schedule for _, _, m in rank})
        shapes = [[self.specs(c.number, m) for m in microbatches] for c in self.crossings]
        schedule = [[tuple(action) for action in rank] for rank in self.schedule]
        known = {"schedule": schedule, "values that cross": self.crossings, "shapes of what crosses": shapes}
        every = self.transport.gather([digest(repr(what).encode()) for what in known.values()])
        for rank, numbers in enumerate(every):
            for name, first, own in zip(known, every[0], numbers, strict=True):
                if first != own:
                    raise AutoparError(
                        f"pipeline: ranks 0 and {rank} of the pipeline differ in the {name}. "
                        "Compile the same model with the same plan on every rank."
                    )
        self.transport.open(edges, self.ranks)
        self._started = True

    def run(self, chunks: Sequence[Chunk]) -> None:
        """One step: every action of this rank, in order. ``chunks``: this rank's. Collective.

        Raises RankError where another rank fails, has left or hangs, and what a chunk raises.
        """
        try:
            if not self._started:
                self.start()
            _Step(self, chunks).run()
        except RankError:
            raise
        except BaseException as error:
            if not blames_another(error):
                self.transport.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            raise

    def stage(self, chunk: int) -> int:
        """The stage that is this rank's ``chunk``."""
        return chunk * self.ranks + self.rank

    def _messages(self) -> dict[Edge, list[Message]]:
        """All messages of a step, per edge in the order in which they are sent."""
        ways: dict[Edge, list[Message]] = {}
        for rank, actions in enumerate(self.schedule):
            for action in actions:
                for message in self.sent(rank, action):
                    ways.setdefault(message.edge(self.ranks), []).append(message)
        return ways

    def sent(self, rank: int, action: Action) -> list[Message]:
        """What a rank sends to others after an action, in order."""
        letter, chunk, m = action
        stage = chunk * self.ranks + rank
        if letter == "F":
            return [
                Message(c.number, m, stage, target, False)
                for c in self._made.get(stage, ())
                for target in self._firsts(c)
                if target % self.ranks != rank
            ]
        return [Message(c.number, m, c.source, stage, True) for c in self._returned(stage, letter, rank)]

    def needed(self, action: Action) -> list[Message]:
        """What this rank receives from others for an action."""
        letter, chunk, m = action
        stage = self.stage(chunk)
        if letter == "F":
            return [
                Message(c.number, m, c.source, self._first(c, self.rank), False)
                for c in self._read.get(stage, ())
                if c.source % self.ranks != self.rank
            ]
        return [
            Message(c.number, m, stage, target, True)
            for c in self._made.get(stage, ())
            for target in c.targets
            if c.grad and letter != "W" and target % self.ranks != self.rank
        ]

    def _returned(self, stage: int, letter: str, rank: int) -> list[Crossing]:
        """Those whose gradients leave the rank after a backward of the stage."""
        if letter == "W":
            return []
        return [c for c in self._read.get(stage, ()) if c.grad and c.source % self.ranks != rank]

    def _first(self, crossing: Crossing, rank: int) -> int:
        return next(target for target in crossing.targets if target % self.ranks == rank)

    def _firsts(self, crossing: Crossing) -> list[int]:
        """The first target on each rank that has one."""
        ranks = dict.fromkeys(target % self.ranks for target in crossing.targets)
        return [self._first(crossing, rank) for rank in ranks]


class _Step:
    """One step of a `Pipeline`: what has been posted, what has come and waits to be read."""

    def __init__(self, pipeline: Pipeline, chunks: Sequence[Chunk]) -> None:
        self.pipeline, self.chunks, self.transport = pipeline, chunks, pipeline.transport
        self.posted: dict[Message, Pending] = {}
        self.next: Counter[Edge] = Counter()  # how many receives of each edge have been posted
        self.values: dict[tuple[int, int], tuple[Tensor, int]] = {}  # by number and microbatch, with readers to come
        self.gradients: dict[Message, Tensor] = {}  # from targets on this rank

    def run(self) -> None:
        actions = self.pipeline.actions
        for i, action in enumerate(actions):
            for ahead in actions[i : i + 2]:
                self.post(self.pipeline._needed[ahead])
            if action[0] == "F":
                self.forward(action)
            else:
                self.backward(action, last=i in self.pipeline._last)
        assert not (self.posted or self.values or self.gradients), "something came that nobody read"
        self.transport.drain()

    def forward(self, action: Action) -> None:
        pipeline, (_, chunk, m) = self.pipeline, action
        stage = pipeline.stage(chunk)
        for message in pipeline._needed[action]:
            if (message.number, m) not in self.values:
                self.keep(message.number, m, self.posted.pop(message).wait())
        reads = pipeline._read.get(stage, ())
        made = self.chunks[chunk].forward(m, {c.number: self.read(c.number, m) for c in reads})
        for crossing in pipeline._made.get(stage, ()):
            self.check(made, crossing.number, m, f"the forward of stage {stage}")
            if pipeline._readers[crossing.number]:
                self.keep(crossing.number, m, made[crossing.number])
        for message in pipeline._sent[action]:
            self.transport.send(message, made[message.number])

    def backward(self, action: Action, *, last: bool) -> None:
        pipeline, (letter, chunk, m) = self.pipeline, action
        stage = pipeline.stage(chunk)
        sent = [c for c in pipeline._made.get(stage, ()) if c.grad and letter != "W"]
        made = self.chunks[chunk].backward(m, {c.number: self.summed(c, m) for c in sent}, letter, last)
        if letter == "W":
            return
        for crossing in pipeline._read.get(stage, ()):
            if not crossing.grad:
                continue
            self.check(made, crossing.number, m, f"the backward of stage {stage}", or_zero=True)
            message = Message(crossing.number, m, crossing.source, stage, True)
            if crossing.source % pipeline.ranks == pipeline.rank:
                self.gradients[message] = made[crossing.number]
            else:
                self.transport.send(message, made[crossing.number])

    def post(self, messages: Sequence[Message]) -> None:
        """Post the receives of these and of all that come before them on their edges."""
        for message in messages:
            edge = message.edge(self.pipeline.ranks)
            way = self.pipeline._ways.get(edge, [])
            while message not in self.posted and not self.has(message):
                if self.next[edge] == len(way):
                    raise AutoparError(f"schedule: no rank sends {message}. Check the schedule.")
                ahead = way[self.next[edge]]
                self.next[edge] += 1
                self.posted[ahead] = self.transport.receive(ahead, self.pipeline.specs(ahead.number, ahead.microbatch))

    def has(self, message: Message) -> bool:
        """Whether a value came already, for another stage of this rank."""
        return not message.gradient and (message.number, message.microbatch) in self.values

    def keep(self, number: int, microbatch: int, value: Tensor) -> None:
        """Until every stage of this rank that reads it has."""
        self.values[number, microbatch] = value, self.pipeline._readers[number]

    def read(self, number: int, microbatch: int) -> Tensor:
        if (number, microbatch) not in self.values:
            raise AutoparError(f"schedule: microbatch {microbatch}'s value {number} is read before this rank makes it.")
        value, readers = self.values.pop((number, microbatch))
        if readers > 1:
            self.values[number, microbatch] = value, readers - 1
        return value

    def summed(self, crossing: Crossing, microbatch: int) -> Tensor:
        """The gradients that the targets sent, added in ascending order of target: the same bits in every run."""
        total: Tensor | None = None
        for i, target in enumerate(crossing.targets):
            message = Message(crossing.number, microbatch, crossing.source, target, True)
            here = target % self.pipeline.ranks == self.pipeline.rank
            if here and message not in self.gradients:
                raise AutoparError(f"schedule: {message} is read before this rank makes it.")
            own = self.gradients.pop(message) if here else self.posted.pop(message).wait()
            total = own if total is None else total + own if i == 1 else total.add_(own)
        assert total is not None, f"value {crossing.number} crosses to no stage"
        return total

    def check(self, made: dict[int, Tensor], number: int, m: int, by: str, *, or_zero: bool = False) -> None:
        """That a tensor is what the others expect on the wire; a gradient that was left out is zero."""
        shape, dtype = self.pipeline.specs(number, m)
        if number not in made:
            assert or_zero, f"{by} did not make value {number} of microbatch {m}"
            made[number] = torch.zeros(shape, dtype=dtype, device=self.transport.device)
        own = made[number]
        if tuple(own.shape) != tuple(shape) or own.dtype != dtype:
            raise AutoparError(
                f"pipeline: {by} made {own.dtype} {tuple(own.shape)} for value {number} of microbatch {m}, and the "
                f"ranks expect {dtype} {tuple(shape)}. Compile again for these inputs."
            )
