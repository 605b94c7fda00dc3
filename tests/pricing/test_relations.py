"""What must hold between the prices of two configurations, whatever the figures are."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.bench.published_rows import row_of
from autopar.pricing import PricedRow, price_row

MODEL = {"layers": 16, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "ffn_type": "swiglu", "vocab": 32000}
RUN = {"seq": 4096, "gpu": "H100", "precision": "bf16", "mbs": 1, "gbs": 256, "run": {"source_kind": "nemo"}}
LAYOUT = {"gpus": 32, "tp": 4, "pp": 4, "sequence_parallel": True, "pp_schedule": "1F1B"}


def price(**fields: Any) -> PricedRow:
    return price_row(row_of({"id": "x", **MODEL, **RUN, **LAYOUT, **fields}, "rows.json", "$[0]"))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("gpus", (32, 64, 128, 256)),
        ("gbs", (256, 128, 64)),
        ("vp", (1, 2, 4)),
        ("precision", ("bf16", "fp8")),
        ("recompute", ("full", "selective", "none")),
        ("gpu", ("A100", "H100", "H200")),
    ],
)
def test_faster_from_each_to_the_next(field: str, values: tuple[Any, ...]) -> None:
    seconds = [price(**{field: value}).step_s for value in values]
    assert seconds == sorted(set(seconds))[::-1]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("tp", (1, 2, 4, 8)),
        ("pp", (1, 2, 4, 8)),
        ("zero_stage", (0, 1, 2, 3)),
        ("cp", (1, 2)),
        ("sequence_parallel", (False, True)),
        ("recompute", ("none", "selective", "full")),
        ("pp_schedule", ("GPipe", "1F1B")),
        ("run", ({"attention_kernel": "torch"}, {"attention_kernel": "fused_softmax"}, {"attention_kernel": "flash2"})),
    ],
)
def test_fewer_bytes_from_each_to_the_next(field: str, values: tuple[Any, ...]) -> None:
    held = [price(**{field: value}).peak_gib for value in values]
    assert held == sorted(set(held))[::-1]


def test_a_microbatch_more_adds_the_same_each_time() -> None:
    """Past the bubble, which no number of microbatches changes."""
    one, two, three = (price(gbs=gbs).step_s for gbs in (128, 256, 384))
    assert three - two == pytest.approx(two - one, rel=1e-6)
    assert two < 2 * one


def test_recomputation_costs_about_a_forward() -> None:
    assert 1.2 < price(recompute="full").step_s / price(recompute="none").step_s < 1.4


def test_more_nodes_leave_what_is_inside_one_as_it_is() -> None:
    near, far = (price(gpus=gpus, gbs=8 * gpus, zero_stage=0).parts["tp_s"] for gpus in (32, 256))
    assert near == pytest.approx(far)
