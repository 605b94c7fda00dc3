"""From a captured model and pins to a plan, and from a plan to what can be lowered for a rank.

`choose` decides and writes down (a `Plan`), `apply` reads a plan and nothing else, so that a plan that was saved,
edited or broadcast gives the same program as one just made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import fx

from autopar.capture import Capture, to_float64
from autopar.choosing.wiring import weights_of
from autopar.cluster import Cluster
from autopar.errors import AutoparError, NeedsWholeBatch
from autopar.mixed_precision import reduced_in
from autopar.passes import PREPARE, run
from autopar.passes.complete_layouts import complete_layouts, complete_prologue, treat
from autopar.passes.cut_stages import cut_stages
from autopar.passes.divide_work import Keep, Option, Undivided, flops
from autopar.passes.expert_dims import EXPERTS, experts_of
from autopar.passes.facts import KEY, Choice, Dtypes, Strategy, annotate, fact, operand_nodes, value
from autopar.passes.insert_changes import is_getitem
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.loss_stays_wide import LOSS_DTYPE
from autopar.passes.lower import (
    Local,
    Lowerable,
    ParameterUse,
    lower,
    output_uses,
    parameter_uses,
    tail_uses,
    with_changes,
)
from autopar.passes.opaque_flow import opaque_flow
from autopar.passes.roles import Limit, divides_nothing, limits_of, shares_nothing
from autopar.passes.sequence import DIVIDE, Along, along_sequence, cuts_nothing
from autopar.passes.split_prologue import copy_graph, split_prologue
from autopar.passes.split_tail import Tail, split_tail
from autopar.passes.strategy import choices, fills, rule, strategy
from autopar.passes.units import core_ops, cut_units
from autopar.pins import SEQUENCE, ResolvedPins, microbatch_rows
from autopar.plan import Op, Plan, Predicted, Whole, choice_from_text, choice_to_text
from autopar.runtime.mesh import Ranks
from autopar.runtime.opaque import Flow
from autopar.runtime.stage import Stages
from autopar.wires import with_wires
from autopar.write_plan import ops_of, plan_of, strides_of, wire_from_json


@dataclass(frozen=True)
class Prepared:
    """The graph after PREPARE, one step split in what runs once and what runs per microbatch."""

    body: fx.GraphModule
    prologue: fx.GraphModule | None
    hoisted: tuple[str, ...]
    captured: Capture
    forwards_first: bool = False
    tail: Tail | None = None


def prepare(captured: Capture, microbatches: int, *, float64: bool = False, forwards_first: bool = False) -> Prepared:
    """Run PREPARE on a copy of the captured graph; ``float64``: the result in that precision, node for node the same
    (casts between types included, so that a plan fits both); ``forwards_first``: all microbatches run forward before
    the first runs backward, so that a tail may be cut off."""
    gm = copy_graph(captured.graph)
    gm.meta["batch_inputs"] = {i.name for i in captured.inputs if i.batch}
    gm.meta |= captured.relaxations
    gm = run(gm, PREPARE)
    if float64:
        gm = to_float64(gm)
        gm.graph.output_node().meta.pop(LOSS_DTYPE, None)
    _refuse_changed_constants(gm, captured)
    annotate(gm, captured.trainable, {} if float64 else _dtypes(gm, captured))
    whole = Prepared(gm, None, (), captured, forwards_first)
    return whole if microbatches == 1 else in_microbatches(whole)


def in_microbatches(whole: Prepared) -> Prepared:
    """For several microbatches, in place: what runs once a step stands apart, before them or after them."""
    captured = whole.captured
    prologue, body, hoisted = split_prologue(run(whole.body, ("hoist_normalisers",)))
    tail = None
    if whole.forwards_first:
        batched = [i.name for i in captured.inputs if i.batch]
        tail = split_tail(body, frozenset(captured.parameters), batched, captured.batch)
    return Prepared(body, prologue, hoisted, captured, whole.forwards_first, tail)


def with_way_out(error: NeedsWholeBatch, captured: Capture) -> NeedsWholeBatch:
    """Microbatches are refused: says so where a pipeline could run them, all forward before the first backward."""
    if prepare(captured, 2, forwards_first=True).tail is None:
        return error
    return NeedsWholeBatch(error.what, ", or pp and schedule=gpipe: all forwards come first")


def _dtypes(gm: fx.GraphModule, captured: Capture) -> dict[str, Dtypes]:
    """Of parameters that rest, or whose gradients are reduced, in others than they are used in."""
    found: dict[str, Dtypes] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        parameter = captured.parameters.get(str(node.target))
        if parameter is not None:
            rests, used = parameter.dtype, node.meta["val"].dtype
            reduced = reduced_in(rests, captured.precision)
            found[str(node.target)] = (rests if used != rests else None, reduced if reduced != rests else None)
    return found


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
    """The mesh that pins ask for, without axes of one rank, and with time where there are several microbatches."""
    axes = [Axis(name, size) for name, size in pins.axes()]
    if pins.microbatches > 1:
        axes.append(Axis("time", pins.microbatches, pins.rows))
    return Mesh(tuple(axes))


def choose(prepared: Prepared, pins: ResolvedPins, cluster: Cluster) -> Plan:
    """The plan for these pins. Raises AutoparError where a pin cannot be kept."""
    plain = mesh_of(pins)
    mesh = with_wires(plain, strides_of(plain), cluster)
    shares = ("tp",) if pins.pins.sp is True else ()
    gm, left, obliged = completed(prepared, mesh, pins.zero, ("tp",), (SEQUENCE,), shares)
    _keep_obligations(gm, mesh, obliged, left)
    plan = plan_of(gm, prepared.captured, mesh, cluster, recompute=pins.recompute)
    return replace(plan, predicted=left_whole(plan, left), pins=pins.pins.given())


@dataclass(frozen=True)
class _Obliged:
    """What pinned axes must do, by the copied graph's nodes: ``along``, by axis, cut the sequence; ``limits``: with
    ``sp=true``, what else of the tensor axis is cut along it."""

    along: Mapping[str, Mapping[fx.Node, Along]]
    limits: Mapping[fx.Node, Limit]


def completed(
    prepared: Prepared,
    mesh: Mesh,
    zero: int,
    divided: Collection[str],
    cut: Collection[str],
    shares: Collection[str] = (),
    dims: Mapping[str, int | None] = MappingProxyType({}),
) -> tuple[fx.GraphModule, list[tuple[str, Undivided]], _Obliged]:
    """``divided``: axes that divide work; ``cut``: those along the sequence; ``shares``: of the first those that cut
    what lies around a residual stream along it; ``dims``: the dim that the divided axes cut of parameters, by name
    (None: none)."""
    captured, gm = prepared.captured, copy_graph(prepared.body)
    parameters, batched = frozenset(captured.parameters), frozenset(i.name for i in captured.inputs if i.batch)
    weights, named = weights_of(gm, parameters), {a.name for a in mesh.axes}
    rows = along_sequence(gm, parameters, weights, batched, captured.batch) if named & {*cut, *shares} else {}
    along = {name: rows for name in cut if name in named}
    keep = {name: _along_only(rows) for name in along}
    limits: dict[fx.Node, Limit] = {}
    for name in named & {*shares}:
        limits, _ = limits_of(core_ops(gm, parameters), cut_units(gm, parameters), parameters, weights, rows)
        keep[name] = _shared_only(limits)
    if dims:
        keep |= {name: _dims_only(dims, keep.get(name)) for name in divided}
    gm, left = complete_layouts(
        gm,
        mesh,
        parameters=parameters,
        batch_inputs=batched,
        batch=captured.batch,
        zero=zero,
        divided=divided,
        keep=keep,
        experts=experts_of(gm, parameters, mesh.axes[mesh.index(EXPERTS)].size) if EXPERTS in named else {},
    )
    return gm, left, _Obliged(along, limits)


def _along_only(along: Mapping[fx.Node, Along]) -> Keep:
    """Of what an op may do on an axis, what cuts the sequence."""

    def keep(op: fx.Node, offered: list[Option], axis: int) -> list[Option]:
        allowed = along[op].of([s for _, s in offered], axis) if op in along else []
        return [o for o in offered if o[1] in allowed] or offered

    return keep


def _shared_only(limits: Mapping[fx.Node, Limit]) -> Keep:
    """Of what glue may do on a tensor axis, what cuts the sequence, where something does."""

    def keep(op: fx.Node, offered: list[Option], axis: int) -> list[Option]:
        limit = limits.get(op)
        return [o for o in offered if limit is not None and limit.cuts_sequence(o[1], axis)] or offered

    return keep


def _dims_only(dims: Mapping[str, int | None], otherwise: Keep | None) -> Keep:
    """Of what an op that reads one of these parameters may do on a divided axis, what cuts it so."""

    def keep(op: fx.Node, offered: list[Option], axis: int) -> list[Option]:
        named = [(slot, dims[str(o.target)]) for slot, o in enumerate(operand_nodes(op)) if str(o.target) in dims]
        kept = [o for o in offered if all(o[1].operands[slot].dim_of(axis) == dim for slot, dim in named)]
        assert kept, f"{op}: cannot cut {named}"
        return otherwise(op, kept, axis) if otherwise is not None else kept

    return keep


def left_whole(plan: Plan, left: list[tuple[str, Undivided]]) -> Predicted:
    """Its predictions, with the ops that axes leave whole."""
    return replace(plan.predicted, whole=tuple(Whole(axis, u.fqn, u.op, u.why) for axis, u in left))


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
    if dict(plan.relaxations) != dict(captured.relaxations):
        told = [" ".join(f"{k}={v}" for k, v in r.items()) or "none" for r in (plan.relaxations, captured.relaxations)]
        raise AutoparError(f"plan: $.relaxations: the plan has {told[0]}, the model was captured with {told[1]}.")
    if plan.precision != captured.precision:
        told = [f"{p.param_dtype or 'own'}, {p.reduce_dtype or 'own'}" for p in (plan.precision, captured.precision)]
        raise AutoparError(f"plan: $.precision: the plan has {told[0]}, the model was captured with {told[1]}.")
    mesh = mesh or plan_mesh(plan)
    gm = copy_graph(prepared.body)
    nodes, listed = ops_of(gm), list(_ops_of_units(plan))
    if len(listed) != len(nodes):
        raise AutoparError(
            f"plan: $.units: the classes of all units have {len(listed)} ops, the graph has {len(nodes)}. Plan again."
        )
    every = tuple(range(len(mesh.axes)))
    for (where, unit, op), node in zip(listed, nodes, strict=True):
        chosen = [choice_from_text(text) for text in op.choices]
        found = None
        if op.op == str(node.target) and known_choices(node, chosen):
            found = strategy(node, mesh, chosen, op.order or every)
        if found is None:
            raise AutoparError(_illegal(where, op, node, mesh))
        node.meta[KEY] = replace(fact(node), strategy=found, unit=unit)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            text = plan.inputs.get(node.name)
            where = f'plan: $.inputs["{node.name}"]'
            if text is None:
                raise AutoparError(f"{where}: is missing. Plan again.")
            layout = _legal_layout(text, value(node).shape, mesh, where, full=True)
            node.meta[KEY] = replace(fact(node), strategy=Strategy((), every, (), (layout,)))
        elif node.op == "get_attr":
            apply_leaf(plan, node, mesh)
        elif is_getitem(node):
            producer, index = node.args[0], node.args[1]
            assert isinstance(producer, fx.Node) and isinstance(index, int)
            known = fact(producer)
            assert known.strategy is not None
            picked = Strategy((), known.strategy.order, (), (known.strategy.results[index],))
            node.meta[KEY] = replace(fact(node), strategy=picked, unit=known.unit)
    prologue = None
    if prepared.prologue is not None:
        prologue = complete_prologue(copy_graph(prepared.prologue), mesh, gm)
    recompute = tuple(plan.classes[unit.kind].recompute for unit in plan.units)
    return replace(lowerable(gm, mesh, prepared, prologue), recompute=recompute)


@dataclass(frozen=True)
class Staged:
    """A model with its changes, as the ranks of a pipeline have it. ``models``: of each stage; ``uses``: of all its
    parameters; ``read``: the stages that read each of them; ``holders``: the places along the pipeline where it is;
    ``whole``: the model uncut."""

    models: tuple[Lowerable, ...]
    uses: tuple[ParameterUse, ...]
    read: Mapping[str, tuple[int, ...]]
    holders: Mapping[str, tuple[int, ...]]
    pipeline: Stages | None
    whole: Lowerable

    @property
    def flow(self) -> Flow | None:
        """How gradients come through opaque calls."""
        return opaque_flow(self.whole)

    def locals(self, ranks: Ranks) -> list[Local]:
        """The programs of this rank, one for each of its stages."""
        own = self.models[ranks.stage :: ranks.stages]
        return [lower(model, ranks.place, ranks.group_names, ranks.device) for model in own]


def staged(plan: Plan, prepared: Prepared) -> Staged:
    """`apply`, with changes and cut into the plan's stages."""
    whole = with_changes(apply(plan, prepared))
    uses = parameter_uses(whole)
    if len(plan.stages) <= 1:
        return Staged((whole,), uses, {}, {}, None, whole)
    cut = cut_stages(whole, [(stage.first, stage.last) for stage in plan.stages])
    holders = {fqn: tuple(sorted({s % plan.pp for s in stages})) for fqn, stages in cut.holders.items()}
    ties = tuple((fqn, at) for fqn, at in holders.items() if len(at) > 1 and fqn in cut.reached)
    outputs = dict(zip(whole.returns or range(len(cut.outputs)), zip(output_uses(whole), cut.outputs), strict=True))
    for i, use in zip(whole.tail.returns, tail_uses(whole.tail), strict=True) if whole.tail is not None else ():
        outputs[i] = use, len(plan.stages) - 1
    known = tuple(outputs[i] for i in range(len(outputs) - (len(whole.tail.inputs) if whole.tail is not None else 0)))
    pipeline = Stages(plan.orders(), cut.crossings, cut.crossed, known, tuple(cut.updates.items()), ties)
    return Staged(cut.models, uses, cut.holders, holders, pipeline, whole)


