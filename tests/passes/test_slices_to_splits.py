"""Slices that tile a dim become one split; others stay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopar.passes import run
from autopar.passes.slices_to_splits import slices_to_splits
from autopar.passes.spec import check

BEFORE = ("functionalize_mutations", "views_to_reshapes", "drop_noops")
aten = torch.ops.aten


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        q, k, v = y[..., :8], y[..., 8:12], y[..., 12:]
        return (q.sum() * k * v).sum() + y[..., 12:].sum()


def test_text_spec_numbers(tools: Any) -> None:
    x = torch.randn(2, 3, 8)
    gm = run(tools.export(Fused(), (x,)), BEFORE)
    after = tools.golden(slices_to_splits, "slices_to_splits", gm)
    check(after, "slices_to_splits")
    tools.same_numbers(gm, after, (x,))


def test_pieces_are_split_again(tools: Any) -> None:
    class Rotary(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            turned, passed = x[:, :4], x[:, 4:]
            return (torch.cat((-turned[:, 2:], turned[:, :2]), -1) * passed).sum()

    gm = slices_to_splits(run(tools.export(Rotary(), (torch.randn(2, 8),)), BEFORE))
    check(gm, "slices_to_splits")
    splits = [n for n in gm.graph.nodes if n.target is aten.split_with_sizes.default]
    assert [n.args[1] for n in splits] == [[4, 4], [2, 2]]


def test_gaps_overlaps_and_steps_stay(tools: Any) -> None:
    class Loose(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gap = x[:, :3] * x[:, 4:7]
            overlap = x[:, :4, None] + x[:, 3:, None]
            return gap.sum() + overlap.sum() + (x[:1, ::2] + x[1:, ::2]).sum() + (x[::2] - x[1::2]).sum()

    gm = slices_to_splits(run(tools.export(Loose(), (torch.randn(2, 7),)), BEFORE))
    splits = [n for n in gm.graph.nodes if n.target is aten.split_with_sizes.default]
    assert [n.args[1:] for n in splits] == [([1, 1], 0)]
