"""How a model in train mode gets its plan: from the solver, or, where axes are pinned, from the pins.

Every plan that is made is predicted (`predict`), and one that does not fit the cluster's memory is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.build import Prepared, choose, choose_again, prepare
from autopar.capture import Capture
from autopar.cluster import Cluster
from autopar.errors import AutoparError, NothingFits
from autopar.passes.layout import Layout
from autopar.pins import Pins, divisors, resolve
from autopar.plan import Alternative, Plan
from autopar.predict import predict
from autopar.rests import resting
from autopar.solver.file import Saved

GIB = 2**30
OWNERS = {
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "saved_bytes": "saved activations",
    "gathered_step_bytes": "gathered parameters",
    "accumulator_bytes": "gradients that add up",
    "transient_bytes": "working memory",
    "inputs_bytes": "inputs",
    "buffers_bytes": "buffers",
}


@dataclass(frozen=True)
class Planned:
    """A plan, predicted, and the graph it is for. ``search``: what the solver went through (None: pinned)."""

    plan: Plan
    prepared: Prepared
    search: Saved | None = None


def solves(pins: Pins) -> bool:
    """Whether the solver makes the plan: nobody has said what the axes are for."""
    return not {"dp", "tp"} & pins.named()


def plan_training(captured: Capture, pins: Pins, cluster: Cluster, rests: Mapping[str, Layout]) -> Planned:
    """The plan for a captured model in train mode. ``rests``: where parameters rest already, empty before they do.

    Raises NothingFits where no plan that keeps the pins fits the memory of a rank, AutoparError where a pin cannot be
    kept.
    """
    if rests:  # by an eval program that came first, whose ranks are these
        return _pinned(captured, pins, cluster, rests)
    if solves(pins):
        return _solved(captured, pins, cluster)
    first = _pinned(captured, pins, cluster, {})
    return first if first.plan.fits is not False else _that_fits(captured, pins, cluster, first)


def _solved(captured: Capture, pins: Pins, cluster: Cluster) -> Planned:
    from autopar.solve import solved

    found = solved(captured, cluster, pins)
    return Planned(found.plan, found.prepared, found.saved())


def _pinned(captured: Capture, pins: Pins, cluster: Cluster, rests: Mapping[str, Layout]) -> Planned:
    resolved = resolve(pins, cluster.ranks, captured.batch)
    prepared = prepare(captured, resolved.microbatches)
    plan = choose(prepared, resolved, cluster)
    return Planned(predict(resting(plan, rests) if rests else plan, prepared, cluster), prepared)


def _that_fits(captured: Capture, pins: Pins, cluster: Cluster, first: Planned) -> Planned:
    """The fastest plan that fits, of those with another ZeRO stage or more microbatches where these are open."""
    stages = _Stages(captured, pins, cluster, first)
    fitting, least = stages.that_fit(pins)
    if fitting:
        return min(fitting, key=lambda made: made.plan.predicted.step_time_s or 0.0)
    nearest: list[Alternative] = []
    if {"zero", "microbatches"} & pins.named():
        fitting, _ = stages.that_fit(replace(pins, zero=None, microbatches=None))
        nearest = sorted((_alternative(made.plan) for made in fitting), key=lambda a: a.step_time_s or 0.0)
    raise NothingFits(_message(least.plan, nearest), replace(least.plan, alternatives=tuple(nearest)))


class _Stages:
    """Plans on pinned axes that differ in the ZeRO stage and the number of microbatches; each is made once."""

    def __init__(self, captured: Capture, pins: Pins, cluster: Cluster, first: Planned) -> None:
        self.captured, self.pins, self.cluster = captured, pins, cluster
        key = (first.plan.zero, first.plan.microbatches)
        self.made: dict[tuple[int, int], Planned | None] = {key: first}
        self.like: dict[bool, Planned] = {first.plan.microbatches > 1: first}

    def that_fit(self, pins: Pins) -> tuple[list[Planned], Planned]:
        """For each ZeRO stage that ``pins`` leave open the plan of fewest microbatches that fits; and of all that were
        made the one of least memory. More microbatches need less memory and, with more collectives, no less time."""
        resolved = resolve(pins, self.cluster.ranks, self.captured.batch)
        counts = [pins.microbatches] if pins.microbatches else divisors(self.captured.batch // resolved.dp)
        fitting: list[Planned] = []
        for zero in range(4) if pins.zero is None and resolved.dp > 1 else [resolved.zero]:
            low, high = 0, len(counts)
            best: Planned | None = None
            while low < high:
                at = (low + high) // 2
                made = self._make(zero, counts[at])
                if made is None or made.plan.fits:  # None: so many the model cannot have, only fewer
                    best, high = made or best, at
                else:
                    low = at + 1
            fitting += [best] if best is not None else []
        tried = (made for made in self.made.values() if made is not None)
        return fitting, min(tried, key=lambda made: made.plan.predicted.peak_mem_gib or 0.0)

    def _make(self, zero: int, count: int) -> Planned | None:
        if (zero, count) not in self.made:
            try:
                self.made[zero, count] = self._attempt(zero, count)
            except AutoparError:
                self.made[zero, count] = None
        return self.made[zero, count]

    def _attempt(self, zero: int, count: int) -> Planned:
        pins = replace(self.pins, zero=zero, microbatches=count)
        resolved = resolve(pins, self.cluster.ranks, self.captured.batch)
        like = self.like.get(count > 1)
        if like is None:
            prepared = prepare(self.captured, count)
            plan = choose(prepared, resolved, self.cluster)
        else:
            prepared = like.prepared
            plan = choose_again(like.plan, prepared, resolved, self.cluster)
        plan = replace(plan, pins=self.pins.given())
        made = Planned(predict(plan, prepared, self.cluster), prepared)
        self.like.setdefault(count > 1, made)
        return made


def _alternative(plan: Plan) -> Alternative:
    pins = {"zero": str(plan.zero), "microbatches": str(plan.microbatches)}
    change = " ".join(f"{key}={value}" for key, value in pins.items())
    found = plan.predicted
    return Alternative("nearest", change, {**plan.pins, **pins}, found.step_time_s, found.peak_mem_gib, fits=True)


def _message(plan: Plan, nearest: list[Alternative]) -> str:
    """``no plan fits: dp=2 zero=3 needs 91.2 GiB of 76.0 a rank (saved activations 60.1). Nearest: ...``"""
    parts = plan.predicted.parts
    limit = parts.get("memory_limit_bytes", 0.0) / GIB
    owners = sorted(((parts.get(key, 0.0) / GIB, word) for key, word in OWNERS.items()), reverse=True)[:2]
    named = ", ".join(f"{word} {_size(size)}" for size, word in owners if size)
    way = f"Nearest: {nearest[0].change}" if nearest else "Use more ranks, a smaller batch, or other pins"
    need = _size(plan.predicted.peak_mem_gib or 0.0)
    return f"no plan fits: {plan.one_line()} needs {need} GiB of {_size(limit)} a rank ({named}). {way}."


def _size(gib: float) -> str:
    return f"{gib:.1f}" if gib >= 100 else f"{gib:.3g}"
