"""Finalists: plans of problems in which all parameters are treated alike, one a ZeRO stage, judged by their programs.

A problem prices each parameter with its part of the latencies of buckets (`passes.parameter_states`), as if all those
that move shared them. Parameters that enter in different ways do not, so an assignment that mixes ways looks faster
than its program is. Where that matters, each stage's best assignment without such mixes is looked for: it is one of
the whole problem's, so bounds and proofs stay those of the whole problem.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from autopar.choosing.pose import Posed
from autopar.passes.parameter_states import STAGES, ParameterState
from autopar.solver.problem import Problem, Variable

if TYPE_CHECKING:
    from autopar.choosing.fitting import Fit
    from autopar.choosing.solve import Solver
    from autopar.plan import Plan

OTHERS = 2
"""Candidates beside the best whose plans are judged."""
Kept = npt.NDArray[np.bool_]


def judged(solver: Solver, fit: Fit) -> Plan:
    """The plan of least predicted time among that of the search and, where its program takes longer than its problem
    says, some whose parameters are all treated alike."""
    found, plan = fit.found, fit.plan
    limits = fit.given, max(fit.given, solver.cluster.limit - solver.beside(plan))
    assert found.best is not None
    best, took, seen = plan, plan.predicted.step_time_s or 0.0, {found.best.answer.assignment}
    if took * (1 - solver.target_gap) <= found.best.seconds:
        return plan
    for outcome in (found.best, *found.alternatives[:OTHERS]):
        assert outcome.problem is not None
        if outcome.bound >= took:
            continue
        tried = [] if outcome is found.best else [outcome.answer.assignment]
        for assignment in itertools.chain(tried, solver.uniform(outcome.problem, took, limits)):
            if assignment in seen:
                continue
            seen.add(assignment)
            other = solver.plan(outcome.problem, assignment)
            seconds = other.predicted.step_time_s or 0.0
            if other.fits is not False and seconds < took:
                best, took = other, seconds
    return best


def uniform(posed: Posed) -> Iterator[Problem]:
    """The problem with parameters of ZeRO stage 0, of 1, 2 and 3 only, where that leaves something out: the same
    variables and states, but others illegal."""
    seen = set()
    for stage in (0, *STAGES):
        shared = [_kept(s, stage) if v.kind == "parameter" else None for v, s in _shared(posed)]
        own = [[_kept(states, stage) for states in kind] for kind in posed.parameters]
        every = [k for k in shared if k is not None] + [k for kind in own for k in kind]
        if all(k.all() for k in every):
            continue
        key = tuple(k.tobytes() for k in every)
        if key not in seen:
            seen.add(key)
            yield _masked(posed, shared, own)


def _shared(posed: Posed) -> Iterator[tuple[Variable, Sequence[ParameterState]]]:
    yield from zip(posed.problem.shared, posed.shared, strict=True)


def _masked(posed: Posed, shared: Sequence[Kept | None], own: Sequence[Sequence[Kept]]) -> Problem:
    classes = []
    for kind, masks in zip(posed.problem.classes, own, strict=True):
        *others, again = kind.variables  # the last but for what the unit makes again are its parameters
        first = len(others) - len(masks)
        held = [v.only(kept) for v, kept in zip(others[first:], masks, strict=True)]
        classes.append(replace(kind, variables=(*others[:first], *held, again)))
    pairs = zip(posed.problem.shared, shared, strict=True)
    return replace(
        posed.problem,
        shared=tuple(v if kept is None else v.only(kept) for v, kept in pairs),
        classes=tuple(classes),
    )


def _kept(states: Sequence[ParameterState], stage: int) -> Kept:
    """Of the states with one use, those of a stage: in pieces over as many axes as any. All, if none is of it."""
    kept = np.zeros(len(states), np.bool_)
    for use in dict.fromkeys(s.use for s in states):
        group = np.array([s.use == use for s in states])
        axes = np.array([_pieces(s) for s in states])
        of = group & np.array([_is(s, stage) for s in states])
        most = int(axes[of].max(initial=0))
        kept |= of & (axes == most) if of.any() else group
    return kept


def _is(state: ParameterState, stage: int) -> bool:
    if not _pieces(state):
        return stage == 0
    gather, reduce = STAGES.get(stage, ("", ""))
    return state.gather == gather and state.reduce in (reduce, "never")


def _pieces(state: ParameterState) -> int:
    """Over how many axes a parameter rests in pieces that is used whole."""
    return sum(a == "S" != b for a, b in zip(state.rest.kinds, state.use.kinds, strict=True))
