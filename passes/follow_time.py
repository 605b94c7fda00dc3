"""What every op does on the time axis: forced, since nothing may change over time but by cutting what is whole.

The same as `complete_layouts.follow` on a mesh of the time axis alone; equal ops on equal operands are decided once, so
that the 126 equal layers of a model cost one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from torch import fx

from autopar.errors import AutoparError
from autopar.passes.calls import call_key
from autopar.passes.changes import cost
from autopar.passes.completion import is_op, produced_parts
from autopar.passes.facts import Choice, Strategy, fact, is_tensor, operand_nodes, value
from autopar.passes.insert_changes import is_getitem
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.strategy import choices, rule, strategy


@dataclass(frozen=True, eq=False)
class TimeChoices:
    """``ops``: the choice of each op; ``layouts``: of each tensor, over the time axis alone."""

    ops: dict[fx.Node, Choice]
    layouts: dict[fx.Node, Layout]


def follow_time(gm: fx.GraphModule, batch_inputs: frozenset[str], rows: tuple[int, ...]) -> TimeChoices:
    """Follow the batch of the inputs through the graph. ``rows``: of each microbatch.

    Raises AutoparError where an op needs the whole batch at once."""
    return follow_axis(gm, batch_inputs, Axis("time", len(rows), rows))


def follow_axis(gm: fx.GraphModule, batch_inputs: frozenset[str], axis: Axis) -> TimeChoices:
    """The same on any one axis."""
    mesh = Mesh((axis,))
    ops: dict[fx.Node, Choice] = {}
    layouts: dict[fx.Node, Layout] = {}
    memo: dict[Hashable, tuple[Choice, Strategy]] = {}
    for node in gm.graph.nodes:
        if is_op(node):
            have = tuple(layouts[n] for n in operand_nodes(node))
            key = (call_key(node), have)
            if key not in memo:
                memo[key] = _decide(node, have, mesh)
            ops[node], made = memo[key]
            if is_tensor(node):
                assert made.results[0] is not None
                layouts[node] = made.results[0]
            for user in node.users:
                picked = made.results[user.args[1]] if is_getitem(user) else None
                if picked is not None:
                    layouts[user] = picked
        elif node.op in ("placeholder", "get_attr") and is_tensor(node):
            layouts[node] = Layout.uniform("R", 1, len(value(node).shape))
            if node.name in batch_inputs and node.op == "placeholder":
                layouts[node] = layouts[node].with_shard(0, 0)
    return TimeChoices(ops, layouts)


def cut_alike(known: TimeChoices, rows: tuple[int, ...]) -> bool:
    """Whether the same choices are legal, with the same layouts, for microbatches of other rows."""
    mesh = Mesh((Axis("time", len(rows), rows),))
    done = {(call_key(node), choice): node for node, choice in known.ops.items()}
    return all(strategy(node, mesh, [choice], (0,)) is not None for (_, choice), node in done.items())


def _decide(node: fx.Node, have: tuple[Layout, ...], mesh: Mesh) -> tuple[Choice, Strategy]:
    found, best = rule(node), None
    operands = [value(n) for n in operand_nodes(node)]
    parts = [p for i, layout in enumerate(have) for p in (produced_parts(found, i, layout, 0) if found else ())]
    for choice in choices(node, mesh, 0, parts):
        plan = strategy(node, mesh, [choice], (0,))
        assert plan is not None
        price = sum(cost(a, b, v, mesh) for a, b, v in zip(have, plan.operands, operands, strict=True))
        if best is None or price < best[0] - 1e-15:
            best = (price, choice, plan)
    if best is None or math.isinf(best[0]):
        known = fact(node)
        raise AutoparError(
            f"{known.fqn or node.name}: {node.target} ({known.source}) needs the whole batch at once, so it cannot "
            f"run in microbatches. Set microbatches=1."
        )
    return best[1], best[2]
