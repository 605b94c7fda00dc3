"""A plan with stages: the layouts of one stage's ranks for the whole model, its units cut into stages, the number of
microbatches with the shortest step.

Layouts are searched on the ranks of one stage with as much memory as all stages have together; what a stage really
needs is judged by its own prediction. Where one needs too much, cuts are moved, then layouts that need less are looked
for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Protocol

import numpy as np
import numpy.typing as npt

from autopar.build import Prepared, apply, plan_mesh
from autopar.choosing.stages import Work, balanced, cuts, levels, pinned, with_stages
from autopar.cluster import Cluster
from autopar.errors import AutoparError, NothingFits
from autopar.passes.lower import with_changes
from autopar.pins import Pins, ResolvedPins
from autopar.plan import Plan, Proof, Schedule
from autopar.predict import predict
from autopar.predict_pipeline import Pipeline
from autopar.wires import with_wires


class Inner(Protocol):
    """How the layouts of a model without stages are found."""

    def plan(self, pins: Pins, part: Cluster) -> tuple[Plan, Prepared]:
        """The plan for these pins on these ranks. Raises NothingFits, with the plan of least memory."""
        ...

    def prepared(self, microbatches: int) -> Prepared:
        """The graph that a plan with so many microbatches is for."""
        ...


ROUNDS = 3  # searches with ever less memory
SHIFTS = 4  # of cuts, until every stage fits
WORTH = 0.99  # of the step with fewer microbatches: else no more of them are tried


def pipelined(pins: Pins, resolved: ResolvedPins, cluster: Cluster, batch: int, inner: Inner) -> tuple[Plan, Prepared]:
    """The plan for pins with ``pp``, predicted, and the graph that it is for. ``inner``: how layouts are found.

    Raises NothingFits where a stage needs too much, AutoparError where a pin cannot be kept.
    """
    part = cluster.part(cluster.ranks // resolved.pp)
    best: tuple[Plan, Prepared] | None = None
    refused: AutoparError | None = None
    for count in counts(resolved, batch):
        asked = replace(pins, pp=None, vp=None, schedule=None, cut=(), microbatches=count)
        try:
            made = _within(asked, resolved, part, cluster, inner)
        except NothingFits as error:
            refused = error
            continue
        except AutoparError as error:  # one microbatch is legal if any number is
            if count == 1 or resolved.pins.microbatches:
                raise
            refused = refused or error
            continue
        if best is not None and _step(made[0]) > WORTH * _step(best[0]):
            best = min(best, made, key=lambda found: _step(found[0]))
            if count >= resolved.pp:
                break
        else:
            best = made
    if best is None:
        assert refused is not None
        raise refused
    plan, prepared = best
    return replace(plan, pins=pins.given()), prepared


def counts(resolved: ResolvedPins, batch: int) -> Iterator[int]:
    """Numbers of microbatches to try: that of the pins, or 1 and multiples of the pipeline's ranks, twice as many each
    time.

    >>> from autopar.pins import resolve
    >>> list(counts(resolve(Pins(pp=2), 4), 12)), list(counts(resolve(Pins(pp=2, microbatches=3), 4), 12))
    ([1, 2, 4, 8], [3])
    """
    if resolved.pins.microbatches or resolved.words:
        yield resolved.microbatches
        return
    rows = batch // resolved.data_ranks if resolved.pins.axes or resolved.pins.dp else batch
    yield 1
    count = resolved.pp
    while count <= rows:
        yield count
        count *= 2


def _step(plan: Plan) -> float:
    return plan.predicted.step_time_s or 0.0


def _within(
    asked: Pins, resolved: ResolvedPins, part: Cluster, cluster: Cluster, inner: Inner
) -> tuple[Plan, Prepared]:
    """The plan for one number of microbatches, of which every stage fits."""
    room, found = part.limit * resolved.pp, None
    for _ in range(ROUNDS):
        try:
            plan, prepared = inner.plan(asked, part.with_memory(room))
        except NothingFits as error:
            if found is not None or error.plan is None:
                break
            plan, prepared = error.plan, inner.prepared(asked.microbatches or 1)  # of least memory: it may do in stages
        found = staged(plan, prepared, resolved, cluster)
        if found.fits is not False:
            return found, prepared
        room = int(0.97 * room * cluster.limit / ((found.predicted.peak_mem_gib or 0.0) * 2**30))
    if found is None:
        gib = cluster.limit / 2**30
        raise NothingFits(
            f"no plan fits: {resolved.one_line()} needs more than {gib:.3g} GiB a rank. Use more ranks.", None
        )
    raise NothingFits(_message(found, resolved), found)


def staged(plan: Plan, prepared: Prepared, resolved: ResolvedPins, cluster: Cluster) -> Plan:
    """A plan of one stage's ranks, cut into stages and predicted."""
    plan = replace(
        plan,
        cluster=replace(plan.cluster, nodes=cluster.nodes, ranks_per_node=cluster.ranks_per_node),
        mesh={"pp": resolved.pp, **plan.mesh},
        alternatives=(),
        proof=_proof(plan),
    )
    schedule = Schedule(
        resolved.schedule,  # type: ignore[arg-type]
        resolved.virtual,
        resolved.words,
        cluster.tier_of(resolved.pp, plan.stage_ranks).name,
    )
    cutting = Cutting(plan, prepared, schedule, resolved.pp, cluster)
    if resolved.pins.cut:
        return cutting.plan(pinned(cutting.pipe.model, plan, resolved.pins.cut))
    at = cuts(cutting.work, levels(cutting.pipe.model, plan, cutting.pipe.crossed), cutting.stages)
    found = cutting.plan(at)
    for _ in range(SHIFTS):
        if found.fits is not False:
            break
        shifted = cutting.shifted(found, at)
        if not shifted or shifted == at:
            break
        other = cutting.plan(shifted)
        if (other.predicted.peak_mem_gib or inf) >= (found.predicted.peak_mem_gib or inf):
            break
        found, at = other, shifted
    return found


