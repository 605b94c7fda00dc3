"""
What a model does, piece by piece: the matmuls, the tensors read, written and kept, and the moves between devices.

Nothing here knows a device. Sizes are ints for one run, or sympy expressions in the sizes of a family of runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import sympy

Size: TypeAlias = int | sympy.Expr

KINDS = ("matmul", "attention", "conv", "pointwise", "reduction", "norm", "loss", "lookup", "copy", "view", "random")


@dataclass(frozen=True)
class Piece:
    """
    What one device holds of a tensor.

    Args:
        key: The storage: views of one storage share it.
        shape: The local shape.
        itemsize: Bytes of one element.
        floating: Whether a gradient can flow through it.
        weight: A parameter, or made of parameters alone: never counted as an activation.

    Examples:
        >>> Piece(0, (2, 3), 4).nbytes
        24
        >>> Piece(0, (2, sympy.Symbol("s")), 2).nbytes
        4*s
    """

    key: int
    shape: tuple[Size, ...]
    itemsize: int
    floating: bool = True
    weight: bool = False

    @property
    def elements(self) -> Size:
        """How many numbers it holds."""
        return product(self.shape)

    @property
    def nbytes(self) -> Size:
        """How many bytes it holds."""
        return self.elements * self.itemsize


@dataclass(frozen=True)
class Product:
    """
    One matmul, ``[batch, m, k] x [batch, k, n]``.

    Examples:
        >>> Product(1, 2, 3, 4, "bf16").flops
        48
    """

    batch: Size
    m: Size
    n: Size
    k: Size
    dtype: str

    @property
    def flops(self) -> Size:
        """Two for each multiply-add."""
        return product((2, self.batch, self.m, self.n, self.k))


@dataclass(frozen=True)
class Attend:
    """
    One scaled dot product attention: `queries` by `keys` scores for each of `heads` heads of each of `batch` rows.

    Examples:
        >>> Attend(1, 2, 2, 8, 8, 4, "bf16", causal=True).flops
        1024
    """

    batch: Size
    heads: Size
    kv_heads: Size
    queries: Size
    keys: Size
    head: Size
    dtype: str
    causal: bool

    @property
    def flops(self) -> Size:
        """Forward: two matmuls, half of both when causal."""
        return product((2 if self.causal else 4, self.batch, self.heads, self.queries, self.keys, self.head))


@dataclass(frozen=True)
class Op:
    """
    One operator on one device.

    Args:
        name: Such as ``"aten.linear"``.
        module: The path of the module it came from, such as ``"model.layers.0.mlp"``.
        kind: One of :data:`KINDS`.
        forward: Its matmuls.
        backward_input: Those of the gradients of its activations.
        backward_weight: Those of the gradients of its weights.
        attend: The attention, if it is one (its matmuls are then in none of the three).
        reads: What the forward reads (nothing for a view).
        writes: What the forward writes (nothing for a view).
        kept: What the backward keeps of it.
        grad: Whether it has a backward.
    """

    name: str
    module: str
    kind: str
    forward: tuple[Product, ...] = ()
    backward_input: tuple[Product, ...] = ()
    backward_weight: tuple[Product, ...] = ()
    attend: Attend | None = None
    reads: tuple[Piece, ...] = ()
    writes: tuple[Piece, ...] = ()
    kept: tuple[Piece, ...] = ()
    grad: bool = True


@dataclass(frozen=True)
class Move:
    """
    One change of layout, forward and backward.

    Args:
        module: The path of the module that it is for.
        axis: The mesh axis it runs on.
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, or ``""`` where nothing moves.
        piece: The tensor, counted as nccl-tests does: one device's for ``all_to_all``, else whole over the axis.
        backward: The kind that its gradient takes.
        backward_piece: The gradient, counted alike; None where nothing moves.
        weight: Whether a parameter moves.
        source: What a device holds before.
        result: What a device holds afterwards.
        again: Backward makes the result once more, out of its source, and nothing keeps it until then.
    """

    module: str
    axis: str
    kind: str
    piece: Piece
    backward: str
    backward_piece: Piece | None
    weight: bool
    source: Piece
    result: Piece
    again: bool = False


@dataclass(frozen=True)
class Unit:
    """
    One unit of the model: what is before its layers, one of them, or what comes after.

    Args:
        name: Such as ``"layers.0"``.
        entries: Its operators and moves, in order.
        parameters: Its parameters by path, as a device uses them.
        made: The storages first written in this unit.
    """

    name: str
    entries: tuple[Op | Move, ...]
    parameters: tuple[tuple[str, Piece], ...]
    made: frozenset[int]

    @property
    def ops(self) -> Iterator[Op]:
        """Its operators."""
        return (entry for entry in self.entries if isinstance(entry, Op))

    @property
    def moves(self) -> Iterator[Move]:
        """Its moves."""
        return (entry for entry in self.entries if isinstance(entry, Move))


def gathered_again(unit: Unit, axis: str = "tp") -> Unit:
    """The unit as Megatron-LM runs it: of an activation that an axis gathers, backward keeps the piece, and gathers it
    a second time.

    >>> piece, whole = Piece(0, (4,), 2), Piece(1, (8,), 2)
    >>> move = Move("", "tp", "all_gather", whole, "reduce_scatter", whole, False, piece, whole)
    >>> linear = Op("aten.linear", "", "matmul", kept=(whole,))
    >>> again = gathered_again(Unit("layer", (move, linear), (), frozenset({1})))
    >>> [m.again for m in again.moves], [op.kept[0].nbytes for op in again.ops]
    ([True], [8])
    """
    gathers = [m for m in unit.moves if m.kind == "all_gather" and m.axis == axis and not m.weight]
    sources = {m.result.key: m.source for m in gathers}
    kept = {p.key for op in unit.ops for p in op.kept}
    entries = tuple(
        replace(entry, kept=tuple(sources.get(p.key, p) for p in entry.kept))
        if isinstance(entry, Op)
        else replace(entry, again=entry in gathers and entry.result.key in kept)
        for entry in unit.entries
    )
    return replace(unit, entries=entries)


def product(sizes: tuple[Size, ...]) -> Size:
    """The product of all sizes; 1 of none."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return total
