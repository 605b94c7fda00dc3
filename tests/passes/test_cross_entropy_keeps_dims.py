"""Cross entropy becomes a sum over a count, with batch and sequence kept apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes import PREPARE, run
from autopar.passes.cross_entropy_keeps_dims import cross_entropy_keeps_dims
from autopar.passes.spec import check

BEFORE = PREPARE[: PREPARE.index("cross_entropy_keeps_dims")]
WEIGHT = torch.linspace(0.5, 2, 10)
ops = torch.ops.autopar


class Head(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.randn(10, 6)), body
        self.register_buffer("classes", WEIGHT)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.body(F.linear(x, self.weight), labels)


def shifted(h: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(h[:, :-1].contiguous().view(-1, 10).float(), labels[:, 1:].contiguous().view(-1))


BODIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "flat": lambda h, t: F.cross_entropy(h.flatten(0, 1), t.flatten()),
    "shifted": shifted,
    "sum": lambda h, t: F.cross_entropy(h.view(-1, 10), t.view(-1), reduction="sum") / 7,
    "smoothing": lambda h, t: F.cross_entropy(h.view(-1, 10), t.clamp(0).view(-1), None, None, 0, label_smoothing=0.2),
    "classes_second": lambda h, t: F.cross_entropy(h.transpose(1, 2), t),
    "one_row": lambda h, t: F.cross_entropy(h[0, 0], t[0, 0]),
    "rows": lambda h, t: F.cross_entropy(h[:, 0], t[:, 0]),
    "other_target": lambda h, t: F.cross_entropy(h.reshape(-1, 10), t.t().reshape(-1)),
    "nll": lambda h, t: F.nll_loss(h.view(-1, 10).log_softmax(-1), t.view(-1)),
    "probabilities": lambda h, t: F.cross_entropy(h.transpose(1, 2), h.detach().exp().mT, label_smoothing=0.1),
    "none": lambda h, t: F.cross_entropy(h.view(-1, 10), t.view(-1), reduction="none").sum(),
    "nothing_valid": lambda h, t: F.cross_entropy(h.view(-1, 10), (t * 0 - 100).view(-1)),
}  # fmt: skip


def given() -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 10, (3, 4))
    labels[1], labels[2, 0] = -100, 3
    labels[0, 0] = 5
    return torch.randn(3, 4, 6), labels


@pytest.mark.parametrize("name", BODIES)
def test_same_numbers(tools: Any, name: str) -> None:
    inputs, head = given(), Head(BODIES[name])
    if name == "other_target":
        inputs = inputs[0].reshape(4, 3, 6), inputs[1]
    gm = run(tools.export(head, inputs), BEFORE)
    after = cross_entropy_keeps_dims(run(tools.export(head, inputs), BEFORE))
    check(after, "cross_entropy_keeps_dims")
    tools.same_numbers(gm, after, inputs)


@pytest.mark.parametrize("name", ["flat", "shifted", "sum", "smoothing", "classes_second", "nll"])
def test_rows_keep_their_dims(tools: Any, name: str) -> None:
    gm = cross_entropy_keeps_dims(run(tools.export(Head(BODIES[name]), given()), BEFORE))
    (loss,) = (n for n in gm.graph.nodes if n.target is ops.cross_entropy_sum.default)
    rows = (3, 3) if name == "shifted" else (3, 4)
    assert loss.args[0].meta["val"].shape == (*rows, 10) and loss.args[1].meta["val"].shape == rows


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights(tools: Any, smoothing: float) -> None:
    class Weighted(Head):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            logits = F.linear(x, self.weight).view(-1, 10)
            return F.cross_entropy(logits, labels.view(-1), self.classes, label_smoothing=smoothing)

    inputs, head = given(), Weighted(shifted)
    gm = run(tools.export(head, inputs), BEFORE)
    tools.same_numbers(gm, cross_entropy_keeps_dims(run(tools.export(head, inputs), BEFORE)), inputs)


def test_half_precision_is_summed_in_float32(tools: Any) -> None:
    x, labels = given()
    head = Head(BODIES["flat"]).bfloat16()
    gm = cross_entropy_keeps_dims(run(tools.export(head, (x.bfloat16(), labels)), BEFORE))
    check(gm, "cross_entropy_keeps_dims")
    (loss,) = (n for n in gm.graph.nodes if n.target is ops.cross_entropy_sum.default)
    assert loss.meta["val"].dtype == torch.float32
    found = gm(x.bfloat16(), labels)["outputs"][0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, head(x.bfloat16(), labels), rtol=1e-2, atol=0)


def test_text(tools: Any) -> None:
    gm = run(tools.export(Head(shifted), given()), BEFORE)
    check(tools.golden(cross_entropy_keeps_dims, "cross_entropy_keeps_dims", gm), "cross_entropy_keeps_dims")
