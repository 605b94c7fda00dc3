"""Bounds of problems with stages once more, by code of its own: what a proof is checked with.

Every run of units is priced from its first unit on, a unit at a time, without telling equal runs or units apart from
others; all lengths are. What is relaxed: tensors that cross an end of the run, and those whose units do not follow each
other (or that would make the states between two units more than `WIDEST_LINK`), take the state that suits each unit.
What prices prove of a stage, and of a step over all cuts, is said in `stage_bound`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, product
from math import inf

import numpy as np

from autopar.solver.problem import AGAIN, SAVED, STATIC, TRANSIENT, Array, Assignment, Pipeline, Problem
from autopar.solver.recompute import _eliminate, _of_class, _once, _own_variables, _price, _Table

WIDEST_LINK = 512
"""States between two units at most."""
ROUNDING = 1e-9
CAPS = 5
"""Sizes of transients that are told apart for the fewest bytes."""

Weights = tuple[float, ...]


@dataclass(eq=False)
class Line:
    """The units of a problem with a pipeline in a row. ``between``: the variables that link unit k - 1 to unit k."""

    problem: Problem
    between: list[list[int]] = field(default_factory=list)
    seen: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.problem
        for k, unit in enumerate(problem.units):
            for v in sorted(set(unit.borders)):
                self.seen.setdefault(v, []).append(k)
        follow = {v for v, ks in self.seen.items() if ks == list(range(ks[0], ks[-1] + 1))}
        crossing = [
            [v for v in sorted(follow) if self.seen[v][0] < k <= self.seen[v][-1]] for k in range(self.count + 1)
        ]
        for vs in crossing:
            states = 1
            for v in sorted(vs, key=lambda v: (-self.states(v), v)):
                if states * self.states(v) > WIDEST_LINK:
                    follow.discard(v)
                elif v in follow:
                    states *= self.states(v)
        self.apart = set(self.seen) - follow
        self.between = [[v for v in vs if v in follow] for vs in crossing]

    @property
    def count(self) -> int:
        """Units."""
        return len(self.problem.units)

    def states(self, v: int) -> int:
        """Of a shared variable."""
        return len(self.problem.shared[v].states)

    def floors(self) -> Array:
        """Bytes of a transient that every run has at least, [starts, ends]."""
        mine = []
        for unit in self.problem.units:
            kind = self.problem.classes[unit.kind]
            tables = [v.costs for v in kind.variables] + [f.table for f in kind.factors]
            tables += [self.problem.shared[b].costs for b in unit.borders]
            rows = [t.reshape(-1, t.shape[-1]) for t in tables]
            legal = [r[np.isfinite(r).all(1), TRANSIENT] for r in rows]
            mine.append(max((float(r.min()) for r in legal if len(r)), default=0.0))
        found = np.zeros((self.count + 1, self.count + 1))
        for i in range(self.count):
            for j in range(i + 1, self.count + 1):
                found[i, j] = max(found[i, j - 1], mine[j - 1])
        return found

    def messages(self) -> Array:
        """Seconds of a microbatch's messages to every run at least, [starts, ends]."""
        pipeline = self.problem.pipeline
        assert pipeline is not None
        found = np.zeros((self.count + 1, self.count + 1))
        for v, ks in self.seen.items():
            legal = np.isfinite(self.problem.shared[v].costs).all(1)
            least = float(pipeline.sends[v][legal].min()) if legal.any() else 0.0
            for i in range(ks[0] + 1, ks[-1] + 1) if least else ():
                found[i, min(k for k in ks if k >= i) + 1 :] += least
        return found


@dataclass(eq=False)
class Runs:
    """At one choice of weights: ``least`` of every run, [starts, ends]; ``grows``: what it grows by at least with each
    unit."""

    least: Array
    grows: Array


