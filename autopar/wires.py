"""The wire of a mesh axis: what its collectives cost on this cluster, as the layouts' shortest paths read it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autopar.cluster import Cluster
from autopar.passes.layout import Mesh, Wire
from autopar.solver.cost import share

COPIED = 2  # bytes of device memory moved for each byte of a local copy: one read, one written


def wire_of(cluster: Cluster, size: int, stride: int) -> Wire:
    """Seconds of the four collectives over an axis of ``size`` ranks, ``stride`` apart: (latency, per byte), and
    seconds per byte of a local copy. Bytes count as in `autopar.solver.cost.collective`.

    >>> wire = wire_of(Cluster.load("h100-dgx"), size=8, stride=1)
    >>> seconds = wire.all_gather[0] + wire.all_gather[1] * 1e9
    >>> f"{seconds:.6f} s"
    '0.002496 s'
    """
    lines = {}
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        latency, bandwidth = cluster.link(kind, size, stride)
        lines[kind] = (latency, share(kind, size) / bandwidth) if size > 1 else (0.0, 0.0)
    overlap = cluster.tier_of(size, stride).overlap
    busy = 0.0 if overlap is None else 1.0 - overlap.value
    return Wire(**lines, copy=COPIED / cluster.chip.memory_rate, busy=busy)


def with_wires(mesh: Mesh, strides: Iterable[int], cluster: Cluster) -> Mesh:
    """The mesh with this cluster's wires. ``strides``: of its axes, in ranks."""
    pairs = zip(mesh.axes, strides, strict=True)
    return Mesh(tuple(a if a.is_time else replace(a, wire=wire_of(cluster, a.size, stride)) for a, stride in pairs))
