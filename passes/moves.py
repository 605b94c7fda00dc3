"""Moves: the changes of layout that exist on one axis, and what each takes in seconds.

They are the rows of the table in ``docs/design.md`` section 3, each with its dual in backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from autopar.passes.facts import Value
from autopar.passes.layout import Layout, Mesh, Split, cuts_evenly

STEP = 1e-12  # s: of ways that take equally long the one of fewer steps is taken

# forward, backward: which collective (None: local or nothing) each kind change needs. S>S is the all-to-all.
COLLECTIVES: dict[str, tuple[str | None, str | None]] = {
    "I>R": (None, "all_reduce"),
    "P>I": ("all_reduce", None),
    "P>R": ("all_reduce", "all_reduce"),
    "S>R": ("all_gather", "reduce_scatter"),
    "S>I": ("all_gather", None),
    "P>S": ("reduce_scatter", "all_gather"),
    "S>S": ("all_to_all", "all_to_all"),
    "I>S": (None, "all_gather"),
    "R>S": (None, None),
    "S>P": (None, None),
    "I>P": (None, None),
    "R>P": (None, None),
    "R>I": (None, None),
}
# Of local moves what is written, forward and backward: a "piece" of the axis, the "whole", or nothing.
COPIES: dict[str, tuple[str | None, str | None]] = {
    "S>I": (None, "piece"),
    "I>S": ("piece", None),
    "R>S": ("piece", "whole"),
    "S>P": ("whole", "piece"),
    "I>P": ("whole", None),
    "R>P": ("whole", "whole"),
    "R>I": (None, "whole"),
}
OVER_TIME = ("R>S", "R>P", "S>P")


@dataclass(frozen=True)
class Step:
    """One row of the table on one axis: ``row`` is ``"P>S"`` and the like."""

    row: str
    axis: int
    source: Layout
    target: Layout


@dataclass(frozen=True)
class Moved:
    """Seconds of communication: in which nothing is computed, and those that pass beside compute.

    >>> 2 * (Moved(1.0) + Moved(0.5, 3.0))
    Moved(exposed=3.0, hidden=6.0)
    """

    exposed: float = 0.0
    hidden: float = 0.0

    @property
    def seconds(self) -> float:
        """Both."""
        return self.exposed + self.hidden

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.exposed + other.exposed, self.hidden + other.hidden)

    def __rmul__(self, factor: float) -> Moved:
        return Moved(factor * self.exposed, factor * self.hidden)


def beside(seconds: float, axis: int, mesh: Mesh) -> Moved:
    """Communication along an axis that compute need not wait for."""
    busy = mesh.wire(axis).busy
    return Moved(busy * seconds, (1 - busy) * seconds)


def moves(layout: Layout, wanted: Iterable[tuple[int, Split]], mesh: Mesh) -> Iterator[Step]:
    """All single-axis moves from ``layout``. ``wanted``: the dims that may be cut, each with how (its axes aside)."""
    for axis, kind in enumerate(layout.kinds):
        over_time = mesh.axes[axis].is_time
        dim = layout.dim_of(axis)
        if dim is not None and layout.dims[dim].axes[-1] != axis:
            continue  # only the innermost cut of a dim can be taken off
        if dim is not None and over_time and layout.dims[dim].parts:
            continue  # rows that restart in every part stay so: no change over time has parts
        for target in "RIP":
            row = f"{kind}>{target}"
            if row in COLLECTIVES and (not over_time or row in OVER_TIME):
                yield Step(row, axis, layout, layout.with_kind(axis, target))
        row = f"{kind}>S"
        if over_time and row not in OVER_TIME:
            continue
        base = layout.with_kind(axis, "R")
        for to, how in wanted:
            there = base.dims[to]
            if there.axes and (there.parts, there.items) != (how.parts, how.items):
                continue
            new = base.with_shard(axis, to, how.parts, how.items)
            if new != layout and (not how.parts or not over_time):
                yield Step(row, axis, layout, new)


def price(step: Step, v: Value, mesh: Mesh) -> float:
    """Seconds of one step, forward and (where a gradient flows) backward, by the wire of its axis.

    >>> from autopar.passes.layout import Axis, Wire
    >>> import torch
    >>> wire = Wire((1e-5, 2e-11), (0.0, 1e-11), (0.0, 1e-11), (0.0, 1e-11), 0.0)
    >>> step = Step("P>I", 0, Layout.parse("P", 1), Layout.parse("I", 1))
    >>> round(price(step, Value((250_000,), torch.float32), Mesh((Axis("tp", 2, wire=wire),))), 9)
    3e-05
    """
    fixed, per_byte = terms(step.row, step.axis, v.grad, mesh)
    return fixed + per_byte * held(step, v, mesh)


def held(step: Step, v: Value, mesh: Mesh) -> float:
    """Bytes that a rank holds of ``v`` where the step's axis does not cut; uneven pieces are padded to the longest."""
    return v.nbytes * share(step.source, step.axis, mesh) * padding(step.source, step.target, v.shape, mesh)


def share(layout: Layout, axis: int, mesh: Mesh) -> float:
    """Of all bytes those that a rank holds where ``axis`` does not cut, were all pieces even."""
    pieces = 1
    for a, kind in enumerate(layout.kinds):
        if kind == "S" and a != axis:
            pieces *= mesh.axes[a].size
    return 1 / pieces


def padding(source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh) -> float:
    """How many times longer a tensor is with its uneven cuts padded.

    >>> from autopar.passes.layout import Axis
    >>> padding(Layout.parse("S0/5", 1), Layout.parse("I", 1), (40,), Mesh((Axis("tp", 2),)))
    1.2
    """
    if source.is_even(shape, mesh) and target.is_even(shape, mesh):
        return 1.0
    dims = zip(shape, source.dims, target.dims, strict=True)
    return math.prod(max(_padding(n, a, mesh), _padding(n, b, mesh)) for n, a, b in dims)


@lru_cache(maxsize=1 << 14)
def _padding(length: int, split: Split, mesh: Mesh) -> float:
    """The longest piece, the first, times the number of pieces, of the whole."""
    if not length or cuts_evenly(length, split, mesh):
        return 1.0
    (runs,) = Layout("", (split,)).runs((length,), mesh, (0,) * len(mesh.axes))
    return sum(n for _, n in runs) * math.prod(mesh.axes[a].size for a in split.axes) / length


@lru_cache(maxsize=1 << 12)
def terms(row: str, axis: int, grad: bool, mesh: Mesh) -> tuple[float, float]:
    """(s, s per byte held where ``axis`` does not cut) of a row on one axis, forward and with ``grad`` backward."""
    wire, n = mesh.wire(axis), mesh.axes[axis].size
    fixed, per_byte = STEP, 0.0
    for collective, copied in list(zip(COLLECTIVES[row], COPIES.get(row, (None, None)), strict=True))[: 1 + grad]:
        if collective is not None:
            latency, slope = wire.of(collective)
            fixed += latency
            per_byte += slope / n if collective == "all_to_all" else slope
        elif copied is not None:
            per_byte += wire.copy / n if copied == "piece" else wire.copy
    return fixed, per_byte


def settle(layout: Layout, v: Value, mesh: Mesh) -> Layout:
    """Without a gradient R and I are one layout: written I (over time, where I does not exist, R)."""
    if v.grad or "R" not in layout.kinds:
        return layout
    kinds = "".join("I" if k == "R" and not mesh.axes[a].is_time else k for a, k in enumerate(layout.kinds))
    return Layout(kinds, layout.dims)