def runs_at(line: Line, weights: Array, high: float = inf) -> Runs:
    """The least of every run without transients above ``high`` bytes."""
    problem, n = line.problem, line.count
    held = weights.copy()
    held[:3] = 0.0
    full = [_price(v.costs, weights, high) for v in problem.shared]
    later = [full[i] if v.kind == "parameter" else _price(v.costs, held, high) for i, v in enumerate(problem.shared)]
    left = [
        _eliminate(_of_class(problem, k, weights, high), _own_variables(problem, k))
        for k in range(len(problem.classes))
    ]
    made: dict[object, Array] = {}
    steps = [_step(line, left, full, k, made) for k in range(n)]
    least = np.full((n + 1, n + 1), inf)
    for i in range(n):
        state = np.zeros(1)
        for v in line.between[i]:
            state = (state[:, None] + later[v]).reshape(-1)
        for j in range(i, n):
            state = (state[:, None] + steps[j]).min(0)
            least[i, j + 1] = state.min()
    for v in line.apart:
        for i, j in product(range(n), range(1, n + 1)):
            if any(i <= k < j for k in line.seen[v]):
                least[i, j] += (full[v] if line.seen[v][0] >= i else later[v]).min()
    least[0] += sum(float(f.min()) for v, f in enumerate(full) if v not in line.seen)
    grows = np.array([s.min() if np.isfinite(s).any() else 0.0 for s in steps])
    return Runs(least, grows)


def _step(line: Line, left: list[list[_Table]], full: list[Array], k: int, made: dict[object, Array]) -> Array:
    """What a unit costs between the states before and after it, [states, states]."""
    unit = line.problem.units[k]
    own, mine = len(line.problem.classes[unit.kind].variables), sorted(set(unit.borders))
    ins, outs = line.between[k], line.between[k + 1]
    new = [line.seen[v][0] == k and v not in line.apart for v in mine]
    costs = [
        np.where(new_, full[v], np.where(np.isfinite(full[v]), 0.0, inf)) for v, new_ in zip(mine, new, strict=True)
    ]
    place = {v: i for i, v in enumerate(mine)}
    roles = tuple(place[b] for b in unit.borders), tuple(place[v] for v in ins), tuple(place[v] for v in outs)
    key = (unit.kind, roles, tuple(c.tobytes() for c in costs))
    if key in made:
        return made[key]
    tables = [_Table((place[v],), (np.arange(len(c)),), c) for v, c in zip(mine, costs, strict=True)]
    for t in left[unit.kind]:
        tables.append(_once(_Table(tuple(place[unit.borders[v - own]] for v in t.over), t.maps, t.values)))
    kept = sorted({*roles[1], *roles[2]})
    rest = _eliminate(tables, set(range(len(mine))) - set(kept))
    shape = [len(costs[i]) for i in kept]
    total = np.zeros(shape)
    for t in rest:
        values = t.values[np.ix_(*t.maps)] if t.over else t.values
        order = sorted(range(len(t.over)), key=lambda d: t.over[d])
        values = values.transpose(order) if t.over else values
        total = total + values.reshape([shape[a] if i in t.over else 1 for a, i in enumerate(kept)])
    found = np.full((int(np.prod([line.states(v) for v in ins])), int(np.prod([line.states(v) for v in outs]))), inf)
    for at in np.ndindex(*shape):
        state = dict(zip(kept, at, strict=True))
        a = _number([state[i] for i in roles[1]], [line.states(v) for v in ins])
        b = _number([state[i] for i in roles[2]], [line.states(v) for v in outs])
        found[a, b] = total[at]
    made[key] = found
    return found


def _number(states: list[int], sizes: list[int]) -> int:
    number = 0
    for s, n in zip(states, sizes, strict=True):
        number = number * n + s
    return number


def stages_bound_anew(problem: Problem, multipliers: tuple[Weights, ...]) -> float:
    """Seconds that no cuts and no assignment within the limit beat; -inf where the multipliers are none."""
    pipeline = problem.pipeline
    assert pipeline is not None
    if len(problem.units) < pipeline.stages:
        return inf
    if not _legal(pipeline, multipliers, problem.memory_limit):
        return -inf
    line, made = _made(problem, multipliers)
    grows = np.mean([made[m[:8]].grows for m in multipliers], axis=0)
    stages = np.stack(_stages(line, multipliers, made))
    return least_step(pipeline, stages, pipeline.fill * line.messages(), grows, [m[7] for m in multipliers])


