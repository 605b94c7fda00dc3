"""``autopar plan`` and ``autopar explain``: make a plan, say what it does, and price others beside it."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.flags import DONE, FORM, NO, cluster_flags, cluster_of, common_flags
from autopar.errors import AutoparError, NothingFits
from autopar.pins import Pins, resolve
from autopar.solver.effort import GAP, Effort

if TYPE_CHECKING:
    from autopar.capture import Capture
    from autopar.cluster import Cluster
    from autopar.compile import Parallel
    from autopar.explain.page import Section
    from autopar.explain.why_not import Other
    from autopar.loading import LoadedModel
    from autopar.plan import Plan

PROBLEM = ".npz"
ALSO = ("next", "prices", "pareto")
MOST_ROWS = 1 << 24  # of a global batch: rows are listed one by one
PIN = re.compile(r"[\s,]+(?=[\w.]+=)")  # between pins of one word; a comma inside a value stays

ELSEWHERE = (
    "loss",
    "cluster",
    "nodes",
    "ranks",
    "global_batch",
    "optimizer",
    "gap",
    "time_limit",
)  # flags of what is neither a plan nor a reference model
FORMULAS = (
    "instead of a MODEL: FLOPs and bytes of a reference model in its own symbols: gpt or llama, then any of tp sp cp "
    "tied dropout experts; with sizes (--set s=4096) their values, too"
)


def add(commands: Any) -> None:
    """Add both commands to a parser."""
    plan = commands.add_parser("plan", help="make a plan and write it as JSON", allow_abbrev=False)
    plan.add_argument("model", metavar="MODEL", help=FORM)
    plan.add_argument("--out", metavar="FILE", help="write plan.json here (without --json)")
    plan.add_argument(
        "--emit", metavar="DIR", help="write the program of all ranks as Python here, beside plan.json (load_program)"
    )
    plan.add_argument("--problem", metavar="FILE", help=f"save what the solver was given ({PROBLEM}), for `check`")
    cluster_flags(plan)
    common_flags(plan)
    _training_flags(plan)
    plan.set_defaults(run=_plan)

    explain = commands.add_parser("explain", help="say what a plan does", allow_abbrev=False)
    explain.add_argument("model", nargs="?", metavar="MODEL|PLAN", help="a MODEL as for plan, or a plan.json")
    explain.add_argument("--formulas", nargs="+", metavar="WORD", help=FORMULAS)
    explain.add_argument(
        "--also",
        action="append",
        default=[],
        choices=ALSO,
        help="solve again, each as long as planning or longer: next (the ten next-best plans, predicted), prices (one "
        "more GiB, one more node, faster links), pareto (plans within less memory)",
    )
    explain.add_argument(
        "--why-not",
        action="append",
        default=[],
        metavar="PINS",
        help="price another plan beside it: 'tp=8 zero=3', recompute=none; of a plan.json: what its proof says of it",
    )
    cluster_flags(explain)
    common_flags(explain)
    _training_flags(explain)
    explain.set_defaults(run=_explain)


def _training_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--optimizer",
        metavar="NAME",
        help="one of torch.optim, whose states count: adamw (default), sgd,momentum=0.9",
    )
    command.add_argument(
        "--gap", type=float, metavar="SHARE", help=f"how near to the best a plan must be proved (default {GAP})"
    )
    command.add_argument(
        "--time-limit", type=float, metavar="S", help="end the search after S seconds, with the best plan so far"
    )
    command.add_argument(
        "--dropout",
        choices=("exact", "per-rank"),
        default="exact",
        help="per-rank: torch's own kernels, which drop otherwise on every rank",
    )


@dataclass(frozen=True)
class Asked:
    """A model on a cluster, as the flags say, loaded once."""

    loaded: LoadedModel
    cluster: Cluster
    pins: Pins
    batch: int | None
    dropout: str
    optimizer: str | None
    effort: Effort

    @staticmethod
    def of(options: argparse.Namespace) -> Asked:
        """Everything that can be refused without the model is refused before it is loaded."""
        from autopar.loading import ModelSpec

        spec = ModelSpec.parse(options.model, options.set, options.loss)
        pins, cluster = Pins.parse(options.pin), cluster_of(options)
        _refuse(pins, cluster, options.global_batch)
        effort = Effort(GAP if options.gap is None else options.gap, options.time_limit)
        return Asked(spec.load(), cluster, pins, options.global_batch, options.dropout, options.optimizer, effort)

    def compile(self, pins: Pins) -> Parallel:
        """The model planned with these pins."""
        from autopar import compile
        from autopar.cli.progress import watched

        with watched() as watch:
            return compile(
                self.loaded.model,
                self.cluster,
                args=self.loaded.args,
                kwargs=self.loaded.kwargs,
                loss=self.loaded.loss,
                pins=pins,
                global_batch=self.batch,
                dropout=self.dropout,
                optimizer=self.optimizer,
                gap=self.effort.gap,
                time_limit=self.effort.time_limit,
                watch=watch,
            )


def _refuse(pins: Pins, cluster: Cluster, batch: int | None) -> None:
    """Pins that do not fit the cluster; rows only where dp, tp or sp say how ranks share them."""
    if batch is not None and batch < 1:
        raise AutoparError(f"batch: {batch} is not a number of rows. Legal: 1 or more.")
    if batch is not None and batch > MOST_ROWS:
        raise AutoparError(f"batch: {batch:,} rows are more than a plan is made for. Legal: up to {MOST_ROWS:,}.")
    resolve(pins, cluster.ranks, batch if pins.axes else None)


def _plan(options: argparse.Namespace) -> tuple[str, int]:
    import torch

    from autopar.choosing.plan_training import is_searched
    from autopar.emit import refuse_device

    for flag in ("out", "problem"):
        _refuse_folder(flag, getattr(options, flag))
    if options.emit and (Path(options.emit).is_file() or not Path(options.emit).parent.is_dir()):
        raise AutoparError(f"--emit {options.emit}: not a folder in a folder that exists. Name one.")
    asked = Asked.of(options)
    if options.emit:
        refuse_device(torch.device(asked.cluster.device))
    if options.problem and (asked.pins.pp or 1) > 1 and not is_searched(asked.pins):
        raise AutoparError(
            f"--problem {options.problem}: nothing is proved where cuts, order or axes of stages are pinned. "
            "Leave it out."
        )
    parallel = asked.compile(asked.pins)
    plan = parallel.detailed_plan()
    if options.problem:
        _save_search(parallel, options.problem)
    if options.emit:
        parallel.save_source(options.emit)
    if options.json:
        return json.dumps(plan.to_json(), sort_keys=True), DONE
    if options.out:
        plan.save(options.out)
    if options.out or options.emit:
        return f"{plan.one_line()}: written to {' and '.join(filter(None, (options.out, options.emit)))}", DONE
    return plan.dumps().rstrip("\n"), DONE


def _refuse_folder(flag: str, path: str | None) -> None:
    """Minutes of planning must not end at a folder that is not there."""
    if path is None:
        return
    if flag == "problem" and Path(path).suffix != PROBLEM:
        raise AutoparError(f"--problem {path}: must end in {PROBLEM}.")
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        what = "is a folder" if Path(path).is_dir() else f"there is no folder {Path(path).parent}"
        raise AutoparError(f"--{flag} {path}: {what}. Name a file.")


def _explain(options: argparse.Namespace) -> tuple[str, int]:
    from autopar.explain import explain
    from autopar.explain.recorded import recorded
    from autopar.explain.why_not import as_json, why_not

    if options.formulas:
        return _formulas(options)
    if options.model is None:
        raise AutoparError("explain: nothing to explain. Name a MODEL or a plan.json, or --formulas llama tp.")
    wanted = [Pins.parse(_pins(text)) for text in options.why_not]
    if options.model.endswith(".json"):
        plan, error = _finished(options), None
        again: list[Section] = []
        others = [recorded(plan, pins) for pins in wanted]
    else:
        asked = Asked.of(options)
        plan, error, captured = _chosen(asked)
        others = [_other(asked, pins, captured, plan) for pins in wanted]
        plan, again = _also(options.also, asked, plan, captured)
    page = explain(plan, (why_not(plan, others), *again))
    fits = False if error is not None else page.fits
    code = NO if fits is False else DONE
    if error is not None:
        print(f"autopar: {error}", file=sys.stderr)
    if options.json:
        more: dict[str, Any] = {"why_not": [as_json(plan, other) for other in others]} if others else {}
        more |= {"error": str(error)} if error is not None else {}
        return json.dumps({**page.to_json(), "fits": fits, **more}), code
    return page.text(_width()), code


def _also(also: Sequence[str], asked: Asked, plan: Plan, captured: Capture | None) -> tuple[Plan, list[Section]]:
    """What is solved again: the plan with its next-best ones, and sections. Nothing, where nothing fits."""
    from autopar.explain.pareto import pareto
    from autopar.explain.shadow_prices import shadow_prices
    from autopar.what_if import Conditions, next_best
    from autopar.what_if import pareto as within_less
    from autopar.what_if import shadow_prices as with_more

    if captured is None:
        return plan, []
    conditions = Conditions(captured, asked.pins, asked.cluster, asked.effort)
    if "next" in also:
        plan = next_best(conditions, plan)
    prices = shadow_prices(plan, with_more(conditions)) if "prices" in also else shadow_prices(plan)
    front = within_less(conditions, plan) if "pareto" in also else ()
    return plan, [prices, pareto(plan, front)]


def _width() -> int:
    return shutil.get_terminal_size((160, 24)).columns if sys.stdout.isatty() else 160


def _formulas(options: argparse.Namespace) -> tuple[str, int]:
    from autopar.explain.reference import formulas_of

    _refuse_flags(
        options, ("model", "why_not", "also", "pin", *ELSEWHERE), "--formulas are of a reference model. Leave it out"
    )
    page = formulas_of(options.formulas, options.set)
    return json.dumps(page.to_json()) if options.json else page.text(_width()), DONE


def _refuse_flags(options: argparse.Namespace, flags: Iterable[str], why: str) -> None:
    for flag in flags:
        if getattr(options, flag) not in (None, []):
            name = "MODEL" if flag == "model" else f"--{flag.replace('_', '-')}"
            raise AutoparError(f"{name}: {why}.")


def _finished(options: argparse.Namespace) -> Plan:
    from autopar.plan import Plan

    why = f"{options.model} is a finished plan. Leave it out, or name a MODEL"
    _refuse_flags(options, ("pin", "set", "also", *ELSEWHERE), why)
    return Plan.load(options.model)


def _chosen(asked: Asked) -> tuple[Plan, NothingFits | None, Capture | None]:
    """The plan and what it was made of; where nothing fits the plan that comes closest, and the error."""
    try:
        parallel = asked.compile(asked.pins)
        return parallel.detailed_plan(), None, parallel.captured
    except NothingFits as error:
        if error.plan is None:
            raise
        return error.plan, error, None


def _pins(text: str) -> list[str]:
    """``tp=8 zero=3``, ``tp=8,zero=3`` as the words of pins."""
    words = [word for word in PIN.split(text.strip(" ,")) if word]
    if not words:
        raise AutoparError("--why-not: names no pin. Example: --why-not tp=8.")
    return words


def _other(asked: Asked, pins: Pins, captured: Capture | None, chosen: Plan) -> Other:
    """The plan with these pins before those of the command line, or why there is none. An order or chunks without
    ``pp`` are of the stages that the chosen plan has."""
    from autopar.choosing.plan_training import plan_training
    from autopar.explain.why_not import Other
    from autopar.mixed_precision import precision

    try:
        staged = {"pp": str(chosen.pp)} if {"schedule", "vp", "cut"} & pins.named() and chosen.pp > 1 else {}
        both: Mapping[str, str] = {**asked.pins.given(), **staged, **pins.given()}
        parsed = Pins.parse(both)
        _refuse(parsed, asked.cluster, asked.batch)
        same = captured is not None and captured.precision == precision(parsed.param_dtype, parsed.reduce_dtype)
        if captured is None or not captured.training or not same:
            return Other(pins.text(), asked.compile(parsed).plan)
        return Other(pins.text(), plan_training(captured, parsed, asked.cluster, {}, asked.effort).plan)
    except NothingFits as error:
        return Other(pins.text(), error.plan, str(error), fits=False)
    except AutoparError as error:
        return Other(pins.text(), None, str(error))


def _save_search(parallel: Parallel, path: str) -> None:
    """What the solver went through, for `check --proof`."""
    from autopar.solver.file import save

    if parallel.search is None:
        raise _no_search(path)
    save(path, parallel.search)


def _no_search(path: str) -> AutoparError:
    return AutoparError(f"--problem {path}: the plan was made by another rank: no problem. Run one process.")
