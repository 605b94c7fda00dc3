"""The formulas that priced the plan, printed from the functions that did."""

from __future__ import annotations

from autopar.explain.page import Section
from autopar.plan import Plan

NOTE = (
    "n ranks of the axis; B bytes, counted as nccl-tests does; L latency and W bus bandwidth of the axis's tier; "
    "Z bytes of optimizer states; F FLOP/s and H bytes/s of device memory that are reached."
)


def formulas(plan: Plan) -> Section:
    """The section of formulas; empty where nothing was predicted."""
    if plan.predicted.step_time_s is None:
        return Section("How it is computed", ())
    import sympy

    from autopar.solver import cost

    nbytes, states, latency, wire, flops, rate, memory = sympy.symbols("B Z L W flops F H", positive=True)
    compute, exposed, hidden, optimizer = sympy.symbols("compute exposed hidden optimizer", positive=True)
    rows: list[tuple[str, object]] = [
        ("step", cost.step_time(compute + optimizer, exposed, hidden)),
        ("op", cost.roofline(flops, nbytes, rate, memory)),
        (plan.optimizer.name, cost.update(nbytes, states, memory)),
    ]
    if plan.pp > 1:
        rows[0] = ("step", "the schedule, simulated with the seconds of every stage, in")
    many = sympy.Symbol("n", integer=True, positive=True)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        rows.append((kind, _for_several(cost.collective(kind, many, nbytes, latency, wire))))
    text = tuple((name, f"{formula} s") for name, formula in rows)
    return Section("How it is computed", (*text, ("MFU", "model_flops / (step * ranks * peak FLOP/s)")), (), NOTE)


def _for_several(formula: object) -> object:
    """The case of more than one rank; of one rank a collective takes nothing."""
    import sympy

    return formula.args[0][0] if isinstance(formula, sympy.Piecewise) else formula
