"""price: FLOPs, bytes of memory traffic, bytes kept and working bytes of one op under each of its strategies.

All figures are of one rank and one microbatch: the rank that has most, the microbatch with the most rows. What a
figure counts:

- FLOPs: matmuls, attention and convolutions as torch's flop counter has them; an axis divides them where its choice is
  a factor or a special. Backward: one forward's worth for every factor of the product that needs a gradient; attention
  recomputes its scores.
- Memory traffic: operands read and results written (a view moves nothing; a lookup reads the rows it takes); backward
  gradients of results and kept tensors read, gradients of operands written.
- Kept: what autograd keeps beyond operands and results (`saves`).
- Working memory: gradients of results and operands, and one of every kept intermediate, or, where that is more, the
  operands and results of forward that the op itself does not keep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.passes.divide_work import flops, is_recurrent
from autopar.passes.facts import Choice, Strategy, Value, fact, operand_nodes, value
from autopar.passes.layout import Layout, Mesh
from autopar.passes.rules.core import LOCALIZE
from autopar.passes.saves import Call, Saves, alias, call_of, observe, saves
from autopar.passes.strategy import share, strategy

__all__ = ["Prices", "Saves", "alias", "local_bytes", "prices", "saves"]

Array = NDArray[np.float64]
DTYPES = {torch.float64: "fp64", torch.complex128: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
PRODUCTS = {  # slots of the tensors that are multiplied; others (biases, addends) cost no FLOPs
    "addmm": (1, 2), "baddbmm": (1, 2), "addbmm": (1, 2), "linear": (0, 1), "bilinear": (0, 1, 2),
}  # fmt: skip
LOOKUPS = {"embedding", "index", "index_select", "gather", "take_along_dim"}  # read what they take, not the table


@dataclass(frozen=True)
class Prices:
    """One entry a strategy: FLOPs, bytes of memory traffic, bytes kept besides operands and results, working bytes.

    ``dtype``: whose peak FLOP/s the FLOPs run at: "fp32", "fp64", "bf16" or "fp16".
    """

    flops_forward: Array
    flops_backward: Array
    moved_forward: Array
    moved_backward: Array
    saved_new: Array
    transient: Array
    dtype: str


def local_bytes(v: Value, layout: Layout, mesh: Mesh) -> int:
    """Bytes that the rank with the largest piece holds of a tensor, in the microbatch with the most rows.

    >>> from autopar.passes.layout import Axis
    >>> v, mesh = Value((10, 4), torch.float32), Mesh((Axis("tp", 4), Axis("time", 3, (1, 3, 1))))
    >>> local_bytes(v, Layout.parse("S0 R", 2), mesh), local_bytes(v, Layout.parse("S1 S0", 2), mesh)
    (48, 24)
    """
    return v.dtype.itemsize * math.prod(layout.local_shape(v.shape, mesh, largest(mesh)))


@lru_cache(maxsize=1 << 10)
def largest(mesh: Mesh) -> tuple[int, ...]:
    """Coordinates of the largest piece: the first ranks have most, and the microbatch with the most rows."""
    return tuple(a.rows.index(max(a.rows)) if a.is_time else 0 for a in mesh.axes)


@lru_cache(maxsize=1 << 10)
def _shares(mesh: Mesh) -> tuple[float, ...]:
    """What one coordinate keeps of a dim that each axis cuts evenly."""
    return tuple(max(a.rows) / sum(a.rows) if a.is_time else 1 / a.size for a in mesh.axes)


def _divided(node: fx.Node, strategies: Sequence[Strategy], mesh: Mesh) -> Array:
    """The part of the whole op's work that the rank with most has under each strategy."""
    known: dict[tuple[int, Choice], float] = {}
    found = np.ones(len(strategies))
    for k, s in enumerate(strategies):
        for a, c in enumerate(s.choices):
            if c.kind in ("factor", "special"):
                if (a, c) not in known:
                    known[a, c] = share(node, c, mesh.axes[a])
                found[k] *= known[a, c]
    return found


def prices(node: fx.Node, strategies: Sequence[Strategy], mesh: Mesh) -> Prices:
    """Prices of an op of the annotated graph under each strategy (of ``mesh``)."""
    return _Op(node, strategies, mesh).prices()


