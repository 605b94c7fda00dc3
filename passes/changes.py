"""Changes of layout: the moves that exist on one axis, and the cheapest way from one layout to another.

The moves are the rows of the table in ``docs/design.md`` section 3, each with its dual in backward. Over several axes
the cheapest way may pass through other layouts (P,R -> R,P is a slice, an all-reduce of an eighth and a gather), so the
price of a change is a shortest path, and that path is what is emitted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from autopar.passes.facts import Value
from autopar.passes.layout import Layout, Mesh, Split

LATENCY = 1000.0  # bytes that could have moved in the time a collective takes to start
LOCAL = 1e-3  # cost of a byte copied within a rank, in bytes moved between ranks

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
OVER_TIME = ("R>S", "R>P", "S>P")


@dataclass(frozen=True)
class Step:
    """One row of the table on one axis: ``row`` is ``"P>S"`` and the like."""

    row: str
    axis: int
    source: Layout
    target: Layout


def moves(layout: Layout, wanted: frozenset[tuple[int, tuple[int, ...]]], v: Value, mesh: Mesh) -> Iterator[Step]:
    """All single-axis moves from ``layout``. ``wanted``: the (dim, parts) cuts that may be introduced."""
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
        for to, parts in wanted:
            there = base.dims[to]
            if there.axes and there.parts != parts:
                continue
            new = base.with_shard(axis, to, parts)
            if new != layout and (not parts or not over_time):
                yield Step(row, axis, layout, new)


def price(step: Step, v: Value, mesh: Mesh) -> float:
    """Bytes that one rank sends for the step, forward and backward, with latency as bytes."""
    n = mesh.axes[step.axis].size
    held = float(v.nbytes)
    for a, kind in enumerate(step.source.kinds):
        if kind == "S" and a != step.axis:
            held /= mesh.axes[a].size
    share = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0 / n}
    forward, backward = COLLECTIVES[step.row]
    total = 0.01
    for collective in (forward, backward if v.grad else None):
        total += LOCAL * held if collective is None else LATENCY + share[collective] * held * (n - 1) / n
    free = step.row in ("I>R", "R>I")
    return 0.01 if free and not v.grad else total


@lru_cache(maxsize=1 << 17)
def path(source: Layout, target: Layout, v: Value, mesh: Mesh) -> tuple[Step, ...] | None:
    """The cheapest steps from ``source`` to ``target``, or None where no legal way exists (over time).

    >>> from autopar.passes.layout import Axis
    >>> import torch
    >>> mesh = Mesh((Axis("tp", 2),))
    >>> steps = path(Layout.parse("P", 1), Layout.parse("I", 1), Value((8,), torch.float32, True), mesh)
    >>> [s.row for s in steps]
    ['P>I']
    """
    source, target = settle(source, v, mesh), settle(target, v, mesh)
    if source == target:
        return ()
    cuts = frozenset((d, p) for x in (source, target) for d, s in enumerate(x.dims) if s.axes for p in (s.parts, ()))
    cuts |= {(d, ()) for d in _stepping_stone(v, mesh, frozenset(d for d, _ in cuts))}
    uneven = frozenset(
        (d, Split(split.axes[:n], split.parts))
        for x in (source, target)
        if not x.is_even(v.shape, mesh)
        for d, split in enumerate(x.dims)
        for n in range(1, len(split.axes) + 1)
    )
    sums = v.dtype.is_floating_point or v.dtype.is_complex or "P" in source.kinds + target.kinds
    best: dict[Layout, float] = {source: 0.0}
    came: dict[Layout, Step] = {}
    heap: list[tuple[float, int, Layout]] = [(0.0, 0, source)]
    count = 0
    while heap:
        cost, _, here = heapq.heappop(heap)
        if here == target:
            steps: list[Step] = []
            while here != source:
                steps.append(came[here])
                here = came[here].source
            return tuple(reversed(steps))
        if cost > best[here]:
            continue
        for step, more in _edges(here, cuts, uneven, sums, v, mesh):
            if cost + more < best.get(step.target, math.inf):
                best[step.target] = cost + more
                came[step.target] = step
                count += 1
                heapq.heappush(heap, (cost + more, count, step.target))
    return None


@lru_cache(maxsize=1 << 12)
def _stepping_stone(v: Value, mesh: Mesh, used: frozenset[int]) -> tuple[int, ...]:
    """One more dim that may be cut on the way, the first that all axes divide: an all-reduce of a piece costs less."""
    ranks = mesh.ranks
    return next(((d,) for d, n in enumerate(v.shape) if d not in used and n and n % ranks == 0), ())


@lru_cache(maxsize=1 << 17)
def _edges(
    layout: Layout,
    cuts: frozenset[tuple[int, tuple[int, ...]]],
    uneven: frozenset[tuple[int, Split]],
    sums: bool,
    v: Value,
    mesh: Mesh,
) -> tuple[tuple[Step, float], ...]:
    """The legal moves from ``layout`` with their prices. Cuts are even, or an uneven one that a parameter at rest has,
    from outside in; tensors that cannot be added (``sums``) are never partial."""
    found = []
    for step in moves(layout, cuts, v, mesh):
        there = settle(step.target, v, mesh)
        even = there.is_even(v.shape, mesh) or all(
            (d, s) in uneven or Layout("", (s,)).is_even((v.shape[d],), mesh) for d, s in enumerate(there.dims)
        )
        if even and (sums or "P" not in there.kinds):
            found.append((Step(step.row, step.axis, layout, there), price(step, v, mesh)))
    return tuple(found)


@lru_cache(maxsize=1 << 17)
def cost(source: Layout, target: Layout, v: Value, mesh: Mesh) -> float:
    """Price of the cheapest way, infinite where there is none."""
    steps = path(source, target, v, mesh)
    return math.inf if steps is None else sum(price(s, v, mesh) for s in steps)


def settle(layout: Layout, v: Value, mesh: Mesh) -> Layout:
    """Without a gradient R and I are one layout: written I (over time, where I does not exist, R)."""
    if v.grad or "R" not in layout.kinds:
        return layout
    kinds = "".join("I" if k == "R" and not mesh.axes[a].is_time else k for a, k in enumerate(layout.kinds))
    return Layout(kinds, layout.dims)
