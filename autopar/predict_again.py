"""What the units of an emitted program make again in backward: which ops and changes of layout, and what that takes.

As `passes.differentiate` cuts a unit of one rank, on the graph of the whole model, where the prices are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.choosing.again import stays
from autopar.choosing.inside import inside
from autopar.choosing.wiring import weights_of
from autopar.hardware import Chip
from autopar.passes.changes import COLLECTIVES, price
from autopar.passes.completion import is_op, result_slots
from autopar.passes.divide_work import flops
from autopar.passes.facts import fact, operand_nodes, value
from autopar.passes.insert_changes import change
from autopar.passes.layout import Mesh
from autopar.passes.lower import Local
from autopar.passes.saves import saves
from autopar.passes.units import producer_of
from autopar.plan import Plan
from autopar.predict_seconds import Priced
from autopar.runtime.run import units_of
from autopar.runtime.units import Explicit
from autopar.solver.cost import roofline


@dataclass(frozen=True)
class Repeated:
    """Seconds in a microbatch, computing and waiting for collectives, and the FLOPs of the whole model in a step."""

    compute: float = 0.0
    exposed: float = 0.0
    flops: float = 0.0


def repeated(
    graph: fx.GraphModule, recompute: Sequence[str], plan: Plan, mesh: Mesh, priced: Priced, chip: Chip
) -> Repeated:
    """Of a body with changes inserted. ``recompute``: the policy of each unit. Changes of weights are made again for
    every backward, whatever the policy, and are no part of it."""
    compute = exposed = work = 0.0
    weights = weights_of(graph, frozenset(plan.parameters))
    for node in made_again(graph, recompute, frozenset(plan.parameters)):
        if node.target is change:
            alone = replace(value(node), grad=False)
            exposed += 0.0 if node in weights else price(node.meta["change"], alone, mesh)
            continue
        p = priced.of(node)
        compute += float(roofline(p.flops_forward[0], p.moved_forward[0], chip.matmul_rate(p.dtype), chip.memory_rate))
        work += flops(node)
        found = fact(node).strategy
        within = inside(node, found, mesh.without_wires()) if found is not None else None
        if within is not None and _policy(node, recompute) == "full":
            exposed += within.seconds(mesh, train=False)
    return Repeated(compute, exposed, work)


def made_again(graph: fx.GraphModule, recompute: Sequence[str], parameters: frozenset[str]) -> list[fx.Node]:
    """The ops and changes that run a second time, in the order of the graph. What depends on no parameter (masks,
    tables) is taken to be there."""
    again = set[fx.Node]()
    core = core_of(graph, parameters)
    waiting: list[tuple[fx.Node, fx.Node]] = []  # who reads what
    for node in graph.graph.nodes:
        if node not in core or not is_op(node) or node.target is change or _policy(node, recompute) == "none":
            continue
        found, operands, results = saves(node), operand_nodes(node), result_slots(node)
        waiting += [(node, operands[slot]) for slot in found.operands]
        waiting += [(node, t) for r in found.results if (t := results[r]) is not None]
        if found.new and not _stays(node, recompute):
            _run(node, again, waiting)
    while waiting:
        reader, tensor = waiting.pop()
        made = producer_of(tensor)
        if made in core and fact(made).unit == fact(reader).unit and not _stays(made, recompute):
            _run(made, again, waiting)
    return [node for node in graph.graph.nodes if node in again]


def core_of(graph: fx.GraphModule, parameters: frozenset[str]) -> frozenset[fx.Node]:
    """The calls that depend on a parameter."""
    found = set[fx.Node]()
    for node in graph.graph.nodes:
        reads = (n in found or (n.op == "get_attr" and str(n.target) in parameters) for n in node.all_input_nodes)
        if node.op == "call_function" and any(reads):
            found.add(node)
    return frozenset(found)


def _run(node: fx.Node, again: set[fx.Node], waiting: list[tuple[fx.Node, fx.Node]]) -> None:
    if node not in again:
        again.add(node)
        waiting += [(node, operand) for operand in operand_nodes(node)]


def _policy(node: fx.Node, recompute: Sequence[str]) -> str:
    unit = fact(node).unit
    return "none" if unit is None or not recompute else recompute[unit]


def _stays(node: fx.Node, recompute: Sequence[str]) -> bool:
    if _policy(node, recompute) != "selective":
        return False
    if node.target is change:
        return COLLECTIVES[node.meta["change"].row][0] is not None
    return stays(node.target)


def kept(local: Local) -> int:
    """Bytes that units keep of the largest microbatch for their backwards, values between units once."""
    run = units_of(local)[max(local.units)]
    own, values = 0, dict[int, int]()
    for call in run.program.calls:
        unit = run.units[call.kind]
        if not isinstance(unit, Explicit):
            continue
        own += sum(s.nbytes for s in unit.made.saved if s.result is None)
        values |= {call.results[s.result]: s.nbytes for s in unit.made.saved if s.result is not None}
        for i in unit.reads:
            word, number = call.args[i]
            if word == "value":
                values[number] = unit.kind.graph.graph.find_nodes(op="placeholder")[i].meta["val"].nbytes
    return own + sum(values.values())


__all__ = ["Repeated", "kept", "made_again", "repeated"]
