"""A tensor axis divides ops with weights and what lies between them; what is around a residual stream stays whole."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.build import prepare
from autopar.capture import capture
from autopar.choosing.wiring import weights_of
from autopar.models import gpt2, llama, mlp
from autopar.passes.roles import Limit, limits_of
from autopar.passes.units import core_ops, cut_units


class Grouped(nn.Module):
    """Attention whose two key and value heads are repeated for four query heads, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(-1, 6, 4, 4).transpose(1, 2)
        k, v = self.kv(x).split(8, dim=-1)
        k, v = (t.view(-1, 6, 2, 4).transpose(1, 2)[:, :, None].expand(-1, 2, 2, 6, 4) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k.reshape(-1, 4, 6, 4), v.reshape(-1, 4, 6, 4))
        return self.out(y.transpose(1, 2).reshape(-1, 6, 16)).square().sum()


def grouped() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    return Grouped(), (torch.randn(2, 6, 16),), {}


MODELS = {"gpt2": gpt2.make, "llama": llama.make, "mlp": mlp.make, "grouped": grouped}


@cache
def limits(name: str) -> dict[str, list[Limit]]:
    """By the name of the op."""
    model, args, kwargs = MODELS[name]()
    captured = capture(model, args, kwargs, check=False)
    gm, parameters = prepare(captured, 1).body, frozenset(captured.parameters)
    found, _ = limits_of(core_ops(gm, parameters), cut_units(gm, parameters), parameters, weights_of(gm, parameters))
    by_name: dict[str, list[Limit]] = {}
    for op, limit in found.items():
        by_name.setdefault(str(op.target).split(".")[1], []).append(limit)
    return by_name


def test_norms_and_additions_of_the_stream_are_whole() -> None:
    found = limits("gpt2")
    assert all(x.whole for x in (*found["layer_norm"], *found["add"]))
    assert not any(x.whole for x in (*found["gelu"], *found["split_with_sizes"], *found["transpose"]))


def test_additions_inside_of_attention_are_not_of_the_stream() -> None:
    """Rotary embeddings add, too."""
    found = limits("llama")
    assert {x.whole for x in found["add"]} == {True, False}
    assert not any(x.whole for x in found["silu"])


def test_without_a_residual_stream_nothing_is_whole() -> None:
    assert not any(x.whole for group in limits("mlp").values() for x in group)


@pytest.mark.parametrize("name", MODELS)
def test_ops_with_weights_are_obliged_and_rows_are_the_first_dims(name: str) -> None:
    for linear in limits(name)["linear"]:
        assert linear.obliged and linear.weights == (1,)
        (rows,) = linear.results
        assert rows == frozenset(range(max(rows) + 1)), "all but the last dim"


def test_heads_are_no_rows() -> None:
    for attention in limits("llama")["scaled_dot_product_attention"]:
        assert attention.results[0] == {0, 2}


def test_what_heads_are_repeated_along_is_no_row() -> None:
    (attention,) = limits("grouped")["scaled_dot_product_attention"]
    assert attention.operands == ({0, 2},) * 3, "heads of queries, keys and values may be cut"