def lowerable(gm: fx.GraphModule, mesh: Mesh, prepared: Prepared, prologue: fx.GraphModule | None = None) -> Lowerable:
    """A completed graph with what else of the captured model its ranks need."""
    captured = prepared.captured
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
        returns=None if prepared.tail is None else prepared.tail.ids,
        tail=prepared.tail,
    )


def plan_mesh(plan: Plan) -> Mesh:
    """The mesh that a plan's axes describe."""
    axes = []
    for axis in plan.axes:
        rows: tuple[int, ...] = ()
        if axis.is_time:
            assert plan.batch is not None
            rows = microbatch_rows(plan.batch, plan.row_unit if plan.has_even_rows else 1, axis.size)
        axes.append(Axis(axis.name, axis.size, rows, wire_from_json(axis.wire)))
    return Mesh(tuple(axes))


def _ops_of_units(plan: Plan) -> Iterator[tuple[str, int, Op]]:
    """(JSON path, unit, op) of every op of the graph, unit by unit."""
    for u, unit in enumerate(plan.units):
        for k, op in enumerate(plan.classes[unit.kind].ops):
            yield f"plan: $.classes[{unit.kind}].ops[{k}]", u, op


def apply_leaf(plan: Plan, node: fx.Node, mesh: Mesh) -> None:
    """Treat a parameter as the plan says; a buffer or constant is read whole."""
    fqn, v = str(node.target), value(node)
    every = tuple(range(len(mesh.axes)))
    found = plan.parameters.get(fqn)
    if found is None:
        whole = Layout.uniform("R", len(mesh.axes), len(v.shape))
        node.meta[KEY] = replace(fact(node), strategy=Strategy((), every, (), (whole,)))
        return
    where = f'plan: $.parameters["{fqn}"]'
    rest = _legal_layout(found.rest, v.shape, mesh, f"{where}.rest", full=False)
    use = _legal_layout(found.use, v.shape, mesh, f"{where}.use", full=False)
    if any(s.parts or s.items for s in rest.dims):
        raise AutoparError(
            f"{where}.rest: {found.rest!r} rests in parts or items (checkpoints could not say so). Legal: S<dim> alone."
        )
    treat(node, rest, use, found.gather, "microbatch" if found.reduce == "microbatch" else "step", mesh)


