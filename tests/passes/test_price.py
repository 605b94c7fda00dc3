"""Prices: FLOPs as torch counts them, bytes of pieces, and what is kept of local shapes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.passes import PREPARE, run
from autopar.passes.completion import is_op
from autopar.passes.divide_work import flops
from autopar.passes.facts import Choice, Strategy, Value, annotate
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.price import Prices, _pieces, local_bytes, prices
from autopar.passes.saves import saves
from autopar.passes.strategy import choices, strategy

ALONE = Mesh(())
TWO = Mesh((Axis("dp", 2), Axis("tp", 2)))
TIMED = Mesh((Axis("tp", 2), Axis("time", 3, (2, 4, 2))))
aten = torch.ops.aten


class Of(nn.Module):
    """A function of inputs and parameters ``p0, p1, ...``, summed."""

    def __init__(self, function: Any, *parameters: tuple[int, ...]) -> None:
        super().__init__()
        self.function, self.count = function, len(parameters)
        for i, shape in enumerate(parameters):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape)))

    def forward(self, *inputs: Tensor) -> Tensor:
        made = self.function(*inputs, *(getattr(self, f"p{i}") for i in range(self.count)))
        assert isinstance(made, Tensor)
        return made.sum()


def prepared(tools: Any, model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    gm = run(tools.export(model, inputs), PREPARE)
    annotate(gm, lambda fqn: True)
    return gm


def find(gm: fx.GraphModule, target: Any) -> fx.Node:
    found = [n for n in gm.graph.nodes if n.target is target]
    assert isinstance(found[0], fx.Node)
    return found[0]


def whole(node: fx.Node) -> Prices:
    found = strategy(node, ALONE, (), ())
    assert found is not None
    return prices(node, [found], ALONE)


def under(node: fx.Node, mesh: Mesh, *chosen: Choice) -> Prices:
    found = strategy(node, mesh, chosen, range(len(mesh.axes)))
    assert found is not None
    return prices(node, [found], mesh)


def legal(node: fx.Node, mesh: Mesh) -> list[Strategy]:
    menus = [choices(node, mesh, a) for a in range(len(mesh.axes))]
    found = [strategy(node, mesh, chosen, range(len(mesh.axes))) for chosen in itertools.product(*menus)]
    return [s for s in found if s is not None]


R = torch.randn
COUNTED: dict[str, tuple[Any, list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "linear": (lambda x, w, b: F.linear(x, w, b), [(4, 6, 8)], [(5, 8), (5,)]),
    "linear_of_linear": (lambda x, v, w: F.linear(F.linear(x, v), w), [(4, 6, 8)], [(7, 8), (5, 7)]),
    "mm": (lambda a, b: a @ b, [], [(4, 6), (6, 5)]),
    "mm_of_input": (lambda x, b: torch.mm(x, b), [(4, 6)], [(6, 5)]),
    "bmm": (torch.bmm, [], [(3, 4, 6), (3, 6, 5)]),
    "addmm": (torch.addmm, [], [(5,), (4, 6), (6, 5)]),
    "baddbmm": (torch.baddbmm, [], [(3, 4, 5), (3, 4, 6), (3, 6, 5)]),
    "matmul": (torch.matmul, [], [(2, 3, 4, 6), (2, 3, 6, 5)]),
    "square": (lambda a: a @ a, [], [(4, 4)]),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), [(2, 3, 8)], [(4, 3, 3), (4,)]),
    "conv2d": (lambda w, x: F.conv2d(x, w, stride=2), [], [(4, 3, 3, 3), (2, 3, 8, 8)]),
    "conv_transposed": (lambda w, x: F.conv_transpose2d(x, w, stride=2), [], [(3, 4, 2, 2), (2, 3, 4, 4)]),
}


@pytest.mark.parametrize("name", COUNTED)
def test_flops_forward_and_backward_are_those_of_torch(tools: Any, name: str) -> None:
    function, inputs, parameters = COUNTED[name]
    model, given = Of(function, *parameters), [R(s) for s in inputs]
    gm = prepared(tools, model, *given)
    mine = [whole(n) for n in gm.graph.nodes if is_op(n)]
    with FlopCounterMode(display=False) as counter:
        model(*given).backward()
    assert sum(p.flops_forward.item() + p.flops_backward.item() for p in mine) == counter.get_total_flops() > 0


@pytest.mark.parametrize("causal", [False, True])
def test_attention_recomputes_its_scores_in_backward(tools: Any, causal: bool) -> None:
    from torch.utils import flop_counter

    backward: Any = flop_counter.sdpa_backward_flop_count
    shape = (2, 3, 8, 4)
    function = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    node = find(prepared(tools, Of(function, shape, shape, shape)), aten.scaled_dot_product_attention.default)
    found = whole(node)
    assert found.flops_forward.item() == flops(node) == 2 * 2 * 2 * 3 * 8 * 8 * 4
    assert found.flops_backward.item() == backward(*[shape] * 4) == 2.5 * flops(node)


def test_a_factor_divides_flops_and_replicas_do_not(tools: Any) -> None:
    linear = find(prepared(tools, Of(F.linear, (6, 8), (4, 8))), aten.linear.default)
    o, i, r, addend = Choice("factor", "o"), Choice("factor", "i"), Choice("R"), Choice("linear", "0")
    total = flops(linear)
    assert under(linear, TWO, o, i).flops_forward.item() == total / 4
    assert under(linear, TWO, o, r).flops_backward.item() == total  # two products, each halved
    assert under(linear, TWO, r, addend).flops_forward.item() == total


def test_time_counts_the_largest_microbatch(tools: Any) -> None:
    linear = find(prepared(tools, Of(F.linear, (8, 6), (4, 6))), aten.linear.default)
    found = under(linear, TIMED, Choice("factor", "o"), Choice("factor", "b0"))
    assert found.flops_forward.item() == flops(linear) / 2 / 2
    assert found.moved_forward.item() == 4 * (4 * 6 + 2 * 6 + 4 * 2)


def test_splitting_the_values_does_not_divide_the_scores(tools: Any) -> None:
    shape = (2, 3, 8, 4)
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v)
    node = find(prepared(tools, Of(attend, shape, shape, shape)), aten.scaled_dot_product_attention.default)
    found = under(node, TWO, Choice("factor", "e"), Choice("R"))
    assert found.flops_forward.item() == flops(node) * 3 / 4


def test_traffic_of_a_linear(tools: Any) -> None:
    linear = find(prepared(tools, Of(F.linear, (6, 8), (4, 8))), aten.linear.default)
    x, w, y = 4 * 6 * 8, 4 * 4 * 8, 4 * 6 * 4
    found = whole(linear)
    assert found.moved_forward.item() == x + w + y
    assert found.moved_backward.item() == y + (x + w) + (x + w)
    assert found.transient.item() == y + x + w
    assert found.dtype == "fp32"
    data = whole(find(prepared(tools, Of(F.linear, (4, 8)), R(6, 8)), aten.linear.default))
    assert data.moved_backward.item() == y + x + w and data.transient.item() == y + w


def test_views_move_nothing_and_lookups_read_what_they_take(tools: Any) -> None:
    view = find(prepared(tools, Of(lambda a: a.transpose(0, 1) * 2, (6, 8))), aten.transpose.int)
    found = whole(view)
    assert found.moved_forward.item() == found.moved_backward.item() == found.transient.item() == 0
    piece = whole(find(prepared(tools, Of(lambda a: a.narrow(0, 0, 2) * 2, (6, 8))), aten.slice.Tensor))
    assert piece.moved_forward.item() == 0 and piece.moved_backward.item() == 4 * (2 * 8 + 6 * 8)
    table = Of(lambda i, w: F.embedding(i, w), (1000, 8))
    embedding = whole(find(prepared(tools, table, torch.zeros(5, dtype=torch.int64)), aten.embedding.default))
    assert embedding.moved_forward.item() == 4 * (5 * 8 + 5 * 8) + 8 * 5
    assert embedding.moved_backward.item() == 4 * (5 * 8 + 1000 * 8) + 8 * 5


def test_nothing_is_priced_backward_without_a_gradient(tools: Any) -> None:
    gm = prepared(tools, Of(lambda x, w: (x.matmul(x) * 2).sum() * w, ()), R(6, 6))
    found = whole(find(gm, aten.matmul.default))
    assert found.flops_forward.item() > 0 == found.flops_backward.item() == found.moved_backward.item()


LOCAL = {
    aten.scaled_dot_product_attention.default: Of(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *[(4, 4, 8, 4)] * 3
    ),
    aten.layer_norm.default: Of(lambda x, w: F.layer_norm(x, (8,), w), (4, 4, 8), (8,)),
    aten.softmax.int: Of(lambda x: x.softmax(-1), (4, 4, 8)),
    aten.max_pool2d.default: Of(lambda x: F.max_pool2d(x, 2), (4, 4, 8, 8)),
    torch.ops.autopar.dropout.default: Of(lambda x: F.dropout(x, 0.5), (4, 4, 8)),
    aten.group_norm.default: Of(lambda x: F.group_norm(x, 4), (4, 8, 4)),
}


@pytest.mark.parametrize("target", LOCAL, ids=str)
def test_what_is_kept_besides_is_that_of_the_pieces(tools: Any, target: Any) -> None:
    node = find(prepared(tools, LOCAL[target]), target)
    strategies = legal(node, TWO)
    found = prices(node, strategies, TWO)
    assert whole(node).saved_new.item() == sum(n.nbytes for n in saves(node).new)
    for s, nbytes in zip(strategies, found.saved_new, strict=True):
        local = _pieces(node, s, TWO)
        assert not local.guessed and sum(n.nbytes for n in local.new) == nbytes, s


def test_bytes_of_the_largest_piece() -> None:
    v = Value((7, 4), torch.bfloat16)
    mesh = Mesh((Axis("dp", 2), Axis("tp", 2)))
    assert local_bytes(v, Layout.parse("S0 I", 2), mesh) == 2 * 4 * 4  # 4 rows of 7
    assert local_bytes(v, Layout.parse("S0 S0", 2), mesh) == 2 * 2 * 4
    assert local_bytes(v, Layout.parse("P S1", 2), mesh) == 2 * 7 * 2
    parts = Layout.parse("R S1(3+1)", 2)
    assert local_bytes(v, parts, mesh) == 2 * 7 * 3


def test_a_loss_works_on_gradients_as_large_as_its_logits(tools: Any) -> None:
    loss = Of(lambda y, x: F.cross_entropy(x, y), (6, 50))
    node = find(prepared(tools, loss, torch.zeros(6, dtype=torch.int64)), torch.ops.autopar.cross_entropy_sum.default)
    found, logits = whole(node), 4 * 6 * 50
    assert found.saved_new.item() == pytest.approx(logits, abs=8)
    assert found.transient.item() == pytest.approx(2 * logits, abs=16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_rate_is_that_of_the_dtype(tools: Any, dtype: torch.dtype) -> None:
    node = find(prepared(tools, Of(F.linear, (6, 8), (4, 8)).to(dtype)), aten.linear.default)
    assert whole(node).dtype == {"float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}[str(dtype)[6:]]


def test_prices_are_arrays_over_the_strategies(tools: Any) -> None:
    linear = find(prepared(tools, Of(F.linear, (8, 8), (4, 8))), aten.linear.default)
    strategies = legal(linear, TWO)
    together = prices(linear, strategies, TWO)
    for k, s in enumerate(strategies):
        alone = prices(linear, [s], TWO)
        for name in ("flops_forward", "flops_backward", "moved_forward", "moved_backward", "saved_new", "transient"):
            array = getattr(together, name)
            assert array.dtype == np.float64 and array.shape == (len(strategies),)
            assert array[k] == getattr(alone, name)[0]
