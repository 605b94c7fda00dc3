"""The table of predictions: models x plans on 2 gloo ranks, bytes predicted against bytes held.

Prints a row a plan and ends with exit code 1 where resting, gradient or optimizer bytes are not equal, or saved ones
are off by more than 2 %. ``--models hf/llama,...`` runs a part.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from autopar.build import Prepared, choose
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.passes.layout import Axis, Mesh
from autopar.passes.random_layouts import random_layouts
from autopar.passes.split_prologue import copy_graph
from autopar.pins import Pins, microbatch_rows, resolve
from autopar.plan import Plan
from autopar.predict import predict
from autopar.runtime.pool import RankPool
from autopar.verify import Subject
from autopar.write_plan import plan_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from exact import slice as slice_
from measured import measured

Made = tuple[Plan, Prepared]
RANKS, TIMEOUT, MOST_OFF = 2, 600.0, 0.02
CLUSTER = Cluster.local(ranks=RANKS)


def pinned(subject: Subject) -> Iterator[tuple[str, Callable[[], Made]]]:
    """The plans of the first table on 2 ranks, and every ZeRO stage."""
    further = [{"dp": 2, "tp": 1, "zero": z, "microbatches": m} for z in (1, 2) for m in (1, 3)]
    for pins in (*slice_.plans(RANKS), *further):
        yield Pins.parse(pins).text(), partial(_pinned, subject, pins)


def _pinned(subject: Subject, pins: dict[str, int]) -> Made:
    resolved = resolve(Pins.parse(pins), RANKS, subject.captured.batch)
    prepared = subject.prepared(resolved.microbatches, "fp32")
    return choose(prepared, resolved, CLUSTER), prepared


def drawn(subject: Subject, seeds: int) -> Iterator[tuple[str, Callable[[], Made]]]:
    """Layouts drawn at random for every op."""
    for seed in range(seeds):
        for microbatches in (1, 3):
            yield f"random {seed} microbatches={microbatches}", partial(_drawn, subject, seed, microbatches)


def _drawn(subject: Subject, seed: int, microbatches: int) -> Made:
    captured, prepared = subject.captured, subject.prepared(microbatches, "fp32")
    rows = microbatch_rows(captured.batch, RANKS, microbatches)
    axes = (Axis("a", RANKS), Axis("time", microbatches, rows))
    mesh = Mesh(axes if microbatches > 1 else axes[:1])
    batched = frozenset(i.name for i in captured.inputs if i.batch)
    gm = copy_graph(prepared.body)
    random_layouts(gm, mesh, frozenset(captured.parameters), batched, seed, hoisted=frozenset(prepared.hoisted))
    return plan_of(gm, captured, mesh, CLUSTER), prepared


def compare(name: str, made: Made, pool: RankPool) -> tuple[bool, str]:
    """Whether a plan's bytes are as predicted, and a line that says so."""
    plan = predict(*made, CLUSTER)
    every: list[Any] = pool.run(measured, slice_.spec_of(name), slice_.BATCH, plan.dumps())
    parts, saved = plan.predicted.parts, max(m.saved for m in every)
    held = [every[0].parameters, every[0].gradients, every[0].optimizer]
    said = [parts[f"{key}_bytes"] for key in ("parameters", "gradients", "optimizer")]
    off = parts["saved_bytes"] / saved - 1
    good = held == said and abs(off) <= MOST_OFF
    text = f"rest {held[0]:>9} gradients {held[1]:>9} AdamW {held[2]:>9} saved {saved:>9}"
    wrong = "" if held == said else f"  predicted {said}"
    return good, f"{text} predicted {off:+.2%}{wrong}"


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = (*slice_.NAMED, *(f"reference/{r}" for r in slice_.REFERENCE))
    parser.add_argument("--models", default=",".join(names))
    parser.add_argument("--layouts", type=int, default=3, help="random layouts a model")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    started, counts = time.perf_counter(), {"equal": 0, "refused": 0, "wrong": 0}
    with RankPool(RANKS, timeout=TIMEOUT) as pool:
        for name in options.models.split(","):
            if name.startswith("tv/") and importlib.util.find_spec("torchvision") is None:
                print(f"left out {name}: torchvision is not installed", flush=True)
                continue
            subject = Subject.of(slice_.spec_of(name), slice_.BATCH, check=False)
            for words, make in (*pinned(subject), *drawn(subject, options.layouts)):
                words = f"{name:18s} {words:38s}"
                try:
                    good, text = compare(name, make(), pool)
                except AutoparError as error:
                    counts["refused"] += 1
                    print(f"refused {words} {str(error)[:120]}", flush=True)
                    continue
                counts["equal" if good else "wrong"] += 1
                print(f"{'equal  ' if good else 'WRONG  '} {words} {text}", flush=True)
    print(f"\n{counts['equal']} as predicted, {counts['refused']} refused, {counts['wrong']} wrong; ", end="")
    print(f"{(time.perf_counter() - started) / 60:.0f} minutes")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
