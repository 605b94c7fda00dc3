"""Tensors in a file come back as they were, and comparing by pieces is comparing whole."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from autopar import equality, piecewise, verify
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


@pytest.mark.parametrize("make", verify.OPTIMIZERS.values(), ids=verify.OPTIMIZERS)
def test_pieces_step_as_the_whole_does(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise, "LARGE", 8)
    start = [torch.randn(3), torch.randn(5, 7, dtype=torch.float64), torch.randn(9), torch.randn(11)]
    one, two = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    optimizers = make(one), piecewise.Piecewise(two, make, tmp_path / "states")
    for step in range(3):
        for params, optimizer in zip((one, two), optimizers):
            optimizer.zero_grad()
            for i, p in enumerate(params):
                p.grad = None if i == 3 and step != 1 else torch.full_like(p, 0.1 * step) - p.detach()
            optimizer.step()
    assert all(torch.equal(a, b) and not torch.equal(b, c) for a, b, c in zip(one, two, start))
    optimizers[1].zero_grad()
    assert all(p.grad is None for p in two)


def test_pieces_of_a_dtensor_step_as_the_whole_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise, "LARGE", 8)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        start = [torch.randn(3), torch.randn(5, 7)]
        one = [torch.nn.Parameter(p.clone()) for p in start]
        two = [torch.nn.Parameter(DTensor.from_local(p.clone(), mesh, [Replicate()])) for p in start]
        make = verify.OPTIMIZERS["adamw"]
        optimizers = make(one), piecewise.Piecewise(two, make, tmp_path / "states")
        for step in range(3):
            for params, optimizer in zip((one, two), optimizers):
                for p in params:
                    p.grad = torch.full_like(p, 0.1 * step) - p.detach()
                optimizer.step()
        for a, b, c in zip(one, two, start):
            assert torch.equal(a, b.to_local()) and not torch.equal(a, c)
        assert len(list(tmp_path.iterdir())) == 5  # 35 elements, 8 at a time
    finally:
        dist.destroy_process_group()


def test_runs_are_files_that_go_with_their_subject() -> None:
    subject = Subject.of(ModelSpec("autopar.models.mlp:make"), None, check=False)
    grads, folder = subject.judge.grads, subject._folder
    assert {f.name for f in folder.iterdir()} == {"judge.grads", "judge.params"}
    assert all(g is not None and g.dtype == torch.float64 for g in grads.values())
    del subject
    assert not folder.exists()
