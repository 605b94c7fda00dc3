"""The parameters of a step: gathered where units read them, released after, their gradients added up and taken back.

What is static of it are the `Ways` of a program: which buckets enter once a step, which are gathered for the forward
and for the backward of each unit, and after which unit's backward each reduction may start. `Weights` is one step: it
gathers one unit ahead, and keeps at most `UNDER_WAY` reductions beside backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autopar.runtime.buckets import CAP, Bucket, Flight, buckets
from autopar.runtime.collectives import settle

if TYPE_CHECKING:
    from autopar.passes.lower import Local, ParameterUse
    from autopar.runtime.run import Units

UNDER_WAY = 2  # reductions that may be in flight: what one has brought is added before the next but one starts


@dataclass(frozen=True)
class Reduced:
    """Gradients that go back in one bucket, ``after`` the backward of this call: then the last of them is there."""

    bucket: Bucket
    reduce: str
    after: int


@dataclass(frozen=True)
class Ways:
    """``at_use``: the parameters, as places in `Local.parameters`, that are gathered for each unit that reads them;
    ``entered``: once a step, before anything is read; ``prologue``, ``forward`` and ``backward`` (by call): gathered
    at use, and where backward is parted for its ``parts``, ``I`` and ``W``; ``reduced`` in the order in which backward
    starts them, and by call (``after``); ``reached``: the parameters that the loss has a gradient for."""

    at_use: frozenset[int]
    entered: tuple[Bucket, ...]
    prologue: tuple[Bucket, ...]
    forward: tuple[tuple[Bucket, ...], ...]
    backward: tuple[tuple[Bucket, ...], ...]
    parts: Mapping[str, tuple[tuple[Bucket, ...], ...]]
    reduced: tuple[Reduced, ...]
    reached: frozenset[int]

    @cached_property
    def after(self) -> Mapping[int, Sequence[Reduced]]:
        """The reductions that wait for the backward of each call."""
        found: dict[int, list[Reduced]] = {}
        for r in self.reduced:
            found.setdefault(r.after, []).append(r)
        return found

    def moves(self, microbatches: int, *, train: bool) -> Iterator[tuple[Bucket, int, int]]:
        """How often each bucket goes in a step: (bucket, times from rest to use, times back)."""
        for bucket in (*self.entered, *self.prologue):
            yield bucket, 1, 0
        backward = [*self.parts.values()] if self.parts else [self.backward]
        for bucket in (b for part in (self.forward, *(backward if train else ())) for call in part for b in call):
            yield bucket, microbatches, 0
        for r in self.reduced if train else ():
            yield r.bucket, 0, microbatches if r.reduce == "microbatch" else 1

    def gathers(self, actions: Iterable[str]) -> Iterator[tuple[Bucket, ...]]:
        """What is gathered for each moment of a step: the prologue, then for each of ``actions`` (``F``; ``B``, or
        ``I`` and ``W``) every call, backward from the last."""
        yield self.prologue
        for action in actions:
            if action == "F":
                yield from self.forward
            else:
                yield from reversed(self.backward if action == "B" else self.parts[action])


def ways_of(local: Local, units: Mapping[int, Units], cap: int = CAP, parted: bool = False) -> Ways:
    """The ways of a rank's program. ``units``: how its units are run, for a microbatch of so many rows; all have the
    same calls. ``parted``: backward makes the gradients of parameters apart."""
    run = next(iter(units.values()))
    at_use = frozenset(i for i, u in enumerate(local.parameters) if u.gather == "use" and u.fqn in local.enter)
    last: dict[int, int] = {}
    forward, backward, inputs, weights = [], [], [], []
    for number, call in enumerate(run.program.calls):
        unit = run.units[call.kind]
        read = [(place, i) for place, (word, i) in enumerate(call.args) if word == "parameter"]
        forward.append(buckets(local, (i for _, i in read if i in at_use), cap))
        again = (i for place, i in read if i in at_use and place in unit.reads)
        backward.append(buckets(local, again, cap))
        if parted:
            inputs.append(buckets(local, (i for place, i in read if i in at_use and place in unit.input_reads), cap))
            weights.append(buckets(local, (i for place, i in read if i in at_use and place in unit.weight_reads), cap))
        for place, i in read:
            if place in unit.grads:
                last.setdefault(i, number)
    loss = run.program.outputs[0] if run.program.outputs else ("", 0)
    if local.has_loss and loss[0] == "parameter" and local.parameters[loss[1]].trainable:
        last.setdefault(loss[1], 0)
    order = sorted(last, key=lambda i: (-last[i], i))
    reduced = [
        Reduced(bucket, local.parameters[bucket.members[0]].reduce, min(last[i] for i in bucket.members))
        for bucket in buckets(local, order, cap, lambda use: use.reduce)
    ]
    return Ways(
        at_use=at_use,
        entered=buckets(local, (i for i in range(len(local.parameters)) if i not in at_use), cap),
        prologue=buckets(local, (i for i in _prologue_reads(local) if i in at_use), cap),
        forward=tuple(forward),
        backward=tuple(backward),
        parts={"I": tuple(inputs), "W": tuple(weights)} if parted else {},
        reduced=tuple(sorted(reduced, key=lambda r: -r.after)),
        reached=frozenset(last),
    )


def _prologue_reads(local: Local) -> list[int]:
    if local.prologue is None:
        return []
    holders = list(local.prologue.graph.find_nodes(op="placeholder"))[: len(local.parameters)]
    return [i for i, holder in enumerate(holders) if holder.users]


class Weights:
    """One step. ``rests``: the pieces at rest; ``wanted``: whose gradient is; both in the order of the parameters;
    ``actions``: what is done, as `Ways.gathers` takes it.

    Moments come in the order of `Ways.gathers`: `arrive` brings the weights of the next, `release` lets go of them.
    """

    def __init__(
        self,
        ways: Ways,
        uses: Sequence[ParameterUse],
        rests: Sequence[Tensor],
        wanted: Sequence[bool],
        actions: Sequence[str],
    ) -> None:
        self.ways, self.uses, self.rests, self.wanted = ways, uses, rests, wanted
        self.read = [None if i in ways.at_use else rest for i, rest in enumerate(rests)]
        self.device = rests[0].device if rests else torch.device("cpu")
        self.gradients: dict[int, Tensor] = {}  # at rest, once reduced
        self._sums: dict[int, tuple[Tensor, bool]] = {}  # at use; whether they may be added to in place
        self._back: deque[Flight] = deque()
        self._enter()
        self._moments = ways.gathers(actions)
        self._next = self._start(next(self._moments, ()))
        self._here: list[int] = []

    def _start(self, gathered: Iterable[Bucket]) -> list[Flight]:
        return [bucket.enter([self.rests[i] for i in bucket.members]) for bucket in gathered]

    def _enter(self) -> None:
        flights: deque[Flight] = deque()
        for bucket in self.ways.entered:
            flights.extend(self._start([bucket]))
            if len(flights) == UNDER_WAY:
                self._land(flights.popleft())
        for flight in flights:
            self._land(flight)

    def _land(self, flight: Flight) -> None:
        for i, tensor in flight.land():
            self.read[i] = tensor

    def arrive(self) -> None:
        """The weights of the next moment are there; those of the moment after it are on their way."""
        for flight in self._next:
            self._land(flight)
        self._here = [i for flight in self._next for i in flight.members]
        settle()  # what brought them, before more is on its way
        self._next = self._start(next(self._moments, ()))

    def release(self) -> None:
        """Let go of what was gathered for this moment."""
        for i in self._here:
            self.read[i] = None
        self._here = []

    def add(self, i: int, gradient: Tensor, fresh: bool) -> None:
        """A gradient of parameter ``i`` as a unit reads it; ``fresh``: it may be added to in place."""
        if not self.wanted[i]:
            return
        if i not in self._sums:
            self._sums[i] = gradient, fresh
            return
        total, mine = self._sums[i]
        if total.dtype != self.rests[i].dtype:  # several are added in the precision of the parameter
            total, mine = total.to(self.rests[i].dtype), True
        self._sums[i] = (total.add_(gradient) if mine else total + gradient), True

    def reduce(self, after: int, last: bool) -> None:
        """Start the reductions that wait for the backward of this call; ``last``: of the last microbatch."""
        for r in self.ways.after.get(after, ()):
            if last or r.reduce == "microbatch":
                sums = [self._sum(i, r.bucket) for i in r.bucket.members]
                if len(self._back) == UNDER_WAY:
                    self._bring(self._back.popleft())
                self._back.append(r.bucket.leave(sums))

    def _sum(self, i: int, bucket: Bucket) -> Tensor | None:
        total, mine = self._sums.pop(i, (None, False))
        return total.clone() if total is not None and not mine and bucket.passes_on else total

    def _bring(self, flight: Flight) -> None:
        for i, gradient in flight.land():
            old = self.gradients.get(i)
            self.gradients[i] = gradient if old is None else old.add_(gradient)

    def finish(self) -> dict[int, Tensor]:
        """The gradients at rest, in memory of their own, contiguous; none of parameters where nothing flowed."""
        while self._back:
            self._bring(self._back.popleft())
        for i, (total, mine) in self._sums.items():
            dtype = self.rests[i].dtype
            own = total.to(dtype).contiguous()
            self.gradients[i] = own.clone() if own is total and not mine else own
        self._sums.clear()
        return self.gradients


__all__ = ["UNDER_WAY", "Reduced", "Ways", "Weights", "ways_of"]
