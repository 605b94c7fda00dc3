"""Products with the weights of experts, and lookups in a table that is cut over what is looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten
library = torch.ops.autopar

Check = Callable[..., list[str]]


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


@pytest.mark.parametrize("experts", [6, 7])
@pytest.mark.parametrize("rows", [torch.tensor([5, 0, 0, 3, 5, 1]), torch.tensor([2] * 6), ids(6, 12)])
def test_rows_dims_and_experts_split(check: Check, rows: torch.Tensor, experts: int) -> None:
    tried = check(library.experts_mm.default, torch.randn(len(rows), 4), torch.randn(experts, 4, 6), rows, 0, experts)
    for strategy in ("factor:s0", "factor:i0", "factor:o0", "linear:0", "special:experts"):
        assert any(strategy in t for t in tried), f"{strategy} is not among {tried}"


def test_rows_of_no_expert_are_zero() -> None:
    out = library.experts_mm(torch.ones(3, 2), torch.ones(2, 2, 2), torch.tensor([0, 2, 7]), 0, 2)
    assert out.tolist() == [[2, 2], [0, 0], [0, 0]]


def test_flops_are_those_of_equal_shares() -> None:
    x, w = torch.randn(8, 4, requires_grad=True), torch.randn(2, 4, 6, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        library.experts_mm(x, w, torch.zeros(8, dtype=torch.int64), 2, 4).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 8 * 4 * 6 * 2 // 4


def test_double_precision_gradients() -> None:
    x, w = torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 3, 2, dtype=torch.float64)
    x, w, rows = x.requires_grad_(), w.requires_grad_(), torch.tensor([3, 0, 3, 1, 3])
    assert torch.autograd.gradcheck(lambda x, w: library.experts_mm(x, w, rows, 0, 4), (x, w))


LOOKUPS = [
    (aten.index.Tensor, torch.randn(6, 4, 3), [torch.tensor([5, 0, -1, 2, 2, -6])]),
    (aten.index.Tensor, torch.randn(3, 12), [None, ids(12, 6, 2)]),
    (aten.index_select.default, torch.randn(2, 7, 3), 1, ids(7, 6)),
    (aten.gather.default, torch.randn(6, 12), 1, ids(12, 6, 2)),
]


@pytest.mark.parametrize("call", LOOKUPS, ids=lambda call: f"{call[0]}")
def test_what_is_looked_up_in_is_cut(check: Check, call: tuple[Any, ...]) -> None:
    assert any("special:lookup" in t for t in check(*call))
