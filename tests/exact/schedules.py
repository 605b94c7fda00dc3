"""Random graphs of stages under random schedules: what the static check says against what the executor does.

For each seed a graph (values skip stages, fan out, are masks, are empty) and a schedule, every other one disturbed so
that it may deadlock; run with one thread a rank under random delays. A schedule that passes the check must run, with
the gradients of the composed function; one that does not must not. Ends with exit code 1 where one is wrong.
``--seeds A:B`` runs a part.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from autopar.errors import AutoparError
from autopar.solver.simulate.check import check_schedule, schedule_from_words, words_of

sys.path.insert(0, str(Path(__file__).parent.parent))
from stage_graphs import disturbed, random_graph, random_schedule, run_in_threads, wrong

DELAY = 0.0005  # seconds that most messages take at most; one in four takes up to ten times as long
SAID = "RankError: deadlock|(RankError: rank . failed with )?AutoparError: schedule: "


def judge(seed: int) -> tuple[str, str]:
    """("runs" or "deadlocks", what is wrong)."""
    draw = random.Random(seed)
    graph = random_graph(draw)
    schedule = random_schedule(graph, draw)
    if seed % 2:
        schedule = disturbed(schedule, draw)
    assert schedule_from_words(words_of(schedule)) == schedule
    try:
        held = check_schedule(schedule, graph.crossings)
        predicted = "runs"
    except AutoparError as error:
        predicted = "deadlocks"
        if not seed % 2:
            return predicted, f"a schedule that can be run: {error}"
    outcome = run_in_threads(graph, schedule, delays(seed))
    if predicted == "deadlocks":
        failed = [error for error in outcome.errors if error]
        others = [error for error in failed if not re.match(SAID, error)]
        return predicted, "; ".join(others) if failed else "it ran"
    most = tuple(toy.most for toy in outcome.toys)
    if most != held.stages:
        return predicted, f"stages held {most} microbatches, not {held.stages}"
    why = wrong(graph, outcome)
    if not why and seed % 5 == 0:
        again = run_in_threads(graph, schedule, delays(seed + 1))
        if [toy.gradient for toy in again.toys] != [toy.gradient for toy in outcome.toys]:
            why = "another timing gives other bits"
    return predicted, why


def delays(seed: int) -> Callable[[], float]:
    draw = random.Random(seed)
    return lambda: DELAY * draw.random() * draw.choice((1, 1, 1, 10))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:2000", help="A:B, from A and before B")
    first, end = (int(word) for word in parser.parse_args().seeds.split(":"))
    torch.set_num_threads(1)
    begun, counts, failed = time.monotonic(), Counter[str](), 0
    for seed in range(first, end):
        predicted, why = judge(seed)
        counts[predicted] += 1
        if why:
            failed += 1
            print(f"WRONG seed {seed} ({predicted}): {why}", flush=True)
    said = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    print(f"{end - first} schedules ({said}): {failed} wrong, {time.monotonic() - begun:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
