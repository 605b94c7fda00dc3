"""The cluster: a device, how many of them, and the links between them. Every figure carries its source.

Clusters are JSON files (``autopar/clusters/*.json``, or the user's own); SI units: bytes, seconds, FLOP/s, bytes/s.

>>> cluster = Cluster.load("h100-dgx", nodes=64)
>>> cluster.ranks, cluster.device, cluster.tier_of(size=8, stride=1).name, cluster.tier_of(size=8, stride=8).name
(512, 'cuda', 'nvlink', 'network')
>>> cluster.link("all_gather", size=64, stride=8)  # one rank a node: one NIC
(0.00028199999999999997, 50000000000.0)
>>> Cluster.local(ranks=4).ranks
4
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from autopar.errors import AutoparError
from autopar.schema import fail, nearest, read, read_file, write

SCHEMA = 1
FOLDER = Path(__file__).parent / "clusters"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
NEEDED = COLLECTIVES[:-1]  # of every tier
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
INSTEAD = {
    "fp64": ("fp32",),
    "tf32": ("fp32",),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
}
EFFICIENCIES = ("matmul", "memory")


@dataclass(frozen=True)
class Figure:
    """One number about hardware and where it comes from. ``verified``: read in the source, not inferred or assumed."""

    value: float
    source: str
    verified: bool = True


@dataclass(frozen=True)
class Chip:
    """One rank's device. ``memory`` in bytes, ``memory_bandwidth`` in bytes/s, ``flops`` dense FLOP/s by dtype.

    ``efficiency``: fraction of the peak FLOP/s ("matmul") and of the bandwidth ("memory") that is reached.
    ``reserved``: bytes of memory that tensors cannot have (the driver's context, communication buffers).
    """

    kind: Literal["cpu", "cuda"]
    name: str
    memory: Figure
    memory_bandwidth: Figure
    flops: Mapping[str, Figure]
    efficiency: Mapping[str, Figure]
    reserved: Figure | None = None

    def peak(self, dtype: str) -> float:
        """FLOP/s of the data sheet. A dtype without a figure takes the next of `INSTEAD`; fp64 half of fp32's."""
        if dtype in self.flops:
            return self.flops[dtype].value
        other = next((d for d in INSTEAD.get(dtype, ()) if d in self.flops), None)
        if other is None:
            raise AutoparError(f"chip {self.name}: no FLOP/s for {dtype!r}. Legal: {', '.join(DTYPES)}.")
        return self.flops[other].value / (2 if dtype == "fp64" else 1)

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s that large matmuls reach."""
        return self.peak(dtype) * self.efficiency["matmul"].value

    @property
    def memory_rate(self) -> float:
        """Bytes/s of device memory that large kernels reach."""
        return self.memory_bandwidth.value * self.efficiency["memory"].value


@dataclass(frozen=True)
class Link:
    """What one collective gets of a tier. ``bandwidth``: bus bandwidth of a rank in bytes/s at large sizes, counted as
    nccl-tests does; ``latency``: seconds of the smallest message."""

    bandwidth: Figure
    latency: Figure


@dataclass(frozen=True)
class Tier:
    """Links of one speed. ``spans``: ranks that reach each other over it (None: all). ``bandwidth``: what the wire
    gives one rank, bytes/s and direction; ``collectives``: what is measured of it."""

    name: str
    spans: int | None
    bandwidth: Figure
    collectives: Mapping[str, Link]


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal ranks. ``tiers``: fastest first; the last one reaches every rank.

    Raises AutoparError, in `load`, for an unknown name, and with the JSON path for a file that is not legal.
    """

    name: str
    ranks_per_node: int
    chip: Chip
    tiers: tuple[Tier, ...]
    nodes: int = 1
    schema: int = SCHEMA

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The device type that tensors live on."""
        return self.chip.kind

    @property
    def memory(self) -> int:
        """Bytes of memory of one rank."""
        return int(self.chip.memory.value)

    @property
    def limit(self) -> int:
        """Bytes of one rank that tensors may take: its memory less what is reserved."""
        return self.memory - (int(self.chip.reserved.value) if self.chip.reserved else 0)

    def tier_of(self, size: int, stride: int) -> Tier:
        """The tier that the slowest hop of an axis crosses: ``size`` ranks, ``stride`` apart, inside a block of
        their product."""
        return next((t for t in self.tiers if t.spans is None or size * stride <= t.spans), self.tiers[-1])

    def link(self, kind: str, size: int, stride: int) -> tuple[float, float]:
        """Latency in seconds and bus bandwidth in bytes/s of a collective (one of `COLLECTIVES`) over an axis.

        Measured bandwidths are those of full groups of the tier inside. A group with k ranks in each of those crosses
        the outer wires k times only: ``k * tier.bandwidth`` bounds it on every tier it crosses. (8 NICs a node, one a
        GPU: a group of one GPU a node gets 46-50 GB/s, one NIC's rate; nccl-tests#290, #267.) The latency of a
        collective grows with the base-2 logarithm of the nodes in the group, as a tree's does
        (NVIDIA/nccl src/graph/tuning.cc).
        """
        tier = self.tier_of(size, stride)
        if kind not in tier.collectives:
            legal = ", ".join(tier.collectives)
            raise AutoparError(f"cluster {self.name}: tier {tier.name} has no figure for {kind!r}. Legal: {legal}.")
        link = tier.collectives[kind]
        latency, bandwidth = link.latency.value, link.bandwidth.value
        for inner, outer in zip(self.tiers, self.tiers[1 : self.tiers.index(tier) + 1]):
            together = max(1, (inner.spans or 1) // stride)
            bandwidth = min(bandwidth, together * outer.bandwidth.value)
        if kind != "send":
            latency *= max(1.0, math.log2(self._nodes_of(size, stride)))
        return latency, bandwidth

    def _nodes_of(self, size: int, stride: int) -> int:
        """Nodes (blocks of the innermost tier) that one group of an axis touches."""
        node = self.tiers[0].spans
        return 1 if node is None else max(1, math.ceil(size / max(1, node // stride)))

    @staticmethod
    def local(ranks: int | None = None) -> Cluster:
        """CPU ranks of this machine (default: one a core); each gets an equal share of its memory."""
        if ranks is None:
            ranks = os.cpu_count() or 1
        if ranks < 1:
            raise AutoparError(f"cluster local: ranks={ranks} is not a number of ranks. Legal: 1 or more.")
        cluster = Cluster.load("local")
        memory = Figure(_host_memory() // ranks, f"physical memory of this machine over {ranks} ranks")
        return replace(cluster, ranks_per_node=ranks, chip=replace(cluster.chip, memory=memory))

    @staticmethod
    def load(name: str | Path, nodes: int = 1) -> Cluster:
        """A shipped cluster by name, or one from a JSON file (a path, ending in ``.json``)."""
        if nodes < 1:
            raise AutoparError(f"cluster {name}: nodes={nodes} is not a number of nodes. Legal: 1 or more.")
        path = Path(name)
        if path.suffix != ".json":
            if str(name) not in shipped():
                meant = nearest(str(name), shipped()) or "."
                legal = ", ".join(shipped())
                raise AutoparError(f"cluster {name}: unknown{meant} Legal: {legal}, or a file ending in .json.")
            path = FOLDER / f"{name}.json"
        cluster = from_json(read_file(path, who="cluster"), where=str(name))
        return replace(cluster, nodes=cluster.nodes * nodes) if nodes != 1 else cluster

    @staticmethod
    def of(cluster: Cluster | str | Path) -> Cluster:
        """What a user may give for a cluster: the value itself, a name, or a path."""
        if isinstance(cluster, Cluster):
            return cluster
        if not isinstance(cluster, (str, Path)):
            raise AutoparError(
                f"cluster: a {type(cluster).__name__} is no cluster. Give Cluster.local(ranks=4), a name of "
                f"{', '.join(shipped())}, or a JSON file."
            )
        return Cluster.local() if cluster == "local" else Cluster.load(cluster)


def shipped() -> list[str]:
    """Names of the clusters that come with autopar."""
    return sorted(p.stem for p in FOLDER.glob("*.json"))


def from_json(data: object, *, where: str) -> Cluster:
    """A cluster from plain JSON values, validated. Raises AutoparError with the JSON path of what is wrong."""
    if isinstance(data, dict) and isinstance(data.get("schema"), int) and data["schema"] > SCHEMA:
        raise fail(
            where, "$.schema", f"{data['schema']} is newer than this autopar reads. Legal: {SCHEMA}; update autopar."
        )
    cluster = read(Cluster, data, where=where)
    for name in ("nodes", "ranks_per_node"):
        if getattr(cluster, name) < 1:
            raise fail(where, f"$.{name}", f"{getattr(cluster, name)} is not legal. Legal: 1 or more.")
    _check_figures(write(cluster), where, "$")
    _check_chip(cluster.chip, where)
    _check_tiers(cluster.tiers, where)
    return cluster


def _check_chip(chip: Chip, where: str) -> None:
    _check_keys(chip.flops, DTYPES, ("fp32",), where, "$.chip.flops")
    _check_keys(chip.efficiency, EFFICIENCIES, EFFICIENCIES, where, "$.chip.efficiency")
    for name, figure in chip.efficiency.items():
        if figure.value > 1:
            raise fail(
                where,
                f"$.chip.efficiency.{name}.value",
                f"{figure.value:g} is not a fraction. Legal: above 0, at most 1.",
            )
    if chip.reserved is not None and chip.reserved.value >= chip.memory.value:
        legal = f"less than {chip.memory.value:g}, the memory"
        raise fail(where, "$.chip.reserved.value", f"{chip.reserved.value:g} leaves nothing. Legal: {legal}.")


def _check_tiers(tiers: tuple[Tier, ...], where: str) -> None:
    if not tiers or tiers[-1].spans is not None:
        raise fail(where, "$.tiers", "must end in a tier that reaches every rank (spans: null).")
    inner = 1
    for i, tier in enumerate(tiers):
        _check_keys(tier.collectives, COLLECTIVES, NEEDED, where, f"$.tiers[{i}].collectives")
        if i < len(tiers) - 1:
            if tier.spans is None:
                raise fail(where, f"$.tiers[{i}].spans", "null is for the last tier. Legal: a number of ranks.")
            if tier.spans < 2 * inner or tier.spans % inner:
                legal = "2 or more" if inner == 1 else f"a multiple of {inner}, the tier inside it, and more"
                raise fail(where, f"$.tiers[{i}].spans", f"{tier.spans} is not legal. Legal: {legal}.")
            inner = tier.spans


def _check_keys(
    found: Mapping[str, object], legal: tuple[str, ...], needed: tuple[str, ...], where: str, path: str
) -> None:
    for key in found:
        if key not in legal:
            raise fail(where, path, f"unknown key {key!r}{nearest(key, legal) or '.'} Legal: {', '.join(legal)}.")
    for key in needed:
        if key not in found:
            raise fail(where, path, f"the key {key!r} is missing. Legal: {', '.join(legal)}.")


def _check_figures(value: object, where: str, path: str) -> None:
    """Every figure is positive and has a source."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            _check_figures(item, where, f"{path}[{i}]")
    elif isinstance(value, dict):
        if "source" in value and "value" in value:
            if not value["value"] > 0:
                raise fail(where, f"{path}.value", f"{value['value']} is not legal. Legal: more than 0.")
            if not value["source"].strip():
                raise fail(where, f"{path}.source", "is empty. Say where the figure comes from.")
            return
        for key, item in value.items():
            _check_figures(item, where, f"{path}.{key}")


def _host_memory() -> int:
    """Bytes of physical memory; on a platform that does not say, 8 GiB."""
    if sys.platform == "win32":
        return 8 << 30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
