"""The reference models have the published parameter counts and names, and learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.models import gpt2, llama, mlp, resnet, vit

# Parameters, tied ones once, as the released checkpoints have them.
PUBLISHED = {
    (gpt2, "gpt2"): 124_439_808,
    (gpt2, "gpt2-medium"): 354_823_168,
    (gpt2, "gpt2-large"): 774_030_080,
    (gpt2, "gpt2-xl"): 1_557_611_200,
    (llama, "llama-2-7b"): 6_738_415_616,
    (llama, "llama-2-13b"): 13_015_864_320,
    (llama, "llama-2-70b"): 68_976_648_192,
    (llama, "llama-3.2-1b"): 1_235_814_400,
    (llama, "llama-3.2-3b"): 3_212_749_824,
    (llama, "llama-3-8b"): 8_030_261_248,
    (llama, "llama-3-70b"): 70_553_706_496,
    (llama, "llama-3-405b"): 405_853_388_800,
    (vit, "vit-s-16"): 22_050_664,
    (vit, "vit-b-16"): 86_567_656,
    (vit, "vit-l-16"): 304_326_632,
    (vit, "vit-h-14"): 632_045_800,
    (resnet, "resnet18"): 11_689_512,
    (resnet, "resnet34"): 21_797_672,
    (resnet, "resnet50"): 25_557_032,
    (resnet, "resnet101"): 44_549_160,
    (resnet, "resnet152"): 60_192_808,
}
FAMILIES = (gpt2, llama, mlp, resnet, vit)
NAMES = {
    gpt2: "transformer.h.0.attn.c_attn.weight",
    llama: "model.layers.1.self_attn.q_proj.weight",
    resnet: "layer2.0.downsample.1.running_var",
    vit: "blocks.1.attn.qkv.bias",
}


def family(module: Any) -> str:
    return str(getattr(module, "__name__", module)).rpartition(".")[2]


@pytest.mark.parametrize(("module", "size"), PUBLISHED, ids=family)
def test_parameter_count_is_the_published_one(module: Any, size: str) -> None:
    with torch.device("meta"):
        model, _, _ = module.make(size=size, batch=1)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[module, size]


def test_every_published_size_is_counted() -> None:
    named = {(module, size) for module in (gpt2, llama, resnet, vit) for size in module.SIZES if size != "tiny"}
    assert named == set(PUBLISHED)


@pytest.mark.parametrize("module", FAMILIES, ids=family)
def test_loss_is_a_scalar_that_falls(module: Any) -> None:
    model, args, kwargs = module.make()
    assert not kwargs
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model(*args)
        assert loss.shape == ()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("module", FAMILIES, ids=family)
def test_without_labels_logits_give_the_same_loss(module: Any) -> None:
    model, (x, labels), _ = module.make()
    logits = model(x)
    assert logits.shape[:-1] == labels.shape
    expected = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
    torch.testing.assert_close(model(x, labels), expected)


@pytest.mark.parametrize("module", FAMILIES, ids=family)
def test_the_same_seed_makes_the_same_model_and_data(module: Any) -> None:
    (first, a, _), (second, b, _) = module.make(seed=3), module.make(seed=3)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("module", NAMES, ids=family)
def test_parameters_have_their_published_names(module: Any) -> None:
    model, _, _ = module.make()
    assert NAMES[module] in model.state_dict()


@pytest.mark.parametrize("module", [gpt2, llama], ids=family)
def test_a_token_sees_no_later_one(module: Any) -> None:
    model, (ids, _), _ = module.make()
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    torch.testing.assert_close(model(ids)[:, :-1], model(changed)[:, :-1])
    assert not torch.equal(model(ids)[:, -1], model(changed)[:, -1])


def test_gpt2_ties_its_head() -> None:
    model, _, _ = gpt2.make()
    assert model.lm_head.weight is model.transformer.wte.weight


def test_llama_equals_the_one_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    model, (ids, _), _ = llama.make()
    sizes = llama.SIZES["tiny"]
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        rms_norm_eps=sizes.epsilon,
        rope_theta=sizes.theta,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.theta},
        max_position_embeddings=64,
    )
    theirs = transformers.LlamaForCausalLM(config)
    theirs.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)
