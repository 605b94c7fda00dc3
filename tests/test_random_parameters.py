"""Parameters rest, enter and are reduced in any way, each its own, on two axes that no code knows by name: the numbers
are those of one process."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import fx

from autopar.build import apply
from autopar.cluster import Cluster
from autopar.passes.complete_layouts import complete_layouts, resting, treat
from autopar.passes.facts import value
from autopar.passes.insert_changes import produced_layout
from autopar.passes.layout import Axis, Mesh
from autopar.passes.split_prologue import copy_graph
from autopar.pins import microbatch_rows
from autopar.plan import loads
from autopar.write_plan import plan_of

MODELS = Path(__file__).with_name("small_models.py")
WHOLE_BATCH = {"batch_norm_variants", "info_nce_in_batch", "moe_balance_loss", "running_mean_of_batch"}
NAMES = [n for n in re.findall(r"^@small\ndef (\w+)", MODELS.read_text(), re.MULTILINE) if n not in WHOLE_BATCH][::3]
AXES: list[tuple[tuple[int, int], tuple[str, ...], int]] = [((2, 2), (), 2), ((2, 3), ("y",), 1), ((2, 2), ("x",), 2)]


def draw(node: fx.Node, mesh: Mesh, rng: random.Random) -> None:
    """A treatment at random: used R or I where its use is not cut, in pieces over some of those axes, any ZeRO."""
    v, use = value(node), produced_layout(node)
    whole = [a for a in mesh.space if use.kinds[a] != "S"]
    for axis in whole:
        use = use.with_kind(axis, rng.choice("RI"))
    over = rng.sample(whole, rng.randint(0, len(whole)))
    rest = resting(v, use, mesh, over)
    for axis in over:
        if v.shape and rng.random() < 0.3:
            cuts = [rest.with_shard(axis, d) for d in range(len(v.shape))]
            rest = rng.choice([c for c in cuts if c.is_even(v.shape, mesh)] or [rest])
    treat(node, rest, use, rng.choice(["step", "use"]), rng.choice(["step", "microbatch"]), mesh)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("sizes", "divided", "microbatches"), AXES)
def test_any_treatment_of_parameters_is_exact(
    name: str, sizes: tuple[int, int], divided: tuple[str, ...], microbatches: int, judge_of: Callable[[str], Any]
) -> None:
    judge, rng = judge_of(f"{MODELS}:{name}"), random.Random(zlib.crc32(f"{name}{sizes}{divided}".encode()))
    captured = judge.captured
    rows = microbatch_rows(captured.batch, 4 if not divided else 2, microbatches)
    time = (Axis("time", microbatches, rows),) if microbatches > 1 else ()
    mesh = Mesh((Axis("x", sizes[0]), Axis("y", sizes[1]), *time))
    prepared = judge.prepared(microbatches)
    batch_inputs = frozenset(i.name for i in captured.inputs if i.batch)
    gm, _ = complete_layouts(
        copy_graph(prepared.body),
        mesh,
        parameters=frozenset(captured.parameters),
        batch_inputs=batch_inputs,
        batch=captured.batch,
        divided=divided,
    )
    for node in gm.graph.nodes:
        if node.op == "get_attr" and str(node.target) in captured.parameters:
            draw(node, mesh, rng)
    plan = plan_of(gm, captured, mesh, Cluster.local(ranks=mesh.ranks), rename=True)
    judge.assert_equal(apply(loads(plan.dumps()), prepared), f"{name} {plan.one_line()}")
