"""Published rows: read as they are written, priced by whoever prices, scored against what was measured."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autopar import AutoparError
from autopar.bench.published import Report, published
from autopar.bench.published_report import Fits, Result, fits, spearman, sweeps, time_errors, time_errors_of_rows
from autopar.bench.published_rows import Row, lacks, read_rows, row_of
from autopar.bench.published_targets import TARGETS, check
from autopar.bench.published_text import text
from autopar.cli import main
from autopar.pricing import PricedRow

SOUND = {"time": True, "memory": True, "fits": True, "rank": True, "why_not": None}
STATED = {
    "id": "a-0",
    "source": "a",
    "model": "GPT-13B",
    "layers": 4,
    "hidden": 64,
    "heads": 4,
    "ffn": 256,
    "ffn_type": "gelu",
    "seq": 128,
    "gpu": "A100-80GB",
    "gpus": 8,
    "tp": 2,
    "pp": 2,
    "cp": 1,
    "dp": 2,
    "mbs": 1,
    "gbs": 16,
    "precision": "bf16",
    "step_time_s": 1.0,
    "peak_mem_gib": 40,
    "tier": "A",
    "use": SOUND,
    "run": {"source_kind": "aleph_alpha"},
}


@dataclass(frozen=True)
class Priced:
    step_s: float
    peak_gib: float
    fits: bool
    parts: dict[str, float] = field(default_factory=dict)
    timeline: Any = None


def a_file(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.json"
    path.write_text(json.dumps([STATED | row for row in rows]))
    return str(path)


def results(folder: Path, *rows: dict[str, Any], **priced: Priced) -> tuple[Result, ...]:
    """Rows a-0, a-1, ... with the prices given under x0, x1, ..."""
    named = [{"id": f"a-{i}", "layout_key": f"k{i}"} | row for i, row in enumerate(rows)]
    return published(a_file(folder, *named), (), lambda row: priced[f"x{row.id[2:]}"]).results


def test_a_row_is_read_as_it_is_written(tmp_path: Path) -> None:
    odd = {"zero_stage": "3 (FSDP 128/256)", "vp": None, "vocab": None, "dp": None, "gbs": None, "grad_accum": 8.0}
    (row,), unread = read_rows(a_file(tmp_path, odd | {"notes": "seen", "tpp": 2, "run": {"sharp": 1}}))
    assert (row.zero_stage, row.vp, row.vocab, row.dp, row.gbs, row.run.tdp_w) == (3, 0, 0, 2, 16, None)
    assert row.use.rank and row.layout_key == "a-0" and lacks(row) is None
    assert unread == ["run.sharp", "tpp"]


def test_a_row_that_does_not_say_what_it_is_sound_for_is_scored_by_what_it_measured(tmp_path: Path) -> None:
    rows, _ = read_rows(a_file(tmp_path, {"use": None}, {"id": "b", "use": None, "status": "OOM", "step_time_s": None}))
    assert [(row.use.time, row.use.memory, row.use.fits, row.use.rank) for row in rows] == [
        (True, True, True, False),
        (False, True, True, False),
    ]


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"tp": 0}, r"row a-0: at \$\[1\]\.tp: 0 is not legal\. Legal: 1 and more, or null"),
        ({"tp": "two"}, r"row a-0: at \$\[1\]\.tp: \"two\" is not an integer"),
        ({"tp": 1.5}, r"row a-0: at \$\[1\]\.tp: 1\.5 is not an integer"),
        ({"zero_stage": 4}, r"row a-0: at \$\[1\]\.zero_stage: 4 is not legal\. Legal: 0 to 3"),
        ({"layers": 10**400}, r"row a-0: at \$\[1\]\.layers: 10{29} is not legal"),
        ({"run": {"dropout": 2}}, r"row a-0: at \$\[1\]\.run\.dropout: 2\.0 is not legal\. Legal: 0 to 1, or null"),
        ({"step_time_s": -1}, r"row a-0: at \$\[1\]\.step_time_s: -1\.0 is not legal"),
        ({"run": {"tdp_w": "hot"}}, r"row a-0: at \$\[1\]\.run\.tdp_w: \"hot\" is not a number"),
        ({"run": []}, r"row a-0: at \$\[1\]\.run: a JSON list is not an object"),
        ({"id": None}, r"rows\.json: at \$\[1\]\.id: null is not legal"),
        ({"id": "first"}, r"at \$\[1\]\.id: two rows are called 'first'"),
    ],
)
def test_a_malformed_row_is_one_line(row: dict[str, Any], line: str, tmp_path: Path) -> None:
    path = a_file(tmp_path, {"id": "first"}, row)
    with pytest.raises(AutoparError, match=line):
        read_rows(path)


@pytest.mark.parametrize("content", ["{}", "[]", "[1]", "[", "[" * 100_000, '{"rows": []}', '[{"id": "a", "id": "b"}]'])
def test_a_malformed_file_is_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(AutoparError, match=r"bad\.json"):
        read_rows(path)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"ffn": None, "gpu": None}, "not stated: ffn, gpu."),
        ({"dp": 4}, "tp=2 x pp=2 x cp=1 x dp=4 are 16 ranks, gpus=8."),
        ({"kind": "per-layer-time"}, "kind 'per-layer-time' is not a whole step."),
        ({"kind": "inference"}, "kind 'inference' is not a whole step."),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4."),
        ({"moe_experts": 4, "moe_topk": 5}, "moe_topk=5 of moe_experts=4."),
        ({"mbs": 64}, "gbs=16 is less than mbs=64 x dp=2: ranks have nothing to do."),
        ({"heads": 5, "kv_heads": 5}, "hidden=64 is no multiple of heads=5, and the size of a head is not stated."),
    ],
)
def test_what_says_too_little_is_not_priced(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (found,) = published(a_file(tmp_path, row), (), lambda row: pytest.fail("priced")).results
    assert found.reason == reason and found.priced is None


def test_repeats_of_a_layout_count_once(tmp_path: Path) -> None:
    rows = [{"layout_key": "same"}, {"layout_key": "same"}, {}, {"use": SOUND | {"time": False}}]
    prices = {f"x{i}": Priced(s, 40, True) for i, s in enumerate((1.0, 1.2, 0.7, 9.0))}
    found, each = (
        time_errors(results(tmp_path, *rows, **prices)),
        time_errors_of_rows(results(tmp_path, *rows, **prices)),
    )
    assert found is not None and each is not None
    assert (found.layouts, found.median, found.worst, found.bias, found.worst_at) == (2, 0.2, 0.3, -0.1, "a-2")
    assert (each.layouts, each.median, each.bias) == (3, 0.2, -0.0333)


def test_fits_are_told_from_failures(tmp_path: Path) -> None:
    failed = {"status": "OOM", "step_time_s": None}
    rows = [{}, {}, {}, failed, failed, failed | {"use": SOUND | {"fits": False}}]
    prices = {f"x{i}": Priced(1.0, 40, yes) for i, yes in enumerate((True, True, False, True, False, True))}
    found = fits(results(tmp_path, *rows, **prices))
    assert found == Fits(ran_fit=2, ran_not=1, failed_fit=1, failed_not=1)
    assert found.right == {"all": 0.6, "ran": 0.6667, "failed": 0.5}


def test_a_sweep_has_its_rank_correlation_and_regret(tmp_path: Path) -> None:
    ranked = [{"step_time_s": s} for s in (1.0, 1.1, 1.3, 2.0)]
    rows = [*ranked, {"status": "OOM", "step_time_s": None, "use": SOUND | {"rank": False}}, {"gpus": 16, "dp": 4}]
    prices = {f"x{i}": Priced(s, 40, i != 1) for i, s in enumerate((1.4, 1.2, 1.5, 1.6, 0.9, 1.0))}
    (found,) = sweeps(results(tmp_path, *rows, **prices))  # one layout alone, on 16 GPUs, is no sweep
    assert (found.gpus, found.layouts, found.spearman) == (8, 4, 0.8)
    assert (found.best, found.predicted_best, found.regret) == ("a-0", "a-1", 0.1)
    assert (found.place, found.within) == (2, 3)
    assert (found.choice, found.choice_regret) == ("a-4", None)  # that run failed


def test_rank_correlation_of_ties() -> None:
    assert spearman([1, 2, 3, 4], [1, 2, 2, 4]) == 0.9487
    assert spearman([1, 2, 3], [3, 2, 1]) == -1
    assert spearman([1, 2], [5, 5]) is None


def test_targets_say_what_is_reached(tmp_path: Path) -> None:
    prices = {"x0": Priced(1.2, 40, True), "x1": Priced(1.0, 40, True)}
    found = results(tmp_path, {}, {"status": "OOM", "step_time_s": None}, **prices)
    reached = {r.label: r for r in (check(target, found) for target in TARGETS)}
    assert len(reached) == len(TARGETS)
    assert reached["step time, AlephAlpha, tier A: median"].reached is False
    assert reached["step time, AlephAlpha, tier A: p90"].reached is True
    assert reached["step time, AlephAlpha, tier A: bias"].reached is None
    assert reached["fits, AlephAlpha 13B: failed"].measured == 0
    assert reached["fits, AlephAlpha 13B: failed"].reached is False
    assert reached["step time, A100 without AlephAlpha, tier A: median"].count == 0
    other = tuple(replace(r, row=replace(r.row, tier="B")) for r in found)
    assert check(TARGETS[9], other).count == 0, TARGETS[9].label


def test_the_report_names_every_row(tmp_path: Path) -> None:
    def price(row: Row) -> Any:
        if row.id == "b":
            raise AutoparError("gpu 'TPU' is not known.")
        return Priced(0.9, 44, True, {"tp_s": 0.1})

    path = a_file(tmp_path, {}, {"id": "b", "source": "b"}, {"id": "c", "precision": "fp8"})
    report = published(path, (), price)
    out = report.to_json()
    assert out["rows"][0]["error"] == pytest.approx(-0.1) and out["rows"][0]["predicted_peak_mem_gib"] == 44
    assert out["rows"][1]["reason"] == "gpu 'TPU' is not known." and out["rows"][1]["fits"] is None
    assert out["rows"][2]["precision"] == "fp8" and out["by_source"]["b"]["priced"] == 0
    assert (out["totals"]["rows"], out["totals"]["priced"], out["totals"]["time"]["layouts"]) == (3, 2, 2)
    shown = text(report)
    assert "a-0   0.9   1            -10" in shown and "1      b       gpu 'TPU' is not known." in shown
    assert [r.row.id for r in published(path, ["b"], price).results] == ["b"]
    with pytest.raises(AutoparError, match="no row or source 'bb', did you mean 'b'"):
        published(path, ["bb"], price)


@pytest.fixture
def pricer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices in the place of ours: by the row's own words."""

    class Timeline:
        def trace(self, path: str) -> None:
            Path(path).write_text("[]")

    def price_row(row: Row) -> Priced:
        if row.source == "crash":
            raise KeyError("x")
        return Priced(1.0, 40.0, True, timeline=Timeline())

    module = ModuleType("autopar.pricing")
    module.price_row = price_row  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "autopar.pricing", module)


