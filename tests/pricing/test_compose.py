"""Stages, collectives, recomputation and bytes by owner, on a network that moves a byte a second and remembers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from autopar.errors import AutoparError
from autopar.pricing.compose import (
    Layout,
    Priced,
    data_seconds,
    exposed,
    held_elements,
    inside_seconds,
    layers_of_chunks,
    optimizer_seconds,
    send_seconds,
    stages_of,
    static_bytes,
    step_of,
    tied_seconds,
    times,
)
from autopar.pricing.kernels import Beside, Elements, UnitCost, Ways
from autopar.pricing.recipe import Recipe
from autopar.solver.cost.device import Device
from autopar.solver.cost.network import Network
from autopar.solver.simulate.step import run
from autopar.solver.work import Move, Piece

SIXTEEN = Recipe(weight=2, gradient=2, optimizer=12)


@dataclass
class Wire:
    """A network whose collectives take a second a byte, and are remembered."""

    calls: list[tuple[str, float, int, int]] = field(default_factory=list)

    def seconds(self, kind: str, nbytes: float, size: int, stride: int) -> float:
        self.calls.append((kind, nbytes, size, stride))
        return nbytes


def layer_cost() -> UnitCost:
    """Saved: 10 from outside, 40 in the attention core, 30 and 20 of matmuls."""
    return UnitCost(
        "layer",
        forward_s=8.0,
        backward_input_s=9.0,
        backward_weight_s=7.0,
        attention_s=2.0,
        saved={"in": 10.0, "core": 40.0, "a": 30.0, "b": 20.0},
        core={"core": 40.0},
        inputs={"in": 10.0},
        matmuls=[(30.0, 1.0), (20.0, 2.0)],
        attended=5.0,
        for_weights={"a": 30.0},
        working=4.0,
        elements=Elements(100.0),
    )


def priced(recipe: Recipe = SIXTEEN, layer: UnitCost | None = None, **more: Any) -> Priced:
    prefix, suffix = UnitCost("prefix", elements=Elements(50.0)), UnitCost("suffix", elements=Elements(60.0))
    device = Device("hand", {}, {}, {}, bandwidth=1.0)
    network = cast(Network, more.pop("network", Wire()))
    return Priced(prefix, layer or layer_cost(), suffix, more.pop("boundary", 16.0), recipe, device, network, **more)


@pytest.mark.parametrize(
    ("layers", "pp", "vp", "expected"),
    [
        (8, 4, 1, [2, 2, 2, 2]),
        (8, 2, 2, [2, 2, 2, 2]),
        (30, 8, 1, [3, 4, 4, 4, 4, 4, 4, 3]),  # embedding and head count as a layer each
        (9, 4, 1, [3, 2, 2, 2]),
        (126, 16, 8, [0, *[1] * 126, 0]),
    ],
)
def test_layers_of_chunks(layers: int, pp: int, vp: int, expected: list[int]) -> None:
    assert layers_of_chunks(layers, pp, vp) == expected
    assert sum(expected) == layers


def test_more_chunks_than_layers_is_an_error() -> None:
    with pytest.raises(AutoparError, match="pp=4 vp=2: 5 layers make no 8 chunks. Take at most 5."):
        layers_of_chunks(5, 4, 2)


def test_stages_hold_the_embedding_first_and_the_head_last() -> None:
    stages = stages_of(Layout(8, pp=2, vp=2), priced())
    assert [[(u.name, n) for u, n in stage] for stage in stages] == [
        [("prefix", 1), ("layer", 2)],
        [("layer", 2)],
        [("layer", 2)],
        [("layer", 2), ("suffix", 1)],
    ]


def test_a_step_deals_chunks_to_ranks_in_turn() -> None:
    step = step_of(Layout(8, pp=2, vp=2, schedule="interleaved", microbatches=4), priced())
    names = [[[u.name for u, _ in chunk.units] for chunk in rank] for rank in step.chunks]
    assert names == [[["prefix", "layer"], ["layer"]], [["layer"], ["layer", "suffix"]]]
    assert [[chunk.send_s for chunk in rank] for rank in step.chunks] == [[16.0, 16.0], [16.0, 0.0]]
    assert step.reduce == step.gather == "never"


@pytest.mark.parametrize(
    ("zero", "gather", "reduce"), [(0, "never", "step"), (1, "step", "step"), (3, "use", "microbatch")]
)
def test_when_weights_are_gathered_and_gradients_reduced(zero: int, gather: str, reduce: str) -> None:
    step = step_of(Layout(2, dp=4, zero=zero), priced())
    assert (step.gather, step.reduce) == (gather, reduce)
    assert step.reshard_after_forward == (zero == 3)


def test_a_tied_table_is_held_once_by_one_rank_and_twice_by_a_pipeline() -> None:
    whole, parted = Layout(4, tied=True), Layout(4, tied=True, pp=2)
    cost = priced(table=50.0)
    assert held_elements(stages_of(whole, cost), whole, cost) == Elements(400.0 + 60.0, 0.0)
    assert held_elements(stages_of(parted, cost), parted, cost) == Elements(400.0 + 110.0, 0.0)


@pytest.mark.parametrize(
    ("zero", "expected"),
    [(0, 16.0), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 14 / 8)],
)
def test_sixteen_bytes_a_parameter_and_what_zero_parts(zero: int, expected: float) -> None:
    """Of ZeRO-2 as FSDP runs it, weights are whole from forward to backward; of ZeRO-3, only those at use."""
    layout = Layout(1, dp=8, zero=zero)
    cost = priced(layer=replace(layer_cost(), elements=Elements(1e6), saved={}))
    static = static_bytes(Elements(1e6), layout, SIXTEEN)
    owners = run(step_of(layout, cost)).peak(0).owners
    whole = owners["gathered"] if zero == 2 else 0.0
    assert (sum(static.values()) + whole) / 1e6 == pytest.approx(expected, rel=1e-3)


def test_experts_are_parted_over_the_ranks_that_hold_the_same() -> None:
    layout, elements = Layout(1, dp=8, ep=4, zero=1), Elements(80.0, 40.0)
    held = static_bytes(elements, layout, SIXTEEN)
    assert held == {"parameters": 240.0, "gradients": 240.0, "optimizer": 12 * (80 / 8 + 40 / 2)}


def test_gradients_of_experts_are_reduced_among_those_that_hold_the_same() -> None:
    wire, elements = Wire(), Elements(80.0, 40.0)
    assert data_seconds(elements, Layout(1, tp=2, dp=8, ep=4), priced(network=wire)) == (0.0, 240.0)
    assert wire.calls == [("all_reduce", 160.0, 8, 2), ("all_reduce", 80.0, 2, 8)]
    wire.calls.clear()
    assert data_seconds(elements, Layout(1, dp=4, ep=4, zero=1), priced(network=wire)) == (160.0, 160.0)
    assert wire.calls == [("all_gather", 160.0, 4, 1), ("reduce_scatter", 160.0, 4, 1)]


def test_context_ranks_hold_the_same_weights() -> None:
    wire = Wire()
    data_seconds(Elements(10.0), Layout(1, tp=2, cp=2, dp=4), priced(network=wire))
    assert wire.calls == [("all_reduce", 20.0, 8, 2)]
    assert data_seconds(Elements(10.0), Layout(1, tp=8), priced()) == (0.0, 0.0)


def test_the_optimizer_moves_its_bytes_once() -> None:
    elements = Elements(100.0)
    each = 2 + 2 + 2 * 12 + 2  # the gradient twice, states read and written, the weight written
    assert optimizer_seconds(elements, Layout(1, dp=4), priced()) == 100 * each
    assert optimizer_seconds(elements, Layout(1, dp=4, zero=1), priced()) == 25 * each
    many = replace(SIXTEEN, optimizer_traffic=80)
    assert optimizer_seconds(elements, Layout(1), priced(many)) == 100 * (2 + 80)


@pytest.mark.parametrize(
    ("recompute", "saved", "working", "seconds"),
    [
        ("none", 100.0, 0.0, 0.0),
        ("full", 10.0, 90.0 + 4.0, 8.0),
        ("attention", 60.0, 40.0 + 4.0, 2.0),
        ("ops", 10.0 + 5.0 + 30.0, 55.0 + 4.0, 8.0 - 2.0 - 1.0),  # every second matmul is kept
    ],
)
def test_what_is_kept_and_what_is_computed_again(recompute: str, saved: float, working: float, seconds: float) -> None:
    found = times(layer_cost(), Layout(1, recompute=recompute), priced())
    assert (found.saved_bytes, found.recompute_bytes, found.recompute_s) == (saved, working, seconds)
    assert found.working_bytes == (4.0 if recompute == "none" else 0.0)
    assert found.weight_bytes == min(saved, 30.0)


def test_only_layers_are_computed_again() -> None:
    head = replace(layer_cost(), name="suffix")
    assert times(head, Layout(1, recompute="full"), priced()).saved_bytes == 100.0


def test_an_unknown_recomputation_is_an_error() -> None:
    with pytest.raises(AutoparError, match="recompute 'some' is not known. Legal: none, full, attention, ops"):
        times(layer_cost(), Layout(1, recompute="some"), priced())


def test_weights_that_are_gathered_at_use_are_copied_and_slow_what_runs_beside() -> None:
    recipe = replace(SIXTEEN, gather_copies=4, reduce_copies=6)
    found = times(layer_cost(), Layout(1, dp=4, zero=3), priced(recipe, beside=0.8))
    assert (found.gather_s, found.reduce_s) == (200.0, 200.0)
    assert found.forward_s == pytest.approx(8 + 0.25 * 200 + 400)
    assert found.backward_input_s == pytest.approx(9 + 0.25 * 400 + 400 + 600)
    assert (found.gathered_bytes, found.gradient_bytes) == (200.0, 200.0)
    alone = times(layer_cost(), Layout(1, dp=4, zero=1), priced(recipe, beside=0.8))
    assert (alone.forward_s, alone.gathered_bytes) == (8.0, 0.0)


BEFORE, AFTER = Ways(4.0, 5.0, 6.0), Ways(7.0, 8.0, 9.0)
PIECE = Piece(0, (16,), 1)


def moved(kind: str, backward: str, again: bool = False, axis: str = "tp") -> Move:
    return Move("", axis, kind, PIECE, backward, PIECE, False, PIECE, PIECE, again)


@pytest.mark.parametrize(
    ("recipe", "move", "forward", "backward"),
    [
        (Recipe(), moved("all_gather", "reduce_scatter"), 16.0, 16.0),
        (Recipe(), moved("all_gather", "reduce_scatter", again=True), 16.0, 32.0),
        # in 4 pieces: one is waited for, three run beside the matmul of 7 (forward) and of 8 (backward) seconds
        (Recipe(overlap_tensor=True), moved("all_gather", "reduce_scatter"), 4 + 12 - 7, 4 + 12 - 8),
        (Recipe(overlap_tensor=True), moved("reduce_scatter", "all_gather"), 4 + 12 - 4, 4 + 12 - 5),
        (Recipe(overlap_tensor=True), moved("all_gather", "reduce_scatter", again=True), 4 + 12 - 7, 8 + 16 - 9),
        # whole: the sum beside the weight gradients (9), the second gather beside those of activations (8)
        (Recipe(overlap_backward=True), moved("all_gather", "reduce_scatter"), 16.0, 16 - 9),
        (Recipe(overlap_backward=True), moved("all_gather", "reduce_scatter", again=True), 16.0, 16 - 9 + 16 - 8),
        (Recipe(overlap_backward=True), moved("reduce_scatter", "all_gather"), 16.0, 16.0),
    ],
)
def test_what_of_a_collective_is_waited_for(recipe: Recipe, move: Move, forward: float, backward: float) -> None:
    assert exposed(move, Beside(BEFORE, AFTER), 16.0, 16.0, 4, recipe) == (forward, backward)


def test_collectives_inside_a_unit_run_on_their_own_ranks() -> None:
    wire, nothing = Wire(), Beside(Ways(), Ways())
    moves = [moved("all_gather", "reduce_scatter"), moved("all_to_all", "all_to_all", axis="ep")]
    cost = replace(layer_cost(), moves=tuple((m, nothing) for m in moves))
    layout = Layout(1, tp=2, dp=8, ep=4)
    assert inside_seconds(cost, layout, priced(network=wire)) == (32.0, 32.0)
    assert wire.calls == [
        ("all_gather", 16.0, 2, 1),
        ("reduce_scatter", 16.0, 2, 1),
        ("all_to_all", 16.0, 4, 2),
        ("all_to_all", 16.0, 4, 2),
    ]
    assert times(cost, layout, priced()).comm == "tp+ep"
    assert times(cost, replace(layout, tp=1), priced()).comm == "ep"


def test_a_ring_hides_behind_the_attention_of_what_has_arrived() -> None:
    """Of 2 context ranks, half of attention (1 s forward, 2 backward) runs while keys and values travel."""
    cost = replace(layer_cost(), moves=((moved("all_gather", "reduce_scatter", axis="cp"), Beside(Ways(), Ways())),))
    assert inside_seconds(cost, Layout(1, cp=2), priced()) == (16 - 1, 2 * 16 - 2)
    busy = replace(cost, attention_s=1000.0)
    assert inside_seconds(busy, Layout(1, cp=2), priced()) == (0.0, 0.0)


def test_what_stages_send() -> None:
    wire = Wire()
    assert send_seconds(Layout(4), priced(network=wire)) == 0.0
    assert send_seconds(Layout(4, pp=2, tp=4, dp=2), priced(network=wire)) == 16.0
    assert send_seconds(Layout(4, pp=2, tp=4, sequence_parallel=True), priced(network=wire)) == 4.0
    scattered = priced(replace(SIXTEEN, scatter_send=True), network=wire)
    assert send_seconds(Layout(4, pp=2, tp=4), scattered) == 4.0 + 16.0
    assert wire.calls == [("send", 16.0, 2, 8), ("send", 4.0, 2, 4), ("send", 4.0, 2, 4), ("all_gather", 16.0, 4, 1)]


def test_a_table_at_both_ends_of_a_pipeline_adds_up_its_gradients() -> None:
    wire = Wire()
    assert tied_seconds(Layout(4, pp=4, tp=2, dp=3, tied=True), priced(network=wire, table=50.0)) == 100.0
    assert wire.calls == [("all_reduce", 100.0, 2, 18)]
    assert tied_seconds(Layout(4, tied=True), priced(table=50.0)) == 0.0
    assert tied_seconds(Layout(4, pp=4), priced(table=50.0)) == 0.0
