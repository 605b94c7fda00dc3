"""What the tests of rules take from ``tests/rule_judge.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import rule_judge


@pytest.fixture
def check() -> Callable[..., Any]:
    """Run one call under every strategy of its rule; returns the strategies that were tried, as text."""
    return rule_judge.check_call


@pytest.fixture
def build() -> Callable[..., Any]:
    """Make a graph with one call."""
    return rule_judge.build
