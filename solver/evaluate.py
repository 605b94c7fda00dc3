"""What an assignment costs at given weights of the resources, and the assignment that costs least.

Each class is eliminated down to its borders once; then the shared variables of the whole problem are. Nothing here
knows of bounds or limits: `lagrangian` chooses the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.eliminate import TABLE_LIMIT, Elimination, Scope
from autopar.solver.problem import (
    COMPUTE,
    RESOURCES,
    TRANSIENT,
    Array,
    Assignment,
    Class,
    Problem,
    joined,
    together,
)


@dataclass(frozen=True, eq=False)
class Pattern:
    """What a class does between given border states. ``total``: by resource, as `problem.together` has it."""

    kind: int
    states: tuple[int, ...]
    borders: tuple[int, ...]
    total: Array

    def at(self, places: Sequence[int]) -> tuple[int, ...]:
        """The states of some of the borders."""
        return tuple(self.borders[i] for i in places)


@dataclass(frozen=True, eq=False)
class Outcome:
    """The least of one evaluation: ``value`` is a lower bound (equal to what the assignment costs where exact).

    ``patterns``: of each unit. ``total`` by resource; infinite compute where the assignment is illegal (only if not
    exact, or where no legal one exists)."""

    value: float
    assignment: Assignment
    patterns: tuple[Pattern, ...]
    total: Array


class _Rows:
    """The cost rows of many tables below each other. Illegal rows are kept apart: 0 times infinity is no number."""

    def __init__(self, tables: Sequence[Array]) -> None:
        self.shapes = [t.shape[:-1] for t in tables]
        flat = [t.reshape(-1, len(RESOURCES)) for t in tables]
        self.rows = np.concatenate(flat) if flat else np.zeros((0, len(RESOURCES)))
        self.illegal = np.asarray(~np.isfinite(self.rows).all(1))
        self.rows[self.illegal] = 0.0
        self.transient = self.rows[:, TRANSIENT].copy()
        self.starts = np.cumsum([0, *(len(t) for t in flat)])

    def price(self, weights: Array, high: float) -> list[Array]:
        """Each table at these weights; rows whose transient is above ``high`` bytes are illegal."""
        flat = self.rows @ weights
        flat[self.illegal | (self.transient > high)] = np.inf
        return [
            flat[a:b].reshape(shape) for a, b, shape in zip(self.starts[:-1], self.starts[1:], self.shapes, strict=True)
        ]

    def total(self, rows: Sequence[int]) -> Array:
        """Rows together; infinite compute where one is illegal."""
        total = together(self.rows[list(rows)])
        if self.illegal[list(rows)].any():
            total[COMPUTE] = np.inf
        return total


class _Priced:
    """One class: its rows, and the elimination of its variables down to the borders."""

    def __init__(self, kind: Class, borders: Sequence[int], limit: int) -> None:
        self.kind = kind
        own = len(kind.variables)
        sizes = [*(len(v.states) for v in kind.variables), *borders]
        scopes = [Scope((i,), (np.arange(sizes[i]),)) for i in range(own)]
        scopes += [Scope(f.over, f.reads) for f in kind.factors]
        self.rows = _Rows([*(v.costs for v in kind.variables), *(f.table for f in kind.factors)])
        self.elimination = _elimination(sizes, scopes, range(own, len(sizes)), limit)

    def total(self, states: Sequence[int], borders: Sequence[int]) -> Array:
        every = (*states, *borders)
        own, starts = len(states), self.rows.starts
        rows = [int(starts[i]) + s for i, s in enumerate(states)]
        for i, f in enumerate(self.kind.factors):
            rows.append(int(starts[own + i]) + int(np.ravel_multi_index(f.at(every), f.table.shape[:-1])))
        return self.rows.total(rows)


def _elimination(sizes: Sequence[int], scopes: Sequence[Scope], keep: Collection[int], limit: int) -> Elimination:
    """Exact where no table has more than ``limit`` entries; else with tables of a quarter of that. (densenet121 on four
    ranks: the same plans or faster ones in a sixth of the time, bounds up to a tenth lower.)"""
    exact = Elimination(sizes, scopes, keep, limit)
    return exact if exact.exact else Elimination(sizes, scopes, keep, max(1, limit // 4))


class Evaluation:
    """A problem made ready for evaluations. ``exact``: nothing had to be split."""

    def __init__(self, problem: Problem, limit: int = TABLE_LIMIT) -> None:
        self.problem = problem
        self.sizes = [len(v.states) for v in problem.shared]
        self._classes = [_Priced(c, self._border_sizes(i, c), limit) for i, c in enumerate(problem.classes)]
        self._shared = _Rows([v.costs for v in problem.shared])
        self._top = _elimination(self.sizes, self._scopes(), (), limit)
        self.exact = self._top.exact and all(c.elimination.exact for c in self._classes)
        self._patterns: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Pattern] = {}
        self.evaluations = 0

    def of_limit(self, problem: Problem) -> Evaluation:
        """The evaluation of the same problem with another memory limit."""
        other = copy.copy(self)
        other.problem = problem
        return other

    def least(self, weights: Array, high: float = np.inf) -> Outcome:
        """The assignment of least ``weights @ resources`` among those without a transient above ``high`` bytes."""
        return Point(self, weights, high).outcome()

    def bound(self, weights: Array, high: float = np.inf) -> float:
        """The value of `least` alone."""
        return Point(self, weights, high).value()

    def transients(self) -> Array:
        """Every size of a transient that occurs, ascending."""
        return np.unique(np.concatenate([self._shared.transient, *(c.rows.transient for c in self._classes)]))

    def least_transient(self) -> float:
        """Bytes below which no assignment's largest transient can be: every variable and factor does something."""
        least = 0.0
        for rows in (
            self._shared,
            *(self._classes[kind].rows for kind in sorted({u.kind for u in self.problem.units})),
        ):
            for a, b in zip(rows.starts[:-1], rows.starts[1:], strict=True):
                legal = ~rows.illegal[a:b]
                if b > a and legal.any():
                    least = max(least, float(rows.transient[a:b][legal].min()))
        return least

    def pattern(self, kind: int, states: tuple[int, ...], borders: tuple[int, ...]) -> Pattern:
        """The pattern of these states, the same object for the same states."""
        key = (kind, states, borders)
        if key not in self._patterns:
            self._patterns[key] = Pattern(kind, states, borders, self._classes[kind].total(states, borders))
        return self._patterns[key]

    def outcome(self, value: float, shared: Sequence[int], patterns: Sequence[Pattern]) -> Outcome:
        """An outcome of these shared states and patterns."""
        own = self._shared.total([int(a) + s for a, s in zip(self._shared.starts, shared, strict=False)])
        total = joined([own, *(p.total for p in patterns)])
        assignment = Assignment(tuple(shared), tuple(p.states for p in patterns))
        return Outcome(value, assignment, tuple(patterns), total)

    def priced(self, assignment: Assignment) -> Outcome:
        """The outcome of an assignment found elsewhere; its value is no number."""
        shared = assignment.shared
        units = zip(self.problem.units, assignment.units, strict=True)
        patterns = [self.pattern(u.kind, states, tuple(shared[b] for b in u.borders)) for u, states in units]
        return self.outcome(float("nan"), shared, patterns)

    def _border_sizes(self, kind: int, what: Class) -> list[int]:
        for unit in self.problem.units:
            if unit.kind == kind:
                return [self.sizes[b] for b in unit.borders]
        return [1] * len(what.borders)

    def _scopes(self) -> list[Scope]:
        scopes = [Scope((i,), (np.arange(n),)) for i, n in enumerate(self.sizes)]
        for unit in self.problem.units:
            own = len(self.problem.classes[unit.kind].variables)
            elimination = self._classes[unit.kind].elimination
            for i in elimination.left:
                scope = elimination.scopes[i]
                scopes.append(Scope(tuple(unit.borders[v - own] for v in scope.variables), scope.maps))
        return scopes


