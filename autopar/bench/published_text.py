r"""The report on published rows as text: a line a row, then what the prices are worth.

>>> from autopar.bench.published import Report
>>> from autopar.bench.published_report import Result
>>> from autopar.bench.published_rows import Row
>>> print(text(Report((Result(Row("a-1", source="a"), reason="not stated: tp."),))).split("\n\n")[1])
Not priced
rows   which   why
1      a-1     not stated: tp.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.bench.published import Report
from autopar.bench.published_report import Errors, Result, Sweep, fits, memory_errors, time_errors
from autopar.bench.published_targets import Reached
from autopar.bench.rows import Figure, grid


def text(report: Report) -> str:
    """The whole report as tables."""
    parts = [
        ("", _rows_text(report.results)),
        ("Not priced", _reasons_text(report.results)),
        ("Errors by source (repeats of a layout averaged), %", _sources_text(report)),
        ("Fits, over rows that ran or ran out of memory", _fits_text(report.results)),
        ("Sweeps", _sweeps_text(report.sweeps())),
        ("Targets, as fractions", _targets_text(report.targets())),
        ("Processor seconds that pricing a row takes", _took_text(report)),
        ("Keys that nothing reads", ", ".join(report.unread)),
    ]
    return "\n\n".join(f"{title}\n{body}" if title else body for title, body in parts if body)


def _took_text(report: Report) -> str:
    priced = any(result.priced for result in report.results)
    return ", ".join(f"{name} {seconds:.3f}" for name, seconds in report.took().items()) if priced else ""


def _rows_text(results: Sequence[Result]) -> str:
    columns = ("row", "s", "measured s", "error %", "GiB", "measured GiB", "error %", "fits", "status", "precision")
    return grid(
        columns,
        (
            (
                r.row.id,
                r.step_s,
                r.row.step_time_s,
                _percent(r.time_error),
                r.peak_gib,
                r.row.peak_mem_gib,
                _percent(r.memory_error),
                None if r.priced is None else ("yes" if r.priced.fits else "no"),
                r.row.status if r.priced else "not priced",
                r.row.precision,
            )
            for r in results
        ),
    )


def _reasons_text(results: Sequence[Result]) -> str:
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.reason is not None:
            reasons.setdefault(result.reason, []).append(result.row.id)
    lines = ((len(ids), ids[0] if len(ids) == 1 else f"{ids[0]} ...", reason) for reason, ids in reasons.items())
    return grid(("rows", "which", "why"), lines) if reasons else ""


def _sources_text(report: Report) -> str:
    columns = "source,rows,priced,s: layouts,median,p90,worst,bias,worst at,GiB: layouts,median,p90,worst,bias,worst at"
    lines = []
    for source, results in [*report.by_source(), ("all", report.results)]:
        priced = sum(r.priced is not None for r in results)
        lines.append([source, len(results), priced, *_cells(time_errors(results)), *_cells(memory_errors(results))])
    return grid(columns.split(","), lines)


def _cells(found: Errors | None) -> list[Figure]:
    if found is None:
        return [None] * 6
    return [found.layouts, *map(_percent, (found.median, found.p90, found.worst, found.bias)), found.worst_at]


def _fits_text(results: Sequence[Result]) -> str:
    found = fits(results)
    if not found.counts["all"]:
        return ""
    right = found.right
    return grid(
        ("", "predicted to fit", "predicted not to fit", "right %"),
        [
            ("ran", found.ran_fit, found.ran_not, _percent(right["ran"])),
            ("failed", found.failed_fit, found.failed_not, _percent(right["failed"])),
            ("all", found.ran_fit + found.failed_fit, found.ran_not + found.failed_not, _percent(right["all"])),
        ],
    )


def _sweeps_text(found: Sequence[Sweep]) -> str:
    columns = "source,model,GPUs,length,layouts,Spearman,place,of,predicted best,regret %,best that fits,its regret %"
    lines = []
    for sweep in found:
        failed = sweep.choice is not None and sweep.choice_regret is None
        choice = (sweep.choice, "did not run" if failed else _percent(sweep.choice_regret))
        place = (sweep.place, sweep.within)
        ranks = (sweep.layouts, sweep.spearman, *place, sweep.predicted_best, _percent(sweep.regret))
        lines.append((sweep.source, sweep.model, sweep.gpus, sweep.seq, *ranks, *choice))
    return grid(columns.split(","), lines) if found else ""


def _targets_text(found: Sequence[Reached]) -> str:
    words = {True: "yes", False: "NO", None: "-"}
    lines = [(r.label, r.target, r.measured, r.count, words[r.reached]) for r in found if r.count]
    return grid(("what", "target", "measured", "of", "reached"), lines) if lines else ""


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else round(100 * fraction, 2)
