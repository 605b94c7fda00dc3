"""Closed forms: the units of a reference model, with every size a product of powers of the model's own sizes.

A reference model is built once with sizes that are products of primes of their own, so that every number in its units
can be read back: what 11 * 13 * 29 elements are is b * s * h. Nothing is guessed: a number that is not such a product
is an error.

>>> layer = reference_units("llama", tp=True)["layer"]
>>> [p.flops for op in layer.ops for p in op.forward][0]
2*b*h*head*heads*s/tp
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, TypeVar

import sympy

from autopar.errors import AutoparError
from autopar.pricing.experts import EP, EXPERTS, TOPK, with_experts
from autopar.pricing.reference import Sizes, Structure, laid_out
from autopar.pricing.work import units_of
from autopar.solver.work import Attend, Move, Op, Piece, Product, Size, Unit

T = TypeVar("T")
PRIMES = {"tp": 5, "cp": 7, "b": 11, "s": 13, "group": 17, "kv_heads": 19, "head": 23, "h": 29, "ffn": 31, "vocab": 37}
CONSTANTS = (2, 3)  # all that may be left of a number
SYMBOLS = {name: sympy.Symbol(name, positive=True, integer=True) for name in Sizes.__dataclass_fields__}
SYMBOLS |= {symbol.name: symbol for symbol in (EXPERTS, TOPK, EP)}


def reference_units(
    family: str,
    *,
    tp: bool = False,
    sp: bool = False,
    cp: bool = False,
    tied: bool = False,
    dtype: str = "bf16",
    activation: str = "",
    dropout: bool = False,
    experts: bool = False,
) -> Mapping[str, Unit]:
    """The units ``prefix``, ``layer`` and ``suffix`` of a reference model, sizes in `SYMBOLS`.

    Args:
        family: "gpt" or "llama".
        tp: Whether tensor ranks divide it; ``sp``: along the sequence too, around the blocks.
        cp: Whether context ranks cut the sequence.
        tied: Whether the head is the token embedding.
        dtype: Of parameters and activations.
        activation: Of the MLP, "" for the family's own.
        dropout: Whether embeddings and what blocks add drop out.
        experts: Whether the MLP is a mixture of experts, over ranks ``ep``.

    Raises AutoparError for a structure that is not known.
    """
    return _units(Structure(family, tp, sp and tp, cp, tied, dtype, activation, dropout, experts))


@cache
def _units(structure: Structure) -> Mapping[str, Unit]:
    sizes, signs = _prime_sizes(structure.family)
    prefix, _, layer, suffix = units_of(laid_out(structure, sizes))
    named = {"prefix": prefix, "layer": layer, "suffix": suffix}
    known: dict[int, Size] = {}

    def decode(number: int) -> Size:
        if number not in known:
            known[number] = decoded(number, signs)
        return known[number]

    forms = {name: with_sizes(replace(unit, name=name), decode) for name, unit in named.items()}
    return forms | ({"layer": with_experts(forms["layer"])} if structure.experts else {})


def _prime_sizes(family: str) -> tuple[Sizes, dict[str, tuple[int, ...]]]:
    """Sizes for a family, the same for all its layouts, and the prime factors of each symbol, its own first."""
    signs: dict[str, tuple[int, ...]] = {name: (prime,) for name, prime in PRIMES.items() if name != "group"}
    for name in ("ffn", "vocab", "kv_heads"):
        signs[name] = (PRIMES[name], PRIMES["tp"])
    signs["s"] = (PRIMES["s"], PRIMES["tp"], PRIMES["cp"])
    signs["head"] = (PRIMES["head"], 2)
    if family == "gpt":
        signs["heads"] = signs.pop("kv_heads")
    else:
        signs["heads"] = (PRIMES["group"], *signs["kv_heads"])
    values = {name: math.prod(sign) for name, sign in signs.items()}
    return Sizes(**({"kv_heads": values["heads"]} | values)), signs


def decoded(number: int, signs: Mapping[str, Sequence[int]]) -> Size:
    """A number as a product of powers of symbols. ``signs``: each one's prime factors, the first its own.

    Raises ValueError where something is left that is no `CONSTANTS`.

    >>> decoded(2 * 11 * 13, {"b": (11,), "s": (13, 5), "tp": (5,)})
    2*b*s/tp
    """
    left = sympy.factorint(number) if number else {}
    form: sympy.Expr = sympy.Integer(1 if number else 0)
    for name in sorted(signs, key=lambda n: -len(signs[n])):
        power = left.get(signs[name][0], 0)
        for prime in signs[name] if power else ():
            left[prime] = left.get(prime, 0) - power
        form *= SYMBOLS[name] ** power
    for prime, power in left.items():
        if power and prime not in CONSTANTS:
            raise ValueError(f"{number} is no product of {', '.join(signs)}: {prime} to the power {power} is left")
        form *= sympy.Integer(prime) ** power
    return int(form) if form.is_Integer else form


def with_sizes(thing: T, f: Callable[[Any], Any]) -> T:
    """Units, or anything in them, with ``f`` of every size.

    >>> with_sizes(Piece(7, (2, 3), 4), lambda n: n * 10)
    Piece(key=7, shape=(20, 30), itemsize=4, floating=True, weight=False)
    """
    made: T = _filler(thing, f)()
    return made


def _filler(thing: Any, f: Callable[[Any], Any]) -> Callable[[], Any]:
    """A function that makes ``thing`` anew, with what ``f`` says of its sizes by then."""
    if isinstance(thing, Piece):
        key, shape, itemsize, floating, weight = thing.key, thing.shape, thing.itemsize, thing.floating, thing.weight
        return lambda: Piece(key, tuple([f(n) for n in shape]), itemsize, floating, weight)
    if isinstance(thing, Product):
        batch, m, n, k, dtype = thing.batch, thing.m, thing.n, thing.k, thing.dtype
        return lambda: Product(f(batch), f(m), f(n), f(k), dtype)
    if isinstance(thing, Attend):
        a = thing
        return lambda: Attend(
            f(a.batch), f(a.heads), f(a.kv_heads), f(a.queries), f(a.keys), f(a.head), a.dtype, a.causal
        )
    if isinstance(thing, tuple):
        items = [_filler(item, f) for item in thing]
        return lambda: tuple([item() for item in items])
    if isinstance(thing, (Op, Move, Unit)):
        kind: Any = type(thing)
        parts = [_filler(getattr(thing, field.name), f) for field in fields(thing)]
        return lambda: kind(*[part() for part in parts])
    return lambda: thing


Compiled = Callable[[Mapping[str, int]], dict[str, Unit]]


def compiled(units: Mapping[str, Unit]) -> Compiled:
    """One function from the values of the symbols to the units with numbers. A size that does not come out whole (of
    heads that the tensor ranks do not divide, say) is a float.

    >>> count = compiled(reference_units("llama"))
    >>> sizes = dict(b=1, s=8, h=16, heads=4, kv_heads=2, head=4, ffn=32, vocab=64)
    >>> next(count(sizes)["layer"].ops).reads[0].shape
    (1, 8, 16)
    """
    places: dict[Any, int] = {}
    values: list[Any] = []
    for unit in units.values():
        with_sizes(unit, lambda size: places.setdefault(size, len(places)))
    fractions = [sympy.fraction(sympy.sympify(size)) for size in places]
    names = sorted({str(s) for top, bottom in fractions for s in (top * bottom).free_symbols})
    symbols = [SYMBOLS[name] for name in names]
    evaluate = sympy.lambdify(symbols, [[top for top, _ in fractions], [bottom for _, bottom in fractions]], "math")
    numbered = {name: with_sizes(unit, lambda size: places[size]) for name, unit in units.items()}
    fillers = {name: _filler(unit, lambda place: values[place]) for name, unit in numbered.items()}

    def count(sizes: Mapping[str, int]) -> dict[str, Unit]:
        missing = [name for name in names if name not in sizes]
        if missing:
            raise AutoparError(f"sizes: {', '.join(missing)} not given. Needed: {', '.join(names)}.")
        tops, bottoms = evaluate(*(sizes[name] for name in names))
        values[:] = [a // b if a % b == 0 else a / b for a, b in zip(tops, bottoms, strict=True)]
        return {name: fill() for name, fill in fillers.items()}

    return count


@cache
def counted(family: str, **structure: Any) -> Compiled:
    """`compiled` of `reference_units`, once for each structure."""
    return compiled(reference_units(family, **structure))


__all__ = ["SYMBOLS", "Compiled", "compiled", "counted", "decoded", "reference_units", "with_sizes"]
