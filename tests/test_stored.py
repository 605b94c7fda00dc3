"""Tensors in a file come back as they were, and comparing by pieces is comparing whole."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from autopar import equality
from autopar.equality import Run, distances
from autopar.loading import ModelSpec
from autopar.stored import store
from autopar.verify import Subject

TENSORS = {
    "float": torch.randn(3, 5),
    "double, transposed": torch.randn(4, 2, dtype=torch.float64).t(),
    "half": torch.tensor([1.5, float("nan"), -float("inf")], dtype=torch.bfloat16),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "none": None,
    "bool": torch.tensor([True, False]),
    "count": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "trained": torch.nn.Parameter(torch.randn(2)),
}


def test_what_is_stored_is_read(tmp_path: Path) -> None:
    kept = pickle.loads(pickle.dumps(store(tmp_path / "run", TENSORS.items())))
    assert list(kept) == list(TENSORS) and len(kept) == len(TENSORS)
    for name, tensor in TENSORS.items():
        if tensor is None:
            assert kept[name] is None
        else:
            torch.testing.assert_close(kept[name], tensor.detach(), rtol=0, atol=0, equal_nan=True)
    again = store(tmp_path / "run", [("count", torch.tensor(8))])
    assert dict(again) == {"count": torch.tensor(8)}


def test_pieces_have_the_distance_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (
        Run(torch.tensor(1.0), {"w": w, "none": torch.empty(0)}, {"b": w.to(torch.complex128)}, {"w": w})
        for w in pair()
    )
    whole = distances(one, two, lr=0.1)
    monkeypatch.setattr(equality, "PIECE", 4)
    assert distances(one, two, lr=0.1) == whole and whole[0].rel > 0


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    w = torch.randn(5, 7)
    moved = w.clone()
    moved[4, 6], moved[0, 0], w[0, 0] = w[4, 6] + 1e-3, float("nan"), float("nan")
    return w, moved


def test_runs_are_files_that_go_with_their_subject() -> None:
    subject = Subject.of(ModelSpec("autopar.models.mlp:make"), None, check=False)
    grads, folder = subject.judge.grads, subject._folder
    assert {f.name for f in folder.iterdir()} == {"judge.grads", "judge.params"}
    assert all(g is not None and g.dtype == torch.float64 for g in grads.values())
    del subject
    assert not folder.exists()
