"""A checkpoint saved under one plan continues under another as if nothing had happened."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import autopar
from autopar import AutoparError, Cluster
from autopar.compile import Parallel
from autopar.runtime.pool import RankPool
from autopar.save_weights import INDEX

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


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout=120) as ranks:
        yield ranks


def test_a_run_goes_on_under_other_plans(pool: RankPool, tmp_path: Path) -> None:
    """dp=2 zero=3, then tp=2, then one process: as one process that was never interrupted."""
    whole = run(0, 1, "", None, None, 7)
    first, second = (str(tmp_path / name) for name in ("a", "b"))
    losses = [pool.run(run, 2, "dp=2 zero=3", None, first, 2)[1]["losses"]]
    losses.append(pool.run(run, 2, "tp=2", first, second, 2)[1]["losses"])
    last = run(0, 1, "", second, None, 3)
    same([*itertools.chain(*losses), *last["losses"]], whole["losses"])
    same(last["model"], whole["model"])
    same(last["states"], whole["states"])


def saved(rank: int, folder: str) -> None:
    """The model's weights as files; then what a user of DCP writes, with an optimizer of ours and one of torch."""
    parallel = compiled(2, "dp=2 zero=3", seed=7)
    parallel.save_weights(f"{folder}/one")
    parallel.save_weights(f"{folder}/many", shard_bytes=500)
    parallel.save_weights(f"{folder}/many", shard_bytes=2000)
    with pytest.raises(AutoparError, match=r"^save_weights /proc/none: rank 0 cannot write there \(No such file"):
        parallel.save_weights("/proc/none")
    plain_dcp(parallel, f"{folder}/theirs")


def plain_dcp(parallel: Parallel, folder: str) -> None:
    optimizer = optimizer_of(parallel)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    go_on(parallel, optimizer, schedule, 2)
    model, state = get_state_dict(parallel, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=folder)
    before = held(parallel, optimizer, [])
    go_on(parallel, optimizer, schedule, 1)
    with torch.device("meta"):
        empty = net()
    other = autopar.compile(empty, Cluster.local(ranks=2), args=batch(0), pins="tp=2", seed=7)
    for save in (other.save_weights, lambda path: autopar.save(path, other)):
        with pytest.raises(AutoparError, match=r"^save.*: scale, gain, embed.weight and \d+ more have no value"):
            save(f"{folder}/none")
    named = dict(other.named_parameters())
    theirs = torch.optim.AdamW(
        [{**g, "params": [named[n] for n in g["param_names"]]} for g in optimizer.param_groups], lr=0.01
    )
    model, state = get_state_dict(other, theirs)
    template = {"model": model, "optimizer": state}
    dcp.load(template, checkpoint_id=folder)
    set_state_dict(other, theirs, model_state_dict=template["model"], optim_state_dict=template["optimizer"])
    same(held(other, theirs, []), before)
    autopar.load(folder, parallel, optimizer)  # and ours reads what torch's wrote
    same(held(parallel, optimizer, []), before)


def test_the_functions_of_dcp_work_and_the_whole_model_as_safetensors(pool: RankPool, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    pool.run(saved, str(tmp_path))
    expected, found = net(), net(5)
    assert safetensors.load_model(found, tmp_path / "one" / "model.safetensors") == (set(), [])
    same(found.state_dict(), expected.state_dict())
    files = sorted(path.name for path in (tmp_path / "many").iterdir())
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX]
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"]["total_size"] == (tmp_path / "one" / "model.safetensors").stat().st_size - header(tmp_path)
    for name, file in index["weight_map"].items():
        same(safetensors.load_file(tmp_path / "many" / file)[name], expected.state_dict()[name])
    assert "head.weight" not in index["weight_map"], "tied weights stand once"


def header(folder: Path) -> int:
    """Bytes of a file before its tensors."""
    with (folder / "one" / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_what_does_not_fit_is_one_line_and_changes_nothing(tmp_path: Path) -> None:
    model = net()
    matrices = [model.embed.weight, model.up.weight, model.down.weight]
    rest = [p for p in model.parameters() if p.requires_grad and all(p is not m for m in matrices)]
    several = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.02)]
    model(*batch(0)).backward()
    for optimizer in several:
        optimizer.step()
    saved = tmp_path / "saved"
    autopar.save(saved, model, several, extra=[1, torch.ones(2)])
    autopar.save(saved, model, several, extra=[2, torch.ones(2)])
    autopar.save(tmp_path / "weights", model)

    other = net(5)
    twin = {id(p): q for p, q in zip(model.parameters(), other.parameters(), strict=True)}
    fresh = [torch.optim.Muon([twin[id(p)] for p in matrices]), torch.optim.AdamW([twin[id(p)] for p in rest])]
    before = {n: t.clone() for n, t in other.state_dict().items()}
    wide = nn.Sequential(nn.Linear(3, 3))
    bigger = net()
    bigger.scale = nn.Parameter(torch.ones(2))
    wrong: dict[str, tuple[Callable[[], Any], str]] = {
        "none": (lambda: autopar.load(tmp_path / "x", other), "there is no such folder. Name a folder that autopar.sa"),
        "empty": (lambda: autopar.load(tmp_path, other), r"is no checkpoint \(it has no .metadata\)"),
        "other": (
            lambda: autopar.load(saved, wide),
            "is a checkpoint of another model: it has no 0.weight, 0.bias. Build the model th",
        ),
        "shape": (lambda: autopar.load(saved, bigger), r"of another model: scale has shape \(\) there, \(2,\) here"),
        "dtype": (
            lambda: autopar.load(saved, net().float()),
            "scale is torch.float64 there and torch.float32 here, wh",
        ),
        "weights": (lambda: autopar.load(tmp_path / "weights", other, fresh), "holds no optimizer"),
        "kind": (
            lambda: autopar.load(saved, other, fresh[1]),
            "was saved with Muon, AdamW, here is AdamW. Make the op",
        ),
        "groups": (
            lambda: autopar.load(saved, other, [fresh[0], torch.optim.AdamW([twin[id(rest[0])]])]),
            "same groups",
        ),
        "alien": (lambda: autopar.load(saved, other, several), "Muon has a parameter of shape .16, 8. that is not the"),
        "save": (
            lambda: autopar.save(tmp_path / "y", other, several),
            "^save: Muon has a parameter of shape .16, 8. t",
        ),
        "disk": (lambda: autopar.save("/proc/none", other), "^save /proc/none: rank 0 failed with FileNotFoundError: "),
    }
    for call, said in wrong.values():
        with pytest.raises(AutoparError, match=said) as caught:
            call()
        assert "\n" not in str(caught.value)
    same(other.state_dict(), before)
    extra = autopar.load(saved, other, fresh)
    same(extra, [2, torch.ones(2)])
    same(other.state_dict(), model.state_dict())
    assert [o.param_groups[0]["lr"] for o in fresh] == [0.01, 0.02]
    same([o.state_dict()["state"] for o in fresh], [o.state_dict()["state"] for o in several])
    autopar.load(tmp_path / "weights", net(5))
