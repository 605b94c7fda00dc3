"""PREPARE as a whole: public models and small ones, captured, pass by pass against the spec, and equal in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture, double, run_graph, to_float64
from autopar.passes import PREPARE, run
from autopar.passes.facts import annotate
from autopar.passes.spec import check
from autopar.passes.split_prologue import copy_graph

aten, ops = torch.ops.aten, torch.ops.autopar
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
Given = tuple[nn.Module, dict[str, Tensor]]


def _transformers() -> Any:
    """The package, which imports torchvision where it is installed; that fails beside a torch it was not built for."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return pytest.importorskip("transformers")


def _language(name: tuple[str, str], **sizes: Any) -> Given:
    transformers = _transformers()
    config = getattr(transformers, name[0])(**{"use_cache": False, **sizes})
    ids = torch.randint(3, 64, (3, 12))
    labels = ids.clone()
    labels[1, 4:] = -100
    return getattr(transformers, name[1])(config), {"input_ids": ids, "labels": labels}


def llama() -> Given:
    return _language(("LlamaConfig", "LlamaForCausalLM"), **SMALL, num_key_value_heads=2)


def mistral() -> Given:
    sizes = {**SMALL, "num_key_value_heads": 2, "sliding_window": 5}
    return _language(("MistralConfig", "MistralForCausalLM"), **sizes)


def gpt2() -> Given:
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return _language(
        ("GPT2Config", "GPT2LMHeadModel"), vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16, **off
    )


def llama_with_cache() -> Given:
    return _language(("LlamaConfig", "LlamaForCausalLM"), **SMALL, num_key_value_heads=2, use_cache=True)


def bert() -> Given:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model, kwargs = _language(("BertConfig", "BertForMaskedLM"), **SMALL, **off)
    return model, kwargs


def t5() -> Given:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model, kwargs = _language(
        ("T5Config", "T5ForConditionalGeneration"), **sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0
    )
    return model, kwargs


def vit() -> Given:
    transformers = _transformers()
    sizes = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, **off, image_size=16, patch_size=8, num_labels=5)
    )
    return model, {"pixel_values": torch.randn(3, 3, 16, 16), "labels": torch.tensor([1, 4, 0])}


class Conv(nn.Module):
    """Batch norm, in-place relu, a residual added in place, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.first, self.second = nn.BatchNorm2d(8), nn.BatchNorm2d(8, momentum=None)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = F.relu(self.first(self.stem(x)), inplace=True)
        y = self.second(self.body(h))
        y += h
        y = F.adaptive_avg_pool2d(F.max_pool2d(y.relu_(), 2), 1)
        return F.cross_entropy(self.head(torch.flatten(y, 1)), labels, label_smoothing=0.1)


def conv() -> Given:
    return Conv(), {"x": torch.randn(4, 3, 10, 10), "labels": torch.tensor([1, 4, 0, 2])}


def _run(gm: torch.fx.GraphModule, inputs: tuple[Tensor, ...], attributes: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss, other outputs, gradients and buffers by name; the attributes are not changed."""
    held = {
        k: v.detach().clone().requires_grad_(v.requires_grad) if not v.requires_grad else v
        for k, v in attributes.items()
    }
    found = run_graph(gm, inputs, held)
    wanted = {k: v for k, v in held.items() if v.requires_grad}
    grads = torch.autograd.grad(found["outputs"][0], list(wanted.values()), allow_unused=True)
    out = {f"output {i}": o.detach() for i, o in enumerate(found["outputs"])}
    out |= {f"gradient {k}": g for k, g in zip(wanted, grads) if g is not None}
    out |= {f"buffer {k}": found["buffers"].get(k, v).detach() for k, v in held.items() if not v.requires_grad}
    return out


def _compare(found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float) -> None:
    assert found.keys() == wanted.keys()
    floor = 1e-3 * max(float(v.abs().max()) for k, v in wanted.items() if k.startswith("gradient"))
    wanted = {k: v for k, v in wanted.items() if v.numel()}
    for name, want in wanted.items():
        error = (found[name].double() - want.double()).abs().max() / want.double().abs().max().clamp(min=floor)
        assert error <= limit, f"{name}: {error:.1e}"


MODELS: dict[Callable[[], Given], dict[str, int]] = {  # and what their attention becomes
    llama: {"causal": 2},
    llama_with_cache: {"causal": 2},
    mistral: {"masked": 2},
    gpt2: {"causal": 2},
    bert: {"open": 2},
    t5: {"open": 2, "masked": 4},
    vit: {"open": 2},
    conv: {},
}


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore")
def test_same_loss_gradients_and_buffers(make: Callable[[], Given]) -> None:
    model, kwargs = make()
    captured = capture(model.train(), (), kwargs, check=False)
    inputs = captured.flatten_inputs((), kwargs)
    gm = copy_graph(captured.graph)
    check(gm, "capture")
    for name in PREPARE:
        gm = run(gm, (name,))
        check(gm, name)
    _compare(_run(gm, inputs, captured.attributes), _run(captured.graph, inputs, captured.attributes), 1e-5)
    wide = tuple(i.double() if i.is_floating_point() else i for i in inputs)
    attributes = double(captured.attributes)
    before = _run(to_float64(captured.graph), wide, attributes)
    _compare(_run(to_float64(gm), wide, attributes), before, 1e-10)
    _compare(_run(run(to_float64(captured.graph), PREPARE), wide, attributes), before, 1e-10)
    _check_ops(make, gm)
    annotate(gm, captured.trainable)
    check(run(gm, ("hoist_normalisers",)), "hoist_normalisers")


def _check_ops(make: Callable[[], Given], gm: torch.fx.GraphModule) -> None:
    nodes = list(gm.graph.nodes)
    counts = Counter(n.target for n in nodes)
    attention = [n.args for n in nodes if n.target is aten.scaled_dot_product_attention.default]
    kinds = Counter("masked" if a[3] is not None else "causal" if a[5] else "open" for a in attention)
    assert kinds == MODELS[make]
    assert counts[ops.cross_entropy_sum.default] == counts[ops.cross_entropy_count.default] == 1
    assert counts[ops.batch_norm.default] == (2 if make is conv else 0)
