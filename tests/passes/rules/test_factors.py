"""What rules name: the factors that divide, the groups in which an op is linear, and what must not be offered."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from autopar.passes.rules import rule_of, views
from autopar.passes.rules.core import Rule

aten = torch.ops.aten

Make = Callable[..., tuple[fx.Node, list[torch.Tensor]]]


def x(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


SDPA = aten.scaled_dot_product_attention.default
HALF = torch.bfloat16

# The call, its factors, its linear groups of operand slots.
NAMED = [
    (aten.linear.default, (x(4, 6, 8), x(2, 8), x(2)), "b0 b1 i o", [{0, 2}, {1, 2}]),
    (aten.linear.default, (x(4, 8), x(2, 8)), "b0 i o", [{0}, {1}]),
    (aten.matmul.default, (x(4, 1, 6, 8), x(3, 8, 2)), "b0 b1 k m n", [{0}, {1}]),
    (aten.addmm.default, (x(2), x(4, 8), x(8, 2)), "k m n", [{0, 1}, {0, 2}]),
    (SDPA, (x(2, 4, 6, 8), x(2, 4, 9, 8), x(2, 4, 9, 8)), "b0 e h l", [{2}]),
    (SDPA, (x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), None, 0.0, True), "b0 e h l", [{2}]),
    (aten.reshape.default, (x(4, 6, 8), [24, 8]), "f0 f1 f2", [{0}]),
    (aten.reshape.default, (x(4, 6, 8), [4, 48]), "f0 f1 f2", [{0}]),
    (aten.split_with_sizes.default, (x(4, 16), [8, 4, 4], 1), "d0 s", [{0}]),
    (aten.slice.Tensor, (x(4, 16), 1, 0, 8), "d0 s", [{0}]),
    (aten.slice.Tensor, (x(4, 16), 1, 0, 15), "d0", [{0}]),
    (aten.expand.default, (x(4, 1), [6, 4, 8]), "d0 d1 d2", [{0}]),
    (aten.embedding.default, (x(16, 8), x(4, 6, dtype=torch.int64)), "a0 a1 e", [{0}]),
    (aten.layer_norm.default, (x(4, 6, 8), [8], x(8), x(8)), "d0 d1", [{1, 2}]),
    (aten.sum.dim_IntList, (x(4, 6), [1]), "d0 d1", [{0}]),
    (aten.mean.dim, (x(4, 6), [1]), "d0", [{0}]),
    (aten.softmax.int, (x(4, 6), -1), "d0", []),
    (aten.conv2d.default, (x(4, 6, 5, 5), x(8, 6, 3, 3), x(8)), "i n o", [{0, 2}, {1, 2}]),
    (aten.add.Tensor, (x(4, 6), x(6)), "d0 d1", [{0, 1}]),
    (aten.add.Tensor, (x(4, 6), 1.0), "d0 d1", []),
    (aten.mul.Tensor, (x(4, 6), x(6)), "d0 d1", [{0}, {1}]),
    (aten.div.Tensor, (x(4, 6), x(6)), "d0 d1", [{0}]),
    (aten.where.ScalarOther, (x(4, dtype=torch.bool), x(4), 1.0), "d0", []),
    (aten.masked_fill.Scalar, (x(4), x(4, dtype=torch.bool), float("-inf")), "d0", []),
    (aten.to.dtype, (x(4), torch.float32), "d0", []),
    (aten.to.dtype, (x(4, dtype=HALF), torch.float32), "d0", [{0}]),
    (aten.add.Tensor, (x(4, dtype=torch.bool), x(4, dtype=torch.bool)), "d0", []),
    (aten.relu.default, (x(4),), "d0", []),
]


@pytest.mark.parametrize(("target", "args", "factors", "linear"), NAMED)
def test_rule_names(build: Make, target: Any, args: tuple[Any, ...], factors: str, linear: list[set[int]]) -> None:
    found = rule(build, target, *args)
    assert found is not None
    assert " ".join(sorted(found.factors())) == factors
    assert [set(g) for g in found.linear] == linear


UNRULED = [
    (aten.dropout.default, (x(4), 0.5, True)),
    (SDPA, (x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), None, 0.1)),
    (aten.embedding.default, (x(16, 8), x(4, dtype=torch.int64), -1, True)),
    (aten.mse_loss.default, (x(4), x(4), 1)),
    (aten.cross_entropy_loss.default, (x(4, 6), x(4, dtype=torch.int64))),
    (aten.tril_indices.default, (4, 4)),
    (aten.as_strided.default, (x(4, 4), [2, 2], [1, 2])),
    (aten.squeeze.default, (x(4, 1),)),
]


@pytest.mark.parametrize(("target", "args"), UNRULED)
def test_no_rule(build: Make, target: Any, args: tuple[Any, ...]) -> None:
    assert rule(build, target, *args) is None


def test_slices_of_one_tensor_are_cut_alike(build: Make) -> None:
    node, _ = build(aten.slice.Tensor, (x(4, 16), 1, 0, 8), {})
    assert rule_of(node).operands[0][1].parts == (8, 8)  # type: ignore[union-attr]
    with node.graph.inserting_before(node):
        other = node.graph.call_function(aten.slice.Tensor, (node.args[0], 1, 8, 12))
    other.meta["val"] = x(4, 4).to("meta")
    for n, parts in ((node, ()), (other, ())):
        found = rule_of(n)
        assert found is not None
        assert found.operands[0][1].parts == (8, 4, 4)
        assert found.results[0][1].parts == parts  # type: ignore[index]


def test_examples() -> None:
    assert doctest.testmod(views).failed == 0


def rule(build: Make, target: Any, *args: Any) -> Rule | None:
    return rule_of(build(target, args, {})[0])
