"""`solve_plan`: the fastest plan that fits, over all meshes, microbatch counts and per-op layouts, with its proof.

Every (mesh, microbatches) is a `Problem` (`poser`, `pose`); `solver.search` takes them best bound first; the winning
assignment is read back onto the graph (`readback`), and what the plan then takes is added up anew (`predict`). Bytes
that only the finished program has (inputs, masks, buffers) are taken off the limit and the search is repeated where
they do not fit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any, NoReturn

from autopar.build import Prepared, prepare
from autopar.capture import Capture
from autopar.choosing.at_work import at_work, divided
from autopar.choosing.bounds import floor_of
from autopar.choosing.finalists import judged, uniform
from autopar.choosing.fitting import Fit, Fitting
from autopar.choosing.pose import Posed
from autopar.choosing.poser import Poser
from autopar.choosing.prove import Chosen, proof, saved_search
from autopar.choosing.readback import plan_from
from autopar.cluster import Cluster
from autopar.errors import AutoparError, NothingFits
from autopar.pins import Pins, resolve
from autopar.plan import Alternative, Plan
from autopar.predict import predict
from autopar.solver import lagrangian
from autopar.solver.evaluate import Evaluation
from autopar.solver.file import Saved
from autopar.solver.meshes import Mesh, meshes, microbatch_counts
from autopar.solver.problem import Assignment, Problem, peak, totals
from autopar.solver.search import Candidate, Found, Quick, search
from autopar.solver.solve import ILP_COLUMNS, Answer, solve
from autopar.wires import wire_of

TARGET_GAP = 0.005
ALTERNATIVES = 3
REPEATED = (
    "ranks that all do the same would be faster, of use to nobody: the bound is theirs, the plan shares the work out"
)
GLANCE = 0.02  # the gap at which a next-best plan is good enough
MORE_NODES = (2, 4, 8, 16)


@dataclass(frozen=True, eq=False)
class Candidates:
    """What is tried: meshes of neutral axes (size, stride) and numbers of microbatches."""

    meshes: tuple[tuple[tuple[int, int], ...], ...]
    microbatches: tuple[int, ...]

    def __iter__(self) -> Any:
        return (Candidate(mesh, count) for mesh in self.meshes for count in self.microbatches)


@dataclass(eq=False)
class Solver:
    """The search for one capture, cluster and pins. Keeps what was posed, so that it may be asked again with less
    memory. ``target_gap``: where the search stops, relative."""

    captured: Capture
    cluster: Cluster
    pins: Pins = field(default_factory=Pins)
    target_gap: float = TARGET_GAP
    prepared: Prepared | None = None

    def __post_init__(self) -> None:
        pinned = self.pins.axes
        asked = self.pins if pinned else replace(self.pins, dp=None, tp=None)
        resolved = resolve(asked, self.cluster.ranks if pinned else 1, self.captured.batch)  # refuses what it must
        self.pinned = resolved if pinned else None
        self.prepared = self.prepared or prepare(self.captured, 1)
        self.poser = Poser(self.prepared, self.cluster, self.pins.zero, self.pinned, self.pins.recompute)
        self.seconds: dict[str, float] = {}
        self.repeatable = True
        self.searched: list[tuple[float, Found[Posed]]] = []
        self._planned: list[tuple[Plan, Posed, Assignment]] = []
        self._plans: dict[tuple[Any, Assignment], Plan] = {}
        self._posed: dict[Candidate, Posed] = {}
        self._evaluations: dict[Posed, Evaluation] = {}
        self._answers: dict[Posed, Answer] = {}
        self._floor = floor_of(self.poser.body(1), self.cluster, self.poser.policies)

    @property
    def candidates(self) -> Candidates:
        """All that is tried."""
        count, rows = self.pins.microbatches, self.captured.batch
        if self.pinned is not None:
            sizes = [size for _, size in self.pinned.axes()]
            tried: tuple[Mesh, ...] = (tuple((n, prod(sizes[i + 1 :])) for i, n in enumerate(sizes)),)
            rows //= self.pinned.dp
        else:
            spans = tuple(t.spans for t in self.cluster.tiers if t.spans is not None)
            tried = meshes(self.cluster.ranks, spans, wire=lambda size, stride: wire_of(self.cluster, size, stride))
        return Candidates(tried, (count,) if count else tuple(microbatch_counts(rows)))

    def search(self, limit: float, counts: Sequence[int] = (), *, polish: bool = True) -> Found[Posed]:
        """The best plan within ``limit`` bytes a rank. ``counts``: of microbatches, if not all; ``polish``: to the
        target gap, with integer programs where one is left, or else a glance."""
        candidates, gap = self.candidates, self.target_gap if polish else max(GLANCE, self.target_gap)
        found = search(
            replace(candidates, microbatches=tuple(counts)) if counts else candidates,
            quick_bound=lambda c: self._quick(c, limit),
            pose=lambda c: self._pose(c, limit),
            solve=lambda posed, cutoff: self._solve(posed, cutoff, gap / 2, polish),
            limit=limit,
            target_gap=gap,
            lower_bound=lambda posed, m: lagrangian.one_bound(self._evaluation(posed), m),
            free_bound=lambda posed, a: lagrangian.free_bound(self._evaluation(posed), a.multipliers),
        )
        if not counts:
            self.searched = [pair for pair in self.searched if pair[0] != limit] + [(limit, found)]
        return found

    def one(self, candidate: Candidate, limit: float) -> tuple[Posed, Answer]:
        """One candidate solved by itself, within ``limit`` bytes a rank. Its microbatches must be legal."""
        times = self.poser.times(candidate.microbatches)
        assert not isinstance(times, str), times
        posed = self._pose(candidate, limit)
        return posed, self._solve(posed, inf, self.target_gap / 2, True)

    def glance(self, candidate: Candidate, found: Found[Posed]) -> tuple[Posed, Answer]:
        """A good plan of one candidate within the memory that a search had, not the best."""
        assert found.best is not None and found.best.problem is not None
        posed = self._pose(candidate, found.best.problem.problem.memory_limit)
        with self.timed("next"):
            return posed, solve(posed.problem, target_gap=GLANCE, ilp_columns=0, evaluation=self._evaluation(posed))

    def uniform(self, posed: Posed, cutoff: float, limits: Sequence[float]) -> Iterator[Assignment]:
        """Assignments within each of some limits that may take less than ``cutoff`` seconds, each with one treatment of
        parameters."""
        for problem, limit in itertools.product(uniform(posed), dict.fromkeys(limits)):
            with self.timed("finalists"):
                answer = solve(replace(problem, memory_limit=limit), target_gap=GLANCE, cutoff=cutoff, ilp_columns=0)
            self.repeatable &= answer.deterministic
            if answer.assignment is not None:
                yield answer.assignment

    def working(self, candidate: Candidate, limit: float) -> Plan | None:
        """A good plan of a candidate whose ranks share out the work; None where there is none within ``limit``."""
        if isinstance(self.poser.times(candidate.microbatches), str):
            return None
        posed = self._pose(candidate, limit)
        with self.timed("finalists"):
            answer = solve(divided(posed), target_gap=GLANCE, ilp_columns=0)
        self.repeatable &= answer.deterministic
        return None if answer.assignment is None else self.plan(posed, answer.assignment)

    def plan(self, posed: Posed, assignment: Assignment, *, predicted: bool = True) -> Plan:
        """The plan that an assignment amounts to, with predictions."""
        known = self._plans.get((posed.mesh, assignment)) if predicted else None
        if known is not None:
            return known
        count = 1 if posed.mesh.time is None else posed.mesh.axes[posed.mesh.time].size
        body, times = self.poser.body(count), self.poser.times(count)
        assert not isinstance(times, str)
        with self.timed("read_back"):
            plan = plan_from(body, posed, assignment, times, self.cluster)
        if not predicted:
            return plan
        with self.timed("predict"):
            plan = replace(predict(plan, body.prepared, self.cluster), pins=self.pins.given())
        self._planned.append((plan, posed, assignment))
        self._plans[posed.mesh, assignment] = plan
        return plan

    def counted(self, plan: Plan) -> float:
        """Bytes of a plan with predictions as its problem counts them."""
        chosen = self.chosen(plan)
        return float(peak(totals(chosen.problem, chosen.assignment)))

    def beside(self, plan: Plan) -> float:
        """Bytes that the program of a plan with predictions has and its problem does not count; less than none where
        it has fewer."""
        return (plan.predicted.peak_mem_gib or 0.0) * 2**30 - self.counted(plan)

    def fastest(self) -> float:
        """Seconds that no plan can beat, whatever memory there is."""
        return self.least_quick((), inf)

    def least_quick(self, counts: Sequence[int], limit: float) -> float:
        """Seconds that no plan within ``limit`` bytes can beat, by cheap bounds: infinite where they say there is none.
        ``counts``: of microbatches, if not all."""
        tried = [self._quick(Candidate((), n), limit) for n in counts or self.candidates.microbatches]
        return min((quick.seconds for quick in tried if quick.illegal is None and quick.bytes <= limit), default=inf)

    def made_of(self, plan: Plan) -> tuple[Posed, Assignment]:
        """What a plan with predictions was made of."""
        return next((p, a) for made, p, a in self._planned if made is plan)

    def chosen(self, plan: Plan) -> Chosen:
        """The same with its candidate."""
        posed, assignment = self.made_of(plan)
        candidate = next(c for c, p in self._posed.items() if p.mesh is posed.mesh)
        return Chosen(candidate, posed.problem, assignment)

    def bounding(self, chosen: Chosen) -> tuple[float, Found[Posed]]:
        """The search over all candidates whose bounds are of the chosen plan, and the bytes that it was given: those of
        a rank or, where the plan's problem says that it needs more, those."""
        needed = max(float(self.cluster.limit), float(peak(totals(chosen.problem, chosen.assignment))))
        holding = [pair for pair in self.searched if pair[0] >= needed and pair[1].best is not None]
        if not holding:
            holding = [(needed, self.search(needed, polish=False))]
        return min(holding, key=lambda pair: pair[0])

    # -- what the search calls -------------------------------------------------------------------------------------

    def _quick(self, candidate: Candidate, limit: float) -> Quick:
        with self.timed("time"):
            times = self.poser.times(candidate.microbatches)
        if isinstance(times, str):
            return Quick(inf, 0.0, times)
        return self._floor.quick(self.cluster.ranks, candidate.microbatches, limit)

    def _pose(self, candidate: Candidate, limit: float) -> Posed:
        if candidate not in self._posed:
            with self.timed("pose"):
                self._posed[candidate] = self.poser.pose(candidate.mesh, candidate.microbatches)
        posed = self._posed[candidate]
        if posed.problem.memory_limit != limit:
            known = self._evaluations.pop(posed, None)
            self._posed[candidate] = posed = replace(posed, problem=replace(posed.problem, memory_limit=limit))
            if known is not None:
                self._evaluations[posed] = known.of_limit(posed.problem)
        return posed

    def _solve(self, posed: Posed, cutoff: float, gap: float, polish: bool) -> Answer:
        known = self._answers.get(posed)
        if known is not None and _is_enough(known, posed.problem, gap, cutoff):
            return known
        evaluation, columns = self._evaluation(posed), ILP_COLUMNS if polish else 0
        with self.timed("solve"):
            self._answers[posed] = solve(
                posed.problem,
                target_gap=gap,
                cutoff=cutoff,
                ilp_columns=columns,
                evaluation=evaluation,
            )
        return self._answers[posed]

    def _evaluation(self, posed: Posed) -> Evaluation:
        if posed not in self._evaluations:
            with self.timed("eliminate"):
                self._evaluations[posed] = Evaluation(posed.problem)
        return self._evaluations[posed]

    def timed(self, what: str) -> Any:
        return _Clock(self.seconds, what)


