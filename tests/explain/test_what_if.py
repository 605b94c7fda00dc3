"""What one more of something is worth, and what less memory costs: bounds from a plan, and plans solved again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar import what_if
from autopar.capture import capture
from autopar.choosing.plan_training import plan_training
from autopar.cluster import Cluster
from autopar.explain.pareto import pareto
from autopar.explain.shadow_prices import at_twice, per_byte, shadow_prices
from autopar.explain.why_not import Other
from autopar.models import mlp
from autopar.pins import Pins
from autopar.plan import ClusterId, Collective, ModelId, Plan, PlanAxis, Predicted, Proof
from autopar.solver.effort import Effort

PARTS = {"compute_s": 2.0, "optimizer_s": 0.5, "exposed_s": 1.0, "hidden_s": 3.0, "memory_limit_bytes": 2.0**31}
PLAN = Plan(
    ModelId("x"),
    ClusterId("h100-dgx", 1, 64),
    axes=(PlanAxis("a", 8, "network", 8), PlanAxis("b", 8, "nvlink", 1)),
    mesh={"dp_shard": 8, "tp": 8},
    predicted=Predicted(
        4.0,
        1.0,
        PARTS,
        (
            Collective("all_gather", "a", 4, 1, "parameters", 3.0, hidden=True),
            Collective("all_reduce", "b", 4, 1, "forward", 1.0, hidden=False),
        ),
    ),
    proof=Proof(
        4.0,
        4.0,
        0.0,
        {"pruned": [{"mesh": [[8, 8], [8, 1]], "microbatches": 1, "by": "solved", "bound": 4.0,
                     "multipliers": [[1.0, 2e-10, 0.0, 1.0, 1.0], [1.0, 1e-10, 1.0, None, 1.0]]}]},
    ),
)  # fmt: skip


def test_a_plan_alone_bounds_what_more_would_save() -> None:
    assert per_byte(PLAN) == 2e-10
    assert at_twice(PLAN, "nvlink") == 3.5, "half of what is exposed there"
    assert at_twice(PLAN, "network") == 3.5, "hidden, half a second longer than what it hides beside"
    rows = {row[0]: row[1] for row in shadow_prices(PLAN).rows}
    assert rows == {
        "one more GiB a rank": "at most 215 ms",
        "one more node": "at most 2.00 s",
        "network at twice the bandwidth": "500 ms",
        "nvlink at twice the bandwidth": "500 ms",
    }
    assert per_byte(replace(PLAN, microbatches=2)) is None, "of another candidate"


def test_what_is_solved_stands_beside_the_plan() -> None:
    faster = replace(PLAN, predicted=replace(PLAN.predicted, step_time_s=3.0))
    others = [Other("more", faster), Other("none", None, "no plan fits.", fits=False)]
    assert [row[:2] for row in shadow_prices(PLAN, others).rows] == [("more", "1.00 s"), ("none", "")]
    assert [row[1:3] for row in pareto(PLAN, others).rows] == [("4.00 s", "+0.0 %"), ("3.00 s", "-25.0 %"), ("", "")]
    assert not pareto(PLAN, ()).rows


def seconds(other: Other) -> float:
    assert other.plan is not None
    return other.plan.predicted.step_time_s or 0.0


def test_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faster links never make the best plan slower, less memory never faster."""
    model, args, kwargs = mlp.make()
    captured = capture(model.train(), args, kwargs, check=False)
    asked = what_if.Conditions(captured, Pins.parse("tp=2 zero=0"), Cluster.local(ranks=2), Effort())
    plan = plan_training(captured, asked.pins, asked.cluster, {}).plan
    step = plan.predicted.step_time_s or 0.0
    found = {o.pins: o for o in what_if.shadow_prices(asked)}
    (tier,) = [name for name in found if "twice the bandwidth" in name]
    assert seconds(found[tier]) < step
    monkeypatch.setattr(what_if, "SHARES", (0.9, 1e-9, 1e-9))
    *fitting, last = what_if.pareto(asked, plan)
    assert last.answer == "too large" and all(seconds(o) >= step for o in fitting)
    assert len(fitting) < 2, "ends where nothing fits"
