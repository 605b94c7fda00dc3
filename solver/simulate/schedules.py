"""The order in which each rank of a pipeline runs the microbatches of its chunks.

Chunk ``c`` of rank ``r`` is stage ``c * ranks + r`` of the model. An action is a letter, a chunk and a microbatch: "F"
forward, "B" backward, or where that is parted, "I" its input gradients and "W" its weight gradients.

>>> ["".join(f"{a}{m}" for a, _, m in rank) for rank in schedule("1f1b", ranks=2, microbatches=3)]
['F0F1B0F2B1B2', 'F0B0F1B1F2B2']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from autopar.errors import AutoparError
from autopar.solver.simulate.zero_bubble import Action, Schedule, Seconds, zero_bubble

NAMES = ("none", "gpipe", "1f1b", "interleaved", "zb-1p", "zb-2p")
PARTED = ("zb-1p", "zb-2p")
"""Schedules that run input and weight gradients apart."""


def schedule(
    name: str, ranks: int, microbatches: int, chunks: int = 1, seconds: Sequence[Seconds] | None = None
) -> Schedule:
    """Each rank's actions, in order.

    "gpipe": all forwards, then all backwards. "1f1b", or "none": as few microbatches in flight as keep the last rank
    busy. "interleaved": the same with several chunks a rank, microbatches in groups of ``ranks``, as Megatron-LM
    (Narayanan et al. 2021). "zb-1p" and "zb-2p": zero bubble (Qi et al. 2023), with at most ``ranks`` or twice as many
    microbatches in flight, made for the ``seconds`` of each rank.

    Raises AutoparError for a name that is not known, or several chunks where the schedule has one.
    """
    if name not in NAMES:
        raise AutoparError(f"schedule {name!r} is not known. Legal: {', '.join(NAMES)}.")
    if min(ranks, microbatches, chunks) < 1:
        raise AutoparError(
            f"schedule {name}: {ranks} ranks, {microbatches} microbatches, {chunks} chunks. Give 1 or more of each."
        )
    if chunks > 1 and name != "interleaved":
        raise AutoparError(f"schedule {name}: has one chunk a rank, not {chunks}. Use interleaved, or vp=1.")
    if name == "gpipe":
        rank: list[Action] = [("F", 0, m) for m in range(microbatches)]
        return [rank + [("B", 0, m) for m in range(microbatches)] for _ in range(ranks)]
    if name in PARTED:
        limit = ranks if name == "zb-1p" else 2 * ranks
        return zero_bubble(microbatches, seconds or [Seconds()] * ranks, limit)
    return [_alternating(r, ranks, microbatches, chunks) for r in range(ranks)]


def _alternating(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """Some forwards, then a forward and a backward in turn, then the backwards that are left."""
    forward, backward = _groups("F", ranks, microbatches, chunks), _groups("B", ranks, microbatches, chunks)
    ahead = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    ahead = min(ahead, len(forward))
    pairs = [action for both in zip(forward[ahead:], backward) for action in both]
    return forward[:ahead] + pairs + backward[len(forward) - ahead :]


def _groups(letter: str, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """All chunks of the first ``ranks`` microbatches, then of the next; backwards from the last chunk."""
    order = range(chunks) if letter == "F" else range(chunks)[::-1]
    starts = range(0, microbatches, ranks)
    return [(letter, c, m) for at in starts for c in order for m in range(at, min(at + ranks, microbatches))]


def in_flight(rank: Sequence[Action]) -> int:
    """The most microbatches (of a chunk each) between their forward and the end of their backward on a rank.

    >>> [in_flight(rank) for rank in schedule("1f1b", ranks=4, microbatches=8)]
    [4, 3, 2, 1]
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