@pytest.mark.usefixtures("pricer")
def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, out, events = a_file(tmp_path, {}, {"id": "b"}), tmp_path / "report.json", tmp_path / "events.json"
    assert main(["bench", "published", path, "--out", str(out)]) == 0
    assert "Targets" in capfd.readouterr().out
    assert main(["bench", "published", path, "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == json.loads(out.read_text())
    assert main(["bench", "published", path, "--case", "b", "--trace", str(events)]) == 0 and events.exists()


@pytest.mark.usefixtures("pricer")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--trace", "t.json"], "a trace is of one row"),
        (["--trace", "t.json", "--case", "a"], "a trace is of one row, and 2 are priced"),
        (["--out", "none/there.json"], "--out none/there.json: not a file in a folder that exists"),
        (["--case", "c"], "no row or source 'c'"),
    ],
)
def test_refusals_of_the_command(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "published", a_file(tmp_path, {}, {"id": "b"}), *words]) == 2
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1


@pytest.mark.usefixtures("pricer")
def test_a_crash_costs_one_row_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "published", a_file(tmp_path, {}, {"id": "b", "source": "crash"})]) == 70
    assert "a bug of autopar: KeyError: 'x'" in capsys.readouterr().out


def test_a_report_of_nothing_priced() -> None:
    empty = Report((Result(Row("a"), reason="no"),))
    assert "no" in text(empty) and empty.to_json()["totals"]["time"] is None


def test_the_seconds_of_pricing_are_told() -> None:
    results = tuple(Result(row_of({"id": str(s)}, "x", "$"), PricedRow(1.0, 1.0, True), took_s=s) for s in (0.1, 0.2))
    report = Report((*results, Result(row_of({"id": "no"}, "x", "$"), reason="not stated.")))
    assert report.took() == pytest.approx({"median": 0.15, "p90": 0.19})
    assert "Processor seconds that pricing a row takes\nmedian 0.150, p90 0.190" in text(report)
    assert "Processor" not in text(Report(report.results[2:]))
