"""Bytes alive at every node of graphs written by hand, and of graphs that run."""

from __future__ import annotations

import operator

import pytest
import torch
from allocations import fullest, mark
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import autopar.runtime.collectives  # registers the ops
import autopar.runtime.counter_random  # noqa: F401
from autopar.liveness import walk

ATEN, OURS = torch.ops.aten, torch.ops.autopar
GATHER, GATHERED = OURS.start_all_gather, OURS.wait_all_gather
SWAP, SWAPPED = OURS.start_all_to_all, OURS.wait_all_to_all
X = 4 * 64 * 64  # bytes of every square below


class Hand:
    """A graph written node by node."""

    def __init__(self) -> None:
        self.graph, self.count = fx.Graph(), 0

    def given(self, *shape, dtype=torch.float32):
        self.count += 1
        node = self.graph.placeholder(f"x{self.count}")
        node.meta["val"] = torch.empty(shape or (64, 64), dtype=dtype, device="meta")
        return node

    def call(self, op, *args):
        return self.graph.call_function(getattr(op, "default", op), args)

    def walk(self, *outputs):
        self.graph.output(tuple(outputs))
        return walk(self.module())

    def module(self):
        return fx.GraphModule({}, self.graph)


def squares(live):
    return [n / X for n in live]


def test_a_name_goes_after_its_last_reader():
    g = Hand()
    x = g.given()
    a = g.call(ATEN.relu, x)
    b = g.call(ATEN.neg, a)
    c = g.call(ATEN.neg, b)
    d = g.call(ATEN.mul.Tensor, c, b)
    found = g.walk(d)
    assert squares(found.live()) == [2, 3, 3, 4]
    assert squares(found.live(boxed=True)) == [2, 2, 2, 3], "x goes after relu"
    assert [m.node for m in found.moments] == [a.name, b.name, c.name, d.name]


def test_a_result_that_nobody_reads_is_there_for_a_moment():
    g = Hand()
    x = g.given()
    g.call(ATEN.relu, x)
    assert squares(g.walk(g.call(ATEN.neg, x)).live()) == [2, 2]


def test_views_share_a_storage_that_lives_as_long_as_any():
    g = Hand()
    x = g.given()
    a = g.call(ATEN.relu, x)
    view = g.call(ATEN.view, a, [-1])
    b = g.call(ATEN.neg, a)
    c = g.call(ATEN.exp, b)
    found = g.walk(g.call(ATEN.slice.Tensor, view, 0, 0, 8), c)
    assert squares(found.live()) == [2, 2, 3, 4, 3]
    assert found.results[0] == found.moments[0].made[0], "a part of `a`, all of which is held"


def test_results_say_which_argument_they_are():
    g = Hand()
    x, y = g.given(), g.given()
    found = g.walk(g.call(ATEN.t, y), x, g.call(ATEN.neg, x), None)
    assert found.results == (found.arguments[1], found.arguments[0], 2, None)


def test_several_results():
    g = Hand()
    both = g.call(ATEN.topk, g.given(), 64)
    values = g.call(operator.getitem, both, 0)
    found = g.walk(g.call(ATEN.neg, values))
    assert squares(found.live()) == [4, 4, 3], "indices are of 8 bytes, and go with the pair that names them"


def test_the_parts_of_a_composite_op():
    g = Hand()
    q, k, v = (g.given(1, 4, 64, 16) for _ in range(3))
    mask = g.given(64, 64)
    found = g.walk(g.call(ATEN._scaled_dot_product_attention_math, q, k, v, mask))
    assert found.moments[0].extra == 4 * X, "the scores of four heads; their softmax is a result"


@pytest.mark.parametrize(
    ("op", "after", "live"),
    [
        # rows of all ranks, in order as they come
        ((GATHER, "tp", 2, 0, 0, [128], "reduce_scatter"), (GATHERED, 2, 0, 0, [128]), (3, 3)),
        # columns: the raw tensor is put in order
        ((GATHER, "tp", 2, 0, 1, [128], "reduce_scatter"), (GATHERED, 2, 0, 1, [128]), (3, 5)),
        # 63 rows and 64: padded on the wire, where the copy stays
        ((GATHER, "tp", 2, 0, 0, [127], "slice"), (GATHERED, 2, 0, 0, [127]), (3, 5 - 1 / 64)),
        ((OURS.start_all_reduce, "tp", "none"), (OURS.wait_all_reduce,), (2, 2)),
        ((OURS.start_swap, "tp", 64), (OURS.wait_stacked,), (2, 2)),
        ((OURS.start_reduce_scatter, "tp", 2, 0, 0, [64]), (OURS.wait_reduce_scatter, 2, 0, 0, [64]), (1.5, 1.5)),
        # columns: put in order before
        ((OURS.start_reduce_scatter, "tp", 2, 0, 1, [64]), (OURS.wait_reduce_scatter, 2, 0, 1, [64]), (2.5, 2.5)),
        ((SWAP, "tp", 2, 0, 0, [128], 1, [64]), (SWAPPED, 2, 0, 0, [128], 1, [64]), (3, 3)),
    ],
)  # fmt: skip
def test_collectives(op, after, live):
    g = Hand()
    raw = g.call(op[0], g.given(), *op[1:])
    found = g.walk(g.call(after[0], raw, *after[1:]))
    assert squares(found.live()) == list(live)
    got = found.moments[0].sent[1]
    assert got == found.moments[0].made[0]


def test_what_returns_its_operand_makes_nothing():
    g = Hand()
    x = g.given()
    a = g.call(OURS.replicate, x, "tp")
    b = g.call(OURS.keep, a, 0, "none")
    c = g.call(OURS.keep, b, 1, "none")
    assert squares(g.walk(c).live()) == [1, 1, 2]


def test_a_random_op_hashes_a_piece_at_a_time():
    g = Hand()
    x = g.given(1024, 1024)
    found = g.walk(g.call(OURS.dropout, x, 0.5))
    hashes, mask = 2 * 8 * (1 << 18), 1 << 20
    assert hashes + mask <= found.moments[0].extra < hashes + 1.1 * mask


def test_a_graph_allocates_what_its_walk_says():
    """A block with attention and its gradients, as make_fx has them, on real tensors."""

    def joint(x, w, up, down):
        h = torch.nn.functional.layer_norm(x, [128])
        q, k, v = (t.view(2, 64, 4, 32).transpose(1, 2) for t in (h @ w).split(128, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y = (y + torch.nn.functional.gelu(y @ up) @ down).sum()
        return y, *torch.autograd.grad(y, (x, w, up, down))

    args = [torch.randn(s, requires_grad=True) for s in ((2, 64, 128), (128, 384), (128, 512), (512, 128))]
    graph = make_fx(joint, tracing_mode="fake")(*args)
    given = sum(a.nbytes for a in args)

    def run():
        for name in ("first", "second"):
            mark(name)
            graph(*args)

    with torch.no_grad():
        measured = dict(fullest(run))["second"]
    assert abs(max(walk(graph).live()) - given - measured) < 0.01 * measured
