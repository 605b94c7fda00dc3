"""After annotate: what needs the whole batch and no parameter is computed once a step, before the microbatches."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.passes.constants import is_elementwise
from autopar.passes.facts import KEY, Fact, fact, is_tensor, operand_nodes
from autopar.passes.rules import Rule, rule_of
from autopar.passes.rules.core import Dims


@dataclass(frozen=True)
class Rows:
    """How a tensor depends on the rows of the batch: it holds them, outermost, in ``dim``; or, with None, it holds what
    is left of all of them (a count, a sum, an order of the rows)."""

    dim: int | None


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
    states: dict[fx.Node, States] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            states[node] = (Rows(0) if node.name in inputs else None,)
        elif node.op == "get_attr":
            if not _has_gradient(fact(node)):
                states[node] = (None,)
        elif node.op == "call_function" and all(a in states for a in node.all_input_nodes):
            states[node] = _result(node, states, batch)
    return states


def _has_gradient(of: Fact) -> bool:
    return any(v is not None and v.grad for v in of.values)


def _batch(gm: fx.GraphModule) -> tuple[int, frozenset[str]]:
    """Rows of the batch, and the names of the placeholders that have them."""
    shapes = {n.name: tuple(n.meta["val"].shape) for n in gm.graph.find_nodes(op="placeholder") if is_tensor(n)}
    named = gm.meta.get("batch_inputs")
    first = next((s[0] for n, s in shapes.items() if s and (named is None or n in named)), 0)
    names = {n for n, s in shapes.items() if s and s[0] == first} if named is None else set(named)
    return first, frozenset(names)


def _result(node: fx.Node, states: dict[fx.Node, States], batch: int) -> States:
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
    rule = rule_of(node)
    if rule is None:
        return (_aligned(node, operands, rows),) * count
    factor = _batch_factor(rule, operands, rows, batch)
    if factor is None:
        return (REDUCED,) * count
    return tuple(_held(dims, factor) for dims in rule.results)


def _aligned(node: fx.Node, operands: tuple[fx.Node, ...], rows: list[Rows | None]) -> Rows:
    """Of an op without a rule: rows stay where they are if it is elementwise."""
    if not is_elementwise(node) or not isinstance(node.meta["val"], torch.Tensor):
        return REDUCED
    ndim = node.meta["val"].ndim
    dims = {r.dim + ndim - a.meta["val"].ndim for a, r in zip(operands, rows) if r is not None and r.dim is not None}
    return Rows(dims.pop()) if len(dims) == 1 else REDUCED


def _batch_factor(rule: Rule, operands: tuple[fx.Node, ...], rows: list[Rows | None], batch: int) -> str | None:
    """The one factor that stands for the rows in all operands that hold them; None where an op mixes rows."""
    found = set[str]()
    for node, dims, held in zip(operands, rule.operands, rows, strict=True):
        if held is None or held.dim is None:
            continue
        dim = dims[held.dim]
        if not dim.factors or len(dim.parts) > 1:
            return None
        first = dim.factors[0]
        length = node.meta["val"].shape[held.dim] if len(dim.factors) == 1 else rule.sizes[first]
        if first in rule.whole or length % batch:
            return None
        found.add(first)
    return found.pop() if len(found) == 1 else None


def _held(dims: Dims | None, factor: str) -> Rows | None:
    if dims is None:
        return None
    for place, dim in enumerate(dims):
        factors = dim.factors
        if factor in factors:
            outermost = factors[0] == factor and len(dim.parts) <= 1
            return Rows(place) if outermost else REDUCED
    return REDUCED
