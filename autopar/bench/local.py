"""Predicted beside measured on this machine's ranks: seconds of a step, and bytes of tensors alive at its fullest.

Every case is a reference model under pinned degrees. All cases of one number of ranks take steps in turns, so that what
else runs on the machine meets them alike; its seconds are the lower quartile of the rounds, as those of `autopar
profile`. The figures to predict from are those of the cluster files given, else the shipped ones.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.bench.rows import Figure, bench, chosen
from autopar.bench.workloads import Made, gpt, llama, mlp
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.profiling.clock import typical

ROUNDS = 7
TIMEOUT = 600.0  # seconds that all cases of one number of ranks may take


@dataclass(frozen=True)
class Case:
    """A model, the ranks and the pins."""

    make: Callable[[], Made]
    ranks: int
    pins: Mapping[str, int]


CASES = {
    "gpt": Case(gpt, 1, {}),
    "gpt microbatches=4": Case(gpt, 1, {"microbatches": 4}),
    "llama": Case(llama, 1, {}),
    "mlp": Case(mlp, 1, {}),
    "gpt dp=2": Case(gpt, 2, {"dp": 2, "zero": 0}),
    "gpt tp=2": Case(gpt, 2, {"tp": 2}),
    "gpt dp=2 zero=1": Case(gpt, 2, {"dp": 2, "zero": 1}),
    "gpt dp=2 microbatches=2": Case(gpt, 2, {"dp": 2, "zero": 0, "microbatches": 2}),
    "llama dp=2 zero=2": Case(llama, 2, {"dp": 2, "zero": 2}),
    "llama tp=2": Case(llama, 2, {"tp": 2}),
    "mlp dp=2": Case(mlp, 2, {"dp": 2, "zero": 0}),
    "mlp dp=2 zero=3": Case(mlp, 2, {"dp": 2, "zero": 3}),
    "gpt dp=2 tp=2": Case(gpt, 4, {"dp": 2, "tp": 2, "zero": 0}),
    "llama dp=4 zero=1": Case(llama, 4, {"dp": 4, "zero": 1}),
}


@bench("local")
def local(cases: Sequence[str], clusters: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Figure]]]:
    """Predicted and measured step seconds and MiB of each case. ``clusters``: files of `autopar profile`, of which each
    case takes the one with its number of ranks."""
    from autopar.runtime.pool import RankPool

    known = _profiled(clusters)
    by_ranks: dict[int, list[str]] = defaultdict(list)
    for name in chosen(cases, CASES, "local"):
        by_ranks[CASES[name].ranks].append(name)
    for ranks, names in sorted(by_ranks.items()):
        cluster = known.get(ranks, Cluster.local(ranks))
        plans = {name: _plan(CASES[name], cluster) for name in names}
        with RankPool(ranks, timeout=TIMEOUT) as pool:
            measured = pool.run(_measure, [(CASES[n].make, plan) for n, plan in plans.items()])
        for i, (name, plan) in enumerate(plans.items()):
            seconds, live = (max(own[i][k] for own in measured) for k in (0, 1))
            yield name, _figures(plan, seconds, live, profiled=ranks in known)


def _profiled(clusters: Sequence[str]) -> dict[int, Cluster]:
    """The cluster files by their ranks."""
    found: dict[int, Cluster] = {}
    for path in clusters:
        cluster = Cluster.load(path)
        if cluster.device != "cpu":
            raise AutoparError(
                f"--cluster {path}: is of {cluster.device}; the ranks of this benchmark are CPU processes."
            )
        if cluster.ranks in found:
            raise AutoparError(f"--cluster {path}: a second file for {cluster.ranks} ranks. Give one for each number.")
        found[cluster.ranks] = cluster
    return found


def _plan(case: Case, cluster: Cluster) -> Plan:
    import autopar

    model, args = case.make()
    return autopar.compile(model, cluster, args=args, pins=case.pins or None).plan


def _figures(plan: Plan, seconds: float, live: float, *, profiled: bool) -> dict[str, Figure]:
    predicted, parts = plan.predicted.step_time_s or 0.0, plan.predicted.parts
    expected = parts.get("live_bytes", (plan.predicted.peak_mem_gib or 0.0) * 2**30)
    return {
        "predicted_s": predicted,
        "measured_s": seconds,
        "error_s": predicted / seconds - 1,
        "predicted_mib": expected / 2**20,
        "measured_mib": live / 2**20,
        "error_mib": expected / live - 1,
        "compute_s": parts["compute_s"],
        "moved_s": parts["exposed_s"] + parts["hidden_s"],
        "optimizer_s": parts["optimizer_s"],
        "profiled": profiled,
    }


def _measure(rank: int, cases: Sequence[tuple[Callable[[], Made], Plan]]) -> list[tuple[float, float]]:
    """(seconds, bytes) of each case; runs on every rank."""
    import torch.distributed as dist

    trainings = [Training(make, plan) for make, plan in cases]
    seconds: list[list[float]] = [[] for _ in cases]
    for turn in range(ROUNDS + 1):
        for training, found in zip(trainings, seconds, strict=True):
            dist.barrier()
            started = time.perf_counter()
            training.step()
            dist.barrier()
            if turn:
                found.append(time.perf_counter() - started)
    return [(typical(found), float(training.live())) for training, found in zip(trainings, seconds, strict=True)]


class Training:
    """A compiled model with fused AdamW, and one batch."""

    def __init__(self, make: Callable[[], Made], plan: Plan) -> None:
        import autopar

        model, self.args = make()
        self.parallel = autopar.compile(model, Cluster.local(plan.ranks), args=self.args, plan=plan)
        self.optimizer = torch.optim.AdamW(self.parallel.parameters(), lr=1e-3, fused=True)

    def step(self) -> None:
        """One step of training."""
        self.parallel.step(*self.args)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def live(self) -> int:
        """The most bytes of tensors alive during a step: those alive before, and what the allocator reports. The least
        of five steps, the first of six aside: the threads of a communication backend let go of tensors late, which
        only adds."""
        from autopar.runtime.collectives import kept_apart

        before = sum({s.data_ptr(): s.nbytes() for s in map(_storage, self._held())}.values())
        cpu, begun = [torch.profiler.ProfilerActivity.CPU], []
        with kept_apart(), torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
            for _ in range(6):
                begun.append(time.time_ns())
                self.step()
        now, most = 0, [0] * len(begun)
        for event in sorted(_allocations(profiler), key=lambda e: e.start_ns()):
            now += event.nbytes()
            step = max(0, bisect(begun, event.start_ns()) - 1)
            most[step] = max(most[step], now)
        return before + min(most[1:])

    def _held(self) -> Iterator[Tensor]:
        yield from self.parallel.parameters()
        yield from self.parallel.buffers()
        yield from self.args
        for state in self.optimizer.state.values():
            yield from (t for t in state.values() if isinstance(t, Tensor))


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """Of a parameter its own piece."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def _allocations(profiler: Any) -> Iterator[Any]:
    return (e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]")
