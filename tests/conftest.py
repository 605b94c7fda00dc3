"""Settings that every test shares."""

from __future__ import annotations

import os

import pytest

# Ranks are processes that share few cores; one thread each. Read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    """Every test starts from one seed, so that it draws the same numbers alone and in the whole run."""
    import torch

    torch.manual_seed(0)
