"""The predicted peak of one rank: whose the bytes are at that moment, and when it is."""

from __future__ import annotations

from autopar.explain.page import Section
from autopar.explain.quantities import GIB, bytes_text, percent
from autopar.plan import Optimizer, Plan

OWNERS = {
    "peak_parameters_bytes": ("parameters", "as they rest"),
    "peak_gradients_bytes": ("gradients", "at rest, and those that add up before they are reduced"),
    "peak_optimizer_bytes": ("optimizer states", ""),  # see `kept`
    "peak_gathered_bytes": ("gathered weights", "as units read them"),
    "peak_saved_bytes": ("saved activations", "kept by units for their backwards"),
    "peak_values_bytes": ("values between units", "and their gradients"),
    "peak_working_bytes": ("working memory", "inside the unit that runs"),
    "peak_sent_bytes": ("on the wire", "buckets of gradients, and what collectives work on"),
    "peak_inputs_bytes": ("inputs", ""),
    "peak_buffers_bytes": ("buffers and constants", ""),
}
COUNTS = {1: "one", 2: "two", 3: "three"}


def owners(plan: Plan) -> list[tuple[str, str, float]]:
    """(name, remark, bytes) of everything in the predicted peak, largest first."""
    owners = {**OWNERS, "peak_optimizer_bytes": ("optimizer states", kept(plan.optimizer))}
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
    rows.append(("peak", bytes_text(peak * GIB), "100.0 %", plan.predicted.peak_at))
    if limit := parts.get("memory_limit_bytes"):
        left = limit - peak * GIB
        used = f"what tensors may take of the device; the peak is {percent(peak * GIB, limit)} of it"
        rows.append(("limit", bytes_text(limit), "", used))
        rows.append(("free" if left >= 0 else "MISSING", bytes_text(abs(left)), "", ""))
    return Section("Memory of a rank", tuple(rows), ("kind", "bytes", "of the peak", ""))
