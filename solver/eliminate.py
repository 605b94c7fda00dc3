"""Exact minimisation of a sum of tables by eliminating variables one by one (min-sum variable elimination).

The order and every index are found once, from sizes and scopes alone (`Elimination`); `Elimination.run` then takes the
numbers of the tables, as often as there are multipliers. Where a state of a variable reads only a row of a table,
tables stay over rows: elimination works on rows that differ, never on states that look alike. A table that would have
more than `limit` entries is split in several smaller ones (mini-buckets): the result is then a lower bound, and
``exact`` is False.

>>> import numpy as np
>>> every = np.arange(2)
>>> toy = Elimination((2, 2), (Scope((0,), (every,)), Scope((0, 1), (every, every))), keep=())
>>> tables = toy.run([np.array([0.0, 3.0]), np.array([[5.0, 4.0], [0.0, np.inf]])])
>>> float(toy.value(tables)), toy.decode(tables, {})
(3.0, [1, 0])
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import prod

import numpy as np

from autopar.solver.problem import Array, Index

TABLE_LIMIT = 400_000
"""Entries of the largest table that elimination writes (8 bytes each)."""
CHUNK = 1 << 16
"""Entries that are added up at a time: 512 KiB, so that they stay in the cache."""


@dataclass(frozen=True, eq=False)
class Scope:
    """The variables of a table, one a dim, and for each state of each the row (of that dim) that it reads."""

    variables: tuple[int, ...]
    maps: tuple[Index, ...]

    def dims(self, variable: int) -> list[int]:
        """The dims over a variable."""
        return [d for d, v in enumerate(self.variables) if v == variable]


@dataclass(frozen=True, eq=False)
class _Part:
    """How a table enters a product: rows to take of dims, dims in the product's order, ones where it is constant
    (``free``)."""

    table: int
    takes: tuple[tuple[int, Index], ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]
    free: tuple[int, ...]

    def of(self, table: Array) -> Array:
        for dim, rows in self.takes:
            table = table.take(rows, axis=dim)
        return table.transpose(self.order).reshape(self.shape)


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Tables that are added and minimised together. ``sorted`` and ``starts``: states of the variable by what they read
    of these tables (None: all differ). ``alone``: the variable's own costs enter here. ``out``: the table made."""

    parts: tuple[_Part, ...]
    sorted: Index | None
    starts: Index
    shape: tuple[int, ...]
    alone: bool
    out: int


@dataclass(frozen=True, eq=False)
class _Step:
    """One variable: tables over it alone, tables over it and others, and the buckets that these fall into."""

    variable: int
    alone: tuple[int, ...]
    joint: tuple[int, ...]
    buckets: tuple[_Bucket, ...]


