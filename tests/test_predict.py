"""What is predicted is what real ranks hold, to the byte; seconds follow from the program, and move as they should."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from measured import measured
from torch import nn

from autopar.build import apply, choose, prepare
from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.loading import ModelSpec
from autopar.passes.lower import lower, with_changes
from autopar.pins import Pins, resolve
from autopar.predict import IN_PEAK, predict
from autopar.run_on_fakes import run_on_fakes
from autopar.runtime.pool import RankPool
from autopar.solver.cost import step_time


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout=240) as ranks:
        yield ranks


@cache
def captured(target, batch=24, **options):
    loaded = ModelSpec(target, options).load()
    loaded.model.train()
    return capture(loaded.model, loaded.args, loaded.kwargs, global_batch=batch, loss=loaded.loss, check=False)


def planned(model, cluster=None, ranks=2, **pins):
    """A predicted plan. ``model``: a capture."""
    cluster = cluster or Cluster.local(ranks=ranks)
    pins = {"dp": ranks, "zero": 0, "microbatches": 1} | pins
    prepared = prepare(model, pins["microbatches"])
    plan = choose(prepared, resolve(Pins.parse(pins), cluster.ranks, model.batch), cluster)
    return predict(plan, prepared, cluster)


OVERLAP = Cluster.local(ranks=2).tiers[0].overlap
assert OVERLAP is not None
WAITED = 1 / OVERLAP.value - 1
"""Seconds exposed of communication that need not be waited for, by those hidden."""
MLP, GPT2, LLAMA = (f"autopar.models.{name}:make" for name in ("mlp", "gpt2", "llama"))
DROPOUT = f"{Path(__file__).with_name('small_models.py')}:attention_dropout_causal_grouped"


@pytest.mark.parametrize(
    ("target", "pins"),
    [
        (MLP, {"dp": 2, "zero": 0, "microbatches": 3}),
        (MLP, {"dp": 2, "zero": 3, "microbatches": 1}),
        (GPT2, {"dp": 1, "tp": 2, "zero": 0, "microbatches": 1}),
        (GPT2, {"dp": 2, "zero": 2, "microbatches": 3}),
        (LLAMA, {"dp": 1, "tp": 2, "zero": 0, "microbatches": 3}),
        (LLAMA, {"dp": 2, "zero": 3, "microbatches": 3}),
        (DROPOUT, {"dp": 1, "tp": 2, "zero": 0, "microbatches": 3}),
    ],
)
def test_bytes_are_those_of_real_ranks(pool, target, pins):
    plan = planned(captured(target), **pins)
    every, parts = pool.run(measured, ModelSpec(target), 24, plan.dumps()), plan.predicted.parts
    real = every[0]
    assert parts["parameters_bytes"] == real.parameters
    assert parts["gradients_bytes"] == real.gradients
    assert parts["optimizer_bytes"] == real.optimizer
    assert parts["saved_bytes"] == pytest.approx(max(m.saved for m in every), rel=0.02)


def test_the_sums():
    found = planned(captured(LLAMA), dp=2, zero=1, microbatches=3).predicted
    parts = found.parts
    assert set(parts) == {
        *IN_PEAK, "parameters_bytes", "gradients_bytes", "optimizer_bytes", "saved_bytes", "gathered_step_bytes",
        "accumulator_bytes", "transient_bytes", "inputs_bytes", "buffers_bytes", "compute_s", "exposed_s", "hidden_s",
        "optimizer_s", "memory_limit_bytes", "model_flops", "peak_flops", "mfu", "tokens",
    }  # fmt: skip
    assert found.peak_mem_gib == sum(parts[key] for key in IN_PEAK) / 2**30
    assert found.step_time_s == step_time(
        parts["compute_s"] + parts["optimizer_s"], parts["exposed_s"], parts["hidden_s"]
    )
    assert parts["mfu"] == pytest.approx(parts["model_flops"] / parts["peak_flops"] / found.step_time_s)
    assert parts["memory_limit_bytes"] == Cluster.local(ranks=2).limit


WEIGHTS = 4 * (32 * 64 + 64 + 64 * 16 + 16)  # bytes of the MLP


@pytest.mark.parametrize(
    ("zero", "rest", "step", "adding"),
    [(0, WEIGHTS, 0, 0), (1, WEIGHTS / 2, WEIGHTS, WEIGHTS), (2, WEIGHTS / 2, WEIGHTS, 0), (3, WEIGHTS / 2, 0, 0)],
)
def test_zero_stages_of_an_mlp(zero, rest, step, adding):
    parts = planned(captured(MLP), zero=zero, microbatches=3).predicted.parts
    assert parts["parameters_bytes"] == parts["gradients_bytes"] == parts["optimizer_bytes"] / 2 == rest
    assert (parts["gathered_step_bytes"], parts["accumulator_bytes"]) == (step, adding)
    assert parts["model_flops"] == 6 * 24 * (32 * 64 + 64 * 16) - 2 * 24 * 32 * 64  # no gradient of the input


def test_inputs_are_this_ranks_rows_of_all_microbatches():
    parts = planned(captured(MLP), microbatches=3).predicted.parts
    count = 4  # bytes: of labels, made by the prologue
    assert parts["inputs_bytes"] == 12 * (32 * 4 + 8) + count
    assert planned(captured(MLP), microbatches=1).predicted.parts["inputs_bytes"] == 12 * (32 * 4 + 8)


class Odd(nn.Module):
    """A frozen layer, one that the loss has no gradient for, one that nobody uses, two names of one weight."""

    def __init__(self):
        super().__init__()
        self.frozen, self.head, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        x = self.second(self.first(self.frozen(x)).relu()) * self.scale.sum()
        return F.mse_loss(x, torch.zeros_like(x)), self.head(x.detach())


def test_odd_parameters():
    model = capture(Odd(), (torch.randn(8, 8),), check=False)
    parts = planned(model).predicted.parts
    layer = 4 * 8 * 9
    assert parts["parameters_bytes"] == 3 * layer + 4 * 64
    assert parts["gradients_bytes"] == 4 * 64, "of the tied weight alone"
    assert parts["buffers_bytes"] == 12


def test_eval_is_a_forward_alone():
    loaded = ModelSpec(LLAMA).load()
    options = {"loss": None, "loss_required": False, "check": False}
    model = capture(loaded.model.eval(), loaded.args[:1], {}, **options)
    plan = planned(model, tp=2, dp=1)
    parts, train = plan.predicted.parts, planned(captured(LLAMA, 8), tp=2, dp=1).predicted.parts
    none = ("gradients_bytes", "optimizer_bytes", "saved_bytes", "optimizer_s")
    assert {key: parts[key] for key in none} == dict.fromkeys(none, 0.0)
    assert parts["transient_bytes"] > 0
    assert 0.2 < parts["compute_s"] / train["compute_s"] < 0.5
    assert {c.phase for c in plan.predicted.collectives} <= {"forward", "parameters"}


def test_more_data_ranks_need_less_memory():
    for zero in (0, 3):  # one rank alone has no buckets
        peaks = [planned(captured(MLP), ranks=n, zero=zero).predicted.peak_mem_gib for n in (2, 4, 8)]
        assert peaks == sorted(set(peaks), reverse=True)


def test_zero_moves_more_and_holds_less():
    one, two, three = (planned(captured(GPT2), zero=z, microbatches=4).predicted for z in (1, 2, 3))
    assert one.parts["hidden_s"] < two.parts["hidden_s"] < three.parts["hidden_s"]
    one_held, two_held, three_held = (
        p.parts["gathered_step_bytes"] + p.parts["accumulator_bytes"] for p in (one, two, three)
    )
    assert one_held > two_held > three_held == 0
    assert two.peak_mem_gib > three.peak_mem_gib, "whose gradients are reduced likewise, a bucket at a time"
    waited = [p.parts["exposed_s"] - WAITED * p.parts["hidden_s"] for p in (one, three)]
    assert waited[0] == pytest.approx(waited[1])


def test_collectives_take_what_the_wires_say():
    found = planned(captured(GPT2), ranks=4, dp=2, tp=2, zero=1).predicted
    hidden = sum(c.seconds for c in found.collectives if c.hidden)
    exposed = sum(c.seconds for c in found.collectives if not c.hidden)
    assert all(c.hidden == (c.phase in ("parameters", "gradients")) for c in found.collectives)
    assert hidden * OVERLAP.value == pytest.approx(found.parts["hidden_s"], rel=0.02)  # copies aside
    assert exposed + hidden * (1 - OVERLAP.value) == pytest.approx(found.parts["exposed_s"], rel=0.02)


def test_seconds_are_of_the_cluster_not_of_the_plan():
    model, cluster = captured(LLAMA), Cluster.load("h100-dgx")
    prepared = prepare(model, 1)
    pins = {"dp": 4, "tp": 2, "zero": 0, "microbatches": 1}
    plan = choose(prepared, resolve(Pins.parse(pins), 8, 24), cluster)
    bare = replace(plan, axes=tuple(replace(a, wire={}) for a in plan.axes))
    fast = cluster.chip.memory_bandwidth
    twice = replace(cluster, chip=replace(cluster.chip, memory_bandwidth=replace(fast, value=2 * fast.value)))
    here, there = (predict(p, prepared, c).predicted for p, c in ((plan, cluster), (bare, twice)))
    assert there.parts["optimizer_s"] == pytest.approx(here.parts["optimizer_s"] / 2)
    assert there.parts["compute_s"] < here.parts["compute_s"]
    assert sum(c.seconds for c in there.collectives) == pytest.approx(sum(c.seconds for c in here.collectives))


def test_a_run_on_fakes_counts_flops_as_one_process_does():
    model = captured(MLP)
    prepared = prepare(model, 1)
    plan = choose(prepared, resolve(Pins.parse({"dp": 1}), 1, 24), Cluster.local(ranks=1))
    local = lower(with_changes(apply(plan, prepared)), 0, {})
    ran = run_on_fakes(local, local.body[0])
    assert ran.flops == planned(model, ranks=1).predicted.parts["model_flops"]
    assert ran.reached == set(model.parameters)
    assert run_on_fakes(local, local.body[0], train=False).saved == 0
