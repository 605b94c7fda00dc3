"""Layouts: what the ranks of each mesh axis hold of one tensor.

On every axis of a mesh a tensor is sharded ``S``, replicated ``R``, invariant ``I`` or partial ``P``
(``docs/design.md`` section 3). ``R`` and ``I`` hold the same value; they differ in the gradient: that of ``R`` is a
set of addends (each rank used the value differently), that of ``I`` is whole on every rank.

A dim may be cut by several axes, outermost first, and its cut may restart in every one of its ``parts``: the weight
of a fused query/key/value projection is ``S(0, parts=(q, k, v))``. A dim that an axis does not divide is cut as
``torch.chunk`` does, unevenly; where elements belong together (those of an attention head) between whole ``items``.
Nothing here needs torch.

>>> mesh = Mesh((Axis("dp", 2), Axis("tp", 2)))
>>> layout = Layout.parse("S0 R", ndim=2)
>>> str(layout), layout.local_shape((8, 6), mesh, (1, 0))
('S0 R', (4, 6))
>>> fused = Layout.parse("R S0(4+2+2)", ndim=1)
>>> fused.runs((8,), mesh, (0, 1))[0]
((2, 2), (5, 1), (7, 1))
>>> heads = Layout.parse("R S0/5", ndim=1)  # five heads of eight elements
>>> [heads.local_shape((40,), mesh, (0, tp)) for tp in (0, 1)]
[(24,), (16,)]
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

SHARD, REPLICATE, INVARIANT, PARTIAL = "S", "R", "I", "P"


BYTE = 1e-10  # seconds in which the neutral wire moves a byte between two ranks: a unit, not a measurement
NEUTRAL_LATENCY = 1000 * BYTE
NEUTRAL_COPY = 1e-3 * BYTE


WIRED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Wire:
    """What moving bytes along one axis takes: of each collective (latency in s, s per byte).

    Bytes are counted as nccl-tests does: all_reduce and all_to_all what a rank holds, all_gather the result,
    reduce_scatter the input. ``copy``: s per byte of a copy within a rank. ``busy``: of the time of a collective that
    compute need not wait for, the fraction in which the device computes nothing all the same.

    >>> neutral(2).seconds("all_gather", 2e10)
    1.0000001
    """

    all_reduce: tuple[float, float]
    all_gather: tuple[float, float]
    reduce_scatter: tuple[float, float]
    all_to_all: tuple[float, float]
    copy: float
    busy: float = 0.0

    def of(self, collective: str) -> tuple[float, float]:
        """(latency in s, s per byte) of a collective by name."""
        found: tuple[float, float] = getattr(self, collective)
        return found

    def seconds(self, collective: str, nbytes: float) -> float:
        """How long the collective takes for ``nbytes``."""
        latency, per_byte = self.of(collective)
        return latency + per_byte * nbytes

    def scaled(self, factor: float) -> Wire:
        """A wire that takes so many times as long."""
        lines = {kind: (factor * latency, factor * slope) for kind in WIRED for latency, slope in [self.of(kind)]}
        return Wire(**lines, copy=factor * self.copy, busy=self.busy)


@lru_cache(maxsize=1 << 10)
def neutral(n: int) -> Wire:
    """The wire of an axis of ``n`` ranks of which nothing is known: rings, starting one costs as much as 1000 bytes."""
    ring = (NEUTRAL_LATENCY, BYTE * (n - 1) / n)
    return Wire((NEUTRAL_LATENCY, 2 * BYTE * (n - 1) / n), ring, ring, ring, NEUTRAL_COPY)


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh: ``size`` ranks, or, for the time axis, ``size`` microbatches of ``rows`` batch rows.

    ``wire``: what moving bytes along it takes; None: `neutral`, or in time the copies of the axes of ranks.
    """

    name: str
    size: int
    rows: tuple[int, ...] = ()
    wire: Wire | None = None

    @property
    def is_time(self) -> bool:
        return bool(self.rows)

    @cached_property
    def batch(self) -> int:
        """Rows of all microbatches."""
        return sum(self.rows)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The different rows of a microbatch."""
        return tuple(dict.fromkeys(self.rows))

    def divides(self, length: int) -> bool:
        """Whether every coordinate of this axis gets a whole, even (for time: proportional) piece of ``length``."""
        if self.is_time:
            return all(length * r % self.batch == 0 and length * r > 0 for r in self.lengths)
        return length % self.size == 0 and length > 0

    def cut(self, start: int, length: int, coordinate: int, items: int = 0) -> tuple[int, int]:
        """The (start, length) that ``coordinate`` keeps of a run of so many items (0: every element is one); uneven
        runs are cut as ``torch.chunk`` does."""
        if self.is_time:
            lo = length * sum(self.rows[:coordinate]) // self.batch
            return start + lo, length * self.rows[coordinate] // self.batch
        items = items or length
        step = -(-items // self.size) * (length // items if items else 0)
        lo = min(coordinate * step, length)
        return start + lo, min(step, length - lo)

    def fills(self, items: int) -> bool:
        """Whether every rank gets one of so many items, evenly or not; over time nothing is uneven.

        >>> [n for n in range(2, 9) if Axis("tp", n).fills(5)]
        [2, 3, 5]
        """
        return not self.is_time and -(-items // self.size) * (self.size - 1) < items


@dataclass(frozen=True)
class Mesh:
    """Named axes; ranks are numbered with the last axis fastest. At most one axis is in time, and it comes last.

    >>> Mesh((Axis("dp", 2), Axis("tp", 4))).coordinates(6)
    (1, 2)
    """

    axes: tuple[Axis, ...]

    def __hash__(self) -> int:
        found = self.__dict__.get("_hash")
        if found is None:
            found = self.__dict__["_hash"] = hash(self.axes)
        return int(found)

    def __reduce__(self) -> tuple[type[Mesh], tuple[tuple[Axis, ...]]]:
        return Mesh, (self.axes,)  # a hash holds in one process only

    def wire(self, axis: int) -> Wire:
        """What moving bytes along ``axis`` takes; the time axis only copies."""
        own = self.axes[axis]
        if own.wire is not None:
            return own.wire
        known = next((a.wire for a in self.axes if a.wire is not None), None) if own.is_time else None
        return known or neutral(own.size)

    @cached_property
    def busy(self) -> Mesh | None:
        """The same axes, with wires that take the seconds of `Wire.busy` alone; None where they would take none."""
        if not any(a.wire is not None and a.wire.busy for a in self.axes):
            return None
        return Mesh(tuple(a if a.wire is None else replace(a, wire=a.wire.scaled(a.wire.busy)) for a in self.axes))

    def without_wires(self) -> Mesh:
        """The same axes, all with neutral wires."""
        return self._bare

    @cached_property
    def _bare(self) -> Mesh:
        return Mesh(tuple(replace(a, wire=None) for a in self.axes))

    @cached_property
    def ranks(self) -> int:
        return math.prod(a.size for a in self.axes if not a.is_time)

    @cached_property
    def time(self) -> int | None:
        """Index of the time axis, or None when the step is one microbatch."""
        return next((i for i, a in enumerate(self.axes) if a.is_time), None)

    @cached_property
    def space(self) -> tuple[int, ...]:
        """Indices of the axes whose coordinates are ranks."""
        return tuple(i for i, a in enumerate(self.axes) if not a.is_time)

    def index(self, name: str) -> int:
        return next(i for i, a in enumerate(self.axes) if a.name == name)

    def coordinates(self, rank: int, microbatch: int = 0) -> tuple[int, ...]:
        """Coordinates of a rank on every axis; on the time axis the microbatch."""
        out = []
        for axis in reversed(self.axes):
            if axis.is_time:
                out.append(microbatch)
            else:
                out.append(rank % axis.size)
                rank //= axis.size
        return tuple(reversed(out))


@dataclass(frozen=True)
class Split:
    """How one tensor dim is cut: the axes, outermost first, and the parts that are cut one by one (none: one part).

    ``items``: in how many equal pieces, none of which is cut, every part comes; 0, every element, also where that makes
    no difference."""

    axes: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    items: int = 0


WHOLE = Split()


@dataclass(frozen=True)
class Layout:
    """``kinds``: one letter a mesh axis; ``dims``: one `Split` a tensor dim, listing each ``S`` axis exactly once."""

    kinds: str
    dims: tuple[Split, ...]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Layout) and self.kinds == other.kinds and self.dims == other.dims

    def __hash__(self) -> int:
        found = self.__dict__.get("_hash")
        if found is None:
            found = self.__dict__["_hash"] = hash((self.kinds, self.dims))
        return int(found)

    def __reduce__(self) -> tuple[type[Layout], tuple[str, tuple[Split, ...]]]:
        return Layout, (self.kinds, self.dims)  # a hash holds in one process only

    @staticmethod
    def uniform(kind: str, axes: int, ndim: int) -> Layout:
        """``I``, ``R`` or ``P`` on every axis."""
        return Layout(kind * axes, (WHOLE,) * ndim)

    @property
    def ndim(self) -> int:
        return len(self.dims)

    def dim_of(self, axis: int) -> int | None:
        """The tensor dim that ``axis`` cuts."""
        if self.kinds[axis : axis + 1] != "S":
            return None
        return next((d for d, split in enumerate(self.dims) if axis in split.axes), None)

    def with_kind(self, axis: int, kind: str) -> Layout:
        """Replace what ``axis`` holds by ``R``, ``I`` or ``P``; a shard on it is taken off its dim."""
        dims = self.dims
        if self.kinds[axis : axis + 1] == "S":
            dims = tuple(
                _tidy(replace(s, axes=tuple(a for a in s.axes if a != axis))) if axis in s.axes else s for s in dims
            )
        return Layout(self.kinds[:axis] + kind + self.kinds[axis + 1 :], dims)

    def with_shard(self, axis: int, dim: int, parts: tuple[int, ...] = (), items: int = 0) -> Layout:
        """Cut ``dim`` by ``axis``, innermost. ``parts`` and ``items`` must agree with a cut that is already there."""
        base = self.with_kind(axis, "R")
        old = base.dims[dim]
        if old.axes and (old.parts, old.items) != (parts, items):
            raise ValueError(f"dim {dim} is cut in parts {old.parts} of {old.items} items, not {parts} of {items}")
        dims = list(base.dims)
        dims[dim] = Split((*old.axes, axis), parts if len(parts) > 1 else (), items)
        return Layout(base.kinds[:axis] + "S" + base.kinds[axis + 1 :], tuple(dims))

    def runs(
        self, shape: tuple[int, ...], mesh: Mesh, coordinates: tuple[int, ...]
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For every dim the (start, length) runs of global indices that the rank at ``coordinates`` holds, in order."""
        return tuple(_runs(size, split, mesh, coordinates) for size, split in zip(shape, self.dims, strict=True))

    def local_shape(self, shape: tuple[int, ...], mesh: Mesh, coordinates: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the piece of a tensor of global ``shape`` that the rank at ``coordinates`` holds."""
        return tuple(sum(n for _, n in runs) for runs in self.runs(shape, mesh, coordinates))

    def is_even(self, shape: tuple[int, ...], mesh: Mesh) -> bool:
        """Whether all pieces are equal (proportional over time)."""
        return _all_even(self, shape, mesh)

    def __str__(self) -> str:
        return " ".join(self._word(a) for a in range(len(self.kinds)))

    def _word(self, axis: int) -> str:
        dim = self.dim_of(axis)
        if dim is None:
            return self.kinds[axis]
        split = self.dims[dim]
        word = f"S{dim}"
        if split.parts:
            word += "(" + "+".join(map(str, split.parts)) + ")"
        if split.items:
            word += f"/{split.items}"
        if len(split.axes) > 1 and tuple(sorted(split.axes)) != split.axes:
            word += f"@{split.axes.index(axis)}"
        return word

    @staticmethod
    def parse(text: str, ndim: int) -> Layout:
        """Read what ``str`` writes: a word an axis, ``S1(4+2)/2@1`` being dim 1, its parts, the items of each, its
        place in the nest.

        Raises ValueError with the offending word.
        """
        kinds, cuts = "", dict[int, list[tuple[int, int, Split]]]()
        for axis, word in enumerate(text.split()):
            if word in ("R", "I", "P"):
                kinds += word
                continue
            match = re.fullmatch(r"S(\d+)(?:\((\d+(?:\+\d+)*)\))?(?:/([1-9]\d*))?(?:@(\d+))?", word)
            if not match or int(match[1]) >= ndim:
                raise ValueError(f"{word!r} is not a layout of a tensor of {ndim} dims (legal: R, I, P, S<dim>)")
            parts = tuple(map(int, match[2].split("+"))) if match[2] else ()
            place = int(match[4]) if match[4] else axis
            cuts.setdefault(int(match[1]), []).append((place, axis, Split((), parts, int(match[3] or 0))))
            kinds += "S"
        dims = [WHOLE] * ndim
        for dim, entries in cuts.items():
            if len({split for _, _, split in entries}) > 1:
                raise ValueError(f"{text!r} cuts dim {dim} in different parts on different axes")
            dims[dim] = replace(entries[0][2], axes=tuple(a for _, a in sorted((p, a) for p, a, _ in entries)))
        return Layout(kinds, tuple(dims))


def _tidy(split: Split) -> Split:
    return split if split.axes else WHOLE


@lru_cache(maxsize=1 << 16)
def _runs(size: int, split: Split, mesh: Mesh, coordinates: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    runs, start = [], 0
    for part in split.parts or (size,):
        if split.items and part % split.items:
            raise ValueError(f"{part} elements are not {split.items} equal items")
        runs.append((start, part))
        start += part
    if start != size:
        raise ValueError(f"parts {split.parts} do not add up to {size}")
    items = split.items
    for a in split.axes:
        runs = [mesh.axes[a].cut(lo, n, coordinates[a], items) for lo, n in runs]
        items = items and mesh.axes[a].cut(0, items, coordinates[a])[1]
    return tuple(runs)


def parts_before(
    axis: int, length: int, split: Split, mesh: Mesh, coordinates: tuple[int, ...]
) -> tuple[tuple[int, ...], int]:
    """The lengths of the parts of a dim as a rank holds them before ``axis`` cuts it, and the items of each (0: every
    element is one)."""
    outer = split.axes[: split.axes.index(axis)]
    items = split.items
    for a in outer:
        items = items and mesh.axes[a].cut(0, items, coordinates[a])[1]
    return tuple(n for _, n in _runs(length, replace(split, axes=outer), mesh, coordinates)), items


@lru_cache(maxsize=1 << 17)
def _all_even(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> bool:
    return all(cuts_evenly(size, split, mesh) for size, split in zip(shape, layout.dims, strict=True))


@lru_cache(maxsize=1 << 16)
def cuts_evenly(length: int, split: Split, mesh: Mesh) -> bool:
    """Whether all pieces of a dim of this length are equal (proportional over time)."""
    if not split.axes:
        return True
    pieces = math.prod(mesh.axes[a].size for a in split.axes if not mesh.axes[a].is_time)
    rows, batch = cut_in_time(split, mesh)
    parts = (split.items,) if split.items else split.parts or (length,)
    return all(part * r % (batch * pieces) == 0 and part * r > 0 for part in parts for r in rows)


def cut_in_time(split: Split, mesh: Mesh) -> tuple[tuple[int, ...], int]:
    """Where time is among the axes of a cut the different rows of a microbatch, and those of all; else one of one."""
    time = next((mesh.axes[a] for a in split.axes if mesh.axes[a].is_time), None)
    return ((1,), 1) if time is None else (time.lengths, time.batch)


__all__ = [
    "BYTE",
    "INVARIANT",
    "PARTIAL",
    "REPLICATE",
    "SHARD",
    "WHOLE",
    "Axis",
    "Layout",
    "Mesh",
    "Split",
    "Wire",
    "cut_in_time",
    "cuts_evenly",
    "neutral",
    "parts_before",
    "replace",
]
