"""A rank's program: text, local shapes, and all ranks together compute what one process does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.passes import PREPARE, run
from autopar.passes.complete_layouts import complete_layouts
from autopar.passes.facts import annotate, fact
from autopar.passes.insert_changes import change
from autopar.passes.layout import Axis, Mesh
from autopar.passes.lower import Local, Lowerable, lower, with_changes
from autopar.passes.make_local import make_local
from autopar.passes.rules.core import LOCALIZE
from autopar.passes.strategy import choices, strategy
from autopar.runtime.stacked_step import stacked_step


class Heads(nn.Module):
    """A fused projection whose parts are cut one by one, a reshape to heads with literal sizes, a row-parallel end."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(8, -1)
        q, k, v = (t.view(x.shape[0], 3, 4, 2).transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape[0], 3, 8)
        return self.out(y).square().sum()


def lowerable(tools: Any, model: nn.Module, x: Tensor, mesh: Mesh, zero: int = 0) -> Lowerable:
    gm = run(tools.export(model, (x,)), PREPARE)
    annotate(gm, lambda fqn: True)
    names = [n for n, _ in model.named_parameters()]
    gm, _ = complete_layouts(
        gm, mesh, parameters=frozenset(names), batch_inputs=frozenset({"x"}), batch=len(x), zero=zero
    )
    return with_changes(Lowerable(gm, mesh, tuple(names), (), (), ("x",)))


def programs(model: Lowerable) -> list[Local]:
    return [lower(model, r, {a.name: a.name for a in model.mesh.axes}) for r in range(model.mesh.ranks)]


def test_text_and_spec(tools: Any) -> None:
    torch.manual_seed(0)
    mesh = Mesh((Axis("tp", 2),))
    model = lowerable(tools, Heads(), torch.randn(2, 3, 8), mesh)
    signature = [("get_attr", p) for p in model.parameters] + [("placeholder", "x"), ("microbatch", "microbatch")]
    groups = {"tp": "tp"}
    local = tools.golden(lambda g: make_local(g, mesh, (1,), groups, signature), "make_local", model.body)
    starts = [n for n in local.graph.nodes if ".start_" in str(n.target)]
    assert len(starts) == 1, "one all-reduce, after the row-parallel linear; none between the projection and attention"
    for node in local.graph.nodes:
        assert node.op in ("placeholder", "call_function", "output") and node.target is not change
    for start in starts:
        (wait,) = start.users
        assert ".wait_" in str(wait.target)


@pytest.mark.parametrize(
    "axes",
    [
        (Axis("tp", 2),),
        (Axis("tp", 4),),
        (Axis("dp", 2), Axis("tp", 2)),
        (Axis("dp", 2), Axis("tp", 4), Axis("time", 3, (4, 2, 2))),
        (Axis("dp", 4), Axis("tp", 4), Axis("time", 2, (4, 4))),
    ],
)
@pytest.mark.parametrize("zero", [0, 3])
def test_numbers(tools: Any, axes: tuple[Axis, ...], zero: int) -> None:
    torch.manual_seed(0)
    model, x = Heads().double(), torch.randn(8, 3, 8, dtype=torch.float64)
    got = stacked_step(programs(lowerable(tools, model, x, Mesh(axes), zero)), dict(model.named_parameters()), [x])
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(got.loss, loss.detach(), rtol=1e-13, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got.gradients[name], parameter.grad, rtol=1e-12, atol=1e-13)


def test_a_bias_has_one_gradient_where_pieces_are_unequal(tools: Any) -> None:
    """Of 3 columns one rank has 2, the other 1; kernels then differ, the bias is the same on both (bit for bit, as
    `stacked_step` asks)."""

    class Columns(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.reshape(8, 3, 4).transpose(1, 2)).sin().sum()

    torch.manual_seed(0)
    model, x = Columns(3, 12).double(), torch.randn(8, 12, dtype=torch.float64)
    gm = run(tools.export(model, (x,)), PREPARE)
    annotate(gm, lambda fqn: True)
    mesh, names = Mesh((Axis("tp", 2),)), ("weight", "bias")
    gm, _ = complete_layouts(gm, mesh, parameters=frozenset(names), batch_inputs=frozenset("x"), batch=8, zero=0)
    strategies = {}
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.linear.default:
            plan = strategy(node, mesh, [next(c for c in choices(node, mesh, 0) if c.name == "i")], (0,))
            strategies[node] = node.meta["autopar"] = replace(fact(node), strategy=plan)
    assert strategies
    found = programs(with_changes(Lowerable(gm, mesh, names, (), (), ("x",))))
    products = [n for n in found[0].body[0].graph.nodes if n.target is torch.ops.aten.linear.default]
    assert [n.args[2] for n in products] == [None]
    got = stacked_step(found, dict(model.named_parameters()), [x])
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(got.gradients["bias"], model.bias.grad, rtol=1e-12, atol=1e-13)


def test_a_rule_that_promises_another_shape_is_found_out(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lowerable(tools, Heads(), torch.randn(2, 3, 8), Mesh((Axis("tp", 2),)))
    monkeypatch.delitem(LOCALIZE, torch.ops.aten.reshape.default)
    with pytest.raises((AssertionError, RuntimeError)):
        programs(model)
