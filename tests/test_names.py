"""What axes are called, from finished graphs: made from pins, or by hand, with axes that have no name of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.build import Prepared, apply, prepare
from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.models import mlp, vit
from autopar.passes.complete_layouts import complete_layouts, treat
from autopar.passes.facts import KEY, Choice, fact, value
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.split_prologue import copy_graph
from autopar.passes.strategy import choices, strategy
from autopar.plan import Plan, loads
from autopar.write_plan import ops_of, plan_of

aten = torch.ops.aten


def prepared_of(factory: Any, **options: Any) -> Prepared:
    model, args, kwargs = factory(**options)
    return prepare(capture(model, args, kwargs, check=False), 1)


def complete(prepared: Prepared, mesh: Mesh, divided: tuple[str, ...], zero: int = 0) -> Any:
    captured = prepared.captured
    return complete_layouts(
        copy_graph(prepared.body),
        mesh,
        parameters=frozenset(captured.parameters),
        batch_inputs=frozenset(i.name for i in captured.inputs if i.batch),
        batch=captured.batch,
        zero=zero,
        divided=divided,
    )[0]


def planned(prepared: Prepared, gm: Any, mesh: Mesh, **options: Any) -> Plan:
    return plan_of(gm, prepared.captured, mesh, Cluster.local(ranks=mesh.ranks), **options)


def axes(*sizes: int) -> Mesh:
    return Mesh(tuple(Axis("abc"[i], n) for i, n in enumerate(sizes)))


@pytest.mark.parametrize(
    ("divided", "zero", "names", "mesh"),
    [
        ((), 0, ["dp", "dp2"], {"dp_replicate": 4}),
        ((), 1, ["dp", "dp2"], {"dp_shard": 4}),
        (("b",), 0, ["dp", "tp"], {"dp_replicate": 2, "tp": 2}),
        (("a",), 3, ["tp", "dp"], {"tp": 2, "dp_shard": 2}),
        (("a", "b"), 0, ["tp", "tp2"], {"tp": 4}),
    ],
)
def test_axes_are_named_by_what_they_do(divided: tuple[str, ...], zero: int, names: list[str], mesh: Any) -> None:
    prepared, where = prepared_of(mlp.make), axes(2, 2)
    plan = planned(prepared, complete(prepared, where, divided, zero), where, rename=True)
    assert [a.name for a in plan.axes] == names and plan.mesh == mesh and plan.zero == zero
    assert loads(plan.dumps()) == plan
    apply(plan, prepared)


def test_the_sequence_of_an_attention_is_context_parallelism() -> None:
    """Attention cut along its queries, all else along the batch."""
    prepared, mesh = prepared_of(vit.make), Mesh((Axis("a", 1),))
    gm = complete(prepared, mesh, ())
    for node in ops_of(gm):
        if node.target is aten.scaled_dot_product_attention.default:
            wanted = [c for c in choices(node, mesh, 0) if c.kind == "factor"]
            found = [strategy(node, mesh, [c], (0,)) for c in wanted]
            along = next(s for s in found if s is not None and s.operands[0].dim_of(0) == 2)
            node.meta[KEY] = replace(fact(node), strategy=along)
    (words,) = (a.display for a in planned(prepared, gm, mesh).axes)
    assert set(words) == {"dp_replicate", "cp"}


def test_an_axis_used_in_two_ways_has_both_names() -> None:
    """A batch that is cut, and one wide linear whose weight is, with the most FLOPs."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 64), nn.Linear(64, 1))
    captured = capture(model, (torch.randn(4, 8),), {}, check=False, loss=lambda y: y.sum())
    prepared, mesh = prepare(captured, 1), axes(2)
    gm = complete(prepared, mesh, ())
    wide = next(n for n in ops_of(gm) if value(n).shape == (4, 64))
    rows = next(c for c in choices(wide, mesh, 0) if _cuts(wide, mesh, c, operand=1))
    wide.meta[KEY] = replace(fact(wide), strategy=strategy(wide, mesh, [rows], (0,)))
    plan = planned(prepared, gm, mesh, rename=True)
    assert plan.axes[0].display == ("tp", "dp_replicate") and plan.axes[0].name == "tp"


def test_an_axis_that_divides_no_op_is_idle() -> None:
    prepared, mesh = prepared_of(mlp.make), axes(2)
    gm = complete(prepared, mesh, ())
    for node in ops_of(gm):
        node.meta[KEY] = replace(fact(node), strategy=strategy(node, mesh, [Choice("I")], (0,)))
    plan = planned(prepared, gm, mesh, rename=True)
    assert plan.mesh == {"idle": 2} and plan.axes[0].name == "idle"


def _cuts(node: Any, mesh: Mesh, choice: Any, operand: int) -> bool:
    found = strategy(node, mesh, [choice], (0,))
    return choice.kind == "factor" and found is not None and found.operands[operand].dim_of(0) == 0


def test_equal_units_share_a_class_only_if_they_are_treated_alike() -> None:
    prepared, mesh = prepared_of(mlp.make, layers=4), axes(2)
    gm = complete(prepared, mesh, ("a",))
    places = [i for i, n in enumerate(ops_of(gm)) if n.target is aten.linear.default]
    last = len(ops_of(gm))
    units = [("first", 0, places[1]), *((f"u{i}", places[i], places[i + 1]) for i in range(1, len(places) - 1))]
    units.append(("last", places[-1], last))
    plan = planned(prepared, gm, mesh, units=units)
    assert [u.fqn for u in plan.units] == [u[0] for u in units] and len(plan.classes) < len(plan.units)
    assert plan.classes[plan.units[0].kind].fqn == "first"
    assert sum(len(plan.classes[u.kind].ops) for u in plan.units) == last
    assert loads(plan.dumps()) == plan
    assert len(apply(plan, prepared).body.graph.nodes) == len(prepared.body.graph.nodes)


def test_a_parameter_that_rests_in_pieces_shards_its_axis() -> None:
    prepared, mesh = prepared_of(mlp.make), axes(2, 2)
    gm = complete(prepared, mesh, ())
    leaf = next(n for n in gm.graph.nodes if n.op == "get_attr" and len(value(n).shape) == 2)
    treat(leaf, Layout.parse("I S0", 2), Layout.parse("R R", 2), "step", "step", mesh)
    plan = planned(prepared, gm, mesh)
    assert [a.display for a in plan.axes] == [("dp_replicate",), ("dp_shard",)]
    assert plan.mesh == {"dp_replicate": 2, "dp_shard": 2} and plan.zero == 1
