"""Plans as a search leaves them, made by hand."""

import pytest

from autopar.plan import (
    Alternative,
    ClusterId,
    Collective,
    ModelId,
    Op,
    Padding,
    Parameter,
    Plan,
    PlanAxis,
    PlanClass,
    Predicted,
    Proof,
    Share,
    Unit,
    Whole,
)

GIB = 2**30
WIRE = {
    "all_reduce": (2e-5, 4e-12),
    "all_gather": (1e-5, 2.5e-12),
    "reduce_scatter": (1e-5, 2.6e-12),
    "all_to_all": (1e-5, 2.7e-12),
    "copy": (0.0, 3e-13),
}
DTYPE = {"dtype": "bf16", "use_dtype": "bf16", "grad_dtype": "bf16"}


def _linear(index, fqn, factor):
    return Op(index, "aten.linear.default", fqn, ("factor:b0", factor, "factor:b0"), (2, 0, 1))


def _layer():
    norm = ("factor:d0", "factor:d1", "factor:d0")
    names = (("q_proj", "factor:o"), ("k_proj", "factor:o"), ("v_proj", "factor:o"), ("o_proj", "factor:i"))
    ops = [Op(0, "aten.rsqrt.default", "model.layers.0.input_layernorm", norm, (2, 0, 1))]
    ops += [_linear(i + 1, f"model.layers.0.self_attn.{name}", f) for i, (name, f) in enumerate(names)]
    attention = "aten.scaled_dot_product_attention.default"
    heads = ("factor:b0", "factor:h", "factor:b0")
    ops.append(Op(5, attention, "model.layers.0.self_attn", heads, (2, 0, 1)))
    names = (("gate_proj", "factor:o"), ("up_proj", "factor:o"), ("down_proj", "factor:i"))
    ops += [_linear(i + 6, f"model.layers.0.mlp.{name}", f) for i, (name, f) in enumerate(names)]
    ops.append(Op(9, "aten.add.Tensor", "model.layers.0", ("factor:d0", "I", "factor:d0"), (2, 0, 1)))
    return PlanClass("model.layers.0", tuple(ops))


def _parameters():
    column = Parameter((14336, 4096), "S1 S0 R", "R S0 R", "use", "microbatch", **DTYPE)
    row = Parameter((4096, 14336), "S0 S1 R", "R S1 R", "use", "microbatch", **DTYPE)
    norm = Parameter((4096,), "S0 I R", "R R R", "step", "step", **DTYPE)
    kinds = {"mlp.gate_proj.weight": column, "mlp.up_proj.weight": column, "mlp.down_proj.weight": row}
    for name in ("q_proj", "k_proj", "v_proj"):
        kinds[f"self_attn.{name}.weight"] = column
    kinds |= {"self_attn.o_proj.weight": row, "input_layernorm.weight": norm, "post_attention_layernorm.weight": norm}
    found = {f"model.layers.{i}.{name}": p for i in range(32) for name, p in kinds.items()}
    return found | {"model.embed_tokens.weight": column, "model.norm.weight": norm, "lm_head.weight": column}


PARTS = {
    "compute_s": 6.4,
    "exposed_s": 1.2,
    "hidden_s": 2.5,
    "optimizer_s": 0.004,
    "peak_parameters_bytes": 0.25 * GIB,
    "peak_gradients_bytes": 0.25 * GIB,
    "peak_optimizer_bytes": 0.5 * GIB,
    "peak_saved_bytes": 50.0 * GIB,
    "peak_gathered_bytes": 0.0,
    "peak_working_bytes": 8.0 * GIB,
    "peak_inputs_bytes": 0.5 * GIB,
    "peak_buffers_bytes": 0.0,
    "memory_limit_bytes": 72.0 * GIB,
    "model_flops": 2.5e17,
    "peak_flops": 64 * 989e12,
    "mfu": 2.5e17 / (7.604 * 64 * 989e12),
}
SCOPE = {
    "axes": "at most 2",
    "nesting": "mesh order, time outermost",
    "copies": "one shared layout a tensor",
    "meshes": [[[64, 1]], [[8, 8], [8, 1]], [[16, 4], [4, 1]]],
    "microbatches": [1, 2, 4, 8],
    "generated": 12345,
    "dropped": {"dominated": 120},
    "pruned": [
        {"mesh": [[8, 8], [8, 1]], "microbatches": 2, "by": "solved", "bound": 7.58},
        {"mesh": [[64, 1]], "microbatches": 1, "by": "memory", "bound": None},
        {"mesh": [[64, 1]], "microbatches": 2, "by": "multipliers", "bound": 7.9},
        {"mesh": [[16, 4], [4, 1]], "microbatches": 1, "by": "multipliers", "bound": 8.25},
    ],
    "multipliers": {"alpha": 1.0, "lambda": 0.0},
}


