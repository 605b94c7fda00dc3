"""What a tensor axis does not divide, and why; modules left whole in the same way are one row."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.explain.axes import axis_name
from autopar.explain.fold import fold
from autopar.explain.page import Section
from autopar.explain.units import named_ops
from autopar.plan import Plan

LIGHT = "no matmul, attention or convolution"
CHOSEN = "no division in scope is cheaper"
HEAVY = ("linear", "mm", "matmul", "attention", "conv", "einsum")  # parts of the names of ops that do the work


def whole(plan: Plan) -> Section:
    """The section of what stays whole."""
    left = [(w.axis, w.fqn, short(w.op), w.why) for w in plan.predicted.whole]
    left += _undivided(plan)
    folded: dict[tuple[str, str, str], list[str]] = {}
    for axis, fqn, op, why in left:
        folded.setdefault((axis, op, why), []).append(fqn or "(model)")
    rows = tuple((axis_name(plan, axis), fold(fqns), op, why) for (axis, op, why), fqns in folded.items())
    return Section("What stays whole", rows, ("axis", "module", "ops", "why"))


def _undivided(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    """(axis, module, ops, why) of what every rank of a tensor axis does alike, beyond the ops `Predicted` names."""
    told = {(w.axis, w.fqn, w.op) for w in plan.predicted.whole}
    for a, axis in enumerate(plan.axes):
        found: dict[tuple[str, str], list[str]] = {}
        for op, names in named_ops(plan) if "tp" in axis.display else ():
            if op.choices[a] in ("I", "R") and (axis.name, op.fqn, op.op) not in told:
                why = CHOSEN if any(word in op.op for word in HEAVY) else LIGHT
                for name in names:
                    found.setdefault((name, why), []).append(short(op.op))
        for (fqn, why), ops in found.items():
            yield axis.name, fqn, ", ".join(dict.fromkeys(ops)), why


def short(op: str) -> str:
    """The op without its namespace and overload.

    >>> short("aten.layer_norm.default")
    'layer_norm'
    """
    return op.split(".")[1] if op.count(".") else op
