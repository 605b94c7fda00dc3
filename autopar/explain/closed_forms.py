"""Closed forms of what one microbatch costs one rank: FLOPs, bytes kept and bytes communicated of a unit, in the
symbols of the model and the mesh (`autopar.pricing.symbols.SYMBOLS`), or as numbers where its sizes are.

>>> from autopar.pricing.symbols import reference_units
>>> layer = reference_units("llama", tp=True, sp=True)["layer"]
>>> forward_flops(layer)
2*b*s*(3*ffn*h + 2*h*head*heads + 2*h*head*kv_heads + head*heads*s)/tp
>>> moved_bytes(layer)
{('tp', 'all_gather'): 8*b*h*s, ('tp', 'reduce_scatter'): 8*b*h*s}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import sympy

from autopar.solver.cost import device
from autopar.solver.work import Move, Op, Product, Size, Unit

BACKWARD = sympy.Rational(device.BACKWARD)


def total(sizes: Iterable[Size]) -> Size:
    """The sum of sizes, factored; 0 of none."""
    found = sum(sizes)
    return sympy.factor(found) if isinstance(found, sympy.Expr) else found


def forward_flops(unit: Unit) -> Size:
    """FLOPs of a unit's matmuls and attention, forward."""
    return total(size for op in unit.ops for size in op_flops(op)[:1])


def backward_flops(unit: Unit) -> Size:
    """FLOPs of the gradients of activations and weights; attention makes its scores once more."""
    return total(size for op in unit.ops for size in op_flops(op)[1:])


def op_flops(op: Op) -> tuple[Size, Size]:
    """FLOPs of an op, forward and backward."""
    attended = op.attend.flops if op.attend is not None else 0
    forward = sum((p.flops for p in op.forward), attended)
    back: tuple[Product, ...] = (*op.backward_input, *op.backward_weight)
    return forward, sum((p.flops for p in back), BACKWARD * attended if op.grad else 0)


def kept_bytes(unit: Unit) -> Size:
    """Bytes of activations that backward needs of a unit, each storage once."""
    return total(nbytes for _, nbytes in kept_by_op(unit))


def kept_by_op(unit: Unit) -> list[tuple[Op, Size]]:
    """Bytes of activations that each op keeps; what several keep counts for the first."""
    known: set[int] = set()
    found = []
    for op in unit.ops:
        new = {p.key: p.nbytes for p in op.kept if not p.weight and p.key not in known}
        known |= new.keys()
        found.append((op, total(new.values())))
    return found


def moved_bytes(unit: Unit) -> dict[tuple[str, str], Size]:
    """Bytes of activations communicated, forward and backward, by axis and collective; counted as nccl-tests does."""
    found: dict[tuple[str, str], list[Size]] = defaultdict(list)
    for move in unit.moves:
        for kind, nbytes in ways(move):
            found[move.axis, kind].append(nbytes)
    return {key: total(sizes) for key, sizes in found.items()}


def parameters(unit: Unit) -> Size:
    """Elements of the parameters that a rank computes a unit with."""
    return total(piece.elements for _, piece in unit.parameters)


def ways(move: Move) -> list[tuple[str, Size]]:
    """The collectives of a move of activations and their bytes, forward and backward."""
    return [way for way in both_ways(move) if way[0]]


def both_ways(move: Move) -> tuple[tuple[str, Size], tuple[str, Size]]:
    """Collective and bytes, forward and backward; "" where a way has none, or what moves is a parameter."""
    kind, back = ("", "") if move.weight else (move.kind, move.backward)
    return (kind, move.piece.nbytes), (back, move.backward_piece.nbytes if move.backward_piece is not None else 0)


def totals(unit: Unit) -> Mapping[str, Size]:
    """A unit's closed forms by what they count."""
    moved = {f"{kind} over {axis}, bytes": nbytes for (axis, kind), nbytes in moved_bytes(unit).items()}
    return {
        "parameters": parameters(unit),
        "FLOPs forward": forward_flops(unit),
        "FLOPs backward": backward_flops(unit),
        "bytes kept": kept_bytes(unit),
        **moved,
    }