@pytest.fixture
def llama():
    """Llama-3-8B on 64 ranks as the search leaves it; the figures are made up."""
    head = PlanClass("lm_head", (_linear(0, "lm_head", "factor:o"),))
    return Plan(
        ModelId("sha256:0123456789abcdef", "LlamaForCausalLM"),
        ClusterId("h100-dgx", 8, 8, "cuda"),
        axes=(
            PlanAxis("a0", 8, "network", 8, ("dp_shard",), WIRE),
            PlanAxis("a1", 8, "nvlink", 1, ("tp",), WIRE),
            PlanAxis("time", 2, "time", 0),
        ),
        mesh={"dp_shard": 8, "tp": 8},
        classes=(_layer(), head),
        units=(*(Unit(f"model.layers.{i}", 0) for i in range(32)), Unit("lm_head", 1)),
        microbatches=2,
        batch=512,
        inputs={"input_ids": "S0@1 R S0@0"},
        parameters=_parameters(),
        predicted=Predicted(
            step_time_s=7.604,
            peak_mem_gib=59.5,
            peak_at="backward of model.norm, mm_2",
            parts=PARTS,
            collectives=(
                Collective("all_gather", "a0", 450, 30 * GIB, "forward", 0.1, True),
                Collective("reduce_scatter", "a1", 128, 60 * GIB, "forward", hidden=False),
            ),
            divided={"dp_shard": Share(0.875, 0.875, 0.875), "tp": Share(0.875, 0.874, 0.86)},
        ),
        proof=Proof(7.61, 7.58, 1 - 7.58 / 7.61, SCOPE),
        alternatives=(
            Alternative("next", "dp_shard=16 tp=4", {"tp": "4"}, 7.95, 66.0),
            Alternative("next", "microbatches=4", {"microbatches": "4"}, 8.1, 40.0, why="more latency"),
        ),
    )


@pytest.fixture
def pinned():
    """A plan that was pinned: nothing predicted but what its program says."""
    column = Parameter((16, 8), "S0 S0", "R S0", "use", "microbatch")
    norm = Parameter((8,), "S0 I", "R I", "use", "microbatch")
    layers = {f"h.{i}.{name}": p for i in range(12) for name, p in (("fc.weight", column), ("ln.weight", norm))}
    frozen = Parameter((16, 8), "S0 S0", "R S0", "use", "never", trainable=False, **DTYPE)
    ops = tuple(
        Op(2 * i + j, f"aten.{op}.default", f"h.{i}.{name}", choices)
        for i in range(12)
        for j, (op, name, choices) in enumerate(
            (("linear", "fc", ("factor:b0", "I")), ("layer_norm", "ln", ("factor:d0", "I")))
        )
    )
    return Plan(
        ModelId("sha256:0123456789abcdef", "GPT", checked=True),
        ClusterId(ranks_per_node=4),
        axes=(PlanAxis("dp", 2, "host", 2, ("dp_shard",)), PlanAxis("tp", 2, "host", 1, ("tp",))),
        mesh={"dp_shard": 2, "tp": 2},
        classes=(PlanClass("", ops),),
        units=(Unit("", 0),),
        batch=8,
        parameters=layers | {"head.weight": frozen},
        padding=(Padding("wte.weight", 0, 65, 66),),
        predicted=Predicted(
            collectives=(
                Collective("all_reduce", "tp", 24, 3 << 20, "forward"),
                Collective("all_gather", "dp", 25, 1 << 20),
            ),
            divided={"tp": Share(0.49, 0.48)},
            whole=tuple(Whole("tp", f"h.{i}.fc", "aten.linear.default", "9 does not divide") for i in range(12)),
            fallback=("aten.cumsum.default",),
        ),
        relaxations={"dropout": "per-rank"},
        pins={"tp": "2", "zero": "3"},
    )
