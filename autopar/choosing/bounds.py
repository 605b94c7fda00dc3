"""What no plan of a capture can go below, on any mesh: work shared out evenly, every byte held once.

The share of any tensor that one rank has of one microbatch is at least 1 / (ranks * microbatches), and prices grow with
it, so the whole op's price over the ranks bounds all strategies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.choosing.again import POLICIES
from autopar.choosing.poser import Body
from autopar.choosing.wiring import Wiring
from autopar.cluster import Cluster
from autopar.hardware import Chip
from autopar.optimizer_states import state_bytes
from autopar.passes.facts import Strategy, fact, operand_nodes, value
from autopar.passes.layout import WHOLE, Layout, Mesh
from autopar.passes.price import prices
from autopar.solver.cost import roofline, update
from autopar.solver.pipes import NO_PIPE, Pipe
from autopar.solver.search import Quick

ALMOST = 1 - 1e-12  # sums of floats in another order


@dataclass(frozen=True)
class Floor:
    """Of one rank, were it alone: seconds of compute a step, bytes held all the time, kept, and at work at once (by an
    op, or made again by a unit). ``ways``: how less may be kept, (seconds a byte, bytes), the cheapest first.
    ``parted``: (F + I - W) / (F + I + W) of the seconds of forwards, input and weight gradients: the bubbles of a
    schedule that parts the last two are so many microbatches a rank (Qi et al. 2023, table 2)."""

    compute: float
    static: float
    saved: float
    transient: float
    least: float
    ways: tuple[tuple[float, float], ...] = ()
    parted: float = 1.0

    def again(self, ranks: int, microbatches: int, limit: float) -> float:
        """Seconds of one rank alone that must be spent on making things again so that each of so many fits ``limit``
        bytes: units as a fractional knapsack."""
        over = self.saved + self.transient - (limit * ranks / ALMOST - self.static) * microbatches
        seconds = 0.0
        for price, nbytes in self.ways:
            if over <= 0:
                break
            seconds += price * min(nbytes, over)
            over -= nbytes
        return seconds

    def quick(self, ranks: int, microbatches: int, limit: float, pipe: Pipe = NO_PIPE) -> Quick:
        """Lower bounds of the step and of the bytes of the fullest of so many ranks, in a pipeline or in none."""
        share, again = ranks / ALMOST, self.again(ranks, microbatches, limit)
        rate = share / (pipe.share(microbatches) * pipe.ranks)  # all wait while a pipeline fills
        compute = [("compute", self.compute, rate), ("made again", again, rate)]
        held = [("held", self.static, share), ("kept and at work", self.least, share * microbatches)]
        return Quick.of(seconds=[compute], bytes=[held])


def floor_of(body: Body, cluster: Cluster, policies: Sequence[str] = POLICIES) -> Floor:
    """The floor of a graph: each class counted as often as it occurs. Where several ``policies`` of recomputation are
    open, what a unit would keep is there at least while its own backward runs."""
    chip = cluster.chip
    times = [sum(u.kind == kind for u in body.units.units) for kind in range(len(body.units.first))]
    compute = transient = static = run = weights = 0.0
    saved = least = float(sum(_held(body, policies).values()))
    fullest, ways = 0.0, list[tuple[float, float]]()
    for wiring, count in zip(body.wirings, times, strict=True):
        alone = [_alone(op, chip) for op in wiring.ops]
        run += count * sum(op.forward + op.backward for op in alone)
        weights += count * sum(op.weights for op in alone)
        transient = max([transient, *(op.transient for op in alone)])
        points = [_kept(wiring, policy, alone) for policy in wiring.policies(policies)]
        saved += count * max(kept for kept, _ in points)
        least += count * min(kept for kept, _ in points)
        fullest = max(fullest, points[0][0]) if len(points) > 1 else fullest
        ways += [(price, count * nbytes) for price, nbytes in _hull(points)]
        compute += count * min(seconds for _, seconds in points)
    for parameter in _parameters(body):
        v = value(parameter).resting
        states = state_bytes(body.prepared.captured.optimizer, v.shape, v.dtype, v.nbytes) if v.grad else 0.0
        static += v.nbytes * (2 if v.grad else 1) + states
        compute += float(update(v.nbytes, states, chip.memory_rate)) if v.grad else 0.0
    parted = 1 - 2 * weights / run if run else 1.0
    return Floor(compute + run, static, saved, transient, least + max(transient, fullest), tuple(sorted(ways)), parted)


@dataclass(frozen=True)
class _Op:
    """An op whole: seconds, of which ``weights`` are those of the gradients of parameters, bytes kept besides operands
    and results, working bytes."""

    forward: float
    backward: float
    weights: float
    new: float
    transient: float


def _alone(op: fx.Node, chip: Chip) -> _Op:
    whole = Strategy(
        (),
        (),
        tuple(Layout("", (WHOLE,) * len(value(o).shape)) for o in operand_nodes(op)),
        tuple(None if v is None else Layout("", (WHOLE,) * len(v.shape)) for v in fact(op).values),
    )
    p = prices(op, [whole], Mesh(()))
    rate, moved = chip.matmul_rate(p.dtype), chip.memory_rate
    forward, backward = (
        float(roofline(flops, nbytes, rate, moved)[0])
        for flops, nbytes in ((p.flops_forward, p.moved_forward), (p.flops_backward, p.moved_backward))
    )
    graded = [o for o in operand_nodes(op) if value(o).grad]
    leaves = sum(o.op == "get_attr" and len(value(o).shape) > 1 for o in graded)
    weights = backward * min(leaves, 1) / max(min(len(graded), 2), 1)
    return _Op(forward, backward, weights, float(p.saved_new[0]), float(p.transient[0]))


def _kept(wiring: Wiring, policy: str, alone: Sequence[_Op]) -> tuple[float, float]:
    """Bytes of its own that a unit keeps at least, and seconds of what runs again."""
    own = [t for t in wiring.tensors if t.made is not None and t.border is None and not t.view]
    if policy == "none":
        return sum(op.new for op in alone) + float(sum(t.value.nbytes for t in own if t.kept or t.own)), 0.0
    a = wiring.again[policy]
    kept = sum(t.value.nbytes for t in own if t.made in a.stays and not t.weight)
    return kept + sum(alone[i].new for i in a.inner), sum(alone[i].forward for i in a.ops)


def _hull(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """From the point that keeps most to that which keeps least, (seconds a byte, bytes) of each step along the lower
    hull: no mix of policies frees bytes for less.

    >>> list(_hull([(9.0, 0.0), (5.0, 1.0), (1.0, 6.0), (0.0, 3.5)]))
    [(0.25, 4.0), (0.5, 5.0)]
    """
    kept, seconds = max(points, key=lambda p: (p[0], -p[1]))
    while below := [p for p in points if p[0] < kept]:
        slope, nearest = min(((t - seconds) / (kept - n), n) for n, t in below)
        yield max(slope, 0.0), kept - nearest
        kept, seconds = nearest, seconds + slope * (kept - nearest)


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
