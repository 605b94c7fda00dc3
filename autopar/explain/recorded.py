"""What a plan file alone says of other pins: that they are illegal, kept already, or how fast they are at most.

The proof lists every candidate of the search with a bound. All plans that keep some pins are among the candidates with
their stages, microbatches and sizes of axes, so the least bound of these holds. Seconds of such a plan need the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from autopar.errors import AutoparError
from autopar.explain.quantities import seconds_text
from autopar.explain.why_not import Other
from autopar.pins import Pins, ResolvedPins, resolve
from autopar.plan import Alternative, Plan
from autopar.solver.pipes import NO_PIPE, Pipe
from autopar.solver.proof import each

ABSENT = "not in the file, which lists {what}: autopar explain MODEL --why-not '{pins}' solves it"


def recorded(plan: Plan, pins: Pins) -> Other:
    """The answer for ``pins``, from the file alone."""
    text = pins.text()
    if keeps(_words(plan), pins):
        return Other(text, plan)
    try:
        resolved = resolve(_beside(plan, pins), plan.ranks, plan.batch if pins.axes else None)
    except AutoparError as error:
        return Other(text, error=str(error))
    entries = candidates(plan)
    found = [entry for entry in entries if _is_of(entry, pins, resolved)]
    if not found:
        return Other(text, error=ABSENT.format(what=_listed(entries), pins=text), open=True)
    bounds = [entry.get("bound") for entry in found if entry["by"] not in ("illegal", "memory")]
    if not bounds:
        whys = dict.fromkeys(str(entry.get("why") or "its least bytes are above the limit") for entry in found)
        fits = False if any(entry["by"] == "memory" for entry in found) else None
        return Other(text, error="; ".join(whys), fits=fits)
    return Other(text, bound=min(b or 0.0 for b in bounds), error=_ends(found) + _known(plan, pins))


def candidates(plan: Plan) -> list[Mapping[str, Any]]:
    """The candidates of the search in the plan's proof; none of a file that says something else there."""
    pruned = plan.proof.scope.get("pruned", ())
    rows = [row for row in pruned if isinstance(row, Mapping)] if isinstance(pruned, list) else []
    return [entry for entry in each(rows) if {"mesh", "microbatches", "by"} <= entry.keys()]


def pipe_of(entry: Mapping[str, Any]) -> Pipe:
    """The pipeline of a candidate in a proof."""
    return Pipe(*entry["pipe"]) if "pipe" in entry else NO_PIPE


def keeps(words: Mapping[str, str], pins: Pins) -> bool:
    """Whether a plan in such words keeps all pins."""
    return all(words.get(key) == value for key, value in pins.given().items())


def _beside(plan: Plan, pins: Pins) -> Pins:
    """An order or chunks are of the stages that the plan has."""
    staged = {"schedule", "vp", "cut"} & pins.named() and pins.pp is None and plan.pp > 1
    return Pins.parse({**pins.given(), "pp": plan.pp}) if staged else pins


def _words(plan: Plan) -> dict[str, str]:
    """A plan in the words of pins."""
    schedule, mesh = plan.schedule, plan.mesh
    found: dict[str, Any] = {"pp": plan.pp, "vp": schedule.virtual, "microbatches": plan.microbatches}
    found |= {"schedule": schedule.name, "zero": plan.zero, "recompute": plan.recompute}
    return {key: str(value) for key, value in (found | _degrees(mesh)).items()} | dict(plan.pins)


def _words_of(other: Alternative) -> dict[str, str]:
    """The same of what a next-best plan says of itself."""
    words = dict(word.split("=", 1) for word in other.change.split() if "=" in word)
    sizes = {name: int(size) for name, size in words.items() if size.isdecimal()}
    return {"pp": "1", "recompute": "none", **words, **{key: str(n) for key, n in _degrees(sizes).items()}}


def _degrees(mesh: Mapping[str, int]) -> dict[str, int]:
    return {
        "dp": prod(size for name, size in mesh.items() if name.startswith("dp")),
        "ep": mesh.get("ep", 1),
        "cp": mesh.get("cp", 1),
        "tp": mesh.get("tp", 1),
    }


def _is_of(entry: Mapping[str, Any], pins: Pins, resolved: ResolvedPins) -> bool:
    """Whether plans that keep the pins may be among those of a candidate."""
    pipe = pipe_of(entry)
    has = {"pp": pipe.ranks, "vp": pipe.virtual, "schedule": pipe.schedule, "microbatches": entry["microbatches"]}
    if any(getattr(pins, key) not in (None, value) for key, value in has.items()):
        return False
    sizes = sorted(size for size, _ in entry["mesh"])
    return not pins.axes or sizes == sorted(size for _, size in resolved.axes())


def _ends(entries: Sequence[Mapping[str, Any]]) -> str:
    """``no such plan is faster: 12 candidates, 10 by roofline, 2 by solved``."""
    ends = Counter(str(entry["by"]) for entry in entries)
    return f"no such plan takes less: {len(entries)} candidates, {', '.join(f'{n} {by}' for by, n in ends.items())}"


def _known(plan: Plan, pins: Pins) -> str:
    """The fastest of the next-best plans that keeps the pins: one of those that the bound is of."""
    found = [a for a in plan.alternatives if a.kind == "next" and a.step_time_s and keeps(_words_of(a), pins)]
    first = min(found, key=lambda a: a.step_time_s or 0.0, default=None)
    return "" if first is None else f"; {first.change} takes {seconds_text(first.step_time_s or 0.0)}"


def _listed(entries: Sequence[Mapping[str, Any]]) -> str:
    if not entries:
        return "no candidates"
    counts = sorted({entry["microbatches"] for entry in entries})
    stages = sorted({pipe_of(entry).ranks for entry in entries})
    return f"microbatches={','.join(map(str, counts))} and pp={','.join(map(str, stages))}"


__all__ = ["candidates", "pipe_of", "recorded"]
