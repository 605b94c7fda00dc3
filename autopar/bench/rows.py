"""The row format and the registry of benchmarks.

>>> row = Row("planner", "gpt2 on 8", "abc1234", "2026-11-29", "2 cores", {"seconds": 1.25, "gap": 0.004, "fits": True})
>>> print(table([row]))
name        seconds   gap     fits
gpt2 on 8   1.25      0.004   True
planner at abc1234, 2026-11-29, 2 cores
"""

from __future__ import annotations

import datetime
import io
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.schema import nearest

Figure = float | int | str | bool | None
Bench = Callable[..., Iterator[tuple[Any, ...]]]  # of (case, figures), or (case, figures, points)
WIDTH = 2000  # characters of a line at most: a figure is never cut
BENCHES: dict[str, Bench] = {}
MODULES = {
    name: f"autopar.bench.{name}" for name in ("planner", "local", "testbed", "runtime", "pipelines", "machinery")
}


@dataclass(frozen=True)
class Row:
    """One measurement: which benchmark and case, at which commit, when and where, and its figures by name (units in the
    name). ``points``: plans that ran, with predicted and measured seconds, where there are several."""

    bench: str
    name: str
    commit: str
    date: str
    machine: str
    figures: Mapping[str, Figure]
    points: Sequence[tuple[str, float, float]] = ()


def bench(name: str) -> Callable[[Bench], Bench]:
    """Put a benchmark into the registry. It takes the names of the cases wanted (none: all) and yields
    (case, figures), and points where it has some."""

    def register(function: Bench) -> Bench:
        BENCHES[name] = function
        return function

    return register


def run(name: str, cases: Sequence[str] = (), **options: Any) -> Iterator[Row]:
    """The rows of one benchmark as they are measured; ``options``: what it takes beside cases. Raises AutoparError for
    an unknown name or case."""
    if name not in MODULES:
        raise AutoparError(f"bench {name}: unknown{nearest(name, MODULES) or '.'} Legal: {', '.join(MODULES)}.")
    import_module(MODULES[name])
    commit, date, machine = _commit(), datetime.date.today().isoformat(), _machine()
    for case, figures, *points in BENCHES[name](cases, **options):
        yield Row(name, case, commit, date, machine, figures, *points)


def chosen(cases: Sequence[str], legal: Iterable[str], who: str) -> list[str]:
    """The cases wanted, in the order of ``legal``; all where none is named."""
    known = list(legal)
    for case in cases:
        if case not in known:
            raise AutoparError(f"bench {who}: no case {case!r}{nearest(case, known) or '.'} Legal: {', '.join(known)}.")
    return [case for case in known if case in cases or not cases]


def table(rows: Sequence[Row]) -> str:
    """Rows of one benchmark as text, a column a figure."""
    if not rows:
        return "no rows"
    columns = list(dict.fromkeys(key for row in rows for key in row.figures))
    lines = grid(("name", *columns), [[row.name, *map(row.figures.get, columns)] for row in rows])
    last = rows[-1]
    return "\n".join([lines, f"{last.bench} at {last.commit}, {last.date}, {last.machine}"])


def grid(columns: Sequence[str], lines: Iterable[Sequence[Figure]]) -> str:
    """Figures in columns, as text.

    >>> print(grid(("name", "s"), [("a", 1.5), ("bc", None)]))
    name   s
    a      1.5
    bc     -
    """
    from rich.console import Console
    from rich.table import Table

    text = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in columns:
        text.add_column(column)
    for line in lines:
        text.add_row(*map(_cell, line))
    console = Console(file=io.StringIO(), width=WIDTH, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(text)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _cell(figure: Figure) -> str:
    if figure is None:
        return "-"
    return f"{figure:.4g}" if isinstance(figure, float) else str(figure)


def _commit() -> str:
    """The commit of the sources that run, with a plus where they were changed since."""
    here = Path(__file__).resolve().parent
    try:
        words = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _machine() -> str:
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{os.cpu_count()} cores, {platform.machine()}{load}"