def stages_anew(problem: Problem, multipliers: tuple[Weights, ...]) -> list[Array] | None:
    """What every run takes at least as every stage, [starts, ends] each; None where the multipliers are none."""
    assert problem.pipeline is not None
    if not _legal(problem.pipeline, multipliers, problem.memory_limit):
        return None
    line, made = _made(problem, multipliers)
    return _stages(line, multipliers, made)


def fullest_anew(problem: Problem, ranks: int, virtual: int, alpha: float) -> float:
    """Seconds of all microbatches on the fullest rank of a pipeline that sends nothing, over all cuts, whatever the
    memory; something below it where ranks have several stages. The problem's own pipeline does not count."""
    line = Line(problem)
    runs = runs_at(line, np.array([alpha, 1.0, 1 - alpha, 0, 0, 0, 0]))
    stages = ranks * virtual
    if line.count < stages:
        return inf
    if virtual == 1:
        return _least_largest([runs.least] * stages)
    pipeline = Pipeline(ranks, virtual, 1, 0.0, (1.0,) * stages, ())
    mean = _path([runs.least] * stages)[0] / ranks
    return max(mean, _least_fullest(pipeline, np.stack([runs.least] * stages), runs.grows))


def _least_largest(costs: list[Array]) -> float:
    """The least largest of one run a stage, end to end."""
    reach = costs[0][0]
    for c in costs[1:]:
        reach = np.maximum(reach[:, None], c).min(0)
    return float(reach[-1])


def _made(problem: Problem, multipliers: tuple[Weights, ...]) -> tuple[Line, dict[Weights, Runs]]:
    line = Line(problem)
    return line, {m: runs_at(line, _weights(m), m[3]) for m in {m[:8] for m in multipliers}}


def _stages(line: Line, multipliers: tuple[Weights, ...], made: dict[Weights, Runs]) -> list[Array]:
    pipeline, limit, floors = line.problem.pipeline, line.problem.memory_limit, line.floors()
    assert pipeline is not None
    units = np.arange(line.count + 1)
    lengths = units[None, :] - units[:, None]

    def worth(price: float, again: float) -> Array:
        left = price - again * lengths
        return price * limit - np.where(left >= 0, left * floors, left * limit) if price else np.zeros_like(floors)

    found = []
    for s, n in enumerate(pipeline.in_flight):
        best = np.full_like(floors, -inf if pipeline.virtual > 1 else 0.0)
        for m in multipliers if pipeline.virtual == 1 else multipliers[s : s + 1]:
            _, per_byte, _, _, time, saved, again = m[:7]
            if pipeline.virtual > 1:
                value = made[m[:8]].least - worth(per_byte, again * pipeline.virtual) / pipeline.virtual
            else:
                price = max(per_byte, saved / n) if saved else per_byte
                value = made[m[:8]].least - worth(price, again)
                value = value if time else np.where(value > ROUNDING * price * limit, inf, 0.0)
            best = np.maximum(best, value)
        found.append(np.where((floors > limit) | (lengths <= 0), inf, best))
    return found


def _weights(m: Weights) -> Array:
    alpha, per_byte, _, _, time, saved, again = m[:7]
    return np.array([time * alpha, time, time * (1 - alpha), per_byte, saved, 0.0, again])


def _legal(pipeline: Pipeline, multipliers: tuple[Weights, ...], limit: float) -> bool:
    for alpha, per_byte, _, high, time, *more in multipliers:
        if len(more) != 3 or not (
            0 <= alpha <= 1 and time in (0.0, 1.0) and min(per_byte, *more) >= 0 and high >= limit
        ):
            return False
    if pipeline.virtual == 1:
        return bool(multipliers)
    return len(multipliers) == pipeline.stages and all(
        m[4] == 1
        and m[1] == multipliers[s % pipeline.ranks][1]
        and m[7] == multipliers[s % pipeline.ranks][7]
        and m[5] <= m[1] * pipeline.in_flight[s] * (1 + ROUNDING)
        for s, m in enumerate(multipliers)
    )


