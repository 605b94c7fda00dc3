"""Units small enough to count by hand, on a device that moves a byte and computes a FLOP a second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.pricing.fp8 import in_fp8
from autopar.pricing.kernels import Elements, Ways, groups, unit_cost
from autopar.pricing.recipe import Recipe
from autopar.solver.cost.device import Device
from autopar.solver.cost.tables import Samples
from autopar.solver.work import Attend, Move, Op, Piece, Product, Unit

FAST = 1e12  # FLOP/s beside which a matmul's bytes count
PLAIN = Recipe(attention="eager", fused_accumulation=False)
HAND = replace(PLAIN, fused=frozenset({"norm", "pointwise"}))
COMPILED = replace(PLAIN, compiled=True)


def device(flops: float = 1.0, bandwidth: float = 1.0) -> Device:
    rates = dict.fromkeys(("bf16", "fp32"), flops) | {"fp8": 2 * flops}
    flash = {("flash2", 8, True, backward): Samples.of(((8, flops), (16, flops))) for backward in (False, True)}
    return Device("hand", rates, rates, {"bf16": 2, "fp32": 4, "fp8": 1}, bandwidth, attentions=flash)


def op(module: str, kind: str, reads: list[Piece], writes: list[Piece], kept: list[Piece] | None = None) -> Op:
    return Op(f"aten.{kind}", module, kind, reads=tuple(reads), writes=tuple(writes), kept=tuple(kept or ()))


def half(key: int, *shape: int) -> Piece:
    return Piece(key, shape or (4, 64), 2)


def linear(x: Piece, y: Piece, weight: int, bias: bool = False) -> Op:
    (m, k), (_, n) = x.shape, y.shape
    w = Piece(weight, (n, k), 2, weight=True)
    more = (Piece(weight + 1, (n,), 2, weight=True),) if bias else ()
    ways = (Product(1, m, n, k, "bf16"), Product(1, m, k, n, "bf16"), Product(1, n, k, m, "bf16"))
    one, two, three = ((way,) for way in ways)
    return Op("aten.linear", "linear", "matmul", one, two, three, None, (x, w, *more), (y,), (x, w))


def unit(*entries: Op | Move, parameters: tuple[tuple[str, Piece], ...] = (), name: str = "layer") -> Unit:
    made = frozenset(p.key for e in entries if isinstance(e, Op) for p in e.writes)
    return Unit(name, entries, parameters, made)


X, SINGLE, RSTD, NORMED = half(0), Piece(1, (4, 64), 4), Piece(2, (4, 1), 4), half(3)
UP, ACTED, GATED, DOWN = half(4, 4, 32), half(5, 4, 32), half(6, 4, 32), half(7)
SUM = half(8)
NORM = (
    op("norm", "pointwise", [X], [SINGLE]),
    op("norm", "reduction", [SINGLE], [RSTD], [SINGLE]),
    op("norm", "pointwise", [SINGLE, RSTD], [NORMED], [SINGLE, RSTD]),
)
MLP = (
    linear(NORMED, UP, 20),
    op("mlp", "pointwise", [UP], [ACTED], [UP]),
    op("mlp", "pointwise", [ACTED, UP], [GATED], [ACTED, UP]),
    linear(GATED, DOWN, 22),
)
ADD = op("block", "pointwise", [DOWN, X], [SUM])
LAYER = unit(*NORM, *MLP, ADD)


def joined(recipe: Recipe, layer: Unit = LAYER) -> list[list[int]]:
    """The ops of each kernel, by what they write first."""
    return sorted([o.writes[0].key for o in group] for group in groups(layer, recipe))


def test_kernels_are_ops_or_what_was_written_as_one_or_all_between_two_matmuls() -> None:
    assert joined(PLAIN) == [[1], [2], [3], [5], [6], [8]]
    assert joined(HAND) == [[1, 2, 3], [5, 6], [8]]
    assert joined(replace(PLAIN, fused=frozenset({"norm"}))) == [[1, 2, 3], [5], [6], [8]]
    assert joined(COMPILED) == [[1, 2, 3], [5, 6], [8]]


def test_only_a_compiler_joins_across_modules() -> None:
    following = half(9)
    layer = unit(*LAYER.entries, op("next", "norm", [SUM], [following]))
    assert [8, 9] in joined(COMPILED, layer)
    assert [8, 9] not in joined(HAND, layer)


def test_what_a_matmul_stands_between_is_not_joined() -> None:
    after = op("norm", "pointwise", [DOWN, NORMED], [SUM])  # reads what the norm wrote, and the matmul's result
    assert [1, 2, 3] in joined(COMPILED, unit(*NORM, *MLP, after))


def test_views_are_no_kernels_and_join_what_they_lie_between() -> None:
    seen = op("block", "view", [ACTED], [ACTED])
    layer = unit(*NORM, MLP[0], MLP[1], seen, MLP[2])
    assert joined(COMPILED, layer) == [[1, 2, 3], [5, 6]]


def test_a_compiler_leaves_a_loss_alone_where_the_recipe_says_so() -> None:
    layer = unit(op("head", "pointwise", [X], [SINGLE]), op("head", "loss", [SINGLE], [RSTD]))
    assert joined(COMPILED, layer) == [[1, 2]]
    assert joined(replace(COMPILED, compiled_loss=False), layer) == [[1], [2]]


def test_a_joined_norm_reads_and_writes_once_and_keeps_its_input_and_statistics() -> None:
    cost = unit_cost(unit(*NORM), HAND, device())
    assert cost.forward_s == X.nbytes + NORMED.nbytes
    assert cost.saved == {0: 512.0, 2: 16.0}
    assert cost.backward_input_s == NORMED.nbytes + X.nbytes + 512 + 16
    assert cost.inputs == {0: 512.0}


def test_a_norm_op_by_op_moves_and_keeps_all_between() -> None:
    cost = unit_cost(unit(*NORM), PLAIN, device())
    assert cost.forward_s == (512 + 1024) + (1024 + 16) + (1024 + 16 + 512)
    assert cost.saved == {1: 1024.0, 2: 16.0}


def test_a_joined_activation_keeps_what_it_reads_alone() -> None:
    assert unit_cost(unit(*MLP[1:3]), HAND, device()).saved == {4: 256.0}
    assert unit_cost(unit(*MLP[1:3]), PLAIN, device()).saved == {4: 256.0, 5: 256.0}


def test_a_matmul_takes_its_flops_three_times_and_keeps_its_activation() -> None:
    cost = unit_cost(unit(MLP[0]), replace(PLAIN, fused_accumulation=True), device(bandwidth=1e9))
    flops = 2 * 4 * 32 * 64
    assert (cost.forward_s, cost.backward_input_s, cost.backward_weight_s) == pytest.approx((flops,) * 3)
    assert cost.saved == {3: 512.0} == cost.for_weights
    assert cost.matmuls == [(256.0, flops)]


def test_a_gradient_is_added_inside_the_matmul_or_by_a_kernel_of_its_own() -> None:
    weight = 32 * 64
    inside = unit_cost(unit(MLP[0]), replace(PLAIN, fused_accumulation=True), device(FAST)).backward_weight_s
    outside = unit_cost(unit(MLP[0]), PLAIN, device(FAST)).backward_weight_s
    moved = 2 * (32 * 64 + 4 * 32 + 4 * 64)
    assert inside == 2 * 4 * weight  # read and written, in fp32: more than the matmul itself moves
    assert outside == moved + (2 * 4 + 2) * weight


def test_the_gradient_of_a_bias_reads_that_of_the_result() -> None:
    alone, biased = (
        unit_cost(unit(linear(NORMED, UP, 20, bias)), PLAIN, device(FAST)).backward_weight_s for bias in (False, True)
    )
    assert biased - alone == UP.nbytes + 32 * (2 * 4 + 2)


ATTEND = Attend(batch=1, heads=2, kv_heads=2, queries=8, keys=8, head=8, dtype="bf16", causal=True)
QUERY, OUT = half(30, 1, 2, 8, 8), half(31, 1, 2, 8, 8)
STATISTIC = Piece(32, (1, 2, 8), 4)
CORE = Op(
    "aten.attention", "attention", "attention", attend=ATTEND, reads=(QUERY,), writes=(OUT, STATISTIC),
    kept=(QUERY, OUT, STATISTIC),
)  # fmt: skip
SCORES = 1 * 2 * 8 * 8


@pytest.mark.parametrize(
    ("attention", "dropout", "bytes_a_score"),
    [("fused_softmax", True, 5), ("fused_softmax", False, 2), ("eager", True, 7), ("eager", False, 6)],
)
def test_scores_that_are_written_out_are_kept(attention: str, dropout: bool, bytes_a_score: int) -> None:
    cost = unit_cost(unit(CORE), replace(PLAIN, attention=attention, dropout=dropout), device())
    assert sum(cost.core.values()) == bytes_a_score * SCORES
    assert sum(cost.saved.values()) == bytes_a_score * SCORES + QUERY.nbytes


def test_fused_attention_keeps_its_result_and_takes_its_curve() -> None:
    cost = unit_cost(unit(CORE), replace(PLAIN, attention="flash2"), device())
    assert cost.saved == {30: 256.0, 31: 256.0, 32: 64.0}
    assert cost.core == {31: 256.0, 32: 64.0}
    assert cost.attention_s == pytest.approx(ATTEND.flops)
    assert cost.backward_input_s == pytest.approx(2.5 * float(ATTEND.flops))


def test_collectives_know_the_matmuls_beside_them() -> None:
    whole, back = half(40, 8, 32), half(41, 8, 32)
    gather = Move("", "tp", "all_gather", whole, "reduce_scatter", whole, False, UP, whole)
    layer = unit(linear(NORMED, UP, 20), gather, linear(whole, back, 50))
    ((move, beside),) = unit_cost(layer, PLAIN, device(bandwidth=1e9)).moves
    assert move is gather
    assert beside.before.forward == 2 * 4 * 32 * 64
    assert beside.after.forward == 2 * 8 * 32 * 32
    assert Ways.sum([beside.before, beside.after]).forward == beside.before.forward + beside.after.forward


def test_parameters_of_experts_are_told_apart() -> None:
    layer = unit(parameters=(("a.weight", half(0)), ("a.mlp.experts.up.weight", half(1, 3, 5)), ("b", half(2, 2))))
    assert Elements.of(layer) == Elements(258.0, 15.0)
    assert Elements.of(layer).total == 273.0


def test_a_program_may_hold_logits_and_what_they_were_cast_from() -> None:
    loss = op("loss", "loss", [SINGLE], [RSTD], [SINGLE])
    head = unit(linear(NORMED, X, 20), op("", "pointwise", [X], [SINGLE]), loss)
    assert unit_cost(head, PLAIN, device()).saved == {3: 512.0, 1: 1024.0}
    assert unit_cost(head, replace(PLAIN, holds_outputs=True), device()).saved == {3: 512.0, 1: 1024.0, 0: 512.0}


def test_a_loss_in_two_steps_has_a_gradient_between_them() -> None:
    loss = op("loss", "loss", [SINGLE], [RSTD], [SINGLE])
    assert unit_cost(unit(loss), PLAIN, device()).working == 2 * SINGLE.nbytes + RSTD.nbytes


def test_fp8_halves_matmuls_and_what_they_keep_and_casts() -> None:
    plain = unit_cost(unit(MLP[0]), PLAIN, device(bandwidth=1e9))
    eight = unit_cost(in_fp8(unit(MLP[0])), PLAIN, device(bandwidth=1e9))
    assert eight.forward_s == pytest.approx(plain.forward_s / 2, rel=1e-3)
    assert sum(eight.saved.values()) == sum(plain.saved.values()) / 2
    assert eight.inputs == plain.inputs
    slow = unit_cost(in_fp8(unit(MLP[0])), PLAIN, device(FAST))
    assert slow.forward_s == (4 * 64 + 32 * 64 + 4 * 32) + 4 * 4 * 64  # the matmul's bytes, and those of its cast
    assert unit_cost(in_fp8(unit(MLP[0]), keeps=False), PLAIN, device()).saved == plain.saved


def test_fp8_leaves_fp32_matmuls_alone() -> None:
    router = replace(MLP[0], forward=(Product(1, 4, 32, 64, "fp32"),))
    assert next(in_fp8(unit(router)).ops) == router
