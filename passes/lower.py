"""From a graph with strategies to the program of one rank: `Local`, all that the runtime needs.

`LOWER` in ``passes/__init__.py`` is the order: changes inserted, then everything made local.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from autopar.passes.changes import path
from autopar.passes.emit import Emitter
from autopar.passes.facts import Value, fact, value
from autopar.passes.graph_module import graph_module
from autopar.passes.insert_changes import insert_changes, produced_layout
from autopar.passes.layout import WHOLE, Layout, Mesh
from autopar.passes.loss_stays_wide import LOSS_DTYPE
from autopar.passes.make_local import make_local
from autopar.passes.split_tail import Tail
from autopar.passes.split_units import UnitProgram, split_units
from autopar.runtime.pipeline import Crossing


@dataclass(frozen=True)
class ParameterUse:
    """How one parameter is held: ``rest`` between steps, ``use`` as the body reads it. ``reduce``: when its gradient is
    taken back, once a ``step`` or per ``microbatch``; ``gather``: when rest becomes use, once a ``step``, or for every
    unit that reads it, at each ``use`` (``never``: the value does not move). ``dtype``: as it rests; ``use_dtype`` and
    ``reduce_dtype``: as it is gathered and read, and as its gradient is reduced, where that is another."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    rest: Layout
    use: Layout
    reduce: str
    gather: str = "step"
    use_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def value(self) -> Value:
        """The parameter as units read it."""
        rest_dtype = self.dtype if self.use_dtype else None
        return Value(self.shape, self.use_dtype or self.dtype, self.trainable, rest_dtype, self.reduce_dtype)


@dataclass(frozen=True)
class InputUse:
    """One tensor input: its global shape, and the piece that a rank reads for a microbatch."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout


@dataclass(frozen=True)
class OutputUse:
    """One tensor output and the layout in which the ranks hold it; ``dtype``: as it is returned."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout


@dataclass(frozen=True)
class Lowerable:
    """A completed model: strategies on every node. ``prologue`` computes, once a step and on the whole batch, what the
    body's placeholders ``hoisted`` read; ``recompute``: what each unit makes again in backward (empty: nothing).

    ``returns``: which of the model's outputs it makes (None: all of them), by `Tail.ids` where there is a ``tail``. Of
    one pipeline stage (`cut_stages`) ``received`` and ``sent``: what crosses; what is sent stands behind its outputs.
    """

    body: fx.GraphModule
    mesh: Mesh
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]
    inputs: tuple[str, ...]
    prologue: fx.GraphModule | None = None
    hoisted: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    returns: tuple[int, ...] | None = None
    received: tuple[Crossing, ...] = ()
    sent: tuple[Crossing, ...] = ()
    tail: Tail | None = None


