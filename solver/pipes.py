"""The pipelines that are tried: how many ranks, stages on each and which schedule, and what a schedule makes of a step.

>>> [str(pipe) for pipe in pipes(8, units=6, parted=0.25)][:5]
['no stages', '2 stages, 1f1b', '2 stages, zero_bubble', '4 stages on 2 ranks, interleaved', '4 stages, 1f1b']
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.solver.simulate.actions import Action
from autopar.solver.simulate.schedules import schedule as actions_of

MOST_STAGES = 128
"""More are not tried."""
VIRTUAL = (2, 4)
"""Stages of a rank that are tried under interleaved 1F1B."""
MORE = 4
"""Microbatches that, beyond those in flight, show all that an alternating schedule keeps at once."""
ROUNDS = 3
"""Times the ranks: microbatches that show it where ranks have several stages."""
IN_SIMULATOR = {"zero_bubble": "zb-h1"}
"""What the simulator calls a schedule, where that is another name."""


@dataclass(frozen=True)
class Pipe:
    """A pipeline of ``ranks`` ranks with ``virtual`` stages each. ``fill``: so many microbatches of a rank pass before
    all ranks of the pipeline are busy, as `solver.problem.Pipeline` has it, over the number of other ranks."""

    ranks: int = 1
    virtual: int = 1
    schedule: str = "accumulate"
    fill: float = 0.0

    @property
    def stages(self) -> int:
        """How many."""
        return self.ranks * self.virtual

    def share(self, microbatches: int) -> float:
        """Of the seconds of all stages, how much a step takes at least: where every rank has the same.

        >>> Pipe(4, fill=1.0, schedule="1f1b").share(8)  # (8 + 3) / 8 of a quarter
        0.34375
        """
        return (microbatches + self.fill * (self.ranks - 1)) / (self.ranks * microbatches)

    def __str__(self) -> str:
        if self.ranks == 1:
            return "no stages"
        on = f" on {self.ranks} ranks" if self.virtual > 1 else ""
        return f"{self.stages} stages{on}, {self.schedule}"

    def legal(self, microbatches: int) -> bool:
        """Whether the schedule's ``fill`` is that of so many microbatches."""
        return self.virtual == 1 or microbatches % self.ranks == 0


NO_PIPE = Pipe()


def pipes(ranks: int, units: int, parted: float, *, only: int | None = None) -> tuple[Pipe, ...]:
    """The pipelines of ``ranks`` ranks in all, of a model with ``units`` units. ``parted``: the fill of a zero-bubble
    schedule; ``only``: so many ranks."""
    found = []
    for count in range(1, min(ranks, units, MOST_STAGES) + 1):
        if ranks % count or (only is not None and count != only):
            continue
        if count == 1:
            found.append(NO_PIPE)
            continue
        found.append(Pipe(count, 1, "1f1b", 1.0))
        if 0 < parted < 1:
            found.append(Pipe(count, 1, "zero_bubble", parted))
        found += [Pipe(count, v, "interleaved", 1 / v) for v in VIRTUAL if count * v <= min(units, MOST_STAGES)]
    return tuple(found)


def flying(pipe: Pipe, microbatches: int) -> tuple[int, ...]:
    """Of each stage, how many microbatches it keeps when its rank keeps the most.

    >>> flying(Pipe(4, 1, "1f1b", 1.0), 8), flying(Pipe(2, 2, "interleaved", 0.5), 8)
    ((4, 3, 2, 1), (3, 2, 2, 1))
    """
    return _flying(pipe, enough(pipe.schedule, pipe.ranks, pipe.virtual, microbatches))


def enough(schedule: str, ranks: int, virtual: int, microbatches: int) -> int:
    """Microbatches that show what a schedule keeps at once: where forward and backward alternate, until all ranks do.

    >>> enough("1f1b", 4, 1, 64), enough("gpipe", 4, 1, 64), enough("interleaved", 4, 2, 63)
    (8, 64, 63)
    """
    alternates = schedule not in ("gpipe", "custom") and (virtual == 1 or microbatches % ranks == 0)
    return min(microbatches, ranks + MORE if virtual == 1 else ROUNDS * ranks) if alternates else microbatches


@lru_cache(maxsize=4096)
def _flying(pipe: Pipe, microbatches: int) -> tuple[int, ...]:
    name = IN_SIMULATOR.get(pipe.schedule, pipe.schedule)
    ranks = actions_of(name, pipe.ranks, microbatches, pipe.virtual)
    counts = [_fullest(rank, pipe.virtual) for rank in ranks]
    return tuple(counts[r][chunk] for chunk in range(pipe.virtual) for r in range(pipe.ranks))


def _fullest(rank: Sequence[Action], virtual: int) -> tuple[int, ...]:
    """Of each chunk, the microbatches kept at the moment when a rank keeps the most."""
    last = "W" if any(letter == "W" for letter, _, _ in rank) else "B"
    now, best = [0] * virtual, (0,) * virtual
    for letter, chunk, _ in rank:
        now[chunk] += (letter == "F") - (letter == last)
        if sum(now) > sum(best):
            best = tuple(now)
    return best


__all__ = ["IN_SIMULATOR", "MOST_STAGES", "NO_PIPE", "Pipe", "enough", "flying", "pipes"]
