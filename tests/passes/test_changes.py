"""The way from one layout to another is the cheapest one, passes through legal layouts only, and never crosses time."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.passes.changes import cost, moves, path, price, settle
from autopar.passes.facts import Value
from autopar.passes.layout import Axis, Layout, Mesh

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
