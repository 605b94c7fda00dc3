"""Counting the collectives of a hand-made program: kinds, phases, bytes, microbatches and what needs no gradient."""

from dataclasses import replace

import torch
from torch import fx

from autopar.count_collectives import count_collectives
from autopar.passes.facts import call
from autopar.passes.layout import Axis, Layout, Mesh, Wire
from autopar.passes.lower import InputUse, Local, OutputUse, ParameterUse
from autopar.plan import Collective
from autopar.runtime import collectives  # noqa: F401  registers the ops

OPS = torch.ops.autopar
ROW = 4 * 8  # bytes of 8 float32


def _graph(*makers, body=False):
    """Each maker gives what its op takes, the op, its arguments after that, and the shape of its result. Of a body the
    loss is the sum of all results."""
    graph, made = fx.Graph(), []
    weight, x = graph.placeholder("w"), graph.placeholder("x")
    for node in (weight, x):
        node.meta["val"] = torch.empty(2, 8, device="meta")
    for of, op, arguments, shape in makers:
        start = {"w": weight, "x": x}[of]
        node = graph.call_function(op.default, (start, *arguments))
        node.meta["val"] = torch.empty(shape, device="meta")
        made.append(node)
    if not body:
        graph.output(made[-1])
        return fx.GraphModule({}, graph)
    for name in ("microbatch", "key"):
        with graph.inserting_after(x):
            graph.placeholder(name).meta["val"] = 0
    loss = call(graph, torch.ops.aten.sum.default, (weight,), like=x)
    for node in made:
        one = call(graph, torch.ops.aten.sum.default, (node,), like=x)
        loss = call(graph, torch.ops.aten.add.Tensor, (loss, one), like=x)
    graph.output(((loss,), ()))
    return fx.GraphModule({}, graph)


BODY = (
    ("w", OPS.start_all_gather, ("g", 2, 0, 0, [4], "reduce_scatter"), (2, 2, 8)),
    ("x", OPS.start_all_gather, ("g", 2, 0, 0, [4], "reduce_scatter"), (2, 2, 8)),
    ("w", OPS.start_all_gather, ("g", 2, 0, 0, [4], "slice"), (2, 2, 8)),
    ("w", OPS.start_reduce_scatter, ("t", 2, 0, 0, [2]), (1, 8)),
    ("w", OPS.replicate, ("t",), (2, 8)),
    ("w", OPS.start_all_reduce, ("t", "none"), (2, 8)),
    ("w", OPS.shard, ("t", 2, 0, 0, [2], "pad"), (1, 8)),
)


def _local(mesh, rows, reduce="step", trainable=True):
    layout = Layout.parse("S0 R" if mesh.time is None else "S0 R R", 2)
    use = ParameterUse("w", (4, 8), torch.float32, trainable, layout, layout.with_kind(0, "R"), reduce)
    enter = _graph(("w", OPS.start_all_gather, ("g", 2, 0, 0, [4], "reduce_scatter"), (2, 2, 8)))
    inputs = (InputUse("x", (4, 8), torch.float32, layout),)
    body = {r: _graph(*BODY, body=True) for r in rows}
    loss = OutputUse((), torch.float32, Layout("I" * len(mesh.axes), ()))
    return Local(mesh, (0, 0), (use,), (), (), inputs, (loss,), (), body, None, {"w": enter}, returns=(0,))


def _count(local):
    return {(c.axis, c.kind, c.phase): (c.count, c.bytes) for c in count_collectives(local, {"g": "dp", "t": "tp"})}


def test_one_microbatch():
    assert _count(_local(Mesh((Axis("dp", 2), Axis("tp", 2))), [0])) == {
        ("dp", "all_gather", "forward"): (1, 4 * ROW),
        ("dp", "all_gather", "parameters"): (3, 12 * ROW),
        ("dp", "reduce_scatter", "gradients"): (2, 8 * ROW),
        ("tp", "reduce_scatter", "parameters"): (1, 2 * ROW),
        ("tp", "all_gather", "gradients"): (1, 2 * ROW),
        ("tp", "all_reduce", "parameters"): (1, 2 * ROW),
        ("tp", "all_reduce", "gradients"): (1, 2 * ROW),
    }


