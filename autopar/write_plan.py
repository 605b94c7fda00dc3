"""From a finished graph, all of its nodes with strategies, to the plan that says the same: `plan_of`.

The graph may come from pins (`autopar.build.choose`) or from the solver. What a node does is read from its fact
alone: choices and nesting of ops, layouts of inputs, treatment of parameters (`passes.complete_layouts.treat`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from autopar.capture import Capture
from autopar.cluster import Cluster
from autopar.names import axis_names, displays, sizes_by_name
from autopar.passes.calls import call_key
from autopar.passes.complete_layouts import needs_change
from autopar.passes.completion import is_op
from autopar.passes.facts import fact, value
from autopar.passes.insert_changes import produced_layout
from autopar.passes.layout import Layout, Mesh, Wire
from autopar.passes.probe import probed
from autopar.passes.rules import rule_of
from autopar.passes.units import ranges
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
    Rng,
    Stage,
    Unit,
    choice_to_text,
)
from autopar.rests import one_nesting
from autopar.runtime.counter_random import draws

DTYPES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}


def plan_of(
    gm: fx.GraphModule,
    captured: Capture,
    mesh: Mesh,
    cluster: Cluster,
    *,
    units: Sequence[tuple[str, int, int]] = (),
    recompute: str | Sequence[str] = "none",
    rename: bool = False,
) -> Plan:
    """The plan that a finished graph amounts to; predictions, proof and pins are the caller's to add.

    ``units``: (FQN, start, stop) of each unit as a range of `ops_of`, in order and without gaps (none: `ranges`);
    ``recompute``: what each, or all of them, make again in backward. Units with equal ops that do the same share a
    class. ``rename``: give the axes the names of what they do. Parameters that would nest two axes in opposite orders
    at rest are nested alike (`rests.one_nesting`).
    """
    shown = displays(gm, mesh, frozenset(i.name for i in captured.inputs if i.batch), captured.batch)
    names = axis_names(shown) if rename else tuple(a.name for a in mesh.axes)
    units = units or ranges(gm, frozenset(captured.parameters))
    kinds, classes = _classes(gm, units, [recompute] * len(units) if isinstance(recompute, str) else recompute)
    nodes = {str(n.target): n for n in gm.graph.nodes if n.op == "get_attr" and str(n.target) in captured.parameters}
    rests, unruled = _rests(nodes), _unruled(gm)
    return Plan(
        model=ModelId(captured.hash, captured.model_name, captured.checked == "equal", captured.hints),
        cluster=ClusterId(cluster.name, cluster.nodes, cluster.ranks_per_node, cluster.device),
        axes=_axes(mesh, cluster, names, shown),
        mesh=sizes_by_name(shown, [a.size for a in mesh.axes]),
        units=tuple(Unit(fqn, kind) for (fqn, _, _), kind in zip(units, kinds, strict=True)),
        classes=classes,
        stages=(Stage(0, len(units)),),
        microbatches=1 if mesh.time is None else mesh.axes[mesh.time].size,
        batch=captured.batch,
        inputs={n.name: str(produced_layout(n)) for n in gm.graph.nodes if n.op == "placeholder"},
        parameters={fqn: _parameter(captured, n, rests[fqn], mesh) for fqn, n in nodes.items()},
        relaxations=dict(captured.relaxations),
        optimizer=captured.optimizer,
        precision=captured.precision,
        padding=_padding(nodes, rests, mesh),
        rng=Rng("counter" if any(draws(n.target) for n in gm.graph.nodes) else "none"),
        predicted=Predicted(fallback=_without_rule(unruled), probed=_probed(unruled)),
    )


def ops_of(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes that a plan's ops stand for, in order."""
    return [n for n in gm.graph.nodes if is_op(n)]


def strides_of(mesh: Mesh) -> tuple[int, ...]:
    """How far neighbours on each axis are apart, in ranks; 0 in time.

    >>> from autopar.passes.layout import Axis
    >>> strides_of(Mesh((Axis("dp", 2), Axis("tp", 4), Axis("time", 2, (3, 3)))))
    (4, 1, 0)
    """
    sizes = [1 if a.is_time else a.size for a in mesh.axes]
    return tuple(0 if a.is_time else math.prod(sizes[i + 1 :]) for i, a in enumerate(mesh.axes))


def wire_to_json(wire: Wire | None) -> dict[str, tuple[float, float]]:
    """A wire as `PlanAxis.wire` has it; empty for none."""
    if wire is None:
        return {}
    return {
        "all_reduce": wire.all_reduce,
        "all_gather": wire.all_gather,
        "reduce_scatter": wire.reduce_scatter,
        "all_to_all": wire.all_to_all,
        "copy": (0.0, wire.copy),
    }


