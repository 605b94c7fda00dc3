"""plan.json: round trips, byte-stable text, and errors by JSON path."""

import json
from dataclasses import replace

import pytest

from autopar.check_plan import WIRES
from autopar.errors import AutoparError
from autopar.plan import (
    SCHEMA,
    Alternative,
    ClusterId,
    Collective,
    Extra,
    ModelId,
    Op,
    Padding,
    Parameter,
    Plan,
    PlanAxis,
    PlanClass,
    Predicted,
    Proof,
    Schedule,
    Share,
    Stage,
    Unit,
    Whole,
    choice_from_text,
    choice_to_text,
    from_json,
    loads,
)

KEYS = [
    "schema",
    "model",
    "cluster",
    "axes",
    "mesh",
    "units",
    "classes",
    "stages",
    "microbatches",
    "schedule",
    "parameters",
    "relaxations",
    "padding",
    "rng",
    "predicted",
    "proof",
    "deterministic",
]


def _plan():
    return Plan(
        model=ModelId("sha256:ab", "GPT", checked=True),
        cluster=ClusterId(ranks_per_node=4),
        axes=(
            PlanAxis("dp", 2, "host", 2, ("dp_shard",), dict.fromkeys(WIRES, (1e-5, 2.5e-10))),
            PlanAxis("tp", 2, "host", 1, ("tp",)),
            PlanAxis("microbatch", 3, "time", 0),
        ),
        mesh={"dp_shard": 2, "tp": 2},
        units=(Unit("h.0", 0), Unit("h.1", 0)),
        classes=(
            PlanClass(
                "h.0",
                (
                    Op(0, "aten.linear.default", "h.0.fc", ("factor:b", "factor:o(8+4+4)", "factor:b"), (2, 0, 1)),
                    Op(1, "aten.add.Tensor", "h.0", ("I", "linear:0", "R")),
                ),
                (Extra(0, "S0 R R"),),
            ),
        ),
        stages=(Stage(0, 2),),
        microbatches=3,
        batch=14,
        inputs={"ids": "S0 R S0"},
        parameters={
            "h.0.fc.weight": Parameter((16, 8), "S0 S0(8+4+4)@1 R", "R S0(8+4+4) R", "use", "microbatch"),
            "h.0.fc.scale": Parameter((), "I I R", "R I R", "never", "step", aliases=("scale",)),
        },
        padding=(Padding("wte.weight", 0, 65, 66),),
        predicted=Predicted(
            step_time_s=0.1,
            collectives=(Collective("all_reduce", "tp", 4, 4096, "forward"),),
            divided={"tp": Share(0.5, 0.5, None)},
            whole=(Whole("tp", "h.0.ln", "aten.layer_norm.default", "its factors are all on dims that norm whole"),),
        ),
        proof=Proof(1.5, 1.25, 0.25, {"axes": 2, "pruned": [{"mesh": [[4, 1]], "bound": 2.5}]}),
        alternatives=(Alternative("next", "tp=4", {"tp": "4"}, 0.2, 1.5, why="slower"),),
        pins={"tp": "2"},
        timings={"capture": 1.25},
    )


def _pipelined(name="1f1b", virtual=1, words=()):
    plan, stages = _plan(), 2 * virtual
    return replace(
        plan,
        cluster=replace(plan.cluster, nodes=2),
        mesh={"pp": 2, **plan.mesh},
        units=tuple(Unit(f"h.{i}", 0) for i in range(stages)),
        stages=tuple(Stage(i, i + 1) for i in range(stages)),
        schedule=Schedule(name, virtual, words, "network"),
        predicted=replace(plan.predicted, collectives=(Collective("send", "pp", 3, 4096, "forward"),)),
    )


def test_round_trip_and_bytes(tmp_path):
    plan = _plan()
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.dumps() == plan.dumps() == (tmp_path / "plan.json").read_text()
    assert replace(plan, timings={"capture": 9.0}).dumps() == plan.dumps()
    shuffled = json.dumps(dict(reversed(json.loads(plan.dumps()).items())))
    assert loads(shuffled).dumps() == plan.dumps()


def test_schema_is_wide_enough_from_the_start():
    assert set(KEYS) <= set(_plan().to_json())
    assert "timings" not in _plan().to_json() and _plan().to_json(timings=True)["timings"] == {"capture": 1.25}
    assert from_json(_plan().to_json(timings=True)).timings == {"capture": 1.25}


