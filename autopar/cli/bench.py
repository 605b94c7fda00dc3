"""``autopar bench``: run a benchmark and print its rows."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from autopar.cli.flags import DONE

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction


def add(commands: _SubParsersAction[ArgumentParser]) -> None:
    """The command and its flags."""
    bench = commands.add_parser("bench", help="measure planning, or training on this machine", allow_abbrev=False)
    bench.add_argument(
        "bench", metavar="NAME", help="planner: seconds, memory and gap; local: against one process and DDP"
    )
    bench.add_argument("--case", action="append", default=[], metavar="CASE", help="only this case (default: all)")
    bench.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    bench.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> tuple[str, int]:
    from autopar.bench import run, table

    rows = list(run(options.bench, options.case))
    return json.dumps({"rows": [asdict(row) for row in rows]}) if options.json else table(rows), DONE
