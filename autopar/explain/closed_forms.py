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

from autopar.errors import AutoparError
from autopar.explain.page import Page, Section
from autopar.pricing.symbols import reference_units
from autopar.solver.work import Move, Op, Product, Size, Unit

FAMILIES = ("gpt", "llama")
WORDS = ("tp", "sp", "cp", "tied", "dropout", "experts")  # what a reference model may be besides its family
BACKWARD = sympy.Rational(5, 2)  # FLOPs of attention's backward over those of forward: five matmuls to two
LEGEND = (
    "One rank, one microbatch, bf16. b rows of the microbatch on a data rank, s sequence, h width, heads, kv_heads, "
    "head width of one, ffn width inside the MLP, vocab, tp tensor ranks, cp context ranks; of mixtures "
    "experts, topk, ep. Causal attention counts half."
)


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
        for kind, nbytes in _ways(move):
            found[move.axis, kind].append(nbytes)
    return {key: total(sizes) for key, sizes in found.items()}


def parameters(unit: Unit) -> Size:
    """Elements of the parameters that a rank computes a unit with."""
    return total(piece.elements for _, piece in unit.parameters)


def _ways(move: Move) -> Iterable[tuple[str, Size]]:
    if move.weight:
        return
    if move.kind:
        yield move.kind, move.piece.nbytes
    if move.backward and move.backward_piece is not None:
        yield move.backward, move.backward_piece.nbytes


def closed_forms(words: Iterable[str]) -> Page:
    """The page of a reference model's closed forms. ``words``: its family, then any of `WORDS`.

    Raises AutoparError for a word that is neither.

    >>> closed_forms(["llama", "tp"]).sections[0].title
    'prefix, by op'
    """
    family, *rest = words
    for word in rest:
        if word not in WORDS:
            raise AutoparError(f"--formulas {family}: {word!r} is not known. Legal: {', '.join(WORDS)}.")
    if family not in FAMILIES:
        raise AutoparError(f"--formulas: {family!r} is no reference model. Legal: {', '.join(FAMILIES)}.")
    if "sp" in rest and "tp" not in rest:
        raise AutoparError("--formulas: sp cuts the sequence along tensor ranks. Add tp.")
    flags = dict.fromkeys(rest, True)
    units = reference_units(family, **flags)  # type: ignore[arg-type]
    sections = tuple(section for name, unit in units.items() for section in _sections(name, unit))
    return Page(" ".join([family, *rest]), (*sections[:-1], _with_note(sections[-1])))


def _with_note(section: Section) -> Section:
    return Section(section.title, section.rows, section.columns, LEGEND)


def _sections(name: str, unit: Unit) -> Iterable[Section]:
    """Ops that compute or keep something, then what moves, then the sums."""
    kept = {id(op): nbytes for op, nbytes in kept_by_op(unit)}
    rows = [
        (_path(op), op.name.removeprefix("aten."), *map(str, op_flops(op)), str(kept[id(op)]))
        for op in unit.ops
        if op_flops(op)[0] or kept[id(op)]
    ]
    yield Section(f"{name}, by op", tuple(rows), ("module", "op", "FLOPs", "backward", "bytes kept"))
    moves = [(_path(m), m.axis, *(f"{kind} {nbytes}" for kind, nbytes in _ways(m))) for m in unit.moves if not m.weight]
    if moves:
        yield Section(f"{name}, moves", tuple(moves), ("module", "axis", "forward", "backward"))
    yield Section(f"{name}, in all", tuple((what, str(size)) for what, size in totals(unit).items()))


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


def _path(entry: Op | Move) -> str:
    return entry.module or "(loss)"