def _legal_layout(text: str, shape: tuple[int, ...], mesh: Mesh, where: str, *, full: bool) -> Layout:
    try:
        layout = Layout.parse(text, len(shape))
    except ValueError as error:
        raise AutoparError(f"{where}: {error}.") from None
    if len(layout.kinds) != len(mesh.axes):
        raise AutoparError(f"{where}: {text!r} has {len(layout.kinds)} words for {len(mesh.axes)} axes.")
    try:
        filled = all(not s.axes or fills(n, s, mesh) for n, s in zip(shape, layout.dims, strict=True))
        layout.runs(shape, mesh, mesh.coordinates(0))
    except ValueError as error:
        raise AutoparError(f"{where}: {text!r} does not fit shape {shape} ({error}).") from None
    if full and not filled:
        raise AutoparError(
            f"{where}: {text!r} leaves ranks without a piece of shape {shape}. Legal: I, R, or a dim of which "
            "every rank gets some."
        )
    return layout


def _illegal(where: str, op: Op, node: fx.Node, mesh: Mesh) -> str:
    if op.op != str(node.target):
        return f"{where}.op: is {op.op}, the graph has {node.target} there. Plan again."
    legal = "; ".join(
        f"{axis.name}: {', '.join(choice_to_text(c) for c in choices(node, mesh, a))}"
        for a, axis in enumerate(mesh.axes)
    )
    return f"{where}.choices: {list(op.choices)} is not legal for {op.op} ({op.fqn}). Legal per axis: {legal}."


