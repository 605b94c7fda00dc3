"""What a step costs beside its kernels: how it grows with tensors, microbatches, stages and ranks.

Models are so small that kernels take next to nothing. ``overhead_us`` is what a call of a unit in one microbatch,
forward and backward, takes beyond eager's whole step; eager runs its microbatches one after another, on one rank. With
several ranks it holds the exchange of gradients too. ``compile_s``: capture, plan and emission.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from autopar.bench.rows import Figure, bench, chosen
from autopar.bench.turns import in_turns, pooled
from autopar.cluster import Cluster

ROUNDS = (30, 300)
SECONDS = 8.0  # that the rounds of a case take about
TIMEOUT = 1800.0  # seconds that a case may take
WIDTH, ROWS = 8, 64


@dataclass(frozen=True)
class Case:
    """``layers`` linears of 8 by 8 with bias on so many ranks, under these pins."""

    layers: int
    ranks: int = 1
    pins: Mapping[str, int | str] = field(default_factory=dict)

    @property
    def microbatches(self) -> int:
        """Of a step."""
        return int(self.pins.get("microbatches", 1))


CASES = {
    **{f"{2 * n} tensors": Case(n, pins={"microbatches": 1}) for n in (5, 50, 500, 5000)},
    **{f"{m} microbatches": Case(5, pins={"microbatches": m}) for m in (1, 4, 16, 64)},
    **{f"{n} stages": Case(16, n, {"pp": n, "dp": 1, "tp": 1, "microbatches": 16, "schedule": "1f1b"}) for n in (2, 4)},
    **{f"{n} ranks": Case(5, n, {"dp": n, "zero": 0, "microbatches": 1}) for n in (2, 4, 8)},
}


@bench("machinery")
def machinery(cases: Sequence[str]) -> Iterator[tuple[str, dict[str, Figure]]]:
    """Milliseconds of a step of ours and of eager, and what a unit's call in a microbatch adds."""
    for name, pool in pooled(chosen(cases, CASES, "machinery"), lambda name: CASES[name].ranks, TIMEOUT):
        every = pool.run(_measure, CASES[name])
        ours, eager = (np.array([own[i] for own in every]).max(axis=0) for i in (0, 1))
        calls, compiling = max(own[2] for own in every), max(own[3] for own in every)
        step, plain = float(np.median(ours)), float(np.median(eager))
        yield (
            name,
            {
                "ours_ms": step * 1e3,
                "eager_ms": plain * 1e3,
                "calls": calls,
                "overhead_us": (step - plain) / calls * 1e6,
                "compile_s": compiling,
                "rounds": len(ours),
            },
        )


def _measure(rank: int, case: Case) -> tuple[list[float], list[float], int, float]:
    """Seconds of every round of ours and of eager; calls of units in a step of this rank; seconds to compile."""
    import autopar

    torch.manual_seed(0)
    x, y = torch.randn(2, ROWS, WIDTH)
    started = time.perf_counter()
    loss = nn.functional.mse_loss
    parallel = autopar.compile(
        _model(case), Cluster.local(case.ranks), args=(x,), kwargs={"target": y}, loss=_loss, pins=case.pins
    )
    compiling = time.perf_counter() - started
    model, (units, *_) = _model(case), parallel.local.units.values()

    def ours() -> None:
        parallel.step(x, target=y)
        for parameter in parallel.parameters():
            parameter.grad = None

    def eager() -> None:
        for a, b in zip(x.chunk(case.microbatches), y.chunk(case.microbatches), strict=True):
            (loss(model(a), b) / case.microbatches).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    for step in (ours, eager):
        step()
    took = in_turns([ours, eager], SECONDS, ROUNDS)
    return took[0], took[1], len(units.calls) * case.microbatches, compiling


def _model(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(case.layers)))


def _loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(out, target)
