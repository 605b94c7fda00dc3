"""A plan with stages: the layouts of one stage's ranks for the whole model, its units cut into stages, the number of
microbatches with the shortest step.

Layouts are searched on the ranks of one stage with as much memory as all stages have together; what a stage really
needs is judged by its own prediction. Where one needs too much, cuts are moved, then layouts that need less are looked
for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

import numpy as np

from autopar.build import Prepared, apply, plan_mesh
from autopar.choosing.stages import Work, crossed, cuts, levels, pinned, with_stages
from autopar.cluster import Cluster
from autopar.errors import AutoparError, NothingFits
from autopar.passes.lower import with_changes
from autopar.pins import Pins, ResolvedPins
from autopar.plan import Plan, Proof, Schedule
from autopar.predict import predict
from autopar.predict_ops import op_seconds
from autopar.predict_pipeline import Link, along

Inner = Callable[[Pins, Cluster], tuple[Plan, Prepared]]
"""The plan of a model without stages, for these pins on these ranks."""
ROUNDS = 3  # searches with ever less memory
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
    rows = batch // resolved.dp if resolved.pins.axes or resolved.pins.dp else batch
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
    room, found = part.limit * resolved.pp, None
    for _ in range(ROUNDS):
        try:
            plan, prepared = inner(asked, part.with_memory(room))
        except NothingFits as error:
            if found is None:
                raise
            raise NothingFits(_message(found, resolved), found) from error
        found = staged(plan, prepared, resolved, cluster)
        if found.fits is not False:
            return found, prepared
        room = int(0.97 * room * cluster.limit / ((found.predicted.peak_mem_gib or 0.0) * 2**30))
    assert found is not None
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
    model = with_changes(apply(plan, prepared))
    schedule = Schedule(
        resolved.schedule,  # type: ignore[arg-type]
        resolved.virtual,
        resolved.words,
        cluster.tier_of(resolved.pp, plan.stage_ranks).name,
    )
    stages = resolved.pp * resolved.virtual
    if resolved.pins.cut:
        at = pinned(model, plan, resolved.pins.cut)
    else:
        found = crossed(model, frozenset(plan.parameters))
        link = Link(*cluster.link("send", resolved.pp, plan.stage_ranks))
        seconds = op_seconds(model, plan, along(plan_mesh(plan), plan, cluster), cluster.chip)
        crossing = np.array([link.seconds(*each) for each in zip(found.count, found.forward, strict=True)])
        crossing += [link.seconds(int(b > 0), b) for b in found.backward]
        work = Work(seconds.total, crossing - crossing.min(initial=inf), found.forward + found.backward)
        at = cuts(work, levels(model, plan, found), stages)
    return predict(replace(with_stages(plan, at), schedule=schedule), prepared, cluster)


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


__all__ = ["counts", "pipelined", "staged"]
