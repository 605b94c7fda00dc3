"""What units make again in backward; units that do alike are one row."""

from __future__ import annotations

from autopar.explain.fold import fold, pattern
from autopar.explain.page import Section
from autopar.plan import Plan

KEPT = {
    "none": "all that backward reads",
    "selective": "results of matmuls, convolutions, attention, sorts and collectives",
    "full": "what the unit reads of others",
}


def recompute(plan: Plan) -> Section:
    """The section of recomputation; empty where nothing is made again."""
    if plan.recompute == "none":
        return Section("Made again in backward", ())
    folded: dict[tuple[str, str], list[str]] = {}
    for unit in plan.units:
        policy = plan.classes[unit.kind].recompute
        folded.setdefault((pattern(unit.fqn), policy), []).append(unit.fqn or "(model)")
    rows = tuple(
        (fold(list(dict.fromkeys(fqns))), str(len(fqns)), policy, KEPT[policy]) for (_, policy), fqns in folded.items()
    )
    return Section("Made again in backward", rows, ("module", "units", "recompute", "kept until backward"))
