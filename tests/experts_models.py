"""Public models with routed experts, unmodified, of one layer, in both implementations that can be captured."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any

import torch
from torch import nn

if importlib.util.find_spec("torchvision"):  # its release asks for a CUDA torch; transformers imports it where it is
    for _name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # defined by another test
            torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "num_experts_per_tok": 2,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 24}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "sliding_window": 4}),
}


def make(name: str, experts: str, router_loss: bool = False) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """``experts``: ``batched_mm`` or ``grouped_mm``; ``router_loss``: with the term that balances experts."""
    import transformers

    prefix, more = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**SIZES, **more, output_router_logits=router_loss)
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).train()
    model.set_experts_implementation(experts)
    ids = torch.randint(3, 64, (8, 6))
    labels = ids.clone()
    labels[0] = -100
    return model, (), {"input_ids": ids, "labels": labels}
