"""Dims that are merged and split again stay apart, with the same numbers, so that each is cut by an axis of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes import PREPARE, run
from autopar.passes.ops_keep_dims import ops_keep_dims
from autopar.passes.spec import check

aten = torch.ops.aten
BEFORE = PREPARE[: PREPARE.index("ops_keep_dims")]


class Net(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.body = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8)), body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(x, y, self.weight, self.bias).square().sum()


def attention(h: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """As nn.MultiheadAttention has it, sequence first: batch and heads merged between."""
    q, k = (F.linear(t, w, b).reshape(5, 3 * 2, 4).transpose(0, 1) for t in (h, y))
    scores = (torch.bmm(q * 0.5, k.transpose(1, 2)) + y[0, 0, 0]).softmax(-1)
    return F.linear(torch.bmm(scores, k).transpose(0, 1).reshape(15, 8), w).view(5, 3, 8)


def with_bias(h: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """As bloom has it: a bias of every head is added to merged products."""
    q, k = (t.reshape(5, 3, 2, 4).permute(1, 2, 0, 3).reshape(6, 5, 4) for t in (h, y))
    scores = b[:6].reshape(6, 1, 1).baddbmm(q, k.mT, beta=0.5, alpha=2.0)
    return torch.bmm(scores.view(3, 2, 5, 5).softmax(-1).view(6, 5, 5), k).view(3, 2, 5, 4)


BODIES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda h, y, w, b: F.linear(h.reshape(15, 8), w, b).relu().reshape(5, 3, 8),
    "attention": attention,
    "with_bias": with_bias,
    "conv1d": lambda h, y, w, b: F.gelu(torch.addmm(b, h.reshape(15, 8), w)).reshape(5, 3, 8),
    "product": lambda h, y, w, b: torch.mm(torch.addmm(b, h.view(15, 8), w), w.t()).reshape(5, 3, 8),
    "elementwise": lambda h, y, w, b: (h.reshape(15, 8) * y.reshape(15, 8) + b).reshape(5, 3, 8),
    "rows_apart": lambda h, y, w, b: (h.reshape(15, 8) * y[:, :, :1].reshape(15, 1)).reshape(5, 3, 2, 4),
}
KEPT: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "read_merged": lambda h, y, w, b: F.linear(h.reshape(15, 8), w).cumsum(0).reshape(5, 3, 8),
    "never_split": lambda h, y, w, b: F.linear(h.reshape(15, 8), w).reshape(15, 2, 4),
    "scaled": lambda h, y, w, b: torch.addmm(b, h.reshape(15, 8), w, beta=0.5).reshape(5, 3, 8),
    "one_way_is_merged": lambda h, y, w, b: (g := h.reshape(15, 8)).reshape(5, 3, 8) + g.cumsum(0).reshape(5, 3, 8),
}


@pytest.mark.parametrize("name", [*BODIES, *KEPT])
def test_same_numbers(tools: Any, name: str) -> None:
    inputs = torch.randn(5, 3, 8), torch.randn(5, 3, 8)
    before = run(tools.export(Net((BODIES | KEPT)[name]), inputs), BEFORE)
    after = ops_keep_dims(tools.copy(before))
    check(after, "ops_keep_dims")
    tools.same_numbers(before, after, inputs)
    shapes = [tuple(n.meta["val"].shape) for n in after.graph.nodes if n.op == "call_function"]
    merged = [s for s in shapes if s[:1] in ((15,), (6,)) and s[1:] not in ((), (1, 1))]
    assert bool(merged) == (name in KEPT)


def test_golden(tools: Any) -> None:
    inputs = torch.randn(5, 3, 8), torch.randn(5, 3, 8)
    tools.golden(ops_keep_dims, "ops_keep_dims", run(tools.export(Net(attention), inputs), BEFORE))
