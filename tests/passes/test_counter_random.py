"""Random ops become ops that count: they draw from torch's distributions, attention and recurrent layers compute what
torch's do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.errors import AutoparError
from autopar.evaluate import run_graph
from autopar.passes import PREPARE, run
from autopar.passes.counter_random import counter_random, is_random
from autopar.passes.spec import check
from autopar.runtime.counter_random import draws

ops = torch.ops.autopar
N = 20_000
X = torch.linspace(-1, 1, N).view(N // 10, 10)
P = X.abs()
WEIGHTS = torch.tensor([0.1, 0.0, 0.4, 0.3, 0.2]).repeat(2000, 1)


class Of(nn.Module):
    """A module of a function."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Tensor) -> Any:
        return self.body(*args)


class Block(nn.Module):
    """Dropout in both forms, attention with dropout and grouped heads, and a path that is dropped by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 3, 4, 4).transpose(1, 2).split([2, 1, 1], 1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True, enable_gqa=True)
        y = F.dropout(F.dropout(y.transpose(1, 2).flatten(2).relu(), 0.2), 0.3, inplace=True)
        return (y * x.new_empty((2, 1, 1)).bernoulli_(0.9).div_(0.9)).sum()


def test_text_and_spec(tools: Any) -> None:
    gm = tools.export(Block(), (torch.randn(2, 3, 8),))
    after = tools.golden(counter_random, "counter_random", gm)
    check(after, "counter_random")
    assert [n.kwargs["draw"] for n in after.graph.nodes if draws(n.target)] == [0, 1, 2, 3]
    for name in PREPARE[1:]:
        check(run(after, (name,)), name)


def drawn(tools: Any, body: Callable[..., Any], *args: Tensor, key: int = 1) -> Any:
    """What a function gives with its random ops replaced."""
    return drawing(tools, body, *args)(key)


def drawing(tools: Any, body: Callable[..., Any], *args: Tensor) -> Callable[[int], Any]:
    """The same by key."""
    gm = counter_random(tools.export(Of(body), args))
    assert not any(is_random(n) for n in gm.graph.nodes)
    return lambda key: run_graph(gm, args, {}, key)["outputs"][0]


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "native dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "feature dropout": lambda x: F.dropout1d(x.view(-1, 2, 5), 0.3),
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x.view(-1, 10, 1), 0.3, True),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.6, True),
    "bernoulli of numbers": lambda x: torch.bernoulli(x.abs()),
    "bernoulli of one number": lambda x: x.new_empty(x.shape).bernoulli_(0.7),
    "bernoulli in place of numbers": lambda x: torch.empty_like(x).bernoulli_(x.abs()),
    "rand": lambda x: torch.rand(2000, 10),
    "rand_like": lambda x: torch.rand_like(x) * x,
    "rand of bfloat16": lambda x: torch.rand_like(x, dtype=torch.bfloat16).float(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-2, 3),
    "randn": lambda x: torch.randn(2000, 10),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "normal": lambda x: torch.normal(x, 0.5),
    "normal of two tensors": lambda x: torch.normal(x, x.abs()),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.1, 0.5),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(1.0, 0.5).clamp(-20, 20),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, 0.7),
    "randint": lambda x: torch.randint(3, 9, (2000, 10)).float(),
    "randint_like": lambda x: torch.randint_like(x, 7),
    "random_": lambda x: torch.empty_like(x).random_(6),
    "randperm": lambda x: torch.stack([torch.randperm(5)[0] for _ in range(20)]).float(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_draws_from_the_same_distribution(tools: Any, name: str) -> None:
    """The largest distance of two samples' distributions, in standard deviations (Kolmogorov and Smirnov)."""
    body = FUNCTIONS[name]
    torch.manual_seed(0)
    keys = range(1 if name != "randperm" else 40)
    draw = drawing(tools, body, X)
    found = torch.cat([draw(key).flatten() for key in keys])
    wanted = torch.cat([body(X).flatten() for _ in keys])
    assert found.dtype == wanted.dtype and found.shape == wanted.shape and found.isfinite().all()
    samples = [s.double().round(decimals=5).sort().values for s in (found, wanted)]
    every = torch.cat(samples).unique()
    apart = [torch.searchsorted(s, every, right=True).double() / len(s) for s in samples]
    assert float((apart[0] - apart[1]).abs().max()) * math.sqrt(len(found) / 2) < 2.2
    if found.numel() > 1000 and name != "dropout of all":
        assert not torch.equal(found, draw(2).flatten())


