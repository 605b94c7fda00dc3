"""From a captured model and pins to a plan, and from a plan to what can be lowered for a rank.

`choose` decides and writes down (a `Plan`), `apply` reads a plan and nothing else, so that a plan that was saved,
edited or broadcast gives the same program as one just made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.capture import Capture
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.passes import PREPARE, run
from autopar.passes.complete_layouts import complete_layouts, complete_prologue, rest_as_entry
from autopar.passes.completion import is_op
from autopar.passes.divide_work import Undivided, flops
from autopar.passes.facts import KEY, Choice, Strategy, annotate, fact, value
from autopar.passes.insert_changes import is_getitem, produced_layout
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.lower import Lowerable
from autopar.passes.split_prologue import copy_graph, split_prologue
from autopar.passes.strategy import choices, rule, strategy
from autopar.pins import ResolvedPins, microbatch_rows
from autopar.plan import (
    TIME,
    ClusterId,
    ModelId,
    Op,
    Padding,
    Parameter,
    Plan,
    PlanAxis,
    PlanClass,
    Predicted,
    Stage,
    Unit,
    Whole,
    choice_from_text,
    choice_to_text,
)

DTYPES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Prepared:
    """The graph after PREPARE, one step split in what runs once and what runs per microbatch."""

    body: fx.GraphModule
    prologue: fx.GraphModule | None
    hoisted: tuple[str, ...]
    captured: Capture


def prepare(captured: Capture, microbatches: int, graph: fx.GraphModule | None = None) -> Prepared:
    """Run PREPARE on a copy of the captured graph (or of ``graph``, the same in another precision)."""
    gm = copy_graph(graph or captured.graph)
    gm.meta["batch_inputs"] = {i.name for i in captured.inputs if i.batch}
    gm = run(gm, PREPARE)
    _refuse_changed_constants(gm, captured)
    annotate(gm, captured.trainable)
    if microbatches == 1:
        return Prepared(gm, None, (), captured)
    prologue, body, hoisted = split_prologue(run(gm, ("hoist_normalisers",)))
    return Prepared(body, prologue, hoisted, captured)


def _refuse_changed_constants(gm: fx.GraphModule, captured: Capture) -> None:
    (result,) = next(n for n in gm.graph.nodes if n.op == "output").args
    assert isinstance(result, dict) and isinstance(result["buffers"], dict)
    for name, node in result["buffers"].items():
        if name not in captured.buffers:
            assert isinstance(node, fx.Node)
            where = node.meta.get("stack_trace", "").strip().splitlines()[-1:] or [""]
            raise AutoparError(
                f"{name}: forward changes a tensor that is no buffer ({where[0].strip()}), so it would be lost. "
                f"Register it as a buffer."
            )


def mesh_of(pins: ResolvedPins) -> Mesh:
    """The mesh that pins ask for: dp, tp (axes of one rank left out), and time where there are several microbatches."""
    axes = [Axis(name, size) for name, size in pins.axes()]
    if pins.microbatches > 1:
        axes.append(Axis("time", pins.microbatches, pins.rows))
    return Mesh(tuple(axes))


def choose(prepared: Prepared, pins: ResolvedPins, cluster: Cluster) -> Plan:
    """The plan for these pins. Raises AutoparError where a pin cannot be kept."""
    captured, mesh = prepared.captured, mesh_of(pins)
    gm = copy_graph(prepared.body)
    gm, undivided = complete_layouts(
        gm,
        mesh,
        parameters=frozenset(captured.parameters),
        batch_inputs=frozenset(i.name for i in captured.inputs if i.batch),
        batch=captured.batch,
        zero=pins.zero,
    )
    _keep_obligations(gm, mesh, pins, undivided)
    parameters = {
        str(n.target): _parameter(captured, n, mesh) for n in gm.graph.nodes if str(n.target) in captured.parameters
    }
    stride = pins.ranks
    axes = []
    for axis in mesh.axes:
        if axis.is_time:
            axes.append(PlanAxis(axis.name, axis.size, TIME, 0))
            continue
        stride //= axis.size
        display = "tp" if axis.name == "tp" else "dp_shard" if pins.zero else "dp_replicate"
        axes.append(PlanAxis(axis.name, axis.size, cluster.tier_of(axis.size, stride).name, stride, (display,)))
    ops = tuple(_op(index, node) for index, node in enumerate(_ops(gm)))
    return Plan(
        model=ModelId(captured.hash, captured.model_name, captured.checked == "equal", captured.hints),
        cluster=ClusterId(cluster.name, cluster.nodes, cluster.ranks_per_node, cluster.device),
        axes=tuple(axes),
        mesh={a.display[0]: a.size for a in axes if a.display},
        units=(Unit("", 0),),
        classes=(PlanClass("", ops),),
        stages=(Stage(0, 1),),
        microbatches=pins.microbatches,
        batch=captured.batch,
        inputs={n.name: str(produced_layout(n)) for n in gm.graph.nodes if n.op == "placeholder"},
        parameters=parameters,
        padding=_padding(gm, mesh, captured),
        predicted=Predicted(
            whole=tuple(Whole("tp", u.fqn, u.op, u.why) for u in undivided),
            fallback=tuple(sorted({str(n.target) for n in _ops(gm) if rule(n) is None and not _constant(n)})),
        ),
        pins=pins.pins.given(),
    )


def apply(plan: Plan, prepared: Prepared, mesh: Mesh | None = None) -> Lowerable:
    """The prepared graph with the plan's strategies. Raises AutoparError, by JSON path, where they do not fit it.

    ``mesh``: the plan's axes with other sizes (to count what an axis takes off a rank)."""
    captured = prepared.captured
    if plan.model.graph != captured.hash:
        raise AutoparError(
            f"plan: was made for another model than {captured.model_name} (its graph, names or shapes differ: "
            f"{plan.model.graph[:15]}... is not {captured.hash[:15]}...). "
            f"Plan again, or give the batch and options it was made with."
        )
    mesh = mesh or plan_mesh(plan)
    gm = copy_graph(prepared.body)
    nodes = _ops(gm)
    listed = plan.classes[0].ops if plan.classes else ()
    if len(listed) != len(nodes):
        raise AutoparError(f"plan: $.classes[0].ops has {len(listed)} ops, the graph has {len(nodes)}. Plan again.")
    every = tuple(range(len(mesh.axes)))
    for k, (op, node) in enumerate(zip(listed, nodes, strict=True)):
        chosen = [choice_from_text(text) for text in op.choices]
        found = None
        if op.op == str(node.target) and _known(node, chosen):
            found = strategy(node, mesh, chosen, op.order or every)
        if found is None:
            raise AutoparError(_illegal(k, op, node, mesh))
        node.meta[KEY] = replace(fact(node), strategy=found)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            text = plan.inputs.get(node.name)
            where = f'plan: $.inputs["{node.name}"]'
            if text is None:
                raise AutoparError(f"{where}: is missing. Plan again.")
            layout = _legal_layout(text, value(node).shape, mesh, where, even=True)
            node.meta[KEY] = replace(fact(node), strategy=Strategy((), every, (), (layout,)))
        elif node.op == "get_attr":
            _apply_leaf(plan, node, mesh)
        elif is_getitem(node):
            producer, index = node.args[0], node.args[1]
            assert isinstance(producer, fx.Node) and isinstance(index, int)
            made = fact(producer).strategy
            assert made is not None
            node.meta[KEY] = replace(fact(node), strategy=Strategy((), made.order, (), (made.results[index],)))
    prologue = None
    if prepared.prologue is not None:
        inputs = {n.name: produced_layout(n) for n in gm.graph.nodes if n.op == "placeholder"}
        prologue = complete_prologue(copy_graph(prepared.prologue), mesh, inputs)
    used = {str(n.target) for g in (gm, prologue) if g is not None for n in g.graph.nodes if n.op == "get_attr"}
    return Lowerable(
        body=gm,
        mesh=mesh,
        parameters=tuple(p for p in captured.parameters if p in used),
        buffers=tuple(b for b in captured.buffers if b in used),
        constants=tuple(c for c in captured.constants if c in used),
        inputs=tuple(i.name for i in captured.inputs),
        prologue=prologue,
        hoisted=prepared.hoisted,
    )


