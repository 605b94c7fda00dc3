"""The best cuts and patterns about an assignment with stages: one mixed-integer program in counts.

All shared variables keep their states. Then units of one class between the same states are a *group*, told apart no
further: a stage is a run of units, and its groups do each pattern so often. Columns: ``y[s, i, j]``, stage s is the
run of units [i, j), whose ends are near those of the assignment (binary); ``n[s, g, p]``, so many units of group g do
pattern p on stage s (integer); ``t[s]``, seconds of all microbatches of a stage; ``x[r, l]``, the working memory of
rank r is the size l of those that occur (binary); the largest rank ``G``. Minimise the step. Rows, in this order:

1. `one_run`: every stage is one run, not empty;
2. `cuts_meet`: a stage begins where the one before ends (so stages follow each other, and have every unit);
3. `every_unit`: the n[s, g, p] of a group add up to its units in the run of the stage;
4. `streams`: t[s] >= exposed + compute and t[s] >= exposed + hidden;
5. `fullest`: G >= the t[s] of the stages of a rank;
6. `working`: what a pattern works with, what it makes again included, or a shared variable, is not above the chosen
   size;
7. `memory`: static + in flight * saved + the chosen size <= limit, on each rank.

The program is only as good as its patterns and states; the proof is `stage_bound`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from autopar.solver.backend import Model, minimise
from autopar.solver.evaluate import Pattern
from autopar.solver.placed import Placed, place
from autopar.solver.problem import (
    AGAIN,
    COMPUTE,
    EXPOSED,
    HIDDEN,
    RESOURCES,
    SAVED,
    STATIC,
    TRANSIENT,
    Array,
    Pipeline,
    seconds,
    together,
)
from autopar.solver.segments import Priced, Row

NEAR = 1
"""Units by which a cut may move either way."""
PATTERNS = 6
"""Of a group on a stage at most: those of least cost at the prices of its rank."""
SIZES = 3
"""Sizes of the working memory of a rank that are told apart; others count as the next larger."""
WORK = 100_000
"""Columns times branch-and-bound nodes at most."""


@dataclass(frozen=True, eq=False)
class Run:
    """Units [first, last) as a stage: how many of each group, what its shared variables cost, and the column."""

    first: int
    last: int
    counts: dict[int, int]
    shared: Array
    column: int


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage: the runs that it may be; of each group, columns of patterns; the column of its seconds."""

    in_flight: float
    runs: list[Run]
    patterns: dict[int, list[tuple[Pattern, int]]]
    seconds: int

    def costs(self) -> list[tuple[int, Array]]:
        """Columns with what they cost."""
        return [(r.column, r.shared) for r in self.runs] + [
            (n, p.total) for ps in self.patterns.values() for p, n in ps
        ]

    def working(self) -> list[list[tuple[float, int, int]]]:
        """Sets of columns of which a stage takes so many at most: what each works with, the column, how many."""
        found = [[(float(r.shared[TRANSIENT]), r.column, 1) for r in self.runs]]
        for g, patterns in self.patterns.items():
            most = max(r.counts.get(g, 0) for r in self.runs)
            found.append([(_working(p), n, most) for p, n in patterns])
        return found


@dataclass
class Columns:
    """The columns of the program. ``sizes``: of the working memory of each rank, ascending."""

    pipeline: Pipeline
    limit: float
    scale: float
    model: Model = field(default_factory=Model)
    stages: list[Stage] = field(default_factory=list)
    sizes: list[list[tuple[float, int]]] = field(default_factory=list)
    fullest: int = -1

    def of_rank(self, rank: int) -> list[Stage]:
        """The stages of a rank."""
        return self.stages[rank :: self.pipeline.ranks]


