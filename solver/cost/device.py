"""Seconds of a device's kernels, from its measured tables. Sizes may be numbers or numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from autopar.errors import AutoparError
from autopar.solver.cost.either import symbolic
from autopar.solver.cost.tables import Grid, Samples

BACKWARD = 2.5  # FLOPs of attention's backward over those of forward: five matmuls to two


class AttentionSizes(Protocol):
    """One attention: scores of ``queries`` by ``keys`` for ``heads`` heads of ``batch`` rows."""

    @property
    def batch(self) -> Any: ...
    @property
    def heads(self) -> Any: ...
    @property
    def queries(self) -> Any: ...
    @property
    def keys(self) -> Any: ...
    @property
    def head(self) -> Any: ...
    @property
    def dtype(self) -> str: ...
    @property
    def causal(self) -> bool: ...


@dataclass(frozen=True)
class Device:
    """A device in plain numbers. ``rates``: burst FLOP/s that the best matmuls reach, by dtype; ``peaks``: those of
    the data sheet; ``bandwidth``: bytes/s that large kernels reach; ``launch_s``: seconds of the shortest kernel;
    ``sustained``: the fraction of burst rates that a long run holds; ``unaligned``: what is left of a matmul's rate
    where n or k is no multiple of 8; ``scores``: of one whose k is the width of a head. Make one by
    ``Cluster.load(...).chip.device()``.

    >>> device = Device("x", {"bf16": 8e14}, {"bf16": 1e15}, {"bf16": 2}, 3e12, launch_s=5e-6)
    >>> f"{device.matmul_s(1, 8192, 8192, 8192):.6f} s, {device.memory_s(3e9):.6f} s"
    '0.001374 s, 0.001005 s'
    """

    name: str
    rates: Mapping[str, float]
    peaks: Mapping[str, float]
    itemsizes: Mapping[str, int]
    bandwidth: float
    launch_s: float = 0.0
    sustained: float = 1.0
    unaligned: float = 1.0
    scores: float = 1.0
    grids: Mapping[str, Grid] = field(default_factory=dict)
    attentions: Mapping[tuple[str, int, bool, bool], Samples] = field(default_factory=dict)
    copy: Samples | None = None
    kernels: Mapping[str, Samples] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """FLOP/s of the data sheet."""
        return self.peaks[dtype]

    def matmul_s(self, batch: Any, m: Any, n: Any, k: Any, dtype: str = "bf16") -> Any:
        """Seconds of ``[batch, m, k] x [batch, k, n]`` in a long run.

        The measured table by shape, no faster than the best rate and than memory. A dtype without a table takes
        another's: its time scales with the ratio of the peaks, and its k counts in bytes (so do fp8's measured rates).
        The clock of a long run is lower than that of a burst: what exceeds a launch is divided by ``sustained``. For
        symbols, the launch and the FLOPs at the best rate.
        """
        flops, itemsize = 2.0 * batch * m * n * k, self.itemsizes[dtype]
        if symbolic(flops):
            return self.launch_s + flops / (self.rates[dtype] * self.sustained)
        least = np.maximum(flops / self.rates[dtype], self.launch_s)
        if self.grids:
            table = dtype if dtype in self.grids else next(iter(self.grids))
            wide = itemsize / self.itemsizes[table]
            same = self.grids[table].at(batch, m, n, k * wide)
            least = np.maximum(least, same * (self.peaks[table] / self.peaks[dtype] / wide))
        if self.unaligned < 1:
            least = least / np.where((np.mod(n, 8) == 0) & (np.mod(k, 8) == 0), 1.0, self.unaligned)
        moved = batch * (m * k + k * n + m * n) * itemsize / self.bandwidth
        return np.maximum(self._held(least), moved)[()]

    def attention_s(self, kernel: str, attention: AttentionSizes, *, backward: bool = False) -> Any:
        """Seconds of one fused attention in a long run. Raises AutoparError for a kernel without a curve.

        Rates are interpolated between the measured heads and lengths (the geometric mean of queries and keys), and
        taken from the ends beyond them.
        """
        a = attention
        flops = (2.0 if a.causal else 4.0) * a.batch * a.heads * a.queries * a.keys * a.head
        heads = sorted(h for name, h, c, b in self.attentions if (name, c, b) == (kernel, a.causal, backward))
        if not heads:
            legal = ", ".join(sorted({name for name, *_ in self.attentions})) or "none"
            raise AutoparError(f"device {self.name}: no figures for attention kernel {kernel!r}. Legal: {legal}.")
        length = np.sqrt(np.asarray(a.queries, dtype=float) * a.keys)
        rates = np.array([self.attentions[kernel, h, a.causal, backward].at(length) for h in heads])
        rate = _between(np.log(heads), np.log(rates), np.log(np.asarray(a.head, dtype=float)))
        rate = np.exp(rate) * self.rates[a.dtype] / self.rates["bf16"]
        return self._held(np.maximum((BACKWARD if backward else 1.0) * flops / rate, self.launch_s))[()]

    def memory_s(self, nbytes: Any) -> Any:
        """Seconds of a kernel that reads and writes ``nbytes``: a launch and the bytes, or the measured curve."""
        if self.copy is not None and not symbolic(nbytes):
            return self.copy.above(nbytes)[()]
        return self.launch_s + nbytes / self.bandwidth

    def kernel_s(self, op: str, nbytes: Any) -> Any:
        """Seconds of an op by name that reads and writes ``nbytes``: its own curve, or that of any kernel."""
        if op in self.kernels:
            return self.kernels[op].above(nbytes)[()]
        return self.memory_s(nbytes)

    def _held(self, burst: Any) -> Any:
        """Seconds in a long run of what takes ``burst`` alone."""
        idle = np.minimum(burst, self.launch_s)
        return idle + (burst - idle) / self.sustained


def _between(places: Any, values: Any, place: Any) -> Any:
    """Linear between rows of ``values`` (one for each of ``places``), the first or last beyond."""
    if len(places) == 1:
        return values[0]
    inside = np.clip(place, places[0], places[-1])
    i = np.clip(np.searchsorted(places, inside, side="right") - 1, 0, len(places) - 2)
    part = (inside - places[i]) / (places[i + 1] - places[i])
    low, high = (np.take_along_axis(values, np.broadcast_to(j, values.shape[1:])[None], 0)[0] for j in (i, i + 1))
    return low + part * (high - low)
