"""Small random problems with stages, and every assignment with every cut of one counted out.

``CountedStages`` shares no code with the solver: neither `stages`, which says what an assignment with cuts takes, nor
anything below it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np
from random_problems import AGAIN, COMPUTE, EXPOSED, HIDDEN, SAVED, STATIC, TRANSIENT, _class, _variable

from autopar.solver.problem import Assignment, Pipeline, Problem, Unit

MOST = 5_000  # assignments of one problem, without its cuts


@lru_cache(maxsize=512)
def random_stages(seed: int) -> Problem:
    """3 to 6 units of 1 or 2 classes in a row, on 2 or 3 stages (4 where ranks have two), some with a hub or a tied
    parameter that others share, some sharing anything; the limit loose, tight or too small."""
    rng = np.random.default_rng(1_000_000 + seed)
    while True:
        problem = _draw(rng, seed)
        sizes = [len(v.states) for u in problem.units for v in problem.classes[u.kind].variables]
        if np.prod([*sizes, *(len(v.states) for v in problem.shared)], dtype=float) > MOST:
            continue
        peaks = CountedStages(problem).peaks
        if len(peaks) or rng.random() < 0.1:
            break
    low, high = (float(peaks.min()), float(peaks.max())) if len(peaks) else (5.0, 5.0)
    share = rng.choice([-0.1, 0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0])
    return replace(problem, memory_limit=max(0.5, low + share * (high - low)))


def _draw(rng: np.random.Generator, seed: int) -> Problem:
    virtual = int(rng.choice([1, 1, 1, 2]))
    ranks = 2 if virtual == 2 else int(rng.integers(2, 4))
    count = int(rng.integers(max(3, ranks * virtual), 7))
    states = int(rng.integers(1, 4))
    shared = []
    for i in range(count + int(rng.integers(0, 3))):
        v = _variable(rng, f"x{i}", "parameter" if i >= count and rng.random() < 0.5 else "tensor")
        shared.append(replace(v, states=tuple("abc"[:states]), costs=np.resize(v.costs, (states, 7))))
    kinds = [int(k) for k in rng.integers(0, rng.integers(1, 3), count)]
    chained = rng.random() < 0.75
    wide = [chained and len(shared) > count and rng.random() < 0.5 for _ in range(2)]
    units = []
    for k, kind in enumerate(kinds):
        borders = [max(0, k - 1), k] if chained else [int(b) for b in rng.integers(0, len(shared), 2)]
        if wide[kind]:
            borders.append(int(rng.integers(count, len(shared))))
        units.append(Unit(kind, tuple(borders)))
    sizes = [states if kind in kinds else 1 for kind in range(2)]  # of borders; a class without units sees none
    classes = tuple(_class(rng, f"c{kind}", [sizes[kind]] * (2 + wide[kind])) for kind in range(2))
    microbatches = int(rng.choice([1, 2, 4, 8]))
    pipeline = Pipeline(
        ranks,
        virtual,
        microbatches,
        fill=float(rng.choice([0.3, 0.5, 0.75, 1.0])),
        in_flight=tuple(float(n) for n in sorted(rng.choice([1, 1.5, 2, 3, 4], ranks * virtual), reverse=True)),
        sends=tuple(rng.integers(0, 3, states) * float(rng.choice([0.0, 0.125])) for _ in shared),
    )
    return Problem(f"random stages {seed}", tuple(shared), classes, tuple(units), 1.0, pipeline=pipeline)


@dataclass
class CountedStages:
    """Every legal assignment with every cut: its seconds and the bytes of its fullest rank. ``drop``: a cut place that
    is not tried."""

    problem: Problem
    drop: int | None = None

    def __post_init__(self) -> None:
        p = self.problem
        sizes = [len(v.states) for v in p.shared]
        self.places = []
        for unit in p.units:
            own = p.classes[unit.kind].variables
            self.places.append([*range(len(sizes), len(sizes) + len(own)), *unit.borders])
            sizes += [len(v.states) for v in own]
        self.states = np.indices(sizes).reshape(len(sizes), -1)
        self.shared = [v.costs[self.states[i]] for i, v in enumerate(p.shared)]
        self.units = [self._unit(k) for k in range(len(p.units))]
        legal = np.ones(self.states.shape[1], bool)
        for rows in [*([s] for s in self.shared), *self.units]:
            for row in rows:
                legal &= np.isfinite(row).all(1)
        self.states = self.states[:, legal]
        self.shared = [s[legal] for s in self.shared]
        self.units = [[row[legal] for row in rows] for rows in self.units]
        assert p.pipeline is not None
        places = [k for k in range(1, len(p.units)) if k != self.drop]
        self.cuts = list(combinations(places, p.pipeline.stages - 1))
        found = [self._cut(cuts) for cuts in self.cuts]
        self.times = np.concatenate([np.zeros(0), *(t for t, _ in found)])
        self.peaks = np.concatenate([np.zeros(0), *(b for _, b in found)])

    def _unit(self, k: int) -> list[np.ndarray]:
        p, place = self.problem, self.places[k]
        kind = p.classes[p.units[k].kind]
        rows = [v.costs[self.states[place[i]]] for i, v in enumerate(kind.variables)]
        for f in kind.factors:
            rows.append(f.table[tuple(m[self.states[place[v]]] for v, m in zip(f.over, f.reads, strict=True))])
        return rows

    def _cut(self, cuts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        p, pipe = self.problem, self.problem.pipeline
        assert pipe is not None
        n = self.states.shape[1]
        edges = (0, *cuts, len(p.units))
        stage_of = {k: s for s in range(pipe.stages) for k in range(edges[s], edges[s + 1])}
        on: dict[int, list[int]] = {v: [] for v in range(len(p.shared))}
        for k, unit in enumerate(p.units):
            for v in unit.borders:
                on[v].append(stage_of[k])
        seconds, held = np.zeros((pipe.ranks, n)), np.zeros((pipe.ranks, n))
        fullest, sends = np.zeros((pipe.ranks, n)), np.zeros(n)
        for s in range(pipe.stages):
            groups = [self.units[k] for k in range(edges[s], edges[s + 1])]
            for v, stages in on.items():
                if s in stages or (not stages and s == 0):
                    row = self.shared[v].copy()
                    if stages and s != min(stages) and p.shared[v].kind != "parameter":
                        row[:, :3] = 0.0
                    groups.append([row])
            total, working, most = np.zeros((n, 7)), np.zeros(n), np.zeros(n)
            for rows in groups:
                mine, again = np.zeros(n), np.zeros(n)
                for row in rows:
                    total += row
                    mine, again = np.maximum(mine, row[:, TRANSIENT]), again + row[:, AGAIN]
                working, most = np.maximum(working, mine), np.maximum(most, mine + again)
            seconds[s % pipe.ranks] += total[:, EXPOSED] + np.maximum(total[:, COMPUTE], total[:, HIDDEN])
            held[s % pipe.ranks] += total[:, STATIC] + pipe.in_flight[s] * total[:, SAVED]
            fullest[s % pipe.ranks] = np.maximum(fullest[s % pipe.ranks], np.maximum(working, most))
        for v, stages in on.items():
            if len(set(stages)) > 1:
                sends += (len(set(stages)) - 1) * pipe.sends[v][self.states[v]]
        micro = seconds / pipe.microbatches
        times = pipe.fill * (micro.sum(0) + sends) + (pipe.microbatches - pipe.fill) * micro.max(0)
        return times, (held + fullest).max(0)

    @property
    def least_bytes(self) -> float:
        return float(self.peaks.min(initial=np.inf))

    @property
    def optimum(self) -> float:
        """Infinite where nothing fits."""
        return float(self.times[self.peaks <= self.problem.memory_limit].min(initial=np.inf))

    def number(self, assignment: Assignment) -> int:
        """The place of an assignment among those counted (its column of every cut's)."""
        wanted = np.array([*assignment.shared, *(s for unit in assignment.units for s in unit)])
        column = int(np.flatnonzero((self.states == wanted[:, None]).all(0))[0])
        return self.cuts.index(assignment.cuts) * self.states.shape[1] + column
