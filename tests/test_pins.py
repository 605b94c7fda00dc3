"""Pins: keys, values, what is refused, and where the ranks go."""

import itertools

import pytest

from autopar.errors import AutoparError
from autopar.pins import KEYS, Pins, divisors, microbatch_rows, resolve


def test_text_and_mapping_say_the_same():
    text = Pins.parse(["tp=2", "zero=3", "microbatches=4", "sp=false", "recompute=none", "layout.fc1.weight=tp:S0"])
    assert text == Pins.parse(
        {"tp": 2, "zero": 3, "microbatches": 4, "sp": False, "recompute": "none", "layout.fc1.weight": {"tp": "S0"}}
    )
    assert Pins.parse(text.text().split()) == text
    assert Pins.parse(text) is text
    assert text.named() == {"tp", "zero", "microbatches", "sp", "recompute", "layouts"}
    assert Pins.parse(None).text() == "no pins"
    assert Pins.parse(text.given()) == text


def test_every_reserved_key_parses():
    legal = {
        "sp": "true",
        "recompute": "full",
        "schedule": "1f1b",
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "cut": "h.4,h.8",
        "zero": "0",
    }
    pins = Pins.parse([f"{key}={legal.get(key, '2')}" for key in KEYS])
    assert pins.sp is True and pins.cut == ("h.4", "h.8") and pins.vp == 2 and pins.zero == 0
    assert Pins.parse(pins.text().split()) == pins
    assert Pins.parse(["sp=4"]).sp == 4


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("tpp=2", "unknown key 'tpp', did you mean 'tp'? Legal: dp, tp,"),
        ("foo=2", "unknown key 'foo'. Legal: dp"),
        ("tp", "pin 'tp': is not KEY=VALUE."),
        ("tp=", "pin 'tp=': is not KEY=VALUE."),
        ("=2", "pin '=2': is not KEY=VALUE."),
        ("tp=two", "pin tp=two: not a legal value. Legal: an integer of at least 1."),
        ("tp=0", "pin tp=0: not a legal value."),
        ("tp=2.0", "pin tp=2.0: not a legal value."),
        ("dp=-1", "pin dp=-1: not a legal value."),
        ("zero=4", "pin zero=4: not a legal value. Legal: 0, 1, 2, 3."),
        ("microbatches=0", "pin microbatches=0: not a legal value."),
        ("sp=1", "pin sp=1: not a legal value. Legal: true, false, or an integer of at least 2."),
        ("recompute=some", "pin recompute=some: not a legal value. Legal: none, selective, full."),
        (
            "schedule=2f2b",
            "Legal: gpipe, 1f1b, interleaved, zero_bubble, or a file of your own (its name ends in .json).",
        ),
        ("param_dtype=float32", "Legal: fp32, bf16, fp16."),
        ("layout.fc1.weight=S0", "is not AXIS:LAYOUT."),
        ("layout.fc1.weight=tp:Q", "is not AXIS:LAYOUT. Legal: an axis of dp, ep, cp, tp, and R or S<dim>."),
        ("layout.fc1.weight=pp:S0", "is not AXIS:LAYOUT."),
        ("layout.=tp:S0", "is not AXIS:LAYOUT."),
        ("cut=", "is not KEY=VALUE"),
    ],
)
def test_parse_errors(pin, message):
    with pytest.raises(AutoparError) as error:
        Pins.parse([pin])
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "pins",
    [{"tp": True}, {"tp": 2.0}, {"tp": None}, {"zero": "x"}, {"cut": [1]}, {"cut": []}, {3: 2}, {"recompute": 1}],
)
def test_values_of_the_wrong_type(pins):
    with pytest.raises(AutoparError, match=r"^pin "):
        Pins.parse(pins)


def test_a_key_given_twice():
    with pytest.raises(AutoparError, match="'tp' is pinned twice"):
        Pins.parse(["tp=2", "tp=4"])


def test_degrees_of_experts():
    assert resolve(Pins.parse(["ep=2"]), ranks=4, batch=8).axes() == (("dp", 2), ("ep", 2))
    for pins, ranks, batch, text in (
        (["ep=3"], 4, 8, r"ep=3 does not divide 4 ranks. Legal: ep=1, ep=2, ep=4\."),
        (["ep=2", "tp=4"], 4, 8, r"tp=4 does not divide the 2 ranks beside ep=2. Legal: tp=1, tp=2\."),
        (["ep=2", "dp=4"], 4, 8, r"dp=4 ep=2 makes 8 ranks, there are 4. Legal with ep=2: dp=2 tp=1, dp=1 tp=2\."),
        (
            ["ep=2"],
            4,
            6,
            r"dp=2 ep=2 does not divide .* 6 rows. Legal on 2 ranks: dp=1 tp=2, ep=1; or .* 4\.",
        ),
        (
            ["ep=2", "microbatches=3"],
            2,
            4,
            r"microbatches=3 over dp=1 ep=2 needs a batch of at least 6 rows",
        ),
    ):
        with pytest.raises(AutoparError, match=text):
            resolve(Pins.parse(pins), ranks=ranks, batch=batch)


