"""Optimizers on parameters that rest in pieces: the numbers of one process, for what an optimizer needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import autopar
from autopar import AutoparError, Cluster
from autopar.models import mlp
from autopar.optimizer_states import optimizer_states
from autopar.runtime.finite import NonfiniteError
from autopar.runtime.optimizer import local_optimizer, way_of
from autopar.runtime.pool import RankPool

PIECES: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "AdamW": {"fused": True},
    "Adam": {"amsgrad": True, "foreach": True},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Rprop": {},  # DTensor has no rule for what it does
    "ASGD": {"t0": 1},
}
WHOLE: dict[str, dict[str, Any]] = {"Muon": {}, "Adafactor": {}}
SHAPES = ((6, 4), (5, 3), (4, 6), (1, 1))  # cut evenly and unevenly, held whole, and one rank has nothing
STEPS = 3


class Lion(torch.optim.Optimizer):
    """Somebody's own, elementwise: counts its steps in the group, makes states anew."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["mean"] = 0.9 * state.get("mean", 0.0) + 0.1 * p.grad
                p.sub_(state["mean"].sign(), alpha=group["lr"] / group["k"])


class Lamb(Lion):
    """A step in proportion to the tensor's own size: it needs the whole tensor."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm() * p.norm(), alpha=group["lr"])


class Normed(Lion):
    """Divides by the size of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        size = sum(p.grad.square().sum() for p in params).sqrt()
        for p in params:
            p.sub_(p.grad / size, alpha=0.1)


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def stepped(make: Callable[[list[Any]], torch.optim.Optimizer], place: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
    """The parameters after some steps; the last has no gradient in the second."""
    params = [nn.Parameter(place(v, i)) for i, v in enumerate(values(0))]
    optimizer = make(params)
    for seed in range(1, STEPS + 1):
        for i, (p, g) in enumerate(zip(params, values(seed), strict=True)):
            p.grad = None if (seed, i) == (2, 2) else place(g, i)
        optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in params]


def kind_named(name: str) -> type[torch.optim.Optimizer]:
    return {"Lion": Lion, "Lamb": Lamb, "Normed": Normed}.get(name) or getattr(torch.optim, name)


# what the ranks run


def on_shards(rank: int, kinds: dict[str, dict[str, Any]]) -> dict[str, list[Tensor]]:
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, options in kinds.items():
        for dim in (0, 1):
            place = lambda t, i, dim=dim: distribute_tensor(t, mesh, [Replicate() if i == 2 else Shard(dim)])
            found[f"{name} {dim}"] = stepped(partial(local_optimizer, kind_named(name), lr=0.01, **options), place)
    return found


