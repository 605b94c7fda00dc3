"""Models that nobody tuned rules for (`zoo.py`) x plans x ranks, on real gloo ranks against one process.

For each model: the solver's own plan, tp=2, dp=2 zero=3 and two microbatches on 2 ranks; the solver's own plan and
dp=2 tp=2 on 4; all without dropout, and where the model has some also with it. Then the share of float ops that have a
rule with a factor to split, and what tp=2 takes off a rank. Prints a row a plan and ends with exit code 1 where a plan
is not equal or refused without reason. ``--models llama,tv/swin_t``, ``--ranks 2`` and ``--minutes 30`` run a part;
models left out for time are named.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.choosing.plan_training import plan_training
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.loading import ModelSpec
from autopar.passes.facts import fact
from autopar.passes.strategy import rule
from autopar.pins import Pins
from autopar.plan import Plan
from autopar.runtime.pool import RankPool
from autopar.verify import Subject, VerifyResult, verify_many
from autopar.write_plan import ops_of

sys.path.insert(0, str(Path(__file__).parent))
import zoo

TIMEOUT = 900.0
PLANS: dict[int, tuple[dict[str, int], ...]] = {
    2: ({}, {"tp": 2}, {"dp": 2, "zero": 3}, {"dp": 2, "microbatches": 2}, {"tp": 2, "microbatches": 2}),
    4: ({}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "zero": 3, "microbatches": 2}),
}
WITH_DROPOUT: dict[int, tuple[dict[str, int], ...]] = {
    2: ({}, {"tp": 2}, {"dp": 2, "zero": 3, "microbatches": 2}),
    4: ({"dp": 2, "tp": 2},),
}
MICROBATCHES = "microbatches"  # a refusal for this word is right where the model needs its whole batch at once
IDEAL = 0.5  # of the FLOPs, that tp=2 can take off a rank
LITTLE = 0.5  # of that: models under it are listed with what stops them
TARGET, SPLIT = 0.9, 0.95


@dataclass
class Report:
    """What the table found. ``shares``: of the ideal, that tp=2 takes off, by model; ``split``: (ops with a rule that
    splits a factor, all float ops), by model."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)
    split: dict[str, tuple[int, int]] = field(default_factory=dict)


def spec_of(name: str, dropout: str) -> ModelSpec:
    """The factory of a model."""
    return ModelSpec(f"{Path(__file__).parent / 'zoo.py'}:make", {"name": name, "dropout": dropout})


def has_dropout(name: str) -> bool:
    """Whether the library's own model drops anything."""
    return bool(list(zoo.probabilities(zoo.make(name, "on")[0])))


def plan_of(subject: Subject, pins: dict[str, int], ranks: int) -> Plan | AutoparError:
    """The plan that `autopar.compile` would make."""
    try:
        return plan_training(subject.captured, Pins.parse(pins), Cluster.local(ranks=ranks), {}).plan
    except AutoparError as error:
        return error


def complaint(pins: dict[str, int], result: VerifyResult | AutoparError) -> str:
    """What is wrong with a row; empty where nothing is."""
    if isinstance(result, VerifyResult):
        return "" if result.ok else f"not equal: {result.worst[0]}"
    right = MICROBATCHES in pins and "whole batch at once" in str(result)
    return "" if right else f"refused: {result}"


def row(name: str, said: str, result: VerifyResult | AutoparError, wrong: str) -> str:
    """One line of the table."""
    if isinstance(result, AutoparError):
        return f"{'refused' if not wrong else 'WRONG  '} {name:26s} {said:36s} {str(result)[:160]}"
    shares = " ".join(f"{a}:{s.flops:.3f}/{s.param_bytes:.3f}/{s.saved_bytes:.3f}" for a, s in result.divided.items())
    head = f"{'equal  ' if not wrong else 'WRONG  '} {name:26s} {said:36s} {result.plan:44s}"
    return f"{head} worst {result.worst[0].rel:.1e}  {shares}  {result.seconds:.1f} s"


