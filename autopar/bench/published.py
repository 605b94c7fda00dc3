"""Prices of published training runs beside what was measured: ``autopar bench published ROWS.json``."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.bench.published_report import Result, Sweep, fits, memory_errors, sweeps, time_errors
from autopar.bench.published_rows import WHO, Row, lacks, read_rows
from autopar.bench.published_targets import TARGETS, Reached, check
from autopar.errors import AutoparError
from autopar.schema import nearest

if TYPE_CHECKING:
    from autopar.pricing import PricedRow

Price = Callable[[Row], "PricedRow"]
CRASHED = "a bug of autopar"


@dataclass(frozen=True)
class Report:
    """Priced rows and what they show. ``unread``: keys of the file that nothing reads."""

    results: tuple[Result, ...]
    unread: tuple[str, ...] = ()

    @property
    def crashed(self) -> int:
        """Rows on which the pricing itself failed."""
        return sum((r.reason or "").startswith(CRASHED) for r in self.results)

    def took(self) -> dict[str, float]:
        """Processor seconds that pricing a row takes: ``median``, ``p90``. The first of each structure captures its
        model. In no JSON, which is the same each time."""
        seconds = [r.took_s for r in self.results if r.priced] or [0.0]
        return {"median": float(np.quantile(seconds, 0.5)), "p90": float(np.quantile(seconds, 0.9))}

    def sweeps(self) -> list[Sweep]:
        """Many layouts of one model on one number of GPUs."""
        return sweeps(self.results)

    def targets(self) -> list[Reached]:
        """What is to be reached, beside what is."""
        return [check(target, self.results) for target in TARGETS]

    def to_json(self) -> dict[str, Any]:
        """``rows``, ``by_source``, ``totals``, ``sweeps``, ``targets``, ``unread``. Errors are fractions,
        predicted over measured less one."""
        return {
            "rows": [_row_json(result) for result in self.results],
            "by_source": {source: _figures(results) for source, results in self.by_source()},
            "totals": _figures(self.results),
            "sweeps": [asdict(sweep) for sweep in self.sweeps()],
            "targets": [asdict(reached) for reached in self.targets()],
            "unread": list(self.unread),
        }

    def by_source(self) -> Iterator[tuple[str, list[Result]]]:
        """Results of each source, in the order of the file."""
        for source in dict.fromkeys(result.row.source for result in self.results):
            yield source, [result for result in self.results if result.row.source == source]


def published(path: str | Path, cases: Sequence[str] = (), price: Price | None = None) -> Report:
    """Price the rows of a file, or only those whose id or source is among ``cases``. Raises AutoparError where the file
    or a row is malformed; a row that cannot be priced is reported with its reason."""
    kept, unread = chosen_rows(path, cases)
    if price is None:
        from autopar.pricing import price_row

        price = price_row
    results = (priced(row, price) for row in kept)
    return Report(tuple([r if len(kept) == 1 else _without_events(r) for r in results]), tuple(unread))


def chosen_rows(path: str | Path, cases: Sequence[str]) -> tuple[list[Row], list[str]]:
    """The rows of a file, those of ``cases`` where some are named, and the keys that nothing reads."""
    rows, unread = read_rows(path)
    _check_cases(cases, rows)
    return [row for row in rows if not cases or row.id in cases or row.source in cases], unread


def _check_cases(cases: Sequence[str], rows: Sequence[Row]) -> None:
    sources, ids = dict.fromkeys(row.source for row in rows), [row.id for row in rows]
    for case in cases:
        if case not in sources and case not in ids:
            close = nearest(case, [*sources, *ids]) or "."
            raise AutoparError(f"{WHO}: no row or source {case!r}{close} Legal: an id, or {', '.join(sources)}.")


def _without_events(result: Result) -> Result:
    """Of many rows, the simulated events of each would fill the memory."""
    return result if result.priced is None else replace(result, priced=replace(result.priced, timeline=None))


def priced(row: Row, price: Price) -> Result:
    """One row with its price, or with why it has none. A crash of the pricing is told, and costs one row."""
    reason = lacks(row)
    if reason is not None:
        return Result(row, reason=reason)
    since = time.process_time()
    try:
        found = price(row)
    except AutoparError as error:
        return Result(row, reason=str(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{CRASHED}: {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        return Result(row, reason=" ".join(what.split()))
    if not (math.isfinite(found.step_s) and math.isfinite(found.peak_gib) and found.step_s > 0):
        return Result(row, reason=f"{CRASHED}: {found.step_s} seconds, {found.peak_gib} GiB.")
    return Result(row, found, took_s=time.process_time() - since)


def trace(report: Report, path: str | Path) -> None:
    """Write the simulated step of the one row as a Chrome or Perfetto trace."""
    if len(report.results) != 1:
        raise AutoparError(f"--trace: a trace is of one row, and {len(report.results)} are priced. Add --case ID.")
    (result,) = report.results
    if result.priced is None:
        raise AutoparError(f"--trace: row {result.row.id} is not priced: {result.reason}")
    assert result.priced.timeline is not None
    result.priced.timeline.trace(str(path))


def _row_json(result: Result) -> dict[str, Any]:
    row, found = result.row, result.priced
    return {
        "id": row.id,
        "source": row.source,
        "precision": row.precision,
        "status": row.status,
        "predicted_step_time_s": result.step_s,
        "measured_step_time_s": row.step_time_s,
        "error": result.time_error,
        "predicted_peak_mem_gib": result.peak_gib,
        "measured_peak_mem_gib": row.peak_mem_gib,
        "memory_error": result.memory_error,
        "fits": None if found is None else found.fits,
        "reason": result.reason,
        "parts": dict(found.parts) if found else {},
    }


def _figures(results: Sequence[Result]) -> Mapping[str, Any]:
    time, memory, fit = time_errors(results), memory_errors(results), fits(results)
    return {
        "rows": len(results),
        "priced": sum(result.priced is not None for result in results),
        "time": time and asdict(time),
        "memory": memory and asdict(memory),
        "fits": {**asdict(fit), "right": fit.right} if fit.counts["all"] else None,
    }
