"""What a run is besides its model: the default of its framework, and over it what the run states."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import AutoparError
from autopar.pricing.recipe import ATTENTION, FRAMEWORKS, Recipe, recipe


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_not_stated_is_the_framework_s_own(framework: str) -> None:
    stated = ("attention_kernel", "fused_norm", "compile", "async_tp", "tp_overlap", "grad_bytes", "dropout")
    assert recipe(framework, **dict.fromkeys(stated)) == FRAMEWORKS[framework]
    assert FRAMEWORKS[framework].attention in ATTENTION
    assert FRAMEWORKS[framework].source


def test_no_framework_is_megatron() -> None:
    assert recipe(None) == recipe("megatron")


@pytest.mark.parametrize(
    ("stated", "field", "value"),
    [
        ({"attention_kernel": "torch"}, "attention", "eager"),
        ({"attention_kernel": "flash3"}, "attention", "flash3"),
        ({"fused_norm": False}, "fused", frozenset({"pointwise"})),
        ({"fused_norm": True}, "fused", frozenset({"norm", "pointwise"})),
        ({"compile": True}, "compiled", True),
        ({"tp_overlap": True}, "overlap_tensor", True),
        ({"async_tp": True}, "overlap_tensor", True),
        ({"async_tp": False, "tp_overlap": True}, "overlap_tensor", True),
        ({"grad_bytes": 2}, "gradient", 2),
        ({"logits_sharded": False}, "sharded_logits", False),
        ({"dropout": 0.0}, "dropout", False),
        ({"dropout": 0.1}, "dropout", True),
    ],
)
def test_what_a_run_states_goes_before(stated: dict[str, Any], field: str, value: object) -> None:
    found = recipe("megatron", **stated)
    assert getattr(found, field) == value
    others = [name for name in Recipe.__dataclass_fields__ if name != field]
    assert all(getattr(found, name) == getattr(FRAMEWORKS["megatron"], name) for name in others)


@pytest.mark.parametrize(
    ("framework", "stated", "words"),
    [
        ("megatrom", {}, "run.source_kind 'megatrom' is not known. Legal: megatron"),
        ("nemo", {"attention_kernel": "flash9"}, "run.attention_kernel 'flash9' is not known. Legal: torch, eager"),
    ],
)
def test_errors_name_what_is_legal(framework: str, stated: dict[str, Any], words: str) -> None:
    with pytest.raises(AutoparError, match=words):
        recipe(framework, **stated)
