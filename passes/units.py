"""Units: contiguous pieces of a graph between places where little is live, and classes of equal ones.

The *core* of a graph is what depends on a parameter or needs a gradient; the rest (masks, tables, ids) is its *side*
and belongs to no unit. Two units are one class when their ops, literal arguments, shapes, dtypes, gradients, wiring and
parameters are the same; names do not count. What a unit shares with others are its *borders*: tensors that cross a
cut, and parameters that several units read.

before:  embed, add, norm, linear, ..., add, norm, linear, ..., add, norm, head, loss
after:   embed | add, norm, linear, ... | add, norm, linear, ... | add, norm, head, loss      # classes 0 1 1 2
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import fx

from autopar.passes.completion import is_op, result_slots
from autopar.passes.facts import fact, is_tensor, operand_nodes, value
from autopar.passes.insert_changes import is_getitem

SHORTEST = 16  # ops of a unit that ends in a tensor with one reader: such a cut saves nothing
LONGEST = 96  # ops of a unit that is cut again, with tensors that outlive a quarter of it set aside
OUTLIVES = 48  # ops that such a tensor is at least alive for
ASIDE = 4  # tensors in each other's way that may be set aside at one place
SCALES = frozenset(f"aten.{op}.{of}" for op in ("mul", "div") for of in ("Tensor", "Scalar"))


@dataclass(frozen=True, eq=False)
class Unit:
    """``ops`` in order; ``borders``: the shared tensors and parameters it touches, in the order of first touch;
    ``kind``: index of its class."""

    ops: tuple[fx.Node, ...]
    borders: tuple[fx.Node, ...]
    kind: int


@dataclass(frozen=True, eq=False)
class Units:
    """``shared``: tensors that cross cuts and parameters that several units read, in the order of first touch;
    ``first``: for each class its first unit."""

    units: tuple[Unit, ...]
    shared: tuple[fx.Node, ...]
    first: tuple[int, ...]


def cut_units(
    gm: fx.GraphModule,
    parameters: frozenset[str],
    mark_op: Callable[[fx.Node], Hashable] = lambda op: None,
    mark_tensor: Callable[[fx.Node], Hashable] = lambda tensor: None,
) -> Units:
    """Cut the core of an annotated graph. ``parameters``: the get_attr targets that are parameters; ``mark_op`` and
    ``mark_tensor``: what else two ops, two tensors must have in common."""
    pieces = cut(gm, parameters)
    if not pieces:
        return Units((), (), ())
    ops = [node for piece in pieces for node in piece]
    unit_of = {node: i for i, piece in enumerate(pieces) for node in piece}
    touched = _touched(ops, unit_of, parameters)
    marks = _outputs(gm)
    kinds: dict[Hashable, int] = {}
    units, shared, first = list[Unit](), dict[fx.Node, None](), list[int]()
    for i, piece in enumerate(pieces):
        key, borders = _key(piece, touched, parameters, mark_op, lambda t: (mark_tensor(t), marks.get(t)))
        kind = kinds.setdefault(key, len(kinds))
        if kind == len(first):
            first.append(i)
        units.append(Unit(piece, borders, kind))
        shared.update(dict.fromkeys(borders))
    return Units(tuple(units), tuple(shared), tuple(first))


def cut(gm: fx.GraphModule, parameters: frozenset[str]) -> list[tuple[fx.Node, ...]]:
    """The ops of each unit, in order."""
    ops, pieces, start = core_ops(gm, parameters), list[tuple[fx.Node, ...]](), 0
    for end in [*_cuts(ops, parameters), len(ops) - 1] if ops else ():
        pieces.append(tuple(ops[start : end + 1]))
        start = end + 1
    return pieces


def ranges(gm: fx.GraphModule, parameters: frozenset[str]) -> list[tuple[str, int, int]]:
    """(name, start, stop) of each unit as a range of all ops of the graph, without gaps: what of the side stands
    between two units goes with the later one. One range, if nothing is cut."""
    place = {node: i for i, node in enumerate(n for n in gm.graph.nodes if is_op(n))}
    pieces = cut(gm, parameters)
    stops = [place[piece[-1]] + 1 for piece in pieces[:-1]] + [len(place)]
    names = [common_fqn([fact(op).fqn for op in piece]) for piece in pieces] or [""]
    return list(zip(names, [0, *stops[:-1]], stops, strict=True))


def common_fqn(fqns: Iterable[str]) -> str:
    """The module that all of these lie in, or else the first.

    >>> common_fqn(["layers.0.attn.q", "", "layers.0.norm"]), common_fqn(["embed", "head"])
    ('layers.0', 'embed')
    """
    names = [fqn.split(".") for fqn in fqns if fqn]
    if not names:
        return ""
    common = [words[0] for words in takewhile(lambda words: len(set(words)) == 1, zip(*names, strict=False))]
    return ".".join(common or names[0])


def core_ops(gm: fx.GraphModule, parameters: frozenset[str]) -> list[fx.Node]:
    """The ops that depend on a parameter or need a gradient, in order."""
    core, ops = set[fx.Node](), list[fx.Node]()
    for node in gm.graph.nodes:
        if node.op == "get_attr" and str(node.target) in parameters:
            core.add(node)
        elif node.op == "call_function" and any(n in core for n in node.all_input_nodes):
            core.add(node)
            if is_op(node):
                ops.append(node)
    return ops


def producer_of(tensor: fx.Node) -> fx.Node:
    """The op (or leaf) that makes a tensor: of a picked output, the multi-output op."""
    while is_getitem(tensor):
        tensor = tensor.args[0]  # type: ignore[assignment]
    return tensor


def results_of(op: fx.Node) -> list[fx.Node]:
    """The tensors of an op that something may read."""
    return [t for t in result_slots(op) if t is not None]


def is_parameter(node: fx.Node, parameters: frozenset[str]) -> bool:
    """Whether a node reads a parameter."""
    return node.op == "get_attr" and str(node.target) in parameters


# -- where to cut ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Span:
    """One core tensor: alive after ops ``[made, last)``; ``reads``: the place of every slot that reads it."""

    made: int
    last: int
    reads: tuple[int, ...]


def _cuts(ops: Sequence[fx.Node], parameters: frozenset[str]) -> list[int]:
    """Positions (the last op of a unit) of all units but the last."""
    spans = _spans(ops)
    cuts = _narrow(spans, 0, len(ops))
    edges = [-1, *cuts, len(ops) - 1]
    for before, end in pairwise(edges):
        if end - before > LONGEST:
            cuts += _again(spans, before + 1, end + 1)
    return sorted(set(cuts))


def _spans(ops: Sequence[fx.Node]) -> list[_Span]:
    place = {op: i for i, op in enumerate(ops)}
    read: dict[fx.Node, list[int]] = {}
    for i, op in enumerate(ops):
        for operand in operand_nodes(op):
            if producer_of(operand) in place:
                read.setdefault(operand, []).append(i)
    return [_Span(place[producer_of(t)], max(at), tuple(at)) for t, at in read.items()]


def _narrow(spans: Iterable[_Span], start: int, end: int) -> list[int]:
    """Positions in ``[start, end - 1)`` after which at most one of the tensors is alive."""
    n = end - start
    width, held = [0] * (n + 1), [0] * (n + 1)
    known = list(spans)
    for k, span in enumerate(known):
        lo, hi = max(span.made, start) - start, min(span.last, end) - start
        if lo < hi:
            width[lo] += 1
            width[hi] -= 1
            held[lo] += k
            held[hi] -= k
    found, alive, which, before, seen = list[int](), 0, 0, -1, set[int]()
    for p in range(n - 1):
        alive, which = alive + width[p], which + held[p]
        if alive > 1 or (alive == 1 and which in seen):
            continue
        if alive == 0 or len(known[which].reads) > 1 or p - before >= SHORTEST:
            found.append(start + p)
            before = p
            seen.add(which)
    return found


def _again(spans: Sequence[_Span], start: int, end: int) -> list[int]:
    """Cuts of a long unit once tensors that are alive for most of it (an encoder's output in a decoder, a position
    bias, a U-Net's skips) are set aside; what is long then is cut again."""
    least = max(OUTLIVES, (end - start) // 4)
    lives = [max(0, min(s.last, end) - max(s.made, start)) for s in spans]
    aside = [s for s, life in zip(spans, lives, strict=True) if life > least]
    if not aside:
        return []
    kept = [s for s, life in zip(spans, lives, strict=True) if life <= least]
    found = [p for p in _narrow(kept, start, end) if _crossing([s for s in aside if s.made <= p < s.last]) <= ASIDE]
    for before, last in pairwise([start - 1, *found, end - 1] if found else ()):
        if last - before > LONGEST:
            found += _again(spans, before + 1, last + 1)
    return found


def _crossing(alive: Iterable[_Span]) -> int:
    """How many tensors that are alive at one place are in each other's way: all that are read midway, and of those that
    are read near their ends only, as many as end in the order they were made in. (A U-Net's skips end in the opposite
    order: whatever is between the ends of one can be decided before it, so that they never meet.)"""
    midway, ends = 0, list[int]()
    for span in sorted(alive, key=lambda s: (s.made, s.last)):
        if any(span.made + OUTLIVES < at < span.last - OUTLIVES for at in span.reads):
            midway += 1
            continue
        place = bisect_right(ends, span.last)
        ends[place : place + 1] = [span.last]
    return midway + len(ends)


# -- which are equal -------------------------------------------------------------------------------------------------


def _touched(
    ops: Sequence[fx.Node], unit_of: Mapping[fx.Node, int], parameters: frozenset[str]
) -> dict[fx.Node, set[int]]:
    """The units that make or read each tensor and parameter."""
    touched: dict[fx.Node, set[int]] = {}
    for op in ops:
        for tensor in (*operand_nodes(op), *results_of(op)):
            if producer_of(tensor) in unit_of or is_parameter(tensor, parameters):
                touched.setdefault(tensor, set()).add(unit_of[op])
    return touched


def _outputs(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """The tensors that the program returns, and as what."""
    (result,) = next(n for n in gm.graph.nodes if n.op == "output").args
    assert isinstance(result, dict)
    found = dict.fromkeys(result["outputs"], "output")
    found.update(dict.fromkeys(result["outputs"][:1], "loss"))
    found.update(dict.fromkeys(result["buffers"].values(), "buffer"))
    return found


def _key(
    ops: Sequence[fx.Node],
    touched: Mapping[fx.Node, set[int]],
    parameters: frozenset[str],
    mark_op: Callable[[fx.Node], Hashable],
    mark: Callable[[fx.Node], Hashable],
) -> tuple[Hashable, tuple[fx.Node, ...]]:
    """What makes a unit equal to another, and its borders."""
    inside = {op: i for i, op in enumerate(ops)}
    borders, own = dict[fx.Node, int](), dict[fx.Node, int]()

    def outside(tensor: fx.Node) -> tuple[Hashable, ...]:
        """Its number among the borders where other units touch it too."""
        shared = len(touched[tensor]) > 1
        return (borders.setdefault(tensor, len(borders)),) if shared else ()

    def word(a: Any) -> Hashable:
        if not isinstance(a, fx.Node):
            return _literal(a)
        made = producer_of(a)
        if made in inside:
            return ("op", inside[made], _index(a), *outside(a))
        if a in touched and is_parameter(a, parameters):
            return ("parameter", value(a), own.setdefault(a, len(own)), *outside(a))
        if a in touched:
            return ("border", value(a), mark(a), *outside(a))
        return ("side", tuple(fact(a).values))

    lines = []
    for op in ops:
        scales = str(op.target) in SCALES
        args = tuple("factor" if scales and _is_factor(a) else _words(a, word) for a in op.args)
        kwargs = tuple((k, _words(a, word)) for k, a in sorted(op.kwargs.items()) if k not in ("device", "draw"))
        made = tuple((_index(t), mark(t), *outside(t)) for t in results_of(op))
        lines.append((str(op.target), args, kwargs, tuple(fact(op).values), mark_op(op), made))
    return tuple(lines), tuple(borders)


def _index(tensor: fx.Node) -> int:
    return int(tensor.args[1]) if is_getitem(tensor) else 0  # type: ignore[arg-type]


def _words(a: Any, word: Callable[[Any], Hashable]) -> Hashable:
    if isinstance(a, (tuple, list)):
        return tuple(_words(x, word) for x in a)
    if isinstance(a, dict):
        return tuple((str(k), _words(x, word)) for k, x in sorted(a.items()))
    return word(a)


def _is_factor(a: Any) -> bool:
    """A number to multiply or divide by (a depth's chance to drop, its scale): which one makes no plan another."""
    return isinstance(a, float) and a != 0 and math.isfinite(a)


def _literal(a: Any) -> Hashable:
    return (type(a).__name__, "" if isinstance(a, torch.device) else repr(a))


__all__ = [
    "Unit", "Units", "common_fqn", "core_ops", "cut", "cut_units", "is_parameter", "is_tensor", "producer_of",
    "ranges", "results_of",
]  # fmt: skip
