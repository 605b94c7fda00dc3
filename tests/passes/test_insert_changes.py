"""Changes are nodes, shared as a tree, and identities on the global value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.passes import PREPARE, run
from autopar.passes.changes import settle
from autopar.passes.complete_layouts import complete_layouts
from autopar.passes.facts import Choice, Strategy, annotate, fact, is_tensor, operand_nodes, value
from autopar.passes.insert_changes import change, grow, insert_changes, output_layouts, produced_layout
from autopar.passes.layout import Axis, Layout, Mesh

TP = Mesh((Axis("tp", 2),))


class Block(nn.Module):
    """A residual MLP: the smallest model with a column and a row parallel linear."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(torch.tanh(self.up(self.norm(x))))).square().sum()


def completed(tools: Any, model: nn.Module, *args: Tensor, mesh: Mesh = TP, zero: int = 0) -> fx.GraphModule:
    gm = run(tools.export(model, args), PREPARE)
    annotate(gm, lambda fqn: True)
    names = frozenset(n for n, _ in model.named_parameters())
    gm, _ = complete_layouts(
        gm, mesh, parameters=names, batch_inputs=frozenset({"x"}), batch=args[0].shape[0], zero=zero
    )
    return gm


def assert_every_operand_arrives_as_wanted(gm: fx.GraphModule, mesh: Mesh) -> None:
    for node in gm.graph.nodes:
        plan = fact(node).strategy if node.op == "call_function" else None
        wanted = list(zip(operand_nodes(node), plan.operands, strict=True)) if plan and plan.operands else []
        if node.op == "output":
            wanted = output_layouts(node, mesh)
        for operand, want in wanted:
            v = value(operand)
            assert settle(produced_layout(operand), v, mesh) == settle(want, v, mesh), (node, operand)


def test_text_spec_numbers(tools: Any) -> None:
    x = torch.randn(4, 8)
    gm = completed(tools, Block(), x)
    after = tools.golden(lambda g: insert_changes(g, TP), "insert_changes", gm)
    assert_every_operand_arrives_as_wanted(after, TP)
    tools.same_numbers(gm, after, (x,))


def test_every_operand_arrives_as_wanted_with_zero_and_microbatches(tools: Any) -> None:
    mesh = Mesh((Axis("dp", 2), Axis("tp", 2), Axis("time", 2, (2, 2))))
    gm = insert_changes(completed(tools, Block(), torch.randn(4, 8), mesh=mesh, zero=3), mesh)
    assert_every_operand_arrives_as_wanted(gm, mesh)
    assert sum(n.target is change for n in gm.graph.nodes) > 2  # weights come as they are used


def _leaf(layout: str, shape: tuple[int, ...] = (8, 8)) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta["val"] = torch.empty(shape, device="meta")
    node.graph.output({"outputs": (), "buffers": {}})
    annotate(fx.GraphModule({}, node.graph), lambda fqn: True)
    known = fact(node)
    grad = type(known.values[0])(shape, torch.float32, True)  # type: ignore[misc]
    strategy = Strategy((Choice("R"),), (0,), (), (Layout.parse(layout, len(shape)),))
    node.meta["autopar"] = type(known)((grad,), strategy=strategy)
    return node


def test_a_partial_sum_wanted_cut_and_whole_is_scattered_then_gathered() -> None:
    tree = grow(_leaf("P"), [(1, Layout.parse("R", 2)), (2, Layout.parse("S0", 2))], TP)
    assert {s.row for s in tree.steps.values()} == {"P>S", "S>R"}


def test_consumers_that_want_the_same_share_one_change() -> None:
    tree = grow(_leaf("I"), [(i, Layout.parse("R", 2)) for i in range(3)], TP)
    assert len(tree.steps) == 1 and tree.first == {Layout.parse("R", 2): 0}


def test_replicated_and_invariant_consumers_have_changes_of_their_own() -> None:
    tree = grow(_leaf("S0"), [(1, Layout.parse("R", 2)), (2, Layout.parse("I", 2))], TP)
    assert len(tree.steps) == 2


def test_a_change_stands_before_its_first_consumer(tools: Any) -> None:
    gm = insert_changes(completed(tools, Block(), torch.randn(4, 8), mesh=TP), TP)
    place = {n: i for i, n in enumerate(gm.graph.nodes)}
    changes = [n for n in gm.graph.nodes if n.target is change]
    assert changes
    for node in changes:
        first = min(place[u] for u in node.users)
        between = list(gm.graph.nodes)[place[node] + 1 : first]
        assert all(n.target is change or not is_tensor(n) for n in between), f"{node} waits for {between}"
