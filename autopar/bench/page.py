"""Rows of a benchmark as files: ``rows.json``, and a page with a table and plots."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autopar.bench.rows import Row, table
from autopar.errors import AutoparError

INCHES, DPI = (7.0, 5.0), 120
SHIFT = 0.2  # between two intervals of a row
Point = tuple[str, float, float]  # a plan, its predicted seconds and those measured


def write(rows: Sequence[Row], folder: str | Path) -> list[str]:
    """Write the files into ``folder``, which is made; their names. Plots need matplotlib, and AutoparError says so."""
    try:
        import matplotlib
    except ImportError:
        raise AutoparError("bench --out: plots need matplotlib (pip install 'autopar[bench]').") from None
    matplotlib.use("agg")
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    (place / "rows.json").write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))
    drawn = {name: draw(rows) for name, draw in PLOTS.items()}
    names = []
    for name, figure in drawn.items():
        if figure is not None:
            figure.savefig(place / f"{name}.png", dpi=DPI, bbox_inches="tight")
            names.append(f"{name}.png")
    title = f"autopar bench {rows[0].bench}" if rows else "autopar bench"
    images = "\n".join(f'<p><img src="{name}" alt="{name.removesuffix(".png")}"></p>' for name in names)
    page = (
        f"<!doctype html>\n<title>{title}</title>\n<h1>{title}</h1>\n<pre>{html.escape(table(rows))}</pre>\n{images}\n"
    )
    (place / "index.html").write_text(page)
    return ["rows.json", "index.html", *names]


def predicted(rows: Sequence[Row]) -> Any:
    """Predicted beside measured seconds of every plan, on logarithmic axes; None where rows have none."""
    series = {row.name: _points(row) for row in rows}
    if not any(series.values()):
        return None
    figure, axes = _axes("measured, s a step", "predicted, s a step")
    for name, points in series.items():
        axes.loglog([p[2] for p in points], [p[1] for p in points], ".", label=name)
    both = [x for points in series.values() for p in points for x in p[1:]]
    axes.plot([min(both), max(both)], [min(both), max(both)], color="grey", linewidth=1)
    axes.legend(fontsize="x-small")
    return figure


def ratios(rows: Sequence[Row]) -> Any:
    """How many times as fast we are as each peer, with intervals; None where rows have none."""
    found = [row for row in rows if "ratio" in row.figures]
    if not found:
        return None
    series = [("the peer's plan", _spans(found, "ratio", "")), ("our own plan", _spans(found, "ratio", "_own"))]
    return _intervals("speed of ours over the peer's", found, series, beside=1.0)


def regrets(rows: Sequence[Row]) -> Any:
    """How much slower the chosen plan is than the fastest, as a fraction, by cell, with intervals; None where rows have
    none."""
    found = [row for row in rows if "regret" in row.figures]
    if not found:
        return None
    return _intervals("regret", found, [("the chosen plan", _spans(found, "regret", ""))], beside=0.0)


PLOTS: dict[str, Callable[[Sequence[Row]], Any]] = {"predicted": predicted, "ratios": ratios, "regrets": regrets}


def _points(row: Row) -> Sequence[Point]:
    if row.points:
        return row.points
    if "predicted_s" in row.figures and "measured_s" in row.figures:
        return [(row.name, _number(row, "predicted_s"), _number(row, "measured_s"))]
    return []


def _spans(rows: Sequence[Row], name: str, end: str) -> list[tuple[float, ...]]:
    return [tuple(_number(row, f"{part}{end}") for part in (name, "low", "high")) for row in rows]


def _intervals(
    across: str, rows: Sequence[Row], series: Sequence[tuple[str, list[tuple[float, ...]]]], beside: float
) -> Any:
    """A line a row: of each of ``series`` the middle and the ends of its interval."""
    figure, axes = _axes(across, "")
    for k, (label, spans) in enumerate(series):
        middle = [m for m, _, _ in spans]
        ends = [[max(0.0, m - low) for m, low, _ in spans], [max(0.0, high - m) for m, _, high in spans]]
        axes.errorbar(middle, [i - SHIFT * k for i in range(len(spans))], xerr=ends, fmt="o", label=label)
    axes.axvline(beside, color="grey", linewidth=1)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.legend(fontsize="x-small")
    return figure


def _number(row: Row, name: str) -> float:
    return float(row.figures[name] or 0.0)


def _axes(across: str, up: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES)
    axes = figure.add_subplot()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return figure, axes
