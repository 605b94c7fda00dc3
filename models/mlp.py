"""A multi-layer perceptron for classification: the smallest model that every plan can be shown on.

>>> model, (x, labels), _ = make(layers=3)
>>> model(x, labels).shape
torch.Size([])
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Linears of the given widths with ReLU between; ``[batch, widths[0]]`` to logits ``[batch, widths[-1]]``.

    With ``labels`` ``[batch]`` the mean cross-entropy, in nats.
    """

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(F.relu(x) if index else x)
        return x if labels is None else F.cross_entropy(x, labels)


def make(
    inputs: int = 32, width: int = 64, layers: int = 2, classes: int = 16, batch: int = 8, seed: int = 0
) -> tuple[MLP, tuple[Tensor, Tensor], dict[str, Any]]:
    """A model of ``layers`` linears with random weights, ``x`` ``[batch, inputs]`` and labels ``[batch]``."""
    torch.manual_seed(seed)
    x = torch.randn(batch, inputs, device="cpu")
    labels = torch.randint(classes, (batch,), device="cpu")
    return MLP((inputs, *[width] * (layers - 1), classes)), (x, labels), {}
