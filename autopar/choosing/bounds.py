"""What no plan of a capture can go below, on any mesh: work shared out evenly, every byte held once.

The share of any tensor that one rank has of one microbatch is at least 1 / (ranks * microbatches), and prices grow with
it, so the whole op's price over the ranks bounds all strategies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.choosing.again import POLICIES
from autopar.choosing.poser import Body
from autopar.cluster import Cluster
from autopar.optimizer_states import state_bytes
from autopar.passes.facts import Strategy, fact, operand_nodes, value
from autopar.passes.layout import WHOLE, Layout, Mesh
from autopar.passes.price import prices
from autopar.solver.cost import roofline, update

ALMOST = 1 - 1e-12  # sums of floats in another order


@dataclass(frozen=True)
class Floor:
    """Of one rank, were it alone: seconds of compute a step, bytes held all the time, kept, and at work at once (by an
    op, or made again by a unit)."""

    compute: float
    static: float
    saved: float
    transient: float

    def seconds(self, ranks: int) -> float:
        """A lower bound of the step on so many ranks."""
        return ALMOST * self.compute / ranks

    def nbytes(self, ranks: int, microbatches: int) -> float:
        """A lower bound of the bytes of the fullest rank."""
        return ALMOST * (self.static + (self.saved + self.transient) / microbatches) / ranks


def floor_of(body: Body, cluster: Cluster, policies: Sequence[str] = POLICIES) -> Floor:
    """The floor of a graph: each class counted as often as it occurs. Where several ``policies`` of recomputation are
    open, what a unit would keep is there at least while its own backward runs."""
    alone, chip = Mesh(()), cluster.chip
    times = [sum(u.kind == kind for u in body.units.units) for kind in range(len(body.units.first))]
    compute = saved = transient = static = again = 0.0
    for wiring, count in zip(body.wirings, times, strict=True):
        kept = 0.0
        for op in wiring.ops:
            whole = Strategy(
                (),
                (),
                tuple(Layout("", (WHOLE,) * len(value(o).shape)) for o in operand_nodes(op)),
                tuple(None if v is None else Layout("", (WHOLE,) * len(v.shape)) for v in fact(op).values),
            )
            priced = prices(op, [whole], alone)
            rate, moved = chip.matmul_rate(priced.dtype), chip.memory_rate
            forward = roofline(priced.flops_forward, priced.moved_forward, rate, moved)
            backward = roofline(priced.flops_backward, priced.moved_backward, rate, moved)
            compute += count * float((forward + backward)[0])
            kept += float(priced.saved_new[0])
            transient = max(transient, float(priced.transient[0]))
        own = [t for t in wiring.tensors if t.made and not t.view and (t.kept or t.own)]
        if policies == ("none",):
            saved += count * (kept + sum(t.value.nbytes for t in own))
        else:
            again = max(again, kept + sum(t.value.nbytes for t in own if t.border is None))
    if policies != ("none",):
        saved = float(sum(_held(body, policies).values()))
    for parameter in _parameters(body):
        v = value(parameter).resting
        kept = state_bytes(body.prepared.captured.optimizer, v.shape, v.dtype, v.nbytes) if v.grad else 0.0
        static += v.nbytes * (2 if v.grad else 1) + kept
        compute += float(update(v.nbytes, kept, chip.memory_rate)) if v.grad else 0.0
    return Floor(compute, static, saved, max(transient, again))


def _held(body: Body, policies: Sequence[str]) -> dict[fx.Node, int]:
    """Bytes of the tensors between units that some unit keeps, whatever it makes again."""
    found = {}
    for unit in body.units.units:
        wiring = body.wirings[unit.kind]
        for t in wiring.tensors:
            if t.border is None or t.parameter or t.made is not None or t.view:
                continue
            if all(wiring.holds(t, policy) for policy in wiring.policies(policies)):
                found[unit.borders[t.border]] = t.value.nbytes
    return found


def _parameters(body: Body) -> list[fx.Node]:
    """The parameters that the core reads."""
    names = body.prepared.captured.parameters
    read = {o for unit in body.units.units for op in unit.ops for o in operand_nodes(op)}
    return [n for n in body.prepared.body.graph.nodes if n in read and n.op == "get_attr" and str(n.target) in names]
