"""Strategies completed from pins: text, every node has one, and how parameters rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.errors import AutoparError
from autopar.passes import PREPARE, run
from autopar.passes.complete_layouts import complete_layouts, complete_prologue, resting
from autopar.passes.completion import is_op
from autopar.passes.facts import Value, annotate, fact, is_tensor
from autopar.passes.insert_changes import produced_layout
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.split_prologue import split_prologue

FOUR = Mesh((Axis("dp", 2), Axis("tp", 2)))


class Tied(nn.Module):
    """Embedding, MLP and a tied head: the column/row pattern and both vocabulary-parallel ends."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(64, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.emb(ids)
        h = h + self.down(torch.relu(self.up(self.norm(h))))
        logits = nn.functional.linear(h, self.emb.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def graph(tools: Any, model: nn.Module, *args: Tensor) -> fx.GraphModule:
    gm = run(tools.export(model, args), PREPARE)
    annotate(gm, lambda fqn: True)
    return gm


def complete(model: nn.Module, gm: fx.GraphModule, mesh: Mesh, batch: int, zero: int = 0) -> fx.GraphModule:
    names = frozenset(n for n, _ in model.named_parameters())
    inputs = frozenset(n.name for n in gm.graph.nodes if n.op == "placeholder" and not n.name.startswith("hoisted"))
    return complete_layouts(gm, mesh, parameters=names, batch_inputs=inputs, batch=batch, zero=zero)[0]


def test_text_spec_numbers(tools: Any) -> None:
    ids = torch.randint(0, 64, (4, 6))
    model = Tied()
    labels = ids.roll(-1, 1)
    gm = graph(tools, model, ids, labels)
    after = tools.golden(lambda g: complete(model, g, FOUR, 4, zero=1), "complete_layouts", gm)
    for node in after.graph.nodes:
        assert not is_tensor(node) or fact(node).strategy is not None, node
        if is_op(node):
            plan = fact(node).strategy
            assert plan is not None and len(plan.choices) == 2
    tools.same_numbers(gm, after, (ids, labels))


def test_a_loss_that_is_not_a_sum_over_rows_needs_one_microbatch(tools: Any) -> None:
    class Spread(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum(0).square().sum()

    model = Spread(4, 4)
    gm, mesh = graph(tools, model, torch.randn(4, 4)), Mesh((Axis("time", 2, (2, 2)),))
    with pytest.raises(AutoparError, match="microbatches=1"):
        complete(model, gm, mesh, 4)


@pytest.mark.parametrize(
    ("shape", "used", "zero", "rest"),
    [
        ((8, 6), "R S0", 0, "I S0"),
        ((8, 6), "R S0", 1, "S1 S0"),
        ((8,), "R S0", 3, "S0@1 S0@0"),
        ((8,), "R I", 3, "S0 I"),
        ((5, 3), "R I", 3, "S0 I"),
        ((), "R I", 3, "I I"),
        ((12, 7), "R S0(8+4)", 0, "I S0"),
        ((12, 7), "R S0(8+4)", 3, "S0@1 S0@0"),
    ],
)
def test_how_parameters_rest(shape: tuple[int, ...], used: str, zero: int, rest: str) -> None:
    v, use = Value(shape, torch.float32, True), Layout.parse(used, len(shape))
    assert str(resting(v, use, FOUR, [0] if zero else ())) == rest


def test_a_prologue_has_every_microbatch_as_a_part(tools: Any) -> None:
    class Neighbours(nn.Linear):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return super().forward(x).square().sum() / weight.cumsum(0).max()

    model, mesh = Neighbours(4, 4), Mesh((Axis("dp", 2), Axis("time", 2, (4, 2))))
    gm = run(graph(tools, model, torch.randn(6, 4), torch.rand(6)), ("hoist_normalisers",))
    prologue, body, _ = split_prologue(gm)
    assert prologue is not None
    body = complete(model, body, mesh, 6)
    (rows,) = (n for n in complete_prologue(prologue, mesh, body).graph.nodes if n.op == "placeholder")
    assert str(produced_layout(rows)) == "S0(4+2) R"


def test_a_prologue_takes_frozen_parameters_as_the_body_does(tools: Any) -> None:
    class Weighted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().sum() / (x * self.frozen).square().sum()

    model, mesh = Weighted(4, 4), Mesh((Axis("dp", 2), Axis("time", 2, (4, 2))))
    model.register_parameter("frozen", nn.Parameter(torch.randn(4), requires_grad=False))
    gm = graph(tools, model, torch.randn(6, 4))
    annotate(gm, lambda name: name != "frozen")
    prologue, body, _ = split_prologue(run(gm, ("hoist_normalisers",)))
    assert prologue is not None
    body = complete(model, body, mesh, 6, zero=3)
    (frozen,) = (n for n in complete_prologue(prologue, mesh, body).graph.nodes if n.op == "get_attr")
    assert str(produced_layout(frozen)) == "R R"
