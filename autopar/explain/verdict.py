"""Whether it fits, how fast it is, how much of the machine that uses, and how far from the best."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.explain.axes import axis_name
from autopar.explain.memory import owners
from autopar.explain.page import Section
from autopar.explain.quantities import GIB, bytes_text, count_text, percent, seconds_text, several
from autopar.explain.step_time import binds
from autopar.plan import Plan

OWNERS = 4  # named in one line


def verdict(plan: Plan) -> Section:
    """The first section: the plan in a few lines."""
    cluster = plan.cluster
    nodes = f"{several(cluster.nodes, 'node')} of {cluster.ranks_per_node}"
    rows = [("plan", plan.one_line()), ("cluster", f"{cluster.name}, {nodes} {cluster.device} ranks")]
    rows += _predicted(plan)
    rows += _chosen(plan)
    rows.append(("model", " ".join(filter(None, (plan.model.name, plan.model.graph[:19])))))
    gradients = "checked against eager" if plan.model.checked else "unchecked (not compared with eager)"
    rows.append(("captured gradients", gradients))
    return Section("Plan", tuple(rows))


def _chosen(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.mesh:
        order = [axis_name(plan, a.name) for a in plan.axes]
        sizes = sorted(plan.mesh.items(), key=lambda item: (order.index(item[0]) if item[0] in order else -1, item))
        yield "mesh", " x ".join(f"{name} {size}" for name, size in sizes)
    if plan.batch is not None:
        yield "global batch", f"{several(plan.batch, 'row')} in {several(plan.microbatches, 'microbatch')}"
    if plan.pins:
        yield "pinned", " ".join(f"{key}={value}" for key, value in sorted(plan.pins.items()))


def _predicted(plan: Plan) -> Iterator[tuple[str, str]]:
    predicted = plan.predicted
    if predicted.peak_mem_gib is not None:
        yield "fits", _fits(plan, predicted.peak_mem_gib)
    if step := predicted.step_time_s:
        yield "step", ", ".join(filter(None, (seconds_text(step), _speed(plan, step))))
        if why := binds(plan):
            yield "binds", why
        if mfu := _mfu(plan, step):
            yield "MFU", mfu
    if plan.proof.gap is not None:
        bound = f"no plan in scope takes less than {seconds_text(plan.proof.bound)}" if plan.proof.bound else "proved"
        if "repeated" in plan.proof.scope:
            bound += ", which ranks that all do the same would take"
        yield "gap", f"{100 * plan.proof.gap:.2g} %: {bound} (see Proof)"


def _fits(plan: Plan, peak: float) -> str:
    limit = plan.predicted.parts.get("memory_limit_bytes")
    found = owners(plan)
    named = [f"{name} {bytes_text(n)}" for name, _, n in found[:OWNERS]]
    if rest := sum(n for _, _, n in found[OWNERS:]):
        named.append(f"other {bytes_text(rest)}")
    why = f" ({', '.join(named)})" if named else ""
    if limit is None:
        return f"not known: {bytes_text(peak * GIB)} a rank{why}"
    return f"{'yes' if plan.fits else 'NO'}: {bytes_text(peak * GIB)} of {bytes_text(limit)} a rank{why}"


def _speed(plan: Plan, step: float) -> str:
    if tokens := plan.predicted.parts.get("tokens"):
        return f"{count_text(tokens / step)} tokens/s"
    return "" if plan.batch is None else f"{count_text(plan.batch / step)} rows/s"


def _mfu(plan: Plan, step: float) -> str:
    """The share of the peak FLOP/s, with the division spelt out."""
    flops, peak = plan.predicted.parts.get("model_flops"), plan.predicted.parts.get("peak_flops")
    if not flops or not peak:
        return ""
    machine = f"{step:.4g} s x {several(plan.ranks, 'rank')} x {peak / plan.ranks:.4g} FLOP/s"
    text = f"{percent(flops, step * peak)} = {flops:.4g} model FLOPs / ({machine})"
    again = plan.predicted.parts.get("again_flops", 0.0)
    return f"{text}; {percent(flops + again, step * peak)} of the hardware with what is made again" if again else text
