"""Units of reference models: closed forms against what is read off at real sizes, published counts, and torch's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
import torch
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.build import apply
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.models import llama
from autopar.passes.lower import with_changes
from autopar.pricing.reference import Sizes, Structure, laid_out, model_of
from autopar.pricing.symbols import SYMBOLS, compiled, decoded, reference_units
from autopar.pricing.work import units_of
from autopar.solver.work import Move, Op, Unit, gathered_again

B, S, H, A, T, F = (SYMBOLS[name] for name in ("b", "s", "h", "heads", "tp", "ffn"))
LLAMA = Sizes(b=3, s=32, h=48, heads=8, kv_heads=4, head=6, ffn=40, vocab=96)
GPT = Sizes(b=3, s=32, h=48, heads=8, kv_heads=8, head=6, ffn=64, vocab=96)


@pytest.mark.parametrize(
    ("family", "tp", "sp", "cp"),
    [
        ("llama", 1, False, 1),
        ("llama", 2, False, 1),
        ("llama", 4, True, 1),
        ("llama", 2, True, 2),
        ("nemotron", 2, True, 1),
        ("gpt", 1, False, 1),
        ("gpt", 2, True, 1),
        ("gpt", 4, False, 1),
        ("gpt", 1, False, 2),
    ],
)
def test_closed_forms_are_what_is_read_off_at_real_sizes(family: str, tp: int, sp: bool, cp: int) -> None:
    sizes = replace(GPT if family == "gpt" else LLAMA, tp=tp, cp=cp)
    options = {"activation": "relu2"} if family == "nemotron" else {"dropout": True} if family == "gpt" else {}
    structure = Structure("gpt" if family == "gpt" else "llama", tp > 1, sp, cp > 1, **options)  # type: ignore[arg-type]
    units = reference_units(structure.family, tp=tp > 1, sp=sp, cp=cp > 1, **options)  # type: ignore[arg-type]
    prefix, _, layer, suffix = units_of(laid_out(structure, sizes))
    named = {"prefix": prefix, "layer": replace(layer, name="layer"), "suffix": suffix}
    assert compiled(units)(sizes.__dict__) == named


def kept_bytes(unit: Unit) -> sympy.Expr:
    """Bytes of activations that a unit keeps, each storage once; those of rows without width (statistics) aside."""
    pieces = {p.key: p for op in unit.ops for p in op.kept if not p.weight}
    sizes = [sympy.sympify(p.nbytes).subs({SYMBOLS["head"]: H / A, F: 4 * H}) for p in pieces.values()]
    return sum((n for n in map(sympy.simplify, sizes) if H in n.free_symbols), sympy.Integer(0))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 34 * S * B * H),
        ({"tp": True}, S * B * H * (10 + 24 / T)),
        ({"tp": True, "sp": True}, 34 * S * B * H / T),
    ],
)
def test_a_gpt_layer_keeps_what_korthikanti_counts(options: dict[str, bool], expected: sympy.Expr) -> None:
    layer = reference_units("gpt", dropout=True, **options)["layer"]
    assert sympy.simplify(kept_bytes(gathered_again(layer)) - expected) == 0


def test_the_program_as_we_run_it_keeps_gathered_inputs_whole() -> None:
    layer = reference_units("gpt", tp=True, sp=True, dropout=True)["layer"]
    assert sympy.simplify(kept_bytes(layer) - S * B * H * (4 + 30 / T)) == 0


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_products_are_those_that_torch_counts(family: str) -> None:
    sizes = LLAMA if family == "llama" else GPT
    structure = Structure(family, dtype="fp32")
    model = model_of(structure, sizes).to_empty(device="cpu")
    ids = torch.zeros(sizes.b, sizes.s, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).backward()
    found = counter.get_flop_counts()["Global"]
    counted = sum(n for op, n in found.items() if str(op).split(".")[1] in ("mm", "addmm", "bmm", "baddbmm"))
    units = units_of(laid_out(structure, sizes))
    ops = [op for unit in units for op in unit.ops]
    products = [p for op in ops for p in (*op.forward, *op.backward_input, *op.backward_weight)]
    assert sum(int(p.flops) for p in products) == counted


@pytest.mark.parametrize("pins", [{"tp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_a_plan_keeps_what_it_predicts(pins: dict[str, int]) -> None:
    model, args, _ = llama.make()
    ready = autopar.compile(model, Cluster.local(ranks=2), args=args, pins=pins)._first("plan")
    units = units_of(with_changes(apply(ready.plan, ready.prepared)))
    assert [unit.name for unit in units] == ["prefix", "model.layers.0", "model.layers.1", "suffix"]
    kept = {p.key: p for unit in units for op in unit.ops for p in op.kept if not p.weight}
    parts = ready.plan.predicted.parts
    assert sum(int(p.nbytes) for p in kept.values()) == parts["saved_bytes"] + parts["inputs_bytes"]


def test_attention_is_recognised() -> None:
    (attend,) = (op.attend for op in reference_units("llama", tp=True, cp=True)["layer"].ops if op.attend)
    cp, kv_heads = SYMBOLS["cp"], SYMBOLS["kv_heads"]
    assert (attend.heads, attend.kv_heads, attend.queries, attend.keys) == (A / T, kv_heads / T, S / cp, S)
    assert attend.causal and attend.dtype == "bf16"


def test_views_of_one_storage_are_read_one_by_one_and_kept_once() -> None:
    (attention,) = (op for op in reference_units("gpt")["layer"].ops if op.kind == "attention")
    head, heads = SYMBOLS["head"], A
    assert [p.elements for p in attention.reads] == [B * S * heads * head] * 3
    assert len({p.key for p in attention.reads}) == 1
    (kept,) = (p for p in attention.kept if p.key == attention.reads[0].key)
    assert kept.elements == 3 * B * S * heads * head


def test_a_lookup_reads_what_it_takes_of_its_table() -> None:
    (lookup,) = (op for op in reference_units("llama", tp=True)["prefix"].ops if op.kind == "lookup")
    assert [p.elements for p in lookup.reads] == [B * S * H, B * S]


def test_a_layer_moves_what_megatron_does() -> None:
    def moves(**options: bool) -> list[tuple[str, str]]:
        entries = reference_units("llama", tp=True, **options)["layer"].entries
        return [(e.kind, e.backward) for e in entries if isinstance(e, Move)]

    assert moves() == [("", "all_reduce"), ("all_reduce", "")] * 2
    assert moves(sp=True) == [("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather")] * 2


def test_every_parameter_is_in_a_unit_once_and_cut_over_tensor_ranks() -> None:
    sizes = replace(LLAMA, tp=4)
    units = compiled(reference_units("llama", tp=True))(sizes.__dict__)
    named = [(name, piece) for unit in units.values() for name, piece in unit.parameters]
    parameters = {n: p for n, p in model_of(Structure("llama"), sizes).named_parameters() if ".0." not in n}
    assert sorted(n for n, _ in named) == sorted(parameters)
    whole = {n for n, piece in named if piece.elements == parameters[n].numel()}
    assert whole == {n for n in parameters if "norm" in n}
    assert all(piece.elements * 4 == parameters[n].numel() for n, piece in named if n not in whole)


def test_a_loss_over_a_cut_vocabulary_reduces_its_rows() -> None:
    suffix = reference_units("gpt", tp=True)["suffix"]
    moved = [m.piece.nbytes for m in suffix.moves if m.axis == "tp" and m.kind == "all_reduce"]
    assert moved == [4 * B * S, 8 * B * S]


def test_storages_are_made_once_and_read_where_they_are() -> None:
    layer = reference_units("llama")["layer"]
    outside = {p.key for op in layer.ops for p in op.reads if not p.weight} - layer.made
    written = [p.key for e in layer.entries if isinstance(e, Op) for p in e.writes]
    assert len(written) == len(set(written)) and set(written) <= layer.made
    assert len(outside) == 3  # the residual stream, cosines and sines


def test_what_is_no_product_of_symbols_is_an_error() -> None:
    with pytest.raises(ValueError, match="143 is no product of b: 13 to the power 1 is left"):
        decoded(143, {"b": (11,)})


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_unknown_structures_are_refused(family: str) -> None:
    with pytest.raises(AutoparError, match="activation 'tanh'"):
        reference_units(family, activation="tanh")


def test_missing_sizes_are_named() -> None:
    with pytest.raises(AutoparError, match="ffn, h not given"):
        compiled(reference_units("llama"))({"b": 1, "s": 2, "heads": 2, "kv_heads": 1, "head": 4, "vocab": 8})


@pytest.mark.parametrize("options", [{}, {"tp": True}, {"tp": True, "sp": True}], ids=str)
def test_experts_take_every_row_topk_times(options: dict[str, bool]) -> None:
    dense = reference_units("llama", **options)["layer"]
    mixed = reference_units("llama", experts=True, **options)["layer"]
    experts, topk, ep = (SYMBOLS[name] for name in ("experts", "topk", "ep"))

    def flops(unit: Unit, part: str) -> sympy.Expr:
        ops = [op for op in unit.ops if part in op.module.split(".")]
        return sum(p.flops for op in ops for p in (*op.forward, *op.backward_input, *op.backward_weight))

    def elements(unit: Unit, part: str) -> sympy.Expr:
        return sum(piece.elements for name, piece in unit.parameters if part in name.split("."))

    router = flops(mixed, "router")
    rows = B * S / T if options.get("sp") else B * S
    assert sympy.simplify(router - 3 * 2 * rows * experts * H) == 0
    assert sympy.simplify(flops(mixed, "mlp") - router - topk * flops(dense, "mlp")) == 0
    assert sympy.simplify(elements(mixed, "experts") - experts / ep * elements(dense, "mlp")) == 0
    assert flops(mixed, "self_attn") == flops(dense, "self_attn")
    sent = [m.piece.nbytes for m in mixed.moves if m.axis == "ep"]
    assert sent == [2 * topk * rows * H] * 2


def test_a_layer_of_experts_hangs_together() -> None:
    layer = reference_units("llama", tp=True, sp=True, experts=True)["layer"]
    known = {p.key for op in layer.ops for p in op.reads if p.weight} | {p.key for _, p in layer.parameters}
    known |= {p.key for op in reference_units("llama", tp=True, sp=True)["layer"].ops for p in op.reads} - layer.made
    for entry in layer.entries:
        read, made = (entry.reads, entry.writes) if isinstance(entry, Op) else ((entry.source,), (entry.result,))
        assert {p.key for p in read} <= known, entry
        known |= {p.key for p in made}
