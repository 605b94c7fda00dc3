"""State of pipelined programs: what a user clips, optimizes, saves and loads is the whole model's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import autopar
from autopar import AutoparError, Cluster
from autopar.compile import Parallel
from autopar.runtime.finite import NonfiniteError, check_finite
from autopar.runtime.parameters import is_here, local
from autopar.runtime.pool import RankPool
from autopar.runtime.whole import everywhere

BATCH, WIDTH, CLASSES = 8, 8, 16
PP, PP_DP, PP_TP = (f"pp=2 cut=last microbatches=2 {more}" for more in ("", "dp=2 zero=3", "tp=2"))


class Net(nn.Module):
    """Ids and labels ``[batch, 4]`` to a loss. The head, of the last stage, is tied to the embedding, of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.first, self.last = (nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)) for _ in range(2))
        self.dropout = nn.Dropout(0.25)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5, requires_grad=False)
        self.register_buffer("table", torch.arange(4.0)[:, None] / 8)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids) + self.table
        x = x + self.dropout(self.first(x)) * self.gain
        x = x + self.last(x) * self.scale
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Unwritten(Net):
    """A parameter of the last stage is never written."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(WIDTH, dtype=torch.double))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(ids, labels) + self.bias.sum()


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(CLASSES, (BATCH, 4), generator=generator) for _ in range(2))
    return ids, labels


def compiled(pins: str, model: nn.Module | None = None, seed: int = 7) -> Parallel:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return autopar.compile(model or net(), Cluster.local(ranks=ranks), args=batch(0), pins=pins, seed=seed)


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def values(parallel: Parallel) -> dict[str, Tensor]:
    """Every parameter and buffer whole, on every rank. Collective."""
    assert parallel._ranks is not None
    found = {name: everywhere(p, p.detach(), parallel._ranks) for name, p in parallel.named_parameters()}
    return {**{name: t for name, t in found.items() if t is not None}, **dict(parallel.named_buffers())}


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], RankPool]]:
    made: dict[int, RankPool] = {}

    def of(ranks: int) -> RankPool:
        if ranks not in made:
            made[ranks] = RankPool(ranks, timeout=240)
        return made[ranks]

    yield of
    for pool in made.values():
        pool.close()


# a run goes on under other plans


def run(rank: int, pins: str, came_from: str | None, goes_to: str | None, steps: int) -> dict[str, Any]:
    """Some steps, clipped, from a checkpoint and to another one."""
    parallel = compiled(pins, net(0 if came_from is None else 5), seed=7 if came_from is None else 99)
    groups = [
        {"params": ["embed.weight", "first.0.weight", "last.2.weight"], "weight_decay": 0.1},
        {"params": ["first.0.bias", "scale", "norm.bias"], "lr": 0.02},
    ]
    optimizer = parallel.optimizer(torch.optim.AdamW, groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done))
    if came_from is not None:
        schedule.load_state_dict(autopar.load(came_from, parallel, optimizer)["schedule"])
    losses, norms = [], []
    for _ in range(steps):
        losses.append(parallel.step(*batch(parallel.steps)))
        norms.append(parallel.clip_grad_norm_(0.5))
        optimizer.step()
        parallel.zero_grad()
        schedule.step()
    if goes_to is not None:
        autopar.save(goes_to, parallel, optimizer, extra={"schedule": schedule.state_dict()})
    if dist.is_initialized() and dist.get_world_size() > 1:
        return {"losses": losses, "norms": norms, "embed": local(parallel.get_parameter("embed.weight")).detach()}
    names = {id(p): n for n, p in parallel.named_parameters()}
    states = {names[id(p)]: {k: local(v) for k, v in s.items()} for p, s in optimizer.state.items()}
    return {"losses": losses, "norms": norms, "model": values(parallel), "states": states}


def test_a_run_goes_on_under_other_plans(pools: Callable[[int], RankPool], tmp_path: Path) -> None:
    """One process, pp=2, dp=2, pp=2 tp=2, pp=2 dp=2 zero=3, one process: as if never interrupted."""
    whole = run(0, "", None, None, 8)
    at = [None, *(str(tmp_path / name) for name in "abcde"), None]
    legs = [(1, "", 2), (2, PP, 1), (2, "dp=2", 1), (4, PP_TP, 1), (4, PP_DP, 1), (1, "", 2)]
    found: list[dict[str, Any]] = []
    for (ranks, pins, steps), begin, end in zip(legs, at, at[1:], strict=False):
        every = [run(0, pins, begin, end, steps)] if ranks == 1 else pools(ranks).run(run, pins, begin, end, steps)
        found.append(every[0])
        for one in every:
            same((one["losses"], one["norms"]), (every[0]["losses"], every[0]["norms"]))
        if "pp=2" in pins:  # both stages hold the tied parameter
            half = ranks // 2
            assert all(torch.equal(every[r]["embed"], every[r + half]["embed"]) for r in range(half))
    for what in ("losses", "norms"):
        same([*itertools.chain(*(leg[what] for leg in found))], whole[what])
    same(found[-1]["model"], whole["model"])
    same(found[-1]["states"], whole["states"])


# clipping and optimizers


def kinds(parallel: Parallel) -> list[Callable[[], torch.optim.Optimizer]]:
    """Optimizers of torch's own on the DTensors, and ours on the pieces and on the whole."""
    every = list(parallel.parameters())
    matrices = [p for p in every if p.ndim == 2]
    return [
        lambda: torch.optim.AdamW(every, fused=True),
        lambda: torch.optim.SGD(every, lr=0.1, momentum=0.9, foreach=True),
        lambda: torch.optim.RMSprop(every, foreach=False),
        lambda: parallel.optimizer(torch.optim.Adafactor, lr=0.1),
        lambda: parallel.optimizer(torch.optim.Muon, matrices, lr=0.01),
        lambda: parallel.optimizer(torch.optim.AdamW, [{"params": matrices, "lr": 0.02}, {"params": ["scale"]}]),
    ]


