"""Whether a schedule can be run, and what it holds, known beforehand.

The ranks of a pipeline run their actions in order; one that reads what another rank sends waits for it, and nobody
waits for its own sends. So a schedule deadlocks under every timing or under none.

>>> check_schedule(schedule_from_words([["F0.0", "F0.1", "B0.0", "B0.1"], ["F0.0", "B0.0", "F0.1", "B0.1"]]))
InFlight(ranks=(2, 1), stages=(2, 1))
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

from autopar.errors import AutoparError
from autopar.solver.simulate.actions import Action, Schedule

Done: TypeAlias = tuple[str, int, int]
"""What has been run: "F", "B" (or "I") or "W", a stage and a microbatch."""
PARTS = ("F", "FB", "FIW")
"""What a chunk runs of a microbatch: alone forwards where nothing trains."""


class Crossing(Protocol):
    """A value that the stage ``source`` makes and the stages ``targets`` read; with ``grad`` each sends a gradient."""

    @property
    def number(self) -> int: ...
    @property
    def source(self) -> int: ...
    @property
    def targets(self) -> tuple[int, ...]: ...
    @property
    def grad(self) -> bool: ...


@dataclass(frozen=True)
class InFlight:
    """The most microbatches between their forward and the end of their backward, weight gradients included: on each
    rank, over all its chunks, and of each stage."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...]


def check_schedule(
    schedule: Sequence[Sequence[Action]], crossings: Iterable[Crossing] | None = None, *, train: bool = True
) -> InFlight:
    """What the schedule holds at most. ``crossings``: between stages; by default each stage reads from the one before.

    Raises AutoparError where an action is missing, comes twice or too early, or waits for ever.
    """
    chunks = 1 + max((chunk for rank in schedule for _, chunk, _ in rank), default=0)
    microbatches = 1 + max((m for rank in schedule for _, _, m in rank), default=0)
    for rank, actions in enumerate(schedule):
        _check_rank(rank, actions, chunks, microbatches, train)
    _check_waits(schedule, _needs(len(schedule) * chunks, crossings))
    stages = [_peak(a for a in rank if a[1] == chunk) for chunk in range(chunks) for rank in schedule]
    return InFlight(tuple(_peak(actions) for actions in schedule), tuple(stages))


def schedule_from_words(rows: Sequence[Sequence[str]]) -> Schedule:
    """Each rank's actions from words of a letter, a chunk and a microbatch, as "F0.2".

    Raises AutoparError for a word that is none.
    """
    return [[_action(word, rank) for word in row] for rank, row in enumerate(rows)]


def words_of(schedule: Sequence[Sequence[Action]]) -> list[list[str]]:
    """The words of each rank, as `schedule_from_words` takes them.

    >>> words_of([[("F", 0, 0), ("B", 0, 0)]])
    [['F0.0', 'B0.0']]
    """
    return [[_word(action) for action in rank] for rank in schedule]


def _word(action: Action) -> str:
    letter, chunk, microbatch = action
    return f"{letter}{chunk}.{microbatch}"


def _action(word: Any, rank: int) -> Action:
    found = re.fullmatch(r"([FBIW])(\d+)\.(\d+)", word) if isinstance(word, str) else None
    if found is None:
        raise AutoparError(
            f"schedule: {word!r} of rank {rank} is not known. Write F, B, I or W, then chunk.microbatch, as F0.2."
        )
    return found[1], int(found[2]), int(found[3])


def _check_rank(rank: int, actions: Sequence[Action], chunks: int, microbatches: int, train: bool) -> None:
    """That a rank runs every part of every chunk and microbatch once, in order."""
    twice = [action for action, count in Counter(actions).items() if count > 1]
    if twice:
        raise AutoparError(f"schedule: rank {rank} runs {_word(twice[0])} twice. Name each action once.")
    parts: dict[tuple[int, int], str] = {(c, m): "" for c in range(chunks) for m in range(microbatches)}
    for letter, chunk, microbatch in actions:
        parts[chunk, microbatch] += letter
    for (chunk, microbatch), ran in parts.items():
        if ran in (PARTS[1:] if train else PARTS[:1]):
            continue
        legal = "F and B, or F, I and W," if train else "F"
        raise AutoparError(
            f"schedule: rank {rank} runs {' then '.join(ran) or 'nothing'} of chunk {chunk}, microbatch {microbatch}. "
            f"Every rank runs {legal} of each of {chunks} chunks and {microbatches} microbatches, in this order."
        )


def _needs(stages: int, crossings: Iterable[Crossing] | None) -> dict[tuple[str, int], list[int]]:
    """Of the forward and the backward of a stage: the stages whose forward, or backward, it waits for."""
    needs: dict[tuple[str, int], list[int]] = {}
    pairs = [(s, s + 1, True) for s in range(stages - 1)]
    if crossings is not None:
        pairs = [(c.source, target, c.grad) for c in crossings for target in c.targets]
    for source, target, grad in pairs:
        if not (0 <= source < stages and 0 <= target < stages):
            raise AutoparError(
                f"schedule: a value crosses from stage {source} to {target}, and the schedule has {stages} stages. "
                "Give as many chunks and ranks as stages."
            )
        needs.setdefault(("F", target), []).append(source)
        if grad:
            needs.setdefault(("B", source), []).append(target)
    return needs


def _check_waits(schedule: Sequence[Sequence[Action]], needs: dict[tuple[str, int], list[int]]) -> None:
    """Runs the ranks side by side, each until it waits for what another, or itself, has still to run."""
    ranks = len(schedule)
    at, done = [0] * ranks, set[Done]()
    waiting: dict[Done, list[int]] = {}
    ready = list(range(ranks))
    while ready:
        rank = ready.pop()
        while at[rank] < len(schedule[rank]):
            letter, chunk, m = schedule[rank][at[rank]]
            part, stage = "B" if letter == "I" else letter, chunk * ranks + rank
            missing = next((d for s in needs.get((part, stage), ()) if (d := (part, s, m)) not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done.add((part, stage, m))
            ready += waiting.pop((part, stage, m), ())
            at[rank] += 1
    stuck = {rank: missing for missing, ranks_ in waiting.items() for rank in ranks_}
    if stuck:
        rank = min(stuck)
        (part, stage, m), action = stuck[rank], schedule[rank][at[rank]]
        other = stage % ranks
        own = next(a for a in schedule[other] if a[1:] == (stage // ranks, m) and a[0] in (part, "I" * (part == "B")))
        then = "comes later on the same rank" if other == rank else f"rank {other} has not run when all wait"
        raise AutoparError(
            f"schedule: rank {rank} waits for ever to run {_word(action)} (stage {action[1] * ranks + rank}): it needs "
            f"{_word(own)} of stage {stage}, which {then}. Run what it needs before it."
        )


def _peak(actions: Iterable[Action]) -> int:
    ends = {"F": 1, "B": -1, "W": -1}
    return max(accumulate(ends.get(letter, 0) for letter, _, _ in actions), default=0)
