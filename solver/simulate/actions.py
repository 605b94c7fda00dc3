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
    stages = len(ranks) * (1 + max((chunk for rank in ranks for _, chunk, _ in rank), default=0))
    microbatches = 1 + max((m for rank in ranks for _, _, m in rank), default=0)
    forward, backward = ([bytearray(microbatches) for _ in range(stages + 1)] for _ in "FB")  # what is done
    forward[-1] = backward[stages] = bytearray([1] * microbatches)  # what the ends of the model wait for
    at = [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for r, actions in enumerate(ranks):
            while at[r] < len(actions):
                letter, chunk, m = action = actions[at[r]]
                stage = chunk * len(ranks) + r
                if letter == "F":
                    if not forward[stage - 1][m]:
                        break
                    forward[stage][m] = 1
                elif letter == "W":
                    if not backward[stage][m]:
                        break
                elif forward[stage][m] and backward[stage + 1][m]:
                    backward[stage][m] = 1
                else:
                    break
                at[r] += 1
                moved = True
                yield r, action
    for r, actions in enumerate(ranks):
        if at[r] < len(actions):
            letter, chunk, microbatch = actions[at[r]]
            raise AutoparError(
                f"schedule: rank {r} waits for ever to run {letter} of chunk {chunk}, microbatch {microbatch}. "
                "Run what it needs before it."
            )
