"""The Vision Transformer family (Dosovitskiy et al. 2021), with the published sizes and the parameter names of timm.

As published: patches by a strided convolution, a class token, learned positions, pre-norm blocks with one fused
query-key-value projection and exact GELU, a linear head on the class token. Left out: dropout.

>>> model, (images, labels), _ = make(layers=1)
>>> model(images, labels).shape
torch.Size([])
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of one member of the family; the defaults are those of ViT-B/16. ``image`` and ``patch`` in pixels."""

    image: int = 224
    patch: int = 16
    width: int = 768
    layers: int = 12
    heads: int = 12
    classes: int = 1000


SIZES = {
    "tiny": ViTConfig(image=16, patch=4, width=64, layers=2, heads=8, classes=16),
    "vit-s-16": ViTConfig(width=384, heads=6),
    "vit-b-16": ViTConfig(),
    "vit-l-16": ViTConfig(width=1024, layers=24, heads=16),
    "vit-h-14": ViTConfig(patch=14, width=1280, layers=32, heads=16),
}


class Attention(nn.Module):
    """Self-attention over all tokens; ``[batch, tokens, width]`` to the same."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    """Two linears around a GELU; ``[batch, tokens, width]`` to the same."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, 4 * config.width)
        self.fc2 = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """One layer; ``[batch, tokens, width]`` to the same."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=1e-6)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=1e-6)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    """``[batch, 3, image, image]`` to ``[batch, (image / patch) ** 2, width]``."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.width, kernel_size=config.patch, stride=config.patch)

    def forward(self, images: Tensor) -> Tensor:
        patches: Tensor = self.proj(images)
        return patches.flatten(2).transpose(1, 2)


class ViT(nn.Module):
    """Images ``[batch, 3, image, image]`` to logits ``[batch, classes]``.

    With ``labels`` ``[batch]`` the mean cross-entropy, in nats.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        tokens = 1 + (config.image // config.patch) ** 2
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, config.width))
        nn.init.normal_(self.pos_embed, std=0.02)
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        patches = self.patch_embed(images)
        x = torch.cat((self.cls_token.expand(patches.shape[0], -1, -1), patches), dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits if labels is None else F.cross_entropy(logits, labels)


def make(
    size: str = "tiny", layers: int = 0, batch: int = 8, seed: int = 0
) -> tuple[ViT, tuple[Tensor, Tensor], dict[str, Any]]:
    """A model with random weights, images ``[batch, 3, image, image]`` and labels ``[batch]``.

    ``size``: a key of `SIZES`; ``layers``: 0 for as many as published.
    """
    config = SIZES[size]
    config = replace(config, layers=layers or config.layers)
    torch.manual_seed(seed)
    images = torch.randn(batch, 3, config.image, config.image, device="cpu")
    labels = torch.randint(config.classes, (batch,), device="cpu")
    return ViT(config), (images, labels), {}
