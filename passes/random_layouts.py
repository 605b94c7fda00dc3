"""random_layouts: afterwards every node has a strategy drawn at random from all that are legal.

For tests: whatever the plan, the numbers must be those of one process. Nothing is optimised; parameters rest and enter,
and inputs arrive, in random layouts too.
"""

from __future__ import annotations

import random
from dataclasses import replace

from torch import fx

from autopar.passes.complete_layouts import follow
from autopar.passes.completion import Completion, is_op
from autopar.passes.divide_work import propose_parts
from autopar.passes.facts import KEY, Strategy, Value, fact, is_tensor, value
from autopar.passes.layout import Layout, Mesh


def random_layouts(
    gm: fx.GraphModule,
    mesh: Mesh,
    parameters: frozenset[str],
    batch_inputs: frozenset[str],
    seed: int,
    one_nesting: bool = False,
    hoisted: frozenset[str] = frozenset(),
) -> fx.GraphModule:
    """Draw a strategy for every node. Over time the batch is followed, as it must be. ``one_nesting``: at rest axes
    nest in the mesh's order, as DTensors of one device mesh do. ``hoisted``: placeholders that the prologue fills.
    """
    rng = random.Random(seed)
    state = Completion(gm, mesh, parameters)
    if mesh.time is not None:
        for node in state.leaves:
            if node.op == "placeholder" and node.name in batch_inputs:
                state.leaves[node] = state.leaves[node].with_shard(mesh.time, 0)
        follow(state, mesh.time)
    parts = propose_parts(gm)
    space = list(mesh.space)
    for node in gm.graph.nodes:
        if not is_op(node):
            continue
        rng.shuffle(space)
        state.order = tuple(([mesh.time] if mesh.time is not None else []) + space)
        for axis in space:
            offered = state.candidates(node, axis, parts.get(node, ()))
            divided = [o for o in offered if o[0].kind in ("factor", "special", "linear")]
            state.take(node, axis, *rng.choice(divided if divided and rng.random() < 0.7 else offered))
    for node in gm.graph.nodes:
        if node.op == "get_attr" and node.target in parameters:
            rest = _random(value(node), state.leaves[node], mesh, rng, "I", uneven=True, shuffle=not one_nesting)
            use = rest if rng.random() < 0.4 else _random(value(node), state.leaves[node], mesh, rng, "IR", uneven=True)
            node.meta[KEY] = replace(fact(node), strategy=Strategy((), state.order, (), (use,)), rest=rest)
        elif node.op == "placeholder":
            layout = state.leaves[node]
            if node.name not in hoisted:
                layout = _random(value(node), layout, mesh, rng, "I", uneven=False)
            node.meta[KEY] = replace(fact(node), strategy=Strategy((), state.order, (), (layout,)))
        elif node in state.plans:
            node.meta[KEY] = replace(fact(node), strategy=state.plans[node])
        elif is_tensor(node):
            node.meta[KEY] = replace(fact(node), strategy=Strategy((), state.order, (), (state.layout(node),)))
    return gm


def _random(
    v: Value, base: Layout, mesh: Mesh, rng: random.Random, kinds: str, *, uneven: bool, shuffle: bool = True
) -> Layout:
    layout, space = base, list(mesh.space)
    if shuffle:
        rng.shuffle(space)
    for axis in space:
        layout = layout.with_kind(axis, rng.choice(kinds))
        cuts = [layout.with_shard(axis, d) for d in range(len(v.shape)) if v.shape[d] > 1]
        legal = [c for c in cuts if c.is_even(v.shape, mesh) or (uneven and mesh.time is None)]
        if legal and rng.random() < 0.6:
            layout = rng.choice(legal)
    return layout
