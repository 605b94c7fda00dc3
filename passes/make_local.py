"""make_local: afterwards the graph is what one rank runs: local sizes, collectives as start/wait pairs, tensors
passed in.

Literal sizes are computed from layouts and global shapes, never found by trial; the shape that an op then really
produces is checked against its layout, so that a wrong rule cannot go unnoticed.

before:  %view   = reshape(%linear, [4, 16, 8, 32])                 # S2 on tp=2
         %change = change(%partial, "P", "I")
after:   %view   = reshape(%linear, [4, 16, 4, 32])
         %start  = autopar.start_all_reduce(%partial, "tp", "none")
         %wait   = autopar.wait_all_reduce(%start)
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.passes.changes import Step
from autopar.passes.emit import Emitter
from autopar.passes.facts import DRAWN, LAYOUT, RELAXED, fact, is_tensor, operand_nodes, value
from autopar.passes.graph_module import graph_module
from autopar.passes.insert_changes import change, is_getitem, produced_layout
from autopar.passes.layout import PARTIAL, SHARD, Mesh
from autopar.passes.rules.convolution import CONVOLUTIONS, TRANSPOSED
from autopar.passes.rules.core import LOCALIZE, PLACES
from autopar.passes.strategy import at_positions, special_of
from autopar.runtime.counter_random import draws, runs_of

aten = torch.ops.aten
PRODUCTS = (aten.linear.default, *CONVOLUTIONS, *TRANSPOSED)


@dataclass(frozen=True)
class Sizes:
    """Local shapes of a node's tensor operands and results on one rank."""

    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...] | None, ...]


def make_local(
    gm: fx.GraphModule,
    mesh: Mesh,
    coordinates: tuple[int, ...],
    groups: Mapping[str, str],
    signature: Sequence[tuple[str, str]],
    device: torch.device = torch.device("cpu"),  # noqa: B008  immutable
) -> fx.GraphModule:
    """The graph of the rank at ``coordinates``. ``signature``: (kind, name) of its placeholders in order; those that
    the graph does not read are kept, so that all graphs of a program are called alike."""
    emitter = Emitter(mesh, coordinates, groups, device)
    known = {("get_attr", str(n.target)): n for n in gm.graph.nodes if n.op == "get_attr"}
    known |= {("placeholder", n.name): n for n in gm.graph.nodes if n.op == "placeholder"}
    words: set[str] = set()
    for kind, name in signature:
        local = emitter.graph.placeholder(_word(name, words))
        if kind == "microbatch":
            local.meta["val"] = 0 if mesh.time is None else coordinates[mesh.time]  # one with the rows of this program
            emitter.microbatch = local
        elif kind == "key":
            local.meta["val"] = 0
            emitter.key = local
        elif (kind, name) in known:
            node = known[kind, name]
            shape = produced_layout(node).local_shape(value(node).shape, mesh, coordinates)
            local.meta["val"] = torch.empty(shape, dtype=value(node).dtype, device="meta")
            emitter.env[node] = local
            for key in ("nn_module_stack", "stack_trace"):
                if key in node.meta:
                    local.meta[key] = node.meta[key]
    for node in gm.graph.nodes:
        emitter.at = node
        if node.op == "output":
            (result,) = node.args
            outputs, buffers = result["outputs"], result["buffers"]
            emitter.graph.output(
                (tuple(emitter.env[n] for n in outputs), tuple(emitter.env[n] for n in buffers.values()))
            )
        elif node.op == "call_function":
            emitter.env[node] = lower_node(node, emitter)
            if node.target is not change:
                emitter.env[node]._rename(node.name)
            if is_tensor(node):
                emitter.env[node].meta[LAYOUT] = produced_layout(node)
    for node in reversed(list(emitter.graph.nodes)):
        if node.op == "call_function" and not node.users:
            emitter.graph.erase_node(node)
    return graph_module(emitter.graph)


def _word(name: str, taken: set[str]) -> str:
    """``name`` as a Python name of its own: ``0.weight`` -> ``_0_weight``."""
    word = re.sub(r"\W", "_", name)
    if not word.isidentifier() or keyword.iskeyword(word):
        word = f"_{word}"
    while word in taken:
        word += "_"
    taken.add(word)
    return word