class _Op:
    """One op under several strategies; every array has one entry a strategy."""

    def __init__(self, node: fx.Node, strategies: Sequence[Strategy], mesh: Mesh) -> None:
        self.node, self.strategies, self.mesh = node, strategies, mesh
        self.kept = saves(node)
        self.inputs = [value(o) for o in operand_nodes(node)]
        self.made = fact(node).values
        self.shares: dict[str, float] = {}
        self.uneven = _may_be_uneven(strategies, (*self.inputs, *self.made), mesh)
        self.zero = np.zeros(len(strategies))
        self.share_in = [self._share(v, (s.operands[i] for s in strategies)) for i, v in enumerate(self.inputs)]
        self.share_out = [
            self._share(v, (s.results[i] for s in strategies)) if v is not None else self.zero
            for i, v in enumerate(self.made)
        ]
        self.read = [v.nbytes * s for v, s in zip(self.inputs, self.share_in, strict=True)]
        self.written = [
            v.nbytes * s if v is not None else self.zero for v, s in zip(self.made, self.share_out, strict=True)
        ]

    def prices(self) -> Prices:
        new, flowing = self._new()
        forward, backward = self._flops()
        return Prices(
            flops_forward=forward,
            flops_backward=backward,
            moved_forward=self._moved_forward(),
            moved_backward=self._moved_backward(new),
            saved_new=new,
            transient=self._transient(flowing),
            dtype=self._dtype(),
        )

    def _share(self, v: Value, layouts: Any) -> Array:
        """The part of a whole tensor that the rank with most has in each layout."""
        out = np.empty(len(self.strategies))
        for k, layout in enumerate(layouts):
            if self.uneven and not layout.is_even(v.shape, self.mesh):
                out[k] = local_bytes(v, layout, self.mesh) / v.nbytes
                continue
            found = self.shares.get(layout.kinds)
            if found is None:
                cut = (s for s, kind in zip(_shares(self.mesh), layout.kinds, strict=True) if kind == "S")
                found = self.shares[layout.kinds] = math.prod(cut)
            out[k] = found
        return out

    def _sum(self, arrays: Sequence[Array]) -> Array:
        return sum(arrays, self.zero)

    def _dtype(self) -> str:
        tensors = [*self.inputs, *(v for v in self.made if v is not None)]
        floats = [v.dtype for v in tensors if v.dtype.is_floating_point or v.dtype.is_complex]
        return DTYPES.get(floats[0], "fp32") if floats else "fp32"

    def _flops(self) -> tuple[Array, Array]:
        whole = flops(self.node)
        name = self.node.target.__name__.split(".")[0] if whole else ""  # type: ignore[union-attr]
        if not whole:
            return self.zero, self.zero
        if "attention" in name:
            return self._attention(whole)
        forward = whole * _divided(self.node, self.strategies, self.mesh)
        if name.startswith("opaque"):  # backward begins with another forward
            return forward, 3 * forward * any(v.grad for v in self.inputs)
        if is_recurrent(self.node.target):
            return forward, 2 * forward * any(v.grad for v in self.inputs)
        factors = PRODUCTS.get(name, (0, 1) if name != "einsum" else tuple(range(len(self.inputs))))
        times = sum(self.inputs[i].grad for i in factors if i < len(self.inputs))
        return forward, forward * times

    def _attention(self, whole: float) -> tuple[Array, Array]:
        """Scores are as long as the query's pieces, their product with values as the result's; backward has three
        products of the first kind (one recomputes the scores, where these are not kept) and two of the second."""
        d, e = self.inputs[0].shape[-1], self.inputs[2].shape[-1]
        scores, mixed = whole * d / (d + e) * self.share_in[0], whole * e / (d + e) * self.share_out[0]
        if not any(v.grad for v in self.inputs[:3]):
            return scores + mixed, self.zero
        recomputed = 1 if self.kept.results else 0
        return scores + mixed, (2 + recomputed) * scores + 2 * mixed

    def _moved_forward(self) -> Array:
        if alias(self.node):
            return self.zero
        written = self._sum([w for w, a in zip(self.written, self.kept.aliases, strict=True) if a is None])
        read = dict(zip(operand_nodes(self.node), self.read, strict=True))
        if getattr(self.node.target, "__name__", "").split(".")[0] in LOOKUPS:
            table = max(read, key=lambda o: value(o).nbytes, default=None)
            read = {o: np.minimum(r, written) if o is table else r for o, r in read.items()}
        return written + self._sum(list(read.values()))

    def _gradients(self) -> tuple[Array, Array]:
        """Bytes of the gradients of results, and of operands."""
        results = self._sum([w for v, w in zip(self.made, self.written, strict=True) if v is not None and v.grad])
        operands = self._sum([r for v, r in zip(self.inputs, self.read, strict=True) if v.grad])
        return results, operands

    def _rearranges(self) -> bool:
        """A view that keeps all elements: so is its backward."""
        sizes = [math.prod(v.shape) for v in self.made if v is not None]
        return alias(self.node) and len(sizes) == 1 and sizes[0] == math.prod(self.inputs[0].shape)

    def _moved_backward(self, new: Array) -> Array:
        results, operands = self._gradients()
        if self._rearranges() or not any(v.grad for v in self.inputs):
            return self.zero
        kept = [self.read[i] for i in self.kept.operands] + [self.written[i] for i in self.kept.results]
        return results + operands + new + self._sum(kept)

    def _transient(self, new: Array) -> Array:
        if self._rearranges():
            return self.zero
        results, operands = self._gradients()
        loose = [w for i, w in enumerate(self.written) if i not in self.kept.results]
        for i, (o, r) in enumerate(zip(operand_nodes(self.node), self.read, strict=True)):
            if o.op == "call_function" and i not in self.kept.operands:
                loose.append(r)
        forward = self.zero if alias(self.node) else self._sum(loose)
        return np.maximum(forward, results + operands + new)

    def _new(self) -> tuple[Array, Array]:
        """Bytes kept besides operands and results, and of these the ones that a gradient flows through."""
        total, flowing = np.zeros(len(self.strategies)), np.zeros(len(self.strategies))
        if not self.kept.new:
            return total, flowing
        known: dict[tuple[Choice, ...], tuple[float, float]] = {}
        for k, s in enumerate(self.strategies):
            if s.choices not in known:
                kept = self._new_of(s)
                known[s.choices] = sum(b for b, _ in kept), sum(b for b, flows in kept if flows)
            total[k], flowing[k] = known[s.choices]
        return total, flowing

    def _new_of(self, s: Strategy) -> list[tuple[float, bool]]:
        """(bytes, flows) of each: an axis cuts those that its choice alone cuts. A choice with which the op keeps other
        tensors (attention that is no longer fused) is where counting starts."""
        cutting = [(a, c) for a, c in enumerate(s.choices) if c.kind in ("factor", "special")]
        base = [(a, c) for a, c in cutting if _cuts(self.node, self.mesh, [], a, c) is None]
        start = _alone(self.node, self.mesh, base)
        if start is None:
            start, base = self.kept, []
        sizes = [float(n.nbytes) for n in start.new]
        for axis, choice in cutting:
            if (axis, choice) not in base:
                cuts = _cuts(self.node, self.mesh, base, axis, choice)
                if cuts is None or len(cuts) != len(sizes):  # not to be seen: as the result
                    cuts = (any(v is not None and v.kinds[axis] == "S" for v in s.results),) * len(sizes)
                own = share(self.node, choice, self.mesh.axes[axis])
                sizes = [n * own if cut else n for n, cut in zip(sizes, cuts, strict=True)]
        return [(b, n.flows) for b, n in zip(sizes, start.new, strict=True)]


