"""Random numbers are the same for every plan, on real ranks and for public models; and dropout relaxed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stacked_judge import StackedJudge
from torch import Tensor, nn

import autopar
from autopar import Cluster
from autopar.build import apply, choose, prepare
from autopar.capture import capture, run_graph
from autopar.cli import main
from autopar.loading import ModelSpec
from autopar.passes.calls import call_key
from autopar.passes.counter_random import counter_random
from autopar.passes.lower import lower, with_changes
from autopar.passes.split_prologue import copy_graph
from autopar.passes.units import cut_units
from autopar.pins import Pins, resolve
from autopar.runtime.counter_random import draws, random_key, runs_of
from autopar.runtime.pool import RankPool
from autopar.runtime.stacked_step import StackedStep, stacked_step
from autopar.verify import verify_many

ROWS, WIDTH = 12, 8


class Masks(nn.Module):
    """The gradient of ``ones`` is a mask of dropout, that of ``rows`` random numbers, one a row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.ones, self.rows = nn.Parameter(torch.ones(ROWS, WIDTH)), nn.Parameter(torch.ones(()))
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        numbers = (torch.rand_like(x) * self.rows).sum() + (torch.rand(4) * self.rows).sum()
        return F.dropout(self.ones, 0.4).sum() + numbers + F.dropout(self.linear(x), 0.2).sum()


class Attention(nn.Module):
    """Attention with dropout, and dropout."""

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.qkv, self.out, self.p = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), p

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (z.unflatten(-1, (4, 2)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p)
        return F.mse_loss(F.dropout(self.out(z.transpose(1, 2).flatten(2)), self.p), y)


def attention() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    return Attention(), (torch.randn(ROWS, 6, WIDTH), torch.randn(ROWS, 6, WIDTH)), {}


def masks() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Masks(), torch.randn(ROWS, WIDTH)


# -- on ranks --------------------------------------------------------------------------------------------------------

PLANS = ("dp=2", "tp=2", "dp=2 zero=3 microbatches=2", "tp=2 microbatches=3", "")


def steps(rank: int, pins: str, seed: int) -> list[dict[str, Tensor]]:
    """Gradients of three steps, then of the second one again."""
    model, x = masks()
    parallel = autopar.compile(model, Cluster.local(ranks=2), args=(x,), pins=pins, seed=seed)
    made = []
    for step in (0, 1, 2, 1):
        parallel.steps = step
        parallel.zero_grad()
        parallel.step(x)
        assert parallel.steps == step + 1
        made.append({n: p.grad.full_tensor() for n, p in parallel.named_parameters()})  # type: ignore[union-attr]
    return made


def other_seeds(rank: int) -> None:
    model, x = masks()
    parallel = autopar.compile(model, Cluster.local(ranks=2), args=(x,), pins="dp=2", seed=rank)
    with pytest.raises(
        autopar.AutoparError, match="ranks 0 and 1 draw other random numbers. Give compile the same seed"
    ):
        parallel.step(x)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks."""
    made = RankPool(2, timeout=120)
    yield made
    made.close()


def one_process(seed: int, step: int) -> dict[str, Tensor]:
    """Gradients of the captured graph, drawing by the same counter."""
    model, x = masks()
    captured = capture(model, (x,))
    graph = counter_random(copy_graph(captured.graph))
    run_graph(graph, (x,), captured.attributes, random_key(seed, step))["outputs"][0].backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_masks_are_equal_for_every_plan_and_differ_by_step_and_seed(pool: RankPool) -> None:
    expected = [one_process(5, step) for step in (0, 1, 2, 1)]
    for pins in PLANS:
        for every in pool.run(steps, pins, 5):
            torch.testing.assert_close(every, expected)
    kept = [e["ones"] != 0 for e in expected]
    assert torch.equal(kept[1], kept[3])
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(expected[0]["rows"], expected[1]["rows"])
    assert not torch.equal(kept[0], one_process(6, 0)["ones"] != 0)
    assert expected[0]["ones"].unique().tolist() == pytest.approx([0, 1 / 0.6])


def test_ranks_with_other_seeds_are_refused(pool: RankPool) -> None:
    pool.run(other_seeds)


def test_verify_with_dropout() -> None:
    results = verify_many(ModelSpec(f"{__file__}:attention"), 2, [Pins.parse(text) for text in PLANS])
    for text, result in zip(PLANS, results, strict=True):
        assert getattr(result, "ok", None), (text, result)


# -- public models ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}),
        ("BertForMaskedLM", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
        ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "num_layers": 1, "num_heads": 4, "d_ff": 64}),
    ],
)
def test_public_models_with_the_dropout_they_come_with(model: str, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    family = model.removesuffix("LMHeadModel").removesuffix("ForMaskedLM").removesuffix("ForConditionalGeneration")
    common = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**common, **options, use_cache=False)
    ids = torch.randint(3, 64, (8, 12))
    judge = StackedJudge(getattr(transformers, model)(config).train(), (), {"input_ids": ids, "labels": ids.clone()})
    assert sum(draws(n.target) for n in judge.graph.graph.nodes) > 5
    judge.pinned(dp=2, tp=2, microbatches=2)
    judge.random(0)


def test_numbers_of_another_place_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that draw as if their piece were the first."""
    judge = StackedJudge(*attention())
    judge.pinned(dp=2)
    first = lambda piece: tuple(((0, sum(n for _, n in runs)),) for runs in piece)
    monkeypatch.setattr("autopar.passes.make_local.runs_of", lambda pieces: runs_of(list(map(first, pieces))))
    with pytest.raises(AssertionError, match="dp"):
        judge.pinned(dp=2)


def test_equal_layers_stay_one_class() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    captured = capture(model, (torch.randn(4, 6, WIDTH),), loss=lambda out: out.sum())
    body = prepare(captured, 1).body
    found = [n for n in body.graph.nodes if draws(n.target)]
    assert len({n.kwargs["draw"] for n in found}) == len(found) == 16
    assert len({call_key(n) for n in found}) < 6
    units = cut_units(body, frozenset(captured.parameters))
    assert len(units.units) > len(units.first) + 3


# -- relaxed ---------------------------------------------------------------------------------------------------------


def relaxed_step(pins: dict[str, int], model: nn.Module, *args: Tensor, key: int = 1) -> tuple[StackedStep, set[str]]:
    """One step in the stacked semantics, which holds copies of one value against each other; the random ops in it."""
    captured = capture(model, args, dropout="per-rank")
    ranks = pins.get("dp", 1) * pins.get("tp", 1)
    resolved = resolve(Pins.parse(pins), ranks, captured.batch)
    prepared = prepare(captured, resolved.microbatches)
    plan = choose(prepared, resolved, Cluster.local(ranks=ranks))
    assert plan.relaxations == {"dropout": "per-rank"}
    lowerable = with_changes(apply(plan, prepared))
    programs = [lower(lowerable, rank, {a.name: a.name for a in lowerable.mesh.axes}) for rank in range(ranks)]
    names = {str(n.target) for body in programs[0].body.values() for n in body.graph.nodes if draws(n.target)}
    attributes = {n: t.detach() for n, t in captured.attributes.items()}
    return stacked_step(programs, attributes, captured.flatten_inputs(args), key), names


@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2, "zero": 3}, {"dp": 2, "microbatches": 2}])
def test_relaxed_dropout_keeps_the_fused_kernels_and_copies_alike(pins: dict[str, int]) -> None:
    made, names = relaxed_step(pins, *attention()[:1], *attention()[1])
    assert names == {"autopar.seeded_dropout.default", "autopar.seeded_attention.default"}
    assert made.loss.isfinite()


