"""Plans in which ranks share out the work, for models so small that repeating it on every rank would be faster.

Where latencies are more than all the work, the fastest plan lets every rank do the same. It is exact, and of no use to
anyone who asked for several ranks. So where an axis takes less than half of the FLOPs off a rank that it could, each
mesh's problem is solved again with every op that does work divided by all axes, where it can be, and the fastest of
those plans is taken. Its assignment is one of the whole problem's: the bound stays that of the whole problem, and the
gap says what sharing the work costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from torch import fx

from autopar.choosing.pose import Posed
from autopar.passes.divide_work import flops
from autopar.passes.facts import fact
from autopar.passes.roles import DIVIDE
from autopar.solver.pipes import NO_PIPE
from autopar.solver.problem import Assignment, Problem

if TYPE_CHECKING:
    from autopar.choosing.solve import Solver
    from autopar.plan import Plan

HALF = 0.5  # of the FLOPs that an axis could divide


def at_work(solver: Solver, plan: Plan, limits: Sequence[float]) -> Plan:
    """The plan, or where an axis of it hardly divides work, the fastest that fits of those that do, looked for within
    each of some ``limits``."""
    posed, assignment = solver.made_of(plan)
    if solver.pinned is not None or solver.effort.is_over or all(share >= HALF for share in shares(posed, assignment)):
        return plan
    best, took, chosen = plan, inf, solver.chosen(plan).candidate
    counts = {solver.pins.microbatches or 1, plan.microbatches}
    among = [c for c in solver.candidates if c.microbatches in counts and c.pipe in (NO_PIPE, chosen.pipe)]
    for candidate, limit in itertools.product(among, dict.fromkeys(limits)):
        other = solver.working(candidate, limit)
        seconds = inf if other is None else other.predicted.step_time_s or 0.0
        if other is not None and other.fits is not False and seconds < took:
            best, took = other, seconds
    return best


def shares(posed: Posed, assignment: Assignment) -> list[float]:
    """Of each axis of ranks, the share of the model's work in ops that it divides."""
    every, divided, work_of = 0.0, [0.0] * len(posed.mesh.space), _work(posed)
    for unit, states in zip(posed.units.units, assignment.units, strict=True):
        for op, options, state in zip(unit.ops, posed.ops[unit.kind], states, strict=False):
            work = work_of(op)
            every += work
            for i, axis in enumerate(posed.mesh.space):
                if options.strategies[state].choices[axis].kind in DIVIDE:
                    divided[i] += work
    return [part / every if every else 1.0 for part in divided]


def divided(posed: Posed) -> Problem:
    """The problem with all ops that do work divided by every axis, where they can be: the same variables and states,
    but others illegal."""
    classes, work_of = [], _work(posed)
    for kind, first, options in zip(posed.problem.classes, posed.units.first, posed.ops, strict=True):
        variables = list(kind.variables)
        for i, (op, states) in enumerate(zip(posed.units.units[first].ops, options, strict=True)):
            if not work_of(op):
                continue
            kept = np.array([all(s.choices[a].kind in DIVIDE for a in posed.mesh.space) for s in states.strategies])
            if kept.any():
                variables[i] = variables[i].only(kept)
        classes.append(replace(kind, variables=tuple(variables)))
    return replace(posed.problem, classes=tuple(classes))


def _work(posed: Posed) -> Callable[[fx.Node], float]:
    """How work is counted: FLOPs, or, in a model that has none (norms), bytes of results."""
    if any(flops(op) for unit in posed.units.units for op in unit.ops):
        return flops
    return lambda op: float(sum(v.nbytes for v in fact(op).values if v is not None))