def rows(name: str, dropout: str, pools: dict[int, RankPool], report: Report) -> Iterator[str]:
    """The lines of one model."""
    spec = spec_of(name, dropout)
    subject = Subject.of(spec, None)
    if dropout == "off":
        report.split[name] = splits(subject)
    for ranks, pool in pools.items():
        given = (PLANS if dropout == "off" else WITH_DROPOUT)[ranks]
        plans = [plan_of(subject, pins, ranks) for pins in given]
        made = [p for p in plans if isinstance(p, Plan)]
        results = iter(verify_many(spec, ranks, made, pool=pool, subject=subject))
        for pins, plan in zip(given, plans, strict=True):
            result = next(results) if isinstance(plan, Plan) else plan
            said = f"{ranks} {' '.join(f'{k}={v}' for k, v in pins.items()) or 'own'}{' dropout' * (dropout == 'on')}"
            wrong = complaint(pins, result)
            report.counts["wrong" if wrong else "refused" if isinstance(result, AutoparError) else "equal"] += 1
            report.wrong += [f"{name} {said}: {wrong}"] if wrong else []
            if pins == {"tp": 2} and dropout == "off" and isinstance(plan, Plan) and isinstance(result, VerifyResult):
                _divided(name, plan, result, report)
            yield row(name, said, result, wrong) + (f"\n        ^ {wrong}" if wrong else "")


def _divided(name: str, plan: Plan, result: VerifyResult, report: Report) -> None:
    share = result.divided["tp"].flops if "tp" in result.divided else None
    report.shares[name] = min(1.0, (share or 0.0) / IDEAL)  # torch counts grouped convolutions as if they were whole
    if report.shares[name] < LITTLE:
        report.stopped[name] = "; ".join(f"{w.fqn} ({w.op}): {w.why}" for w in plan.predicted.whole[:3])


def splits(subject: Subject) -> tuple[int, int]:
    """(ops with floats whose rule has a factor to split or a special way, all ops with floats larger than a number)."""
    found = []
    for node in ops_of(subject.prepared(1, "fp32").body):
        values = [v for v in fact(node).values if v is not None and v.dtype.is_floating_point]
        if any(v.shape for v in values):
            named = rule(node)
            found.append(named is not None and bool(named.factors() or named.specials))
    return sum(found), len(found)


def summary(report: Report) -> list[str]:
    """The closing lines."""
    lines = [f"{report.counts['equal']} equal, {report.counts['refused']} rightly refused, {len(report.wrong)} wrong"]
    if report.shares:
        median = statistics.median(report.shares.values())
        lines.append(f"tp=2 takes off a rank, of the ideal half of the FLOPs: median {median:.3f} (at least {TARGET})")
        lines += [f"    {n}: {report.shares[n]:.3f}, stopped by {why}" for n, why in report.stopped.items()]
    with_rule, every = (sum(pair[i] for pair in report.split.values()) for i in (0, 1))
    if every:
        lines.append(f"float ops with a rule that splits: {with_rule} of {every}, {with_rule / every:.2%}")
    return [*lines, *report.wrong]


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--models", default=",".join(zoo.MODELS))
    parser.add_argument("--dropout", default="off,on")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no model after so long")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    started, report, left = time.perf_counter(), Report(), list[str]()
    with ExitStack() as stack:
        ranks = [int(n) for n in options.ranks.split(",")]
        pools = {n: stack.enter_context(RankPool(n, timeout=TIMEOUT)) for n in ranks}
        for name in options.models.split(","):
            missing = [p for p, m in (("timm/", "timm"), ("tv/", "torchvision")) if name.startswith(p) and not _has(m)]
            if missing or time.perf_counter() - started > 60 * options.minutes:
                left.append(name)
                continue
            for dropout in options.dropout.split(","):
                if dropout == "on" and not has_dropout(name):
                    continue
                try:
                    for line in rows(name, dropout, pools, report):
                        print(line, flush=True)
                except AutoparError as error:
                    report.wrong.append(f"{name}: refused: {error}")
                    print(f"WRONG   {report.wrong[-1]}", flush=True)
    print("", *summary(report), sep="\n")
    print(f"{(time.perf_counter() - started) / 60:.0f} minutes" + (f"; left out: {', '.join(left)}" if left else ""))
    return 1 if report.wrong else 0


def _has(module: str) -> Any:
    return importlib.util.find_spec(module)


if __name__ == "__main__":
    sys.exit(main())
