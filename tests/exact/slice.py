"""The first table: models x plans x ranks against one process, on real gloo ranks. ``make exact-slice``.

Prints a row a plan and ends with exit code 1 where a plan is not equal, does not divide what it should, or is refused
without reason. ``--ranks 2,4`` and ``--models hf/llama,...`` run a part; ``--json FILE`` keeps the rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.loading import ModelSpec
from autopar.pins import Pins
from autopar.runtime.pool import RankPool
from autopar.verify import VerifyResult, verify_many

BATCH = 24  # divides by 8 ranks and by 3 microbatches of 8 rows
TIMEOUT = 600.0
HERE = Path(__file__).parent
NAMED = ("hf/llama", "hf/gpt2", "hf/bert", "hf/vit", "hf/t5", "tv/resnet18")
REFERENCE = ("mlp", "gpt2", "llama", "vit", "resnet")
BATCH_STATISTICS = ("tv/resnet18", "reference/resnet")  # need the whole batch at once: one microbatch
DIVIDE = ("hf/llama", "hf/gpt2", "hf/bert", "hf/vit")  # tp=2: FLOPs at most 0.52, parameters at most 0.55 of the whole


def spec_of(name: str) -> ModelSpec:
    """The factory of a model of the table."""
    if name.startswith("reference/"):
        return ModelSpec(f"autopar.models.{name.removeprefix('reference/')}:make")
    return ModelSpec(f"{HERE / 'models.py'}:make", {"name": name})


def plans(ranks: int) -> Iterator[dict[str, int]]:
    """dp, tp and dp x tp over all ranks, with 1 and 3 microbatches, and zero 0 and 3 where there is a dp axis."""
    degrees = [(dp, ranks // dp) for dp in range(1, ranks + 1) if ranks % dp == 0]
    for dp, tp in degrees:
        for zero in (0, 3) if dp > 1 else (0,):
            for microbatches in (1, 3):
                yield {"dp": dp, "tp": tp, "zero": zero, "microbatches": microbatches}


def complaint(name: str, pins: dict[str, int], result: VerifyResult | AutoparError) -> str:
    """What is wrong with a row; empty where nothing is."""
    refused = isinstance(result, AutoparError)
    if name in BATCH_STATISTICS and pins["microbatches"] > 1:
        return "" if refused and "microbatches" in str(result) else "should be refused: statistics of the whole batch"
    if isinstance(result, AutoparError):
        return f"refused: {result}"
    if not result.ok:
        return "not equal"
    ideal = {"dp_replicate": pins["dp"], "dp_shard": pins["dp"]}
    for axis, share in result.divided.items():
        assert share.flops is not None and share.param_bytes is not None
        if axis in ideal and 1 - share.flops > 1.02 / ideal[axis]:
            return f"{axis} leaves {1 - share.flops:.3f} of the FLOPs, more than 1.02/{ideal[axis]}"
        if axis == "dp_shard" and 1 - share.param_bytes > 1.05 / ideal[axis]:
            return f"{axis} leaves {1 - share.param_bytes:.3f} of the resting bytes, more than 1.05/{ideal[axis]}"
        left = max((1 - share.flops) / 0.52, (1 - share.param_bytes) / 0.55)
        if axis == "tp" and pins["tp"] == 2 and name in DIVIDE and left > 1:
            return f"tp=2 leaves {1 - share.flops:.3f} of the FLOPs, {1 - share.param_bytes:.3f} of the parameters"
    return ""


def row(name: str, result: VerifyResult | AutoparError, wrong: str) -> str:
    """One line of the table."""
    if isinstance(result, AutoparError):
        return f"{'refused' if not wrong else 'WRONG  '} {name:18s} {str(result)[:150]}"
    worst = result.worst[0]
    shares = " ".join(f"{a}:{s.flops:.3f}/{s.param_bytes:.3f}/{s.saved_bytes:.3f}" for a, s in result.divided.items())
    head = f"{'equal  ' if not wrong else 'WRONG  '} {name:18s} {result.plan:42s}"
    return f"{head} worst {worst.rel:.1e} ({worst.kind} {worst.name})  {shares}  {result.seconds:.1f} s"


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--models", default=",".join((*NAMED, *(f"reference/{r}" for r in REFERENCE))))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    started, failures, kept = time.perf_counter(), [], []
    counts = {"equal": 0, "refused": 0}
    for ranks in map(int, options.ranks.split(",")):
        with RankPool(ranks, timeout=TIMEOUT) as pool:
            for name in options.models.split(","):
                chosen = list(plans(ranks))
                results = verify_many(spec_of(name), ranks, [Pins.parse(p) for p in chosen], batch=BATCH, pool=pool)
                for pins, result in zip(chosen, results, strict=True):
                    wrong = complaint(name, pins, result)
                    print(row(name, result, wrong) + (f"\n        ^ {wrong} ({pins})" if wrong else ""), flush=True)
                    counts["refused" if isinstance(result, AutoparError) else "equal"] += not wrong
                    failures += [f"{name} {pins}: {wrong}"] if wrong else []
                    kept.append(_record(name, ranks, pins, result, wrong))
    print(f"\n{counts['equal']} equal, {counts['refused']} rightly refused, {len(failures)} wrong; ", end="")
    print(f"{(time.perf_counter() - started) / 60:.0f} minutes")
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1))
    return 1 if failures else 0


def _record(
    name: str, ranks: int, pins: dict[str, int], result: VerifyResult | AutoparError, wrong: str
) -> dict[str, Any]:
    said = {"refused": str(result)} if isinstance(result, AutoparError) else asdict(result)
    return {"model": name, "ranks": ranks, "pins": pins, "wrong": wrong, **said}


if __name__ == "__main__":
    sys.exit(main())
