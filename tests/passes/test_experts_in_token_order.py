"""Rows sorted for a grouped product are computed in the order of tokens; what reads them sorted still does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.passes import run
from autopar.passes.experts_in_token_order import experts_in_token_order
from autopar.passes.spec import check

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers.integrations.moe")  # registers the product

BEFORE = ("functionalize_mutations", "views_to_reshapes", "drop_noops", "slices_to_splits")
aten = torch.ops.aten
experts_mm = torch.ops.autopar.experts_mm.default
T, K, E, D, H = 6, 2, 3, 4, 8  # tokens, experts a token, experts, widths


def product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(x, w, ends)


def groups(ids: Tensor) -> Tensor:
    return torch.histc(ids.float(), E, 0, E - 1).cumsum(0, dtype=torch.int32)


def inverse(order: Tensor) -> Tensor:
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return back


class Experts(nn.Module):
    """``forward_of(self, x [T, D], ids [T K], gates [T K])`` between a router and a loss."""

    def __init__(self, forward_of: Callable[..., Tensor]) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.up, self.down = nn.Parameter(torch.randn(E, D, 2 * H)), nn.Parameter(torch.randn(E, H, D))
        self.bias = nn.Parameter(torch.randn(E, D))
        self.forward_of = forward_of

    def forward(self, x: Tensor) -> Tensor:
        gates, ids = self.router(x).softmax(-1).topk(K, -1)
        return self.forward_of(self, x, ids.reshape(-1), gates.reshape(-1)).pow(2).sum()


def mlp(self: Experts, rows: Tensor, ends: Tensor) -> Tensor:
    gate, up = product(rows, self.up, ends).chunk(2, -1)
    return product(F.silu(gate) * up, self.down, ends)


def put_back_by_index(self: Experts, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    of_row, order = ids.sort()
    y = mlp(self, x[order // K], groups(of_row))
    y.add_(self.bias[of_row])
    return (y * gates[order, None])[inverse(order)].view(T, K, D).sum(1)


def added_up_by_token(self: Experts, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    order = ids.argsort(stable=True)
    token = torch.arange(T).repeat_interleave(K)[order]
    y = mlp(self, x[token], F.one_hot(ids, E).sum(0).cumsum(0))
    return torch.zeros_like(x).index_add(0, token, y * gates[order][:, None])


def put_into_places(self: Experts, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    order = ids.argsort()
    y = mlp(self, x.repeat_interleave(K, 0)[order], groups(ids))
    return torch.empty_like(y).index_put((order,), y) * gates[:, None]


def mixed_while_sorted(self: Experts, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    of_row, order = ids.sort(stable=True)
    y = mlp(self, x[order // K], groups(of_row))
    return (y[1:] * y[:-1].cumsum(0)).sum(0) + y[order.argsort()].sum(0)


def groups_by_length(self: Experts, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    return mlp(self, x, torch.tensor([2, 2, 5], dtype=torch.int32))  # the last row is in no group


def sorted_otherwise(self: Experts, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
    order = ids.argsort(descending=True)
    return mlp(self, x[order // K], groups(E - 1 - ids))[inverse(order)]


def prepared(tools: Any, forward_of: Callable[..., Tensor]) -> tuple[fx.GraphModule, Tensor]:
    x = torch.randn(T, D)
    return run(tools.export(Experts(forward_of), (x,)), BEFORE), x


def targets(gm: fx.GraphModule) -> list[Any]:
    return [n.target for n in gm.graph.nodes]


def test_text_spec_numbers(tools: Any) -> None:
    gm, x = prepared(tools, put_back_by_index)
    after = tools.golden(experts_in_token_order, "experts_in_token_order", gm)
    check(after, "experts_in_token_order")
    tools.same_numbers(gm, after, (x,))
    assert not {aten.sort.default, aten.histc.default, aten.index_put.default} & set(targets(after))


@pytest.mark.parametrize("forward_of", [added_up_by_token, put_into_places, put_back_by_index])
def test_nothing_is_sorted_any_more(tools: Any, forward_of: Callable[..., Tensor]) -> None:
    gm, x = prepared(tools, forward_of)
    after = experts_in_token_order(tools.copy(gm))
    tools.same_numbers(gm, after, (x,))
    assert targets(after).count(experts_mm) == 2
    assert not [t for t in targets(after) if "sort" in str(t) or "index_add" in str(t) or "cumsum" in str(t)]


@pytest.mark.parametrize("forward_of", [mixed_while_sorted, groups_by_length, sorted_otherwise])
def test_what_needs_the_order_keeps_it(tools: Any, forward_of: Callable[..., Tensor]) -> None:
    gm, x = prepared(tools, forward_of)
    after = experts_in_token_order(tools.copy(gm))
    check(after, "experts_in_token_order")
    tools.same_numbers(gm, after, (x,))
    assert targets(after).count(experts_mm) == 2, "a product is computed once"
