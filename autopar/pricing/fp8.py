"""Linears in fp8: what of a unit changes when its matmuls with weights run in eight bits.

Attention, norms, the router of experts, embedding and head stay as they are. Weights are held in fp8 and once more
transposed: as many bytes as in bf16.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.solver.work import Op, Unit

HALVES = ("bf16", "fp16")


def in_fp8(unit: Unit, keeps: bool = True) -> Unit:
    """The unit with its linears in fp8; ``keeps``: for backward they keep the activation as cast, one byte an element.

    >>> from autopar.solver.work import Piece, Product
    >>> x = Piece(0, (4, 8), 2)
    >>> linear = Op("aten.linear", "", "matmul", (Product(1, 4, 8, 8, "bf16"),), (), (), None, (x,), (), (x,))
    >>> (op,) = in_fp8(Unit("layer", (linear,), (), frozenset())).ops
    >>> op.forward[0].dtype, op.kept[0].nbytes
    ('fp8', 32)
    """
    entries = [_cast(e, keeps) if isinstance(e, Op) and e.kind == "matmul" else e for e in unit.entries]
    made = {_twin(p.key) for op in unit.ops for p in op.kept}
    return replace(unit, entries=tuple(entries), made=unit.made | made)


def _cast(op: Op, keeps: bool) -> Op:
    """A matmul in fp8, if it is one of 16 bits."""
    if any(p.dtype not in HALVES for p in op.forward):
        return op
    forward, backward_input, backward_weight = (
        tuple(replace(p, dtype="fp8") for p in way) for way in (op.forward, op.backward_input, op.backward_weight)
    )
    kept = tuple(p if p.weight or not keeps else replace(p, key=_twin(p.key), itemsize=1) for p in op.kept)
    return replace(op, forward=forward, backward_input=backward_input, backward_weight=backward_weight, kept=kept)


def _twin(key: int) -> int:
    """The key of what a storage is cast to."""
    return -1 - key


__all__ = ["in_fp8"]
