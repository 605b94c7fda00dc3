"""Pins that leave the ZeRO stage and microbatches open get the fastest that fits; what fits in no way is refused with
the plan that comes closest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.cluster import Cluster
from autopar.errors import NothingFits
from autopar.models import mlp
from autopar.plan import Plan

GIB = 2**30


def planned(gib: float | None, pins: dict[str, Any]) -> Plan:
    """With so much memory a rank (None: that of this machine)."""
    cluster = Cluster.local(ranks=2)
    if gib is not None:
        chip = replace(cluster.chip, memory=replace(cluster.chip.memory, value=gib * GIB), reserved=None)
        cluster = replace(cluster, chip=chip)
    model, args, kwargs = mlp.make()
    return autopar.compile(model, cluster, args=args, kwargs=kwargs, pins=pins).plan


def peak(**pins: Any) -> float:
    found = planned(None, pins).predicted.peak_mem_gib
    assert found is not None
    return found


def test_what_is_open_gives_way_until_the_plan_fits() -> None:
    roomy, tight = peak(dp=2), peak(dp=2, zero=3)  # one unit: more microbatches would add to it
    assert tight < roomy
    plan = planned((roomy + tight) / 2, {"dp": 2})
    assert plan.fits and (plan.zero, plan.microbatches) != (0, 1) and plan.pins == {"dp": "2"}
    assert planned(roomy * 1.01, {"dp": 2}).one_line() == "dp=2 on 2 ranks"


def test_pins_are_kept_and_what_fits_instead_is_named() -> None:
    limit = (peak(dp=2, zero=0, microbatches=1) + peak(dp=2, zero=3)) / 2
    with pytest.raises(
        NothingFits, match=r"no plan fits: dp=2 .*on 2 ranks needs .* GiB of .* Nearest: zero="
    ) as error:
        planned(limit, {"dp": 2, "zero": 0, "microbatches": 1})
    plan = error.value.plan
    assert plan is not None and plan.fits is False and plan.pins == {"dp": "2", "zero": "0", "microbatches": "1"}
    nearest = plan.alternatives[0]
    assert nearest.kind == "nearest" and nearest.fits and planned(limit, dict(nearest.pins)).fits


def test_nothing_fits_in_no_memory() -> None:
    with pytest.raises(NothingFits, match=r"Use more ranks, a smaller batch, or other pins\.$") as error:
        planned(1e-6, {"dp": 2})
    assert error.value.plan is not None and error.value.plan.alternatives == ()
