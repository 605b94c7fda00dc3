"""Cuts that do not divide: the same judge as for all rules, on lengths that two, three or four ranks do not divide."""

from __future__ import annotations

from typing import Any

import pytest
import rule_judge
import torch
from torch import Tensor, fx

from autopar.passes.facts import Choice, fact, operand_nodes, value
from autopar.passes.layout import Axis, Mesh
from autopar.passes.strategy import choices, share, strategy

aten = torch.ops.aten
library = torch.ops.autopar
MESHES = tuple(Mesh(tuple(Axis("ab"[i], n) for i, n in enumerate(sizes))) for sizes in [(2,), (3,), (4,), (2, 2)])
TP = MESHES[0]


def x(*shape: int) -> Tensor:
    return torch.randn(shape)


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


torch.manual_seed(0)
CALLS: list[tuple[Any, ...]] = [
    (aten.add.Tensor, x(5, 1, 7), x(3, 7)),
    (aten.sum.dim_IntList, x(5, 7), [1]),
    (aten.layer_norm.default, x(5, 7, 4), [4], x(4), x(4)),
    (aten.linear.default, x(5, 7, 11), x(13, 11), x(13)),
    (aten.bmm.default, x(5, 3, 7), x(5, 7, 11)),
    (aten.einsum.default, "bhi,hio->bho", [x(3, 5, 7), x(5, 7, 4)]),
    (aten.reshape.default, x(3, 7, 20), [3, 7, 5, 4]),
    (aten.reshape.default, x(3, 5, 7, 4), [3, 5, 28]),
    (aten.reshape.default, x(5, 7, 3), [35, 3]),
    (aten.transpose.int, x(5, 7), 0, 1),
    (aten.expand.default, x(5, 1, 3), [5, 7, 3]),
    (aten.repeat.default, x(5, 7), [3, 2]),
    (aten.repeat_interleave.self_int, x(5, 7), 3, 1),
    (aten.split_with_sizes.default, x(3, 30), [15, 5, 10], 1),
    (aten.split_with_sizes.default, x(3, 21), [7, 7, 7], 1),
    (aten.chunk.default, x(3, 15), 3, 1),
    (aten.cat.default, [x(5, 9), x(5, 3)], 1),
    (aten.slice.Tensor, x(5, 15), 1, 5, 10),
    (aten.slice_scatter.default, x(5, 15), x(5, 5), 1, 10, 15),
    (aten.glu.default, x(5, 10), 1),
    (aten.index_select.default, x(5, 7), 0, i(5, 11)),
    (aten.embedding.default, x(13, 5), i(13, 3, 7)),
    (aten.embedding.default, x(13, 5), i(13, 3, 7), 9),
    (aten.convolution.default, x(3, 10, 5), x(15, 2, 3), x(15), [1], [0], [1], False, [0], 5),
    (aten.convolution.default, x(3, 5, 6), x(7, 5, 3), x(7), [1], [0], [1], False, [0], 1),
    (aten.group_norm.default, x(3, 15, 2), 5, x(15), x(15)),
    (library.cross_entropy_sum.default, x(3, 7, 13), i(13, 3, 7), None, -100, 0.1),
    (library.batch_norm.default, x(5, 7, 3), x(7), x(7), x(7), x(7).abs(), 0.1, 1e-5),
]
ATTENTION = [
    (aten.scaled_dot_product_attention.default, x(2, 5, 3, 4), x(2, 5, 7, 4), x(2, 5, 7, 6)),
    (aten.scaled_dot_product_attention.default, *(x(2, 3, 5, 4) for _ in range(3)), None, 0.0, True),
]


@pytest.mark.parametrize("call", [*CALLS, *ATTENTION], ids=lambda call: str(call[0]))
def test_uneven_is_whole(call: tuple[Any, ...]) -> None:
    node, operands = rule_judge.build(call[0], call[1:], {})
    verdict = rule_judge.judge(node, operands, MESHES)
    assert not verdict.wrong and len(verdict.tried) > 1, verdict.wrong
    assert any(_uneven(node, mesh) for mesh in MESHES[:3])


@pytest.mark.parametrize("heads", [(9, 3), (6, 3), (10, 5), (5, 1)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    """Key heads that go round are cut with the queries that read them, else they stay whole."""
    q, k, v = x(2, heads[0], 5, 4), x(2, heads[1], 5, 4), x(2, heads[1], 5, 4)
    node, operands = rule_judge.build(aten.scaled_dot_product_attention.default, (q, k, v), {"enable_gqa": True})
    verdict = rule_judge.judge(node, operands, MESHES)
    assert not verdict.wrong, verdict.wrong
    assert _uneven(node, TP)


def _uneven(node: fx.Node, mesh: Mesh) -> list[Choice]:
    """The choices that leave the ranks with pieces of different sizes."""
    values = [*map(value, operand_nodes(node)), *fact(node).values]
    found = []
    for choice in choices(node, mesh, 0):
        made = strategy(node, mesh, [choice], (0,))
        assert made is not None
        pairs = zip((*made.operands, *made.results), values, strict=True)
        if any(layout is not None and v is not None and not layout.is_even(v.shape, mesh) for layout, v in pairs):
            found.append(choice)
    return found


def test_every_rank_gets_an_item_or_the_cut_is_illegal() -> None:
    node, _ = rule_judge.build(aten.relu.default, (x(5, 4),), {})
    legal = [n for n in range(2, 8) if Choice("factor", "d0") in choices(node, Mesh((Axis("a", n),)), 0)]
    assert legal == [2, 3, 5]


def test_two_axes_do_not_cut_one_dim_unevenly() -> None:
    node, _ = rule_judge.build(aten.relu.default, (x(10),), {})
    both, mesh = [Choice("factor", "d0")] * 2, MESHES[3]
    assert strategy(node, mesh, both, (0, 1)) is None
    assert strategy(node, mesh, [both[0], Choice("R")], (0, 1)) is not None


def test_parts_without_a_common_share_stay_whole() -> None:
    """Seven and five elements over two ranks would be 4 + 3 and 3 + 3: in no proportion."""
    node, _ = rule_judge.build(aten.split_with_sizes.default, (x(12), [7, 5]), {})
    assert not [c for c in choices(node, TP, 0) if c.kind == "factor"]


def test_a_rank_with_more_items_has_more_of_the_work() -> None:
    node, _ = rule_judge.build(aten.linear.default, (x(2, 4), x(40, 4)), {})
    assert share(node, Choice("factor", "o"), TP.axes[0]) == 1 / 2
    assert share(node, Choice("factor", "o", items=5), TP.axes[0]) == 3 / 5
    made = strategy(node, TP, [Choice("factor", "o", items=5)], (0,))
    assert made is not None and [str(layout) for layout in (*made.operands, *made.results)] == ["R", "S0/5", "S1/5"]
    offered = choices(node, TP, 0, [("o", (), 5), ("o", (), 4)])
    assert Choice("factor", "o", items=5) in offered and Choice("factor", "o", items=4) not in offered  # even: the same