def test_the_word_of_recomputation_is_that_of_all_units():
    def of(*words):
        classes = tuple(PlanClass(f"h.{i}", recompute=word) for i, word in enumerate(words))
        return replace(_plan(), classes=classes, units=tuple(Unit(c.fqn, i) for i, c in enumerate(classes)))

    assert [of(*w).recompute for w in (("none",), ("full", "full"), ("none", "selective"))] == ["none", "full", "mixed"]
    assert Plan(ModelId("sha256:0")).recompute == "none" and "recompute" not in of("none").one_line()
    assert of("full", "none").one_line().endswith("recompute=mixed on 4 ranks")
    again = loads(of("selective", "none").dumps())
    assert again.recompute == "mixed" and again.classes[0].recompute == "selective"


def test_pipelines():
    plan = _pipelined()
    assert (plan.pp, plan.ranks, plan.stage_ranks) == (2, 8, 4) and loads(plan.dumps()) == plan
    assert plan.orders()[1] == [(letter, 0, m) for m in range(3) for letter in "FB"]
    wide = _pipelined("interleaved", 2)
    assert (wide.pp, len(wide.stages)) == (2, 4) and "vp=2" in wide.one_line() and loads(wide.dumps()) == wide
    assert {chunk for _, chunk, _ in wide.orders()[0]} == {0, 1}
    assert {letter for letter, _, _ in _pipelined("zero_bubble").orders()[0]} == set("FIW")
    order = tuple(tuple(f"{letter}0.{m}" for letter in "FB" for m in range(3)) for _ in range(2))
    own = _pipelined("custom", words=order)
    assert loads(own.dumps()) == own and own.orders() == _pipelined("gpipe").orders()
    assert Plan(ModelId("sha256:0"), microbatches=2).orders() == [[("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)]]


ORDER = [["F0.0", "B0.0", "F0.1", "B0.1", "F0.2", "B0.2"]] * 2


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ["schedule", "name"],
            "accumulate",
            '$.schedule.name: "accumulate" is not legal for 2 stages. Legal: "gpipe",',
        ),
        (["schedule", "virtual"], 2, "$.schedule.virtual: 2 leaves all stages to one rank. Legal: at most 1."),
        (["schedule", "virtual"], 3, "$.schedule.virtual: 3 does not divide 2 stages."),
        (
            ["schedule", "name"],
            "interleaved",
            '$.schedule.virtual: 1 is not legal for "interleaved". Legal: 2 or more.',
        ),
        (
            ["schedule", "name"],
            "custom",
            '$.schedule.words: does not go with "custom". Legal: the order of every rank.',
        ),
        (["schedule", "words"], ORDER, '$.schedule.words: does not go with "1f1b".'),
        (["stages", 1, "last"], 1, "$.stages[1]: [1, 1) has no unit. Legal: one or more."),
        (["stages", 0, "last"], 0, "$.stages[0]: [0, 0) has no unit."),
        (["stages"], [{"first": 0, "last": 1}], '$.schedule.name: "1f1b" is not legal for 1 stages'),
        (["mesh"], {"dp_shard": 2, "tp": 2}, "$.mesh: makes 4 ranks, the axes make 8."),
        (["cluster", "nodes"], 1, "$.axes: make 8 ranks, the cluster has 4."),
    ],
)
def test_pipelines_that_are_none(path, value, message):
    data = _pipelined().to_json()
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    if path == ["stages"]:
        data["units"], data["mesh"] = data["units"][:1], {"tp": 4}
    with pytest.raises(AutoparError) as error:
        from_json(data)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((1, 5, "B0.1"), "rank 1 runs B0.1 twice"),
        ((0, 5, "W0.2"), "rank 0 runs F then W of chunk 0, microbatch 2. Every rank runs F and B, or F, I and W,"),
        ((1, 0, "B0.0"), "rank 1 runs B0.0 twice"),
        ((0, 1, "F1.0"), "the order has 2 chunks a rank, the plan 1."),
        ((0, 5, "X0.2"), "'X0.2' of rank 0 is not known."),
    ],
)
def test_orders_of_the_users_own_that_cannot_run(change, message):
    rank, place, word = change
    words = [list(r) for r in ORDER]
    words[rank][place] = word
    with pytest.raises(AutoparError) as error:
        loads(_pipelined("custom", words=tuple(map(tuple, words))).dumps())
    assert message in str(error.value) and "$.schedule.words" in str(error.value)
    stuck = (ORDER[0], ("F0.1", "B0.1", "F0.0", "B0.0", "F0.2", "B0.2"))
    with pytest.raises(AutoparError, match=r"rank 0 waits for ever to run B0.0 \(stage 0\)"):
        loads(_pipelined("custom", words=tuple(map(tuple, stuck))).dumps())


