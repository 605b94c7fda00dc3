"""Random small problems with stages against counting out every assignment with every cut: a table.

    python tests/exact/small_stages.py [FIRST LAST]

By how many stages and how tight the memory is: problems, those solved to the optimum, the largest gap with and without
programs over every state, how many are proven to fit nowhere. Ends with status 1 where a bound is above the optimum, an
assignment takes other seconds or bytes than it says, or the check finds less than what is claimed.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "solver"))

from random_stages import CountedStages, random_stages

from autopar.solver.file import _weights
from autopar.solver.recompute_stages import stage_bytes_bound, stages_bound_anew
from autopar.solver.solve import solve

CLOSE = 1e-9


def main(first: int = 0, last: int = 1000) -> int:
    """Prints the table; how many claims were wrong."""
    rows: dict[tuple[str, str], list[tuple[float, float, float, bool]]] = defaultdict(list)
    wrong, begun = 0, time.process_time()
    for seed in range(first, last):
        problem = random_stages(seed)
        pipe, counted = problem.pipeline, CountedStages(problem)
        assert pipe is not None
        optimum = counted.optimum
        free = counted.times.min(initial=np.inf)
        memory = "nothing fits" if optimum == np.inf else "tight" if optimum > free else "loose"
        gaps = []
        for columns in (0, 2500):
            answer = solve(problem, target_gap=0.0, ilp_columns=columns)
            faults = []
            if answer.bound > optimum * (1 + CLOSE):
                faults.append(f"bound {answer.bound} above {optimum}")
            if answer.assignment is not None:
                at = counted.number(answer.assignment)
                if abs(counted.times[at] - answer.objective) > CLOSE * answer.objective:
                    faults.append(f"takes {counted.times[at]}, said {answer.objective}")
                if counted.peaks[at] > problem.memory_limit:
                    faults.append(f"needs {counted.peaks[at]} of {problem.memory_limit}")
            elif answer.least_bound > counted.least_bytes * (1 + CLOSE):
                faults.append(f"least bytes {answer.least_bound} above {counted.least_bytes}")
            shown = stages_bound_anew(problem, tuple(_weights(m) for m in answer.multipliers))
            if not answer.multipliers_bound * (1 - CLOSE) <= shown <= optimum * (1 + CLOSE):
                faults.append(f"multipliers give {shown}, said {answer.multipliers_bound}")
            if answer.status == "infeasible" and stage_bytes_bound(problem) < answer.least_bound * (1 - CLOSE):
                faults.append("fewest bytes not found again")
            for fault in faults:
                print(f"seed {seed}: {fault}")
            wrong += len(faults)
            gaps.append(1 - answer.bound / answer.objective if 0 < answer.objective < np.inf else 0.0)
        best = answer.objective <= optimum * (1 + 2e-6) if optimum < np.inf else answer.assignment is None
        stages = f"{pipe.stages} on {pipe.ranks}" if pipe.virtual > 1 else str(pipe.ranks)
        rows[stages, memory].append((gaps[0], gaps[1], float(best), answer.bound == np.inf))
    print(f"{'stages':>8} {'memory':>13} {'problems':>9} {'optimal':>8} {'gap':>8} {'no program':>11} {'proven':>7}")
    for (stages, memory), found in sorted(rows.items()):
        without, gap, best, proven = (np.array(column, float) for column in zip(*found, strict=True))
        print(
            f"{stages:>8} {memory:>13} {len(found):>9} {int(best.sum()):>8} {gap.max():>8.1e} {without.max():>11.3f} "
            f"{int(proven.sum()):>7}"
        )
    print(f"{last - first} problems, {wrong} wrong, {time.process_time() - begun:.0f} CPU s")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(*map(int, sys.argv[1:]))))