def _may_be_uneven(strategies: Sequence[Strategy], values: Sequence[Value | None], mesh: Mesh) -> bool:
    """Whether some layout of these strategies may cut unevenly."""
    sizes = [a.size for a in mesh.axes if not a.is_time]
    lengths = {n for v in values if v is not None for n in v.shape}
    odd = any(n % size for n in lengths for size in sizes)
    return odd or any(c.items for s in strategies for c in s.choices)


_CUTS: dict[tuple[Call, tuple[Choice, ...], Choice], tuple[bool, ...] | None] = {}


def _cuts(
    node: fx.Node, mesh: Mesh, base: list[tuple[int, Choice]], axis: int, choice: Choice
) -> tuple[bool, ...] | None:
    """Whether each tensor that the op keeps besides operands and results under ``base`` shrinks where ``choice`` cuts
    besides; None where others are kept then, or it cannot be seen. Asked once for all sizes of axes."""
    key = (call_of(node), tuple(c for _, c in base), choice)
    if key not in _CUTS:
        before, after = _alone(node, mesh, base), _alone(node, mesh, [*base, (axis, choice)])
        same = before is not None and after is not None and _kind(before) == _kind(after)
        pairs = zip(after.new, before.new, strict=True) if same and before and after else ()
        _CUTS[key] = tuple(a.nbytes < b.nbytes for a, b in pairs) if same else None
    return _CUTS[key]


def _kind(found: Saves) -> tuple[Any, ...]:
    return found.operands, found.results, len(found.new)


def _alone(node: fx.Node, mesh: Mesh, chosen: list[tuple[int, Choice]]) -> Saves | None:
    """What the op keeps where only these axes do anything; None where it cannot be seen."""
    axes = [a for a, _ in chosen]
    found = strategy(node, Mesh(tuple(mesh.axes[a] for a in axes)), [c for _, c in chosen], range(len(axes)))
    pieces = _pieces(node, found, Mesh(tuple(mesh.axes[a] for a in axes))) if found is not None else None
    return None if pieces is None or pieces.guessed else pieces


def _pieces(node: fx.Node, s: Strategy, mesh: Mesh) -> Saves:
    """What the op keeps of the largest pieces of a strategy."""
    at = largest(mesh)
    shapes = tuple(
        x.local_shape(value(o).shape, mesh, at) for o, x in zip(operand_nodes(node), s.operands, strict=True)
    )
    results = tuple(
        x.local_shape(v.shape, mesh, at) if v is not None and x is not None else None
        for v, x in zip(fact(node).values, s.results, strict=True)
    )
    try:
        args = _local_args(node, shapes, results)
    except (AssertionError, IndexError, ZeroDivisionError):  # a special's pieces are no call of the op itself
        return Saves((), (), guessed=True)
    return observe(call_of(node, shapes, args)).saves


def _local_args(
    node: fx.Node, operands: tuple[tuple[int, ...], ...], results: tuple[tuple[int, ...] | None, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments with literal sizes made local."""
    from autopar.passes.make_local import Sizes

    args, kwargs = tuple(node.args), dict(node.kwargs)
    localize = LOCALIZE.get(node.target)
    return localize(node, args, kwargs, Sizes(operands, results)) if localize is not None else (args, kwargs)
