"""Parameters rest in one place for all programs of a model: a plan made later takes them from where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.passes.layout import Layout
from autopar.plan import Parameter, Plan


def rests_of(plan: Plan) -> dict[str, Layout]:
    """How each parameter of a plan rests, over its axes of ranks.

    >>> from autopar.plan import ModelId, PlanAxis
    >>> weight = Parameter((4, 2), rest="S0 R", use="R R", gather="step")
    >>> axes = (PlanAxis("dp", 2, "host", 1), PlanAxis("time", 3, "time", 0))
    >>> str(rests_of(Plan(ModelId(""), axes=axes, microbatches=3, batch=6, parameters={"w": weight}))["w"])
    'S0'
    """
    ranks = sum(not axis.is_time for axis in plan.axes)
    layouts = {fqn: Layout.parse(p.rest, len(p.shape)) for fqn, p in plan.parameters.items()}
    return {fqn: replace(layout, kinds=layout.kinds[:ranks]) for fqn, layout in layouts.items()}


def resting(plan: Plan, rests: Mapping[str, Layout]) -> Plan:
    """The plan with every parameter resting as ``rests`` says, whole on every rank where it says nothing."""
    ranks = sum(not axis.is_time for axis in plan.axes)
    moved = {}
    for fqn, parameter in plan.parameters.items():
        rest = rests.get(fqn) or Layout.uniform("I", ranks, len(parameter.shape))
        moved[fqn] = _resting(parameter, replace(rest, kinds=rest.kinds + "R" * (len(plan.axes) - ranks)))
    return replace(plan, parameters=moved)


def _resting(parameter: Parameter, rest: Layout) -> Parameter:
    if str(rest) == parameter.rest:
        return parameter
    moves = str(rest).replace("R", "I") != parameter.use.replace("R", "I")
    gather = parameter.gather if parameter.gather == "use" else "step" if moves else "never"
    reduce = "step" if moves and parameter.trainable and parameter.reduce == "never" else parameter.reduce
    return replace(parameter, rest=str(rest), gather=gather, reduce=reduce)
