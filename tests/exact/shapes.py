"""Batches of other shapes under the plan of the first one: 200 random changes over six models, against one process.

For each model and some plans the first batch is planned; each of the changes draws rows and lengths, the model is
captured anew (and held against eager), the plan is carried over, and a step of all ranks, run in one process, has to
give the loss, gradients and buffers of one process in float64 at that batch. Prints a row a change and, by model, how
many were equal, equal but planned anew, and refused with their lines. Exit code 1 where one is wrong.
``--changes 20``, ``--after 77``, ``--models bert`` and ``--minutes 10`` run a part.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.choosing.plan_training import plan_training
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.models import gpt2, resnet, vit
from autopar.pins import Pins
from autopar.plan import Plan

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import zoo  # noqa: E402
from stacked_judge import StackedJudge  # noqa: E402

Inputs = tuple[tuple[Tensor, ...], dict[str, Tensor]]
MOST_ROWS = 12
TOKENS = (
    "dp=2",
    "tp=2",
    "dp=2 tp=2 zero=3 microbatches=2",
    "dp=4 microbatches=2",
    "dp=2 sp=2",
    "pp=2 dp=2 microbatches=3",
    "",
)
IMAGES = ("dp=2", "tp=2", "dp=2 tp=2 zero=3", "dp=4", "")


@dataclass(frozen=True)
class Subject:
    """``build``: the model; ``inputs``: of so many rows and such a length; ``lengths``: that are drawn, the first one
    the plan's; ``plans``: their pins (empty: the solver's own on two ranks)."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]
    lengths: tuple[int, ...]
    plans: tuple[str, ...]


def _tokens(rows: int, length: int) -> Tensor:
    return torch.randint(5, zoo.VOCABULARY, (rows, length))


def _padded(rows: int, length: int) -> Inputs:
    """Ids, their mask and labels, padded behind random lengths."""
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1))
    ids = _tokens(rows, length).masked_fill(~mask, 0)
    return (), {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, zoo.IGNORED)}


def _both(rows: int, length: int) -> Inputs:
    """Ids for an encoder, labels of another length for a decoder."""
    return (), {"input_ids": _tokens(rows, length), "labels": _tokens(rows, 1 + length // 2)}


def _pixels(side: int, classes: int, rows: int) -> Inputs:
    return (torch.randn(rows, 3, side, side), torch.randint(0, classes, (rows,))), {}


LENGTHS = (16, 16, 8, 9, 13, 20, 32, 1, 2)
SUBJECTS = {
    "gpt2": Subject(lambda: gpt2.make(layers=2)[0], lambda b, s: ((_tokens(b, s), _tokens(b, s)), {}), LENGTHS, TOKENS),
    "llama": Subject(
        lambda: zoo.make("llama")[0],
        lambda b, s: ((), {"input_ids": (ids := _tokens(b, s)), "labels": ids}),
        (*LENGTHS[:-2], 2, 3),
        TOKENS,
    ),
    "bert": Subject(lambda: zoo.make("bert")[0], _padded, LENGTHS, TOKENS),
    "t5": Subject(lambda: zoo.make("t5")[0], _both, LENGTHS, TOKENS),
    "vit": Subject(lambda: vit.make(layers=2)[0], lambda b, _: _pixels(vit.SIZES["tiny"].image, 10, b), (0,), IMAGES),
    "resnet": Subject(lambda: resnet.make()[0], lambda b, s: _pixels(s, 10, b), (32, 32, 24, 33, 40, 64), IMAGES),
}


def plan_of(subject: Subject, model: nn.Module, pins: str) -> Plan:
    """For eight rows of the first length."""
    args, kwargs = subject.inputs(8, subject.lengths[0])
    parsed = Pins.parse(pins)
    ranks = (parsed.dp or 1) * (parsed.tp or 1) * (parsed.pp or 1) * parsed.sequence if pins else 2
    return plan_training(capture(model, args, kwargs, check=False), parsed, Cluster.local(ranks=ranks), {}).plan


def change(subject: Subject, model: nn.Module, plan: Plan, shape: tuple[int, int]) -> tuple[str, str]:
    """(equal, anew, refused or WRONG; what is to be said)."""
    try:
        judge = StackedJudge(model, *subject.inputs(*shape))
        judge.eager()
        made = judge.along(plan)
    except AutoparError as error:
        return "refused", str(error)
    except AssertionError as error:
        return "WRONG", str(error)
    return "equal" if made.units == plan.units else "anew", made.one_line()


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--after", type=int, default=0, help="draw so many changes without running them")
    parser.add_argument("--models", default=",".join(SUBJECTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no change after so long")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    started, draw, names = time.perf_counter(), random.Random(options.seed), options.models.split(",")
    models, plans = dict[str, nn.Module](), dict[tuple[str, str], Plan]()
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    for number in range(options.changes):
        if time.perf_counter() - started > 60 * options.minutes:
            print(f"{options.changes - number} changes left out for time")
            break
        name = names[number % len(names)]
        subject = SUBJECTS[name]
        pins, shape = draw.choice(subject.plans), (draw.randint(1, MOST_ROWS), draw.choice(subject.lengths))
        if number < options.after:
            continue
        torch.manual_seed(number)
        if name not in models:
            models[name] = subject.build().train()
        if (name, pins) not in plans:
            plans[name, pins] = plan_of(subject, models[name], pins)
        said, why = change(subject, models[name], plans[name, pins], shape)
        counts[name][said] += 1
        print(f"{said:8s} {name:7s} {plans[name, pins].one_line():44s} -> {shape}: {why[:200]}", flush=True)
    print()
    for name, found in counts.items():
        print(f"{name:7s} {', '.join(f'{n} {said}' for said, n in sorted(found.items()))}")
    total = sum(counts.values(), Counter[str]())
    print(f"{sum(total.values())} changes in {(time.perf_counter() - started) / 60:.0f} minutes: {dict(total)}")
    return 1 if total["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
