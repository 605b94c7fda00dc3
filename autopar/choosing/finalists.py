"""Finalists: plans of problems in which all parameters are treated alike, one a ZeRO stage, judged by their programs.

A problem prices each parameter with its part of the latencies of buckets (`passes.parameter_states`), as if all those
that move shared them. Parameters that enter in different ways do not, so an assignment that mixes ways looks faster
than its program is. Where that matters, each stage's best assignment without such mixes is looked for: it is one of
the whole problem's, so bounds and proofs stay those of the whole problem.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from autopar.choosing.pipelines import Cutting
from autopar.choosing.pose import Posed
from autopar.choosing.stages import cuts, levels
from autopar.errors import AutoparError
from autopar.passes.parameter_states import STAGES, ParameterState
from autopar.solver.problem import Problem

if TYPE_CHECKING:
    from autopar.choosing.fitting import Fit
    from autopar.choosing.solve import Solver
    from autopar.plan import Plan

OTHERS = 2
"""Candidates beside the best whose plans are judged."""
SAME = 1e-3
"""Of the seconds of two plans that are as fast."""
Kept = npt.NDArray[np.bool_]


def judged(solver: Solver, fit: Fit) -> Plan:
    """The plan of least predicted time among that of the search and, where its program takes longer than its problem
    says, others that the search found, and some whose parameters are all treated alike. Of pipelines only the former:
    each prediction replays several ranks."""
    found, plan = fit.found, fit.plan
    limits = fit.given, max(fit.given, solver.cluster.limit - solver.beside(plan))
    assert found.best is not None
    best, took, seen = plan, plan.predicted.step_time_s or 0.0, {found.best.answer.assignment}
    if took * (1 - solver.target_gap) <= found.best.seconds or solver.effort.is_over:
        return plan
    for outcome in (found.best, *found.alternatives[:OTHERS]):
        assert outcome.problem is not None
        if outcome.bound >= took:
            continue
        tried = [] if outcome is found.best else [outcome.answer.assignment]
        staged = outcome.problem.problem.pipeline is not None
        for assignment in itertools.chain(tried, () if staged else solver.uniform(outcome.problem, took, limits)):
            if assignment in seen:
                continue
            seen.add(assignment)
            other = solver.plan(outcome.problem, assignment)
            seconds = other.predicted.step_time_s or 0.0
            if other.fits is not False and seconds < took:
                best, took = other, seconds
    return best


def recut(solver: Solver, plan: Plan) -> Plan:
    """The plan, or where that is faster, or as fast with fewer bytes, the same layouts cut before any op: a problem
    cuts between units, and by what they add up to."""
    if plan.pp == 1 or solver.effort.is_over:
        return plan
    cutting = Cutting(solver.uncut(plan), solver.prepared_for(plan), plan.schedule, plan.pp, solver.cluster)
    try:
        found = cutting.plan(
            cuts(cutting.work, levels(cutting.pipe.model, cutting.whole, cutting.pipe.crossed), cutting.stages)
        )
    except AutoparError:
        return plan
    took, other = plan.predicted.step_time_s or 0.0, found.predicted.step_time_s or 0.0
    lean = (found.predicted.peak_mem_gib or 0.0) < (plan.predicted.peak_mem_gib or 0.0)
    if found.fits is False or not (other < took * (1 - SAME) or (lean and other <= took * (1 + 1e-9))):
        return plan
    return solver.also(plan, found)


def uniform(posed: Posed) -> Iterator[Problem]:
    """The problem with parameters of ZeRO stage 0, of 1, 2 and 3 only, where that leaves something out: the same
    variables and states, but others illegal."""
    shared = [of for v, of in zip(posed.problem.shared, posed.shared, strict=True) if v.kind == "parameter"]
    every = [*shared, *(states for kind in posed.parameters for states in kind)]
    seen = set()
    for stage in (0, *STAGES):
        kept = [_kept(states, stage) for states in every]  # type: ignore[arg-type]
        key = tuple(k.tobytes() for k in kept)
        if key not in seen and not all(k.all() for k in kept):
            seen.add(key)
            yield posed.with_parameters(lambda v, states, stage=stage: v.only(_kept(states, stage)))  # type: ignore[misc]


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
