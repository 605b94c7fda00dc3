"""Models that pipelines find hard: long skips, a head tied to the embedding, a loss that is not linear in the batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
ROWS = 8


class Block(nn.Module):
    """Convolution, GroupNorm, SiLU, dropout."""

    def __init__(self, given: int, width: int, chance: float) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(given, width, 3, padding=1), nn.GroupNorm(4, width)
        self.dropout = nn.Dropout(chance)

    def forward(self, x: Tensor) -> Tensor:
        """``x [B, given, H, W]`` -> ``[B, width, H, W]``."""
        return self.dropout(F.silu(self.norm(self.conv(x))))


class UNet(nn.Module):
    """The first scale down skips to the last scale up, over all stages between."""

    def __init__(self, width: int = 8, scales: int = 3, chance: float = 0.0) -> None:
        super().__init__()
        widths = [width * (i + 1) for i in range(scales)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Block(a, b, chance) for a, b in zip([width, *widths], widths, strict=False))
        self.middle = Block(widths[-1], widths[-1], chance)
        after = [*widths[-2::-1], width]
        self.up = nn.ModuleList(Block(2 * w, a, chance) for w, a in zip(reversed(widths), after, strict=True))
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """``x, target [B, 3, H, W]`` -> loss; H and W divide by ``2 ** scales``."""
        x, skips = self.stem(x), []
        for step in self.down:
            skips.append(step(x))
            x = F.avg_pool2d(skips[-1], 2)
        x = self.middle(x)
        for step in self.up:
            x = step(torch.cat([skips.pop(), F.interpolate(x, scale_factor=2.0)], 1))
        return F.mse_loss(self.out(x), target)


def unet(chance: float = 0.0, rows: int = ROWS, scales: int = 3) -> Built:
    """Small, from seed 0. ``chance``: to drop."""
    torch.manual_seed(0)
    return UNet(scales=scales, chance=chance), (torch.randn(rows, 3, 8, 8), torch.randn(rows, 3, 8, 8)), {}


class Tied(nn.Module):
    """Residual layers between an embedding and the same matrix as a head; each of them reads the mask of the ids."""

    def __init__(self, layers: int = 3, width: int = 8, vocabulary: int = 16, chance: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(chance)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """``ids, labels [B, n]`` -> loss, logits and the first hidden state."""
        there = (ids > 0).unsqueeze(-1)
        first = x = self.embed(ids) + 0.1 * torch.arange(ids.shape[1]).unsqueeze(-1)
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x))) * there
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "first": first}


def tied(chance: float = 0.0, rows: int = ROWS, frozen: bool = False) -> Built:
    """Small, from seed 0. ``frozen``: the embedding, and with it the head, and the first layer do not train."""
    torch.manual_seed(0)
    model = Tied(chance=chance)
    if frozen:
        for part in (model.embed, model.layers[0]):
            part.requires_grad_(False)
    ids, labels = (torch.randint(16, (rows, 4)) for _ in range(2))
    return model, (ids, labels), {}


class Routed(nn.Module):
    """Layers with two halves that a router mixes, and a loss that wants both used alike over the whole batch."""

    def __init__(self, layers: int = 2, width: int = 8, chance: float = 0.0) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(width, 2) for _ in range(layers))
        self.halves = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.dropout = nn.Dropout(chance)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """``x [B, n, width], labels [B, n]`` -> loss, balance and logits."""
        chosen = []
        for router, halves in zip(self.routers, self.halves, strict=True):
            chosen.append(router(x).softmax(-1))
            made = torch.tanh(halves(x)).unflatten(-1, (2, -1))
            x = x + self.dropout((made * chosen[-1].unsqueeze(-1)).sum(-2))
        every = torch.stack(chosen).flatten(1, 2)  # [layers, tokens of the batch, 2]
        shares = every.mean(1)
        balance = (shares * shares).sum() + 0.1 * every.logsumexp(1).sum()
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + balance
        return {"loss": loss, "balance": balance, "logits": logits}


def routed(chance: float = 0.0, rows: int = ROWS) -> Built:
    """Small, from seed 0."""
    torch.manual_seed(0)
    return Routed(chance=chance), (torch.randn(rows, 4, 8), torch.randint(4, (rows, 4))), {}
