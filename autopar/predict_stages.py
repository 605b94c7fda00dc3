"""`predict` of a plan with stages: seconds by simulating its schedule, bytes of the rank that needs most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.build import Prepared, plan_mesh, staged
from autopar.capture import Capture
from autopar.cluster import Cluster
from autopar.count_collectives import count_collectives, summed
from autopar.optimizer_states import state_bytes
from autopar.orders import actions
from autopar.passes.layout import Mesh
from autopar.passes.lower import Local, OutputUse, lower
from autopar.passes.price import local_bytes
from autopar.plan import Collective, Plan, StageFigures
from autopar.predict_again import kept
from autopar.predict_memory import Peak, predict_rank
from autopar.predict_pipeline import Pipeline, parts_of
from autopar.runtime.run import units_of
from autopar.runtime.stage import Stages
from autopar.runtime.weights import ways_of
from autopar.solver.cost import update
from autopar.solver.pipes import enough
from autopar.solver.simulate.check import check_schedule
from autopar.wires import with_wires

FEW = 4
"""Ranks of a pipeline whose programs are all replayed."""


def predict_stages(
    plan: Plan, prepared: Prepared, cluster: Cluster
) -> tuple[Plan, dict[str, float], tuple[Local, ...]]:
    """The plan with its stages' figures, collectives and peak; the ``parts`` of its prediction: seconds of the mean
    rank, which add up to the step, bytes of the rank with the highest peak; and the programs of its stages."""
    cut = staged(plan, prepared)
    assert cut.pipeline is not None
    axes = {axis.name: axis.name for axis in plan.axes}
    locals = tuple(lower(model, 0, axes) for model in cut.models)
    mesh = with_wires(plan_mesh(plan), [a.stride for a in plan.axes], cluster)
    pipe = Pipeline(plan, cut.whole, mesh, cluster)
    ranks = [_Rank.of(plan, locals[r :: plan.pp]) for r in range(plan.pp)]
    rate = cluster.chip.memory_rate
    updates = [float(update(rank.gradients, rank.optimizer, rate)) for rank in ranks]
    line = pipe.simulate(updates, cut.pipeline.ties)
    flying = check_schedule(plan.orders(), cut.pipeline.crossings).stages
    used = {use.fqn for use in cut.uses}
    peaks, worst, fullest = _peaks(plan, cut.pipeline, ranks, flying, prepared.captured, used)
    busiest = max(range(plan.pp), key=lambda r: line.busy(r).get("forward", 0.0) + line.busy(r).get("backward", 0.0))
    crossings = _Crossings(plan, cut.pipeline, mesh, cluster)
    own = summed(count_collectives(x, axes, mesh, parted=_parted(plan)) for x in ranks[busiest].locals)
    predicted = replace(
        plan.predicted,
        step_time_s=line.seconds,
        peak_mem_gib=fullest.nbytes / 2**30,
        peak_at=f"rank {worst} of the pipeline, {fullest.where}",
        stages=tuple(
            _figures(pipe, crossings, s, flying[s], peaks[s % plan.pp], locals[s]) for s in range(len(locals))
        ),
        collectives=(*own, *crossings.of_rank(busiest)),
    )
    parts = parts_of(line) | {f"peak_{owner}_bytes": float(n) for owner, n in fullest.owners.items()}
    of = ranks[worst]
    parts |= {"parameters_bytes": of.parameters, "gradients_bytes": of.gradients, "optimizer_bytes": of.optimizer}
    return replace(plan, predicted=predicted), parts, locals


def _parted(plan: Plan) -> bool:
    return any(letter == "W" for rank in plan.orders() for letter, _, _ in rank)


@dataclass(frozen=True)
class _Rank:
    """A rank of the pipeline: the programs of its stages, and bytes of its parameters at rest, once each."""

    locals: tuple[Local, ...]
    parameters: float
    gradients: float
    optimizer: float

    @staticmethod
    def of(plan: Plan, locals: tuple[Local, ...]) -> _Rank:
        reached = set[str]()
        for local in locals:
            ways = ways_of(local, units_of(local))
            reached |= {local.parameters[i].fqn for i in ways.reached}
        uses = {use.fqn: use for local in locals for use in local.parameters}
        piece = {fqn: float(local_bytes(u.value.resting, u.rest, locals[0].mesh)) for fqn, u in uses.items()}
        states = (state_bytes(plan.optimizer, uses[fqn].shape, uses[fqn].dtype, piece[fqn]) for fqn in sorted(reached))
        return _Rank(locals, sum(piece.values()), sum(piece[fqn] for fqn in sorted(reached)), sum(states))

    def held(self, flying: Sequence[int]) -> dict[str, float]:
        """Bytes that rest, and that are kept where each stage has so many microbatches in flight, by owner."""
        saved = sum(n * kept(local) for n, local in zip(flying, self.locals, strict=True))
        rests = {"parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer}
        return {**rests, "saved": float(saved)}


def _peaks(
    plan: Plan, pipeline: Stages, ranks: Sequence[_Rank], flying: Sequence[int], captured: Capture, used: set[str]
) -> tuple[list[Mapping[str, float]], int, Peak]:
    """Bytes of the fullest moment of every rank of the pipeline, by owner, and the rank that needs most. Of more than
    `FEW` ranks those that seem to need most are replayed, until one of these does; the others have what rests and is
    kept there, and beside it as much as the replayed ones have at most."""
    schedule = plan.schedule
    count = enough(schedule.name, plan.pp, schedule.virtual, plan.microbatches)
    fewer = replace(pipeline, schedule=actions(schedule.name, plan.pp, count, schedule.virtual, schedule.words))
    unused = captured.parameters.keys() - used
    held = [rank.held(flying[r :: plan.pp]) for r, rank in enumerate(ranks)]
    sums = [sum(owners.values()) for owners in held]
    found = dict[int, Peak]()
    while True:
        beside = max((found[r].nbytes - sums[r] for r in found), default=0.0)
        guess = [found[r].nbytes if r in found else round(sums[r] + beside) for r in range(plan.pp)]
        worst = max(range(plan.pp), key=lambda r: guess[r])
        if worst in found and len(found) >= min(FEW, plan.pp):
            rest: list[Mapping[str, float]] = [{**owners, "working": beside} for owners in held]
            return [found[r].owners if r in found else rest[r] for r in range(plan.pp)], worst, found[worst]
        r = max((r for r in range(plan.pp) if r not in found), key=lambda r: guess[r])
        found[r] = predict_rank(ranks[r].locals, captured, round(ranks[r].optimizer), fewer, r, unused)


@dataclass(frozen=True)
class _Crossings:
    """What crosses between stages in a microbatch, on one rank of each."""

    plan: Plan
    pipeline: Stages
    mesh: Mesh
    cluster: Cluster

    def sent(self, stage: int) -> tuple[int, int]:
        """Bytes that a stage sends on, and of gradients that come back."""
        there = back = 0
        for crossing, use in zip(self.pipeline.crossings, self.pipeline.crossed, strict=True):
            if crossing.source == stage:
                nbytes, pp = self._nbytes(use), self.plan.pp
                there += nbytes * len({t % pp for t in crossing.targets} - {stage % pp})
                back += nbytes * sum(t % pp != stage % pp for t in crossing.targets) * crossing.grad
        return there, back

    def of_rank(self, rank: int) -> tuple[Collective, ...]:
        """The messages of a rank in a step."""
        pp, times, rows = self.plan.pp, self.plan.microbatches, dict[tuple[str, str], list[int]]()
        for crossing, use in zip(self.pipeline.crossings, self.pipeline.crossed, strict=True):
            source, nbytes = crossing.source % pp, self._nbytes(use)
            messages = [("forward", source, t) for t in sorted({t % pp for t in crossing.targets})]
            messages += [("backward", t % pp, source) for t in crossing.targets] * crossing.grad
            for phase, a, b in messages:
                for kind, here in (("send", a), ("receive", b)):
                    if a != b and here == rank:
                        row = rows.setdefault((kind, phase), [0, 0])
                        row[0], row[1] = row[0] + times, row[1] + times * nbytes
        latency, bandwidth = self.cluster.link("send", pp, self.plan.stage_ranks)
        return tuple(
            Collective(kind, "pp", count, nbytes, phase, count * latency + nbytes / bandwidth, hidden=True)
            for (kind, phase), (count, nbytes) in sorted(rows.items())
        )

    def _nbytes(self, use: OutputUse) -> int:
        at = self.mesh.coordinates(0, 0)
        return math.prod(use.layout.local_shape(use.shape, self.mesh, at)) * use.dtype.itemsize


def _figures(
    pipe: Pipeline, crossings: _Crossings, stage: int, flying: int, owners: Mapping[str, float], local: Local
) -> StageFigures:
    units = pipe.units(stage)
    there, back = crossings.sent(stage)
    return StageFigures(
        forward_s=sum(u.forward_s + u.forward_comm_s for u in units),
        backward_s=sum(u.backward_input_s + u.backward_weight_s + u.recompute_s + u.backward_comm_s for u in units),
        parameters=sum(math.prod(use.shape) for use in local.parameters),
        in_flight=flying,
        sent=there,
        returned=back,
        peak_bytes=float(round(sum(owners.values()))),
        owners={owner: float(n) for owner, n in owners.items() if n},
    )


__all__ = ["predict_stages"]