def _is_enough(answer: Answer, problem: Problem, gap: float, cutoff: float) -> bool:
    """Whether solving a problem again would say no more."""
    if answer.assignment is not None:
        return (answer.gap or 0.0) <= gap or answer.bound >= cutoff
    return answer.bound >= cutoff or answer.least_bound > problem.memory_limit


@dataclass
class _Clock:
    """Adds the seconds of a block to an entry."""

    into: dict[str, float]
    what: str
    started: float = 0.0

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.into[self.what] = self.into.get(self.what, 0.0) + time.perf_counter() - self.started


@dataclass(frozen=True, eq=False)
class Solved:
    """A plan, the prepared graph that it is for, and the search that found it, as a file holds it. ``seconds``: by
    phase."""

    plan: Plan
    prepared: Prepared
    search: Saved
    seconds: Mapping[str, float]


def solve_plan(captured: Capture, cluster: Cluster, pins: Pins | None = None) -> Plan:
    """The fastest plan for a captured model in train mode, its predictions, proof and next-best plans.

    ``pins``: zero, microbatches and recompute may be fixed. Raises NothingFits, with the plan of least memory, where no
    plan fits a rank; AutoparError for pins that cannot be kept.
    """
    return solved(captured, cluster, pins).plan


def solved(
    captured: Capture,
    cluster: Cluster,
    pins: Pins | None = None,
    *,
    target_gap: float = TARGET_GAP,
    prepared: Prepared | None = None,
    nearest: bool = True,
) -> Solved:
    """`solve_plan` with all that led to the plan. ``prepared``: the capture prepared for one microbatch; ``nearest``:
    whether changes that fit are looked for where nothing does."""
    solver = Solver(captured, cluster, pins or Pins(), target_gap, prepared)
    fit = _that_fits(solver, nearest)
    fastest = judged(solver, fit)
    plan = at_work(solver, fastest, (fit.given, float(cluster.limit)))
    chosen = solver.chosen(plan)
    given, first = solver.bounding(chosen)
    saved = saved_search(first, given, chosen)
    repeatable = solver.repeatable and all(f.deterministic for _, f in solver.searched)
    pinned = solver.pins.text() if solver.pins.named() else ""
    made = proof(saved, first, float(cluster.limit), fit.given, pinned)
    if plan is not fastest:
        made = replace(made, scope={**made.scope, "repeated": REPEATED})
    plan = replace(
        plan,
        proof=made,
        alternatives=_next(solver, fit.found, plan),
        deterministic=repeatable,
    )
    return Solved(plan, solver.poser.body(plan.microbatches).prepared, saved, dict(solver.seconds))


