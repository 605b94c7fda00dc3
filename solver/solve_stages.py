"""One candidate with stages: the fastest cuts and assignment within the memory limit, with a proven bound.

1. At prices of the resources every run of units has a least cost (`segments`), from which follow a lower bound over
   all cuts, and the cuts that reach it (`stage_bound`).
2. Where bytes bind, prices are found for the ranks of those cuts by cutting planes (Kelley), for the rank that holds
   the bound down most first; prices of one stage serve the others.
3. Along the cuts a whole assignment is found at once, each unit at the prices of its stage (`placed`). Between two
   prices of a rank, as many of its units go by the leaner ones as its memory asks for.
4. An integer program moves cuts by a unit and mixes patterns of the prices seen (`stage_master`).
5. Where columns are few, an integer program over every state finds the optimum, cut by cut (`stage_ilp`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb, inf

import numpy as np

from autopar.solver.answer import Answer
from autopar.solver.backend import NODES
from autopar.solver.evaluate import Evaluation
from autopar.solver.ilp import columns_of
from autopar.solver.placed import cheapest, placed_as, runs
from autopar.solver.problem import Problem
from autopar.solver.segments import Priced
from autopar.solver.stage_bound import Prices, cut_bounds, row_of
from autopar.solver.stage_bytes import caps, least_bytes, some_in_flight
from autopar.solver.stage_ilp import solve_cut
from autopar.solver.stage_master import best_about
from autopar.solver.staged import Rank, Staged
from autopar.solver.stages import peak_bytes, step_seconds

ROUNDS = 4
"""Cuts for which prices are sought."""
VISITS, GLANCES = 48, 16
"""Prices at most: for a small gap, and where a glance is enough."""
MIXES = 3
"""Programs of mixing at most."""
FEW = 24
"""Stages up to which there are so many programs: up to twice as many there is one, beyond none, as it takes long."""
MOST_CUTS = 200
"""Cuts up to which the optimum of each is sought, where columns are few."""
SHIFTS = 24
"""Cuts that are tried until every stage fits."""
LEAN = 1e3
"""Times the seconds of a stage: what the limit is worth at the leanest prices."""


def solve_stages(
    problem: Problem, target_gap: float, cutoff: float, evaluation: Evaluation, ilp_columns: int = 0
) -> Answer:
    """As `solve.solve`, of a problem with a pipeline."""
    pipeline = problem.pipeline
    assert pipeline is not None
    if len(problem.units) < pipeline.stages:
        return Answer("infeasible", inf, inf, None, (), inf, least_bound=inf, exact=evaluation.exact)
    row = row_of(evaluation)
    staged = Staged(row, target_gap, cutoff)
    staged.visit(Prices(1.0, 0.0))
    staged.bound()
    for _ in range(ROUNDS):
        if staged.cut.bound == inf or staged.cut.bound >= cutoff or (not staged.cut.cuts and pipeline.stages > 1):
            break
        _find_prices(staged, VISITS if ilp_columns else GLANCES)
        cuts = staged.cut.cuts
        _assign(staged, cuts)
        if staged.best is None and least_bytes(staged) > problem.memory_limit:
            break
        staged.bound()
        if staged.enough(target_gap) or staged.cut.cuts == cuts:
            break
    known = staged.cut.bound
    _mix(staged, 0.2 * target_gap)
    if columns_of(problem) <= ilp_columns:
        _polish(staged)
    answer = _answer(staged)
    known = min(known, answer.objective) if staged.best is not None else known
    return replace(answer, multipliers_bound=known, deterministic=not staged.timed_out)


def _find_prices(staged: Staged, most: int) -> None:
    """Better prices for the ranks at the cuts of the bound."""
    ranks = staged.ranks()
    if not all(r.has_room() for r in ranks):
        _find_lean(staged, ranks)
        _make_room(staged)
        ranks = staged.ranks()
    done: set[int] = set()
    while len(staged.visited) < most and len(done) < len(ranks):
        slack = [0.0 if i in done else r.slack() for i, r in enumerate(ranks)]
        bounds = [r.bound for r in ranks]
        tolerance = 0.1 * staged.target_gap * max(staged.cut.bound, 1e-12)
        if staged.share * sum(slack) + (1 - staged.share) * max(slack) <= tolerance:
            return
        worst = max(range(len(ranks)), key=lambda i: (min(slack[i], 1e30), bounds[i], -i))
        ceiling, prices = ranks[worst].highest()
        if not prices or ceiling - bounds[worst] <= 0.5 * tolerance:
            done.add(worst)
            continue
        before = len(staged.visited)
        ranks[worst].take(prices)
        if len(staged.visited) == before:
            done.add(worst)


def _find_lean(staged: Staged, ranks: list[Rank]) -> None:
    """Prices at which bytes count most, until every rank fits: without, then with what is made again and a cap on
    transients."""
    scale = max((r.point(0)[1] for r in ranks if np.isfinite(r.point(0)[1])), default=1.0) or 1.0
    per_byte, again = LEAN * scale / staged.limit, 0.0
    for high in (inf, *caps(staged.row, staged.limit)):
        for n in some_in_flight(staged):
            number = staged.visit(Prices(1.0, per_byte, high=high, saved=per_byte * n, again=again))
            staged.lean += [number] if number not in staged.lean else []
        if all(r.has_room() for r in ranks):
            return
        again = per_byte * staged.pipeline.ranks / staged.row.units


def _make_room(staged: Staged) -> None:
    """Other cuts where a rank does not fit at any prices: neither its fullest stage nor any that has all units of that
    is tried again."""
    starts, lengths = np.indices(staged.unfit.shape[1:])
    for _ in range(SHIFTS):
        full = [r for r in staged.ranks() if not r.has_room()]
        if not full:
            return
        for r in full:
            s, (i, j) = r.fullest()
            staged.unfit[s] |= (starts <= i) & (starts + lengths + 1 >= min(j, i + staged.row.longest))
        cuts = staged.fitting()
        if not cuts:
            return
        staged.cut = replace(staged.cut, cuts=cuts)


def _assign(staged: Staged, cuts: tuple[int, ...]) -> None:
    """The best assignment along these cuts that a halving over every rank's ladder of prices finds."""
    ranks = staged.ranks()
    ladders = [r.ladder() for r in ranks]
    if not all(ladders):
        return
    sizes = [sum(j - i for i, j in r.runs) for r in ranks]
    lean = [(len(ladder) - 1) * n for ladder, n in zip(ladders, sizes, strict=True)]
    fast = [0] * len(ranks)
    at = list(fast)
    while True:
        placed = cheapest(staged.row, cuts, _priced(staged, ranks, ladders, at))
        staged.add(placed)
        for r, nbytes in enumerate(placed.ranks):
            if nbytes <= staged.limit:
                lean[r] = at[r]
            else:
                fast[r] = min(at[r] + 1, lean[r])
        if all(f >= b for f, b in zip(fast, lean, strict=True)):
            if at == lean:
                return
            at = list(lean)
        else:
            at = [(f + b) // 2 for f, b in zip(fast, lean, strict=True)]


def _priced(staged: Staged, ranks: list[Rank], ladders: list[list[int]], at: list[int]) -> list[Priced]:
    """The prices of every unit: the first units of a rank are one step further down its ladder."""
    found: list[Priced | None] = [None] * staged.row.units
    for r, ladder, x in zip(ranks, ladders, at, strict=True):
        mine = [k for i, j in r.runs for k in range(i, j)]
        for place, k in enumerate(mine):
            level = x // len(mine) + (place < x % len(mine))
            found[k] = staged.visited[ladder[level]][1]
    return [p for p in found if p is not None]


def _mix(staged: Staged, gap: float) -> None:
    """Better cuts and patterns about the best assignment, while there are any."""
    stages = staged.pipeline.stages
    for _ in range(MIXES if stages <= FEW else stages <= 2 * FEW):
        home = staged.best
        if home is None or staged.enough(staged.target_gap):
            return
        prices = [staged.prices(s, i, j).weights() for s, (i, j) in enumerate(runs(staged.row, home.cuts))]
        priced = [p for _, p in staged.visited]
        for limit in (staged.limit, staged.limit * (1 - 1e-6)):
            found, timed_out = best_about(staged.row, home, priced, prices, limit, gap)
            staged.timed_out |= timed_out
            if found is None:
                return
            staged.add(found)
            if found.peak <= staged.limit:
                break
        if staged.best is home:
            return


def _polish(staged: Staged) -> None:
    """The best assignment of each cut that may still be better, of the lowest bound first; the bound is then that of
    those left."""
    row, pipeline = staged.row, staged.pipeline
    if comb(row.units - 1, pipeline.stages - 1) > MOST_CUTS or staged.enough(staged.target_gap):
        return
    every = list(combinations(range(1, row.units), pipeline.stages - 1))
    bounds = cut_bounds(row, pipeline, staged.stages, np.array(every, int).reshape(len(every), -1))
    order = sorted(range(len(every)), key=lambda i: (bounds[i], i))
    proven: list[float] = []
    scale = max(staged.seconds if staged.seconds < inf else bounds[order[0]], 1e-12)
    for i in order:
        wanted = min(staged.seconds, staged.cutoff) * (1 - staged.target_gap)
        if bounds[i] >= wanted:
            proven.append(float(bounds[i]))
            break
        answer = solve_cut(
            row.problem, every[i], gap=0.5 * staged.target_gap, nodes=NODES, cutoff=staged.seconds, scale=scale
        )
        staged.timed_out |= answer.timed_out
        if answer.assignment is not None:
            staged.add(placed_as(row, answer.assignment))
        proven.append(max(float(bounds[i]), min(answer.bound, staged.seconds)))
    staged.cut = replace(staged.cut, bound=max(staged.cut.bound, min([*proven, staged.seconds])))


def _answer(staged: Staged) -> Answer:
    problem, bound = staged.row.problem, staged.cut.bound
    multipliers = staged.multipliers
    stats = {"evaluations": staged.row.evaluation.evaluations, "visited": len(staged.visited)}
    exact = staged.row.evaluation.exact
    if staged.best is not None:
        found = staged.best.assignment
        assert peak_bytes(problem, found) <= problem.memory_limit, "an assignment that does not fit was taken"
        objective = step_seconds(problem, found)
        bound = min(bound, objective)
        return Answer("solved", objective, bound, found, multipliers, bound, exact=exact, stats=stats)
    if staged.cutoff <= bound < inf:
        return Answer("cutoff", inf, bound, None, multipliers, bound, exact=exact, stats=stats)
    least_bound = least_bytes(staged)
    if staged.best is not None:
        return _answer(staged)
    least = staged.leanest
    return Answer(
        "infeasible",
        inf,
        inf if least_bound > problem.memory_limit else bound,
        None,
        multipliers,
        bound,
        least_bytes=inf if least is None else peak_bytes(problem, least.assignment),
        least_bound=least_bound,
        least_assignment=None if least is None else least.assignment,
        exact=exact,
        stats=stats,
    )
