"""The form of a rule: the dims of an op's operands and results named as factors; the strategies follow from it.

>>> linear = Rule(
...     operands=(dims("b i"), dims("o i"), dims("o")), results=(dims("b o"),),
...     outside={2: frozenset({"i"})}, linear=(frozenset({0, 2}), frozenset({1, 2})))
>>> sorted(linear.factors())
['b', 'i', 'o']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:
    from autopar.passes.emit import Emitter


@dataclass(frozen=True)
class Dim:
    """One tensor dim: the product of ``factors``, outer to inner (none: never split); or, with ``parts``, the
    concatenation of parts of these lengths, each of which is cut along the one factor."""

    factors: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()


Dims = tuple[Dim, ...]
Word = str | int | tuple[int, tuple[int, ...]]  # what a special does with a tensor


def dims(text: str) -> Dims:
    """``"b (h d) ."`` -> three dims: factor b, the merged factors h (outer) and d (inner), one that is never split."""
    out: list[Dim] = []
    group: list[str] | None = None
    for word in text.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            group = []
        elif word == ")":
            out.append(Dim(tuple(group or ())))
            group = None
        elif group is not None:
            group.append(word)
        else:
            out.append(Dim(() if word == "." else (word,)))
    return tuple(out)


@dataclass(frozen=True)
class Special:
    """A strategy on one axis that no factor describes, with a lowering of its own.

    ``operands``/``results``: per tensor operand and result ``"R"``, ``"I"``, ``"P"`` or the dim (int) that is cut (it
    is the innermost cut of its dim, and even unless ``uneven``), or the dim and the lengths of its parts.
    ``lower(emitter, node, axis)`` emits local nodes, the same ops on every rank, and returns the node that stands for
    the result (a tuple-producing node for multi-output ops). ``divides``: lengths that the axis must divide besides.
    ``several``: specials that are may be chosen together, each on any number of axes and in any nest; ``lower`` is then
    called once and reads the others off the strategy.
    """

    name: str
    operands: tuple[Word, ...]
    results: tuple[Word, ...]
    lower: Callable[[Emitter, fx.Node, int], Any]
    divides: tuple[int, ...] = ()
    uneven: bool = False
    several: bool = False


@dataclass(frozen=True)
class Rule:
    """Factors of every tensor operand (order of `facts.operand_nodes`) and result (None where a result is no tensor).

    ``sizes``: length of each factor that shares a dim with others. ``whole``: factors that never split. ``outside``:
    operand index -> the summed factors it stands outside of (it is ``P`` when one of them is split). ``linear``: groups
    of operand indices in which the op is jointly, homogeneously linear. A factor that is in no result may be split only
    if the results are the plain sum of the pieces' results: else list it in ``whole``. ``positions``: factors along
    which the result hangs on where it stands: never cut over time, lowered by what `placed` registers. ``why``: what
    keeps work that one would expect to be divided whole.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims | None, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    outside: Mapping[int, frozenset[str]] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    specials: tuple[Special, ...] = ()
    positions: frozenset[str] = frozenset()
    why: str = ""

    def factors(self) -> tuple[str, ...]:
        """The factors that may be split, in order of appearance."""
        seen: dict[str, None] = {}
        for tensor in (*self.operands, *(r for r in self.results if r is not None)):
            for dim in tensor:
                seen.update(dict.fromkeys(f for f in dim.factors if f not in self.whole))
        return tuple(seen)


Localize = Callable[[fx.Node, tuple[Any, ...], dict[str, Any], Any], tuple[tuple[Any, ...], dict[str, Any]]]
"""(node, args, kwargs, sizes) -> (args, kwargs) with literal sizes made local. ``node`` is the global node (facts and
strategy on it), ``args``/``kwargs`` are its own with operands already replaced by local nodes; ``sizes.results`` and
``sizes.operands`` are tuples of local shapes."""

Place = Callable[["Emitter", fx.Node], fx.Node]
"""Emits a node that is cut along a factor of its rule's ``positions``: what the op makes where this rank stands."""

RULES: dict[Any, Callable[[fx.Node], Rule | None]] = {}
LOCALIZE: dict[Any, Localize] = {}
PLACES: dict[Any, Place] = {}


def factors(*targets: Any) -> Callable[[Callable[[fx.Node], Rule | None]], Callable[[fx.Node], Rule | None]]:
    """Register a rule for ops: a function of the node that returns its `Rule`, or None where this call has none."""

    def register(rule: Callable[[fx.Node], Rule | None]) -> Callable[[fx.Node], Rule | None]:
        for target in targets:
            assert target not in RULES, f"second rule for {target}"
            RULES[target] = rule
        return rule

    return register


def localizes(*targets: Any) -> Callable[[Localize], Localize]:
    """Register how the literal sizes in the arguments of ops are made local."""

    def register(function: Localize) -> Localize:
        for target in targets:
            assert target not in LOCALIZE, f"second localiser for {target}"
            LOCALIZE[target] = function
        return function

    return register


def placed(*targets: Any) -> Callable[[Place], Place]:
    """Register how ops are lowered where they are cut along positions."""

    def register(function: Place) -> Place:
        for target in targets:
            assert target not in PLACES, f"second placement for {target}"
            PLACES[target] = function
        return function

    return register


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of a call_function node, or None: such an op runs ``I`` (or ``R``)."""
    find = RULES.get(node.target)
    return find(node) if find else None
