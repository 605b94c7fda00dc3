"""The one file that touches OR-Tools: a mixed-integer linear model as plain numbers, and its solution by HiGHS.

HiGHS, of those that OR-Tools brings: on programs of `master` and `ilp` it is as fast as SCIP or faster but for one,
and needs no scaling. Traps, each with a test in tests/solver/test_backend.py: pywraplp's ``HIGHS_LP`` and ``PDLP``
silently drop integrality; MathOpt's HiGHS refuses ``threads=1`` (unset, it runs one); GLOP calls a search for the
highest point under planes IMPRECISE where bounds are as wide as 1e6, and gives nothing; CP-SAT through MathOpt rounds
continuous columns, and then calls a program infeasible that is not; HiGHS prints a line when it repairs a point that
it found, whatever it is told about output (to stderr with it: standard output is the command's). Everything stops by
gap or by a number of nodes, never by the clock: same input, same answer.

>>> model = Model()
>>> x, y = (model.add(cost=-c, high=1.0, integer=True) for c in (2.0, 3.0))
>>> model.row([(x, 1.0), (y, 2.0)], high=2.0)
>>> solution = minimise(model)
>>> solution.status, solution.objective, solution.values.tolist()
('optimal', -3.0, [0.0, 1.0])
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from typing import Literal

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from autopar.solver.problem import Array

NODES = 2000
"""Branch-and-bound nodes after which a solve stops with what it has."""
SECONDS = 600.0
"""A safety net far above what ``NODES`` take; a solve that hits it is not repeatable, and says so (``timed_out``)."""


@dataclass
class Model:
    """``min cost @ x`` with bounds on columns and rows; some columns integer."""

    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[tuple[float, float]] = field(default_factory=list)
    entries: list[tuple[list[int], list[float]]] = field(default_factory=list)

    def add(self, *, cost: float = 0.0, low: float = 0.0, high: float = inf, integer: bool = False) -> int:
        """A new column; its index."""
        self.low.append(low)
        self.high.append(high)
        self.cost.append(cost)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: Iterable[tuple[int, float]], *, low: float = -inf, high: float = inf) -> None:
        """``low <= sum of coefficient * column <= high``; columns may repeat."""
        total: dict[int, float] = {}
        for column, value in terms:
            total[column] = total.get(column, 0.0) + value
        self.rows.append((low, high))
        self.entries.append((list(total), list(total.values())))


@dataclass(frozen=True, eq=False)
class Solution:
    """``values`` is empty where no feasible point was found; ``bound``: proven, within the solver's tolerance."""

    status: Literal["optimal", "feasible", "infeasible", "none"]
    objective: float
    bound: float
    values: Array
    timed_out: bool = False


def minimise(model: Model, *, gap: float = 0.0, nodes: int = NODES) -> Solution:
    """Solves a model. ``gap``: relative, at which to stop."""
    parameters = mathopt.SolveParameters(relative_gap_tolerance=gap, time_limit=timedelta(seconds=SECONDS))
    parameters.highs.int_options["mip_max_nodes"] = nodes
    parameters.highs.double_options["mip_abs_gap"] = 0.0
    with _prints_to_stderr():
        result = mathopt.solve(_mathopt(model), mathopt.SolverType.HIGHS, params=parameters)
    reason = result.termination.reason
    limit = result.termination.limit
    timed_out = limit == mathopt.Limit.TIME
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return Solution("infeasible", inf, inf, np.zeros(0))
    bound = result.termination.objective_bounds.dual_bound
    if not result.has_primal_feasible_solution():
        return Solution("none", inf, bound, np.zeros(0), timed_out)
    values = np.array(list(result.variable_values().values()))
    status: Literal["optimal", "feasible"] = "optimal" if reason == mathopt.TerminationReason.OPTIMAL else "feasible"
    return Solution(status, result.objective_value(), bound, values, timed_out)


@contextmanager
def _prints_to_stderr() -> Iterator[None]:
    """What C code prints meanwhile goes to file descriptor 2. Nothing happens where 1 or 2 is closed."""
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    buffers = ctypes.CDLL(None)  # of C: what it printed before, and what it prints here, leave in order
    try:
        buffers.fflush(None)
        with suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        buffers.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def _mathopt(model: Model) -> mathopt.Model:
    proto = model_pb2.ModelProto()
    columns = len(model.cost)
    proto.variables.ids.extend(range(columns))
    proto.variables.lower_bounds.extend(model.low)
    proto.variables.upper_bounds.extend(model.high)
    proto.variables.integers.extend(model.integer)
    costly = [(i, c) for i, c in enumerate(model.cost) if c]
    proto.objective.linear_coefficients.ids.extend(i for i, _ in costly)
    proto.objective.linear_coefficients.values.extend(c for _, c in costly)
    proto.linear_constraints.ids.extend(range(len(model.rows)))
    proto.linear_constraints.lower_bounds.extend(a for a, _ in model.rows)
    proto.linear_constraints.upper_bounds.extend(b for _, b in model.rows)
    matrix = proto.linear_constraint_matrix
    for row, (ids, values) in enumerate(model.entries):
        order = sorted((i, v) for i, v in zip(ids, values, strict=True) if v)
        matrix.row_ids.extend([row] * len(order))
        matrix.column_ids.extend(i for i, _ in order)
        matrix.coefficients.extend(v for _, v in order)
    return mathopt.Model.from_model_proto(proto)
