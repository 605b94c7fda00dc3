"""The fastest configuration that fits, for a published run's model, cluster and batch: exhaustive over a stated space.

Every configuration has a lower bound of its step: what its fullest rank computes, or the way of a microbatch through
all stages, with what comes before and after. They are simulated by their bounds, least first, until the next bound is
no less than the best step found; bytes that are certainly too many are told without simulating.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.pins import divisors
from autopar.pricing.compose import (
    Layout,
    Priced,
    held_elements,
    layers_of_chunks,
    optimizer_seconds,
    send_seconds,
    stages_of,
    static_bytes,
    step_of,
    tied_seconds,
    times,
)
from autopar.pricing.configuration import PricedRow, cluster_of, layout_of, priced_units, recipe_of, summary
from autopar.solver.simulate.step import UnitTimes, run

if TYPE_CHECKING:
    from autopar.bench.published_rows import Row

CONTEXT = (1, 2, 4, 8)
RECOMPUTE = ("none", "attention", "ops", "full")
SPACE = (
    "tensor ranks inside a node, with the sequence cut along them or not; 1, 2, 4 or 8 context ranks; any pipeline, "
    "1F1B or interleaved, whose chunks have equally many layers (embedding and head may stand for one); ZeRO 0 to 3; "
    "equal microbatches; recomputation of nothing, attention, memory-bound ops, or all"
)
ALMOST = 1 - 1e-9  # sums of floats in another order


class Place(NamedTuple):
    """What the units' own costs depend on. ``rows``: of a microbatch on a rank."""

    tp: int
    sequence_parallel: bool
    cp: int
    rows: int


@dataclass(frozen=True)
class Chosen:
    """The fastest that fits, with its layout; how many ``configurations`` there are and were ``simulated``."""

    layout: Layout
    priced: PricedRow
    configurations: int
    simulated: int


