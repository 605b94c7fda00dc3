"""Under torchrun itself, on loopback; few, as each launch costs seconds. The rest of the suite uses the rank pool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autopar
from autopar.models import mlp

ROOT = Path(__file__).resolve().parent.parent
TRAIN = """
import torch
import autopar
from autopar.models import mlp

torch.seed()  # as a script that forgets to seed: rank 0's weights count
model, (x, labels), _ = mlp.make(seed=int(torch.randint(1 << 30, ())))
data = torch.Generator().manual_seed(0)
x, labels = torch.randn(8, 32, generator=data), torch.randint(16, (8,), generator=data)
first = {name: p.detach().clone() for name, p in model.named_parameters()}
parallel = autopar.compile(model, args=(x[:4], labels[:4]), pins="dp=2 zero=3", inputs="local")
assert torch.distributed.get_backend() == "gloo"
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
own = slice(4 * parallel.data_rank, 4 * parallel.data_rank + 4)
losses = []
for _ in range(3):
    losses.append(parallel.step(x[own], labels[own]).item())
    optimizer.step()
    optimizer.zero_grad()
torch.save((losses, first), f"rank{torch.distributed.get_rank()}.pt")
"""
READ = """
import sys
import torch
import autopar

program = autopar.load_program("program")
weights, inputs = torch.load("weights.pt"), torch.load("inputs.pt")
program.load_state_dict(weights)
loss = program.step(*inputs).item()
gradients = {name: p.grad.full_tensor() for name, p in program.named_parameters()}
assert not any(name.startswith("autopar.models") for name in sys.modules)
torch.save((loss, gradients), f"rank{torch.distributed.get_rank()}.pt")
"""
WRONG = """
import torch
import autopar

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Flatten(0), torch.nn.LogSoftmax(0))
autopar.compile(model, autopar.Cluster.local(ranks=4), pins="dp=4", loss=torch.sum)
"""


def torchrun(folder: Path, text: str, processes: int) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    command = f"-m torch.distributed.run --standalone --nproc-per-node {processes} train.py".split()
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_script_trains_on_two_ranks(tmp_path: Path) -> None:
    run = torchrun(tmp_path, TRAIN, 2)
    assert run.returncode == 0, run.stderr
    (losses, first), (other, _) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert losses == other
    model, _, _ = mlp.make()
    model.load_state_dict(first)
    data = torch.Generator().manual_seed(0)
    x, labels = torch.randn(8, 32, generator=data), torch.randint(16, (8,), generator=data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loss in losses:
        expected = model(x, labels)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()


def test_a_written_program_trains_in_new_processes(tmp_path: Path) -> None:
    model, inputs, _ = mlp.make()
    parallel = autopar.compile(model, autopar.Cluster.local(2), args=inputs, pins="dp=2 zero=3")
    parallel.save_source(tmp_path / "program")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save(inputs, tmp_path / "inputs.pt")
    run = torchrun(tmp_path, READ, 2)
    assert run.returncode == 0, run.stderr
    expected = model(*inputs)
    expected.backward()
    for rank in range(2):
        loss, gradients = torch.load(tmp_path / f"rank{rank}.pt")
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        for name, p in model.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-5, atol=1e-6)


def test_the_wrong_number_of_processes_is_one_line(tmp_path: Path) -> None:
    run = torchrun(tmp_path, WRONG, 2)
    assert run.returncode != 0
    said = [line for line in run.stderr.splitlines() if "AutoparError: " in line]
    assert said and all(
        "AutoparError: compile: the cluster has 4 ranks and 2 processes are running. Launch with torchrun "
        "--nproc-per-node 4, or give Cluster.local(ranks=2)." in line
        for line in said
    ), run.stderr