class Point:
    """An evaluation at one choice of weights; patterns between other borders can be asked of it."""

    def __init__(self, evaluation: Evaluation, weights: Array, high: float = np.inf) -> None:
        self._of = evaluation
        evaluation.evaluations += 1
        self._tables = [c.elimination.run(c.rows.price(weights, high)) for c in evaluation._classes]
        self._shared = evaluation._shared.price(weights, high)
        self._seen: dict[tuple[int, tuple[int, ...]], Pattern] = {}

    def outcome(self) -> Outcome:
        """The whole problem's least."""
        of, every = self._of, self.top()
        shared = of._top.decode(every, {})
        patterns = [self.between(u.kind, tuple(shared[b] for b in u.borders)) for u in of.problem.units]
        return of.outcome(of._top.value(every), shared, patterns)

    def value(self) -> float:
        """The whole problem's least, without what reaches it."""
        return self._of._top.value(self.top())

    def top(self) -> list[Array]:
        """The tables over shared variables: given and made."""
        tables = list(self._shared)
        for unit in self._of.problem.units:
            tables += [self._tables[unit.kind][i] for i in self._of._classes[unit.kind].elimination.left]
        return self._of._top.run(tables)

    def tables(self, kind: int) -> list[Array]:
        """The tables of a class: given and made."""
        return self._tables[kind]

    def between(self, kind: int, borders: tuple[int, ...]) -> Pattern:
        """The least pattern of a class between border states."""
        key = (kind, borders)
        if key not in self._seen:
            elimination = self._of._classes[kind].elimination
            own = len(self._of.problem.classes[kind].variables)
            states = elimination.decode(self._tables[kind], {own + i: s for i, s in enumerate(borders)})
            self._seen[key] = self._of.pattern(kind, tuple(states[:own]), borders)
        return self._seen[key]
