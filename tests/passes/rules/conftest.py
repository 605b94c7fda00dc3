"""The judge of rules as fixtures: with pytest's importlib mode test files cannot import each other."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor, fx


@pytest.fixture(scope="session")
def judge() -> ModuleType:
    """``tests/rule_judge.py``."""
    import rule_judge

    return rule_judge


@pytest.fixture(scope="session")
def opinfo() -> ModuleType:
    """``tests/opinfo_calls.py``."""
    import opinfo_calls

    return opinfo_calls


@pytest.fixture
def check(judge: Any) -> Callable[..., list[str]]:
    """Run one call under every strategy of its rule; returns the strategies that were tried, as text."""
    found: Callable[..., list[str]] = judge.check_call
    return found


@pytest.fixture
def build(judge: Any) -> Callable[..., tuple[fx.Node, list[Tensor]]]:
    """Make a graph with one call."""
    found: Callable[..., tuple[fx.Node, list[Tensor]]] = judge.build
    return found
