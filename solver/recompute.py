"""The least weighted cost of a problem once more, by code of its own: what a proof is checked with.

Shares nothing with the solver but the problem. Every variable of every unit's class is eliminated as soon as it has few
neighbours; a table lives over *sorts* of states (those that read the same rows of all tables involved).

>>> from autopar.solver.problem import Class, Factor, Unit
>>> free = np.zeros((2, 6))
>>> x, y = Variable("x", "op", ("a", "b"), free + [[1.0], [2.0]]), Variable("y", "op", ("a", "b"), free)
>>> cost = np.zeros((2, 2, 6))
>>> cost[0, 0] = 5.0
>>> both = Class("c", (x, y), (Factor(0, 1, np.arange(2), np.arange(2), cost),), ())
>>> least(Problem("toy", (), (both,), (Unit(0, ()),), 0.0), np.array([1.0, 0, 0, 0, 0, 0]))
1.0
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod

import numpy as np

from autopar.solver.backend import Model, minimise
from autopar.solver.problem import TRANSIENT, Array, Factor, Index, Problem, Variable

WIDEST = 30_000_000
"""Entries of the largest table that is tried (8 bytes each)."""


class TooWide(Exception):
    """A table would not fit in memory."""


@dataclass(frozen=True, eq=False)
class _Table:
    """``values[maps[0][s0], maps[1][s1], ...]`` for the states s0, s1, ... of ``over``."""

    over: tuple[int, ...]
    maps: tuple[Index, ...]
    values: Array


def least(problem: Problem, weights: Array, high: float = inf) -> float:
    """The least of ``weights @ resources`` over all legal assignments without a transient above ``high`` bytes.

    Raises TooWide."""
    left = [_class_left(problem, number, weights, high) for number in range(len(problem.classes))]
    tables = [_own(i, v, weights, high) for i, v in enumerate(problem.shared)]
    for unit in problem.units:
        own = len(problem.classes[unit.kind].variables)
        for table in left[unit.kind]:
            tables.append(_Table(tuple(unit.borders[v - own] for v in table.over), table.maps, table.values))
    tables = [_once(t) for t in tables]
    return float(sum(float(t.values) for t in _eliminate(tables, set(range(len(problem.shared))))))


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


def _class_left(problem: Problem, number: int, weights: Array, high: float) -> list[_Table]:
    """The tables over the borders that remain of a class."""
    kind = problem.classes[number]
    tables = [_own(i, v, weights, high) for i, v in enumerate(kind.variables)]
    tables += [_Table((f.first, f.second), (f.rows, f.cols), _price(f.table, weights, high)) for f in kind.factors]
    return _eliminate([_once(t) for t in tables], set(range(len(kind.variables))))


def _own(number: int, variable: Variable, weights: Array, high: float) -> _Table:
    return _Table((number,), (np.arange(len(variable.states)),), _price(variable.costs, weights, high))


def _price(costs: Array, weights: Array, high: float) -> Array:
    legal = np.isfinite(costs).all(-1) & (costs[..., TRANSIENT] <= high)
    return np.where(legal, np.where(np.isfinite(costs), costs, 0.0) @ weights, inf)


def _once(table: _Table) -> _Table:
    """A table that names a variable twice (a unit whose borders are one tensor) reads its diagonal."""
    if len(set(table.over)) == len(table.over):
        return table
    first, second = table.over
    assert first == second, "a table over more than two variables names one twice"
    return _Table((first,), (np.arange(len(table.maps[0])),), table.values[table.maps[0], table.maps[1]])


def _eliminate(tables: list[_Table], gone: set[int]) -> list[_Table]:
    """Takes the minimum over the variables in ``gone``, the one of the smallest product first."""
    gone = set(gone)
    sizes: dict[int, int] = {}
    while gone:
        for v in gone - sizes.keys():
            sizes[v] = _product(v, [t for t in tables if v in t.over])
        v = min(gone, key=lambda w: (sizes[w], w))
        touching = [t for t in tables if v in t.over]
        new = _minimum(v, touching)
        for w in new.over:
            sizes.pop(w, None)
        tables = [t for t in tables if v not in t.over]
        tables.append(new)
        gone.remove(v)
    return tables


def _product(v: int, touching: list[_Table]) -> int:
    return prod(len(_sorts(w, touching)[0]) for w in {w for t in touching for w in t.over})


def _sorts(v: int, tables: list[_Table]) -> tuple[Index, Index]:
    """One state of every sort, and the sort of every state."""
    reads = np.stack([t.maps[t.over.index(v)] for t in tables if v in t.over])
    _, one, sort = np.unique(reads, axis=1, return_index=True, return_inverse=True)
    return one, sort.reshape(-1)


def _minimum(v: int, touching: list[_Table]) -> _Table:
    """The sum of the tables, least over v."""
    others = sorted({w for t in touching for w in t.over} - {v})
    sorts = {w: _sorts(w, touching) for w in others}
    shape = tuple(len(sorts[w][0]) for w in others)
    if prod(shape) > WIDEST:
        raise TooWide(f"a table of {prod(shape)} entries")
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


def _map_of(v: int, table: _Table) -> Index:
    return table.maps[table.over.index(v)]


def _spread(table: _Table, v: int, states: Index, others: list[int], sorts: dict[int, tuple[Index, Index]]) -> Array:
    """The table over the sorts: v first, then the others in order, of length 1 where it does not know them."""
    picks = [m[states if w == v else sorts[w][0]] for w, m in zip(table.over, table.maps)]
    values = table.values[np.ix_(*picks)]
    order = [w for w in (v, *others) if w in table.over]
    values = values.transpose([table.over.index(w) for w in order])
    return values.reshape([len(states), *(len(sorts[w][0]) if w in table.over else 1 for w in others)])


def integer_bound(problem: Problem) -> float:
    """A lower bound of the seconds by branching: the optimum, less the solver's rounding, where it ends.

    One column for each state and each legal pair of rows; a factor's pairs sum to its variables' states."""
    model, scale = Model(), _scale(problem)
    states = [_columns(model, v) for v in problem.shared]
    groups = [[(x, v.costs[i]) for i, x in own.items()] for v, own in zip(problem.shared, states)]
    for unit in problem.units:
        kind = problem.classes[unit.kind]
        own = [_columns(model, v) for v in kind.variables]
        groups += [[(x, v.costs[i]) for i, x in s.items()] for v, s in zip(kind.variables, own)]
        every = [*own, *(states[b] for b in unit.borders)]
        groups += [_pairs(model, f, every[f.first], every[f.second]) for f in kind.factors]
    costs = [c for group in groups for c in group]
    largest, time = model.add(), model.add(cost=1.0)
    for stream in (0, 2):
        model.row([(time, -1.0), *((x, float(c[1] + c[stream]) / scale) for x, c in costs)], high=0.0)
    limit = problem.memory_limit
    for group in groups:
        model.row([(largest, -1.0), *((x, float(c[TRANSIENT]) / limit) for x, c in group)], high=0.0)
    model.row([(largest, 1.0), *((x, float(c[3] + c[4]) / limit) for x, c in costs)], high=1.0)
    solution = minimise(model)
    return inf if solution.status == "infeasible" else solution.bound * scale * (1 - 1e-6)


def _columns(model: Model, variable: Variable) -> dict[int, int]:
    """A column for each legal state, of which one is taken."""
    legal = np.isfinite(variable.costs).all(1).tolist()
    own = {i: model.add(high=1.0, integer=True) for i in range(len(legal)) if legal[i]}
    model.row([(x, 1.0) for x in own.values()], low=1.0, high=1.0)
    return own


def _pairs(model: Model, f: Factor, first: dict[int, int], second: dict[int, int]) -> list[tuple[int, Array]]:
    """A column for each legal pair of a row and a column that states read."""
    rows, cols = ({int(m[i]) for i in s} for m, s in ((f.rows, first), (f.cols, second)))
    legal = np.asarray(np.isfinite(f.table).all(-1))
    pairs = {(r, c): model.add(high=1.0) for r in sorted(rows) for c in sorted(cols) if legal[r, c]}
    for side, reads, states, seen in ((0, f.rows, first, rows), (1, f.cols, second, cols)):
        for key in sorted(seen):
            terms = [(x, 1.0) for pair, x in pairs.items() if pair[side] == key]
            terms += [(x, -1.0) for i, x in states.items() if int(reads[i]) == key]
            model.row(terms, low=0.0, high=0.0)
    return [(x, f.table[pair]) for pair, x in pairs.items()]


def _scale(problem: Problem) -> float:
    """Seconds of the order of a step, so that coefficients are near 1."""
    own = [v.costs for u in problem.units for v in problem.classes[u.kind].variables]
    finite = [c[np.isfinite(c).all(1)] for c in (*own, *(v.costs for v in problem.shared))]
    return sum(float((c[:, 0] + c[:, 1]).max(initial=0.0)) for c in finite) or 1.0
