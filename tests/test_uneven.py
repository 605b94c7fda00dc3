"""Models of which nothing divides: equal under random layouts and pins, and divided all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.build import apply
from autopar.capture import Capture, capture
from autopar.choosing.plan_training import Planned, plan_training
from autopar.cluster import Cluster
from autopar.divided import divided
from autopar.errors import AutoparError
from autopar.passes.facts import fact, operand_nodes, value
from autopar.passes.lower import Lowerable
from autopar.pins import Pins
from autopar.plan import loads
from tests.limits import figures

MODELS = Path(__file__).with_name("uneven_models.py")
ALL = ["gpt", "grouped", "few_keys", "repeated_keys", "channels", "views"]


def uneven(lowerable: Lowerable) -> list[fx.Node]:
    """The ops of which some operand or result is in pieces of different sizes."""
    found, mesh = [], lowerable.mesh
    for node in lowerable.body.graph.nodes:
        plan = fact(node).strategy if node.op == "call_function" else None
        if plan is not None:
            held = [*zip(plan.operands, map(value, operand_nodes(node))), *zip(plan.results, fact(node).values)]
            if any(x is not None and v is not None and not x.is_even(v.shape, mesh) for x, v in held):
                found.append(node)
    return found


@pytest.mark.parametrize("name", ALL)
def test_random_layouts(name: str, judge_of: Callable[[str], Any]) -> None:
    judge, index = judge_of(f"{MODELS}:{name}"), ALL.index(name)
    for seed, axes in enumerate([(2,), (3,), (2, 2)]):
        drawn = judge.drawn(seed + 10 * index, axes)
        assert uneven(drawn)
        judge.assert_equal(drawn, f"seed {seed} on {axes}")


@pytest.mark.parametrize("name", ["gpt", "grouped"])
def test_random_layouts_in_microbatches(name: str, judge_of: Callable[[str], Any]) -> None:
    judge_of(f"{MODELS}:{name}").random(1, (2,), microbatches=2)


PINNED: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"tp": 2}),
    ("gpt", {"tp": 3}),
    ("gpt", {"tp": 4}),
    ("gpt", {"tp": 2, "sp": 2}),
    ("grouped", {"tp": 2, "microbatches": 2}),
    ("grouped", {"sp": 3}),
    ("channels", {"tp": 2}),
]


@pytest.mark.parametrize(("name", "pins"), PINNED)
def test_pinned(name: str, pins: dict[str, Any], judge_of: Callable[[str], Any]) -> None:
    judge_of(f"{MODELS}:{name}").pinned(**pins)


class Wide(nn.Module):
    """A vocabulary that no number of ranks divides."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.emb(ids)).flatten(0, 1), labels.flatten())


def wide(vocabulary: int = 50257, width: int = 768) -> Capture:
    with torch.device("meta"):
        model, ids = Wide(vocabulary, width), torch.zeros(2, 64, dtype=torch.long)
    return capture(model, (ids, ids), {}, check=False, global_batch=2)


def planned(captured: Capture, pins: dict[str, Any], cluster: Cluster) -> tuple[Planned, Lowerable]:
    made = plan_training(captured, Pins.parse(pins), cluster, {})
    return made, apply(loads(made.plan.dumps()), made.prepared)


def test_a_wide_vocabulary_is_cut_unevenly_where_that_pays() -> None:
    made, lowerable = planned(wide(width=100), {}, figures("h100", 2))
    assert "aten.linear.default" in {str(n.target) for n in uneven(lowerable)}
    head = made.plan.parameters["head.weight"]
    assert (head.shape, head.rest, head.use) == ((50257, 100), "S0", "S0")


def test_a_pinned_axis_takes_half_of_it_off_each_rank() -> None:
    made, _ = planned(wide(), {"tp": 2}, figures("h100", 2))
    assert divided(made.plan, made.prepared)["tp"].flops == pytest.approx(1 / 2, abs=1e-4)


def test_five_heads_over_two_ranks_are_three_and_two(judge_of: Callable[[str], Any]) -> None:
    captured = judge_of(f"{MODELS}:gpt").captured
    made, lowerable = planned(captured, {"tp": 2}, Cluster.local(ranks=2))
    attention = next(n for n in lowerable.body.graph.nodes if "attention" in str(n.target))
    plan = fact(attention).strategy
    assert plan is not None and plan.results[0] is not None
    heads = [plan.results[0].local_shape(value(attention).shape, lowerable.mesh, (rank,))[1] for rank in (0, 1)]
    assert heads == [3, 2]
    qkv = made.plan.parameters["qkv.weight"]
    assert (qkv.rest, qkv.use) == ("S0", "S0(20+20+20)/5")
    assert divided(made.plan, made.prepared)["tp"].flops == pytest.approx(0.4, abs=0.05)


def test_nothing_rests_in_items(judge_of: Callable[[str], Any]) -> None:
    """A checkpoint could not say so; what a rank holds of five heads at rest is half of the rows."""
    captured = judge_of(f"{MODELS}:gpt").captured
    made, _ = planned(captured, {"tp": 2}, Cluster.local(ranks=2))
    out = made.plan.parameters["out.weight"]
    assert (out.rest, out.use) == ("S1", "S1/5")
    for word, why in (("S1/5", "rests in parts or items"), ("S1/7", "20 elements are not 7 equal items")):
        wrong = replace(made.plan, parameters={**made.plan.parameters, "out.weight": replace(out, rest=word)})
        with pytest.raises(AutoparError, match=why):
            apply(loads(wrong.dumps()), made.prepared)