def trained(rank: int, pins: str) -> dict[str, Any]:
    """A step of each optimizer; the norms of the gradients."""
    parallel = compiled(pins)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for make in kinds(parallel):
        optimizer = make()
        found["losses"].append(parallel.step(*batch(parallel.steps)))
        for order in (2.0, float("inf"), 3.0):
            found["norms"].append(parallel.clip_grad_norm_(1e9, order))
        found["norms"].append(parallel.clip_grad_norm_(1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=len(found["losses"]) % 2 == 1)
    found["model"] = values(parallel)
    if dist.is_initialized() and dist.get_world_size() > 1:
        found["embed"] = refused(rank, parallel)
    return found


def refused(rank: int, parallel: Parallel) -> Tensor:
    """What would be of one stage alone, and what is not finite on one of them; a parameter that two stages hold, after
    torch's own Muon, whose products are rounded otherwise than those of one process."""
    loss = parallel.step(*batch(0))
    torch.optim.Muon([p for p in parallel.parameters() if p.ndim == 2], lr=0.1).step()
    for foreach in (None, True, False):
        with pytest.raises(AutoparError, match="^norm: in a pipeline .* Use parallel.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(parallel.parameters(), 1.0, foreach=foreach)
    named = dict(parallel.named_parameters())
    for name, p in named.items():
        p.grad = p.grad if is_here(p) else torch.zeros_like(p)
        assert (p.grad is None) == (not is_here(p) or name == "gain")
    assert parallel._ranks is not None
    finite = lambda: check_finite(parallel._names("step"), parallel._ranks, loss, 3)
    finite()
    if rank == 3:
        local(named["last.2.bias"].grad)[-1] = float("nan")
    if rank == 0:
        local(named["first.2.bias"].grad)[0] = float("inf")
    with pytest.raises(
        NonfiniteError, match=r"^step 3: the gradient of last.2.bias is nan or inf on rank 3 \(pp=1 dp=1"
    ):
        finite()
    with pytest.raises(RuntimeError, match="is nan, so it cannot be clipped"):
        parallel.clip_grad_norm_(1.0, error_if_nonfinite=True)
    return local(named["embed.weight"]).detach()


def test_clipping_and_optimizers_mean_the_whole_model(pools: Callable[[int], RankPool]) -> None:
    expected = trained(0, "")
    every = pools(4).run(trained, PP_DP)
    copies = [found.pop("embed") for found in every]
    assert torch.equal(copies[0], copies[2]) and torch.equal(copies[1], copies[3])
    for found in every:
        same(found, expected)


# weights


def weighed(rank: int, folder: str) -> None:
    """Weights are made where they rest, written and read; stages may be frozen."""
    parallel = compiled(PP, autopar.deferred_init(net))
    same(values(parallel), {n: t.detach() for n, t in [*net().named_parameters(), *net().named_buffers()]})
    for name, p in parallel.named_parameters():
        held = {0: ("embed", "first", "gain"), 1: ("embed", "last", "scale", "norm")}[rank]
        assert (local(p).numel() > 0) == name.startswith(held), "nothing of other stages"
    parallel.save_weights(f"{folder}/ours")
    with torch.device("meta"):
        empty = Net()
    other = compiled(PP, empty)
    for call in (lambda: other.step(*batch(0)), lambda: other.save_weights(f"{folder}/none")):
        with pytest.raises(AutoparError, match="scale, gain, embed.weight and .* have no value yet"):
            call()
    other.load_weights(f"{folder}/ours")
    same(values(other), values(parallel))
    other.load_state_dict(net(3).state_dict())
    same(values(other)["last.0.weight"], net(3).last[0].weight.detach())
    other.load_state_dict(parallel.state_dict())
    same(values(other), values(parallel))
    copied = copy.deepcopy(other.state_dict())
    theirs(other, parallel, folder)
    other.load_state_dict(copied)
    same(values(other), {n: t.detach() for n, t in [*net().named_parameters(), *net().named_buffers()]})
    of_other = next(p for p in parallel.parameters() if not is_here(p))
    with pytest.raises(AutoparError, match="^full_tensor: a parameter of shape .* is of another stage"):
        of_other.full_tensor()
    with pytest.raises(AutoparError, match="^bias: has no value: nothing wrote all of it"):
        compiled(PP, autopar.deferred_init(Unwritten))
    other.load_weights(f"{folder}/plain")
    frozen(other)


def theirs(one: Parallel, other: Parallel, folder: str) -> None:
    """torch's own functions save and load both."""
    optimizers = [torch.optim.AdamW(parallel.parameters(), lr=0.01) for parallel in (one, other)]
    one.step(*batch(0))
    optimizers[0].step()
    optimizers[0].zero_grad()
    model, state = get_state_dict(one, optimizers[0])
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=f"{folder}/plain")
    model, state = get_state_dict(other, optimizers[1])
    template = {"model": model, "optimizer": state}
    dcp.load(template, checkpoint_id=f"{folder}/plain")
    options = StateDictOptions(strict=False)
    set_state_dict(
        other,
        optimizers[1],
        model_state_dict=template["model"],
        optim_state_dict=template["optimizer"],
        options=options,
    )
    other.steps = one.steps
    for parallel, optimizer in zip((one, other), optimizers, strict=True):
        assert all(is_here(p) for p in optimizer.state), "no state of other stages"
        parallel.step(*batch(1))
        optimizer.step()
        optimizer.zero_grad()
    same(values(one), values(other))


def frozen(parallel: Parallel) -> None:
    named = dict(parallel.named_parameters())
    for train in ("first", "last"):  # all else of its stage and of the other is frozen
        for name, p in named.items():
            p.requires_grad_(name.startswith(train))
        parallel.step(*batch(0))
        norm = parallel.clip_grad_norm_(1.0)
        assert norm > 0
        for name, p in named.items():
            assert (p.grad is not None) == (name.startswith(train) and is_here(p)), name
            p.grad = None
    for p in named.values():
        p.requires_grad_(False)
    with pytest.raises(AutoparError, match="^step: no trainable parameter reaches the loss"):
        parallel.step(*batch(0))


def test_weights_are_made_and_kept_by_their_stage(pools: Callable[[int], RankPool], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    pools(2).run(weighed, str(tmp_path))
    found = net(5)
    assert safetensors.load_model(found, tmp_path / "ours" / "model.safetensors") == (set(), [])
    same(found.state_dict(), net().state_dict())
