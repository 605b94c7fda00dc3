"""What every op does on the time axis: forced, since nothing may change over time but by cutting what is whole.

The same as `complete_layouts.follow` on a mesh of the time axis alone; equal ops on equal operands are decided once, so
that the 126 equal layers of a model cost one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import fx

from autopar.errors import NeedsWholeBatch
from autopar.passes.calls import call_key
from autopar.passes.complete_layouts import Behind, arriving, cheapest
from autopar.passes.completion import is_op
from autopar.passes.expert_dims import DIM, Held
from autopar.passes.facts import Choice, Strategy, fact, is_tensor, operand_nodes, value
from autopar.passes.insert_changes import is_getitem
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.strategy import choices, strategy


@dataclass(frozen=True, eq=False)
class TimeChoices:
    """``ops``: the choice of each op; ``layouts``: of each tensor, over the time axis alone."""

    ops: dict[fx.Node, Choice]
    layouts: dict[fx.Node, Layout]


def follow_time(gm: fx.GraphModule, batch_inputs: frozenset[str], rows: tuple[int, ...]) -> TimeChoices:
    """Follow the batch of the inputs through the graph. ``rows``: of each microbatch.

    Raises NeedsWholeBatch where an op needs the whole batch at once."""
    return follow_axis(gm, batch_inputs, Axis("time", len(rows), rows))


def follow_axis(gm: fx.GraphModule, batch_inputs: frozenset[str], axis: Axis, held: Held | None = None) -> TimeChoices:
    """The same on any one axis. ``held``: what it cuts by experts, where it does."""
    found, refused = _followed(gm, batch_inputs, axis, held)
    for error in refused.values():
        raise error
    if axis.is_time:
        _refuse_split_buffers(gm.graph.output_node(), found.layouts)
    return found


def undecided(gm: fx.GraphModule, batch_inputs: frozenset[str], axis: Axis) -> list[fx.Node]:
    """The ops that `follow_axis` finds no way for, each the first on its path from the inputs."""
    return list(_followed(gm, batch_inputs, axis)[1])


def _followed(
    gm: fx.GraphModule, batch_inputs: frozenset[str], axis: Axis, held: Held | None = None
) -> tuple[TimeChoices, dict[fx.Node, NeedsWholeBatch]]:
    """What is decided, and the ops for which there is no way; what follows from these has no layout."""
    mesh = Mesh((axis,))
    ops: dict[fx.Node, Choice] = {}
    layouts: dict[fx.Node, Layout] = {}
    refused: dict[fx.Node, NeedsWholeBatch] = {}
    memo: dict[Hashable, tuple[Choice, Strategy] | NeedsWholeBatch] = {}
    behind = Behind(0)
    for node in gm.graph.nodes:
        if is_op(node):
            operands = operand_nodes(node)
            if any(n not in layouts for n in operands):
                continue
            have = tuple(behind.cut(node, [layouts[n] for n in operands]))
            key = (call_key(node), have, None if held is None else held.cuts(node, have, 0))
            if key not in memo:
                memo[key] = _decide(node, have, mesh, held)
            if isinstance(decided := memo[key], NeedsWholeBatch):
                refused[node] = decided
                continue
            ops[node], made = decided
            if not axis.is_time:
                behind.made(node, have, made)
            if is_tensor(node):
                assert made.results[0] is not None
                layouts[node] = made.results[0]
            for user in node.users:
                picked = made.results[user.args[1]] if is_getitem(user) else None
                if picked is not None:
                    layouts[user] = picked
        elif node.op in ("placeholder", "get_attr") and is_tensor(node):
            layouts[node] = Layout.uniform("R", 1, len(value(node).shape))
            if held is not None and held.leaf(node):
                layouts[node] = layouts[node].with_shard(0, DIM)
            if node.name in batch_inputs and node.op == "placeholder":
                layouts[node] = layouts[node].with_shard(0, 0)
    return TimeChoices(ops, layouts), refused


def _refuse_split_buffers(output: fx.Node, layouts: dict[fx.Node, Layout]) -> None:
    """What a buffer becomes must be the same in every microbatch."""
    (result,) = output.args
    assert isinstance(result, dict) and isinstance(result["buffers"], dict)
    for name, node in result["buffers"].items():
        assert isinstance(node, fx.Node)
        if layouts[node].kinds != "R":
            raise NeedsWholeBatch(f"{name}: the value that forward gives this buffer ({fact(node).source})")


def cut_alike(known: TimeChoices, rows: tuple[int, ...]) -> bool:
    """Whether the same choices are legal, with the same layouts, for microbatches of other rows."""
    mesh = Mesh((Axis("time", len(rows), rows),))
    done = {(call_key(node), choice): node for node, choice in known.ops.items()}
    return all(strategy(node, mesh, [choice], (0,)) is not None for (_, choice), node in done.items())


def _decide(
    node: fx.Node, have: tuple[Layout, ...], mesh: Mesh, held: Held | None
) -> tuple[Choice, Strategy] | NeedsWholeBatch:
    try:
        offered = ((c, strategy(node, mesh, [c], (0,))) for c in choices(node, mesh, 0, arriving(node, have, 0)))
        legal = [(c, plan) for c, plan in offered if plan is not None]
        return cheapest(node, have, held.of(node, legal, have, 0) if held else legal, mesh)
    except NeedsWholeBatch as error:
        return error