def _that_fits(solver: Solver, nearest: bool) -> Fit:
    """The fastest plan that fits. Raises NothingFits where there is none: see `_nothing_fits`."""
    fitting = Fitting(solver)
    fit = fitting.run()
    if fit is None:
        _nothing_fits(solver, solver.searched[0][1], fitting.leanest, nearest)
    return fit


# -- other plans -----------------------------------------------------------------------------------------------------


def _next(solver: Solver, found: Found[Posed], plan: Plan) -> tuple[Alternative, ...]:
    """The next-best plans of other meshes or microbatch counts, priced as problems: those that the search solved, and
    some that it could leave out."""
    made: list[Alternative] = []
    if solver.pinned is not None:
        return ()
    seen = {_change(plan)}
    for posed, answer in _others(solver, found):
        if len(made) == ALTERNATIVES or answer.assignment is None:
            continue
        other = solver.plan(posed, answer.assignment, predicted=False)
        if _change(other) not in seen:
            seen.add(_change(other))
            peak_gib = float(peak(totals(posed.problem, answer.assignment))) / 2**30
            made.append(Alternative("next", _change(other), _pins(other), answer.objective, peak_gib))
    return tuple(sorted(made, key=lambda a: a.step_time_s or 0.0))


def _others(solver: Solver, found: Found[Posed]) -> Iterator[tuple[Posed, Answer]]:
    solved_too = found.alternatives[:ALTERNATIVES]
    for outcome in solved_too:
        assert outcome.problem is not None
        yield outcome.problem, outcome.answer
    left_out = [o for o in found.outcomes if o.status in ("roofline", "dominated", "multipliers") and o.bound < inf]
    left_out.sort(key=lambda o: (o.bound, o.candidate.microbatches, len(o.candidate.mesh), o.candidate.mesh))
    for outcome in left_out[: max(0, ALTERNATIVES - len(solved_too))]:
        yield solver.glance(outcome.candidate, found)


