"""The step of a pipeline: every stage's seconds, simulated under the plan's schedule.

Seconds of a microbatch are those of the one with the most rows, scaled to the mean. What crosses goes over the link
between stages beside compute; parameters and gradients of a stage go beside it too, as they do without stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from torch import fx

from autopar.choosing.stages import Crossed, crossed, unit_edges
from autopar.cluster import Cluster
from autopar.optimizer_states import state_bytes
from autopar.passes.changes import path
from autopar.passes.facts import fact, operand_nodes, value
from autopar.passes.insert_changes import change, produced_layout
from autopar.passes.layout import Mesh
from autopar.passes.lower import Lowerable
from autopar.passes.moves import Moved, beside, held, terms
from autopar.passes.price import local_bytes
from autopar.plan import Plan
from autopar.predict_ops import OpSeconds, op_seconds, places
from autopar.solver.simulate import Chunk, Step, Timeline, UnitTimes, run

COMPUTE = ("forward", "backward", "weight", "recompute")
"""Kinds of the simulation that are computation; those of parameters and gradients are `BESIDE`."""
BESIDE = ("gather", "reduce")


@dataclass(frozen=True)
class Link:
    """Between stages: seconds to begin, and bytes/s."""

    latency: float
    bandwidth: float

    @staticmethod
    def of(plan: Plan, cluster: Cluster) -> Link:
        """That of the plan's stages on a cluster."""
        return Link(*cluster.link("send", plan.pp, plan.stage_ranks))

    def seconds(self, tensors: int, nbytes: int) -> float:
        """Of so many tensors with so many bytes in all, one way."""
        return tensors * self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A plan with stages, priced. ``model``: with changes inserted; ``mesh``: with the cluster's wires."""

    plan: Plan
    model: Lowerable
    mesh: Mesh
    cluster: Cluster

    @cached_property
    def seconds(self) -> OpSeconds:
        """Of every op in one microbatch."""
        return op_seconds(self.model, self.plan, self.mesh, self.cluster.chip)

    @cached_property
    def crossed(self) -> Crossed:
        """What is alive between every two ops."""
        return crossed(self.model, frozenset(self.plan.parameters))

    @cached_property
    def link(self) -> Link:
        """Between stages."""
        return Link.of(self.plan, self.cluster)

    @cached_property
    def edges(self) -> list[int]:
        """See `unit_edges`."""
        return unit_edges(self.plan)

    def send(self, stage: int) -> tuple[int, int, int]:
        """What a stage sends on for a microbatch: tensors, bytes, and bytes that come back."""
        if stage == len(self.plan.stages) - 1:
            return 0, 0, 0
        at = self.edges[self.plan.stages[stage].last] - 1
        found = self.crossed
        return int(found.count[at]), int(found.forward[at]), int(found.backward[at])

    @cached_property
    def share(self) -> float:
        """Rows of the mean microbatch over those of the largest."""
        time = self.mesh.time
        rows = (1,) if time is None else self.mesh.axes[time].rows
        return sum(rows) / len(rows) / max(rows)

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """The ops that read each parameter, as it rests or in another layout."""
        found = dict[str, list[int]]()
        for node, place in places(self.model.body).items():
            for operand in operand_nodes(node) if node.target is not change else ():
                root = operand
                while root.target is change:
                    (root,) = operand_nodes(root)
                if root.op == "get_attr" and str(root.target) in self.plan.parameters:
                    found.setdefault(str(root.target), []).append(place)
        return found

    @cached_property
    def ways(self) -> tuple[str, str]:
        """When the parameters that move most often are gathered, and when gradients are reduced."""
        used = self.plan.parameters.values()
        gather = next((w for w in ("use", "step") if any(p.gather == w for p in used)), "never")
        return gather, next((w for w in ("microbatch", "step") if any(p.reduce == w for p in used)), "never")

    def ops(self, stage: int) -> range:
        """The ops of a stage."""
        of = self.plan.stages[stage]
        return range(self.edges[of.first], self.edges[of.last])

    @cached_property
    def leaves(self) -> dict[str, fx.Node]:
        """The nodes of parameters."""
        nodes = self.model.body.graph.find_nodes(op="get_attr")
        return {str(n.target): n for n in nodes if str(n.target) in self.plan.parameters}

    def units(self, stage: int) -> list[UnitTimes]:
        """Seconds of the units of a stage."""
        found, of = [], self.seconds
        for u in range(self.plan.stages[stage].first, self.plan.stages[stage].last):
            ops = slice(self.edges[u], self.edges[u + 1])
            forward, inputs, weights, again, there, back = (
                float(x[ops].sum()) * self.share
                for x in (of.forward, of.inputs, of.weights, of.again, of.there, of.back)
            )
            gather, reduce = self._parameters(range(ops.start, ops.stop), self.ops(stage))
            name = self.plan.units[u].fqn or "model"
            gathered, reduced = (1 / self.plan.microbatches if way == "step" else 1.0 for way in self.ways)
            there = there / self.share + gathered * gather.exposed
            back = back / self.share + (self.ways[0] == "use") * gather.exposed + reduced * reduce.exposed
            found.append(
                UnitTimes(
                    name, forward, inputs, weights, again, there, back, gather.hidden, reduce.hidden, comm="exposed"
                )
            )
        return found

    def _parameters(self, unit: range, stage: range) -> tuple[Moved, Moved]:
        """The gather of the parameters that a unit is the first of its stage to read, and the reduction of their
        gradients, each time that this is simulated: one latency for all. What moves once a step among others that move
        more often counts its part each time."""
        latency, moving = [Moved(), Moved()], [Moved(), Moved()]
        gathers, reduces = self.ways
        count = self.plan.microbatches
        for fqn, ops in self.readers.items():
            if min((op for op in ops if op in stage), default=-1) not in unit:
                continue
            node, parameter = self.leaves[fqn], self.plan.parameters[fqn]
            v, rest = value(node), fact(node).rest
            assert rest is not None
            more = v.reduced.dtype.itemsize / v.dtype.itemsize
            there = 1 / (2 * count) if (gathers, parameter.gather) == ("use", "step") else 1.0
            back = 1 / count if (reduces, parameter.reduce) == ("microbatch", "step") else 1.0
            for step in path(rest, produced_layout(node), v, self.model.mesh) or ():
                nbytes = held(step, v, self.mesh)
                fixed, per_byte = terms(step.row, step.axis, False, self.mesh)
                both, per_byte_both = terms(step.row, step.axis, v.grad and parameter.trainable, self.mesh)
                begins = (there * fixed, back * (both - fixed))
                moves = (there * nbytes * per_byte, back * nbytes * more * (per_byte_both - per_byte))
                for i in range(2):
                    latency[i] = max(latency[i], beside(begins[i], step.axis, self.mesh), key=lambda m: m.seconds)
                    moving[i] += beside(moves[i], step.axis, self.mesh)
        return latency[0] + moving[0], latency[1] + moving[1]

    @cached_property
    def kept(self) -> npt.NDArray[np.float64]:
        """Bytes that parameters take all the time, with gradients and optimizer states, by the op that reads them
        first."""
        found = np.zeros(self.edges[-1])
        for fqn, ops in self.readers.items():
            node, parameter = self.leaves[fqn], self.plan.parameters[fqn]
            v, rest = value(node), fact(node).rest
            assert rest is not None
            piece = float(local_bytes(v.resting, rest, self.mesh))
            states = state_bytes(self.plan.optimizer, v.shape, v.resting.dtype, piece)
            copied = parameter.gather == "step" or parameter.use_dtype != parameter.dtype
            found[min(ops)] += piece + (piece + states) * parameter.trainable
            found[min(ops)] += local_bytes(v, produced_layout(node), self.mesh) * copied
        return found

    @cached_property
    def saved(self) -> npt.NDArray[np.float64]:
        """About how many bytes each op keeps of a microbatch for its backward."""
        found = np.zeros(self.edges[-1])
        for node, place in places(self.model.body).items():
            strategy = fact(node).strategy
            if node.target is change or strategy is None:
                continue
            pairs = zip(strategy.results, fact(node).values, strict=False)
            found[place] += sum(local_bytes(v, x, self.mesh) for x, v in pairs if x is not None and v and v.grad)
        for (start, stop), policy in zip(pairwise(self.edges), self.model.recompute, strict=False):
            if policy == "full":
                found[start : stop - 1] = 0.0
        return found

    def simulate(self, optimizer_s: Sequence[float], ties: Iterable[tuple[str, Sequence[int]]]) -> Timeline:
        """The step. ``optimizer_s``: of each rank of the pipeline; ``ties``: see `autopar.runtime.stage.Stages`."""
        plan = self.plan
        stages = [
            Chunk(tuple((u, 1) for u in self.units(s)), self.link.seconds(*self.send(s)[:2]))
            for s in range(len(plan.stages))
        ]
        tied = sum(2 * (len(ranks) - 1) * self._copy_s(fqn) for fqn, ranks in ties)
        return run(
            Step(
                chunks=tuple(tuple(stages[r :: plan.pp]) for r in range(plan.pp)),
                microbatches=plan.microbatches,
                order=tuple(tuple(rank) for rank in plan.orders()),
                gather=self.ways[0],
                reduce=self.ways[1],
                overlap_p2p=True,
                optimizer_s=tuple(optimizer_s),
                tied_s=tied,
                staggered=False,
            )
        )

    def _copy_s(self, fqn: str) -> float:
        node = self.leaves[fqn]
        rest = fact(node).rest
        assert rest is not None
        shape = rest.local_shape(value(node).shape, self.mesh, self.mesh.coordinates(0))
        size = value(node).resting.dtype.itemsize
        for n in shape:
            size *= n
        return self.link.seconds(1, size)


def parts_of(line: Timeline) -> dict[str, float]:
    """Seconds of the mean rank, which add up to those of the step but for ``hidden_s``: all that parameters and
    gradients take, of which compute waits ``waits_s``."""
    mean = line.mean_parts()
    busy = [line.busy(rank) for rank in range(line.ranks)]
    return {
        "compute_s": sum(mean.get(kind, 0.0) for kind in COMPUTE),
        "exposed_s": mean.get("exposed", 0.0),
        "waits_s": sum(mean.get(kind, 0.0) for kind in BESIDE),
        "hidden_s": sum(b.get(kind, 0.0) for b in busy for kind in BESIDE) / len(busy),
        "send_s": mean.get("p2p", 0.0),
        "bubble_s": mean.get("bubble", 0.0),
        "optimizer_s": mean.get("optimizer", 0.0),
    }


__all__ = ["Link", "Pipeline", "parts_of"]
