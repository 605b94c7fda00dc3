"""Training on this machine's ranks: the chosen plan against one process and against DDP, in turns in one launch.

Every variant sees the same model, batch and optimizer; ``tokens`` are rows of the global batch times their length. The
figures are the medians over rounds of the ratio within a round, so that a noisy machine moves both sides.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.bench.rows import Figure, bench, chosen

WARMUP, ROUNDS = 1, 5
TIMEOUT = 600.0  # seconds that a case may take


@dataclass(frozen=True)
class Case:
    """A model factory, the ranks, the rows of the global batch, and the steps of a round."""

    target: str
    ranks: int
    batch: int
    steps: int
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "gpt2": Case("autopar.models.gpt2:make", 2, 8, 1, {"size": "gpt2", "layers": 2, "sequence": 64}),
    "llama": Case("autopar.models.llama:make", 2, 16, 4, {"layers": 4, "sequence": 64}),
    "mlp": Case("autopar.models.mlp:make", 2, 256, 20),
}


@bench("ddp")
def ddp(cases: Sequence[str]) -> Iterator[tuple[str, dict[str, Figure]]]:
    """Tokens/s of the chosen plan, of DDP and of one process, and their ratios."""
    from autopar.runtime.pool import RankPool

    for name in chosen(cases, CASES, "ddp"):
        case = CASES[name]
        with RankPool(case.ranks, timeout=TIMEOUT) as pool:
            yield name, pool.run(_compare, case)[0]


def _compare(rank: int, case: Case) -> dict[str, Figure]:
    """Runs on every rank; rank 0's answer counts."""
    import torch
    import torch.distributed as dist

    import autopar
    from autopar.cluster import Cluster
    from autopar.loading import ModelSpec

    torch.manual_seed(0)
    loaded = ModelSpec(case.target, case.options).load()
    rows = next(t.shape[0] for t in loaded.args if isinstance(t, torch.Tensor))
    args = tuple(t.repeat(-(-case.batch // rows), *[1] * (t.ndim - 1))[: case.batch] for t in loaded.args)
    parallel = autopar.compile(loaded.model, Cluster.local(case.ranks), args=args, kwargs=loaded.kwargs)
    own = tuple(t.chunk(case.ranks)[rank] for t in args)
    ddp = torch.nn.parallel.DistributedDataParallel(ModelSpec(case.target, case.options).load().model.train())
    alone = ModelSpec(case.target, case.options).load().model.train()

    def plain(model: Any, inputs: tuple[Any, ...]) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

        def step() -> None:
            out = model(*inputs, **loaded.kwargs)
            loss = out if isinstance(out, torch.Tensor) else out[0]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, foreach=True)

    def planned() -> None:
        parallel.step(*args, **loaded.kwargs)
        optimizer.step()
        optimizer.zero_grad()

    variants = {"chosen": planned, "ddp": plain(ddp, own), "alone": plain(alone, args) if rank == 0 else _nothing}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(ROUNDS + 1):
        for name, step in variants.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(case.steps if turn else WARMUP):
                step()
            dist.barrier()
            if turn:
                seconds[name].append((time.perf_counter() - started) / case.steps)
    tokens = args[0].numel() if not args[0].is_floating_point() else case.batch
    typical = {name: statistics.median(took) for name, took in seconds.items()}
    return {
        "plan": parallel.plan.one_line(),
        "tokens_per_s": tokens / typical["chosen"],
        "against_alone": statistics.median(b / a for a, b in zip(seconds["chosen"], seconds["alone"], strict=True)),
        "against_ddp": statistics.median(b / a for a, b in zip(seconds["chosen"], seconds["ddp"], strict=True)),
        "predicted_s": parallel.plan.predicted.step_time_s,
        "measured_s": typical["chosen"],
        "cores": os.cpu_count(),
    }


def _nothing() -> None:
    """What the other ranks do while rank 0 trains alone."""
