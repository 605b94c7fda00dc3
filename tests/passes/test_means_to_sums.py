"""Means, variances, pools and losses become sums over literal counts, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes import run
from autopar.passes.means_to_sums import means_to_sums
from autopar.passes.spec import check

BEFORE = ("functionalize_mutations", "views_to_reshapes", "drop_noops", "slices_to_splits")


class Net(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.randn(6, 6)), body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(x @ self.weight, y)


BODIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda h, y: h.mean(),
    "mean_dim": lambda h, y: (h.mean(-1, keepdim=True) * h.mean((0, 2)).sum()).square().sum(),
    "mean_of_all_dims": lambda h, y: h.mean(dim=(), keepdim=True).sum() + y.long().mean(dtype=torch.float32),
    "mean_half": lambda h, y: h.bfloat16().mean(0).float().sum() + (h.half() * 1e3).mean().float(),
    "var": lambda h, y: h.var().log() + h.var(1, unbiased=False).sum() + h.var((0, 1), correction=3).sum(),
    "var_mean": lambda h, y: sum(t.square().sum() for t in torch.var_mean(h, -1)) + torch.var_mean(h, 1)[1].sum(),
    "pool": lambda h, y: F.adaptive_avg_pool2d(h, 1).square().sum() + F.adaptive_avg_pool2d(h, 2).sum(),
    "of_one": lambda h, y: h[:1, :, :1].mean((0, 2)).sum() + F.adaptive_avg_pool2d(h[:, :1, :1], 1).sum(),
    "mse": lambda h, y: F.mse_loss(h, y) + 2 * F.mse_loss(h, y, reduction="sum") + (h - y).square().mean(),
    "l1": lambda h, y: F.l1_loss(h, y) + F.smooth_l1_loss(h, y, beta=0.5) + F.huber_loss(h, y, reduction="sum"),
    "bce": lambda h, y: F.binary_cross_entropy_with_logits(h, y.sigmoid(), y.exp(), pos_weight=y[0].exp()),
    "bce_of_probabilities": lambda h, y: F.binary_cross_entropy(h.sigmoid(), y.sigmoid()),
    "kl": lambda h, y: F.kl_div(h.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "margin": lambda h, y: F.soft_margin_loss(h, y.sign()),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_same_numbers(tools: Any, name: str) -> None:
    inputs = torch.randn(3, 4, 6), torch.randn(3, 4, 6)
    gm = run(tools.export(Net(BODIES[name]), inputs), BEFORE)
    after = means_to_sums(run(tools.export(Net(BODIES[name]), inputs), BEFORE))
    after.weight = gm.weight
    check(after, "means_to_sums")
    if name == "mean_half":  # torch rounds elsewhere
        before, now = tools.numbers(gm, inputs)[0][0], tools.numbers(after, inputs)[0][0]
        torch.testing.assert_close(before, now, rtol=1e-3, atol=0)
    else:
        tools.same_numbers(gm, after, inputs)


def test_text(tools: Any) -> None:
    def body(h: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt(), y)

    gm = run(tools.export(Net(body), (torch.randn(2, 6), torch.randn(2, 6))), BEFORE)
    check(tools.golden(means_to_sums, "means_to_sums", gm), "means_to_sums")


def test_half_precision_does_not_overflow(tools: Any) -> None:
    big = torch.full((4, 60_000), 3.0, dtype=torch.float16)

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(-1)

    gm = means_to_sums(tools.export(Mean(), (big,)))
    assert gm(big)["outputs"][0].tolist() == [3.0] * 4
