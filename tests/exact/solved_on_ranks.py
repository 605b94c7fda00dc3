"""The table of the solver's own plans: models x ranks x memory limits, run on real gloo ranks against one process.

Limits of memory: ``loose`` (the cluster's own), ``tight`` (halfway from there to the least that any plan takes) and
``just`` (that least). Every plan must equal one process and fit, must divide something where memory is short, and must
not be predicted slower, its gap apart, than any plan that fits as well of the pinned ones of ``slice.py``, of layouts
drawn at random, and of plans near to it. Prints a row a plan, ends with exit code 1 where something is wrong.
``--models``, ``--ranks``, ``--random 0`` and ``--figures h100`` run other parts.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from autopar.choosing.plan_training import plan_training
from autopar.cluster import Cluster
from autopar.errors import AutoparError, NothingFits
from autopar.pins import Pins
from autopar.plan import Plan, loads
from autopar.runtime.pool import RankPool
from autopar.verify import Subject, VerifyResult, verify_many

sys.path.insert(0, str(Path(__file__).parents[1]))
import limits
from exact import rivals
from exact import slice as slice_

TIMEOUT = 600.0
ROUNDING = 1e-9
LEAST_SHARE = 0.01  # of something that an axis takes off a rank, to count as divided


@dataclass(frozen=True)
class Asked:
    """A model on so many ranks with the figures of a cluster."""

    name: str
    ranks: int
    figures: str

    @property
    def cluster(self) -> Cluster:
        """With the memory of its file."""
        found: Cluster = limits.figures(self.figures, self.ranks)
        return found


@lru_cache(maxsize=1)
def subject_of(name: str) -> Subject:
    """The captured model."""
    return Subject.of(slice_.spec_of(name), slice_.BATCH, check=False)


def plans(asked: Asked) -> Iterator[tuple[str, Plan | NothingFits]]:
    """The solver's plan under each limit."""
    captured, cluster = subject_of(asked.name).captured, asked.cluster
    loose = plan_training(captured, Pins(), cluster, {}).plan
    yield "loose", loose
    for memory, short in limits.limits(captured, cluster, loose).items():
        try:
            yield memory, plan_training(captured, Pins(), short, {}).plan
        except NothingFits as error:
            yield memory, error


def rivals_of(asked: Asked, kind: str, seeds: Sequence[int], text: str = "") -> list[Any]:
    """In a worker: plans drawn at random, or near to the plan that ``text`` holds."""
    warnings.filterwarnings("ignore")
    subject, cluster = subject_of(asked.name), asked.cluster
    if kind == "near":
        made = [rivals.near(subject, loads(text), cluster, seed) for seed in seeds]
        return [r for r in made if r is not None]
    alone = asked.name in slice_.BATCH_STATISTICS
    return [rivals.drawn(subject, cluster, seed, one_microbatch=alone) for seed in seeds]


def spread(workers: ProcessPoolExecutor, asked: Asked, kind: str, count: int, text: str = "") -> list[Any]:
    """`rivals_of` over all workers."""
    groups = [range(i, count, 4) for i in range(min(4, count))]
    jobs = [workers.submit(rivals_of, asked, kind, group, text) for group in groups]
    return [rival for job in jobs for rival in job.result()]


def beaten(plan: Plan, found: Sequence[Any]) -> Iterator[Any]:
    """The rivals that fit as well and are predicted faster, beyond the gap that the plan admits."""
    parts, seconds = plan.predicted.parts, plan.predicted.step_time_s or 0.0
    bound = seconds * (1 - (plan.proof.gap or 0.0))
    for rival in found:
        if rival.nbytes <= parts["memory_limit_bytes"] and rival.seconds * (1 + ROUNDING) < bound:
            yield rival


def complaint(memory: str, plan: Plan, result: VerifyResult | AutoparError) -> str:
    """What is wrong with a plan, apart from its rivals."""
    if isinstance(result, AutoparError):
        return f"refused: {result}"
    if not result.ok:
        return "not equal"
    if plan.fits is False:
        return "does not fit"
    shares = [s for share in result.divided.values() for s in (share.flops, share.param_bytes, share.saved_bytes)]
    if memory != "loose" and plan.microbatches == 1 and max(s or 0.0 for s in shares) < LEAST_SHARE:
        return "nothing is divided, though memory is short"
    return ""


