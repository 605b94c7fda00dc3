"""One integer program over every state of every variable: the local marginal polytope, with all rows.

For problems that are small, or have become small; it finds the optimum where the bound of `lagrangian` leaves a gap.
Columns: ``x[v, i]``, variable v is in state i (binary); ``e[f, r]``, the variables of factor f read entry r of its
table (continuous; only rows of each dim that differ, only legal entries); ``P``, the largest transient, and ``P[u]``,
that of a unit that makes something again; the step time ``T``. Minimise T. Rows, in this order:

1. `one_state`: sum_i x[v, i] = 1;
2. `entries_agree`: for each dim of a table, the e[f, r] of one row of it sum to the x[v, i] of the states that read it;
3. `streams`: T >= exposed + compute and T >= exposed + hidden;
4. `largest_transient`: P >= the transient of every variable's state and of every factor's entry, and P >= P[u] + what u
   makes again, with P[u] >= the transients in u;
5. `memory`: static + saved + P <= limit.

>>> import numpy as np
>>> from autopar.solver.problem import Class, Problem, Unit, Variable
>>> x = Variable("x", "op", ("fast", "lean"), np.array([[1.0, 0, 0, 0, 8.0, 0, 0], [2.0, 0, 0, 0, 4.0, 0, 0]]))
>>> toy = Problem("toy", (), (Class("layer", (x,), (), ()),), (Unit(0, ()), Unit(0, ())), memory_limit=12.0)
>>> solve_ilp(toy).objective
3.0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf, prod

import numpy as np

from autopar.solver.backend import NODES, Model, minimise
from autopar.solver.problem import (
    AGAIN,
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
    """A factor of one unit: its variables (indices into all), and the columns of its legal entries."""

    over: tuple[int, ...]
    reads: tuple[Index, ...]
    table: Array
    entries: dict[tuple[int, ...], int]


@dataclass
class _Columns:
    """The columns of the program: of every variable's legal states, and of every factor's legal entries. ``units``:
    the variables and links of each unit, as ranges, after the ``shared`` variables."""

    model: Model
    variables: list[Variable]
    states: list[dict[int, int]]
    shared: int
    links: list[_Link] = field(default_factory=list)
    units: list[tuple[range, range]] = field(default_factory=list)
    largest: int = -1
    time: int = -1

    def groups(self, variables: range, links: range) -> list[list[tuple[int, Array]]]:
        """Columns with their resources, in groups of which one is taken."""
        of_states = [[(x, self.variables[v].costs[i]) for i, x in self.states[v].items()] for v in variables]
        return of_states + [[(e, self.links[k].table[at]) for at, e in self.links[k].entries.items()] for k in links]

    def costs(self) -> Iterator[tuple[int, Array]]:
        """Every column that costs, with its resources."""
        for group in self.groups(range(len(self.variables)), range(len(self.links))):
            yield from group


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
            count += prod(len(np.unique(reads[every[v]])) for v, reads in zip(f.over, f.reads, strict=True))
    return count


def fewest_columns(problem: Problem) -> int:
    """Of any program that leaves every variable a state."""
    kinds = [problem.classes[u.kind] for u in problem.units]
    return len(problem.shared) + sum(len(k.variables) + len(k.factors) for k in kinds)


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
    columns = _Columns(model, variables, states, len(problem.shared))
    for unit, start in zip(problem.units, starts, strict=True):
        kind, first = problem.classes[unit.kind], len(columns.links)
        mine = range(start, start + len(kind.variables))
        place = [*mine, *unit.borders]
        for f in kind.factors:
            columns.links.append(_link(columns, tuple(place[v] for v in f.over), f.reads, f.table))
        columns.units.append((mine, range(first, len(columns.links))))
    columns.largest, columns.time = model.add(), model.add(cost=1.0)
    return columns


def _link(c: _Columns, over: tuple[int, ...], reads: tuple[Index, ...], table: Array) -> _Link:
    seen: dict[int, set[tuple[int, ...]]] = {}  # of each variable, what its states read of all its dims
    for v in over:
        mine = [m for w, m in zip(over, reads, strict=True) if w == v]
        seen[v] = {tuple(int(m[i]) for m in mine) for i in c.states[v]}
    entries = set()
    for chosen in product(*seen.values()):
        left = {v: list(rows) for v, rows in zip(seen, chosen, strict=True)}
        entries.add(tuple(left[v].pop(0) for v in over))
    legal = np.asarray(np.isfinite(table).all(-1))
    columns = {at: c.model.add(high=1.0, integer=False) for at in sorted(entries) if legal[at]}
    return _Link(over, reads, table, columns)


def one_state(c: _Columns, scale: float, limit: float) -> None:
    """sum_i x[v, i] = 1."""
    for states in c.states:
        c.model.row([(x, 1.0) for x in states.values()], low=1.0, high=1.0)


def entries_agree(c: _Columns, scale: float, limit: float) -> None:
    """For each dim of a table: the e[f, r] of one row of it sum to the x[v, i] of the states that read that row."""
    for link in c.links:
        for dim, (v, reads) in enumerate(zip(link.over, link.reads, strict=True)):
            _agree(c, [(at[dim], e) for at, e in link.entries.items()], c.states[v], reads)


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
    """P >= the transient of every variable's state and of every factor's entry; of a unit with something made again
    P >= P[u] + that, P[u] >= the transients in u. Only rows that can bind."""
    groups = c.groups(range(c.shared), range(0))
    for own, links in c.units:
        inside = c.groups(own, links)
        again = [(x, float(t[AGAIN]) / limit) for group in inside for x, t in group if t[AGAIN]]
        if not again:
            groups += inside
            continue
        fullest = c.model.add()
        _at_least(c, fullest, inside, limit)
        c.model.row([(c.largest, -1.0), (fullest, 1.0), *again], high=0.0)
    _at_least(c, c.largest, groups, limit)


def _at_least(c: _Columns, column: int, groups: list[list[tuple[int, Array]]], limit: float) -> None:
    """The column is at least the transient of what is taken of each group."""
    sized = [[(x, float(t[TRANSIENT])) for x, t in group] for group in groups]
    least = max((min(t for _, t in g) for g in sized if g), default=0.0)
    c.model.row([(column, 1.0)], low=least / limit)
    for group in sized:
        if max((t for _, t in group), default=0.0) > least:
            c.model.row([(column, -1.0), *((x, t / limit) for x, t in group)], high=0.0)


def memory(c: _Columns, scale: float, limit: float) -> None:
    """static + saved + P <= limit."""
    terms = [(x, float(t[STATIC] + t[SAVED]) / limit) for x, t in c.costs()]
    c.model.row([(c.largest, 1.0), *terms], high=1.0)


ROWS = (one_state, entries_agree, streams, largest_transient, memory)


def _assignment(problem: Problem, columns: _Columns, values: Array) -> Assignment:
    chosen = [max(s, key=lambda i: values[s[i]]) for s in columns.states]
    shared, rest = chosen[: len(problem.shared)], chosen[len(problem.shared) :]
    units = []
    for unit in problem.units:
        own = len(problem.classes[unit.kind].variables)
        units.append(tuple(rest[:own]))
        rest = rest[own:]
    return Assignment(tuple(shared), tuple(units))
