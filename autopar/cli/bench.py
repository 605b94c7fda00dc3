"""``autopar bench``: run a benchmark and print its rows, or price published ones."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from autopar.cli.flags import CRASHED, DONE, check_folder, write_file
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

MEASURED = {
    "planner": "seconds, memory and gap of planning",
    "local": "predicted against measured seconds and bytes of training on this machine's ranks",
    "ddp": "training on this machine's ranks against one process and DDP",
    "pipelines": "the executor of pipelines against torch.distributed.pipelining, on this machine's ranks",
}
PUBLISHED = """\
Predict step seconds and peak GiB of published training runs, from hardware figures alone, and print them beside what
was measured: a line a row, then the errors by source, whether out-of-memory runs are told apart, rank correlation and
regret within sweeps, and the targets. ROWS.json is a JSON list of objects; a value that is not known is null."""

CLAIMS = "Price claims about training speed, and rules of thumb, as a page in Markdown"


def add(commands: _SubParsersAction[ArgumentParser]) -> None:
    """The command, a word for each benchmark, and their flags."""
    bench = commands.add_parser("bench", help="measure planning or training here, or price published runs")
    benches = bench.add_subparsers(dest="bench", required=True, metavar="NAME")
    for name, what in MEASURED.items():
        measured = benches.add_parser(name, help=what, description=f"Measure {what}.", allow_abbrev=False)
        _common(measured, "only this case (default: all)")
        if name == "local":
            text = "a file of `autopar profile`, of the ranks of some cases"
            measured.add_argument("--cluster", action="append", default=[], metavar="FILE", help=text)
        measured.set_defaults(run=_bench)
    published = benches.add_parser(
        "published", help="predicted against published step seconds and GiB", description=PUBLISHED, allow_abbrev=False
    )
    published.add_argument("rows", metavar="ROWS.json", help="published runs, e.g. published_rows.json")
    _common(published, "only the row of this id, or the rows of this source (default: all)")
    published.add_argument("--out", metavar="FILE", help="write the report here as JSON")
    published.add_argument(
        "--trace", metavar="FILE", help="write the simulated step of one row here (Chrome, Perfetto)"
    )
    published.set_defaults(run=_published)
    claims = benches.add_parser("claims", help=CLAIMS.lower(), description=f"{CLAIMS}.", allow_abbrev=False)
    claims.add_argument("--write", metavar="FILE", help="write the page here, too")
    claims.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    claims.set_defaults(run=_claims)


def _common(parser: ArgumentParser, case: str) -> None:
    parser.add_argument("--case", action="append", default=[], metavar="CASE", help=case)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _bench(options: argparse.Namespace) -> tuple[str, int]:
    from autopar.bench import run, table

    rows = list(run(options.bench, options.case, getattr(options, "cluster", ())))
    return json.dumps({"rows": [asdict(row) for row in rows]}) if options.json else table(rows), DONE


def _published(options: argparse.Namespace) -> tuple[str, int]:
    from autopar.bench.published import published, trace
    from autopar.bench.published_text import text

    for flag in ("out", "trace"):
        check_folder(flag, getattr(options, flag))
    if options.trace and len(options.case) != 1:
        raise AutoparError(f"--trace {options.trace}: a trace is of one row. Name it by --case ID.")
    report = published(options.rows, options.case)
    found = json.dumps(report.to_json(), allow_nan=False)
    if options.trace:
        trace(report, options.trace)
    if options.out:
        write_file("out", options.out, found)
    return found if options.json else text(report), CRASHED if report.crashed else DONE


def _claims(options: argparse.Namespace) -> tuple[str, int]:
    from autopar.bench.claims import claims
    from autopar.bench.claims_text import page

    check_folder("write", options.write)
    found = claims()
    text = page(found)
    if options.write:
        write_file("write", options.write, text)
    return json.dumps(found.to_json(), allow_nan=False) if options.json else text, DONE
