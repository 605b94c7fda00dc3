"""Seconds and bytes of one tensor between layouts, as arrays: what factors are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from autopar.choosing.wiring import Tensor
from autopar.passes.changes import costs
from autopar.passes.facts import Value
from autopar.passes.layout import Layout, Mesh, Split
from autopar.passes.price import local_bytes
from autopar.solver.problem import EXPOSED, HIDDEN, RESOURCES, Array, Index

UNHIDDEN = 1e-3  # of hidden seconds, taken as exposed so that ties are broken
PART = 2  # of `Tables._held`: what an axis has of a partial sum; a shard has more, a whole tensor less
Layouts = Sequence[Layout]
Flags = npt.NDArray[np.bool_]


class Tables:
    """Of one mesh, seconds of all ``microbatches``."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.plain = mesh, mesh.without_wires()
        self.microbatches = 1 if mesh.time is None else mesh.axes[mesh.time].size
        self._seconds: dict[tuple[Value, tuple[Layout, ...], tuple[Layout, ...], Mesh], Array] = {}
        self._bytes: dict[tuple[Value, tuple[Layout, ...]], Array] = {}
        self._numbers: dict[tuple[Layout, ...], Index] = {}
        self._pieces: dict[tuple[Layout, ...], Index] = {}
        self._storage: dict[tuple[str, tuple[Split, ...]], int] = {}

    def changes(self, t: Tensor, sources: Layouts, targets: Layouts) -> Array:
        """[sources, targets, resources]: of a weight, and of what depends on weights alone, hidden."""
        table = np.zeros((len(sources), len(targets), len(RESOURCES)))
        seconds = self._changed(t.value, sources, targets)
        if not t.weight:
            table[..., EXPOSED] = seconds
            return table
        busy = 0.0 if self.mesh.busy is None else self._changed(t.value, sources, targets, self.mesh.busy)
        table[..., HIDDEN] = seconds - busy
        table[..., EXPOSED] = busy + UNHIDDEN * table[..., HIDDEN]
        return table

    def again(self, t: Tensor, sources: Layouts, targets: Layouts) -> Array:
        """Seconds of the changes made once more: forward alone."""
        return self._changed(replace(t.value, grad=False), sources, targets)

    def bytes(self, v: Value, layouts: Layouts) -> Array:
        """Of the largest piece, in the microbatch with the most rows."""
        key = v, tuple(layouts)
        if key not in self._bytes:
            self._bytes[key] = np.array([local_bytes(v, x, self.plain) for x in layouts], np.float64)
            self._bytes[key].flags.writeable = False
        return self._bytes[key]

    def copies(self, v: Value, sources: Layouts, targets: Layouts, *, free: bool) -> Array:
        """Bytes of each target; ``free``: none where it is the source's own storage, which counts elsewhere."""
        held = np.broadcast_to(self.bytes(v, targets), (len(sources), len(targets)))
        return np.where(self.same(sources, targets), 0.0, held) if free else held.copy()

    def same(self, sources: Layouts, targets: Layouts) -> Flags:
        """Whether a target is the storage of the source."""
        return np.asarray(self._storages(sources)[:, None] == self._storages(targets))

    def collective(self, sources: Layouts, targets: Layouts) -> Flags:
        """Whether ranks exchange what they hold on the way: an axis without P and S holds all of a tensor, and every
        layout is made of that in place."""
        before, after = self._held(sources)[:, None], self._held(targets)
        return np.asarray(((before >= PART) & (before != after)).any(-1))

    def _storages(self, layouts: Layouts) -> Index:
        """Of each layout the number of the storage that it is: R and I are one."""
        key = tuple(layouts)
        if key not in self._numbers:
            storages = [self._storage.setdefault((_kinds(x), x.dims), len(self._storage)) for x in layouts]
            self._numbers[key] = np.array(storages, np.int64)
        return self._numbers[key]

    def _held(self, layouts: Layouts) -> Index:
        """What each layout has on each axis of ranks, as a number, [layouts, axes]: `PART` for P, more for a shard."""
        key = tuple(layouts)
        if key not in self._pieces:
            held = [[_piece(x, a) for a in self.mesh.space] for x in layouts]
            self._pieces[key] = np.array(held, np.int64).reshape(len(layouts), len(self.mesh.space))
        return self._pieces[key]

    def _changed(self, v: Value, sources: Layouts, targets: Layouts, mesh: Mesh | None = None) -> Array:
        mesh = mesh or self.mesh
        key = (v, tuple(sources), tuple(targets), mesh)
        if key not in self._seconds:
            self._seconds[key] = costs(sources, targets, v, mesh) * self.microbatches
        return self._seconds[key]


def _piece(layout: Layout, axis: int) -> int:
    dim = layout.dim_of(axis)
    return "IRP".index(layout.kinds[axis]) if dim is None else PART + 1 + dim


def _kinds(layout: Layout) -> str:
    return layout.kinds.replace("R", "I")
