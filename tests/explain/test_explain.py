"""The page: its text, what each section says of a plan, and that a plan alone is enough."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.explain import SECTIONS, Page, Section, explain
from autopar.explain.fold import fold
from autopar.explain.layouts import OPS, in_and_out
from autopar.explain.page import SCREEN
from autopar.explain.quantities import bytes_text
from autopar.explain.stages import lanes
from autopar.plan import (
    Alternative,
    Collective,
    ModelId,
    Op,
    Parameter,
    Plan,
    PlanAxis,
    Predicted,
    Proof,
    Schedule,
    Stage,
    StageFigures,
    loads,
)

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(("name", "width"), [("pinned", 160), ("llama", 160), ("llama", 100)])
def test_text(name, width, request):
    """``EXPECTTEST_ACCEPT=1`` writes the golden pages."""
    found = explain(request.getfixturevalue(name)).text(width) + "\n"
    path = GOLDEN / f"{name}_{width}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path.write_text(found)
    assert found == path.read_text()
    assert max(map(len, found.splitlines())) <= width


def test_no_section_of_a_llama_is_longer_than_a_screen(llama):
    page = explain(llama)
    assert max(len(section.rows) for section in page.sections) <= SCREEN
    for block in page.text(100).split("\n\n"):
        assert len(block.splitlines()) <= 30, block


def test_a_long_section_is_cut_on_the_page_and_whole_in_json():
    page = Page("", (Section("Many", tuple((f"row {i}", "x") for i in range(SCREEN + 2))),))
    text = page.text()
    assert f"row {SCREEN - 1} " in text and f"row {SCREEN} " not in text
    assert "and 2 more rows (--json has all)" in text
    assert len(page.to_json()["sections"][0]["rows"]) == SCREEN + 2


@pytest.mark.parametrize("name", ["pinned", "llama"])
def test_a_plan_alone_is_enough(name, request):
    plan = request.getfixturevalue(name)
    assert explain(loads(plan.dumps())).to_json() == explain(plan).to_json()


def test_json(llama):
    found = json.loads(json.dumps(explain(llama).to_json()))
    assert list(found) == ["plan", "fits", "mesh", "microbatches", "predicted", "proof", "sections"]
    assert found["fits"] is True and found["mesh"] == {"dp_shard": 8, "tp": 8} and found["microbatches"] == 2
    assert found["predicted"]["step_time_s"] == 7.604 and found["predicted"]["parts"]["compute_s"] == 6.4
    assert set(found["proof"]) == {"objective", "bound", "gap", "scope"}
    assert [set(s) for s in found["sections"]] == [{"title", "rows", "columns", "note"}] * len(found["sections"])


def _section(plan, title):
    return next(s for s in explain(plan).sections if s.title == title)


def _value(plan, title, name):
    return next(row[1] for row in _section(plan, title).rows if row[0] == name)


def test_verdict_of_a_plan_that_does_not_fit(llama):
    parts = {**llama.predicted.parts, "memory_limit_bytes": 50.0 * 2**30}
    alternatives = (Alternative("nearest", "nodes=16", {}, 4.0, 45.0), *llama.alternatives)
    plan = replace(llama, predicted=replace(llama.predicted, parts=parts), alternatives=alternatives)
    assert explain(plan).fits is False
    assert _value(plan, "Plan", "fits").startswith(
        "NO: 59.5 GiB of 50.0 GiB a rank (saved activations 50.0 GiB, working"
    )
    assert _value(plan, "Plan", "binds") == "memory: 9.5 GiB too much"
    assert ("MISSING", "9.5 GiB", "", "") in _section(plan, "Memory of a rank").rows
    assert _section(plan, "Nearest changes that fit").rows == (
        ("nodes=16", "4.00 s", "-47.4 %", "45.0 GiB", "yes", ""),
    )
    assert explain(plan).sections[1].title == "Nearest changes that fit"


def test_mfu_can_be_checked_from_its_line(llama):
    line = _value(llama, "Plan", "MFU")
    percent, formula = line.split(" = ")
    numbers = formula.replace("model FLOPs", "").replace("ranks", "").replace("FLOP/s", "").replace(" s ", " ")
    assert 100 * eval(numbers.replace("x", "*")) == pytest.approx(float(percent.rstrip(" %")), abs=0.05)


def test_what_is_made_again_has_a_section_seconds_and_no_part_in_the_mfu(llama):
    classes = (*llama.classes, replace(llama.classes[0], recompute="full"))
    units = tuple(replace(u, kind=len(llama.classes)) if u.fqn.endswith(".0") else u for u in llama.units)
    parts = llama.predicted.parts
    again = {"again_compute_s": 0.25, "again_exposed_s": 0.125, "again_flops": 0.5 * parts["model_flops"]}
    plan = replace(llama, classes=classes, units=units, predicted=replace(llama.predicted, parts={**parts, **again}))
    assert explain(llama).to_json()["sections"] == explain(replace(llama, classes=classes)).to_json()["sections"]
    page = explain(plan).text(160)
    assert "recompute=mixed" in page and "Made again in backward" in page
    assert "model.layers.0 " in page and "what the unit reads of others" in page and "all that backward reads" in page
    assert "250 ms" in page and "125 ms" in page
    rows = dict(explain(plan).sections[0].rows)
    before = dict(explain(llama).sections[0].rows)["MFU"]
    assert rows["MFU"].startswith(before) and "of the hardware with what is made again" in rows["MFU"]
    share = float(before.split(" %")[0])
    assert float(rows["MFU"].split("; ")[1].split(" %")[0]) == pytest.approx(1.5 * share, abs=0.06)


def test_tokens_where_they_are_known(llama):
    parts = {**llama.predicted.parts, "tokens": 512 * 8192.0}
    plan = replace(llama, predicted=replace(llama.predicted, parts=parts))
    assert _value(plan, "Plan", "step") == "7.60 s, 552,000 tokens/s"


def test_communication_that_outlasts_compute(llama):
    parts = {**llama.predicted.parts, "hidden_s": 8.404}
    plan = replace(llama, predicted=replace(llama.predicted, parts=parts, step_time_s=9.604))
    assert _value(plan, "Time of a step", "not hidden") == "2.00 s"
    assert _value(plan, "Plan", "binds").startswith("communication of parameters and gradients, 87.5 %")


def test_collectives_take_their_seconds_from_the_wire_where_none_are_predicted(llama):
    rows = _section(llama, "Collectives a step").rows
    assert [row[6:] for row in rows] == [("100 ms", "hidden"), ("169 ms", "exposed")]
    assert rows[0][1:3] == ("dp_shard", "network (8)")


def test_what_is_predicted_and_proved(pinned):
    plan = replace(pinned, predicted=Predicted(0.125, 70.25), proof=Proof(1.0, 0.995, 0.005), deterministic=False)
    text = explain(replace(plan, model=replace(plan.model, checked=False))).text()
    for words in ("125 ms", "70.2 GiB a rank", "0.5 %: no plan in scope takes less than 995 ms", "unchecked"):
        assert words in text
    assert "time limit" in text and "not proved" not in text and "not predicted" not in text


def test_assumed_figures_are_named_by_the_cluster(llama):
    named = _value(llama, "Not vouched for", "assumed figures")
    assert "network latency (all)" in named and "network bandwidth (all_gather, reduce_scatter)" in named
    other = replace(llama, cluster=replace(llama.cluster, name="mine"))
    assert _value(other, "Not vouched for", "assumed figures") == "those that the file of mine marks verified=false"


def test_scope_that_is_not_known_yet_is_shown_as_it_is(llama):
    scope = {"new key": {"b": 1, "a": [2]}, "pruned": [{"by": "luck"}], "multipliers": {"secret": 1}}
    plan = replace(llama, proof=replace(llama.proof, scope=scope))
    rows = dict(_section(plan, "Proof").rows)
    assert rows["new key"] == '{"a": [2], "b": 1}' and rows["by luck"] == "1" and "multipliers" not in rows


def test_names_are_text_not_markup(pinned):
    plan = replace(pinned, parameters={"[bold]w[/bold]": Parameter((2,), "I I", "R I")})
    assert "[bold]w[/bold]" in explain(plan).text()


def test_the_smallest_plan_has_a_page():
    page = explain(
        Plan(ModelId("sha256:0"), predicted=Predicted(1.0, 1.0, collectives=(Collective("send", "x", 1, 1),)))
    )
    assert page.fits is None and "not known: 1.0 GiB a rank" in page.text()
    assert len(SECTIONS) >= len(page.sections)


AXES = (PlanAxis("a", 2, "host", 2), PlanAxis("b", 2, "host", 1), PlanAxis("time", 2, "time", 0))


@pytest.mark.parametrize(
    ("op", "choices", "order", "expected"),
    [
        ("aten.linear.default", ("factor:i", "factor:o", "factor:b0"), (2, 0, 1), ("S-1 R", "P S-1")),
        ("aten.linear.default", ("linear:0", "linear:1", "R"), (), ("P R", "P P")),
        ("aten.linear.default", ("factor:o(4+2)", "factor:o(4+2)", "R"), (1, 0, 2), ("R R", "S-1(4+2)@1 S-1(4+2)@0")),
        ("aten.linear.default", ("factor:b0", "factor:b0", "factor:b0"), (2, 0, 1), ("S0 S0", "S0 S0")),
        ("aten.bmm.default", ("factor:b0", "factor:k", "R"), (), ("S0 S-1", "S0 P")),
        ("aten.embedding.default", ("factor:a0", "special:vocabulary", "R"), (), ("S0 R", "S0 P")),
        ("autopar.cross_entropy_sum.default", ("factor:a0", "special:vocabulary", "R"), (), ("S0 S-1", "P I")),
        ("aten.scaled_dot_product_attention.default", ("factor:b0", "special:grouped-heads", "R"), (), ("S0 S-3",) * 2),
        ("aten.conv2d.default", ("factor:n", "factor:o", "R"), (), ("S0 R", "S0 S1")),
        ("aten.layer_norm.default", ("factor:d0", "factor:d1", "R"), (), ("S0 S1", "S0 S1")),
        ("aten.linear.default", ("factor:z", "R", "R"), (), None),
    ],
)  # fmt: skip
def test_layouts_of_ops(op, choices, order, expected):
    plan = Plan(ModelId("x"), axes=AXES)
    assert in_and_out(plan, Op(0, op, "fc", choices, order)) == expected


def test_layouts_are_those_of_the_rules():
    """What the page derives from a choice is the layout that the rule gives the op."""
    import torch
    from torch import nn

    from autopar.build import prepare
    from autopar.capture import capture
    from autopar.explain.whole import short
    from autopar.models import gpt2, llama, resnet
    from autopar.passes.completion import is_op
    from autopar.passes.layout import Axis, Mesh
    from autopar.passes.strategy import choices, strategy
    from autopar.plan import choice_to_text

    mesh = Mesh((Axis("a", 2), Axis("b", 2)))
    plan, seen = Plan(ModelId("x"), axes=AXES[:2]), set()
    for module in (llama, gpt2, resnet):
        model, args, kwargs = module.make()
        assert isinstance(model, nn.Module) and torch.is_grad_enabled()
        for node in prepare(capture(model, args, kwargs, check=False), 1).body.graph.nodes:
            if not is_op(node) or short(str(node.target)) not in OPS:
                continue
            for a in choices(node, mesh, 0):
                for b in choices(node, mesh, 1):
                    found = strategy(node, mesh, (a, b), (0, 1))
                    if found is None or found.results[0] is None:
                        continue
                    op = Op(0, str(node.target), "", (choice_to_text(a), choice_to_text(b)), (0, 1))
                    ranks = len(found.operands[0].dims), len(found.results[0].dims)
                    shown = in_and_out(plan, op)
                    assert shown is not None, op
                    at = 1 if short(op.op) == "embedding" else 0
                    actual = str(found.operands[at]), str(found.results[0])
                    assert tuple(_from_the_front(t, n) for t, n in zip(shown, ranks, strict=True)) == actual or at, op
                    seen.add(short(op.op))
    assert {"linear", "scaled_dot_product_attention", "embedding", "cross_entropy_sum", "rsqrt", "conv2d"} <= seen


def _from_the_front(layout, ndim):
    words = []
    for word in layout.split():
        if word.startswith("S-"):
            dim, rest = word[2], word[3:]
            word = f"S{ndim - int(dim)}{rest}"
        words.append(word)
    return " ".join(words)


@pytest.mark.parametrize(
    ("fqns", "text"),
    [
        (["h.0.w", "h.1.w", "h.2.w"], "h.{0-2}.w"),
        (["h.0.w", "h.2.w", "h.3.w", "h.10.w"], "h.{0,2-3,10}.w"),
        (["s.0.b.0.w", "s.0.b.1.w", "s.1.b.0.w", "s.1.b.1.w"], "s.{0-1}.b.{0-1}.w"),
        (["s.0.b.0.w", "s.1.b.1.w"], "s.0.b.0.w, s.1.b.1.w"),
        (["h.0.ln", "norm", "h.1.ln"], "h.{0-1}.ln, norm"),
        (["w"], "w"),
    ],
)
def test_fold(fqns, text):
    assert fold(fqns) == text


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 41, "6.0 TiB")]
)
def test_bytes(n, text):
    assert bytes_text(n) == text


def test_formulas_are_those_that_price():
    from autopar.explain.formulas import formulas
    from autopar.solver import cost

    rows = dict(formulas(Plan(ModelId("x"), predicted=Predicted(1.0))).rows)
    values = {"B": 1e9, "L": 2e-5, "W": 350e9, "n": 8}
    found = eval(rows["all_reduce"].removesuffix(" s"), {}, values)
    assert found == pytest.approx(cost.collective("all_reduce", 8, 1e9, 2e-5, 350e9))
    found = eval(
        rows["step"].removesuffix(" s"), {"Max": max}, {"exposed": 1, "hidden": 2, "compute": 3, "optimizer": 1}
    )
    assert found == cost.step_time(4, 1, 2)


def _staged(llama, **schedule):
    owners = {"parameters": 2.0**30, "saved": 2.0**31, "inputs": 8.0}
    figures = [
        StageFigures(0.01 * (s + 1), 0.02 * (s + 1), 2_000_000_000, 2 - s, 1 << 20, 1 << 20, 3.0 * 2**30, owners)
        for s in (0, 1)
    ]
    parts = {"compute_s": 6.0, "exposed_s": 0.5, "waits_s": 0.1, "send_s": 0.2, "bubble_s": 0.8, "optimizer_s": 0.004}
    parts["hidden_s"] = 9.0
    return replace(
        llama,
        cluster=replace(llama.cluster, nodes=16),
        mesh={"pp": 2, **llama.mesh},
        stages=(Stage(0, 16), Stage(16, 33)),
        schedule=Schedule("1f1b", tier="network"),
        predicted=replace(
            llama.predicted,
            parts=llama.predicted.parts | parts,
            stages=tuple(figures),
            collectives=(Collective("send", "pp", 2, 1 << 20, "forward", 0.1, True),),
        ),
        **schedule,
    )


def test_stages_of_a_pipeline(llama):
    page = explain(loads(_staged(llama).dumps()))
    found = {section.title: section for section in page.sections}
    first, last = found["Stages of the pipeline"].rows
    assert first[:3] == ("0", "0-63", "model.layers.{0-15}") and last[:3] == (
        "1",
        "64-127",
        "model.layers.{16-31}, lm_head",
    )
    figures = (
        "2e+09",
        "10.0 ms",
        "20.0 ms",
        "99.2 %",
        "2 microbatches",
        "1.0 MiB",
        "3.0 GiB",
        "saved activations 2.0 GiB, parameters 1.0 GiB",
    )
    assert first[3:] == figures and last[8] == ""
    assert "the longest takes 1.33 times the mean" in found["Stages of the pipeline"].note
    assert found["Schedule"].rows == (("rank 0", "stage 0", "ab..AA.BB"), ("rank 1", "stage 1", ".aAAbBB.."))
    assert found["Time of a step"].rows[5][:3] == ("bubble", "800 ms", "10.5 %")
    assert found["Collectives a step"].rows[0][:3] == ("send", "pp", "network (2)")
    assert (
        found["Plan"].rows[0][1].startswith("pp=2 a0=8 a1=8")
        and ("mesh", "pp 2 x dp_shard 8 x tp 8") in found["Plan"].rows
    )
    assert dict(found["How it is computed"].rows)["step"].startswith("the schedule, simulated")
    assert not {"Stages of the pipeline", "Schedule"} & {section.title for section in explain(llama).sections}


def test_large_schedules_are_not_drawn(llama):
    plan = replace(_staged(llama), microbatches=17)
    assert "Schedule" not in {section.title for section in explain(plan).sections}
    drawn = lanes(replace(_staged(llama), schedule=Schedule("zero_bubble"), microbatches=3))
    assert drawn == ["ab.A*cB*C*", ".aAbB*cC**"]
