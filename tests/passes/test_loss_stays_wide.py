"""A loss in half precision is returned as it was before the last cast."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.build import prepare
from autopar.capture import capture
from autopar.passes import run
from autopar.passes.loss_stays_wide import LOSS_DTYPE, loss_stays_wide
from autopar.passes.spec import check

BEFORE = ("functionalize_mutations", "views_to_reshapes", "drop_noops", "means_to_sums")


class Two(nn.Module):
    """Two means in half precision, scaled and added, and a number that was never wide."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4).bfloat16())

    def forward(self, x: Tensor) -> Any:
        y = x @ self.weight
        return y.square().mean() * 0.5 + F.l1_loss(y, x) - y.amax(), y


def test_text_spec_numbers(tools: Any) -> None:
    x = torch.randn(3, 4).bfloat16()
    gm = run(tools.export(Two(), (x,)), BEFORE)
    before = gm(x)["outputs"]
    after = tools.golden(loss_stays_wide, "loss_stays_wide", gm)
    check(after, "loss_stays_wide")
    loss, y = after(x)["outputs"]
    assert loss.dtype == torch.float32 and after.graph.output_node().meta[LOSS_DTYPE] == torch.bfloat16
    assert torch.allclose(loss, before[0].float(), rtol=2**-7) and torch.equal(y, before[1])


def test_other_losses_stay_as_they_are(tools: Any) -> None:
    class Net(Two):
        def __init__(self, how: Any) -> None:
            super().__init__()
            self.how = how

        def forward(self, x: Tensor) -> Any:
            return self.how(x @ self.weight)

    x = torch.randn(3, 4).bfloat16()
    for how in (lambda y: y.float().mean(), lambda y: y.sum(), lambda y: y.square().mean().relu()):
        gm = run(tools.export(Net(how), (x,)), BEFORE)
        text = str(gm.graph)
        assert str(loss_stays_wide(gm).graph) == text and LOSS_DTYPE not in gm.graph.output_node().meta


def test_the_judge_in_float64_returns_what_it_computes() -> None:
    captured = capture(Two(), (torch.randn(4, 4).bfloat16(),), check=False)
    metas = [prepare(captured, 1, float64=wide).body.graph.output_node().meta.get(LOSS_DTYPE) for wide in (False, True)]
    assert metas == [torch.bfloat16, None]
