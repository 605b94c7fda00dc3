"""What computes nothing goes, and numbers stay."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes import run
from autopar.passes.drop_noops import drop_noops
from autopar.passes.spec import check

aten = torch.ops.aten


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Any:
        y = (x.to(torch.float32).contiguous() @ self.weight).clone()
        y.cos()
        y = F.dropout(y, 0.0, True) * 1.0 / 1 + torch.arange(4).add(0).to(y)
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


class Cached(nn.Module):
    """What an empty cache of keys leaves: pieces without elements before, between and after others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("past", torch.empty(0))

    def forward(self, x: Tensor) -> Any:
        y = x @ self.weight
        keys = torch.cat([self.past, y], -2) * 2
        half = torch.cat([self.past, y.to(torch.bfloat16)], 0).square()
        both = torch.cat([y, y[:, :0], y], 1).cos()
        wide = torch.cat([self.past, y.half(), y.half()], 0).sin()
        own = torch.cat([y, self.nothing], 0).tanh()
        return keys.sum() + half.sum() + both.sum() + wide.sum() + own.sum(), torch.cat([self.past, self.past])


def test_pieces_without_elements_are_not_joined(tools: Any) -> None:
    x = torch.randn(3, 4)
    gm = run(tools.export(Cached(), (x,)), ("functionalize_mutations", "views_to_reshapes"))
    after = tools.golden(drop_noops, "drop_noops_in_cat", gm)
    check(after, "drop_noops")
    tools.same_numbers(gm, after, (x,))
    assert tools.numbers(after, (x,))[1]["nothing"].shape == (0, 4)


def test_a_tensor_is_not_read_for_its_type(tools: Any) -> None:
    class Fresh(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            return (x.sum() * y.new_zeros(2) + y.new_full((2,), 3) + y.new_ones(2, dtype=torch.float64).float()).sum()

    x = torch.randn(2, 3)
    gm = run(tools.export(Fresh(), (x,)), ("functionalize_mutations", "views_to_reshapes"))
    after = drop_noops(tools.copy(gm))
    check(after, "drop_noops")
    tools.same_numbers(gm, after, (x,))
    assert aten.mul.Tensor not in [n.target for n in after.graph.nodes if n.args[1:] == (2,)]