@dataclass(frozen=True, eq=False)
class Space:
    """All configurations of a run's model on its cluster with its batch."""

    row: Row

    @cached_property
    def cluster(self) -> Cluster:
        """That of the run."""
        return cluster_of(self.row)

    def places(self) -> Iterator[Place]:
        """Tensor and context ranks, and rows of a microbatch, that the model and the batch allow."""
        row, node = self.row, min(self.cluster.ranks_per_node, self.row.gpus)
        kv = row.kv_heads or row.heads
        for tp in divisors(node):
            if row.heads % tp or row.ffn % tp or (kv % tp and tp % kv):
                continue
            for cp in CONTEXT:
                if row.gpus % (tp * cp) or row.seq % (2 * cp) or (cp > 1 and cp * tp > row.gpus):
                    continue
                for rows in divisors(row.gbs):
                    if row.gbs % rows == 0 and any(self._fits_batch(rows, dp) for dp in self._data(tp, cp)):
                        yield from (Place(tp, sp, cp, rows) for sp in ((False, True) if tp > 1 else (False,)))

    def _data(self, tp: int, cp: int) -> list[int]:
        return [n for n in divisors(self.row.gpus // (tp * cp)) if self.row.gpus // (tp * cp * n) <= self.row.layers]

    def _fits_batch(self, rows: int, dp: int) -> bool:
        return self.row.gbs % (dp * rows) == 0

    def layouts(self, place: Place) -> Iterator[Layout]:
        """Pipelines with one chunk a rank, without ZeRO: `variants` has the rest."""
        for dp in self._data(place.tp, place.cp):
            if not self._fits_batch(place.rows, dp):
                continue
            pp, first = self.row.gpus // (place.tp * place.cp * dp), layout_of(self.row)
            for recompute in RECOMPUTE:
                yield replace(
                    first, tp=place.tp, cp=place.cp, dp=dp, pp=pp, vp=1, rows=place.rows,
                    microbatches=self.row.gbs // (dp * place.rows), sequence_parallel=place.sequence_parallel,
                    zero=0, reshard=True, recompute=recompute, recomputed=0, schedule="1f1b",
                )  # fmt: skip

    def variants(self, layout: Layout) -> Iterator[Layout]:
        """The same with every number of chunks a rank and every stage of ZeRO."""
        chunks = [1] if layout.pp == 1 else [v for v in divisors(layout.layers) if self._interleaves(layout, v)]
        for vp in chunks:
            staged = replace(layout, vp=vp, schedule="interleaved" if vp > 1 else "1f1b")
            yield staged
            if layout.shards > 1:
                yield from (replace(staged, zero=zero) for zero in (1, 2, 3))
                yield replace(staged, zero=3, reshard=False)

    def contains(self, layout: Layout) -> bool:
        """Whether a layout is one of them (below ZeRO-3 nothing is let go of after forward)."""
        layout = layout if layout.zero >= 3 else replace(layout, reshard=True)
        place = Place(layout.tp, layout.sequence_parallel, layout.cp, layout.rows)
        return place in self.places() and any(layout in self.variants(x) for x in self.layouts(place))

    @staticmethod
    def _interleaves(layout: Layout, vp: int) -> bool:
        count = layout.pp * vp
        even = layout.layers % count == 0 or (layout.layers + 2) % count == 0
        return count <= layout.layers and even and (vp == 1 or layout.microbatches % layout.pp == 0)


def choose(row: Row) -> Chosen:
    """The configuration of least predicted seconds that fits. Raises AutoparError where none does."""
    return _Choice(Space(row)).run()


class _Choice:
    def __init__(self, space: Space) -> None:
        self.space, self.row, self.cluster = space, space.row, space.cluster
        self.recipe = recipe_of(self.row)
        self.priced: dict[Place, Priced] = {}
        self.best: tuple[Layout, PricedRow] | None = None
        self.count = self.simulated = 0

    def run(self) -> Chosen:
        """Best bound first: of layouts as they are without data ranks' collectives, then of their variants."""
        waiting: list[tuple[float, int, bool, Layout]] = []
        for place in self.space.places():
            for layout in self.space.layouts(place):
                if not self.too_large(layout, self.units(layout), static=False):
                    heapq.heappush(waiting, (self.bound(layout, alone=True), len(waiting) + self.count, False, layout))
                self.count += sum(1 for _ in self.space.variants(layout))
        order = self.count + len(waiting)
        while waiting and (self.best is None or waiting[0][0] < self.best[1].step_s):
            _, _, whole, layout = heapq.heappop(waiting)
            if whole:
                self.simulate(layout)
                continue
            for variant in self.space.variants(layout):
                if not self.too_large(variant, self.units(variant)):
                    order += 1
                    heapq.heappush(waiting, (self.bound(variant), order, True, variant))
        if self.best is None:
            raise AutoparError(f"row {self.row.id}: no configuration fits. Use more ranks.")
        return Chosen(*self.best, self.count, self.simulated)

    def simulate(self, layout: Layout) -> None:
        """Takes a configuration that fits and is faster than the best so far."""
        self.simulated += 1
        try:
            found = summary(run(step_of(layout, self.units(layout))), self.cluster)
        except AutoparError:  # more tasks than are simulated
            return
        if found.fits and (self.best is None or found.step_s < self.best[1].step_s):
            self.best = layout, replace(found, timeline=None)

    def units(self, layout: Layout) -> Priced:
        """The priced units of a layout's place."""
        place = Place(layout.tp, layout.sequence_parallel, layout.cp, layout.rows)
        if place not in self.priced:
            self.priced[place] = priced_units(replace(self.row, mbs=layout.rows), layout, self.recipe, self.cluster)
        return self.priced[place]

    def bound(self, layout: Layout, *, alone: bool = False) -> float:
        """See `least_seconds`."""
        return least_seconds(layout, self.units(layout), alone=alone)

    def too_large(self, layout: Layout, priced: Priced, *, static: bool = True) -> bool:
        """Whether the first rank certainly has too many bytes."""
        return self.cluster.chip.held(least_bytes(layout, priced, static=static)) > self.cluster.memory


def least_seconds(layout: Layout, priced: Priced, *, alone: bool = False) -> float:
    """Seconds that a step cannot go below; ``alone``: without what the data ranks exchange, for all `variants`."""
    of = {u.name: times(u, layout, priced) for u in (priced.prefix, priced.layer, priced.suffix)}
    stages = [[(of[unit.name], n) for unit, n in stage] for stage in stages_of(layout, priced)]
    if alone:
        return ALMOST * layout.microbatches * sum(_through(u) * n for s in stages for u, n in s) / layout.pp
    m, r, send = layout.microbatches, priced.recipe, send_seconds(layout, priced)
    there = [sum(_forward(u) * n for u, n in stage) for stage in stages]
    back = [sum(_backward(u) * n for u, n in stage) for stage in stages]
    last = len(stages) - 1
    blocking = [0.0 if r.overlap_send else (send if i < last else 0.0) + (send if i else 0.0) for i in range(last + 1)]
    work = [
        m * sum(there[i] + back[i] + blocking[i] for i in range(rank, last + 1, layout.pp)) for rank in range(layout.pp)
    ]
    way = work[-1] - m * blocking[last] + sum(there[: layout.pp - 1]) + sum(back[: layout.pp - 1])
    data = [_data(layout, [x for s in stages[rank :: layout.pp] for x in s]) for rank in range(layout.pp)]
    units = stages_of(layout, priced)
    elements = [held_elements(units[rank :: layout.pp], layout, priced) for rank in range(layout.pp)]
    after = max(optimizer_seconds(e, layout, priced) for e in elements) + tied_seconds(layout, priced)
    return ALMOST * (max(*work, way, *data) + after)


def _forward(unit: UnitTimes) -> float:
    return unit.forward_s + unit.forward_comm_s


def _backward(unit: UnitTimes) -> float:
    return unit.backward_input_s + unit.backward_weight_s + unit.backward_comm_s + unit.recompute_s


def _through(unit: UnitTimes) -> float:
    return _forward(unit) + _backward(unit)


def _data(layout: Layout, units: list[tuple[UnitTimes, int]]) -> float:
    """Seconds of the stream that gathers weights and reduces gradients: per microbatch from ZeRO 2 on."""
    if layout.shards == 1:
        return 0.0
    each = sum((u.reduce_s + (u.gather_s if layout.zero else 0.0)) * n for u, n in units)
    return each * (layout.microbatches if layout.zero >= 2 else 1)


def least_bytes(layout: Layout, priced: Priced, *, static: bool = True) -> float:
    """Bytes that the first rank has at least: what it holds all the time, and what is in flight before its first
    backward. Without ``static``, for all `variants`: of one chunk a rank, of which others have more in flight."""
    of = {u.name: times(u, layout, priced).saved_bytes for u in (priced.prefix, priced.layer)}
    layers = layers_of_chunks(layout.layers, layout.pp, layout.vp)[:: layout.pp]
    count = min(layout.pp, layout.microbatches)
    if layout.vp > 1:
        count = min(2 * (layout.pp - 1) + (layout.vp - 1) * layout.pp + 1, layout.vp * layout.microbatches)
    kept = count * min(layers) * of[priced.layer.name] + of[priced.prefix.name]
    if not static:
        return kept
    held = held_elements(stages_of(layout, priced)[:: layout.pp], layout, priced)
    return kept + sum(static_bytes(held, layout, priced.recipe).values())


__all__ = ["SPACE", "Chosen", "Space", "choose", "least_bytes", "least_seconds"]
