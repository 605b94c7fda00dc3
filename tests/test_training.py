"""Training on real ranks equals training in one process: any optimizer, schedule, clipping, inputs and mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import autopar
from autopar import Cluster
from autopar.compile import Parallel
from autopar.runtime.pool import RankPool

BATCH, WIDTH, CLASSES, STEPS = 12, 8, 16, 3
OPTIMIZERS: dict[str, Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda named: torch.optim.SGD(named.values(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda named: torch.optim.AdamW(named.values(), lr=0.01),
    "adam foreach": lambda named: torch.optim.Adam(named.values(), lr=0.01, foreach=True),
    "rmsprop": lambda named: torch.optim.RMSprop(named.values(), lr=0.01, momentum=0.5),
    "groups": lambda named: torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in named.items() if not n.endswith("weight")], "lr": 0.02, "weight_decay": 0.0},
        ],
        lr=0.01,
    ),
}
MORE: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True, "foreach": True},
    "AdamW": {"fused": True},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {"foreach": True},
    "RAdam": {},
    "ASGD": {},
    "LBFGS": {},  # takes the step as a closure, and sums over all parameters
}


class Net(nn.Module):
    """Ids ``[batch, 4]`` and labels ``[batch, 4]`` (-100: none) to a dict. The head is tied to the embedding, the gain
    frozen, ``spare`` unused; ``calls`` counts, ``shift`` is in no state dict."""

    def __init__(self, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=not norm), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5, requires_grad=False)
        self.spare = nn.Parameter(torch.randn(3, 3))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.randn(WIDTH), persistent=False)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        if self.training:
            self.calls.add_(1)
        x = self.embed(ids) + self.shift
        hidden = self.norm(self.up(x).flatten(0, 1)).unflatten(0, x.shape[:2])
        x = x + self.down(self.dropout(F.gelu(hidden))) * self.gain
        logits = self.head(x)
        if labels is None:
            return {"loss": None, "logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def net(seed: int | None = 0, **options: Any) -> Net:
    torch.seed() if seed is None else torch.manual_seed(seed)
    return Net(**options)


def batch(seed: int = 0, rows: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(CLASSES, (rows, 4), generator=generator) for _ in range(2))
    return ids, labels.masked_fill(torch.rand(rows, 4, generator=generator) < 0.3, -100)


def compiled(model: nn.Module, ranks: int, pins: str, **options: Any) -> Parallel:
    return autopar.compile(model, Cluster.local(ranks=ranks), args=batch(), pins=pins, **options)


def full(tensor: Tensor | None) -> Tensor | None:
    return (
        None if tensor is None else (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    )


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: full(p.grad) for name, p in module.named_parameters()}


def state(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: full(t) for name, t in {**module.state_dict(), **dict(module.named_buffers())}.items()}


def train(module: nn.Module, step: Callable[..., Tensor], clip: Callable[..., Tensor], kind: str) -> dict[str, Any]:
    """Some steps with clipping and a schedule of learning rates, from what ``module`` holds; what they leave."""
    optimizer = OPTIMIZERS[kind](dict(module.named_parameters()))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done))
    losses, norms = [], []
    for seed in range(STEPS):
        losses.append(step(*batch(seed)).detach())
        norms.append(clip(0.5))
        optimizer.step()
        optimizer.zero_grad(set_to_none=seed % 2 == 0)
        schedule.step()
    return {"losses": losses, "norms": norms, "state": state(module)}


# what the ranks run


def train_all(rank: int, ranks: int, pins: str, norm: bool) -> dict[str, Any]:
    parallel = compiled(net(norm=norm), ranks, pins)
    first = state(parallel)
    results = {}
    for kind in OPTIMIZERS:
        parallel.zero_grad()
        parallel.load_state_dict({n: t for n, t in first.items() if n in parallel.state_dict()})
        results[kind] = train(parallel, parallel.step, parallel.clip_grad_norm_, kind)
    return results


def more_optimizers(rank: int) -> None:
    parallel = compiled(_all_used(), 2, "dp=2 zero=3")
    for kind, options in MORE.items():
        model = _all_used()
        parallel.load_state_dict(model.state_dict())
        pairs = ((parallel, parallel.step), (model, reference_step(model)))
        for module, step in pairs:
            trained = [p for p in module.parameters() if p.requires_grad]
            optimizer = getattr(torch.optim, kind)(trained, lr=0.01, **options)
            for seed in range(2):

                def closure(step=step, optimizer=optimizer, seed=seed) -> Tensor:
                    optimizer.zero_grad()
                    return step(*batch(seed))

                optimizer.step(closure)
        expected = dict(model.named_parameters())
        same({n: full(p) for n, p in parallel.named_parameters()}, {n: full(p) for n, p in expected.items()})


def _all_used() -> Net:
    model = net()
    model.spare.requires_grad_(False)
    return model


def accumulate(rank: int, ranks: int, pins: str) -> dict[str, Any]:
    """Twice the same batch is twice the gradient; another batch adds; zero_grad of both kinds; norms."""
    parallel = compiled(net(), ranks, pins)
    parallel.step(*batch(0))
    once = grads(parallel)
    parallel.step(*batch(0))
    same(grads(parallel), {n: None if g is None else 2 * g for n, g in once.items()})
    parallel.zero_grad(set_to_none=False)
    assert all(g is None or not g.any() for g in grads(parallel).values())
    parallel.step(*batch(0))
    same(grads(parallel), once)
    parallel.step(*batch(1))
    two = grads(parallel)
    norms = [parallel.clip_grad_norm_(1e9, p) for p in (1.0, 2.0, math.inf)]
    parallel.zero_grad()
    assert all(p.grad is None for p in parallel.parameters())
    return {"once": once, "two": two, "norms": norms}


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows whose labels are all valid, so that every way to deal them out has the same mean."""

    def __len__(self) -> int:
        return 2 * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(CLASSES, (4,), generator=torch.Generator().manual_seed(index))
        return ids, (ids + 1) % CLASSES


