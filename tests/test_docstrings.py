"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def modules() -> list[str]:
    """Modules of the package that have an example, by name."""
    files = sorted(
        [*(ROOT / "autopar").glob("*.py")]
        + [p for own in ("bench", "choosing", "cli", "explain") for p in (ROOT / "autopar" / own).glob("*.py")]
        + [p for folder in ("models", "passes", "runtime", "solver") for p in (ROOT / folder).rglob("*.py")]
    )
    names = []
    for path in files:
        parts = path.relative_to(ROOT).with_suffix("").parts
        dotted = ".".join(parts if parts[0] == "autopar" else ("autopar", *parts)).removesuffix(".__init__")
        if ">>>" in path.read_text():
            names.append(dotted)
    return names


@pytest.mark.parametrize("name", modules())
def test_examples_run(name: str) -> None:
    result = doctest.testmod(import_module(name))
    assert result.failed == 0
