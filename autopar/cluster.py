"""The cluster: a device, how many of them, and the links between them. Every figure carries its source.

Clusters are JSON files (``autopar/clusters/*.json``, or the user's own); SI units: bytes, seconds, FLOP/s, bytes/s.

>>> cluster = Cluster.load("h100-dgx", nodes=64)
>>> cluster.ranks, cluster.device, cluster.tier_of(size=8, stride=1).name, cluster.tier_of(size=8, stride=8).name
(512, 'cuda', 'nvlink', 'network')
>>> cluster.link("all_gather", size=64, stride=8)  # one rank a node: one NIC
(0.000206, 46250000000.0)
>>> Cluster.local(ranks=4).ranks
4
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from autopar.cluster_checks import check
from autopar.errors import AutoparError
from autopar.hardware import Chip, Figure, Protocol, Tier
from autopar.schema import fail, nearest, read, read_file
from autopar.solver.cost import Line, Network
from autopar.solver.cost.network import DIRECT

SCHEMA = 2
FOLDER = Path(__file__).parent / "clusters"


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal ranks. ``tiers``: fastest first; the last one reaches every rank. ``protocols``: how its
    library sends between nodes; without any, seconds are a latency by the logarithm of the nodes, and bytes.

    Raises AutoparError, in `load`, for an unknown name, and with the JSON path for a file that is not legal.
    """

    name: str
    ranks_per_node: int
    chip: Chip
    tiers: tuple[Tier, ...]
    nodes: int = 1
    protocols: tuple[Protocol, ...] = ()
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
        """Bytes of live tensors that one rank has room for: its memory less the context, over the fragmentation."""
        reserved = self.chip.reserved
        if reserved is None:
            return self.memory
        return int((self.memory - reserved.context.value) / (1 + reserved.fragmentation.value))

    def tier_of(self, size: int, stride: int) -> Tier:
        """The tier that the slowest hop of an axis crosses: ``size`` ranks, ``stride`` apart, inside a block of
        their product."""
        return next((t for t in self.tiers if t.spans is None or size * stride <= t.spans), self.tiers[-1])

    def network(self) -> Network:
        """The seconds of collectives on these links."""
        return self._network

    @cached_property
    def _network(self) -> Network:
        lines = tuple(Line(p.algorithm, p.base, p.inner, p.outer, p.fraction) for p in self.protocols)
        return Network(self.name, tuple(t.lane() for t in self.tiers), lines)

    def link(self, kind: str, size: int, stride: int) -> tuple[float, float]:
        """Latency in seconds and bus bandwidth in bytes/s of a collective (one of `KINDS`) over an axis: the line of
        `network`."""
        return self._network.line(kind, size, stride)

    def part(self, ranks: int) -> Cluster:
        """The cluster of ``ranks`` of its ranks that stand side by side, as one stage of a pipeline has them: whole
        nodes, or a part of one. Raises AutoparError where they would straddle two nodes."""
        if ranks % self.ranks_per_node == 0 and self.ranks % ranks == 0:
            return replace(self, nodes=ranks // self.ranks_per_node)
        if self.ranks_per_node % ranks == 0:
            return replace(self, nodes=1, ranks_per_node=ranks)
        each = self.ranks_per_node
        fit = [n for n in range(1, self.ranks + 1) if self.ranks % n == 0 and (n % each == 0 or each % n == 0)]
        legal = ", ".join(f"pp={self.ranks // n}" for n in reversed(fit))
        raise AutoparError(
            f"cluster {self.name}: a stage of {ranks} ranks would straddle nodes of {each}. Legal: {legal}."
        )

    def with_memory(self, nbytes: int) -> Cluster:
        """With so many bytes of live tensors in the `limit` of a rank."""
        reserved, source = self.chip.reserved, f"given: room for {nbytes} bytes of live tensors"
        whole = nbytes
        if reserved is not None:
            whole = math.ceil(nbytes * (1 + reserved.fragmentation.value) + reserved.context.value)
        return replace(self, chip=replace(self.chip, memory=Figure(whole, source)))

    def with_fabric(self, gbps_per_node: float) -> Cluster:
        """With NICs of ``gbps_per_node`` Gbit/s a node in all: every rank's share of the outermost tier, and what its
        collectives reach, scale alike."""
        last, source = self.tiers[-1], f"given: {gbps_per_node:g} Gbit/s a node"
        wire = gbps_per_node * 1e9 / 8 / self.ranks_per_node
        if not wire > 0:
            raise AutoparError(f"cluster {self.name}: a fabric of {gbps_per_node:g} Gbit/s. Legal: more than 0.")
        scale = wire / last.bandwidth.value
        links = {
            k: replace(x, bandwidth=Figure(x.bandwidth.value * scale, f"{source}; {x.bandwidth.source}", False))
            for k, x in last.collectives.items()
        }
        tier = replace(last, bandwidth=Figure(wire, source), collectives=links)
        return replace(self, tiers=(*self.tiers[:-1], tier))

    def with_node(self, ranks: int) -> Cluster:
        """With ``ranks`` of the same chips a node, each with its own share of the NICs: what the ranks of a node reach
        together between nodes scales with them."""
        (node, *between), scale = self.tiers, ranks / self.ranks_per_node
        if scale == 1 or not between:
            return replace(self, ranks_per_node=ranks)
        last, source = between[-1], f"given: {ranks} ranks a node"
        links = {
            k: x
            if k in DIRECT
            else replace(x, bandwidth=Figure(x.bandwidth.value * scale, f"{source}; {x.bandwidth.source}", False))
            for k, x in last.collectives.items()
        }
        tiers = (replace(node, spans=ranks), *between[:-1], replace(last, collectives=links))
        return replace(self, ranks_per_node=ranks, tiers=tiers)

    def with_power_cap(self, watts: float) -> Cluster:
        """With boards capped at ``watts`` W. Raises AutoparError where the chip's power is not known."""
        power = self.chip.power
        if power is None or not watts > power.idle.value:
            legal = f"more than {power.idle.value:g}" if power else f"none: {self.chip.name} states no power"
            raise AutoparError(f"cluster {self.name}: a power cap of {watts:g} W. Legal: {legal}.")
        capped = replace(power, cap=Figure(watts, f"given: {watts:g} W"))
        return replace(self, chip=replace(self.chip, power=capped))

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
    if isinstance(data, dict) and "like" in data:
        data = _like(data, where)
    cluster = read(Cluster, data, where=where)
    check(cluster, where)
    return cluster


def _like(data: dict[str, Any], where: str) -> object:
    """A file that says how it differs from a shipped cluster."""
    name = data["like"]
    if name not in shipped():
        raise fail(where, "$.like", f"{name!r} is no shipped cluster. Legal: {', '.join(shipped())}.")
    base = read_file(FOLDER / f"{name}.json", who="cluster")
    return _over(base, {k: v for k, v in data.items() if k != "like"})


def _over(base: Any, data: Any) -> Any:
    """``data`` laid over ``base``, object by object; a figure (with a source) replaces a figure."""
    if not isinstance(base, dict) or not isinstance(data, dict) or "source" in data:
        return data
    return base | {k: _over(base.get(k), v) for k, v in data.items()}


def _host_memory() -> int:
    """Bytes of physical memory; on a platform that does not say, 8 GiB."""
    if sys.platform == "win32":
        return 8 << 30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
