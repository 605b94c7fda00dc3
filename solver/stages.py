"""What an assignment of a problem with stages takes: seconds of a step, bytes of the fullest rank.

With ``t[r]`` seconds of one microbatch on rank ``r`` of the pipeline (all of its stages), ``M`` microbatches and the
schedule's ``fill``

    T = fill * (sum of t[r] + sends) + (M - fill) * max of t[r],        M * t[r] = exposed + max(compute, hidden)

which is what 1F1B, GPipe and interleaved 1F1B take where stages are equal. A rank holds what its stages hold all the
time, of each what is kept of a microbatch as often as ``in_flight``, and the fullest stage's working memory.

Every stage pays for the shared variables that its units touch: a parameter of two stages has a copy on each. Seconds of
a tensor are paid by the stage that makes it, and sent once to every other stage that reads it.

>>> from autopar.solver.problem import Class, Pipeline, Unit, Variable
>>> x = Variable("x", "op", ("only",), np.array([[4.0, 0, 0, 1.0, 2.0, 0, 0]]))
>>> layer = Class("layer", (x,), (), ())
>>> pipeline = Pipeline(ranks=2, virtual=1, microbatches=4, fill=1.0, in_flight=(2, 1), sends=())
>>> problem = Problem("toy", (), (layer,), (Unit(0, ()),) * 4, memory_limit=10.0, pipeline=pipeline)
>>> even = Assignment((), ((0,),) * 4, cuts=(2,))
>>> step_seconds(problem, even), peak_bytes(problem, even)  # 2 s a microbatch and rank: (4 + 1) * 2
(10.0, 10.0)
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from autopar.solver.problem import (
    AGAIN,
    COMPUTE,
    EXPOSED,
    HIDDEN,
    SAVED,
    STATIC,
    TRANSIENT,
    Array,
    Assignment,
    Problem,
    joined,
    pattern_rows,
    peak,
    seconds,
    together,
    totals,
)


def step_seconds(problem: Problem, assignment: Assignment) -> float:
    """Seconds of a step of an assignment, with stages or without."""
    pipeline = problem.pipeline
    if pipeline is None:
        return float(seconds(totals(problem, assignment)))
    ranks = _of_ranks(problem, seconds(stage_totals(problem, assignment)) / pipeline.microbatches)
    filling = pipeline.fill * (ranks.sum() + send_seconds(problem, assignment))
    return float(filling + (pipeline.microbatches - pipeline.fill) * ranks.max())


def peak_bytes(problem: Problem, assignment: Assignment) -> float:
    """Bytes of the fullest rank of an assignment, with stages or without."""
    pipeline = problem.pipeline
    if pipeline is None:
        return float(peak(totals(problem, assignment)))
    of = stage_totals(problem, assignment)
    held = of[:, STATIC] + np.asarray(pipeline.in_flight) * of[:, SAVED]
    working = of[:, TRANSIENT] + of[:, AGAIN]
    fullest = [working[r :: pipeline.ranks].max() for r in range(pipeline.ranks)]
    return float((_of_ranks(problem, held) + fullest).max())


def stage_totals(problem: Problem, assignment: Assignment) -> Array:
    """What each stage costs, [stages, resources]; `SAVED` of one microbatch."""
    shared, found, made = problem.shared, [], set[int]()
    for first, last in pairwise((0, *assignment.cuts, len(problem.units))):
        own, rows = set[int](), []
        for unit, states in zip(problem.units[first:last], assignment.units[first:last], strict=True):
            rows.append(
                together(pattern_rows(problem, unit, states, tuple(assignment.shared[b] for b in unit.borders)))
            )
            own.update(unit.borders)
        if first == 0:
            own.update(set(range(len(shared))) - {b for unit in problem.units for b in unit.borders})
        costs = [_paid(problem, v, assignment.shared[v], again=v in made) for v in sorted(own)]
        found.append(joined([together(np.stack(costs)), *rows] if costs else rows))
        made |= own
    return np.stack(found)


def _paid(problem: Problem, variable: int, state: int, *, again: bool) -> Array:
    """What a stage pays for a shared variable. ``again``: an earlier stage has it too."""
    costs: Array = problem.shared[variable].costs[state].copy()
    if again and problem.shared[variable].kind != "parameter":
        costs[[COMPUTE, EXPOSED, HIDDEN]] = 0.0
    return costs


def send_seconds(problem: Problem, assignment: Assignment) -> float:
    """Seconds of all that one microbatch sends between stages."""
    assert problem.pipeline is not None
    stages: dict[int, set[int]] = {}
    for s, (first, last) in enumerate(pairwise((0, *assignment.cuts, len(problem.units)))):
        for unit in problem.units[first:last]:
            for b in unit.borders:
                stages.setdefault(b, set()).add(s)
    sends = problem.pipeline.sends
    return float(sum((len(of) - 1) * sends[v][assignment.shared[v]] for v, of in stages.items() if len(of) > 1))


def _of_ranks(problem: Problem, stages: Array) -> Array:
    """Sums over the stages of each rank of the pipeline."""
    assert problem.pipeline is not None
    return np.asarray(stages.reshape(problem.pipeline.virtual, problem.pipeline.ranks).sum(0))


__all__ = ["peak_bytes", "send_seconds", "stage_totals", "step_seconds"]
