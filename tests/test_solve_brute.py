"""Every plan of a tiny model, one by one, against the solver: nothing that the rules allow is faster than its plan.

Nothing of `autopar.choosing.pose` is used to make or price the plans: strategies come from the rules, a graph from each
combination of them, seconds and bytes from `predict`. What parameters cost is added up per parameter, since it does not
depend on what else a plan does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import inf

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.build import Prepared, prepare
from autopar.capture import Capture, capture
from autopar.choosing import op_states, pose
from autopar.choosing.solve import Solved, solved
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.passes.complete_layouts import needs_change, resting, treat
from autopar.passes.completion import is_op
from autopar.passes.facts import KEY, Strategy, fact, operand_nodes, value
from autopar.passes.follow_time import TimeChoices
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.sides import sides
from autopar.passes.split_prologue import copy_graph
from autopar.passes.strategy import choices, strategy
from autopar.pins import Pins
from autopar.plan import Plan
from autopar.predict import predict
from autopar.solver.effort import Effort
from autopar.solver.problem import peak, totals
from autopar.wires import wire_of
from autopar.write_plan import plan_of

RANKS = 2
CLOSE = 1e-9
SAME = 0.05  # of bytes
TIES = 2e-4  # a thousandth of hidden seconds is priced as exposed
KINDS = (
    *("parameters", "gradients", "optimizer", "gathered_step", "accumulator"),
    *("saved", "transient", "inputs", "buffers"),
)
GATHERED = {"never": ("step",), "step": ("step", "microbatch"), "use": ("microbatch",)}


class Two(nn.Module):
    """Two linears; the loss is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(i, o, bias=False, device="meta") for i, o in ((2048, 4096), (4096, 1024)))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).sum()


@dataclass(frozen=True)
class One:
    """A plan: seconds by stream, bytes of the peak; what each op does, and when each parameter is gathered."""

    compute: float
    exposed: float
    hidden: float
    peak: float
    choices: tuple[str, ...] = ()
    gathers: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.exposed + max(self.compute, self.hidden)


@cache
def model() -> tuple[Capture, Prepared, Cluster, Mesh]:
    captured = capture(Two(), (torch.zeros(4096, 2048, device="meta"),), {}, check=False)
    cluster = Cluster.load("h100-dgx")
    cluster = replace(cluster, ranks_per_node=RANKS)
    return captured, prepare(captured, 1), cluster, Mesh((Axis("a", RANKS, wire=wire_of(cluster, RANKS, 1)),))


def menus() -> list[list[Strategy]]:
    """The legal strategies of every op, by the rules alone."""
    _, prepared, _, mesh = model()
    plain, found = mesh.without_wires(), []
    for op in filter(is_op, prepared.body.graph.nodes):
        each = (strategy(op, plain, [c], (0,)) for c in choices(op, plain, 0, ()))
        found.append([s for s in each if s is not None])
    return found


def uses(want: Layout) -> list[Layout]:
    """How a parameter may be used that its reader wants so: a partial sum is made of a whole one."""
    return [want] if want.kinds != "P" else [want.with_kind(0, "I"), want.with_kind(0, "R")]


def treatments(parameter: fx.Node, use: Layout) -> Iterator[tuple[Layout, Layout, str, str]]:
    """Rest, use, gather, reduce."""
    mesh = model()[3]
    for rest in dict.fromkeys(resting(value(parameter), use, mesh, over) for over in ((), (0,))):
        ways = ["step", "use"] if needs_change(rest, use) and "S" in rest.kinds else ["never"]
        yield from ((rest, use, gather, reduce) for gather in ways for reduce in GATHERED[gather])


def price(chosen: tuple[Strategy, ...], treated: tuple[tuple[Layout, Layout, str, str], ...]) -> Plan:
    """The plan of a graph with these strategies, predicted."""
    captured, prepared, cluster, mesh = model()
    gm = copy_graph(prepared.body)
    for node, plan in zip(filter(is_op, gm.graph.nodes), chosen, strict=True):
        node.meta[KEY] = replace(fact(node), strategy=plan)
    for node, how in zip(parameters(gm), treated, strict=True):
        treat(node, *how, mesh)
    done = sides(gm, mesh, TimeChoices({}, {}), {"x"}, prepared.hoisted)
    return predict(plan_of(done, captured, mesh, cluster), prepared, cluster)


def parameters(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "get_attr"]


def one(plan: Plan) -> One:
    parts = plan.predicted.parts
    return One(parts["compute_s"] + parts["optimizer_s"], parts["exposed_s"], parts["hidden_s"], summed(plan))


def summed(plan: Plan) -> float:
    """Bytes as a problem counts them: the most of each kind. The fullest moment of the program may have fewer."""
    return sum(plan.predicted.parts[f"{kind}_bytes"] for kind in KINDS)


def wants(graph: fx.GraphModule, chosen: tuple[Strategy, ...]) -> list[Layout]:
    """The layout in which each parameter's reader wants it."""
    found = {
        o: w for op, s in zip(filter(is_op, graph.graph.nodes), chosen) for o, w in zip(operand_nodes(op), s.operands)
    }
    return [found[p] for p in parameters(graph)]


