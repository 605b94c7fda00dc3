"""The memory side of the runtime: models x ways to spend or save memory, on real gloo ranks. ``make exact-zero``.

For each model a pairwise covering array over ranks and axes (dp, tp, dp x tp on 2 and 4 ranks), ZeRO stage 0 to 3,
recomputation, microbatches 1 and 3, dropout off and on, and parameters in fp32 or bf16: every two values of two of them
meet in a row. Prints the seed of the array and a row a plan; ends with exit code 1 where a plan is not equal, does not
divide its FLOPs, or is refused without reason. ``--models hf/llama,hf/mixtral``, ``--ranks 2``, ``--minutes 60`` and
``--seed 7`` run a part, or other arrays.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.loading import ModelSpec
from autopar.models import gpt2
from autopar.pins import Pins
from autopar.runtime.pool import RankPool
from autopar.verify import VerifyResult, verify_many

sys.path.insert(0, str(Path(__file__).parent))
import covering as array
import slice as table
import zoo

BATCH = 12  # divides by 4 ranks and 3 microbatches
CHANCE = 0.1
Row = dict[str, Any]
FACTORS: dict[str, tuple[Any, ...]] = {
    "mesh": ({"dp": 2}, {"tp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "microbatches": (1, 3),
    "dropout": ("off", "on"),
    "param_dtype": ("fp32", "bf16"),
}
MIXTRAL = "hf/mixtral"
WITHOUT_DROPOUT = ("tv/resnet18", "reference/mlp", "reference/llama", "reference/vit", "reference/resnet")
ONE_MICROBATCH = (*table.BATCH_STATISTICS, MIXTRAL)  # batch statistics; the balance of experts is not a sum over rows
MODELS = (*table.NAMED, *(f"reference/{r}" for r in table.REFERENCE), MIXTRAL)


def make(name: str, dropout: str = "off") -> zoo.Built:
    """Build a model of the table from seed 0; ``dropout``: ``on`` sets every probability to drop to `CHANCE`."""
    if name == "reference/gpt2":
        torch.manual_seed(0)
        config = replace(gpt2.SIZES["tiny"], layers=2, dropout=CHANCE if dropout == "on" else 0.0)
        return gpt2.GPT2(config), gpt2.make(layers=2)[1], {}
    if name == MIXTRAL:
        model, args, kwargs = zoo.make("mixtral")
        kwargs["output_router_logits"] = True  # the loss takes the balance of the experts in
    else:
        model, args, kwargs, *_ = table.spec_of(name).load()
    if dropout == "on":
        for owner, attribute in _chances(model):
            setattr(owner, attribute, CHANCE)
    return model, args, kwargs


def _chances(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """(owner, attribute) of every probability to drop, of modules and of their configs."""
    for module in model.modules():
        for owner in (module, *zoo._configs(getattr(module, "config", None))):
            for key, value in list(vars(owner).items()):
                named = "drop" in key.lower() or (key == "p" and isinstance(module, nn.Dropout))
                if named and isinstance(value, float):
                    yield owner, key


def spec_of(name: str, dropout: str) -> ModelSpec:
    """The factory of a model."""
    if name.startswith("reference/") and name not in ("reference/gpt2",):
        return table.spec_of(name)
    return ModelSpec(f"{Path(__file__)}:make", {"name": name, "dropout": dropout})


def covering(name: str, ranks: Sequence[int], seed: int) -> list[Row]:
    """Rows in which every legal pair of values of two factors is met; greedy, best of 50 random rows each time."""
    draw = random.Random(f"{name} {seed}")
    factors = {key: list(values) for key, values in FACTORS.items()}
    factors["mesh"] = [m for m in factors["mesh"] if _size(m) in ranks]
    if name in WITHOUT_DROPOUT:
        factors["dropout"] = ["off"]
    if name in ONE_MICROBATCH:
        factors["microbatches"] = [1]
    return array.covering(factors, _legal, draw)


def _legal(row: Row) -> bool:
    """A ZeRO stage needs data ranks."""
    return "mesh" not in row or "zero" not in row or row["zero"] == 0 or "dp" in row["mesh"]


def _size(mesh: Mapping[str, int]) -> int:
    return mesh.get("dp", 1) * mesh.get("tp", 1)


def pins_of(row: Row) -> dict[str, Any]:
    """The pins of a row."""
    pins = dict(row["mesh"]) | {k: row[k] for k in ("zero", "microbatches", "recompute")}
    return pins | ({"param_dtype": row["param_dtype"]} if row["param_dtype"] != "fp32" else {})


def complaint(row: Row, result: VerifyResult | AutoparError) -> str:
    """What is wrong with a row; empty where nothing is."""
    if isinstance(result, AutoparError):
        return f"refused: {result}"
    if not result.ok:
        return "not equal"
    for axis, share in result.divided.items():
        size = row["mesh"].get("dp" if axis.startswith("dp") else axis, 1)
        assert share.flops is not None
        if size > 1 and share.flops < 0.5 * (1 - 1 / size):
            return f"{axis} leaves {1 - share.flops:.3f} of the FLOPs"
    return ""


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no model after so long")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    started, failures, equal, left = time.perf_counter(), list[str](), 0, list[str]()
    sizes = [int(n) for n in options.ranks.split(",")]
    print(f"covering arrays of seed {options.seed}")
    with ExitStack() as stack:
        pools = {n: stack.enter_context(RankPool(n, timeout=table.TIMEOUT)) for n in sizes}
        for name in options.models.split(","):
            if time.perf_counter() - started > 60 * options.minutes:
                left.append(name)
                continue
            rows = covering(name, sizes, options.seed)
            for ranks, dropout in itertools.product(sizes, ("off", "on")):
                chosen = [r for r in rows if _size(r["mesh"]) == ranks and r["dropout"] == dropout]
                if not chosen:
                    continue
                plans = [Pins.parse(pins_of(r)) for r in chosen]
                results = verify_many(spec_of(name, dropout), ranks, plans, batch=BATCH, pool=pools[ranks])
                for row, result in zip(chosen, results, strict=True):
                    wrong = complaint(row, result)
                    said = f"{' '.join(f'{k}={v}' for k, v in pins_of(row).items())} dropout={dropout}"
                    print(
                        f"{said:70s} {table.row(name, result, wrong)}" + (f"\n    ^ {wrong}" if wrong else ""),
                        flush=True,
                    )
                    equal += not wrong
                    failures += [f"{name} {said}: {wrong}"] if wrong else []
    print(f"\n{equal} equal, {len(failures)} wrong; {(time.perf_counter() - started) / 60:.0f} minutes", end="")
    print(f"; left out: {', '.join(left)}" if left else "", *failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
