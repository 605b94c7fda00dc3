"""The least weighted cost of a problem once more, by code of its own: what a proof is checked with.

Shares nothing with the solver but the problem. Every variable of every unit's class is eliminated as soon as it has few
neighbours; a table lives over *sorts* of states (those that read the same rows of all tables involved). Where a table
would be too large, the tables that it is made of are taken apart, and what comes out is a lower bound.

>>> from autopar.solver.problem import Class, Factor, Unit
>>> free = np.zeros((2, 7))
>>> x, y = Variable("x", "op", ("a", "b"), free + [[1.0], [2.0]]), Variable("y", "op", ("a", "b"), free)
>>> cost = np.zeros((2, 2, 7))
>>> cost[0, 0] = 5.0
>>> both = Class("c", (x, y), (Factor((0, 1), (np.arange(2), np.arange(2)), cost),), ())
>>> least(Problem("toy", (), (both,), (Unit(0, ()),), 0.0), np.array([1.0, *[0] * 6]))
1.0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from autopar.solver.problem import TRANSIENT, Array, Index, Problem, Variable

WIDEST = 30_000_000
"""Entries of the largest table (8 bytes each) that is made where no table is taken apart."""
SPLIT = 100_000
"""The same where one has to be: the solver's, so that what it claims is found again."""


@dataclass(frozen=True, eq=False)
class _Scope:
    """What a table is over, and the row that each state of each of these variables reads."""

    over: tuple[int, ...]
    maps: tuple[Index, ...]


@dataclass(frozen=True, eq=False)
class _Table(_Scope):
    """``values[maps[0][s0], maps[1][s1], ...]`` for the states s0, s1, ... of ``over``."""

    values: Array


def least(problem: Problem, weights: Array, high: float = inf) -> float:
    """The least of ``weights @ resources`` over all legal assignments without a transient above ``high`` bytes;
    something below it where tables would be too large."""
    left = [_eliminate(_of_class(problem, n, weights, high), _own_variables(problem, n)) for n in _kinds(problem)]
    return float(sum(float(t.values) for t in _eliminate(_of_all(problem, left, weights, high), _shared(problem))))


def transients(problem: Problem) -> tuple[float, Array]:
    """Bytes below which no assignment's largest transient is, and every size that a legal entry has, ascending."""
    floor = 0.0
    sizes = [np.zeros(0)]
    for costs in _all_tables(problem):
        rows = costs.reshape(-1, costs.shape[-1])
        legal = rows[np.isfinite(rows).all(1), TRANSIENT]
        if len(legal):
            floor = max(floor, float(legal.min()))
            sizes.append(np.unique(legal))
    return floor, np.unique(np.concatenate(sizes))


def _all_tables(problem: Problem) -> list[Array]:
    found = [v.costs for v in problem.shared]
    for kind in sorted({u.kind for u in problem.units}):
        found += [v.costs for v in problem.classes[kind].variables]
        found += [f.table for f in problem.classes[kind].factors]
    return found


def _kinds(problem: Problem) -> range:
    return range(len(problem.classes))


def _shared(problem: Problem) -> set[int]:
    return set(range(len(problem.shared)))


def _own_variables(problem: Problem, number: int) -> set[int]:
    return set(range(len(problem.classes[number].variables)))


def _of_class(problem: Problem, number: int, weights: Array, high: float) -> list[_Table]:
    """The tables of a class, over its variables and then its borders."""
    kind = problem.classes[number]
    tables = [_own(i, v, weights, high) for i, v in enumerate(kind.variables)]
    tables += [_Table(f.over, f.reads, _price(f.table, weights, high)) for f in kind.factors]
    return [_once(t) for t in tables]


def _of_all(problem: Problem, left: list[list[_Table]], weights: Array, high: float) -> list[_Table]:
    """The tables over the shared variables: their own, then what each unit's class has left over its borders."""
    tables = [_own(i, v, weights, high) for i, v in enumerate(problem.shared)]
    for unit in problem.units:
        own = len(problem.classes[unit.kind].variables)
        for table in left[unit.kind]:
            tables.append(_Table(tuple(unit.borders[v - own] for v in table.over), table.maps, table.values))
    return [_once(t) for t in tables]


def _own(number: int, variable: Variable, weights: Array, high: float) -> _Table:
    return _Table((number,), (np.arange(len(variable.states)),), _price(variable.costs, weights, high))


def _price(costs: Array, weights: Array, high: float) -> Array:
    legal = np.isfinite(costs).all(-1) & (costs[..., TRANSIENT] <= high)
    return np.where(legal, np.where(np.isfinite(costs), costs, 0.0) @ weights, inf)


def _once(table: _Table) -> _Table:
    """The table without a variable twice (a unit whose borders are one tensor), and without those of which it reads one
    row, if others are left."""
    over, maps, index = _folded(table)
    return table if over == table.over else _Table(over, maps, table.values[index])


def _folded(table: _Table) -> tuple[tuple[int, ...], tuple[Index, ...], tuple[Index, ...]]:
    """Variables and maps of the table without such dims, and the entries of the given one that it has."""
    pairs = list(zip(table.over, table.maps, strict=True))
    over = tuple(dict.fromkeys(w for w, m in pairs if np.ptp(m))) or table.over[:1]
    twice = {w for w in over if table.over.count(w) > 1}
    maps = {w: np.arange(len(m)) if w in twice else m for w, m in pairs}
    index = []
    for (w, m), rows in zip(pairs, table.values.shape, strict=True):
        taken = m[:1] if w not in over else m if w in twice else np.arange(rows)
        index.append(taken.reshape([-1 if w == v else 1 for v in over]))
    return over, tuple(maps[w] for w in over), tuple(index)


