"""Zero-bubble schedules, made for given seconds (Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism, 2023).

Weight gradients wait for nothing but their own input gradients, and nobody waits for them: they fill the gaps. Each
rank takes at any time the first that it may of a forward and a backward in turn, and where neither is there, weight
gradients. Some rules of what to do in short gaps are tried, beside the schedule made by hand, and the one whose
busiest rank is done soonest wins.

>>> ["".join(f"{a}{m}" for a, _, m in rank) for rank in zero_bubble(3, [Seconds()] * 2, limit=4)]
['F0F1F2I0W0I1W1I2W2', 'F0I0F1I1F2I2W0W1W2']
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from autopar.solver.simulate.actions import Action, Schedule, Seconds, in_order

RULES = ((False, 1.0), (True, 0.75), (False, 0.5), (True, 1.0))
"""What is tried, as (eager, patience) of `_Run`: on random seconds more rules gain less than 0.2 % of a step."""


def by_hand(ranks: int, microbatches: int, doubled: bool) -> Schedule:
    """ZB-H1, or ``doubled`` ZB-H2: 1F1B with as many microbatches ahead, or about twice as many, and weight gradients
    so much later that each rank holds as many microbatches as the first.

    >>> ["".join(f"{a}{m}" for a, _, m in rank) for rank in by_hand(2, 3, doubled=False)]
    ['F0F1I0W0F2I1W1I2W2', 'F0I0F1I1W0F2I2W1W2']
    """
    return [_steady(r, ranks, microbatches, doubled) for r in range(ranks)]


def _steady(rank: int, ranks: int, microbatches: int, doubled: bool) -> list[Action]:
    ahead, late = ranks - rank, rank
    if doubled:
        ahead, late = 2 * ahead - 1, 2 * late
    actions: list[Action] = [("F", 0, m) for m in range(min(ahead, microbatches))]
    for m in range(microbatches):
        actions.append(("I", 0, m))
        if m >= late:
            actions.append(("W", 0, m - late))
        if m + ahead < microbatches:
            actions.append(("F", 0, m + ahead))
    return actions + [("W", 0, m) for m in range(max(0, microbatches - late), microbatches)]


def span(actions: Schedule, seconds: Sequence[Seconds]) -> float:
    """Seconds from the first to the last action of the busiest rank."""
    done: dict[tuple[str, int, int], float] = {}
    start, free = [inf] * len(actions), [0.0] * len(actions)
    for rank, (letter, _, m) in in_order(actions):
        own = seconds[rank]
        at, lasts = free[rank], {"F": own.forward, "I": own.inputs, "W": own.weights}[letter]
        if letter == "F" and rank:
            at = max(at, done["F", rank - 1, m] + seconds[rank - 1].send)
        if letter == "I" and rank < len(actions) - 1:
            at = max(at, done["I", rank + 1, m] + own.send)
        start[rank] = min(start[rank], at)
        free[rank] = done[letter, rank, m] = at + lasts
    return max(end - since for end, since in zip(free, start))


def zero_bubble(microbatches: int, seconds: Sequence[Seconds], limit: int) -> Schedule:
    """Each rank's actions, with the bytes of at most ``limit`` microbatches held at once.

    ``seconds``: of each rank. ``limit``: as many as ranks for ZB-1p, twice as many for ZB-2p.
    """
    ranks = len(seconds)
    best = by_hand(ranks, microbatches, doubled=limit >= 2 * ranks - 1)
    least, soonest = span(best, seconds), microbatches * max(s.forward + s.inputs + s.weights for s in seconds)
    for eager, patience in RULES:
        if least <= soonest * (1 + 1e-9):
            break
        run = _Run(microbatches, seconds, limit, eager, patience)
        if run.span < least:
            best, least = run.actions, run.span
    return best


class _Run:
    """One set of rules, played out: ``actions`` and ``span``, the seconds from first to last of the busiest rank.

    Args:
        eager: Whether a forward may start that a backward will have to wait for.
        patience: The share of a weight gradient by which it may overrun a gap.
    """

    def __init__(self, microbatches: int, seconds: Sequence[Seconds], limit: int, eager: bool, patience: float) -> None:
        self.microbatches, self.seconds, self.limit = microbatches, seconds, limit
        self.eager, self.patience = eager, patience
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
            if self.due[rank] == "F" and pending and done["F"] < self.microbatches:
                return "W", now
            forward, known_forward = inf, inf
        here = [letter for letter, at in (("F", known_forward), ("I", known_backward)) if at <= now]
        if self.due[rank] in here:
            if self.due[rank] == "I" or self.eager or known_backward >= now + own.forward or known_backward <= now:
                return self.due[rank], now
        elif here and (here == ["I"] or self.eager or known_backward >= now + own.forward):
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
