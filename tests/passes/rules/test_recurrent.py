"""Recurrent layers and cells, cut along their hidden units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.choosing.plan_training import plan_training
from autopar.cluster import Cluster
from autopar.divided import divided
from autopar.errors import AutoparError
from autopar.loading import ModelSpec
from autopar.passes.divide_work import recurrent_flops
from autopar.passes.rules import recurrent
from autopar.pins import Pins
from autopar.plan import Plan
from autopar.runtime.pool import RankPool
from autopar.verify import VerifyResult, verify_many

MODELS = Path(__file__).parents[2] / "recurrent_models.py"
ALL = ["lstm", "gru", "rnn", "cells"]
PINS = [{"tp": 2}, {"tp": 2, "microbatches": 2}, {"tp": 2, "dp": 2}, {"dp": 2, "zero": 3}, {"tp": 3}]

aten = torch.ops.aten

Judges = Callable[[str], Any]


@pytest.mark.parametrize("op", [aten.lstm_cell.default, aten.gru_cell.default, aten.rnn_relu_cell.default])
def test_cells(op: Any, check: Callable[..., list[str]]) -> None:
    gates = {"lstm_cell": 4, "gru_cell": 3}.get(op.overloadpacket.__name__, 1)
    x, h, *weights = (torch.randn(s) for s in ((6, 3), (6, 5), (5 * gates, 3), (5 * gates, 5)))
    tried = check(op, x, [h, torch.randn(6, 5)] if gates == 4 else h, *weights)
    for strategy in ("factor:b", "special:hidden"):
        assert any(strategy in t for t in tried), f"{strategy} is not among {tried}"


@pytest.mark.parametrize("pins", PINS, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_pinned(name: str, pins: dict[str, int], judge_of: Judges) -> None:
    judge_of(f"{MODELS}:{name}").pinned(**pins)


@pytest.mark.parametrize("name", ALL)
def test_random_layouts(name: str, judge_of: Judges) -> None:
    judge, hidden = judge_of(f"{MODELS}:{name}"), 0
    for seed, axes, microbatches in ((0, (2,), 2), (1, (2, 2), 1), (2, (3, 2), 1)):
        drawn = judge.drawn(seed, axes, microbatches)
        judge.assert_equal(drawn, f"seed {seed}")
        chosen = (n.meta["autopar"].strategy for n in drawn.body.graph.nodes if n.op == "call_function")
        hidden += sum(c.name == "hidden" for s in chosen if s is not None for c in s.choices)
    assert hidden


def plan_of(name: str, pins: dict[str, Any], judge_of: Judges) -> Any:
    captured = judge_of(f"{MODELS}:{name}").captured
    return plan_training(captured, Pins.parse(pins), Cluster.local(ranks=2), {})


@pytest.mark.parametrize(("name", "share"), [("lstm", 0.4), ("gru", 0.5), ("rnn", 0.5)])
def test_work_and_weights_are_divided(name: str, share: float, judge_of: Judges) -> None:
    made = plan_of(name, {"tp": 2}, judge_of)
    found = divided(made.plan, made.prepared)["tp"]
    assert found.flops == pytest.approx(share, abs=0.06)
    assert not made.plan.predicted.whole


@pytest.mark.parametrize(
    ("name", "why"), [("alone", "its 7 steps are more than the 6"), ("projected", "its hidden state is projected")]
)
def test_what_is_not_unrolled_says_why(name: str, why: str, judge_of: Judges, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "MOST_STEPS", 6)
    with pytest.raises(AutoparError, match=rf"tp=2 divides no .*lstm.input\): {why}"):
        plan_of(name, {"tp": 2}, judge_of)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_flops_are_those_of_the_cells(kind: type[nn.RNNBase]) -> None:
    layer = kind(3, 4, 2, bidirectional=True).to("meta")
    x, h = torch.empty(5, 8, 3, device="meta"), torch.empty(4, 8, 4, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x)
    assert recurrent_flops((x, h, list(layer.parameters()))) == counter.get_total_flops() > 0


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2, timeout=240) as pool:
        yield pool


@pytest.mark.parametrize("name", ["gru", "cells"])
def test_real_ranks(name: str, ranks: RankPool) -> None:
    pins: list[Pins | Plan] = [Pins.parse(p) for p in ({}, {"tp": 2, "microbatches": 2})]
    for result in verify_many(ModelSpec(f"{MODELS}:{name}"), 2, pins, pool=ranks):
        assert isinstance(result, VerifyResult) and result.ok, result
