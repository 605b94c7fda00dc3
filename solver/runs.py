"""Runs of equal units, and a walk through one that does each pattern as often as was counted.

A chain of layers is a run: units whose classes come again and again with the same period, each coupled to the next by
the variables (its *links*) that these two alone touch. Which of the equal units does what is all the same then, but for
the links: a unit may follow another if it starts in the states in which that ends. So counts of patterns say all. They
are a chain wherever a walk from the first states to the last uses every one of them (Euler: as many patterns leave a
state as enter it, and all are reached).

>>> import numpy as np
>>> from autopar.solver.problem import Variable
>>> layers = [Unit(0, (0, 1)), Unit(1, (1, 2)), Unit(0, (2, 3)), Unit(1, (3, 4))]
>>> x = Variable("x", "tensor", ("a", "b"), np.zeros((2, 7)))
>>> _, run, _ = runs_of(Problem("toy", (x,) * 5, (), (Unit(2, (0,)), *layers, Unit(3, (4,))), 1.0))
>>> [(g.units, g.ins, g.outs) for g in run.groups]
[((1, 3), (0,), (1,)), ((2, 4), (0,), (1,))]
>>> steps = [[((0,), (1,), "up"), ((0,), (0,), "stay")], [((1,), (0,), "down"), ((0,), (0,), "stay")]]
>>> walk(run, (0,), [[(s, 1) for s in group] for group in steps])
(['up', 'down', 'stay', 'stay'], [])
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autopar.solver.problem import Problem, Unit

LONGEST = 8
"""Units of a period at most."""

T = TypeVar("T")
States = tuple[int, ...]
Node = tuple[int, States]


@dataclass(frozen=True)
class Group:
    """Equal units of a run. Places among a unit's borders: of the links to the unit before (``ins``) and after
    (``outs``), of variables that it alone touches (``alone``), and of all others, which the whole group shares."""

    kind: int
    units: tuple[int, ...]
    ins: tuple[int, ...] = ()
    outs: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()
    held: tuple[int, ...] = ()


@dataclass(frozen=True)
class Run:
    """``groups``: one a unit of the period, in their order; a unit that is in no run is one by itself, all its borders
    held."""

    groups: tuple[Group, ...]

    @property
    def count(self) -> int:
        """Units of all groups."""
        return sum(len(g.units) for g in self.groups)

    @property
    def first(self) -> int:
        """The first unit."""
        return self.groups[0].units[0]

    @property
    def last(self) -> Group:
        """The group of the last unit."""
        return max(self.groups, key=lambda g: g.units[-1])

    def inner(self, units: Sequence[Unit]) -> set[int]:
        """The variables that are nobody else's: links inside the run, and what one unit alone touches."""
        links = {units[u].borders[i] for g in self.groups for u in g.units for i in g.ins if u != self.first}
        return links | {units[u].borders[i] for g in self.groups for u in g.units for i in g.alone}


def runs_of(problem: Problem) -> list[Run]:
    """All units, in their order, in runs as long as can be."""
    roles = _roles(problem)
    found, at = list[Run](), 0
    while at < len(roles):
        ends = {q: _end(roles, at, q) for q in range(1, LONGEST + 1)}
        periods = [q for q, end in ends.items() if end - at >= 2 * q]
        if periods:
            period = max(periods, key=lambda q: (ends[q], -q))
            found.append(_run(roles, at, period, ends[period]))
        else:
            found.append(Run((Group(problem.units[at].kind, (at,), held=tuple(range(len(roles[at].borders)))),)))
        at = found[-1].first + found[-1].count
    return found


def walk(
    run: Run, start: States, counted: Sequence[Sequence[tuple[tuple[States, States, T], int]]]
) -> tuple[list[T], list[set[Node]]]:
    """The units' steps in order. ``counted``: of each group, steps (states in, states out, what) and how often. What
    cannot be reached from the start comes back as sets of nodes (group, states before it), and no steps then."""
    ahead: dict[Node, list[tuple[Node, T]]] = {}
    groups = len(run.groups)
    for g, steps in enumerate(counted):
        for (before, after, what), often in steps:
            ahead.setdefault((g, before), []).extend([(((g + 1) % groups, after), what)] * often)
    for steps_from in ahead.values():
        steps_from.reverse()
    path: list[T] = []
    stack: list[tuple[Node, T | None]] = [((0, start), None)]
    while stack:
        node, came = stack[-1]
        if ahead.get(node):
            stack.append(ahead[node].pop())
        else:
            stack.pop()
            if came is not None:
                path.append(came)
    if left := _parts({n: [to for to, _ in steps_from] for n, steps_from in ahead.items() if steps_from}):
        return [], left
    return path[::-1], []


def _parts(ahead: dict[Node, list[Node]]) -> list[set[Node]]:
    """Sets of nodes that steps connect."""
    parts: list[set[Node]] = []
    for node, to in ahead.items():
        joined = {node, *to}
        apart = []
        for part in parts:
            if part & joined:
                joined |= part
            else:
                apart.append(part)
        parts = [*apart, joined]
    return parts


@dataclass(frozen=True)
class _Role:
    """What makes units equal for a run. ``borders``: what each is there, and what more has to be equal; of several
    links, each by its place among the borders of the unit before."""

    kind: int
    borders: tuple[tuple[str, Hashable, Hashable], ...]

    def places(self, what: str) -> tuple[int, ...]:
        return tuple(i for i, (role, _, _) in enumerate(self.borders) if role == what)


def _run(roles: Sequence[_Role], at: int, period: int, end: int) -> Run:
    groups = []
    for first in range(at, at + period):
        role, following = roles[first], roles[first + 1]
        ins, outs = following.places("in"), role.places("out")
        if len(ins) > 1:  # in the order in which the next unit has them
            outs = tuple(int(following.borders[i][1]) for i in ins)  # type: ignore[call-overload]
        held, alone = role.places("held"), role.places("alone")
        groups.append(Group(role.kind, tuple(range(first, end, period)), role.places("in"), outs, alone, held))
    return Run(tuple(groups))


def _roles(problem: Problem) -> list[_Role]:
    touching: dict[int, list[int]] = {}
    for u, unit in enumerate(problem.units):
        for b in unit.borders:
            touching.setdefault(b, []).append(u)
    costs = {b: problem.shared[b].costs.tobytes() for b in touching}
    found = []
    for u, unit in enumerate(problem.units):
        links = sum(touching[b] == [u - 1, u] for b in unit.borders)
        borders = list[tuple[str, Hashable, Hashable]]()
        for b in unit.borders:
            if len(set(unit.borders)) < len(unit.borders):
                borders.append(("held", u, b))
            elif touching[b] == [u]:
                borders.append(("alone", None, costs[b]))
            elif touching[b] == [u - 1, u]:
                borders.append(("in", problem.units[u - 1].borders.index(b) if links > 1 else None, costs[b]))
            elif touching[b] == [u, u + 1]:
                borders.append(("out", None, None))
            else:
                borders.append(("held", None, b))
        found.append(_Role(unit.kind, tuple(borders)))
    return found


def _end(roles: Sequence[_Role], at: int, period: int) -> int:
    """Behind the last unit up to which units come again with a period."""
    end = at + period
    while end < len(roles) and roles[end] == roles[end - period]:
        end += 1
    return min(end, len(roles))
