"""What is known of hardware: single figures and measured tables, each with its source. SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from autopar.errors import AutoparError
from autopar.solver.cost import Device, Grid, Lane, Samples

KERNEL = "sdpa"  # the attention kernel that a measured file has: what torch takes itself
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
ITEMSIZE = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
INSTEAD = {
    "fp64": ("fp32",),
    "tf32": ("fp32",),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
}


@dataclass(frozen=True)
class Figure:
    """One number about hardware and where it comes from. ``verified``: read in the source, not inferred or assumed."""

    value: float
    source: str
    verified: bool = True


@dataclass(frozen=True)
class Curve:
    """Measured points [bytes, seconds], bytes ascending: a collective over a group, or a kernel that moves memory."""

    points: tuple[tuple[float, float], ...]
    source: str
    verified: bool = True

    def samples(self) -> Samples:
        """As arrays to interpolate."""
        return Samples.of(self.points)


@dataclass(frozen=True)
class Matmuls:
    """FLOP/s of ``[batch, m, k] x [batch, k, n]`` on a grid: one rate for each batch, m, n, k; k runs fastest."""

    batch: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    points: tuple[float, ...]
    source: str
    verified: bool = True

    def grid(self) -> Grid:
        """Seconds by shape, to interpolate."""
        return Grid.of((self.batch, self.m, self.n, self.k), self.points)


@dataclass(frozen=True)
class Attention:
    """FLOP/s of an attention kernel by length: points [queries or keys, FLOP/s]. Causal FLOPs count half, backward's
    2.5 times those of forward."""

    kernel: str
    head: int
    causal: bool
    backward: bool
    points: tuple[tuple[float, float], ...]
    source: str
    verified: bool = True


@dataclass(frozen=True)
class Reserved:
    """Memory that tensors cannot have. ``context``: bytes of the driver, the libraries and the buffers of
    communicators; ``fragmentation``: what the allocator holds beyond live tensors, a fraction of their bytes."""

    context: Figure
    fragmentation: Figure


@dataclass(frozen=True)
class Power:
    """``cap``: W that the board may draw; ``idle``: W that do not depend on the clock; ``sustained``: the fraction of
    the burst rate of matmuls and attention that a long run holds, by cap in W.

    Between caps the clock follows the cube root of the power above idle: dynamic power is proportional to frequency
    times the square of voltage, and voltage to frequency.

    >>> cap, idle, held = Figure(500, "a"), Figure(100, "b"), Figure(0.8, "c")
    >>> round(Power(cap, idle, {"700": held}).fraction, 3)
    0.699
    """

    cap: Figure
    idle: Figure
    sustained: Mapping[str, Figure]

    @property
    def fraction(self) -> float:
        """The fraction held at ``cap``; that of the nearest cap that has one, scaled."""
        nearest = min(self.sustained, key=lambda w: abs(float(w) - self.cap.value))
        scale = (self.cap.value - self.idle.value) / (float(nearest) - self.idle.value)
        return min(1.0, self.sustained[nearest].value * float(scale ** (1 / 3)))


@dataclass(frozen=True)
class Chip:
    """One rank's device. ``memory`` in bytes, ``memory_bandwidth`` in bytes/s, ``flops`` dense FLOP/s by dtype.

    ``efficiency``: fraction of the peak FLOP/s ("matmul"; "matmul_fp8" where it differs) and of the bandwidth
    ("memory") that is reached at best; of the rate of matmuls what is left where a width is no multiple of 8
    ("unaligned"), where k is the width of a head ("scores"), and beside a collective ("beside").

    ``launch``: seconds that any kernel takes at least. ``matmul``, ``attention``, ``copy``: what is measured of kernels
    by shape and size (``copy``: bytes read and written); ``kernels``: the same of single ops, by name (``aten.gelu``).
    """

    kind: Literal["cpu", "cuda"]
    name: str
    memory: Figure
    memory_bandwidth: Figure
    flops: Mapping[str, Figure]
    efficiency: Mapping[str, Figure]
    reserved: Reserved | None = None
    power: Power | None = None
    launch: Figure | None = None
    matmul: Mapping[str, Matmuls] = field(default_factory=dict)
    attention: tuple[Attention, ...] = ()
    copy: Curve | None = None
    kernels: Mapping[str, Curve] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """FLOP/s of the data sheet. A dtype without a figure takes the next of `INSTEAD`; fp64 half of fp32's."""
        if dtype in self.flops:
            return self.flops[dtype].value
        other = next((d for d in INSTEAD.get(dtype, ()) if d in self.flops), None)
        if other is None:
            raise AutoparError(f"chip {self.name}: no FLOP/s for {dtype!r}. Legal: {', '.join(DTYPES)}.")
        return self.flops[other].value / (2 if dtype == "fp64" else 1)

    def burst_rate(self, dtype: str) -> float:
        """FLOP/s that the best matmuls reach for a moment."""
        best = self.efficiency.get(f"matmul_{dtype}", self.efficiency["matmul"])
        return self.peak(dtype) * best.value

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s that large matmuls hold in a long run."""
        return self.burst_rate(dtype) * self.sustained

    @property
    def sustained(self) -> float:
        """The fraction of burst rates that a long run holds."""
        return self.power.fraction if self.power else 1.0

    @property
    def memory_rate(self) -> float:
        """Bytes/s of device memory that large kernels reach."""
        return self.memory_bandwidth.value * self.efficiency["memory"].value

    @property
    def context(self) -> float:
        """Bytes of the driver, the libraries and the buffers of communicators."""
        return self.reserved.context.value if self.reserved else 0.0

    def held(self, live: float) -> float:
        """Bytes of the device that are taken where ``live`` bytes of tensors are: with fragmentation and context."""
        if self.reserved is None:
            return live
        return live * (1 + self.reserved.fragmentation.value) + self.reserved.context.value

    def _left(self, name: str) -> float:
        return self.efficiency[name].value if name in self.efficiency else 1.0

    def device(self) -> Device:
        """The seconds of this chip's kernels."""
        return Device(
            name=self.name,
            rates={d: self.burst_rate(d) for d in DTYPES},
            itemsizes=ITEMSIZE,
            bandwidth=self.memory_rate,
            launch_s=self.launch.value if self.launch else 0.0,
            sustained=self.sustained,
            unaligned=self._left("unaligned"),
            scores=self._left("scores"),
            peaks={d: self.peak(d) for d in DTYPES},
            grids={dtype: table.grid() for dtype, table in self.matmul.items()},
            attentions={(a.kernel, a.head, a.causal, a.backward): Samples.of(a.points) for a in self.attention},
            copy=self.copy.samples() if self.copy else None,
            kernels={op: curve.samples() for op, curve in self.kernels.items()},
        )


