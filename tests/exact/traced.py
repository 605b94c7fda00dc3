"""Which units of public models (`zoo.py`) and of ``small:NAME`` of ``small_models.py`` have graphs of their backward
(`differentiate`), and whether these are right.

Every model is planned with dp=2 tp=2, and every class of its units differentiated under every policy; ``--equal`` also
runs a step of all ranks by these graphs, in this one process and in float64, and compares it with one process. Prints a
row a model; ends with exit code 1 where a unit is not equal, or a class that was not is ``Untraceable``. ``--models
llama,gpt2`` runs a part.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from autopar.build import apply, choose
from autopar.cluster import Cluster
from autopar.equality import FP64, Run, distances
from autopar.errors import AutoparError
from autopar.passes.differentiate import Untraceable, differentiate
from autopar.passes.lower import Lowerable, lower, with_changes
from autopar.pins import Pins, resolve

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import zoo  # noqa: E402
from explicit_step import ExplicitStep  # noqa: E402
from small_models import MODELS as SMALL  # noqa: E402
from stacked_judge import StackedJudge  # noqa: E402

POLICIES = ("none", "selective", "full")
PINS = {"dp": "2", "tp": "2"}


def lowered(judge: StackedJudge, pins: dict[str, str]) -> Lowerable:
    """The model as the pins have it; where nothing can be divided, over data ranks alone."""
    try:
        resolved = resolve(Pins.parse(pins), 4, judge.captured.batch)
        prepared = judge.prepared(resolved.microbatches)
        plan = choose(prepared, resolved, Cluster.local(ranks=4))
    except AutoparError:
        if pins != PINS:
            raise
        return lowered(judge, {"dp": "4"})
    return with_changes(apply(plan, prepared))


def judged(name: str, equal: bool) -> tuple[str, Counter[str]]:
    """A row for one model, and why units of it cannot be traced."""
    small = name.removeprefix("small:")
    judge = StackedJudge(*(SMALL[small]() if small != name else zoo.make(name, "on")))
    lowerable = lowered(judge, PINS)
    groups = {a.name: a.name for a in lowerable.mesh.axes}
    local = lower(lowerable, 0, groups)
    (program,) = local.units.values()
    reasons, seconds, traced = Counter[str](), 0.0, 0
    for unit in program.classes:
        if not unit.trains:
            continue
        begin = time.process_time()
        try:
            for policy in POLICIES:
                differentiate(replace(unit, recompute=policy))
            traced += 1
        except Untraceable as why:
            reasons[str(why)[:160]] += 1
        seconds += time.process_time() - begin
    head = f"{name:28s} {len(program.calls):3d} units {traced:2d} classes {seconds / max(1, 3 * traced):6.2f} s each"
    if not equal or reasons:
        return head, reasons
    worst = 0.0
    for policy in POLICIES:
        programs = [lower(lowerable, rank, groups) for rank in range(lowerable.mesh.ranks)]
        step = ExplicitStep(programs, policy).run(judge.attributes, judge.inputs, judge.key)
        grads = {n: step.gradients.get(n) for n in judge.captured.parameters}
        buffers = {n: step.buffers.get(n, judge.attributes[n]) for n in judge.captured.buffers}
        found = distances(Run(step.loss, grads, buffers, {}), judge.reference, lr=1.0)[0]
        worst = max(worst, found.rel)
        if found.rel > FP64.limits[found.kind]:
            reasons[f"WRONG {policy}: {found}"] += 1
    return f"{head} worst {worst:.1e}", reasons


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join([*zoo.MODELS, *(f"small:{n}" for n in SMALL)]))
    parser.add_argument("--equal", action="store_true")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    bad, known = 0, Counter[str]()
    for name in given.models.split(","):
        try:
            row, reasons = judged(name, given.equal)
        except Exception as error:
            traceback.print_exc(limit=-3)
            row, reasons = f"{name:28s}", Counter({f"{type(error).__name__}: {str(error).splitlines()[0][:160]}": 1})
        print("traced" if not reasons else "FAILED", row, *(f"\n       {n} x {why}" for why, n in reasons.items()))
        sys.stdout.flush()
        bad += bool(reasons)
        known += reasons
    print(f"{bad} models with units that have no graphs" if bad else "every unit of every model has its graphs")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
