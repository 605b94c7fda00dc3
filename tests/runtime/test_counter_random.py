"""Numbers by a counter: pieces are those of the whole, and what is drawn is as random as it should be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autopar.passes.layout import Axis, Layout, Mesh
from autopar.runtime.counter_random import random_key, runs_of

ops = torch.ops.autopar
KEY = random_key(seed=3, step=5)
N = 1 << 18
SIGMAS = 4.5


def uniform(shape: tuple[int, ...] = (N,), draw: int = 0, key: int = KEY, dtype: torch.dtype = torch.float64) -> Tensor:
    made = ops.uniform(list(shape), dtype=dtype, draw=draw, step_key=key)
    assert isinstance(made, Tensor)
    return made


# -- pieces ----------------------------------------------------------------------------------------------------------

SHAPE = (6, 8, 12)
MESH = Mesh((Axis("a", 2), Axis("b", 3)))
IN_TIME = Mesh((Axis("a", 2), Axis("time", 2, (2, 4))))
LAYOUTS = [
    (MESH, text)
    for text in ("S0 S0", "S0@1 S0@0", "S1 S2", "S2(8+4) S0", "R S2(3+6+3)", "I P", "S1 R", "R S1", "S2(4+4+4) S0")
]
LAYOUTS += [(IN_TIME, "S0@1 S0@0"), (IN_TIME, "S1 S0"), (IN_TIME, "S2 R"), (IN_TIME, "S0 S2(6+6)")]


@pytest.mark.parametrize(("mesh", "text"), LAYOUTS, ids=lambda x: x if isinstance(x, str) else "")
def test_every_piece_of_a_layout_is_that_of_the_whole(mesh: Mesh, text: str) -> None:
    """Cuts by several axes, in parts, uneven ones (8 over 3), and in time."""
    layout, whole = Layout.parse(text, 3), uniform(SHAPE)
    moments = range(1 if mesh.time is None else mesh.axes[mesh.time].size)
    x = torch.randn(SHAPE)
    dropped = ops.dropout(x, 0.3, step_key=KEY)
    for rank, moment in itertools.product(range(mesh.ranks), moments):
        pieces = [layout.runs(SHAPE, mesh, mesh.coordinates(rank, m)) for m in moments]
        index = torch.meshgrid(*(_places(runs) for runs in pieces[moment]), indexing="ij")
        place = {"step_key": KEY, "shape": list(SHAPE), "runs": runs_of(pieces), "microbatch": moment}
        own = list(index[0].shape)
        assert torch.equal(ops.uniform(own, dtype=torch.float64, **place), whole[index])
        assert torch.equal(ops.dropout(x[index], 0.3, **place), dropped[index])


def _places(runs: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.cat([torch.arange(start, start + n) for start, n in runs])


def test_numbers_do_not_depend_on_how_many_are_hashed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = uniform((700, 900))
    monkeypatch.setattr("autopar.runtime.counter_random.AT_ONCE", {"cpu": 1000})
    assert torch.equal(uniform((700, 900)), whole)


def test_shapes_of_every_kind() -> None:
    assert uniform(()).shape == () and uniform((0, 3)).shape == (0, 3)
    assert torch.equal(uniform((5, 2)).flatten(), uniform((10,)))
    assert ops.uniform([2], torch.empty(2, device="meta")).device.type == "meta"


# -- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_and_its_gradient() -> None:
    x = torch.randn(40, 50, dtype=torch.float64).t().requires_grad_()
    y = ops.dropout(x, 0.3, step_key=KEY)
    kept = uniform((50, 40)) < 0.7
    assert torch.equal(y, x * kept / 0.7)
    y.backward(gradient := torch.randn_like(y))
    assert x.grad is not None and torch.equal(x.grad, gradient * kept / 0.7)


def test_dropout_keeps_the_same_in_every_precision() -> None:
    ones = [torch.ones(1000, dtype=t) for t in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
    wide, *others = [ops.dropout(x, 0.4, step_key=KEY) != 0 for x in ones]
    assert all(torch.equal(wide, other) for other in others)


def test_dropout_of_all_and_of_nearly_none() -> None:
    x = torch.randn(100)
    assert torch.equal(ops.dropout(x, 1.0, step_key=KEY), torch.zeros(100))
    assert torch.equal(ops.dropout(x, 1e-12, step_key=KEY), x)


def test_what_is_kept_for_backward_is_one_byte_an_element() -> None:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        ops.dropout(torch.randn(10, 10, requires_grad=True), 0.5, step_key=KEY)
    assert [t.dtype for t in kept] == [torch.bool]


# -- statistics ------------------------------------------------------------------------------------------------------


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard deviations of that of independent numbers."""
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1]) * math.sqrt(len(a))