def _alternative(kind: Any, plan: Plan, change: str, why: str = "") -> Alternative:
    found = plan.predicted
    return Alternative(
        kind, change, _pins(plan), found.step_time_s, found.peak_mem_gib, fits=plan.fits is not False, why=why
    )


def _change(plan: Plan) -> str:
    words = [f"{name}={size}" for name, size in plan.mesh.items()]
    words += [f"zero={plan.zero}", f"microbatches={plan.microbatches}"]
    words += [f"recompute={plan.recompute}"] * (plan.recompute != "none")
    return " ".join(words)


def _pins(plan: Plan) -> dict[str, str]:
    """How to ask for such a plan."""
    return {"microbatches": str(plan.microbatches)}


def _nothing_fits(solver: Solver, found: Found[Posed], plan: Plan | None, nearest: bool) -> NoReturn:
    """Raises NothingFits: the leanest plan, and the changes that make one fit. AutoparError where nothing is legal."""
    illegal = [o.quick.illegal or o.why for o in found.outcomes if o.status == "illegal"]
    if len(illegal) == len(found.outcomes):
        raise AutoparError(f"pins {solver.pins.text()}: {illegal[0].rstrip('.') if illegal else 'leave no plan'}.")
    if plan is None:
        raise NothingFits(
            f"no plan fits: {solver.captured.model_name} needs more than the {solver.cluster.limit / 2**30:.2f} GiB of "
            f"a rank of {solver.cluster.name} whatever the layouts. Use more ranks or a smaller batch.",
            None,
        )
    changes = tuple(_nearest(solver)) if nearest else ()
    raise NothingFits(_message(plan, changes), replace(plan, alternatives=changes))