@cache
def every() -> tuple[One, ...]:
    """All plans of one microbatch on the one axis. Ops are predicted with parameters that rest as they are used; what
    another treatment changes is predicted once for each parameter and layout."""
    graph = model()[1].body
    nodes = parameters(graph)
    more: dict[tuple[int, Layout, Layout], list[One]] = {}
    found = []
    for chosen in itertools.product(*menus()):
        wanted, what = wants(graph, chosen), tuple(f"{s.choices[0].kind}:{s.choices[0].name}" for s in chosen)
        for used in itertools.product(*(uses(w) for w in wanted)):
            plain = tuple(next(treatments(n, u)) for n, u in zip(nodes, used))
            base = one(price(chosen, plain))
            for i, (node, use) in enumerate(zip(nodes, used)):
                if (i, wanted[i], use) not in more:
                    others = [(*plain[:i], how, *plain[i + 1 :]) for how in treatments(node, use)]
                    more[i, wanted[i], use] = [
                        replace(less(one(price(chosen, how)), base), gathers=(how[i][2],)) for how in others
                    ]
            for added in itertools.product(*(more[i, wanted[i], u] for i, u in enumerate(used))):
                total = One(*(sum(x) for x in zip(astuple(base), *map(astuple, added))))
                found.append(replace(total, choices=what, gathers=tuple(a.gathers[0] for a in added)))
    return tuple(found)


def astuple(o: One) -> tuple[float, ...]:
    return o.compute, o.exposed, o.hidden, o.peak


def less(a: One, b: One) -> One:
    return One(*(x - y for x, y in zip(astuple(a), astuple(b))))


def fastest(limit: float = inf, *, gathers: bool = True) -> float:
    """Seconds of the fastest plan within so many bytes; without ``gathers`` of those that never gather a weight."""
    found = (o for o in every() if o.peak <= limit and (gathers or {*o.gathers} == {"never"}))
    return min((o.seconds for o in found), default=inf)


def one_microbatch(limit: float | None = None) -> Solved:
    """The solver's plan within so many bytes."""
    captured, prepared, cluster, _ = model()
    if limit is not None:
        memory = replace(cluster.chip.memory, value=limit)
        cluster = replace(cluster, chip=replace(cluster.chip, memory=memory, reserved=None))
    pins = Pins.parse({"microbatches": "1"})
    return solved(captured, cluster, pins, prepared=prepared, effort=Effort(1e-9), nearest=False)


def test_nothing_that_the_rules_allow_is_faster_than_the_solvers_plan() -> None:
    made = one_microbatch()
    assert made.plan.predicted.step_time_s == pytest.approx(fastest(), rel=CLOSE)
    assert made.plan.proof.objective == pytest.approx(fastest(), rel=TIES)
    assert made.plan.proof.bound is not None and made.plan.proof.bound <= fastest() * (1 + TIES)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_under_tight_memory_too(share: float) -> None:
    """The solver may be faster: weights gathered at their use are counted here as if all were there at once."""
    least = min(o.peak for o in every())
    limit = least + share * (summed(one_microbatch().plan) - least)
    made = one_microbatch(float(int(limit)))
    best = fastest(float(int(limit)))
    predicted = made.plan.predicted
    assert predicted.peak_mem_gib * 2**30 <= limit
    assert made.plan.proof.bound <= best * (1 + TIES)
    assert made.plan.proof.scope["memory"]["bound_for"] >= float(int(limit))
    assert predicted.step_time_s <= best * (1 + TIES)


def slower(made: Solved, limit: float = inf) -> bool:
    return made.plan.predicted.step_time_s > fastest(limit) * (1 + TIES)


@pytest.mark.parametrize("at", [0, 1])
def test_strategies_that_are_missing_are_seen(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """All those that a linear has in a plan as fast as the best."""
    gone = {o.choices[at] for o in every() if o.seconds <= fastest() * (1 + 2 * TIES)}
    name = [op.name for op in filter(is_op, model()[1].body.graph.nodes)][at]
    rules = op_states.Menu.strategies

    def fewer(self, op, *args):  # type: ignore[no-untyped-def]
        offered = rules(self, op, *args)
        return [s for s in offered if op.name != name or f"{s.choices[0].kind}:{s.choices[0].name}" not in gone]

    monkeypatch.setattr(op_states.Menu, "strategies", fewer)
    assert slower(one_microbatch())


def test_treatments_of_parameters_that_are_missing_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any gather, at the least memory where that is slower."""
    limits = sorted({o.peak for o in every()})
    limit = next(x for x in limits if fastest(x) * (1 + 2 * TIES) < fastest(x, gathers=False))
    assert not slower(one_microbatch(limit), limit)
    states = pose.parameter_states
    monkeypatch.setattr(pose, "parameter_states", lambda *args: [s for s in states(*args) if s.gather == "never"])
    try:
        assert slower(one_microbatch(limit), limit)
    except AutoparError as error:
        assert "no plan fits" in str(error)


def test_bytes_that_are_not_priced_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the optimizer's states the problem says that more fits than does."""
    monkeypatch.setattr(pose, "state_bytes", lambda *args: 0.0)
    made = one_microbatch()
    problem = made.search.best
    assert problem is not None and problem.problem is not None and problem.assignment is not None
    said = float(peak(totals(problem.problem, problem.assignment)))
    assert said < (1 - 2 * SAME) * summed(made.plan)


def test_bytes_of_a_problem_are_those_of_its_program() -> None:
    made = one_microbatch()
    best = made.search.best
    assert best is not None and best.problem is not None and best.assignment is not None
    said = float(peak(totals(best.problem, best.assignment)))
    assert said == pytest.approx(summed(made.plan), rel=SAME)
