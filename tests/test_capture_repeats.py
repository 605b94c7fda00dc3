"""Deep models: the graph unrolled from a few blocks is that of a full export, node by node, or none is made."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import repeat_models
import torch
from repeat_models import Block, Stack
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves

import autopar.capture
from autopar import repeats
from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.export_model import Call, Exported, export_model
from autopar.export_repeats import export_short
from autopar.signature import Signature

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

SAME = (
    *("Block", "SpecialLast", "Scaled", "DropPath", "WithBatchNorm", "Checkpointed", "Reentrant", "InAutocast"),
    *("WithConstants", "Counts", "WithFunction", "InPlace", "Nested", "InSequential", "Glue", "TwoLists", "Sliced"),
    *("TiedWeights", "Twice", "MixedCase"),
)
OTHER = (
    *("SpecialMiddle", "OneOff", "NumberedConstants", "Zipped", "UNet", "ReadsDepth", "ByIndex", "Backwards"),
    *("Averages", "ReadsThird", "Carried", "SharedBlocks", "TiedInside", "TiedToMiddle", "Fails", "WritesCaches"),
    *("OtherFactor", "SwapsOnce", "Hooked", "SkipsOne", "Frozen"),
)


def built(name: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    kind = getattr(repeat_models, name)
    return kind() if issubclass(kind, Stack) else Stack(kind, **more)


def call_of(model: nn.Module, args: Any = (), kwargs: Any = None, loss: bool = True) -> Call:
    return Call(model, Signature.of(model, args, kwargs or {}, {}, with_loss=False), None, loss)


def example() -> tuple[torch.Tensor]:
    return (torch.randn(4, 6, 4),)


def described(exported: Exported) -> list[Any]:
    """All that there is to a graph: per node its op, name, target, operands, values, and what it is from."""
    at = {n: i for i, n in enumerate(exported.graph.graph.nodes)}
    found = []
    for node in at:
        flat, tree = tree_flatten((node.args, node.kwargs))
        operands = [at[a] if isinstance(a, fx.Node) else (type(a), repr(a)) for a in flat]
        values = [
            (v.shape, v.stride(), v.dtype, v.device) if isinstance(v, torch.Tensor) else v
            for v in tree_leaves(node.meta.get("val"))
        ]
        stack = [*(node.meta.get("nn_module_stack") or {}).items()]
        more = {k: v for k, v in node.meta.items() if k not in ("val", "nn_module_stack")}
        found.append((node.op, node.name, node.target, operands, str(tree), values, stack, more))
    return found


def assert_same(short: Exported | None, whole: Exported) -> None:
    assert short is not None
    for a, b in zip(described(short), described(whole), strict=False):
        assert a == b
    assert len(short.graph.graph.nodes) == len(whole.graph.graph.nodes)
    for a, b in zip(short.graph.state_dict().items(), whole.graph.state_dict().items(), strict=True):
        assert a[0] == b[0] and a[1].shape == b[1].shape
    assert list(short.constants) == list(whole.constants)
    for a, b in zip(short.constants.values(), whole.constants.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    for word in ("outputs", "has_loss", "changed", "hints"):
        assert getattr(short, word) == getattr(whole, word)
    assert len(short.applied) == len(whole.applied)


@pytest.mark.parametrize("name", SAME)
def test_unrolled_is_the_full_export(name: str) -> None:
    call = call_of(built(name), example())
    short = export_short(call, 4)
    whole = export_model(call, 4)
    assert short is not None and len(short.exported.graph.graph.nodes) < 0.8 * len(whole.graph.graph.nodes)
    assert_same(short.unrolled(), whole)


@pytest.mark.parametrize("name", OTHER)
def test_models_whose_blocks_differ_are_exported_whole(name: str) -> None:
    short = export_short(call_of(built(name), example()), 4)
    assert short is None or short.unrolled() is None


def test_a_pattern_of_several_blocks() -> None:
    call = call_of(built("Alternating", depth=16), example())
    short = export_short(call, 4)
    assert short is not None and [(r.period, r.removed) for r in short.repeats] == [(3, 6)]
    assert_same(short.unrolled(), export_model(call, 4))


def test_the_model_is_the_list() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(9)))
    call = Call(model, Signature.of(model, example(), {}, {}, with_loss=True), torch.mean, True)
    short = export_short(call, 4)
    assert short is not None and short.repeats[0].container == ""
    assert_same(short.unrolled(), export_model(call, 4))


def test_forward_only_and_cast_parameters() -> None:
    model = built("Block").eval()
    for call in (
        call_of(model, example(), loss=False),
        Call(model, call_of(model, example()).signature, None, True, torch.bfloat16),
    ):
        short = export_short(call, 4)
        assert short is not None
        assert_same(short.unrolled(), export_model(call, 4))


# -- capture as a whole


def test_capture_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against eager: loss and gradients of the unrolled graph are the model's own."""
    model, inputs = built("WithBatchNorm"), example()
    whole = capture(model, inputs, _whole=True)
    monkeypatch.setattr(autopar.capture, "_export_whole", None)
    captured = capture(model, inputs, global_batch=4)
    assert captured.checked == "equal" and captured.hash == whole.hash
    assert captured.outputs == whole.outputs and captured.hints == whole.hints
    captured = capture(model, inputs, global_batch=512, check=False)
    assert captured.checked == "unchecked" and captured.batch == 512


