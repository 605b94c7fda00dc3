"""The harness: rows, registry, and a smallest run of each benchmark."""

from __future__ import annotations

import pytest

from autopar import AutoparError
from autopar.bench import Row, run, table
from autopar.bench import rows as rows_module


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
