"""The cheapest ways between all legal layouts of one tensor at once, as arrays.

`Structure` is what does not depend on a tensor's sizes: which layouts exist, which moves join them, which share of the
bytes each move handles. It serves all tensors whose dims the axes divide alike. `Closure` adds prices and the shortest
paths (Floyd and Warshall). The layouts are the cuts without parts of every dim that an axis divides evenly, in all
nesting orders, and what the two ends of a change have besides (`Profile`): cuts in parts, and uneven ones. What a
tensor holds over time changes by local moves in one direction only (R, S, P), so a closure covers the time states of
its two ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.passes.facts import Value
from autopar.passes.layout import WHOLE, Axis, Layout, Mesh, Split, cuts_evenly
from autopar.passes.moves import Step, moves, padding, settle, terms

MOST_LAYOUTS = 250  # beyond that fewer dims serve as stepping stones

Cut = tuple[int, tuple[int, ...]]  # dim, parts
TimeState = str | tuple[int, tuple[int, ...], tuple[int, ...]]  # a kind; or dim, the axes outside of time, parts
Shape = tuple[tuple[int, bool], ...]  # of a mesh: size of each axis, and whether it is time


@dataclass(frozen=True)
class Profile:
    """What an end of a change asks of the layouts on the way: its state over time, cuts that are not among those of
    every tensor, uneven cuts from outside in, and whether integers are summed."""

    time: TimeState
    cuts: frozenset[Cut]
    uneven: frozenset[tuple[int, Split]]
    summed: bool


@dataclass(frozen=True, eq=False)
class Structure:
    """Layouts and the moves among them: arrays over moves, ``kinds`` indexing ``rows`` of (row, axis)."""

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    rows: tuple[tuple[str, int], ...]
    kind: NDArray[np.int64]
    share: NDArray[np.float64]

    @cached_property
    def moves(self) -> dict[tuple[int, int], int]:
        """Number of the move from one layout to another."""
        return {(int(i), int(j)): k for k, (i, j) in enumerate(zip(self.source, self.target, strict=True))}


@dataclass(frozen=True, eq=False)
class Closure:
    """``seconds[i, j]``: the cheapest way from layout i to j (inf: none); ``after[i, j]``: the layout next on it."""

    structure: Structure
    seconds: NDArray[np.float64]
    after: NDArray[np.int16]

    def steps(self, source: Layout, target: Layout) -> tuple[Step, ...] | None:
        """The moves of the cheapest way, or None."""
        known = self.structure
        here, there = known.index[source], known.index[target]
        if math.isinf(self.seconds[here, there]):
            return None
        found = []
        while here != there:
            nearer = int(self.after[here, there])
            row, axis = known.rows[known.kind[known.moves[here, nearer]]]
            found.append(Step(row, axis, known.layouts[here], known.layouts[nearer]))
            here = nearer
        return tuple(found)


def closure(a: Profile, b: Profile, v: Value, mesh: Mesh) -> Closure | None:
    """The closure that covers changes between layouts of two profiles; None where time keeps them apart."""
    states = _states(a.time, b.time, v, mesh)
    if not states:
        return None
    structure = _structure_of(states, a.cuts | b.cuts, a.uneven | b.uneven, a.summed or b.summed, v, mesh)
    lengths = v.shape if a.uneven or b.uneven else ()
    return _priced(structure, v.nbytes, v.grad, lengths, mesh)


@lru_cache(maxsize=1 << 17)
def profile(layout: Layout, v: Value, mesh: Mesh) -> Profile:
    """What a (settled) layout of ``v`` asks of a closure."""
    base = base_dims(v.shape, mesh)
    used = [(d, s) for d, s in enumerate(layout.dims) if s.axes]
    cuts = {(d, p) for d, s in used if s.parts or d not in base for p in (s.parts, ())}
    uneven = set[tuple[int, Split]]()
    for d, split in used:
        if split.items or not cuts_evenly(v.shape[d], split, mesh):
            uneven |= {(d, replace(split, axes=split.axes[: n + 1])) for n in range(len(split.axes))}
    return Profile(_time_state(layout, mesh), frozenset(cuts), frozenset(uneven), "P" in layout.kinds and not _real(v))


@lru_cache(maxsize=1 << 14)
def base_dims(shape: tuple[int, ...], mesh: Mesh) -> frozenset[int]:
    """The dims of every tensor of this shape that may be cut on the way: those that an axis divides evenly, of many
    those first that all axes divide."""
    axes = range(len(mesh.axes))
    divided = [d for d, n in enumerate(shape) if any(cuts_evenly(n, Split((a,)), mesh) for a in axes)]
    divided.sort(key=lambda d: not cuts_evenly(shape[d], Split(tuple(axes)), mesh))
    n = len(mesh.space)
    while len(divided) > 1 and _count(n, len(divided)) > MOST_LAYOUTS:
        divided.pop()
    return frozenset(divided)


def _count(axes: int, dims: int) -> int:
    """Layouts in which each of ``axes`` has one of three kinds or cuts one of ``dims``, nesting orders told apart.

    >>> _count(1, 2), _count(2, 3)
    (5, 39)
    """
    return sum(math.comb(axes, k) * 3 ** (axes - k) * math.prod(range(dims, dims + k)) for k in range(axes + 1))


def _real(v: Value) -> bool:
    return v.dtype.is_floating_point or v.dtype.is_complex


def _time_state(layout: Layout, mesh: Mesh) -> TimeState:
    if mesh.time is None:
        return ""
    dim = layout.dim_of(mesh.time)
    if dim is None:
        return layout.kinds[mesh.time]
    split = layout.dims[dim]
    return dim, split.axes[: split.axes.index(mesh.time)], split.parts


def _states(source: TimeState, target: TimeState, v: Value, mesh: Mesh) -> tuple[TimeState, ...]:
    """The time states on the way from one to another; none where there is no way. Between R and P lie the cuts."""
    if source == target:
        return (source,)
    if source == "R" and target == "P":
        dims = sorted(base_dims(v.shape, mesh))
        fit = max(0, MOST_LAYOUTS // _count(len(mesh.space), len(dims)) - 2)
        return ("R", *((d, (), ()) for d in dims[:fit]), "P")
    if (source == "R" and not isinstance(target, str)) or (not isinstance(source, str) and target == "P"):
        return (source, target)
    return ()


def _structure_of(
    states: tuple[TimeState, ...],
    cuts: frozenset[Cut],
    uneven: frozenset[tuple[int, Split]],
    summed: bool,
    v: Value,
    mesh: Mesh,
) -> Structure:
    plain = base_dims(v.shape, mesh)
    splits = tuple(
        _splits(
            n,
            tuple(sorted({p for to, p in cuts if to == d} | ({()} if d in plain else set()))),
            frozenset(s for to, s in uneven if to == d),
            mesh,
        )
        for d, n in enumerate(v.shape)
    )
    kinds = ("R" if v.grad else "") + "I" + ("P" if summed or _real(v) else "")
    return _structure(splits, kinds, states, v.grad, tuple((a.size, a.is_time) for a in mesh.axes))


@lru_cache(maxsize=1 << 14)
def _splits(length: int, parts: tuple[tuple[int, ...], ...], uneven: frozenset[Split], mesh: Mesh) -> tuple[Split, ...]:
    """The legal cuts of one dim, nesting orders told apart."""
    axes = range(len(mesh.axes))
    found = [
        Split(order, p)
        for p in parts
        for n in range(1, len(axes) + 1)
        for order in itertools.permutations(axes, n)
        if cuts_evenly(length, Split(order, p), mesh)
    ]
    return (WHOLE, *found, *sorted(uneven - set(found), key=lambda s: (s.axes, s.parts, s.items)))


@lru_cache(maxsize=1 << 12)
def _structure(
    splits: tuple[tuple[Split, ...], ...], kinds: str, states: tuple[TimeState, ...], grad: bool, shape: Shape
) -> Structure:
    """What the sizes of axes add to `_joined`: the share of each move."""
    known = _joined(splits, kinds, states, grad, tuple(time for _, time in shape))
    axes, sizes = np.array([axis for _, axis in known.rows], np.int64), np.array([n for n, _ in shape], np.int64)
    cut = np.array([[k == "S" for k in x.kinds] for x in known.layouts], bool).reshape(len(known.layouts), len(shape))
    beside = cut[known.source] & (np.arange(len(shape)) != axes[known.kind][:, None])
    return replace(known, share=1 / np.where(beside, sizes, 1).prod(axis=1))


@lru_cache(maxsize=1 << 12)
def _joined(
    splits: tuple[tuple[Split, ...], ...],
    kinds: str,
    states: tuple[TimeState, ...],
    grad: bool,
    times: tuple[bool, ...],
) -> Structure:
    """Layouts and moves alone, on axes of any sizes."""
    mesh = Mesh(tuple(Axis(str(a), 1, (1,) if time else ()) for a, time in enumerate(times)))
    layouts = tuple(x for state in states for x in _layouts(splits, kinds, state, mesh))
    index = {x: i for i, x in enumerate(layouts)}
    wanted = list(dict.fromkeys((d, replace(s, axes=())) for d, menu in enumerate(splits) for s in menu if s.axes))
    v = Value((), torch.float32, grad)
    joined: dict[tuple[int, int], tuple[str, int]] = {}
    for i, here in enumerate(layouts):
        for step in moves(here, wanted, mesh):
            j = index.get(settle(step.target, v, mesh), i)
            if j != i:
                joined.setdefault((i, j), (step.row, step.axis))
    rows = tuple(dict.fromkeys(joined.values()))
    number = {key: k for k, key in enumerate(rows)}
    ends = np.array(list(joined), dtype=np.int64).reshape(-1, 2)
    return Structure(
        layouts,
        index,
        ends[:, 0],
        ends[:, 1],
        rows,
        np.array([number[key] for key in joined.values()], dtype=np.int64),
        np.ones(len(ends)),
    )


def _layouts(splits: tuple[tuple[Split, ...], ...], kinds: str, state: TimeState, mesh: Mesh) -> Iterator[Layout]:
    """All legal layouts of one time state."""
    time, space = mesh.time, mesh.space
    menus = []
    for d, menu in enumerate(splits):
        if isinstance(state, str) or state[0] != d:
            menus.append([s for s in menu if time not in s.axes])
        else:
            _, outer, parts = state
            prefix = (*outer, time)
            menus.append([s for s in menu if s.axes[: len(prefix)] == prefix and s.parts == parts])
    for dims in itertools.product(*menus):
        cutting = [a for s in dims for a in s.axes]
        if len(set(cutting)) < len(cutting):
            continue
        free = [a for a in space if a not in cutting]
        for letters in itertools.product(kinds, repeat=len(free)):
            given = dict(zip(free, letters, strict=True))
            if time is not None and isinstance(state, str):
                given[time] = state
            yield Layout("".join(given.get(a, "S") for a in range(len(mesh.axes))), dims)


@lru_cache(maxsize=1 << 12)
def _terms(structure: Structure, grad: bool, mesh: Mesh) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    table = np.array([terms(row, axis, grad, mesh) for row, axis in structure.rows]).reshape(-1, 2)
    return table[structure.kind, 0], table[structure.kind, 1] * structure.share


@lru_cache(maxsize=1 << 12)
def _priced(structure: Structure, nbytes: int, grad: bool, uneven: tuple[int, ...], mesh: Mesh) -> Closure:
    """``uneven``: the tensor's shape where some layouts are uneven, so that what is padded is sent too."""
    n = len(structure.layouts)
    fixed, per_byte = _terms(structure, grad, mesh)
    if uneven:
        ends = zip(structure.source, structure.target, strict=True)
        per_byte = per_byte * [padding(structure.layouts[i], structure.layouts[j], uneven, mesh) for i, j in ends]
    seconds = np.full((n, n), np.inf)
    np.fill_diagonal(seconds, 0.0)
    seconds[structure.source, structure.target] = fixed + per_byte * nbytes
    after = np.broadcast_to(np.arange(n, dtype=np.int16), (n, n)).copy()
    for k in range(n):
        through = seconds[:, k, None] + seconds[k]
        better = through < seconds
        np.copyto(seconds, through, where=better)
        np.copyto(after, after[:, k, None], where=better)
    return Closure(structure, seconds, after)
