"""``autopar verify``: plans on local ranks against one process."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autopar.cli.flags import DONE, FORM, NO, REFUSED, common_flags
from autopar.errors import AutoparError
from autopar.pins import Pins, resolve
from autopar.schema import nearest, read_file, write

if TYPE_CHECKING:
    from autopar.cluster import Cluster
    from autopar.loading import ModelSpec
    from autopar.verify import VerifyResult


def add(commands: Any) -> None:
    """Add the command to a parser."""
    verify = commands.add_parser("verify", help="compare a plan on local ranks with one process", allow_abbrev=False)
    verify.add_argument("model", metavar="MODEL", nargs="?", help=FORM)
    verify.add_argument("--ranks", type=int, metavar="N", help="local ranks to run on")
    verify.add_argument(
        "--batch", type=int, metavar="B", help="rows of the global batch (default: those of the model's inputs)"
    )
    verify.add_argument(
        "--plans", metavar="FILE", help='JSON list of pins or of {"model", "pins", "set", "loss", "ranks", "batch"}'
    )
    verify.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="plan for the figures and memory of this cluster of as many ranks (default: this machine)",
    )
    common_flags(verify)
    verify.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> tuple[str, int]:
    jobs, cluster = _jobs(options), _cluster(options)
    results: list[VerifyResult | AutoparError] = []
    for (spec, ranks, batch), pins in _grouped(jobs):
        from autopar.verify import verify_many

        try:
            results += verify_many(spec, ranks, pins, batch=batch, cluster=cluster)
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


def _cluster(options: argparse.Namespace) -> Cluster | None:
    """The cluster that plans are made for; None: this machine, with as many ranks as the job has."""
    if options.cluster in (None, "local"):
        return None
    from autopar.cluster import Cluster

    return Cluster.load(options.cluster)


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
        _refuse(base, options.ranks, options.batch)
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
        _refuse(pins, given["ranks"], given["batch"])
    except AutoparError as error:
        raise AutoparError(f"{where}: {error}") from None
    return spec, given["ranks"], given["batch"], pins


def _refuse(pins: Pins, ranks: int, batch: int | None) -> None:
    """Pins that cannot be kept; rows only where dp, tp or sp say how ranks share them."""
    resolve(pins, ranks, batch if pins.axes else None)


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
    lines += [f"  probed, not proved: {', '.join(result.probed)}"] * bool(result.probed)
    return "\n".join(lines)


def _shares(share: Mapping[str, float | None]) -> str:
    return ", ".join(f"{value:.1%} of {name.replace('_', ' ')}" for name, value in share.items() if value is not None)
