"""2,000 models drawn at random under random layouts, pins and the solver's plans. ``make exact-random`` runs it.

``tests/random_models.py`` draws a model from each seed; all ranks run in this process, in float64, against one process.
``--real`` of the models run on 4 gloo ranks too, under random layouts of 2 x 2. Prints how often each op was met, and
every plan that is not equal with the seed that makes it again; ends with exit code 1 where there is one.
``--seeds 17:18`` runs one model.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from autopar.equality import Run, distances
from autopar.errors import AutoparError
from autopar.passes.lower import lower, with_changes
from autopar.runtime.counter_random import random_key
from autopar.runtime.mesh import connect
from autopar.runtime.parameters import place
from autopar.runtime.pool import RankPool
from autopar.runtime.program import Program

sys.path.insert(0, str(Path(__file__).parents[1]))
import random_models
from stacked_judge import StackedJudge

REAL = (2, 2)
CHUNK = 10


def judge_of(seed: int) -> Any:
    """The model's judge."""
    return StackedJudge(*random_models.make(seed))


def stacked(seeds: Sequence[int]) -> list[tuple[str, str, list[str]]]:
    """(Plan, what came of it, ops of the model, listed with its first plan) of every plan of the models."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found: list[tuple[str, str, list[str]]] = []
    for seed in seeds:
        try:
            judge = judge_of(seed)
        except Exception as error:
            found.append((f"capture of seed {seed}", f"{type(error).__name__}: {error}", []))
            continue
        ops = sorted({str(n.target) for n in judge.graph.graph.nodes if n.op == "call_function"})
        for plan in random_models.plans(seed):
            found.append((str(plan), random_models.judged(judge, plan), ops))
            ops = []
    return found


def real(rank: int, seed: int) -> tuple[str, str]:
    """One random plan on this and the other ranks: (name, what came of it)."""
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it advises on full_tensor of nested shards
    model, args, kwargs = random_models.make(seed)
    judge = StackedJudge(model, args, kwargs, key=random_key(0, 0))  # of the first step
    name, microbatches = f"seed {seed} on {REAL} real ranks", 1 + seed % 2
    try:
        drawn = judge.drawn(seed, REAL, microbatches, one_nesting=True)
    except AutoparError as error:
        return name, f"refused: {error}"
    ranks = connect(drawn.mesh)
    program = lower(with_changes(drawn), ranks.rank, ranks.group_names)
    names = place(model.double(), program.parameters, ranks)
    constants = {n: judge.attributes[n] for n in judge.captured.constants}
    (loss,) = Program([program], names, ranks, constants).step(judge.inputs)
    grads = {n: None if p.grad is None else p.grad.full_tensor() for n, p in names.named_parameters()}
    step = Run(loss, grads, dict(names.named_buffers()), {})
    return name, random_models.verdict(judge, distances(step, judge.reference, lr=1.0)[0])


def report(found: Sequence[tuple[str, str]], how: str, started: float) -> int:
    """Print what came of the plans; how many are wrong."""
    counts = Counter("refused" if what.startswith("refused: ") else what.split(":")[0] for _, what in found)
    wrong = [(plan, what) for plan, what in found if what != "equal" and not what.startswith("refused: ")]
    reasons = Counter(what.partition(". ")[0][-60:] for _, what in found if what.startswith("refused: "))
    print(f"{how}: {dict(counts)}, {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
    for reason, count in reasons.most_common(8):
        print(f"    refused {count:4d} ...{reason}")
    for plan, what in wrong:
        print(f"WRONG {plan}: {what}", flush=True)
    return len(wrong)


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="2000", help="how many, or FIRST:END")
    parser.add_argument("--real", type=int, default=100, help="so many of them on real ranks too")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end the stacked ones after so long")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    begin, _, end = options.seeds.rpartition(":")
    seeds, started = range(int(begin or 0), int(end)), time.perf_counter()
    chunks = [seeds[i : i + CHUNK] for i in range(0, len(seeds), CHUNK)]
    found: list[tuple[str, str, list[str]]] = []
    models = 0
    with get_context("forkserver").Pool(options.workers, maxtasksperchild=5) as workers:
        for done in workers.imap(stacked, chunks):
            found += done
            models += CHUNK
            print(f"{models} models, {time.perf_counter() - started:.0f} s", file=sys.stderr)
            if time.perf_counter() - started > 60 * options.minutes:
                break
    ops = Counter(op for _, _, names in found for op in names)
    met = ", ".join(f"{op} {n}" for op, n in ops.most_common())
    print(f"{min(models, len(seeds))} models of {len(ops)} ops: {met}")
    wrong = report([(plan, what) for plan, what, _ in found], "stacked", started)
    if options.real:
        started = time.perf_counter()
        with RankPool(4, timeout=600.0) as pool:
            on_ranks = [pool.run(real, seed)[0] for seed in seeds[: options.real]]
        wrong += report(on_ranks, "4 gloo ranks", started)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
