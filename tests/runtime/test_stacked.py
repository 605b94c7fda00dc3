"""The stacked interpreter: whole programs of many ranks, groups, and the mistakes it finds. (The changes of layout
themselves are tested with the collectives.)"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from autopar.passes.layout import Axis, Mesh
from autopar.runtime import collectives as c
from autopar.runtime import ops
from autopar.runtime.stacked import run_stacked

aten = torch.ops.aten


def trace(names: str, build: Callable[..., Any]) -> fx.GraphModule:
    """A graph with these placeholders; ``build`` writes with ``call`` and returns the outputs."""
    graph = fx.Graph()
    placeholders = [graph.placeholder(name) for name in names.split()]
    graph.output(build(lambda target, *args: graph.call_function(target, args), *placeholders))
    return fx.GraphModule({}, graph)


def mlp(c0: int, n: int) -> fx.GraphModule:
    """Column and row parallel linear over ``tp``, batch over ``dp``; the loss a sum, changed to I."""

    def build(call: Any, x: fx.Node, first: fx.Node, bias: fx.Node, second: fx.Node) -> Any:
        x, bias = call(c.replicate, x, "tp"), call(c.keep, bias, c0, "none")
        first, second = (call(c.replicate, w, "dp") for w in (first, second))
        bias = call(c.replicate, bias, "dp")
        hidden = call(aten.relu.default, call(aten.linear.default, x, first))
        out = call(
            c.wait_all_reduce, call(c.start_all_reduce, call(aten.linear.default, hidden, second, bias), "tp", "none")
        )
        loss = call(aten.sum.default, call(aten.mul.Tensor, out, out))
        return call(c.wait_all_reduce, call(c.start_all_reduce, loss, "dp", "none"))

    return trace("x first bias second", build)


def test_an_mlp_on_64_ranks_is_one_process() -> None:
    mesh = Mesh((Axis("dp", 8), Axis("tp", 8)))
    x, first, bias, second = (torch.randn(s, dtype=torch.float64) for s in ((16, 4), (24, 4), (5,), (5, 24)))
    whole = [t.clone().requires_grad_() for t in (x, first, bias, second)]
    loss = F.linear(F.linear(whole[0], whole[1]).relu(), whole[3], whole[2]).square().sum()
    loss.backward()

    inputs, programs = [], []
    for rank in range(64):
        dp, tp = mesh.coordinates(rank)
        local = (x.chunk(8)[dp], first.chunk(8)[tp], bias, second.chunk(8, 1)[tp])
        inputs.append([t.clone().requires_grad_() for t in local])
        programs.append(mlp(tp, 8))
    groups = {"tp": [list(range(8 * i, 8 * i + 8)) for i in range(8)], "dp": [list(range(i, 64, 8)) for i in range(8)]}
    started = time.process_time()
    losses = run_stacked(programs, inputs, groups)
    torch.stack(losses).sum().backward()
    seconds = time.process_time() - started

    assert seconds < 2
    for rank, (found, held) in enumerate(zip(losses, inputs, strict=True)):
        dp, tp = mesh.coordinates(rank)
        torch.testing.assert_close(found, loss)
        wanted = [t.grad for t in whole]
        cut = (wanted[0].chunk(8)[dp], wanted[1].chunk(8)[tp], wanted[2], wanted[3].chunk(8, 1)[tp])
        for one, two in zip(held, cut, strict=True):
            torch.testing.assert_close(one.grad, two)


def test_groups_may_have_a_name_each() -> None:
    """Real ranks know their group by its own name; two groups of one axis then differ in it."""

    def build(group: str) -> fx.GraphModule:
        return trace("x", lambda call, x: call(c.wait_all_reduce, call(c.start_all_reduce, x, group, "none")))

    programs = [build(g) for g in ("left", "left", "right", "right")]
    found = run_stacked(programs, [[torch.tensor(i)] for i in range(4)], {"left": [[0, 1]], "right": [[2, 3]]})
    assert [int(t) for t in found] == [1, 1, 5, 5]


def test_tuples_literals_and_attributes() -> None:
    class Root(torch.nn.Module):
        def __init__(self, scale: int) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(scale))

    programs = []
    for rank in range(2):
        graph = fx.Graph()
        x, microbatch = graph.placeholder("x"), graph.placeholder("microbatch")
        halves = graph.call_function(aten.split.Tensor, (x, 2))
        half = graph.call_function(operator.getitem, (halves, rank))
        half = graph.call_function(aten.mul.Tensor, (half, graph.get_attr("scale")))
        graph.output(((half, graph.call_function(c.time_keep, (half, microbatch))), ()))
        programs.append(fx.GraphModule(Root(10 + rank), graph))
    found = run_stacked(programs, [[torch.arange(4), 1]] * 2, {})
    assert [[t.tolist() for t in outputs] for outputs, buffers in found] == [[[0, 10], [0, 0]], [[22, 33], [0, 0]]]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_over_a_cut_vocabulary(smoothing: float) -> None:
    logits = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[0, 5, -100], [2, 3, 4]])
    wanted = ops.cross_entropy_sum(logits, target, None, -100, smoothing)
    wanted.backward()
    programs = [
        trace(
            "x target",
            lambda call, x, t, s=start: call(ops.cross_entropy_sum_sharded, x, t, "tp", s, -100, smoothing, 6),
        )
        for start in (0, 3)
    ]
    locals_ = [t.detach().clone().requires_grad_() for t in logits.chunk(2, -1)]
    losses = run_stacked(programs, [[t, target] for t in locals_], {"tp": [[0, 1]]})
    torch.stack(losses).sum().backward()
    for loss in losses:
        torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(torch.cat([t.grad for t in locals_], -1), logits.grad)


def test_values_are_freed_after_their_last_use() -> None:
    seen: list[int] = []

    class Big:
        alive = 0

        def __init__(self) -> None:
            Big.alive += 1

        def __del__(self) -> None:
            Big.alive -= 1

    def step(_: object) -> Big:
        seen.append(Big.alive)
        return Big()

    program = trace("x", lambda call, x: call(step, call(step, call(step, call(step, x)))))
    run_stacked([program] * 2, [[0], [0]], {})
    assert max(seen) <= 2 * 2


MISTAKES: list[tuple[str, list[Any], str]] = [
    ("order", [(c.start_all_reduce, "tp", "none"), (c.start_all_reduce, "tp", "all_reduce")], "disagree"),
    ("place", [(c.shard, "tp", 2, 0, 0, [4], "pad"), (c.shard, "tp", 2, 0, 0, [4], "pad")], "at place 1"),
    ("size", [(c.shard, "tp", 4, i, 0, [4], "pad") for i in range(2)], "n=4 in a group of"),
    ("group", [(c.replicate, "dp")] * 2, "in no group"),
    ("ops", [(c.replicate, "tp"), (c.invariant, 1)], "ranks disagree at"),
]


@pytest.mark.parametrize(("calls", "message"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_mistakes_between_ranks_are_found(calls: list[Any], message: str) -> None:
    programs = [trace("x", lambda call, x, o=op, r=rest: call(o, x, *r)) for op, *rest in calls]
    with pytest.raises(AssertionError, match=message):
        run_stacked(programs, [[torch.ones(4)]] * 2, {"tp": [[0, 1]], "dp": [[2, 3]]})


def test_a_wait_that_differs_from_its_start_is_found() -> None:
    def build(call: Any, x: fx.Node) -> fx.Node:
        return call(c.wait_all_gather, call(c.start_all_gather, x, "tp", 1, 0, 0, [4], "slice"), 1, 0, 0, [2, 2])

    with pytest.raises(AssertionError, match=r"differs from its start in \['parts'\]"):
        run_stacked([trace("x", build)], [[torch.ones(4)]], {"tp": [[0]]})
