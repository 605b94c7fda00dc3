"""Whole configurations: published activation bytes to every digit, experts, fp8, and how long pricing one takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.bench.published_rows import Row, row_of
from autopar.errors import AutoparError
from autopar.pricing import price_row
from autopar.pricing.compose import Priced, static_bytes, step_of
from autopar.pricing.configuration import (
    GIB,
    cluster_of,
    experts_axis,
    family_of,
    framework_of,
    layout_of,
    priced_units,
    recipe_of,
    recompute_of,
    schedule_of,
    sizes_of,
    units_at,
)
from autopar.pricing.kernels import Elements, UnitCost
from autopar.solver.simulate.step import run
from autopar.solver.work import Move, Op


def row(**fields: Any) -> Row:
    small = {
        "layers": 4,
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 16,
        "ffn": 4096,
        "ffn_type": "swiglu",
        "vocab": 32000,
        "seq": 1024,
        "gpu": "H100",
        "gpus": 8,
        "tp": 1,
        "pp": 1,
        "dp": 8,
        "mbs": 1,
        "gbs": 32,
        "precision": "bf16",
        "run": {"source_kind": "nemo"},
    }
    return row_of({"id": "x", **small, **fields}, "rows.json", "$[0]")


def priced(of: Row) -> Priced:
    return priced_units(of, layout_of(of), recipe_of(of), cluster_of(of))


FLASH_2 = {"attention_kernel": "flash2"}
KORTHIKANTI = {  # arXiv 2205.05198: fp16, attention's scores written out, dropout; tensor ranks 8
    "22B": {"layers": 48, "hidden": 6144, "heads": 64, "ffn": 24576, "mbs": 4, "gbs": 4, "pp": 1},
    "175B": {"layers": 96, "hidden": 12288, "heads": 96, "ffn": 49152, "mbs": 1, "gbs": 64, "pp": 8, "vp": 3},
}
BOTH = {"sequence_parallel": True, "recompute": "selective (attention core)"}


def korthikanti(model: str, **fields: Any) -> Row:
    sizes = KORTHIKANTI[model]
    common = {"kv_heads": sizes["heads"], "ffn_type": "gelu", "vocab": 51200, "seq": 2048, "gpu": "A100", "run": {}}
    ranks = {"tp": 8, "dp": 1, "gpus": 8 * sizes["pp"], "pp_schedule": "interleaved-1F1B", "precision": "fp16"}
    return row(**sizes, **common, **ranks, **fields)


def without_statistics(of: Row) -> Priced:
    """The priced row with layers that keep what the paper counts, tensors as wide as the model, and nothing else."""
    cost = priced(of)
    wide = 8 * of.mbs * of.seq

    def kept(nbytes: dict[Any, float]) -> dict[Any, float]:
        return {key: n for key, n in nbytes.items() if n > wide}

    layer = replace(cost.layer, saved=kept(cost.layer.saved), inputs=kept(cost.layer.inputs), working=0.0)
    return replace(cost, prefix=UnitCost("prefix"), layer=layer, suffix=UnitCost("suffix"))


def activations(of: Row) -> float:
    """GiB that the first stage keeps of its layers, of all microbatches in flight."""
    timeline = run(step_of(layout_of(of), without_statistics(of)))
    return timeline.peak(0).owners["activations"] / GIB


@pytest.mark.parametrize(
    ("model", "fields", "kept", "total"),
    [
        ("22B", BOTH, 9.5625, 55.12),
        ("22B", {}, 59.25, 104.81),
        ("175B", BOTH, 12.3515625, 57.91),
        ("175B", {}, 66.84375, 112.41),
    ],
)
def test_published_bytes_to_every_digit(model: str, fields: dict[str, Any], kept: float, total: float) -> None:
    """Fig. 1: activations of the first stage, and with the 18 bytes a parameter of the layers' matrices."""
    of = korthikanti(model, **fields)
    found = activations(of)
    assert found == pytest.approx(kept, rel=1e-12)
    matrices = 12 * of.hidden**2 * of.layers / of.tp / of.pp
    held = sum(static_bytes(Elements(matrices), layout_of(of), recipe_of(of)).values()) / GIB
    assert held == 45.5625
    assert found + held == pytest.approx(total, abs=0.005001)


