"""Layouts into and out of the ops that do the work, from their choices alone.

An op's choice names a factor (`docs/design.md` section 4); where the factors of an op stand among the dims of its first
operand and of its result is in `OPS`. Dims are counted from the end where leading dims may be any number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopar.check_plan import CHOICE
from autopar.explain.axes import legend
from autopar.explain.fold import fold, pattern
from autopar.explain.page import Section
from autopar.explain.units import named_ops
from autopar.explain.whole import short
from autopar.plan import Op, Plan

COLUMNS = ("module", "op", "in", "out")


@dataclass(frozen=True)
class Dims:
    """``lead``: the letter of numbered leading factors (``b0``, ``b1``); ``ins``, ``outs``: where other factors stand
    in the first operand and in the result; ``linear``: the linear group that holds the first operand; ``special``:
    layouts by the name of a special."""

    lead: str
    ins: dict[str, int]
    outs: dict[str, int] | None  # None: the result has no dims
    linear: str = ""
    special: tuple[tuple[str, str, str], ...] = ()


_MATMUL = Dims("b", {"m": -2, "k": -1}, {"m": -2, "n": -1}, "0")
_CONVOLUTION = Dims("", {"n": 0, "g": 1, "i": 1}, {"n": 0, "g": 1, "o": 1}, "0")
_NORM = Dims("d", {}, {})
OPS = {
    "linear": Dims("b", {"i": -1}, {"o": -1}, "0"),
    **dict.fromkeys(("mm", "bmm", "matmul", "addmm", "baddbmm"), _MATMUL),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _CONVOLUTION),
    **dict.fromkeys(("layer_norm", "rms_norm", "rsqrt"), _NORM),  # rsqrt: the heart of a spelt-out norm
    "scaled_dot_product_attention": Dims(
        "b", {"h": -3, "l": -2}, {"h": -3, "l": -2, "e": -1}, special=(("grouped-heads", "S-3", "S-3"),)
    ),
    "batch_norm": Dims("d", {"c": 1}, {"c": 1}, "1", special=(("global-statistics", "S0", "S0"),)),
    "embedding": Dims("a", {}, {"e": -1}, special=(("vocabulary", "R", "P"),)),
    "cross_entropy_sum": Dims("a", {}, None, special=(("vocabulary", "S-1", "I"),)),
}
NAMES = {"scaled_dot_product_attention": "attention", "cross_entropy_sum": "cross_entropy", "rsqrt": "norm"}


def layouts(plan: Plan) -> Section:
    """The section of layouts; equal ops of repeated layers are one row."""
    folded: dict[tuple[str, str, str, str], list[str]] = {}
    for op, names in named_ops(plan):
        if short(op.op) in OPS and (found := in_and_out(plan, op)) is not None:
            name = NAMES.get(short(op.op), short(op.op))
            folded.setdefault((pattern(names[0]), name, *found), []).extend(names)
    rows = tuple((fold(list(dict.fromkeys(fqns))), name, ins, outs) for (_, name, ins, outs), fqns in folded.items())
    return Section("Ops", rows, COLUMNS, _note(plan))


def _note(plan: Plan) -> str:
    return f"{legend(plan)} In: of the first operand (x, q, ids, logits). S-1: the last dim."


def in_and_out(plan: Plan, op: Op) -> tuple[str, str] | None:
    """Layouts of the first operand and of the result over the axes of ranks; None where a choice is not known.

    >>> from autopar.plan import ModelId, PlanAxis
    >>> plan = Plan(ModelId("x"), axes=(PlanAxis("dp", 2, "host", 2), PlanAxis("tp", 2, "host", 1)))
    >>> in_and_out(plan, Op(0, "aten.linear.default", "fc", ("factor:b0", "factor:o"), (0, 1)))
    ('S0 R', 'S0 S-1')
    """
    dims = OPS[short(op.op)]
    pairs = [_words(dims, choice) for choice in op.choices]
    if not all(pairs):
        return None
    order = sorted(op.order or range(len(plan.axes)), key=lambda a: not plan.axes[a].is_time)
    ins, outs = ([pair[side] for pair in pairs if pair] for side in (0, 1))
    ranks = [a for a, axis in enumerate(plan.axes) if not axis.is_time]
    return _nested(ins, order, ranks), _nested(outs, order, ranks)


def _words(dims: Dims, text: str) -> tuple[str, str] | None:
    """One axis's words for the first operand and the result."""
    match = CHOICE.fullmatch(text)
    if match is None:
        return None
    if match[1]:
        return match[1], match[1]
    kind, name = match[2], match[3]
    parts = (f"({match[4]})" if match[4] else "") + (f"/{match[5]}" if match[5] else "")
    if kind == "special":
        return next(((i, o) for n, i, o in dims.special if n == name), None)
    if kind == "linear":
        return ("P" if name == dims.linear else "R"), "P"
    lead = re.fullmatch(rf"{dims.lead}(\d+)", name) if dims.lead else None
    if lead:
        return f"S{lead[1]}{parts}", "P" if dims.outs is None else f"S{lead[1]}{parts}"
    outs = dims.outs or {}
    if name not in dims.ins and name not in outs:
        return None
    into = f"S{dims.ins[name]}{parts}" if name in dims.ins else "R"
    return into, f"S{outs[name]}{parts}" if name in outs else "P"


def _nested(words: list[str], order: list[int], ranks: list[int]) -> str:
    """The words, with their place where axes that cut one dim nest in another order than they stand in."""
    found = list(words)
    for word in {w for w in words if w.startswith("S")}:
        together = [a for a in order if words[a] == word and a in ranks]
        if together != sorted(together):
            for place, a in enumerate(together):
                found[a] = f"{word}@{place}"
    return " ".join(found[a] for a in ranks) or "-"
