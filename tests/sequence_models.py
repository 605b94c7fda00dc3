"""Small models whose sequence is cut: masks, shifts, counts, odd lengths. Factories, by FILE:name."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Given = tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]


class Block(nn.Module):
    """Causal attention over an own table of positions, grouped heads, a loss of the next token."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, 8), nn.Parameter(torch.randn(length, 8))
        self.norm, self.qkv, self.head = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places
        q, k, v = self.qkv(self.norm(x)).split((8, 4, 4), -1)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        logits = self.head(x + mixed.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits[:, :-1].reshape(-1, 16), ids[:, 1:].reshape(-1))


class Padded(nn.Module):
    """A sliding window, padding, and a diagonal that always passes, as one mask; rows listed before a product."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.qkv = nn.Embedding(16, 8), nn.Linear(8, 24)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16))

    def forward(self, ids: Tensor, keep: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        x = self.tokens(ids) + self.tokens(places)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        window = (places <= places[:, None]) & (places > places[:, None] - 3)
        mask = (window & keep[:, None, None]) | torch.eye(ids.shape[1], dtype=torch.bool)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        logits = torch.addmm(self.bias, x.view(-1, 8), self.weight).view(*ids.shape, 16)
        return F.cross_entropy(logits.transpose(1, 2), labels)


class Counted(nn.Module):
    """Ops that read along the sequence, between some that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.up(x)).cumsum(1)
        h = h - F.pad(h, (0, 0, 1, 0))[:, :-1] * 0.5
        h = h * torch.arange(x.shape[1], dtype=x.dtype).cos()[:, None]
        band = torch.ones(x.shape[1], x.shape[1]).tril().triu(-2)
        return F.mse_loss(self.down((band / band.sum(-1, keepdim=True)) @ h).diff(dim=1), y[:, 1:])


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.conv(x).relu().mean((2, 3))), y)


def block(length: int = 8) -> Given:
    torch.manual_seed(0)
    return Block(length), (torch.randint(16, (4, length)),), {}


def odd() -> Given:
    return block(7)


def padded() -> Given:
    torch.manual_seed(0)
    keep = torch.arange(8) < torch.tensor([8, 5, 3, 6])[:, None]
    return Padded(), (torch.randint(16, (4, 8)), keep, torch.randint(16, (4, 8))), {}


def counted() -> Given:
    torch.manual_seed(0)
    return Counted(), (torch.randn(4, 8, 6), torch.randn(4, 8, 6)), {}


def listed() -> Given:
    """Rows without a batch of their own: they are the sequence."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return Loss(model), (torch.randn(8, 6), torch.randn(8, 1)), {}


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)


class Listed(nn.Module):
    """Products of all tokens in one list, with an op between that reads the list."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 12), nn.Linear(12, 16)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.relu(self.up(self.tokens(ids).view(-1, 8)))
        h = h / h.detach().sum(0).add(1)
        return F.cross_entropy(self.down(h), ids.view(-1))


def tokens_listed() -> Given:
    torch.manual_seed(0)
    return Listed(), (torch.randint(16, (4, 8)),), {}


def pixels() -> Given:
    torch.manual_seed(0)
    return Pixels(), (torch.randn(4, 3, 8, 8), torch.randint(5, (4,))), {}
