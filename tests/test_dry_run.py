"""A step on fakes against a step: the kernels, and the bytes alive."""

from __future__ import annotations

import torch

import autopar
from autopar.bench.local import Training
from autopar.build import apply
from autopar.cluster import Cluster
from autopar.dry_run import Ran, Watch, dry_run
from autopar.models import mlp
from autopar.passes.lower import lower, with_changes
from autopar.plan import Plan

LAYERS, WIDTH, ROWS = 4, 256, 128
PARAMETERS = 4 * LAYERS * WIDTH * (WIDTH + 1)  # bytes


def small() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    model, args, _ = mlp.make(inputs=WIDTH, width=WIDTH, layers=LAYERS, classes=WIDTH, batch=ROWS)
    return model, args


def ran(ranks: int, **pins: int) -> tuple[Ran, Plan]:
    model, args = small()
    parallel = autopar.compile(model, Cluster.local(ranks), args=args, pins=pins or None)
    ready = parallel._ready[True][0]
    local = lower(with_changes(apply(ready.plan, ready.prepared)), 0, {a.name: a.name for a in ready.plan.axes})
    return dry_run(local, ready.captured), ready.plan


def test_the_peak_is_that_of_a_step() -> None:
    found, plan = ran(1)
    measured = Training(small, plan).live()
    assert abs(found.peak - measured) < 0.01 * measured, (found.peak, measured)


def test_every_product_is_there() -> None:
    found, _ = ran(1)
    products = [x for x in found.launches if x.op in ("aten.mm", "aten.addmm")]
    flops = sum(2 * a[0] * a[1] * b[1] for a, b in (x.shapes[-2:] for x in products))
    assert flops == (3 * LAYERS - 1) * 2 * ROWS * WIDTH * WIDTH  # the input needs no gradient
    (update,) = [x for x in found.optimizer if x.op == "aten._fused_adamw_"]
    assert update.read >= 4 * PARAMETERS


def test_gradients_go_through_one_bucket() -> None:
    found, _ = ran(2, dp=2, zero=0)
    reduced = [x.read for x in found.launches if x.op.startswith("_c10d_functional.all_reduce")]
    assert PARAMETERS in reduced and sum(reduced) < 1.01 * PARAMETERS


def test_what_is_freed_is_not_alive() -> None:
    with Watch() as watch:
        x = torch.ones(1000)
        y = x + 1
        del x
        z = y.view(10, 100) * 2
        assert watch.now == y.nbytes + z.nbytes and watch.most == watch.now
    assert [x.op for x in watch.launches] == ["aten.ones", "aten.add", "aten.view", "aten.mul"]
    assert [x.nbytes for x in watch.launches[1:]] == [8000, 0, 8000]
