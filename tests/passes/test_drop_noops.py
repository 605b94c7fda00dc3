"""What computes nothing goes, numbers stay, random ops are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.passes import run
from autopar.passes.drop_noops import drop_noops
from autopar.passes.spec import check

aten = torch.ops.aten


class Idle(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.weight, self.p = nn.Parameter(torch.randn(4, 4)), p

    def forward(self, x: Tensor) -> Any:
        y = (x.to(torch.float32).contiguous() @ self.weight).clone()
        y.cos()
        y = F.dropout(y, self.p, True) * 1.0 / 1 + torch.arange(4).add(0).to(y)
        half = y.to(dtype=torch.bfloat16, device="cpu").float().type_as(y)
        return (F.dropout(y, 0.5, False)[:, :] + torch.tensor(2.0) + half).sum(), y + 0.0


def test_text_spec_numbers(tools: Any) -> None:
    x = torch.randn(3, 4)
    gm = run(tools.export(Idle(), (x,)), ("functionalize_mutations", "views_to_reshapes"))
    after = tools.golden(drop_noops, "drop_noops", gm)
    check(after, "drop_noops")
    tools.same_numbers(gm, after, (x,))


def test_strides_that_are_read_stay(tools: Any) -> None:
    class Complex(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(torch.view_as_complex(x.transpose(0, 1).contiguous()) * 2).sum()

    x = torch.randn(2, 3)
    gm = run(tools.export(Complex(), (x,)), ("views_to_reshapes", "drop_noops"))
    assert any(n.target is aten.contiguous.default for n in gm.graph.nodes)


def test_random_ops_are_refused(tools: Any) -> None:
    with pytest.raises(AutoparError, match=r"test_drop_noops.py:\d+: aten.dropout.default draws random numbers"):
        drop_noops(tools.export(Idle(0.1), (torch.randn(3, 4),)))


def test_attention_is_random_only_with_dropout(tools: Any) -> None:
    class Attention(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.p = p

        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, dropout_p=self.p).sum()

    q = torch.randn(1, 2, 4, 8)
    drop_noops(tools.export(Attention(0.0), (q,)))
    with pytest.raises(AutoparError, match="random"):
        drop_noops(tools.export(Attention(0.1), (q,)))