@pytest.mark.parametrize("model", KORTHIKANTI)
def test_layers_hold_more_than_matrices(model: str) -> None:
    """Biases and norms, in tenths of a per mille."""
    of = korthikanti(model)
    matrices = 12 * of.hidden**2 / of.tp
    assert matrices < priced(of).layer.elements.total < 1.001 * matrices


@pytest.mark.parametrize(
    ("model", "sequence", "recompute", "printed"),
    [
        ("22B", True, None, 66.84),
        ("22B", False, "selective (attention core)", 49.42),
        ("22B", True, "selective (attention core)", 16.18),
        ("22B", False, "full", 7.64),
        ("175B", True, None, 62.04),
        ("175B", False, "selective (attention core)", 56.53),
        ("175B", True, "selective (attention core)", 18.49),
        ("175B", False, "full", 8.71),
    ],
)
def test_published_shares_of_the_baseline(model: str, sequence: bool, recompute: str | None, printed: float) -> None:
    """Fig. 7, percent. What it prints is up to 0.09 above its own formula, which is met exactly."""
    of = korthikanti(model, sequence_parallel=sequence, recompute=recompute)
    t, scores = of.tp, 5 * of.heads * of.seq / of.hidden / of.tp
    baseline, outside = 10 + 24 / t + scores, 10 / t if sequence else 10
    formula = {None: outside + 24 / t + scores, "full": 2.0}.get(recompute, outside + 24 / t)
    found = 100 * activations(of) / activations(korthikanti(model))
    assert found == pytest.approx(100 * formula / baseline, rel=1e-9)
    assert 0 <= printed - found < 0.09


MIXTURE = {"moe_experts": 8, "moe_topk": 2, "ep": 4}


def test_experts_are_priced_by_what_a_rank_holds_and_by_what_a_token_meets() -> None:
    dense, mixed = priced(row()).layer, priced(row(**MIXTURE)).layer
    mlp = 3 * 1024 * 4096
    assert mixed.elements == Elements(dense.elements.total - mlp + 8 * 1024, 2 * mlp)
    assert [m.axis for m, _ in mixed.moves] == ["ep", "ep"]
    assert [float(m.piece.nbytes) for m, _ in mixed.moves] == [2 * 2 * 1024 * 1024] * 2  # topk, bytes, tokens, width


def test_experts_on_their_own_ranks_move_nothing() -> None:
    mixed = row(**MIXTURE | {"ep": 1})
    assert "ep_s" not in price_row(mixed).parts
    assert price_row(row(**MIXTURE)).parts["ep_s"] > 0
    assert price_row(row(**MIXTURE)).peak_gib < price_row(mixed).peak_gib


