"""The page: repeated layers folded, units, and the text itself."""

from dataclasses import replace

import pytest

from autopar.explain import _fold, bytes_text, explain
from autopar.plan import (
    ClusterId,
    Collective,
    ModelId,
    Op,
    Padding,
    Parameter,
    Plan,
    PlanAxis,
    PlanClass,
    Predicted,
    Proof,
    Share,
    Whole,
)


def _plan():
    column = Parameter((16, 8), "S0 S0", "R S0", "use", "microbatch")
    norm = Parameter((8,), "S0 I", "R I", "use", "microbatch")
    layers = {f"h.{i}.{name}": p for i in range(12) for name, p in (("fc.weight", column), ("ln.weight", norm))}
    ops = tuple(
        Op(2 * i + j, f"aten.{op}.default", f"h.{i}.{name}", ("factor:b", choice))
        for i in range(12)
        for j, (op, name, choice) in enumerate((("linear", "fc", "I"), ("layer_norm", "ln", "I")))
    )
    return Plan(
        ModelId("sha256:0123456789abcdef", "GPT", checked=True),
        ClusterId(ranks_per_node=4),
        axes=(PlanAxis("dp", 2, "host", 2, ("dp_shard",)), PlanAxis("tp", 2, "host", 1, ("tp",))),
        mesh={"dp_shard": 2, "tp": 2},
        classes=(PlanClass("", ops),),
        batch=8,
        parameters=layers | {"head.weight": replace(column, trainable=False, reduce="never", dtype="bf16")},
        padding=(Padding("wte.weight", 0, 65, 66),),
        predicted=Predicted(
            collectives=(
                Collective("all_reduce", "tp", 24, 3 << 20, "forward"),
                Collective("all_gather", "dp", 25, 1 << 20),
            ),
            divided={"tp": Share(0.49, 0.48)},
            whole=tuple(Whole("tp", f"h.{i}.fc", "aten.linear.default", "9 does not divide") for i in range(12)),
            fallback=("aten.cumsum.default",),
        ),
        relaxations={"dropout": "per-rank"},
        pins={"tp": "2", "zero": "3"},
    )


def test_text():
    expected = """\
Plan
plan                 dp=2 tp=2 zero=3 on 4 ranks
cluster              local, 1 node of 4 cpu ranks
mesh                 dp_shard 2 x tp 2
global batch         8 rows in 1 microbatch
pinned               tp=2 zero=3
model                GPT sha256:0123456789ab
captured gradients   checked against eager

Parameters
name                 shape   rests   used   gathered      gradient reduced   dtype
h.{0-11}.fc.weight   16x8    S0 S0   R S0   at each use   each microbatch    fp32
h.{0-11}.ln.weight   8       S0 I    R I    at each use   each microbatch    fp32
head.weight          16x8    S0 S0   R S0   at each use   frozen             bf16, frozen
Layouts: a word an axis (dp tp). S<dim> shard, R replicated, I invariant, P partial.

Share that each axis takes off the busiest rank
axis   FLOPs   parameter bytes   saved bytes   ideal
tp     0.490   0.480                           0.500

What stays whole
axis   module      ops                       why
tp     h.{0-11}.fc linear                    9 does not divide
tp     h.{0-11}.ln layer_norm                no matmul, attention or convolution: every rank does it

Collectives a step
kind         axis   phase     count   bytes
all_reduce   tp     forward   24      3.0 MiB
all_gather   dp               25      1.0 MiB
In all 4.0 MiB a rank.

Not vouched for
relaxed                dropout=per-rank
padded                 wte.weight dim 0: 65 as 66
no rule, runs whole    aten.cumsum.default
not predicted          time and memory (the plan was pinned, not solved)
not proved             no bound: other plans may be better"""
    found = explain(_plan()).text()
    assert [" ".join(line.split()) for line in found.splitlines()] == [
        " ".join(line.split()) for line in expected.splitlines()
    ]


def test_a_plan_alone_is_enough():
    plan = _plan()
    from autopar.plan import loads

    assert explain(loads(plan.dumps())).to_json() == explain(plan).to_json()


def test_what_is_predicted_and_proved():
    plan = replace(_plan(), predicted=Predicted(0.125, 70.25), proof=Proof(1.0, 0.995, 0.005), deterministic=False)
    text = explain(replace(plan, model=replace(plan.model, checked=False))).text()
    for words in ("0.125 s", "70.2 GiB a rank", "0.5 % of the optimum", "unchecked", "time limit"):
        assert words in text
    assert "not proved" not in text and "not predicted" not in text


def test_names_are_text_not_markup():
    plan = replace(_plan(), parameters={"[bold]w[/bold]": Parameter((2,), "I I", "R I")})
    assert "[bold]w[/bold]" in explain(plan).text()


@pytest.mark.parametrize(
    ("fqns", "text"),
    [
        (["h.0.w", "h.1.w", "h.2.w"], "h.{0-2}.w"),
        (["h.0.w", "h.2.w", "h.3.w", "h.10.w"], "h.{0,2-3,10}.w"),
        (["s.0.b.0.w", "s.0.b.1.w", "s.1.b.0.w", "s.1.b.1.w"], "s.{0-1}.b.{0-1}.w"),
        (["s.0.b.0.w", "s.1.b.1.w"], "s.0.b.0.w, s.1.b.1.w"),
        (["w"], "w"),
    ],
)
def test_fold(fqns, text):
    assert _fold(fqns) == text


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 41, "6.0 TiB")]
)
def test_bytes(n, text):
    assert bytes_text(n) == text
