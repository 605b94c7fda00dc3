"""The way from one layout to another is the cheapest one, passes through legal layouts only, and never crosses time."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from autopar.passes.changes import Step, cost, costs, moves, path, price, settle
from autopar.passes.closure import MOST_LAYOUTS, base_dims, closure, profile
from autopar.passes.facts import Value
from autopar.passes.layout import Axis, Layout, Mesh, Wire

TP = Mesh((Axis("tp", 8),))
TWO = Mesh((Axis("dp", 2), Axis("tp", 4)))
BIG = Value((1 << 12, 64), torch.float32, True)


def rows(source: str, target: str, v: Value = BIG, mesh: Mesh = TP) -> list[str]:
    steps = path(Layout.parse(source, len(v.shape)), Layout.parse(target, len(v.shape)), v, mesh)
    assert steps is not None
    return [s.row for s in steps]


@pytest.mark.parametrize("pair", list(itertools.permutations(["S0", "S1", "R", "I", "P"], 2)))
def test_every_pair_on_one_axis_has_a_way(pair: tuple[str, str]) -> None:
    steps = rows(*pair)
    assert len(steps) in (1, 2), steps


def test_hierarchical_ways_are_found() -> None:
    assert rows("P R", "R P", mesh=TWO) != ["P>R", "R>P"]
    direct = price_of("P R", "R R") + price_of("R R", "R P")
    assert cost(Layout.parse("P R", 2), Layout.parse("R P", 2), BIG, TWO) < direct


def price_of(source: str, target: str) -> float:
    return cost(Layout.parse(source, 2), Layout.parse(target, 2), BIG, TWO)


def test_prices_are_a_metric() -> None:
    layouts = [Layout.parse(f"{a} {b}", 2) for a in ("S0", "R", "I", "P") for b in ("S1", "R", "I", "P")]
    for a, b, c in itertools.product(layouts, repeat=3):
        assert cost(a, c, BIG, TWO) <= cost(a, b, BIG, TWO) + cost(b, c, BIG, TWO) + 1e-6


def test_without_a_gradient_replicated_and_invariant_are_one() -> None:
    v = Value((8,), torch.int64)
    assert path(Layout.parse("R", 1), Layout.parse("I", 1), v, TP) == ()
    assert rows("R", "I", Value((8,), torch.float32, True)) == ["R>I"]
    assert settle(Layout.parse("R R", 1), v, Mesh((Axis("tp", 2), Axis("time", 2, (1, 1))))) == Layout.parse("I R", 1)


def test_only_the_innermost_cut_can_be_taken_off() -> None:
    nested = Layout.parse("S0 S0", 2)
    off = {s.axis for s in moves(nested, frozenset(), TWO)}
    assert off == {1}


def test_nothing_crosses_time() -> None:
    mesh = Mesh((Axis("dp", 2), Axis("time", 2, (2, 2))))
    v = Value((4, 4), torch.float32, True)
    for source, target in itertools.product(["I S0", "I P", "I R"], repeat=2):
        steps = path(Layout.parse(source, 2), Layout.parse(target, 2), v, mesh)
        legal = source == target or (source, target) in [("I R", "I S0"), ("I R", "I P"), ("I S0", "I P")]
        assert (steps is not None) == legal, (source, target)


def test_the_batch_is_cut_by_time_outside_of_dp() -> None:
    mesh = Mesh((Axis("dp", 2), Axis("time", 2, (2, 2))))
    v = Value((4,), torch.int64)
    steps = path(Layout.parse("S0 R", 1), Layout.parse("S0@1 S0@0", 1), v, mesh)
    assert steps is not None and [s.axis for s in steps] == [0, 1, 0]
    assert [str(s.target) for s in steps] == ["I R", "I S0", "S0@1 S0@0"]


def test_uneven_cuts_are_gathered_from_the_inside() -> None:
    mesh, v = Mesh((Axis("dp", 3), Axis("tp", 2))), Value((10,), torch.float32, True)
    steps = path(Layout.parse("S0@1 S0@0", 1), Layout.parse("R I", 1), v, mesh)
    assert steps is not None and [s.axis for s in steps] == [0, 1]


def test_a_step_costs_what_moves_forward_and_backward() -> None:
    small = Value((8,), torch.float32, True)
    with_grad = path(Layout.parse("S0", 1), Layout.parse("R", 1), small, TP)
    assert with_grad is not None
    free = Value((8,), torch.float32, False)
    assert price(with_grad[0], small, TP) > price(with_grad[0], free, TP)


def wire(n: int, latency: float, bandwidth: float) -> Wire:
    """A ring of ``n`` ranks: latency in s, bandwidth in bytes/s."""
    ring = (latency, (n - 1) / n / bandwidth)
    return Wire((2 * latency, 2 * (n - 1) / n / bandwidth), ring, ring, ring, 1e-12)


SLOW_FAST = Mesh((Axis("dp", 4, wire=wire(4, 3e-5, 2e10)), Axis("tp", 8, wire=wire(8, 1e-5, 3e11))))
TIMED = Mesh((*SLOW_FAST.axes, Axis("time", 2, (8, 8))))
WORDS = {
    "even": ["S0", "S1", "S2", "R", "I", "P"],
    "parts": ["S0", "S2(512+256+256)", "R", "I", "P"],
    "time": ["S0", "S1", "R", "I", "P"],
    "uneven": ["S0", "S0/25", "S1", "R", "I", "P"],
}


def some_layouts(case: str, mesh: Mesh, shape: tuple[int, ...]) -> list[Layout]:
    found = []
    for words in itertools.product(WORDS[case], WORDS[case], *([["S0", "R", "P"]] if mesh.time is not None else [])):
        layout = Layout.uniform("R", len(words), len(shape))
        try:
            for axis in sorted(range(len(words)), key=lambda a: a != mesh.time):
                word = Layout.parse(words[axis], len(shape))
                dim = word.dim_of(0)
                layout = (
                    layout.with_kind(axis, words[axis])
                    if dim is None
                    else layout.with_shard(axis, dim, word.dims[dim].parts, word.dims[dim].items)
                )
        except ValueError:
            continue
        if layout.is_even(shape, mesh) or case == "uneven":
            found.append(layout)
    return found


def test_what_is_padded_is_sent() -> None:
    """Five items over two ranks take as long as six."""
    mesh, whole = Mesh((Axis("tp", 2),)), Layout.parse("I", 1)
    five, six = (Value((8 * n,), torch.float32, True) for n in (5, 6))
    assert cost(Layout.parse("S0/5", 1), whole, five, mesh) == pytest.approx(
        cost(Layout.parse("S0", 1), whole, six, mesh)
    )


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("case", "mesh", "shape"),
    [
        ("even", SLOW_FAST, (64, 32, 64)),
        ("parts", SLOW_FAST, (64, 32, 1024)),
        ("time", TIMED, (64, 32)),
        ("uneven", SLOW_FAST, (50, 7)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_is_priced_is_what_is_emitted(case: str, mesh: Mesh, shape: tuple[int, ...], grad: bool) -> None:
    v = Value(shape, torch.bfloat16, grad)
    layouts = some_layouts(case, mesh, shape)
    table = costs(layouts, layouts, v, mesh)
    drawn = random.Random(0)
    for i, j in [(drawn.randrange(len(layouts)), drawn.randrange(len(layouts))) for _ in range(300)]:
        a, b = layouts[i], layouts[j]
        steps = path(a, b, v, mesh)
        assert cost(a, b, v, mesh) == table[i, j]
        if steps is None:
            assert np.isinf(table[i, j])
            continue
        assert sum(price(s, v, mesh) for s in steps) == pytest.approx(table[i, j], rel=1e-9)
        ends = [settle(a, v, mesh), *(s.target for s in steps)]
        assert [s.source for s in steps] == ends[:-1] and ends[-1] == settle(b, v, mesh)
        for step in steps:
            legal = moves(step.source, [(d, s) for d, s in enumerate(step.target.dims) if s.axes], mesh)
            assert any((m.row, settle(m.target, v, mesh)) == (step.row, step.target) for m in legal)


@pytest.mark.parametrize(("case", "mesh", "shape"), [("even", SLOW_FAST, (64, 32, 64)), ("time", TIMED, (64, 32))])
def test_no_detour_is_cheaper(case: str, mesh: Mesh, shape: tuple[int, ...]) -> None:
    v = Value(shape, torch.float32, True)
    layouts = some_layouts(case, mesh, shape)
    table = costs(layouts, layouts, v, mesh)
    detours = (table[:, :, None] + table[None]).min(axis=1)
    assert (table <= detours * (1 + 1e-12)).all()
    assert (np.diagonal(table) == 0).all()


def test_all_legal_layouts_stand_in_one_closure() -> None:
    v = Value((64, 32, 64), torch.float32, True)
    ends = [profile(x, v, SLOW_FAST) for x in some_layouts("even", SLOW_FAST, v.shape)]
    assert len(set(ends)) == 1
    ways = closure(ends[0], ends[0], v, SLOW_FAST)
    assert ways is not None and len(ways.structure.layouts) == 39 and np.isfinite(ways.seconds).all()


@pytest.mark.parametrize(("axes", "dims"), [(3, 6), (3, 3), (2, 8)])
def test_many_dims_leave_few_layouts(axes: int, dims: int) -> None:
    mesh = Mesh(tuple(Axis(str(a), 2) for a in range(axes)))
    v = Value((8,) * dims, torch.float32, True)
    last = Layout.uniform("R", axes, dims).with_shard(0, dims - 1)
    ends = profile(Layout.uniform("P", axes, dims), v, mesh), profile(last, v, mesh)
    ways = closure(ends[0], ends[0], v, mesh)
    assert base_dims(v.shape, mesh) and ways is not None and len(ways.structure.layouts) <= MOST_LAYOUTS
    assert path(Layout.uniform("P", axes, dims), last, v, mesh) is not None


def test_a_slow_axis_sees_only_a_piece() -> None:
    v = Value((64, 1 << 20), torch.bfloat16, True)
    steps = path(Layout.parse("P R", 2), Layout.parse("R P", 2), v, SLOW_FAST)
    assert steps is not None
    slow = [s for s in steps if s.axis == 0]
    assert [s.row for s in slow] == ["P>R"] and all(s.source.kinds[1] == "S" for s in slow)


def test_bytes_are_counted_as_nccl_tests_does() -> None:
    """all_reduce and all_to_all what a rank holds, all_gather the result, reduce_scatter the input."""
    unit = {"all_reduce": 1.0, "all_gather": 1e2, "reduce_scatter": 1e4, "all_to_all": 1e6}
    mesh = Mesh((Axis("tp", 4, wire=Wire(copy=0.0, **{k: (0.0, s) for k, s in unit.items()})),))
    v, free = Value((4, 4), torch.float32, True), Value((4, 4), torch.float32)
    texts = {"P>I": 64, "S0>R": 64e2 + 64e4, "S0>I": 64e2, "P>S0": 64e4 + 64e2, "S0>S1": 2 * 16e6, "I>S0": 64e2}
    for text, expected in texts.items():
        ends = [Layout.parse(t, 2) for t in text.split(">")]
        step = Step(">".join(end.kinds for end in ends), 0, *ends)
        assert price(step, v, mesh) == pytest.approx(expected), text
    assert price(Step("S>R", 0, ends[1], Layout.parse("R", 2)), free, mesh) == pytest.approx(64e2)
