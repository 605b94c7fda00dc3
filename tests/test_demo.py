"""The demo of the README: its data, its launch, its verdict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from autopar import demo

ROOT = Path(__file__).resolve().parent.parent


def launch(*command: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def test_batches_are_a_function_of_the_seed() -> None:
    text = demo.corpus()
    first, again, other = (list(demo.batches(text, 2, seed)) for seed in (1, 1, 2))
    for (ids, labels), (same_ids, _), (other_ids, _) in zip(first, again, other, strict=True):
        assert ids.shape == labels.shape == (demo.BATCH, demo.CONFIG.positions)
        assert torch.equal(ids[:, 1:], labels[:, :-1])
        assert torch.equal(ids, same_ids)
        assert not torch.equal(ids, other_ids)
    assert not torch.equal(first[0][0], first[1][0])


def test_four_ranks_follow_the_loss_curve_of_one_process() -> None:
    run = launch(
        *"-m torch.distributed.run --standalone --nproc-per-node 4 -m autopar.demo --steps 2".split(),
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("step   1 ") == 2, "once for the ranks, once for one process"
    assert "on 4 ranks" in run.stdout
    assert "no plan in scope takes less than" in run.stdout.replace("\n", " "), (
        "the plan is the solver's, and explained"
    )
    assert "Largest relative difference from one process over 2 steps" in run.stdout.replace("\n", " ")


def test_launched_alone_it_says_how() -> None:
    run = launch("-m", "autopar.demo")
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert "torchrun --standalone --nproc-per-node 4" in line
