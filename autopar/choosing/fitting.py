"""The fastest plan whose program fits, found by searches that are each given some bytes.

A problem adds up bytes; a program has them at moments. It has some that the problem knows nothing of (inputs, masks),
and some of what the problem adds up are never there at once: with one microbatch, gradients come as what is kept goes.
So a search is given bytes, the program of its plan is looked at, and the next search is given so much more or less as
that program leaves or lacks, until plans with more bytes are hardly faster or do not fit. Where memory binds, plans of
one microbatch are looked for apart from others: what is counted of them too much is another amount.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from autopar.choosing.pose import Posed
from autopar.plan import Plan
from autopar.solver.search import Found

if TYPE_CHECKING:
    from autopar.choosing.solve import Solver

LOOKS = 4
"""Searches among some candidates at most, after the first."""
MOST = 2.0
"""Times the limit: more than is counted of a program that fits (what rests, and at once what is kept and gradients)."""
MANY, FAR = 300, 0.1
"""Of so many candidates, those that so much (relative) separates from the best are not looked among again."""
WORTHWHILE = 0.01
"""Of the seconds, and of the bytes: no further search for less."""
ANY = 2.0**60
"""Bytes that every plan has room in."""
LEANEST = 3
"""Candidates whose leanest plans' programs are looked at."""
LEANER = 8
"""Times that a leaner one is then looked for."""


def peak(plan: Plan) -> float:
    """Bytes of a rank, as predicted."""
    return (plan.predicted.peak_mem_gib or 0.0) * 2**30


@dataclass(frozen=True, eq=False)
class Fit:
    """A plan that fits, the search that it is of and the bytes which that was given; ``counts``: of microbatches, what
    was searched (none: all)."""

    given: float
    found: Found[Posed]
    plan: Plan
    counts: Sequence[int] = ()

    @property
    def seconds(self) -> float:
        """Of a step, as predicted."""
        return self.plan.predicted.step_time_s or 0.0


class Fitting:
    """Searches for the ``best`` plan of at most ``limit`` bytes (those of the cluster); unless for the ``fastest``, for
    any. ``leanest``: where there is none, the one with the fewest bytes of those looked at."""

    def __init__(self, solver: Solver, limit: float | None = None, *, fastest: bool = True) -> None:
        self.solver, self.fastest = solver, fastest
        self.limit = float(solver.cluster.limit if limit is None else limit)
        counts = solver.candidates.microbatches
        self.groups = [_Among(self, g) for g in ([n for n in counts if n == 1], [n for n in counts if n > 1]) if g]
        self.best: Fit | None = None
        self.leanest: Plan | None = None

    def run(self) -> Fit | None:
        """The fastest plan that fits; None where none was found."""
        self.search()
        if self.best is None:
            self.lean()
        return None if self.best is None else self.polished(self.best)

    def search(self) -> None:
        """Looks among all candidates and, where memory binds, among those of one microbatch and among others."""
        every = _Among(self, ())
        first = every.look(self.limit)
        for group in self.groups:
            group.nothing = every.nothing
            if first is not None and first.plan.microbatches in group.counts:
                group.seen.append(first)
        if self.best is None or (self.binds(self.best.found) and not self.solver.effort.is_over):
            for group in sorted(self.groups, key=lambda group: not group.seen):  # a plan that fits ends others sooner
                group.go_on()

    def is_near(self, bound: float) -> bool:
        """Whether nothing with such a bound is worth a search."""
        return self.best is not None and self.best.seconds * (1 - WORTHWHILE) <= bound

    def binds(self, found: Found[Posed]) -> bool:
        """Whether a search that was given more bytes might find a faster plan."""
        least = self.solver.fastest()
        return not self.is_near(least) and any(
            o.status == "memory"
            or any(m.per_byte for m in o.multipliers or ())
            # a floor with what must be made again for want of bytes is above the least
            or least * (1 + WORTHWHILE) < o.quick.seconds < inf
            for o in found.outcomes
        )

    def fits(self, plan: Plan) -> bool:
        """Whether the plan's program has at most so many bytes."""
        return peak(plan) <= self.limit

    def lean(self) -> None:
        """Looks for the plan of the fewest bytes until one fits: first at those of which problems count the fewest, and
        at the fastest of the same candidates that share the work out, then for any with fewer, some times. (Whatever
        the limit is, these are the same plans.)"""
        found = self.solver.search(1.0, polish=False)  # a byte: none is that lean
        outcomes = [o for o in found.outcomes if o.answer is not None and o.answer.least_assignment is not None]
        outcomes.sort(key=lambda o: float(o.answer.least_bytes))
        pairs = [(o.problem, o.answer.least_assignment) for o in outcomes[:LEANEST] if o.problem is not None]
        plans = [self.solver.plan(*pair) for pair in pairs]
        working = (self.solver.working(o.candidate, ANY) for o in outcomes[:LEANEST])
        self.leanest = min((*plans, *(plan for plan in working if plan is not None)), key=peak, default=None)
        for _ in range(LEANER):
            if self.leanest is None or self.fits(self.leanest):
                break
            other = Fitting(self.solver, peak(self.leanest) - 1, fastest=False)
            other.search()
            if other.best is None:
                break
            self.leanest = other.best.plan
        if self.leanest is not None and self.fits(self.leanest):
            self.begin_with(self.leanest)

    def begin_with(self, plan: Plan) -> None:
        """Goes on from a plan that fits."""
        group = next(group for group in self.groups if plan.microbatches in group.counts)
        found = group.look(self.solver.counted(plan) * (1 + 1e-9))
        if self.best is None and found is not None:
            self.best = group.seen[-1] = replace(found, plan=plan)  # what that search found is faster and does not fit
        group.go_on()

    def polished(self, best: Fit) -> Fit:
        """The search to the target gap; its plan where that fits and is faster."""
        if self.solver.effort.is_over:
            return best
        seen = _Among(self, best.counts).look(best.given, polish=True)
        assert self.best is not None
        return self.best if seen is None or self.best is seen else replace(best, found=seen.found)


