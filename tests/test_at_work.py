"""Ranks share out the work, also where a model is so small that repeating it on every rank would be faster."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.choosing.solve import Solved, solved
from autopar.cluster import Cluster
from autopar.divided import divided
from autopar.explain import explain
from autopar.models import mlp


@pytest.fixture(scope="module")
def found() -> Solved:
    model, args, kwargs = mlp.make()
    return solved(capture(model, args, kwargs, check=False), Cluster.local(ranks=4))


def test_every_axis_takes_its_share_of_the_flops(found: Solved) -> None:
    shares = divided(found.plan, found.prepared)
    assert shares and all(s.flops == pytest.approx(0.75) for s in shares.values())


def test_work_without_flops_is_shared_out_too() -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.Tanh())
    captured = capture(model, (torch.randn(8, 5, 6),), {}, check=False, loss=lambda out: out.square().sum())
    plan = solved(captured, Cluster.local(ranks=2)).plan
    assert plan.mesh == {"dp_replicate": 2} or plan.mesh == {"dp_shard": 2}


def test_the_bound_is_of_all_plans_and_says_so(found: Solved) -> None:
    proof = found.plan.proof
    assert proof.bound is not None and proof.objective is not None and proof.bound < 0.5 * proof.objective
    assert "repeated" in proof.scope
    assert "ranks that all do the same" in explain(found.plan).text()
