"""The stages of a pipeline: what each computes, holds and sends, and in which order microbatches go through them."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.explain.fold import fold
from autopar.explain.memory import OWNERS
from autopar.explain.page import Row, Section
from autopar.explain.quantities import bytes_text, count_text, percent, seconds_text, several
from autopar.plan import Plan, StageFigures
from autopar.solver.simulate.actions import in_order

COLUMNS = (
    "stage",
    "ranks",
    "modules",
    "parameters",
    "forward",
    "backward",
    "idle",
    "in flight",
    "sends",
    "peak of a rank",
    "most of it",
)
NAMED = 2  # owners of a peak
DRAWN = (8, 16)  # most ranks of a pipeline and microbatches of a schedule that is drawn
SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}  # how long an action is drawn
NAMES = "abcdefghijklmnop"


def stages(plan: Plan) -> Section:
    """The section of stages; empty without a pipeline."""
    if plan.pp == 1:
        return Section("Stages of the pipeline", ())
    rows = tuple(_row(plan, s) for s in range(len(plan.stages)))
    found = plan.predicted.stages
    if not found:
        return Section("Stages of the pipeline", rows, COLUMNS)
    seconds = [f.forward_s + f.backward_s for f in found]
    mean = sum(seconds) / len(seconds)
    uneven = f"; the longest takes {max(seconds) / mean:.2f} times the mean" if mean else ""
    note = (
        f"Seconds and what is sent are of a microbatch{uneven}. Idle: of the step, in which the stage's rank computes "
        "nothing. Sends: bytes on to other stages."
    )
    return Section("Stages of the pipeline", rows, COLUMNS, note)


def _row(plan: Plan, s: int) -> Row:
    stage, size = plan.stages[s], plan.stage_ranks
    first = s % plan.pp * size
    ranks = str(first) if size == 1 else f"{first}-{first + size - 1}"
    head = (str(s), ranks, modules(plan, s))
    if not plan.predicted.stages:
        return (*head, *[""] * (len(COLUMNS) - len(head)))
    f = plan.predicted.stages[s]
    return (
        *head,
        count_text(f.parameters),
        seconds_text(f.forward_s),
        seconds_text(f.backward_s),
        _idle(plan, s),
        several(f.in_flight, "microbatch"),
        bytes_text(f.sent) if stage.last < len(plan.units) else "",
        bytes_text(f.peak_bytes),
        _owners(f),
    )


def _owners(f: StageFigures) -> str:
    """The owners of most of a rank's peak: ``saved activations 12.1 GiB, parameters 3.0 GiB``."""
    most = sorted(f.owners.items(), key=lambda owner: -owner[1])[:NAMED]
    return ", ".join(f"{OWNERS[f'peak_{owner}_bytes'][0]} {bytes_text(n)}" for owner, n in most)


def _idle(plan: Plan, s: int) -> str:
    """The share of the step in which the rank of a stage runs no forward and no backward of any of its stages."""
    step, found = plan.predicted.step_time_s or 0.0, plan.predicted.stages
    busy = plan.microbatches * sum(f.forward_s + f.backward_s for f in found[s % plan.pp :: plan.pp])
    return percent(max(0.0, step - busy), step)


def modules(plan: Plan, stage: int) -> str:
    """The modules of a stage's units: ``emb, layers.{0-5}``."""
    of = plan.stages[stage]
    names = [unit.fqn or "(model)" for unit in plan.units[of.first : of.last]]
    return fold(list(dict.fromkeys(names)))


def order(plan: Plan) -> Section:
    """The section of the schedule, a lane for each stage; empty where it is too large, or there is none."""
    ranks, microbatches = DRAWN
    if plan.pp == 1 or plan.pp > ranks or plan.microbatches > microbatches:
        return Section("Schedule", ())
    found = lanes(plan)
    rows = tuple((f"rank {s % plan.pp}", f"stage {s}", lane) for s, lane in _by_rank(plan, found))
    last = NAMES[plan.microbatches - 1]
    several_ = plan.microbatches > 1
    names = f"a to {last}: forward of microbatches 0 to {plan.microbatches - 1}" if several_ else "a: forward"
    parted = any(letter == "W" for rank in plan.orders() for letter, _, _ in rank)
    back = "of inputs, *: of parameters" if parted else "drawn twice as long"
    note = (
        f"{names}; {'A to ' + last.upper() if several_ else 'A'}: backward, {back}; dots: waits. Sends are not drawn."
    )
    return Section("Schedule", rows, (), note)


def _by_rank(plan: Plan, found: list[str]) -> Iterator[tuple[int, str]]:
    for rank in range(plan.pp):
        for s in range(rank, len(found), plan.pp):
            yield s, found[s]


def lanes(plan: Plan) -> list[str]:
    """What each stage does, a character a slot of time.

    >>> from autopar.plan import ModelId, Schedule, Stage, Unit
    >>> units, stages = (Unit("a", 0), Unit("b", 0)), (Stage(0, 1), Stage(1, 2))
    >>> lanes(Plan(ModelId("x"), units=units, stages=stages, microbatches=2, schedule=Schedule("1f1b")))
    ['ab..AA.BB', '.aAAbBB..']
    """
    schedule, pp, count = plan.orders(), plan.pp, len(plan.stages)
    ends: dict[tuple[str, int, int], int] = {}
    free, drawn = [0] * pp, [dict[int, str]() for _ in range(count)]
    for rank, (letter, chunk, m) in in_order(schedule):
        stage, part = chunk * pp + rank, "F" if letter == "F" else "B"
        needs = (part, stage - 1 if part == "F" else stage + 1, m)
        start = max(free[rank], 0 if letter == "W" else ends.get(needs, 0))
        free[rank] = start + SLOTS[letter]
        if letter != "W":
            ends[part, stage, m] = free[rank]
        mark = "*" if letter == "W" else NAMES[m] if letter == "F" else NAMES[m].upper()
        drawn[stage] |= dict.fromkeys(range(start, free[rank]), mark)
    width = max(free)
    return ["".join(lane.get(i, ".") for i in range(width)) for lane in drawn]


__all__ = ["lanes", "modules", "order", "stages"]