class _Among:
    """Searches among some candidates: what they have ``seen``, and with how many bytes there is ``nothing``, as
    problems count."""

    def __init__(self, of: Fitting, counts: Sequence[int]) -> None:
        self.of, self.counts = of, counts
        self.seen: list[Fit] = []
        self.nothing = 0.0

    def look(self, given: float, *, polish: bool = False) -> Fit | None:
        """One search, and what its plan's program says."""
        of = self.of
        with of.solver.timed("search"):
            known = of.best.seconds if self.counts and of.best is not None and not polish else inf
            found = of.solver.search(given, self.counts, polish=polish, known=known)
        if found.best is None or found.best.problem is None:
            tried = [o.bytes if o.status == "memory" else given for o in found.outcomes if o.status != "illegal"]
            self.nothing = max(self.nothing, given, min(tried, default=given) * (1 - 1e-9))
            return None
        seen = Fit(given, found, of.solver.plan(found.best.problem, found.best.answer.assignment), self.counts)
        self.seen.append(seen)
        if of.fits(seen.plan) and (of.best is None or seen.seconds < of.best.seconds):
            of.best = seen
        return seen

    def go_on(self) -> None:
        """More searches, while they may be of use."""
        for _ in range(LOOKS):
            enough = self.of.best is not None and (
                not self.of.fastest or self.of.solver.effort.is_over or self._is_far(self.of.best)
            )
            given = None if enough else self.next()
            if given is None:
                break
            self.look(given)

    def _is_far(self, best: Fit) -> bool:
        if not self.seen or len(self.seen[-1].found.outcomes) < MANY:
            return False
        found = self.seen[-1].found.best
        return found is not None and found.seconds > best.seconds * (1 + FAR)

    def next(self) -> float | None:
        """The bytes to give to the next search; None where no more is to be had. With ``low`` bytes what is found fits
        or there is nothing, with ``high`` it does not fit."""
        of, limit = self.of, self.of.limit
        fitting = [fit for fit in self.seen if of.fits(fit.plan)]
        low = max([self.nothing, *(fit.given for fit in fitting)])
        over = min((f for f in self.seen if f.given > low and not of.fits(f.plan)), key=lambda f: f.given, default=None)
        if over is None:
            given = limit if low < limit else MOST * limit
            bound = of.solver.least_quick(self.counts, given)
            return None if low >= given or bound == inf or of.is_near(bound) else given
        high = over.given
        if of.is_near(over.found.bound) or high - low <= WORTHWHILE * limit:
            return None
        for fit in (over, *reversed(fitting)):
            guess = limit - of.solver.beside(fit.plan)
            if low < guess < high:
                return guess
        return (low + high) / 2


__all__ = ["Fit", "Fitting"]
