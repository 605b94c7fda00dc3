"""One call of an op on small tensors of our own: the same op and arguments, every size mapped to a small one.

Probing (`probe`) asks an op how it may be split by running it. What is run is a `SmallCall`; `small_call` makes one of
a node or says why the op cannot be asked.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from autopar.passes.facts import is_tensor, operand_nodes, value

POOL = (4, 5, 6, 7, 9, 11, 13, 17, 19, 23)  # small sizes; none is a multiple of another, so few fit by accident
KEPT_RATIO = 4  # a size that is so many times another stays so: halves of a gate, four gates, 2 x 2 pixels
MOST_ELEMENTS = 1 << 20  # of all operands and results together; what is larger is not run
LARGE_LITERAL = 8  # a smaller number in the arguments is a dim, a kernel or a flag rather than a size
WIDE = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64}
WIDE |= {torch.complex64: torch.complex128}
UNTOLD = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class CannotProbe(Exception):
    """An op that is not to be run, or that did not run. The text is the reason, as `explain` shows it."""


class NoFunction(CannotProbe):
    """An op that is no function of its operands, at whatever sizes."""


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor operand in the arguments of a `SmallCall`."""

    index: int


@dataclass(frozen=True)
class SmallCall:
    """``flat`` and ``spec``: arguments and keyword arguments, operands as `Slot`. ``shapes``, ``dtypes``: of the
    operands; ``results``: shapes of the results (None: no tensor). ``below``: all integers of operands are in
    [0, below), so that they may be indices. ``frozen``: operands for which the op has no gradient."""

    target: Any
    flat: tuple[Any, ...]
    spec: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    results: tuple[tuple[int, ...] | None, ...] = ()
    below: int = 2
    frozen: frozenset[int] = frozenset()

    def run(self, operands: Sequence[Tensor]) -> list[Tensor | None]:
        """The results. Raises `CannotProbe` for whatever the op raises."""
        at = operands[0].device
        flat = [
            operands[a.index] if isinstance(a, Slot) else at if isinstance(a, torch.device) else a for a in self.flat
        ]
        args, kwargs = tree_unflatten(flat, self.spec)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = self.target(*args, **kwargs)
        except Exception as error:  # an op of anyone's may raise anything
            said = str(error).splitlines()[0] if str(error) else ""
            raise CannotProbe(f"{type(error).__name__}: {said[:120]}") from None
        return [v if isinstance(v, Tensor) else None for v in (made if isinstance(made, (tuple, list)) else (made,))]

    def literals(self) -> tuple[int, ...]:
        """Places in ``flat`` of whole numbers that may be sizes."""
        return tuple(i for i, a in enumerate(self.flat) if type(a) is int and 2 <= a <= MOST_ELEMENTS)

    def with_flat(self, changed: Mapping[int, Any]) -> SmallCall:
        """With some arguments replaced."""
        return replace(self, flat=tuple(changed.get(i, a) for i, a in enumerate(self.flat)))

    def differentiable(self) -> tuple[int, ...]:
        """The operands that a gradient may flow to."""
        return tuple(i for i, d in enumerate(self.dtypes) if is_number(d) and i not in self.frozen)


def is_number(dtype: torch.dtype) -> bool:
    """Whether it is a dtype of real or complex numbers."""
    return dtype.is_floating_point or dtype.is_complex