def test_relaxed_dropout_drops_otherwise_on_every_rank_and_microbatch() -> None:
    ids, model, state = torch.arange(ROWS), Rows(), torch.get_rng_state()
    first, again, later = (
        relaxed_step({"dp": 2, "microbatches": 2}, model, ids, key=key)[0].gradients["w"] for key in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state), "torch's own stream goes on where it was"
    assert first is not None and again is not None and later is not None
    assert torch.equal(first, again) and not torch.equal(first, later)
    quarters = first.chunk(4)
    assert all(not torch.equal(a, b) for i, a in enumerate(quarters) for b in quarters[:i])
    assert 0.3 < (first != 0).float().mean() < 0.7


class Rows(nn.Module):
    """The gradient of ``w`` is the mask that the rows of the batch got."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(ROWS, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return F.dropout(F.embedding(ids, self.w), 0.5).sum()


def test_relaxation_is_said_and_refused_beside_another() -> None:
    model, args, _ = attention()
    parallel = autopar.compile(model, Cluster.local(ranks=2), args=args, pins="dp=2", dropout="per-rank")
    assert "dropout=per-rank" in parallel.explain()
    again = autopar.compile(model, args=args, plan=parallel.plan)
    assert again.plan.relaxations == {"dropout": "per-rank"}
    with pytest.raises(autopar.AutoparError, match="the plan has dropout=per-rank, the model was captured with none"):
        autopar.compile(model, args=args, plan=parallel.plan, dropout="exact")
    with pytest.raises(autopar.AutoparError, match="dropout: 'torch' is not known. Legal: 'exact', 'per-rank'"):
        autopar.compile(model, args=args, dropout="torch")


def test_relaxation_by_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", f"{__file__}:attention", "--ranks", "2", "--pin", "dp=2", "--json"]
    assert main([*words, "--dropout", "per-rank"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["relaxations"] == {"dropout": "per-rank"} and plan["rng"]["kind"] == "none"
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["relaxations"] == {} and plan["rng"]["kind"] == "counter"
