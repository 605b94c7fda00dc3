"""``autopar bench``: run a benchmark and print its rows, or price published ones."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopar.cli.flags import CRASHED, DONE, NO, check_folder, write_file
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

MEASURED = {
    "planner": "seconds, memory and gap of planning",
    "local": "predicted against measured seconds and bytes of training on this machine's ranks",
    "runtime": "training on this machine's ranks beside eager, DDP, FSDP2, DTensor and torch's pipelines",
    "machinery": "what a step costs beside its kernels, by tensors, microbatches, stages and ranks",
    "testbed": "the chosen plan against others on hosts of this machine with links of a given rate (needs root)",
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
        measured.add_argument("--out", metavar="FOLDER", help="write rows.json and a page with plots into this folder")
        if name == "local":
            text = "a file of `autopar profile`, of the ranks of some cases"
            measured.add_argument("--cluster", action="append", default=[], dest="clusters", metavar="FILE", help=text)
        if name == "testbed":
            measured.add_argument("--hosts", type=int, default=2, metavar="N", help="network namespaces (default: 2)")
            measured.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of a host (default: 2)")
            text = "what a link carries, as tc writes it, or none: unlimited; may be given again (default: 200mbit)"
            measured.add_argument("--rate", action="append", dest="rates", metavar="RATE", help=text)
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
    published.add_argument(
        "--choose",
        action="store_true",
        help="choose a configuration for each tier-A H100 run's model, cluster and batch, and print it beside theirs",
    )
    published.add_argument("--plan", metavar="PLAN.json", help="with --choose: price this plan for the one row, too")
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

    own = {"local": ("clusters",), "testbed": ("hosts", "ranks", "rates")}.get(options.bench, ())
    given = {name: value for name in own if (value := getattr(options, name)) is not None}
    rows = list(run(options.bench, options.case, **given))
    if options.out:
        from autopar.bench.page import write

        write(rows, options.out)
    if not options.json:
        return table(rows), DONE
    cells: list[dict[str, Any]] = [{"name": row.name, **row.figures} for row in rows]
    for cell in cells:
        if "low" in cell:
            cell["interval"] = [cell["low"], cell["high"]]
    found: dict[str, Any] = {"rows": [asdict(row) for row in rows], "cells": cells}
    if options.bench == "testbed":
        from autopar.bench.testbed import summary

        found |= summary(cells)
    return json.dumps(found), DONE


def _published(options: argparse.Namespace) -> tuple[str, int]:
    from autopar.bench.published import published, trace
    from autopar.bench.published_text import text

    for flag in ("out", "trace"):
        check_folder(flag, getattr(options, flag))
    if options.choose:
        return _choose(options)
    if options.plan:
        raise AutoparError(f"--plan {options.plan}: is priced beside a choice. Add --choose.")
    if options.trace and len(options.case) != 1:
        raise AutoparError(f"--trace {options.trace}: a trace is of one row. Name it by --case ID.")
    report = published(options.rows, options.case)
    found = json.dumps(report.to_json(), allow_nan=False)
    if options.trace:
        trace(report, options.trace)
    if options.out:
        write_file("out", options.out, found)
    return found if options.json else text(report), CRASHED if report.crashed else DONE


def _choose(options: argparse.Namespace) -> tuple[str, int]:
    from autopar.bench.published_choice import beside, plan_beside, text, to_json

    for flag, why in (
        ("trace", "is of one published run. Leave out --choose"),
        ("json", "has no plans. Leave out --plan"),
    ):
        if getattr(options, flag) and (flag == "trace" or options.plan):
            raise AutoparError(f"--{flag}: {why}.")
    chosen = beside(options.rows, options.case)
    found = json.dumps(to_json(chosen), allow_nan=False)
    if options.out:
        write_file("out", options.out, found)
    page = found if options.json else text(chosen)
    if options.plan:
        page += "\n" + plan_beside(options.plan, options.rows, options.case)
    return page, DONE if all(b.dominates for b in chosen) else NO


def _claims(options: argparse.Namespace) -> tuple[str, int]:
    from autopar.bench.claims import claims
    from autopar.bench.claims_text import page

    check_folder("write", options.write)
    found = claims()
    text = page(found)
    if options.write:
        write_file("write", options.write, text)
    return json.dumps(found.to_json(), allow_nan=False) if options.json else text, DONE