class Elimination:
    """Tables over ``scopes`` of variables with ``sizes`` states; all variables but ``keep`` are eliminated.

    ``left``: the tables (indices into what `run` returns) that remain, over kept variables only; ``scopes`` has a scope
    for each. ``exact``: no table had to be split.
    """

    def __init__(
        self, sizes: Sequence[int], scopes: Sequence[Scope], keep: Collection[int], limit: int = TABLE_LIMIT
    ) -> None:
        self.sizes, self.limit, self.exact = tuple(sizes), limit, True
        self._given = len(scopes)
        self._folds: list[tuple[Index, ...] | None] = []
        self.scopes: list[Scope] = []
        for scope in scopes:
            folded, fold = _fold(scope, self.sizes)
            self.scopes.append(folded)
            self._folds.append(fold)
        self._names: dict[bytes | int, int] = {}
        self._sorts: dict[tuple[int, ...], tuple[Index, Index]] = {}
        self._over: list[set[int]] = [set() for _ in sizes]
        for index, scope in enumerate(self.scopes):
            for v in scope.variables:
                self._over[v].add(index)
        live = set(range(self._given))
        kept = frozenset(keep)
        self._steps = self._order([v for v in range(len(sizes)) if v not in kept], live)
        self.left = tuple(sorted(live))
        self._names, self._sorts = {}, {}  # of use to the order alone

    def run(self, tables: Sequence[Array]) -> list[Array]:
        """The given tables and those that elimination makes."""
        every = [t if fold is None else t[fold] for t, fold in zip(tables, self._folds, strict=True)]
        for step in self._steps:
            own = self._own(step, every)
            for bucket in step.buckets:
                every.append(_minimum(bucket, own if bucket.alone else np.zeros_like(own), every))
        return every

    def value(self, tables: Sequence[Array]) -> float:
        """The minimum, where nothing was kept."""
        return float(sum(float(tables[i]) for i in self.left))

    def decode(self, tables: Sequence[Array], kept: Mapping[int, int]) -> list[int]:
        """A state of every variable that reaches the minimum for the kept ones (comes near it where not exact)."""
        states = [kept.get(v, -1) for v in range(len(self.sizes))]
        for step in reversed(self._steps):
            values = self._own(step, tables)
            for index in step.joint:
                values += self._reads(index, tables[index], step.variable, states)
            states[step.variable] = int(values.argmin())
        return states if self.exact else self._improve(tables, states)

    def _own(self, step: _Step, tables: Sequence[Array]) -> Array:
        own = np.zeros(self.sizes[step.variable])
        for index in step.alone:
            own += tables[index][self.scopes[index].maps[0]]
        return own

    def _reads(self, index: int, table: Array, variable: int, states: Sequence[int]) -> Array:
        """What each state of a variable reads of a table, the others at their states."""
        scope = self.scopes[index]
        at = tuple(
            slice(None) if v == variable else m[states[v]] for v, m in zip(scope.variables, scope.maps, strict=True)
        )
        row: Array = table[at]
        return row[scope.maps[scope.variables.index(variable)]]

    def _improve(self, tables: Sequence[Array], states: list[int], sweeps: int = 10) -> list[int]:
        """Changes one variable at a time while that helps."""
        given = [[i for i in over if i < self._given] for over in self._over]
        for _ in range(sweeps):
            changed = False
            for step in self._steps:
                v = step.variable
                values = np.zeros(self.sizes[v])
                for index in given[v]:
                    values += self._reads(index, tables[index], v, states)
                best = int(values.argmin())
                if values[best] < values[states[v]]:
                    states[v], changed = best, True
            if not changed:
                break
        return states

    def _order(self, variables: Sequence[int], live: set[int]) -> tuple[_Step, ...]:
        """Greedily the variable whose elimination makes the smallest product; ties by place."""
        cost = {v: self._cost(v, live) for v in variables}
        heap = [(c, v) for v, c in cost.items()]
        heapify(heap)
        steps = []
        while cost:
            c, v = heappop(heap)
            if cost.get(v) != c:  # of before a neighbour went
                continue
            del cost[v]
            near = {w for i in self._over[v] if i in live for w in self.scopes[i].variables} - {v}
            steps.append(self._eliminate(v, live))
            for w in near & cost.keys():
                cost[w] = self._cost(w, live)
                heappush(heap, (cost[w], w))
        return tuple(steps)

    def _cost(self, variable: int, live: set[int]) -> int:
        joint = [i for i in self._over[variable] if i in live and len(self.scopes[i].variables) > 1]
        return prod(len(self._rows(v, joint)[0]) for v in self._variables(joint)) if joint else 0

    def _variables(self, tables: Collection[int]) -> list[int]:
        return sorted({v for i in tables for v in self.scopes[i].variables})

    def _rows(self, variable: int, tables: Collection[int]) -> tuple[Index, Index]:
        """States of a variable that differ in what they read of tables: one of each sort, and the sort of every one."""
        maps: dict[int, Index] = {}  # a map that comes again tells nothing new
        for i in sorted(tables):
            scope = self.scopes[i]
            for v, reads in zip(scope.variables, scope.maps, strict=True):
                if v == variable:
                    maps.setdefault(self._name(reads), reads)
        key = tuple(maps)
        if key not in self._sorts:
            self._sorts[key] = _rows(list(maps.values()))
        return self._sorts[key]

    def _name(self, reads: Index) -> int:
        """The same number for equal maps. (Maps live as long as their scopes, so that their ids are theirs.)"""
        name = self._names.get(id(reads))
        if name is None:
            name = self._names[id(reads)] = self._names.setdefault(reads.tobytes(), len(self._names))
        return name

    def _eliminate(self, variable: int, live: set[int]) -> _Step:
        tables = sorted(i for i in self._over[variable] if i in live)
        alone = tuple(i for i in tables if len(self.scopes[i].variables) == 1)
        joint = tuple(i for i in tables if len(self.scopes[i].variables) > 1)
        live.difference_update(tables)
        buckets = []
        for number, group in enumerate(self._groups(variable, joint)):
            bucket, scope = self._bucket(variable, group, number == 0)
            buckets.append(bucket)
            live.add(len(self.scopes))
            for v in scope.variables:
                self._over[v].add(len(self.scopes))
            self.scopes.append(scope)
        return _Step(variable, alone, joint, tuple(buckets))

    def _groups(self, variable: int, joint: Sequence[int]) -> list[list[int]]:
        """All tables together if what they make is small enough; else few groups, largest tables first."""
        if self._size(variable, joint) <= self.limit:
            return [list(joint)]
        groups: list[list[int]] = []
        for table in sorted(joint, key=lambda i: (-self._size(variable, [i]), i)):
            home = next((g for g in groups if self._size(variable, [*g, table]) <= self.limit), None)
            if home is None:
                groups.append([table])
            else:
                home.append(table)
        self.exact &= len(groups) == 1
        return [sorted(g) for g in groups]

    def _size(self, variable: int, tables: Sequence[int]) -> int:
        return prod(len(self._rows(v, tables)[0]) for v in self._variables(tables) if v != variable)

    def _bucket(self, variable: int, tables: Sequence[int], alone: bool) -> tuple[_Bucket, Scope]:
        """The product of tables, the variable first, and the scope of its minimum."""
        others = [v for v in self._variables(tables) if v != variable]
        first, groups = self._rows(variable, tables) if tables else (np.zeros(1, np.int64), None)
        domains = {v: self._rows(v, tables) for v in others}
        axes = [variable, *others]
        picks = {variable: first, **{v: rows for v, (rows, _) in domains.items()}}
        parts = tuple(_part(i, self.scopes[i], axes, picks) for i in tables)
        if groups is None:
            order, starts = np.arange(self.sizes[variable]), np.zeros(1, np.int64)
        else:
            order = np.argsort(groups, kind="stable")
            starts = np.searchsorted(groups[order], np.arange(len(first)))
        distinct = len(starts) == self.sizes[variable] and bool((order == np.arange(len(order))).all())
        shape = tuple(len(picks[v]) for v in others)
        scope = Scope(tuple(others), tuple(domains[v][1] for v in others))
        return _Bucket(parts, None if distinct else order, starts, shape, alone, len(self.scopes)), scope


