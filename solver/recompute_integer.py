"""Bounds by branching once more, by code of its own: what a check does where multipliers alone do not show a bound.

States whose least weighted sum is no less than the bound that is claimed cannot help to go below it; they are left out,
and the program over all others is solved. Every state's least sum comes from messages that go back through the same
elimination as `recompute.least`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from autopar.solver.backend import Model, minimise
from autopar.solver.file import Weights
from autopar.solver.problem import AGAIN, TRANSIENT, Array, Factor, Index, Problem, Variable
from autopar.solver.recompute import (
    WIDEST,
    _eliminate,
    _folded,
    _kinds,
    _map_of,
    _of_all,
    _of_class,
    _own_variables,
    _shared,
    _sorts,
    _spread,
    _Table,
)

ROUNDING = 1e-6
"""Relative error that the bound of an integer program may have."""


class TooWide(Exception):
    """A table would not fit in memory."""


Step = tuple[int, list[_Table], _Table]
"""An eliminated variable, tables that it touched, and the one that took their place."""
States = list[list[Any]]
"""For each unit, then for the shared variables: per variable, something per state."""


def state_leasts(problem: Problem, weights: Array, high: float = inf) -> States:
    """The least of ``weights @ resources`` over all legal assignments with each state, or something below it. Raises
    TooWide."""
    steps: list[list[Step]] = [[] for _ in _kinds(problem)]
    tables = [_of_class(problem, n, weights, high) for n in _kinds(problem)]
    left = [_eliminate(tables[n], _own_variables(problem, n), steps[n]) for n in _kinds(problem)]
    top, above = list[Step](), _of_all(problem, left, weights, high)
    ends = _eliminate(above, _shared(problem), top)
    total = sum(float(t.values) for t in ends)
    rest = {id(t): np.asarray(total - float(t.values) if np.isfinite(total) else inf) for t in ends}
    shared = _back(top, rest, len(problem.shared))
    found, at = [], len(problem.shared)
    for unit in problem.units:
        beyond, own = {}, len(problem.classes[unit.kind].variables)
        for table in left[unit.kind]:
            seen = replace(table, over=tuple(unit.borders[v - own] for v in table.over))
            beyond[id(table)] = np.full(table.values.shape, inf)
            np.minimum.at(beyond[id(table)], _folded(seen)[2], rest[id(above[at])])
            at += 1
        found.append(_back(steps[unit.kind], beyond, own))
    return [*found, shared]


def _back(steps: list[Step], rest: dict[int, Array], count: int) -> list[Array]:
    """The least of everything with each state of each eliminated variable. ``rest``: of a table, the least of all
    others by what is read of it; given for those that were left, filled in for all."""
    found = [np.zeros(0)] * count
    for v, touching, new in reversed(steps):
        alone, joint = ([t for t in touching if (t.over == (v,)) == lonely] for lonely in (True, False))
        read = [t.values[t.maps[0]] for t in alone]
        own = np.asarray(sum(read, np.zeros(len(_map_of(v, touching[0])))))
        states, sort = _sorts(v, joint) if joint else (np.zeros(1, np.int64), np.zeros(len(own), np.int64))
        if len(states) * new.values.size > WIDEST:
            raise TooWide(f"a product of {len(states) * new.values.size} entries")
        best = np.full(len(states), inf)
        np.minimum.at(best, sort, own)
        beyond = _joint_messages(v, states, best, joint, new, rest)[sort]
        found[v] = np.maximum(found[v], own + beyond) if len(found[v]) else own + beyond
        for i, table in enumerate(alone):
            others = beyond + sum(r for j, r in enumerate(read) if j != i)
            rest[id(table)] = np.full(table.values.shape, inf)
            np.minimum.at(rest[id(table)], table.maps[0], others)
    return found


def _joint_messages(
    v: int, states: Index, best: Array, joint: list[_Table], new: _Table, rest: dict[int, Array]
) -> Array:
    """Messages to the tables of v and others, from what is left and v's own least costs ``best``, by sorts of v's
    states. Returns the least of all but those costs."""
    others = list(new.over)
    sorts = {w: _sorts(w, joint) for w in others}
    shape = (len(states), *new.values.shape)
    pieces = [_spread(t, v, states, others, sorts) for t in joint]
    beyond = np.broadcast_to(rest[id(new)] + sum(pieces, np.zeros(())), shape)
    start = rest[id(new)] + best.reshape(-1, *(1 for _ in others))
    for i, table in enumerate(joint):
        without = np.broadcast_to(start + sum((p for j, p in enumerate(pieces) if j != i), np.zeros(())), shape)
        order = [v, *others]
        least = without.min(axis=tuple(k for k, w in enumerate(order) if w not in table.over))
        kept = [w for w in order if w in table.over]
        least = least.transpose([kept.index(w) for w in table.over])
        reads = [m[states if w == v else sorts[w][0]] for w, m in zip(table.over, table.maps)]
        rest[id(table)] = np.full(table.values.shape, inf)
        np.minimum.at(rest[id(table)], np.ix_(*reads), least)
    return np.asarray(beyond.reshape(len(states), -1).min(1))


def surviving(problem: Problem, multipliers: tuple[Weights, ...], claim: float) -> States:
    """Which states an assignment below ``claim`` seconds may have, by the multipliers (whose ranges are known to cover
    every transient): true for each of them."""
    bounds: States | None = None
    for alpha, per_byte, low, high, time in multipliers:
        weights = np.array([time * alpha, time, time * (1 - alpha), per_byte, per_byte, 0.0, 0.0])
        found = state_leasts(problem, weights, high)
        spare = per_byte * (problem.memory_limit - low)
        values = [[s - spare if time else np.where(s > spare, inf, -inf) for s in states] for states in found]
        bounds = (
            values
            if bounds is None
            else [[np.minimum(a, b) for a, b in zip(old, new)] for old, new in zip(bounds, values)]
        )
    assert bounds is not None
    return [[s < claim for s in states] for states in bounds]


def integer_bound(problem: Problem, multipliers: tuple[Weights, ...] = (), claim: float = inf) -> float:
    """A lower bound of the seconds by branching, up to ``claim``: the optimum, less the solver's rounding, where it
    ends. ``multipliers`` tell which states need not be looked at to show the claim.

    One column for each state and each legal entry of a factor's table; entries sum to the states that read them."""
    model, scale = Model(), _scale(problem)
    try:
        kept = surviving(problem, multipliers, claim) if multipliers and claim < inf else None
    except TooWide:
        kept = None
    of_shared = kept[-1] if kept is not None else [None] * len(problem.shared)
    states = [_columns(model, v, k) for v, k in zip(problem.shared, of_shared)]
    units = [[[(x, v.costs[i]) for i, x in own.items()]] for v, own in zip(problem.shared, states)]
    for place, unit in enumerate(problem.units):
        kind = problem.classes[unit.kind]
        of_unit = kept[place] if kept is not None else [None] * len(kind.variables)
        own = [_columns(model, v, k) for v, k in zip(kind.variables, of_unit)]
        groups = [[(x, v.costs[i]) for i, x in s.items()] for v, s in zip(kind.variables, own)]
        every = [*own, *(states[b] for b in unit.borders)]
        units.append(groups + [_entries(model, f, [every[v] for v in f.over]) for f in kind.factors])
    costs = [c for groups in units for group in groups for c in group]
    largest, time = model.add(), model.add(cost=1.0, high=claim / scale)
    for stream in (0, 2):
        model.row([(time, -1.0), *((x, float(c[1] + c[stream]) / scale) for x, c in costs)], high=0.0)
    limit = problem.memory_limit
    for groups in units:
        again = [(x, float(c[AGAIN]) / limit) for group in groups for x, c in group if c[AGAIN]]
        working = model.add() if again else largest
        if again:
            model.row([(largest, -1.0), (working, 1.0), *again], high=0.0)
        for group in groups:
            model.row([(working, -1.0), *((x, float(c[TRANSIENT]) / limit) for x, c in group)], high=0.0)
    model.row([(largest, 1.0), *((x, float(c[3] + c[4]) / limit) for x, c in costs)], high=1.0)
    solution = minimise(model)
    shown = inf if solution.status == "infeasible" else solution.bound * scale * (1 - ROUNDING)
    return min(shown, claim)


