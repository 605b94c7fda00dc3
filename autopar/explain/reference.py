"""``autopar explain --formulas``: the closed forms of a reference model, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy

from autopar.errors import AutoparError
from autopar.explain.closed_forms import both_ways, kept_by_op, op_flops, totals, ways
from autopar.explain.page import Page, Section
from autopar.explain.step_form import pipelined, unit_seconds
from autopar.pricing.symbols import SYMBOLS, reference_units
from autopar.solver.work import Move, Op, Size, Unit

FAMILIES = ("gpt", "llama")
WORDS = ("tp", "sp", "cp", "tied", "dropout", "experts")  # what a reference model may be besides its family
LEGEND = (
    "One rank, one microbatch, bf16. b rows of the microbatch on a data rank, s sequence, h width, heads, kv_heads, "
    "head width of one, ffn width inside the MLP, vocab, tp tensor ranks, cp context ranks; of mixtures: "
    "experts, topk, ep. Causal attention counts half. Bytes moved count as nccl-tests counts them."
)
STEP = (
    "Roofline by hand: m microbatches, pp stages of vp chunks; F FLOP/s that are held, L latency and W bus bandwidth "
    "of an axis. Collectives of activations are exposed, those of parameters hidden; of one rank none takes anything."
)


def formulas_of(words: Iterable[str], settings: Iterable[str] = ()) -> Page:
    """The page. ``words``: "gpt" or "llama", then any of `WORDS`; ``settings``: sizes, ``s=4096``; a form whose
    symbols all have one is printed with its value.

    Raises AutoparError for a word or size that is not known.

    >>> formulas_of(["llama", "tp"]).sections[0].title
    'prefix, by op'
    """
    family, *flags = words
    sizes = _sizes(settings)
    units = reference_units(family, **_checked(family, flags))
    sections = [section for name, unit in units.items() for section in _unit(name, unit, sizes)]
    sections[-1] = Section(sections[-1].title, sections[-1].rows, note=LEGEND)
    return Page(" ".join([family, *flags]), (*sections, _step(units)))


def _checked(family: str, flags: list[str]) -> dict[str, Any]:
    if family not in FAMILIES:
        raise AutoparError(f"--formulas {family}: is no reference model. Legal: {', '.join(FAMILIES)}.")
    for word in flags:
        if word not in WORDS:
            raise AutoparError(f"--formulas {family}: {word!r} is not known. Legal: {', '.join(WORDS)}.")
    if "sp" in flags and "tp" not in flags:
        raise AutoparError(f"--formulas {family}: sp cuts the sequence along tensor ranks. Add tp.")
    return dict.fromkeys(flags, True)


def _sizes(settings: Iterable[str]) -> dict[sympy.Symbol, int]:
    found = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in SYMBOLS or not value.isdigit() or not int(value):
            legal = ", ".join(SYMBOLS)
            raise AutoparError(f"--set {setting}: is no size of a reference model. Legal: {legal}, each =1 or more.")
        found[SYMBOLS[name]] = int(value)
    return found


def _unit(name: str, unit: Unit, sizes: Mapping[sympy.Symbol, int]) -> Iterable[Section]:
    """Ops that compute or keep something, then what moves, then the sums."""
    rows = [
        (_path(op), op.name.removeprefix("aten."), *map(str, op_flops(op)), str(kept))
        for op, kept in kept_by_op(unit)
        if op_flops(op)[0] or kept
    ]
    yield Section(f"{name}, by op", tuple(rows), ("module", "op", "FLOPs", "backward", "bytes kept"))
    moves = [(_path(m), m.axis, *(_way(*way) for way in both_ways(m))) for m in unit.moves if ways(m)]
    if moves:
        yield Section(f"{name}, moves", tuple(moves), ("module", "axis", "forward", "backward"))
    sums = totals(unit).items()
    yield Section(f"{name}, in all", tuple((what, str(size), _value(size, sizes)) for what, size in sums))


def _way(kind: str, nbytes: Size) -> str:
    return f"{kind} {nbytes}" if kind else ""


def _value(size: Size, sizes: Mapping[sympy.Symbol, int]) -> str:
    """The number behind a form; nothing where a symbol has no size, or no sizes are given."""
    value = sympy.sympify(size).subs(sizes)
    return f"{float(value):.4g}" if sizes and value.is_number else ""


def _step(units: Mapping[str, Unit]) -> Section:
    layer, prefix, suffix = sympy.symbols("layer prefix suffix", positive=True)
    step = pipelined(layer, prefix + suffix)
    seconds = {
        name: unit_seconds(unit).replace(_is_piecewise, lambda form: form.args[0][0]) for name, unit in units.items()
    }
    rows = [("step", step), *seconds.items()]
    return Section("step, seconds", tuple((name, str(form)) for name, form in rows), note=STEP)


def _is_piecewise(form: sympy.Basic) -> bool:
    return isinstance(form, sympy.Piecewise)


def _path(entry: Op | Move) -> str:
    return entry.module or "(loss)"


__all__ = ["formulas_of"]
