"""Seconds of every op of a plan's graph, forward and backward apart, as `predict_seconds` adds them up."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import fx

from autopar.choosing.inside import inside
from autopar.choosing.wiring import weights_of
from autopar.hardware import Chip
from autopar.passes.changes import price
from autopar.passes.completion import is_op
from autopar.passes.facts import fact, operand_nodes, value
from autopar.passes.insert_changes import change
from autopar.passes.layout import Mesh
from autopar.passes.lower import Lowerable
from autopar.plan import Plan
from autopar.predict_again import made_again
from autopar.predict_seconds import Priced
from autopar.solver.cost import roofline

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OpSeconds:
    """One entry an op, in the order of `ops_of`, for the microbatch with the most rows on one rank.

    ``forward``, and of backward what ``inputs`` and ``weights`` (those of parameters) take; ``again``: of forward, once
    more; ``there`` and ``back``: waiting for collectives of activations in forward and backward, those that are sent
    ``resent`` included.
    """

    forward: Seconds
    inputs: Seconds
    weights: Seconds
    again: Seconds
    there: Seconds
    back: Seconds
    resent: Seconds

    @property
    def total(self) -> Seconds:
        """All of them."""
        return self.forward + self.inputs + self.weights + self.again + self.there + self.back


def places(graph: fx.GraphModule) -> dict[fx.Node, int]:
    """The place in `ops_of` of every op, in a graph with changes too: a change is with the op that comes next."""
    found, at = dict[fx.Node, int](), 0
    for node in graph.graph.nodes:
        if node.op != "call_function" or not is_op(node):
            continue
        found[node] = at
        at += node.target is not change
    return {node: min(place, at - 1) for node, place in found.items()}


def op_seconds(model: Lowerable, plan: Plan, mesh: Mesh, chip: Chip) -> OpSeconds:
    """Of a model with changes inserted. ``mesh``: the plan's, with the wires of a cluster."""
    place, priced, plain = places(model.body), Priced(mesh), mesh.without_wires()
    parameters = frozenset(plan.parameters)
    weights = weights_of(model.body, parameters)
    count = 1 + max(place.values(), default=-1)
    forward, inputs, own, again, there, back, resent = (np.zeros(count) for _ in range(7))
    for node, at in place.items():
        if node.target is change:
            if node not in weights:
                alone = price(node.meta["change"], replace(value(node), grad=False), mesh)
                there[at] += alone
                back[at] += price(node.meta["change"], value(node), mesh) - alone
            continue
        p = priced.of(node)
        rates = chip.matmul_rate(p.dtype), chip.memory_rate
        forward[at] = float(roofline(p.flops_forward[0], p.moved_forward[0], *rates))
        backward = float(roofline(p.flops_backward[0], p.moved_backward[0], *rates))
        own[at] = backward * _of_weights(node, weights)
        inputs[at] = backward - own[at]
        found = fact(node).strategy
        within = None if found is None else inside(node, found, plain)
        if within is not None:
            there[at] += within.seconds(mesh, train=False)
            back[at] += within.seconds(mesh) - within.seconds(mesh, train=False)
    for node in made_again(model.body, model.recompute, parameters):
        at = place[node]
        found, unit = fact(node).strategy, fact(node).unit
        if node.target is not change:
            again[at] += forward[at]
            within = None if found is None else inside(node, found, plain)
            if within is not None and unit is not None and model.recompute[unit] == "full":
                resent[at] += within.seconds(mesh, train=False)
        elif node not in weights:
            resent[at] += price(node.meta["change"], replace(value(node), grad=False), mesh)
    return OpSeconds(forward, inputs, own, again, there, back + resent, resent)


def _of_weights(node: fx.Node, weights: frozenset[fx.Node]) -> float:
    """The share of an op's backward that is of weights: of its operands with a gradient as many as are weights."""
    wanted = [n for n in operand_nodes(node) if value(n).grad]
    large = [n for n in wanted if len(value(n).shape) > 1] or wanted
    return sum(n in weights for n in large) / len(large) if large else 0.0


__all__ = ["OpSeconds", "op_seconds", "places"]
