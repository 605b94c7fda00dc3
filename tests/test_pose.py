"""What a problem prices is what the program does, by independent sums; and its bounds hold."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache
from math import inf

import numpy as np
import pytest
from torch import fx

from autopar.build import Prepared, apply, plan_mesh, prepare
from autopar.capture import capture
from autopar.choosing.bounds import floor_of
from autopar.choosing.in_stages import waiting
from autopar.choosing.inside import seconds_inside
from autopar.choosing.pose import Posed
from autopar.choosing.poser import Body, Poser
from autopar.choosing.readback import completed, plan_from
from autopar.choosing.tables import UNHIDDEN
from autopar.choosing.wiring import weights_of
from autopar.cluster import Cluster
from autopar.passes.changes import price
from autopar.passes.facts import value
from autopar.passes.follow_time import TimeChoices
from autopar.passes.insert_changes import change, insert_changes
from autopar.passes.lower import lower, with_changes
from autopar.plan import Plan
from autopar.predict import predict
from autopar.predict_seconds import entry_moved
from autopar.solver.evaluate import Evaluation
from autopar.solver.lagrangian import least_memory
from autopar.solver.problem import COMPUTE, EXPOSED, HIDDEN, SAVED, STATIC, Assignment, peak, totals
from autopar.solver.solve import solve

ONE, TWO = ((4, 1),), ((2, 2), (2, 1))
STATIC_BYTES = ("parameters", "gradients", "optimizer", "gathered_step", "accumulator")


@cache
def captured(name: str) -> Prepared:
    model, args, kwargs = importlib.import_module(f"autopar.models.{name}").make()
    return prepare(capture(model, args, kwargs, check=False), 1)


@cache
def poser(name: str, zero: int | None = None, recompute: str | None = "none") -> Poser:
    return Poser(captured(name), Cluster.local(ranks=4), zero, recompute=recompute)


@cache
def posed(
    name: str, axes: tuple[tuple[int, int], ...], microbatches: int, recompute: str | None = "none"
) -> tuple[Posed, Evaluation]:
    found = poser(name, None, recompute).pose(axes, microbatches)
    return found, Evaluation(found.problem)


def cheapest(evaluation: Evaluation, alpha: float, per_byte: float) -> Assignment:
    weights = np.zeros(7)
    weights[[COMPUTE, EXPOSED, HIDDEN]] = alpha, 1.0, 1.0 - alpha
    weights[[STATIC, SAVED]] = per_byte
    return evaluation.least(weights).assignment


def times_of(asked: Poser, microbatches: int) -> TimeChoices:
    found = asked.times(microbatches)
    assert isinstance(found, TimeChoices)
    return found


def emitted(body: Body, found: Posed, assignment: Assignment, times: TimeChoices) -> float:
    """Seconds of the changes of core tensors in the finished graph, and of what is inside its ops."""
    gm = completed(body, found, assignment, times)
    core = {n.name for n in body.core}
    weights = {n.name for n in weights_of(gm, frozenset(body.prepared.captured.parameters))}
    inner = seconds_inside(gm, found.mesh)
    gm = insert_changes(gm, found.mesh)
    moved = 0.0
    for node in gm.graph.nodes:
        if node.target is change:
            root: fx.Node = node
            while root.target is change:
                root = root.args[0]  # type: ignore[assignment]
            maker = root.args[0] if root.target.__class__.__name__ == "builtin_function_or_method" else root
            assert isinstance(maker, fx.Node)
            if maker.name in core and root.name not in weights:
                moved += price(node.meta["change"], value(node), found.mesh)
    count = 1 if found.mesh.time is None else found.mesh.axes[found.mesh.time].size
    return count * (inner + moved)


def latency(plan: Plan, body: Body) -> float:
    """Seconds that the buckets of parameters take besides their bytes, of which parameters are priced with a part."""
    mesh = plan_mesh(plan)
    local = lower(with_changes(apply(plan, body.prepared)), 0, {a.name: a.name for a in mesh.axes})
    return entry_moved(local, mesh, plan.microbatches, train=True)[0].hidden


CASES = [
    ("mlp", TWO, 2, 0.5, 1e-7, "none"),
    ("gpt2", ONE, 1, 1.0, 0.0, "none"),
    ("gpt2", TWO, 2, 0.5, 1e-7, "none"),
    ("llama", TWO, 2, 1.0, 1e-8, "none"),
    ("vit", TWO, 1, 0.5, 1e-8, "none"),
    ("resnet", ONE, 1, 1.0, 1e-8, "none"),
    ("gpt2", ONE, 1, 1.0, 1e-8, "full"),
    ("llama", TWO, 2, 0.5, 1e-9, "selective"),
    ("resnet", ONE, 1, 1.0, 1e-8, "full"),
]


@pytest.mark.parametrize(("name", "axes", "microbatches", "alpha", "per_byte", "recompute"), CASES)
def test_a_problem_prices_what_the_program_does(
    name: str, axes: tuple[tuple[int, int], ...], microbatches: int, alpha: float, per_byte: float, recompute: str
) -> None:
    found, evaluation = posed(name, axes, microbatches, recompute)
    assignment = cheapest(evaluation, alpha, per_byte)
    total = totals(found.problem, assignment)
    asked = poser(name, None, recompute)
    body, times = asked.body(microbatches), times_of(asked, microbatches)
    plan = plan_from(body, found, assignment, times, asked.cluster)
    assert plan.recompute in (recompute, "mixed")
    parts = predict(plan, body.prepared, asked.cluster).predicted.parts
    assert total[COMPUTE] == pytest.approx(parts["compute_s"] + parts["optimizer_s"], rel=2e-3)
    assert parts["hidden_s"] - latency(plan, body) <= total[HIDDEN] * (1 + 1e-9)
    assert total[HIDDEN] <= parts["hidden_s"] * (1 + 1e-9)
    held = sum(parts[f"{kind}_bytes"] for kind in STATIC_BYTES)
    assert held <= total[STATIC] <= held + parts["inputs_bytes"]
    assert total[SAVED] == pytest.approx(parts["saved_bytes"], rel=0.04)
    (tier,) = asked.cluster.tiers
    assert tier.overlap is not None and tier.overlap.value < 1
    waited = total[HIDDEN] * (1 - tier.overlap.value) / tier.overlap.value  # of what need not be waited for
    exposed = total[EXPOSED] - UNHIDDEN * total[HIDDEN] - waited
    moved = emitted(body, found, assignment, times) + parts.get("again_exposed_s", 0.0)
    assert exposed == pytest.approx(moved, abs=1e-9)
    assert exposed <= parts["exposed_s"] + 1e-9  # the side comes on top


@pytest.mark.parametrize("name", ["mlp", "llama", "resnet"])
def test_quick_bounds_hold(name: str) -> None:
    for recompute in ("none", None):
        asked = poser(name, None, recompute)
        found, evaluation = posed(name, TWO, 1, recompute)
        floor = floor_of(asked.body(1), asked.cluster, asked.policies)
        for alpha in (0.0, 0.5, 1.0):
            total = totals(found.problem, cheapest(evaluation, alpha, 0.0))
            assert floor.quick(4, 1, inf).seconds <= total[COMPUTE]
        bound, least = least_memory(evaluation)
        assert floor.quick(4, 1, inf).bytes <= (bound if recompute else float(peak(least.total)))
        shares = (0.2, 0.6) if name != "llama" else (0.2,) if recompute else (0.6,)  # the others are quick
        for share in shares:
            limit = float(peak(least.total)) + share * floor.saved
            answer = solve(replace(found.problem, memory_limit=limit), target_gap=0.01)
            assert floor.quick(4, 1, limit).seconds <= answer.objective


def test_statistics_of_the_batch_need_one_microbatch() -> None:
    why = poser("resnet").times(2)
    assert isinstance(why, str) and "Set microbatches=1" in why


def test_more_microbatches_than_rows() -> None:
    assert "more than the batch" in str(poser("mlp").times(10**6))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_pinned_stage_is_the_only_one(zero: int) -> None:
    problem = poser("mlp", zero).pose(ONE, 1).problem
    states = [s for c in problem.classes for v in c.variables if v.kind == "parameter" for s in v.states]
    sharded = [s for s in states if s.startswith("S") and "gather never" not in s]
    if zero == 0:
        assert not sharded
        return
    gather, reduce = {1: ("step", "step"), 2: ("step", "microbatch"), 3: ("use", "microbatch")}[zero]
    assert sharded and all(f"gather {gather}, reduce {reduce}" in s for s in sharded)
    assert not any(s.startswith("I -> R") for s in states)  # it can be in pieces, so it is


def test_equal_layers_are_posed_once() -> None:
    problem = poser("llama").pose(TWO, 1).problem
    assert len(problem.classes) == 4 and len(problem.units) == 6
    for unit in problem.units:
        for factor in problem.classes[unit.kind].factors:
            own = len(problem.classes[unit.kind].variables)
            for side, index in zip(factor.over, factor.reads, strict=True):
                variable = (
                    problem.classes[unit.kind].variables[side]
                    if side < own
                    else problem.shared[unit.borders[side - own]]
                )
                assert len(index) == len(variable.states)
    assert problem.counts["generated"] > 1000


@pytest.mark.parametrize("zero", [1, 3])
def test_the_first_unit_of_a_stage_waits_for_what_is_gathered_at_every_use(zero: int) -> None:
    """Of all units that is the share of stages; nothing waits where parameters are gathered once a step."""
    found = poser("llama", zero).pose(ONE, 2)
    units = len(found.problem.units)
    assignment = cheapest(Evaluation(found.problem), 1.0, 0.0)
    before = totals(found.problem, assignment)
    half, all_ = (totals(waiting(found, n).problem, assignment) - before for n in (units // 2, units))
    assert np.delete(all_, EXPOSED) == pytest.approx(0)
    assert half[EXPOSED] == pytest.approx(all_[EXPOSED] * (units // 2) / units)
    if zero == 1:
        assert all_[EXPOSED] == 0
    else:
        assert 0.4 * before[HIDDEN] < all_[EXPOSED] < before[HIDDEN]  # gathers in both passes, one reduction
