"""The table of peaks: plans of models of 50 MB and more on 2 and 4 gloo ranks, predicted against what the allocator
says of steps 3 to 5, what communication backends allocate for themselves aside.

Prints a row a plan and ends with exit code 1 where the peak is off by more than 5 %, or any unit's turn by more than
10 %; of a pipeline the peak of every rank of it. ``--plans 0,3`` runs a part, ``--minutes N`` stops in time.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autopar.build import apply
from autopar.cluster import Cluster
from autopar.passes.lower import lower, with_changes
from autopar.plan import Plan
from autopar.predict_memory import Peak, predict_memory
from autopar.runtime.pool import RankPool

sys.path.insert(0, str(Path(__file__).parents[1]))
from peaks import Held, Made, held, turns_off

import autopar

MIB, TIMEOUT, OFF, TURN_OFF = 2**20, 900.0, 0.05, 0.10


def mlp(layers: int = 5, width: int = 1024, rows: int = 768) -> Made:
    """5 million parameters."""
    from autopar.models.mlp import make

    model, args, _ = make(inputs=width, width=width, layers=layers, classes=width, batch=rows)
    return model, args


def llama(layers: int = 3, rows: int = 12) -> Made:
    """7 million parameters, 128 tokens a row."""
    from autopar.models.llama import Llama, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(vocabulary=2048, width=384, hidden=1024, layers=layers, heads=8, kv_heads=4)
    tokens = torch.randint(2048, (rows, 129))
    return Llama(config), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def gpt2(layers: int = 3, rows: int = 12) -> Made:
    """7 million parameters, 128 tokens a row."""
    from autopar.models.gpt2 import GPT2, GPT2Config

    torch.manual_seed(0)
    tokens = torch.randint(2048, (rows, 129))
    model = GPT2(GPT2Config(vocabulary=2048, positions=128, width=384, layers=layers, heads=8))
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


PLANS: tuple[tuple[Any, int, dict[str, Any]], ...] = (
    (llama, 2, {"dp": 2, "zero": 0}),
    (llama, 2, {"dp": 2, "zero": 1, "microbatches": 3}),
    (gpt2, 2, {"dp": 2, "zero": 2, "microbatches": 3}),
    (llama, 2, {"dp": 2, "zero": 3}),
    (llama, 2, {"dp": 2, "zero": 3, "recompute": "full", "microbatches": 3}),
    (gpt2, 2, {"dp": 2, "zero": 0, "recompute": "full"}),
    (llama, 2, {"tp": 2, "recompute": "selective"}),
    (gpt2, 2, {"tp": 2, "microbatches": 3}),
    (mlp, 2, {"dp": 2, "zero": 3, "microbatches": 3}),
    (llama, 2, {"dp": 2, "zero": 2, "param_dtype": "bf16", "reduce_dtype": "fp32"}),
    (partial(llama, layers=3, rows=16), 4, {"dp": 2, "tp": 2, "zero": 3, "recompute": "selective"}),
    (partial(gpt2, layers=2), 4, {"dp": 4, "zero": 3, "microbatches": 3}),
    (partial(llama, rows=16), 2, {"pp": 2, "microbatches": 4, "schedule": "gpipe"}),
    (partial(gpt2, rows=16), 2, {"pp": 2, "microbatches": 4, "schedule": "gpipe", "recompute": "full"}),
    (partial(llama, rows=16), 2, {"pp": 2, "microbatches": 4, "schedule": "1f1b"}),
    (partial(llama, rows=64), 2, {"pp": 2, "microbatches": 16, "schedule": "1f1b"}),
    (partial(gpt2, rows=32), 2, {"pp": 2, "microbatches": 8, "schedule": "1f1b", "recompute": "selective"}),
    (partial(gpt2, layers=4, rows=16), 2, {"pp": 2, "vp": 2, "microbatches": 4, "schedule": "interleaved"}),
    (partial(llama, rows=16), 2, {"pp": 2, "microbatches": 4, "schedule": "zero_bubble"}),
    (partial(llama, rows=32), 2, {"pp": 2, "microbatches": 8, "schedule": "zero_bubble", "recompute": "full"}),
)


def predicted(make: Any, ranks: int, pins: dict[str, Any]) -> tuple[Plan, Peak | None]:
    """A plan, and its peak in full unless it is a pipeline's."""
    model, args = make()
    parallel = autopar.compile(model, Cluster.local(ranks), args=args, pins=pins)
    ready = parallel._ready[True][0]
    if ready.plan.pp > 1:
        return ready.plan, None
    local = lower(with_changes(apply(ready.plan, ready.prepared)), 0, {a.name: a.name for a in ready.plan.axes})
    return ready.plan, predict_memory(local, ready.captured, int(ready.plan.predicted.parts["optimizer_bytes"]))


def row(peak: Peak, real: Held) -> tuple[bool, str]:
    """Whether a plan's peak is as predicted, and a line that says so."""
    off = peak.nbytes / real.peak - 1
    turns = turns_off(peak, real)
    name, worst = max(turns.items(), key=lambda pair: abs(pair[1]))
    owners = sorted(((n, owner) for owner, n in peak.owners.items() if n >= 0.01 * peak.nbytes), reverse=True)
    text = f"peak {real.peak / MIB:7.1f} MiB predicted {off:+.2%} ({peak.where}), worst turn {worst:+.2%} ({name}), "
    text += f"{len(turns)} turns; " + ", ".join(f"{owner} {n / MIB:.1f}" for n, owner in owners)
    return abs(off) <= OFF and abs(worst) <= TURN_OFF and real.peak >= 50e6, text


def pipeline_row(plan: Plan, every: list[Held]) -> tuple[bool, str]:
    """The same of a pipeline: of each of its ranks."""
    here = len(every) // plan.pp
    real = [max(h.peak for h in every[r * here : (r + 1) * here]) for r in range(plan.pp)]
    off = [plan.predicted.stages[r].peak_bytes / real[r] - 1 for r in range(plan.pp)]
    text = ", ".join(f"rank {r}: {n / MIB:.1f} MiB predicted {o:+.2%}" for r, (n, o) in enumerate(zip(real, off)))
    return max(map(abs, off)) <= OFF and max(real) >= 50e6, f"peak {text} ({plan.predicted.peak_at})"


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", default=",".join(map(str, range(len(PLANS)))))
    parser.add_argument("--minutes", type=float, default=30.0)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    started, wrong, done = time.perf_counter(), 0, 0
    chosen = [PLANS[int(i)] for i in options.plans.split(",")]
    for ranks in sorted({n for _, n, _ in chosen}):
        with RankPool(ranks, timeout=TIMEOUT) as pool:
            for make, _, pins in (p for p in chosen if p[1] == ranks):
                if time.perf_counter() - started > 60 * options.minutes:
                    print(f"stopped after {options.minutes:g} minutes", flush=True)
                    break
                plan, peak = predicted(make, ranks, pins)
                every: list[Held] = pool.run(held, make, plan)
                if peak is None:
                    good, text = pipeline_row(plan, every)
                else:
                    good, text = row(peak, max(every, key=lambda h: h.peak))
                wrong, done = wrong + (not good), done + 1
                name = getattr(make, "func", make).__name__
                words = " ".join(f"{k}={v}" for k, v in pins.items())
                print(f"{'equal  ' if good else 'WRONG  '} {name:6s} {words:46s} {text}", flush=True)
    print(f"\n{done - wrong} as predicted, {wrong} wrong; {(time.perf_counter() - started) / 60:.0f} minutes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
