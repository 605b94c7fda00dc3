"""The peak of a step of real ranks: what the allocator says beside what rests. For the tests of what is predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from allocations import fullest, mark
from torch import Tensor, nn

import autopar
from autopar.cluster import Cluster
from autopar.plan import Plan
from autopar.predict_memory import Peak
from autopar.runtime.collectives import kept_apart
from autopar.runtime.weights import Weights

Made = tuple[nn.Module, tuple[Tensor, ...]]
MEASURED = 3  # steps, after two that are not


@dataclass(frozen=True)
class Held:
    """Bytes of one rank: ``rest`` between steps with AdamW's states and the inputs; ``steps``: the most in each step,
    rest included; ``turns``: the most at the start, in every unit's turn, and at the end, of whichever step but the
    first has least there."""

    rest: int
    steps: tuple[int, ...]
    turns: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Of the leanest step but the first, which has nothing under way from the step before: threads of a
        communication backend let go of tensors late, which only adds."""
        return min(self.steps[1:])


def turns_off(peak: Peak, real: Held) -> dict[str, float]:
    """How far every turn is predicted off, as a fraction. The start of a step is left out: until then the last
    reductions of the step before are there."""
    pairs = zip(peak.timeline, real.turns, strict=True)  # of at most MOST_RUN microbatches
    return {f"{i} {turn}": nbytes / measured - 1 for i, ((turn, nbytes), measured) in enumerate(pairs) if i}


def held(rank: int, make: Callable[[], Made], plan: Plan, steps: int = MEASURED) -> Held:
    """Train under a plan on this rank, with fused AdamW and this rank's own rows, and look. Collective."""
    model, args = make()
    parallel = autopar.compile(model, Cluster.local(plan.ranks), args=args, plan=plan)
    program = parallel._ready[True][0].program
    assert program is not None
    own = [_own(program, use, t) for use, t in zip(program.local.inputs, args, strict=True)]
    parallel._inputs = "local"
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        parallel.step(*own)
        optimizer.step()
        optimizer.zero_grad()

    def run() -> None:
        for _ in range(steps):
            mark("step")
            step()

    for _ in range(2):
        step()
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    constants = [tensor for stage in program.stages for tensor in stage.constants]
    tensors = [*parallel.parameters(), *parallel.buffers(), *constants, *own, *states]
    rest = sum({s.data_ptr(): s.nbytes() for s in map(_storage, tensors)}.values())
    with kept_apart(), _turns():
        found = fullest(run)
    each: list[list[int]] = []
    for name, most in found:
        if name == "step":
            each.append([])
        each[-1].append(most + rest)
    whole = [max(s) for s in each]
    return Held(rest, tuple(whole), tuple(min(turn) for turn in zip(*each[1:], strict=True)))


def _own(program: Any, use: Any, tensor: Tensor) -> Tensor:
    """This rank's rows of all microbatches, in memory of their own."""
    pieces = [program._piece(use, tensor, "global", m) for m in range(len(program.rows))]
    return torch.cat(pieces) if program._by_batch(use) else pieces[0].clone()


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


@contextmanager
def _turns() -> Iterator[None]:
    """Marks where the turn of a unit begins, and where the last ends."""
    arrive, finish = Weights.arrive, Weights.finish

    def arriving(weights: Weights) -> None:
        mark("turn")
        arrive(weights)

    def finishing(weights: Weights) -> dict[int, Tensor]:
        mark("end")
        return finish(weights)

    with mock.patch.object(Weights, "arrive", arriving), mock.patch.object(Weights, "finish", finishing):
        yield


__all__ = ["Held", "held", "turns_off"]