def test_the_smallest_plan():
    plan = Plan(ModelId("sha256:0"))
    assert loads(plan.dumps()) == plan and plan.ranks == 1 and plan.one_line() == "dp=1 on 1 rank"


def test_one_line():
    plan = _plan()
    assert plan.one_line() == "dp=2 tp=2 zero=3 microbatches=3 on 4 ranks"
    plan = _pipelined()
    assert plan.one_line() == "pp=2 dp=2 tp=2 zero=3 microbatches=3 schedule=1f1b on 8 ranks"


@pytest.mark.parametrize(
    ("rest", "use", "gather", "reduce", "zero"),
    [
        ("I R", "R R", "never", "step", 0),
        ("S0 R", "R R", "step", "step", 1),
        ("S0 R", "R R", "step", "microbatch", 2),
        ("S0 R", "R R", "use", "microbatch", 3),
    ],
)
def test_zero_of_a_plan(rest, use, gather, reduce, zero):
    axes = (PlanAxis("x", 2, "host", 1), PlanAxis("y", 1, "host", 1))
    assert Plan(ModelId("x"), axes=axes, parameters={"w": Parameter((4,), rest, use, gather, reduce)}).zero == zero


@pytest.mark.parametrize("text", ["I", "R", "factor:o", "factor:b.0(4+2+2)", "linear:0", "special:vocabulary"])
def test_choices(text):
    assert choice_to_text(choice_from_text(text)) == text


@pytest.mark.parametrize("text", ["", "S", "factor:", "factor:o()", "factor:o(4", "factors:o", "I:0"])
def test_choices_that_are_none(text):
    with pytest.raises(AutoparError, match=r"is not legal\. Legal: I, R, factor"):
        choice_from_text(text)


