"""complete_layouts: afterwards every node has a strategy: a choice on each axis, and with it all its layouts.

For a plan pinned by axes (``dp``, ``tp``) no solver is needed. On the time and dp axes the batch is followed: each op
takes the choice whose operands arrive as they are. On the tp axis `divide_work` decides; the usual column/row pattern
is what comes out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autopar.errors import AutoparError
from autopar.passes.changes import cost
from autopar.passes.completion import Completion, is_op, produced_parts
from autopar.passes.divide_work import Undivided, divide_work
from autopar.passes.facts import KEY, Choice, Strategy, Value, fact, is_tensor, operand_nodes, value
from autopar.passes.layout import Axis, Layout, Mesh, Split
from autopar.passes.moves import STEP
from autopar.passes.strategy import rule


def follow(state: Completion, axis: int) -> None:
    """Decide ``axis`` for all ops in order: each takes the choice whose operands need the cheapest changes."""
    mesh = state.mesh
    for node in state.gm.graph.nodes:
        if not is_op(node):
            continue
        operands = [(value(n), state.layout(n)) for n in operand_nodes(node)]
        best: tuple[float, Choice, Strategy] | None = None
        found = rule(node)
        parts = [
            p for i, (_, have) in enumerate(operands) for p in (produced_parts(found, i, have, axis) if found else ())
        ]
        for choice, plan in state.candidates(node, axis, parts):
            price = sum(cost(have, want, v, mesh) for (v, have), want in zip(operands, plan.operands, strict=True))
            if best is None or price < best[0] - STEP / 10:
                best = (price, choice, plan)
        if best is None or math.isinf(best[0]):
            known = fact(node)
            raise AutoparError(
                f"{known.fqn or node.name}: {node.target} ({known.source}) needs the whole batch at once, so it cannot "
                f"run in microbatches. Set microbatches=1."
            )
        state.take(node, axis, best[1], best[2])


def batch_dims(gm: fx.GraphModule, batch_inputs: frozenset[str], batch: int) -> dict[fx.Node, int]:
    """The dim of every tensor that carries the batch: where the rows of the inputs end up when each has a rank."""
    if batch < 2:
        return {}
    mesh = Mesh((Axis("batch", batch),))
    state = Completion(gm, mesh)
    for node in state.leaves:
        if node.op == "placeholder" and node.name in batch_inputs:
            state.leaves[node] = state.leaves[node].with_shard(0, 0)
    follow(state, 0)
    found = {n: state.layout(n).dim_of(0) for n in gm.graph.nodes if is_tensor(n)}
    return {n: d for n, d in found.items() if d is not None}


def complete_layouts(
    gm: fx.GraphModule,
    mesh: Mesh,
    *,
    parameters: frozenset[str],
    batch_inputs: frozenset[str],
    batch: int,
    zero: int = 0,
) -> tuple[fx.GraphModule, list[Undivided]]:
    """Give every node its strategy for a mesh of axes named ``dp``, ``tp`` and (in time) ``time``.

    ``parameters``: the get_attr targets that are parameters; ``batch_inputs``: the placeholders whose dim 0 is
    the batch; ``zero``: how parameters rest over dp (``docs/design.md`` section 6). Returns the graph and the ops
    that tp leaves whole. Raises AutoparError where the batch cannot be cut into microbatches.
    """
    state = Completion(gm, mesh, parameters)
    for axis, a in enumerate(mesh.axes):
        if a.name != "tp":
            for node in state.leaves:
                if node.op == "placeholder" and node.name in batch_inputs:
                    state.leaves[node] = _outermost(state.leaves[node], axis, mesh)
            follow(state, axis)
    undivided: list[Undivided] = []
    for axis, a in enumerate(mesh.axes):
        if a.name == "tp":
            undivided += divide_work(state, axis, batch_dims(gm, batch_inputs, batch))
    record(state, zero)
    return gm, undivided


def _outermost(layout: Layout, axis: int, mesh: Mesh) -> Layout:
    if not mesh.axes[axis].is_time:
        return layout.with_shard(axis, 0)
    inner = layout.dims[0].axes
    for a in inner:
        layout = layout.with_kind(a, "R")
    for a in (axis, *inner):
        layout = layout.with_shard(a, 0)
    return layout


def complete_prologue(gm: fx.GraphModule, mesh: Mesh, inputs: Mapping[str, Layout]) -> fx.GraphModule:
    """Strategies for what is computed once a step. ``inputs``: how the body reads each placeholder. A rank has its rows
    of all microbatches, one after another. What arrives cut is followed, results leave invariant."""
    state = Completion(gm, mesh)
    for node in state.leaves:
        if node.op == "placeholder":
            state.leaves[node] = _joined(inputs[node.name], mesh)
    for axis in mesh.space:
        follow(state, axis)
    record(state, 0)
    return gm


def _joined(layout: Layout, mesh: Mesh) -> Layout:
    """How a rank holds the rows of all microbatches: its piece of each, so that every microbatch is a part.

    >>> mesh = Mesh((Axis("dp", 2), Axis("time", 2, (4, 2))))
    >>> str(_joined(Layout.parse("S0@1 S0@0", 1), mesh))
    'S0(4+2) R'
    """
    if mesh.time is None:
        return layout
    dim, joined = layout.dim_of(mesh.time), layout.with_kind(mesh.time, "R")
    if dim is None or not joined.dims[dim].axes:
        return joined
    rows = mesh.axes[mesh.time].rows
    split = Split(joined.dims[dim].axes, rows if len(rows) > 1 else ())
    return Layout(joined.kinds, (*joined.dims[:dim], split, *joined.dims[dim + 1 :]))


def record(state: Completion, zero: int) -> None:
    """Write the strategies, and how parameters rest, into the nodes' facts."""
    for node in state.gm.graph.nodes:
        if node in state.plans:
            node.meta[KEY] = replace(fact(node), strategy=state.plans[node])
        elif node in state.leaves and node.op == "get_attr" and node.target in state.parameters:
            rest, entry = rest_and_entry(value(node), state.leaves[node], state.mesh, zero)
            reduce = "microbatch" if zero >= 2 else "step"
            plan = Strategy((), state.order, (), (entry,))
            node.meta[KEY] = replace(fact(node), strategy=plan, rest=rest, reduce=reduce)
        elif is_tensor(node):
            node.meta[KEY] = replace(fact(node), strategy=Strategy((), state.order, (), (state.layout(node),)))


