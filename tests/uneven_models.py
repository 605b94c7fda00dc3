"""Small models of which nothing divides: five heads, a vocabulary of 13, nine heads of three keys, seven channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Gpt(nn.Module):
    """One layer with fused query, key and value, a gated MLP and a tied head."""

    def __init__(self, vocabulary: int = 13, heads: int = 5, size: int = 4) -> None:
        super().__init__()
        width = heads * size
        self.heads, self.size = heads, size
        self.emb, self.norm = nn.Embedding(vocabulary, width, padding_idx=3), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 14), nn.Linear(7, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        b, s, width = x.shape
        fused = self.qkv(self.norm(x)).split(width, -1)
        q, k, v = (t.view(b, s, self.heads, self.size).transpose(1, 2) for t in fused)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1))
        gate, up = self.up(x).chunk(2, -1)
        logits = self.head(x + self.down(F.silu(gate) * up))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


class Grouped(nn.Module):
    """Attention of more query heads than key heads, with rotary positions; ``fused``: by the attention op itself."""

    def __init__(self, heads: int, keys: int, size: int = 4, *, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.keys, self.size, self.fused = heads, keys, size, fused
        self.q, self.k, self.v = (nn.Linear(10, n * size, bias=False) for n in (heads, keys, keys))
        self.out = nn.Linear(heads * size, 10)
        angles = torch.outer(torch.arange(7.0), torch.tensor([1.0, 0.1])).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.size).transpose(1, 2)

    def _turned(self, x: Tensor) -> Tensor:
        low, high = x[..., : self.size // 2], x[..., self.size // 2 :]
        return x * self.cos + torch.cat([-high, low], -1) * self.sin

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self._turned(self._heads(self.q(x))), self._turned(self._heads(self.k(x))), self._heads(self.v(x))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        else:
            k, v = (t.repeat_interleave(self.heads // self.keys, 1) for t in (k, v))
            mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return F.mse_loss(self.out(mixed.transpose(1, 2).flatten(2)), y)


class Channels(nn.Module):
    """Convolutions, one in five groups, norms over a batch of five and over groups."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.batch = nn.Conv2d(3, 10, 3, padding=1), nn.BatchNorm2d(10)
        self.two, self.group = nn.Conv2d(10, 15, 3, groups=5), nn.GroupNorm(5, 15)
        self.out = nn.Linear(15, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(self.batch(self.one(x)))
        return F.cross_entropy(self.out(F.max_pool2d(self.group(self.two(x)), 2).mean((2, 3))), y)


class Views(nn.Module):
    """Dims that merge and part, are cut out and joined."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 15), nn.Linear(5, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.a(x)).unflatten(-1, (3, 5))
        h = self.b(h).permute(0, 2, 1, 3).flatten(1, 2)
        h = torch.cat([h, h * 2], -1)[..., :9] + h
        return (self.c(h).reshape(x.shape[0], -1, x.shape[1]).sum(1) - y).abs().sum()


def gpt() -> Built:
    ids = torch.randint(0, 13, (4, 7))
    return Gpt(), (ids, ids.roll(1, 1)), {}


def grouped() -> Built:
    return Grouped(9, 3), (torch.randn(5, 7, 10), torch.randn(5, 7, 10)), {}


def few_keys() -> Built:
    return Grouped(6, 3), (torch.randn(4, 7, 10), torch.randn(4, 7, 10)), {}


def repeated_keys() -> Built:
    return Grouped(10, 5, fused=False), (torch.randn(3, 7, 10), torch.randn(3, 7, 10)), {}


def channels() -> Built:
    return Channels(), (torch.randn(5, 3, 6, 6), torch.randint(0, 7, (5,))), {}


def views() -> Built:
    return Views(), (torch.randn(7, 5, 6), torch.randn(7, 5)), {}
