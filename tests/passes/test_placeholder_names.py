"""Parameters may have names that are no Python names, or that become equal without their dots."""

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster import Cluster


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({"a-b": nn.Linear(4, 4), "0": nn.Linear(4, 4)})
        self.a_b, self.a = nn.Linear(4, 4), nn.Module()
        self.a.b_weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return (self.a_b(x) * self.a.b_weight).pow(2).mean()


@pytest.mark.parametrize("model", [Odd(), nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))], ids=["odd", "digits"])
def test_any_name_can_be_lowered(model):
    loss = None if isinstance(model, Odd) else lambda outputs: outputs.sum()
    parallel = autopar.compile(model, Cluster.local(ranks=1), args=(torch.ones(6, 4),), loss=loss)
    assert sorted(n for n, _ in parallel.named_parameters()) == sorted(n for n, _ in model.named_parameters())
    expected = model(torch.ones(6, 4)) if loss is None else loss(model(torch.ones(6, 4)))
    torch.testing.assert_close(parallel.step(torch.ones(6, 4)), expected.detach())
