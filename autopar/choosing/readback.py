"""From an assignment back to the graph: a strategy on every node, and how parameters rest; then the plan."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.choosing.pose import Posed
from autopar.choosing.poser import Body
from autopar.choosing.wiring import Wiring
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.passes.complete_layouts import treat
from autopar.passes.divide_work import flops
from autopar.passes.facts import KEY, fact, value
from autopar.passes.follow_time import TimeChoices
from autopar.passes.layout import Layout
from autopar.passes.parameter_states import ParameterState
from autopar.passes.roles import divides_nothing, shares_nothing, why_whole
from autopar.passes.sequence import DIVIDE, cuts_nothing, why_uncut
from autopar.passes.sides import sides
from autopar.passes.split_prologue import copy_graph
from autopar.plan import Plan, Whole
from autopar.solver.problem import Assignment
from autopar.write_plan import plan_of


def completed(body: Body, posed: Posed, assignment: Assignment, times: TimeChoices) -> fx.GraphModule:
    """A copy of the body's graph in which every node does what the assignment says."""
    gm = copy_graph(body.prepared.body)
    copy = dict(zip(body.prepared.body.graph.nodes, gm.graph.nodes, strict=True))
    shared = {n: posed.shared[i][s] for i, (n, s) in enumerate(zip(posed.units.shared, assignment.shared, strict=True))}
    for unit, states in zip(posed.units.units, assignment.units, strict=True):
        for op, options, state in zip(unit.ops, posed.ops[unit.kind], states, strict=False):
            node = copy[op]
            node.meta[KEY] = replace(fact(node), strategy=options.strategies[state])
        wiring = body.wirings[unit.kind]
        at = len(unit.ops) + len(wiring.own(parameters=False))
        for parameter, treatments, state in zip(
            _own_parameters(wiring, unit.ops), posed.parameters[unit.kind], states[at:-1], strict=True
        ):
            _treat(copy[parameter], treatments[state], posed)
    for node, held in shared.items():
        if isinstance(held, ParameterState):
            _treat(copy[node], held, posed)
    _unread(gm, frozenset(body.prepared.captured.parameters), posed)
    captured, over_time = (
        body.prepared.captured,
        TimeChoices({copy[n]: c for n, c in times.ops.items()}, {copy[n]: x for n, x in times.layouts.items()}),
    )
    batched = {i.name for i in captured.inputs if i.batch}
    followed = {
        axis: TimeChoices({copy[n]: c for n, c in found.ops.items()}, {copy[n]: x for n, x in found.layouts.items()})
        for axis, found in (posed.roles.follow if posed.roles else {}).items()
    }
    return sides(gm, posed.mesh, over_time, batched, body.prepared.hoisted, followed)


def _own_parameters(wiring: Wiring, ops: tuple[fx.Node, ...]) -> list[fx.Node]:
    """The parameters of a unit's own, in the order of the class's variables: those its ops read where the first
    unit's read theirs."""
    from autopar.passes.facts import operand_nodes

    return [operand_nodes(ops[t.readers[0].op])[t.readers[0].slot] for t in wiring.own(parameters=True)]


def _treat(node: fx.Node, state: ParameterState, posed: Posed) -> None:
    treat(
        node, state.rest, state.use, state.gather, "microbatch" if state.reduce == "microbatch" else "step", posed.mesh
    )


def _unread(gm: fx.GraphModule, parameters: frozenset[str], posed: Posed) -> None:
    """Parameters that no op of the core reads rest whole."""
    for node in gm.graph.nodes:
        if node.op == "get_attr" and str(node.target) in parameters and fact(node).strategy is None:
            whole = Layout.uniform("I", len(posed.mesh.axes), len(value(node).shape))
            if posed.mesh.time is not None:
                whole = whole.with_kind(posed.mesh.time, "R")
            treat(node, whole, whole, "never", "step", posed.mesh)


def plan_from(body: Body, posed: Posed, assignment: Assignment, times: TimeChoices, cluster: Cluster) -> Plan:
    """The plan that an assignment amounts to, without predictions and proof."""
    gm = completed(body, posed, assignment, times)
    policies = [posed.policies[u.kind][s[-1]] for u, s in zip(posed.problem.units, assignment.units, strict=True)]
    rename = posed.roles is None
    plan = plan_of(gm, body.prepared.captured, posed.mesh, cluster, recompute=policies or "none", rename=rename)
    return replace(plan, predicted=replace(plan.predicted, whole=_left_whole(posed, assignment)))


def _left_whole(posed: Posed, assignment: Assignment) -> tuple[Whole, ...]:
    """The ops that pinned axes should divide and leave whole. Raises AutoparError where one divides none."""
    roles, left = posed.roles, list[Whole]()
    if roles is None:
        return ()
    done = {
        op: options.strategies[state]
        for unit, states in zip(posed.units.units, assignment.units, strict=True)
        for op, options, state in zip(unit.ops, posed.ops[unit.kind], states, strict=False)
    }
    for axis in (roles.cut, roles.tensor):
        if axis is None:
            continue
        name, size = posed.mesh.axes[axis].name, posed.mesh.axes[axis].size
        idle = [op for op, chosen in done.items() if flops(op) and chosen.choices[axis].kind not in DIVIDE]
        why = [
            why_whole(op, size, roles.limits[op]) if axis == roles.tensor else why_uncut(op, size, roles.along[op])
            for op in idle
        ]
        whole = [Whole(name, fact(op).fqn or op.name, str(op.target), w) for op, w in zip(idle, why, strict=True)]
        if len(idle) == sum(flops(op) > 0 for op in done):
            words = [f"{w.fqn} ({w.op.removeprefix('aten.')}): {w.why}" for w in whole]
            raise AutoparError(
                divides_nothing(size, words) if axis == roles.tensor else cuts_nothing(size, roles.along)
            )
        left += whole
    if roles.sequence and not any(roles.limits[op].cuts_sequence(s, roles.tensor or 0) for op, s in done.items()):
        raise AutoparError(shares_nothing(posed.mesh.axes[roles.tensor or 0].size))
    return tuple(left)


__all__ = ["completed", "plan_from"]
