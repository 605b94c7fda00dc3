"""A loss of all tokens but the last reads all of them; what was cut off is ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes import PREPARE, run
from autopar.passes.shifted_losses_keep_length import shifted_losses_keep_length
from autopar.passes.spec import check

BEFORE = PREPARE[: PREPARE.index("shifted_losses_keep_length")]
aten = torch.ops.aten
WEIGHT = torch.linspace(0.5, 2, 10)
Body = Callable[[Tensor, Tensor], Tensor]


class Head(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.randn(10, 6)), body

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.body(F.linear(x, self.weight), labels)


def flat(h: Tensor, t: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(h.reshape(-1, 10), t.reshape(-1), **options)


BODIES: dict[str, Body] = {
    "shifted": lambda h, t: flat(h[:, :-1].contiguous(), t[:, 1:].contiguous()),
    "cast": lambda h, t: flat(h[:, :-1].double(), t[:, 1:]),
    "first": lambda h, t: flat(h[:, 1:], t[:, :-1]),
    "both_ends": lambda h, t: flat(h[:, 1:-1], t[:, 2:]),
    "rows_too": lambda h, t: flat(h[:-1, :-1], t[1:, 1:]),
    "sum": lambda h, t: flat(h[:, :-1], t[:, 1:], reduction="sum") / 7,
    "smoothed": lambda h, t: flat(h[:, :-1], t[:, 1:].clamp(0), label_smoothing=0.2, ignore_index=3),
    "second": lambda h, t: F.cross_entropy(h[:, :-1].transpose(1, 2), t[:, 1:]),
}
KEPT: dict[str, Body] = {
    "last": lambda h, t: flat(h[:, -1:], t[:, -1:]),
    "classes": lambda h, t: F.cross_entropy(h[:, :, :9].reshape(-1, 9), t.clamp(0, 8).reshape(-1)),
    "others": lambda h, t: flat(h[:, ::2], t[:, ::2]),
}


def given() -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 10, (4, 8))
    labels[1], labels[2, 0] = -100, 3
    return torch.randn(4, 8, 6), labels


@pytest.mark.parametrize("name", [*BODIES, *KEPT])
def test_same_numbers(tools: Any, name: str) -> None:
    inputs = given()
    gm = run(tools.export(Head((BODIES | KEPT)[name]), inputs), BEFORE)
    after = shifted_losses_keep_length(tools.copy(gm))
    check(after, "shifted_losses_keep_length")
    tools.same_numbers(gm, after, inputs)
    (loss,) = (n for n in after.graph.nodes if n.target is torch.ops.autopar.cross_entropy_sum.default)
    shape = loss.args[0].meta["val"].shape
    assert (shape == (4, 8, 10)) == (name in BODIES)


def test_text(tools: Any) -> None:
    gm = run(tools.export(Head(BODIES["shifted"]), given()), BEFORE)
    tools.golden(shifted_losses_keep_length, "shifted_losses_keep_length", gm)