def interchange(rank: int) -> None:
    """States are DTensors as torch's own are: a state dict goes from the one optimizer to the other and back."""
    mesh = init_device_mesh("cpu", (2,))
    params = [nn.Parameter(distribute_tensor(v, mesh, [Shard(0)])) for v in values(0)[:2]]
    ours = local_optimizer(torch.optim.AdamW, params, lr=0.01)
    theirs = torch.optim.AdamW(params, lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(ours, 0.5)
    calls: list[str] = []
    ours.register_step_pre_hook(lambda *_: calls.append("before"))
    for optimizer in (ours, theirs, ours):
        for p, g in zip(params, values(1), strict=False):
            p.grad = distribute_tensor(g, mesh, [Shard(0)])
        optimizer.step()
        state = optimizer.state_dict()
        moment = state["state"][1]["exp_avg"]
        assert isinstance(moment, DTensor) and moment.shape == params[1].shape and moment.placements == (Shard(0),)
        assert set(state["param_groups"][0]) >= {"lr", "betas", "params"}
        for other in (ours, theirs):
            if other is not optimizer:
                other.load_state_dict(state)
    schedule.step()
    assert calls == ["before"] * 2 and isinstance(ours, torch.optim.AdamW) and ours.param_groups[0]["lr"] == 0.005
    assert ours.state[params[0]]["step"].item() == 3


def trained(rank: int, ranks: int, pins: str) -> dict[str, Any]:
    """Muon for matrices beside AdamW for the rest, clipped; then a gradient that is not finite."""
    model, args, _ = mlp.make()
    parallel = autopar.compile(model.double(), Cluster.local(ranks=ranks), args=doubled(args), pins=pins)
    names = [name for name, _ in parallel.named_parameters()]
    matrices = [name for name in names if name.endswith("weight")]
    muon = parallel.optimizer(torch.optim.Muon, matrices, lr=0.01)
    rest = parallel.optimizer(torch.optim.AdamW, [{"params": [n for n in names if n not in matrices]}], lr=0.01)
    norms = []
    for _ in range(2):
        parallel.step(*doubled(args))
        norms.append([parallel.clip_grad_norm_(m, p) for m, p in ((1e9, 1.5), (1e9, math.inf), (0.1, 2.0))])
        for optimizer in (muon, rest):
            optimizer.step()
            optimizer.zero_grad()
    after = {n: p.full_tensor() for n, p in parallel.named_parameters()}
    with pytest.raises(AutoparError, match="'up' is no parameter of the model"):
        parallel.optimizer(torch.optim.SGD, ["up"])
    parallel.error_if_nonfinite = True
    parallel.step(*doubled(args))
    assert parallel.steps == 3
    said = []
    for poison in ("loss", "gradient"):
        with pytest.raises(NonfiniteError) as caught:
            poisoned(parallel, rank, args, names[-1], poison)
        said.append(str(caught.value))
    return {"after": after, "norms": norms, "said": said}


def poisoned(parallel: autopar.Parallel, rank: int, args: Iterable[Tensor], name: str, what: str) -> None:
    x, *labels = doubled(args)
    if what == "loss":
        parallel.step(x.masked_fill(torch.eye(*x.shape, dtype=torch.bool), math.nan), *labels)
    parallel.zero_grad()
    parallel.step(x, *labels)
    gradient = parallel.get_parameter(name).grad
    assert isinstance(gradient, DTensor)
    if rank == 1:
        gradient._local_tensor.view(-1)[0] = math.inf
    parallel.step(x, *labels)


def state_of(rank: int, kind: str) -> tuple[int, int]:
    """Predicted and held bytes of an optimizer's states on this rank, counts of steps left out."""
    model, args, _ = mlp.make()
    made = kind_named(kind)
    parallel = autopar.compile(model, Cluster.local(ranks=2), args=args, pins="dp=2 zero=3", optimizer=made)
    optimizer = parallel.optimizer(made, [n for n, p in parallel.named_parameters() if kind != "Muon" or p.ndim == 2])
    parallel.step(*args)
    optimizer.step()
    held = [v for state in optimizer.state.values() for v in state.values() if v.ndim]
    local = [v._local_tensor if isinstance(v, DTensor) else v for v in held]
    assert parallel.plan.optimizer.name == kind
    return int(parallel.plan.predicted.parts["optimizer_bytes"]), sum(t.nbytes for t in local)


def doubled(args: Iterable[Tensor]) -> list[Tensor]:
    return [a.double() if a.is_floating_point() else a for a in args]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout=120) as ranks:
        yield ranks


def test_each_has_the_numbers_of_one_process_on_shards(pool: RankPool) -> None:
    kinds = {**PIECES, **WHOLE, "Lion": {}}
    alone = lambda t, _: t.clone()
    expected = {name: stepped(partial(kind_named(name), lr=0.01, **o), alone) for name, o in kinds.items()}
    for found in pool.run(on_shards, kinds):
        for name, params in found.items():
            torch.testing.assert_close(params, expected[name.split()[0]], rtol=1e-13, atol=1e-15, msg=name)


def test_states_are_dtensors_as_those_of_torch(pool: RankPool) -> None:
    pool.run(interchange)