@dataclass(frozen=True)
class Local:
    """The program of one rank, or of one stage of it. Graph placeholders: parameters, buffers, constants, inputs,
    hoisted, received, microbatch, and the key of the step (`random_key`), which the prologue takes too. ``outputs``:
    those that it makes, what it sends behind them. ``recompute``, ``returns``, ``received``, ``sent``, ``tail``: as
    `Lowerable` has them."""

    mesh: Mesh
    coordinates: tuple[int, ...]
    parameters: tuple[ParameterUse, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]
    inputs: tuple[InputUse, ...]
    outputs: tuple[OutputUse, ...]
    buffer_updates: tuple[str, ...]
    body: Mapping[int, fx.GraphModule]  # by the microbatch's batch rows (0 when there is no time axis)
    prologue: fx.GraphModule | None = None
    enter: Mapping[str, fx.GraphModule] = field(default_factory=dict)
    recompute: tuple[str, ...] = ()
    returns: tuple[int, ...] | None = None
    received: tuple[Crossing, ...] = ()
    sent: tuple[Crossing, ...] = ()
    tail: Tail | None = None

    @property
    def has_loss(self) -> bool:
        """Whether the loss is made here: the first of ``outputs`` then."""
        return bool(self.outputs) and (self.returns is None or self.returns[0] == 0)

    @property
    def roots(self) -> tuple[int, ...]:
        """The outputs of the body to which a gradient comes."""
        sent = (len(self.outputs) + i for i, crossing in enumerate(self.sent) if crossing.grad)
        return (*((0,) if self.has_loss else ()), *(i for i, grad in self.tailed if grad), *sent)

    @property
    def tailed(self) -> list[tuple[int, bool]]:
        """Of each input of the tail its place among the outputs, and whether a gradient of it comes back."""
        if self.tail is None:
            return []
        assert self.returns is not None
        ids = self.tail.ids[len(self.tail.kept) :]
        return [(self.returns.index(i), v.grad) for i, v in zip(ids, self.tail.inputs, strict=True)]

    @cached_property
    def units(self) -> Mapping[int, UnitProgram]:
        """The bodies once more, in pieces, by the microbatch's batch rows."""
        held = {
            "parameter": len(self.parameters),
            "buffer": len(self.buffers),
            "constant": len(self.constants),
            "input": len(self.inputs),
        }
        refs = [(kind, i) for kind, n in held.items() for i in range(n)]
        wanted = {("parameter", i) for i, use in enumerate(self.parameters) if use.trainable}
        wanted |= {("received", i) for i, crossing in enumerate(self.received) if crossing.grad}
        last = [*(("received", i) for i in range(len(self.received))), ("microbatch", 0), ("key", 0)]
        found = {}
        for rows, gm in self.body.items():
            hoisted = len(gm.graph.find_nodes(op="placeholder")) - len(refs) - len(last)
            every = [*refs, *(("hoisted", i) for i in range(hoisted)), *last]
            found[rows] = split_units(gm, every, wanted, self.recompute, self.roots)
        return found


def with_changes(model: Lowerable) -> Lowerable:
    """The model with every change of layout a node; done once, before it is lowered for any rank."""
    from dataclasses import replace

    body = insert_changes(model.body, model.mesh)
    prologue = insert_changes(model.prologue, model.mesh) if model.prologue is not None else None
    return replace(model, body=body, prologue=prologue)


