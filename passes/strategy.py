"""From a rule to strategies: the choices an op has on one axis, and the layouts that a choice per axis implies.

A strategy is legal when axes that share a dim agree on its parts, nothing is invariant over time (``docs/design.md``
sections 4 and 5), and every rank gets a piece of each factor that is cut. Where an axis does not divide a factor its
items are shared out unevenly, by that axis alone: everywhere the factor stands a rank has as many of the same number of
items, so that what is local stays in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopar.passes.calls import call_key
from autopar.passes.facts import Choice, Strategy, Value, fact, operand_nodes, value
from autopar.passes.layout import WHOLE, Axis, Layout, Mesh, Split, cut_in_time, cuts_evenly
from autopar.passes.probe import probed, scale_literals
from autopar.passes.rules.core import LOCALIZE, Dim, Dims, Rule, Special, Word, rule_of

INVARIANT = Choice("I")
REPLICATED = Choice("R")
MOST_FOUND = 1 << 18  # strategies remembered, of equal calls
Proposal = tuple[str, tuple[int, ...], int]  # a factor to cut, in these parts, each in these many items (0: plainly)
_FOUND: dict[tuple[int, Mesh, tuple[Choice, ...], tuple[int, ...]], Strategy | None] = {}
_LENGTHS: dict[tuple[int, str], tuple[int, ...]] = {}
MOST_PARTS = 64  # a cut that restarts more often than this is not offered: such copies cost more than they save


def rule(node: fx.Node) -> Rule | None:
    """`rule_of`, or what probing finds in its place; asked once a node."""
    if "autopar_rule" not in node.meta:
        node.meta["autopar_rule"] = rule_of(node) or probed(node).rule
        if node.meta["autopar_rule"] is not None and node.meta["autopar_rule"].scaled:
            LOCALIZE.setdefault(node.target, scale_literals)
    found = node.meta["autopar_rule"]
    assert found is None or isinstance(found, Rule)
    return found


def choices(node: fx.Node, mesh: Mesh, axis: int, proposals: Iterable[Proposal] = ()) -> list[Choice]:
    """What ``node`` can do on ``axis`` with all other axes idle. ``proposals``: to offer besides the plain cut of a
    factor; they come first."""
    over_time, size = mesh.axes[axis].is_time, mesh.axes[axis].size
    found = rule(node)
    offered = [] if over_time else [INVARIANT]
    if found is None or found.addends:
        offered.append(REPLICATED)
    if found is not None:
        proposed = [p for p in proposals if (p[1] or p[2]) and not (p[2] and (over_time or p[2] % size == 0))]
        for f in found.factors():
            offered += [Choice("factor", f, p, items) for g, p, items in proposed if g == f]
            offered.append(Choice("factor", f))
        offered += [Choice("linear", str(i)) for i in range(len(found.linear))]
        if not over_time:
            offered += [Choice("special", s.name) for s in found.specials]

    def alone(choice: Choice) -> Strategy | None:
        idle = [REPLICATED] * len(mesh.axes)
        return strategy(node, mesh, [*idle[:axis], choice, *idle[axis + 1 :]], range(len(mesh.axes)))

    legal = []
    for choice in offered:
        made = alone(choice)
        plain = alone(replace(choice, items=0)) if made and choice.items else None
        if made and not (plain and (plain.operands, plain.results) == (made.operands, made.results)):
            legal.append(choice)  # in items only where that makes a difference
    return legal


def strategy(node: fx.Node, mesh: Mesh, chosen: Sequence[Choice], order: Iterable[int]) -> Strategy | None:
    """The layouts that one choice per axis implies, or None where they are illegal together.

    ``order``: all axes, outermost first; where two axes cut the same dim they nest in this order, time outermost.
    """
    order = tuple(sorted(order, key=lambda a: not mesh.axes[a].is_time))
    if mesh.time is not None and at_positions(node, chosen[mesh.time]):
        return None
    key = (call_key(node), mesh, tuple(chosen), order)
    if key not in _FOUND:
        if len(_FOUND) > MOST_FOUND:
            _FOUND.clear()
        _FOUND[key] = _strategy(node, mesh, chosen, order)
    return _FOUND[key]


def _strategy(node: fx.Node, mesh: Mesh, chosen: Sequence[Choice], order: tuple[int, ...]) -> Strategy | None:
    operand_values = [value(n) for n in operand_nodes(node)]
    results = fact(node).values
    found = rule(node)
    if found is None and any(c.kind not in ("I", "R") for c in chosen):
        return None
    if not _alone(found, chosen):
        return None
    items = _items(node, mesh, chosen)
    if items is None:
        return None
    ins: list[Layout] = []
    for i, v in enumerate(operand_values):
        layout = _layout(v, found.operands[i] if found else None, i, True, found, mesh, chosen, items, order)
        if layout is None:
            return None
        ins.append(layout)
    outs: list[Layout | None] = []
    for i, r in enumerate(results):
        if r is None:
            outs.append(None)
            continue
        named = found.results[i] if found else None
        layout = _layout(r, named, i, False, found, mesh, chosen, items, order)
        if layout is None:
            return None
        outs.append(layout)
    return Strategy(tuple(chosen), order, tuple(ins), tuple(outs))


def _layout(
    v: Value,
    named: Dims | None,
    slot: int,
    operand: bool,
    found: Rule | None,
    mesh: Mesh,
    chosen: Sequence[Choice],
    items: Mapping[str, int],
    order: tuple[int, ...],
) -> Layout | None:
    kinds = ["R"] * len(chosen)
    cuts: list[list[tuple[int, Split]]] = [[] for _ in v.shape]
    for axis in order:
        choice = chosen[axis]
        if choice.kind in ("I", "R"):
            kinds[axis] = choice.kind
            continue
        assert found is not None and named is not None
        if choice.kind == "linear":
            kinds[axis] = "P" if not operand or slot in found.linear[int(choice.name)] else "R"
            continue
        if choice.kind == "special":
            special = next(s for s in found.specials if s.name == choice.name)
            word = (special.operands if operand else special.results)[slot]
            if isinstance(word, str):
                kinds[axis] = word
                continue
            dim, pieces = _cut_by(word, v.shape)
            lengths = special.divides if special.uneven else (*special.divides, *pieces)
            if any(n % mesh.axes[axis].size for n in lengths):
                return None
            cuts[dim].append((axis, Split((), pieces if len(pieces) > 1 else ())))
            kinds[axis] = "S"
            continue
        place = next((d for d, dim in enumerate(named) if choice.name in dim.factors), None)
        if place is None:
            outside = operand and choice.name in found.outside.get(slot, frozenset())
            summed = not any(choice.name in d.factors for r in found.results if r is not None for d in r)
            kinds[axis] = "P" if not operand or (outside and summed) else "R"
            continue
        parts = _parts(named[place], choice, v.shape[place], found)
        if parts is None:
            return None
        whole = items[choice.name]  # nothing to say where every element is an item
        lengths = parts or (v.shape[place],)
        cuts[place].append((axis, Split((), parts, 0 if all(n == whole for n in lengths) else whole)))
        kinds[axis] = "S"
    dims = []
    for n, cut in zip(v.shape, cuts, strict=True):
        if len({how for _, how in cut}) > 1 or any(_innermost(found, chosen[a]) for a, _ in cut[:-1]):
            return None
        split = Split(tuple(a for a, _ in cut), cut[0][1].parts, cut[0][1].items) if cut else WHOLE
        if split.axes and not fills(n, split, mesh):
            return None
        dims.append(split)
    if "P" in kinds and not (v.dtype.is_floating_point or v.dtype.is_complex) and v.dtype.itemsize == 1:
        return None  # sums of booleans are no booleans
    return Layout("".join(kinds), tuple(dims))


def _cut_by(word: Word, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """The dim that a special cuts of a tensor, and the lengths of its parts."""
    assert not isinstance(word, str)
    dim, parts = word if isinstance(word, tuple) else (word, ())
    return dim, parts or (shape[dim],)


def _alone(found: Rule | None, chosen: Sequence[Choice]) -> bool:
    """Whether the specials that are chosen can be lowered together."""
    names = [c.name for c in chosen if c.kind == "special"]
    return len(names) == len(set(names)) or all(s.several for s in found.specials if s.name in names)  # type: ignore[union-attr]


def _innermost(found: Rule | None, choice: Choice) -> bool:
    """Whether a choice counts on being the innermost cut of its dim."""
    return choice.kind == "special" and not next(s.several for s in found.specials if s.name == choice.name)  # type: ignore[union-attr]


def _parts(dim: Dim, choice: Choice, length: int, found: Rule) -> tuple[int, ...] | None:
    """The parts in which cutting ``choice``'s factor cuts this dim; None where it cannot be said."""
    if dim.parts:
        return None if choice.parts else dim.parts
    if len(dim.factors) == 1:
        return choice.parts if not choice.parts or sum(choice.parts) == length else None
    at = dim.factors.index(choice.name)
    outer = math.prod(found.sizes[f] for f in dim.factors[:at])
    inner = math.prod(found.sizes[f] for f in dim.factors[at + 1 :])
    if outer == 1:
        if choice.parts and sum(choice.parts) * inner != length:
            return None
        return tuple(p * inner for p in choice.parts)
    if choice.parts or outer > MOST_PARTS:
        return None
    return (length // outer,) * outer


def fills(length: int, split: Split, mesh: Mesh) -> bool:
    """Whether a dim is cut evenly, or by one axis of ranks of which every rank gets something, of every microbatch.

    >>> mesh = Mesh((Axis("dp", 2), Axis("time", 2, (4, 3))))
    >>> fills(7, Split((1, 0)), mesh), fills(7, Split((1, 0)), Mesh((Axis("dp", 4), Axis("time", 2, (6, 1)))))
    (True, False)
    """
    if cuts_evenly(length, split, mesh):
        return True
    space = [mesh.axes[a] for a in split.axes if not mesh.axes[a].is_time]
    rows, batch = cut_in_time(split, mesh)
    lengths = [(n, r) for n in (split.items, *(split.parts or (length,))) if n for r in rows]
    if len(space) != 1 or any(n * r % batch for n, r in lengths):
        return False
    pieces = lengths[: len(rows)] if split.items else lengths
    return bool(pieces) and all(space[0].fills(n * r // batch) for n, r in pieces)


def _items(node: fx.Node, mesh: Mesh, chosen: Sequence[Choice]) -> dict[str, int] | None:
    """For every factor that is cut the items of which each axis gets its share, 0 where they all divide it; None where
    some rank would get nothing, or two axes would cut unevenly."""
    found: dict[str, int] = {}
    for name in dict.fromkeys(c.name for c in chosen if c.kind == "factor"):
        axes = tuple(a for a, c in enumerate(chosen) if c.kind == "factor" and c.name == name)
        ways = {(chosen[a].parts, chosen[a].items) for a in axes}
        if len(ways) > 1:
            return None
        ((parts, wanted),) = ways
        common = math.gcd(*(parts or _lengths(node, name)))
        items = wanted or common
        even = cuts_evenly(items, Split(axes), mesh)
        if not common or common % items or not fills(items, Split(axes), mesh):
            return None
        found[name] = 0 if even else items
    return found


def _lengths(node: fx.Node, name: str) -> tuple[int, ...]:
    """How long a factor is in every dim, or part of a dim, that has it."""
    key = (call_key(node), name)
    if key not in _LENGTHS:
        found = rule(node)
        assert found is not None
        shapes = [value(n).shape for n in operand_nodes(node)]
        slots = [*zip(found.operands, shapes, strict=True)]
        slots += [(d, v.shape) for d, v in zip(found.results, fact(node).values, strict=True) if d is not None and v]
        lengths: dict[int, None] = {}
        for dims, shape in slots:
            for dim, n in zip(dims, shape, strict=True):
                if name in dim.factors:
                    lengths.update(
                        dict.fromkeys(dim.parts or ((n,) if len(dim.factors) == 1 else (found.sizes[name],)))
                    )
        _LENGTHS[key] = tuple(lengths)
    return _LENGTHS[key]


def share(node: fx.Node, choice: Choice, axis: Axis) -> float:
    """What the rank of ``axis`` with most, or the longest microbatch, has of an op's work; 1: all of it."""
    if choice.kind not in ("factor", "special"):
        return 1.0
    if axis.is_time:
        return max(axis.lengths) / axis.batch
    if choice.kind == "special":
        words = special_of(node, choice.name).operands
        cuts = [_cut_by(w, value(n).shape) for n, w in zip(operand_nodes(node), words) if not isinstance(w, str)]
        lengths = tuple(n for _, parts in cuts for n in parts)
    else:
        lengths = choice.parts or _lengths(node, choice.name)
    items = choice.items or math.gcd(*lengths)
    return -(-items // axis.size) / items


def at_positions(node: fx.Node, choice: Choice) -> bool:
    """Whether a choice cuts a factor along which results hang on where they stand."""
    found = rule(node) if choice.kind == "factor" else None
    return found is not None and choice.name in found.positions


def special_of(node: fx.Node, name: str) -> Special:
    """The special strategy called ``name`` of the node's rule."""
    found = rule(node)
    assert found is not None
    return next(s for s in found.specials if s.name == name)