def test_rows_are_dropped_whole(tools: Any) -> None:
    made = drawn(tools, lambda x: F.dropout1d(x.view(-1, 2, 5), 0.3), torch.ones(N))
    assert ((made == 0).all(-1) | (made == 1 / 0.7).all(-1)).all()


@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial(tools: Any, replacement: bool) -> None:
    made = drawn(tools, lambda w: torch.multinomial(w, 3, replacement), WEIGHTS)
    first = torch.bincount(made[:, 0], minlength=5) / len(made)
    assert (made != 1).all() and float((first - WEIGHTS[0]).abs().max()) < 0.04
    assert replacement or all(len(set(row)) == 3 for row in made.tolist())
    assert not replacement or float((made[:, 0] == made[:, 1]).double().mean()) == pytest.approx(0.3, abs=0.04)


def test_a_permutation_is_one(tools: Any) -> None:
    made = drawn(tools, lambda x: x[torch.randperm(100)], torch.arange(100))
    assert sorted(made.tolist()) == list(range(100)) and made.tolist() != list(range(100))


# -- what is taken apart ---------------------------------------------------------------------------------------------


def without_dropout(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with dropout that drops nothing."""
    for node in gm.graph.nodes:
        if node.target is ops.dropout.default:
            node.args = (node.args[0], 0.0)
    gm.recompile()
    return gm


MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "causal": lambda: {"is_causal": True},
    "booleans": lambda: {"attn_mask": torch.ones(5, 7).tril().bool()},
    "rows that see nothing": lambda: {"attn_mask": torch.ones(5, 7).tril(-2).bool()},
    "numbers": lambda: {"attn_mask": torch.linspace(-3, 3, 4 * 35).view(1, 4, 5, 7)},
    "scale": lambda: {"scale": 0.3},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_is_torchs(tools: Any, mask: str, heads: int) -> None:
    q, k, v = torch.randn(2, 4, 5, 6), torch.randn(2, heads, 7, 6), torch.randn(2, heads, 7, 8)
    given = {"enable_gqa": heads != 4} | MASKS[mask]()
    named = {n: t for n, t in given.items() if isinstance(t, Tensor)}
    plain = {n: t for n, t in given.items() if n not in named}
    body = lambda q, k, v, **masks: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, **plain, **masks)

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
            return body(q, k, v, **({} if attn_mask is None else {"attn_mask": attn_mask}))

    args = (q, k, v, *named.values())
    gm = without_dropout(counter_random(tools.export(Attention(), args)))
    (made,) = run_graph(gm, args, {})["outputs"]
    torch.testing.assert_close(made, F.scaled_dot_product_attention(q, k, v, **given), equal_nan=True)


def test_layers_share_a_causal_mask(tools: Any) -> None:
    def body(q: Tensor) -> Tensor:
        for _ in range(3):
            q = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True)
        return q.sum()

    gm = counter_random(tools.export(Of(body), (torch.randn(2, 4, 5, 6),)))
    assert [str(n.target) for n in gm.graph.nodes].count("aten.ge.Tensor") == 1


@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "batch_first": True}, {"bias": False}], ids=str)
def test_recurrent_layers_are_torchs(tools: Any, kind: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layers = kind(4, 5, num_layers=3, dropout=0.4, **options)
    x = torch.randn(6, 6, 4)
    gm = counter_random(tools.export(layers, (x,)))
    assert sum(n.target is ops.dropout.default for n in gm.graph.nodes) == 2
    attributes = {n: gm.get_parameter(n) for n, _ in gm.named_parameters()}
    attributes |= {n.target: getattr(gm, n.target) for n in gm.graph.find_nodes(op="get_attr") if "." not in n.target}
    made = run_graph(without_dropout(gm), (x,), attributes)["outputs"]
    y, state = layers.eval()(x)
    wanted = (y, *(state if isinstance(state, tuple) else (state,)))
    torch.testing.assert_close(made, wanted)


# -- what is left and what is refused --------------------------------------------------------------------------------


def test_ops_that_draw_nothing_stay(tools: Any) -> None:
    body = lambda x: F.rrelu(F.dropout(F.dropout(x, 0.0), 0.5, False)).sum()
    gm = tools.export(Of(body), (X,))
    before = [str(n.target) for n in gm.graph.nodes]
    assert [str(n.target) for n in counter_random(gm).graph.nodes] == before


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            lambda x: torch.poisson(x.abs()),
            "test_counter_random.py:.* aten.poisson.default draws random numbers in a way",
        ),
        (lambda x: torch.empty_like(x).random_(), "without bounds that are numbers. Use torch.randint"),
    ],
)
def test_what_is_not_known_is_refused(tools: Any, body: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(AutoparError, match=words):
        counter_random(tools.export(Of(body), (X,)))