def known_choices(node: fx.Node, chosen: list[Choice]) -> bool:
    """Whether the op's rule has all these factors, groups and specials."""
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


def _keep_obligations(gm: fx.GraphModule, mesh: Mesh, obliged: _Obliged, left: list[tuple[str, Undivided]]) -> None:
    """A pinned tp must divide something, and a pinned sp along the sequence."""
    for axis, a in enumerate(mesh.axes):
        if a.is_time or a.name not in ("tp", SEQUENCE):
            continue
        if not any(_divides(node, axis) for node in ops_of(gm)):
            if a.name == SEQUENCE:
                raise AutoparError(cuts_nothing(a.size, obliged.along[a.name]))
            words = [f"{u.fqn} ({u.op.removeprefix('aten.')}): {u.why}" for name, u in left if name == a.name]
            raise AutoparError(divides_nothing(a.size, words))
        done = [(limit, fact(op).strategy) for op, limit in obliged.limits.items() if a.name == "tp"]
        if done and not any(s is not None and limit.cuts_sequence(s, axis) for limit, s in done):
            raise AutoparError(shares_nothing(a.size))


def _divides(node: fx.Node, axis: int) -> bool:
    found = fact(node).strategy
    assert found is not None
    return flops(node) > 0 and found.choices[axis].kind in DIVIDE