def least_step(pipeline: Pipeline, stages: Array, sends: Array, grows: Array, shares: list[float]) -> float:
    """The least step over all cuts, from what every run takes at least as every stage, [stages, starts, ends]; with
    several stages a rank something below it."""
    f = min(1.0, pipeline.fill / pipeline.microbatches)
    if pipeline.virtual > 1:
        total = sum(shares[: pipeline.ranks])
        if not 1 - ROUNDING <= total <= 1 + ROUNDING:
            return -inf
        weighted = [_scaled(f + (1 - f) * w, c) + sends for w, c in zip(shares, stages, strict=True)]
        plain = _path([f * c + sends for c in stages])[0]
        return max(0.0, _path(weighted)[0], plain + (1 - f) * _least_fullest(pipeline, stages, grows))
    best, most = inf, inf
    while True:
        allowed = [np.where(c < most, f * c + sends, inf) for c in stages]
        total, cuts = _path(allowed)
        if total >= best or total == inf:
            return best
        most = max(float(stages[s, i, j]) for s, (i, j) in enumerate(pairwise(cuts)))
        best = min(best, total + (1 - f) * most)


def _scaled(share: float, costs: Array) -> Array:
    return np.where(np.isfinite(costs), share * np.where(np.isfinite(costs), costs, 0.0), inf)


def _path(costs: list[Array]) -> tuple[float, list[int]]:
    """The least sum of one run a stage, end to end, and where they end."""
    reach = costs[0][0]
    choices = []
    for c in costs[1:]:
        every = reach[:, None] + c
        choices.append(every.argmin(0))
        reach = every.min(0)
    ends = [len(reach) - 1]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return float(reach[-1]), [0, *reversed(ends)]


def _least_fullest(pipeline: Pipeline, stages: Array, grows: Array) -> float:
    """Seconds that the fullest rank takes at least: each has room within them for so much of what runs grow by, and all
    of it has to go somewhere."""
    size = grows + 1e-6 * (grows.sum() or 1.0) / len(grows)
    before = np.concatenate([[0.0], size.cumsum()])
    holds = [[(0.0, 0.0)] for _ in range(pipeline.ranks)]
    for s in range(pipeline.stages):
        mine = _may_hold(pipeline, stages[s], before, s)
        old = holds[s % pipeline.ranks]
        holds[s % pipeline.ranks] = _unbeaten([(a + t, b + z) for a, b in old for t, z in mine])
    levels = sorted({t for hold in holds for t, _ in hold})
    low, high = 0, len(levels)
    while low < high:
        middle = (low + high) // 2
        within = sum(max((z for t, z in hold if t <= levels[middle]), default=-inf) for hold in holds)
        low, high = (low, middle) if within >= before[-1] * (1 - ROUNDING) else (middle + 1, high)
    return levels[low] if low < len(levels) else inf


def _may_hold(pipeline: Pipeline, costs: Array, before: Array, stage: int) -> list[tuple[float, float]]:
    found, n = [], len(before) - 1
    for i in range(stage, n) if stage else (0,):
        last = stage == pipeline.stages - 1
        for j in (n,) if last else range(i + 1, n - (pipeline.stages - 1 - stage) + 1):
            if np.isfinite(costs[i, j]):
                found.append((float(costs[i, j]), float(before[j] - before[i])))
    return _unbeaten(found)


