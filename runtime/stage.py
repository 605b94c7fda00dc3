"""One stage of a rank's program, and one step of it: what the executor of a schedule calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from autopar.runtime.pipeline import Action, Crossing, Edge, Message, Pending, Spec
from autopar.runtime.run import Run, Units
from autopar.runtime.weights import Ways, Weights, ways_of

if TYPE_CHECKING:
    from autopar.passes.lower import Local, OutputUse
    from autopar.passes.split_tail import Tail


@dataclass(frozen=True)
class Stages:
    """What every rank knows of all stages of a pipeline. ``schedule``: by place along the pipeline what it does, in
    order; ``crossings``: what one stage makes and others read, and as what (``crossed``); ``outputs`` of the model, and
    the stages that make them; ``updates``: of each buffer that changes the stage that knows its new value; ``ties``:
    parameters that several places along the pipeline hold, and which."""

    schedule: Sequence[Sequence[Action]]
    crossings: tuple[Crossing, ...]
    crossed: tuple[OutputUse, ...]
    outputs: tuple[tuple[OutputUse, int], ...]
    updates: tuple[tuple[str, int], ...]
    ties: tuple[tuple[str, tuple[int, ...]], ...] = ()


def alone(local: Local, microbatches: int) -> Stages:
    """One stage: forward and backward of each microbatch in turn; with a tail, all forwards first."""
    forward, backward = ([(letter, 0, m) for m in range(microbatches)] for letter in "FB")
    turns = [action for both in zip(forward, backward, strict=True) for action in both]
    return Stages(
        [turns if local.tail is None else forward + backward],
        (),
        (),
        tuple((use, 0) for use in local.outputs),
        tuple((name, 0) for name in local.buffer_updates),
    )


@dataclass(frozen=True, eq=False)
class Stage:
    """``number``: which one of the model's; ``units``: how its microbatches are run, by their rows; ``prologue``: how
    that of ``local`` is called; ``constants``: in the order of ``local.constants``; ``parted``: its backward is run in
    two parts."""

    number: int
    local: Local
    units: Mapping[int, Units]
    prologue: Callable[..., Any] | None
    constants: list[Tensor]
    parted: bool = False

    @cached_property
    def ways(self) -> Ways:
        """How its parameters go."""
        return ways_of(self.local, self.units, parted=self.parted)


class StageStep:
    """One step of a stage on this rank: `runtime.pipeline.Chunk`. ``rows`` and ``pieces``: of each microbatch;
    ``given``: what all of them read (buffers, constants, the key); ``whole``: inputs of all microbatches, for the
    prologue; ``whole_batch``: how the tail is run; ``keep``: whether outputs but the loss are kept."""

    def __init__(
        self,
        stage: Stage,
        weights: Weights,
        rows: Sequence[int],
        pieces: Sequence[Sequence[Tensor]],
        whole: Sequence[Tensor],
        given: Mapping[str, Sequence[Any]],
        whole_batch: WholeBatch,
        *,
        train: bool,
        keep: bool,
    ) -> None:
        self.stage, self.local, self.weights, self.rows, self.pieces = stage, stage.local, weights, rows, pieces
        self.train, self.whole_batch = train, whole_batch
        every = range(len(self.local.outputs))
        tailed = [i for i, _ in self.local.tailed]
        self.keep = every if keep else [0] * self.local.has_loss + tailed
        self.outputs: dict[int, dict[int, Tensor]] = {}  # by microbatch, then by place in ``local.outputs``
        self._tail: tuple[tuple[Tensor, ...], dict[int, Tensor]] | None = None
        self.updates: tuple[Tensor, ...] = ()
        self.runs: dict[int, Run] = {}
        hoisted: tuple[Tensor, ...] = ()
        weights.arrive()
        if stage.prologue is not None:
            hoisted, _ = stage.prologue(*weights.read, *given["buffer"], *stage.constants, *whole, given["key"][0])
        weights.release()
        self.given = {**given, "constant": stage.constants, "hoisted": hoisted}

    def forward(self, microbatch: int, received: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Values for other stages, by number."""
        given = {
            **self.given,
            "input": self.pieces[microbatch],
            "microbatch": [microbatch],
            "received": [received[c.number] for c in self.local.received],
        }
        units = self.stage.units[self.rows[microbatch]]
        run = Run(units, given, self.weights, len(self.local.outputs))
        del given, received
        self.outputs[microbatch], self.updates, sent = run.forward(self.keep, train=self.train)
        if self.train:
            self.runs[microbatch] = run
        return {c.number: value for c, value in zip(self.local.sent, sent, strict=True)}

    def backward(self, microbatch: int, gradients: dict[int, Tensor], part: str, last: bool) -> dict[int, Tensor]:
        """Gradients of the values of other stages, by number, as far as something flowed."""
        run = self.runs[microbatch]
        if part != "W":
            if self.local.has_loss:
                run.seed(0, torch.ones_like(self.outputs[microbatch][0]), True)
            for i, gradient in self.tail()[1].items():
                run.seed(i, self.whole_batch.share(self.local.outputs[i], gradient, microbatch), False)
            for i, crossing in enumerate(self.local.sent):
                if crossing.number in gradients:
                    run.seed(len(self.local.outputs) + i, gradients.pop(crossing.number), False)
        run.backward(last=last, part=part)
        if part != "I":
            del self.runs[microbatch]
        if part == "W":
            return {}
        found = ((c.number, run.received(i)) for i, c in enumerate(self.local.received) if c.grad)
        return {number: gradient for number, gradient in found if gradient is not None}

    def tail(self) -> tuple[tuple[Tensor, ...], dict[int, Tensor]]:
        """What the tail makes of all microbatches, and in training the gradients of what it reads, by their places in
        ``local.outputs``; nothing where there is none. Every rank of the stage computes it whole."""
        if self._tail is None:
            self._tail = self._run_tail() if self.local.tail is not None else ((), {})
        return self._tail

    def _run_tail(self) -> tuple[tuple[Tensor, ...], dict[int, Tensor]]:
        tail = self.local.tail
        assert tail is not None and len(self.outputs) == len(self.rows), "the tail needs every microbatch"
        whole = []
        for i, _ in self.local.tailed:
            pieces = [self.outputs[m].pop(i) if self.train else self.outputs[m][i] for m in range(len(self.rows))]
            whole.append(self.whole_batch.join(self.local.outputs[i], pieces))
        wanted = [grad and self.train for _, grad in self.local.tailed]
        made, gradients = self.whole_batch.run_tail(tail, whole, wanted)
        return made, {i: g for (i, _), g in zip(self.local.tailed, gradients, strict=True) if g is not None}