def best_about(
    row: Row, home: Placed, priced: Sequence[Priced], prices: Sequence[Array], limit: float, gap: float
) -> tuple[Placed | None, bool]:
    """The fastest cuts and patterns about an assignment (None where none fits), to within a relative gap of the
    program; whether the clock ended it. ``priced``: where patterns are taken from; ``prices``: of each stage's
    resources, by which patterns are chosen."""
    groups = _groups(row, home)
    c = _columns(row, home, groups, _patterns(row, home, groups, priced), prices, limit)
    for add in ROWS:
        add(c)
    solution = minimise(c.model, gap=gap, nodes=max(1, WORK // len(c.model.cost)))
    if not len(solution.values):
        return None, solution.timed_out
    return _placed(c, row, home, groups, solution.values), solution.timed_out


def _groups(row: Row, home: Placed) -> list[int]:
    """Of each unit, the number of its group."""
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    states = [(unit.kind, tuple(home.shared[b] for b in unit.borders)) for unit in row.problem.units]
    return [known.setdefault(key, len(known)) for key in states]


def _patterns(row: Row, home: Placed, groups: list[int], priced: Sequence[Priced]) -> list[list[Pattern]]:
    """Of each group the legal patterns, without those that another beats in everything."""
    found = []
    for number in range(max(groups) + 1):
        mine = [home.patterns[k] for k, g in enumerate(groups) if g == number]
        every = dict.fromkeys([*mine, *(p.point.between(mine[0].kind, mine[0].borders) for p in priced)])
        legal = sorted((p for p in every if np.isfinite(p.total).all()), key=lambda p: (*_costs(p), p.states))
        kept: list[Pattern] = []
        for p in legal:
            if not any((_costs(q) <= _costs(p)).all() for q in kept):
                kept.append(p)
        found.append(kept)
    return found


def _costs(pattern: Pattern) -> Array:
    """What of a pattern a stage sees: both streams, what is held, what is kept, what it works with."""
    t = pattern.total
    return np.array([t[EXPOSED] + t[COMPUTE], t[EXPOSED] + t[HIDDEN], t[STATIC], t[SAVED], _working(pattern)])


def _working(pattern: Pattern) -> float:
    return float(pattern.total[TRANSIENT] + pattern.total[AGAIN])


def _columns(
    row: Row,
    home: Placed,
    groups: list[int],
    patterns: list[list[Pattern]],
    prices: Sequence[Array],
    limit: float,
) -> Columns:
    pipeline = row.problem.pipeline
    assert pipeline is not None
    c = Columns(pipeline, limit, max(1e-12, float(seconds(home.stages).max())))
    share, model = pipeline.fill / pipeline.microbatches, c.model
    costly = {v for v in row.touched if row.problem.shared[v].costs[home.shared[v]].any() or pipeline.sends[v].any()}
    near = [_near(row, cut) for cut in (0, *home.cuts, row.units)]
    for s, n in enumerate(pipeline.in_flight):
        every = [(i, j) for i in near[s] for j in near[s + 1] if i < j]
        found = [_run(c, row, home, groups, costly, i, j) for i, j in every]
        chosen = {}
        for g in sorted({groups[k] for k in range(near[s][0], near[s + 1][-1])}):
            order = sorted(patterns[g], key=lambda p: (float(prices[s] @ p.total), p.states))
            kept = dict.fromkeys([*order[:PATTERNS], min(order, key=lambda p: (_bytes(p, n), p.states))])
            kept.update(dict.fromkeys(p for p in home.patterns[near[s][0] : near[s + 1][-1]] if p in order))
            most = float(max(r.counts.get(g, 0) for r in found))
            chosen[g] = [(p, model.add(high=most, integer=True)) for p in kept if p in patterns[g]]
        c.stages.append(Stage(n, found, chosen, model.add(cost=share)))
    for r in range(pipeline.ranks):
        c.sizes.append([(size, model.add(high=1.0, integer=True)) for size in _sizes(c.of_rank(r))])
    c.fullest = model.add(cost=1.0 - share)
    return c


def _bytes(pattern: Pattern, in_flight: float) -> float:
    return float(pattern.total[STATIC] + in_flight * pattern.total[SAVED]) + _working(pattern)


def _near(row: Row, cut: int) -> list[int]:
    """Where a cut may be."""
    if cut in (0, row.units):
        return [cut]
    return list(range(max(1, cut - NEAR), min(row.units - 1, cut + NEAR) + 1))


def _run(c: Columns, row: Row, home: Placed, groups: list[int], costly: set[int], first: int, last: int) -> Run:
    touched = sorted({b for unit in row.problem.units[first:last] for b in unit.borders} & costly)
    paid = [row.paid(v, home.shared[v], first) for v in (*touched, *(row.untouched if first == 0 else ()))]
    sends = sum(float(c.pipeline.sends[v][home.shared[v]]) for v in touched if row.first[v] < first)
    shared = together(np.stack(paid)) if paid else np.zeros(len(RESOURCES))
    column = c.model.add(high=1.0, integer=True, cost=c.pipeline.fill * sends / c.scale)
    return Run(first, last, Counter(groups[first:last]), shared, column)


def _sizes(stages: Sequence[Stage]) -> list[float]:
    """Some of the sizes of working memory that occur, the largest among them."""
    every = sorted({size for stage in stages for of in stage.working() for size, _, _ in of})
    places = np.unique(np.linspace(0, len(every) - 1, min(SIZES, len(every))).round().astype(int))
    return [every[i] for i in places]


def one_run(c: Columns) -> None:
    """sum of y[s, i, j] = 1."""
    for stage in c.stages:
        c.model.row([(r.column, 1.0) for r in stage.runs], low=1.0, high=1.0)


def cuts_meet(c: Columns) -> None:
    """sum over i of y[s, i, k] = sum over j of y[s + 1, k, j]."""
    for before, after in pairwise(c.stages):
        for cut in sorted({r.last for r in before.runs} | {r.first for r in after.runs}):
            ends = [(r.column, 1.0) for r in before.runs if r.last == cut]
            c.model.row(ends + [(r.column, -1.0) for r in after.runs if r.first == cut], low=0.0, high=0.0)


def every_unit(c: Columns) -> None:
    """sum over p of n[s, g, p] = sum over runs of y[s, i, j] * (units of g in it)."""
    for stage in c.stages:
        for g, patterns in stage.patterns.items():
            units = [(r.column, -float(r.counts[g])) for r in stage.runs if r.counts.get(g)]
            c.model.row([*((n, 1.0) for _, n in patterns), *units], low=0.0, high=0.0)


def streams(c: Columns) -> None:
    """t[s] >= exposed + compute, t[s] >= exposed + hidden."""
    for stage in c.stages:
        for stream in (COMPUTE, HIDDEN):
            terms = [(x, float(t[EXPOSED] + t[stream]) / c.scale) for x, t in stage.costs()]
            c.model.row([(stage.seconds, -1.0), *terms], high=0.0)


def fullest(c: Columns) -> None:
    """G >= sum over the stages of a rank of t[s]."""
    for r in range(c.pipeline.ranks):
        c.model.row([(c.fullest, -1.0), *((stage.seconds, 1.0) for stage in c.of_rank(r))], high=0.0)


def working(c: Columns) -> None:
    """sum over l of x[r, l] = 1, and of columns that work with at least so much, as many as there may be or none:
    sum n <= (the most) * sum of the x[r, l] of sizes that are not below."""
    for r, sizes in enumerate(c.sizes):
        c.model.row([(x, 1.0) for _, x in sizes], low=1.0, high=1.0)
        for of in (of for stage in c.of_rank(r) for of in stage.working()):
            for k in range(1, len(sizes)):
                above = [(column, most) for size, column, most in of if size > sizes[k - 1][0]]
                if any(sizes[k - 1][0] < size <= sizes[k][0] for size, _, _ in of):
                    most = float(max(m for _, m in above))
                    c.model.row([*((n, 1.0) for n, _ in above), *((x, -most) for _, x in sizes[k:])], high=0.0)


def memory(c: Columns) -> None:
    """static + in flight * saved + sum over l of size[l] * x[r, l] <= limit."""
    for r, sizes in enumerate(c.sizes):
        terms = [(x, size / c.limit) for size, x in sizes]
        for stage in c.of_rank(r):
            terms += [(x, float(t[STATIC] + stage.in_flight * t[SAVED]) / c.limit) for x, t in stage.costs()]
        c.model.row(terms, high=1.0)


ROWS = (one_run, cuts_meet, every_unit, streams, fullest, working, memory)


def _placed(c: Columns, row: Row, home: Placed, groups: list[int], values: Array) -> Placed:
    """The counts told apart: the units of a group in a stage take its patterns one after the other."""
    found = list(home.patterns)
    cuts = []
    for stage in c.stages:
        run = max(stage.runs, key=lambda r: values[r.column])
        cuts.append(run.last)
        left = {g: [p for p, n in of for _ in range(round(float(values[n])))] for g, of in stage.patterns.items()}
        for k in range(run.first, run.last):
            if left[groups[k]]:
                found[k] = left[groups[k]].pop(0)
    return place(row, tuple(cuts[:-1]), home.shared, found)


__all__ = ["best_about"]
