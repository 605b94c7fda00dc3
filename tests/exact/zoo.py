"""Public models that nobody tuned rules for: unmodified classes of transformers, timm, torchvision and torch, tiny."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

for _name in ("nms", "qnms"):  # torchvision's release asks for a CUDA torch; timm imports torchvision
    if importlib.util.find_spec("torchvision") and not hasattr(torch.ops.torchvision, _name):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
ROWS, LENGTH, VOCABULARY, CLASSES = 8, 16, 128, 10
IGNORED = -100  # torch's label that counts for nothing

TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TEXT = {**TOKENS, **WIDTHS, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2}
HEADS16 = {**GROUPED, "head_dim": 16}
T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
VISION = {**WIDTHS, "image_size": 32, "patch_size": 8}

# name -> (class without its suffix and what is trained of it, settings of its config)
LANGUAGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", GROUPED),
    "llama_tied": ("Llama", "ForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "mistral": ("Mistral", "ForCausalLM", {**GROUPED, "sliding_window": 8}),
    "qwen2": ("Qwen2", "ForCausalLM", GROUPED),
    "gemma3_text": (
        "Gemma3Text",
        "Gemma3ForCausalLM",
        {**HEADS16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
    "phi3": ("Phi3", "ForCausalLM", GROUPED),
    "olmo": ("Olmo", "ForCausalLM", GROUPED),
    "stablelm": ("StableLm", "ForCausalLM", GROUPED),
    "starcoder2": ("Starcoder2", "ForCausalLM", GROUPED),
    "gpt2": (
        "GPT2",
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
         "eos_token_id": 2},
    ),
    "gpt_neo": (
        "GPTNeo",
        "ForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "window_size": 8,
         "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64, "bos_token_id": 1,
         "eos_token_id": 2},
    ),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", TEXT),
    "bloom": (
        "Bloom",
        "ForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "mixtral": ("Mixtral", "ForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        "ForCausalLM",
        {**HEADS16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt_oss": (
        "GptOss",
        "ForCausalLM",
        {**HEADS16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "mamba": ("Mamba", "ForCausalLM", {**TOKENS, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
    "rwkv": (
        "Rwkv",
        "ForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 128,
         "num_hidden_layers": 2, "context_length": 64, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "bert": ("Bert", "ForMaskedLM", {**WIDTHS, "vocab_size": VOCABULARY, "max_position_embeddings": 64}),
    "modernbert": (
        "ModernBert",
        "ForMaskedLM",
        {**TEXT, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8},
    ),
    "electra": (
        "Electra",
        "ForMaskedLM",
        {**WIDTHS, "vocab_size": VOCABULARY, "embedding_size": 32, "max_position_embeddings": 64},
    ),
    "deberta_v2": (
        "DebertaV2",
        "ForMaskedLM",
        {**WIDTHS, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "relative_attention": True,
         "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    ),
    "fnet": (
        "FNet",
        "ForMaskedLM",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "max_position_embeddings": 64},
    ),
    "longformer": (
        "Longformer",
        "ForMaskedLM",
        {**WIDTHS, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "attention_window": 8},
    ),
    "switch_transformers": (
        "SwitchTransformers",
        "ForConditionalGeneration",
        {**T5, "num_sparse_encoder_layers": 1, "num_decoder_layers": 2, "num_sparse_decoder_layers": 1,
         "num_experts": 4},
    ),
    "t5": ("T5", "ForConditionalGeneration", T5),
    "mt5": ("MT5", "ForConditionalGeneration", T5),
    "bart": (
        "Bart",
        "ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128,
         "decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "max_position_embeddings": 64},
    ),
}  # fmt: skip
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")  # each also with experts as batched matmuls, ``NAME+batched_mm``

# name -> (class, settings of its config, side of the images)
IMAGES: dict[str, tuple[str, dict[str, Any], int]] = {
    "vit": ("ViT", VISION, 32),
    "swin": ("Swin", {"image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4],
                      "window_size": 4}, 32),
    "convnext": ("ConvNext", {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]}, 64),
}  # fmt: skip

# name -> (settings, side of the images)
TIMM: dict[str, tuple[dict[str, Any], int]] = {
    "resnet50": ({}, 32),
    "vit_tiny_patch16_224": ({"img_size": 32, "depth": 2}, 32),
    "deit_tiny_patch16_224": ({"img_size": 32, "depth": 2}, 32),
    "convnext_tiny": ({"depths": (1, 1, 2, 1), "dims": (24, 48, 48, 48)}, 32),
    "mixer_s32_224": ({"img_size": 64}, 64),
    "efficientnet_b0": ({}, 32),
    "mobilenetv3_large_100": ({}, 32),
}
TORCHVISION = {"resnet18": 32, "wide_resnet50_2": 32, "vgg11_bn": 32, "mobilenet_v2": 32, "swin_t": 64,
               "convnext_tiny": 32, "densenet121": 32}  # fmt: skip


class WithLoss(nn.Module):
    """A model and its own loss, or else the mean square of every output that has a gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss, ``[]``."""
        out = self.model(*args, **kwargs)
        own = out.get("loss") if isinstance(out, dict) else None
        if own is not None:
            return own
        floats = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
        return sum((t.square().mean() for t in floats[1:]), floats[0].square().mean())


class Classifier(nn.Module):
    """A classifier of images and the cross entropy of its outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """``images [B, 3, H, W], labels [B]`` -> loss."""
        return nn.functional.cross_entropy(self.model(images), labels)


