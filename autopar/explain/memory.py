"""The predicted peak of one rank, by who owns the bytes."""

from __future__ import annotations

from autopar.explain.page import Section
from autopar.explain.quantities import GIB, bytes_text, percent
from autopar.plan import Optimizer, Plan

OWNERS = {
    "parameters_bytes": ("parameters", "as they rest"),
    "gradients_bytes": ("gradients", "as parameters rest, or whole where they are reduced once a step"),
    "optimizer_bytes": ("optimizer states", ""),  # see `kept`
    "saved_bytes": ("saved activations", "kept by autograd for the backward of one microbatch"),
    "gathered_step_bytes": ("weights gathered once a step", ""),
    "accumulator_bytes": ("accumulated gradients", "not reduced before the last microbatch"),
    "transient_bytes": ("working memory", "the largest of any op and its changes of layout"),
    "inputs_bytes": ("inputs", ""),
    "buffers_bytes": ("buffers and constants", ""),
}
COUNTS = {1: "one", 2: "two", 3: "three"}
HELD = "gathered_held_bytes"


def owners(plan: Plan) -> list[tuple[str, str, float]]:
    """(name, remark, bytes) of everything in the predicted peak, largest first."""
    owners = {**OWNERS, "optimizer_bytes": ("optimizer states", kept(plan.optimizer))}
    found = [(*words, plan.predicted.parts.get(key, 0.0)) for key, words in owners.items()]
    return sorted((owner for owner in found if owner[2]), key=lambda owner: -owner[2])


def kept(optimizer: Optimizer) -> str:
    """What an optimizer keeps of every parameter.

    >>> kept(Optimizer())
    "AdamW's two, in the dtype of the resting parameter"
    """
    states = set(optimizer.states.values())
    if len(states) == 1 and set(*states) <= {"param"}:
        (only,) = states
        return f"{optimizer.name}'s {COUNTS.get(len(only), len(only))}, in the dtype of the resting parameter"
    words = (f"{kind}: {' + '.join(found) or 'none'}" for kind, found in optimizer.states.items())
    return f"{optimizer.name}'s, by dtype and number of dims: {', '.join(words)}"


def memory(plan: Plan) -> Section:
    """The section of memory."""
    peak, parts = plan.predicted.peak_mem_gib, plan.predicted.parts
    if peak is None:
        return Section("Memory of a rank", ())
    rows = [(name, bytes_text(n), percent(n, peak * GIB), remark) for name, remark, n in owners(plan)]
    rows.append(("peak", bytes_text(peak * GIB), "100.0 %", "sum of the above" if rows else ""))
    if limit := parts.get("memory_limit_bytes"):
        left = limit - peak * GIB
        used = f"what tensors may take of the device; the peak is {percent(peak * GIB, limit)} of it"
        rows.append(("limit", bytes_text(limit), "", used))
        rows.append(("free" if left >= 0 else "MISSING", bytes_text(abs(left)), "", ""))
    if held := parts.get(HELD):
        remark = "gathered weights that today's runtime keeps until backward; not in the peak"
        rows.append(("apart: held weights", bytes_text(held), "", remark))
    return Section("Memory of a rank", tuple(rows), ("kind", "bytes", "of the peak", ""))
