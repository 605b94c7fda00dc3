"""The order in which each rank of a pipeline runs the microbatches of its chunks.

>>> ["".join(f"{a}{m}" for a, _, m in rank) for rank in schedule("1f1b", ranks=2, microbatches=3)]
['F0F1B0F2B1B2', 'F0B0F1B1F2B2']
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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
    groups = _groups(ranks, microbatches)
    forward: list[Action] = [("F", c, m) for group in groups for c in range(chunks) for m in group]
    backward: list[Action] = [("B", c, m) for group in groups for c in range(chunks)[::-1] for m in group]
    ahead = ranks - rank - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * max(len(group) for group in groups)
    ahead = min(ahead, len(forward))
    pairs = [action for both in zip(forward[ahead:], backward) for action in both]
    return forward[:ahead] + pairs + backward[len(forward) - ahead :]


def _groups(ranks: int, microbatches: int) -> list[range]:
    """The microbatches that go through one chunk after the other: ``ranks`` of them, or a few more where that does
    not divide them, as fewer would leave a rank waiting for itself.

    >>> _groups(4, 8), _groups(4, 11), _groups(4, 3)
    ([range(0, 4), range(4, 8)], [range(0, 6), range(6, 11)], [range(0, 3)])
    """
    count = max(1, microbatches // ranks)
    each, more = divmod(microbatches, count)
    starts = [i * each + min(i, more) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]
