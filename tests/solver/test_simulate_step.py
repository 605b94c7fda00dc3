"""Whole steps against closed forms: bubbles, what overlaps and what does not, bytes and their owners."""

from dataclasses import replace
from itertools import product

import pytest

from autopar.errors import AutoparError
from autopar.solver.simulate import Chunk, Step, UnitTimes, run, tasks_of

LAYER = UnitTimes("layer", forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
EXACT = {"rel": 1e-12, "abs": 1e-12}


def pipeline(ranks: int, chunks: int, unit: UnitTimes = LAYER, send: float = 0.0, times: int = 1) -> tuple:
    last = ranks * chunks - 1
    return tuple(
        tuple(Chunk(((unit, times),), send if c * ranks + r < last else 0.0) for c in range(chunks))
        for r in range(ranks)
    )


def alone(unit: UnitTimes, times: int = 4, **more) -> Step:
    return Step(chunks=((Chunk(((unit, times),)),),), **more)


@pytest.mark.parametrize(("p", "groups", "v"), list(product((1, 2, 4, 8), (1, 2, 5), (1, 2, 3))))
def test_bubble(p, groups, v):
    """(p-1)/(v m + p-1), Narayanan et al. 2021; no schedule of whole backwards has less without several chunks."""
    m = p * groups
    expected = (p - 1) / (v * m + p - 1)
    line = run(Step(pipeline(p, v), m, "interleaved"))
    assert line.bubble == pytest.approx(expected, **EXACT)
    assert line.seconds == pytest.approx(3 * (v * m + p - 1), **EXACT)
    if v == 1:
        for name in ("1f1b", "gpipe"):
            assert run(Step(pipeline(p, 1), m, name)).bubble == pytest.approx(expected, **EXACT)


def test_one_rank_needs_no_schedule():
    line = run(alone(LAYER, microbatches=3, schedule="none", optimizer_s=(0.5,)))
    assert line.parts(0) == {"forward": 12.0, "backward": 24.0, "optimizer": 0.5, "bubble": 0.0}


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 1), (4, 16, 2), (8, 16, 1), (8, 32, 2)])
def test_sends_beside_computation_cost_one_way_through_all_stages_and_back(p, m, v):
    name = "gpipe" if v == 1 else "interleaved"
    quiet, loud = (run(Step(pipeline(p, v, send=c), m, name, overlap_p2p=True)) for c in (0.0, 0.125))
    assert loud.seconds - quiet.seconds == pytest.approx(2 * (p * v - 1) * 0.125, **EXACT)


@pytest.mark.parametrize(("p", "m"), [(3, 6), (4, 8), (8, 24)])
def test_sends_that_computation_waits_for_cost_a_rank_two_of_each_microbatch(p, m):
    chunks = pipeline(p, 1, send=0.125)
    line = run(Step(chunks, m, "gpipe"))
    assert line.seconds - 3 * (m + p - 1) == pytest.approx(2 * (m + p - 2) * 0.125, **EXACT)
    assert [line.parts(r)["p2p"] for r in (0, 1, p - 1)] == [0.125 * m, 0.25 * m, 0.125 * m]


def test_kinds_and_recomputation_are_parts_of_their_pass():
    unit = replace(LAYER, forward_comm_s=0.25, backward_comm_s=0.5, recompute_s=1.25)
    line = run(alone(unit, 2, microbatches=3))
    assert line.parts(0) == {"forward": 6.0, "tp": 4.5, "recompute": 7.5, "backward": 12.0, "bubble": 0.0}
    parted = run(replace(alone(unit, 2, microbatches=3), schedule="zb-1p"))
    assert parted.parts(0) == {**line.parts(0), "backward": 6.0, "weight": 6.0}
    assert run(alone(replace(unit, comm="cp"), 2)).parts(0)["cp"] == 1.5


@pytest.mark.parametrize("m", [1, 3, 8])
def test_activations_in_flight(m):
    unit = replace(LAYER, saved_bytes=10.0, recompute_bytes=3.0, working_bytes=1.0)
    for p, v in ((4, 1), (4, 2)):
        line = run(Step(pipeline(p, v, unit, times=5), m, "1f1b" if v == 1 else "interleaved"))
        for r in range(p):
            flying = min(p - r, m) if v == 1 else min(2 * (p - r - 1) + p + 1, v * m)
            if v == 2 and m % p:
                continue
            assert line.peak(r).owners == {"activations": 50.0 * flying, "recompute": 3.0, "working": 1.0}
            assert line.memory(r)[1][-1] == 0.0


def test_working_bytes_are_those_of_the_largest_unit():
    small, large = replace(LAYER, recompute_bytes=4.0), replace(LAYER, recompute_bytes=2.0, working_bytes=3.0)
    line = run(Step(chunks=((Chunk(((small, 7), (large, 1))),),), static=((("weights", 100.0),),)))
    assert line.peak(0).owners == {"weights": 100.0, "recompute": 2.0, "working": 3.0}