def small_call(node: fx.Node) -> tuple[SmallCall, SmallCall]:
    """The call of an annotated node on small tensors, and the same at the node's own sizes.

    Sizes are mapped together, numbers in the arguments that are sizes too where the op then still runs and its results
    agree. Raises `CannotProbe`: the op draws, writes, aliases, or does not run."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise CannotProbe("is no operator of a library")
    schema = target._schema
    if schema.is_mutable:
        raise CannotProbe("writes into its operands")
    if any(tag in target.tags for tag in UNTOLD):
        raise CannotProbe("reads values to decide what to do")
    whole = _whole(node)
    tried: list[tuple[int, SmallCall]] = []
    reason = ""
    for candidate in _mapped(whole):
        try:
            made = _results(candidate)
        except NoFunction:
            raise
        except CannotProbe as error:
            reason = reason or str(error)
            continue
        tried.append((_agreement(node, whole, candidate, made), replace(candidate, results=made)))
    if not tried:
        raise CannotProbe(f"does not run on small tensors ({reason or 'its own are too large'})")
    small = max(tried, key=lambda t: t[0])[1]
    return small, _with_sizes_of(whole, small)


def _whole(node: fx.Node) -> SmallCall:
    """The call as it stands, in float64 where its operands are of lower precision."""
    operands = operand_nodes(node)
    flat, spec = tree_flatten((node.args, dict(node.kwargs)))
    count = iter(range(len(operands)))
    given = [Slot(next(count)) if is_tensor(a) else a for a in flat]
    if any(isinstance(a, fx.Node) for a in given):
        raise CannotProbe("reads what is no tensor")
    if not operands:
        raise CannotProbe("has no operands")
    shapes = tuple(value(n).shape for n in operands)
    if any(0 in s for s in shapes):
        raise CannotProbe("has an empty operand")
    return SmallCall(node.target, tuple(given), spec, shapes, tuple(value(n).dtype for n in operands))


def _mapped(whole: SmallCall) -> Iterable[SmallCall]:
    """The call at small sizes, in the order of preference: numbers in the arguments left alone, or mapped with the
    sizes; the leading dim alone mapped; nothing mapped. Each in float64, then as it is."""
    sizes = {n for s in whole.shapes for n in s if n > 1}
    numbers = {whole.flat[i] for i in whole.literals()}
    plain, both = _small(sizes), _small(sizes | {n for n in numbers if n >= LARGE_LITERAL})
    scaled = {i: both[whole.flat[i]] for i in whole.literals() if whole.flat[i] in both}
    lead = next((s[0] for s in whole.shapes if s and s[0] > 1), 1)
    apart = [n for n in POOL if all(m % n for m in sizes - {lead})] or [POOL[-1]]
    rows = {lead: apart[0]} if lead > 1 else {}
    same = {i: rows[lead] for i in whole.literals() if whole.flat[i] == lead}
    ways: list[tuple[dict[int, int], dict[int, int]]] = [
        (plain, {}),
        (both, scaled),
        (rows, {}),
        (rows, same),
        ({}, {}),
    ]
    seen = set()
    for wide, (sizing, changed) in product((True, False), ways):
        call = replace(whole, shapes=tuple(tuple(sizing.get(n, n) for n in s) for s in whole.shapes)).with_flat(changed)
        if wide:
            call = replace(
                call,
                dtypes=tuple(WIDE.get(d, d) for d in call.dtypes),
                flat=tuple(WIDE.get(a, a) if isinstance(a, torch.dtype) else a for a in call.flat),
            )
        key = (call.shapes, call.dtypes, tuple(map(str, call.flat)))
        if key not in seen and sum(map(math.prod, call.shapes)) <= MOST_ELEMENTS:
            seen.add(key)
            bounds = [n for s in call.shapes for n in s if n > 1] + [call.flat[i] for i in call.literals()]
            yield replace(call, below=min(bounds, default=2))


def _small(sizes: Iterable[int]) -> dict[int, int]:
    """A small size for each, no two alike, larger for larger ones; small ratios and products are kept.

    >>> _small({8, 128, 768, 1536})
    {8: 4, 128: 5, 768: 6, 1536: 12}
    """
    found: dict[int, int] = {}
    for size in sorted(sizes):
        part = next((t for t in reversed(found) if size % t == 0 and size // t <= KEPT_RATIO), None)
        pair = next(((t, u) for t in found for u in found if t * u == size), None)
        wanted = found[part] * (size // part) if part else found[pair[0]] * found[pair[1]] if pair else 0
        most = max(found.values(), default=0)
        if not most < wanted <= max(size, POOL[-1]):
            wanted = next((n for n in POOL if n > most), most + 1)
        found[size] = wanted
    return found


def _with_sizes_of(whole: SmallCall, small: SmallCall) -> SmallCall:
    """``small`` with the sizes, and the numbers that are sizes, of ``whole``."""
    numbers = {i: whole.flat[i] for i in whole.literals()}
    return replace(small.with_flat(numbers), shapes=whole.shapes)


def _agreement(node: fx.Node, whole: SmallCall, small: SmallCall, made: Sequence[tuple[int, ...] | None]) -> int:
    """How many dims of the results are of the sizes that they should have: those that the operands' were mapped to."""
    pairs = zip(whole.shapes, small.shapes, strict=True)
    sizing = {n: m for a, b in pairs for n, m in zip(a, b, strict=True)}
    val = node.meta["val"]
    outs = val if isinstance(val, (tuple, list)) else (val,)
    wanted = [tuple(v.shape) if isinstance(v, Tensor) else None for v in outs]
    if len(wanted) != len(made) or any((a is None) != (b is None) for a, b in zip(wanted, made, strict=True)):
        return -1
    dims = [(n, m) for a, b in zip(wanted, made, strict=True) if a is not None and b is not None for n, m in zip(a, b)]
    return sum(sizing.get(n, n) == m for n, m in dims)


