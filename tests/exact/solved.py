"""The solver's own plans against one process, in the stacked semantics (all ranks in this one, float64).

Models x ranks x memory limits: loose (the cluster's own), tight (between the leanest plan and the loose one), just
feasible (the leanest). Prints a row a plan; ends with exit code 1 where a plan is not equal, does not fit, or where the
pinned patterns are predicted faster. ``--models mlp,small:lora_frozen_base`` and ``--ranks 2,4`` run a part.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopar.build import apply
from autopar.choosing.solve import Solved, solved
from autopar.cluster import Cluster
from autopar.equality import FP64
from autopar.errors import AutoparError, NothingFits
from autopar.loading import ModelSpec

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from limits import fastest_pinned, with_memory  # noqa: E402
from small_models import MODELS  # noqa: E402
from stacked_judge import StackedJudge  # noqa: E402

REFERENCE = ("mlp", "gpt2", "llama", "vit", "resnet")
SMALLEST = 0.02  # of the loose plan's memory: where the search for the leanest plan starts
SLOWER = 1.02  # than a pinned plan, by independent prediction: the side is decided after the core


@dataclass(frozen=True)
class Row:
    """One plan. ``wrong``: what is; empty where nothing is."""

    model: str
    ranks: int
    memory: str
    plan: str
    worst: float
    gap: float | None
    seconds: float
    wrong: str

    def __str__(self) -> str:
        gap = "-" if self.gap is None else f"{100 * self.gap:.2f} %"
        head = (
            f"{'equal' if not self.wrong else 'WRONG'} {self.model:40s} {self.ranks} {self.memory:9s} {self.plan:50s}"
        )
        return f"{head} worst {self.worst:.1e} gap {gap} {self.seconds:.1f} s {self.wrong}"


def judge_of(name: str) -> StackedJudge:
    """``mlp`` (a reference model), ``small:NAME`` or ``hf/NAME`` of ``models.py``."""
    if name.startswith("small:"):
        model, args, kwargs = MODELS[name.removeprefix("small:")]()
        return StackedJudge(model.train(), args, kwargs)
    if "/" in name:
        loaded = ModelSpec(f"{HERE / 'models.py'}:make", {"name": name}).load()
    else:
        loaded = ModelSpec(f"autopar.models.{name}:make").load()
    return StackedJudge(loaded.model.train(), loaded.args, loaded.kwargs)


def rows(name: str, ranks: int) -> Iterator[Row]:
    """Loose, tight and just feasible."""
    judge, loose = judge_of(name), Cluster.local(ranks=ranks)
    started = time.perf_counter()
    first = solved(judge.captured, loose, prepared=judge.prepared(1))
    yield _row(name, ranks, "loose", judge, first, loose, started)
    used = (first.plan.predicted.peak_mem_gib or 0.0) * 2**30
    least = leanest(judge, loose, used * SMALLEST)
    for memory, limit in (("tight", (least + used) / 2), ("least", least)):
        started = time.perf_counter()
        cluster = with_memory(loose, limit)
        try:
            found = solved(judge.captured, cluster, prepared=judge.prepared(1))
        except NothingFits as error:
            yield Row(name, ranks, memory, "", 0.0, None, time.perf_counter() - started, f"does not fit: {error}")
            continue
        yield _row(name, ranks, memory, judge, found, cluster, started)


def leanest(judge: StackedJudge, cluster: Cluster, start: float) -> float:
    """Bytes of the plan of least memory."""
    try:
        solved(judge.captured, with_memory(cluster, start), prepared=judge.prepared(1), nearest=False)
    except NothingFits as error:
        if error.plan is not None and error.plan.predicted.peak_mem_gib is not None:
            return error.plan.predicted.peak_mem_gib * 2**30 * 1.001
    return start


def _row(
    name: str,
    ranks: int,
    memory: str,
    judge: StackedJudge,
    found: Solved,
    cluster: Cluster,
    started: float,
) -> Row:
    plan, took = found.plan, time.perf_counter() - started
    worst = judge.distances(apply(plan, judge.prepared(plan.microbatches)))[0]
    wrong = "" if worst.rel <= FP64.limits[worst.kind] else f"not equal: {worst}"
    if plan.fits is False:
        wrong += " does not fit"
    rival = fastest_pinned(judge.prepared, cluster)
    if rival is not None and (plan.predicted.step_time_s or 0.0) > SLOWER * (rival.predicted.step_time_s or 0.0):
        wrong += f" slower than {rival.one_line()}: {plan.predicted.step_time_s} > {rival.predicted.step_time_s}"
    return Row(name, ranks, memory, plan.one_line(), worst.rel, plan.proof.gap, took, wrong)


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--models", default=",".join((*REFERENCE, *(f"small:{name}" for name in MODELS))))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    wrong = count = 0
    for name in options.models.split(","):
        for ranks in map(int, options.ranks.split(",")):
            try:
                for row in rows(name, ranks):
                    print(row, flush=True)
                    count, wrong = count + 1, wrong + bool(row.wrong)
            except AutoparError as error:
                print(f"refused {name} {ranks}: {error}", flush=True)
    print(f"\n{count} plans, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