def test_weight_gradients_hold_what_they_need():
    """ZB-H1 holds p microbatches on the first rank, on the last one and what weight gradients of p-1 need."""
    unit = replace(LAYER, saved_bytes=10.0, weight_bytes=4.0)
    line = run(Step(pipeline(4, 1, unit), 8, "zb-h1"))
    assert [line.peak(r).nbytes for r in range(4)] == [40.0, 34.0, 28.0, 22.0]
    assert all(line.memory(r)[1][-1] == 0.0 for r in range(4))


DATA = replace(LAYER, gather_s=0.5, reduce_s=0.5, gathered_bytes=10.0, gradient_bytes=20.0)


def per_use(**more) -> Step:
    return alone(DATA, microbatches=2, gather="use", reduce="microbatch", **more)


def test_per_use_collectives_hide_behind_computation():
    """All but the first gather, which nothing precedes, and the last reduction, which nothing follows; and of the
    second microbatch the same again, as its first gather comes after the reduction before it on the same links."""
    shared = run(per_use())
    assert shared.parts(0) == {"forward": 8.0, "backward": 16.0, "gather": 1.0, "reduce": 1.0, "bubble": 0.0}
    apart = run(per_use(shared_data=False))
    assert apart.parts(0) == {"forward": 8.0, "backward": 16.0, "gather": 1.0, "reduce": 0.5, "bubble": 0.0}
    assert shared.busy(0)["gather"] == 2 * (4 + 3) * 0.5  # the last layer stays whole for its backward
    assert shared.busy(0)["reduce"] == 2 * 4 * 0.5


def test_per_use_collectives_that_do_not_overlap_are_paid_in_full():
    line = run(per_use(overlap_gather=False, overlap_reduce=False))
    assert line.parts(0) == {"forward": 8.0, "backward": 16.0, "gather": 7.0, "reduce": 4.0, "bubble": 0.0}


def test_slow_links_set_the_pace():
    """Gathers of 3 s: forward is 4 of them and the last layer; of backward the first layer is there, 3 are not."""
    unit = replace(DATA, gather_s=3.0, reduce_s=0.0)
    line = run(alone(unit, gather="use", shared_data=False))
    assert line.seconds == 4 * 3.0 + 1.0 + 3 * 3.0 + 2.0
    assert line.parts(0)["gather"] == line.seconds - 12.0


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_no_more_weights_are_whole_than_are_used_and_prefetched(ahead):
    line = run(alone(replace(DATA, gradient_bytes=0.0), microbatches=2, gather="use", prefetch=ahead))
    assert line.peak(0).owners == {"gathered": 10.0 * (1 + ahead)}
    assert line.memory(0)[1][-1] == 0.0


def test_weights_kept_after_forward_are_gathered_once_a_microbatch():
    line = run(per_use(reshard_after_forward=False))
    assert line.busy(0)["gather"] == 2 * 4 * 0.5
    assert max(nbytes for nbytes in line.memory(0)[1]) >= 40.0
    assert line.memory(0)[1][-1] == 0.0


def test_gradients_live_until_they_are_reduced():
    late = run(alone(replace(DATA, reduce_s=100.0), reduce="microbatch"))
    assert late.peak(0).owners["gradients"] == 4 * 20.0
    soon = run(alone(DATA, reduce="microbatch"))
    assert soon.peak(0).owners["gradients"] == 2 * 20.0


def test_once_a_step_only_the_ends_show():
    """One gather before the first unit, one reduction after the last; without overlap all of them."""
    step = alone(DATA, microbatches=3, gather="step", reduce="step")
    assert run(step).parts(0) == {"forward": 12.0, "backward": 24.0, "gather": 0.5, "reduce": 0.5, "bubble": 0.0}
    bare = run(replace(step, overlap_gather=False, overlap_reduce=False))
    assert bare.parts(0) == {"forward": 12.0, "backward": 24.0, "gather": 2.0, "reduce": 2.0, "bubble": 0.0}


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe", "zb-1p", "zb-2p"])
def test_once_a_step_in_a_pipeline_every_unit_takes_part_once(name):
    chunks = pipeline(4, 2 if name == "interleaved" else 1, DATA, times=3)
    line = run(Step(chunks, 8, name, gather="step", reduce="step", staggered=False))
    units = 3 * len(chunks[0])
    for rank in range(4):
        assert line.busy(rank)["gather"] == line.busy(rank)["reduce"] == 0.5 * units
        assert line.parts(rank)["bubble"] >= 0
        assert sum(line.parts(rank).values()) == pytest.approx(line.seconds, **EXACT)


