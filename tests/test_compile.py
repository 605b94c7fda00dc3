"""What `compile` promises of a `Parallel`: names, values, outputs, plans, checkpoints, one line for what is wrong."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

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
from autopar.plan import Plan, choice_from_text, from_json
from autopar.rests import resting, rests_of
from autopar.runtime.pool import RankPool

BATCH, WIDTH = 8, 8


class Net(nn.Module):
    """``x`` ``[batch, 8]`` and a target to a loss. ``last`` is tied to ``first``, ``gain`` frozen, ``spare`` unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.last = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.gain = nn.Parameter(torch.rand(2 * WIDTH), requires_grad=False)
        self.spare = nn.Parameter(torch.randn(3))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mask", torch.rand(2 * WIDTH), persistent=False)
        self.double()

    def hidden(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        h = self.middle(self.first(x).relu() * self.mask).tanh() * self.gain
        return h @ self.last.weight

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return (self.hidden(x) - target).square().mean()


@cache
def made() -> type:
    """An output class of Hugging Face; imported by the one test that needs it, as that takes seconds."""
    from transformers.utils import ModelOutput

    @dataclass
    class Made(ModelOutput):
        loss: Tensor | None = None
        y: Tensor | None = None
        states: tuple[Tensor, ...] | None = None

    return Made


class Pair(NamedTuple):
    loss: Tensor
    y: Tensor


class Outputs(Net):
    """The same, returning ``kind`` of structure."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, target: Tensor) -> Any:
        y = self.hidden(x)
        loss = (y - target).square().mean()
        if self.kind == "ModelOutput":
            return made()(loss=loss, y=y, states=(y * 2, y.sum()))
        if self.kind == "dict":
            return {"y": y, "name": "net", "loss": loss, "rows": [y.argmax(1), None]}
        if self.kind == "named":
            return Pair(loss, y)
        return loss, (y, x)


class Bare(Net):
    """Returns no loss, and takes an option."""

    def forward(self, x: Tensor, scale: Tensor | None = None, *, twice: bool = False) -> Any:
        y = self.hidden(x if scale is None else x * scale)
        return 2 * y if twice else y


class Colliding(nn.Module):
    """Names that `Parallel` has itself."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.plan, self.local = nn.Linear(WIDTH, 4), nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, WIDTH)])
        self._program = nn.BatchNorm1d(4)
        self.register_buffer("_ranks", torch.ones(4))
        self.data_rank = nn.Parameter(torch.rand(WIDTH))
        self.double()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self._program(self.plan(self.step(x)) * self._ranks)
        return (self.local[0](x) * self.data_rank - target).square().mean()


def net(kind: Callable[..., nn.Module] = Net, *args: Any, seed: int | None = 0) -> nn.Module:
    torch.seed() if seed is None else torch.manual_seed(seed)
    return kind(*args)


def batch(seed: int = 0, rows: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, target


def compiled(model: nn.Module, ranks: int = 2, pins: str | None = None, **options: Any) -> Parallel:
    options = {"args": batch(), **options}
    return autopar.compile(model, Cluster.local(ranks=ranks), pins=pins, timeout=timedelta(seconds=30), **options)


def full(tensor: Tensor | None) -> Tensor | None:
    return (
        None if tensor is None else (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    )


def state(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: full(t) for name, t in {**module.state_dict(), **dict(module.named_buffers())}.items()}


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: full(p.grad) for name, p in module.named_parameters()}


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def follows(parallel: Parallel, model: nn.Module, steps: int = 2) -> None:
    """``parallel`` trains as ``model`` does in this process."""
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (parallel, model))
    for seed in range(steps):
        loss = model(*batch(seed))
        loss.backward()
        same(parallel.step(*batch(seed)), loss.detach())
        same(grads(parallel), grads(model))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    same(state(parallel), state(model))


def refused(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(AutoparError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


# what the ranks run


def names_and_values(rank: int) -> dict[str, Any]:
    """From an unseeded factory. Returns what rank 0 had, and what each has after."""
    model = net(seed=None)
    before = state(model)
    parallel = compiled(model, pins="tp=2")
    assert list(parallel.state_dict()) == list(model.state_dict())
    for names in ("named_parameters", "named_buffers"):
        for options in ({}, {"remove_duplicate": False}):
            ours, theirs = (list(getattr(m, names)(**options)) for m in (parallel, model))
            assert [n for n, _ in ours] == [n for n, _ in theirs]
            assert [(t.shape, t.dtype, t.requires_grad) for _, t in ours] == [
                (t.shape, t.dtype, t.requires_grad) for _, t in theirs
            ]
    assert parallel.get_parameter("last.weight") is parallel.get_parameter("first.weight")
    assert parallel.first.weight is parallel.last.weight
    assert all(isinstance(p, DTensor) for p in parallel.parameters())
    weight = parallel.get_parameter("middle.weight")
    assert isinstance(weight, DTensor) and weight.to_local().numel() * 2 == weight.numel()
    after = state(parallel)
    parallel.step(*batch())
    assert parallel.spare.grad is None and parallel.gain.grad is None and weight.grad is not None
    assert weight.grad.placements == weight.placements
    assert float(parallel.steps) == 1 and float(model.steps) == 0, "the model that was given is left alone"
    assert parallel.to("cpu").double() is parallel
    refused(lambda: parallel.half(), "parameters are placed by compile already")
    return {"before": before, "after": after}


def structures(rank: int) -> None:
    for kind, pins in (("ModelOutput", "dp=2 microbatches=2"), ("dict", "tp=2"), ("named", "dp=2"), ("tuple", "dp=2")):
        model = net(Outputs, kind)
        parallel = compiled(model, pins=pins)
        made, expected = parallel.step_with_outputs(*batch()), model(*batch())
        assert type(made) is type(expected)
        torch.utils._pytree.tree_map_only(Tensor, lambda t: t.requires_grad and pytest.fail("outputs are values"), made)
        ours, theirs = (torch.utils._pytree.tree_flatten(value) for value in (made, expected))
        assert ours[1] == theirs[1]
        for a, b in zip(ours[0], theirs[0], strict=True):
            if isinstance(b, Tensor):
                same(a, b.detach())
            else:
                assert a == b


def calls(rank: int) -> None:
    """Capture at the first step, keywords in any order, ``loss=``, ``global_batch=``, options of forward."""
    x, target = batch()
    model = net()
    parallel = autopar.compile(model, Cluster.local(ranks=2))
    refused(parallel.parameters, "Give compile args=", "torchrun --standalone --nproc-per-node 2")
    refused(parallel.state_dict, "state_dict: parameters exist once the model is captured")
    refused(lambda: parallel.plan, "not captured yet")
    refused(lambda: parallel.local, "not captured yet")
    refused(lambda: parallel.data_rank, "not captured yet")
    refused(lambda: parallel.clip_grad_norm_(1.0), "no gradients yet")
    same(parallel.step(target=target, x=x), model(x, target).detach())
    same(parallel.step(x, target=target), model(x, target).detach())
    assert parallel.plan.pins == {} and parallel.plan.proof.gap is not None  # the solver's
    parallel.prepare((x, target), {})
    assert len(parallel._ready[True]) == 1, "a program that is there stays"

    model = net(Bare)
    parallel = autopar.compile(
        model, None, args=(x[:2],), kwargs={"target": target[:2]}, loss=_distance, global_batch=BATCH, pins="tp=2"
    )
    expected = model(x)
    loss, y = parallel.step_with_outputs(x, target=target)
    same((loss, y), (_distance(expected, target).detach(), expected.detach()))
    parallel.eval()
    same(parallel(x), expected.detach())
    same(parallel(x[:3], target[:3], twice=True), model(x[:3], target[:3], twice=True).detach())
    parallel.train()
    with torch.no_grad():
        same(parallel(x, target=target), expected.detach())
    refused(lambda: parallel.step(x), "target: is missing")
    refused(lambda: parallel.step(x, target=target, twice=True), "was not given at capture")


def _distance(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target)


def own_rows(rank: int) -> None:
    """``inputs="local"``, also in eval mode and where ranks other than 0 have the model on meta."""
    (x, target), own = batch(), slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
    model = net(Bare)
    with torch.device("meta" if rank else "cpu"):
        here = net(Bare)
    options = {"args": (x[own],), "kwargs": {"target": target[own]}, "loss": _distance, "inputs": "local"}
    parallel = compiled(here, pins="dp=2", **options)
    assert parallel.plan.batch == BATCH and parallel.data_rank == rank and parallel.plan.model.checked
    same(parallel.step(x[own], target=target[own]), _distance(model(x), target).detach())
    same(parallel.eval()(x[own]), model(x).detach())


def freezing(rank: int) -> None:
    """Parameters may be frozen after compile, not thawed."""
    model = net()
    parallel = compiled(model, pins="dp=2 zero=3")
    for module in (model, parallel):
        module.get_parameter("middle.weight").requires_grad_(False)
    model(*batch()).backward()
    parallel.step(*batch())
    same(grads(parallel), grads(model))
    parallel.gain.requires_grad_(True)
    refused(lambda: parallel.step(*batch()), "gain: was frozen when compiled")


def two_models(rank: int) -> None:
    """Two models, stepped in turn, each with its own ranks of the same processes."""
    torch.manual_seed(0)
    one, other = net(), net(seed=1)
    pair = compiled(one, pins="dp=2 zero=3"), compiled(other, pins="tp=2")
    for seed in range(2):
        for parallel, model in zip(pair, (one, other), strict=True):
            loss = model(*batch(seed))
            loss.backward()
            same(parallel.step(*batch(seed)), loss.detach())
            same(grads(parallel), grads(model))


def collisions(rank: int) -> None:
    model = net(Colliding)
    parallel = compiled(model, pins="dp=2 zero=3")
    assert parallel.get_submodule("step").weight is dict(parallel.named_parameters())["step.weight"]
    assert parallel.data_rank == rank and parallel.plan.ranks == 2
    follows(parallel, model)
    compiled(net(), pins="tp=2").explain()


def frozen_norm(rank: int) -> None:
    """A norm that the user keeps in eval mode stays in it, also after train()."""
    model = net(Colliding)
    model._program.eval()
    parallel = autopar.compile(model, Cluster.local(ranks=2), pins="dp=2 microbatches=2", args=batch())
    assert model.training and not model._program.training
    same(parallel.step(*batch()), model(*batch()).detach())
    parallel.eval()
    same(parallel(*batch()), model.eval()(*batch()).detach())
    same(parallel.train().step(*batch(1)), model(*batch(1)).detach())
    same(state(parallel)["_program.running_mean"], model._program.running_mean)


def refusals(rank: int) -> None:
    x, target = batch()
    parallel = compiled(net(), pins="dp=2 microbatches=2")
    refused(lambda: parallel(x, target), "the model is in train mode", "parallel.step(...)")
    refused(lambda: parallel.eval().step(x, target), "step: the model is in eval mode")
    parallel.train()
    refused(lambda: parallel.step(x, target[:6]), "Give all batch inputs the same rows")
    refused(lambda: parallel.step(x, target.float()), "has dtype torch.float32, the captured graph takes torch.float64")
    refused(lambda: parallel.step(x, target + rank), "input 'target' differs between ranks 0 and 1", "the same batch")
    with torch.no_grad():
        refused(lambda: parallel.step(x, target), "gradients are off")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refused(lambda: parallel.step(x, target), "autocast: is on")
    refused(lambda: parallel.load_state_dict(parallel.state_dict(), assign=True), "assign=True")
    parallel.step(x, target)
    refused(lambda: compiled(net(), ranks=4), "the cluster has 4 ranks and 2 processes are running")
    plan = compiled(net(), pins="dp=2").plan
    refused(lambda: compiled(net(), plan=plan, pins="tp=2"), "pins (tp=2) beside a plan")
    refused(lambda: compiled(net(), plan=plan, global_batch=4), "global_batch=4, the plan is for 8 rows")
    refused(lambda: compiled(net(), ranks=1, plan=plan), "the plan (dp=2 on 2 ranks) is for 2 ranks, the cluster has 1")
    refused(lambda: compiled(net(Bare), plan=plan, loss=_distance, args=(x,), kwargs={"target": target}), "other model")
    mixed = net(nn.Linear, WIDTH, WIDTH + rank).double()
    refused(lambda: compiled(mixed, loss=torch.mean, args=(x,)), "rank 1 captured another program than rank 0")


def plans(rank: int, folder: str) -> None:
    """A saved plan gives the same; a choice, or where a parameter rests, edited by hand to another legal one is as
    exact; illegal ones are refused with the path and what is legal."""
    path = Path(folder) / "plan.json"
    parallel = compiled(net(), pins="tp=2")
    if rank == 0:
        parallel.plan.save(path)
    follows(parallel, net())
    torch.distributed.barrier()
    again = compiled(net(), plan=path)
    assert again.plan == parallel.plan
    follows(again, net())
    data = json.loads(path.read_text())
    (at,) = [i for i, op in enumerate(data["classes"][0]["ops"]) if op["fqn"] == "middle" and "linear" in op["op"]]
    op = data["classes"][0]["ops"][at]
    assert choice_from_text(op["choices"][0]).kind == "factor"
    data["parameters"]["first.weight"].update(rest="S1", gather="step", reduce="step")
    legal = []
    for choice in ("I", "R", *(f"factor:{name}" for name in "abio"), "linear:0"):
        op["choices"] = [choice]
        try:
            follows(compiled(net(), plan=from_json(data)), net(), steps=1)
            legal.append(choice)
        except AutoparError as error:
            assert f"plan: $.classes[0].ops[{at}].choices: ['{choice}'] is not legal for aten.linear" in str(error)
            assert "Legal per axis: tp: I, R, factor:" in str(error)
    assert len(legal) >= 5, legal
    data["parameters"]["middle.weight"]["rest"] = "S7"
    refused(lambda: compiled(net(), plan=from_json(data)), """$.parameters["middle.weight"].rest: 'S7' is not""")


def eval_of_a_given_plan(rank: int, text: str) -> None:
    parallel = compiled(net(), ranks=4, plan=from_json(json.loads(text)))
    parallel.eval()
    same(parallel(*batch(3, 4)), net()(*batch(3, 4)).detach())
    assert [p.gather for p in parallel._ready[False][0].plan.parameters.values()].count("use") > 0


def save(rank: int, folder: str) -> dict[str, Tensor | None]:
    """A step, a checkpoint of model and optimizer, another step; what that leaves."""
    parallel, optimizer = _trainer("dp=2 tp=2 zero=3")
    parallel.step(*batch())
    optimizer.step()
    optimizer.zero_grad()
    model, state_of = get_state_dict(parallel, optimizer)
    dcp.save({"model": model, "optimizer": state_of}, checkpoint_id=folder)
    parallel.step(*batch(1))
    optimizer.step()
    return state(parallel)


def load(rank: int, folder: str, pins: str) -> dict[str, Tensor | None]:
    """Go on from the checkpoint; full tensors of one process load too."""
    parallel, optimizer = _trainer(pins)
    parallel.load_state_dict({name: full(t) * 2 for name, t in parallel.state_dict().items()})
    same(state(parallel)["middle.weight"], 2 * net().middle.weight.detach())
    model, state_of = get_state_dict(parallel, optimizer)
    found = {"model": model, "optimizer": state_of}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(parallel, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    parallel.step(*batch(1))
    optimizer.step()
    return state(parallel)


def _trainer(pins: str) -> tuple[Parallel, torch.optim.Optimizer]:
    model = net()
    model.spare.requires_grad_(False)  # torch makes up a state for parameters that never had a gradient
    parallel = compiled(model, ranks=4, pins=pins)
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=0.01)


def raises_alone(rank: int) -> list[str]:
    """Rank 1 fails where the other does not: what rank 0 says."""
    timeout, fails = timedelta(seconds=8), rank == 1
    said = [_said(lambda: autopar.compile(net(), args=(3,) if fails else batch(), pins="dp=2", timeout=timeout))]
    parallel = autopar.compile(net(), args=batch(), pins="dp=2", timeout=timeout)
    parallel.step(*batch())
    said.append(_said(lambda: parallel.step(*batch(rows=BATCH - 2 * fails))))
    if not fails:  # the other one never comes
        said.append(_said(lambda: autopar.compile(net(), args=batch(), pins="dp=2", timeout=timedelta(seconds=1))))
    return said


def _said(call: Callable[[], Any]) -> str:
    started = time.monotonic()
    with pytest.raises(AutoparError) as caught:
        call()
    assert time.monotonic() - started < 30
    return f"{type(caught.value).__name__}: {caught.value}"


def dies(rank: int) -> str:
    parallel = autopar.compile(net(), args=batch(), pins="dp=2", timeout=timedelta(seconds=20))
    parallel.step(*batch())
    if rank == 1:
        os._exit(7)
    return _said(lambda: parallel.step(*batch()))


# the tests


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with RankPool(2, timeout=90) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(4, timeout=90) as pool:
        yield pool


def test_names_and_first_values_are_those_of_rank_0(two: RankPool) -> None:
    every = two.run(names_and_values)
    assert not torch.equal(every[0]["before"]["spare"], every[1]["before"]["spare"])
    for result in every:
        assert result["after"].keys() == every[0]["before"].keys()
        for name, value in every[0]["before"].items():
            assert torch.equal(result["after"][name], value), name


def test_outputs_have_the_structure_of_the_model(two: RankPool) -> None:
    two.run(structures)


def test_ways_to_call(two: RankPool) -> None:
    two.run(calls)


def test_own_rows_in_both_modes_from_meta(two: RankPool) -> None:
    two.run(own_rows)


def test_parameters_frozen_later(two: RankPool) -> None:
    two.run(freezing)


def test_two_models_in_one_process(two: RankPool) -> None:
    two.run(two_models)


def test_names_that_parallel_has_itself(two: RankPool) -> None:
    two.run(collisions)


def test_modules_kept_in_eval_mode_stay_in_it(two: RankPool) -> None:
    two.run(frozen_norm)


def test_what_is_wrong_is_one_line(two: RankPool) -> None:
    two.run(refusals)


def test_a_plan_saved_and_edited(two: RankPool, tmp_path: Path) -> None:
    two.run(plans, str(tmp_path))


def test_eval_follows_a_given_plan(four: RankPool) -> None:
    plan = autopar.compile(net(), Cluster.local(ranks=4), args=batch(), pins="dp=2 tp=2 zero=3 microbatches=2").plan
    four.run(eval_of_a_given_plan, plan.dumps())


def test_checkpoints_load_under_another_plan_and_in_one_process(four: RankPool, tmp_path: Path) -> None:
    saved = four.run(save, str(tmp_path))[0]
    for loaded in four.run(load, str(tmp_path), "tp=4"):
        same(loaded, saved)
    alone, first = net(seed=5), net()
    optimizer = torch.optim.AdamW([p for p in first.parameters() if p is not first.spare], lr=0.01)
    first(*batch()).backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it says, one process is intended
        dcp.load({"model": alone.state_dict()}, checkpoint_id=str(tmp_path), no_dist=True)
    same(alone.state_dict(), first.state_dict())


def test_a_rank_that_raises_alone_is_named_by_the_others() -> None:
    with RankPool(2, timeout=60) as pool:
        capture, step, never = pool.run(raises_alone)[0]
    assert capture.startswith("RankError: compile: rank 1 failed: inputs: missing a required argument: 'target'")
    assert "in vain for another rank in step 2: rank 1 failed in step 2 with AutoparError: step 2: rank 0 began" in step
    assert never.startswith("RankError: compile: rank 1 did not come within 1 s (it failed, hangs or has left).")


def test_a_rank_that_dies_is_named() -> None:
    with RankPool(2, timeout=60) as pool, pytest.raises(AutoparError, match="rank 1 ended with exit code 7"):
        pool.run(dies)


def test_one_process_plans_and_says_how_to_launch() -> None:
    parallel = compiled(net(), ranks=4, pins="dp=2 tp=2")
    refused(lambda: parallel.step(*batch()), "the plan (dp=2 tp=2 on 4 ranks) needs 4 processes, there is 1.")
    refused(parallel.parameters, "launch with torchrun --standalone --nproc-per-node 4")
    assert parallel.plan.predicted.divided == {}
    shares = parallel.detailed_plan().predicted.divided
    assert shares["tp"].flops == shares["dp_replicate"].flops == 0.5
    assert "Share that each axis takes off the busiest rank" in parallel.explain()


def test_explain_says_what_capture_left_out() -> None:
    class Caches(Net):
        def forward(self, x: Tensor, target: Tensor) -> Any:
            return {"loss": super().forward(x, target), "cache": object()}

    parallel = compiled(net(Caches), ranks=1)
    assert parallel.step_with_outputs(*batch())["cache"] is None
    assert "None is returned in its place" in parallel.explain()
    assert from_json(json.loads(parallel.plan.dumps())) == parallel.plan


def test_rests_of_another_plan() -> None:
    plan = compiled(net(), ranks=2, pins="dp=2 zero=3").plan
    assert resting(plan, rests_of(plan)) == plan
    whole = resting(plan, {})
    assert {p.rest for p in whole.parameters.values()} == {"I"}
    assert isinstance(whole, Plan) and replace(whole, parameters=plan.parameters) == plan
