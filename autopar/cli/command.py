"""The ``autopar`` command.

Exit codes: 0 done; 1 the answer is no (a mismatch, nothing fits); 2 bad input or refused, said in one line; 130
interrupted; 70 a crash of ours, with its traceback. With ``--json`` stdout holds one JSON object and nothing else.

>>> main(["verify", "model.py", "--ranks", "2"])
2
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import NoReturn

from autopar.cli.flags import CRASHED, DONE, INTERRUPTED, NO, REFUSED
from autopar.errors import AutoparError, NothingFits

ISSUES = "Please report it with the lines above."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Prints, never raises."""
    words = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # started with it closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    as_json = "--json" in words
    try:
        if not sys.warnoptions:
            warnings.simplefilter("ignore")  # of libraries; what matters to the user is our own line
        options = _parser().parse_args(words)
        with _stdout_kept_for_json(as_json):
            text, code = options.run(options)
        if text:
            print(text, flush=True)
        return int(code)
    except NothingFits as error:
        if as_json:
            print(json.dumps(_nothing_fits(error)), flush=True)
        print(f"autopar: {error}", file=sys.stderr)
        return NO
    except AutoparError as error:
        if as_json:
            print(json.dumps({"ok": False, "error": str(error)}), flush=True)
        print(f"autopar: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("autopar: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter complains once more at exit
        return DONE
    except Exception:
        traceback.print_exc()
        print(f"autopar: this is a bug of autopar, not of your input. {ISSUES}", file=sys.stderr)
        return CRASHED


def _nothing_fits(error: NothingFits) -> dict[str, object]:
    """The keys of every plan, of the one that comes closest where there is one."""
    from autopar.plan import Predicted, Proof
    from autopar.schema import write

    closest: dict[str, object] = {"mesh": {}, "microbatches": None, "predicted": write(Predicted())}
    closest |= {"proof": write(Proof())}
    if error.plan is not None:
        closest = error.plan.to_json()
    return {"ok": False, **closest, "fits": False, "error": str(error)}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = (
            " (one --pin or --set for each KEY=VALUE)" if message.startswith("unrecognized") and "=" in message else ""
        )
        raise AutoparError(f"{message}{hint}. See `{self.prog} --help`.")


def _parser() -> argparse.ArgumentParser:
    from autopar import __version__
    from autopar.cli import bench, check, plan, profile, verify

    parser = _Parser(
        prog="autopar", description="Compile an unmodified PyTorch model for a cluster.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for module in (verify, plan, check, profile, bench):
        module.add(commands)
    return parser


@contextlib.contextmanager
def _stdout_kept_for_json(active: bool) -> Iterator[None]:
    """What models, libraries and rank processes print goes to stderr, so that stdout holds our object alone."""
    if not active:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