@dataclass(frozen=True)
class Link:
    """What one collective gets of a tier. ``bandwidth``: bus bandwidth of a rank in bytes/s at large sizes, counted as
    nccl-tests does; ``latency``: seconds of the smallest message, between two full nodes for a tier between nodes.
    Both are those of the largest group measured; ``curves``: seconds by size, by number of ranks in the group."""

    bandwidth: Figure
    latency: Figure
    curves: Mapping[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True)
class Tier:
    """Links of one speed. ``spans``: ranks that reach each other over it (None: all). ``bandwidth``: what the wire
    gives one rank, bytes/s and direction (where ranks share a NIC, the share of each); ``collectives``: what is
    measured of it. ``oversubscription``: how much more its ranks can send than its switches carry; ``rail_only``:
    only ranks of the same place in their nodes reach each other over it. ``overlap``: of the seconds of collectives
    that compute need not wait for, the fraction that passes beside it; in the rest nothing is computed (None: 1)."""

    name: str
    spans: int | None
    bandwidth: Figure
    collectives: Mapping[str, Link]
    oversubscription: Figure | None = None
    rail_only: bool = False
    overlap: Figure | None = None

    @property
    def wire(self) -> float:
        """Bytes/s of one rank when all send at once."""
        return self.bandwidth.value / self._shared

    @property
    def _shared(self) -> float:
        return self.oversubscription.value if self.oversubscription else 1.0

    def lane(self) -> Lane:
        """In plain numbers."""
        links = self.collectives
        return Lane(
            name=self.name,
            spans=self.spans,
            wire=self.wire,
            bandwidth={k: x.bandwidth.value / self._shared for k, x in links.items()},
            latency={k: x.latency.value for k, x in links.items()},
            curves={k: {int(n): c.samples() for n, c in x.curves.items()} for k, x in links.items() if x.curves},
            rail_only=self.rail_only,
        )


@dataclass(frozen=True)
class Protocol:
    """One way in which a library sends between nodes: seconds to begin, of a hop inside a node and of one between
    nodes, and the fraction of the bus bandwidth that it reaches."""

    algorithm: Literal["ring", "tree"]
    name: str
    base: float
    inner: float
    outer: float
    fraction: float
    source: str
    verified: bool = True


def ascending(points: tuple[tuple[float, float], ...]) -> bool:
    """Whether points have ascending places and positive values."""
    return all(a[0] < b[0] for a, b in pairwise(points)) and all(x > 0 and y > 0 for x, y in points)
