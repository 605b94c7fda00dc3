"""Public architectures of no other table: unmodified classes of transformers and timm, tiny, with random weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import zoo
from zoo import CLASSES, GROUPED, HEADS16, LENGTH, ROWS, TEXT, TOKENS, VISION, VOCABULARY, WIDTHS, Built

GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
       "eos_token_id": 2}  # fmt: skip
BERT = {**WIDTHS, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
BART = {"vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "max_position_embeddings": 64, "pad_token_id": 0, "decoder_start_token_id": 2,
        "forced_eos_token_id": 2}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
          "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
          "n_shared_experts": 1}  # fmt: skip

# name -> (class without its suffix, head, settings of its config)
TEXTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "opt": ("OPT", "ForCausalLM", {**BERT, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "gptj": ("GPTJ", "ForCausalLM", {**GPT, "rotary_dim": 8}),
    "codegen": ("CodeGen", "ForCausalLM", {**GPT, "rotary_dim": 8}),
    "gpt_bigcode": ("GPTBigCode", "ForCausalLM", GPT),
    "openai-gpt": ("OpenAIGPT", "OpenAIGPTLMHeadModel", GPT),
    "falcon": ("Falcon", "ForCausalLM", {**TEXT, "multi_query": True, "parallel_attn": True}),
    "mpt": ("Mpt", "ForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": VOCABULARY}),
    "gemma": ("Gemma", "ForCausalLM", HEADS16),
    "gemma2": ("Gemma2", "ForCausalLM", {**HEADS16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "cohere": ("Cohere", "ForCausalLM", GROUPED),
    "qwen3": ("Qwen3", "ForCausalLM", HEADS16),
    "olmo2": ("Olmo2", "ForCausalLM", GROUPED),
    "glm4": ("Glm4", "ForCausalLM", HEADS16),
    "granite": ("Granite", "ForCausalLM", GROUPED),
    "phi": ("Phi", "ForCausalLM", TEXT),
    "nemotron": ("Nemotron", "ForCausalLM", GROUPED),
    "persimmon": ("Persimmon", "ForCausalLM", TEXT),
    "biogpt": ("BioGpt", "ForCausalLM", BERT),
    "xglm": ("XGLM", "ForCausalLM", {"vocab_size": VOCABULARY, "d_model": 64, "ffn_dim": 128, "num_layers": 2,
                                      "attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}),
    "smollm3": ("SmolLM3", "ForCausalLM", GROUPED),
    "diffllama": ("DiffLlama", "ForCausalLM", GROUPED),
    "qwen2_moe": ("Qwen2Moe", "ForCausalLM", {**GROUPED, **EXPERTS, "num_experts": 4,
                                               "shared_expert_intermediate_size": 64}),
    "olmoe": ("Olmoe", "ForCausalLM", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": ("GraniteMoe", "ForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2", "ForCausalLM", {**TEXT, **EXPERTS, **LATENT, "topk_method": "greedy",
                                                    "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3", "ForCausalLM", {**TEXT, **EXPERTS, **LATENT}),
    "mamba2": ("Mamba2", "ForCausalLM", {**TOKENS, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8,
                                          "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8}),
    "recurrent_gemma": ("RecurrentGemma", "ForCausalLM", {**GROUPED, "num_hidden_layers": 3, "lru_width": 64,
                                                          "attention_window_size": 8}),
    "roberta": ("Roberta", "ForMaskedLM", {**BERT, "pad_token_id": 0}),
    "albert": ("Albert", "ForMaskedLM", {**BERT, "embedding_size": 32}),
    "distilbert": ("DistilBert", "ForMaskedLM", {"vocab_size": VOCABULARY, "dim": 64, "hidden_dim": 128, "n_layers": 2,
                                                  "n_heads": 4, "max_position_embeddings": 64}),
    "mpnet": ("MPNet", "ForMaskedLM", {**BERT, "pad_token_id": 0}),
    "esm": ("Esm", "ForMaskedLM", {**BERT, "pad_token_id": 0, "mask_token_id": 3, "position_embedding_type": "rotary"}),
    "convbert": ("ConvBert", "ForMaskedLM", {**BERT, "embedding_size": 64}),
    "deberta": ("Deberta", "ForMaskedLM", {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "squeezebert": ("SqueezeBert", "ForMaskedLM", {**BERT, "embedding_size": 64}),
    "mobilebert": ("MobileBert", "ForMaskedLM", {**BERT, "embedding_size": 32, "intra_bottleneck_size": 32,
                                                  "true_hidden_size": 32, "num_feedforward_networks": 2}),
    "nystromformer": ("Nystromformer", "ForMaskedLM", {**BERT, "num_landmarks": 4, "segment_means_seq_len": LENGTH}),
    "pegasus": ("Pegasus", "ForConditionalGeneration", BART),
    "marian": ("Marian", "MTModel", BART),
    "blenderbot": ("Blenderbot", "ForConditionalGeneration", BART),
}  # fmt: skip

# name -> (class, settings of its config, side of the images)
IMAGES: dict[str, tuple[str, dict[str, Any], int]] = {
    "beit": ("Beit", VISION, 32),
    "deit": ("DeiT", VISION, 32),
    "dinov2": ("Dinov2", VISION, 32),
    "swinv2": ("Swinv2", {"image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4],
                          "window_size": 4}, 32),
    "convnextv2": ("ConvNextV2", {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]}, 64),
    "segformer": ("Segformer", {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
                                "hidden_sizes": [16, 32], "num_attention_heads": [2, 4], "patch_sizes": [7, 3],
                                "strides": [4, 2], "mlp_ratios": [2, 2]}, 32),
    "poolformer": ("PoolFormer", {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]}, 64),
    "pvt": ("Pvt", {"image_size": 64, "hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1],
                    "num_attention_heads": [1, 2, 2, 4]}, 64),
    "regnet": ("RegNet", {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1], "embedding_size": 16,
                          "groups_width": 8}, 64),
}  # fmt: skip

# name -> (settings, side of the images)
TIMM: dict[str, tuple[dict[str, Any], int]] = {
    "ghostnet_100": ({}, 32),
    "resmlp_12_224": ({"img_size": 32}, 32),
    "regnetx_002": ({}, 32),
    "xcit_nano_12_p16_224": ({"img_size": 64, "depth": 2}, 64),
    "repvgg_a0": ({}, 32),
}


def _text(name: str) -> Built:
    family, head, settings = TEXTS[name]
    model = zoo._transformers(family, head, settings)
    both = head in ("ForConditionalGeneration", "MTModel")
    kwargs: dict[str, Any] = {"input_ids": zoo._tokens(), "labels": zoo._labels(12 if both else LENGTH)}
    return model, (), {**kwargs, "use_cache": False} if both else kwargs


def _image(name: str) -> Built:
    family, settings, side = IMAGES[name]
    model = zoo._transformers(family, "ForImageClassification", {**settings, "num_labels": CLASSES})
    return model, (), {"pixel_values": torch.randn(ROWS, 3, side, side), "labels": torch.randint(0, CLASSES, (ROWS,))}


def _timm(name: str) -> Built:
    import timm

    settings, side = TIMM[name]
    return zoo._classifier(timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings), side)


MODELS: dict[str, Callable[[], Built]] = {
    **{name: partial(_text, name) for name in TEXTS},
    **{name: partial(_image, name) for name in IMAGES},
    **{f"timm/{name}": partial(_timm, name) for name in TIMM},
}


def make(name: str) -> Built:
    """Build the model ``name`` of `MODELS` from seed 0, without dropout."""
    zoo.MODELS.update(MODELS)
    return zoo.make(name)
