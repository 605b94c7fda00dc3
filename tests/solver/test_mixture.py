"""Counts of equal units against a program that tells every unit apart, and runs against chains made on purpose."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from autopar.solver import mixture
from autopar.solver.evaluate import Evaluation, Pattern
from autopar.solver.mixture import best_mix
from autopar.solver.problem import Class, Problem, Unit, Variable, peak, seconds
from autopar.solver.runs import Group, Run, runs_of

STATES = 3


def chain(seed: int) -> Problem:
    """A first unit, layers of one to three units, a last one; sometimes a second link, something that all read, and
    something that each touches alone. Changes of state are dear or cheap."""
    rng = np.random.default_rng(seed)
    period, layers = int(rng.integers(1, 4)), int(rng.integers(3, 5))
    links, held, alone = int(rng.integers(1, 3)), rng.random() < 0.3, rng.random() < 0.3
    states = STATES if links == 1 else 2
    costs = {k: _costs(rng, states) * 0.2 for k in range(period)}
    shared, units, border = list[Variable](), list[Unit](), list[int]()

    def made(what: np.ndarray) -> int:
        shared.append(Variable(f"x{len(shared)}", "tensor", tuple(map(str, range(len(what)))), what))
        return len(shared) - 1

    every = made(_costs(rng, 2)) if held else -1
    border = [made(costs[0]) for _ in range(links)]
    units.append(Unit(period, tuple(border)))
    own = _costs(rng, 2)
    for i in range(period * layers):
        after = [made(costs[(i + 1) % period]) for _ in range(links)]
        units.append(
            Unit(i % period, (*border, *after[::-1], *([every] if held else ()), *([made(own)] if alone else ())))
        )
        border = after
    units.append(Unit(period + 1, tuple(border)))
    classes = []
    for kind in range(period + 2):
        first = next(u for u in units if u.kind == kind)
        classes.append(Class(f"c{kind}", _own(rng), (), tuple(f"b{i}" for i in range(len(first.borders)))))
    return Problem(f"chain {seed}", tuple(shared), tuple(classes), tuple(units), 1.0)


def _costs(rng: np.random.Generator, count: int) -> np.ndarray:
    costs = rng.uniform(0, 4, (count, 7)).round(2)
    costs[:, -1] = 0.0
    return costs


def _own(rng: np.random.Generator) -> tuple[Variable, ...]:
    return (Variable("v", "op", ("a", "b"), _costs(rng, 2)),)


def patterns_of(problem: Problem, run: Run, seed: int) -> list[list[Pattern]]:
    """For each group a few patterns between all border states; to stay in a state is cheaper."""
    found = []
    for g in run.groups:
        rng = np.random.default_rng((seed, g.kind))
        sizes = [len(problem.shared[b].states) for b in problem.units[g.units[0]].borders]
        patterns = []
        for borders in product(*map(range, sizes)):
            change = 0.0 if len(set(borders)) <= 1 else float(rng.choice([0.0, 5.0]))
            for state in range(2 if len(sizes) < 3 else 1):
                total = np.array([*(rng.uniform(0, 9, 3) + change), *rng.uniform(0, 9, 4)]).round(2)
                patterns.append(Pattern(g.kind, (state,), borders, total))
        found.append(patterns)
    return found


def alone(runs: list[Run]) -> list[Run]:
    """The same units, none of them in a run."""
    groups = [(u, g) for run in runs for g in run.groups for u in g.units]
    places = {u: tuple(sorted((*g.ins, *g.outs, *g.alone, *g.held))) for u, g in groups}
    return [Run((Group(g.kind, (u,), held=places[u]),)) for u, g in sorted(groups, key=lambda pair: pair[0])]


def test_counts_are_as_good_as_units(monkeypatch: pytest.MonkeyPatch) -> None:
    circles = list[int]()
    connected = mixture.connected

    def seen(c: mixture._Columns, circle: mixture._Circle, *, left_out: bool) -> None:
        circles.append(circle.run)
        connected(c, circle, left_out=left_out)

    monkeypatch.setattr(mixture, "connected", seen)
    for seed in range(14):
        problem = chain(seed)
        runs = runs_of(problem)
        assert max(run.count for run in runs) >= 2
        evaluation = Evaluation(problem)
        by_group = [patterns_of(problem, run, seed) for run in runs]
        of_kind = {g.kind: ps for run, of in zip(runs, by_group) for g, ps in zip(run.groups, of)}
        singles = alone(runs)
        for limit in (60.0, 90.0, 1e4):
            counted, _ = best_mix(evaluation, runs, [ps for of in by_group for ps in of], limit, 0.0)
            told, _ = best_mix(evaluation, singles, [of_kind[r.groups[0].kind] for r in singles], limit, 0.0)
            assert (counted is None) == (told is None), (seed, limit)
            if counted is None or told is None:
                continue
            assert float(peak(counted.total)) <= limit * (1 + 1e-6)
            assert float(seconds(counted.total)) == pytest.approx(float(seconds(told.total)), rel=1e-5), (seed, limit)
    assert len(circles) > 5


def test_a_circle_is_reached_or_left_out() -> None:
    """Layers that stay in one state cost nothing in the second, but the way there and back is dear: the counts alone
    would put one layer in the first and the others in the second."""
    free = Variable("x", "tensor", ("a", "b"), np.zeros((2, 7)))
    layers = [Unit(0, (i, i + 1)) for i in range(6)]
    kinds = tuple(Class(name, (), (), borders) for name, borders in (("layer", ("in", "out")), ("end", ("x",))))
    problem = Problem("circle", (free,) * 7, kinds, (Unit(1, (0,)), *layers, Unit(1, (6,))), 1.0)
    evaluation, runs = Evaluation(problem), runs_of(problem)
    for way, best in ((1.0, 3.0), (10.0, 6.0)):
        costs = {(0, 0): 1.0, (1, 1): 0.0, (0, 1): way, (1, 0): way + 1.0}
        steps = [Pattern(0, (), borders, np.array([t, *[0.0] * 6])) for borders, t in costs.items()]
        ends = [Pattern(1, (), (0,), np.zeros(7))]
        found, _ = best_mix(evaluation, runs, [ends, steps, ends], 1.0, 0.0)
        assert found is not None and float(seconds(found.total)) == best


def test_what_breaks_a_run() -> None:
    free = Variable("x", "tensor", ("a", "b"), np.zeros((2, 7)))
    dear = Variable("x", "tensor", ("a", "b"), np.ones((2, 7)))

    def counts(shared: list[Variable], units: list[Unit]) -> list[int]:
        return [run.count for run in runs_of(Problem("toy", tuple(shared), (), tuple(units), 1.0))]

    layers = [Unit(0, (i, i + 1)) for i in range(6)]
    ends = Unit(1, (0,)), Unit(1, (6,))
    whole = [ends[0], *layers, ends[1]]
    assert counts([free] * 7, whole) == [1, 6, 1]
    assert counts([*[free] * 3, dear, *[free] * 3], whole) == [1, 3, 1, 2, 1]  # the fourth reads something dear
    skip = [*layers[:5], Unit(0, (5, 1))]  # one reads what another has made before
    assert max(counts([free] * 7, [ends[0], *skip])) < 6
    read = [Unit(0, (i, i + 1, 7)) for i in range(6)]  # all read one more: still equal
    assert counts([free] * 8, [ends[0], *read, ends[1]]) == [1, 6, 1]