def wire_from_json(wire: Mapping[str, tuple[float, float]]) -> Wire | None:
    """What `wire_to_json` wrote."""
    if not wire:
        return None
    return Wire(
        wire["all_reduce"], wire["all_gather"], wire["reduce_scatter"], wire["all_to_all"], copy=wire["copy"][1]
    )


def _axes(mesh: Mesh, cluster: Cluster, names: Sequence[str], shown: Sequence[tuple[str, ...]]) -> tuple[PlanAxis, ...]:
    found = []
    for axis, name, stride, words in zip(mesh.axes, names, strides_of(mesh), shown, strict=True):
        tier = TIME if axis.is_time else cluster.tier_of(axis.size, stride).name
        found.append(PlanAxis(name, axis.size, tier, stride, words, wire_to_json(axis.wire)))
    return tuple(found)


def _classes(
    gm: fx.GraphModule, units: Sequence[tuple[str, int, int]], recompute: Sequence[str]
) -> tuple[tuple[int, ...], tuple[PlanClass, ...]]:
    """The class of every unit, and the classes in order of their first units."""
    nodes = ops_of(gm)
    assert [u[1] for u in units] == [0, *(u[2] for u in units[:-1])] and units[-1][2] == len(nodes), "gaps in units"
    known: dict[object, int] = {}
    kinds: list[int] = []
    classes: list[PlanClass] = []
    for (fqn, start, stop), again in zip(units, recompute, strict=True):
        ops = tuple(_op(index, node) for index, node in enumerate(nodes[start:stop]))
        shapes = tuple(fact(node).values for node in nodes[start:stop])
        key = (tuple(replace(op, fqn="") for op in ops), shapes, again)
        if key not in known:
            known[key] = len(classes)
            classes.append(PlanClass(fqn, ops, recompute=again))  # type: ignore[arg-type]
        kinds.append(known[key])
    return tuple(kinds), tuple(classes)


def _op(index: int, node: fx.Node) -> Op:
    found = fact(node).strategy
    assert found is not None
    return Op(index, str(node.target), fact(node).fqn, tuple(choice_to_text(c) for c in found.choices), found.order)


def _rests(nodes: Mapping[str, fx.Node]) -> dict[str, Layout]:
    found, nbytes = {}, {}
    for fqn, node in nodes.items():
        rest = fact(node).rest
        assert rest is not None, f"{fqn} does not rest"
        found[fqn], nbytes[fqn] = rest, value(node).resting.nbytes
    return one_nesting(found, nbytes)


def _parameter(captured: Capture, node: fx.Node, rest: Layout, mesh: Mesh) -> Parameter:
    fqn, v, known = str(node.target), value(node), fact(node)
    use = produced_layout(node)
    moves = needs_change(rest, use)
    summed = v.grad and any(use.kinds[i] == "R" and mesh.axes[i].size > 1 for i in mesh.space)
    trainable = captured.parameters[fqn].requires_grad
    reduced = trainable and (moves or summed)
    return Parameter(
        shape=v.shape,
        rest=str(rest),
        use=str(use),
        gather="never" if not moves else "use" if known.gather == "use" else "step",
        reduce="never" if not reduced else "microbatch" if known.reduce == "microbatch" else "step",
        dtype=_word(v.resting.dtype),
        use_dtype=_word(v.dtype),
        grad_dtype=_word(v.reduced.dtype),
        trainable=trainable,
        aliases=tuple(sorted(a for a, c in captured.aliases.items() if c == fqn)),
    )


def _word(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def _padding(nodes: Mapping[str, fx.Node], rests: Mapping[str, Layout], mesh: Mesh) -> tuple[Padding, ...]:
    found = []
    for fqn, node in nodes.items():
        shape = value(node).shape
        for d, split in enumerate(rests[fqn].dims):
            ways = math.prod(mesh.axes[a].size for a in split.axes)
            if split.axes and shape[d] % ways:
                found.append(Padding(fqn, d, shape[d], -(-shape[d] // ways) * ways))
    return tuple(found)


def _unruled(gm: fx.GraphModule) -> list[fx.Node]:
    """Ops without a rule, one of equal calls."""
    return [n for n in {call_key(n): n for n in reversed(ops_of(gm))}.values() if rule_of(n) is None]


def _without_rule(unruled: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(sorted({f"{n.target}: {probed(n).why}" for n in unruled if n.all_input_nodes and probed(n).why}))


def _probed(unruled: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(sorted({str(n.target) for n in unruled if not probed(n).why}))
