"""One integer program over every state of every variable: the local marginal polytope, with all rows.

For problems that are small, or have become small; it finds the optimum where the bound of `lagrangian` leaves a gap.
Columns: ``x[v, i]``, variable v is in state i (binary); ``e[f, r, c]``, the variables of factor f read row r and column
c of its table (continuous; only rows and columns that differ, only legal entries); the largest transient ``P`` and the
step time ``T``. Minimise T. Rows, in this order:

1. `one_state`: sum_i x[v, i] = 1;
2. `rows_agree`: sum_c e[f, r, c] = sum of x[first, i] over the states i that read row r;
3. `columns_agree`: sum_r e[f, r, c] = sum of x[second, j] over the states j that read column c;
4. `streams`: T >= exposed + compute and T >= exposed + hidden;
5. `largest_transient`: P >= the transient of every variable's state and of every factor's entry;
6. `memory`: static + saved + P <= limit.

>>> import numpy as np
>>> from autopar.solver.problem import Class, Problem, Unit, Variable
>>> x = Variable("x", "op", ("fast", "lean"), np.array([[1.0, 0, 0, 0, 8.0, 0], [2.0, 0, 0, 0, 4.0, 0]]))
>>> toy = Problem("toy", (), (Class("layer", (x,), (), ()),), (Unit(0, ()), Unit(0, ())), memory_limit=12.0)
>>> solve_ilp(toy).objective
3.0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from autopar.solver.backend import NODES, Model, minimise
from autopar.solver.problem import (
    COMPUTE,
    EXPOSED,
    HIDDEN,
    SAVED,
    STATIC,
    TRANSIENT,
    Array,
    Assignment,
    Index,
    Problem,
    Variable,
    peak,
    seconds,
    totals,
)

ROUNDING = 1e-6
"""Relative error that the bound of a solver may have: its tolerances on rows and integrality."""


@dataclass(frozen=True)
class IlpAnswer:
    """``bound``: seconds, already less the solver's rounding. No ``assignment``: nothing found that fits; ``proven``:
    the search ended (with an assignment: it is the optimum within the rounding; without: nothing fits). ``timed_out``:
    the clock ended it, so that another run may find another answer."""

    objective: float
    bound: float
    assignment: Assignment | None
    proven: bool
    timed_out: bool = False


@dataclass
class _Link:
    """A factor of one unit: its two variables (indices into all), and the columns of its legal entries."""

    first: int
    second: int
    rows: Index
    cols: Index
    table: Array
    entries: dict[tuple[int, int], int]


@dataclass
class _Columns:
    """The columns of the program: of every variable's legal states, and of every factor's legal entries."""

    model: Model
    variables: list[Variable]
    states: list[dict[int, int]]
    links: list[_Link] = field(default_factory=list)
    largest: int = -1
    time: int = -1

    def costs(self) -> Iterator[tuple[int, Array]]:
        """Every column that costs, with its resources."""
        for v, states in zip(self.variables, self.states, strict=True):
            yield from ((x, v.costs[i]) for i, x in states.items())
        for link in self.links:
            yield from ((e, link.table[r, c]) for (r, c), e in link.entries.items())


def columns_of(problem: Problem, allowed: Sequence[Sequence[Index]] | None = None) -> int:
    """How many columns `solve_ilp` would make."""
    count = sum(len(v.states) for v in problem.shared)
    for u, unit in enumerate(problem.units):
        kind = problem.classes[unit.kind]
        own = allowed[u] if allowed is not None else [np.arange(len(v.states)) for v in kind.variables]
        borders = [np.arange(len(problem.shared[b].states)) for b in unit.borders]
        if allowed is not None:
            borders = [allowed[-1][b] for b in unit.borders]
        every = [*own, *borders]
        count += sum(len(a) for a in own)
        for f in kind.factors:
            count += len(np.unique(f.rows[every[f.first]])) * len(np.unique(f.cols[every[f.second]]))
    return count


def solve_ilp(
    problem: Problem,
    *,
    gap: float = 0.0,
    nodes: int = NODES,
    allowed: Sequence[Sequence[Index]] | None = None,
    cutoff: float = inf,
) -> IlpAnswer:
    """The fastest assignment within the limit. ``allowed``: for each unit the states of its variables that are worth
    a look, then, last, those of the shared variables (None: all); the bound then holds for these only.
    ``cutoff``: seconds; slower assignments are not looked for."""
    scale = _scale(problem)
    proven, bound, timed_out = False, -inf, False
    for limit in (problem.memory_limit, problem.memory_limit * (1 - ROUNDING)):
        columns = _columns(problem, allowed)
        for row in ROWS:
            row(columns, scale, limit)
        columns.model.high[columns.time] = cutoff / scale
        solution = minimise(columns.model, gap=gap, nodes=nodes)
        timed_out |= solution.timed_out
        if limit == problem.memory_limit:
            proven = solution.status in ("optimal", "infeasible")
            bound = solution.bound * scale if solution.bound == inf else solution.bound * scale * (1 - ROUNDING)
        if not len(solution.values):
            break
        assignment = _assignment(problem, columns, solution.values)
        total = totals(problem, assignment)
        if np.isfinite(total).all() and peak(total) <= problem.memory_limit:
            objective = float(seconds(total))
            return IlpAnswer(objective, min(bound, objective), assignment, proven, timed_out)
    return IlpAnswer(inf, bound, None, proven and bound == inf, timed_out)


def _scale(problem: Problem) -> float:
    """Seconds of the order of a step: coefficients near 1."""
    costs = [v.costs for u in problem.units for v in problem.classes[u.kind].variables]
    costs += [v.costs for v in problem.shared]
    total = 0.0
    for c in costs:
        t = seconds(c)
        total += float(t[np.isfinite(t)].min(initial=inf)) if np.isfinite(t).any() else 0.0
    return total if 0 < total < inf else 1.0


def _columns(problem: Problem, allowed: Sequence[Sequence[Index]] | None) -> _Columns:
    variables = list(problem.shared)
    looks: list[Index | None] = list(allowed[-1]) if allowed is not None else [None] * len(variables)
    starts = []
    for u, unit in enumerate(problem.units):
        starts.append(len(variables))
        own = problem.classes[unit.kind].variables
        variables += own
        looks += allowed[u] if allowed is not None else [None] * len(own)
    model = Model()
    states = []
    for v, look in zip(variables, looks, strict=True):
        legal = np.asarray(np.isfinite(v.costs).all(1))
        which = range(len(v.states)) if look is None else look.tolist()
        states.append({i: model.add(high=1.0, integer=True) for i in which if legal[i]})
    columns = _Columns(model, variables, states)
    for unit, start in zip(problem.units, starts, strict=True):
        kind = problem.classes[unit.kind]
        place = [*range(start, start + len(kind.variables)), *unit.borders]
        for f in kind.factors:
            columns.links.append(_link(columns, place[f.first], place[f.second], f.rows, f.cols, f.table))
    columns.largest, columns.time = model.add(), model.add(cost=1.0)
    return columns


def _link(c: _Columns, first: int, second: int, rows: Index, cols: Index, table: Array) -> _Link:
    if first == second:
        pairs = {(int(rows[i]), int(cols[i])) for i in c.states[first]}
    else:
        pairs = {
            (int(r), int(k)) for r in {rows[i] for i in c.states[first]} for k in {cols[j] for j in c.states[second]}
        }
    legal = np.asarray(np.isfinite(table).all(-1))
    entries = {(r, k): c.model.add(high=1.0, integer=False) for r, k in sorted(pairs) if legal[r, k]}
    return _Link(first, second, rows, cols, table, entries)


def one_state(c: _Columns, scale: float, limit: float) -> None:
    """sum_i x[v, i] = 1."""
    for states in c.states:
        c.model.row([(x, 1.0) for x in states.values()], low=1.0, high=1.0)


def rows_agree(c: _Columns, scale: float, limit: float) -> None:
    """sum_c e[f, r, c] = sum of x[first, i] over the states i that read row r."""
    for link in c.links:
        _agree(c, [(r, e) for (r, _), e in link.entries.items()], c.states[link.first], link.rows)


def columns_agree(c: _Columns, scale: float, limit: float) -> None:
    """sum_r e[f, r, c] = sum of x[second, j] over the states j that read column c."""
    for link in c.links:
        _agree(c, [(k, e) for (_, k), e in link.entries.items()], c.states[link.second], link.cols)


def _agree(c: _Columns, entries: list[tuple[int, int]], states: dict[int, int], reads: Index) -> None:
    terms: dict[int, list[tuple[int, float]]] = {}
    for key, e in entries:
        terms.setdefault(key, []).append((e, 1.0))
    for i, x in states.items():
        terms.setdefault(int(reads[i]), []).append((x, -1.0))
    for key in sorted(terms):
        c.model.row(terms[key], low=0.0, high=0.0)


def streams(c: _Columns, scale: float, limit: float) -> None:
    """T >= exposed + compute, T >= exposed + hidden."""
    for stream in (COMPUTE, HIDDEN):
        terms = [(x, float(t[EXPOSED] + t[stream]) / scale) for x, t in c.costs()]
        c.model.row([(c.time, -1.0), *terms], high=0.0)


def largest_transient(c: _Columns, scale: float, limit: float) -> None:
    """P >= the transient of every variable's state and of every factor's entry; only rows that can bind."""
    groups = [[(x, float(v.costs[i, TRANSIENT])) for i, x in s.items()] for v, s in zip(c.variables, c.states)]
    groups += [[(e, float(f.table[(*at, TRANSIENT)])) for at, e in f.entries.items()] for f in c.links]
    least = max((min(t for _, t in g) for g in groups if g), default=0.0)
    c.model.row([(c.largest, 1.0)], low=least / limit)
    for group in groups:
        if max((t for _, t in group), default=0.0) > least:
            c.model.row([(c.largest, -1.0), *((x, t / limit) for x, t in group)], high=0.0)


def memory(c: _Columns, scale: float, limit: float) -> None:
    """static + saved + P <= limit."""
    terms = [(x, float(t[STATIC] + t[SAVED]) / limit) for x, t in c.costs()]
    c.model.row([(c.largest, 1.0), *terms], high=1.0)


ROWS = (one_state, rows_agree, columns_agree, streams, largest_transient, memory)


def _assignment(problem: Problem, columns: _Columns, values: Array) -> Assignment:
    chosen = [max(s, key=lambda i: values[s[i]]) for s in columns.states]
    shared, rest = chosen[: len(problem.shared)], chosen[len(problem.shared) :]
    units = []
    for unit in problem.units:
        own = len(problem.classes[unit.kind].variables)
        units.append(tuple(rest[:own]))
        rest = rest[own:]
    return Assignment(tuple(shared), tuple(units))
