"""Unmodified models of transformers at tiny sizes: captured, equal to eager, the same graph on meta."""

from __future__ import annotations

import warnings

import pytest
import torch

from autopar.capture import capture, double, run_graph, to_float64

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(**SIZES, **TOKENS, num_key_value_heads=2, max_position_embeddings=32)
    return transformers.LlamaForCausalLM(config)


def gpt2(dropout: float = 0.0) -> torch.nn.Module:
    off = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2, **off
    )
    config.loss_type = "ForCausalLM"
    return transformers.GPT2LMHeadModel(config)


def t5() -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def text(rows: int = 4) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 64, (rows, 12)), "labels": torch.randint(3, 64, (rows, 12))}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("factory", [llama, gpt2, t5])
def test_public_model(factory) -> None:
    model, inputs = factory().train(), text()
    captured = capture(model, (), inputs)
    assert captured.checked == "equal"
    outputs = run_graph(captured.graph, captured.flatten_inputs((), inputs), captured.attributes)["outputs"]
    rebuilt, wanted = captured.unflatten_outputs(outputs), model(**inputs)
    assert type(rebuilt) is type(wanted)
    torch.testing.assert_close(rebuilt.loss, wanted.loss)
    torch.testing.assert_close(rebuilt.logits, wanted.logits)
    assert set(captured.parameters) == {n for n, _ in model.named_parameters()}
    assert set(captured.aliases) == set(dict(model.named_parameters(remove_duplicate=False))) - set(captured.parameters)
    traces = [n.meta.get("stack_trace") or "" for n in captured.graph.graph.nodes if n.op == "call_function"]
    assert sum("modeling_" in trace for trace in traces) > len(traces) * 0.8
    wide = run_graph(to_float64(captured.graph), captured.flatten_inputs((), inputs), double(captured.attributes))
    assert wide["outputs"][0].dtype == torch.float64
    assert abs(wide["outputs"][0].item() - wanted.loss.item()) < 1e-5
    with torch.device("meta"):
        on_meta = factory().train()
    assert capture(on_meta, (), inputs).hash == captured.hash


@pytest.mark.filterwarnings("ignore")
def test_default_dropout() -> None:
    assert capture(gpt2(0.1).train(), (), text()).checked == "equal"
    assert capture(gpt2(0.1).eval(), (), text()).checked == "equal"


@pytest.mark.filterwarnings("ignore")
def test_checkpointing_and_caches_are_hints() -> None:
    model, inputs = llama().train(), text()
    assert [hint.split(":")[1] for hint in capture(model, (), inputs).hints] == [
        " a DynamicCache is no tensor and no container; None is returned in its place."
    ]
    for reentrant in (False, True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        (hint,) = capture(model, (), inputs).hints
        assert hint.startswith("model.layers.0 (") and " and 1 more: checkpointed regions" in hint