def _eliminate(
    tables: list[_Table], gone: set[int], steps: list[tuple[int, list[_Table], _Table]] | None = None
) -> list[_Table]:
    """Takes the minimum over the variables in ``gone``. ``steps`` gets each variable, tables that it touched and the
    one that took their place; a variable more than once where its tables are taken apart."""
    every = list(tables)
    order = []
    for step in _order(tables, gone, WIDEST):
        order.append(step)
        if len(step[1]) > 1:
            order = list(_order(tables, gone, SPLIT))
            break
    for v, groups in order:
        for group in groups:
            touching = [every[i] for i in group]
            every.append(_minimum(v, touching))
            if steps is not None:
                steps.append((v, touching, every[-1]))
    used = {i for _, groups in order for group in groups for i in group}
    return [t for i, t in enumerate(every) if i not in used]


def _order(tables: Sequence[_Scope], gone: set[int], most: float) -> Iterator[tuple[int, list[list[int]]]]:
    """The variables in ``gone``, that of the smallest product first, and the tables that each takes along, in groups
    that each make a table of at most ``most`` entries. No values are looked at."""
    every, live = list(tables), set(range(len(tables)))
    left = set(gone)
    sizes: dict[int, int] = {}
    while left:
        for v in left - sizes.keys():
            beside = [every[i] for i in live if v in every[i].over and every[i].over != (v,)]
            sizes[v] = _entries(v, beside) * len(_sorts(v, beside)[0]) if beside else 0
        v = min(left, key=lambda w: (sizes[w], w))
        alone, joint = (
            [i for i in sorted(live) if v in every[i].over and (every[i].over == (v,)) == lonely]
            for lonely in (True, False)
        )
        groups = _groups(v, joint, every, most)
        for group in groups:
            over = sorted({w for i in group for w in every[i].over} - {v})
            live.add(len(every))
            every.append(_Scope(tuple(over), tuple(_sorts(w, [every[i] for i in group])[1] for w in over)))
            for w in over:
                sizes.pop(w, None)
        groups[0] = sorted([*alone, *groups[0]])
        live.difference_update(i for group in groups for i in group)
        left.remove(v)
        yield v, groups


def _groups(v: int, joint: list[int], every: Sequence[_Scope], most: float) -> list[list[int]]:
    """All together, or else each, the largest first, beside those that it still fits with."""
    if _entries(v, [every[i] for i in joint]) <= most:
        return [joint]
    groups: list[list[int]] = []
    for i in sorted(joint, key=lambda i: (-_entries(v, [every[i]]), i)):
        fits = [g for g in groups if _entries(v, [every[j] for j in (*g, i)]) <= most]
        if fits:
            fits[0].append(i)
        else:
            groups.append([i])
    return groups


def _entries(v: int, touching: Sequence[_Scope]) -> int:
    """Of the table that takes the place of these."""
    return prod(len(_sorts(w, touching)[0]) for w in {w for t in touching for w in t.over} - {v})


def _sorts(v: int, tables: Sequence[_Scope]) -> tuple[Index, Index]:
    """One state of every sort, and the sort of every state."""
    reads = np.stack([t.maps[t.over.index(v)] for t in tables if v in t.over], axis=1)
    seen: dict[bytes, int] = {}
    sort = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in reads], np.int64)
    return np.unique(sort, return_index=True)[1], sort


def _minimum(v: int, touching: list[_Table]) -> _Table:
    """The sum of the tables, least over v."""
    others = sorted({w for t in touching for w in t.over} - {v})
    sorts = {w: _sorts(w, touching) for w in others}
    shape = tuple(len(sorts[w][0]) for w in others)
    joint = [t for t in touching if t.over != (v,)]
    alone = np.zeros(len(_map_of(v, touching[0])))
    for table in touching:
        if table.over == (v,):
            alone += table.values[table.maps[0]]
    states, sort = _sorts(v, joint) if joint else (np.zeros(1, np.int64), np.zeros(len(alone), np.int64))
    own = np.full(len(states), inf)
    np.minimum.at(own, sort, alone)
    pieces = [_spread(t, v, states, others, sorts) for t in joint]
    best = np.full(shape, inf)
    for i, value in enumerate(own):
        if value < inf:
            total = np.full(shape, value)
            for piece in pieces:
                total += piece[i]
            np.minimum(best, total, out=best)
    return _Table(tuple(others), tuple(sorts[w][1] for w in others), best)


def _map_of(v: int, table: _Scope) -> Index:
    return table.maps[table.over.index(v)]


def _spread(table: _Table, v: int, states: Index, others: list[int], sorts: dict[int, tuple[Index, Index]]) -> Array:
    """The table over the sorts: v first, then the others in order, of length 1 where it does not know them."""
    picks = [m[states if w == v else sorts[w][0]] for w, m in zip(table.over, table.maps)]
    values = table.values[np.ix_(*picks)]
    order = [w for w in (v, *others) if w in table.over]
    values = values.transpose([table.over.index(w) for w in order])
    return values.reshape([len(states), *(len(sorts[w][0]) if w in table.over else 1 for w in others)])
