"""After annotate: what needs the whole batch and no parameter is computed once a step, before the microbatches."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.passes.completion import produced_parts
from autopar.passes.constants import is_elementwise
from autopar.passes.facts import KEY, Fact, Strategy, fact, is_tensor, operand_nodes
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.strategy import choices, rule, strategy


@dataclass(frozen=True)
class Rows:
    """How a tensor depends on the rows of the batch: it holds them as ``layout`` says, each row a piece; or, with None,
    it holds what is left of all of them (a count, a sum, an order of the rows)."""

    layout: Layout | None


REDUCED = Rows(None)
States = tuple[Rows | None, ...]  # one a tensor of the node; None: does not depend on the batch


def hoist_normalisers(gm: fx.GraphModule) -> fx.GraphModule:
    """Mark as prologue (`Fact.prologue`) every node that depends on inputs, buffers and constants, on no trainable
    parameter, and holds no longer one entry for each row of the batch: the number of valid tokens, a weight normalised
    over the batch. With it goes what it is computed from; a node that the loop reads too is copied.

    A microbatch could not compute such a value from its own rows. Batch inputs are the placeholders whose dim 0 is that
    of the first; ``gm.meta["batch_inputs"]``, a set of names, says otherwise. Needs facts on every node (`annotate`).

    Example:
        ``n = cross_entropy_count(labels, ...); loss = div(s, n)`` -> the same, ``n`` marked: two microbatches with 100
        and 28 valid tokens both divide by 128.
    """
    states = _states(gm)
    needed: dict[fx.Node, None] = {}  # a set in a fixed order
    for node in reversed(list(gm.graph.nodes)):
        if _is_reduced(states, node) or (node.op == "call_function" and any(u in needed for u in node.users)):
            needed[node] = None
    marked = dict.fromkeys(reversed(needed))
    _mark(gm, marked, _staying(states, marked))
    gm.graph.lint()
    gm.recompile()
    return gm


def _is_reduced(states: dict[fx.Node, States], node: fx.Node) -> bool:
    return node.op == "call_function" and REDUCED in states.get(node, ())


def _staying(states: dict[fx.Node, States], marked: dict[fx.Node, None]) -> set[fx.Node]:
    """Marked nodes that the loop reads too and can compute itself."""
    staying = set[fx.Node]()
    for node in reversed(marked):
        if not _is_reduced(states, node) and any(u not in marked or u in staying for u in node.users):
            staying.add(node)
    return staying


def _mark(gm: fx.GraphModule, marked: dict[fx.Node, None], staying: set[fx.Node]) -> None:
    copies: dict[fx.Node, fx.Node] = {}
    for node in marked:
        into = node
        if node in staying:
            with gm.graph.inserting_after(node):
                into = copies[node] = gm.graph.node_copy(node, lambda n: copies.get(n, n))
        else:
            node.args = fx.map_arg(node.args, lambda n: copies.get(n, n))
            node.kwargs = fx.map_arg(node.kwargs, lambda n: copies.get(n, n))
        into.meta = {**node.meta, KEY: replace(fact(node), prologue=True)}


# -- how tensors depend on the rows ----------------------------------------------------------------------------------


def _states(gm: fx.GraphModule) -> dict[fx.Node, States]:
    """Of every node that depends on no trainable parameter."""
    batch, inputs = _batch(gm)
    if batch < 2:
        return {}
    mesh = Mesh((Axis("batch", batch, rows=(1,) * batch),))
    states: dict[fx.Node, States] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            states[node] = (_held(node, 0) if node.name in inputs else None,)
        elif node.op == "get_attr":
            if not _has_gradient(fact(node)):
                states[node] = (None,)
        elif node.op == "call_function" and all(a in states for a in node.all_input_nodes):
            states[node] = _result(node, states, mesh)
    return states


def _held(node: fx.Node, dim: int, parts: tuple[int, ...] = ()) -> Rows:
    return Rows(Layout.uniform("R", 1, node.meta["val"].ndim).with_shard(0, dim, parts))


def _has_gradient(of: Fact) -> bool:
    return any(v is not None and v.grad for v in of.values)


def _batch(gm: fx.GraphModule) -> tuple[int, frozenset[str]]:
    """Rows of the batch, and the names of the placeholders that have them."""
    shapes = {n.name: tuple(n.meta["val"].shape) for n in gm.graph.find_nodes(op="placeholder") if is_tensor(n)}
    named = gm.meta.get("batch_inputs")
    lengths = [s[0] for n, s in shapes.items() if s and (named is None or n in named)]
    first = (
        (lengths[0] if named is None else min(lengths)) if lengths else 0
    )  # of a list of places each row has several
    names = {n for n, s in shapes.items() if s and s[0] == first} if named is None else set(named)
    return first, frozenset(names)


def _result(node: fx.Node, states: dict[fx.Node, States], mesh: Mesh) -> States:
    count = max(len(fact(node).values), 1)
    if node.target is operator.getitem:
        source, index = node.args
        held = states[source]  # type: ignore[index]
        return (held[index] if isinstance(index, int) and len(held) > 1 else held[0],)
    operands = operand_nodes(node)
    rows = [states[a][0] for a in operands]
    if all(r is None for r in rows):
        return (None,) * count
    if all(r is None or r is REDUCED for r in rows):
        return (REDUCED,) * count
    if rule(node) is None:
        return (_aligned(node, operands, rows),) * count
    plan = _row_by_row(node, rows, mesh)
    if plan is None:
        return (REDUCED,) * count
    return tuple(None if r is None else Rows(r) if r.kinds == "S" else REDUCED for r in plan.results)


def _aligned(node: fx.Node, operands: tuple[fx.Node, ...], rows: list[Rows | None]) -> Rows:
    """Of an op without a rule: rows stay where they are if it is elementwise."""
    if not is_elementwise(node) or not isinstance(node.meta["val"], torch.Tensor):
        return REDUCED
    found = set[tuple[int, tuple[int, ...]]]()
    for operand, held in zip(operands, rows):
        dim = held.layout.dim_of(0) if held is not None and held.layout is not None else None
        if dim is not None and held is not None and held.layout is not None:
            found.add((dim + node.meta["val"].ndim - operand.meta["val"].ndim, held.layout.dims[dim].parts))
    return _held(node, *found.pop()) if len(found) == 1 else REDUCED


def _row_by_row(node: fx.Node, rows: list[Rows | None], mesh: Mesh) -> Strategy | None:
    """The strategy that takes all rows where they are; None where the op mixes them."""
    held = {i: r.layout for i, r in enumerate(rows) if r is not None and r.layout is not None}
    found = rule(node)
    assert found is not None
    parts = [p for i, layout in held.items() for p in produced_parts(found, i, layout, 0)]
    for choice in choices(node, mesh, 0, parts):
        plan = strategy(node, mesh, [choice], (0,)) if choice.kind == "factor" else None
        if plan is not None and all(plan.operands[i] == layout for i, layout in held.items()):
            return plan
    return None
