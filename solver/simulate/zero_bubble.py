"""Zero-bubble schedules, made for given seconds (Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism, 2023).

Weight gradients wait for nothing but their own input gradients, and nobody waits for them: they fill the gaps. Each
rank takes at any time the first that it may of a forward and a backward in turn, and where neither is there, weight
gradients; a few rules of what to do in short gaps are tried, and the schedule whose busiest rank is done soonest wins.

>>> ["".join(f"{a}{m}" for a, _, m in rank) for rank in zero_bubble(3, [Seconds()] * 2, limit=4)]
['F0F1F2I0I1W0I2W1W2', 'F0I0F1I1F2I2W0W1W2']
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import product
from math import inf
from typing import NamedTuple, TypeAlias

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


def zero_bubble(microbatches: int, seconds: Sequence[Seconds], limit: int) -> Schedule:
    """Each rank's actions, with the bytes of at most ``limit`` microbatches held at once.

    ``seconds``: of each rank. ``limit``: as many as ranks for ZB-1p, twice as many for ZB-2p.
    """
    rules = product((False, True), (False, True), (0.0, 0.5, 1.0))
    runs = [_Run(microbatches, seconds, limit, *rule) for rule in rules]
    return min(runs, key=lambda run: run.span).actions


class _Run:
    """One set of rules, played out: ``actions`` and ``span``, the seconds from first to last of the busiest rank.

    Args:
        eager: Whether a forward may start that a backward will have to wait for.
        recycle: Where a forward is due and only memory is missing, whether weight gradients come before a backward.
        patience: The share of a weight gradient by which it may overrun a gap.
    """

    def __init__(
        self, microbatches: int, seconds: Sequence[Seconds], limit: int, eager: bool, recycle: bool, patience: float
    ) -> None:
        self.microbatches, self.seconds, self.limit = microbatches, seconds, limit
        self.eager, self.recycle, self.patience = eager, recycle, patience
        ranks = len(seconds)
        self.actions: Schedule = [[] for _ in range(ranks)]
        self.done = [{"F": 0, "I": 0, "W": 0} for _ in range(ranks)]
        self.arrived: list[dict[str, list[float]]] = [{"F": [], "I": []} for _ in range(ranks)]
        self.arrived[0]["F"] = [0.0] * microbatches
        self.due = ["F"] * ranks  # which of forward and backward is next
        self.free = [0.0] * ranks
        self.wake = [0.0] + [inf] * (ranks - 1)
        self.start = [0.0] * ranks
        self.heap = [(0.0, 0)]
        while self.heap:
            now, rank = heappop(self.heap)
            if now == self.wake[rank]:
                self.turn(rank, now)
        self.span = max(end - start for end, start in zip(self.free, self.start))

    def turn(self, rank: int, now: float) -> None:
        """A rank that is free does something, or sleeps until something arrives."""
        letter, until = self.choose(rank, now)
        if letter:
            self.act(rank, letter, now)
        else:
            self.wake_at(rank, until)

    def wake_at(self, rank: int, at: float) -> None:
        self.wake[rank] = at
        if at < inf:
            heappush(self.heap, (at, rank))

    def choose(self, rank: int, now: float) -> tuple[str, float]:
        """What to do now; "" and until when to wait where that is nothing."""
        done, own = self.done[rank], self.seconds[rank]
        held = done["F"] - done["I"] + own.held * (done["I"] - done["W"])
        room = held + 1 <= self.limit + 1e-9
        forward, known_forward = self.arrival(rank, "F", now)
        backward, known_backward = self.arrival(rank, "I", now)
        pending = done["I"] > done["W"]
        if not room:
            if self.due[rank] == "F" and self.recycle and pending and done["F"] < self.microbatches:
                return "W", now
            forward, known_forward = inf, inf
        here = [letter for letter, at in (("F", known_forward), ("I", known_backward)) if at <= now]
        if self.due[rank] in here:
            if self.due[rank] == "I" or self.eager or backward >= now + own.forward or backward <= now:
                return self.due[rank], now
        elif here and (here == ["I"] or self.eager or backward >= now + own.forward):
            return here[0], now
        upcoming = min(forward if forward > now else inf, backward)
        if pending and (upcoming - now >= own.weights * (1 - self.patience) or not room):
            return "W", now
        return "", min(known_forward if known_forward > now else inf, known_backward)

    def arrival(self, rank: int, letter: str, now: float) -> tuple[float, float]:
        """When the next forward or backward can start at the soonest, and when it can if that is known (else inf)."""
        number = self.done[rank][letter]
        if number == (self.microbatches if letter == "F" else self.done[rank]["F"]):
            return inf, inf
        if number < len(times := self.arrived[rank][letter]):
            return times[number], times[number]
        other = rank - 1 if letter == "F" else rank + 1
        there = self.seconds[other]
        lasts = there.forward + there.send if letter == "F" else there.inputs + self.seconds[rank].send
        return max(now, self.free[other]) + lasts, inf

    def act(self, rank: int, letter: str, now: float) -> None:
        """Runs an action, and lets the one who waits for it know."""
        done, own = self.done[rank], self.seconds[rank]
        number = done[letter]
        if not self.actions[rank]:
            self.start[rank] = now
        self.actions[rank].append((letter, 0, number))
        done[letter] += 1
        end = now + {"F": own.forward, "I": own.inputs, "W": own.weights}[letter]
        self.free[rank] = end
        self.wake_at(rank, end)
        if letter == "W":
            return
        self.due[rank] = "I" if letter == "F" else "F"
        last = len(self.seconds) - 1
        if letter == "F" and rank == last:
            self.arrived[rank]["I"].append(end)
        elif letter == "F":
            self.tell(rank + 1, "F", end + own.send)
        elif rank:
            self.tell(rank - 1, "I", end + self.seconds[rank - 1].send)

    def tell(self, rank: int, letter: str, at: float) -> None:
        self.arrived[rank][letter].append(at)
        at = max(at, self.free[rank])
        if at < self.wake[rank]:
            self.wake_at(rank, at)
