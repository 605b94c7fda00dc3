"""Problems and plans with stages: what a pipeline makes of the problem of one stage's ranks, and of its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import numpy as np

from autopar.choosing.pose import Posed
from autopar.choosing.stages import unit_edges, with_stages
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.passes.facts import value
from autopar.passes.parameter_states import ParameterState
from autopar.passes.price import local_bytes
from autopar.pins import Pins
from autopar.plan import Plan, Schedule
from autopar.solver.meshes import Mesh, meshes
from autopar.solver.pipes import NO_PIPE, Pipe, flying, pipes
from autopar.solver.problem import EXPOSED, Array, Pipeline, Variable
from autopar.solver.search import Candidate
from autopar.wires import wire_of

Tried: TypeAlias = tuple[tuple[Pipe, tuple[Mesh, ...]], ...]
"""Pipelines, each with the meshes that a rank of it may be."""
A_FEW = (1, 2, 4)
"""Microbatches a rank of a pipeline that are looked at first."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """What is tried: pipelines with meshes of neutral axes (size, stride), and numbers of microbatches. ``node``: ranks
    of the innermost tier (0: there is only one)."""

    tried: Tried
    microbatches: tuple[int, ...]
    node: int = 0

    def __iter__(self) -> Iterator[Candidate]:
        for pipe, found in self.tried:
            counts = [m for m in self.microbatches if _is_of_use(pipe, m)]
            yield from (Candidate(mesh, m, pipe) for mesh in found for m in counts)

    def usual(self, candidate: Candidate) -> bool:
        """Whether an engineer would try it first: one axis alone or an inner one as wide as a node, and in a pipeline a
        few microbatches a rank."""
        mesh, pipe = candidate.mesh, candidate.pipe
        aligned = len(mesh) < 2 or self.node in (0, mesh[-1][0])
        return aligned and (pipe == NO_PIPE or candidate.microbatches in [n * pipe.ranks for n in A_FEW])


class NothingToTry(AutoparError):
    """The pins leave no pipeline that the search knows: stages are more than units, so that they cannot be cut between
    them, or microbatches do not divide as an interleaved schedule would have them."""


def _is_of_use(pipe: Pipe, microbatches: int) -> bool:
    """Of one microbatch, all schedules make the same."""
    return pipe.legal(microbatches) and (microbatches > 1 or pipe.schedule in ("accumulate", "1f1b"))


def tried(cluster: Cluster, units: int, parted: float, pins: Pins) -> Tried:
    """Pipelines whose stages are whole nodes or parts of one, and their meshes. ``parted``: see `bounds.Floor`; the
    pins ``pp``, ``vp`` and ``schedule`` are kept. Raises NothingToTry where they leave nothing."""
    spans = tuple(t.spans for t in cluster.tiers if t.spans is not None)
    found = []
    for pipe in pipes(cluster.ranks, units, parted, only=pins.pp):
        if pins.vp not in (None, pipe.virtual) or pins.schedule not in (None, pipe.schedule):
            continue
        try:
            part = cluster.part(cluster.ranks // pipe.ranks)
        except AutoparError:
            if pins.pp is not None:
                raise
            continue
        found.append((pipe, meshes(part.ranks, spans, wire=lambda size, stride: wire_of(cluster, size, stride))))
    if not found:
        stages = (pins.pp or 1) * (pins.vp or 1)
        raise NothingToTry(
            f"pins {pins.text()}: {stages} stages are more than the model has units ({units}). Pin fewer."
        )
    return tuple(found)


def pipeline_of(posed: Posed, pipe: Pipe, cluster: Cluster) -> Pipeline:
    """What the schedule and the links of a pipeline make of a problem."""
    time = posed.mesh.time
    microbatches = 1 if time is None else posed.mesh.axes[time].size
    link = cluster.link("send", pipe.ranks, prod(a.size for a in posed.mesh.axes if not a.is_time))
    sends = tuple(_sends(posed, i, link) for i in range(len(posed.problem.shared)))
    return Pipeline(
        pipe.ranks,
        pipe.virtual,
        microbatches,
        pipe.fill,
        tuple(float(n) for n in flying(pipe, microbatches)),
        sends,
        pipe.schedule,
    )


def waiting(posed: Posed, stages: int) -> Posed:
    """The problem of units that are cut into so many stages. A stage gathers its first unit's weights only when its
    turn comes, so that compute waits for them: of all units that is the share of stages. (More stages wait longer.)"""
    part = min(1.0, stages / len(posed.problem.units))
    time = posed.mesh.time
    microbatches = 1 if time is None else posed.mesh.axes[time].size

    def waits(v: Variable, states: Sequence[ParameterState]) -> Variable:
        costs = v.costs.copy()
        costs[:, EXPOSED] += [part * s.enters(microbatches) * s.enter.hidden * (s.gather == "use") for s in states]
        return replace(v, costs=costs)

    return replace(posed, problem=posed.with_parameters(waits))


def _sends(posed: Posed, place: int, link: tuple[float, float]) -> Array:
    """Seconds of a shared variable, by state, to another stage and of its gradient back."""
    variable, node = posed.problem.shared[place], posed.units.shared[place]
    if variable.kind == "parameter":
        return np.zeros(len(variable.states))
    v, (latency, bandwidth) = value(node), link
    each = [latency + local_bytes(v, x, posed.mesh) / bandwidth for x in posed.shared[place]]  # type: ignore[arg-type]
    return np.array(each, np.float64) * (1 + v.grad)


def in_stages(plan: Plan, pipe: Pipe, cuts: Sequence[int], cluster: Cluster) -> Plan:
    """A plan of one stage's ranks, cut before these units."""
    edges = unit_edges(plan)
    schedule = Schedule(pipe.schedule, pipe.virtual, tier=cluster.tier_of(pipe.ranks, plan.stage_ranks).name)  # type: ignore[arg-type]
    plan = replace(plan, mesh={"pp": pipe.ranks, **plan.mesh}, schedule=schedule)
    return with_stages(plan, [edges[unit] for unit in cuts])


__all__ = ["Candidates", "NothingToTry", "Tried", "in_stages", "pipeline_of", "tried", "waiting"]
