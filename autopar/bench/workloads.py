"""What benchmarks train on this machine: a reference model of some million parameters, and one global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Tensor, ...]]


def gpt(
    layers: int = 4, width: int = 512, vocabulary: int = 8192, rows: int = 4, length: int = 128, tied: bool = True
) -> Made:
    """17 million parameters, 512 tokens, unless said otherwise."""
    from autopar.models.gpt2 import GPT2, GPT2Config

    torch.manual_seed(0)
    config = GPT2Config(vocabulary=vocabulary, positions=length, width=width, layers=layers, heads=8, tied=tied)
    return GPT2(config), _tokens(vocabulary, rows, length)


def llama(layers: int = 4, width: int = 512, vocabulary: int = 4096, rows: int = 4, length: int = 128) -> Made:
    """15 million parameters, 512 tokens, unless said otherwise."""
    from autopar.models.llama import Llama, LlamaConfig

    torch.manual_seed(0)
    hidden = 11 * width // 4
    config = LlamaConfig(vocabulary=vocabulary, width=width, hidden=hidden, layers=layers, heads=8, kv_heads=4)
    return Llama(config), _tokens(vocabulary, rows, length)


def mlp(layers: int = 7, width: int = 1024, rows: int = 512) -> Made:
    """7 million parameters, 512 rows, unless said otherwise."""
    from autopar.models.mlp import make

    model, args, _ = make(inputs=width, width=width, layers=layers, classes=width, batch=rows)
    return model, args


def vit(layers: int = 4, width: int = 512, rows: int = 8) -> Made:
    """13 million parameters, 8 images of 65 tokens, unless said otherwise."""
    from autopar.models.vit import ViT, ViTConfig

    torch.manual_seed(0)
    model = ViT(ViTConfig(image=64, patch=8, width=width, layers=layers, heads=8, classes=256))
    return model, (torch.randn(rows, 3, 64, 64), torch.randint(256, (rows,)))


MODELS: dict[str, Callable[..., Made]] = {"gpt": gpt, "llama": llama, "mlp": mlp, "vit": vit}


def made(name: str, sizes: dict[str, Any]) -> Made:
    """The model and batch of this name."""
    return MODELS[name](**sizes)


def _tokens(vocabulary: int, rows: int, length: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(vocabulary, (rows, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
