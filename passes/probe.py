"""Probing: how an op without a rule may be split, found by running it whole and on pieces.

An op that nobody wrote a rule for is run on small tensors (`probe_call`): every way to cut its operands along one
factor is tried, what the results then are is read off their pieces, and what fits is held against the whole, values
and gradients, in every regime of numbers, for pieces of unequal lengths in any order (`probe_split`). What is left is
an ordinary `Rule`. It is found, not proved: `explain` and `verify` list such ops.

Nothing hangs on time or on random numbers of the process, so every rank finds the same. An op that draws, writes,
reads values or does not run small is not split; `Probed.why` says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from autopar.passes.calls import call_key
from autopar.passes.facts import fact, operand_nodes, value
from autopar.passes.probe_apart import apart, checks_sizes
from autopar.passes.probe_cache import recall, remember
from autopar.passes.probe_call import CannotProbe, SmallCall, is_number, small_call
from autopar.passes.probe_split import (
    Cut,
    Found,
    Split,
    Word,
    adds_gradients,
    frozen,
    holds,
    is_linear,
    proposed,
    with_items,
)
from autopar.passes.rules.core import Dim, Dims, Rule, rule_of
from autopar.passes.rules.signature import carries

MOST_TRIED = 800  # ways to cut the operands that are looked at for one call
MOST_UNLIKE = 2  # operands that are cut in parts, or between blocks, at once
SHORT = 1 << 15  # elements: what is not longer must hold at its own sizes too
MOST_GROUPED = 4  # operands of which every group is tried for linearity
FEW = ("usual", "mixed", "spike", "ties")  # for strategies together, each of which holds in all regimes


@dataclass(frozen=True)
class Probed:
    """What is known of a node by probing. ``rule``: None where there is nothing to say but ``why``."""

    rule: Rule | None
    why: str = ""


_KNOWN: dict[int, Probed] = {}  # by call


def probed(node: fx.Node) -> Probed:
    """What probing shows of an annotated node that has no rule. Equal calls are probed once."""
    key = call_key(node)
    if key not in _KNOWN:
        _KNOWN[key] = _probed(node)
    return _KNOWN[key]


def _probed(node: fx.Node) -> Probed:
    if checks_sizes(node.target):
        return _asked(node)
    found = apart(lambda: _asked(node))
    return found or _whole(node, "breaks the process, or hangs, on small tensors", _is_torchs(node.target))


def _asked(node: fx.Node) -> Probed:
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.device("cpu"):
            small, real = small_call(node)
            found = recall(small)
            if found is None:
                found = search(small)
                remember(small, found)
            rule = _rule(node, small, real, found)
    except CannotProbe as error:
        return _whole(node, str(error), addends=_is_torchs(node.target))
    if rule.factors() or rule.linear:
        return Probed(rule)
    return _whole(node, "no split of it gives the same numbers", addends=found.addends)


def _whole(node: fx.Node, why: str, addends: bool) -> Probed:
    """An op that nothing splits. Where gradients must not come as addends its rule, without a factor, says so."""
    if addends:
        return Probed(None, why)
    operands = tuple((Dim(),) * len(value(n).shape) for n in operand_nodes(node))
    results = tuple(None if v is None else (Dim(),) * len(v.shape) for v in fact(node).values)
    return Probed(Rule(operands, results, addends=False, why=why), why)


def _is_torchs(target: Any) -> bool:
    """Whether the op's backward is a derivative, and so linear in what comes in: torch's and ours are."""
    return not isinstance(target, torch._ops.OpOverload) or target.namespace in ("aten", "prims", "autopar")


# -- searching -------------------------------------------------------------------------------------------------------


def search(call: SmallCall) -> Found:
    """Every strategy on one axis that holds; of two that cut one dim in different ways the better, and none that does
    not hold together with the others."""
    call = replace(call, frozen=frozen(call))
    kept: list[Split] = []
    tried = 0
    for unlike in range(MOST_UNLIKE + 1):
        found: list[Split] = []
        for items, operands, literals in _ways(call, unlike):
            if tried == MOST_TRIED:
                break
            blank = Split(items, operands, literals, (None,) * len(call.results))
            if not any(_clash(blank, other) for other in kept):
                tried += 1
                split = proposed(call, items, operands, literals)
                found += [split] if split else []
        for split in sorted(found, key=_worth):
            if not any(_clash(split, k) for k in kept) and holds(call, split) and _together(call, [*kept, split]):
                kept.append(split)
    linear = tuple(g for g in _groups(call) if is_linear(call, g) and _linear_in_pieces(call, g, kept))
    return Found(tuple(kept), linear, adds_gradients(call), tuple(sorted(call.frozen)))


def _worth(split: Split) -> tuple[int, int]:
    """Results in pieces before addends, then what cuts most operands."""
    return sum(w == "P" for w in split.results), -sum(isinstance(w, Cut) for w in split.operands)


def _ways(call: SmallCall, unlike: int) -> Iterator[tuple[int, tuple[Word, ...], tuple[int, ...]]]:
    """(items, words of the operands, literals): dims and numbers that are as long as there are items, and so many more
    that are a multiple."""
    literals = call.literals()
    sizes = {n for s in (*call.shapes, *(r for r in call.results if r is not None)) for n in s}
    for items in sorted({n for n in (*sizes, *(call.flat[i] for i in literals)) if n > 1}):
        plain: list[list[Any]] = [[None, *(Cut(d) for d, n in enumerate(s) if n == items)] for s in call.shapes]
        plain += [[None, i] if call.flat[i] == items else [None] for i in literals]
        others = [_unlike(s, items) for s in call.shapes]
        others += [[i] if call.flat[i] % items == 0 and call.flat[i] > items else [] for i in literals]
        for places in itertools.combinations(range(len(plain)), unlike):
            menus = [others[p] if p in places else plain[p] for p in range(len(plain))]
            for chosen in itertools.product(*menus):
                if any(c is not None for c in chosen):
                    operands, numbers = chosen[: len(call.shapes)], chosen[len(call.shapes) :]
                    yield items, operands, tuple(i for i in numbers if i is not None)


def _unlike(shape: tuple[int, ...], items: int) -> list[Any]:
    """A dim cut between blocks, or in each of its parts."""
    longer = [(d, n // items) for d, n in enumerate(shape) if n > items and n % items == 0]
    return [cut for d, times in longer for cut in (Cut(d, 1, times), Cut(d, times, 1))]


def _clash(a: Split, b: Split) -> bool:
    """Whether two splits cut one dim in ways that are no product of one another."""
    pairs = [*zip(a.operands, b.operands, strict=True), *zip(a.results, b.results, strict=True)]
    return any(
        isinstance(x, Cut) and isinstance(y, Cut) and x.dim == y.dim
        and not (_inside(x, a.items, y, b.items) or _inside(y, b.items, x, a.items))
        for x, y in pairs
    )  # fmt: skip


def _inside(x: Cut, items: int, y: Cut, others: int) -> bool:
    """Whether cut ``y`` of so many items lies within each item of ``x``."""
    return y.outer % (x.outer * items) == 0 and x.inner % (others * y.inner) == 0


def _together(call: SmallCall, splits: Sequence[Split]) -> bool:
    """Whether the last holds on the pieces of every other and of all, and these on its pieces."""
    *others, last = splits
    pairs = [(a, b) for o in others for a, b in ((last, o), (o, last))]
    if not all(holds(*_in_pieces(call, a, [b]), FEW, 1) for a, b in pairs):
        return False
    return len(others) < 2 or holds(*_in_pieces(call, last, others), FEW, 1)


def _in_pieces(call: SmallCall, split: Split, others: Sequence[Split]) -> tuple[SmallCall, Split]:
    """The call on a piece of each of the others, and the split as it then is."""
    for number, other in enumerate(others):
        length = other.items - 1
        call = with_items(call, other, length)
        split = _narrowed(split, other, length)
        others = [*others[: number + 1], *(_narrowed(o, other, length) for o in others[number + 1 :])]
    return call, split


def _narrowed(split: Split, other: Split, length: int) -> Split:
    """A split where another one leaves ``length`` items in the dims that both cut."""

    def word(x: Word, y: Word) -> Word:
        if not (isinstance(x, Cut) and isinstance(y, Cut) and x.dim == y.dim):
            return x
        if _inside(y, other.items, x, split.items):
            return replace(x, outer=x.outer // other.items * length)
        return replace(x, inner=x.inner // other.items * length)

    return replace(
        split,
        operands=tuple(word(x, y) for x, y in zip(split.operands, other.operands, strict=True)),
        results=tuple(word(x, y) for x, y in zip(split.results, other.results, strict=True)),
    )


def _groups(call: SmallCall) -> Iterator[tuple[int, ...]]:
    numbers = [i for i, d in enumerate(call.dtypes) if is_number(d)]
    counts = range(1, len(numbers) + 1) if len(numbers) <= MOST_GROUPED else {1, len(numbers)}
    for count in sorted(counts):
        yield from itertools.combinations(numbers, count)


def _linear_in_pieces(call: SmallCall, group: tuple[int, ...], kept: Sequence[Split]) -> bool:
    return all(is_linear(with_items(call, s, s.items - 1), group, FEW, 1) for s in kept)


# -- the rule --------------------------------------------------------------------------------------------------------


def _rule(node: fx.Node, small: SmallCall, real: SmallCall, found: Found) -> Rule:
    """What was found, at the node's own sizes."""
    shapes = [value(n).shape for n in operand_nodes(node)]
    made = [None if v is None else v.shape for v in fact(node).values]
    real = replace(real, results=tuple(made), frozen=frozenset(found.frozen))
    short = sum(math.prod(s) for s in (*shapes, *(m for m in made if m is not None))) <= SHORT
    cuts: list[Split] = []
    for split in found.splits:
        own = _at_size(split, shapes, made, small, real.flat)
        if own is None or any(_clash(own, c) for c in cuts) or not _scalable([*cuts, own]):
            continue
        if _runs(node, own, real.flat) and (not short or holds(real, own, FEW, 1)):
            cuts.append(own)
    names = [_name(s) for s in cuts]
    sizes: dict[str, int] = {}
    operands = tuple(_dims(s, [c.operands[i] for c in cuts], cuts, names, sizes) for i, s in enumerate(shapes))
    results = tuple(
        None if s is None else _dims(s, [c.results[i] for c in cuts], cuts, names, sizes) for i, s in enumerate(made)
    )
    outside: dict[int, frozenset[str]] = {}
    scaled: dict[int, tuple[str, ...]] = {}
    for cut, name in zip(cuts, names, strict=True):
        for i, word in enumerate(cut.operands):
            if word == "P":
                outside[i] = outside.get(i, frozenset()) | {name}
        for place in cut.literals:
            scaled[place] = (*scaled.get(place, ()), name)
    vals = node.meta["val"]
    outs = [v for v in (vals if isinstance(vals, (tuple, list)) else (vals,)) if isinstance(v, torch.Tensor)]
    dtypes = [value(n).dtype for n in operand_nodes(node)]
    linear = tuple(frozenset(g) for g in found.linear if all(carries(dtypes[i], outs) for i in g))
    whole = frozenset(sizes) - frozenset(names)
    return Rule(
        operands, results, sizes, whole, outside, linear, scaled=scaled, addends=found.addends,
        why="" if cuts or linear else "no split of it gives the same numbers",
    )  # fmt: skip


