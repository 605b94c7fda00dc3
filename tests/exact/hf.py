"""Published models of transformers at their real sizes, on the meta device: to plan and explain, not to run.

``autopar explain tests/exact/hf.py:llama --cluster h100-dgx --nodes 8 --global-batch 512``
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LLAMA = {  # Llama 3 (Grattafiori et al. 2024, table 3): width, width of the MLP, layers, heads
    "8b": (4096, 14336, 32, 32),
    "70b": (8192, 28672, 80, 64),
    "405b": (16384, 53248, 126, 128),
}
VOCABULARY, KV_HEADS, THETA = 128256, 8, 500000.0


def llama(
    size: str = "8b", sequence: int = 8192, dtype: str = "bf16", batch: int = 8, layers: int = 0, device: str = "meta"
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Llama 3 with its loss; ``input_ids`` and ``labels`` are ``[batch, sequence]``.

    ``size``: a key of `LLAMA`; ``layers``: 0 for as many as published. ``use_cache`` stays at its default.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    width, hidden, published, heads = LLAMA[size]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers or published,
        num_attention_heads=heads,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=False,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(DTYPES[dtype])
        ids = torch.zeros(batch, sequence, dtype=torch.int64)
    return model.train(), (), {"input_ids": ids, "labels": ids.clone()}
