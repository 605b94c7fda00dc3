"""The ops of a plan with the names they have in every unit of their class."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.plan import Op, Plan


def named_ops(plan: Plan) -> Iterator[tuple[Op, list[str]]]:
    """Every op of every class, and its module in each unit: a class is spelt as its first unit is.

    >>> from autopar.plan import ModelId, PlanClass, Unit
    >>> group = PlanClass("h.0", (Op(0, "aten.linear.default", "h.0.fc", ()), Op(1, "aten.relu.default", "", ())))
    >>> plan = Plan(ModelId("x"), units=(Unit("h.0", 0), Unit("h.1", 0)), classes=(group,))
    >>> [(op.op, names) for op, names in named_ops(plan)]
    [('aten.linear.default', ['h.0.fc', 'h.1.fc']), ('aten.relu.default', ['(model)'])]
    """
    for c, group in enumerate(plan.classes):
        units = [u.fqn for u in plan.units if u.kind == c] or [group.fqn]
        for op in group.ops:
            inside = group.fqn and f"{op.fqn}.".startswith(f"{group.fqn}.")
            names = [u + op.fqn.removeprefix(group.fqn) for u in units] if inside else [op.fqn]
            yield op, [name or "(model)" for name in names]