def row(asked: Asked, memory: str, plan: Plan, result: VerifyResult | AutoparError, took: float) -> str:
    """One line of the table."""
    head = f"{asked.name:18s} {asked.ranks} {memory:5s}"
    if isinstance(result, AutoparError):
        return f"{head} {str(result)[:200]}"
    shares = " ".join(f"{a}:{s.flops:.2f}/{s.param_bytes:.2f}/{s.saved_bytes:.2f}" for a, s in result.divided.items())
    found, gap = plan.predicted, plan.proof.gap
    said = f"{found.step_time_s:.3e} s {limits.peak(plan) / 2**20:.3f} MiB gap {'-' if gap is None else f'{gap:.2%}'}"
    return f"{head} {result.plan:48s} {said} worst {result.worst[0].rel:.1e}  {shares}  planned in {took:.1f} s"


def _against(rival: Any, plan: Plan) -> str:
    than = rival.seconds / (plan.predicted.step_time_s or 1.0) - 1
    return f"{rival.seconds:.3e} s ({than:+.2%}) {rival.nbytes / 2**20:.3f} MiB: {rival.words[:150]} {rival.outside}"


def rows(
    asked: Asked, pool: RankPool, workers: ProcessPoolExecutor, options: argparse.Namespace
) -> Iterator[tuple[str, bool, list[Any]]]:
    """(Text, right, rivals that are faster) of every plan of one model on so many ranks."""
    random_ones = spread(workers, asked, "random", options.random) if options.random else []
    started, made = time.perf_counter(), []
    for memory, plan in plans(asked):
        made.append((memory, plan, time.perf_counter() - started))
        started = time.perf_counter()
    every = random_ones + list(rivals.pinned(subject_of(asked.name), list(slice_.plans(asked.ranks)), asked.cluster))
    whole = [plan for _, plan, _ in made if isinstance(plan, Plan)]
    results = iter(verify_many(slice_.spec_of(asked.name), asked.ranks, whole, batch=slice_.BATCH, pool=pool))
    for memory, plan, took in made:
        if not isinstance(plan, Plan):
            yield f"WRONG   {asked.name:18s} {asked.ranks} {memory:5s} {str(plan)[:200]}", False, []
            continue
        result = next(results)
        wrong = complaint(memory, plan, result)
        nearby = spread(workers, asked, "near", options.near, plan.dumps()) if options.near else []
        faster = sorted(beaten(plan, every + nearby), key=lambda r: r.seconds)
        inside = [r for r in faster if not r.outside]
        wrong = wrong or (f"slower than {len(inside)} plans of its scope" if inside else "")
        text = f"{'equal  ' if not wrong else 'WRONG  '} {row(asked, memory, plan, result, took)}"
        text += "".join(f"\n        {_against(r, plan)}" for r in faster[:3])
        yield text + (f"\n        ^ {wrong}" if wrong else ""), not wrong, faster


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--models", default=",".join((*slice_.NAMED, *(f"reference/{r}" for r in slice_.REFERENCE))))
    parser.add_argument("--figures", default="local", choices=("local", "h100"), help="of the cluster planned for")
    parser.add_argument("--random", type=int, default=200, help="random layouts a model and number of ranks")
    parser.add_argument("--near", type=int, default=30, help="plans near to each plan")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    started, counts = time.perf_counter(), Counter[str]()
    with ProcessPoolExecutor(2, mp_context=get_context("forkserver")) as workers:
        for ranks in map(int, options.ranks.split(",")):
            with RankPool(ranks, timeout=TIMEOUT) as pool:
                for name in options.models.split(","):
                    if name.startswith("tv/") and importlib.util.find_spec("torchvision") is None:
                        print(f"left out {name}: torchvision is not installed", flush=True)
                        continue
                    for text, right, faster in rows(Asked(name, ranks, options.figures), pool, workers, options):
                        print(text, flush=True)
                        counts["equal" if right else "wrong"] += 1
                        counts["inside"] += sum(not r.outside for r in faster)
                        counts["outside"] += sum(bool(r.outside) for r in faster)
    print(
        f"\n{counts['equal']} right, {counts['wrong']} wrong; faster plans: {counts['inside']} of the scope, ", end=""
    )
    print(f"{counts['outside']} outside of it; {(time.perf_counter() - started) / 60:.0f} minutes")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
