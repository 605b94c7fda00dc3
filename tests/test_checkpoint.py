"""A checkpoint saved under one plan continues under another as if nothing had happened."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import Cluster
from autopar.compile import Parallel
from autopar.runtime.pool import RankPool

BATCH, WIDTH, CLASSES = 8, 8, 16


class Net(nn.Module):
    """Ids and labels ``[batch, 4]`` to a loss. The head is tied to the embedding, a norm counts, dropout drops, the
    scale is 0-d, the gain frozen, 13 hidden units are cut unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.dropout = nn.Dropout(0.25)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5, requires_grad=False)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.dropout(self.down(F.gelu(self.up(x)))) * self.gain
        x = self.norm(x.flatten(0, 1)).unflatten(0, ids.shape) * self.scale
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(CLASSES, (BATCH, 4), generator=generator) for _ in range(2))
    return ids, labels


def compiled(ranks: int, pins: str, seed: int, of: int = 0) -> Parallel:
    return autopar.compile(net(of), Cluster.local(ranks=ranks), args=batch(0), pins=pins, seed=seed)


def optimizer_of(module: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    groups = [
        {"params": ["embed.weight", "up.weight", "down.weight"], "weight_decay": 0.1},
        {"params": ["up.bias", "scale", "down.bias"], "lr": 0.02},
    ]
    if isinstance(module, Parallel):
        return module.optimizer(kind, groups, lr=0.01)
    named = dict(module.named_parameters())
    return kind([{**g, "params": [named[n] for n in g["params"]]} for g in groups], lr=0.01)


def full(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def held(parallel: Parallel, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> dict[str, Any]:
    """All that a run leaves."""
    names = {id(p): n for n, p in parallel.named_parameters()}
    states = {names[id(p)]: {k: full(v) for k, v in s.items()} for p, s in optimizer.state.items()}
    return {"losses": losses, "model": {n: full(t) for n, t in parallel.state_dict().items()}, "states": states}


def go_on(parallel: Parallel, optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[Tensor]:
    losses = []
    for _ in range(steps):
        losses.append(parallel.step(*batch(parallel.steps)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses


def run(rank: int, ranks: int, pins: str, came_from: str | None, goes_to: str | None, steps: int) -> dict[str, Any]:
    """Some steps, from a checkpoint and to another one."""
    parallel = compiled(ranks, pins, seed=7 if came_from is None else 99, of=0 if came_from is None else 5)
    optimizer = optimizer_of(parallel)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done))
    if came_from is not None:
        schedule.load_state_dict(autopar.load(came_from, parallel, optimizer)["schedule"])
    losses = go_on(parallel, optimizer, schedule, steps)
    if goes_to is not None:
        autopar.save(goes_to, parallel, optimizer, extra={"schedule": schedule.state_dict(), "rank": rank})
    return held(parallel, optimizer, losses)


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


Pools = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    made: dict[int, RankPool] = {}
    yield lambda size: made.setdefault(size, RankPool(size, timeout=120))
    for pool in made.values():
        pool.close()


def test_a_run_goes_on_under_other_plans(pools: Pools, tmp_path: Path) -> None:
    """dp=2 tp=2 zero=3, then tp=4, one process and dp=2: as one process that was never interrupted."""
    whole = run(0, 1, "", None, None, 8)
    first, second, third = (str(tmp_path / name) for name in ("a", "b", "c"))
    losses = [pools(4).run(run, 4, "dp=2 tp=2 zero=3", None, first, 2)[3]["losses"]]
    losses.append(pools(4).run(run, 4, "tp=4", first, second, 2)[1]["losses"])
    losses.append(run(0, 1, "", second, third, 1)["losses"])
    last = pools(2).run(run, 2, "dp=2 zero=2", third, None, 3)[1]
    same([*itertools.chain(*losses), *last["losses"]], whole["losses"])
    same(last["model"], whole["model"])
    same(last["states"], whole["states"])
