"""What depends on no parameter: decided after the rest."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.choosing.solve import solve_plan
from autopar.cluster import Cluster


class Masked(nn.Module):
    """The mask and the weights of its rows depend on no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """``x [B, 6]`` -> loss."""
        keep = (x > 0).to(x.dtype)
        return (self.fc(x) * keep / keep.sum(-1, keepdim=True).clamp(min=1.0)).square().mean()


def test_a_mesh_without_axes_has_nothing_to_choose() -> None:
    captured = capture(Masked(), (torch.randn(4, 6),), {})
    plan = solve_plan(captured, Cluster.local(ranks=1))
    assert (plan.one_line(), plan.fits) == ("dp=1 on 1 rank", True)