def test_experts_with_each_layout_are_priced() -> None:
    plain = price_row(row(**MIXTURE)).step_s
    for fields in (
        {"tp": 2, "dp": 4, "sequence_parallel": True},
        {"zero_stage": 3},
        {"pp": 2, "dp": 4, "pp_schedule": "1F1B"},
        {"ffn_type": "gelu", "recompute": "full"},
    ):
        found = price_row(row(**MIXTURE, **fields))
        assert 0.3 * plain < found.step_s < 3 * plain


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"moe_experts": 8}, "moe_topk is not stated"),
        ({**MIXTURE, "ep": 3}, "ep=3: does not divide moe_experts=8 and cp x dp=8"),
        ({**MIXTURE, "ep": 8, "dp": 4, "tp": 2}, "ep=8: does not divide moe_experts=8 and cp x dp=4"),
        ({"precision": "fp8", "gpu": "A100"}, "precision 'fp8': A100 SXM4 80GB has no fp8 matmuls. Take bf16."),
        ({"precision": "int4"}, "precision 'int4' is not known. Legal: bf16, fp16, fp8."),
        ({"ffn_type": "glu"}, "ffn_type 'glu' is not known. Legal: gelu, swiglu, geglu, relu2."),
        ({"gpu": "B300"}, "gpu 'B300' is not known"),
        ({"pp": 2, "dp": 4, "pp_schedule": "dual"}, "pp_schedule 'dual' is not known. Legal: none, 1F1B"),
        ({"mbs": None}, "mbs is not stated"),
        ({"recompute": "partial"}, "recompute 'partial' is not known. Legal: none, full, selective."),
        ({"gpu": "H100-PCIe-80GB"}, "gpu 'H100-PCIe-80GB' is not known. Legal: H200, H100"),
        ({"gpu": "GH200 96GB"}, "gpu 'GH200 96GB' is not known"),
        ({"pp": 2, "dp": 4, "vp": 2, "pp_schedule": "ZB-1p"}, "schedule zb-1p: has one chunk a rank, not 2."),
        ({"gbs": 10**10}, "are more than 1000000 tasks"),
        ({"gpu": "A100", "run": {"attention_kernel": "cudnn"}}, "no figures for attention kernel 'cudnn'"),
    ],
)
def test_what_cannot_be_priced_says_why(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(AutoparError, match=words):
        price_row(row(**fields))


def test_ranks_of_experts_are_one_where_there_are_none() -> None:
    assert experts_axis(row(ep=4)) == 1
    assert layout_of(row(**MIXTURE)).ep == 4


def test_fp8_runs_the_linears_of_layers_alone_at_its_own_rate() -> None:
    of = row(precision="fp8", hidden=4096, ffn=16384, heads=32, kv_heads=32)
    layout, how = layout_of(of), recipe_of(of)
    units = units_at(of, layout, how, sizes_of(of, layout))
    dtypes = {name: {p.dtype for op in unit.ops for p in op.forward} for name, unit in units.items()}
    assert dtypes == {"prefix": set(), "layer": {"fp8"}, "suffix": {"bf16"}}
    half = replace(of, precision="bf16")
    eight, sixteen = price_row(of), price_row(half)
    assert 0.5 < eight.step_s / sixteen.step_s < 0.9
    assert eight.peak_gib < sixteen.peak_gib
    assert priced(of).layer.elements == priced(half).layer.elements


def test_logits_that_are_gathered_are_whole_in_the_loss() -> None:
    of = row(tp=8, dp=1, run={"source_kind": "aleph_alpha"})
    layout, how = layout_of(of), recipe_of(of)
    suffix = units_at(of, layout, how, sizes_of(of, layout))["suffix"]
    *_, gather = suffix.moves
    assert isinstance(gather, Move) and (gather.kind, gather.axis) == ("all_gather", "tp")
    assert gather.source.elements == 1024 * 32768 / 8  # padded to a multiple of 128 on each rank
    assert gather.result.elements == 1024 * 32768
    read = [p.elements for op in suffix.ops if op.kind == "loss" for p in op.reads]
    assert max(map(float, read)) == 1024 * 32768
    after = suffix.entries[suffix.entries.index(gather) + 1 :]
    assert all(isinstance(e, Op) and e.kind != "matmul" for e in after)  # nothing of a vocabulary in parts is left


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("1f1b", 1)),
        ({"pp": 4, "pp_schedule": "1F1B", "vp": 1}, ("1f1b", 1)),
        ({"pp": 2, "pp_schedule": "interleaved-1F1B"}, ("interleaved", 2)),
        ({"pp": 2, "pp_schedule": "1F1B-I", "vp": 1}, ("1f1b", 1)),
        ({"pp": 2, "pp_schedule": "1F1B", "vp": 2}, ("interleaved", 2)),
        ({"pp": 2, "pp_schedule": "ZB-2p"}, ("zb-2p", 1)),
        ({"pp": 2, "vp": 2}, ("interleaved", 2)),
        ({"pp": 2, "vp": 2, "pp_schedule": "Interleaved1F1B"}, ("interleaved", 2)),
        ({"pp": 2, "pp_schedule": "GPipe"}, ("gpipe", 1)),
    ],
)
def test_schedules_by_name(fields: dict[str, Any], expected: tuple[str, int]) -> None:
    assert schedule_of(row(**fields)) == expected