def _fold(scope: Scope, sizes: Sequence[int]) -> tuple[Scope, tuple[Index, ...] | None]:
    """The scope with every variable once, without those of which it reads one row, and how to read such a table out of
    the given one (None: as it is). So every dim of every table has two rows or more: `TABLE_LIMIT` limits dims, too."""
    variables = tuple(v for v in dict.fromkeys(scope.variables) if any(_differ(scope.maps[d]) for d in scope.dims(v)))
    if variables == scope.variables:
        return scope, None
    index, maps = [], {}
    for v, reads in zip(scope.variables, scope.maps, strict=True):
        twice = len(scope.dims(v)) > 1
        maps[v] = np.arange(sizes[v]) if twice else reads
        rows = reads[:1] if v not in variables else reads if twice else np.arange(reads.max() + 1)
        index.append(rows.reshape([-1 if v == w else 1 for w in variables]))
    return Scope(variables, tuple(maps[v] for v in variables)), tuple(index)


def _differ(reads: Index) -> bool:
    return bool((reads != reads[:1]).any())


def _rows(maps: Sequence[Index]) -> tuple[Index, Index]:
    """States that differ in what they read: one of each sort, and the sort of every state."""
    key = maps[0]
    for other in maps[1:]:
        key = np.unique(key * (int(other.max(initial=0)) + 1) + other, return_inverse=True)[1]
    _, first, sort = np.unique(key, return_index=True, return_inverse=True)
    return first, sort


def _part(table: int, scope: Scope, axes: Sequence[int], picks: Mapping[int, Index]) -> _Part:
    takes = tuple((d, m[picks[v]]) for d, (v, m) in enumerate(zip(scope.variables, scope.maps, strict=True)))
    order = tuple(scope.variables.index(v) for v in axes if v in scope.variables)
    shape = tuple(len(picks[v]) if v in scope.variables else 1 for v in axes)
    free = tuple(a for a, v in enumerate(axes) if v not in scope.variables)
    return _Part(table, takes, order, shape, free)


def _minimum(bucket: _Bucket, own: Array, tables: Sequence[Array]) -> Array:
    """The bucket's product, minimised over the variable."""
    if bucket.sorted is not None:
        own = np.minimum.reduceat(own[bucket.sorted], bucket.starts)
    if not bucket.parts:
        return np.asarray(own.min())
    parts = sorted((p.of(tables[p.table]) for p in bucket.parts), key=lambda t: t.size)
    parts[0] = parts[0] + own.reshape(-1, *[1] * len(bucket.shape))
    step = max(1, CHUNK // max(1, prod(bucket.shape)))
    best: Array | None = None
    for start in range(0, len(own), step):
        total = parts[0][start : start + step]
        for part in parts[1:]:
            total = total + part[start : start + step]
        least = total.min(0)
        best = least if best is None else np.minimum(best, least)
    assert best is not None
    return np.broadcast_to(best, bucket.shape)
