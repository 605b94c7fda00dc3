"""Pipelines: models x axes x schedules x memory, on real gloo ranks. ``make exact-pipelines``.

For each model a pairwise covering array over the axes beside ``pp`` (2, 4 and 8 ranks), the schedule, microbatches
below, at and above the stages, ZeRO stage 0 to 3, recomputation, and dropout: every two values of two of them meet in
a row. Prints the seed and a row a plan; ends with exit code 1 where a plan is not equal to one process or is refused:
what may be refused is not in the arrays. ``--models hf/llama,unet``, ``--ranks 2,4``, ``--minutes 60`` and ``--seed
7`` run a part, or other arrays; ``--json FILE`` keeps the rows, and goes on after the models that are in it.
``--threads`` runs the full product for one model instead, all ranks as threads of one process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.loading import ModelSpec
from autopar.models import gpt2, llama
from autopar.pins import Pins
from autopar.runtime.pool import RankPool
from autopar.verify import VerifyResult, verify_many

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import pipeline_models
import pipeline_threads
import slice as table
import zero
import zoo
from covering import Row, covering

BATCH = 16  # 8 microbatches on 2 data ranks; 3 have unequal rows
FACTORS: dict[str, tuple[Any, ...]] = {
    "mesh": ({"pp": 2}, {"pp": 4}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2, "dp": 2}),
    "schedule": ({"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "interleaved", "vp": 2},
                 {"schedule": "zero_bubble"}),
    "microbatches": (1, 3, 8),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "dropout": ("off", "on"),
}  # fmt: skip
MIXTRAL = zero.MIXTRAL
WITHOUT_DROPOUT = ("reference/llama",)
MODELS = (
    "reference/gpt2",
    "hf/gpt2",
    "reference/llama",
    "hf/llama",
    "hf/llama_tied",
    "hf/t5",
    "hf/vit",
    "unet",
    MIXTRAL,
)


def make(name: str, dropout: str = "off") -> zoo.Built:
    """Build a model of the table from seed 0; ``dropout``: ``on`` sets every probability to drop to 0.1."""
    chance = zero.CHANCE if dropout == "on" else 0.0
    if name == "unet":
        return pipeline_models.unet(chance)
    if name == "hf/llama_tied":
        built = zoo.make("llama_tied")
        for owner, attribute in zero._chances(built[0]):
            setattr(owner, attribute, chance)
        return built
    if name == "reference/gpt2":  # as `zero.make`, with as many layers as stages
        torch.manual_seed(0)
        return gpt2.GPT2(replace(gpt2.SIZES["tiny"], layers=4, dropout=chance)), gpt2.make(layers=1)[1], {}
    return llama.make(layers=4) if name == "reference/llama" else zero.make(name, dropout)


def rows_of(name: str, ranks: Sequence[int], seed: int) -> list[Row]:
    """The covering array of a model."""
    factors = {key: list(values) for key, values in FACTORS.items()}
    factors["mesh"] = [m for m in factors["mesh"] if math.prod(m.values()) in ranks]
    if not any("dp" in m for m in factors["mesh"]):
        factors["zero"] = [0]
    if name in WITHOUT_DROPOUT:
        factors["dropout"] = ["off"]
    return covering(factors, lambda row: _legal(name, row), random.Random(f"{name} {seed}"))


def _legal(name: str, row: Row) -> bool:
    """A ZeRO stage needs data ranks. The balance of experts is of the whole batch, which only gpipe has at hand."""
    if row.get("zero", 0) and "dp" not in row.get("mesh", ("dp",)):
        return False
    gpipe = row.get("schedule", {"schedule": "gpipe"})["schedule"] == "gpipe"
    return name != MIXTRAL or row.get("microbatches", 1) == 1 or gpipe


def pins_of(row: Row) -> dict[str, Any]:
    """The pins of a row."""
    return row["mesh"] | row["schedule"] | {key: row[key] for key in ("microbatches", "zero", "recompute")}


def judged(name: str, row: Row, result: VerifyResult | AutoparError) -> tuple[str, str]:
    """``equal`` or ``WRONG``, and the line of the table."""
    verdict, words = "WRONG", " ".join(f"{k}={v}" for k, v in pins_of(row).items())
    if isinstance(result, AutoparError):
        line = str(result)
    else:
        verdict, far = "equal" if result.ok else "WRONG", result.worst[0]
        line = (
            f"worst {far.rel:.1e} ({far.kind} {far.name}) {result.seconds:.1f} s {'' if result.ok else result.limits}"
        )
    return verdict, f"{verdict:8s}{name:16s} {words} dropout={row['dropout']}  {line}"


def tabled(options: argparse.Namespace) -> list[str]:
    """Run the arrays; every line of the table."""
    started, kept = time.perf_counter(), dict[str, list[str]]()
    if options.json is not None and options.json.exists():
        kept = json.loads(options.json.read_text())
    sizes = [int(n) for n in options.ranks.split(",")]
    with ExitStack() as stack:
        pools = {n: stack.enter_context(RankPool(n, timeout=table.TIMEOUT)) for n in sizes}
        for name in options.models.split(","):
            if name in kept or time.perf_counter() - started > 60 * options.minutes:
                print(f"{name}: {'done before' if name in kept else 'left out'}")
                continue
            lines, rows = list[str](), rows_of(name, sizes, options.seed)
            for n, dropout in itertools.product(sizes, ("off", "on")):
                chosen = [r for r in rows if math.prod(r["mesh"].values()) == n and r["dropout"] == dropout]
                spec = ModelSpec(f"{Path(__file__)}:make", {"name": name, "dropout": dropout})
                plans = [Pins.parse(pins_of(r)) for r in chosen]
                results = verify_many(spec, n, plans, batch=BATCH, pool=pools[n]) if plans else []
                for row, result in zip(chosen, results, strict=True):
                    lines.append(judged(name, row, result)[1])
                    print(lines[-1], flush=True)
            kept[name] = lines
            if options.json is not None:
                options.json.write_text(json.dumps(kept, indent=1))
    return [line for lines in kept.values() for line in lines]


def threaded(seed: int) -> list[str]:
    """Run the full product; every line."""
    lines = []
    for plan, wrong in pipeline_threads.product(seed):
        lines.append(f"{'WRONG' if wrong else 'equal':8s}{plan} {'; '.join(wrong)}".rstrip())
        print(lines[-1], flush=True)
    return lines


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no model after so long")
    parser.add_argument("--json", type=Path, help="keep the rows here, and leave out the models that are in it")
    parser.add_argument("--threads", action="store_true", help="the full product for one model, ranks as threads")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    started = time.perf_counter()
    print(f"seed {options.seed}")
    lines = threaded(options.seed) if options.threads else tabled(options)
    counts = {verdict: sum(line.startswith(verdict) for line in lines) for verdict in ("equal", "WRONG")}
    print(
        "\n" + ", ".join(f"{n} {v}" for v, n in counts.items()), f"; {(time.perf_counter() - started) / 60:.0f} minutes"
    )
    print(*(line for line in lines if line.startswith("WRONG")), sep="\n")
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