def lower_node(node: fx.Node, emitter: Emitter) -> fx.Node:
    """Emit one node of the completed graph; its operands are in ``emitter.env``."""
    if node.target is change:
        step = node.meta["change"]
        assert isinstance(step, Step)
        return emitter.step(emitter.operand(0), step, value(node))
    if is_getitem(node):
        return emitter.call(operator.getitem, *emitter.args(node)[0])
    strategy = fact(node).strategy
    assert strategy is not None, f"{node} has no strategy"
    sizes = _sizes(node, emitter)
    emitter.place = _place(node, emitter) if RELAXED in node.meta else {}
    special = next(((a, c.name) for a, c in enumerate(strategy.choices) if c.kind == "special"), None)
    if special is not None:
        local = special_of(node, special[1]).lower(emitter, node, special[0])
    elif any(at_positions(node, c) for c in strategy.choices):
        local = PLACES[node.target](emitter, node)
    else:
        args, kwargs = emitter.args(node)
        localize = LOCALIZE.get(node.target)
        if localize is not None:
            args, kwargs = localize(node, args, kwargs, sizes)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": emitter.device}
        if draws(node.target):
            kwargs = {**kwargs, **_place(node, emitter)}
        if _has_bias_apart(node, emitter.mesh):
            local = emitter.call(node.target, *args[:2], None, *args[3:], **kwargs)
            local = emitter.call(aten.add.Tensor, local, _over_channels(node, args[2], emitter))
        else:
            local = emitter.call(node.target, *args, **kwargs)
    assert isinstance(local, fx.Node)
    _check(node, local, sizes)
    return local


def _has_bias_apart(node: fx.Node, mesh: Mesh) -> bool:
    """Whether the bias of a product is partial while ranks hold pieces of unequal sizes of the rest: kernels then sum
    its gradient in orders of their own, and what is invariant must be the same on all ranks bit for bit."""
    strategy = fact(node).strategy
    if node.target not in PRODUCTS or len(node.args) < 3 or not isinstance(node.args[2], fx.Node) or strategy is None:
        return False
    layouts = zip(operand_nodes(node), strategy.operands, strict=True)
    even = all(layout.is_even(value(n).shape, mesh) for n, layout in layouts)
    return PARTIAL in strategy.operands[2].kinds and not even


def _over_channels(node: fx.Node, bias: fx.Node, emitter: Emitter) -> fx.Node:
    if node.target is aten.linear.default:
        return bias
    return emitter.call(aten.reshape.default, bias, [*emitter.shape(bias), *[1] * (len(value(node).shape) - 2)])


def _place(node: fx.Node, emitter: Emitter) -> dict[str, Any]:
    """Which piece of the whole a random op makes (of a relaxed one: its first operand is), and the key of the step; see
    `autopar.runtime.counter_random`."""
    strategy, mesh, at = fact(node).strategy, emitter.mesh, emitter.coordinates
    assert strategy is not None and emitter.key is not None
    relaxed = RELAXED in node.meta
    layout = strategy.operands[0] if relaxed else strategy.results[0]
    shape = value(operand_nodes(node)[0] if relaxed else node).shape
    assert layout is not None
    place: dict[str, Any] = {"step_key": emitter.key, "shape": list(shape)}
    if relaxed:
        place["draw"] = node.meta.get(DRAWN, len(emitter.env))  # the same number on every rank
    if mesh.time is None or layout.kinds[mesh.time] != SHARD:
        return {**place, "runs": runs_of([layout.runs(shape, mesh, at)])}
    moments = range(mesh.axes[mesh.time].size)
    pieces = [layout.runs(shape, mesh, (*at[: mesh.time], m, *at[mesh.time + 1 :])) for m in moments]
    return {**place, "microbatch": emitter.microbatch, "runs": runs_of(pieces)}


def _sizes(node: fx.Node, emitter: Emitter) -> Sizes:
    strategy = fact(node).strategy
    assert strategy is not None
    operands = tuple(
        layout.local_shape(value(n).shape, emitter.mesh, emitter.coordinates)
        for n, layout in zip(operand_nodes(node), strategy.operands, strict=True)
    )
    results = tuple(
        layout.local_shape(v.shape, emitter.mesh, emitter.coordinates) if v is not None and layout is not None else None
        for v, layout in zip(fact(node).values, strategy.results, strict=True)
    )
    return Sizes(operands, results)


def _check(node: fx.Node, local: fx.Node, sizes: Sizes) -> None:
    """What the op really makes of its local operands must be what the layouts say, wherever it is read."""
    val = local.meta["val"]
    made = val if isinstance(val, (tuple, list)) else (val,)
    read = {u.args[1] for u in node.users if is_getitem(u)}
    for i, (got, want) in enumerate(zip(made, sizes.results, strict=True)):
        assert want is None or (read and i not in read) or tuple(got.shape) == want, (
            f"{node.format_node()} ({fact(node).fqn}): the rule promises a local shape of {want}, "
            f"the op makes {tuple(got.shape)}"
        )
    assert is_tensor(node) == isinstance(val, torch.Tensor)
