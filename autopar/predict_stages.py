"""`predict` of a plan with stages: seconds by simulating its schedule, bytes of the rank that needs most."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from autopar.build import Prepared, apply, plan_mesh
from autopar.cluster import Cluster
from autopar.passes.lower import with_changes
from autopar.plan import Collective, Plan, StageFigures
from autopar.predict_pipeline import Pipeline, along, parts_of
from autopar.solver.cost import update

KEPT = ("parameters", "gradients", "optimizer", "gathered")


def predict_stages(plan: Plan, prepared: Prepared, cluster: Cluster) -> tuple[Plan, dict[str, float]]:
    """The plan with its stages' figures, collectives and peak, and the ``parts`` of its prediction: seconds of the mean
    rank, which add up to the step, bytes of the rank with the highest peak."""
    model = with_changes(apply(plan, prepared))
    pipe = Pipeline(plan, model, along(plan_mesh(plan), plan, cluster), cluster)
    stages = range(len(plan.stages))
    held = [pipe.held(s) for s in stages]
    of_rank = [[s for s in stages if s % plan.pp == r] for r in range(plan.pp)]
    updates = []
    for own in of_rank:
        gradients, states = (sum(held[s][key] for s in own) for key in ("gradients", "optimizer"))
        updates.append(float(update(gradients, states, cluster.chip.memory_rate)))
    line = pipe.simulate(updates)
    flying = in_flight(plan)
    peaks = []
    for own in of_rank:
        owners = {key: sum(held[s][key] for s in own) for key in KEPT}
        owners["saved"] = sum(
            flying[s] * float(pipe.saved[pipe.edges[plan.stages[s].first] : pipe.edges[plan.stages[s].last]].sum())
            for s in own
        )
        peaks.append(owners)
    worst = max(range(plan.pp), key=lambda r: sum(peaks[r].values()))
    figures = tuple(_figures(pipe, s, flying[s], float(sum(peaks[s % plan.pp].values()))) for s in stages)
    parts = parts_of(line) | {f"peak_{key}_bytes": float(n) for key, n in peaks[worst].items()}
    for key in KEPT[:3]:
        parts[f"{key}_bytes"] = float(peaks[worst][key])
    predicted = replace(
        plan.predicted,
        step_time_s=line.seconds,
        peak_mem_gib=sum(peaks[worst].values()) / 2**30,
        peak_at=stage_name(plan, worst),
        stages=figures,
        collectives=crossing(pipe),
    )
    return replace(plan, predicted=predicted), parts


def stage_name(plan: Plan, stage: int) -> str:
    """``stage 1 (layers.4 to head)``."""
    units = [plan.units[u].fqn for u in range(plan.stages[stage].first, plan.stages[stage].last)]
    names = [name for name in units if name] or ["the model"]
    return f"stage {stage} ({names[0]}{f' to {names[-1]}' if names[-1] != names[0] else ''})"


def in_flight(plan: Plan) -> list[int]:
    """Of each stage the most microbatches between their forward and the end of their backward."""
    found = [0] * len(plan.stages)
    for rank, actions in enumerate(plan.orders()):
        last = "W" if any(letter == "W" for letter, _, _ in actions) else "B"
        for chunk in range(plan.schedule.virtual):
            own = ((letter == "F") - (letter == last) for letter, c, _ in actions if c == chunk)
            found[chunk * plan.pp + rank] = max(accumulate(own), default=0)
    return found


def crossing(pipe: Pipeline) -> tuple[Collective, ...]:
    """What the busiest stage sends and receives in a step, forward and backward."""
    plan, rows = pipe.plan, list[Collective]()
    sent = [pipe.send(s) for s in range(len(plan.stages))]
    arrived = [(0, 0, 0), *sent[:-1]]
    busiest = max(range(plan.pp), key=lambda r: sum(sum(t[s][1:]) for t in (sent, arrived) for s in _of(plan, r)))
    for kind, phase, table, i in (
        ("receive", "backward", sent, 2), ("receive", "forward", arrived, 1),
        ("send", "backward", arrived, 2), ("send", "forward", sent, 1),
    ):  # fmt: skip
        count = plan.microbatches * sum(table[s][0] for s in _of(plan, busiest) if table[s][i])
        nbytes = plan.microbatches * sum(table[s][i] for s in _of(plan, busiest))
        if count:
            rows.append(Collective(kind, "pp", count, nbytes, phase, pipe.link.seconds(count, nbytes), hidden=True))
    return tuple(rows)


def _of(plan: Plan, rank: int) -> range:
    return range(rank, len(plan.stages), plan.pp)


def _figures(pipe: Pipeline, stage: int, flying: int, peak: float) -> StageFigures:
    units = pipe.units(stage)
    read = [fqn for fqn, us in pipe.readers.items() if any(pipe.stage_of(u) == stage for u in us)]
    elements = 0
    for fqn in read:
        n = 1
        for size in pipe.plan.parameters[fqn].shape:
            n *= size
        elements += n
    _, there, back = pipe.send(stage)
    return StageFigures(
        forward_s=sum(u.forward_s + u.forward_comm_s for u in units),
        backward_s=sum(u.backward_input_s + u.backward_weight_s + u.recompute_s + u.backward_comm_s for u in units),
        parameters=elements,
        in_flight=flying,
        sent=there,
        returned=back,
        peak_bytes=peak,
    )


__all__ = ["in_flight", "predict_stages", "stage_name"]
