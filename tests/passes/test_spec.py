"""The spec finds what it should: a graph of each kind that is not legal after a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes import PREPARE, run
from autopar.passes.spec import check

WRONG: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
    ("counter_random", "draws random numbers", lambda x: F.dropout(x, 0.5, True)),
    ("functionalize_mutations", "writes in place", lambda x: (x * 2).add_(1)),
    ("views_to_reshapes", "is a view in another form", lambda x: x.view(-1)),
    ("views_to_reshapes", "is a view in another form", lambda x: x.softmax(-1)),
    ("drop_noops", "does nothing", lambda x: x.t().contiguous()),
    ("slices_to_splits", "tile it", lambda x: x[:1] * x[1:]),
    ("means_to_sums", "is a mean", lambda x: x.mean(0)),
    ("cross_entropy_keeps_dims", "is a flat loss", lambda x: F.cross_entropy(x, torch.zeros(2, dtype=torch.int64))),
]


@pytest.mark.parametrize(("after", "words", "body"), WRONG)
def test_illegal_graphs_are_named(tools: Any, after: str, words: str, body: Callable[[Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return body(x)

    gm = tools.export(Model(), (torch.randn(2, 3),))
    if after in PREPARE:
        gm = run(gm, PREPARE[: PREPARE.index(after)])
    with pytest.raises(AssertionError, match=words):
        check(gm, after)


def test_attention_is_random_only_with_dropout(tools: Any) -> None:
    class Attention(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.p = p

        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, dropout_p=self.p).sum()

    q = torch.randn(1, 2, 4, 8)
    check(tools.export(Attention(0.0), (q,)), "counter_random")
    with pytest.raises(AssertionError, match="draws random numbers"):
        check(tools.export(Attention(0.1), (q,)), "counter_random")