def plan_mesh(plan: Plan) -> Mesh:
    """The mesh that a plan's axes describe."""
    axes = []
    for axis in plan.axes:
        rows: tuple[int, ...] = ()
        if axis.is_time:
            assert plan.batch is not None
            unit = math.prod(a.size for a in plan.axes if a.name == "dp")
            rows = microbatch_rows(plan.batch, unit, axis.size)
        axes.append(Axis(axis.name, axis.size, rows))
    return Mesh(tuple(axes))


def _apply_leaf(plan: Plan, node: fx.Node, mesh: Mesh) -> None:
    fqn, v = str(node.target), value(node)
    every = tuple(range(len(mesh.axes)))
    found = plan.parameters.get(fqn)
    if found is None:
        whole = Layout.uniform("R", len(mesh.axes), len(v.shape))
        node.meta[KEY] = replace(fact(node), strategy=Strategy((), every, (), (whole,)))
        return
    where = f'plan: $.parameters["{fqn}"]'
    rest = _legal_layout(found.rest, v.shape, mesh, f"{where}.rest", even=False)
    use = _legal_layout(found.use, v.shape, mesh, f"{where}.use", even=False)
    if any(s.parts for s in rest.dims):
        raise AutoparError(
            f"{where}.rest: {found.rest!r} rests in parts (checkpoints could not say so). Legal: S<dim> without parts."
        )
    entry = use
    if found.gather == "use":
        entry = rest_as_entry(rest, use, mesh)
    strategy_ = Strategy((), every, (), (entry,))
    reduce = "microbatch" if found.reduce == "microbatch" else "step"
    node.meta[KEY] = replace(fact(node), strategy=strategy_, rest=rest, reduce=reduce)


