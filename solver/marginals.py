"""States that no better assignment can use: for every state of every variable, the least weighted sum with it.

After elimination has gone up once, messages go down in the opposite order: for each table, the least of everything else
given what is read of it. A state whose bound is above what is wanted is dropped; what is left is a smaller problem,
for `ilp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from autopar.solver.eliminate import Elimination, _Bucket, _Step
from autopar.solver.evaluate import Evaluation, Point
from autopar.solver.lagrangian import Range
from autopar.solver.problem import Array, Index

PRODUCT_LIMIT = 8_000_000
"""Entries of the largest product that is written out; beyond, nothing is dropped."""


def state_bounds(evaluation: Evaluation, ranges: Sequence[Range]) -> list[list[Array]] | None:
    """For each unit, then, last, for the shared variables: per variable, per state, seconds that no assignment that
    fits can beat with that state. None where products would be too large."""
    problem = evaluation.problem
    sizes = [[len(v.states) for v in problem.classes[u.kind].variables] for u in problem.units] + [evaluation.sizes]
    bounds = [[np.full(n, np.inf) for n in every] for every in sizes]
    for m in (r.multipliers for r in ranges if r.bound < np.inf):
        least = _least(evaluation, Point(evaluation, m.weights(), m.high))
        if least is None:
            return None
        for every, found in zip(bounds, least, strict=True):
            for states, values in zip(every, found, strict=True):
                np.minimum(states, values - m.per_byte * (problem.memory_limit - m.low), out=states)
    return bounds


def below(bounds: list[list[Array]], threshold: float) -> list[list[Index]]:
    """The states whose bound is below so many seconds."""
    return [[np.flatnonzero(states < threshold) for states in every] for every in bounds]


def _least(evaluation: Evaluation, point: Point) -> list[list[Array]] | None:
    """For each unit, and last for the shared variables: per variable, per state, the least sum of all."""
    units, classes = evaluation.problem.units, evaluation._classes
    eliminations = [evaluation._top, *(c.elimination for c in classes)]
    if any(largest_product(e) > PRODUCT_LIMIT for e in eliminations):
        return None
    tables = point.top()
    top = evaluation._top
    scalars = {i: float(tables[i]) for i in top.left}
    outside = {i: np.asarray(sum(v for j, v in scalars.items() if j != i), float) for i in top.left}
    shared, down = marginals(top, tables, outside)
    every = []
    place = len(evaluation.sizes)
    for unit in units:
        elimination = classes[unit.kind].elimination
        own = len(evaluation.problem.classes[unit.kind].variables)
        mine: dict[int, Array] = {}
        for i in elimination.left:
            mine[i] = unfold(top, place, down[place], point.tables(unit.kind)[i].shape)
            place += 1
        every.append(marginals(elimination, point.tables(unit.kind), mine)[0][:own])
    return [*every, shared]


def largest_product(elimination: Elimination) -> int:
    """Entries of the largest product of a bucket."""
    return max((len(b.starts) * prod(b.shape) for s in elimination._steps for b in s.buckets), default=0)


def marginals(
    elimination: Elimination, tables: Sequence[Array], outside: Mapping[int, Array]
) -> tuple[list[Array], dict[int, Array]]:
    """For every variable (kept ones: empty) the least sum with each of its states, and for every table that of all
    others, by what is read of it. ``outside``: that of the tables that are left."""
    down = dict(outside)
    least = [np.zeros(0)] * len(elimination.sizes)
    for step in reversed(elimination._steps):
        own = elimination._own(step, tables)
        found = np.full(len(own), -np.inf)
        for bucket in step.buckets:
            rest = _down_bucket(elimination, step, bucket, own, tables, down)
            found = np.maximum(found, rest + own if bucket.alone else rest)
        least[step.variable] = found
    return least, down


def _down_bucket(
    elimination: Elimination,
    step: _Step,
    bucket: _Bucket,
    own: Array,
    tables: Sequence[Array],
    down: dict[int, Array],
) -> Array:
    """Messages to the tables of a bucket; the least of all but the variable's own costs, by its state."""
    above = down[bucket.out]
    grouped = own if bucket.alone else np.zeros_like(own)
    if bucket.sorted is not None:
        grouped = np.minimum.reduceat(grouped[bucket.sorted], bucket.starts)
    parts = [p.of(tables[p.table]) for p in bucket.parts]
    total = np.broadcast_to(above, (len(grouped), *bucket.shape))
    for part in parts:
        total = total + part
    rest = total.reshape(len(grouped), -1).min(1)[_sorts(bucket, len(own))]
    for k, p in enumerate(bucket.parts):
        others = np.asarray(above + grouped.reshape(-1, *[1] * len(bucket.shape)))
        for j, part in enumerate(parts):
            if j != k:
                others = others + part
        flat = np.broadcast_to(others, (len(grouped), *bucket.shape)).min(axis=p.free)
        message = np.full(tables[p.table].shape, np.inf)
        np.minimum.at(message, np.ix_(*(rows for _, rows in p.takes)), flat.transpose(np.argsort(p.order)))
        down[p.table] = message
    if bucket.alone:
        for index in step.alone:
            reads = elimination.scopes[index].maps[0]
            without = rest + sum(tables[i][elimination.scopes[i].maps[0]] for i in step.alone if i != index)
            message = np.full(tables[index].shape, np.inf)
            np.minimum.at(message, reads, without)
            down[index] = message
    return np.asarray(rest)


def _sorts(bucket: _Bucket, size: int) -> Index:
    """The row of the product that each state of the variable reads."""
    if bucket.sorted is None:
        return np.arange(size)
    sorts = np.zeros(size, np.int64)
    sorts[bucket.sorted] = np.repeat(np.arange(len(bucket.starts)), np.diff([*bucket.starts, size]))
    return sorts


def unfold(elimination: Elimination, index: int, message: Array, shape: tuple[int, ...]) -> Array:
    """The message to a given table, by its own rows (before a variable that it had twice was made one)."""
    fold = elimination._folds[index]
    if fold is None:
        return message
    whole = np.full(shape, np.inf)
    np.minimum.at(whole, fold, message)
    return whole
