"""Autocast regions: the captured graph has the casts that eager makes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.autocast_casts import Autocast
from autopar.build import prepare
from autopar.capture import capture, run_graph
from autopar.errors import AutoparError


class Model(nn.Module):
    """Two linears and what the test does with them."""

    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.f, self.g, self.norm, self.body = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), body
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.conv, self.act = nn.Conv1d(5, 5, 3, padding=1), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).float().pow(2).mean()


def low(dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.autocast("cpu", dtype=dtype)


def a_weight_used_twice(m: Any, x: Tensor) -> Tensor:
    with low():
        return m.f(m.f(x)) + m.g(x) + x @ m.f.weight


def nested_and_disabled(m: Any, x: Tensor) -> Tensor:
    with low():
        h = m.norm(m.f(x))
        with torch.autocast("cpu", enabled=False):
            h = h + m.g(h.float())
            with low(torch.float16):
                h = h @ h.transpose(1, 2) @ h
        return m.f(h) + m.g(h.bfloat16())


def ops_in_float32_and_of_mixed_types(m: Any, x: Tensor) -> Tensor:
    with low():
        h = m.conv(m.f(x))
        loss = F.mse_loss(h, x) + F.cross_entropy(h.flatten(0, 1), x.argmax(-1).flatten()) + h.prod(-1).mean()
        both = torch.cat([h, x], -1) + torch.stack([x, h], 2).flatten(2)
        return m.act(both).softmax(-1).sum() * loss + F.binary_cross_entropy(h.sigmoid().float(), x.sigmoid())


def attention_and_einsum(m: Any, x: Tensor) -> Tensor:
    with low():
        q = m.f(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k = x.unflatten(-1, (2, 4)).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, k, k, attn_mask=torch.zeros(5, 5)).transpose(1, 2).flatten(2)
        return torch.einsum("bsd,de->bse", h, m.g.weight) + torch.einsum("bsd->bs", x).unsqueeze(-1)


def under_no_grad_and_in_place(m: Any, x: Tensor) -> Tensor:
    with low():
        with torch.no_grad():
            target = m.g(x)
        h = m.f(x)
        h.add_(x).mul_(0.5)
        return (h - target).relu_()


@pytest.mark.parametrize(
    "body",
    [
        a_weight_used_twice,
        nested_and_disabled,
        ops_in_float32_and_of_mixed_types,
        attention_and_einsum,
        under_no_grad_and_in_place,
    ],
)
def test_equal_to_eager(body: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model, x = Model(body), torch.randn(4, 5, 8)
    captured = capture(model, (x,))
    assert captured.checked == "equal"
    kept = [p for p in model.parameters() if p.requires_grad]
    eager = model(x)
    mine = run_graph(captured.graph, (x,), captured.attributes)["outputs"][0]
    assert torch.equal(mine, eager)
    for a, b in zip(*(torch.autograd.grad(t, kept, allow_unused=True) for t in (mine, eager)), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert any(n.meta["val"].dtype == torch.bfloat16 for n in captured.graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.to.dtype))  # fmt: skip


def test_a_decorated_method() -> None:
    class Half(nn.Linear):
        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = Model(lambda m, x: m.f(x))
    model.f = Half(8, 8)
    linear = capture(model, (torch.randn(4, 5, 8),)).graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.linear.default
    )
    assert [n.meta["val"].dtype for n in linear] == [torch.bfloat16]


def test_an_op_that_casts_inside_itself() -> None:
    def recurrent(m: Any, x: Tensor) -> Tensor:
        with low():
            return m.rnn(x)[0]

    with pytest.raises(AutoparError, match=r"^rnn \(.*aten.lstm.input casts inside itself under autocast") as caught:
        capture(Model(recurrent), (torch.randn(4, 5, 8),))
    assert "\n" not in str(caught.value)


def test_an_op_that_is_watched_once() -> None:
    x = torch.fx.Graph().placeholder("x")
    x.meta["val"] = torch.empty(3, 3, device="meta")
    autocast = Autocast(torch.bfloat16)
    assert autocast.casts(torch.ops.aten.mm.default, (x, x), {}) == {x: torch.bfloat16}
    assert autocast.casts(torch.ops.aten.to.dtype, (x, torch.bfloat16), {}) == {}  # a cast of its own
    assert autocast.nested(torch.float16).casts(torch.ops.aten.mm.default, (x, x), {}) == {x: torch.float16}


def test_a_plan_fits_the_float64_form() -> None:
    captured = capture(Model(nested_and_disabled), (torch.randn(4, 5, 8),))
    narrow, wide = (prepare(captured, 1, float64=f).body.graph.nodes for f in (False, True))
    assert [n.target for n in narrow] == [n.target for n in wide]
    assert {n.meta["val"].dtype for n in wide if isinstance(n.meta.get("val"), Tensor)} == {torch.float64}
