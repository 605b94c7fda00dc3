"""Elimination against counting out every combination: values, decoded states, kept variables, split tables."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.solver.eliminate import Elimination, Scope


def draw(seed: int, more: int = 0) -> tuple[list[int], list[Scope], list[np.ndarray]]:
    """Variables of 2 to 4 states; tables over 1 to 3 of them (one may occur twice), some entries infinite."""
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(2, 5, rng.integers(2, 7))]
    scopes, tables = [], []
    for _ in range(rng.integers(1, 10) + more):
        over = tuple(int(v) for v in rng.integers(0, len(sizes), rng.integers(1, 4)))
        shape = tuple(int(rng.integers(1, sizes[v] + 1)) for v in over)
        scopes.append(Scope(over, tuple(rng.integers(0, n, sizes[v]) for v, n in zip(over, shape))))
        table = rng.integers(0, 50, shape).astype(float)
        table[rng.random(shape) < 0.1] = np.inf
        tables.append(table)
    return sizes, scopes, tables


def every_sum(sizes: list[int], scopes: list[Scope], tables: list[np.ndarray]) -> np.ndarray:
    """The sum of the tables at every combination, one dim a variable."""
    states = np.indices(sizes)
    total = np.zeros(sizes)
    for scope, table in zip(scopes, tables):
        total += table[tuple(m[states[v]] for v, m in zip(scope.variables, scope.maps))]
    return total


def added(elimination: Elimination, tables: list[np.ndarray], kept: dict[int, int]) -> float:
    """What the tables that are left say of kept states."""
    scopes = [elimination.scopes[i] for i in elimination.left]
    rows = [tables[i] for i in elimination.left]
    return float(sum(t[tuple(m[kept[v]] for v, m in zip(s.variables, s.maps))] for s, t in zip(scopes, rows)))


@pytest.mark.parametrize("seed", range(150))
def test_elimination_finds_the_least_sum(seed: int) -> None:
    sizes, scopes, tables = draw(seed)
    every = every_sum(sizes, scopes, tables)
    elimination = Elimination(sizes, scopes, ())
    out = elimination.run(tables)
    assert elimination.exact
    assert elimination.value(out) == every.min()
    if np.isfinite(every.min()):
        assert every[tuple(elimination.decode(out, {}))] == every.min()


@pytest.mark.parametrize("seed", range(60))
def test_kept_variables_keep_their_table(seed: int) -> None:
    sizes, scopes, tables = draw(seed)
    every = every_sum(sizes, scopes, tables)
    keep = (0, len(sizes) - 1)
    elimination = Elimination(sizes, scopes, keep)
    out = elimination.run(tables)
    least = every.min(axis=tuple(v for v in range(len(sizes)) if v not in keep))
    for at in np.ndindex(*least.shape):
        kept = dict(zip(sorted(set(keep)), at))
        assert added(elimination, out, kept) == least[at]
        states = elimination.decode(out, kept)
        assert all(states[v] == s for v, s in kept.items())
        assert every[tuple(states)] == least[at]


def test_split_tables_bound_the_least_sum_from_below() -> None:
    split = below = 0
    for seed in range(150):
        sizes, scopes, tables = draw(seed, more=6)
        elimination = Elimination(sizes, scopes, (), limit=3)
        out = elimination.run(tables)
        least = every_sum(sizes, scopes, tables).min()
        assert elimination.value(out) <= least
        split += not elimination.exact
        below += elimination.value(out) < least
        states = elimination.decode(out, {})
        assert every_sum(sizes, scopes, tables)[tuple(states)] >= least
    assert split > 20 and below > 5  # the limit mattered


def test_no_table_is_larger_than_the_limit() -> None:
    for seed in range(50):
        sizes, scopes, tables = draw(seed)
        elimination = Elimination(sizes, scopes, (), limit=8)
        assert all(t.size <= max(8, *(u.size * 4 for u in tables)) for t in elimination.run(tables)[len(tables) :])


def test_states_that_read_the_same_rows_are_one() -> None:
    """360 states of a parameter that reads 3 rows: the table that is left has 3 columns, not 360."""
    rng = np.random.default_rng(0)
    rows, every = rng.integers(0, 3, 360), np.arange(4)
    scopes = [Scope((0,), (np.arange(360),)), Scope((0, 1), (rows, every)), Scope((2, 0), (every, rows))]
    elimination = Elimination((360, 4, 4), scopes, (0,))
    assert [elimination.scopes[i].variables for i in elimination.left] == [(0,), (0,), (0,)]
    out = elimination.run([rng.random(360), rng.random((3, 4)), rng.random((4, 3))])
    assert [out[i].shape for i in elimination.left] == [(360,), (3,), (3,)]


def test_the_same_structure_takes_other_numbers() -> None:
    sizes, scopes, tables = draw(3)
    elimination = Elimination(sizes, scopes, ())
    for factor in (1.0, 2.0, 0.5):
        scaled = [t * factor for t in tables]
        assert elimination.value(elimination.run(scaled)) == every_sum(sizes, scopes, scaled).min()


def test_a_variable_with_one_row_makes_no_dim() -> None:
    """A hub with 100 neighbours, of which every table reads one row: NumPy has no table of 100 dims."""
    rng = np.random.default_rng(0)
    hub, one = np.arange(3), np.zeros(2, np.int64)
    scopes = [Scope((0,), (hub,)), *(Scope((i, 0), (one, hub)) for i in range(1, 101))]
    tables = [rng.random(3), *rng.random((100, 1, 3))]
    elimination = Elimination((3, *[2] * 100), scopes, range(1, 101))
    out = elimination.run(tables)
    assert elimination.exact and elimination.value(out) == pytest.approx(
        np.sum([t.reshape(-1, 3).sum(0) for t in tables], 0).min()
    )


def test_no_table_has_more_dims_than_its_entries_allow() -> None:
    """Every dim has two rows or more, so that a limit of entries is one of dims."""
    for seed in range(100):
        sizes, scopes, tables = draw(seed, more=6)
        out = Elimination(sizes, scopes, (), limit=8).run(tables)
        assert all(2**t.ndim <= t.size for t in out[len(tables) :])
