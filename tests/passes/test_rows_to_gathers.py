"""Reading places of rows becomes a gather, which rows divide; what reads across rows is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.passes import run
from autopar.passes.facts import annotate
from autopar.passes.rows_to_gathers import rows_to_gathers
from autopar.passes.rules import rule_of
from autopar.passes.spec import check

aten = torch.ops.aten
SCATTERS = (aten.scatter.src, aten.scatter_add.default)
BEFORE = ("functionalize_mutations", "views_to_reshapes", "drop_noops", "slices_to_splits")


class Net(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.randn(5, 5)), body

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.body(x @ self.weight, places).square().sum()


BODIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "last_token": lambda h, i: h[torch.arange(4), i[:, 0]],
    "from_the_end": lambda h, i: h[torch.arange(h.shape[0]), i[:, 0] - 7],
    "some": lambda h, i: h[torch.arange(4)[:, None], i],
    "of_labels": lambda h, i: h.sum(-1)[torch.arange(4), i[:, 1]],
    "some_of_labels": lambda h, i: h.sum(-1)[torch.arange(4).unsqueeze(1), i],
    "int32": lambda h, i: h[torch.arange(4, dtype=torch.int32), i[:, 0].int()],
}
WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "put": lambda h, i: h.index_put((torch.arange(4), i[:, 0]), h[:, 0] * 2),
    "put_one": lambda h, i: h.index_put((torch.arange(4), i[:, 0] - 7), torch.tensor(3.0, dtype=h.dtype)),
    "put_labels": lambda h, i: h.sum(-1).index_put((torch.arange(4), i[:, 1]), h[:, 0, 0]),
    "add_some": lambda h, i: h.index_put((torch.arange(4)[:, None], i), h[:, :3], accumulate=True),
    "add_one_to_some": lambda h, i: h.index_put((torch.arange(4)[:, None], i), h[0, 0], accumulate=True),
}
KEPT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "other_rows": lambda h, i: h[torch.arange(3, -1, -1), i[:, 0]],
    "fewer_rows": lambda h, i: h[torch.arange(3), i[:3, 0]],
    "all_with_all": lambda h, i: h[torch.arange(4)[:, None], i[:, 0]],
    "one_place": lambda h, i: h[torch.arange(4), torch.tensor(2)],
    "put_some": lambda h, i: h.index_put((torch.arange(4)[:, None], i), h[:, :3]),
    "rows_of_the_input": lambda h, i: h[i[:, 0] % 4, i[:, 1]],
}


@pytest.mark.parametrize("name", [*BODIES, *WRITES, *KEPT])
def test_same_numbers(tools: Any, name: str) -> None:
    inputs = torch.randn(4, 7, 5), torch.randint(7, (4, 3))
    before = run(tools.export(Net((BODIES | WRITES | KEPT)[name]), inputs), BEFORE)
    after = rows_to_gathers(tools.copy(before))
    check(after, "rows_to_gathers")
    tools.same_numbers(before, after, inputs)
    gathers = [n for n in after.graph.nodes if n.target in (aten.gather.default, *SCATTERS)]
    assert len(gathers) == (name not in KEPT)
    annotate(after, lambda _: True)
    for node in gathers:
        found = rule_of(node)
        assert found is not None and "d0" in found.factors()


def test_golden(tools: Any) -> None:
    inputs = torch.randn(4, 7, 5), torch.randint(7, (4, 3))
    graph = run(tools.export(Net(BODIES["last_token"]), inputs), BEFORE)
    tools.golden(rows_to_gathers, "rows_to_gathers", graph)


def test_places_outside_raise(tools: Any) -> None:
    graph = rows_to_gathers(
        run(tools.export(Net(BODIES["last_token"]), (torch.randn(4, 7, 5), torch.zeros(4, 3).long())), BEFORE)
    )
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        graph(torch.randn(4, 7, 5), torch.full((4, 3), 7))
