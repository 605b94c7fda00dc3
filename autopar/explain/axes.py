"""What the page calls the axes of a mesh, and layouts without the axis in time."""

from __future__ import annotations

from autopar.plan import Plan


def axis_name(plan: Plan, name: str) -> str:
    """What an axis is used for where the plan says so, else its name: ``dp_shard`` for the axis ``a0``."""
    found = next((a for a in plan.axes if a.name == name), None)
    if found is None or found.is_time or not found.display:
        return name
    return "+".join(found.display)


def over_ranks(plan: Plan, layout: str) -> str:
    """The words of a layout that are of axes of ranks. Time is left out: it cuts rows of inputs and nothing else."""
    words = layout.split()
    if len(words) != len(plan.axes):
        return layout
    return " ".join(word for word, axis in zip(words, plan.axes, strict=True) if not axis.is_time) or "-"


def legend(plan: Plan) -> str:
    """What the words of layouts mean and which axis each is of."""
    names = [axis_name(plan, a.name) for a in plan.axes if not a.is_time]
    if not names:
        return ""
    return f"Layouts: one word an axis ({' '.join(names)}). S<dim> shard, R replicated, I invariant, P partial."
