"""Completion: the choices made so far for the nodes of one graph, axis by axis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from autopar.passes.facts import Choice, Strategy, fact, is_tensor, value
from autopar.passes.insert_changes import is_getitem
from autopar.passes.layout import Layout, Mesh
from autopar.passes.rules.core import Rule
from autopar.passes.strategy import Proposal, choices, strategy


@dataclass
class Completion:
    """The choices made so far. ``leaves``: layouts of placeholders and get_attrs; ``plans``: strategies of ops."""

    gm: fx.GraphModule
    mesh: Mesh
    parameters: frozenset[str] = frozenset()
    leaves: dict[fx.Node, Layout] = field(default_factory=dict)
    chosen: dict[fx.Node, list[Choice]] = field(default_factory=dict)
    plans: dict[fx.Node, Strategy] = field(default_factory=dict)
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        axes = self.mesh.axes
        self.order = tuple(sorted(range(len(axes)), key=lambda a: not axes[a].is_time))
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.leaves[node] = Layout.uniform("R", len(axes), len(value(node).shape))
            elif is_op(node):
                self.chosen[node] = [Choice("R")] * len(axes)
                plan = strategy(node, self.mesh, self.chosen[node], self.order)
                assert plan is not None
                self.plans[node] = plan

    def layout(self, node: fx.Node) -> Layout:
        """The layout in which ``node`` leaves its tensor."""
        if node in self.leaves:
            return self.leaves[node]
        if is_getitem(node):
            producer, index = node.args[0], node.args[1]
            assert isinstance(producer, fx.Node) and isinstance(index, int)
            layout = self.plans[producer].results[index]
        else:
            (layout,) = self.plans[node].results
        assert layout is not None
        return layout

    def take(self, node: fx.Node, axis: int, choice: Choice, plan: Strategy) -> None:
        """Decide what ``node`` does on ``axis``."""
        self.chosen[node][axis] = choice
        self.plans[node] = plan

    def candidates(self, node: fx.Node, axis: int, proposals: Iterable[Proposal] = ()) -> list[tuple[Choice, Strategy]]:
        """Choices of ``node`` on ``axis`` that are legal with what it does on the other axes."""
        found = []
        for choice in choices(node, self.mesh, axis, proposals):
            chosen = [*self.chosen[node][:axis], choice, *self.chosen[node][axis + 1 :]]
            plan = strategy(node, self.mesh, chosen, self.order)
            if plan is not None:
                found.append((choice, plan))
        return found


def is_op(node: fx.Node) -> bool:
    """Whether the node computes tensors by a strategy of its own."""
    return node.op == "call_function" and not is_getitem(node) and any(v is not None for v in fact(node).values)


def result_slots(node: fx.Node) -> list[fx.Node | None]:
    """The nodes that stand for the op's results: itself, or the getitems of a multi-output op (None: not picked)."""
    if is_tensor(node):
        return [node]
    picked = {user.args[1]: user for user in node.users if is_getitem(user)}
    return [picked.get(i) for i in range(len(fact(node).values))]


def produced_parts(found: Rule, slot: int, layout: Layout, axis: int) -> list[Proposal]:
    """The parts, and items, in which an operand arrives cut by ``axis``, as a proposal for the factor that it is cut
    along."""
    dim = layout.dim_of(axis)
    if dim is None or len(found.operands[slot][dim].factors) != 1:
        return []
    split, named = layout.dims[dim], found.operands[slot][dim]
    parts = () if split.parts == named.parts else split.parts  # a rule's own parts are cut anyway
    return [(named.factors[0], parts, split.items)] if parts or split.items else []