class WholeBatch(Protocol):
    """What a tail needs of the ranks of its stage."""

    def join(self, use: OutputUse, pieces: list[Tensor]) -> Tensor:
        """The global tensor of an output, from this rank's pieces of all microbatches. Collective."""
        ...

    def share(self, use: OutputUse, gradient: Tensor, microbatch: int) -> Tensor:
        """This rank's share, of one microbatch, of the gradient of such a tensor."""
        ...

    def run_tail(
        self, tail: Tail, whole: list[Tensor], wanted: Sequence[bool]
    ) -> tuple[tuple[Tensor, ...], Sequence[Tensor | None]]:
        """The tail's results, the loss first, and the gradients of the tensors that it reads, where ``wanted``."""
        ...


class Nobody:
    """The transport of a rank that has all stages to itself."""

    rank, device = 0, torch.device("cpu")

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """See `runtime.pipeline.Transport`."""
        return [list(numbers)]

    def open(self, edges: Sequence[Edge], ranks: int) -> None:
        """See `runtime.pipeline.Transport`."""
        assert not edges, f"{edges} lead to nobody"

    def send(self, message: Message, tensor: Tensor) -> None:
        """See `runtime.pipeline.Transport`."""
        raise AssertionError(f"{message} is sent to nobody")

    def receive(self, message: Message, spec: Spec) -> Pending:
        """See `runtime.pipeline.Transport`."""
        raise AssertionError(f"{message} comes from nobody")

    def drain(self) -> None:
        """See `runtime.pipeline.Transport`."""

    def fail(self, why: str) -> None:
        """See `runtime.pipeline.Transport`."""


__all__ = ["Nobody", "Stage", "StageStep", "Stages", "WholeBatch", "alone"]
