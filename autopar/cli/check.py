"""``autopar check``: a plan file against itself, and its bounds against the problem that they are of."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from autopar.check_figures import check_figures
from autopar.cli.flags import DONE, NO
from autopar.errors import AutoparError
from autopar.explain.quantities import several
from autopar.plan import Plan
from autopar.schema import write


def add(commands: Any) -> None:
    """Add the command to a parser."""
    check = commands.add_parser("check", help="validate a plan file, and its proof", allow_abbrev=False)
    check.add_argument("plan", metavar="PLAN", help="a plan.json")
    check.add_argument("--proof", action="store_true", help="recompute every bound from --problem, by other code")
    check.add_argument("--problem", metavar="FILE", help="what `autopar plan --problem` saved")
    check.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    check.set_defaults(run=_check)


@dataclass(frozen=True)
class Line:
    """One thing that was checked."""

    ok: bool
    text: str


def _check(options: argparse.Namespace) -> tuple[str, int]:
    if options.proof != (options.problem is not None):
        given, missing = ("--proof", "--problem") if options.proof else ("--problem", "--proof")
        raise AutoparError(f"{given}: needs {missing}. Bounds are recomputed from the problem that the plan came with.")
    plan = Plan.load(options.plan)
    lines = [Line(True, text) for text in _form(plan)]
    lines += [Line(checked.ok, str(checked)) for checked in check_figures(plan)]
    if options.proof:
        lines += _proof(plan, options.problem)
    code = DONE if all(line.ok for line in lines) else NO
    if options.json:
        rows = [{"ok": line.ok, "what": line.text} for line in lines]
        return json.dumps({"ok": code == DONE, "plan": plan.one_line(), "checked": rows}), code
    head = f"{options.plan}: {'every check passed' if code == DONE else 'NOT what it says'} ({plan.one_line()})"
    return "\n".join([head, *(f"  {'ok     ' if line.ok else 'DIFFERS'}  {line.text}" for line in lines)]), code


def _form(plan: Plan) -> list[str]:
    """What reading the file has checked already."""
    ops = sum(len(group.ops) for group in plan.classes)
    classes, units = several(len(plan.classes), "class"), several(len(plan.units), "unit")
    return [
        f"schema {plan.schema}, types and legal values",
        f"mesh and {several(len(plan.axes), 'axis')}: {several(plan.ranks, 'rank')} of the cluster's",
        f"{units} of {classes}: {several(ops, 'op')}, a choice an axis",
        f"{several(len(plan.parameters), 'parameter')}: rest, use and gather agree",
    ]


def _proof(plan: Plan, path: str) -> list[Line]:
    from autopar.solver.check_proof import check
    from autopar.solver.proof import each

    entries = plan.proof.scope.get("pruned")
    if plan.proof.bound is None or not isinstance(entries, list):
        raise AutoparError("--proof: the plan has no bound (it was not searched, or nothing fits). Leave --proof out.")
    differences = check(write(plan.proof), path)
    if differences:
        return [Line(False, text) for text in differences]
    return [Line(True, f"{several(len(list(each(entries))), 'bound')}, objective and gap: found again from {path}")]