def _scalable(cuts: Sequence[Split]) -> bool:
    """Whether every number that is scaled is in proportion to a dim that the same splits cut, or to one for each."""
    dims: dict[tuple[int, int], set[int]] = {}
    for number, cut in enumerate(cuts):
        for slot, word in enumerate((*cut.operands, *cut.results)):
            if isinstance(word, Cut):
                dims.setdefault((slot, word.dim), set()).add(number)
    for place in {p for c in cuts for p in c.literals}:
        own = {number for number, cut in enumerate(cuts) if place in cut.literals}
        if own not in dims.values() and not all({n} in dims.values() for n in own):
            return False
    return True


def _name(split: Split) -> str:
    """What a factor is called: the dims that it cuts, so that it means the same in every process.

    >>> _name(Split(4, (Cut(0), Cut(1, 1, 3), None), (), ("P",)))
    'x0d0_x1d1i3'
    """
    words = [f"x{i}{_shown(w)}" for i, w in enumerate(split.operands) if isinstance(w, Cut)]
    return "_".join(words or [f"y{i}{_shown(w)}" for i, w in enumerate(split.results) if isinstance(w, Cut)])


def _shown(cut: Cut) -> str:
    return f"d{cut.dim}" + f"o{cut.outer}" * (cut.outer > 1) + f"i{cut.inner}" * (cut.inner > 1)


