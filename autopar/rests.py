"""Parameters rest in one place for all programs of a model: a plan made later takes them from where they are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from autopar.passes.layout import Layout, Split
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


def one_nesting(rests: Mapping[str, Layout], nbytes: Mapping[str, int]) -> dict[str, Layout]:
    """The rests with axes that cut one dim nested in one order for all parameters, as DTensors of one device mesh are:
    in the order that most bytes have.

    >>> found = {"w": Layout.parse("S0@1 S0@0", 1), "b": Layout.parse("S0 S0", 1), "c": Layout.parse("S1 S0", 2)}
    >>> {fqn: str(rest) for fqn, rest in one_nesting(found, {"w": 64, "b": 8, "c": 64}).items()}
    {'w': 'S0@1 S0@0', 'b': 'S0@1 S0@0', 'c': 'S1 S0'}
    """
    weight: dict[tuple[int, int], int] = {}
    for fqn, rest in rests.items():
        for split in rest.dims:
            for pair in itertools.combinations(split.axes, 2):
                weight[pair] = weight.get(pair, 0) + nbytes[fqn]
    axes = sorted({a for pair in weight for a in pair})
    orders = itertools.permutations(axes)
    order = max(orders, key=lambda o: sum(weight.get(pair, 0) for pair in itertools.combinations(o, 2)))
    return {fqn: replace(rest, dims=tuple(_nested(s, order) for s in rest.dims)) for fqn, rest in rests.items()}


def _nested(split: Split, order: tuple[int, ...]) -> Split:
    if len(split.axes) < 2:
        return split
    return replace(split, axes=tuple(sorted(split.axes, key=order.index)))
