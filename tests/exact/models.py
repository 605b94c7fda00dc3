"""The models of the exact tables: public classes, unmodified, tiny, without dropout."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

if importlib.util.find_spec("torchvision"):  # its release asks for a CUDA torch; transformers imports it where it is
    for _name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, _name):
            torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
VOCABULARY, LENGTH, ROWS = 128, 16, 8


def make(name: str) -> Built:
    """Build the model ``name`` of `MODELS` from seed 0."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    return model.train(), args, kwargs


def _text(model: nn.Module, *, labels: Tensor | None = None) -> Built:
    ids = torch.randint(5, VOCABULARY, (ROWS, LENGTH))
    targets = ids.clone() if labels is None else labels
    targets[0, :] = -100  # a row without a valid token
    targets[1, 3:] = -100
    return model, (), {"input_ids": ids, "labels": targets}


def _llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _text(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, use_cache=False,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            )
        )
    )  # fmt: skip


def _gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _text(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=64, use_cache=False,
                bos_token_id=1, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )
        )
    )  # fmt: skip


def _bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    return _text(
        BertForMaskedLM(
            BertConfig(
                vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=4, max_position_embeddings=64, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    )  # fmt: skip


def _t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, use_cache=False,
        )
    )  # fmt: skip
    return _text(model, labels=torch.randint(5, VOCABULARY, (ROWS, 12)))


def _vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=32,
            patch_size=8, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    return model, (), {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.randint(0, 10, (ROWS,))}


class WithLoss(nn.Module):
    """A classifier and the cross entropy of its outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """``images [B, 3, H, W], labels [B]`` -> loss."""
        return nn.functional.cross_entropy(self.model(images), labels)


def _torchvision_resnet18() -> Built:
    from torchvision.models import resnet18

    return WithLoss(resnet18(num_classes=10)), (torch.randn(ROWS, 3, 32, 32), torch.randint(0, 10, (ROWS,))), {}


MODELS: dict[str, Callable[[], Built]] = {
    "hf/llama": _llama,
    "hf/gpt2": _gpt2,
    "hf/bert": _bert,
    "hf/vit": _vit,
    "hf/t5": _t5,
    "tv/resnet18": _torchvision_resnet18,
}
