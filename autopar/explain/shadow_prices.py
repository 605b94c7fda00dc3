"""What one more of something would be worth: bounded from the plan alone, or solved again where that is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autopar.explain.collectives import seconds_of
from autopar.explain.page import Row, Section
from autopar.explain.quantities import GIB, seconds_text
from autopar.explain.recorded import candidates, pipe_of
from autopar.explain.why_not import Other
from autopar.plan import Plan

TITLE = "Shadow prices"
COLUMNS = ("given", "saves a step", "from")


def shadow_prices(plan: Plan, solved: Iterable[Other] = ()) -> Section:
    """The section, of what is ``solved`` where there is something; empty without a predicted step."""
    step = plan.predicted.step_time_s
    rows = tuple(_solved(step, other) for other in solved) if step else ()
    if rows:
        return Section(TITLE, rows, COLUMNS, "Each solved again: another plan may be the best there.")
    note = "From the plan alone; `autopar explain MODEL --also prices` solves each again."
    return Section(TITLE, tuple(_bounds(plan, step)) if step else (), COLUMNS, note)


def _solved(step: float, other: Other) -> Row:
    found = None if other.plan is None else other.plan.predicted.step_time_s
    if found is None or other.answer not in ("fits", "legal"):
        return other.pins, "", other.error or other.answer
    assert other.plan is not None
    return other.pins, _signed(step - found), other.plan.one_line()


def _signed(seconds: float) -> str:
    return seconds_text(seconds) if seconds >= 0 else f"-{seconds_text(-seconds)}"


def _bounds(plan: Plan, step: float) -> Iterator[Row]:
    price = per_byte(plan)
    if price is not None:
        worth = "nothing: memory does not bind" if price == 0 else f"at most {seconds_text(price * GIB)}"
        yield "one more GiB a rank", worth, "the multiplier of memory in the proof, beside the gap"
    if plan.cluster.name != "local":
        worth = f"at most {seconds_text(step / (plan.cluster.nodes + 1))}"
        yield "one more node", worth, "all work shared by one node more"
    for tier in dict.fromkeys(tiers(plan).values()):
        saved = step - at_twice(plan, tier)
        yield f"{tier} at twice the bandwidth", seconds_text(saved), "this plan, its collectives there in half the time"


def per_byte(plan: Plan) -> float | None:
    """Seconds that a byte of a rank's memory is worth, by the multipliers of the chosen candidate's bound; None where
    the file has none. Of stages, whose fullest rank alone is priced, too."""
    sizes = sorted(a.size for a in plan.axes if not a.is_time)
    for entry in candidates(plan):
        pipe, schedule = pipe_of(entry), plan.schedule
        same = (pipe.ranks, pipe.virtual, pipe.schedule) == (plan.pp, schedule.virtual, schedule.name)
        same = same and entry["microbatches"] == plan.microbatches
        if same and entry["by"] == "solved" and sorted(size for size, _ in entry["mesh"]) == sizes:
            found = [m[1] for m in entry.get("multipliers", ()) if m[1] is not None]
            return max(found, default=None)
    return None


def tiers(plan: Plan) -> dict[str, str]:
    """The tier of each axis that something moves over."""
    found = {a.name: a.tier for a in plan.axes if not a.is_time} | ({"pp": plan.schedule.tier} if plan.pp > 1 else {})
    moved = {c.axis for c in plan.predicted.collectives}
    return {axis: tier for axis, tier in found.items() if axis in moved}


def at_twice(plan: Plan, tier: str) -> float:
    """Seconds of the step with the collectives of a tier in half their time."""
    parts, over = plan.predicted.parts, tiers(plan)
    saved = {True: 0.0, False: 0.0}
    for c in plan.predicted.collectives:
        if over.get(c.axis) == tier:
            saved[bool(c.hidden)] += (seconds_of(plan, c) or 0.0) / 2
    step = plan.predicted.step_time_s or 0.0
    if "bubble_s" in parts:  # what waits for a pipeline's collectives is among its parts
        return step - saved[False] - min(saved[True], parts.get("waits_s", 0.0))
    beside, hidden = parts.get("compute_s", 0.0) + parts.get("optimizer_s", 0.0), parts.get("hidden_s", 0.0)
    could = sum(seconds_of(plan, c) or 0.0 for c in plan.predicted.collectives if c.hidden)
    share = min(1.0, hidden / could) if could else 1.0  # of what need not be waited for, what passes beside compute
    waited = saved[False] + (1 - share) * saved[True]
    return step - waited - max(beside, hidden) + max(beside, hidden - share * saved[True])


__all__ = ["at_twice", "per_byte", "shadow_prices"]
