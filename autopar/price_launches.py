"""Seconds of the kernels of a step (`dry_run`) on a device whose single kernels are measured (`autopar profile`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.dry_run import Launch
from autopar.hardware import KERNEL
from autopar.passes.price import DTYPES
from autopar.solver.cost import KINDS
from autopar.solver.work import Attend

NOTHING = ("prim", "profiler")  # namespaces of what is no kernel
INSIDE = {  # what our own ops do, by the bytes of their first operand, as kernels and collectives
    "autopar.vocabulary_cross_entropy": ("aten.mean", "aten.add", "aten.exp", "aten.mean", "all_reduce", "all_reduce"),
}


@dataclass(frozen=True)
class AxisSpan:
    """Ranks of one mesh axis: how many, and how far apart."""

    size: int
    stride: int


class Prices:
    """Seconds of launches on ``cluster``; ``axes`` by the name of their group."""

    def __init__(self, cluster: Cluster, axes: Mapping[str, AxisSpan]) -> None:
        self.device, self.network, self.axes = cluster.chip.device(), cluster.network(), axes

    def seconds(self, launches: Iterable[Launch]) -> tuple[float, float]:
        """(compute, communication)."""
        compute = moved = 0.0
        for launch in launches:
            a, b = self.of(launch)
            compute, moved = compute + a, moved + b
        return compute, moved

    def of(self, x: Launch) -> tuple[float, float]:
        """Of one: (compute, communication)."""
        namespace, name = x.op.split(".")
        if namespace in NOTHING:
            return 0.0, 0.0
        kind = next((k for k in KINDS if name.removeprefix("start_").startswith(k)), None)
        if kind is not None:
            return 0.0, self._moved(x, kind)
        if x.op in INSIDE:
            return self._inside(x)
        if not x.nbytes:
            return self.device.launch_s, 0.0
        return max(self._kernel(x, name), self.device.launch_s), 0.0

    def _kernel(self, x: Launch, name: str) -> float:
        dtype = DTYPES.get(x.dtype, "fp32")
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            a, b = x.shapes[-2:]
            product = self.device.matmul_s(math.prod(a[:-2]), a[-2], b[-1], a[-1], dtype)
            return float(product + (self.device.kernel_s("aten.copy_", 2 * x.written) if "add" in name else 0.0))
        if "attention" in name:
            return self._attention(x, name, dtype)
        return float(self.device.kernel_s(x.op, x.nbytes))

    def _attention(self, x: Launch, name: str, dtype: str) -> float:
        q, k, _ = x.shapes[1:4] if name.endswith("backward") else x.shapes[:3]
        causal = any(a is True for a in x.literals)
        attend = Attend(math.prod(q[:-3]), q[-3], k[-3], q[-2], k[-2], q[-1], dtype, causal)
        return float(self.device.attention_s(KERNEL, attend, backward=name.endswith("backward")))

    def _moved(self, x: Launch, kind: str) -> float:
        axis = next(self.axes[a] for a in x.literals if isinstance(a, str) and a in self.axes)
        nbytes = x.written if kind == "all_gather" else x.read
        return float(self.network.seconds(kind, nbytes, axis.size, axis.stride))

    def _inside(self, x: Launch) -> tuple[float, float]:
        whole = math.prod(x.shapes[0]) * x.dtype.itemsize
        axis = next(self.axes[a] for a in x.literals if isinstance(a, str) and a in self.axes)
        compute = moved = 0.0
        for part in INSIDE[x.op]:
            if part in KINDS:
                moved += float(self.network.seconds(part, whole // x.shapes[0][-1], axis.size, axis.stride))
            else:
                compute += float(self.device.kernel_s(part, 2 * whole))
        return compute, moved


__all__ = ["AxisSpan", "Prices"]