def lower(
    model: Lowerable,
    rank: int,
    groups: Mapping[str, str],
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Local:
    """The program of ``rank``. ``groups``: axis name -> name of the rank's c10d group; ``device``: where it
    computes. Call `with_changes` first."""
    mesh = model.mesh
    holders = {n.name: n for n in model.body.graph.nodes if n.op == "placeholder"}
    output = next(n for n in model.body.graph.nodes if n.op == "output")
    body: dict[int, fx.GraphModule] = {}
    for microbatch, rows in enumerate(mesh.axes[mesh.time].rows if mesh.time is not None else (0,)):
        if rows not in body:
            coordinates = mesh.coordinates(rank, microbatch)
            body[rows] = make_local(model.body, mesh, coordinates, groups, _signature(model, hoisted=True), device)
    prologue = None
    if model.prologue is not None:
        prologue = make_local(
            model.prologue, mesh, mesh.coordinates(rank), groups, _signature(model, hoisted=False), device
        )
    uses = parameter_uses(model)
    return Local(
        mesh=mesh,
        coordinates=mesh.coordinates(rank),
        parameters=uses,
        buffers=model.buffers,
        constants=model.constants,
        inputs=tuple(_input_use(n, holders[n]) for n in model.inputs),
        outputs=output_uses(model),
        buffer_updates=tuple(output.args[0]["buffers"]),
        body=body,
        prologue=prologue,
        enter={u.fqn: enter_graph(u, mesh, rank, groups) for u in uses if u.rest != u.use or u.use_dtype},
        recompute=model.recompute,
        returns=model.returns,
        received=model.received,
        sent=model.sent,
        tail=model.tail,
    )


def parameter_uses(model: Lowerable) -> tuple[ParameterUse, ...]:
    """How each parameter that the body reads is held."""
    attrs = {str(n.target): n for n in model.body.graph.nodes if n.op == "get_attr"}
    return tuple(_parameter_use(fqn, attrs[fqn]) for fqn in model.parameters if fqn in attrs)


def output_uses(model: Lowerable) -> tuple[OutputUse, ...]:
    """The outputs of a model that has its changes, without what a stage sends."""
    output = model.body.graph.output_node()
    (result,) = output.args
    assert isinstance(result, dict)
    nodes: tuple[fx.Node, ...] = result["outputs"]
    returns = range(len(nodes)) if model.returns is None else model.returns
    return tuple(
        OutputUse(
            value(n).shape,
            output.meta.get(LOSS_DTYPE, value(n).dtype) if i == 0 else value(n).dtype,
            produced_layout(n),
        )
        for i, n in zip(returns, nodes, strict=False)
    )


def tail_uses(tail: Tail) -> tuple[OutputUse, ...]:
    """The outputs that a tail makes, whole."""
    (results,) = tail.graph.graph.output_node().args
    vals = [n.meta["val"] for n in results]  # type: ignore[union-attr]
    return tuple(OutputUse(tuple(v.shape), v.dtype, Layout("", (WHOLE,) * v.ndim)) for v in vals)


def _input_use(name: str, node: fx.Node) -> InputUse:
    return InputUse(name, value(node).shape, value(node).dtype, produced_layout(node))


def _parameter_use(fqn: str, node: fx.Node) -> ParameterUse:
    v, known = value(node), fact(node)
    use = produced_layout(node)
    return ParameterUse(
        fqn,
        v.shape,
        v.resting.dtype,
        v.grad,
        rest=known.rest or use,
        use=use,
        reduce=known.reduce,
        gather=known.gather,
        use_dtype=v.dtype if v.dtype != v.resting.dtype else None,
        reduce_dtype=v.reduced.dtype if v.reduced.dtype != v.resting.dtype else None,
    )


def _signature(model: Lowerable, *, hoisted: bool) -> list[tuple[str, str]]:
    """(kind, name) of every placeholder of a local graph, in order."""
    body_attrs = {str(n.target) for n in model.body.graph.nodes if n.op == "get_attr"}
    names = [
        ("get_attr", f) for f in (*(p for p in model.parameters if p in body_attrs), *model.buffers, *model.constants)
    ]
    names += [("placeholder", n) for n in model.inputs]
    if hoisted:
        names += [("placeholder", n) for n in (*model.hoisted, *map(name_of, model.received))]
        names += [("microbatch", "microbatch")]
    return [*names, ("key", "key")]


def name_of(crossing: Crossing) -> str:
    """The placeholder that stands for a value of another stage."""
    return f"received_{crossing.number}"


def enter_graph(use: ParameterUse, mesh: Mesh, rank: int, groups: Mapping[str, str]) -> fx.GraphModule:
    """Rest -> use of one parameter on one rank, cast before it moves; its autograd backward reduces the gradient (in
    the dtype of use: another one, as the runtime has it, autograd cannot express)."""
    v = use.value
    steps = path(use.rest, use.use, v, mesh)
    assert steps is not None, f"{use.fqn}: no way from {use.rest} to {use.use}"
    emitter = Emitter(mesh, mesh.coordinates(rank), groups)
    node = emitter.graph.placeholder("rest")
    node.meta["val"] = torch.empty(
        use.rest.local_shape(use.shape, mesh, mesh.coordinates(rank)), dtype=use.dtype, device="meta"
    )
    emitter.at = node
    if use.use_dtype:
        node = emitter.call(torch.ops.aten.to.dtype, node, use.use_dtype)
    for step in steps:
        node = emitter.step(node, step, v)
    emitter.graph.output(node)
    return graph_module(emitter.graph)
