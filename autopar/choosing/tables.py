"""Seconds and bytes of one tensor between layouts, as arrays: what factors are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from autopar.choosing.wiring import Tensor
from autopar.passes.changes import costs
from autopar.passes.facts import Value
from autopar.passes.layout import Layout, Mesh
from autopar.passes.price import local_bytes
from autopar.solver.problem import EXPOSED, HIDDEN, RESOURCES, Array

UNHIDDEN = 1e-3  # of hidden seconds, taken as exposed so that ties are broken
Layouts = Sequence[Layout]
Flags = npt.NDArray[np.bool_]


class Tables:
    """Of one mesh, seconds of all ``microbatches``."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.plain = mesh, mesh.without_wires()
        self.microbatches = 1 if mesh.time is None else mesh.axes[mesh.time].size
        self._seconds: dict[tuple[Value, tuple[Layout, ...], tuple[Layout, ...]], Array] = {}

    def changes(self, t: Tensor, sources: Layouts, targets: Layouts) -> Array:
        """[sources, targets, resources]: of a weight, and of what depends on weights alone, hidden."""
        table = np.zeros((len(sources), len(targets), len(RESOURCES)))
        seconds = self._changed(t.value, sources, targets)
        table[..., EXPOSED] = seconds * (UNHIDDEN if t.weight else 1.0)
        if t.weight:
            table[..., HIDDEN] = seconds
        return table

    def again(self, t: Tensor, sources: Layouts, targets: Layouts) -> Array:
        """Seconds of the changes made once more: forward alone."""
        return self._changed(replace(t.value, grad=False), sources, targets)

    def bytes(self, v: Value, layouts: Layouts) -> Array:
        """Of the largest piece, in the microbatch with the most rows."""
        return np.array([local_bytes(v, x, self.plain) for x in layouts], np.float64)

    def copies(self, v: Value, sources: Layouts, targets: Layouts, *, free: bool) -> Array:
        """Bytes of each target; ``free``: none where it is the source's own storage, which counts elsewhere."""
        held = np.broadcast_to(self.bytes(v, targets), (len(sources), len(targets)))
        return np.where(self.same(sources, targets), 0.0, held) if free else held.copy()

    def same(self, sources: Layouts, targets: Layouts) -> Flags:
        """Whether a target is the storage of the source."""
        return np.array([[_kinds(a) == _kinds(b) and a.dims == b.dims for b in targets] for a in sources], bool)

    def collective(self, sources: Layouts, targets: Layouts) -> Flags:
        """Whether ranks exchange what they hold on the way."""
        return np.array([[self._exchanged(a, b) for b in targets] for a in sources], bool)

    def _exchanged(self, source: Layout, target: Layout) -> bool:
        """An axis without P and S holds all of a tensor: every layout is made of that in place."""
        cut = [a for a in self.mesh.space if source.kinds[a] in "SP"]
        return any(source.kinds[a] != target.kinds[a] or source.dim_of(a) != target.dim_of(a) for a in cut)

    def _changed(self, v: Value, sources: Layouts, targets: Layouts) -> Array:
        key = (v, tuple(sources), tuple(targets))
        if key not in self._seconds:
            self._seconds[key] = costs(sources, targets, v, self.mesh) * self.microbatches
        return self._seconds[key]


def _kinds(layout: Layout) -> str:
    return layout.kinds.replace("R", "I")