def _nearest(solver: Solver) -> Sequence[Alternative]:
    """Changes that make a plan fit, each found by planning with it: pins left open, and more nodes."""
    found = []
    for key in ("zero", "microbatches", "recompute"):
        if getattr(solver.pins, key) is not None:
            other = _fitting(Solver(solver.captured, solver.cluster, replace(solver.pins, **{key: None})))  # type: ignore[arg-type]
            if other is not None:
                value = getattr(other, key)
                change = f"{key} not pinned" if value == "mixed" else f"{key}={value}"
                found.append(_alternative("nearest", other, change, f"{key} not pinned"))
    for factor in MORE_NODES:
        cluster = replace(solver.cluster, nodes=solver.cluster.nodes * factor)
        other = _fitting(Solver(solver.captured, cluster, solver.pins, 0.05, solver.prepared))
        if other is not None:
            found.append(_alternative("nearest", other, f"nodes={cluster.nodes}", f"{factor} times the ranks"))
            break
    return found


def _fitting(solver: Solver) -> Plan | None:
    """A plan that fits, or None."""
    try:
        return _that_fits(solver, nearest=False).plan
    except AutoparError:
        return None


def _message(plan: Plan, nearest: Sequence[Alternative]) -> str:
    from autopar.explain.memory import owners
    from autopar.explain.quantities import bytes_text

    limit = plan.predicted.parts.get("memory_limit_bytes", 0.0)
    needs = (plan.predicted.peak_mem_gib or 0.0) * 2**30
    named = ", ".join(f"{name} {bytes_text(size)}" for name, _, size in owners(plan)[:2])
    way = f"Nearest: {'; '.join(a.change for a in nearest)}" if nearest else "Use more nodes, or a smaller batch"
    return (
        f"no plan fits: the leanest ({plan.one_line()}) needs {bytes_text(needs)} of {bytes_text(limit)} a rank, "
        f"{bytes_text(needs - limit)} too many ({named}). {way}."
    )