def test_what_an_optimizer_needs_is_found_by_trying() -> None:
    assert all(way_of(kind_named(kind), {"lr": 0.01, **options}) == "pieces" for kind, options in PIECES.items())
    assert [way_of(kind, {"lr": 0.01}) for kind in (torch.optim.Muon, torch.optim.Adafactor, Lamb)] == ["whole"] * 3
    assert way_of(torch.optim.AdamW, {"lr": 0.01, "capturable": True}) == "pieces"
    with pytest.raises(AutoparError, match="^optimizer: the step of Normed on one tensor depends on others, or "):
        way_of(Normed, {})
    with pytest.raises(AutoparError, match="^optimizer: LBFGS cannot step on small tensors "):
        local_optimizer(torch.optim.LBFGS, values(0))
    with pytest.raises(AutoparError, match="^optimizer: 'adamw' is not a class of optimizers. Example: torch"):
        local_optimizer("adamw", values(0))  # type: ignore[arg-type]


def test_two_optimizers_norms_and_what_is_not_finite(pool: RankPool) -> None:
    model, args, _ = mlp.make()
    model.double()
    matrices = [p for n, p in model.named_parameters() if n.endswith("weight")]
    muon = torch.optim.Muon(matrices, lr=0.01)
    rest = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=0.01)
    norms = []
    for _ in range(2):
        model(*doubled(args)).backward()
        params = list(model.parameters())
        clips = ((1e9, 1.5), (1e9, math.inf), (0.1, 2.0))
        norms.append([nn.utils.clip_grad_norm_(params, most, p) for most, p in clips])
        for optimizer in (muon, rest):
            optimizer.step()
            optimizer.zero_grad()
    last = [name for name, _ in model.named_parameters()][-1]
    for found in pool.run(trained, 2, "dp=2 zero=3"):
        torch.testing.assert_close(found["norms"], norms, rtol=1e-10, atol=1e-12)
        after = {n: p.detach() for n, p in model.named_parameters()}
        torch.testing.assert_close(found["after"], after, rtol=1e-2, atol=1e-4)  # Muon works in bfloat16
        loss, gradient = found["said"]
        assert loss.startswith("step 4: the loss is nan, parameters are as before. Look at this step's batch")
        assert gradient.startswith(f"step 6: the gradient of {last} is nan or inf on rank 1 (dp=1), the loss is ")


def test_a_plan_counts_the_bytes_of_the_states_that_an_optimizer_makes(pool: RankPool) -> None:
    for kind in ("Adafactor", "SGD", "Lion"):
        predicted, held = pool.run(state_of, kind)[0]
        assert predicted == held and (held > 0) == (kind != "SGD"), kind


def test_states_are_found_by_a_step() -> None:
    tensors = [torch.ones(2, 2), torch.ones(3), torch.ones(2, 2, 2, dtype=torch.bfloat16)]
    found = {
        "adam,amsgrad=true": {"*": ("param",) * 3},
        "adafactor": {"fp32 1": ("param",), "fp32 2": ("d1:fp32", "d0:fp32"), "bf16 3": ("d0*d2:bf16", "d0*d1:bf16")},
    }
    for name, states in found.items():
        assert optimizer_states(name, tensors).states == states
    several = optimizer_states(lambda p: (torch.optim.Muon if p[0].ndim == 2 else torch.optim.Adam)(p), tensors[:2])
    assert several.name == "Adam, Muon" and several.states == {"fp32 1": ("param", "param"), "fp32 2": ("param",)}
    assert optimizer_states(partial(torch.optim.SGD, momentum=0.9), tensors).name == "SGD(momentum=0.9)"
    wrong: dict[Any, str] = {
        "adaw": "^optimizer: 'adaw' is not in torch.optim, did you mean 'adamw'. Legal: adadelta, adafactor, ",
        "sgd,momentum": "^optimizer: 'momentum' is not KEY=VALUE. Example: sgd,momentum=0.9.$",
        "muon": "^optimizer: Muon does not step on a parameter of 3 dims in bf16 .ValueError: Muon only supports 2D",
        "sgd,momentun=1": "^optimizer: SGD.momentun=1. does not step on .* unexpected keyword argument 'momentun'",
        3: "^optimizer: 3 is no optimizer. Give a class as torch.optim.AdamW, its name, or a function of a list of par",
    }
    for wanted, said in wrong.items():
        with pytest.raises(AutoparError, match=said):
            optimizer_states(wanted, tensors)
