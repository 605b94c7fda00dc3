"""Plans of one workload run beside each other on the ranks of torchrun: is the chosen one the fastest?

``python -m autopar.bench.regret SPEC.json`` runs on every rank: it profiles the ranks, then for each workload plans it
for that profile, compiles the solver's plan and the rivals, and takes steps of all of them in turns. Rank 0 prints one
JSON object: the cluster, and of each workload its plans with predicted seconds and those of every round.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autopar.bench.published_report import spearman
from autopar.bench.turns import in_turns, interval
from autopar.bench.workloads import made
from autopar.errors import AutoparError

SEED, RANDOM = 0, 4  # of random rivals; how many
SECONDS, ROUNDS = 60.0, (6, 40)  # that the rounds of a workload take about; the fewest and most of them
LR = 1e-3


@dataclass(frozen=True)
class Workload:
    """A model of `autopar.bench.workloads` and its sizes."""

    model: str
    sizes: dict[str, int]


WORKLOADS = {
    "wide mlp": Workload("mlp", {"width": 1024, "layers": 3, "rows": 64}),
    "gpt small batch": Workload("gpt", {"width": 256, "layers": 3, "vocabulary": 1024, "rows": 4, "length": 64}),
    "gpt large batch": Workload("gpt", {"width": 256, "layers": 3, "vocabulary": 1024, "rows": 32, "length": 64}),
    "long sequence": Workload("llama", {"width": 128, "layers": 2, "vocabulary": 512, "rows": 4, "length": 1024}),
    "deep narrow": Workload("gpt", {"width": 64, "layers": 12, "vocabulary": 512, "rows": 16, "length": 64}),
    "large vocabulary": Workload("gpt", {"width": 128, "layers": 2, "vocabulary": 16384, "rows": 8, "length": 64}),
}


@dataclass(frozen=True)
class Ran:
    """A plan: what was pinned ("chosen": nothing), itself in a line, seconds predicted, and seconds of every round."""

    pins: str
    plan: str
    predicted: float
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Regret:
    """``regret``: seconds of the chosen plan over those of the fastest, less 1; ``low``, ``high``: in 90 of 100 cases.
    ``spearman``: rank correlation of predicted and measured seconds over all plans (None: all alike)."""

    chosen: str
    fastest: str
    regret: float
    low: float
    high: float
    spearman: float | None
    plans: int
    rounds: int


def regret(plans: Sequence[Ran]) -> Regret:
    """Of plans that ran, the first of which was chosen. The fastest is found on even rounds and compared on odd ones,
    since of many plans that are equally fast one looks faster by luck.

    >>> rounds = [1.0, 1.1, 1.0, 1.1]
    >>> found = regret([Ran("chosen", "a", 1.0, rounds), Ran("tp=2", "b", 2.0, [s / 2 for s in rounds])])
    >>> found.fastest, found.regret, found.spearman
    ('b', 1.0, -1.0)
    """
    seconds = np.array([p.seconds for p in plans])
    fastest = int(np.median(seconds[:, 0::2], axis=1).argmin())
    ratios = seconds[0, 1::2] / seconds[fastest, 1::2]
    low, high = interval(ratios, 0.9)
    return Regret(
        plans[0].plan,
        plans[fastest].plan,
        float(np.median(ratios)) - 1,
        low - 1,
        high - 1,
        spearman([p.predicted for p in plans], np.median(seconds, axis=1).tolist()),
        len(plans),
        seconds.shape[1],
    )


def rivals(n: int) -> Iterator[str]:
    """Pins of other plans for ``n`` ranks: pure strategies, the mixes that experts use, and random ones."""
    whole = f"pp={n} dp=1 tp=1 microbatches"
    yield from (f"dp={n} zero={zero}" for zero in range(4))
    yield from (f"dp={n} zero=2 microbatches=2", f"dp={n} zero=1 recompute=full")
    yield from (f"tp={n}", f"tp={n} sp=true", f"tp={n} microbatches=2")
    yield from (f"{whole}=4 schedule=1f1b", f"{whole}=2 schedule=gpipe", f"{whole}=4 schedule=zero_bubble")
    if n == 4:
        yield from (f"dp=2 tp=2 zero={zero}" for zero in (0, 1, 3))
        yield from ("pp=2 microbatches=4 dp=2 tp=1", "pp=2 microbatches=4 dp=1 tp=2")
    draw = random.Random(SEED)
    for _ in range(RANDOM):
        tp = draw.choice([d for d in (1, 2, 4) if n % d == 0])
        pp = draw.choice([d for d in (1, 2, 4) if n // tp % d == 0])
        stages = f" pp={pp}" if pp > 1 else ""
        yield f"dp={n // tp // pp} tp={tp}{stages} zero={draw.randrange(4)} microbatches={draw.choice([2, 4])}"


def main() -> int:
    """On every rank. The one argument: a JSON file with "cases" (names of workloads) and "chip" (what a profile said
    of the ranks before, or None)."""
    import torch
    import torch.distributed as dist

    from autopar.cluster import from_json
    from autopar.profiling.measure import measure
    from autopar.runtime.mesh import join

    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank, _ = join()
    every: list[Any] = [measure(rank, "testbed", chip=spec["chip"])]
    dist.broadcast_object_list(every)
    cluster = from_json(every[0], where="testbed")
    found = {name: [asdict(ran) for ran in _run(WORKLOADS[name], cluster, rank)] for name in spec["cases"]}
    if rank == 0:
        print(json.dumps({"cluster": every[0], "workloads": found}))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _run(workload: Workload, cluster: Any, rank: int) -> list[Ran]:
    """The chosen plan and its rivals, in turns."""
    wanted = ["", *rivals(cluster.ranks)]
    trained, ran = [], list[Ran]()
    for pins in wanted:
        try:
            plan, step = _compiled(workload, cluster, pins)
        except AutoparError:
            if not pins:
                raise
            continue  # as illegal on every rank
        line = plan.one_line()
        if any(line == other.plan for other in ran[1:]):
            continue
        ran.append(Ran(pins or "chosen", line, plan.predicted.step_time_s or 0.0))
        trained.append(step)
    for _ in range(2):
        for step in trained:
            step()
    took = _longest(in_turns(trained, SECONDS, ROUNDS))
    return [Ran(r.pins, r.plan, r.predicted, seconds) for r, seconds in zip(ran, took, strict=True)]


def _compiled(workload: Workload, cluster: Any, pins: str) -> tuple[Any, Any]:
    import torch

    import autopar

    model, args = made(workload.model, workload.sizes)
    parallel = autopar.compile(model, cluster, args=args, pins=pins.split() or None)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=LR, fused=True)

    def step() -> None:
        parallel.step(*args)
        optimizer.step()
        optimizer.zero_grad()

    return parallel.plan, step


def _longest(own: list[list[float]]) -> list[list[float]]:
    """Of all ranks."""
    import torch
    import torch.distributed as dist

    took = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    found: list[list[float]] = took.tolist()
    return found


if __name__ == "__main__":
    sys.exit(main())
