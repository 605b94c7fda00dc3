"""The executor of pipelines against ``torch.distributed.pipelining``: the same stages, schedule and ranks, in turns.

Every stage is some linears and tanh, run by autograd in both; a step cuts the batch into microbatches and leaves
gradients. ``ratio`` is ours over torch's: the median over rounds of two steps next to each other, with a 95 % interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from autopar.bench.rows import Figure, bench, chosen
from autopar.bench.turns import in_turns, interval, pooled
from autopar.passes.layout import Mesh
from autopar.runtime.mesh import connect
from autopar.runtime.pipeline import Crossing, Pipeline, Spec
from autopar.runtime.transport import TorchTransport
from autopar.solver.simulate import schedule

Array: TypeAlias = npt.NDArray[np.float64]
SECONDS, ROUNDS = 6.0, (11, 201)  # that the rounds of a case take about; the fewest and most of them
WARM = 3  # steps of each that do not count
TIMEOUT = 600.0  # seconds that a case may take
SIZES = {"tiny": (16, 1, 4), "medium": (256, 4, 32)}
"""Width, layers and rows of a microbatch."""


@dataclass(frozen=True)
class Case:
    """A schedule on so many ranks; the sizes of every stage."""

    ranks: int
    schedule: str
    microbatches: int
    width: int
    layers: int
    rows: int
    dtype: torch.dtype = torch.float32

    @property
    def chunks(self) -> int:
        """Stages of a rank."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def stages(self) -> int:
        """Of all ranks."""
        return self.ranks * self.chunks

    def stage(self, number: int) -> nn.Sequential:
        """One stage, with the same values wherever it is made."""
        torch.manual_seed(number)
        linears = [nn.Linear(self.width, self.width, dtype=self.dtype) for _ in range(self.layers)]
        return nn.Sequential(*(part for linear in linears for part in (linear, nn.Tanh())))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all microbatches, each of shape ``[microbatches * rows, width]``."""
        torch.manual_seed(1000)
        x, y = torch.randn(2, self.microbatches * self.rows, self.width, dtype=self.dtype)
        return x, y


CASES = {
    f"{name} {size} M={m} on {ranks}": Case(ranks, name, m, *SIZES[size])
    for ranks in (2, 4)
    for size in SIZES
    for name in ("gpipe", "1f1b", "interleaved")
    for m in (8, 32)
}


@bench("pipelines")
def pipelines(cases: Sequence[str]) -> Iterator[tuple[str, dict[str, Figure]]]:
    """Milliseconds a microbatch of both, and their ratio."""
    for name, pool in pooled(chosen(cases, CASES, "pipelines"), lambda name: CASES[name].ranks, TIMEOUT):
        ours, theirs = np.array(pool.run(compare, CASES[name])).max(axis=0)
        yield name, _figures(CASES[name], ours, theirs)


def compare(rank: int, case: Case) -> list[list[float]]:
    """Seconds of each round's step of both. Runs on every rank."""
    steps = [ours(case, rank)[0], theirs(case, rank)[0]]
    for step in steps * WARM:
        step()
    return in_turns(steps, SECONDS, ROUNDS)


class AutogradStage:
    """A module as `runtime.pipeline.Chunk`; of the first stage ``x``, of the last ``y`` are given by microbatch."""

    def __init__(self, number: int, module: nn.Module, x: Sequence[Tensor], y: Sequence[Tensor]) -> None:
        self.number, self.module, self.x, self.y = number, module, x, y
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, microbatch: int, received: dict[int, Tensor]) -> dict[int, Tensor]:
        """The value for the next stage, which has this one's number."""
        x = received[self.number - 1].requires_grad_() if received else self.x[microbatch]
        out = self.module(x)
        if self.y:
            out = loss(out, self.y[microbatch])
        self.held[microbatch] = x, out
        return {} if self.y else {self.number: out.detach()}

    def backward(self, microbatch: int, gradients: dict[int, Tensor], part: str, last: bool) -> dict[int, Tensor]:
        """The gradient of what the stage before sent."""
        x, out = self.held.pop(microbatch)
        torch.autograd.backward(out, gradients.get(self.number))
        return {} if x.grad is None else {self.number - 1: x.grad}


def loss(out: Tensor, y: Tensor) -> Tensor:
    """Of a microbatch: a sum, so that those of all microbatches add up to that of the batch."""
    return (out - y).square().sum()


def ours(case: Case, rank: int) -> tuple[Callable[[], None], list[nn.Sequential]]:
    """A step by `runtime.pipeline`, and the stages of this rank, in which it leaves gradients."""
    ranks = connect(Mesh(()), timedelta(seconds=TIMEOUT / 2), case.ranks)
    crossings = [Crossing(i, i, (i + 1,), True) for i in range(case.stages - 1)]
    spec: Spec = (case.rows, case.width), case.dtype
    actions = schedule(case.schedule, case.ranks, case.microbatches, case.chunks)
    pipeline = Pipeline(actions, crossings, TorchTransport(ranks), lambda number, microbatch: spec)
    numbers = range(rank, case.stages, case.ranks)
    modules = [case.stage(number) for number in numbers]
    x, y = case.batch()

    def step() -> None:
        _forget(modules)
        pieces, targets = x.chunk(case.microbatches), y.chunk(case.microbatches)
        last = case.stages - 1
        pipeline.run([AutogradStage(s, m, pieces, targets if s == last else ()) for s, m in zip(numbers, modules)])

    return step, modules


def theirs(case: Case, rank: int) -> tuple[Callable[[], None], list[nn.Sequential]]:
    """A step by ``torch.distributed.pipelining``, and the stages of this rank."""
    modules = [case.stage(number) for number in range(rank, case.stages, case.ranks)]
    like = torch.empty(case.rows, case.width, dtype=case.dtype, requires_grad=True)
    return torch_step(case, rank, modules, [(like, like)] * case.chunks, loss, *case.batch()), modules


def torch_step(
    case: Case,
    rank: int,
    modules: Sequence[nn.Module],
    shapes: Sequence[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
) -> Callable[[], None]:
    """A step of these stages of a rank. ``shapes``: a microbatch of what each takes and gives, that of gradients too;
    ``loss``: of a microbatch, all of which add up."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    numbers = range(rank, case.stages, case.ranks)
    stages: list[Any] = [
        PipelineStage(module, number, case.stages, x.device, input_args=takes, output_args=gives)
        for number, module, (takes, gives) in zip(numbers, modules, shapes, strict=True)
    ]
    kinds: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
    given = stages if case.chunks > 1 else stages[0]
    with redirect_stdout(StringIO()):
        runner = kinds[case.schedule](given, n_microbatches=case.microbatches, loss_fn=loss, scale_grads=False)

    def step() -> None:
        _forget(modules)
        target = {"target": y, "losses": []} if rank == case.ranks - 1 else {}
        runner.step(*[x] * (rank == 0), return_outputs=False, **target)

    return step


def _forget(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        module.zero_grad()


def _figures(case: Case, ours: Array, theirs: Array) -> dict[str, Figure]:
    ratio = ours / theirs
    low, high = interval(ratio, 0.95)
    per = 1e3 / case.microbatches
    return {
        "ours_ms": float(np.median(ours)) * per,
        "torch_ms": float(np.median(theirs)) * per,
        "ratio": float(np.median(ratio)),
        "low": low,
        "high": high,
        "rounds": len(ratio),
    }
