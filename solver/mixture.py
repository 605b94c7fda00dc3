"""The best mix of given patterns of units: one mixed-integer program.

Units of a run (`runs`) are counted, not told apart. Columns: ``n[g, p]``, so many units of group g do pattern p of its
class (integer); ``z[v, s]``, shared variable v is in state s, but for those inside a run; ``start[r, s]`` and ``end[r,
s]``, the states in which run r starts and ends; ``x[l]``, the largest working memory is the size l of those that occur
(binary); the step time ``T``. Minimise T. Rows, in this order:

1. `every_unit`: the n[g, p] of a group add up to its units;
2. `borders_agree`: units that touch a shared variable see the state that it is in; a run starts and ends in theirs;
3. `links_agree`: of the units of a run as many start in a state as end in it, but for the ends of the run;
4. `one_state`: a shared variable is in one state;
5. `streams`: T >= exposed + compute and T >= exposed + hidden;
6. `largest`: the working memory of a pattern, what it makes again included, or of a shared variable's state, is not
   above the chosen size;
7. `memory`: static + saved + the chosen size <= limit.

The counts of a run are told apart again by walking through it (`runs.walk`). Where patterns form a circle beside the
walk, a row is added: they are done only where the run gets there (`connected`); where that does not help, they are left
out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.backend import Model, minimise
from autopar.solver.evaluate import Evaluation, Outcome, Pattern
from autopar.solver.problem import AGAIN, COMPUTE, EXPOSED, HIDDEN, SAVED, STATIC, TRANSIENT, Array, seconds
from autopar.solver.runs import Group, Node, Run, States, walk

SIZES = 32
"""Sizes of the largest working memory that are told apart; others count as the next larger of these."""
WORK = 1_000_000
"""Columns times branch-and-bound nodes of the program at most."""
CIRCLES = 4
"""Circles that get a row; patterns of further ones are left out."""
ROUNDS = 12
"""Programs at most."""


@dataclass(frozen=True, eq=False)
class _Circle:
    """Nodes of a run (the group that comes next, the states before it) that a walk did not reach."""

    run: int
    nodes: frozenset[Node]


@dataclass
class _Chosen:
    """A group and its patterns: what each costs with the variables inside the run that it pays for, and its column."""

    group: Group
    patterns: list[Pattern]
    costs: list[Array]
    columns: list[int]

    def seeing(self, places: Sequence[int]) -> dict[States, list[int]]:
        """Columns by the states that patterns see at some places among their borders."""
        found: dict[States, list[int]] = {}
        for p, column in zip(self.patterns, self.columns, strict=True):
            found.setdefault(p.at(places), []).append(column)
        return found


@dataclass
class _Along:
    """A run, its groups, and the columns of the states in which it starts and ends."""

    run: Run
    groups: list[_Chosen]
    starts: dict[States, int]
    ends: dict[States, int]


@dataclass
class _Columns:
    """The columns of the program. ``states``: of each shared variable (none inside a run); ``paid``: the variables of
    which patterns pay for the state; ``sizes``: of the largest working memory, ascending."""

    evaluation: Evaluation
    limit: float
    model: Model = field(default_factory=Model)
    runs: list[_Along] = field(default_factory=list)
    states: list[dict[int, int]] = field(default_factory=list)
    paid: set[int] = field(default_factory=set)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    time: int = -1
    scale: float = 1.0

    def alternatives(self) -> Iterator[tuple[int, list[tuple[int, Array]]]]:
        """Columns with their resources in sets, of each of which so many are taken."""
        for along in self.runs:
            for g in along.groups:
                yield len(g.group.units), list(zip(g.columns, g.costs, strict=True))
        for v, states in enumerate(self.states):
            if v not in self.paid:
                yield 1, [(z, self.evaluation.problem.shared[v].costs[s]) for s, z in states.items()]

    def costs(self) -> Iterator[tuple[int, Array]]:
        """Every column that costs, with its resources."""
        for _, columns in self.alternatives():
            yield from columns


def best_mix(
    evaluation: Evaluation, runs: Sequence[Run], patterns: Sequence[Sequence[Pattern]], limit: float, gap: float
) -> tuple[Outcome | None, bool]:
    """The fastest mix within ``limit`` bytes to within a relative gap, None where there is none; whether the clock
    ended a program. ``patterns``: of each group of the runs."""
    circles: list[_Circle] = []
    timed_out = False
    for _ in range(ROUNDS):
        c = _columns(evaluation, runs, patterns, limit)
        if c is None:
            break
        for row in ROWS:
            row(c)
        for number, circle in enumerate(circles):
            connected(c, circle, left_out=number >= CIRCLES)
        solution = minimise(c.model, gap=gap, nodes=max(1, WORK // len(c.model.cost)))
        timed_out |= solution.timed_out
        if not len(solution.values):
            break
        units, found = _told_apart(c, solution.values)
        if not found:
            return _outcome(c, solution.values, units), timed_out
        circles += found
    return None, timed_out


def _columns(
    evaluation: Evaluation, runs: Sequence[Run], patterns: Sequence[Sequence[Pattern]], limit: float
) -> _Columns | None:
    """None where a group has no pattern."""
    c = _Columns(evaluation, limit)
    shared, units, left = evaluation.problem.shared, evaluation.problem.units, iter(patterns)
    seen: dict[int, set[int]] = {}  # states of the variables that are not inside a run
    whole, inside = set[int](), set[int]()  # held by several units; inside a run
    for run in runs:
        chosen = [_chosen(c, g, next(left)) for g in run.groups]
        if not all(g.patterns for g in chosen):
            return None
        first, last = chosen[0], chosen[run.groups.index(run.last)]
        along = _Along(run, chosen, {}, {})
        if run.count > 1:
            along.starts, along.ends = (
                {s: c.model.add(high=1.0, integer=True) for s in sorted(g.seeing(places))}
                for g, places in ((first, first.group.ins), (last, last.group.outs))
            )
        c.runs.append(along)
        inside |= run.inner(units)
        c.paid |= run.inner(units) | {units[run.first].borders[i] for i in run.groups[0].ins}
        for g in chosen:
            for i in g.group.held:
                v = units[g.group.units[0]].borders[i]
                seen.setdefault(v, set()).update(p.borders[i] for p in g.patterns)
                whole |= {v} if run.count > 1 else set()
        for v, k, ends in _at_ends(c, along):
            seen.setdefault(v, set()).update(s[k] for s in ends)
    for v, size in enumerate(evaluation.sizes):
        free = v not in seen
        legal = np.asarray(np.isfinite(shared[v].costs).all(1))
        which = [s for s in sorted(range(size) if free else seen[v]) if legal[s] and v not in inside]
        c.states.append({s: c.model.add(high=1.0, integer=free or v in whole) for s in which})
    c.sizes = [(size, c.model.add(high=1.0, integer=True)) for size in _sizes(c)]
    c.time = c.model.add(cost=1.0)
    c.scale = max(1e-12, sum(n * max((float(seconds(t)) for _, t in of), default=0.0) for n, of in c.alternatives()))
    return c


def _chosen(c: _Columns, group: Group, patterns: Sequence[Pattern]) -> _Chosen:
    """The legal ones of the patterns. Each pays for the links to the unit before and for what its unit alone touches;
    these cost the same for all units of the group."""
    problem = c.evaluation.problem
    borders = problem.units[group.units[-1]].borders
    found = _Chosen(group, [], [], [])
    for p in patterns:
        own = [problem.shared[borders[i]].costs[p.borders[i]] for i in (*group.ins, *group.alone)]
        if not all(np.isfinite(row).all() for row in own):
            continue
        total = p.total + sum(own) if own else p.total.copy()
        total[TRANSIENT] = max(p.total[TRANSIENT] + p.total[AGAIN], *(row[TRANSIENT] for row in own), 0.0)
        found.patterns.append(p)
        found.costs.append(total)
        found.columns.append(c.model.add(high=float(len(group.units)), integer=True))
    return found


def _at_ends(c: _Columns, along: _Along) -> list[tuple[int, int, dict[States, int]]]:
    """The variables at both ends of a run, the place of each in the states there, and the columns of these."""
    units, run = c.evaluation.problem.units, along.run
    if run.count == 1:
        return []
    ends = ((run.first, run.groups[0].ins, along.starts), (run.last.units[-1], run.last.outs, along.ends))
    return [(units[u].borders[i], k, columns) for u, places, columns in ends for k, i in enumerate(places)]


def _sizes(c: _Columns) -> list[float]:
    """Sizes of the largest working memory from the least that any mix has."""
    sizes = [sorted({float(t[TRANSIENT]) for _, t in columns}) for _, columns in c.alternatives() if columns]
    least = max((of[0] for of in sizes), default=0.0)
    every = sorted({least, *(size for of in sizes for size in of if size > least)})
    places = np.unique(np.linspace(0, len(every) - 1, min(SIZES, len(every))).round().astype(int))
    return [every[i] for i in places]


def every_unit(c: _Columns) -> None:
    """sum_p n[g, p] = units of g."""
    for along in c.runs:
        for g in along.groups:
            count = float(len(g.group.units))
            c.model.row([(n, 1.0) for n in g.columns], low=count, high=count)


def borders_agree(c: _Columns) -> None:
    """sum over p that see v in state s of n[g, p] = units of g * z[v, s]; of start[r, s], and of end[r, s], one z."""
    for along in c.runs:
        for g in along.groups:
            for i in g.group.held:
                v = c.evaluation.problem.units[g.group.units[0]].borders[i]
                _agree(c, v, {s[0]: columns for s, columns in g.seeing((i,)).items()}, len(g.group.units))
        for v, k, ends in _at_ends(c, along):
            _agree(c, v, {s: [x for states, x in ends.items() if states[k] == s] for s in {t[k] for t in ends}}, 1)
        if along.run.count > 1:
            for columns in (along.starts, along.ends):
                c.model.row([(x, 1.0) for x in columns.values()], low=1.0, high=1.0)


def _agree(c: _Columns, variable: int, seeing: dict[int, list[int]], times: int) -> None:
    states = c.states[variable]
    for s in sorted(seeing.keys() | states.keys()):
        terms = [(x, 1.0) for x in seeing.get(s, ())]
        terms += [(states[s], -float(times))] if s in states else []
        c.model.row(terms, low=0.0, high=0.0)


def links_agree(c: _Columns) -> None:
    """Of each run, in front of each group: as many come in a state as go on from it."""
    for along in c.runs:
        if along.run.count == 1:
            continue
        last = along.run.groups.index(along.run.last)
        for at, g in enumerate(along.groups):
            before = along.groups[at - 1]
            terms: dict[States, list[tuple[int, float]]] = {}
            for s, columns in g.seeing(g.group.ins).items():
                terms.setdefault(s, []).extend((n, -1.0) for n in columns)
            for s, columns in before.seeing(before.group.outs).items():
                terms.setdefault(s, []).extend((n, 1.0) for n in columns)
            for s, column in along.starts.items() if at == 0 else ():
                terms.setdefault(s, []).append((column, 1.0))
            for s, column in along.ends.items() if at == (last + 1) % len(along.groups) else ():
                terms.setdefault(s, []).append((column, -1.0))
            for s in sorted(terms):
                c.model.row(terms[s], low=0.0, high=0.0)


def one_state(c: _Columns) -> None:
    """sum_s z[v, s] = 1."""
    for states in c.states:
        if states:
            c.model.row([(z, 1.0) for z in states.values()], low=1.0, high=1.0)


def streams(c: _Columns) -> None:
    """T >= exposed + compute, T >= exposed + hidden."""
    for stream in (COMPUTE, HIDDEN):
        terms = [(x, float(t[EXPOSED] + t[stream]) / c.scale) for x, t in c.costs()]
        c.model.row([(c.time, -1.0), *terms], high=0.0)


def largest(c: _Columns) -> None:
    """sum_l x[l] = 1, and of what works with at least so much, as many as there are or none: sum n <= units * sum of
    the x[l] of sizes that are not below."""
    c.model.row([(x, 1.0) for _, x in c.sizes], low=1.0, high=1.0)
    for times, columns in c.alternatives():
        working = [(float(t[TRANSIENT]), column) for column, t in columns]
        for k in range(1, len(c.sizes)):
            below, size = c.sizes[k - 1][0], c.sizes[k][0]
            if any(below < w <= size for w, _ in working):
                terms = [(column, 1.0) for w, column in working if w > below]
                c.model.row([*terms, *((x, -float(times)) for _, x in c.sizes[k:])], high=0.0)


def memory(c: _Columns) -> None:
    """static + saved + sum_l size[l] x[l] <= limit."""
    terms = [(x, float(t[STATIC] + t[SAVED]) / c.limit) for x, t in c.costs()]
    c.model.row([*terms, *((x, size / c.limit) for size, x in c.sizes)], high=1.0)


ROWS = (every_unit, borders_agree, links_agree, one_state, streams, largest, memory)


def connected(c: _Columns, circle: _Circle, *, left_out: bool) -> None:
    """sum of n[g, p] on a circle <= units of the run * sum of those that lead there; or no pattern of it."""
    along = c.runs[circle.run]
    on, to = list[int](), [x for s, x in along.starts.items() if (0, s) in circle.nodes]
    for at, g in enumerate(along.groups):
        for p, column in zip(g.patterns, g.columns, strict=True):
            if ((at + 1) % len(along.groups), p.at(g.group.outs)) in circle.nodes:
                (on if (at, p.at(g.group.ins)) in circle.nodes else to).append(column)
    paths = [] if left_out else [(x, -float(along.run.count)) for x in to]
    c.model.row([*((x, 1.0) for x in on), *paths], high=0.0)


def _told_apart(c: _Columns, values: Array) -> tuple[dict[int, Pattern], list[_Circle]]:
    """The pattern of every unit, and what the walks through runs did not reach."""
    units: dict[int, Pattern] = {}
    circles: list[_Circle] = []
    for number, along in enumerate(c.runs):
        counted = []
        for g in along.groups:
            often = [round(float(values[column])) for column in g.columns]
            steps = [(p.at(g.group.ins), p.at(g.group.outs), p) for p in g.patterns]
            counted.append([(step, n) for step, n in zip(steps, often, strict=True) if n])
        start = max(along.starts, key=lambda s: values[along.starts[s]], default=())
        path, left = walk(along.run, start, counted)
        circles += [_Circle(number, frozenset(nodes)) for nodes in left]
        units.update(zip(range(along.run.first, along.run.first + along.run.count), path, strict=False))
    return units, circles


def _outcome(c: _Columns, values: Array, patterns: dict[int, Pattern]) -> Outcome | None:
    """None where rounding has made units disagree."""
    units = c.evaluation.problem.units
    shared = [max(of, key=lambda s: values[of[s]], default=-1) for of in c.states]
    for along in c.runs:
        for v in along.run.inner(units):
            shared[v] = -1
    if len(patterns) < len(units):
        return None
    for u, unit in enumerate(units):
        for b, s in zip(unit.borders, patterns[u].borders, strict=True):
            if shared[b] not in (-1, s):
                return None
            shared[b] = s
    return c.evaluation.outcome(float("nan"), shared, [patterns[u] for u in range(len(units))])


__all__ = ["best_mix"]
