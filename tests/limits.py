"""Clusters with little memory, for the tests of plans that the solver makes under a limit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.build import Prepared, choose
from autopar.capture import Capture
from autopar.choosing.solve import solved
from autopar.cluster import Cluster
from autopar.errors import AutoparError, NothingFits
from autopar.pins import Pins, divisors, resolve
from autopar.plan import Plan
from autopar.predict import predict

GIB = 2**30
TINY = 0.02  # of what a plan without a limit takes: under what any plan needs


def figures(name: str, ranks: int) -> Cluster:
    """``local``, or ``h100``: its figures, one node of so many ranks."""
    if name == "local":
        return Cluster.local(ranks=ranks)
    return replace(Cluster.load("h100-dgx"), ranks_per_node=ranks)


def with_memory(cluster: Cluster, nbytes: float) -> Cluster:
    """The cluster with so many bytes a rank for tensors."""
    memory = replace(cluster.chip.memory, value=float(int(nbytes)), source="the limit of a test")
    return replace(cluster, chip=replace(cluster.chip, memory=memory, reserved=None))


def peak(plan: Plan) -> float:
    """Bytes of a rank, as predicted."""
    assert plan.predicted.peak_mem_gib is not None
    return plan.predicted.peak_mem_gib * GIB


def leanest(
    captured: Capture, cluster: Cluster, loose: Plan, pins: Pins | None = None, prepared: Prepared | None = None
) -> Plan:
    """The plan of least memory, as the solver names it where nothing fits. ``prepared``: what ``loose`` is for."""
    try:
        solved(captured, with_memory(cluster, TINY * peak(loose)), pins, prepared=prepared, nearest=False)
    except NothingFits as error:
        assert error.plan is not None and error.plan.fits is False
        return error.plan
    raise AssertionError("something fits in next to nothing")


def limits(captured: Capture, cluster: Cluster, loose: Plan) -> dict[str, Cluster]:
    """``tight``: halfway between what the loose plan and the leanest take; ``just``: what the leanest takes. All as the
    programs are predicted, at their fullest moments."""
    least = min(peak(leanest(captured, cluster, loose)), peak(loose))
    return {
        "tight": with_memory(cluster, (least + peak(loose)) / 2),
        "just": with_memory(cluster, least + 1),
    }


def fastest_pinned(
    prepared: Callable[[int], Prepared], cluster: Cluster, counts: Sequence[int] = (1, 2)
) -> Plan | None:
    """The fastest pinned pattern that fits: dp x tp over all ranks, ZeRO 0 and 3, in ``counts`` of microbatches.

    ``prepared``: the capture prepared for a number of microbatches."""
    best: Plan | None = None
    for dp, count in itertools.product(divisors(cluster.ranks), counts):
        for zero in (0, 3) if dp > 1 else (0,):
            pins = Pins(dp=dp, tp=cluster.ranks // dp, zero=zero, microbatches=count)
            try:
                body = prepared(count)
                resolved = resolve(pins, cluster.ranks, body.captured.batch)
                made = predict(choose(body, resolved, cluster), body, cluster)
            except AutoparError:
                continue
            seconds = made.predicted.step_time_s or 0.0
            if made.fits is not False and (best is None or seconds < (best.predicted.step_time_s or 0.0)):
                best = made
    return best