def _columns(model: Model, variable: Variable, kept: npt.NDArray[np.bool_] | None) -> dict[int, int]:
    """A column for each legal state that is kept, of which one is taken."""
    legal = np.isfinite(variable.costs).all(1)
    taken = np.flatnonzero(legal if kept is None else legal & kept).tolist()
    own = {i: model.add(high=1.0, integer=True) for i in taken}
    model.row([(x, 1.0) for x in own.values()], low=1.0, high=1.0)
    return own


def _entries(model: Model, f: Factor, states: list[dict[int, int]]) -> list[tuple[int, Array]]:
    """A column for each legal entry whose rows states read; those of a row of a dim sum to the states that read it."""
    rows = [sorted({int(reads[i]) for i in s}) for reads, s in zip(f.reads, states)]
    legal = np.asarray(np.isfinite(f.table).all(-1))
    entries = {at: model.add(high=1.0) for at in itertools.product(*rows) if legal[at]}
    for dim, (reads, mine) in enumerate(zip(f.reads, states)):
        for key in rows[dim]:
            terms = [(x, 1.0) for at, x in entries.items() if at[dim] == key]
            terms += [(x, -1.0) for i, x in mine.items() if int(reads[i]) == key]
            model.row(terms, low=0.0, high=0.0)
    return [(x, f.table[at]) for at, x in entries.items()]


def _scale(problem: Problem) -> float:
    """Seconds of the order of a step, so that coefficients are near 1."""
    own = [v.costs for u in problem.units for v in problem.classes[u.kind].variables]
    finite = [c[np.isfinite(c).all(1)] for c in (*own, *(v.costs for v in problem.shared))]
    return sum(float((c[:, 0] + c[:, 1]).max(initial=0.0)) for c in finite) or 1.0
