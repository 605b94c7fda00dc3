"""What one rank holds during a step, in bytes, added up from the shapes of its emitted program.

Independent of the solver's prices: resting pieces, gradients and optimizer states are those of the real program to the
byte, and what autograd keeps is measured (`run_on_fakes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, fx

from autopar.capture import Capture
from autopar.count_collectives import microbatches
from autopar.optimizer_states import state_bytes
from autopar.passes.facts import Value
from autopar.passes.layout import Layout
from autopar.passes.lower import Local, ParameterUse
from autopar.plan import Optimizer
from autopar.run_on_fakes import Ran

SAME_MEMORY = ("replicate", "invariant", "to")  # ops of an enter graph that move nothing


def predict_bytes(local: Local, captured: Capture, ran: Ran, optimizer: Optimizer) -> dict[str, float]:
    """The entries ``*_bytes`` of `Predicted.parts` but for the working memory; ``ran``: the largest microbatch.

    A gradient that adds up in another layout than it rests in (``accumulator_bytes``) is held beside it. Where both are
    whole (rest ``I``, use ``R``) the one becomes the other and counts once. In mixed precision what is used is a copy,
    and gradients of several microbatches add up in the dtype of rest.
    """
    several = sum(microbatches(local).values()) > 1
    rests = _rests(local, captured)
    entered = [u for u in local.parameters if u.gather != "use" and _copied(local, u)]
    with_gradient = [u for u in local.parameters if u.fqn in ran.reached]
    gradients = sum(_piece(local, u.value.resting, u.rest) for u in with_gradient)
    adding_up = [u for u in entered if u.fqn in ran.reached and u.reduce == "step" and _moves(local, u)]
    return {
        "parameters_bytes": rests,
        "gradients_bytes": gradients,
        "optimizer_bytes": sum(
            state_bytes(optimizer, u.shape, u.dtype, _piece(local, u.value.resting, u.rest)) for u in with_gradient
        ),
        "saved_bytes": ran.saved,
        "gathered_step_bytes": sum(_piece(local, u.value, u.use) for u in entered),
        "accumulator_bytes": sum(_piece(local, u.value.resting if several else u.value, u.use) for u in adding_up),
        "inputs_bytes": _inputs(local),
        "buffers_bytes": _nbytes([*captured.buffers.values(), *(captured.constants[n] for n in local.constants)]),
    }


def _rests(local: Local, captured: Capture) -> int:
    """Pieces at rest; a parameter that the graph does not use rests whole."""
    used = {u.fqn for u in local.parameters}
    return sum(_piece(local, u.value.resting, u.rest) for u in local.parameters) + _nbytes(
        p for fqn, p in captured.parameters.items() if fqn not in used
    )


def _piece(local: Local, v: Value, layout: Layout) -> int:
    return math.prod(layout.local_shape(v.shape, local.mesh, local.coordinates)) * v.dtype.itemsize


def _copied(local: Local, use: ParameterUse) -> bool:
    """Whether the program takes the parameter as a copy, in another layout or dtype, held over the step."""
    return bool(use.use_dtype) or _moves(local, use)


def _moves(local: Local, use: ParameterUse) -> bool:
    """Whether the program takes it in another layout than it rests in."""
    if use.fqn not in local.enter:
        return False
    ops = [n.target.overloadpacket.__name__ for n in local.enter[use.fqn].graph.nodes if n.op == "call_function"]
    return any(op not in SAME_MEMORY for op in ops)


def _inputs(local: Local) -> int:
    """This rank's pieces of all inputs of a step, and what its prologue makes of them."""
    mesh, total = local.mesh, 0
    body = local.body[max(local.body)].graph
    holders = list(body.find_nodes(op="placeholder"))
    first = len(local.parameters) + len(local.buffers) + len(local.constants)
    for use, holder in zip(local.inputs, holders[first:], strict=False):
        pieces = mesh.axes[mesh.time].size if mesh.time is not None and use.layout.kinds[mesh.time] == "S" else 1
        for m in range(pieces):
            at = tuple(m if a.is_time else c for a, c in zip(mesh.axes, local.coordinates, strict=True))
            total += math.prod(use.layout.local_shape(use.shape, mesh, at)) * holder.meta["val"].element_size()
    hoisted = holders[first + len(local.inputs) :]
    return total + _nbytes(_vals(hoisted))


def _vals(nodes: Iterable[fx.Node]) -> Iterable[Tensor]:
    return (n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), Tensor))


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


__all__ = ["predict_bytes"]
