"""From a rule to strategies: the choices an op has on one axis, and the layouts that a choice per axis implies.

A strategy is legal when every operand and result is cut evenly, axes that share a dim agree on its parts, and nothing
is invariant over time (``docs/design.md`` sections 4 and 5).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import fx

from autopar.passes.calls import call_key
from autopar.passes.facts import Choice, Strategy, Value, fact, operand_nodes, value
from autopar.passes.layout import WHOLE, Layout, Mesh, Split
from autopar.passes.rules.core import Dim, Dims, Rule, Special, rule_of

INVARIANT = Choice("I")
REPLICATED = Choice("R")
MOST_FOUND = 1 << 18  # strategies remembered, of equal calls
_FOUND: dict[tuple[int, Mesh, tuple[Choice, ...], tuple[int, ...]], Strategy | None] = {}
MOST_PARTS = 64  # a cut that restarts more often than this is not offered: such copies cost more than they save


def rule(node: fx.Node) -> Rule | None:
    """`rule_of`, asked once a node."""
    if "autopar_rule" not in node.meta:
        node.meta["autopar_rule"] = rule_of(node)
    found = node.meta["autopar_rule"]
    assert found is None or isinstance(found, Rule)
    return found


def choices(node: fx.Node, mesh: Mesh, axis: int, parts: Iterable[tuple[str, tuple[int, ...]]] = ()) -> list[Choice]:
    """What ``node`` can do on ``axis`` with all other axes idle. ``parts``: proposals (factor, parts) to offer besides
    the plain cut of a factor; they come first."""
    over_time = mesh.axes[axis].is_time
    offered = [] if over_time else [INVARIANT]
    offered.append(REPLICATED)
    found = rule(node)
    if found is not None:
        proposals = list(parts)
        for f in found.factors():
            offered += [Choice("factor", f, p) for g, p in proposals if g == f and p]
            offered.append(Choice("factor", f))
        offered += [Choice("linear", str(i)) for i in range(len(found.linear))]
        if not over_time:
            offered += [Choice("special", s.name) for s in found.specials]
    idle = [REPLICATED] * len(mesh.axes)
    legal = []
    for choice in offered:
        if strategy(node, mesh, [*idle[:axis], choice, *idle[axis + 1 :]], range(len(mesh.axes))) is not None:
            legal.append(choice)
    return legal


def strategy(node: fx.Node, mesh: Mesh, chosen: Sequence[Choice], order: Iterable[int]) -> Strategy | None:
    """The layouts that one choice per axis implies, or None where they are illegal together.

    ``order``: all axes, outermost first; where two axes cut the same dim they nest in this order, time outermost.
    """
    order = tuple(sorted(order, key=lambda a: not mesh.axes[a].is_time))
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
    specials = [c.name for c in chosen if c.kind == "special"]
    if len(specials) != len(set(specials)):
        return None
    ins: list[Layout] = []
    for i, v in enumerate(operand_values):
        layout = _layout(v, found.operands[i] if found else None, i, True, found, mesh, chosen, order)
        if layout is None:
            return None
        ins.append(layout)
    outs: list[Layout | None] = []
    for i, r in enumerate(results):
        if r is None:
            outs.append(None)
            continue
        named = found.results[i] if found else None
        layout = _layout(r, named, i, False, found, mesh, chosen, order)
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
    order: tuple[int, ...],
) -> Layout | None:
    kinds = ["R"] * len(chosen)
    cuts: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in v.shape]
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
            if any(n % mesh.axes[axis].size for n in special.divides):
                return None
            cuts[word].append((axis, ()))
            kinds[axis] = "S"
            continue
        place = next((d for d, dim in enumerate(named) if choice.name in dim.factors), None)
        if place is None:
            outside = operand and choice.name in found.outside.get(slot, frozenset())
            summed = not any(choice.name in d.factors for r in found.results if r is not None for d in r)
            kinds[axis] = "P" if not operand or (outside and summed) else "R"
            continue
        parts = _parts(named[place], choice, v.shape[place], found)
        if parts is None or not _divides(named[place], choice.name, v.shape[place], mesh, chosen, found):
            return None
        cuts[place].append((axis, parts))
        kinds[axis] = "S"
    dims = []
    for cut in cuts:
        if len({p for _, p in cut}) > 1 or any(chosen[a].kind == "special" for a, _ in cut[:-1]):
            return None  # a special counts on being the innermost cut of its dim
        parts = cut[0][1] if cut else ()
        dims.append(Split(tuple(a for a, _ in cut), parts) if cut else WHOLE)
    layout = Layout("".join(kinds), tuple(dims))
    if "P" in kinds and not (v.dtype.is_floating_point or v.dtype.is_complex) and v.dtype.itemsize == 1:
        return None  # sums of booleans are no booleans
    return layout if layout.is_even(v.shape, mesh) else None


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


def _divides(dim: Dim, factor: str, length: int, mesh: Mesh, chosen: Sequence[Choice], found: Rule) -> bool:
    """A merged dim must be cut between whole items of the factor, not only evenly."""
    if len(dim.factors) == 1:
        return True  # evenness of the layout says it all
    size = found.sizes[factor]
    axes = tuple(a for a, c in enumerate(chosen) if c.kind == "factor" and c.name == factor)
    parts = next(c.parts for c in chosen if c.kind == "factor" and c.name == factor)
    return Layout("", (Split(axes, parts),)).is_even((size,), mesh)


def special_of(node: fx.Node, name: str) -> Special:
    """The special strategy called ``name`` of the node's rule."""
    found = rule(node)
    assert found is not None
    return next(s for s in found.specials if s.name == name)