def deviations(seed: int) -> Iterator[tuple[str, float]]:
    """Statistics of N numbers, each in standard deviations from what it should be."""
    key = random_key(seed, 0)
    x = uniform(key=key)
    yield "mean", (float(x.mean()) - 0.5) * math.sqrt(12 * N)
    yield "variance", (float(x.var()) - 1 / 12) * math.sqrt(180 * N)
    for bits in (4, 12, 31, 52):
        yield f"bit {bits}", (float((x * 2**bits).frac().ge(0.5).double().mean()) - 0.5) * 2 * math.sqrt(N)
    for name, cells in (("ones", (x * 256).long()), ("pairs", (x[::2] * 32).long() * 32 + (x[1::2] * 32).long())):
        counts = torch.bincount(cells, minlength=256 if name == "ones" else 1024).double()
        even = len(cells) / len(counts)
        chi = float(((counts - even) ** 2 / even).sum())
        yield f"chi square of {name}", (chi - len(counts) + 1) / math.sqrt(2 * len(counts) - 2)
    for lag in (1, 2, 3, 64, 511, 512, 513, 4096):
        yield f"neighbours {lag} apart", correlation(x[lag:], x[:-lag])
    for draw in (1, 2, 100):
        yield f"op {draw}", correlation(x, uniform(draw=draw, key=key))
    for step in (1, 2, 100):
        yield f"step {step}", correlation(x, uniform(key=random_key(seed, step)))
    yield "next seed", correlation(x, uniform(key=random_key(seed + 1, 0)))
    rows = x.view(512, 512)
    for name, means in (("rows", rows.mean(1)), ("columns", rows.mean(0))):
        yield name, float(((means - 0.5) ** 2).sum() * 12 * 512 - 512) / math.sqrt(1024)
    for other in range(1, 4):  # what four ranks have of a tensor cut along its columns
        yield f"rank {other}", correlation(rows[:, :128].flatten(), rows[:, other * 128 : other * 128 + 128].flatten())


@pytest.mark.parametrize("seed", range(4))
def test_numbers_are_uniform_and_independent(seed: int) -> None:
    """Of ops, steps, seeds, neighbours, rows and ranks."""
    wrong = {name: sigmas for name, sigmas in deviations(seed) if abs(sigmas) > SIGMAS}
    assert not wrong


def test_the_statistics_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.runtime.counter_random._hash", lambda z: z)  # the indices, as they are counted
    assert sum(abs(sigmas) > SIGMAS for _, sigmas in deviations(0)) > 10


def test_float32_has_the_uppermost_bits_of_float64() -> None:
    wide, narrow = uniform(), uniform(dtype=torch.float32)
    assert torch.equal((wide * 2**24).floor() / 2**24, narrow.double())
    assert float(narrow.min()) >= 0 and float(narrow.max()) < 1


def test_another_key_or_draw_gives_other_numbers() -> None:
    keys = [random_key(seed, step) for seed in (0, 1, 2**63, -1) for step in range(3)]
    made = [uniform((4,), draw, key) for key in keys for draw in range(3)]
    assert len({tuple(m.tolist()) for m in made}) == len(made)