def _legal_layout(text: str, shape: tuple[int, ...], mesh: Mesh, where: str, *, even: bool) -> Layout:
    try:
        layout = Layout.parse(text, len(shape))
    except ValueError as error:
        raise AutoparError(f"{where}: {error}.") from None
    if len(layout.kinds) != len(mesh.axes):
        raise AutoparError(f"{where}: {text!r} has {len(layout.kinds)} words for {len(mesh.axes)} axes.")
    try:
        whole = layout.is_even(shape, mesh)
        layout.runs(shape, mesh, mesh.coordinates(0))
    except ValueError as error:
        raise AutoparError(f"{where}: {text!r} does not fit shape {shape} ({error}).") from None
    if even and not whole:
        raise AutoparError(
            f"{where}: {text!r} does not cut shape {shape} evenly. Legal: I, R, or a dim that the axis divides."
        )
    return layout


def _illegal(k: int, op: Op, node: fx.Node, mesh: Mesh) -> str:
    where = f"plan: $.classes[0].ops[{k}]"
    if op.op != str(node.target):
        return f"{where}.op: is {op.op}, the graph has {node.target} there. Plan again."
    legal = "; ".join(
        f"{axis.name}: {', '.join(choice_to_text(c) for c in choices(node, mesh, a))}"
        for a, axis in enumerate(mesh.axes)
    )
    return f"{where}.choices: {list(op.choices)} is not legal for {op.op} ({op.fqn}). Legal per axis: {legal}."


def _known(node: fx.Node, chosen: list[Choice]) -> bool:
    found = rule(node)
    for c in chosen:
        if c.kind in ("I", "R"):
            continue
        if found is None:
            return False
        names = {
            "factor": found.factors(),
            "linear": tuple(str(i) for i in range(len(found.linear))),
            "special": tuple(s.name for s in found.specials),
        }
        if c.name not in names[c.kind]:
            return False
    return True


def _ops(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if is_op(n)]


def _op(index: int, node: fx.Node) -> Op:
    found = fact(node).strategy
    assert found is not None
    return Op(index, str(node.target), fact(node).fqn, tuple(choice_to_text(c) for c in found.choices), found.order)


def _parameter(captured: Capture, node: fx.Node, mesh: Mesh) -> Parameter:
    fqn, v, known = str(node.target), value(node), fact(node)
    entry, rest = produced_layout(node), known.rest
    assert rest is not None
    per_use = any(a.name == "dp" and entry.kinds[i] == "S" for i, a in enumerate(mesh.axes))
    use = entry
    for i, a in enumerate(mesh.axes):
        if per_use and a.name == "dp":
            use = use.with_kind(i, "R")
    moves = str(rest).replace("R", "I") != str(use).replace("R", "I")
    summed = v.grad and any(use.kinds[i] == "R" and a.size > 1 for i, a in enumerate(mesh.axes) if not a.is_time)
    trainable = captured.parameters[fqn].requires_grad
    return Parameter(
        shape=v.shape,
        rest=str(rest),
        use=str(use),
        gather="use" if per_use else "step" if moves else "never",
        reduce="never"
        if not trainable or not (moves or summed)
        else "microbatch"
        if known.reduce == "microbatch"
        else "step",
        dtype=DTYPES.get(v.dtype, str(v.dtype).removeprefix("torch.")),
        grad_dtype=DTYPES.get(v.dtype, str(v.dtype).removeprefix("torch.")),
        trainable=trainable,
        aliases=tuple(sorted(a for a, c in captured.aliases.items() if c == fqn)),
    )


def _padding(gm: fx.GraphModule, mesh: Mesh, captured: Capture) -> tuple[Padding, ...]:
    found = []
    for node in gm.graph.nodes:
        if node.op != "get_attr" or str(node.target) not in captured.parameters:
            continue
        rest, shape = fact(node).rest, value(node).shape
        assert rest is not None
        for d, split in enumerate(rest.dims):
            ways = math.prod(mesh.axes[a].size for a in split.axes)
            if split.axes and shape[d] % ways:
                found.append(Padding(str(node.target), d, shape[d], -(-shape[d] // ways) * ways))
    return tuple(found)


def _constant(node: fx.Node) -> bool:
    return not node.all_input_nodes


def _keep_obligations(gm: fx.GraphModule, mesh: Mesh, pins: ResolvedPins, undivided: list[Undivided]) -> None:
    """A pinned tp must divide something."""
    if pins.tp == 1:
        return
    axis = mesh.index("tp")
    for node in _ops(gm):
        found = fact(node).strategy
        assert found is not None
        if flops(node) and found.choices[axis].kind in ("factor", "special"):
            return
    listed = "; ".join(f"{u.fqn} ({u.op.removeprefix('aten.')}): {u.why}" for u in undivided[:3])
    raise AutoparError(
        f"pins: tp={pins.tp} divides no matmul, attention or convolution of this model "
        f"({listed or 'it has none'}). Use tp=1, or a degree that divides them."
    )
