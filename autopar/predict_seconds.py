"""Seconds of a step on one rank, added up over the ops and changes of layout of the emitted program.

Compute is the roofline of every op under its strategy; a change of layout takes what the wire of its axis takes. Those
of activations are waited for; those of parameters and gradients run beside compute. All figures are of a whole step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from autopar.choosing.wiring import weights_of
from autopar.hardware import Chip
from autopar.passes.changes import Step, path, price
from autopar.passes.completion import is_op
from autopar.passes.divide_work import flops
from autopar.passes.facts import Strategy, Value, fact, operand_nodes, value
from autopar.passes.insert_changes import change
from autopar.passes.layout import Mesh
from autopar.passes.lower import Local, ParameterUse
from autopar.passes.moves import Moved, beside, held, terms
from autopar.passes.price import Prices, local_bytes, prices
from autopar.passes.saves import Call, call_of
from autopar.passes.strategy import strategy
from autopar.plan import Plan
from autopar.runtime.run import units_of
from autopar.runtime.weights import ways_of
from autopar.solver.cost import cast, roofline


@dataclass(frozen=True)
class Work:
    """What the ops of a graph take in a microbatch: ``seconds``, and the most working memory (bytes) of any of them,
    the weights that it has gathered included."""

    seconds: float = 0.0
    transient: int = 0


class Priced:
    """Prices of ops, equal ops once."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._known: dict[tuple[Call, Strategy], Prices] = {}

    def of(self, node: fx.Node) -> Prices:
        """The prices of a node under its own strategy."""
        found = fact(node).strategy
        assert found is not None, f"{node} has no strategy"
        key = (call_of(node), found)
        if key not in self._known:
            self._known[key] = prices(node, [found], self.mesh)
        return self._known[key]


def work_of(graph: fx.GraphModule, plan: Plan, priced: Priced, chip: Chip, *, train: bool) -> Work:
    """Add up a body (or prologue) with changes inserted."""
    seconds, transient = 0.0, 0.0
    for node in _ops(graph):
        p = priced.of(node)
        flops_per_s, bytes_per_s = chip.matmul_rate(p.dtype), chip.memory_rate
        seconds += float(roofline(p.flops_forward[0], p.moved_forward[0], flops_per_s, bytes_per_s))
        if train:
            seconds += float(roofline(p.flops_backward[0], p.moved_backward[0], flops_per_s, bytes_per_s))
        transient = max(transient, float(p.transient[0]) + _gathered(node, plan, priced.mesh))
    return Work(seconds, round(transient))


def _ops(graph: fx.GraphModule) -> Iterator[fx.Node]:
    return (n for n in graph.graph.nodes if is_op(n) and n.target is not change)


def _gathered(node: fx.Node, plan: Plan, mesh: Mesh) -> int:
    """Bytes of the weights that this op reads and that are gathered at each use."""
    found, total = fact(node).strategy, 0
    assert found is not None
    for operand, layout in zip(operand_nodes(node), found.operands, strict=True):
        root = operand
        while root.target is change:
            (root,) = operand_nodes(root)
        parameter = plan.parameters.get(str(root.target)) if root.op == "get_attr" else None
        if parameter is not None and parameter.gather == "use":
            total += local_bytes(value(operand), layout, mesh)
    return total


def moved_in(graph: fx.GraphModule, plan: Plan, mesh: Mesh, times: int, *, train: bool) -> Moved:
    """Changes of layout in a graph that runs ``times`` a step. Those of parameters, and of what depends on parameters
    alone, are hidden; backward makes them again, so that nothing of a gathered weight is kept."""
    found = Moved()
    weights = weights_of(graph, frozenset(plan.parameters))
    for node in graph.graph.nodes:
        if node.target is not change:
            continue
        step: Step = node.meta["change"]
        forward, backward = _both_ways(step, value(node), mesh, train=train)
        if node in weights:
            found += beside(times * ((2 if train else 1) * forward + backward), step.axis, mesh)
        else:
            found += Moved(times * (forward + backward))
    return found


def moved_on_entry(local: Local, mesh: Mesh, times: int, *, train: bool) -> Moved:
    """Rest -> use of all parameters, and their gradients' way back: bytes by parameter, latencies by bucket."""
    latency, moving = entry_moved(local, mesh, times, train=train)
    return latency + moving


def entry_moved(local: Local, mesh: Mesh, times: int, *, train: bool) -> tuple[Moved, Moved]:
    """`moved_on_entry`: latencies, and what bytes take."""
    latency = moving = Moved()
    for bucket, there, back in ways_of(local, units_of(local)).moves(times, train=train):
        ways = [_on_entry(local.parameters[i], local, mesh, there, back) for i in bucket.members]
        latency += max((fixed for fixed, _ in ways), key=lambda m: m.seconds)
        moving = sum((bytes_s for _, bytes_s in ways), moving)
    return latency, moving


def cast_seconds(local: Local, times: int, chip: Chip, *, train: bool) -> float:
    """Of casts from how parameters rest to the dtype that they are used in, a step."""
    seconds = 0.0
    for bucket, there, _ in ways_of(local, units_of(local)).moves(times, train=train):
        for use in (local.parameters[i] for i in bucket.members):
            if use.use_dtype:
                read, written = (local_bytes(v, use.rest, local.mesh) for v in (use.value.resting, use.value))
                seconds += there * float(cast(read, written, chip.memory_rate))
    return seconds


def _on_entry(use: ParameterUse, local: Local, mesh: Mesh, there: int, back: int) -> tuple[Moved, Moved]:
    """One parameter that goes so often from rest to use, and its gradient back: the latencies, and what its bytes
    take."""
    v, latency, moving = use.value, Moved(), Moved()
    more = v.reduced.dtype.itemsize / v.dtype.itemsize
    for step in path(use.rest, use.use, v, local.mesh) or ():
        nbytes = held(step, v, mesh)
        fixed, per_byte = terms(step.row, step.axis, False, mesh)
        fixed_both, per_byte_both = terms(step.row, step.axis, v.grad, mesh)
        latency += beside(there * fixed + back * (fixed_both - fixed), step.axis, mesh)
        moving += beside(nbytes * (there * per_byte + back * more * (per_byte_both - per_byte)), step.axis, mesh)
    return latency, moving


def _both_ways(step: Step, v: Value, mesh: Mesh, *, train: bool) -> tuple[float, float]:
    forward = price(step, replace(v, grad=False), mesh)
    return forward, price(step, v, mesh) - forward if train else 0.0


def model_flops(graph: fx.GraphModule, *, train: bool) -> Counter[str]:
    """FLOPs of the whole model in one step, by dtype, forward and (``train``) backward, as torch's counter has them."""
    found: Counter[str] = Counter()
    alone = Mesh(())
    known: dict[Call, Prices] = {}
    for node in _ops(graph):
        if not flops(node):
            continue
        key = call_of(node)
        if key not in known:
            whole = strategy(node, alone, (), ())
            assert whole is not None
            known[key] = prices(node, [whole], alone)
        p = known[key]
        found[p.dtype] += round(float(p.flops_forward[0]) + (float(p.flops_backward[0]) if train else 0.0))
    return found


__all__ = [
    "Moved",
    "Priced",
    "Work",
    "cast_seconds",
    "entry_moved",
    "model_flops",
    "moved_in",
    "moved_on_entry",
    "work_of",
]