@pytest.mark.parametrize(
    "pin", ["pp=1", "cp=1", "ep=1", "vp=1", "sp=false", "recompute=none", "param_dtype=fp32", "reduce_dtype=fp32"]
)
def test_no_ops_are_accepted(pin):
    assert resolve(Pins.parse([pin]), ranks=4, batch=8).axes() == (("dp", 4),)


@pytest.mark.parametrize(
    ("pins", "ranks", "axes"),
    [
        ({}, 1, ()),
        ({}, 4, (("dp", 4),)),
        ({"tp": 2}, 4, (("dp", 2), ("tp", 2))),
        ({"tp": 4}, 4, (("tp", 4),)),
        ({"dp": 1, "tp": 3}, 3, (("tp", 3),)),
        ({"dp": 2, "tp": 3}, 6, (("dp", 2), ("tp", 3))),
        ({"cp": 2}, 4, (("dp", 2), ("cp", 2))),
        ({"sp": 2}, 4, (("dp", 2), ("cp", 2))),
        ({"sp": 2, "tp": 2}, 4, (("cp", 2), ("tp", 2))),
        ({"sp": 2, "tp": 2}, 8, (("dp", 2), ("cp", 2), ("tp", 2))),
        ({"sp": True, "tp": 2}, 4, (("dp", 2), ("tp", 2))),
    ],
)
def test_ranks_that_no_pin_names_go_to_dp(pins, ranks, axes):
    found = resolve(Pins.parse(pins), ranks)
    assert found.axes() == axes and found.ranks == ranks and found.rows == ()


@pytest.mark.parametrize(
    ("pins", "ranks", "batch", "message"),
    [
        ({"tp": 3}, 4, 8, "pins: tp=3 does not divide 4 ranks. Legal: tp=1, tp=2, tp=4."),
        ({"dp": 2}, 4, 8, "pins: dp=2 makes 2 ranks, there are 4. Legal: dp=4 tp=1, dp=2 tp=2, dp=1 tp=4."),
        ({"dp": 4, "tp": 2}, 4, 8, "pins: dp=4 tp=2 makes 8 ranks, there are 4."),
        (
            {},
            4,
            6,
            "pins: dp=4 does not divide the batch of 6 rows. Legal on 4 ranks: dp=1 tp=4, dp=2 tp=2; or a batch",
        ),
        (
            {"microbatches": 3},
            4,
            8,
            "pins: microbatches=3 over dp=4 needs a batch of at least 12 rows, it has 8. Legal: microbatches=1 to 2.",
        ),
        ({"microbatches": 2}, 4, 4, "Legal: microbatches=1."),
        ({"cp": 3}, 4, 8, "pins: cp=3 does not divide 4 ranks. Legal: cp=2 tp=1, cp=4 tp=1, cp=2 tp=2."),
        ({"sp": 2}, 1, 8, "pins: cp=2 does not divide 1 rank. Legal: no cp."),
        (
            {"dp": 2, "sp": 2},
            8,
            8,
            "pins: dp=2 cp=2 makes 4 ranks, there are 8. Legal: dp=4 cp=2 tp=1, dp=2 cp=2 tp=2,",
        ),
        (
            {"sp": 2},
            8,
            6,
            "pins: dp=4 does not divide the batch of 6 rows. Legal on 8 ranks: dp=1 cp=2 tp=4, dp=2 cp=2",
        ),
        ({"cp": 2, "sp": 4}, 8, 8, "pins: cp=2 and sp=4 both give the sequence an axis. Keep one of them."),
        (
            {"layout.w": "tp:S0"},
            4,
            8,
            "pin layout.w=tp:S0: no axis 'tp' holds parameters here. Legal: dp; or pin tp=2.",
        ),
        ({"sp": True}, 2, 8, "pin sp=true: needs tensor ranks to cut the sequence over."),
        ({}, 0, 4, "ranks: 0 is not a number of ranks."),
        ({}, 1, 0, "batch: 0 is not a number of rows."),
    ],
)
def test_what_does_not_fit(pins, ranks, batch, message):
    with pytest.raises(AutoparError) as error:
        resolve(Pins.parse(pins), ranks, batch)
    assert message in str(error.value)


