"""The harness: rows, registry, and a smallest run of each benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar import AutoparError
from autopar.bench import Row, page, run, table
from autopar.bench import rows as rows_module
from autopar.bench.planner import CASES
from autopar.loading import ModelSpec

ROOT = Path(__file__).resolve().parent.parent


def test_a_table_has_a_column_a_figure() -> None:
    rows = [
        Row("planner", "a", "c0ffee", "2026-11-29", "2 cores", {"total_s": 1.5, "gap": None}),
        Row("planner", "b", "c0ffee", "2026-11-29", "2 cores", {"total_s": 0.25, "error": "no"}),
    ]
    lines = table(rows).splitlines()
    assert lines[0].split() == ["name", "total_s", "gap", "error"]
    assert lines[1].split() == ["a", "1.5", "-", "-"]
    assert lines[2].split() == ["b", "0.25", "-", "no"]
    assert lines[3] == "planner at c0ffee, 2026-11-29, 2 cores"


def test_a_page_holds_the_rows_and_a_plot_of_each_kind_they_have(tmp_path: Path) -> None:
    where = "c0ffee", "2026-11-29", "2 cores"
    speed = {"ratio": 1.5, "low": 1.4, "high": 1.6, "ratio_own": 1.0, "low_own": 0.9, "high_own": 1.1}
    regret = {"regret": 0.02, "low": 0.0, "high": 0.05}
    assert page.write([Row("runtime", "gpt ddp", *where, speed)], tmp_path) == ["rows.json", "index.html", "ratios.png"]
    plans = [("dp=2", 0.1, 0.12), ("tp=2", 0.3, 0.31)]
    made = page.write([Row("testbed", "wide", *where, regret, plans)], tmp_path)
    assert made[2:] == ["predicted.png", "regrets.png"]
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["points"] == [list(p) for p in plans]
    assert "regrets.png" in (tmp_path / "index.html").read_text()
    assert all((tmp_path / name).stat().st_size > 5000 for name in made[2:])


@pytest.mark.parametrize(
    ("name", "case", "line"), [("plannner", (), "did you mean 'planner'"), ("local", ("gtp",), "no case 'gtp'")]
)
def test_unknown_names_are_one_line(name: str, case: tuple[str, ...], line: str) -> None:
    with pytest.raises(AutoparError, match=line):
        list(run(name, case))


def test_the_commit_is_of_these_sources() -> None:
    assert rows_module._commit() not in ("", "unknown")


def test_planner_measures_a_small_model() -> None:
    (row,) = run("planner", ["mlp on 1 node"])
    assert row.bench == "planner" and "error" not in row.figures, row.figures
    assert isinstance(row.figures["total_s"], float) and row.figures["rss_gib"]


@pytest.mark.parametrize(
    ("case", "billions"),  # as published; of ViT-22B without its head
    [
        ("hf llama-3-8b on 8 nodes", 8.0),
        ("hf llama-3-70b on 64 nodes", 70.6),
        ("hf llama-3-405b on 2,048 nodes", 405.9),
        ("hf gpt-3-175b on 16 nodes", 175),
        ("hf gpt-530b on 64 nodes", 530),
        ("hf mixtral-8x7b on 8 nodes", 46.7),
        ("hf t5-11b on 8 nodes", 11.3),
        ("hf vit-22b-like on 32 nodes", 21.743),
    ],
)
def test_published_models_have_their_size(case: str, billions: float) -> None:
    found = CASES[case]
    model = ModelSpec(str(ROOT / found.target), found.options).load().model
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)
