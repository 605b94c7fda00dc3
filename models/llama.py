"""The Llama family (Touvron et al. 2023, Grattafiori et al. 2024), with the published sizes and parameter names.

As published: RMSNorm, rotary positions on two halves, grouped-query attention, SwiGLU, no biases. Rotary
frequencies are the plain ones of Llama 3; the rescaling of 3.1 for long contexts is left out (it changes no shape).

>>> model, (ids, labels), _ = make(layers=1)
>>> model(ids, labels).shape
torch.Size([])
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of one member of the family; the defaults are those of Llama 3 8B."""

    vocabulary: int = 128256
    width: int = 4096
    hidden: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    theta: float = 500000.0  # base of the rotary frequencies
    epsilon: float = 1e-5
    tied: bool = False  # whether the head is the token embedding
    head: int = 0  # width of a head; 0: the width shared out among the heads
    activation: str = "swiglu"  # or without a gate "relu2", squared as in Nemotron-4, or "gelu"

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.head or self.width // self.heads


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = {
    "tiny": LlamaConfig(vocabulary=256, width=64, hidden=128, layers=2, heads=8, kv_heads=4),
    "llama-2-7b": LlamaConfig(vocabulary=32000, hidden=11008, kv_heads=32, theta=10000.0),
    "llama-2-13b": LlamaConfig(vocabulary=32000, width=5120, hidden=13824, layers=40, heads=40, kv_heads=40, theta=1e4),
    "llama-2-70b": LlamaConfig(vocabulary=32000, width=8192, hidden=28672, layers=80, heads=64, theta=10000.0),
    "llama-3.2-1b": LlamaConfig(width=2048, hidden=8192, layers=16, tied=True),
    "llama-3.2-3b": LlamaConfig(width=3072, hidden=8192, layers=28, heads=24, tied=True),
    "llama-3-8b": LlamaConfig(),
    "llama-3-70b": LlamaConfig(width=8192, hidden=28672, layers=80, heads=64),
    "llama-3-405b": LlamaConfig(width=16384, hidden=53248, layers=126, heads=128),
}


class RMSNorm(nn.Module):
    """Divides by the root of the mean square over the last dim, in float32, then scales; any shape to the same."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


def rotary(sequence: int, head: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[sequence, head]``; the two halves of the last dim turn by the same angles."""
    frequencies = theta ** (-torch.arange(0, head, 2, device=device, dtype=torch.float32) / head)
    angles = torch.arange(sequence, device=device, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``[batch, heads, sequence, head]`` by the angles of `rotary`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention; ``[batch, sequence, width]`` to the same."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head = config.head_width
        self.grouped = config.kv_heads != config.heads
        self.q_proj = nn.Linear(config.width, config.heads * self.head, bias=False)
        self.k_proj = nn.Linear(config.width, config.kv_heads * self.head, bias=False)
        self.v_proj = nn.Linear(config.width, config.kv_heads * self.head, bias=False)
        self.o_proj = nn.Linear(config.heads * self.head, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (
            project(x).view(batch, sequence, -1, self.head).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o_proj(y.transpose(1, 2).reshape(batch, sequence, -1))


class MLP(nn.Module):
    """SwiGLU, or two linears around a squared ReLU or a GELU; ``[batch, sequence, width]`` to the same."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gated, self.smooth = config.activation == "swiglu", config.activation == "gelu"
        if self.gated:
            self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        x = self.up_proj(x)
        return self.down_proj(F.gelu(x) if self.smooth else F.relu(x).square())


class Layer(nn.Module):
    """One layer; ``[batch, sequence, width]`` to the same."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and the last norm; ids ``[batch, sequence]`` to ``[batch, sequence, width]``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.epsilon)

    def forward(self, ids: Tensor) -> Tensor:
        cos, sin = rotary(ids.shape[1], self.config.head_width, self.config.theta, ids.device)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Llama(nn.Module):
    """Ids ``[batch, sequence]`` to logits ``[batch, sequence, vocabulary]``.

    With ``labels`` ``[batch, sequence]`` (the token that follows each position; -100 where none counts) the mean
    cross-entropy per label, in nats.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.lm_head(self.model(ids))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make(
    size: str = "tiny",
    layers: int = 0,
    batch: int = 8,
    sequence: int = 16,
    seed: int = 0,
    dtype: str = "fp32",
    meta: bool = False,
) -> tuple[Llama, tuple[Tensor, Tensor], dict[str, Any]]:
    """A model with random weights, and ids and labels ``[batch, sequence]``.

    ``size``: a key of `SIZES`; ``layers``: 0 for as many as published. ``dtype``: a key of `DTYPES`.
    ``meta``: on the meta device, without values: for models that are planned, not run.
    """
    config = SIZES[size]
    config = replace(config, layers=layers or config.layers)
    torch.manual_seed(seed)
    tokens = torch.randint(config.vocabulary, (batch, sequence + 1), device="meta" if meta else "cpu")
    with torch.device("meta") if meta else nullcontext():
        model = Llama(config).to(DTYPES[dtype])
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), {}