def _at_size(
    split: Split,
    shapes: Sequence[tuple[int, ...]],
    made: Sequence[tuple[int, ...] | None],
    small: SmallCall,
    real: tuple[Any, ...],
) -> Split | None:
    """A split of small tensors at the real sizes; None where these do not have the same form."""
    pairs = [*zip(split.operands, shapes, strict=True), *zip(split.results, made, strict=True)]
    cut = [(w, s[w.dim]) for w, s in pairs if isinstance(w, Cut) and s is not None]
    plain = {n for w, n in cut if w.outer == w.inner == 1}
    plain |= {real[i] for i in split.literals if small.flat[i] == split.items}
    items = plain or {math.gcd(*(n // (w.outer * w.inner) for w, n in cut))}
    if len(items) != 1:
        return None
    (count,) = items
    if count < 2 or any(n % count for _, n in cut) or any(real[i] % count for i in split.literals):
        return None

    def word(w: Word, shape: tuple[int, ...] | None) -> Word:
        if not isinstance(w, Cut) or shape is None or w.outer == w.inner == 1:
            return w
        times = shape[w.dim] // count
        return replace(w, outer=times if w.outer > 1 else 1, inner=times if w.inner > 1 else 1)

    words = [word(w, s) for w, s in pairs]
    if any(
        isinstance(w, Cut) and s is not None and w.outer * w.inner * count != s[w.dim]
        for w, (_, s) in zip(words, pairs, strict=True)
    ):
        return None  # fmt: skip
    return Split(count, tuple(words[: len(shapes)]), split.literals, tuple(words[len(shapes) :]))


def _runs(node: fx.Node, split: Split, real: tuple[Any, ...]) -> bool:
    """Whether the fake kernel, asked for a piece at the real sizes, makes a piece."""
    operands = operand_nodes(node)
    flat, spec = tree_flatten((node.args, dict(node.kwargs)))
    piece = max(split.items // 2, 1)

    def local(shape: tuple[int, ...], w: Word) -> tuple[int, ...]:
        if not isinstance(w, Cut):
            return shape
        return (*shape[: w.dim], shape[w.dim] // split.items * piece, *shape[w.dim + 1 :])

    metas = iter(
        torch.empty(local(value(n).shape, w), dtype=value(n).dtype, device="meta")
        for n, w in zip(operands, split.operands, strict=True)
    )
    given = [a // split.items * piece if i in split.literals else a for i, a in enumerate(flat)]
    given = [next(metas) if isinstance(a, fx.Node) else torch.device("meta") if isinstance(a, torch.device) else a
             for a in given]  # fmt: skip
    args, kwargs = tree_unflatten(given, spec)
    try:
        made = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # whatever a kernel of anyone's raises
        return False
    outs = made if isinstance(made, (tuple, list)) else (made,)
    wanted = [None if v is None else local(v.shape, w) for v, w in zip(fact(node).values, split.results, strict=True)]
    return [tuple(o.shape) if isinstance(o, torch.Tensor) else None for o in outs] == wanted


def _dims(
    shape: tuple[int, ...], words: Sequence[Word], cuts: Sequence[Split], names: Sequence[str], sizes: dict[str, int]
) -> Dims:
    """The dims of one tensor as products of factors, those between them never split. Writes their ``sizes``."""
    dims = []
    for d, length in enumerate(shape):
        here = [
            (w, c.items, n) for w, c, n in zip(words, cuts, names, strict=True) if isinstance(w, Cut) and w.dim == d
        ]
        found: list[str] = []
        done = 1
        for cut, items, name in sorted(here, key=lambda h: h[0].outer):
            found += _filler(cut.outer // done, sizes)
            found.append(name)
            sizes[name] = items
            done = cut.outer * items
        dims.append(Dim((*found, *_filler(length // done, sizes)) if here else ()))
    return tuple(dims)


def _filler(size: int, sizes: dict[str, int]) -> list[str]:
    if size == 1:
        return []
    sizes[f"of{size}"] = size
    return [f"of{size}"]


def scale_literals(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Numbers in the arguments that a rule scales (`Rule.scaled`), in proportion to the local dims of its factors."""
    rule = node.meta.get("autopar_rule") or rule_of(node) or probed(node).rule
    assert isinstance(rule, Rule)
    flat, spec = tree_flatten((args, dict(kwargs)))
    for place, names in rule.scaled.items():
        for local, whole in _shares(node, rule, set(names), sizes):
            flat[place] = flat[place] * local // whole
    found: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(flat, spec)
    return found


def _shares(node: fx.Node, rule: Rule, names: set[str], sizes: Any) -> list[tuple[int, int]]:
    """(local, whole) lengths of a dim that has just these factors, or of one dim for each."""
    dims = [
        (set(dim.factors) - rule.whole, local, whole)
        for named, here, there in (
            *zip(rule.operands, sizes.operands, (value(n).shape for n in operand_nodes(node)), strict=True),
            *zip(rule.results, sizes.results, (v.shape if v else None for v in fact(node).values), strict=True),
        )
        if named is not None and here is not None and there is not None
        for dim, local, whole in zip(named, here, there, strict=True)
    ]
    together = next(((local, whole) for own, local, whole in dims if own == names), None)
    if together:
        return [together]
    return [next((local, whole) for own, local, whole in dims if own == {n}) for n in sorted(names)]
