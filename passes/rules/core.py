"""The form of a rule: the dims of an op's operands and results named as factors; the strategies follow from it.

>>> linear = Rule(
...     operands=(dims("b i"), dims("o i"), dims("o")), results=(dims("b o"),),
...     outside={2: frozenset({"i"})}, linear=(frozenset({0, 2}), frozenset({1, 2})))
>>> sorted(linear.factors())
['b', 'i', 'o']
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.errors import AutoparError
from autopar.passes.facts import operand_nodes

if TYPE_CHECKING:
    from autopar.passes.emit import Emitter


@dataclass(frozen=True)
class Dim:
    """One tensor dim: the product of ``factors``, outer to inner (none: never split); or, with ``parts``, the
    concatenation of parts of these lengths, each of which is cut along the one factor."""

    factors: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()


GROUP = "autopar.rules"  # of entry points
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
    keeps work that one would expect to be divided whole. ``scaled``: numbers among the arguments (their places, args
    and kwargs flattened) that a rank has in proportion to its share of these factors. ``addends``: whether gradients of
    the results may come as addends; not where a backward clips them, say.
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
    scaled: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    addends: bool = True

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

FindRule = Callable[[fx.Node], Rule | None]

RULES: dict[Any, FindRule] = {}
USERS: dict[Any, FindRule] = {}  # registered outside of autopar
LOCALIZE: dict[Any, Localize] = {}
PLACES: dict[Any, Place] = {}


def factors(*targets: Any) -> Callable[[FindRule], FindRule]:
    """Register a rule for ops: a function of the node that returns its `Rule`, or None where this call has none.

    ``targets``: ops of ``torch.ops``, or what ``torch.library.custom_op`` returns. A rule that is registered outside of
    autopar goes before one of autopar's and before probing. It must be right: nothing checks it but ``autopar verify``.
    A package brings rules along by an entry point of the group ``autopar.rules`` that names the module with them.

    Raises AutoparError for what is no op, or has such a rule already.

    Example:
        >>> import torch, autopar
        >>> @torch.library.custom_op("shop::scale_rows", mutates_args=())
        ... def scale_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ...     return x * w
        >>> @autopar.factors(scale_rows)
        ... def rows_and_columns(node):
        ...     return autopar.Rule(
        ...         operands=(autopar.dims("rows columns"), autopar.dims("columns")),
        ...         results=(autopar.dims("rows columns"),),
        ...     )
    """

    def register(rule: FindRule) -> FindRule:
        own = rule.__module__.startswith("autopar.")
        table = RULES if own else USERS
        for target in (op for given in targets for op in _ops(given)):
            if target in table:
                raise AutoparError(f"rule {_named(rule)}: {target} has the rule {_named(table[target])} already.")
            table[target] = rule
        return rule

    return register


def _ops(given: Any) -> list[Any]:
    """The op itself, all forms of one, or what a custom op was registered as."""
    given = getattr(given, "_opoverload", given)
    if isinstance(given, torch._ops.OpOverloadPacket):
        return [getattr(given, name or "default") for name in given._overload_names]
    if not isinstance(given, torch._ops.OpOverload):
        raise AutoparError(
            f"autopar.factors: {given!r} is no op. Give one of torch.ops, or what torch.library.custom_op returns."
        )
    return [given]


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
    """The rule of a call_function node, the user's before ours; None where it has none."""
    _load_entry_points()
    if node.target in USERS:
        found = _users(node, USERS[node.target])
        if found is not None:
            return found
    find = RULES.get(node.target)
    return find(node) if find else None


@cache
def _load_entry_points() -> None:
    """Import what installed packages name in the group ``autopar.rules``."""
    for point in metadata.entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # a package of anyone's may raise anything
            raise AutoparError(
                f"entry point {point.name} = {point.value} of {GROUP}: {type(error).__name__}: {error}. "
                f"Mend or uninstall the package{f' {point.dist.name}' if point.dist else ''}."
            ) from error


def _users(node: fx.Node, find: FindRule) -> Rule | None:
    """What a user's rule says of a node, checked against its shapes."""
    try:
        found = find(node)
        wrong = None if found is None else _misfit(node, found)
    except Exception as error:  # a rule of anyone's may raise anything
        wrong = f"raises {type(error).__name__}: {error}"
    if wrong is not None:
        raise AutoparError(
            f"rule {_named(find)} of {node.target}: {wrong}. Mend the rule, or return None for this call."
        )
    return found


def _misfit(node: fx.Node, rule: Rule) -> str | None:
    """What does not fit in a rule: the number of tensors or dims, or dims of one factor that are not equally long."""
    if not isinstance(rule, Rule):
        return f"returns a {type(rule).__name__} instead of a Rule"
    val = node.meta["val"]
    outs = [v if isinstance(v, torch.Tensor) else None for v in (val if isinstance(val, (tuple, list)) else (val,))]
    slots = [("operand", rule.operands, [n.meta["val"] for n in operand_nodes(node)]), ("result", rule.results, outs)]
    lengths: dict[str, tuple[int, str]] = {f: (n, "sizes") for f, n in rule.sizes.items()}
    for kind, named, tensors in slots:
        if len(named) != len(tensors):
            return f"names {len(named)} {kind}s, the op has {len(tensors)}"
        for i, (dims, tensor) in enumerate(zip(named, tensors, strict=True)):
            if (dims is None) != (tensor is None):
                return f"{kind} {i} is {'a' if dims is None else 'no'} tensor"
            if dims is None:
                continue
            if len(dims) != tensor.ndim:
                return f"names {len(dims)} dims of {kind} {i}, which has {tensor.ndim}"
            for d, (dim, length) in enumerate(zip(dims, tensor.shape, strict=True)):
                where = f"dim {d} of {kind} {i}"
                if dim.parts and sum(dim.parts) != length:
                    return f"{where} is {length} long, its parts are {dim.parts}"
                if len(dim.factors) > 1 and math.prod(rule.sizes.get(f, 0) for f in dim.factors) != length:
                    return f"{where} is {length} long, which is not the product of its factors' sizes"
                if len(dim.factors) == 1 and not dim.parts:
                    known = lengths.setdefault(dim.factors[0], (length, where))
                    if known[0] != length:
                        return f"factor {dim.factors[0]} is {length} long in {where} and {known[0]} in {known[1]}"
    lone = {dim.factors for _, named, _ in slots for dims in named for dim in dims or ()}
    unknown = {f for names in rule.scaled.values() for f in names if (f,) not in lone}
    return f"scales a number by {', '.join(sorted(unknown))}, which is no dim by itself" if unknown else None


def _named(find: FindRule) -> str:
    return f"{find.__module__}.{getattr(find, '__qualname__', find)}"
