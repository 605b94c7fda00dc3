"""The one-process reference: captured graphs run op by op, in their own precision and in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar.capture import Capture, capture
from autopar.evaluate import double, run_graph, to_float64
from autopar.passes import PREPARE, run
from autopar.passes.split_prologue import copy_graph

aten = torch.ops.aten


class Mixed(nn.Module):
    """Casts, constructors and integers that become float32."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("angles", torch.polar(torch.ones(2), torch.tensor([0.3, 0.7])))

    def forward(self, x, ids):
        out = self.norm(self.fc(x)).float()
        out = out + torch.arange(4, device=x.device) / 3  # integers to float32
        out = out * torch.full((4,), 1.5) + torch.zeros(4, dtype=torch.float32)
        out = out + ids.sqrt()[:, None] + torch.linspace(0, 1, 4) + torch.where(ids > 2, 0.1, 0.0)[:, None]
        pairs = torch.view_as_complex(out.reshape(-1, 2, 2)) * self.angles
        out = torch.view_as_real(pairs).to(torch.bfloat16).to(torch.float32)
        return F.softmax(out, -1, dtype=torch.float32).log().mean() + torch.tensor(0.1)


def inputs(rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 4), torch.arange(1, rows + 1)


def floats(captured: Capture, graph) -> set[torch.dtype]:
    vals = [v for n in graph.graph.nodes for v in tree_leaves(n.meta.get("val")) if isinstance(v, torch.Tensor)]
    return {v.dtype for v in vals if v.is_floating_point() or v.is_complex()}


def test_to_float64_computes_in_float64() -> None:
    model, (x, ids) = Mixed(), inputs()
    captured = capture(model, (x, ids))
    graph = to_float64(captured.graph)
    assert floats(captured, graph) == {torch.float64, torch.complex128}
    assert floats(captured, captured.graph) >= {torch.float32, torch.bfloat16}, "the graph itself is left as it was"
    seen: list[torch.dtype] = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(t.dtype for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point())
            return out

    attributes = double(captured.attributes)
    with Seen():
        loss = run_graph(graph, (x.double(), ids), attributes)["outputs"][0]
    assert set(seen) == {torch.float64}
    torch.testing.assert_close(loss.float(), model(x, ids), atol=2e-2, rtol=0.0)
    assert model.norm.num_batches_tracked == 1, "only eager counted; double() made copies"
    assert attributes["norm.num_batches_tracked"] == 1


def test_to_float64_keeps_values_right_to_the_last_digits() -> None:
    class Thirds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, ids):
            return (ids / 3).sum() * self.weight

    captured = capture(Thirds(), (torch.arange(1, 5),))
    loss = run_graph(to_float64(captured.graph), (torch.arange(1, 5),), double(captured.attributes))["outputs"][0]
    assert loss.item() == pytest.approx(10 / 3, abs=1e-15)


def test_meta_values_are_what_runs() -> None:
    captured = capture(Mixed(), inputs())
    for graph in (captured.graph, to_float64(captured.graph)):
        wide = graph is not captured.graph
        held = double(captured.attributes) if wide else {n: t.clone() for n, t in captured.attributes.items()}
        x, ids = inputs()
        check = Check(graph, held)
        check.run(x.double() if wide else x, ids)


class Check(torch.fx.Interpreter):
    def __init__(self, graph, held) -> None:
        super().__init__(graph)
        self.held = held

    def get_attr(self, target, args, kwargs):
        return self.held[target]

    def run_node(self, n):
        out = super().run_node(n)
        for got, said in zip(tree_leaves(out), tree_leaves(n.meta.get("val")), strict=False):
            if isinstance(got, torch.Tensor) and n.op != "output":
                assert (got.shape, got.dtype, got.stride()) == (said.shape, said.dtype, said.stride()), n
        return out


def test_double_keeps_ties_and_gradients() -> None:
    weight = nn.Parameter(torch.ones(2))
    made = double({"a": weight, "b": weight, "ids": torch.arange(3), "frozen": torch.ones(2)})
    assert made["a"] is made["b"] and made["a"].requires_grad and made["a"].is_leaf
    assert made["ids"].dtype == torch.int64 and not made["frozen"].requires_grad
    made["a"].sum().backward()
    assert weight.grad is None


def test_a_graph_captured_on_meta_runs_on_the_cpu() -> None:
    with torch.device("meta"):
        captured = capture(Mixed(), inputs())
    real = Mixed()
    held = {**dict(real.named_parameters()), **{n: b.clone() for n, b in real.named_buffers()}}
    constants = {n: torch.full((), 0.1) for n in captured.constants}
    x, ids = inputs()
    loss = run_graph(captured.graph, (x, ids), {**constants, **held})["outputs"][0]
    assert loss.device.type == "cpu"
    torch.testing.assert_close(loss, real(x, ids))


class OfIntegers(nn.Module):
    """Floats that torch makes of integers alone, and by default."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3, 0.7]))

    def forward(self, ids: Tensor) -> Tensor:
        bucket = torch.where(ids > 1, 0.5, 0.25) + torch.log(ids / 2) + ids.sin() + torch.arange(2.0)
        return (bucket * self.weight).sum()


def test_a_wider_graph_has_the_same_ops_before_and_after_preparation() -> None:
    captured = capture(OfIntegers(), (torch.tensor([[1, 2], [3, 4]]),))
    names = lambda gm: [str(n.target) for n in gm.graph.nodes]
    wide = to_float64(captured.graph)
    assert names(wide) == names(captured.graph)
    assert names(run(wide, PREPARE)) == names(run(copy_graph(captured.graph), PREPARE))
