"""The GPT-2 family (Radford et al. 2019), with the parameter names and sizes of the published checkpoints.

As published: pre-norm blocks, one fused query-key-value projection, learned positions, tanh GELU, a head tied to the
token embedding. Dropout is off unless asked for, and never on attention's probabilities. Linears store ``[out, in]``
where the checkpoints' ``Conv1D`` stores ``[in, out]``.

>>> model, (ids, labels), _ = make(layers=1)
>>> model(ids, labels).shape
torch.Size([])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of one member of the family; the defaults are those of ``gpt2``."""

    vocabulary: int = 50257
    positions: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12
    head: int = 0  # width of a head; 0: the width shared out among the heads
    hidden: int = 0  # width inside the MLP; 0: four times the width
    activation: str = "gelu"  # a key of `ACTIVATIONS`
    dropout: float = 0.0  # of the embeddings and of what attention and MLP add
    tied: bool = True  # whether the head is the token embedding


SIZES = {
    "tiny": GPT2Config(vocabulary=256, positions=64, width=64, layers=2, heads=8),
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(width=1024, layers=24, heads=16),
    "gpt2-large": GPT2Config(width=1280, layers=36, heads=20),
    "gpt2-xl": GPT2Config(width=1600, layers=48, heads=25),
}


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


class Attention(nn.Module):
    """Causal self-attention; ``[batch, sequence, width]`` to the same."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.heads, self.head = config.heads, config.head or config.width // config.heads
        self.c_attn = nn.Linear(config.width, 3 * self.heads * self.head)
        self.c_proj = nn.Linear(self.heads * self.head, config.width)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = self.c_attn(x).split(self.heads * self.head, dim=2)
        q, k, v = (t.view(batch, sequence, self.heads, self.head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.c_proj(y.transpose(1, 2).reshape(batch, sequence, -1)))


class MLP(nn.Module):
    """Two linears around the activation; ``[batch, sequence, width]`` to the same."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        hidden = config.hidden or 4 * config.width
        self.c_fc = nn.Linear(config.width, hidden)
        self.c_proj = nn.Linear(hidden, config.width)
        self.activation = config.activation
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(ACTIVATIONS[self.activation](self.c_fc(x))))


class Block(nn.Module):
    """One layer; ``[batch, sequence, width]`` to the same."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Embeddings, blocks and the last norm; ids ``[batch, sequence]`` to ``[batch, sequence, width]``."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.positions, config.width)
        self.drop = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class GPT2(nn.Module):
    """Ids ``[batch, sequence]`` to logits ``[batch, sequence, vocabulary]``.

    With ``labels`` ``[batch, sequence]`` (the token that follows each position; -100 where none counts) the mean
    cross-entropy per label, in nats.
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.lm_head.weight = self.transformer.wte.weight
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.lm_head(self.transformer(ids))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def make(
    size: str = "tiny", layers: int = 0, batch: int = 8, sequence: int = 16, seed: int = 0
) -> tuple[GPT2, tuple[Tensor, Tensor], dict[str, Any]]:
    """A model with random weights, and ids and labels ``[batch, sequence]``.

    ``size``: a key of `SIZES`; ``layers``: 0 for as many as published.
    """
    config = SIZES[size]
    config = replace(config, layers=layers or config.layers)
    torch.manual_seed(seed)
    tokens = torch.randint(config.vocabulary, (batch, sequence + 1), device="cpu")
    return GPT2(config), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), {}
