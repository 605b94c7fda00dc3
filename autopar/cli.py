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
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from autopar.errors import AutoparError
from autopar.pins import Pins, resolve
from autopar.schema import nearest, read_file, write

if TYPE_CHECKING:
    from autopar.cluster import Cluster
    from autopar.loading import ModelSpec
    from autopar.plan import Plan
    from autopar.verify import VerifyResult

DONE, NO, REFUSED, CRASHED, INTERRUPTED = 0, 1, 2, 70, 130
ISSUES = "Please report it with the lines above."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Prints, never raises."""
    words = list(sys.argv[1:] if argv is None else argv)
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = (
            " (one --pin or --set for each KEY=VALUE)" if message.startswith("unrecognized") and "=" in message else ""
        )
        raise AutoparError(f"{message}{hint}. See `{self.prog} --help`.")


def _parser() -> argparse.ArgumentParser:
    from autopar import __version__

    parser = _Parser(
        prog="autopar", description="Compile an unmodified PyTorch model for a cluster.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    form = "path/to/file.py:factory or package.module:factory; the factory returns (model, args, kwargs)"

    verify = commands.add_parser("verify", help="compare a plan on local ranks with one process", allow_abbrev=False)
    verify.add_argument("model", metavar="MODEL", nargs="?", help=form)
    verify.add_argument("--ranks", type=int, metavar="N", help="local ranks to run on")
    verify.add_argument(
        "--batch", type=int, metavar="B", help="rows of the global batch (default: those of the model's inputs)"
    )
    verify.add_argument(
        "--plans", metavar="FILE", help='JSON list of pins or of {"model", "pins", "set", "loss", "ranks", "batch"}'
    )
    _common(verify)
    verify.set_defaults(run=_verify)

    plan = commands.add_parser("plan", help="make a plan and write it as JSON", allow_abbrev=False)
    plan.add_argument("model", metavar="MODEL", help=form)
    plan.add_argument("--out", metavar="FILE", help="write plan.json here (without --json)")
    _cluster(plan)
    _common(plan)
    plan.set_defaults(run=_plan)

    explain = commands.add_parser("explain", help="say what a plan does", allow_abbrev=False)
    explain.add_argument("model", metavar="MODEL|PLAN", help="a MODEL as for plan, or a plan.json")
    _cluster(explain)
    _common(explain)
    explain.set_defaults(run=_explain)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pin", action="append", default=[], metavar="KEY=VALUE", help="fix a part of the plan: tp=2, zero=3"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the factory: layers=4"
    )
    parser.add_argument("--loss", metavar="module:function", help="makes the loss of what the model returns")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster", default="local", metavar="NAME|FILE", help="h100-dgx, a100-dgx, local, or a JSON file"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks of the local cluster")
    parser.add_argument(
        "--global-batch", type=int, metavar="B", help="rows of the global batch (default: those of the inputs)"
    )


def _verify(options: argparse.Namespace) -> tuple[str, int]:
    jobs = _jobs(options)
    results: list[VerifyResult | AutoparError] = []
    for (spec, ranks, batch), pins in _grouped(jobs):
        from autopar.verify import verify_many

        try:
            results += verify_many(spec, ranks, pins, batch=batch)
        except AutoparError as error:  # the model is refused, and with it all its plans
            results += [error] * len(pins)
    if not options.plans:
        (only,) = results
        if isinstance(only, AutoparError):
            raise only
        return json.dumps(write(only)) if options.json else _result_text(only), DONE if only.ok else NO
    code = (
        REFUSED if any(isinstance(r, AutoparError) for r in results) else DONE if all(_ok(r) for r in results) else NO
    )
    if options.json:
        rows = [_result_json(job, result) for job, result in zip(jobs, results, strict=True)]
        return json.dumps({"ok": code == DONE, "results": rows}), code
    lines = [_result_line(job, result) for job, result in zip(jobs, results, strict=True)]
    lines.append(f"{sum(map(_ok, results))} of {len(results)} plans equal one process")
    return "\n".join(lines), code


Job = tuple["ModelSpec", int, int | None, Pins]  # model, ranks, batch, pins


def _jobs(options: argparse.Namespace) -> list[Job]:
    """What to verify, in order: one plan from the flags, or the entries of ``--plans``, whose own keys go first."""
    from autopar.loading import ModelSpec

    base = Pins.parse(options.pin)
    if not options.plans:
        for word in ("MODEL", "--ranks"):
            if getattr(options, word.strip("-").lower()) is None:
                raise AutoparError(f"verify: {word} is required. See `autopar verify --help`.")
        spec = ModelSpec.parse(options.model, options.set, options.loss)
        resolve(base, options.ranks, options.batch)
        return [(spec, options.ranks, options.batch, base)]
    entries = read_file(options.plans, who="--plans")
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        raise AutoparError(
            f'--plans {options.plans}: is not a list of objects. Example: [{{"tp": 2}}, {{"dp": 2, "zero": 3}}].'
        )
    return [_job(options, base, entry, f"{options.plans}: at $[{i}]") for i, entry in enumerate(entries)]


def _job(options: argparse.Namespace, base: Pins, entry: Mapping[str, Any], where: str) -> Job:
    from autopar.loading import ModelSpec

    keys = ("model", "pins", "set", "loss", "ranks", "batch")
    if not any(key in keys for key in entry):
        entry = {"pins": entry}
    for key in entry:
        if key not in keys:
            raise AutoparError(
                f"{where}: unknown key {key!r}{nearest(key, keys) or '.'} Legal: {', '.join(keys)}, or pins alone."
            )
    for key, kind in (("model", str), ("pins", dict), ("set", dict), ("loss", str), ("ranks", int), ("batch", int)):
        if entry.get(key) is not None and (not isinstance(entry[key], kind) or isinstance(entry[key], bool)):
            raise AutoparError(f"{where}.{key}: {json.dumps(entry[key])} is not a {kind.__name__}.")
    flags = {"model": options.model, "ranks": options.ranks, "batch": options.batch, "loss": options.loss}
    given = flags | {key: value for key, value in entry.items() if value is not None}
    for key, flag in (("model", "MODEL"), ("ranks", "--ranks")):
        if given[key] is None:
            raise AutoparError(f"{where}: names no {key}. Add the key {key!r}, or give {flag} for all.")
    try:
        spec = ModelSpec.parse(given["model"], options.set, given["loss"])
        spec = replace(spec, options={**spec.options, **given.get("set", {})})
        pins = Pins.parse({**base.given(), **given.get("pins", {})})
        resolve(pins, given["ranks"], given["batch"])
    except AutoparError as error:
        raise AutoparError(f"{where}: {error}") from None
    return spec, given["ranks"], given["batch"], pins


def _grouped(jobs: Sequence[Job]) -> Iterator[tuple[tuple[ModelSpec, int, int | None], list[Pins]]]:
    """Neighbouring jobs of one model, rank count and batch together: the model is captured once for them."""
    groups: list[tuple[tuple[ModelSpec, int, int | None], list[Pins]]] = []
    for spec, ranks, batch, pins in jobs:
        if groups and groups[-1][0] == (spec, ranks, batch):
            groups[-1][1].append(pins)
        else:
            groups.append(((spec, ranks, batch), [pins]))
    yield from groups


def _ok(result: VerifyResult | AutoparError) -> bool:
    return not isinstance(result, AutoparError) and result.ok


def _result_json(job: Job, result: VerifyResult | AutoparError) -> dict[str, Any]:
    head = {"model": job[0].target, "pins": job[3].text()}
    if isinstance(result, AutoparError):
        return {**head, "ok": False, "ranks": job[1], "error": str(result)}
    return {**head, **write(result)}


def _result_line(job: Job, result: VerifyResult | AutoparError) -> str:
    if isinstance(result, AutoparError):
        return f"refused  {job[0].target} {job[3].text()}: {result}"
    worst = result.worst[0] if result.worst else None
    error = f"worst {worst.rel:.1e} ({worst.kind} {worst.name})" if worst else ""
    return f"{'equal  ' if result.ok else 'DIFFERS'}  {job[0].target} {result.plan}  {error}  {result.seconds:.1f} s"


def _result_text(result: VerifyResult) -> str:
    lines = [f"{'equal to' if result.ok else 'DIFFERS FROM'} one process: {result.plan} ({result.seconds:.1f} s)"]
    lines += [f"  {e.kind:<10} {e.name:<48} abs {e.abs:.1e}  rel {e.rel:.1e}" for e in result.worst[:8]]
    for axis, share in result.divided.items():
        lines.append(f"  {axis} takes off a rank: {_shares(write(share))}")
    lines += [f"  limits: {', '.join(result.limits)}"] * bool(result.limits)
    return "\n".join(lines)


def _shares(share: Mapping[str, float | None]) -> str:
    return ", ".join(f"{value:.1%} of {name.replace('_', ' ')}" for name, value in share.items() if value is not None)


def _plan(options: argparse.Namespace) -> tuple[str, int]:
    plan = _make_plan(options)
    if options.json:
        return json.dumps(plan.to_json(), sort_keys=True), DONE
    if options.out:
        plan.save(options.out)
        return f"{plan.one_line()}: written to {options.out}", DONE
    return plan.dumps().rstrip("\n"), DONE


def _explain(options: argparse.Namespace) -> tuple[str, int]:
    from autopar.explain import explain
    from autopar.plan import Plan

    if options.model.endswith(".json"):
        for flag in ("pin", "set", "loss", "nodes", "ranks", "global_batch"):
            if getattr(options, flag):
                name = flag.replace("_", "-")
                raise AutoparError(f"--{name}: {options.model} is a finished plan. Leave it out, or name a MODEL.")
        plan = Plan.load(options.model)
    else:
        plan = _make_plan(options)
    page = explain(plan)
    code = NO if page.fits is False else DONE
    if options.json:
        return json.dumps(page.to_json()), code
    return page.text(shutil.get_terminal_size((160, 24)).columns if sys.stdout.isatty() else 160), code


def _make_plan(options: argparse.Namespace) -> Plan:
    from autopar.loading import ModelSpec

    spec = ModelSpec.parse(options.model, options.set, options.loss)
    pins, cluster = Pins.parse(options.pin), _cluster_of(options)
    resolve(pins, cluster.ranks, options.global_batch)
    loaded = spec.load()
    from autopar import compile

    parallel = compile(
        loaded.model,
        cluster,
        args=loaded.args,
        kwargs=loaded.kwargs,
        loss=loaded.loss,
        pins=pins,
        global_batch=options.global_batch,
    )
    return parallel.detailed_plan()


def _cluster_of(options: argparse.Namespace) -> Cluster:
    from autopar.cluster import Cluster

    if options.cluster == "local":
        if options.nodes not in (None, 1):
            raise AutoparError(
                f"--nodes {options.nodes}: the local cluster is this machine. Use --ranks, or another --cluster."
            )
        return Cluster.local(options.ranks)
    if options.ranks is not None:
        raise AutoparError(
            f"--ranks {options.ranks}: the cluster {options.cluster} says how many ranks a node has. Use --nodes."
        )
    return Cluster.load(options.cluster, nodes=1 if options.nodes is None else options.nodes)


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
