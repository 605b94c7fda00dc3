"""The peak of a step of real ranks: what the allocator says beside what rests. For the tests of what is predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from allocations import fullest, mark
from torch import Tensor, nn

import autopar
from autopar.cluster import Cluster
from autopar.plan import Plan
from autopar.runtime.collectives import kept_apart
from autopar.runtime.weights import Weights

Made = tuple[nn.Module, tuple[Tensor, ...]]
STEPS = 3  # measured, after two that are not


@dataclass(frozen=True)
class Held:
    """Bytes of one rank: ``rest`` between steps with AdamW's states and the inputs; ``steps``: the most in each step,
    rest included; ``turns``: of the leanest step, the most in every unit's turn."""

    rest: int
    steps: tuple[int, ...]
    turns: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Of the leanest step but the first, which has nothing under way from the step before: threads of a
        communication backend let go of tensors late, which only adds."""
        return min(self.steps[1:])


def held(rank: int, make: Callable[[], Made], plan: Plan, steps: int = STEPS) -> Held:
    """Train under a plan on this rank, with fused AdamW, and look. Collective."""
    model, args = make()
    parallel = autopar.compile(model, Cluster.local(plan.ranks), args=args, plan=plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        parallel.step(*args)
        optimizer.step()
        optimizer.zero_grad()

    def run() -> None:
        for _ in range(steps):
            mark("step")
            step()

    for _ in range(2):
        step()
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    tensors = [*parallel.parameters(), *parallel.buffers(), *parallel._ready[True][0].program.constants, *args, *states]
    rest = sum({s.data_ptr(): s.nbytes() for s in map(_storage, tensors)}.values())
    with kept_apart(), _turns():
        found = fullest(run)
    each: list[list[int]] = []
    for name, most in found:
        if name == "step":
            each.append([])
        each[-1].append(most + rest)
    whole = [max(s) for s in each]
    return Held(rest, tuple(whole), tuple(each[whole.index(min(whole[1:]), 1)]))


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


class _turns:
    """Marks where the turn of a unit begins and the last ends."""

    def __enter__(self) -> None:
        self.arrive, self.finish = Weights.arrive, Weights.finish

        def arrive(weights: Weights) -> None:
            mark("turn")
            self.arrive(weights)

        def finish(weights: Weights) -> dict[int, Tensor]:
            mark("end")
            return self.finish(weights)

        Weights.arrive, Weights.finish = arrive, finish  # type: ignore[method-assign]

    def __exit__(self, *_: Any) -> None:
        Weights.arrive, Weights.finish = self.arrive, self.finish  # type: ignore[method-assign]


__all__ = ["Held", "held"]
