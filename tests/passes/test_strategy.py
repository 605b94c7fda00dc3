"""Strategies follow from rules: which choices are legal, and which layouts they imply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar.passes import PREPARE, run
from autopar.passes.facts import Choice, annotate
from autopar.passes.layout import Axis, Mesh
from autopar.passes.strategy import choices, strategy

TP = Mesh((Axis("tp", 2),))
TWO = Mesh((Axis("dp", 2), Axis("tp", 2)))
aten = torch.ops.aten


def prepared(tools: Any, model: nn.Module, *args: Any) -> fx.GraphModule:
    gm = run(tools.export(model, args), PREPARE)
    annotate(gm, lambda fqn: True)
    return gm


def find(gm: fx.GraphModule, target: Any) -> fx.Node:
    return next(n for n in gm.graph.nodes if n.target is target)


def texts(node: fx.Node, mesh: Mesh, *chosen: Choice, order: tuple[int, ...] | None = None) -> list[str] | None:
    found = strategy(node, mesh, chosen, order or range(len(mesh.axes)))
    return None if found is None else [*map(str, found.operands), *map(str, found.results)]


class Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


def test_row_and_column_of_a_linear(tools: Any) -> None:
    linear = find(prepared(tools, Linear(4, 6), torch.randn(2, 3, 4)), aten.linear.default)
    assert texts(linear, TP, Choice("factor", "o")) == ["R", "S0", "S0", "S2"]
    assert texts(linear, TP, Choice("factor", "i")) == ["S2", "S1", "P", "P"]
    assert texts(linear, TP, Choice("linear", "0")) == ["P", "R", "P", "P"]
    assert texts(linear, TP, Choice("factor", "b1")) == ["S1", "R", "R", "S1"]  # 3 rows over 2 ranks: 2 and 1
    assert texts(linear, Mesh((Axis("tp", 4),)), Choice("factor", "b1")) is None  # one rank would get none
    names = {(c.kind, c.name) for c in choices(linear, TP, 0)}
    assert names == {
        ("I", ""),
        ("R", ""),
        ("factor", "b0"),
        ("factor", "b1"),
        ("factor", "i"),
        ("factor", "o"),
        ("linear", "0"),
        ("linear", "1"),
    }


def test_two_axes_on_one_dim_nest_in_order(tools: Any) -> None:
    linear = find(prepared(tools, Linear(4, 8), torch.randn(2, 4)), aten.linear.default)
    out = Choice("factor", "o")
    assert texts(linear, TWO, out, out) == ["R R", "S0 S0", "S0 S0", "S1 S1"]
    assert texts(linear, TWO, out, out, order=(1, 0)) == ["R R", "S0@1 S0@0", "S0@1 S0@0", "S1@1 S1@0"]


def test_a_factor_can_be_cut_in_parts(tools: Any) -> None:
    linear = find(prepared(tools, Linear(4, 12), torch.randn(2, 4)), aten.linear.default)
    assert texts(linear, TP, Choice("factor", "o", (8, 4))) == ["R", "S0(8+4)", "S0(8+4)", "S1(8+4)"]
    assert texts(linear, TP, Choice("factor", "o", (7, 5))) is None  # no common items
    assert texts(linear, TP, Choice("factor", "o", (8, 8))) is None  # not the dim's length


def test_the_inner_of_merged_dims_is_cut_in_parts(tools: Any) -> None:
    class Merge(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(3, 8).sum()

    reshape = find(prepared(tools, Merge(), torch.randn(3, 2, 4)), aten.reshape.default)
    found = {tuple(texts(reshape, TP, c) or ()) for c in choices(reshape, TP, 0) if c.kind == "factor"}
    assert ("S1", "S1") in found and ("S2", "S1(4+4)") in found


def test_nothing_is_invariant_over_time(tools: Any) -> None:
    mesh = Mesh((Axis("time", 2, (1, 1)),))
    gm = prepared(tools, Linear(4, 6), torch.randn(2, 4))
    assert {c.kind for n in gm.graph.nodes if n.op == "call_function" for c in choices(n, mesh, 0)} == {
        "R",
        "factor",
        "linear",
    }


def test_an_op_without_a_rule_runs_whole() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 4, device="meta")
    node = graph.call_function(torch.ops.aten.linalg_det.default, (x,))
    node.meta["val"] = torch.empty((), device="meta")
    annotate(fx.GraphModule({}, graph), lambda fqn: True)
    assert choices(node, TP, 0) == [Choice("I"), Choice("R")]
    assert strategy(node, TP, [Choice("factor", "b")], (0,)) is None


@pytest.mark.parametrize(("kv", "divides"), [(1, True), (2, False), (4, True)])
def test_heads_divide_in_every_operand_or_not_at_all(tools: Any, kv: int, divides: bool) -> None:
    """Two kv heads over four ranks would run and be wrong; a single one is shared by all query heads."""

    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True).sum()

    gm = prepared(tools, Attention(), torch.randn(2, 4, 3, 8), torch.randn(2, kv, 3, 8))
    node, four = find(gm, aten.scaled_dot_product_attention.default), Mesh((Axis("tp", 4),))
    by_heads = [
        t for c in choices(node, four, 0) if c.kind == "factor" and (t := texts(node, four, c) or [""])[0] == "S1"
    ]
    assert by_heads == ([["S1", *["R" if kv == 1 else "S1"] * 2, "S1"]] if divides else [])
