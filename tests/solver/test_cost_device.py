"""Seconds of kernels: measured points come back, larger work never takes less, limits and units by hand."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import sympy

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.solver.cost import Device, Grid, Samples
from autopar.solver.work import Attend

CHIPS = {name: Cluster.load(name).chip for name in ("h100-dgx", "a100-dgx", "h100-grandteton", "a100-40gb")}
H100 = CHIPS["h100-dgx"]
BURST = replace(H100.device(), sustained=1.0)
LENGTHS = np.array([128, 512, 1000, 2048, 8192, 65536])


def attend(length, head=128, causal=True, heads=16, batch=1):
    return Attend(batch, heads, heads, length, length, head, "bf16", causal)


def test_the_measured_matmuls_come_back():
    """Within 2 %, but for those above the best rate of a search, and those that a larger matmul undercuts."""
    table = H100.matmul["bf16"]
    shapes = np.array(list(product(table.batch, table.m, table.n, table.k)))
    flops, measured = 2.0 * shapes.prod(1), np.array(table.points)
    found = flops / BURST.matmul_s(*shapes.T)
    known = np.minimum(measured, H100.burst_rate("bf16"))
    near = np.abs(found / known - 1) < 0.02
    assert near.mean() > 0.94
    seconds = flops / measured
    for i in np.flatnonzero(~near):
        larger = (shapes >= shapes[i]).all(1) & (seconds < seconds[i])
        assert larger.any(), shapes[i]


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("name", CHIPS)
def test_larger_matmuls_never_take_less_nor_jump(axis, name):
    device = CHIPS[name].device()
    for shape in ((1, 100, 300, 8), (2, 1024, 512, 4096), (16, 8192, 64, 128), (1, 4096, 50304, 12288)):
        sizes: list = [float(x) for x in shape]
        sizes[axis] = 8 * np.unique(np.round(np.geomspace(1, 20000, 400)))  # unaligned widths apart
        seconds = device.matmul_s(*sizes)
        assert (np.diff(seconds) >= -1e-9 * seconds[1:]).all()
        grown = sizes[axis][1:] / sizes[axis][:-1]
        assert (seconds[1:] / seconds[:-1] <= grown * 1.06).all()


def test_a_matmul_in_numbers():
    flops = 2 * 8192**3
    assert BURST.matmul_s(1, 8192, 8192, 8192) == pytest.approx(flops / 780.2e12, rel=1e-3)  # as the largest measured
    assert H100.device().matmul_s(1, 8192, 8192, 8192) == pytest.approx(flops / 780.2e12 / H100.sustained, rel=1e-2)
    assert BURST.matmul_s(2, 4096, 4096, 4096) == pytest.approx(4 * 4096**3 / (0.803 * 989e12), rel=1e-3)  # capped
    assert BURST.matmul_s(1, 16, 16, 16) == pytest.approx(5e-6, rel=0.01)  # a launch
    reads = 8192 * 8192 * 2 / BURST.bandwidth
    assert reads < BURST.matmul_s(1, 1, 8192, 8192) < 3 * reads  # a matrix and a vector: memory


def test_a_batch_counts_as_rows():
    grid = BURST.grids["bf16"]
    assert grid.at(64, 256, 1024, 1024) == pytest.approx(grid.at(4, 4096, 1024, 1024), rel=1e-9)


def test_unaligned_widths_cost_more():
    even, odd = BURST.matmul_s(1, 8192, 10944, 4096), BURST.matmul_s(1, 8192, 10922, 4096)
    assert odd / even == pytest.approx(398.4 / 272.7, rel=0.01)
    assert BURST.matmul_s(1, 8191, 10944, 4096) <= even


@pytest.mark.parametrize(("k", "tflops"), [(512, 858), (1024, 1129), (2048, 1343), (4096, 1467), (16384, 1541)])
def test_fp8_scales_as_measured_on_an_h800(k, tflops):
    """A check by another source: 8192 x 8192 x k, xwhzz/tilelang; the shipped cap, 1402.6, is of another search."""
    seconds = BURST.matmul_s(1, 8192, 8192, k, "fp8")
    assert 2 * 8192**2 * k / seconds == pytest.approx(min(tflops, 1402.6) * 1e12, rel=0.08)


def test_slower_dtypes_take_as_much_longer_as_their_peaks():
    bf16, fp32 = (BURST.matmul_s(1, 8192, 8192, 8192, d) for d in ("bf16", "fp32"))
    assert fp32 / bf16 == pytest.approx(989 / 67, rel=0.05)


def test_attention_curves_come_back():
    device = BURST
    for curve in H100.attention:
        lengths = np.array([p[0] for p in curve.points])
        a = attend(lengths, curve.head, curve.causal, heads=2048 // curve.head, batch=16384 / lengths)
        flops = a.flops * (2.5 if curve.backward else 1)
        found = flops / device.attention_s(curve.kernel, a, backward=curve.backward)
        assert found == pytest.approx(np.array([p[1] for p in curve.points]), rel=1e-9)


@pytest.mark.parametrize("kernel", ["flash1", "flash2", "cudnn", "flash3"])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_grows_with_length_and_backward_is_not_twice(kernel, causal):
    device = H100.device()
    for head in (32, 64, 96, 128, 160, 256, 512):
        forward = device.attention_s(kernel, attend(LENGTHS, head, causal))
        backward = device.attention_s(kernel, attend(LENGTHS, head, causal), backward=True)
        assert (np.diff(forward) >= 0).all() and (np.diff(backward) >= 0).all()
        assert (backward[3:] / forward[3:] > 2.3).all() and (backward[3:] / forward[3:] < 4).all()
    once, one = device.attention_s(kernel, attend(4096)), device.attention_s(kernel, attend(np.array([4096])))
    assert once == one[0]


def test_flash_attention_2_on_an_a100_as_measured():
    """177.7 TFLOP/s at length 1024 and 185.6 at 4096, at 1200 of 1410 MHz."""
    device = replace(CHIPS["a100-dgx"].device(), sustained=1200 / 1410)
    for length, tflops in ((1024, 177.67), (4096, 185.64)):
        a = attend(length, causal=False, heads=32, batch=16)
        assert a.flops / device.attention_s("flash2", a) == pytest.approx(tflops * 1e12, rel=0.02)


def test_an_unknown_kernel_is_refused():
    with pytest.raises(
        AutoparError, match="A100 SXM4 80GB: no figures for attention kernel 'cudnn'. Legal: flash1, fl"
    ):
        CHIPS["a100-dgx"].device().attention_s("cudnn", attend(1024))


def test_memory_bound_kernels():
    device = H100.device()
    assert device.memory_s(0.9 * 3350e9) == pytest.approx(1 + 5e-6)
    assert device.memory_s(np.array([0.0, 1.0])).tolist() == pytest.approx([5e-6, 5e-6])
    curve = replace(device, copy=Samples.of([(1e3, 2e-6), (1e6, 1e-4)]))
    assert curve.memory_s(np.array([1.0, 1e3, 1e6, 3e6])) == pytest.approx([2e-6, 2e-6, 1e-4, 3e-4])


def test_symbols_give_the_closed_form():
    tokens, hidden = sympy.symbols("tokens hidden", positive=True)
    device = Device("x", {"bf16": 5e14}, {"bf16": 1e15}, {"bf16": 2}, 1e12, sustained=0.8)
    assert sympy.simplify(device.matmul_s(1, tokens, hidden, hidden) - tokens * hidden**2 / 2e14) == 0
    assert device.memory_s(tokens) == tokens / 1e12


def test_a_power_cap_slows_matmuls_by_the_cube_root():
    cluster = Cluster.load("h100-dgx").with_power_cap(500)
    assert cluster.chip.sustained / H100.sustained == pytest.approx((400 / 600) ** (1 / 3))
    assert cluster.chip.sustained == CHIPS["h100-grandteton"].sustained
    assert Cluster.load("h100-dgx").with_power_cap(10_000).chip.sustained == 1
    for watts in (100, -1):
        with pytest.raises(AutoparError, match="cluster h100-dgx: a power cap of .* W. Legal: more than 100."):
            Cluster.load("h100-dgx").with_power_cap(watts)
    with pytest.raises(AutoparError, match="cluster local: a power cap of 50 W. Legal: none"):
        Cluster.load("local").with_power_cap(50)


def test_grid_of_one_size_an_axis():
    grid = Grid.of(((1,), (8, 16), (8,), (8,)), (1e9, 2e9))
    assert grid.at(1, 8, 8, 8) == pytest.approx(1024 / 1e9)
    assert grid.at(1, 32, 8, 8) == pytest.approx(4096 / 2e9)
    assert grid.at(1, 4, 8, 8) == pytest.approx(1024 / 1e9)  # 8 and 16 rows take as long: so do 4
