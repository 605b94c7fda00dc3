"""The judge of rules as fixtures: with pytest's importlib mode test files cannot import each other."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor, fx

TESTS = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """A module of ``tests/``."""
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def judge() -> ModuleType:
    """``tests/rule_judge.py``."""
    return load("rule_judge")


@pytest.fixture(scope="session")
def opinfo() -> ModuleType:
    """``tests/opinfo_calls.py``."""
    return load("opinfo_calls")


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