def make(name: str, dropout: str = "off") -> Built:
    """Build the model ``name`` of `MODELS` from seed 0; ``dropout``: ``on`` leaves it as the library has it."""
    torch.manual_seed(0)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model, args, kwargs = MODELS[name]()
    model.train()
    if dropout == "off":
        for owner, attribute, _ in probabilities(model):
            setattr(owner, attribute, 0.0)
    return model, args, kwargs


def probabilities(model: nn.Module) -> Iterator[tuple[Any, str, float]]:
    """(owner, attribute, value) of every probability to drop that is above zero, of modules and of their configs."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        owners[id(module)] = module
        for config in _configs(getattr(module, "config", None)):
            owners[id(config)] = config
    for owner in owners.values():
        for key, value in list(vars(owner).items()):
            named = "drop" in key.lower() or (key == "p" and "drop" in type(owner).__name__.lower())
            chance = named or (key == "p" and "depth" in type(owner).__name__.lower())
            if chance and isinstance(value, float) and value > 0:
                yield owner, key, value


def _configs(config: Any) -> Iterator[Any]:
    if hasattr(config, "to_dict") and hasattr(config, "__dict__"):
        yield config
        for inner in list(vars(config).values()):
            yield from _configs(inner) if inner is not config else ()


def _tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(5, VOCABULARY, (ROWS, length))


def _labels(length: int = LENGTH) -> Tensor:
    labels = _tokens(length)
    labels[0, :], labels[1, 3:] = IGNORED, IGNORED  # a row without a valid token, and one with few
    return labels


def _transformers(family: str, head: str, settings: dict[str, Any]) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{family}Config")(**settings)
    config.use_cache = False
    model: nn.Module = getattr(transformers, head if head.startswith(family.removesuffix("Text")) else family + head)(
        config
    )
    return model


def _language(name: str, experts: str = "") -> Built:
    family, head, settings = LANGUAGE[name]
    model = _transformers(family, head, settings)
    if experts:
        model.set_experts_implementation(experts)  # type: ignore[operator]
    both = head == "ForConditionalGeneration"
    kwargs: dict[str, Any] = {"input_ids": _tokens(), "labels": _labels(12 if both else LENGTH)}
    return model, (), {**kwargs, "use_cache": False} if both else kwargs


def _images(name: str) -> Built:
    family, settings, side = IMAGES[name]
    model = _transformers(family, "ForImageClassification", {**settings, "num_labels": CLASSES})
    labels = torch.randint(0, CLASSES, (ROWS,))
    return model, (), {"pixel_values": torch.randn(ROWS, 3, side, side), "labels": labels}


def _siglip() -> Built:
    text = {**TEXT, "max_position_embeddings": LENGTH}
    model = _transformers("Siglip", "Model", {"text_config": text, "vision_config": VISION})
    images = torch.randn(ROWS, 3, 32, 32)
    return model, (), {"input_ids": _tokens(), "pixel_values": images, "return_loss": True}


def _llava() -> Built:
    vision = {"model_type": "clip_vision_model", **VISION}
    settings = {
        "vision_config": vision, "text_config": {"model_type": "llama", **GROUPED}, "image_token_index": 4,
        "image_token_id": 4, "vision_feature_layer": -1,
    }  # fmt: skip
    model = _transformers("Llava", "ForConditionalGeneration", settings)
    ids = torch.cat([torch.full((ROWS, 16), 4), _tokens(8)], 1)
    images = torch.randn(ROWS, 3, 32, 32)
    inputs = {"input_ids": ids, "pixel_values": images, "labels": ids.clone(), "use_cache": False}
    return model, (), inputs


def _qwen2_vl() -> Built:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    settings = {
        "vision_config": {**vision, "spatial_merge_size": 2, "temporal_patch_size": 2},
        "text_config": {**GROUPED, "rope_parameters": rope},
        "image_token_id": 4, "video_token_id": 3, "vision_start_token_id": 5, "vision_end_token_id": 6,
    }  # fmt: skip
    model = _transformers("Qwen2VL", "ForConditionalGeneration", settings)
    ids = _tokens(12)
    ids[:, 2], ids[:, 3:7] = 5, 4
    inputs = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == 4).long(),
        "pixel_values": torch.randn(ROWS * 16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
        "labels": ids.clone(), "use_cache": False,
    }  # fmt: skip
    return model, (), inputs


def _wav2vec2() -> Built:
    settings = {
        **WIDTHS, "vocab_size": 32, "conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 4),
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0,
        "mask_feature_prob": 0.0, "ctc_zero_infinity": True,
    }  # fmt: skip
    labels = torch.randint(1, 31, (ROWS, 6))
    labels[1, 3:] = IGNORED
    return (
        _transformers("Wav2Vec2", "ForCTC", settings),
        (),
        {"input_values": torch.randn(ROWS, 1600), "labels": labels},
    )


def _detr() -> Built:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1] * 4, layer_type="basic", out_features=["stage4"]
    )
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder")
             for what, n in (("layers", 1), ("ffn_dim", 64), ("attention_heads", 4))}  # fmt: skip
    settings = {
        **sizes, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
        "backbone_config": backbone, "d_model": 32, "num_queries": 5, "num_labels": 4,
    }  # fmt: skip
    model = _transformers("Detr", "ForObjectDetection", settings)
    return WithLoss(model), (), {"pixel_values": torch.randn(ROWS, 3, 64, 64)}  # its own loss calls scipy


def _classifier(model: nn.Module, side: int) -> Built:
    return Classifier(model), (torch.randn(ROWS, 3, side, side), torch.randint(0, CLASSES, (ROWS,))), {}


def _timm(name: str) -> Built:
    import timm

    settings, side = TIMM[name]
    return _classifier(timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings), side)


def _torchvision(name: str) -> Built:
    import torchvision

    return _classifier(getattr(torchvision.models, name)(weights=None, num_classes=CLASSES), TORCHVISION[name])


def _torchvision_vit() -> Built:
    from torchvision.models.vision_transformer import VisionTransformer

    return _classifier(VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=CLASSES), 32)


def _transformer() -> Built:
    model = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(12)
    sequences = (torch.randn(ROWS, LENGTH, 64), torch.randn(ROWS, 12, 64))
    return WithLoss(model), sequences, {"tgt_mask": mask, "tgt_is_causal": True}


def _encoder() -> Built:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
    return WithLoss(model), (torch.randn(ROWS, LENGTH, 64),), {}


def _lstm() -> Built:
    return WithLoss(nn.LSTM(32, 64, 2, batch_first=True)), (torch.randn(ROWS, LENGTH, 32),), {}


MODELS: dict[str, Callable[[], Built]] = {
    **{name: lambda name=name: _language(name) for name in LANGUAGE},
    **{f"{name}+batched_mm": lambda name=name: _language(name, "batched_mm") for name in EXPERTS},
    **{name: lambda name=name: _images(name) for name in IMAGES},
    "siglip": _siglip,
    "llava": _llava,
    "qwen2_vl": _qwen2_vl,
    "wav2vec2": _wav2vec2,
    "detr": _detr,
    **{f"timm/{name}": lambda name=name: _timm(name) for name in TIMM},
    **{f"tv/{name}": lambda name=name: _torchvision(name) for name in TORCHVISION},
    "tv/vit": _torchvision_vit,
    "nn.Transformer": _transformer,
    "nn.TransformerEncoder": _encoder,
    "nn.LSTM": _lstm,
}
