"""Seconds of collectives over groups of ranks: inside a node by measured curves, between nodes by the lines of the
library's algorithms. Bytes count as in `autopar.solver.cost.collective`; they may be arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from autopar.errors import AutoparError
from autopar.solver.cost.communication import collective, share
from autopar.solver.cost.either import symbolic
from autopar.solver.cost.tables import Samples

DIRECT = ("all_to_all", "send")  # messages between pairs of ranks, which share no NIC of others


@dataclass(frozen=True)
class Line:
    """One algorithm and protocol between nodes: seconds to begin, of a hop inside a node and of one between nodes,
    and the fraction of the bus bandwidth that it reaches."""

    algorithm: str
    base: float
    inner: float
    outer: float
    fraction: float

    def latency(self, kind: str, ranks: int, nodes: int) -> float:
        """Seconds without bytes: 2 (n - 1) steps of a ring all-reduce, n - 1 of a gather or scatter, of which as many
        between nodes as there are nodes; a tree goes up and down, in each node along a chain.

        Source: NVIDIA/nccl src/graph/tuning.cc.
        """
        ways = 2 if kind == "all_reduce" else 1
        if self.algorithm == "tree":
            return self.base + 2 * ((ranks / nodes - 1) * self.inner + math.log2(nodes) * self.outer)
        return self.base + ways * ((ranks - nodes) * self.inner + (nodes - 1) * self.outer)


@dataclass(frozen=True)
class Lane:
    """One tier in plain numbers. ``wire``: bytes/s of one rank. By collective: ``bandwidth`` (bus bandwidth of full
    groups), ``latency``, ``curves`` (seconds by bytes, by ranks; they count before lines and wires)."""

    name: str
    spans: int | None
    wire: float
    bandwidth: Mapping[str, float]
    latency: Mapping[str, float]
    curves: Mapping[str, Mapping[int, Samples]] = field(default_factory=dict)
    rail_only: bool = False


@dataclass(frozen=True)
class Group:
    """``ranks`` of one collective, ``stride`` apart, on ``nodes`` blocks of the innermost tier; ``crossed``: tiers,
    innermost first."""

    ranks: int
    stride: int
    nodes: int
    crossed: tuple[Lane, ...]


@dataclass(frozen=True)
class Network:
    """The links of a cluster in plain numbers. Make one by ``Cluster.load(...).network()``.

    >>> rates, begin = {"all_gather": 300e9}, {"all_gather": 1e-5}
    >>> node = Lane("nvlink", spans=8, wire=450e9, bandwidth=rates, latency=begin)
    >>> network = Network("x", (node, Lane("nics", spans=None, wire=50e9, bandwidth=rates, latency=begin)))
    >>> [f"{network.seconds('all_gather', 8e9, size, stride):.4f} s" for size, stride in ((8, 1), (16, 1), (8, 8))]
    ['0.0233 s', '0.0250 s', '0.1400 s']
    """

    name: str
    lanes: tuple[Lane, ...]
    lines: tuple[Line, ...] = ()

    def seconds(self, kind: str, nbytes: Any, size: int, stride: int = 1, concurrent: int = 1) -> Any:
        """Seconds of a collective over ``size`` ranks, ``stride`` apart; 0 for one rank. For symbols, the straight
        `line`.

        All groups of the axis run at once, each rank with its share of its node's NICs. ``concurrent``: how many
        collectives the same ranks run at once (each gets its part of the links). Raises AutoparError for a kind the
        tier has no figure of.
        """
        if symbolic(nbytes):
            latency, rate = self.line(kind, size, stride)
            return collective(kind, size, nbytes * concurrent, latency, rate)
        nbytes = np.asarray(nbytes, dtype=float)
        if size <= 1:
            return (nbytes * 0.0)[()]
        group, moved = self.group(kind, size, stride), nbytes * concurrent
        lane = group.crossed[-1]
        if group.nodes == 1 or kind in lane.curves:
            found = self._measured(kind, moved, size, lane)
        elif kind in DIRECT:
            found = self._direct(kind, moved, group)
        else:
            found = self._between(kind, moved, group)
        return np.where(nbytes > 0, found, 0.0)[()]

    def line(self, kind: str, size: int, stride: int) -> tuple[float, float]:
        """(seconds of the smallest message, bus bandwidth in bytes/s at large sizes): `seconds` as a straight line."""
        group = self.group(kind, size, stride)
        lane, curves = group.crossed[-1], group.crossed[-1].curves.get(kind)
        if not curves:
            if group.nodes > 1:
                return self._latency(kind, group), self._bandwidth(kind, group)
            return lane.latency[kind], lane.bandwidth[kind]
        ranks = sorted(curves)
        near = min(ranks, key=lambda n: abs(math.log(n / max(size, 1))))
        (latency, rate), (whole_latency, whole_rate) = (_ends(kind, n, curves[n]) for n in (near, ranks[-1]))
        return lane.latency[kind] * latency / whole_latency, lane.bandwidth[kind] * rate / whole_rate

    def group(self, kind: str, size: int, stride: int) -> Group:
        """What an axis of ``size`` ranks, ``stride`` apart, crosses."""
        node = self.lanes[0].spans
        nodes = 1 if node is None else max(1, math.ceil(size / max(1, node // stride)))
        last = next((i for i, t in enumerate(self.lanes) if t.spans is None or size * stride <= t.spans), -1)
        crossed = self.lanes[: last + 1] if last >= 0 else self.lanes
        if kind not in crossed[-1].bandwidth:
            legal, tier = ", ".join(crossed[-1].bandwidth), crossed[-1].name
            raise AutoparError(f"cluster {self.name}: tier {tier} has no figure for {kind!r}. Legal: {legal}.")
        return Group(size, stride, nodes, crossed)

    def _bandwidth(self, kind: str, group: Group) -> float:
        """Bus bandwidth across nodes. A group with k ranks in each block of a tier crosses the wires of the next k
        times only. (8 NICs a node, one a GPU: a group of one GPU a node gets 46-50 GB/s, one NIC's rate;
        nccl-tests#290, #267.)"""
        node, last = group.crossed[0], group.crossed[-1]
        rate, reached = last.bandwidth[kind], 1.0
        if self.lines and kind not in DIRECT:
            full = last.bandwidth.get("all_reduce", rate)  # what a wire gives is a property of no collective
            reached = min(1.0, full / (last.wire * (node.spans or 1)))
            if group.stride < (node.spans or 1):
                rate = min(rate, node.bandwidth[kind])
        for inner, outer in pairwise(group.crossed):
            rate = min(rate, max(1, (inner.spans or 1) // group.stride) * outer.wire * reached)
        return rate

    def _latency(self, kind: str, group: Group) -> float:
        """Seconds of the smallest message across nodes."""
        first = group.crossed[-1].latency[kind]
        if kind == "send":
            return first
        if not self.lines:
            return first * max(1.0, math.log2(group.nodes))
        return self._extra(kind, group) + min(x.latency(kind, group.ranks, group.nodes) for x in self._lines(kind))

    def _lines(self, kind: str) -> list[Line]:
        return [x for x in self.lines if x.algorithm == "ring" or kind in ("all_reduce", "all_to_all")]

    def _extra(self, kind: str, group: Group) -> float:
        """What the smallest message between two full nodes takes beyond the lines."""
        node = self.lanes[0].spans or 1
        least = min(x.latency(kind, 2 * node, 2) for x in self._lines(kind))
        return max(0.0, group.crossed[-1].latency[kind] - least)

    def _measured(self, kind: str, nbytes: Any, size: int, lane: Lane) -> Any:
        """The measured curves of a tier; between two numbers of ranks, linear in their logarithm."""
        curves = lane.curves.get(kind, {})
        if not curves:
            return lane.latency[kind] + share(kind, size) * nbytes / lane.bandwidth[kind]
        ranks = sorted(curves)
        low = max((n for n in ranks if n <= size), default=ranks[0])
        high = min((n for n in ranks if n >= size), default=ranks[-1])
        first, last = (curves[n].above(nbytes) * share(kind, size) / share(kind, n) for n in (low, high))
        part = math.log(size / low) / math.log(high / low) if low < size < high else 0.0
        return first + part * (last - first)

    def _between(self, kind: str, nbytes: Any, group: Group) -> Any:
        """Rings and trees across nodes: the fastest line; links inside a node bound them too."""
        rate, moved = self._bandwidth(kind, group), share(kind, group.ranks) * nbytes
        if not self.lines:
            return self._latency(kind, group) + moved / rate
        ways = [(x.latency(kind, group.ranks, group.nodes), x.fraction * rate) for x in self._lines(kind)]
        return self._extra(kind, group) + np.minimum.reduce([latency + moved / r for latency, r in ways])

    def _direct(self, kind: str, nbytes: Any, group: Group) -> Any:
        """Messages between pairs of ranks: each rank's own share of the wire carries what leaves its node, while the
        rest moves inside. Where only rails connect nodes, what leaves crosses the node to its rail before."""
        lane, inner, ranks = group.crossed[-1], self.lanes[0], group.ranks
        if kind == "send":
            return self._latency(kind, group) + nbytes / self._bandwidth(kind, group)
        near = max(1, min(ranks, (inner.spans or 1) // group.stride))
        away, home = (ranks - near) / ranks * nbytes, (near - 1) / ranks * nbytes
        if lane.rail_only:
            home = home + away * (near - 1) / near
        across = away / min(lane.bandwidth[kind], lane.wire)
        return self._latency(kind, group) + np.maximum(across, home / inner.bandwidth[kind])


def _ends(kind: str, ranks: int, curve: Samples) -> tuple[float, float]:
    """Seconds of a curve's first point, bus bandwidth of its last."""
    return math.exp(curve.values[0]), share(kind, ranks) * math.exp(curve.places[-1] - curve.values[-1])
