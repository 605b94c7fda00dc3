"""complete_layouts: afterwards every node has a strategy: a choice on each axis, and with it all its layouts.

For a plan pinned by axes no solver is needed. On the time axis and on data axes the batch is followed: each op takes
the choice whose operands arrive as they are. On the axes to divide (pinned ``tp``) `divide_work` decides; the usual
column/row pattern is what comes out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import fx

from autopar.errors import NeedsWholeBatch
from autopar.passes.changes import cost
from autopar.passes.completion import Completion, is_op, produced_parts, result_slots
from autopar.passes.divide_work import Keep, Undivided, divide_work, flops
from autopar.passes.expert_dims import DIM, EXPERTS, Held
from autopar.passes.facts import KEY, Choice, Strategy, Value, fact, is_tensor, operand_nodes, value
from autopar.passes.insert_changes import produced_layout
from autopar.passes.layout import Axis, Layout, Mesh, Split
from autopar.passes.moves import STEP
from autopar.passes.strategy import Proposal, fills, rule


def follow(state: Completion, axis: int, held: Held | None = None) -> None:
    """Decide ``axis`` for all ops in order: each takes the choice whose operands need the cheapest changes. ``held``:
    what it cuts by experts."""
    mesh, behind = state.mesh, Behind(axis)
    for node in state.gm.graph.nodes:
        if not is_op(node):
            continue
        have = behind.cut(node, [state.layout(n) for n in operand_nodes(node)])
        offered = state.candidates(node, axis, arriving(node, have, axis))
        choice, plan = cheapest(node, have, held.of(node, offered, have, axis) if held else offered, mesh)
        state.take(node, axis, choice, plan)
        if not mesh.axes[axis].is_time:
            behind.made(node, have, plan)


class Behind:
    """Where the batch lies in what was made of it whole on every rank of an axis, or in addends: operands of products,
    and addends, are cut there again, so that an op that needs the whole batch leaves no more than itself undivided.
    It goes by lengths; a cut elsewhere would be as right."""

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.rows: dict[fx.Node, int] = {}

    def cut(self, op: fx.Node, have: Sequence[Layout]) -> Sequence[Layout]:
        """The layouts of an op's operands, as it should take them to be."""
        cut = "RP" if self.rows and flops(op) else "P"
        pairs = zip(operand_nodes(op), have, strict=True)
        found = [(self.rows.get(n) if x.kinds[self.axis] in cut else None, x) for n, x in pairs]
        return [x if dim is None else x.with_shard(self.axis, dim) for dim, x in found]

    def made(self, op: fx.Node, have: Sequence[Layout], plan: Strategy) -> None:
        """Note what an op does that was just decided; its operands come as it has them."""
        layouts = (*plan.operands, *(x for x in plan.results if x is not None))
        if any(x.kinds[self.axis] == "S" for x in layouts):
            return
        for operand, layout in zip(operand_nodes(op), have, strict=True):
            dim = layout.dim_of(self.axis)
            dim = self.rows.get(operand) if dim is None else dim
            if dim is None:
                continue
            for node in filter(None, result_slots(op)):
                if value(node).shape[dim : dim + 1] == value(operand).shape[dim : dim + 1]:
                    self.rows.setdefault(node, dim)


def arriving(node: fx.Node, have: Sequence[Layout], axis: int) -> list[Proposal]:
    """Proposals of parts: operands that arrive cut in parts by ``axis`` may be read so."""
    found = rule(node)
    return [p for i, x in enumerate(have) for p in (produced_parts(found, i, x, axis) if found else ())]


def cheapest(
    node: fx.Node, have: Sequence[Layout], offered: Iterable[tuple[Choice, Strategy]], mesh: Mesh
) -> tuple[Choice, Strategy]:
    """Of the choices offered, the first whose operands need the cheapest changes from what they ``have``."""
    best: tuple[float, Choice, Strategy] | None = None
    values = [value(n) for n in operand_nodes(node)]
    for choice, plan in offered:
        price = sum(cost(a, b, v, mesh) for a, b, v in zip(have, plan.operands, values, strict=True))
        if best is None or price < best[0] - STEP / 10:
            best = (price, choice, plan)
    if best is None or math.isinf(best[0]):
        known = fact(node)
        raise NeedsWholeBatch(f"{known.fqn or node.name}: {node.target} ({known.source})")
    return best[1], best[2]


