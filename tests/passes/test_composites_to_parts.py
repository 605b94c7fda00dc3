"""Composites are taken apart into ops that have rules, with the same numbers; what has a rule stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar.passes import PREPARE, run
from autopar.passes.composites_to_parts import composites_to_parts
from autopar.passes.facts import is_tensor, operand_nodes
from autopar.passes.rules import rule_of
from autopar.passes.spec import check

BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "stacks": lambda h: torch.hstack([h, torch.vstack([h, h])[4:]]).sum() + torch.dstack([h, h]).square().sum(),
    "splits": lambda h: sum(p.square().sum() * i for i, p in enumerate(torch.hsplit(h, 2))),
    "norms": lambda h: torch.linalg.norm(h[0], ord=2) + torch.linalg.matrix_norm(h).sum(),
    "spectrum": lambda h: torch.fft.rfft(h, n=8).abs().sum() + torch.fft.fftshift(torch.fft.irfft2(h)).square().sum(),
    "determinant": lambda h: torch.linalg.det(h @ h.mT + torch.eye(6, dtype=h.dtype)).sum(),
    "solved": lambda h: torch.linalg.solve(h @ h.mT + torch.eye(6, dtype=h.dtype), h).square().sum(),
    "quantile": lambda h: torch.quantile(h, 0.3, dim=1).sum(),
    "products": lambda h: torch.tensordot(h, h, dims=([1], [1])).square().sum() + torch.inner(h, h).sum(),
    "upsampled": lambda h: torch.nn.functional.interpolate(h[:, None, None], (4, 8, 8), mode="trilinear").sum(),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.randn(6, 6)), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x @ self.weight)


@pytest.mark.parametrize("name", BODIES)
def test_same_numbers(tools: Any, name: str) -> None:
    """In float64 from the start: parts name dtypes that the whole op chose itself."""
    inputs = (torch.randn(4, 6, 6, dtype=torch.float64),)
    before = tools.export(Net(BODIES[name]).double(), inputs)
    after = tools.copy(before)
    check(after, "capture")
    wanted = tree_leaves(tools.numbers(before, inputs))
    for done in PREPARE:
        after = run(after, (done,))
        check(after, done)
        torch.testing.assert_close(tree_leaves(tools.numbers(after, inputs)), wanted, rtol=1e-11, atol=1e-11)
    assert [n for n in after.graph.nodes if n.op == "call_function" and is_float(n) and rule_of(n) is None] == []


def is_float(node: Any) -> bool:
    """Whether an op of aten makes floats of tensors."""
    return (
        is_tensor(node)
        and node.meta["val"].is_floating_point()
        and bool(operand_nodes(node))
        and "getitem" not in node.name
    )


def test_golden(tools: Any) -> None:
    def body(h: Tensor) -> Tensor:
        first, second = torch.hsplit(h, 2)
        return torch.linalg.vecdot(first, second).sum() + torch.fft.rfft(h).abs().sum()

    tools.golden(composites_to_parts, "composites_to_parts", tools.export(Net(body), (torch.randn(4, 6),)))


def test_what_has_a_rule_stays(tools: Any) -> None:
    body: Callable[[Tensor], Tensor] = lambda h: torch.nn.functional.layer_norm(h, (6,)).softmax(-1).sum()
    before = tools.export(Net(body), (torch.randn(4, 6),))
    after = composites_to_parts(tools.copy(before))
    assert [n.target for n in before.graph.nodes] == [n.target for n in after.graph.nodes]
