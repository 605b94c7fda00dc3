"""All that the reader must not take for granted."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.explain.fold import fold, pattern
from autopar.explain.page import Section
from autopar.plan import Padding, Plan


def doubts(plan: Plan) -> Section:
    """The section of what is relaxed, padded, assumed, unchecked or unproved."""
    rows = [("relaxed", f"{name}={value}") for name, value in sorted(plan.relaxations.items())]
    rows += [("padded", text) for text in _padded(plan.padding)]
    rows += [("no rule, runs whole", op) for op in plan.predicted.fallback]
    rows += [("probed, not proved", op) for op in plan.predicted.probed]
    rows += [("left to autograd", unit) for unit in plan.predicted.autograd]
    if not plan.model.checked:
        rows.append(("unchecked", "captured gradients were not compared with eager"))
    rows += [("captured", hint) for hint in plan.model.hints]
    rows += _predictions(plan)
    if plan.proof.gap is None:
        rows.append(("not proved", "no bound: other plans may be better"))
    if not plan.deterministic:
        rows.append(("not deterministic", "the search stopped at a time limit"))
    return Section("Not vouched for", tuple(rows))


def _padded(padding: tuple[Padding, ...]) -> Iterator[str]:
    folded: dict[tuple[str, int, int, int], list[str]] = {}
    for p in padding:
        folded.setdefault((pattern(p.fqn), p.dim, p.size, p.padded), []).append(p.fqn)
    for (_, dim, size, padded), fqns in folded.items():
        yield f"{fold(fqns)} dim {dim}: {size} as {padded}"


def _predictions(plan: Plan) -> Iterator[tuple[str, str]]:
    predicted = plan.predicted
    if predicted.step_time_s is None:
        yield "not predicted", "time and memory"
        return
    yield "uncalibrated", "seconds come from published figures and closed formulas, not from runs on this cluster"
    if figures := _assumed(plan.cluster.name):
        yield "assumed figures", figures
    if predicted.parts.get("hidden_s"):
        yield "assumed overlap", "hidden communication runs wholly beside compute, at no cost to it"


def _assumed(name: str) -> str:
    """The figures of a shipped cluster that no source states for it, by their place in its file."""
    from autopar.cluster import Cluster, shipped

    if name not in shipped():
        return f"those that the file of {name} marks verified=false"
    cluster = Cluster.load(name)
    found = [f"chip.{key}" for key in ("memory", "memory_bandwidth") if not getattr(cluster.chip, key).verified]
    found += [f"chip.flops.{dtype}" for dtype, figure in cluster.chip.flops.items() if not figure.verified]
    found += [f"chip.efficiency.{key}" for key, figure in cluster.chip.efficiency.items() if not figure.verified]
    if cluster.chip.power and not all(f.verified for f in cluster.chip.power.sustained.values()):
        found.append("chip.power.sustained")
    for tier in cluster.tiers:
        kinds: dict[str, list[str]] = {}
        for kind, link in tier.collectives.items():
            for what in ("bandwidth", "latency"):
                if not getattr(link, what).verified:
                    kinds.setdefault(what, []).append(kind)
        every = len(tier.collectives)
        found += [f"{tier.name} {what} ({'all' if len(k) == every else ', '.join(k)})" for what, k in kinds.items()]
    return ", ".join(found)