Cut = tuple[int, tuple[int, ...]]  # a dim, and the parts in which it is cut one by one


def batch_dims(gm: fx.GraphModule, batch_inputs: frozenset[str], batch: int) -> dict[fx.Node, int]:
    """The dim of every tensor that carries the batch: where the rows of the inputs end up when each has a rank."""
    return {node: dim for node, (dim, _) in batch_cuts(gm, batch_inputs, batch).items()}


def batch_cuts(gm: fx.GraphModule, batch_inputs: frozenset[str], batch: int) -> dict[fx.Node, Cut]:
    """How every tensor that carries the batch would be cut by it (in parts, where the batch is inside of a dim)."""
    if batch < 2:
        return {}
    mesh = Mesh((Axis("batch", batch),))
    state = Completion(gm, mesh)
    for node in state.leaves:
        if node.op == "placeholder" and node.name in batch_inputs:
            state.leaves[node] = state.leaves[node].with_shard(0, 0)
    follow(state, 0)
    found = {}
    for node in filter(is_tensor, gm.graph.nodes):
        layout = state.layout(node)
        dim = layout.dim_of(0)
        if dim is not None:
            found[node] = (dim, layout.dims[dim].parts)
    return found


def complete_layouts(
    gm: fx.GraphModule,
    mesh: Mesh,
    *,
    parameters: frozenset[str],
    batch_inputs: frozenset[str],
    batch: int,
    zero: int = 0,
    divided: Collection[str] = ("tp",),
    keep: Mapping[str, Keep] | None = None,
    experts: Mapping[str, int] = MappingProxyType({}),
) -> tuple[fx.GraphModule, list[tuple[str, Undivided]]]:
    """Give every node its strategy. On axes called ``divided`` work is divided; so it is on others of ``keep``, but
    along the sequence and with parameters whole; on all others the batch is followed, where it has rows for every rank.
    ``keep``: leaves choices out; ``experts``: the parameters that the axis `EXPERTS` cuts.

    ``parameters``: the get_attr targets that are parameters; ``batch_inputs``: the placeholders whose dim 0 is
    the batch; ``zero``: how parameters rest over the followed axes (``docs/design.md`` section 6). Returns the graph,
    and each axis with an op that it leaves whole. Raises NeedsWholeBatch where microbatches cannot be cut.
    """
    state = Completion(gm, mesh, parameters)
    keep = keep or {}
    followed = [i for i, a in enumerate(mesh.axes) if a.name not in (*divided, *keep)]
    for axis in followed:
        by_experts = mesh.axes[axis].name == EXPERTS
        held = Held(experts, batch_dims(gm, batch_inputs, batch)) if by_experts else None
        for node in state.leaves:
            if held and held.leaf(node):
                state.leaves[node] = state.leaves[node].with_shard(axis, DIM)
            if node.op == "placeholder" and node.name in batch_inputs:
                cut = _outermost(state.leaves[node], axis, mesh)
                if fills(batch, cut.dims[0], mesh):
                    state.leaves[node] = cut
        follow(state, axis, held)
    undivided: list[tuple[str, Undivided]] = []
    for axis, a in enumerate(mesh.axes):
        if axis not in followed:
            apart = batch_dims(gm, batch_inputs, batch) if a.name in divided else {}
            found = divide_work(state, axis, apart, keep.get(a.name))
            undivided += [(a.name, u) for u in found]
    record(state, zero, [i for i, a in enumerate(mesh.axes) if not a.is_time and a.name not in divided])
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