def test_the_stages_of_a_pipeline_share_the_ranks():
    found = resolve(Pins.parse("pp=2 tp=2"), 8, 8)
    assert (found.pp, found.dp, found.tp, found.ranks, found.schedule, found.virtual) == (2, 2, 2, 8, "1f1b", 1)
    assert found.axes() == (("dp", 2), ("tp", 2))  # of one stage
    assert found.one_line() == "pp=2 dp=2 tp=2 zero=0 microbatches=1 schedule=1f1b"
    found = resolve(Pins.parse("pp=2 vp=2 cut=h.1,h.2,h.3 microbatches=4"), 2, 8)
    assert (found.schedule, found.virtual, found.dp, found.axes()) == ("interleaved", 2, 1, ())
    assert resolve(Pins.parse("pp=2 schedule=zero_bubble"), 2).schedule == "zero_bubble"
    assert resolve(Pins(), 2).schedule == "accumulate"


@pytest.mark.parametrize(
    ("pins", "ranks", "message"),
    [
        ("pp=3", 4, "pins: pp=3 does not divide 4 ranks. Legal: pp=1, pp=2, pp=4."),
        ("pp=2 tp=4", 4, "pins: tp=4 does not divide 2 ranks of a stage (pp=2 of 4). Legal: tp=1, tp=2."),
        ("pp=2 dp=4", 4, "pins: pp=2 dp=4 makes 8 ranks, there are 4. Legal with pp=2: dp=2 tp=1, dp=1 tp=2."),
        ("pp=2 dp=2 tp=2", 16, "pins: pp=2 dp=2 tp=2 makes 8 ranks, there are 16."),
        ("schedule=gpipe", 4, "pin schedule=gpipe: needs stages of a pipeline. Pin pp=2 or more."),
        ("vp=2 pp=1", 4, "pin vp=2: needs stages of a pipeline."),
        ("cut=h.2", 4, "pin cut=h.2: needs stages of a pipeline."),
        ("pp=2 schedule=interleaved", 4, "pin schedule=interleaved: needs several stages a rank. Pin vp=2 or more,"),
        ("pp=2 vp=2 schedule=gpipe", 4, "pin vp=2: schedule=gpipe has one stage a rank. Pin schedule=interleaved."),
        ("pp=2 cut=h.2,h.4", 4, "pin cut=h.2,h.4: names 2 modules, pp=2 needs 1 module."),
        ("pp=2 vp=2 cut=h.2", 4, "pin cut=h.2: names 1 module, pp=2 vp=2 needs 3 modules."),
        ("pp=2 schedule=/no/such.json", 4, "schedule: no such file: /no/such.json."),
    ],
)
def test_pins_of_a_pipeline_that_do_not_go_together(pins, ranks, message):
    with pytest.raises(AutoparError) as error:
        resolve(Pins.parse(pins), ranks, 16)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_schedule_of_the_users_own(tmp_path):
    file = tmp_path / "order.json"
    file.write_text('[["F0.0", "F0.1", "B0.0", "B0.1"], ["F0.0", "B0.0", "F0.1", "B0.1"]]')
    found = resolve(Pins.parse(["pp=2", f"schedule={file}"]), 2, 4)
    assert (found.schedule, found.virtual, found.microbatches, found.rows) == ("custom", 1, 2, (2, 2))
    assert found.words[1] == ("F0.0", "B0.0", "F0.1", "B0.1")
    for pin, message in (("microbatches=4", "has 2 microbatches. Pin"), ("vp=2", "has 1 chunks"), ("pp=4", "2 ranks")):
        with pytest.raises(AutoparError, match=message):
            resolve(Pins.parse({"pp": 2, "schedule": str(file)} | dict([pin.split("=")])), 4, 8)
    for text, message in (
        ('{"F": 1}', "is no order of a pipeline"),
        ('[["F0"], ["F0.0"]]', "'F0' of rank 0 is not known"),
    ):
        file.write_text(text)
        with pytest.raises(AutoparError, match=message):
            resolve(Pins.parse(["pp=2", f"schedule={file}"]), 2, 4)


def test_microbatch_rows():
    for dp, count, each in itertools.product((1, 2, 3), (1, 2, 3, 5), range(1, 12)):
        batch = each * dp
        if batch < dp * count:
            continue
        rows = microbatch_rows(batch, dp, count)
        assert len(rows) == count and sum(rows) == batch
        assert all(r > 0 and r % dp == 0 for r in rows) and max(rows) - min(rows) <= dp
    assert resolve(Pins.parse("microbatches=3"), 2, 10).rows == (4, 4, 2)


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(1) == [1] and divisors(9) == [1, 3, 9]