def test_the_optimizer_waits_for_all_ranks_unless_steps_are_staggered():
    step = Step(pipeline(4, 1), 8, "1f1b", optimizer_s=(1.0, 2.0, 3.0, 1.0))
    met, apart = run(step), run(replace(step, staggered=True))
    assert met.seconds == 3 * (8 + 3) + 3.0
    assert apart.seconds == 3 * (8 + 3) + 1.0  # the first rank is at it from the start to the end
    zero = run(replace(step, schedule="zb-2p"))
    assert zero.seconds == 24.0 + 3.0
    assert zero.bubble == pytest.approx((2 + 1 + 0 + 2) / 4 / 27, **EXACT)


def test_a_tied_weight_is_added_up_by_the_ends_once_both_are_done():
    step = Step(pipeline(4, 1, replace(LAYER, reduce_s=0.5)), 8, "1f1b", reduce="step", optimizer_s=(1.0,) * 4)
    line = run(replace(step, tied_s=2.0))
    assert line.seconds == 3 * (8 + 3) + 0.5 + 2.0 + 1.0
    assert [line.busy(r)["reduce"] for r in range(4)] == [2.5, 0.5, 0.5, 2.5]


def test_uneven_stages_wait_for_the_slowest():
    slow = replace(LAYER, forward_s=2.0)
    chunks = ((Chunk(((LAYER, 1),)),), (Chunk(((slow, 1),)),), (Chunk(((LAYER, 1),)),))
    line = run(Step(chunks, 50, "1f1b"))
    first, round_trip, last = 1.0, 3.0, 2.0  # the slow rank waits for these, and has a pass to do during a round trip
    assert line.seconds == 50 * 4.0 + first + (round_trip - 2.0) * 2 + last
    assert line.parts(1)["bubble"] < line.parts(0)["bubble"]


def test_what_makes_no_sense_is_refused():
    for step, why in (
        (alone(LAYER, gather="always"), "step.gather 'always' is not known. Legal: never, step, use"),
        (alone(LAYER, reduce="late"), "step.reduce 'late' is not known"),
        (Step(pipeline(2, 1) + pipeline(1, 2)), r"ranks have \[1, 2\] chunks"),
        (Step(pipeline(2, 2), 2, "1f1b"), "has one chunk a rank, not 2"),
    ):
        with pytest.raises(AutoparError, match=why):
            tasks_of(step)


def test_a_task_a_pass_where_nothing_runs_beside():
    tasks = tasks_of(Step(pipeline(4, 2, times=10), 8, "interleaved"))
    assert len(tasks) == 4 * 2 * 8 * 2


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-2p"])
def test_whole_passes_and_units_agree(name):
    """Collectives that take no time change nothing, though they make one task a unit."""
    unit = replace(LAYER, forward_comm_s=0.25, recompute_s=0.5, saved_bytes=8.0, weight_bytes=2.0, recompute_bytes=4.0)
    chunks = pipeline(4, 2 if name == "interleaved" else 1, unit, send=0.125, times=3)
    whole = Step(chunks, 8, name, optimizer_s=(1.0,) * 4)
    for beside in (False, True):
        step = replace(whole, overlap_p2p=beside)
        lines = [run(step), run(replace(step, gather="use", reduce="microbatch"))]
        assert len(lines[1].tasks) > 3 * len(lines[0].tasks) * (1 if not beside else 0.5)
        assert lines[0].seconds == pytest.approx(lines[1].seconds, **EXACT)
        for rank in range(4):
            assert lines[0].parts(rank) == pytest.approx(lines[1].parts(rank), rel=1e-9, abs=1e-9)
            assert lines[0].peak(rank).owners["recompute"] == lines[1].peak(rank).owners["recompute"] == 4.0


def test_whatever_the_step_time_adds_up_and_memory_comes_back():
    fields = product(("1f1b", "interleaved", "zb-1p"), ("never", "step", "use"), ("never", "step", "microbatch"))
    for (name, gather, reduce), overlap, keep in product(fields, (False, True), (False, True)):
        unit = replace(DATA, saved_bytes=8.0, forward_comm_s=0.125)
        chunks = pipeline(3, 2 if name == "interleaved" else 1, unit, send=0.25, times=2)
        line = run(
            Step(chunks, 6, name, gather, reduce, overlap, overlap, overlap, (0.5,) * 3, reshard_after_forward=not keep)
        )
        for rank in range(3):
            assert sum(line.parts(rank).values()) == pytest.approx(line.seconds, **EXACT)
            assert line.parts(rank)["bubble"] >= -1e-9
            left = 20.0 * len(chunks[0]) if gather == "step" else 0.0  # what a whole step uses stays
            assert line.memory(rank)[1][-1] == left
            assert line.memory(rank)[1].min() >= 0.0
