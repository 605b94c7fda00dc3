"""The cost formulas: one definition, the same value for numbers, arrays and symbols, and values checked by hand."""

import numpy as np
import pytest
import sympy

from autopar.solver import cost

CASES = [
    (lambda n, b, t, w: cost.collective("all_reduce", n, b, t, w), (8, 1e9, 2e-5, 4e11)),
    (lambda n, b, t, w: cost.collective("all_gather", n, b, t, w), (16, 3e8, 4e-5, 3.5e11)),
    (lambda n, b, t, w: cost.collective("reduce_scatter", n, b, t, w), (2, 3e8, 4e-5, 3.5e11)),
    (lambda n, b, t, w: cost.collective("all_to_all", n, b, t, w), (4, 1e6, 1e-5, 5e10)),
    (lambda n, b, t, w: cost.collective("send", n, b, t, w), (2, 1e6, 1e-5, 5e10)),
    (lambda n, b, t, w: cost.collective("all_reduce", n, b, t, w), (1, 1e9, 2e-5, 4e11)),
    (lambda n, b, t, w: cost.collective("send", n, b, t, w), (1, 1e9, 2e-5, 4e11)),
    (cost.roofline, (1e15, 1e9, 8e14, 3e12)),
    (cost.roofline, (1e9, 1e12, 8e14, 3e12)),
    (cost.update, (3e9, 6e9, 3e12)),
    (cost.step_time, (1.0, 0.25, 0.5)),
    (cost.step_time, (1.0, 0.25, 2.5)),
    (cost.peak_bytes, (6e10, 1e10, 2e9)),
]


@pytest.mark.parametrize(("formula", "numbers"), CASES)
def test_numbers_arrays_and_symbols_agree(formula, numbers):
    plain = formula(*numbers)
    arrays = formula(*(np.array([x, x]) for x in numbers))
    symbols = sympy.symbols(f"a:{len(numbers)}", positive=True)
    symbolic = formula(*symbols)
    assert isinstance(plain, float) and arrays.shape == (2,)
    assert arrays.tolist() == pytest.approx([plain, plain], rel=1e-14)
    assert float(symbolic.subs(dict(zip(symbols, numbers)))) == pytest.approx(plain, rel=1e-14)


@pytest.mark.parametrize(("formula", "numbers"), CASES)
def test_each_argument_may_be_an_array_alone(formula, numbers):
    for i, number in enumerate(numbers):
        mixed = formula(*(np.array([x]) if j == i else x for j, x in enumerate(numbers)))
        assert np.broadcast_to(mixed, (1,))[0] == pytest.approx(formula(*numbers), rel=1e-14), number


@pytest.mark.parametrize(
    ("kind", "share"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("send", 1.0)],
)
def test_the_bus_bandwidth_convention_of_nccl_tests(kind, share):
    assert cost.share(kind, 4) == share
    assert cost.collective(kind, 4, 1e9, 1e-3, 1e9) == pytest.approx(1e-3 + share)


@pytest.mark.parametrize("kind", cost.KINDS)
def test_one_rank_costs_nothing_and_more_never_less(kind):
    seconds = cost.collective(kind, np.arange(1, 65), 1e9, 1e-5, 1e11)
    assert seconds[0] == 0 and (np.diff(seconds) >= 0).all() and seconds[1] > 0


def test_an_all_reduce_is_a_scatter_and_a_gather():
    both = sum(cost.collective(k, 8, 1e9, 0, 1e11) for k in ("reduce_scatter", "all_gather"))
    assert cost.collective("all_reduce", 8, 1e9, 0, 1e11) == pytest.approx(both)


def test_adamw_touches_seven_arrays():
    read, written = ("parameter", "gradient", "mean", "variance"), ("parameter", "mean", "variance")
    assert len(read) + len(written) == cost.update(nbytes=1, states=2, bytes_per_s=1)


def test_an_unknown_kind_is_refused():
    with pytest.raises(AssertionError, match="'broadcast' is none of"):
        cost.collective("broadcast", 2, 1, 1, 1)
