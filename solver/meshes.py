"""The meshes that are tried: every way to arrange the ranks along a few axes that keeps to the tiers of the cluster.

An axis is (size, stride): ``size`` ranks, ``stride`` apart. A mesh lists its axes outermost first; each axis is as
wide as all those inside it together. Roles are free (which axis shards what is the solver's choice), so an order of
axes matters only where it puts them on other wires.

>>> meshes(8)
(((8, 1),), ((2, 4), (4, 1)), ((4, 2), (2, 1)))
>>> meshes(8, wire=lambda size, stride: "the same everywhere")  # (4, 2) is (2, 4) with its axes swapped
(((8, 1),), ((2, 4), (4, 1)))
>>> len(meshes(64, (8,))), meshes(64, (8,))[3]
(6, ((8, 8), (8, 1)))
>>> meshes(24, (8,))  # an axis of 12 or of 3 neighbours would straddle a node
(((24, 1),), ((3, 8), (8, 1)), ((6, 4), (4, 1)), ((12, 2), (2, 1)))
>>> microbatch_counts(12)
(1, 2, 3, 4, 6, 12)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from math import isqrt

Mesh = tuple[tuple[int, int], ...]
MOST_MICROBATCHES = 4096
"""More are not tried: a step would be mostly latency."""


def meshes(
    ranks: int,
    spans: tuple[int, ...] = (),
    *,
    wire: Callable[[int, int], Hashable] | None = None,
    most: int = 2,
) -> tuple[Mesh, ...]:
    """All meshes of ``ranks`` ranks with at most ``most`` axes, none of one rank; fewest axes first.

    ``spans``: ranks that each inner tier reaches; a stride that neither divides a span nor is a multiple of it is left
    out, since some groups would cross the tier's edge and some not. ``wire(size, stride)``: what an axis is made of;
    of meshes that differ in the order of their axes alone, the first is kept.
    """
    assert ranks >= 1 and most >= 1
    kept: dict[Hashable, Mesh] = {}
    for count in range(min(most, ranks - 1) + 1):
        for sizes in _factorisations(ranks, count):
            mesh = _with_strides(sizes)
            if all(_keeps_to(stride, span) for _, stride in mesh for span in spans):
                key: Hashable = mesh if wire is None else _kind(mesh, wire)
                kept.setdefault(key, mesh)
    return tuple(kept.values())


def microbatch_counts(batch: int, most: int = MOST_MICROBATCHES) -> tuple[int, ...]:
    """How many equal microbatches a global batch of ``batch`` rows can be cut into: its divisors up to ``most``,
    ascending."""
    assert batch >= 1
    return tuple(m for m in range(1, min(batch, most) + 1) if batch % m == 0)


def _factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """``number`` as a product of ``count`` ordered factors, each at least 2."""
    if count == 0:
        if number == 1:
            yield ()
        return
    for first in _divisors(number)[1:]:
        yield from ((first, *rest) for rest in _factorisations(number // first, count - 1))


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _with_strides(sizes: tuple[int, ...]) -> Mesh:
    axes: list[tuple[int, int]] = []
    stride = 1
    for size in reversed(sizes):
        axes.insert(0, (size, stride))
        stride *= size
    return tuple(axes)


def _keeps_to(stride: int, span: int) -> bool:
    return span % stride == 0 or stride % span == 0


def _kind(mesh: Mesh, wire: Callable[[int, int], Hashable]) -> Hashable:
    """What does not change where axes swap places: how many there are of each size and wire."""
    axes = [(size, wire(size, stride)) for size, stride in mesh]
    return frozenset((axis, axes.count(axis)) for axis in axes)
