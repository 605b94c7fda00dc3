"""Constant masks are read: causal ones and open ones go, all others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes import PREPARE, run
from autopar.passes.constants import Constants
from autopar.passes.recognize_causal_masks import kind_of, recognize_causal_masks
from autopar.passes.spec import check

BEFORE = PREPARE[: PREPARE.index("recognize_causal_masks")]
S = 6
aten = torch.ops.aten


class Attention(nn.Module):
    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(8, 24), mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, S, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x)).square().sum()


def huggingface(x: Tensor) -> Tensor:
    """As transformers builds it: a mask indexed by batch and positions, and its batch dim expanded."""
    rows, keys = torch.arange(2)[:, None, None, None], torch.arange(S)
    positions = torch.arange(S)[None].expand(2, -1)
    packed = (torch.diff(positions, 1, -1, positions[:, :1] - 1) != 1).cumsum(-1)
    within = positions[rows, keys[None, None, None]] <= positions[rows, keys[None, None, :, None]]
    same = packed[rows, keys[None, None, :, None]] == packed[rows, keys[None, None, None]]
    return (x.new_ones((), dtype=torch.bool) & within & same).expand(2, -1, S, S)


def window(x: Tensor) -> Tensor:
    gap = torch.arange(S)[:, None] - torch.arange(S)
    return (gap >= 0) & (gap < 3)


def additive(x: Tensor) -> Tensor:
    return torch.zeros(S, S).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))


def lowest(x: Tensor) -> Tensor:
    return torch.where(torch.ones(S, S).tril() > 0, 0.0, torch.finfo(torch.float32).min)[None, None]


MASKS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "tril": (lambda x: torch.ones(S, S, dtype=torch.bool).tril(), "causal"),
    "huggingface": (huggingface, "causal"),
    "additive": (additive, "causal"),
    "lowest": (lowest, "causal"),
    "open": (lambda x: (torch.arange(S) >= 0)[:, None].expand(2, 1, S, S), "open"),
    "zeros": (lambda x: torch.where((torch.arange(S) >= 0)[:, None], torch.zeros(1, 2, S, S), -1e9), "open"),
    "window": (window, "kept"),
    "bias": (lambda x: -(torch.arange(S)[:, None] - torch.arange(S)).abs().float(), "kept"),
    "almost": (lambda x: torch.ones(S, S, dtype=torch.bool).tril() | (torch.arange(S) == 3), "kept"),
    "rows_differ": (lambda x: window(x) | (torch.arange(2)[:, None, None, None] == 1), "kept"),
    "input": (lambda x: (x[:, None, :, :1] < 9).expand(2, 1, S, S), "kept"),
}


@pytest.mark.parametrize("name", MASKS)
def test_kind_and_numbers(tools: Any, name: str) -> None:
    mask, kind = MASKS[name]
    x = torch.randn(2, S, 8)
    gm = run(tools.export(Attention(mask), (x,)), BEFORE)
    before = tools.copy(gm)
    after = recognize_causal_masks(gm)
    check(after, "recognize_causal_masks")
    tools.same_numbers(before, after, (x,))
    (node,) = (n for n in after.graph.nodes if n.target is aten.scaled_dot_product_attention.default)
    found = "kept" if node.args[3] is not None else "causal" if node.args[5] else "open"
    assert found == kind


@pytest.mark.parametrize("batch", [4, 4096])
def test_long_sequences_are_read_in_windows(tools: Any, batch: int) -> None:
    length = 8192

    class Mask(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            rows, keys = torch.arange(batch, device="meta")[:, None, None, None], torch.arange(length, device="meta")
            positions = torch.arange(length, device="meta")[None].expand(batch, -1)
            packed = (torch.diff(positions, 1, -1, positions[:, :1] - 1) != 1).cumsum(-1)
            same = packed[rows, keys[None, None, :, None]] == packed[rows, keys[None, None, None]]
            le = positions[rows, keys[None, None, None]] <= positions[rows, keys[None, None, :, None]]
            gap = keys[:, None] - keys
            near = torch.where((gap >= 0) & (gap < 4096), 0.0, float("-inf"))
            le = x.new_ones((), dtype=torch.bool) & (le & same) & (positions[rows, keys[:, None]] >= 0)
            return le.expand(-1, 1, -1, -1), torch.ones(length, length, device="meta").tril() > 0, near

    gm = run(tools.export(Mask(), (torch.zeros(batch, device="meta"),)), ("views_to_reshapes", "drop_noops"))
    masks = gm.graph.output_node().args[0]["outputs"]
    constants = Constants()
    assert [kind_of(constants, m) for m in masks] == ["causal", "causal", "kept"]


def test_text(tools: Any) -> None:
    gm = run(tools.export(Attention(MASKS["tril"][0]), (torch.randn(2, S, 8),)), BEFORE)
    check(tools.golden(recognize_causal_masks, "recognize_causal_masks", gm), "recognize_causal_masks")