@dataclass(frozen=True)
class Cutting:
    """A plan without stages, and where it may be cut into ``pp`` times as many as ``schedule`` has on each rank."""

    whole: Plan
    prepared: Prepared
    schedule: Schedule
    pp: int
    cluster: Cluster

    @property
    def stages(self) -> int:
        """How many."""
        return self.pp * self.schedule.virtual

    @cached_property
    def pipe(self) -> Pipeline:
        """The ops, priced."""
        mesh = with_wires(plan_mesh(self.whole), [a.stride for a in self.whole.axes], self.cluster)
        return Pipeline(self.whole, with_changes(apply(self.whole, self.prepared)), mesh, self.cluster)

    @cached_property
    def work(self) -> Work:
        """What balances stages."""
        found = self.pipe.crossed
        _, bandwidth = self.cluster.link("send", self.pp, self.whole.stage_ranks)
        send = (found.forward + found.backward) / bandwidth  # every message takes the latency, as every cut has one
        reads = np.zeros(len(self.pipe.seconds.total), bool)
        reads[[op for ops in self.pipe.readers.values() for op in ops]] = True
        return Work(self.pipe.seconds.total, send - send.min(initial=inf), found.forward + found.backward, reads)

    def plan(self, at: Sequence[int]) -> Plan:
        """The plan cut before these ops, predicted."""
        return predict(replace(with_stages(self.whole, at), schedule=self.schedule), self.prepared, self.cluster)

    def shifted(self, found: Plan, at: Sequence[int]) -> list[int]:
        """Other cuts than these, with which every rank may have room: as many bytes more or less as its ops have, by
        what they are known to need. Empty where there are none."""
        flying = [f.in_flight for f in found.predicted.stages]
        edges = [0, *at, len(self.work.seconds)]
        legal = next(levels(self.pipe.model, self.whole, self.pipe.crossed))
        kept, saved = (np.concatenate([[0.0], np.cumsum(x)]) for x in (self.pipe.kept, self.pipe.saved))
        need = [
            kept[b] - kept[a] + n * (saved[b] - saved[a]) for (a, b), n in zip(pairwise(edges), flying, strict=True)
        ]

        def allowed(stage: int) -> npt.NDArray[np.bool_]:
            places = np.array([0, *legal, len(self.work.seconds)])
            own = sum(need[stage % self.pp :: self.pp])
            over = self.cluster.limit - (found.predicted.stages[stage].peak_bytes - own)
            k, s = kept[places], flying[stage] * saved[places]
            return np.asarray(k[None, :] - k[:, None] + s[None, :] - s[:, None] <= over / self.schedule.virtual)

        return balanced(self.work, legal, self.stages, allowed)


def _proof(plan: Plan) -> Proof:
    """Of a pipeline nothing is proved; what is known of the layouts of its stages is kept as text."""
    found = plan.proof
    if found.objective is None or found.bound is None:
        return Proof()
    text = f"of all layers on the ranks of one stage, none takes less than {found.bound:.4g} s"
    text += f" ({found.objective:.4g} s as chosen)"
    return Proof(scope={"pipeline": f"nothing is proved of cuts, schedule and microbatches; layouts: {text}"})


def _message(plan: Plan, resolved: ResolvedPins) -> str:
    limit = plan.predicted.parts.get("memory_limit_bytes", 0.0) / 2**30
    need = plan.predicted.peak_mem_gib or 0.0
    return (
        f"no plan fits: {plan.one_line()} needs {need:.3g} GiB of {limit:.3g} a rank ({plan.predicted.peak_at}). "
        f"Use more ranks or stages, a smaller batch, or other pins."
    )


__all__ = ["Cutting", "counts", "pipelined", "staged"]
