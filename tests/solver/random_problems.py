"""Small random problems, and every assignment of one counted out: what the solver is compared with.

``Counted`` shares no code with the solver, not even `problem.totals`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.solver.problem import Class, Factor, Problem, Unit, Variable

COMPUTE, EXPOSED, HIDDEN, STATIC, SAVED, TRANSIENT, AGAIN = range(7)
MOST = 20_000  # assignments of one problem


def random_problem(seed: int) -> Problem:
    """2 to 4 units of 1 or 2 classes, half of which make something again; factors over 2 or 3 variables; some entries
    illegal; the limit loose, tight, or too small."""
    rng = np.random.default_rng(seed)
    while True:
        problem = _draw(rng, seed)
        sizes = [len(v.states) for u in problem.units for v in problem.classes[u.kind].variables]
        if np.prod([*sizes, *(len(v.states) for v in problem.shared)], dtype=float) <= MOST:
            break
    peaks = Counted(problem).peaks
    low, high = (float(peaks.min()), float(peaks.max())) if len(peaks) else (5.0, 5.0)
    share = rng.choice([-0.1, 0.0, 0.05, 0.2, 0.4, 0.7, 1.0])
    return Problem(problem.name, problem.shared, problem.classes, problem.units, max(0.5, low + share * (high - low)))


def _draw(rng: np.random.Generator, seed: int) -> Problem:
    shared = tuple(_variable(rng, f"x{i}", "tensor") for i in range(rng.integers(1, 4)))
    sizes = [int(rng.integers(0, 3)) for _ in range(rng.integers(1, 3))]
    units = []
    for _ in range(rng.integers(2, 5)):
        kind = int(rng.integers(len(sizes)))
        units.append((kind, tuple(int(b) for b in rng.integers(0, len(shared), sizes[kind]))))
    border_states = {}
    for kind, borders in units:
        border_states.setdefault(kind, [len(shared[b].states) for b in borders])
    # equal units must see borders of equal sizes
    units = [(k, b) for k, b in units if [len(shared[i].states) for i in b] == border_states[k]]
    classes = tuple(_class(rng, f"c{k}", border_states.get(k, [1] * n)) for k, n in enumerate(sizes))
    return Problem(f"random {seed}", shared, classes, tuple(Unit(k, b) for k, b in units), 1.0)


def _class(rng: np.random.Generator, name: str, borders: list[int]) -> Class:
    again = float(rng.choice([0.0, 0.3]))
    own = tuple(_variable(rng, f"{name}.v{i}", "op", again) for i in range(rng.integers(1, 4)))
    sizes = [*(len(v.states) for v in own), *borders]
    factors = []
    for _ in range(rng.integers(0, 2 * len(own) + 1)):
        over = tuple(int(i) for i in rng.integers(0, len(sizes), rng.choice([2, 2, 3])))
        shape = tuple(int(rng.integers(1, sizes[v] + 1)) for v in over)
        reads = tuple(rng.integers(0, n, sizes[v]) for v, n in zip(over, shape, strict=True))
        factors.append(Factor(over, reads, _costs(rng, shape, 0.4, again)))
    return Class(name, own, tuple(factors), tuple(f"b{i}" for i in range(len(borders))))


def _variable(rng: np.random.Generator, name: str, kind: str, again: float = 0.0) -> Variable:
    n = int(rng.integers(2, 5))
    return Variable(name, kind, tuple(str(i) for i in range(n)), _costs(rng, (n,), 0.7, again))  # type: ignore[arg-type]


def _costs(rng: np.random.Generator, shape: tuple[int, ...], filled: float, again: float) -> np.ndarray:
    """Small whole numbers, so that sums are exact; now and then an illegal entry. ``again``: how many entries are bytes
    made again."""
    costs = rng.integers(0, 10, (*shape, 7)).astype(float)
    costs[rng.random((*shape, 7)) > filled] = 0.0
    costs[rng.random(shape) > again, AGAIN] = 0.0
    costs[..., SAVED] = np.maximum(0, costs[..., SAVED] + 4 - costs[..., COMPUTE])  # what is fast needs memory
    costs[rng.random(shape) < 0.08, EXPOSED] = np.inf
    return costs


@dataclass
class Counted:
    """Every legal assignment: its seconds and its peak."""

    problem: Problem

    def __post_init__(self) -> None:
        p = self.problem
        sizes = [len(v.states) for v in p.shared]
        places = []
        for unit in p.units:
            own = p.classes[unit.kind].variables
            places.append([*range(len(sizes), len(sizes) + len(own)), *unit.borders])
            sizes += [len(v.states) for v in own]
        self.states = np.indices(sizes).reshape(len(sizes), -1)
        groups = [[v.costs[self.states[i]]] for i, v in enumerate(p.shared)]
        for unit, place in zip(p.units, places, strict=True):
            kind = p.classes[unit.kind]
            rows = [v.costs[self.states[place[i]]] for i, v in enumerate(kind.variables)]
            for f in kind.factors:
                rows.append(f.table[tuple(m[self.states[place[v]]] for v, m in zip(f.over, f.reads, strict=True))])
            groups.append(rows)
        total = np.zeros((self.states.shape[1], 7))
        fullest = np.zeros(len(total))
        for rows in groups:
            working, again = np.zeros(len(total)), np.zeros(len(total))
            for row in rows:
                total[:, :TRANSIENT] += row[:, :TRANSIENT]
                working, again = np.maximum(working, row[:, TRANSIENT]), again + row[:, AGAIN]
            total[:, TRANSIENT] = np.maximum(total[:, TRANSIENT], working)
            fullest = np.maximum(fullest, working + again)
        with np.errstate(invalid="ignore"):  # illegal ones are left out below
            total[:, AGAIN] = fullest - total[:, TRANSIENT]
        legal = np.isfinite(total).all(1)
        self.states, total = self.states[:, legal], total[legal]
        self.total = total
        self.times = total[:, EXPOSED] + np.maximum(total[:, COMPUTE], total[:, HIDDEN])
        self.peaks = total[:, STATIC] + total[:, SAVED] + total[:, TRANSIENT] + total[:, AGAIN]

    @property
    def again(self) -> bool:
        """Whether something is made again, so that what bounds say of bytes need not be reached."""
        return bool(self.total[:, AGAIN].any())

    def picked(self, place: int, variable: int) -> np.ndarray:
        """The state of a variable of unit ``place`` (after the last: of the shared ones) in every assignment."""
        before = sum(len(self.problem.classes[u.kind].variables) for u in self.problem.units[:place])
        shared = len(self.problem.shared)
        return self.states[variable if place == len(self.problem.units) else shared + before + variable]

    @property
    def least_bytes(self) -> float:
        return float(self.peaks.min(initial=np.inf))

    @property
    def optimum(self) -> float:
        """Infinite where nothing fits."""
        return float(self.times[self.peaks <= self.problem.memory_limit].min(initial=np.inf))
