"""What a plan's proof says: bounds that hold for the true memory limit, and the scope that they hold in.

A problem's bytes are not quite the program's, so a plan may have been looked for within fewer bytes than a rank has
(`autopar.choosing.solve`). A bound for fewer bytes is none for more: bounds are taken from a search within the true
limit or more, and only the chosen plan from the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from autopar.choosing.pose import Posed
from autopar.plan import Proof
from autopar.solver.file import Record, Saved, of_search
from autopar.solver.meshes import MOST_MICROBATCHES
from autopar.solver.problem import Assignment, Problem
from autopar.solver.proof import proof_of
from autopar.solver.search import Candidate, Found, Outcome
from autopar.solver.stages import step_seconds

SCOPE = {
    "axes": f"at most 2 of ranks beside the pipeline, and equal microbatches (at most {MOST_MICROBATCHES})",
    "pipelines": "outermost, of whole nodes or parts of one; 1F1B, interleaved (2 or 4 stages a rank) and zero bubble: "
    "fill * (all ranks' seconds of a microbatch + messages) + (M - fill) * the fullest rank's, of gathers at every use "
    "the share of stages in units waited for; cuts between units (the plan's may lie elsewhere, where that is "
    "predicted faster)",
    "nesting": "axes that cut one dim nest in the order of the mesh, microbatches outermost",
    "copies": "every tensor is shared in at most one layout; its readers change that privately",
    "segments": "tensors are cut in parts only where splits and views of the model, or what arrives, propose it",
    "side": "masks, tables and ids are decided after the core, outside of the bound",
    "bytes": "the most of each kind added up, working memory of one op; a plan is judged by its fullest moment, and of "
    "those that fit though their sum does not, nothing is proven",
    "recompute": "one policy a unit (none, selective, full); bounds leave out bytes that the fullest unit makes again",
    "prices": "closed formulas; weights that enter alike share latencies; 0.1 % of hidden seconds counts as exposed",
}


@dataclass(frozen=True, eq=False)
class Chosen:
    """The plan's assignment, and the candidate whose problem it is of."""

    candidate: Candidate
    problem: Problem
    assignment: Assignment


def saved_search(found: Found[Posed], limit: float, chosen: Chosen) -> Saved:
    """The search as a file holds it, with the chosen plan as its only one."""
    outcomes = tuple(_bare(o) for o in found.outcomes)
    saved = of_search(replace(found, outcomes=outcomes, best=None, least=None), limit)  # type: ignore[arg-type]
    return replace(saved, records=tuple(_only(r, limit, chosen) for r in saved.records))


def proof(saved: Saved, found: Found[Posed], limit: float, within: float, pinned: str) -> Proof:
    """Objective, bound and gap, and a bound a candidate, as `solver.check_proof` finds them again. ``limit``: the bytes
    of a rank; ``within``: those that the plan was looked for in; ``pinned``: what nothing else was tried of."""
    made = proof_of(saved)
    posed = [o.problem.problem.counts for o in found.outcomes if o.problem is not None]
    counts: Mapping[str, Any] = {
        "memory": {"limit": limit, "bound_for": saved.memory_limit, "plan_within": within},
        "generated": sum(c.get("generated", 0) for c in posed),
        "dropped": {"dominated": sum(c.get("dominated", 0) for c in posed)},
    }
    held = {"pinned": pinned} if pinned else {}
    return Proof(made["objective"], made["bound"], made["gap"], {**SCOPE, **held, **counts, **made["scope"]})


def _only(record: Record, limit: float, chosen: Chosen) -> Record:
    """A record without the plan that its search found; the chosen candidate's with the chosen plan."""
    if record.candidate != chosen.candidate:
        return replace(record, seconds=inf, assignment=None)
    problem = replace(chosen.problem, memory_limit=limit)
    took = step_seconds(problem, chosen.assignment)
    bound, status = record.bound, record.status
    if status == "memory":  # its bound says that nothing fits, which the plan disproves: rounding
        bound, status = record.quick.seconds, "open"
    return replace(
        record, problem=problem, assignment=chosen.assignment, seconds=took, bound=min(bound, took), status=status
    )


def _bare(outcome: Outcome[Posed]) -> Outcome[Problem]:
    problem = None if outcome.problem is None else outcome.problem.problem
    return replace(outcome, problem=problem)  # type: ignore[return-value,arg-type]
