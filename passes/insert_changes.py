"""insert_changes: afterwards every operand arrives in the layout that its consumer's strategy asks for.

The changes of one tensor form a tree: every layout that consumers want is reached once, from wherever in the tree it is
cheapest (a partial sum wanted both sharded and replicated is reduce-scattered, then gathered). A change is a
node of its own, an identity on the global value, so the graph still runs as one process.

before:  %linear = linear(%x, %w)          # P
         %add    = add(%residual, %linear)  # I, I -> I
after:   %linear = linear(%x, %w)
         %change = change(%linear, "P", "I")
         %add    = add(%residual, %change)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils._pytree import tree_map

from autopar.errors import NeedsWholeBatch
from autopar.passes.changes import Step, cost, path, settle
from autopar.passes.facts import KEY, Fact, Strategy, fact, is_tensor, operand_nodes, value
from autopar.passes.layout import WHOLE, Layout, Mesh


def change(x: torch.Tensor, source: str, target: str) -> torch.Tensor:
    """The same global value held in another layout: one row of the table of changes, not yet lowered."""
    return x.view_as(x)


@dataclass
class Tree:
    """Layouts in which one tensor is wanted: how each is reached and where it is first needed."""

    root: Layout
    steps: dict[Layout, Step] = field(default_factory=dict)
    first: dict[Layout, int] = field(default_factory=dict)


def insert_changes(gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
    """Make every change of layout a node. Needs strategies on all nodes (complete_layouts).

    Raises NeedsWholeBatch where a change would have to cross microbatches.
    """
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    order = list(gm.graph.nodes)
    for producer in order:
        if not is_tensor(producer):
            continue
        uses = [
            (place[user], user, slot, wanted)
            for user in producer.users
            for slot, wanted in wanted_layouts(user, producer, mesh)
        ]
        tree = grow(producer, [(at, wanted) for at, _, _, wanted in uses], mesh)
        made: dict[Layout, fx.Node] = {tree.root: producer}
        for layout, at in sorted(tree.first.items(), key=lambda item: item[1]):
            _make(gm, producer, layout, order[at], tree, made)
        v = value(producer)
        for _, user, slot, wanted in uses:
            target = settle(wanted, v, mesh)
            if made[target] is not producer:
                _replace(user, slot, made[target])
    gm.graph.lint()
    gm.recompile()
    return gm


def produced_layout(producer: fx.Node) -> Layout:
    """The layout in which a node leaves its tensor."""
    strategy = fact(producer).strategy
    assert strategy is not None, f"{producer} has no strategy"
    (layout,) = strategy.results
    assert layout is not None
    return layout


def wanted_layouts(user: fx.Node, producer: fx.Node, mesh: Mesh) -> list[tuple[int, Layout]]:
    """(operand slot, layout) of every use that ``user`` makes of ``producer``."""
    if user.op == "output":
        return [(i, w) for i, (n, w) in enumerate(output_layouts(user, mesh)) if n is producer]
    if not fact(user).values or is_getitem(user):
        return []
    strategy = fact(user).strategy
    assert strategy is not None, f"{user} has no strategy"
    return [(i, strategy.operands[i]) for i, n in enumerate(operand_nodes(user)) if n is producer]


def output_layouts(output: fx.Node, mesh: Mesh) -> list[tuple[fx.Node, Layout]]:
    """What the program returns, in the order of `operand_nodes`: the loss invariant over ranks and summed over time,
    buffers invariant, all other outputs as they come; those of the prologue invariant."""
    (result,) = output.args
    assert isinstance(result, dict)
    wanted: list[tuple[fx.Node, Layout]] = []
    outputs = result["outputs"]
    assert isinstance(outputs, (tuple, list))
    loss = outputs[0] if outputs else None
    for node in outputs:
        assert isinstance(node, fx.Node)
        is_loss = node is loss
        layout = produced_layout(node)
        if output.meta.get("prologue"):
            layout = _whole(mesh, len(value(node).shape))
        elif is_loss and value(node).shape == ():
            kinds = "".join("P" if a.is_time else "I" for a in mesh.axes)
            layout = Layout(kinds, ())
        wanted.append((node, layout))
    buffers = result["buffers"]
    assert isinstance(buffers, dict)
    for node in buffers.values():
        assert isinstance(node, fx.Node)
        wanted.append((node, _whole(mesh, len(value(node).shape))))
    return wanted


def _whole(mesh: Mesh, ndim: int) -> Layout:
    """Invariant over ranks, the same in every microbatch."""
    kinds = "".join("R" if a.is_time else "I" for a in mesh.axes)
    return Layout(kinds, (WHOLE,) * ndim)


def is_getitem(node: fx.Node) -> bool:
    """Whether the node picks one output of a multi-output op."""
    return (
        node.op == "call_function" and not is_tensor(node.args[0]) and getattr(node.target, "__name__", "") == "getitem"
    )


def grow(producer: fx.Node, uses: Sequence[tuple[int, Layout]], mesh: Mesh) -> Tree:
    """The tree of changes of one tensor: the cheapest unreached layout is attached first, from where it is nearest."""
    v = value(producer)
    tree = Tree(settle(produced_layout(producer), v, mesh))
    open_targets: dict[Layout, int] = {}
    for at, wanted in uses:
        target = settle(wanted, v, mesh)
        open_targets[target] = min(at, open_targets.get(target, at))
    reached = [tree.root]
    needed = dict(open_targets)
    open_targets.pop(tree.root, None)
    while open_targets:
        best = min(
            ((cost(r, t, v, mesh), i, j, r, t) for i, r in enumerate(reached) for j, t in enumerate(open_targets)),
            key=lambda item: item[:3],
        )
        price_, _, _, source, target = best
        if math.isinf(price_):
            known = fact(producer)
            where = known.fqn or known.source or producer.name
            raise NeedsWholeBatch(f"{where}: {known.source or producer.name} ({source} as {target})")
        steps = path(source, target, v, mesh)
        assert steps is not None
        for step in steps:
            if step.target not in tree.steps and step.target != tree.root:
                tree.steps[step.target] = step
                reached.append(step.target)
        open_targets.pop(target)
    for target, at in needed.items():
        here = target
        while here != tree.root:
            tree.first[here] = min(at, tree.first.get(here, at))
            here = tree.steps[here].source
    return tree


def _make(
    gm: fx.GraphModule, producer: fx.Node, layout: Layout, before: fx.Node, tree: Tree, made: dict[Layout, fx.Node]
) -> fx.Node:
    if layout in made:
        return made[layout]
    step = tree.steps[layout]
    source = _make(gm, producer, step.source, before, tree, made)
    with gm.graph.inserting_before(before):
        node = gm.graph.call_function(change, (source, str(step.source), str(step.target)))
    node.meta["val"] = producer.meta["val"]
    node.meta["change"] = step
    known = fact(producer)
    strategy = Strategy((), (), (step.source,), (step.target,))
    unit = known.unit if before.op == "output" else fact(before).unit
    node.meta[KEY] = Fact((value(producer),), known.fqn, known.source, strategy, known.prologue, unit=unit)
    for key in ("nn_module_stack", "stack_trace"):
        if key in producer.meta:
            node.meta[key] = producer.meta[key]
    made[layout] = node
    return node


def _replace(user: fx.Node, slot: int, new: fx.Node) -> None:
    """Put ``new`` in the given tensor operand slot (order of `operand_nodes`)."""
    seen = -1

    def swap(a: object) -> object:
        nonlocal seen
        if is_tensor(a):
            seen += 1
            if seen == slot:
                return new
        return a

    args, kwargs = tree_map(swap, (user.args, user.kwargs))
    user.args, user.kwargs = args, kwargs