def _results(call: SmallCall) -> tuple[tuple[int, ...] | None, ...]:
    """Shapes of the results, where the op is a function of its operands that makes what its fake kernel says and
    touches nothing else."""
    operands = sample(call, "usual", seeded(0))
    before, state = [x.clone() for x in operands], torch.get_rng_state()
    with torch.no_grad():
        first = call.run(operands)
        if not all(_same(a, b) for a, b in zip(operands, before, strict=True)):
            raise NoFunction("writes into its operands, whatever its schema says")
        if not torch.equal(state, torch.get_rng_state()):
            raise NoFunction("draws random numbers")
        second = call.run(operands)
    if not all(_same(a, b) for a, b in zip(first, second, strict=True)):
        raise NoFunction("keeps a state: equal operands do not give equal results")
    if sum(r.numel() for r in first if r is not None) > MOST_ELEMENTS:
        raise CannotProbe("its results are too large")
    _check_aliases(call, operands, first)
    shown = tree_map(lambda r: (tuple(r.shape), r.dtype) if r is not None else None, first)
    fakes = call.run([x.to("meta") for x in operands])
    if [None if f is None else (tuple(f.shape), f.dtype) for f in fakes] != shown:
        raise CannotProbe("makes something else than its fake kernel says")
    return tuple(None if r is None else tuple(r.shape) for r in first)


def _check_aliases(call: SmallCall, operands: Sequence[Tensor], results: Sequence[Tensor | None]) -> None:
    """Views are told by the schema; what shares memory without saying so is not to be trusted."""
    said = any(r.alias_info is not None for r in call.target._schema.returns)
    owned = [x.untyped_storage().data_ptr() for x in [*operands, *(r for r in results if r is not None)] if x.numel()]
    if not said and len(owned) != len(set(owned)):
        raise NoFunction("returns memory that it shares without saying so")


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))


# -- samples ---------------------------------------------------------------------------------------------------------

REGIMES = (
    "usual", "unit", "negative", "mixed", "spike", "dip", "ties", "large", "large positive", "large negative",
    "saturating", "infinite", "near zero", "sparse", "zeros", "equal", "blend", "other blend",
)  # fmt: skip
"""Where ops behave otherwise: on either side of zero, where functions saturate, at equal values, where one element is
unlike all others (so that pieces differ from the whole), and with every operand in a regime of its own."""


def seeded(seed: int) -> torch.Generator:
    """A generator of our own, so that nobody's numbers move."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


def sample(call: SmallCall, regime: str, generator: torch.Generator) -> list[Tensor]:
    """Operands of a call, of numbers in one regime."""
    names = [regime] * len(call.shapes)
    if "blend" in regime:
        names = [REGIMES[int(n)] for n in torch.randint(len(REGIMES) - 2, (len(names),), generator=generator)]
    return [_drawn(call, i, name, generator) for i, name in enumerate(names)]


def _drawn(call: SmallCall, i: int, regime: str, generator: torch.Generator) -> Tensor:
    shape, dtype = call.shapes[i], call.dtypes[i]
    if dtype.is_complex:
        parts = [_numbers(shape, regime, generator) for _ in range(2)]
        return torch.complex(*parts).to(dtype)
    if dtype.is_floating_point:
        return _numbers(shape, regime, generator).to(dtype)
    below = 2 if dtype is torch.bool or regime in ("ties", "dip") else call.below
    numbers = torch.randint(below, shape, generator=generator)
    if regime in ("zeros", "spike", "sparse"):
        numbers = torch.zeros(shape, dtype=torch.int64)
    if regime == "equal":
        numbers = torch.full(shape, below - 1)
    if regime in ("spike", "sparse") and numbers.numel():
        numbers.view(-1)[int(torch.randint(numbers.numel(), (), generator=generator))] = below - 1
    return numbers.to(dtype)


def _numbers(shape: tuple[int, ...], regime: str, generator: torch.Generator) -> Tensor:
    """float64 numbers."""
    usual = torch.randn(shape, dtype=torch.float64, generator=generator)
    unit = torch.rand(shape, dtype=torch.float64, generator=generator)
    if regime in ("spike", "dip", "infinite"):
        x, alone = {"spike": (usual, 1e4), "dip": (unit + 0.1, -3.0), "infinite": (usual, math.inf)}[regime]
        if x.numel():
            x.view(-1)[int(torch.randint(x.numel(), (), generator=generator))] = alone
        return x
    return {
        "usual": usual,
        "unit": unit,
        "negative": -unit,
        "mixed": usual * 10 ** (8 * unit - 4),
        "ties": (usual * 1.5).round(),
        "large": usual * 1e3,
        "large positive": unit * 30,
        "large negative": unit * -1e3,
        "saturating": unit * 1e7,
        "near zero": usual * 1e-4,
        "sparse": usual * (unit < 0.1),
        "zeros": torch.zeros_like(usual),
        "equal": torch.full_like(usual, 0.7),
    }[regime]
