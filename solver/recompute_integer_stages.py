"""Bounds of stages by branching once more, by code of its own: one program over every state for each cut that
multipliers do not rule out."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import comb, inf

import numpy as np

from autopar.solver.backend import Model, minimise
from autopar.solver.problem import AGAIN, SAVED, STATIC, TRANSIENT, Array, Problem
from autopar.solver.recompute_integer import ROUNDING, _columns, _entries
from autopar.solver.recompute_stages import Weights, stages_anew

MOST = 1000
"""Cuts at most."""

Group = list[tuple[int, Array]]


def integer_stages_bound(problem: Problem, multipliers: tuple[Weights, ...], claim: float = inf) -> float:
    """A lower bound of the seconds of a problem with a pipeline, up to ``claim``: that of the cuts that multipliers
    leave below it."""
    pipeline = problem.pipeline
    assert pipeline is not None
    count = len(problem.units)
    if comb(count - 1, pipeline.stages - 1) > MOST:
        return -inf
    stages = stages_anew(problem, multipliers)
    if stages is None:
        return -inf
    f, bound = min(1.0, pipeline.fill / pipeline.microbatches), claim
    for cuts in combinations(range(1, count), pipeline.stages - 1):
        edges = (0, *cuts, count)
        each = np.array([stages[s][i, j] for s, (i, j) in enumerate(pairwise(edges))])
        ranks = each.reshape(pipeline.virtual, pipeline.ranks).sum(0)
        if np.isfinite(ranks).all() and f * ranks.sum() + (1 - f) * ranks.max() < bound:
            bound = min(bound, _of_cut(problem, edges, bound))
    return bound


def _of_cut(problem: Problem, edges: tuple[int, ...], claim: float) -> float:
    """Up to ``claim``: what the program over every state shows of these cuts."""
    pipeline, limit = problem.pipeline, problem.memory_limit
    assert pipeline is not None
    model, scale = Model(), claim if 0 < claim < inf else _scale(problem)
    states = [_columns(model, v, None) for v in problem.shared]
    stage_of = {k: s for s, (i, j) in enumerate(pairwise(edges)) for k in range(i, j)}
    stages: list[list[list[Group]]] = [[] for _ in range(pipeline.stages)]
    on: dict[int, set[int]] = {v: set() for v in range(len(problem.shared))}
    for k, unit in enumerate(problem.units):
        kind = problem.classes[unit.kind]
        own = [_columns(model, v, None) for v in kind.variables]
        groups = [[(x, v.costs[i]) for i, x in s.items()] for v, s in zip(kind.variables, own, strict=True)]
        every = [*own, *(states[b] for b in unit.borders)]
        stages[stage_of[k]].append(groups + [_entries(model, f, [every[v] for v in f.over]) for f in kind.factors])
        for b in unit.borders:
            on[b].add(stage_of[k])
    step = model.add(cost=1.0, high=claim / scale)
    terms = [(step, -1.0)]
    for v, where in on.items():
        for s in where or {0}:
            stages[s].append([[(x, _paid(problem, v, i, s > min(where, default=0))) for i, x in states[v].items()]])
        sends = pipeline.fill * max(0, len(where) - 1) * pipeline.sends[v] / scale
        terms += [(x, float(sends[i])) for i, x in states[v].items()]
    fullest = model.add()
    terms.append((fullest, (pipeline.microbatches - pipeline.fill) / pipeline.microbatches))
    for r in range(pipeline.ranks):
        seconds, working, held = list[tuple[int, float]](), model.add(), list[tuple[int, float]]()
        for s in range(r, pipeline.stages, pipeline.ranks):
            costs = [c for groups in stages[s] for group in groups for c in group]
            time = model.add()
            for stream in (0, 2):
                model.row([(time, -1.0), *((x, float(c[1] + c[stream]) / scale) for x, c in costs)], high=0.0)
            seconds.append((time, 1.0))
            terms.append((time, pipeline.fill / pipeline.microbatches))
            held += [(x, float(c[STATIC] + pipeline.in_flight[s] * c[SAVED]) / limit) for x, c in costs]
            for groups in stages[s]:
                _works(model, working, groups, limit)
        model.row([(fullest, -1.0), *seconds], high=0.0)
        model.row([(working, 1.0), *held], high=1.0)
    model.row(terms, high=0.0)
    solution = minimise(model)
    shown = inf if solution.status == "infeasible" else solution.bound * scale * (1 - ROUNDING)
    return min(shown, claim)


def _works(model: Model, working: int, groups: list[Group], limit: float) -> None:
    """What a unit works with, and what it makes again."""
    again = [(x, float(c[AGAIN]) / limit) for group in groups for x, c in group if c[AGAIN]]
    unit = model.add() if again else working
    if again:
        model.row([(working, -1.0), (unit, 1.0), *again], high=0.0)
    for group in groups:
        model.row([(unit, -1.0), *((x, float(c[TRANSIENT]) / limit) for x, c in group)], high=0.0)


def _paid(problem: Problem, v: int, state: int, again: bool) -> Array:
    costs: Array = problem.shared[v].costs[state].copy()
    if again and problem.shared[v].kind != "parameter":
        costs[:3] = 0.0
    return costs


def _scale(problem: Problem) -> float:
    own = [v.costs for u in problem.units for v in problem.classes[u.kind].variables]
    finite = [c[np.isfinite(c).all(1)] for c in (*own, *(v.costs for v in problem.shared))]
    return sum(float((c[:, 0] + c[:, 1]).max(initial=0.0)) for c in finite) or 1.0
