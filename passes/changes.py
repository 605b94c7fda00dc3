"""Changes of layout: the cheapest way from one layout to another.

Over several axes the cheapest way may pass through other layouts (P,R -> R,P is a slice, an all-reduce of an eighth and
a gather), so the price of a change is a shortest path, and that path is what is emitted. All of it is read from one
`Closure` per tensor: what is priced is what is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.passes.closure import Profile, closure, profile
from autopar.passes.facts import Value
from autopar.passes.layout import Layout, Mesh
from autopar.passes.moves import COLLECTIVES, OVER_TIME, Step, moves, price, settle


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
    ways = closure(profile(source, v, mesh), profile(target, v, mesh), v, mesh)
    return None if ways is None else ways.steps(source, target)


@lru_cache(maxsize=1 << 17)
def cost(source: Layout, target: Layout, v: Value, mesh: Mesh) -> float:
    """Seconds of the cheapest way, forward and (where a gradient flows) backward, infinite where there is none."""
    return float(costs((source,), (target,), v, mesh)[0, 0])


def costs(sources: Sequence[Layout], targets: Sequence[Layout], v: Value, mesh: Mesh) -> NDArray[np.float64]:
    """`cost` of all pairs: seconds, [len(sources), len(targets)].

    >>> from autopar.passes.layout import Axis
    >>> import torch
    >>> mesh, v = Mesh((Axis("tp", 2),)), Value((8,), torch.float32, True)
    >>> layouts = [Layout.parse(text, 1) for text in ("I", "R", "P")]
    >>> [[bool(c == 0) for c in row] for row in costs(layouts, layouts, v, mesh)[:1]]
    [[True, False, False]]
    """
    found = np.full((len(sources), len(targets)), np.inf)
    columns = _grouped(targets, v, mesh)
    for mine, (rows, at) in _grouped(sources, v, mesh).items():
        for other, (places, to) in columns.items():
            ways = closure(mine, other, v, mesh)
            if ways is not None:
                index = ways.structure.index
                found[np.ix_(rows, places)] = ways.seconds[np.ix_([index[x] for x in at], [index[x] for x in to])]
    return found


def _grouped(layouts: Sequence[Layout], v: Value, mesh: Mesh) -> dict[Profile, tuple[list[int], list[Layout]]]:
    """Places and settled layouts by profile."""
    groups: dict[Profile, tuple[list[int], list[Layout]]] = {}
    for i, layout in enumerate(layouts):
        settled = settle(layout, v, mesh)
        places, members = groups.setdefault(profile(settled, v, mesh), ([], []))
        places.append(i)
        members.append(settled)
    return groups


__all__ = ["COLLECTIVES", "OVER_TIME", "Step", "cost", "costs", "moves", "path", "price", "settle"]
