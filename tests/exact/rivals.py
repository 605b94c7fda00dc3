"""Plans that a solver's plan must not be slower than: drawn at random, near to it, and pinned."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from torch import fx

from autopar.build import Prepared, choose, plan_mesh
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.passes.complete_layouts import needs_change, resting, treat
from autopar.passes.facts import value
from autopar.passes.insert_changes import produced_layout
from autopar.passes.layout import Axis, Mesh
from autopar.passes.random_layouts import random_layouts
from autopar.passes.split_prologue import copy_graph
from autopar.passes.strategy import choices
from autopar.pins import Pins, microbatch_rows, resolve
from autopar.plan import Op, Plan, choice_to_text
from autopar.predict import predict
from autopar.verify import Subject
from autopar.wires import with_wires
from autopar.write_plan import ops_of, plan_of, strides_of

COUNTS = (1, 1, 2, 3, 4)  # microbatches of plans drawn at random
CHANGED = (1, 1, 1, 2, 3)  # ops of a plan that one near to it does otherwise


@dataclass(frozen=True)
class Rival:
    """What a plan is predicted to take: seconds, and bytes of a rank. ``outside``: why the search does not cover it;
    empty where it does."""

    words: str
    seconds: float
    nbytes: float
    outside: str = ""


def of(words: str, plan: Plan, prepared: Prepared, cluster: Cluster, outside: str = "") -> Rival:
    """A plan with its predictions."""
    found = predict(plan, prepared, cluster).predicted
    return Rival(words, found.step_time_s or inf, (found.peak_mem_gib or inf) * 2**30, outside)


def meshes(ranks: int) -> list[tuple[int, ...]]:
    """One axis over all ranks, and two.

    >>> meshes(8)
    [(8,), (2, 4), (4, 2)]
    """
    return [(ranks,), *((n, ranks // n) for n in range(2, ranks) if ranks % n == 0)]


def drawn(subject: Subject, cluster: Cluster, seed: int, *, one_microbatch: bool) -> Rival:
    """Any layout for every op. Parameters rest anywhere or, every other time, as the search would have them."""
    rng, captured = random.Random(seed), subject.captured
    count = 1 if one_microbatch else rng.choice(COUNTS)
    mesh = _mesh(rng.choice(meshes(cluster.ranks)), count, captured.batch, cluster)
    prepared = subject.prepared(count, "fp32")
    gm = copy_graph(prepared.body)
    batched = frozenset(i.name for i in captured.inputs if i.batch)
    random_layouts(gm, mesh, frozenset(captured.parameters), batched, seed, hoisted=frozenset(prepared.hoisted))
    outside = "parameters rest anywhere"
    if seed % 2:
        outside = ""
        for node in gm.graph.nodes:
            if node.op == "get_attr" and node.target in captured.parameters:
                _treat(node, mesh, rng)
    plan = plan_of(gm, captured, mesh, cluster)
    if any(op.order != _order(mesh) for kind in plan.classes for op in kind.ops):
        outside = "axes nest in another order"
    return of(f"random {seed}: {plan.one_line()}", plan, prepared, cluster, outside)


def near(subject: Subject, plan: Plan, cluster: Cluster, seed: int) -> Rival | None:
    """The plan with an op or some of them done otherwise; None where that is not legal."""
    rng, prepared = random.Random(seed), subject.prepared(plan.microbatches, "fp32")
    mesh, nodes = plan_mesh(plan), _first_nodes(plan, prepared)
    classes = {kind: list(c.ops) for kind, c in enumerate(plan.classes)}
    places = [(kind, k) for kind, ops in classes.items() for k in range(len(ops))]
    said = []
    for kind, k in rng.sample(places, min(len(places), rng.choice(CHANGED))):
        made = _otherwise(classes[kind][k], nodes[kind][k], mesh, rng)
        said.append(f"{nodes[kind][k].name}: {classes[kind][k].choices} -> {made.choices}")
        classes[kind][k] = made
    changed = tuple(replace(c, ops=tuple(classes[kind])) for kind, c in enumerate(plan.classes))
    try:
        return of(f"near {seed}: {'; '.join(said)}", replace(plan, classes=changed), prepared, cluster)
    except AutoparError:
        return None


def pinned(subject: Subject, pins: Sequence[dict[str, int]], cluster: Cluster) -> Iterator[Rival]:
    """Plans that the pattern of the pins completes."""
    for given in pins:
        try:
            resolved = resolve(Pins.parse(given), cluster.ranks, subject.captured.batch)
            prepared = subject.prepared(resolved.microbatches, "fp32")
            yield of(resolved.one_line(), choose(prepared, resolved, cluster), prepared, cluster)
        except AutoparError:
            continue


def _mesh(sizes: Sequence[int], count: int, batch: int, cluster: Cluster) -> Mesh:
    axes = [Axis(name, size) for name, size in zip("ab", sizes, strict=False)]
    if count > 1:
        axes.append(Axis("time", count, microbatch_rows(batch, 1, count)))
    mesh = Mesh(tuple(axes))
    return with_wires(mesh, strides_of(mesh), cluster)


def _order(mesh: Mesh) -> tuple[int, ...]:
    """How axes nest in every plan of the search."""
    return (*(() if mesh.time is None else (mesh.time,)), *mesh.space)


def _treat(node: fx.Node, mesh: Mesh, rng: random.Random) -> None:
    """Let a parameter rest, be gathered and reduced in one of the ways that the search has for its use."""
    use = produced_layout(node)
    rest = resting(value(node), use, mesh, [a for a in mesh.space if rng.random() < 0.5])
    gather = rng.choice(("step", "use")) if needs_change(rest, use) else "never"
    treat(node, rest, use, gather, rng.choice(("step", "microbatch")) if gather == "step" else "microbatch", mesh)


def _first_nodes(plan: Plan, prepared: Prepared) -> dict[int, list[fx.Node]]:
    """For each class the nodes of its first unit."""
    nodes, found, start = ops_of(prepared.body), dict[int, list[fx.Node]](), 0
    for unit in plan.units:
        stop = start + len(plan.classes[unit.kind].ops)
        found.setdefault(unit.kind, nodes[start:stop])
        start = stop
    return found


def _otherwise(op: Op, node: fx.Node, mesh: Mesh, rng: random.Random) -> Op:
    words = list(op.choices)
    for axis in mesh.space:
        words[axis] = choice_to_text(rng.choice(choices(node, mesh, axis)))
    return replace(op, choices=tuple(words))
