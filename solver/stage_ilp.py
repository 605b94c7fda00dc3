"""The optimum of a small problem with stages: an integer program over every state of every variable, for each cut.

Cuts are taken in the order of their own bounds, until that is no less than what is wanted. For one of them the columns
are those of `ilp`, and for each stage its seconds ``t[s]``, for each rank of the pipeline its working memory ``P[r]``,
and the largest rank ``G``. Minimise the step. Rows, in this order:

1. `one_state` and `entries_agree`, as `ilp` has them;
2. `streams`: t[s] >= exposed + compute and t[s] >= exposed + hidden, of its units and of what it pays for shared
   variables;
3. `fullest`: G >= the sum of the t[s] of a rank;
4. `working`: P[r] >= the transient of each of its columns, and, where a unit makes something again, that of the unit
   and what it makes again;
5. `memory`: static + in flight * saved + P[r] <= limit, on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

import numpy as np

from autopar.solver import ilp
from autopar.solver.backend import minimise
from autopar.solver.ilp import ROUNDING, IlpAnswer
from autopar.solver.problem import AGAIN, COMPUTE, EXPOSED, HIDDEN, SAVED, STATIC, Array, Pipeline, Problem
from autopar.solver.stages import peak_bytes, step_seconds

Group = list[tuple[int, Array]]
"""Columns with their resources, of which one is taken."""


@dataclass(eq=False)
class _Stage:
    """What a stage takes: groups of columns of its units, each with those that count together, and of shared variables;
    its column of seconds."""

    in_flight: float
    units: list[list[Group]]
    shared: list[Group]
    seconds: int

    def costs(self) -> Iterator[tuple[int, Array]]:
        for group in (*(g for unit in self.units for g in unit), *self.shared):
            yield from group


@dataclass(eq=False)
class _Program:
    columns: ilp._Columns
    pipeline: Pipeline
    scale: float
    limit: float
    stages: list[_Stage] = field(default_factory=list)
    working: list[int] = field(default_factory=list)
    fullest: int = -1

    def of_rank(self, rank: int) -> list[_Stage]:
        return self.stages[rank :: self.pipeline.ranks]


def solve_cut(
    problem: Problem, cuts: tuple[int, ...], *, gap: float, nodes: int, cutoff: float, scale: float
) -> IlpAnswer:
    """The fastest assignment within the limit with these cuts; see `ilp.solve_ilp`. ``scale``: seconds of the order of
    a step."""
    bound, timed_out = -inf, False
    for limit in (problem.memory_limit, problem.memory_limit * (1 - ROUNDING)):
        p = _program(problem, cuts, limit, scale)
        for row in ROWS:
            row(p)
        p.columns.model.high[p.columns.time] = cutoff / scale
        solution = minimise(p.columns.model, gap=gap, nodes=nodes)
        timed_out |= solution.timed_out
        if limit == problem.memory_limit:
            bound = solution.bound * scale if solution.bound == inf else solution.bound * scale * (1 - ROUNDING)
        if not len(solution.values):
            break
        assignment = replace(ilp._assignment(problem, p.columns, solution.values), cuts=cuts)
        objective = step_seconds(problem, assignment)
        if np.isfinite(objective) and peak_bytes(problem, assignment) <= problem.memory_limit:
            return IlpAnswer(objective, min(bound, objective), assignment, True, timed_out)
    return IlpAnswer(inf, bound, None, bound == inf, timed_out)


def _program(problem: Problem, cuts: tuple[int, ...], limit: float, scale: float) -> _Program:
    pipeline = problem.pipeline
    assert pipeline is not None
    c = ilp._columns(problem, None)
    p, made = _Program(c, pipeline, scale, limit), set[int]()
    on: dict[int, int] = {}
    loose = set(range(len(problem.shared))) - {b for unit in problem.units for b in unit.borders}
    for s, (first, last) in enumerate(pairwise((0, *cuts, len(problem.units)))):
        own = {b for unit in problem.units[first:last] for b in unit.borders}
        units = [c.groups(*c.units[k]) for k in range(first, last)]
        shared = [_paid(p, v, again=v in made) for v in sorted(own | loose if s == 0 else own)]
        p.stages.append(_Stage(pipeline.in_flight[s], units, shared, c.model.add()))
        made |= own
        for v in own:
            on[v] = on.get(v, 0) + 1
    p.working = [c.model.add() for _ in range(pipeline.ranks)]
    p.fullest = c.model.add()
    share = pipeline.fill / pipeline.microbatches
    sends = [
        (x, -pipeline.fill * (n - 1) * float(pipeline.sends[v][i]) / scale)
        for v, n in on.items()
        if n > 1
        for i, x in c.states[v].items()
    ]
    terms = [(stage.seconds, -share) for stage in p.stages] + [(p.fullest, share - 1)]
    c.model.row([(c.time, 1.0), *terms, *sends], low=0.0, high=0.0)
    return p


def _paid(p: _Program, variable: int, *, again: bool) -> Group:
    v = p.columns.variables[variable]
    found = []
    for i, x in p.columns.states[variable].items():
        costs: Array = v.costs[i].copy()
        if again and v.kind != "parameter":
            costs[[COMPUTE, EXPOSED, HIDDEN]] = 0.0
        found.append((x, costs))
    return found


def one_state(p: _Program) -> None:
    """As `ilp.one_state`."""
    ilp.one_state(p.columns, p.scale, p.limit)


def entries_agree(p: _Program) -> None:
    """As `ilp.entries_agree`."""
    ilp.entries_agree(p.columns, p.scale, p.limit)


def streams(p: _Program) -> None:
    """t[s] >= exposed + compute, t[s] >= exposed + hidden."""
    for stage in p.stages:
        for stream in (COMPUTE, HIDDEN):
            terms = [(x, float(t[EXPOSED] + t[stream]) / p.scale) for x, t in stage.costs()]
            p.columns.model.row([(stage.seconds, -1.0), *terms], high=0.0)


def fullest(p: _Program) -> None:
    """G >= sum over the stages of a rank of t[s]."""
    for r in range(p.pipeline.ranks):
        terms = [(stage.seconds, 1.0) for stage in p.of_rank(r)]
        p.columns.model.row([(p.fullest, -1.0), *terms], high=0.0)


def working(p: _Program) -> None:
    """P[r] >= the transient of what is taken of each group; and of a unit, P[u] >= those in it, P[r] >= P[u] + what it
    makes again."""
    model = p.columns.model
    for r, column in enumerate(p.working):
        groups = [g for stage in p.of_rank(r) for g in stage.shared]
        for inside in (unit for stage in p.of_rank(r) for unit in stage.units):
            again = [(x, float(t[AGAIN]) / p.limit) for group in inside for x, t in group if t[AGAIN]]
            if again:
                unit = model.add()
                ilp._at_least(p.columns, unit, inside, p.limit)
                model.row([(column, -1.0), (unit, 1.0), *again], high=0.0)
            else:
                groups += inside
        ilp._at_least(p.columns, column, groups, p.limit)


def memory(p: _Program) -> None:
    """static + in flight * saved + P[r] <= limit."""
    for r, column in enumerate(p.working):
        terms = [(column, 1.0)]
        for stage in p.of_rank(r):
            terms += [(x, float(t[STATIC] + stage.in_flight * t[SAVED]) / p.limit) for x, t in stage.costs()]
        p.columns.model.row(terms, high=1.0)


ROWS: tuple[Callable[[_Program], None], ...] = (one_state, entries_agree, streams, fullest, working, memory)


__all__ = ["solve_cut"]