def sampled(rank: int, ranks: int, pins: str) -> list[Tensor]:
    """Each rank reads its rows with a sampler, as with DistributedDataParallel."""
    ids, labels = (t[: BATCH // 2] for t in batch())
    parallel = autopar.compile(net(), Cluster.local(ranks=ranks), args=(ids, labels), pins=pins, inputs="local")
    assert parallel.plan.batch == BATCH and parallel.data_world_size == 2
    sampler = DistributedSampler(Rows(), parallel.data_world_size, parallel.data_rank, shuffle=False)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses = []
    for own in DataLoader(Rows(), batch_size=BATCH // 2, sampler=sampler):
        losses.append(parallel.step(*own))
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Recurrent(nn.Module):
    """In float32 on a CPU torch has one kernel for the layer, which keeps for backward what it wants."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].square().mean()


def recurrent(rank: int, ranks: int, pins: str) -> list[tuple[Tensor, Tensor]]:
    eager, x = Recurrent(), torch.randn(BATCH, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    eager(x).backward()
    parallel = autopar.compile(Recurrent(), Cluster.local(ranks=ranks), args=(x,), pins=pins)
    parallel.step(x)
    return [(full(p.grad), q.grad) for p, q in zip(parallel.parameters(), eager.parameters(), strict=True)]


def evaluate(rank: int, ranks: int, pins: str, norm: bool) -> dict[str, Any]:
    """Train a step, evaluate batches of three shapes with and without labels, train again."""
    parallel = compiled(net(norm=norm), ranks, pins)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)

    def step(seed: int) -> Tensor:
        loss = parallel.step(*batch(seed))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step(0)]
    before = state(parallel)
    assert not parallel.eval().training
    made = [parallel(*batch(7)), parallel(batch(8)[0]), parallel(ids=batch(9, 4)[0])]
    captured = len(parallel._ready[False])
    made += [parallel(*batch(8)), parallel(batch(7)[0])]
    assert len(parallel._ready[False]) == captured == 3, "known shapes are not captured again"
    same(state(parallel), before)
    parallel.train()
    losses.append(step(1))
    with torch.no_grad():
        made.append(parallel(*batch(2)))
    return {"losses": losses, "made": made, "state": state(parallel)}


def evaluate_first(rank: int, ranks: int, pins: str) -> dict[str, Any]:
    """From eval mode to train mode: parameters stay where eval's plan put them. With dropout, which eval leaves out."""
    model = net(dropout=0.5).eval()
    parallel = compiled(model, ranks, pins)
    made = parallel(batch()[0])["logits"]
    parallel = compiled(net().eval(), ranks, pins)
    parallel.train()
    return {"logits": made, "loss": parallel.step(*batch()), "grads": grads(parallel)}


# the same in one process


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def reference_step(model: nn.Module) -> Callable[..., Tensor]:
    def step(*args: Tensor) -> Tensor:
        loss: Tensor = model(*args)["loss"]
        loss.backward()
        return loss

    return step


def reference(norm: bool) -> dict[str, Any]:
    results = {}
    for kind in OPTIMIZERS:
        model = net(norm=norm)
        clip = lambda most, model=model: nn.utils.clip_grad_norm_(model.parameters(), most)
        results[kind] = train(model, reference_step(model), clip, kind)
    return results


Pools = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Pools by size, started when first asked for."""
    made: dict[int, RankPool] = {}
    yield lambda size: made.setdefault(size, RankPool(size, timeout=120))
    for pool in made.values():
        pool.close()


@pytest.mark.parametrize(
    ("ranks", "pins", "norm"),
    [(2, "dp=2", True), (2, "tp=2 microbatches=3", False), (4, "dp=2 tp=2 zero=3 microbatches=2", False)],
)
def test_any_optimizer_follows_one_process(ranks: int, pins: str, norm: bool, pools: Pools) -> None:
    expected = reference(norm)
    every = pools(ranks).run(train_all, ranks, pins, norm)
    for results in every:
        for kind in OPTIMIZERS:
            same(results[kind], expected[kind])
            pairs = zip(results[kind]["losses"], every[0][kind]["losses"], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), "the loss is the same on every rank, bit for bit"


def test_more_optimizers_work_on_shards(pools: Pools) -> None:
    pools(2).run(more_optimizers)


@pytest.mark.parametrize(("ranks", "pins"), [(2, "dp=2 zero=2 microbatches=2"), (4, "dp=2 tp=2")])
def test_gradients_add_up_as_backward_adds_them(ranks: int, pins: str, pools: Pools) -> None:
    model = net()
    step = reference_step(model)
    step(*batch(0))
    once = grads(model)
    step(*batch(1))
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 1e9, p) for p in (1.0, 2.0, math.inf)]
    for result in pools(ranks).run(accumulate, ranks, pins):
        same(result, {"once": once, "two": grads(model), "norms": norms})
        assert result["once"]["spare"] is None and result["once"]["gain"] is None


@pytest.mark.parametrize(("ranks", "pins"), [(2, "dp=2"), (4, "dp=2 tp=2 microbatches=2")])
def test_ranks_read_their_own_rows_with_a_sampler(ranks: int, pins: str, pools: Pools) -> None:
    model = net()
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    for rows in DataLoader(Rows(), batch_size=BATCH):
        expected.append(reference_step(model)(*rows).detach())
        optimizer.step()
        optimizer.zero_grad()
    for losses in pools(ranks).run(sampled, ranks, pins):
        same(losses, expected)


@pytest.mark.parametrize(("ranks", "pins", "norm"), [(2, "dp=2", True), (4, "dp=2 tp=2 zero=3 microbatches=3", False)])
def test_evaluation_between_steps(ranks: int, pins: str, norm: bool, pools: Pools) -> None:
    model = net(norm=norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(seed: int) -> Tensor:
        loss = reference_step(model)(*batch(seed)).detach()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step(0)]
    model.eval()
    with torch.no_grad():
        made = [model(*batch(7)), model(batch(8)[0]), model(batch(9, 4)[0]), model(*batch(8)), model(batch(7)[0])]
    model.train()
    losses.append(step(1))
    with torch.no_grad():
        made.append(model(*batch(2)))
    every = pools(ranks).run(evaluate, ranks, pins, norm)
    for result in every:
        assert result["made"][1]["loss"] is None
        for out in result["made"] + made:
            out["loss"] = torch.zeros(()) if out["loss"] is None else out["loss"]
        same(result, {"losses": losses, "made": made, "state": state(model)})


@pytest.mark.parametrize("pins", ["dp=2", "tp=2", "dp=2 recompute=full zero=3"])
def test_a_recurrent_layer_of_float32(pins: str, pools: Pools) -> None:
    for mine, theirs in pools(2).run(recurrent, 2, pins)[0]:
        torch.testing.assert_close(mine, theirs)


def test_evaluation_may_come_first(pools: Pools) -> None:
    model, dropping = net(), net(dropout=0.5).eval()
    loss = reference_step(model)(*batch()).detach()
    expected = {"logits": dropping(batch()[0])["logits"].detach(), "loss": loss, "grads": grads(model)}
    for result in pools(4).run(evaluate_first, 4, "dp=2 tp=2 zero=3"):
        same(result, expected)
