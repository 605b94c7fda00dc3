"""A dense layer's MLP as a mixture of experts, as Megatron-LM lays it out, in closed form.

Every token goes to `topk` of `experts` equal experts, in equal numbers; a rank of the expert axis holds its share of
them. So the MLP's ops take `topk` times the rows, its products are as many as a rank has experts, and rows travel to
their experts and back by an all-to-all. Tensor ranks cut each expert as they cut the dense MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import sympy

from autopar.solver.work import Move, Op, Piece, Product, Size, Unit, product

EXPERTS, TOPK, EP = (sympy.Symbol(name, positive=True, integer=True) for name in ("experts", "topk", "ep"))
HELD: Size = EXPERTS / EP  # experts of a rank
SHARE: Size = TOPK / HELD  # rows of one of them, of each row that comes in
FP32, INT64 = 4, 8


def with_experts(layer: Unit) -> Unit:
    """The layer with its MLP as experts. Symbols ``experts``, ``topk`` and ``ep`` join those of its sizes."""
    first, last = _span(layer)
    inside = layer.entries[first : last + 1]
    taken, made = _ends(inside)
    keys = count(1 + max(p.key for p in _pieces(layer)))
    module = next(e.module for e in inside if _in_mlp(e.module)).rpartition(".")[0]
    router = _Router(taken, module, keys)
    sent, received, done, returned = (replace(_more(p), key=next(keys)) for p in (taken, taken, made, made))
    renamed = {taken.key: received.key, made.key: done.key}
    entries = (
        *layer.entries[:first],
        *router.ops,
        Op("aten.index_select", f"{module}.dispatch", "copy", reads=(taken,), writes=(sent,), kept=(router.places,)),
        _sent(f"{module}.dispatch", sent, received),
        *(_of_experts(e, renamed) for e in inside),
        _sent(f"{module}.combine", done, returned),
        Op(
            "aten.mul", f"{module}.combine", "pointwise",
            reads=(returned, router.chosen), writes=(made,), kept=(returned, router.chosen),
        ),
        *layer.entries[last + 1 :],
    )  # fmt: skip
    parameters = tuple(
        (name.replace(".mlp.", ".mlp.experts."), _more(piece)) if _in_mlp(name) else (name, piece)
        for name, piece in layer.parameters
    )
    new = {p.key for p in (sent, received, done, returned, *(p for op in router.ops for p in (*op.writes, *op.kept)))}
    return replace(
        layer,
        entries=entries,
        parameters=(*parameters, (f"{module}.router.weight", router.weight)),
        made=layer.made | (new - {taken.key}),
    )


class _Router:
    """The scores of each token for each expert, and the choice of the best; ``ops`` in order."""

    def __init__(self, taken: Piece, module: str, keys: Iterator[int]) -> None:
        *rows, width = taken.shape
        total, path = product(tuple(rows)), f"{module}.router"
        self.weight = Piece(next(keys), (EXPERTS, width), taken.itemsize, weight=True)
        scores = Piece(next(keys), (*rows, EXPERTS), FP32)
        likely = replace(scores, key=next(keys))
        self.chosen = Piece(next(keys), (*rows, TOPK), FP32)
        self.places = Piece(next(keys), (*rows, TOPK), INT64, floating=False)
        linear = Op(
            "aten.linear", path, "matmul",
            forward=(Product(1, total, EXPERTS, width, "fp32"),),
            backward_input=(Product(1, total, width, EXPERTS, "fp32"),),
            backward_weight=(Product(1, EXPERTS, width, total, "fp32"),),
            reads=(taken, self.weight), writes=(scores,), kept=(taken, self.weight),
        )  # fmt: skip
        softmax = Op("aten.softmax", path, "reduction", reads=(scores,), writes=(likely,), kept=(likely,))
        best = Op(
            "aten.topk", path, "reduction",
            reads=(likely,), writes=(self.chosen, self.places), kept=(self.places,),
        )  # fmt: skip
        self.ops = (linear, softmax, best)


def _in_mlp(path: str) -> bool:
    return "mlp" in path.split(".")


def _span(layer: Unit) -> tuple[int, int]:
    """The first and the last entry that experts do: the MLP's matmuls and what is between, and what tensor ranks move
    just before and after."""
    products = [
        i for i, e in enumerate(layer.entries) if isinstance(e, Op) and e.kind == "matmul" and _in_mlp(e.module)
    ]
    first, last = products[0], products[-1]
    if isinstance(layer.entries[first - 1], Move):
        first -= 1
    if last + 1 < len(layer.entries) and isinstance(layer.entries[last + 1], Move):
        last += 1
    return first, last


def _ends(inside: tuple[Op | Move, ...]) -> tuple[Piece, Piece]:
    """What goes into the experts, and what comes out."""
    first, last = inside[0], inside[-1]
    taken = first.source if isinstance(first, Move) else next(p for p in first.reads if not p.weight)
    made = last.result if isinstance(last, Move) else last.writes[0]
    return taken, made


def _pieces(unit: Unit) -> Iterator[Piece]:
    for entry in unit.entries:
        if isinstance(entry, Op):
            yield from (*entry.reads, *entry.writes, *entry.kept)
        else:
            yield from (entry.source, entry.result, entry.piece)


def _more(piece: Piece) -> Piece:
    """A weight of all of a rank's experts; an activation of as many rows as they get."""
    first, *rest = piece.shape
    return replace(piece, shape=(first * (HELD if piece.weight else TOPK), *rest))


def _of_experts(entry: Op | Move, renamed: dict[int, int]) -> Op | Move:
    def more(piece: Piece) -> Piece:
        return replace(_more(piece), key=renamed.get(piece.key, piece.key))

    if isinstance(entry, Move):
        return replace(
            entry,
            piece=more(entry.piece),
            backward_piece=None if entry.backward_piece is None else more(entry.backward_piece),
            source=more(entry.source),
            result=more(entry.result),
        )
    return replace(
        entry,
        forward=tuple(replace(p, batch=HELD, m=p.m * SHARE) for p in entry.forward),
        backward_input=tuple(replace(p, batch=HELD, m=p.m * SHARE) for p in entry.backward_input),
        backward_weight=tuple(replace(p, batch=HELD, k=p.k * SHARE) for p in entry.backward_weight),
        reads=tuple(more(p) for p in entry.reads),
        writes=tuple(more(p) for p in entry.writes),
        kept=tuple(more(p) for p in entry.kept),
    )


def _sent(module: str, source: Piece, result: Piece) -> Move:
    return Move(module, "ep", "all_to_all", result, "all_to_all", result, False, source, result)


__all__ = ["EP", "EXPERTS", "TOPK", "with_experts"]
