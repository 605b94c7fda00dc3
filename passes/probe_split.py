"""One way to split a call, and whether it is right: the op run whole and on pieces, values and gradients, in every
regime of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.passes.probe_call import REGIMES, CannotProbe, SmallCall, is_number, sample, seeded

TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-5, torch.complex64: 1e-5}
"""Of the largest element. Pieces are added in another order than the whole: some tens of roundings of 1e-16 (1e-7)
each. Of lower precision nothing but equal bits will do, since no tolerance would tell rounding from a wrong rule."""
ROUGH = ("mixed", "spike", "large", "large positive", "large negative", "saturating", "blend", "other blend")
"""Regimes in which an op may be so ill-conditioned that its own rounding is all that is seen."""
LEAST = 6  # regimes that must have run and shown finite numbers
SCALES = (1.0, 1e4, 1e-3)  # of the gradients that come in: a backward may clip them
MORE = 2  # items that the padded sample has more


@dataclass(frozen=True)
class Cut:
    """Where the items that are shared out lie in one dim: its length is ``outer`` x items x ``inner``."""

    dim: int
    outer: int = 1
    inner: int = 1


Word = Cut | str | None
"""What a split does with a tensor: cuts it, takes it as addends (``"P"``), or (None) gives it whole to every piece."""


@dataclass(frozen=True)
class Split:
    """``items`` shared out among pieces. ``literals``: places in ``flat`` of numbers that a piece has in proportion."""

    items: int
    operands: tuple[Word, ...]
    literals: tuple[int, ...]
    results: tuple[Word, ...]


@dataclass(frozen=True)
class Found:
    """What probing a call showed. ``linear``: groups of operands in which it is; ``addends``: its backward is linear in
    the gradients that come in; ``frozen``: operands that it has no gradient for."""

    splits: tuple[Split, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    addends: bool = True
    frozen: tuple[int, ...] = ()


def take(x: Tensor, cut: Cut, items: Tensor) -> Tensor:
    """The piece of ``x`` with these items of the cut dim, in this order."""
    shape = list(x.shape)
    length = shape[cut.dim] // (cut.outer * cut.inner)
    parted = x.reshape([*shape[: cut.dim], cut.outer, length, cut.inner, *shape[cut.dim + 1 :]])
    shape[cut.dim] = cut.outer * len(items) * cut.inner
    return parted.index_select(cut.dim + 1, items).reshape(shape)


def partitions(items: int, generator: torch.Generator) -> list[list[Tensor]]:
    """Ways to share out so many items: in two and three unequal runs, and in any order."""
    order = torch.randperm(items, generator=generator)
    plain = torch.arange(items)
    ways = [[1, items - 1], [items // 2, items - items // 2]]
    if items > 2:
        ways.append([1, items - 1 - items // 2, items // 2] if items > 3 else [1, 1, 1])
    return [list(torch.split(indices, lengths)) for lengths in ways for indices in (plain, order)]


def with_items(call: SmallCall, split: Split, items: int) -> SmallCall:
    """The call with another number of items in everything that the split cuts."""
    shapes = list(call.shapes)
    for i, word in enumerate(split.operands):
        if isinstance(word, Cut):
            shape = list(shapes[i])
            shape[word.dim] = shape[word.dim] // split.items * items
            shapes[i] = tuple(shape)
    changed = {i: call.flat[i] // split.items * items for i in split.literals}
    results = list(call.results)
    for i, word in enumerate(split.results):
        if isinstance(word, Cut):
            made = list(results[i] or ())
            made[word.dim] = made[word.dim] // split.items * items
            results[i] = tuple(made)
    return replace(call.with_flat(changed), shapes=tuple(shapes), results=tuple(results))


def holds(call: SmallCall, split: Split, regimes: Sequence[str] = REGIMES, least: int = LEAST) -> bool:
    """Whether the op on pieces is the op on the whole, values and gradients. Deterministic: fixed seeds."""
    shown = 0
    for number, regime in enumerate(regimes):
        generator = seeded(1000 + number)
        padded = number % 4 == 3  # a whole that is longer: what is there does not change
        own = with_items(call, split, split.items + MORE) if padded else call
        asked = replace(split, items=split.items + MORE) if padded else split
        operands = sample(own, regime, generator)
        try:
            whole = _Run(own, operands, [None] * len(operands), generator, SCALES[number % 3])
        except CannotProbe:
            continue  # the op does not take such numbers, or such a length
        if [None if r is None else tuple(r.shape) for r in whole.results] != list(own.results):
            return False  # the results are not as long as they would have to be
        ways = partitions(asked.items, generator)
        tried = (ways[number % len(ways)], ways[(number * 2 + 1) % len(ways)])
        if all(_agrees(own, asked, operands, whole, way, generator) for way in tried):
            shown += whole.finite()
        elif not (regime in ROUGH and _unstable(own, operands, whole, generator)):
            return False
    return shown >= least


def _unstable(call: SmallCall, operands: Sequence[Tensor], whole: _Run, generator: torch.Generator) -> bool:
    """Whether the last bit of the operands moves what the op makes by more than the tolerance: then pieces, which add
    in another order, may differ from the whole by as much, and say nothing."""
    moved = [x + x * _noise(x, generator, torch.finfo(x.dtype).eps) if is_number(x.dtype) else x for x in operands]
    try:
        other = _Run(call, moved, whole.cotangents)
    except CannotProbe:
        return False
    made = [(a.detach(), b.detach()) for a, b in zip(other.results, whole.results) if a is not None and b is not None]
    pairs = [*made, *zip(other.grads, whole.grads, strict=True)]
    return not all(_close(a, b, _largest(b)) for a, b in pairs)


class _Run:
    """One run of the call with gradients. ``cotangents``: of each result, or drawn at ``scale``."""

    def __init__(
        self,
        call: SmallCall,
        operands: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        generator: torch.Generator | None = None,
        scale: float = 1.0,
    ) -> None:
        wanted = call.differentiable()
        leaves = [x.detach().clone().requires_grad_(i in wanted) for i, x in enumerate(operands)]
        with torch.enable_grad():
            self.results = call.run(leaves)
        if generator is not None:
            cotangents = [_noise(r, generator, scale) if _flows(r) else None for r in self.results]
        self.cotangents = cotangents
        self.grads = gradients(self.results, [leaves[i] for i in wanted], cotangents)
        self.wanted = wanted

    def finite(self) -> bool:
        """Whether most of what it made are finite numbers."""
        numbers = [r for r in self.results if r is not None and r.numel()]
        return all(float(r.detach().isfinite().double().mean()) > 0.5 for r in numbers)


def gradients(
    results: Sequence[Tensor | None], leaves: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> list[Tensor]:
    """The gradients of the leaves; zeros where none flows. Raises `CannotProbe` where there is no backward."""
    flow = [(r, c) for r, c in zip(results, cotangents, strict=True) if r is not None and c is not None and _flows(r)]
    if not flow or not leaves:
        return [torch.zeros_like(x) for x in leaves]
    try:
        found = torch.autograd.grad([r for r, _ in flow], list(leaves), [c for _, c in flow], allow_unused=True)
    except Exception as error:  # a backward of anyone's may raise anything
        raise CannotProbe(f"its backward raises {type(error).__name__}") from None
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def _flows(r: Tensor | None) -> bool:
    return r is not None and r.requires_grad and is_number(r.dtype)


def _noise(like: Tensor | None, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    assert like is not None
    return (torch.randn(like.shape, dtype=torch.float64, generator=generator) * scale).to(like.dtype)


def _agrees(
    call: SmallCall, split: Split, operands: list[Tensor], whole: _Run, way: list[Tensor], generator: torch.Generator
) -> bool:
    given = [_pieces(x, word, way, generator) for x, word in zip(operands, split.operands, strict=True)]
    runs: list[_Run] = []
    for k, items in enumerate(way):
        local = with_items(call, split, len(items))
        cotangents = [
            take(c, word, items) if c is not None and isinstance(word, Cut) else c
            for c, word in zip(whole.cotangents, split.results, strict=True)
        ]
        try:
            runs.append(_Run(local, [piece[k] for piece in given], cotangents))
        except (CannotProbe, RuntimeError):  # it does not run on a piece, or makes another shape
            return False
    floor = max(_largest(x) for x in operands)
    for i, word in enumerate(split.results):
        made, want = [r.results[i] for r in runs], whole.results[i]
        if want is None:
            continue
        if not _together(made, want.detach(), word, way, floor):
            return False
    floor = max([floor, *(_largest(c) for c in whole.cotangents if c is not None)])
    for at, i in enumerate(whole.wanted):
        word = split.operands[i]
        grads, want = [r.grads[at] for r in runs], whole.grads[at]
        if word == "P":  # addends: each has the whole gradient
            if not all(_close(g, want, floor) for g in grads):
                return False
        elif not _together(grads, want, word if isinstance(word, Cut) else "P", way, floor):
            return False
    return True


def _pieces(x: Tensor, word: Word, way: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    if isinstance(word, Cut):
        return [take(x, word, items) for items in way]
    if word is None:
        return [x] * len(way)
    addends = [_noise(x, generator, _largest(x) or 1.0) for _ in way[1:]]
    return [x - sum(addends), *addends]


def _together(made: Sequence[Tensor | None], want: Tensor, word: Word, way: list[Tensor], floor: float) -> bool:
    """Whether the pieces, laid side by side or added up, are the whole."""
    pieces = [r.detach() for r in made if r is not None]
    if len(pieces) != len(way) or any(r.dtype != want.dtype for r in pieces):
        return False
    if isinstance(word, Cut):
        return all(_close(r, take(want, word, items), floor) for r, items in zip(pieces, way, strict=True))
    if want.dtype is torch.bool or any(r.shape != want.shape for r in pieces):
        return False
    largest = max([floor, *(_largest(r) for r in pieces)])
    total = pieces[0].clone()
    for r in pieces[1:]:
        total += r
    beyond = ~want.isfinite()  # infinities do not add up, pieces of them neither
    return _close(total.masked_fill(beyond, 0), want.masked_fill(beyond, 0), largest)


def _largest(x: Tensor) -> float:
    return float(x.abs().double().nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() and x.dtype is not torch.bool else 0.0


def _close(got: Tensor, want: Tensor, floor: float) -> bool:
    if got.shape != want.shape:
        return False
    if not is_number(want.dtype):
        return bool(torch.equal(got, want))
    limit = TOLERANCE.get(want.dtype, 0.0) * max(floor, _largest(want))
    return bool(torch.allclose(got, want, rtol=0, atol=limit, equal_nan=True))


# -- finding ---------------------------------------------------------------------------------------------------------


def proposed(call: SmallCall, items: int, operands: tuple[Word, ...], literals: tuple[int, ...]) -> Split | None:
    """The split that cuts the operands so: what the results are then is read off the shapes of two pieces' results, and
    off their values for one sample. None where nothing fits. Of results that should be addends but are not, an operand
    may be what stands outside of the sum (a bias): it is then given as addends too."""
    plain = _proposed(call, items, operands, literals)
    if isinstance(plain, Split) or plain is None:
        return plain
    for i, word in enumerate(operands):
        if word is None and is_number(call.dtypes[i]):
            found = _proposed(call, items, (*operands[:i], "P", *operands[i + 1 :]), literals)
            if isinstance(found, Split):
                return found
    return None


def _proposed(call: SmallCall, items: int, operands: tuple[Word, ...], literals: tuple[int, ...]) -> Split | str | None:
    """``"P"``: every piece makes results of the whole's shapes, and they do not add up to it."""
    generator = seeded(77)
    blank = Split(items, operands, literals, (None,) * len(call.results))
    whole = sample(call, "usual", generator)
    order = torch.randperm(items, generator=generator)
    way = [order[: items // 2 - (items > 3)], order[items // 2 - (items > 3) :]]
    given = [_pieces(x, word, way, generator) for x, word in zip(whole, operands, strict=True)]
    try:
        with torch.no_grad():
            wanted = call.run(whole)
            made = [with_items(call, blank, len(ids)).run([p[k] for p in given]) for k, ids in enumerate(way)]
    except (CannotProbe, RuntimeError):
        return None
    floor = max((_largest(x) for x in whole), default=0.0)
    words: list[Word] = []
    for i, want in enumerate(wanted):
        if want is None:
            words.append(None)
            continue
        pieces = [m[i] for m in made]
        shapes = [tuple(p.shape) if p is not None else () for p in pieces]
        fitting = (w for w in _words(tuple(want.shape), shapes, items, way) if _together(pieces, want, w, way, floor))
        word = next(fitting, None)
        if word is None:
            whole_shapes = all(m is None or w is None or m.shape == w.shape for r in made for m, w in zip(r, wanted))
            return "P" if whole_shapes else None
        words.append(word)
    return replace(blank, results=tuple(words))


def _words(whole: tuple[int, ...], pieces: list[tuple[int, ...]], items: int, way: list[Tensor]) -> list[Word]:
    """What a result may be whose pieces have these shapes."""
    if any(len(p) != len(whole) for p in pieces):
        return []
    if all(p == whole for p in pieces):
        return ["P"]
    dims = [d for d, n in enumerate(whole) if any(p[d] != n for p in pieces)]
    if len(dims) != 1 or whole[dims[0]] % items:
        return []
    times = whole[dims[0]] // items
    if any(p[dims[0]] != times * len(ids) for p, ids in zip(pieces, way, strict=True)):
        return []
    return list(dict.fromkeys([Cut(dims[0], 1, times), Cut(dims[0], times, 1)]))


# -- what else is to be known of an op -------------------------------------------------------------------------------


def frozen(call: SmallCall) -> frozenset[int]:
    """The operands that the op has no gradient for, though they are numbers: found by trying each."""
    found = set()
    operands = sample(call, "unit", seeded(5))
    for i in call.differentiable():
        others = replace(call, frozen=frozenset(range(len(operands))) - {i})
        try:
            _Run(others, operands, [None] * len(operands), seeded(6))
        except CannotProbe:
            found.add(i)
    return frozenset(found)


def adds_gradients(call: SmallCall) -> bool:
    """Whether the gradient of a sum of gradients is the sum of theirs. Where a backward clips them or takes their sign
    it is not, and then they must not come as addends."""
    for number, regime in enumerate(REGIMES):
        generator = seeded(3000 + number)
        operands = sample(call, regime, generator)
        try:
            first = _Run(call, operands, [None], generator, SCALES[number % 3])
            second = _Run(call, operands, [None], generator, SCALES[number % 3])
            pairs = zip(first.cotangents, second.cotangents, strict=True)
            both = _Run(call, operands, [None if a is None or b is None else a + b for a, b in pairs])
        except CannotProbe:
            continue
        for a, b, total in zip(first.grads, second.grads, both.grads, strict=True):
            beyond = ~total.isfinite()
            floor = max(_largest(x) for x in (a, b, *both.cotangents) if x is not None)
            if not _close((a + b).masked_fill(beyond, 0), total.masked_fill(beyond, 0), floor):
                return False
    return True


def is_linear(call: SmallCall, group: tuple[int, ...], regimes: Sequence[str] = REGIMES, least: int = LEAST) -> bool:
    """Whether the op is jointly linear in a group of operands: given as addends they make addends of the results."""
    if any(r is None for r in call.results):
        return False
    split = Split(
        2, tuple("P" if i in group else None for i in range(len(call.shapes))), (), ("P",) * len(call.results)
    )
    return holds(call, split, regimes, least)


__all__ = [
    "Cut", "Found", "Split", "Word", "adds_gradients", "frozen", "holds", "is_linear", "proposed", "take", "with_items",
]  # fmt: skip
