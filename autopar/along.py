"""Plans along that of training: for a batch of other sizes, for another graph of the model, and for eval mode.

At other sizes a graph has the ops of the old one, so each takes the choices that the plan has for it. Where one is not
legal any more (rows or positions that an axis does not divide and cannot fill), the op takes the nearest that is: the
same factor in the parts in which its operands arrive, else what needs the cheapest changes. An axis of which not every
rank would get rows leaves them whole. Whatever is taken, changes of layout keep it exact. A graph with other ops (the
code branches on a length) is planned anew, on the same mesh. Parameters rest where they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import fx

from autopar.build import (
    Prepared,
    apply_leaf,
    completed,
    in_microbatches,
    known_choices,
    left_whole,
    plan_mesh,
    prepare,
)
from autopar.capture import Capture
from autopar.check_plan import fills_rows
from autopar.choosing.stages import unit_edges, with_stages
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.passes.changes import cost
from autopar.passes.complete_layouts import arriving, cheapest
from autopar.passes.completion import Completion
from autopar.passes.facts import KEY, Choice, Strategy, fact, is_tensor, operand_nodes, value
from autopar.passes.insert_changes import is_getitem, produced_layout
from autopar.passes.layout import Layout, Mesh
from autopar.passes.split_prologue import copy_graph
from autopar.passes.strategy import choices, fills, strategy
from autopar.pins import SEQUENCE
from autopar.plan import Op, Plan, Schedule, Stage, choice_from_text
from autopar.rests import resting, rests_of
from autopar.write_plan import ops_of, plan_of

MOST_DIMS = 64  # of an input, torch's own limit; a layout's text does not say how many there are


def prepare_like(captured: Capture, plan: Plan, *, float64: bool = False) -> Prepared:
    """The graph for a plan that is carried over, node for node that of the plan: where that has an axis in time, what
    runs once a step stands apart, also in one microbatch. ``float64``: see `prepare`."""
    prepared = prepare(captured, 1, float64=float64, forwards_first=plan.forwards_first)
    return in_microbatches(prepared) if _has_time(plan) else prepared


def same_ops(plan: Plan, prepared: Prepared) -> bool:
    """Whether a graph has the ops that a plan speaks of, sizes aside, and reads the same parameters and inputs."""
    nodes, leaves = ops_of(prepared.body), prepared.body.graph
    read = {str(n.target) for n in leaves.find_nodes(op="get_attr")} & set(prepared.captured.parameters)
    inputs = {n.name for n in leaves.find_nodes(op="placeholder")}
    return [op.op for op in _ops(plan)] == [str(n.target) for n in nodes] and (read, inputs) == (
        set(plan.parameters),
        set(plan.inputs),
    )


def carry_over(plan: Plan, prepared: Prepared, cluster: Cluster) -> Plan:
    """``plan`` for a graph of other sizes, as `prepare_like` makes it, which has its ops (`same_ops`). Predictions,
    proof and alternatives are left out."""
    captured, gm = prepared.captured, copy_graph(prepared.body)
    sized = _with_inputs(at_batch(plan, captured.batch), gm)
    mesh = plan_mesh(sized)
    state = Completion(gm, mesh, frozenset(captured.parameters))
    for node in state.leaves:
        if node.op == "placeholder":
            state.leaves[node] = Layout.parse(sized.inputs[node.name], len(value(node).shape))
        else:
            apply_leaf(sized, node, mesh)
            state.leaves[node] = produced_layout(node)
    for op, node in zip(_ops(sized), ops_of(gm), strict=True):
        state.plans[node] = _nearest(op, node, state)
    for node, layout in state.leaves.items():
        if node.op == "placeholder":
            node.meta[KEY] = replace(fact(node), strategy=Strategy((), state.order, (), (layout,)))
    for node in gm.graph.nodes:
        if node in state.plans:
            node.meta[KEY] = replace(fact(node), strategy=state.plans[node])
        elif is_tensor(node) and is_getitem(node):
            node.meta[KEY] = replace(fact(node), strategy=Strategy((), state.order, (), (state.layout(node),)))
    again = [plan.classes[unit.kind].recompute for unit in plan.units]
    made = plan_of(gm, captured, mesh, cluster, units=list(_units(plan)), recompute=again)
    kept = {name: getattr(sized, name) for name in ("cluster", "mesh", "stages", "microbatches", "schedule", "pins")}
    return replace(made, **kept)


def at_batch(plan: Plan, batch: int) -> Plan:
    """The plan with the most microbatches, up to its own, of which every one gives every data rank rows; where none
    does, all ranks take all rows, in as many more microbatches as there were data ranks, so that each is as large."""
    if not _has_time(plan):
        return replace(plan, batch=batch)
    count = min(plan.microbatches, batch // plan.row_unit)
    if batch % plan.row_unit:
        ranks = [plan.axes[i].size for i in plan.data]
        counts = range(min(plan.microbatches, batch), 0, -1)
        most = plan.microbatches * plan.row_unit
        count = next((n for n in counts if any(fills_rows(batch, n, [r]) for r in ranks)), min(batch, most))
    axes = tuple(replace(a, size=count) if a.is_time else a for a in plan.axes)
    schedule = plan.schedule if count == plan.microbatches else _schedule(plan)
    sized = replace(plan, batch=batch, microbatches=count, axes=axes, schedule=schedule)
    return sized if count > 1 else _without_time(sized)


def _without_time(plan: Plan) -> Plan:
    """Of one microbatch, without the axis in time, which is the last one."""
    time = len(plan.axes) - 1

    def spatial(text: str, ndim: int) -> str:
        layout = Layout.parse(text, ndim)
        return str(Layout(layout.kinds[:time], layout.with_kind(time, "R").dims))

    def op(known: Op) -> Op:
        order = tuple(a for a in known.order if a != time)
        return replace(known, choices=known.choices[:time], order=order)

    return replace(
        plan,
        axes=plan.axes[:time],
        classes=tuple(replace(c, ops=tuple(map(op, c.ops))) for c in plan.classes),
        inputs={name: spatial(text, MOST_DIMS) for name, text in plan.inputs.items()},
        parameters={
            fqn: replace(p, rest=spatial(p.rest, len(p.shape)), use=spatial(p.use, len(p.shape)))
            for fqn, p in plan.parameters.items()
        },
    )


def choose_along(
    training: Plan, prepared: Prepared, cluster: Cluster, held: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> Plan:
    """The plan of another graph, in eval mode or as `prepare_like` makes it, on the ranks of a training plan: axes that
    cut its batch are followed as far as rows go round, the others divided, those of its sequence along the sequence;
    parameters rest as they do there. ``held``: the stages that read each parameter in training, where there are
    several. Raises AutoparError where a pipeline would have to run backwards, or microbatches cannot be told apart."""
    captured = prepared.captured
    sized = at_batch(training, captured.batch)
    mesh = plan_mesh(sized) if captured.training else Mesh(tuple(a for a in plan_mesh(sized).axes if not a.is_time))
    data = {training.axes[i].name for i in training.data}
    sequence = {a.name for a in training.axes if a.display[:1] == (SEQUENCE,)} - data
    divided = {mesh.axes[i].name for i in mesh.space} - data - sequence
    gm, left, _ = completed(prepared, mesh, training.zero, divided, sequence)
    again = ("full" if training.recompute == "mixed" else training.recompute) if captured.training else "none"
    plan = resting(plan_of(gm, captured, mesh, cluster, recompute=again), rests_of(training))
    if len(training.stages) > 1:
        plan = _stages_along(plan, gm, training, held)
        plan = replace(plan, schedule=sized.schedule) if captured.training else plan
    return replace(plan, predicted=left_whole(plan, left), pins=training.pins)


def _stages_along(plan: Plan, gm: fx.GraphModule, training: Plan, held: Mapping[str, tuple[int, ...]]) -> Plan:
    """Cut where the parameters are: each op goes to the first stage, from that of the op before it on, that holds what
    it reads."""
    ops, at, here = ops_of(gm), list[int](), 0
    for place, op in enumerate(ops):
        for fqn in (str(n.target) for n in op.all_input_nodes if n.op == "get_attr" and str(n.target) in held):
            here = next((stage for stage in held[fqn] if stage >= here), -1)
            if here < 0:
                raise AutoparError(
                    f"forward: {fqn} is read after parameters of later stages of the pipeline, which training's first "
                    "batch reads it before, or not at all. Pin pp=1 or other cuts, or compile for these inputs first."
                )
        at += [place] * (here - len(at))
    at += [len(ops)] * (len(training.stages) - 1 - len(at))
    plan = with_stages(plan, sorted({place for place in at if 0 < place < len(ops)}))
    starts = unit_edges(plan)
    edges = [0, *(starts.index(place) for place in at), len(plan.units)]
    virtual = training.schedule.virtual
    return replace(
        plan,
        stages=tuple(Stage(a, b) for a, b in itertools.pairwise(edges)),
        schedule=replace(training.schedule, name="interleaved" if virtual > 1 else "gpipe", words=()),
        mesh={"pp": training.pp, **plan.mesh},
        cluster=training.cluster,
    )


def _schedule(plan: Plan) -> Schedule:
    """For another number of microbatches: a user's own order lists those that it has."""
    if plan.schedule.name != "custom":
        return plan.schedule
    name = "gpipe" if plan.forwards_first else "1f1b"
    return replace(plan.schedule, name="interleaved" if plan.schedule.virtual > 1 else name, words=())  # type: ignore[arg-type]


