"""What a special strategy does inside: collectives that no change of layout accounts for, and what its own ops keep.

The op is lowered alone, as the program would have it, and looked at: equal calls once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from autopar.count_collectives import sends
from autopar.passes.calls import call_key
from autopar.passes.completion import is_op
from autopar.passes.emit import Emitter
from autopar.passes.facts import KEY, Choice, Strategy, fact, operand_nodes, value
from autopar.passes.graph_module import graph_module
from autopar.passes.layout import Mesh
from autopar.passes.make_local import lower_node
from autopar.passes.saves import saves
from autopar.run_on_fakes import Run


@dataclass(frozen=True)
class Inside:
    """``sent``: (axis, kind, bytes, whether in backward) of each collective; ``kept``: bytes that autograd keeps
    besides operands and results."""

    sent: tuple[tuple[int, str, int, bool], ...]
    kept: int

    def seconds(self, mesh: Mesh, *, train: bool = True) -> float:
        """Of the collectives, by the wires of the axes; ``train=False``: of the forward alone."""
        return sum(
            mesh.wire(axis).seconds(kind, nbytes) for axis, kind, nbytes, backward in self.sent if train or not backward
        )


def seconds_inside(graph: fx.GraphModule, mesh: Mesh, *, train: bool = True) -> float:
    """Of the collectives inside all ops of a completed graph, in one microbatch."""
    plain, total = mesh.without_wires(), 0.0
    for node in graph.graph.nodes:
        plan = fact(node).strategy if is_op(node) else None
        within = None if plan is None else inside(node, plan, plain)
        total += 0.0 if within is None else within.seconds(mesh, train=train)
    return total


_KNOWN: dict[tuple[int, tuple[Choice, ...], Mesh], Inside] = {}


def inside(op: fx.Node, strategy: Strategy, mesh: Mesh) -> Inside | None:
    """Of one strategy with a special choice, in one microbatch; None for others. ``mesh``: without wires."""
    if not any(c.kind == "special" for c in strategy.choices):
        return None
    key = (call_key(op), strategy.choices, mesh)
    if key not in _KNOWN:
        _KNOWN[key] = _look(op, strategy, mesh)
    return _KNOWN[key]


def _look(op: fx.Node, strategy: Strategy, mesh: Mesh) -> Inside:
    before = fact(op)
    op.meta[KEY] = replace(before, strategy=strategy)
    try:
        graph, wants = _lowered(op, strategy, mesh)
    finally:
        op.meta[KEY] = before
    found = [s for s in sends(graph, wants) if s.kind]
    axis = {a.name: i for i, a in enumerate(mesh.axes)}
    return Inside(tuple((axis[s.group], s.kind, s.nbytes, s.backward) for s in found), _kept(op, graph, wants))


def _lowered(op: fx.Node, strategy: Strategy, mesh: Mesh) -> tuple[fx.GraphModule, dict[str, bool]]:
    """The op on one rank as a graph of its own, and which of its placeholders (a different operand each) need a
    gradient."""
    coordinates = tuple(a.rows.index(max(a.rows)) if a.is_time else 0 for a in mesh.axes)
    emitter = Emitter(mesh, coordinates, {a.name: a.name for a in mesh.axes})
    wants: dict[str, bool] = {}
    for i, (operand, layout) in enumerate(zip(operand_nodes(op), strategy.operands, strict=True)):
        if operand in emitter.env:
            continue
        v = value(operand)
        local = emitter.graph.placeholder(f"operand_{i}")
        shape = layout.local_shape(v.shape, mesh, coordinates)
        local.meta["val"] = torch.empty(shape, dtype=v.dtype, device="meta")
        emitter.env[operand] = local
        wants[local.name] = v.grad
    emitter.at = op
    emitter.graph.output(lower_node(op, emitter))
    return graph_module(emitter.graph), wants


def _firsts(op: fx.Node) -> list[int]:
    """The first slot of every different operand."""
    slots: dict[fx.Node, int] = {}
    for i, operand in enumerate(operand_nodes(op)):
        slots.setdefault(operand, i)
    return list(slots.values())


def _kept(op: fx.Node, graph: fx.GraphModule, wants: dict[str, bool]) -> int:
    """Bytes that autograd keeps and that are not counted where the op, run whole, keeps operands and results."""
    known, firsts = saves(op), _firsts(op)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        inputs = [
            torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype).requires_grad_(wants[n.name])
            for n in graph.graph.find_nodes(op="placeholder")
        ]
        run = Run(graph, inputs, [])
        with torch.autograd.graph.saved_tensors_hooks(run.pack, lambda held: held.tensor):
            made = run.run(*inputs)
        results = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        counted = [t for i, t in enumerate(results) if i in known.results]
        counted += [t for t, i in zip(inputs, firsts, strict=True) if i in known.operands]
        run.own = {int(t.untyped_storage()._cdata) for t in counted}
        kept, _ = run.bytes_held()
    return kept