def test_each_microbatch_counts():
    mesh = Mesh((Axis("dp", 2), Axis("tp", 2), Axis("time", 3, (4, 4, 2))))
    step, each = (_count(_local(mesh, [4, 2], reduce)) for reduce in ("step", "microbatch"))
    assert step["dp", "all_gather", "forward"] == (3, 12 * ROW)
    assert step["dp", "all_gather", "parameters"] == each["dp", "all_gather", "parameters"] == (7, 28 * ROW)
    assert step["dp", "reduce_scatter", "gradients"] == (3 + 1, 16 * ROW)
    assert each["dp", "reduce_scatter", "gradients"] == (3 + 3, 24 * ROW)


def test_forward_alone():
    local = _local(Mesh((Axis("dp", 2), Axis("tp", 2))), [0])
    found = count_collectives(local, {"g": "dp", "t": "tp"}, train=False)
    assert {c.phase for c in found} == {"forward", "parameters"}


def test_seconds_by_the_wire_of_the_axis():
    slow = Wire((1.0, 2.0), (3.0, 4.0), (5.0, 6.0), (7.0, 8.0), 0.0)
    mesh = Mesh((Axis("dp", 2), Axis("tp", 2, wire=slow)))
    rows = {(c.axis, c.kind, c.phase): c for c in count_collectives(_local(mesh, [0]), {"g": "dp", "t": "tp"}, mesh)}
    assert rows["tp", "all_reduce", "gradients"].seconds == 1.0 + 2.0 * 2 * ROW
    assert rows["tp", "reduce_scatter", "parameters"].seconds == 5.0 + 6.0 * 2 * ROW
    assert rows["tp", "all_gather", "gradients"].hidden
    assert rows["dp", "all_gather", "forward"].hidden is False


def test_frozen_parameters_have_no_backward():
    phases = {
        c.phase
        for c in count_collectives(
            _local(Mesh((Axis("dp", 2), Axis("tp", 2))), [0], trainable=False), {"g": "dp", "t": "tp"}
        )
    }
    assert phases == {"forward", "parameters"}


def test_order():
    found = count_collectives(_local(Mesh((Axis("dp", 2), Axis("tp", 2))), [0]), {"g": "dp", "t": "tp"})
    assert list(found) == sorted(found, key=lambda c: (c.axis, c.kind, c.phase))
    assert all(isinstance(c, Collective) for c in found)


def test_a_bucket_counts_once():
    local = _local(Mesh((Axis("dp", 2), Axis("tp", 2))), [])
    (use,) = local.parameters
    uses = (use, replace(use, fqn="v"), replace(use, fqn="frozen", trainable=False))
    graph = fx.Graph()
    held = [graph.placeholder(name) for name in ("w", "v", "frozen", "x", "microbatch", "key")]
    for i, node in enumerate(held):
        node.meta["val"] = torch.empty(4, 8, device="meta") if i < 4 else 0
    total = call(graph, torch.ops.aten.add.Tensor, (held[0], held[1]), like=held[0])
    product = call(graph, torch.ops.aten.mul.Tensor, (total, held[2]), like=held[0])
    graph.output(((call(graph, torch.ops.aten.sum.default, (product,), like=held[0]),), ()))
    enter = {u.fqn: local.enter["w"] for u in uses}
    several = replace(local, parameters=uses, body={0: fx.GraphModule({}, graph)}, enter=enter)
    assert _count(several) == {
        ("dp", "all_gather", "parameters"): (1, 3 * 4 * ROW),
        ("dp", "reduce_scatter", "gradients"): (1, 2 * 4 * ROW),
    }