def rest_and_entry(v: Value, used: Layout, mesh: Mesh, zero: int) -> tuple[Layout, Layout]:
    """How a parameter used as ``used`` rests, and as what the program takes it: with ``zero`` 3 as it rests."""
    rest = used
    for axis, a in enumerate(mesh.axes):
        if a.is_time:
            continue
        if a.name == "tp":
            dim = used.dim_of(axis)
            rest = rest.with_kind(axis, "I") if dim is None else _contiguous(rest, axis, dim)
    for axis, a in enumerate(mesh.axes):
        if a.is_time or a.name == "tp":
            continue
        rest = rest.with_kind(axis, "I")
        if zero and a.size > 1:
            rest = _zero_shard(v, rest, axis, mesh)
    return rest, rest_as_entry(rest, used, mesh) if zero == 3 else used


def rest_as_entry(rest: Layout, use: Layout, mesh: Mesh) -> Layout:
    """What the program takes of a parameter that is gathered per use: ``use`` with the cuts of dp that ``rest`` has."""
    entry = use
    for axis, a in enumerate(mesh.axes):
        dim = rest.dim_of(axis)
        if a.name == "dp" and dim is not None:
            entry = entry.with_shard(axis, dim, entry.dims[dim].parts if entry.dims[dim].axes else ())
    return entry


def _contiguous(rest: Layout, axis: int, dim: int) -> Layout:
    return rest.with_kind(axis, "R").with_shard(axis, dim)


def _zero_shard(v: Value, rest: Layout, axis: int, mesh: Mesh) -> Layout:
    """Cut by dp, innermost: the longest dim that stays even, else the longest dim, unevenly; scalars stay whole."""
    if not v.shape:
        return rest
    options = [rest.with_shard(axis, d, rest.dims[d].parts) for d in range(len(v.shape))]
    even = [d for d, option in enumerate(options) if option.is_even(v.shape, mesh)]
    uncut = [d for d in even if not rest.dims[d].axes]
    pool = uncut or even or list(range(len(v.shape)))
    return options[max(pool, key=lambda d: (v.shape[d], -d))]
