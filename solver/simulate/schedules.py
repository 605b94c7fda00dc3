"""The order in which each rank of a pipeline runs the microbatches of its chunks.

>>> ["".join(f"{a}{m}" for a, _, m in rank) for rank in schedule("1f1b", ranks=2, microbatches=3)]
['F0F1B0F2B1B2', 'F0B0F1B1F2B2']
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import AutoparError
from autopar.solver.simulate.actions import Action, Schedule, Seconds
from autopar.solver.simulate.zero_bubble import by_hand, zero_bubble

NAMES = ("none", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p")
PARTED = NAMES[4:]
"""Schedules that run input and weight gradients apart."""


def schedule(
    name: str, ranks: int, microbatches: int, chunks: int = 1, seconds: Sequence[Seconds] | None = None
) -> Schedule:
    """Each rank's actions, in order.

    "gpipe": all forwards, then all backwards. "1f1b", or "none": as few microbatches in flight as keep the last rank
    busy. "interleaved": the same with several chunks a rank, microbatches in groups of ``ranks``, as Megatron-LM
    (Narayanan et al. 2021). "zb-h1" and "zb-h2": zero bubble by hand (Qi et al. 2023). "zb-1p" and "zb-2p": made
    for the ``seconds`` of each rank, with the bytes of at most ``ranks`` or twice as many microbatches.

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
    if name in ("zb-h1", "zb-h2"):
        return by_hand(ranks, microbatches, doubled=name == "zb-h2")
    if name in PARTED:
        return zero_bubble(microbatches, seconds or [Seconds()] * ranks, ranks if name == "zb-1p" else 2 * ranks)
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
