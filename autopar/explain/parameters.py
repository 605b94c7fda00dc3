"""How parameters rest and are used; those of repeated layers that are treated alike are one row."""

from __future__ import annotations

from autopar.explain.axes import legend, over_ranks
from autopar.explain.fold import fold, pattern
from autopar.explain.page import Row, Section
from autopar.plan import Parameter, Plan

COLUMNS = ("name", "shape", "rest", "use", "gather", "reduce", "dtype")


def parameters(plan: Plan) -> Section:
    """The section of parameters."""
    folded: dict[tuple[str, Row], list[str]] = {}
    for fqn, parameter in sorted(plan.parameters.items()):  # as in a plan that was saved
        folded.setdefault((pattern(fqn), _treatment(plan, parameter)), []).append(fqn)
    rows = tuple((fold(fqns), *row) for (_, row), fqns in folded.items())
    lifetimes = "Gather: when rest becomes use. Reduce: when the gradient becomes whole."
    return Section("Parameters", rows, COLUMNS, f"{legend(plan)} {lifetimes}".strip())


def _treatment(plan: Plan, parameter: Parameter) -> Row:
    shape = "x".join(map(str, parameter.shape)) or "scalar"
    gather = {"never": "never", "step": "once a step", "use": "each use"}[parameter.gather]
    reduce = {"never": "never", "step": "once a step", "microbatch": "each microbatch"}[parameter.reduce]
    if parameter.reduce == "microbatch" and plan.microbatches == 1:
        reduce = "in backward"
    if parameter.grad_dtype != parameter.dtype and parameter.reduce != "never":
        reduce = f"{reduce} in {parameter.grad_dtype}"
    dtype = parameter.dtype
    if parameter.use_dtype != dtype:
        dtype = f"{dtype}, used in {parameter.use_dtype}"
    rest, use = over_ranks(plan, parameter.rest), over_ranks(plan, parameter.use)
    return (shape, rest, use, gather, reduce if parameter.trainable else "frozen", dtype)