def _has_time(plan: Plan) -> bool:
    return any(axis.is_time for axis in plan.axes)


def _ops(plan: Plan) -> Iterator[Op]:
    for unit in plan.units:
        yield from plan.classes[unit.kind].ops


def _units(plan: Plan) -> Iterator[tuple[str, int, int]]:
    start = 0
    for unit in plan.units:
        stop = start + len(plan.classes[unit.kind].ops)
        yield unit.fqn, start, stop
        start = stop


def _with_inputs(plan: Plan, gm: fx.GraphModule) -> Plan:
    """Its inputs cut by no axes but such of which every rank gets a piece."""
    mesh, inputs = plan_mesh(plan), {}
    for node in gm.graph.find_nodes(op="placeholder"):
        shape = value(node).shape
        inputs[node.name] = str(_filled(Layout.parse(plan.inputs[node.name], len(shape)), shape, mesh))
    return replace(plan, inputs=inputs)


def _filled(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """Without the fewest ranks that would leave one of them without a piece."""
    for n, split in zip(shape, layout.dims, strict=True):
        space = [a for a in split.axes if not mesh.axes[a].is_time]
        subsets = [off for k in range(len(space) + 1) for off in itertools.combinations(space, k)]
        for off in sorted(subsets, key=lambda off: math.prod(mesh.axes[a].size for a in off)):
            left = replace(split, axes=tuple(a for a in split.axes if a not in off))
            if not left.axes or fills(n, left, mesh):
                break
        for axis in off:
            layout = layout.with_kind(axis, "R")
    return layout


def _nearest(op: Op, node: fx.Node, state: Completion) -> Strategy:
    """What the plan says that an op does, or what comes nearest of what it may do: decided in time first, then axis by
    axis, all others idle."""
    mesh, order = state.mesh, op.order or state.order
    chosen = [choice_from_text(text) for text in op.choices]
    found = strategy(node, mesh, chosen, order) if known_choices(node, chosen) else None
    if found is not None:
        return found
    have = [state.layout(n) for n in operand_nodes(node)]
    taken = [Choice("R")] * len(chosen)
    for axis in sorted(range(len(chosen)), key=lambda a: not mesh.axes[a].is_time):
        own = [chosen[axis]] if known_choices(node, [chosen[axis]]) else []
        offered = [*own, *choices(node, mesh, axis, arriving(node, have, axis))]
        pairs = [(c, strategy(node, mesh, [*taken[:axis], c, *taken[axis + 1 :]], order)) for c in offered]
        legal = [(c, s) for c, s in pairs if s is not None and _reached(node, have, s, mesh)]
        alike = [(c, s) for c, s in legal if (c.kind, c.name) == (chosen[axis].kind, chosen[axis].name)]
        taken[axis], found = cheapest(node, have, alike or legal, mesh)
    assert found is not None
    return found


def _reached(node: fx.Node, have: Sequence[Layout], wanted: Strategy, mesh: Mesh) -> bool:
    """Whether the operands can be brought as a strategy wants them: not everything can be told apart over time."""
    values = [value(n) for n in operand_nodes(node)]
    return all(cost(a, b, v, mesh) < math.inf for a, b, v in zip(have, wanted.operands, values, strict=True))


__all__ = ["at_batch", "carry_over", "choose_along", "prepare_like", "same_ops"]
