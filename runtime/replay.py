"""The values of a recording, computed in pieces: a rank keeps what it owns of every tensor, and draws little else.

Events run in the order in which they were recorded, but what draws nothing runs as soon as its operands are there, so
that of many tensors few are under way. A walk backwards says what each event must leave: nothing (of a draw then only
the stream moves), some runs of every dim (`Region`), or the whole storage. Draws are made `CHUNK` bytes at a time,
which gives the numbers of one call, and chunks that nobody needs are jumped over; exact elementwise ops run on a piece
alone; whatever else there is runs on whole tensors, one by one. Values are bit for bit those of the recorded code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from autopar.errors import AutoparError
from autopar.runtime.deferred import Event, Place, Recording, Seek, Stream
from autopar.runtime.jump import skip, words_of
from autopar.runtime.runs import GROUP, Region, Runs, chunks, meet, narrow, overlaps, put_chunk, take, whole_runs

aten = torch.ops.aten

SMALL = 1 << 20  # storages up to so many bytes are made whole
# Draw element after element (``normal_``: group after group), so that chunks in order are one call.
SEQUENTIAL = {
    aten.uniform_.default,
    aten.normal_.default,
    aten.random_.default,
    getattr(aten.random_, "from"),
    aten.random_.to,
    aten.cauchy_.default,
    aten.log_normal_.default,
    aten.geometric_.default,
}
FULL: dict[OpOverload, Callable[..., Any]] = {
    aten.zeros.default: lambda *a: 0,
    aten.zeros_like.default: lambda *a: 0,
    aten.new_zeros.default: lambda *a: 0,
    aten.ones.default: lambda *a: 1,
    aten.ones_like.default: lambda *a: 1,
    aten.new_ones.default: lambda *a: 1,
    aten.full.default: lambda size, value: value,
    aten.full_like.default: lambda like, value: value,
    aten.new_full.default: lambda like, size, value: value,
}
# Elementwise ops whose result for an element is the same wherever it stands: correctly rounded, or no arithmetic.
# Others may take another path for the last elements of a loop, and run on whole tensors.
_EXACT = (
    "zero_ fill_ copy_ _to_copy clone lift_fresh_copy add add_ sub sub_ mul mul_ div div_ neg neg_ abs abs_ sign sgn "
    "clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ minimum maximum sqrt sqrt_ square erfinv erfinv_ floor "
    "ceil trunc round masked_fill masked_fill_ where eq ne lt le gt ge logical_and logical_or logical_not relu relu_"
)
EXACT = frozenset(_EXACT.split())


@dataclass(frozen=True)
class Whole:
    """A storage that is needed as it is."""


Need = Region | Whole
WHOLE = Whole()


@dataclass(frozen=True)
class Target:
    """Write the (start, length) ``runs`` of every dim of what lies at ``place`` into ``into``, of their shape."""

    name: str
    place: Place
    runs: Runs
    into: Tensor


@dataclass(frozen=True, eq=False)
class _Do:
    """An event that is executed. ``pieces``: on what is needed alone; ``after``: what then is needed of the storages
    that it touches; ``ends``: the storages that no later event touches."""

    event: Event
    live: bool
    pieces: bool
    after: dict[int, Need]
    ends: tuple[int, ...] = ()


@torch.no_grad()
def replay(recording: Recording, targets: Sequence[Target]) -> dict[str, str]:
    """Compute the targets' values into their tensors. Returns which of them were made whole for a while, with the op
    that needs it, where that is more than `SMALL` bytes.

    Raises AutoparError where a value depends on memory that nothing wrote.
    """
    return _Replay(recording, targets).run()


def refuse_unwritten(recording: Recording, targets: Sequence[Target]) -> None:
    """Raise AutoparError where one of the targets, whole, depends on memory that nothing wrote; computes nothing."""
    _Replay(recording, [replace(t, runs=whole_runs(t.place.size)) for t in targets])


def value_of(recording: Recording, place: Place) -> Tensor:
    """The whole value of what lies at ``place``, contiguous."""
    into = torch.empty(place.size, dtype=place.dtype)
    replay(recording, [Target("tensor", place, whole_runs(place.size), into)])
    return into


class _Replay:
    def __init__(self, recording: Recording, targets: Sequence[Target]) -> None:
        self.recording = recording
        self.targets: dict[int, list[Target]] = {}
        for target in targets:
            self.targets.setdefault(target.place.storage, []).append(target)
        self.wanted = {storage: self._wanted(storage, own) for storage, own in self.targets.items()}
        self.whole: dict[str, str] = {}  # target -> the op that needs a whole tensor for it
        order = scheduled(recording.events)
        self.steps, self.unborn = self._backwards(order)
        self._refuse_unwritten()
        self.held: dict[int, Tensor] = {}  # a piece, or the bytes of a whole storage
        self.regions: dict[int, Region] = {}  # of the pieces
        self.generators: dict[int, torch.Generator] = {}
        self.stood: dict[int, Tensor] = {}  # event that a `Seek` names -> the state after it
        self.ahead: dict[int, int] = {}  # stream -> words that its generator has still to be moved past
        self.numbers = {id(e): i for i, e in enumerate(recording.events)}
        self.scratch: Tensor | None = None

    # -- what is needed ---------------------------------------------------------------------------------------------

    def _wanted(self, storage: int, targets: Sequence[Target]) -> Need:
        first = targets[0]
        same = all((t.place, t.runs) == (first.place, first.runs) for t in targets)
        if not same or not self._fills(first.place) or self._is_small(storage):
            return WHOLE
        return Region(first.place.size, first.place.dtype, first.runs)

    def _fills(self, place: Place) -> bool:
        """Whether a place is the whole of its storage, in order."""
        nbytes = self.recording.nbytes[place.storage]
        return place.is_contiguous and place.offset == 0 and place.numel * place.dtype.itemsize == nbytes

    def _is_small(self, storage: int) -> bool:
        return self.recording.nbytes[storage] <= SMALL

    def _backwards(self, order: Sequence[Event | Seek]) -> tuple[list[_Do | Seek], dict[int, Need]]:
        """The events to execute, and what is needed of storages before any event."""
        need: dict[int, Need] = dict(self.wanted)
        serves = {storage: own[0].name for storage, own in self.targets.items()}
        steps: list[_Do | Seek] = []
        ended: set[int] = set()
        drawing = False
        plain = {str(e.op) for e in order if isinstance(e, Event) and (_name(e) in EXACT or e.op in SEQUENTIAL)}
        for event in reversed(order):
            if isinstance(event, Seek):
                if drawing:
                    steps.append(event)
                continue
            live = any(p.storage in need for p in event.outputs)
            draws = event.stream is not None
            if draws and drawing and not live:
                live = not self._skips(event)
            if not live:
                if draws and drawing:
                    steps.append(_Do(event, False, False, {}))
                continue
            drawing |= draws
            touched = {p.storage for p in (*event.outputs, *event.reads)}
            served = next((serves[p.storage] for p in event.outputs if p.storage in serves), None)
            after = {s: need[s] for s in touched if s in need}
            reads = self._pieces(event, need)
            pieces = reads is not None
            if reads is None:
                reads = [(place, WHOLE) for place in event.reads]
                need |= {place.storage: WHOLE for place in event.outputs}
                if served is not None and not all(map(self._is_small, touched)):
                    said = self.whole.get(served)
                    self.whole[served] = str(event.op) if said is None or said in plain else said
            for place in event.outputs:
                if place not in event.writes or (event.blind and self._fills(place)):
                    need.pop(place.storage, None)
            for place, wanted in reads:
                old = need.get(place.storage, wanted)
                need[place.storage] = wanted if old == wanted and not self._is_small(place.storage) else WHOLE
                if served is not None:
                    serves.setdefault(place.storage, served)
            ends = tuple(s for s in touched if s not in ended)
            ended |= touched
            steps.append(_Do(event, True, pieces, after, ends))
        return steps[::-1], need

    def _skips(self, event: Event) -> bool:
        """Whether the stream can be moved past a draw without its operands."""
        return event.op in SEQUENTIAL and event.outputs[0].is_contiguous

    def _pieces(self, event: Event, need: dict[int, Need]) -> list[tuple[Place, Need]] | None:
        """What an event must read where it computes a region alone; None where it cannot."""
        if len(event.outputs) != 1 or len(event.writes) + len(event.makes) > 2:
            return None
        (out,) = event.outputs
        region = need.get(out.storage)
        if not isinstance(region, Region):
            return None
        if out.dtype != region.dtype:
            return None
        full = self._fills(out)
        name = _name(event)
        if event.stream is not None:
            return [] if full and event.op in SEQUENTIAL else None
        if event.op in FULL:
            return [] if full else None
        if name not in EXACT or event.kwargs.get("alpha", 1) != 1:
            return None
        if any(isinstance(a, (list, tuple)) for a in event.args):
            return None
        if not full:
            inside = _box(out, region.shape)
            scalars = all(p.numel == 1 for p in event.reads)
            return [(p, WHOLE) for p in event.reads] if inside and event.writes and scalars else None
        reads: list[tuple[Place, Need]] = []
        for place in event.reads:
            if place.numel == 1 and out.numel > 1:
                reads.append((place, WHOLE))
            elif self._fills(place) and place.size == out.size:
                reads.append((place, replace(region, dtype=place.dtype)))
            elif out.size == region.shape:
                reads.append((place, WHOLE))
            else:
                return None
        return reads

    def _refuse_unwritten(self) -> None:
        born = {s for s in self.unborn if s not in self.recording.constants and self.recording.nbytes[s]}
        if not any(self._has_gaps(s) for s in born):
            return
        every = [t for own in self.targets.values() for t in own]
        for target in every if len(every) > 1 else ():
            replaced = Target(target.name, target.place, whole_runs(target.place.size), target.into)
            _Replay(self.recording, [replaced])
        raise AutoparError(
            f"{every[0].name}: has no value: nothing wrote all of it. Fill it where the model is made, or by "
            "init_weights(init=...)."
        )

    def _has_gaps(self, storage: int) -> bool:
        """Whether some of a storage is never written."""
        runs = [r for e in self.recording.events if isinstance(e, Event) for r in self._written(e, storage)]
        end = 0
        for start, stop in sorted(runs):
            if start > end:
                break
            end = max(end, stop)
        return end < self.recording.nbytes[storage]

    def _written(self, event: Event, storage: int) -> list[tuple[int, int]]:
        return [run for place in event.outputs if place.storage == storage for run in _byte_runs(place)]

    # -- doing it ---------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, str]:
        named = {step.after for step in self.recording.events if isinstance(step, Seek)}
        for storage in self.targets.keys() - {s for step in self.steps if isinstance(step, _Do) for s in step.ends}:
            self._finish(storage)
        for step in self.steps:
            if isinstance(step, Seek):
                self._seek(step)
                continue
            event = step.event
            with _default_dtype(event.default_dtype):
                self._do(step)
            if event.stream is not None and self.numbers[id(event)] in named:
                self.stood[self.numbers[id(event)]] = self._generator(event.stream).get_state()
            for place in (*event.outputs, *event.reads):
                self._shrink(place.storage, step.after.get(place.storage))
            for storage in step.ends:
                if storage in self.targets:
                    self._finish(storage)
                self._let_go(storage)
        return self.whole

    def _do(self, step: _Do) -> None:
        event = step.event
        if not step.live:
            (out,) = event.outputs
            self._draw(event, None, None, out)
        elif not step.pieces:
            self._whole(event)
        else:
            (out,) = event.outputs
            region = step.after[out.storage]
            assert isinstance(region, Region)
            if event.stream is not None:
                self._draw(event, self._piece(out.storage, region), region, out)
            elif event.op in FULL:
                self._piece(out.storage, region).fill_(FULL[event.op](*event.args))
            elif self._fills(out):
                self._elementwise(event, out, region)
            else:
                self._inside(event, out, region)

    def _piece(self, storage: int, region: Region) -> Tensor:
        """The piece of a storage, made where there is none: the target itself where it can be."""
        if storage in self.regions:
            return self.held[storage]
        into = self.targets[storage][0].into if storage in self.targets else None
        fits = into is not None and into.device.type == "cpu" and into.is_contiguous()
        made = into if fits and into is not None else torch.empty(region.local, dtype=region.dtype)
        if storage in self.held or storage in self.recording.constants:
            made.copy_(self._part(storage, region))
        self.held[storage], self.regions[storage] = made, region
        return made

    def _part(self, storage: int, region: Region) -> Tensor:
        """A piece of a storage that is held whole, or not yet."""
        if storage in self.recording.constants and storage not in self.held:
            return take(self.recording.constant(storage).view(region.dtype).reshape(region.shape), region.runs)
        flat = self._storage(storage)[: prod(region.shape) * region.dtype.itemsize].view(region.dtype)
        return take(flat.view(region.shape), region.runs)

    def _storage(self, storage: int) -> Tensor:
        """The bytes of a whole storage, made where there are none."""
        assert storage not in self.regions, f"storage {storage} is held in pieces"
        if storage not in self.held:
            made = torch.empty(self.recording.nbytes[storage], dtype=torch.uint8)
            if storage in self.recording.constants:
                value = self.recording.constant(storage).contiguous()
                made.copy_(value.reshape(-1).view(torch.uint8))
            self.held[storage] = made
        return self.held[storage]

    def _real(self, place: Place) -> Tensor:
        return _seen(self._storage(place.storage), place)

    def _whole(self, event: Event) -> None:
        args, kwargs = tree_map(self._argument, (event.args, dict(event.kwargs)))
        out = self._call(event, args, kwargs)
        made = [out] if isinstance(out, Tensor) else [t for t in out if isinstance(t, Tensor)] if event.makes else []
        for place, tensor in zip(event.makes, made, strict=False):
            if place is not None:
                self._real(place).copy_(tensor)

    def _call(self, event: Event, args: Any, kwargs: dict[str, Any]) -> Any:
        if event.stream is None:
            return event.op(*args, **kwargs)
        generator = self._generator(event.stream)
        if any(a.name == "generator" for a in event.op._schema.arguments):
            return event.op(*args, **(kwargs | {"generator": generator}))
        default = torch.default_generator
        before = default.get_state()
        try:
            default.set_state(generator.get_state())
            return event.op(*args, **kwargs)
        finally:
            generator.set_state(default.get_state())
            default.set_state(before)

    def _argument(self, a: Any) -> Any:
        if isinstance(a, Place):
            return self._real(a)
        return self._generator(a.number) if isinstance(a, Stream) else a

    def _draw(self, event: Event, piece: Tensor | None, region: Region | None, out: Place) -> None:
        """Draw chunk by chunk what belongs to the piece; the rest is only counted, where that can be."""
        assert event.stream is not None
        for start, length in chunks(out.numel, out.dtype.itemsize):
            kept = piece is not None and region is not None and overlaps(region, start, length)
            words = None if kept or out.numel < GROUP else words_of(event.op, out.dtype, length)
            if words is not None:
                self.ahead[event.stream] = self.ahead.get(event.stream, 0) + words
                continue
            chunk = self._scratch(length, out.dtype)
            event.op(chunk, *event.args[1:], **{**event.kwargs, "generator": self._generator(event.stream)})
            if kept and piece is not None and region is not None:
                put_chunk(piece, region, start, chunk)

    def _scratch(self, length: int, dtype: torch.dtype) -> Tensor:
        nbytes = length * dtype.itemsize
        if self.scratch is None or self.scratch.numel() < nbytes:
            self.scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self.scratch[:nbytes].view(dtype)

    def _elementwise(self, event: Event, out: Place, region: Region) -> None:
        """The event on the piece alone."""

        def argument(a: Any) -> Any:
            if not isinstance(a, Place):
                return a
            if a.numel == 1 and out.numel > 1:
                return self._real(a)
            if event.writes and a == out:
                return self._piece(out.storage, region)
            if not (self._fills(a) and a.size == out.size):
                return take(self._real(a).expand(region.shape), region.runs)
            own = replace(region, dtype=a.dtype)
            return self.held[a.storage] if a.storage in self.regions else self._part(a.storage, own)

        kwargs = {k: argument(v) for k, v in event.kwargs.items() if k != "memory_format"}
        made = event.op(*map(argument, event.args), **kwargs)
        if event.makes and out.storage in self.targets:
            self._piece(out.storage, region).copy_(made)
        elif event.makes:
            self.held[out.storage], self.regions[out.storage] = made, region

    def _inside(self, event: Event, out: Place, region: Region) -> None:
        """An op that writes scalars into a box of the tensor, on what the piece has of the box."""
        box = _box(out, region.shape)
        assert box is not None
        piece = self._piece(out.storage, region)
        args, kwargs = tree_map(self._argument, (event.args[1:], dict(event.kwargs)))
        for own, _ in meet(region.runs, box):
            event.op(narrow(piece, own), *args, **kwargs)

    def _shrink(self, storage: int, need: Need | None) -> None:
        """Let go of what no later event needs."""
        if storage in self.held and need is None:
            self._let_go(storage)
        elif storage in self.held and isinstance(need, Region) and storage not in self.regions:
            self._piece(storage, need)

    def _let_go(self, storage: int) -> None:
        self.held.pop(storage, None)
        self.regions.pop(storage, None)

    def _finish(self, storage: int) -> None:
        """Write what the targets want of a storage that is complete."""
        for target in self.targets[storage]:
            if storage not in self.regions:
                target.into.copy_(take(self._real(target.place), target.runs))
            elif self.held[storage] is not target.into:
                target.into.copy_(self.held[storage])
        self._let_go(storage)

    def _generator(self, stream: int) -> torch.Generator:
        """The generator of a stream, where the recorded code would have it."""
        generator = self.generators.setdefault(stream, torch.Generator())
        skip(generator, self.ahead.pop(stream, 0))
        return generator

    def _seek(self, seek: Seek) -> None:
        state = seek.state if seek.after is None else self.stood[seek.after]
        assert state is not None
        self.ahead.pop(seek.stream, None)
        self._generator(seek.stream).set_state(state)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(default)


def scheduled(events: Sequence[Event | Seek]) -> list[Event | Seek]:
    """The events in an order that gives the same values and keeps fewer of them: draws as recorded, what draws nothing
    right after the last event that it depends on."""
    wrote: dict[int, int] = {}
    read: dict[int, int] = {}
    anchors: list[int] = []
    for i, event in enumerate(events):
        anchor = -1
        if isinstance(event, Event):
            inputs = {p.storage for p in event.reads}
            outputs = {p.storage for p in event.outputs}
            if event.stream is None:
                before = [wrote[s] for s in inputs | outputs if s in wrote] + [read[s] for s in outputs if s in read]
                anchor = max(before, default=-1)
            anchor = i if anchor < 0 else anchor
            wrote |= dict.fromkeys(outputs, anchor)
            for s in inputs:
                read[s] = max(read.get(s, -1), anchor)
        anchors.append(i if anchor < 0 else anchor)
    return [events[i] for i in sorted(range(len(events)), key=lambda i: (anchors[i], i))]


def _name(event: Event) -> str:
    return event.op._schema.name.removeprefix("aten::")


def _seen(storage: Tensor, place: Place) -> Tensor:
    """The bytes of a storage as the tensor that lies at ``place``."""
    made = torch.empty(0, dtype=place.dtype)
    return made.set_(storage.untyped_storage(), place.offset, place.size, place.stride)


def _box(place: Place, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """The (start, length) of every dim that ``place`` covers of a contiguous tensor of ``shape``, where it is such a
    box (a slice, or one index of a dim)."""
    strides = tuple(accumulate(reversed((*shape[1:], 1)), lambda a, b: a * b))[::-1] if shape else ()
    sizes = [(n, s) for n, s in zip(place.size, place.stride, strict=True) if n != 1]
    rest, box = place.offset, []
    for length, step in zip(shape, strides, strict=True):
        start, rest = divmod(rest, step) if step else (0, rest)
        here = sizes[0][0] if sizes and sizes[0][1] == step else 1
        if here > 1:
            sizes.pop(0)
        if start + here > length:
            return None
        box.append((start, here))
    return tuple(box) if not sizes and not rest else None


def _byte_runs(place: Place) -> list[tuple[int, int]]:
    """The (start, stop) bytes of a storage that lie at ``place``."""
    item = place.dtype.itemsize
    dims = sorted(((s, n) for n, s in zip(place.size, place.stride, strict=True) if n != 1), reverse=True)
    if not place.numel:
        return []
    inner = 1
    while dims and dims[-1][0] == inner:
        inner *= dims.pop()[1]
    starts = [place.offset]
    for step, n in dims:
        starts = [s + step * k for s in starts for k in range(n)]
    return [(s * item, (s + inner) * item) for s in starts]
