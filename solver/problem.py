"""The problem that the solver gets: numbers and names only, so that it is saved, replayed and checked without a model.

A problem is a chain (in general a graph) of *units*. Equal units share a *class*, which is priced once. Inside a class
every op, every tensor with several readers and every parameter is a *variable*; its states are what it may do, each
with what that costs (`RESOURCES`); so is what the unit makes again in backward (kind ``recompute``). A *factor* prices
variables together: the change of layout between what one leaves and what the other wants, kept or made again. Units
meet in *shared* variables: the tensors that cross a cut, and tied parameters.

>>> import numpy as np
>>> free = np.zeros((2, len(RESOURCES)))
>>> x = Variable("x", "tensor", ("S0", "I"), free)
>>> op = Variable("fc", "op", ("cut", "whole"), np.array([[1.0, *[0] * 6], [2.0, *[0] * 6]]))
>>> change = np.zeros((2, 2, len(RESOURCES)))
>>> change[0, 1, EXPOSED] = 0.5
>>> layer = Class("fc", (op,), (Factor((1, 0), (np.arange(2), np.arange(2)), change),), ("x",))
>>> problem = Problem("toy", (x,), (layer,), (Unit(0, (0,)),), memory_limit=100.0)
>>> total = totals(problem, Assignment((0,), ((0,),)))
>>> float(seconds(total)), float(peak(total))
(1.0, 0.0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

RESOURCES = ("compute", "exposed", "hidden", "static", "saved", "transient", "again")
COMPUTE, EXPOSED, HIDDEN, STATIC, SAVED, TRANSIENT, AGAIN = range(7)
"""Seconds a step on the compute stream; of communication that compute waits for; of communication that can run beside
it (parameters, gradients). Bytes a rank: held all the time (rest, gradients, optimizer, gathered once a step); kept by
autograd for the microbatches in flight; working memory, of which the largest counts; made again for the backward of a
unit and alive while that runs, added up in each unit, of which the fullest counts. Infinite seconds: illegal."""


@dataclass(frozen=True, eq=False)
class Variable:
    """``states``: the text of each state; ``costs``: shape [states, resources]."""

    name: str
    kind: Literal["op", "tensor", "parameter", "recompute"]
    states: tuple[str, ...]
    costs: Array

    def only(self, kept: npt.NDArray[np.bool_]) -> Variable:
        """The same states, all but those kept illegal: an assignment of it is one of the whole variable."""
        costs = self.costs.copy()
        costs[~kept, EXPOSED] = np.inf
        return replace(self, costs=costs)


@dataclass(frozen=True, eq=False)
class Factor:
    """Costs of variables together: ``table[reads[0][i], reads[1][j], ...]`` for state i of the first, j of the second.

    ``over``: indices into the class's variables, or, from ``len(variables)`` on, into its borders. ``reads``: which row
    of that dim of ``table`` (shape [rows, columns, ..., resources]) a state reads.
    """

    over: tuple[int, ...]
    reads: tuple[Index, ...]
    table: Array

    def at(self, states: Sequence[int]) -> tuple[int, ...]:
        """The entry of the table at the states of the unit's variables and then borders."""
        return tuple(int(reads[states[v]]) for v, reads in zip(self.over, self.reads, strict=True))


@dataclass(frozen=True, eq=False)
class Class:
    """Equal units: their own variables, and the names of the shared variables they touch (``borders``)."""

    name: str
    variables: tuple[Variable, ...]
    factors: tuple[Factor, ...]
    borders: tuple[str, ...]


@dataclass(frozen=True)
class Unit:
    """One unit: its class and, for each border of the class, the index of the problem's shared variable."""

    kind: int
    borders: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """How the units of a problem are cut into stages, and what their schedule makes of a step.

    The mesh of the problem is then that of one stage's ranks. ``ranks``: of the pipeline, each with ``virtual`` stages;
    stage ``c`` runs on rank ``c % ranks``. ``fill``: so often every stage's microbatch is waited for before the fullest
    rank is always busy (1 under 1F1B). ``in_flight``: of each stage, how many microbatches are kept at once.
    ``sends``: of each shared variable, by state, seconds in which it goes to another stage and its gradient comes back,
    for one microbatch (zeros where nothing is sent).
    """

    ranks: int
    virtual: int
    microbatches: int
    fill: float
    in_flight: tuple[float, ...]
    sends: tuple[Array, ...]
    schedule: str = "1f1b"

    @property
    def stages(self) -> int:
        """How many."""
        return self.ranks * self.virtual


@dataclass(frozen=True, eq=False)
class Problem:
    """One candidate (a mesh and a number of microbatches). ``memory_limit`` in bytes a rank. ``counts``: how many
    strategies the rules generated, and how many were dropped before solving by which exact argument. ``pipeline``:
    where units are cut into stages; what that costs is in `solver.stages`."""

    name: str
    shared: tuple[Variable, ...]
    classes: tuple[Class, ...]
    units: tuple[Unit, ...]
    memory_limit: float
    counts: Mapping[str, int] = field(default_factory=dict)
    pipeline: Pipeline | None = None


@dataclass(frozen=True)
class Assignment:
    """A state for every shared variable, and for every variable of every unit. ``cuts``: the first unit of every stage
    but the first, ascending."""

    shared: tuple[int, ...]
    units: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...] = ()


def totals(problem: Problem, assignment: Assignment) -> Array:
    """What an assignment costs, by resource: see `joined`."""
    shared = [v.costs[s] for v, s in zip(problem.shared, assignment.shared, strict=True)]
    rows = [np.stack(shared)] if shared else []
    for unit, states in zip(problem.units, assignment.units, strict=True):
        rows.append(pattern_rows(problem, unit, states, tuple(assignment.shared[b] for b in unit.borders)))
    return joined([together(r) for r in rows])


def pattern_rows(problem: Problem, unit: Unit, states: tuple[int, ...], borders: tuple[int, ...]) -> Array:
    """The cost rows of one unit's variables and factors: [rows, resources]."""
    kind = problem.classes[unit.kind]
    every = (*states, *borders)
    rows = [v.costs[s] for v, s in zip(kind.variables, states, strict=True)]
    rows += [f.table[f.at(every)] for f in kind.factors]
    return np.stack(rows) if rows else np.zeros((0, len(RESOURCES)))


def together(rows: Array) -> Array:
    """What rows of one unit cost: sums, and of ``transient`` the maximum."""
    total = rows.sum(0)
    total[TRANSIENT] = rows[:, TRANSIENT].max(initial=0.0)
    return np.asarray(total)


def joined(units: Sequence[Array]) -> Array:
    """What units cost: sums, of ``transient`` the maximum, and of ``again`` what the fullest unit holds beyond that."""
    if not len(units):
        return np.zeros(len(RESOURCES))
    stacked = np.stack(units)
    total = np.asarray(stacked.sum(0))
    total[TRANSIENT] = stacked[:, TRANSIENT].max()
    total[AGAIN] = (stacked[:, TRANSIENT] + stacked[:, AGAIN]).max() - total[TRANSIENT]
    return total


def seconds(total: Array) -> Any:
    """Step time of totals (last dim: resources): compute waits for exposed communication, hidden runs beside both."""
    return total[..., EXPOSED] + np.maximum(total[..., COMPUTE], total[..., HIDDEN])


def peak(total: Array) -> Any:
    """Bytes a rank of totals (last dim: resources)."""
    return total[..., STATIC] + total[..., SAVED] + total[..., TRANSIENT] + total[..., AGAIN]
