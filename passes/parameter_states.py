"""What may be done with a parameter: how it rests, when it is gathered, when its gradient is reduced.

For each layout in which it is used: on every axis of ranks where that is whole, it may rest whole or in pieces. In
pieces over no such axis it is never gathered; else once a step (ZeRO-1; with the gradient reduced per microbatch
ZeRO-2), or at every use (ZeRO-3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.passes.changes import path
from autopar.passes.complete_layouts import needs_change, resting
from autopar.passes.facts import Value
from autopar.passes.layout import Layout, Mesh, Split
from autopar.passes.moves import Moved, beside, held, terms

STAGES = {1: ("step", "step"), 2: ("step", "microbatch"), 3: ("use", "microbatch")}
"""ZeRO stage -> when a parameter in pieces is gathered, and when its gradient is reduced."""


@dataclass(frozen=True)
class Together:
    """What of a collective's latency one parameter is priced with, since those that enter alike share it
    (`runtime.buckets`): a part of ``count``, or, where ``cap`` (bytes of a full bucket) is given, the part of a bucket
    that it fills. Summed over any parameters that is no more than the latencies of their buckets."""

    count: int = 1
    cap: int = 0

    def part(self, nbytes: float) -> float:
        """Of a parameter of so many bytes as it enters."""
        return min(1.0, nbytes / self.cap) if self.cap else 1 / self.count


@dataclass(frozen=True)
class ParameterState:
    """Communication, with a part of its latencies (`Together`): ``enter`` each time that it goes from rest to use,
    ``leave`` each time that its gradient goes that way back. ``gathers``: how often it is gathered in a microbatch, if
    at use."""

    rest: Layout
    use: Layout
    gather: str
    reduce: str
    enter: Moved
    leave: Moved
    gathers: int = 0

    def __str__(self) -> str:
        return f"{self.rest} -> {self.use}, gather {self.gather}, reduce {self.reduce}"

    def enters(self, microbatches: int) -> int:
        """How often a step it goes from rest to use."""
        return self.gathers * microbatches if self.gather == "use" else 1

    def moved(self, microbatches: int) -> Moved:
        """Communication of a step."""
        leaves = microbatches if self.reduce == "microbatch" else 1
        return self.enters(microbatches) * self.enter + leaves * self.leave


ALONE = Together()


@lru_cache(maxsize=1 << 12)
def parameter_states(
    v: Value,
    uses: Sequence[Layout],
    mesh: Mesh,
    zero: int | None = None,
    over: tuple[int, ...] | None = None,
    together: Together = ALONE,
    gathers: int = 2,
) -> list[ParameterState]:
    """All states of a parameter that is used in one of ``uses`` (a tuple). ``zero``: only that stage; ``over``: the
    only axes over which it may rest in pieces; ``together``: how it shares latencies; ``gathers``: how many forwards
    and backwards of units read it."""
    found = []
    for use in uses:
        allowed = mesh.space if over is None else over
        open_axes = [a for a in allowed if use.kinds[a] in "RI" and mesh.axes[a].size > 1]
        sharded: dict[Layout, None] = {}
        for n in range(1, len(open_axes) + 1):
            for cut in itertools.combinations(open_axes, n):
                rest = _nested(resting(v, use, mesh, cut))
                if any(rest.kinds[a] == "S" for a in cut):
                    sharded[rest] = None
        if not sharded or not zero:
            found.append(_plain(v, resting(v, use, mesh, ()), use, mesh, together))
        for rest in sharded:
            for stage, (gather, reduce) in STAGES.items():
                if zero is None or stage == zero:
                    way = _entering(v, rest, use, mesh, together)
                    often = gathers if gather == "use" else 0
                    found.append(ParameterState(rest, use, gather, reduce if v.grad else "never", *way, often))
    return list(dict.fromkeys(found))


def _nested(rest: Layout) -> Layout:
    """Axes that cut one dim nest in the mesh's order, as the DTensors of one device mesh must."""
    return Layout(rest.kinds, tuple(Split(tuple(sorted(s.axes))) for s in rest.dims))


def _plain(v: Value, rest: Layout, use: Layout, mesh: Mesh, together: Together) -> ParameterState:
    moves = needs_change(rest, use)
    reduces = v.grad and (moves or any(use.kinds[a] == "R" and mesh.axes[a].size > 1 for a in mesh.space))
    gather, reduce = "step" if moves else "never", "step" if reduces else "never"
    return ParameterState(rest, use, gather, reduce, *_entering(v, rest, use, mesh, together))


@lru_cache(maxsize=1 << 16)
def _entering(v: Value, source: Layout, target: Layout, mesh: Mesh, together: Together) -> tuple[Moved, Moved]:
    """The values' way from source to target, and of the gradients' way back, in the dtype of theirs."""
    steps = path(source, target, v, mesh)
    assert steps is not None, f"no way from {source} to {target}"
    sizes = [held(s, v, mesh) for s in steps]
    part = together.part(math.prod(target.local_shape(v.shape, mesh, (0,) * len(mesh.axes))) * v.dtype.itemsize)
    more = v.reduced.dtype.itemsize / v.dtype.itemsize
    there = back = Moved()
    for step, size in zip(steps, sizes, strict=True):
        (fixed, slope), (both, slope_both) = (terms(step.row, step.axis, grad, mesh) for grad in (False, v.grad))
        there += beside(part * fixed + size * slope, step.axis, mesh)
        back += beside(part * (both - fixed) + size * more * (slope_both - slope), step.axis, mesh)
    return there, back
