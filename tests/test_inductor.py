"""Units that Inductor compiles: the numbers of torch.compile, with collectives between compiled pieces."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import autopar
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.runtime import inductor
from autopar.runtime.pool import RankPool

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in inductor.COMPILERS), reason="no C++ compiler on PATH"
)


class Net(nn.Module):
    """Two linears that tp splits, so that collectives lie between them, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.frozen = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x, y):
        x = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return torch.nn.functional.mse_loss(self.frozen(x).tanh(), y)


def made():
    torch.manual_seed(0)
    return Net(), (torch.randn(8, 8), torch.randn(8, 8))


def trained(rank, pins):
    """The pieces that are compiled; the losses of three steps and the weights after them, compiled and not."""
    pieces, found = [], []
    compiled = torch.compile

    def watched(piece, **options):
        pieces.append([str(n.target) for n in piece.graph.nodes if n.op == "call_function"])
        return compiled(piece, **options)

    torch.compile = watched
    try:
        for on in (True, False):
            net, args = made()
            parallel = autopar.compile(net, Cluster.local(2), args=args, pins=pins, inductor=on)
            optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
            losses = []
            for _ in range(3):
                losses.append(float(parallel.step(*args)))
                optimizer.step()
                optimizer.zero_grad()
            found.append((losses, {n: p.detach().full_tensor() for n, p in parallel.named_parameters()}))
    finally:
        torch.compile = compiled
    return pieces, found


@needs_compiler
def test_it_trains_as_eager_does():
    with RankPool(2, timeout=240) as ranks:
        for pieces, (on, off) in ranks.run(trained, {"tp": 2, "microbatches": 2}):
            assert sum("aten.addmm" in op or "aten.mm" in op for piece in pieces for op in piece) >= 6
            assert all(op.startswith(("aten.", "<built-in function getitem>")) for piece in pieces for op in piece)
            torch.testing.assert_close(on, off, rtol=1e-5, atol=1e-6)
            assert on[0][2] < on[0][0]


def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "")
    net, args = made()
    with pytest.raises(
        AutoparError, match=r"inductor=True needs a C\+\+ compiler, and none of c\+\+, g\+\+, clang\+\+"
    ):
        autopar.compile(net, Cluster.local(1), args=args, inductor=True)
