"""verify: equal plans are called equal, wrong programs are caught and named, one launch serves many plans."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.choosing.plan_training import Planned, plan_training
from autopar.cluster import Cluster
from autopar.equality import Run
from autopar.errors import AutoparError, NothingFits
from autopar.loading import ModelSpec
from autopar.pins import Pins
from autopar.schema import write
from autopar.verify import Subject, VerifyResult, run_plan, verify, verify_many

BATCH = 8


class Net(nn.Module):
    """A tie, a frozen weight, a parameter without gradient, a counter, and a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.spare = nn.Parameter(torch.rand(3))
        self.down.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        self.calls.add_(1)
        hidden = self.embed(ids)
        logits = self.head(hidden + self.down(self.up(hidden).relu()))
        return (logits - target).square().mean()


def make(seeded: bool = True) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    if not seeded:
        torch.seed()
    ids = torch.randint(0, 6, (4, 5))
    return Net(), (ids, torch.rand(4, 5, 6)), {}


class Kinked(nn.Module):
    """A unit that stands on its kink: the last bit decides whether it passes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[1.0, 1.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.w).relu().sum()


def kinked() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    return Kinked(), (torch.tensor([[1.0, -1.0], [1.0, 0.5]]),), {}


def spec(**options: Any) -> ModelSpec:
    return ModelSpec(f"{__file__}:make", options)


def plans(*texts: str) -> list[Pins]:
    return [Pins.parse(text) for text in texts]


def test_plans_of_an_unseeded_model_equal_one_process_in_one_launch() -> None:
    texts = (
        "dp=2",
        "tp=2",
        "dp=2 zero=3",
        "dp=2 microbatches=2",
        "dp=2 zero=2 microbatches=2",
        "tp=3",
        "tp=2 microbatches=3",
    )
    results = verify_many(spec(seeded=False), 2, plans(*texts), batch=BATCH)
    for text, result in zip(texts, results, strict=True):
        if text == "tp=3":
            assert isinstance(result, AutoparError)
            assert "tp=3 does not divide 2 ranks" in str(result)
            continue
        assert isinstance(result, VerifyResult), result
        assert result.ok, (text, result.worst)
        assert result.worst[0].rel < 1e-10
        assert result.ranks == 2 and result.seconds > 0
        assert {limit.split()[1] for limit in result.limits} == {"loss", "grad", "buffer", "param"}
        assert json.loads(json.dumps(write(result)))["ok"] is True


def test_a_wrong_program_is_caught_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank returns is tampered with on its way here; every kind of error is found by name."""
    subject = Subject.of(spec(), BATCH)
    one = subject.judge
    wrong = {
        ("grad", "up.weight"): lambda r: dataclasses.replace(
            r, grads={**r.grads, "up.weight": r.grads["up.weight"] * 2}
        ),
        ("grad", "spare (not None, unlike one process)"): lambda r: dataclasses.replace(
            r, grads={**r.grads, "spare": torch.zeros(3)}
        ),
        ("buffer", "calls (integers)"): lambda r: dataclasses.replace(r, buffers={"calls": torch.tensor(2)}),
        ("param", "up.bias"): lambda r: dataclasses.replace(
            r, params={**r.params, "up.bias": r.params["up.bias"] + 1e-3}
        ),
    }
    assert one.grads["spare"] is None and one.grads["down.bias"] is None
    for (kind, name), tamper in wrong.items():
        monkeypatch.setattr("autopar.verify.RankPool", lambda *_, tamper=tamper, **__: Stub(subject, tamper))
        result = verify(spec(), 1, {}, batch=BATCH)
        assert not result.ok
        assert (result.worst[0].kind, result.worst[0].name) == (kind, name)
        json.dumps(write(result), allow_nan=False)


def test_fp32_is_held_against_what_last_bits_move_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSpec(f"{__file__}:kinked")
    subject = Subject.of(model, 2)
    flipped = {"w": subject.eager.grads["w"] + torch.tensor([[1.0, -1.0]])}
    stub = Stub(subject, lambda run: run)
    stub.runs["fp32"] = dataclasses.replace(subject.eager, grads=flipped)
    monkeypatch.setattr("autopar.verify.RankPool", lambda *_, **__: stub)
    result = verify(model, 1, {})
    assert result.ok
    (grown,) = (limit for limit in result.limits if "fp32 grad" in limit)
    assert "2 times eager's own distance from fp64" in grown
    stub.runs["fp32"] = dataclasses.replace(subject.eager, grads={"w": flipped["w"] * 10})
    assert not verify(model, 1, {}).ok


class Stub:
    """In place of the pool: one process's own runs, tampered with."""

    def __init__(self, subject: Subject, tamper: Any) -> None:
        self.runs: dict[str, Run] = {"fp64": tamper(subject.judge), "fp32": subject.eager}

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, fn: object, *_: object) -> Any:
        assert fn is run_plan
        return [(self.runs, [r.loss for r in self.runs.values()])]


def test_without_pins_the_plan_is_the_solvers_and_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for another cluster's memory; a finished plan is run as it is."""
    subject = Subject.of(spec(), BATCH)
    made = []

    def counted(*args: Any) -> Planned:
        made.append(args)
        return plan_training(*args)

    monkeypatch.setattr("autopar.verify.plan_training", counted)
    monkeypatch.setattr("autopar.verify._plans", {})
    monkeypatch.setattr("autopar.verify.RankPool", lambda *_, **__: Stub(subject, lambda run: run))
    first, again, more = verify_many(spec(), 1, plans("", "", "microbatches=2"), batch=BATCH)
    assert isinstance(first, VerifyResult) and isinstance(again, VerifyResult) and isinstance(more, VerifyResult)
    assert first.plan == again.plan and "microbatches=2" in more.plan and len(made) == 2
    chip = Cluster.local(ranks=1).chip
    small = dataclasses.replace(chip, memory=dataclasses.replace(chip.memory, value=64.0))
    cluster = dataclasses.replace(Cluster.local(ranks=1), chip=small)
    finished = plan_training(subject.captured, Pins(), Cluster.local(ranks=1), {}).plan
    refused, run = verify_many(spec(), 1, [Pins(), finished], batch=BATCH, cluster=cluster)
    assert isinstance(refused, NothingFits) and isinstance(run, VerifyResult) and run.ok
    with pytest.raises(AutoparError, match="cluster local has 1 ranks, 2 are to run"):
        verify_many(spec(), 2, [Pins()], cluster=cluster)


def test_rows_beyond_the_example_differ() -> None:
    ids, target = Subject.of(spec(), 12).inputs
    assert ids.shape == (12, 5) and len({tuple(row.tolist()) for row in target[:, 0]}) == 12
    assert torch.equal(ids[4:8], ids[:4].roll(1, -1))


def test_a_refused_model_raises() -> None:
    with pytest.raises(AutoparError, match="no such file: nowhere.py"):
        verify(ModelSpec("nowhere.py:make"), 2, "tp=2")
