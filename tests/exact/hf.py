"""Published models of transformers at their real sizes, on the meta device: to plan and explain, not to run.

``autopar explain tests/exact/hf.py:llama --cluster h100-dgx --nodes 8 --global-batch 512``

Each builder returns (model with its loss, args, kwargs) with example inputs of ``batch`` rows in bf16 (token ids and
labels in int64). ``layers``: 0 for as many as published. Dropout is off unless asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LLAMA = {  # Llama 3 (Grattafiori et al. 2024, table 3): width, width of the MLP, layers, heads
    "8b": (4096, 14336, 32, 32),
    "70b": (8192, 28672, 80, 64),
    "405b": (16384, 53248, 126, 128),
}
VOCABULARY, KV_HEADS, THETA = 128256, 8, 500000.0
GPT = {  # layers, width, heads
    "175b": (96, 12288, 96),  # GPT-3 (Brown et al. 2020, table 2.1)
    "530b": (105, 20480, 128),  # Megatron-Turing NLG (Smith et al. 2022, section 3.1)
}


def llama(
    size: str = "8b", sequence: int = 8192, dtype: str = "bf16", batch: int = 8, layers: int = 0, device: str = "meta"
) -> Built:
    """Llama 3 with its loss; ``input_ids`` and ``labels`` are ``[batch, sequence]``.

    ``size``: a key of `LLAMA`. ``use_cache`` stays at its default.
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
    return _text(LlamaForCausalLM, config, sequence, dtype, batch, device)


def gpt(
    size: str = "175b", sequence: int = 2048, dtype: str = "bf16", batch: int = 8, layers: int = 0, dropout: float = 0.0
) -> Built:
    """The sizes of `GPT` as transformers' GPT-2, whose architecture GPT-3 says it has, with dense attention in every
    layer where GPT-3 alternated it with banded; ``input_ids`` and ``labels`` are ``[batch, sequence]``.

    The vocabulary is GPT-2's 50257 padded to 51200, as Megatron-LM trains these sizes (Narayanan et al. 2021, 5).
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    published, width, heads = GPT[size]
    config = GPT2Config(
        vocab_size=51200,
        n_positions=sequence,
        n_embd=width,
        n_layer=layers or published,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return _text(GPT2LMHeadModel, config, sequence, dtype, batch)


def mixtral(sequence: int = 4096, dtype: str = "bf16", batch: int = 8, layers: int = 0, experts: str = "") -> Built:
    """Mixtral 8x7B (Jiang et al. 2024, table 1) with its loss; ``input_ids`` and ``labels`` are ``[batch, sequence]``.

    ``experts``: transformers' ``experts_implementation``, ``grouped_mm`` by default.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers or 32,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        use_cache=False,
    )
    model, args, kwargs = _text(MixtralForCausalLM, config, sequence, dtype, batch)
    model.set_experts_implementation(experts or "grouped_mm")  # type: ignore[operator]
    return model, args, kwargs


def t5(
    sequence: int = 512, targets: int = 128, dtype: str = "bf16", batch: int = 8, layers: int = 0, dropout: float = 0.0
) -> Built:
    """T5-11B (Raffel et al. 2020, section 3.7; google-t5/t5-11b) with its loss; ``input_ids`` ``[batch, sequence]``,
    ``labels`` ``[batch, targets]``: as in pre-training, whose 114 targets are rounded up.

    ``layers``: of the encoder and of the decoder each.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32128,
        d_model=1024,
        d_kv=128,
        d_ff=65536,
        num_layers=layers or 24,
        num_heads=128,
        dropout_rate=dropout,
        pad_token_id=0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model, args, kwargs = _text(T5ForConditionalGeneration, config, sequence, dtype, batch)
    return model, args, {**kwargs, "labels": torch.zeros(batch, targets, dtype=torch.int64, device="meta")}


def vit(dtype: str = "bf16", batch: int = 8, layers: int = 0) -> Built:
    """A classifier like ViT-22B (Dehghani et al. 2023, table 1): its depth, widths, heads, patches of 14 pixels and
    30,000 classes, as transformers' ViT: attention and MLP one after the other, not side by side, biases everywhere and
    no norm of queries and keys. ``pixel_values`` ``[batch, 3, 224, 224]``, ``labels`` ``[batch]``."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=6144,
        intermediate_size=24576,
        num_hidden_layers=layers or 48,
        num_attention_heads=48,
        image_size=224,
        patch_size=14,
        num_labels=30000,
    )
    return _images(ViTForImageClassification, config, dtype, batch)


def resnet(width: int = 8, dtype: str = "bf16", batch: int = 32) -> Built:
    """ResNet-50 (He et al. 2016, table 1) with ``width`` times the channels in every layer but the first image and the
    classes (Zagoruyko and Komodakis 2016), as transformers' ResNet. ``pixel_values`` ``[batch, 3, 224, 224]``,
    ``labels`` ``[batch]``."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=64 * width,
        hidden_sizes=[256 * width, 512 * width, 1024 * width, 2048 * width],
        depths=[3, 4, 6, 3],
        layer_type="bottleneck",
        num_labels=1000,
    )
    return _images(ResNetForImageClassification, config, dtype, batch)


def _text(kind: Any, config: Any, sequence: int, dtype: str, batch: int, device: str = "meta") -> Built:
    with torch.device(device):
        model = kind(config).to(DTYPES[dtype])
        ids = torch.zeros(batch, sequence, dtype=torch.int64)
    return model.train(), (), {"input_ids": ids, "labels": ids.clone()}


def _images(kind: Any, config: Any, dtype: str, batch: int) -> Built:
    with torch.device("meta"):
        model = kind(config).to(DTYPES[dtype])
        images = torch.zeros(batch, 3, 224, 224, dtype=DTYPES[dtype])
        labels = torch.zeros(batch, dtype=torch.int64)
    return model.train(), (), {"pixel_values": images, "labels": labels}