def _broken(path, value):
    data = _plan().to_json()
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema"], SCHEMA + 1, "plan: at $.schema: 2 is newer than this autopar reads. Legal: 1; update autopar."),
        (["schema"], "1", 'plan: at $.schema: "1" is not a schema version. Legal: 1.'),
        (["model"], KeyError, "plan: at $: the key 'model' is missing."),
        (["paramters"], {}, "plan: at $: unknown key 'paramters', did you mean 'parameters'? Legal: model,"),
        (["microbatches"], 0, "plan: at $.axes[2].size: 3 is not the number of microbatches, 0."),
        (["microbatches"], True, "plan: at $.microbatches: true is not an integer."),
        (["deterministic"], 1, "plan: at $.deterministic: 1 is not true or false."),
        (["batch"], None, "plan: at $.batch: is null, but 3 microbatches need to know their rows."),
        (
            ["batch"],
            4,
            "plan: at $.batch: 4 is not legal. Legal: a multiple of 2, at least 6 (data ranks x microbatches).",
        ),
        (["inputs", "ids"], "S0 R", "plan: at $.inputs[\"ids\"]: 'S0 R' has 2 words for 3 axes."),
        (["mesh", "tp"], 4, "plan: at $.mesh: makes 8 ranks, the axes make 4."),
        (["cluster", "ranks_per_node"], 2, "plan: at $.axes: make 4 ranks, the cluster has 2."),
        (["cluster", "device"], "tpu", 'plan: at $.cluster.device: "tpu" is not legal. Legal: "cpu", "cuda".'),
        (["axes", 0, "display"], ["fsdp"], "plan: at $.axes[0].display: 'fsdp' is not legal. Legal: pp, dp_replicate,"),
        (["axes", 1, "name"], "dp", "plan: at $.axes[1].name: the axis 'dp' stands twice."),
        (["axes", 1, "tier"], "time", "plan: at $.axes[1].tier: the axis in time must be the last one."),
        (
            ["classes", 0, "ops", 0, "choices", 1],
            "factor",
            "plan: at $.classes[0].ops[0].choices[1]: 'factor' is not legal.",
        ),
        (["classes", 0, "ops", 0, "choices"], ["I"], "plan: at $.classes[0].ops[0].choices: has 1 choices for 3 axes."),
        (["classes", 0, "ops", 0, "order"], [0, 1], "plan: at $.classes[0].ops[0].order: [0, 1] does not name each of"),
        (
            ["classes", 0, "ops", 1, "index"],
            0,
            "plan: at $.classes[0].ops[1].index: 0 is not the op's place in its class. Legal: 1.",
        ),
        (["classes", 0, "extra", 0, "of"], 2, "plan: at $.classes[0].extra[0].of: there is no op 2. Legal: 0 to 1."),
        (
            ["optimizer", "states"],
            {"fp32 2": ["2d"]},
            """plan: at $.optimizer.states["fp32 2"]: '2d' is not legal. Legal: "param", "param:fp32", "d1:fp32".""",
        ),
        (
            ["optimizer", "states"],
            {"*": ["moment"]},
            """plan: at $.optimizer.states["*"]: 'moment' is not legal. Legal: "param", "param:fp32".""",
        ),
        (
            ["classes", 0, "recompute"],
            "all",
            'plan: at $.classes[0].recompute: "all" is not legal. Legal: "none", "selective", "full".',
        ),
        (["axes", 1, "wire"], {"copy": [0, 1]}, "plan: at $.axes[1].wire: has the keys ['copy']. Legal: all_reduce,"),
        (["axes", 0, "wire", "copy"], [0.0, -1.0], "plan: at $.axes[0].wire.copy: [0.0, -1.0] has a negative time."),
        (["axes", 0, "wire", "copy"], [0.0], "plan: at $.axes[0].wire.copy: has 1 items. Legal: 2."),
        (["alternatives", 0, "kind"], "best", 'plan: at $.alternatives[0].kind: "best" is not legal. Legal: "next",'),
        (["units", 1, "kind"], 3, "plan: at $.units[1].kind: there is no class 3. Legal: 0 to 0."),
        (["stages", 0, "last"], 5, "plan: at $.stages[0]: [0, 5) does not continue at unit 0."),
        (["schedule", "name"], "dualpipe", 'plan: at $.schedule.name: "dualpipe" is not legal. Legal: "accumulate",'),
        (
            ["parameters", "h.0.fc.weight", "rest"],
            "S0 R",
            """plan: at $.parameters["h.0.fc.weight"].rest: 'S0 R' has 2 words for""",
        ),
        (["parameters", "h.0.fc.weight", "rest"], "S2 R R", "'S2' is not legal. Legal: R, I, P, S0 to S1."),
        (["parameters", "h.0.fc.scale", "use"], "S0 R R", "Legal: R, I, P, but no S, as it has no dims."),
        (
            ["parameters", "h.0.fc.weight", "gather"],
            "always",
            '.gather: "always" is not legal. Legal: "never", "step", "use".',
        ),
        (["parameters", "h.0.fc.weight", "gather"], "never", "\"never\", but rest 'S0 S0(8+4+4)@1 R' is not use"),
        (["predicted", "step_time_s"], "fast", 'plan: at $.predicted.step_time_s: "fast" is not a number.'),
        (["parameters"], [], "plan: at $.parameters: a JSON list is not an object."),
        (["axes"], {}, "plan: at $.axes: a JSON object is not a list."),
    ],
)
def test_errors_name_the_path_and_what_is_legal(path, value, message):
    with pytest.raises(AutoparError) as error:
        from_json(_broken(path, value))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan.json is not JSON"),
        ("[]", "is not a plan"),
        ("{}", "is not a plan"),
        ('{"schema": 1, "schema": 1}', "the key 'schema' stands twice"),
        ('{"schema": NaN}', "NaN is no JSON number"),
    ],
)
def test_files_that_are_no_plan(tmp_path, text, message):
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(AutoparError, match=message):
        Plan.load(file)


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(AutoparError, match="plan: no such file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(AutoparError, match="plan: cannot read"):
        Plan.load(tmp_path)
    with pytest.raises(AutoparError, match="plan: cannot write"):
        _plan().save(tmp_path / "no" / "plan.json")


def test_numbers_that_are_not_finite_never_reach_a_file():
    with pytest.raises(ValueError):
        replace(_plan(), predicted=Predicted(step_time_s=float("nan"))).dumps()
