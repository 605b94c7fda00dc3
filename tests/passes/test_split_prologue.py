"""What is computed once a step stands in a graph of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopar.passes import PREPARE, run
from autopar.passes.facts import annotate
from autopar.passes.split_prologue import split_prologue
from autopar.passes.text import text


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), labels, ignore_index=-100)


def test_text_and_numbers(tools: Any) -> None:
    x, labels = torch.randn(4, 4), torch.tensor([1, -100, 3, 5])
    gm = run(tools.export(Masked(), (x, labels)), PREPARE)
    annotate(gm, lambda fqn: True)
    gm = run(gm, ("hoist_normalisers",))
    whole = tools.copy(gm)
    parts: list[Any] = []

    def split(g: Any) -> Any:
        parts.append(split_prologue(g))
        return parts[0][1]

    body = tools.golden(split, "split_prologue", gm)
    prologue, _, names = parts[0]
    assert prologue is not None and names == ("hoisted_0",)
    assert "cross_entropy_count" in text(prologue) and "cross_entropy_count" not in text(body)
    (count,) = prologue(labels)["outputs"]
    assert count == 3
    (loss,) = body(x, labels, count)["outputs"]
    torch.testing.assert_close(loss, whole(x, labels)["outputs"][0], rtol=0, atol=0)


def test_nothing_to_hoist(tools: Any) -> None:
    class Sum(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()

    gm = run(tools.export(Sum(4, 4), (torch.randn(2, 4),)), PREPARE)
    annotate(gm, lambda fqn: True)
    prologue, body, names = split_prologue(run(gm, ("hoist_normalisers",)))
    assert prologue is None and body is gm and names == ()
