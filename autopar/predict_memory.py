"""The most bytes that one rank holds during a step of training: whose they are, and when that is.

The program runs on fake tensors as it will on real ones: its buckets, its values, what it gathers ahead and what it has
under way. Its units are not run but replayed: every graph was walked once (`liveness`), and says what it makes, keeps
and lets go of, node by node. What communication backends hold in memory of their own is not counted.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.dry_run import IN_PLACE, SAME, _whole
from autopar.dry_run import _Dry as Dry
from autopar.dry_run import _tensors as tensors_of
from autopar.liveness import View, Walk, walk
from autopar.passes.lower import Local
from autopar.passes.split_backward import Parted
from autopar.passes.split_units import UnitClass
from autopar.runtime.buckets import Flight
from autopar.runtime.collectives import keep_until_settled, kept_apart, settle
from autopar.runtime.pipeline import Edge, Message, Spec, Transport
from autopar.runtime.program import Batch
from autopar.runtime.run import Units, units_of
from autopar.runtime.stage import Stage, Stages, alone
from autopar.runtime.units import Explicit, Ready, Unit
from autopar.runtime.weights import Weights

if TYPE_CHECKING:
    from autopar.capture import Capture

OWNERS = (
    "parameters",
    "optimizer",
    "gradients",
    "gathered",
    "saved",
    "values",
    "working",
    "sent",
    "inputs",
    "buffers",
)
"""Whose bytes are. ``gathered``: weights in the layout in which units read them; ``saved``: by forward for backward;
``values``: between units, and their gradients; ``working``: inside a unit; ``sent``: on the way to or from the wire."""

T = TypeVar("T")
MOST_RUN = 3  # microbatches: the first, one like all between, and the last


@dataclass(frozen=True)
class Peak:
    """``owners``: bytes by `OWNERS` at the fullest moment; ``where``: which it is; ``timeline``: (turn, bytes) of every
    unit, in order, the most in its turn; ``most``: by owner the most that it has at any moment."""

    owners: Mapping[str, int]
    where: str
    timeline: tuple[tuple[str, int], ...] = ()
    most: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self.owners.values())


def predict_memory(local: Local, captured: Capture, optimizer: int) -> Peak:
    """The fullest moment of a step of ``local``, or of a forward where it was captured in eval mode;
    ``optimizer``: bytes of its states."""
    return predict_rank([local], captured, optimizer)


def predict_rank(
    locals: Sequence[Local],
    captured: Capture,
    optimizer: int,
    pipeline: Stages | None = None,
    at: int = 0,
    unused: Collection[str] | None = None,
) -> Peak:
    """The same of a rank with several stages, or with one of a pipeline: see `dry_run._Dry`. With ``pipeline`` every
    microbatch of its schedule is run."""
    units = [units_of(local) for local in locals]
    parted = pipeline is not None and any(letter == "W" for letter, _, _ in pipeline.schedule[at])
    for unit in (u for each in units for run in each.values() for u in run.units):
        _graphs(unit, parted)  # traced and walked before anything is counted
    for local in locals:
        if local.prologue is not None:
            walk_of(local.prologue)
    with kept_apart(), _without_data(units), Ledger() as ledger:
        with ledger.of("parameters"):
            program = _Replayed(locals, units, captured, ledger, pipeline, at, unused)
        with ledger.of("optimizer"):
            states = torch.empty(optimizer, dtype=torch.uint8)
        ledger.restart()
        if captured.training:
            program.run()
        else:
            program.run_forward()
        del states
        by_owner = {k: ledger.fullest.get(k, 0) for k in OWNERS}
        return Peak(by_owner, ledger.where, tuple(ledger.timeline), dict(ledger.most_of))


def _without_data(units: Sequence[Mapping[int, Units]]) -> AbstractContextManager[Any]:
    """In which tensors have no values: on the meta device, which is fast; as fakes where autograd runs a unit."""
    if any(u.why is not None for each in units for run in each.values() for u in run.units):
        return FakeTensorMode(allow_non_fake_inputs=True)
    return torch.device("meta")


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages, each under the owner that is set when it is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner, self.turn = "working", ""
        self.alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.owners: dict[int, str] = {}
        self.flying: dict[int, tuple[Any, ...]] = {}  # by storage of the raw tensor, until it is waited for
        self.now: Counter[str] = Counter()
        self.total = self.most = 0
        self.most_of: Counter[str] = Counter()
        self.fullest: dict[str, int] = {}
        self.where = ""
        self.timeline: list[tuple[str, int]] = []

    @contextmanager
    def of(self, owner: str) -> Iterator[None]:
        """What is made inside is this owner's."""
        before, self.owner = self.owner, owner
        try:
            yield
        finally:
            self.owner = before

    def restart(self) -> None:
        """Forget the peak so far."""
        self.most, self.timeline = 0, []
        self.most_of.clear()
        self.begin("start of the step")

    def begin(self, turn: str) -> None:
        """Another unit's turn."""
        self.turn = turn
        self.timeline.append((turn, 0))
        self.note("")

    def note(self, at: str, more: Mapping[str, int] | None = None) -> None:
        """A moment, with ``more`` bytes than the storages that there are."""
        total = self.total + (sum(more.values()) if more else 0)
        if self.timeline and total > self.timeline[-1][1]:
            self.timeline[-1] = self.turn, total
        if total > self.most:
            self.most = total
            self.fullest = dict(self.now + Counter(more or {}))
            self.where = ", ".join(filter(None, (self.turn, at)))

    def give(self, tensor: Tensor, owner: str) -> None:
        """From now on a storage is another's."""
        key = id(tensor.untyped_storage())
        if key in self.owners:
            size = self.alive[key][1]
            self.now[self.owners[key]] -= size
            self.now[owner] += size
            self.most_of[owner] = max(self.most_of[owner], self.now[owner])
            self.owners[key] = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op of the executor."""
        space, name = func.name().split(".")[0].split("::")
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if space == "autopar" and name.startswith("wait_") and x is not None:
            keep_until_settled(self.flying.pop(id(x.untyped_storage()), ()))
        if space == "autopar" and name in SAME and x is not None and x.is_contiguous() and _whole(name, args):
            return x
        made: Any = x if f"{space}.{name}" in IN_PLACE else func(*args, **(kwargs or {}))
        if space == "autopar" and name.startswith("start_"):
            self.flying[id(made.untyped_storage())] = made, x
            keep_until_settled((made, x))
        for tensor in tensors_of(made):
            self._born(tensor)
        return made

    def _born(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self.alive:
            return

        def died(_: Any) -> None:
            del self.alive[key]
            self.total -= size
            self.now[self.owners.pop(key)] -= size

        self.alive[key], self.owners[key] = (weakref.ref(storage, died), size), self.owner
        self.total += size
        self.now[self.owner] += size
        self.most_of[self.owner] = max(self.most_of[self.owner], self.now[self.owner])
        if self.total > self.most or (self.timeline and self.total > self.timeline[-1][1]):
            self.note(self.owner)


class _Replayed(Dry):
    """A program whose units are replayed."""

    def __init__(
        self,
        locals: Sequence[Local],
        units: Sequence[Mapping[int, Units]],
        captured: Capture,
        ledger: Ledger,
        pipeline: Stages | None,
        at: int,
        unused: Collection[str] | None,
    ) -> None:
        replayed = [{rows: _replayed(run, ledger) for rows, run in each.items()} for each in units]
        super().__init__(locals, replayed, captured, pipeline, at, unused)
        self.ledger = ledger
        self.stages = tuple(
            stage
            if stage.prologue is None
            else replace(stage, prologue=_Replay(Unit(UnitClass(stage.prologue, (), (), ())), ledger).prologue)  # type: ignore[arg-type]
            for stage in self.stages
        )
        tensors = [self.tensors.get_buffer(name) for local in locals for name in local.buffers]
        for tensor in (*tensors, *(c for stage in self.stages for c in stage.constants)):
            ledger.give(tensor, "buffers")
        count = 1 + max(m for rank in self.pipeline.schedule for _, _, m in rank)
        if pipeline is None and count > MOST_RUN:
            count = MOST_RUN
            self.pipeline = alone(locals[0], count)
            self.rows = tuple(_few(self.rows, count))
        with ledger.of("inputs"):
            self.every = super()._inputs()  # of microbatches that are not run, too
        self.rows = tuple(_few(self.rows, count))
        self.batch = Batch(_few(self.every.pieces, count), self.every.whole)

    def _transport(self) -> Transport:
        return _Wire(self.ledger, self.at, len(self.pipeline.schedule))

    def _spec(self, number: int, microbatch: int) -> Spec:
        use = self.pipeline.crossed[number]
        return use.layout.local_shape(use.shape, self.mesh, self.mesh.coordinates(0, microbatch)), use.dtype

    @torch.no_grad()
    def run_forward(self) -> None:
        """`forward`, up to its outputs."""
        settle()
        self._run(self._inputs(), train=False, keep=True)

    def _inputs(self) -> Batch:
        return self.batch

    def _weights(self, stage: Stage, letters: Sequence[str]) -> Weights:
        uses = stage.local.parameters
        rests = [self.rests[u.fqn].detach() for u in uses]
        wanted = [u.trainable for u in uses]
        calls = [call.fqn for call in next(iter(stage.units.values())).program.calls]
        return _Weights(stage.ways, uses, rests, wanted, letters, ledger=self.ledger, calls=calls)


def _few(every: Sequence[T], count: int) -> list[T]:
    """So many of a list at most, with its last."""
    return [*every[: count - 1], every[-1]] if len(every) > count else [*every]


class _Wire:
    """A transport to ranks that are not there: what is received is made when its receive is posted, what is sent is
    kept until the next is sent the same way."""

    def __init__(self, ledger: Ledger, rank: int, ranks: int) -> None:
        self.ledger, self.rank, self.ranks, self.device = ledger, rank, ranks, torch.empty(0).device
        self.sending: dict[Edge, Tensor] = {}

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """See `runtime.pipeline.Transport`."""
        return [list(numbers)] * self.ranks

    def open(self, edges: Sequence[Edge], ranks: int) -> None:
        """See `runtime.pipeline.Transport`."""

    def send(self, message: Message, tensor: Tensor) -> None:
        """See `runtime.pipeline.Transport`."""
        self.sending[message.edge(self.ranks)] = tensor

    def receive(self, message: Message, spec: Spec) -> _Posted:
        """See `runtime.pipeline.Transport`."""
        with self.ledger.of("sent"):
            return _Posted(torch.empty(spec[0], dtype=spec[1]), self.ledger)

    def drain(self) -> None:
        """See `runtime.pipeline.Transport`."""
        self.sending.clear()

    def fail(self, why: str) -> None:
        """See `runtime.pipeline.Transport`."""


class _Posted:
    """A receive whose tensor is there."""

    def __init__(self, tensor: Tensor, ledger: Ledger) -> None:
        self.tensor: Tensor | None = tensor
        self.ledger = ledger

    def wait(self) -> Tensor:
        """Once."""
        made, self.tensor = self.tensor, None
        assert made is not None
        self.ledger.give(made, "values")
        return made


class _Weights(Weights):
    """Says whose the storages are that it makes, and whose turn it is."""

    def __init__(self, *args: Any, ledger: Ledger, calls: Sequence[str]) -> None:
        self.ledger = ledger
        self.turns = _turns(calls, args[4])
        with ledger.of("gathered"):
            super().__init__(*args)

    def _start(self, gathered: Any) -> list[Flight]:
        with self.ledger.of("gathered"):
            return super()._start(gathered)

    def arrive(self) -> None:
        self.ledger.begin(next(self.turns))
        with self.ledger.of("gathered"):
            super().arrive()

    def add(self, i: int, gradient: Tensor, fresh: bool) -> None:
        self.ledger.give(gradient, "gradients")
        with self.ledger.of("gradients"):
            super().add(i, gradient, fresh)

    def reduce(self, after: int, last: bool) -> None:
        with self.ledger.of("sent"):
            super().reduce(after, last)

    def _bring(self, flight: Flight) -> None:
        with self.ledger.of("sent"):
            super()._bring(flight)
        for i in flight.members:
            if i in self.gradients:
                self.ledger.give(self.gradients[i], "gradients")

    def finish(self) -> dict[int, Tensor]:
        self.ledger.begin("end of the step")
        with self.ledger.of("gradients"):
            return super().finish()


def _turns(calls: Sequence[str], letters: Sequence[str]) -> Iterator[str]:
    yield "prologue"
    for letter in letters:
        names = [fqn or "the model" for fqn in calls]
        yield from (f"forward of {n}" for n in names) if letter == "F" else (f"backward of {n}" for n in names[::-1])


# -- units -----------------------------------------------------------------------------------------------------------

_WALKS: WeakKeyDictionary[fx.GraphModule, Walk] = WeakKeyDictionary()


def walk_of(graph: fx.GraphModule) -> Walk:
    """`liveness.walk` of a graph, once."""
    if graph not in _WALKS:
        _WALKS[graph] = walk(graph)
    return _WALKS[graph]


def _graphs(unit: Unit, parted: bool) -> None:
    graphs: list[fx.GraphModule | None] = [unit.kind.graph]
    if isinstance(unit, Explicit):
        parts = (unit.parted.inputs, unit.parted.weights) if parted else ()
        graphs = [unit.made.forward, *((p.graph for p in parts if p) if parted else (unit.made.backward,))]
    for graph in graphs:
        if graph is not None:
            walk_of(graph)


def _replayed(units: Units, ledger: Ledger) -> Units:
    return replace(units, units=tuple(_Replay(u, ledger) if u.why is None else u for u in units.units))


class _Replay(Explicit):
    """A unit that makes and holds what the graphs of ``unit`` would; its forward alone, where that has no more."""

    def __init__(self, unit: Unit, ledger: Ledger) -> None:
        self.kind, self.unit, self.ledger = unit.kind, unit, ledger
        self.reads, self.tangents, self.grads = unit.reads, unit.tangents, unit.grads
        if isinstance(unit, Explicit):
            self.made, self.outputs, self.strides = unit.made, unit.outputs, unit.strides

    @property
    def parted(self) -> Parted:
        assert isinstance(self.unit, Explicit)
        return self.unit.parted

    @property
    def input_reads(self) -> tuple[int, ...]:
        return self.unit.input_reads

    @property
    def weight_reads(self) -> tuple[int, ...]:
        return self.unit.weight_reads

    def _ready(self, graph: fx.GraphModule, outputs: int) -> Ready:
        return partial(self._replay, graph, outputs)

    def prologue(self, *args: Any) -> tuple[list[Any], list[Any]]:
        """What units read as hoisted, and no updates: as the graph of a prologue returns it."""
        return self._replay(self.kind.graph, len(walk_of(self.kind.graph).results), list(args)), []

    def _replay(self, graph: fx.GraphModule, outputs: int, args: list[Any]) -> list[Any]:
        """What the graph returns; it lets go of its arguments as it goes. Results after ``outputs`` are saved."""
        found = walk_of(graph)
        given = {n: args[i] for i, n in enumerate(found.arguments) if n is not None}
        args.clear()
        wanted, saved = set(found.results), set(found.results[outputs:])
        real: dict[int, Tensor] = {}  # storages that outlive the graph, or its node
        inside: dict[int, int] = {}
        for moment in found.moments:
            for number in moment.made:
                if number in wanted or number in moment.sent:
                    with self.ledger.of("saved" if number in saved else "values" if number in wanted else "sent"):
                        real[number] = _storage(found, number)
                else:
                    inside[number] = found.nbytes[number]
            self.ledger.note(moment.node, {"working": sum(inside.values()) + moment.extra})
            if moment.sent:
                keep_until_settled(tuple(real[n] for n in moment.sent if n in real))
            for number in moment.gone:
                inside.pop(number, None)
                if number not in wanted:
                    real.pop(number, None)
                    given.pop(number, None)
        bases = given | real
        return [_view(bases, n, v) for n, v in zip(found.results, found.views, strict=True)]


def _storage(found: Walk, number: int) -> Tensor:
    """As many bytes, as the first result that is all of them where there is one."""
    nbytes = found.nbytes[number]
    for result, view in zip(found.results, found.views, strict=True):
        if result == number and view is not None and math.prod(view.shape) * view.dtype.itemsize == nbytes:
            return torch.empty_strided(view.shape, view.strides, dtype=view.dtype)
    return torch.empty(nbytes, dtype=torch.uint8)


def _view(bases: Mapping[int, Tensor], number: int | None, view: View | None) -> Any:
    if number is None or view is None:
        return None
    base = bases[number]
    if (base.dtype, base.shape, base.stride(), base.storage_offset()) == (*_of(view), view.offset):
        return base
    if base.dtype != view.dtype:
        base = base.view(view.dtype)
    return base.as_strided(view.shape, view.strides, view.offset)


def _of(view: View) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]:
    return view.dtype, view.shape, view.strides


__all__ = ["MOST_RUN", "OWNERS", "Ledger", "Peak", "predict_memory", "walk_of"]
