"""What ranks of a pipeline do: actions, and whether an order of them can be run.

Chunk ``c`` of rank ``r`` is stage ``c * ranks + r`` of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from autopar.errors import AutoparError

Action: TypeAlias = tuple[str, int, int]
"""A letter ("F" forward, "B" backward, or parted "I" input and "W" weight gradients), a chunk and a microbatch."""
Schedule: TypeAlias = list[list[Action]]
"""Each rank's actions, in order."""


class Seconds(NamedTuple):
    """Of one microbatch on a rank: forward, input gradients, weight gradients, and the way to the next rank. ``held``:
    the share of its bytes that the weight gradients still need."""

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0
    send: float = 0.0
    held: float = 1.0


def in_flight(rank: Sequence[Action]) -> int:
    """The most microbatches (of a chunk each) between their forward and the end of their backward on a rank.

    >>> in_flight([("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("F", 0, 2), ("B", 0, 1), ("B", 0, 2)])
    2
    """
    last = "W" if any(letter == "W" for letter, _, _ in rank) else "B"
    return max(accumulate((letter == "F") - (letter == last) for letter, _, _ in rank), default=0)


def in_order(ranks: Sequence[Sequence[Action]]) -> Iterator[tuple[int, Action]]:
    """(rank, action) of a whole schedule, each after all that it needs.

    Raises AutoparError for a schedule that gets stuck, naming an action that waits for what never comes.
    """
    done: set[tuple[str, int, int]] = set()
    at = [0] * len(ranks)
    stages = len(ranks) * (1 + max((chunk for rank in ranks for _, chunk, _ in rank), default=0))
    moved = True
    while moved:
        moved = False
        for r, actions in enumerate(ranks):
            while at[r] < len(actions):
                action = actions[at[r]]
                needed = _needs(action, r, len(ranks), stages)
                if any(need not in done for need in needed):
                    break
                letter, chunk, microbatch = action
                done.add(("I" if letter == "B" else letter, chunk * len(ranks) + r, microbatch))
                at[r], moved = at[r] + 1, True
                yield r, action
    for r, actions in enumerate(ranks):
        if at[r] < len(actions):
            letter, chunk, microbatch = actions[at[r]]
            raise AutoparError(
                f"schedule: rank {r} waits for ever to run {letter} of chunk {chunk}, microbatch {microbatch}. "
                "Run what it needs before it."
            )


def _needs(action: Action, rank: int, ranks: int, stages: int) -> tuple[tuple[str, int, int], ...]:
    """What must be done before an action, as (letter, stage, microbatch), input gradients being "I"."""
    letter, chunk, microbatch = action
    stage = chunk * ranks + rank
    if letter == "F":
        return (("F", stage - 1, microbatch),) if stage else ()
    if letter == "W":
        return (("I", stage, microbatch),)
    own = ("F", stage, microbatch)
    return (own,) if stage == stages - 1 else (own, ("I", stage + 1, microbatch))
