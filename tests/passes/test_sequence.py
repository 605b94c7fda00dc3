"""What of a model is its sequence: the rows that are not those of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.build import prepare
from autopar.capture import capture
from autopar.choosing.wiring import weights_of
from autopar.models import gpt2
from autopar.passes.layout import Axis, Mesh
from autopar.passes.sequence import Along, along_sequence
from autopar.passes.strategy import choices

aten = torch.ops.aten


def along(model: nn.Module, *args: Any, **options: Any) -> dict[Any, list[Along]]:
    """By the op."""
    captured = capture(model, args, {}, check=False, **options)
    gm, parameters = prepare(captured, 1).body, frozenset(captured.parameters)
    batched = frozenset(i.name for i in captured.inputs if i.batch)
    found: dict[Any, list[Along]] = {}
    for op, known in along_sequence(gm, parameters, weights_of(gm, parameters), batched, captured.batch).items():
        found.setdefault(op.target, []).append(known)
    return found


def dims(known: Along) -> list[set[int]]:
    return [set(rows.dims) for rows in (*known.operands, *known.results)]


def test_tokens_are_rows_and_weights_have_none() -> None:
    model, args, _ = gpt2.make(layers=1)
    found = along(model, *args)
    assert all(
        dims(k) == [{0, 1}, set(), set(), {0, 1}] and k.results[0].batch == (0, ())
        for k in found[aten.linear.default][:-1]
    )
    (attention,) = found[aten.scaled_dot_product_attention.default]
    assert dims(attention) == [{0, 2}] * 4, "heads are no rows"


def test_what_a_norm_normalises_is_no_row() -> None:
    norm = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4))
    (known,) = along(norm, torch.randn(4, 8, 6), loss=lambda y: y.square().sum())[aten.layer_norm.default]
    assert dims(known) == [set(), set(), set(), {0, 1}]


def test_places_of_an_image_become_tokens() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 6, 2, 2), nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(x).flatten(2).transpose(1, 2)).square().sum()

    found = along(Patches(), torch.randn(4, 3, 8, 8))
    assert dims(found[aten.conv2d.default][0])[-1] == {0, 2, 3}
    assert dims(found[aten.linear.default][0])[-1] == {0, 1}


def test_counts_are_never_cut_over_time() -> None:
    """The program of a microbatch does not know where it stands."""
    gm = torch.fx.GraphModule(nn.Module(), torch.fx.Graph())
    node = gm.graph.call_function(aten.arange.default, (8,))
    node.meta["val"] = torch.empty(8, dtype=torch.int64, device="meta")
    from autopar.passes.facts import annotate

    annotate(gm, lambda _: False)
    assert [c.kind for c in choices(node, Mesh((Axis("time", 2, (4, 4)),)), 0)] == ["R"]
    assert "factor" in [c.kind for c in choices(node, Mesh((Axis("cp", 2),)), 0)]
