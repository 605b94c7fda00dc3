"""Whole assignments of a problem with stages: the least of one at prices of every unit's own, and what it takes.

Fast beside `stages`, which is the definition: units are added up from their patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.solver.evaluate import Pattern
from autopar.solver.problem import (
    AGAIN,
    SAVED,
    STATIC,
    TRANSIENT,
    Array,
    Assignment,
    Pipeline,
    joined,
    seconds,
    together,
)
from autopar.solver.segments import Priced, Row


@dataclass(frozen=True, eq=False)
class Placed:
    """An assignment with cuts. ``stages``: [stages, resources] as `stages.stage_totals`; ``seconds`` of a step;
    ``ranks``: bytes of each rank of the pipeline."""

    cuts: tuple[int, ...]
    shared: tuple[int, ...]
    patterns: tuple[Pattern, ...]
    stages: Array
    seconds: float
    ranks: Array

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank; infinite where the assignment is illegal."""
        return float(self.ranks.max()) if np.isfinite(self.seconds) else float("inf")

    @property
    def assignment(self) -> Assignment:
        """As problems have it."""
        return Assignment(self.shared, tuple(p.states for p in self.patterns), self.cuts)


def runs(row: Row, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """First unit and end of every stage."""
    return list(pairwise((0, *cuts, row.units)))


def cheapest(row: Row, cuts: tuple[int, ...], priced: Sequence[Priced]) -> Placed:
    """The assignment of least cost where unit k pays the prices ``priced[k]``; what of shared variables a stage pays is
    at the prices of its first unit that touches them."""
    problem = row.problem
    shared: list[Array] = [np.zeros(n) for n in row.evaluation.sizes]
    for first, last in runs(row, cuts):
        paid = set[int]()
        for k in range(first, last):
            for v in problem.units[k].borders:
                if v not in paid:
                    paid.add(v)
                    shared[v] = shared[v] + (priced[k].full[v] if row.first[v] >= first else priced[k].held[v])
    for v in row.untouched:
        shared[v] = priced[0].full[v]
    tables = list(shared)
    for k, unit in enumerate(problem.units):
        tables += [priced[k].point.tables(unit.kind)[t] for t in row.evaluation._classes[unit.kind].elimination.left]
    top = row.evaluation._top
    states = top.decode(top.run(tables), {})
    patterns = [
        priced[k].point.between(unit.kind, tuple(states[b] for b in unit.borders))
        for k, unit in enumerate(problem.units)
    ]
    return place(row, cuts, states, patterns)


def place(row: Row, cuts: tuple[int, ...], shared: Sequence[int], patterns: Sequence[Pattern]) -> Placed:
    """What an assignment takes."""
    pipeline = row.problem.pipeline
    assert pipeline is not None
    found, reads = [], dict[int, int]()
    for first, last in runs(row, cuts):
        own = sorted({b for unit in row.problem.units[first:last] for b in unit.borders})
        for v in own:
            reads[v] = reads.get(v, 0) + 1
        costs = [row.paid(v, shared[v], first) for v in own]
        costs += [row.paid(v, shared[v], first) for v in row.untouched if first == 0]
        rows = [p.total for p in patterns[first:last]]
        found.append(joined([together(np.stack(costs)), *rows] if costs else rows))
    of = np.stack(found)
    sends = sum((n - 1) * float(pipeline.sends[v][shared[v]]) for v, n in reads.items() if n > 1)
    time = np.nan_to_num(step_of(pipeline, of, sends), nan=np.inf)
    return Placed(cuts, tuple(shared), tuple(patterns), of, float(time), bytes_of(pipeline, of))


def placed_as(row: Row, assignment: Assignment) -> Placed:
    """An assignment found elsewhere."""
    shared, units = assignment.shared, zip(row.problem.units, assignment.units, strict=True)
    patterns = [row.evaluation.pattern(u.kind, states, tuple(shared[b] for b in u.borders)) for u, states in units]
    return place(row, assignment.cuts, shared, patterns)


def step_of(pipeline: Pipeline, stages: Array, sends: float) -> float:
    """Seconds of a step from what stages take of all microbatches."""
    ranks = _by_rank(pipeline, seconds(stages) / pipeline.microbatches).sum(0)
    return float(pipeline.fill * (ranks.sum() + sends) + (pipeline.microbatches - pipeline.fill) * ranks.max())


def bytes_of(pipeline: Pipeline, stages: Array) -> Array:
    """Bytes of each rank."""
    held = stages[:, STATIC] + np.asarray(pipeline.in_flight) * stages[:, SAVED]
    working = stages[:, TRANSIENT] + stages[:, AGAIN]
    return np.asarray(_by_rank(pipeline, held).sum(0) + _by_rank(pipeline, working).max(0))


def _by_rank(pipeline: Pipeline, stages: Array) -> Array:
    return np.asarray(stages.reshape(pipeline.virtual, pipeline.ranks))
