"""Views become reshape, expand, permute, split_with_sizes and slice with literal, positive arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopar.passes import run
from autopar.passes.spec import check
from autopar.passes.views_to_reshapes import views_to_reshapes

aten = torch.ops.aten


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 12))

    def forward(self, x: Tensor) -> Any:
        y = x @ self.weight.t()
        a, b, c = y.view(2, -1, 3, 4).unbind(-2)
        d = a.flatten(-2).unflatten(-1, (-1, 2)).transpose(-1, -2)
        e = (torch.softmax(b.mT, dim=-1) @ c.swapaxes(-1, -2).movedim(-1, -2)[..., -1:]).squeeze()
        f = torch.cat([p.cumsum(-1) for p in y.chunk(5, -1)], dim=-1).sum((-1, -2), keepdim=True)
        g, h = y.split([4, 8], dim=-1)
        k = y[..., 1::3].narrow(-1, -2, 2) + y[0, -1, -1:].expand(2, 3, -1).expand_as(y[..., :2])
        m = torch.stack([g, h[..., :4].view_as(g)], -1).unsqueeze(-1).squeeze(dim=(0, -1)).select(-1, -1)
        n, p = torch.broadcast_tensors(y, y[0, :1])
        f = f + (n * p).sum()
        return f.sum() + d.sum() + e.sum() + k.square().sum() + m.sum(), y.view(2, 3, 12)


def test_text_spec_numbers(tools: Any) -> None:
    x = torch.randn(2, 3, 12)
    gm = tools.export(Views(), (x,))
    check(gm, "functionalize_mutations")
    after = tools.golden(views_to_reshapes, "views_to_reshapes", gm)
    check(after, "views_to_reshapes")
    tools.same_numbers(gm, after, (x,))


def test_one_op_a_family(tools: Any) -> None:
    gm = run(tools.export(Views(), (torch.randn(2, 3, 12),)), ("views_to_reshapes",))
    left = {n.target for n in gm.graph.nodes if n.op == "call_function"}
    assert not left & {
        aten.view.default,
        aten.flatten.using_ints,
        aten.chunk.default,
        aten.narrow.default,
        aten.mT.default,
    }
    assert {aten.reshape.default, aten.split_with_sizes.default, aten.permute.default} <= left


def test_views_that_change_nothing_go(tools: Any) -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(2, -1).expand(-1, -1)[:, :].reshape(2, 3).permute(0, 1).movedim(0, 0).sum()

    gm = views_to_reshapes(tools.export(Same(), (torch.randn(2, 3),)))
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"][-1] is aten.sum.default
    assert len(gm.graph.nodes) <= 5, gm.graph
