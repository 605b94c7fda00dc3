"""Functions with a backward of their own and modules that decide by values: captured as one node, equal, divided where
trials allow it; truths that a plan may rely on are held to."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import opaque_models
import pytest
import torch
from stacked_judge import StackedJudge
from torch import Tensor, nn

import autopar
from autopar.capture import capture, run_graph
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.passes.facts import operand_nodes
from autopar.passes.strategy import rule
from autopar.runtime.opaque import OPAQUE, Cut, called, opaque
from autopar.runtime.pool import RankPool

ONE = dict.fromkeys(("branch", "numpy", "loop", "noisy", "masked", "rare", "pictures"), 1)
NODES = {**ONE, "functions": 4, "unused": 2, "finite": 0, "windows": 0}


@pytest.fixture(scope="module")
def judges() -> dict[str, StackedJudge]:
    return {}


def judge(judges: dict[str, StackedJudge], name: str) -> StackedJudge:
    if name not in judges:
        judges[name] = StackedJudge(*opaque_models.make(name))
    return judges[name]


@pytest.mark.parametrize("name", opaque_models.MODELS)
def test_is_eager_and_every_plan_is_equal(judges: dict[str, StackedJudge], name: str) -> None:
    model, args, kwargs = opaque_models.make(name)
    assert capture(model, args, kwargs).checked == "equal"
    of = judge(judges, name)
    nodes = [n for n in of.captured.graph.graph.nodes if n.target in OPAQUE]
    assert len(nodes) == NODES[name]
    for pins in ({"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}):
        of.pinned(**pins)
    for seed in range(4):
        of.random(seed)


def test_the_gradient_is_the_functions_own() -> None:
    model, args, _ = opaque_models.make("functions")
    captured = capture(model, args, check=False)
    run_graph(captured.graph, args, captured.attributes)["outputs"][0].backward()
    mine = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(*args).backward()
    assert mine.keys() == {n for n, p in model.named_parameters() if p.grad is not None}
    for name, p in model.named_parameters():
        if name in mine:
            torch.testing.assert_close(mine[name], p.grad, rtol=1e-6, atol=1e-9)
    assert model.down.bias.grad is not None and model.down.bias.grad.abs().max() <= 8e-3  # clipped


def cuts(of: StackedJudge) -> list[tuple[list[str], bool]]:
    """Of each opaque call the factors of its first operand, and whether gradients may come as addends."""
    found = []
    for node in of.prepared(1).body.graph.find_nodes(op="call_function", target=opaque):
        known = rule(node)
        assert known is not None and len(known.operands) == len(operand_nodes(node))
        found.append(([f for d in known.operands[0] for f in d.factors], known.addends))
    return found


def test_what_may_be_cut(judges: dict[str, StackedJudge]) -> None:
    whole, by_rows, by_all = ([], True), (["c0"], True), (["c0", "c1"], True)
    assert [c for c in cuts(judge(judges, "functions")) if c[1]] == [by_all] * 3
    assert [c for c in cuts(judge(judges, "functions")) if not c[1]] == [(["c0", "c1"], False)]  # Clipped
    assert cuts(judge(judges, "masked")) == [by_rows]
    assert cuts(judge(judges, "pictures")) == [by_rows]
    for name in ("branch", "numpy", "loop", "rare"):
        assert cuts(judge(judges, name)) == [whole], name


def test_a_function_that_sums_rows_is_cut_only_over_columns() -> None:
    class Centred(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x - x.mean(0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return Centred.apply(self.fc(x)).square().mean()

    of = StackedJudge(Net(), (torch.randn(8, 8),), {})
    (node,) = of.prepared(1).body.graph.find_nodes(op="call_function", target=opaque)
    assert [bool(d.factors) for d in rule(node).operands[0]] == [False, True]
    for seed in range(4):
        of.random(seed)


def test_a_truth_that_no_longer_holds_is_one_line() -> None:
    model, (x, y), _ = opaque_models.make("finite")
    captured = capture(model, (x, y))
    run = lambda x, y: run_graph(captured.graph, (x, y), captured.attributes)
    run(x, y)
    with pytest.raises(AutoparError, match=r"inner \(opaque_models.py:\d+\): would decide otherwise for this batch"):
        run(x * float("inf"), y)
    with pytest.raises(AutoparError, match=r"Around \(opaque_models.py:\d+\): would decide otherwise"):
        run(x, y + 1e7)


def test_numbers_that_pieces_were_tried_with_are_held_to() -> None:
    """The list that is as long as there are rows comes back as the model gives it."""
    model, (sides, patches, y), _ = opaque_models.make("pictures")
    captured = capture(model, (sides, patches, y))
    (node,) = captured.graph.graph.find_nodes(op="call_function", target=opaque)
    call = called(*node.args[1:])
    assert call.cuts() == (Cut((0, 0, None, None), (0,)),)
    given = [patches[:16] @ model.first.weight.T, sides[:4], *call.held()]
    assert call.run(given)[0].shape == (16, 16)
    with pytest.raises(AutoparError, match=r"inner .*: reads 1 at opaque_models.py:\d+, at capture 2 of every row"):
        call.run([given[0][:4], torch.ones_like(sides[:4]), *call.held()])
    with pytest.raises(AutoparError, match=r"inner .*: result: is a list .*, of other shapes .* Pad to one length"):
        call.run([given[0], torch.tensor([4, 0, 0, 0]), *call.held()])
    made = captured.unflatten_outputs(run_graph(captured.graph, (sides, patches, y), captured.attributes)["outputs"])
    want = model(sides, patches, y)
    torch.testing.assert_close(made, want)


def trained(rank: int | None) -> dict[str, Tensor]:
    """Parameters after three steps, the second of which takes the other branch. Weight decay tells none from zeros."""
    model, (x, y), _ = opaque_models.make("unused")
    model, args = model.double(), (x.double(), y.double())
    pins = {"dp": 2, "zero": 3}
    ready = None if rank is None else autopar.compile(model, Cluster.local(ranks=2), args=args, pins=pins)
    optimizer = (ready.optimizer if ready else partial(_made, model))(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    taught = []
    for scale in (1.0, 20.0, 1.0):
        optimizer.zero_grad()
        loss = (ready.step if ready else model)(args[0] * scale, args[1])
        if ready is None:
            loss.backward()
        optimizer.step()
        named = dict((ready or model).named_parameters())
        taught.append({n for n, p in named.items() if p.grad is not None})
    assert [{"first.weight", "inner.start"} & names for names in taught] == [
        {"inner.start"},
        {"first.weight"},
        {"inner.start"},
    ]
    return {n: p.full_tensor() if ready else p.detach() for n, p in named.items()}


def _made(model: nn.Module, kind: type, **options: float) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind(model.parameters(), **options)
    return made


def test_what_is_not_used_has_no_gradient_in_that_step() -> None:
    with RankPool(2, timeout=240) as pool:
        first, second = pool.run(trained)
    for name, value in trained(None).items():
        torch.testing.assert_close(first[name], value, rtol=1e-10, atol=1e-12)
        assert torch.equal(first[name], second[name])


def test_hints_say_what_and_why() -> None:
    model, args, kwargs = opaque_models.make("branch")
    called, held = capture(model, args, kwargs).hints
    assert called.startswith("inner (") and "opaque_models.py:" in called and "of the FLOPs" in called
    assert held.startswith("Around (opaque_models.py:") and "decided as the examples do" in held
    model, args, kwargs = opaque_models.make("functions")
    hints = capture(model, args, kwargs).hints
    assert [h.partition("Function ")[2].split()[0] for h in hints] == ["Straight", "Reversed", "Clipped"]


def test_hash_is_that_of_the_model() -> None:
    """Not of what the process captured before."""
    first, second = (capture(*opaque_models.make("branch")[:2]).hash for _ in range(2))
    assert first == second


def test_refused_in_one_line() -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * random.random() if x.mean() > 0 else x / random.random()

    x, y = torch.randn(8, 8), torch.randn(8, 4)
    with pytest.raises(AutoparError, match=r"inner \(.*test_opaque_calls.py:\d+\): draws from Python's generator"):
        capture(opaque_models.Around(Picky()), (x, y))
    with torch.device("meta"):
        empty = opaque_models.Around(opaque_models.Branch())
    with pytest.raises(AutoparError, match="depends on the values of tensors"):
        capture(empty, (x, y))
