"""Bags of equal length become sums of embeddings, with the same numbers; other bags are kept, and features divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes import PREPARE, run
from autopar.passes.bags_to_sums import BAGS, bags_to_sums
from autopar.passes.facts import annotate
from autopar.passes.rules import rule_of
from autopar.passes.spec import check

BEFORE = PREPARE[: PREPARE.index("bags_to_sums")]


class Net(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.body = nn.Parameter(torch.randn(9, 6)), body

    def forward(self, indices: Tensor) -> Tensor:
        return self.body(indices, self.table).square().sum()


BODIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda i, w: F.embedding_bag(i, w, mode="sum"),
    "mean": lambda i, w: F.embedding_bag(i, w, mode="mean"),
    "weighted": lambda i, w: F.embedding_bag(i, w, mode="sum", per_sample_weights=i.to(w.dtype) * w[0, 0]),
    "offsets": lambda i, w: F.embedding_bag(i.reshape(-1), w, torch.arange(0, 12, 3), mode="sum"),
}
KEPT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "max": lambda i, w: F.embedding_bag(i, w, mode="max"),
    "padded": lambda i, w: F.embedding_bag(i, w, mode="sum", padding_idx=2),
    "uneven": lambda i, w: F.embedding_bag(i.reshape(-1), w, torch.arange(4) * 2, mode="sum"),
    "of_an_input": lambda i, w: F.embedding_bag(i.reshape(-1), w, i[:, 0].sort().values * 0, mode="sum"),
}


@pytest.mark.parametrize("name", [*BODIES, *KEPT])
def test_same_numbers(tools: Any, name: str) -> None:
    inputs = (torch.randint(9, (4, 3)),)
    before = run(tools.export(Net((BODIES | KEPT)[name]), inputs), BEFORE)
    after = bags_to_sums(tools.copy(before))
    check(after, "bags_to_sums")
    tools.same_numbers(before, after, inputs)
    annotate(after, lambda _: True)
    bags = [n for n in after.graph.nodes if n.target in BAGS]
    assert len(bags) == (name in KEPT)
    for node in bags:
        found = rule_of(node)
        assert found is not None and found.factors() == ("e",)


def test_golden(tools: Any) -> None:
    graph = run(tools.export(Net(BODIES["mean"]), (torch.randint(9, (4, 3)),)), BEFORE)
    tools.golden(bags_to_sums, "bags_to_sums", graph)