def test_the_model_is_left_alone() -> None:
    for name in ("WithBatchNorm", "UNet", "Fails"):
        model = built(name)
        before = [(n, m, m._modules, list(m._modules.items())) for n, m in model.named_modules()]
        values = {n: t.clone() for n, t in model.state_dict().items()}
        export_short(call_of(model, example()), 4)
        after = [(n, m, m._modules, list(m._modules.items())) for n, m in model.named_modules()]
        assert all(a[:2] == b[:2] and a[2] is b[2] and a[3] == b[3] for a, b in zip(before, after, strict=True))
        assert all(torch.equal(values[n], t) for n, t in model.state_dict().items())


def test_a_block_in_the_middle_that_does_other_ops_at_other_rows_is_refused() -> None:
    with pytest.raises(AutoparError, match="does other ops at batch size 4"):
        capture(built("OtherRows"), example(), check=False)


def test_few_blocks_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopar.capture, "export_short", None)
    capture(Stack(Block, depth=7), example(), check=False)


# -- public models


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def public(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    ids = torch.randint(3, 64, (4, 8))
    text = {"input_ids": ids, "labels": ids}
    t = transformers
    if name == "llama":  # with its cache
        return t.LlamaForCausalLM(
            t.LlamaConfig(**SIZES, **TOKENS, num_key_value_heads=2, tie_word_embeddings=True)
        ), text
    if name == "mixtral":
        config = t.MixtralConfig(**SIZES, **TOKENS, num_key_value_heads=2, num_local_experts=4, use_cache=False)
        model = t.MixtralForCausalLM(config)
        model.set_experts_implementation("batched_mm")
        return model, text
    if name == "gpt2":
        config = t.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=6, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
        )
        config.loss_type = "ForCausalLM"
        return t.GPT2LMHeadModel(config), text
    if name == "t5":
        config = t.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=7, num_heads=4, decoder_start_token_id=0,
            pad_token_id=0, use_cache=False,
        )  # fmt: skip
        return t.T5ForConditionalGeneration(config), text
    if name == "bert":
        return t.BertForMaskedLM(t.BertConfig(**SIZES, pad_token_id=0)), text
    config = t.ViTConfig(**{**SIZES, "vocab_size": None}, image_size=16, patch_size=8, num_labels=5)
    images = torch.randn(4, 3, 16, 16)
    return t.ViTForImageClassification(config), {"pixel_values": images, "labels": torch.randint(0, 5, (4,))}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", "t5", "bert", "vit"])
def test_public_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MANY", 3)
    monkeypatch.setattr(repeats, "SAVED", 0.1)
    model, inputs = public(name)
    call = call_of(model.train(), (), inputs)
    short = export_short(call, 4)
    assert short is not None and len(short.repeats) == (2 if name == "t5" else 1)
    assert_same(short.unrolled(), export_model(call, 4))