def complete_prologue(gm: fx.GraphModule, mesh: Mesh, body: fx.GraphModule) -> fx.GraphModule:
    """Strategies for what is computed once a step. ``body``: completed; it says how inputs and frozen parameters come.
    A rank has its rows of all microbatches, one after another. What arrives cut is followed, results leave invariant.
    """
    leaves = [n for n in body.graph.nodes if n.op in ("placeholder", "get_attr")]
    taken = {(n.op, n.target): produced_layout(n) for n in leaves}
    state = Completion(gm, mesh)
    for node in state.leaves:
        state.leaves[node] = _joined(taken[node.op, node.target], mesh)
    for axis in mesh.space:
        follow(state, axis)
    record(state, 0, ())
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


def record(state: Completion, zero: int, over: Collection[int]) -> None:
    """Write the strategies, and how parameters rest: with ``zero`` in pieces over the axes ``over`` too."""
    for node in state.gm.graph.nodes:
        if node in state.plans:
            node.meta[KEY] = replace(fact(node), strategy=state.plans[node])
        elif node in state.leaves and node.op == "get_attr" and node.target in state.parameters:
            treat_by_stage(node, state.leaves[node], zero, over, state.mesh)
        elif is_tensor(node):
            node.meta[KEY] = replace(fact(node), strategy=Strategy((), state.order, (), (state.layout(node),)))


def treat_by_stage(node: fx.Node, use: Layout, zero: int, over: Collection[int], mesh: Mesh) -> None:
    """`treat` a parameter as a ZeRO stage over axes ``over`` does."""
    rest = resting(value(node), use, mesh, over if zero else ())
    pieces = any(a == "S" != b for a, b in zip(rest.kinds, use.kinds, strict=True))
    gather = "use" if zero == 3 and pieces else "step" if needs_change(rest, use) else "never"
    treat(node, rest, use, gather, "microbatch" if zero >= 2 else "step", mesh)


def treat(node: fx.Node, rest: Layout, use: Layout, gather: str, reduce: str, mesh: Mesh) -> None:
    """Write down how a parameter (its get_attr) is treated; the strategy is then how ops read it."""
    plan = Strategy((), tuple(range(len(mesh.axes))), (), (use,))
    node.meta[KEY] = replace(fact(node), strategy=plan, rest=rest, gather=gather, reduce=reduce)


def needs_change(rest: Layout, use: Layout) -> bool:
    """Whether a parameter's value has to move (R and I hold the same) between how it rests and how it is used."""
    return str(rest).replace("R", "I") != str(use).replace("R", "I")


def resting(v: Value, use: Layout, mesh: Mesh, over: Collection[int]) -> Layout:
    """How a parameter used as ``use`` rests: cut where its use is cut (but never in parts), and one axis after another
    of ``over`` as well; whole elsewhere.

    >>> import torch
    >>> mesh = Mesh((Axis("dp", 2), Axis("tp", 2)))
    >>> str(resting(Value((12, 7), torch.float32), Layout.parse("R S0(8+4)", 2), mesh, over=[0]))
    'S0@1 S0@0'
    """
    kinds = "".join("S" if k == "S" else "R" if mesh.axes[a].is_time else "I" for a, k in enumerate(use.kinds))
    rest = Layout(kinds, tuple(Split(s.axes) for s in use.dims))
    for axis in over:
        if use.kinds[axis] != "S" and mesh.axes[axis].size > 1:
            rest = _zero_shard(v, rest, axis, mesh)
    return rest


def _zero_shard(v: Value, rest: Layout, axis: int, mesh: Mesh) -> Layout:
    """Cut by one more axis, innermost: the longest dim that stays even, else the longest dim, unevenly; scalars stay
    whole."""
    if not v.shape:
        return rest
    options = [rest.with_shard(axis, d, rest.dims[d].parts) for d in range(len(v.shape))]
    even = [d for d, option in enumerate(options) if option.is_even(v.shape, mesh)]
    uncut = [d for d in even if not rest.dims[d].axes]
    pool = uncut or even or list(range(len(v.shape)))
    return options[max(pool, key=lambda d: (v.shape[d], -d))]