def _unbeaten(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Seconds ascending, and sizes, without those that another beats in both."""
    found: list[tuple[float, float]] = []
    for t, z in sorted(pairs, key=lambda p: (p[0], -p[1])):
        if not found or z > found[-1][1]:
            found.append((t, z))
    return found


def stage_bytes_bound(problem: Problem) -> float:
    """Bytes that no assignment's fullest rank goes below, over all cuts: by ranges of the largest transient."""
    pipeline = problem.pipeline
    assert pipeline is not None
    if len(problem.units) < pipeline.stages:
        return inf
    line = Line(problem)
    floors, units = line.floors(), np.arange(line.count + 1)
    highs = [*_caps(problem, floors), inf]
    few, many = min(pipeline.in_flight), max(pipeline.in_flight)
    again = pipeline.ranks / line.count
    counted = again * pipeline.virtual * np.maximum(1, units[None, :] - units[:, None])
    ranges = []
    for low, high in zip((0.0, *highs), highs, strict=False):
        runs = [
            [runs_at(line, np.array([0.0, 0, 0, 1, n, 0, w]), high).least for n in (few, many)] for w in (0.0, again)
        ]
        ranges.append((np.maximum(low, floors) / pipeline.virtual, runs))
    held = []
    for n in pipeline.in_flight:
        share = (n - few) / (many - few) if many > few else 0.0
        best = np.full_like(floors, inf)
        for working, (plain, priced) in ranges:
            least = [
                a if a is b or share == 0 else b if share == 1 else (1 - share) * a + share * b
                for a, b in (plain, priced)
            ]
            second = least[1] / np.maximum(1.0, counted) + np.maximum(0.0, 1 - counted) * working
            best = np.minimum(best, np.maximum(least[0] + working, second))
        held.append(np.where(units[None, :] > units[:, None], best, inf))
    if pipeline.virtual > 1:
        return max(0.0, _path(held)[0] / pipeline.ranks)
    return _least_largest(held)


def _caps(problem: Problem, floors: Array) -> list[float]:
    """Sizes of transients, each twice the one before or more."""
    tables = [v.costs for v in problem.shared]
    for kind in problem.classes:
        tables += [v.costs for v in kind.variables] + [f.table for f in kind.factors]
    rows = np.concatenate([t.reshape(-1, t.shape[-1]) for t in tables])
    sizes = np.unique(rows[np.isfinite(rows).all(1), TRANSIENT])
    least = max(float(np.diagonal(floors, 1).min()), 1e-12)
    found: list[float] = []
    for size in sorted((float(x) for x in sizes if x >= least), reverse=True):
        if not found or size <= found[-1] / 2:
            found.append(size)
    return found[-CAPS:][::-1]


def taken(problem: Problem, assignment: Assignment) -> tuple[float, float]:
    """Seconds and bytes of an assignment with cuts; infinite where it is not one."""
    pipeline = problem.pipeline
    assert pipeline is not None
    edges = (0, *assignment.cuts, len(problem.units))
    if len(edges) != pipeline.stages + 1 or any(a >= b for a, b in pairwise(edges)):
        return inf, inf
    seconds, held, working = ([0.0] * pipeline.ranks for _ in range(3))
    on = {
        v: [s for s, (a, b) in enumerate(pairwise(edges)) if any(v in u.borders for u in problem.units[a:b])]
        for v in range(len(problem.shared))
    }
    sends = 0.0
    try:
        for s, (first, last) in enumerate(pairwise(edges)):
            total, most = np.zeros(7), 0.0
            groups = [_unit_rows(problem, assignment, k) for k in range(first, last)]
            for v, stages in on.items():
                if s in stages or (not stages and s == 0):
                    row = problem.shared[v].costs[assignment.shared[v]].copy()
                    if s != min(stages, default=0) and problem.shared[v].kind != "parameter":
                        row[:3] = 0.0
                    groups.append([row])
                    sends += float(pipeline.sends[v][assignment.shared[v]]) * (s in stages[1:])
            for rows in groups:
                total = total + sum(rows, np.zeros(7))
                most = max(
                    most, max((float(r[TRANSIENT]) for r in rows), default=0.0) + sum(float(r[AGAIN]) for r in rows)
                )
            rank = s % pipeline.ranks
            seconds[rank] += float(total[1] + max(total[0], total[2])) / pipeline.microbatches
            held[rank] += float(total[STATIC] + pipeline.in_flight[s] * total[SAVED])
            working[rank] = max(working[rank], most)
    except (IndexError, ValueError):
        return inf, inf
    step = pipeline.fill * (sum(seconds) + sends) + (pipeline.microbatches - pipeline.fill) * max(seconds)
    nbytes = max(h + w for h, w in zip(held, working, strict=True))
    return (step, nbytes) if np.isfinite(step) else (inf, inf)


def _unit_rows(problem: Problem, assignment: Assignment, k: int) -> list[Array]:
    unit = problem.units[k]
    kind = problem.classes[unit.kind]
    rows = [v.costs[s] for v, s in zip(kind.variables, assignment.units[k], strict=True)]
    every = [*assignment.units[k], *(assignment.shared[b] for b in unit.borders)]
    return rows + [f.table[tuple(r[every[v]] for v, r in zip(f.over, f.reads, strict=True))] for f in kind.factors]
