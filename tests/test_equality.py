"""The definition of equal: scales, floors, limits, and what no limit forgives."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.equality import FP32, FP64, Difference, Doubt, Run, distances, farthest_by_kind, judge


def run(**changes: Any) -> Run:
    base = Run(
        loss=torch.tensor(2.0, dtype=torch.float64),
        grads={"w": torch.tensor([1.0, -4.0]).double(), "b": t(1e-20), "spare": None},
        buffers={"mean": torch.tensor([0.5, 0.25]).double(), "count": torch.tensor(3)},
        params={"w": torch.tensor([10.0, 2.0]).double(), "b": torch.tensor([0.0]).double()},
        names=("w", "b", "tied"),
    )
    return replace(base, **changes)


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def far(candidate: Run, reference: Run | None = None) -> dict[tuple[str, str], float]:
    return {(d.kind, d.name): d.rel for d in distances(candidate, reference or run(), lr=0.1) if d.rel}


def test_equal_runs_have_no_distance() -> None:
    found = distances(run(), run(), lr=0.1)
    assert far(run()) == {}
    assert judge(found, FP64) == (
        True,
        ("fp64 loss 1.0e-10", "fp64 grad 1.0e-10", "fp64 buffer 1.0e-10", "fp64 param 1.0e-09"),
    )


def test_scales_are_the_largest_value_with_a_floor() -> None:
    noise = run(grads={"w": t(1.0, -4.0), "b": t(-3e-13), "spare": None})
    assert far(noise) == {("grad", "b"): pytest.approx(3e-13 / 4e-3)}
    assert far(run(grads={"w": t(1.0, -4.2), "b": t(1e-20), "spare": None})) == {("grad", "w"): pytest.approx(0.05)}
    assert far(run(params={"w": t(10.0, 2.0), "b": t(1e-3)})) == {("param", "b"): pytest.approx(1e-2)}  # lr 0.1
    assert far(run(loss=t(2.2)[0])) == {("loss", "loss"): pytest.approx(0.1)}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"grads": {"w": t(1.0, -4.0), "b": None, "spare": None}}, "b (None, unlike one process)"),
        ({"grads": {"w": t(1.0, -4.0), "b": t(0), "spare": t(0)}}, "spare (not None, unlike one process)"),
        ({"grads": {"w": t(1.0, -4.0), "b": t(1e-20)}}, "spare (only in one process)"),
        ({"buffers": {"mean": t(0.5, 0.25), "count": torch.tensor(4)}}, "count (integers)"),
        ({"params": {"w": t(10.0, 2.0, 0.0), "b": t(0)}}, "w (shape (3,), not (2,))"),
        ({"names": ("w", "b")}, "names (tied)"),
        ({"names": ("b", "w", "tied")}, "names (their order)"),
    ],
)
def test_no_limit_forgives_what_is_not_a_number(changes: dict[str, Any], name: str) -> None:
    found = distances(run(**changes), run(), lr=0.1)
    assert (found[0].name, found[0].rel) == (name, math.inf)
    assert not judge(found, FP32, lambda: Doubt(dict.fromkeys(("loss", "grad", "buffer", "param"), 1.0)))[0]


def test_equal_infinities_and_nans_are_equal() -> None:
    odd = {"mask": t(-math.inf, 0.0, math.nan)}
    assert far(run(buffers=odd), run(buffers=odd)) == {}
    assert far(run(buffers={"mask": t(0.0, 0.0, math.nan)}), run(buffers=odd)) == {("buffer", "mask"): math.inf}
    assert far(run(loss=t(math.nan)[0])) == {("loss", "loss"): math.inf}


def test_a_limit_grows_with_the_references_own_distance_and_says_so() -> None:
    found = [Difference("w", "grad", 1.0, 3e-5), Difference("loss", "loss", 1.0, 1e-7)]
    assert not judge(found, FP32)[0]
    ok, said = judge(found, FP32, lambda: Doubt({"grad": 2e-5}))
    assert ok
    assert said == ("fp32 loss 1.0e-05", "fp32 grad 4.0e-05 (2 times eager's own distance from fp64, 2.0e-05)")
    assert not judge(found, FP32, lambda: Doubt({"grad": 4.9e-6}))[0]  # eager is to be trusted to 5e-6
    assert not judge(found, FP32, lambda: Doubt({"grad": 2e-5}, [Difference("w", "grad", 1.0, 5e-5)]))[0]
    assert judge([Difference("w", "grad", 1.0, 5e-10)], FP64, lambda: Doubt({"grad": 1e-10}))[0]


def test_own_distances_are_asked_only_when_needed() -> None:
    def never() -> Doubt:
        raise AssertionError

    assert judge(distances(run(), run(), lr=0.1), FP64, never)[0]
    assert not judge(distances(run(names=()), run(), lr=0.1), FP64, never)[0]
    assert farthest_by_kind(distances(run(loss=t(2.2)[0]), run(), lr=0.1))["loss"] == pytest.approx(0.1)