def test_recomputation_in_the_words_of_sources() -> None:
    words = ("full (per block)", "full", "selective (attention core)", "selective op", "none", "", None)
    assert [recompute_of(w) for w in words] == ["full", "full", "attention", "ops", "none", "none", "none"]


def test_layers_recomputed_in_part() -> None:
    """Between all and none, in equal steps; "per block" is all."""
    words = ("none", "full (block, 1 layer)", "full (block, 2 layers)", "full (block, 4 layers)", "full (per block)")
    none, one, two, all_, block = (price_row(row(recompute=w)) for w in words)
    assert none.step_s < one.step_s < two.step_s < all_.step_s == block.step_s
    saved = [p.parts["activations_gib"] for p in (none, one, two, all_)]
    assert saved == sorted(saved)[::-1]
    assert two.parts["recompute_s"] == pytest.approx(2 * one.parts["recompute_s"])
    assert all_.parts["recompute_s"] == pytest.approx(4 * one.parts["recompute_s"])


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("H200-SXM5-141GB", "h200-dgx"),
        ("H100-SXM 96GB HBM2e 2.4TB/s, 500W cap (Grand Teton)", "h100-grandteton"),
        ("A100-SXM4-40GB", "a100-40gb"),
        ("A100 (4x200Gb/s, NVLink)", "a100-dgx"),
    ],
)
def test_devices_by_name(gpu: str, name: str) -> None:
    assert cluster_of(row(gpu=gpu)).name == name


def test_nodes_have_the_ranks_that_a_row_states() -> None:
    small, large = (row(gpus_per_node=n, gpus=16, tp=8, dp=2) for n in (4, 8))
    assert (cluster_of(small).nodes, cluster_of(large).nodes) == (4, 2)
    assert price_row(small).parts["tp_s"] > 2 * price_row(large).parts["tp_s"]


@pytest.mark.parametrize(
    ("fields", "framework"),
    [
        ({}, "nemo"),
        ({"zero_stage": 3}, "torchtitan"),
        ({"gpu": "A100", "ffn_type": "gelu"}, "megatron"),
        ({"gpu": "A100"}, "nemo"),
    ],
)
def test_the_framework_of_a_row_that_states_none(fields: dict[str, Any], framework: str) -> None:
    of = row(**fields, run={})
    assert framework_of(of) == framework and price_row(of).step_s > 0


def test_without_cudnn_attention_runs_in_flash_2() -> None:
    default, stated = (price_row(row(gpu="A100", run={"source_kind": "nemo", **x})) for x in ({}, FLASH_2))
    assert default.step_s == stated.step_s


def test_a_gelu_between_grouped_heads() -> None:
    """Fewer weights and less time than with as many heads of keys and values."""
    whole, grouped = (row(ffn_type="gelu", kv_heads=n, gpus=1, dp=1) for n in (16, 4))
    assert (family_of(whole), family_of(grouped)) == ("gpt", "llama")
    assert priced(grouped).layer.elements.total < priced(whole).layer.elements.total
    assert price_row(row(ffn_type="geglu")).step_s == price_row(row()).step_s


def test_peaks_are_counted_as_the_source_counts_them() -> None:
    """Live tensors, or with what fragments; what fits counts the context too."""
    of = row()
    live, reserved = price_row(of), price_row(replace(of, mem_kind="max reserved by the allocator"))
    assert reserved.peak_gib == pytest.approx(
        live.peak_gib * (1 + cluster_of(of).chip.reserved.fragmentation.value)  # type: ignore[union-attr]
    )
    assert sum(n for owner, n in live.parts.items() if owner.endswith("_gib")) == pytest.approx(live.peak_gib)
    assert sum(n for owner, n in live.parts.items() if owner.endswith("_s")) == pytest.approx(live.step_s)
    assert live.fits
    assert not price_row(row(layers=400, hidden=4096)).fits


def test_a_row_can_be_priced_on_another_cluster() -> None:
    of = row(gpus=64, dp=64, gbs=64)
    slow = cluster_of(of).with_fabric(100)
    assert price_row(of, slow).step_s > price_row(of).step_s
    assert price_row(replace(of, run=replace(of.run, fabric_gbps_per_node=100))).step_s == price_row(of, slow).step_s
