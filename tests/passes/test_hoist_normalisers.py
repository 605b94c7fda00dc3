"""What needs the whole batch and no parameter is marked; what microbatches can do stays in the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.passes import PREPARE, run
from autopar.passes.facts import annotate, fact
from autopar.passes.hoist_normalisers import hoist_normalisers
from autopar.passes.spec import check
from autopar.passes.split_prologue import split_prologue

B, T, V = 4, 6, 10


class Model(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(3, V), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(x), labels)


def given() -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, V, (B, T))
    labels[1], labels[2, 3:] = -100, -100
    return torch.randn(B, T, 3), labels


def each(h: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(h.view(-1, V), labels.view(-1), reduction="none").view(B, T)


def masked_mean(h: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100).float()
    return (each(h, labels) * mask).sum() / mask.sum().clamp(min=1)


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int, tuple[tuple[int, ...], ...]]] = {
    "cross_entropy": (lambda h, t: F.cross_entropy(h.view(-1, V), t.view(-1)), 1, ((),)),
    "shifted": (lambda h, t: F.cross_entropy(h[:, :-1].reshape(-1, V), t[:, 1:].reshape(-1)), 2, ((),)),
    "masked_mean": (masked_mean, 4, ((),)),
    "mean_of_rows": (lambda h, t: (each(h, t).sum(1) / (t != -100).sum(1).clamp(min=1)).sum() / B, 0, ()),
    "weights_over_batch": (lambda h, t: (each(h, t) * (t.float() / t.float().abs().amax(0))).sum(), 3, ((T,),)),
    "nothing": (lambda h, t: (h.sum(-1) * t).sum() / 3, 0, ()),
}


def prepared(tools: Any, loss: Callable[[Tensor, Tensor], Tensor]) -> fx.GraphModule:
    gm: fx.GraphModule = run(tools.export(Model(loss), given()), PREPARE)
    annotate(gm, lambda name: name.startswith("head"))
    return gm


@pytest.mark.parametrize("name", LOSSES)
def test_marks_and_numbers(tools: Any, name: str) -> None:
    loss, marks, crossing = LOSSES[name]
    gm = prepared(tools, loss)
    before, inputs = tools.copy(gm), given()
    after = hoist_normalisers(gm)
    check(after, "hoist_normalisers")
    tools.same_numbers(before, after, inputs)
    assert sum(fact(n).prologue for n in after.graph.nodes) == marks
    prologue, body, names = split_prologue(after)
    assert (prologue is None) == (not marks)
    held = {n.name: tuple(n.meta["val"].shape) for n in body.graph.find_nodes(op="placeholder")}
    assert tuple(held[n] for n in names) == crossing


def test_what_the_loop_reads_too_is_copied(tools: Any) -> None:
    gm = hoist_normalisers(prepared(tools, masked_mean))
    masks = [n for n in gm.graph.nodes if n.target is torch.ops.aten.ne.Scalar]
    assert [fact(n).prologue for n in masks] == [False, True]


def test_batch_inputs_can_be_named(tools: Any) -> None:
    gm = prepared(tools, LOSSES["cross_entropy"][0])
    gm.meta["batch_inputs"] = {"x"}
    assert not any(fact(n).prologue for n in hoist_normalisers(gm).graph.nodes)


def test_text(tools: Any) -> None:
    gm = prepared(tools, LOSSES["shifted"][0])
    tools.golden(hoist_normalisers, "hoist_normalisers", gm)
