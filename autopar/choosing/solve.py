"""`solve_plan`: the fastest plan that fits, over all meshes, microbatch counts and per-op layouts, with its proof.

Every (mesh, microbatches) is a `Problem` (`poser`, `pose`); `solver.search` takes them best bound first; the winning
assignment is read back onto the graph (`readback`), and what the plan then takes is added up anew (`predict`). Bytes
that only the finished program has (inputs, masks, buffers) are taken off the limit and the search is repeated where
they do not fit.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, prod
from typing import Any, NoReturn

from autopar.build import Prepared, prepare
from autopar.capture import Capture
from autopar.choosing.at_work import at_work, divided
from autopar.choosing.bounds import floor_of
from autopar.choosing.finalists import judged, recut, uniform
from autopar.choosing.fitting import MOST, Fit, Fitting
from autopar.choosing.in_stages import Candidates, NothingToTry, Tried, in_stages, pipeline_of, tried, waiting
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
from autopar.solver.effort import Effort
from autopar.solver.evaluate import Evaluation
from autopar.solver.file import Saved
from autopar.solver.lagrangian import Multipliers
from autopar.solver.meshes import Mesh, microbatch_counts
from autopar.solver.pipe_bound import fullest
from autopar.solver.pipes import NO_PIPE, Pipe
from autopar.solver.problem import Assignment, Problem
from autopar.solver.search import Candidate, Found, Quick, search
from autopar.solver.solve import ILP_COLUMNS, Answer, solve
from autopar.solver.stages import peak_bytes

ALTERNATIVES = 3
REPEATED = (
    "ranks that all do the same would be faster, of use to nobody: the bound is theirs, the plan shares the work out"
)
GLANCE = 0.02  # the gap at which a next-best plan is good enough
MORE_NODES = (2, 4, 8, 16)
POSED = 60
"""Problems of a capture at most, once a plan is known: what is left open then is in the gap."""
IN_VAIN = 200
"""Problems of a search at most that fit nothing: what is left open then might."""
READY = 60
"""Problems that are kept ready for evaluations."""


@dataclass(eq=False)
class Solver:
    """The search for one capture, cluster and pins. Keeps what was posed, so that it may be asked again with less
    memory. ``effort``: where and when the search stops."""

    captured: Capture
    cluster: Cluster
    pins: Pins = field(default_factory=Pins)
    effort: Effort = field(default_factory=Effort)
    prepared: Prepared | None = None

    def __post_init__(self) -> None:
        pinned = self.pins.axes
        if (self.pins.pp or 1) > 1 and not pinned:
            resolve(replace(self.pins, microbatches=None), self.cluster.ranks)  # refuses what it must
        asked = self.pins if pinned else replace(self.pins, dp=None, tp=None, pp=None, vp=None, schedule=None)
        resolved = resolve(asked, self.cluster.ranks if pinned else 1, self.captured.batch)
        self.pinned = resolved if pinned else None
        self.prepared = self.prepared or prepare(self.captured, 1)
        self.poser = Poser(self.prepared, self.cluster, self.pins.zero, self.pinned, self.pins.recompute)
        self.seconds: dict[str, float] = {}
        self.repeatable = True
        self.searched: list[tuple[float, Found[Posed]]] = []
        self._bounds: list[tuple[float, dict[Candidate, float]]] = []
        self._planned: list[tuple[Plan, Posed, Assignment]] = []
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._whole: dict[tuple[Mesh, int], Posed] = {}
        self._waiting: dict[tuple[Mesh, int, int], Posed] = {}
        self._posed: dict[Candidate, Posed] = {}
        self._evaluations: dict[Problem, Evaluation] = {}
        self._answers: dict[Posed, Answer] = {}
        self._ranks: dict[tuple[Any, int, Pipe, float], float] = {}
        self._frees: dict[tuple[Any, int, float], tuple[float, tuple[Multipliers, ...]]] = {}
        self._floor = floor_of(self.poser.body(1), self.cluster, self.poser.policies)

    @property
    def target_gap(self) -> float:
        """Where the search stops, relative."""
        return self.effort.gap

    @cached_property
    def candidates(self) -> Candidates:
        """All that is tried."""
        count, rows = self.pins.microbatches, self.captured.batch
        if self.pinned is not None:
            sizes = [size for _, size in self.pinned.axes()]
            only = tuple((n, prod(sizes[i + 1 :])) for i, n in enumerate(sizes))
            among: Tried = ((NO_PIPE, (only,)),)
            rows //= self.pinned.data_ranks
        else:
            among = tried(self.cluster, len(self.poser.body(1).units.units), self._floor.parted, self.pins)
        node = min((t.spans for t in self.cluster.tiers if t.spans is not None), default=0)
        found = Candidates(among, (count,) if count else tuple(microbatch_counts(rows)), node)
        if next(iter(found), None) is None:
            raise NothingToTry(f"pins {self.pins.text()}: leave no plan.")
        return found

    def search(
        self, limit: float, counts: Sequence[int] = (), *, polish: bool = True, known: float = inf
    ) -> Found[Posed]:
        """The best plan within ``limit`` bytes a rank. ``counts``: of microbatches, if not all; ``polish``: to the
        target gap, with integer programs where one is left, or else a glance; ``known``: seconds to be beaten."""
        candidates, gap = self.candidates, self.target_gap if polish else max(GLANCE, self.target_gap)
        found = search(
            replace(candidates, microbatches=tuple(counts)) if counts else candidates,
            quick_bound=lambda c: self._quick_again(c, limit) if counts else self._quick(c, limit),
            pose=lambda c: self._pose(c, limit),
            solve=lambda posed, cutoff: self._solve(posed, cutoff, gap / 2, polish),
            limit=limit,
            target_gap=gap,
            effort=self.effort,
            may_pose=lambda c: (c.mesh, c.microbatches) in self._whole or len(self._whole) < POSED,
            first=self.candidates.usual,
            known=known,
            in_vain=IN_VAIN,
            lower_bound=lambda posed, m: lagrangian.one_bound(self._evaluation(posed), m),
            free_bound=self._free,
            fullest_bound=self._fullest,
        )
        self._bounds.append((limit, {o.candidate: o.bound for o in found.outcomes if o.bound < inf}))
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
        key = posed.mesh, posed.problem.pipeline, assignment
        known = self._plans.get(key) if predicted else None
        if known is not None:
            return known
        with self.timed("read_back"):
            plan = self._read_back(posed, assignment)
            pipe = self._candidate(posed).pipe
            if pipe != NO_PIPE:
                plan = in_stages(plan, pipe, assignment.cuts, self.cluster)
        if not predicted:
            return plan
        with self.timed("predict"):
            plan = replace(predict(plan, self.prepared_for(plan), self.cluster), pins=self.pins.given())
        self._planned.append((plan, posed, assignment))
        self._plans[key] = plan
        return plan

    def counted(self, plan: Plan) -> float:
        """Bytes of a plan with predictions as its problem counts them."""
        chosen = self.chosen(plan)
        return peak_bytes(chosen.problem, chosen.assignment)

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

    def uncut(self, plan: Plan) -> Plan:
        """A plan with stages before it is cut."""
        whole = self._read_back(*self.made_of(plan))
        return replace(whole, mesh={"pp": plan.pp, **whole.mesh}, pins=plan.pins)

    def _read_back(self, posed: Posed, assignment: Assignment) -> Plan:
        """What an assignment amounts to, not cut, without predictions."""
        count = 1 if posed.mesh.time is None else posed.mesh.axes[posed.mesh.time].size
        times = self.poser.times(count)
        assert not isinstance(times, str)
        return plan_from(self.poser.body(count), posed, assignment, times, self.cluster)

    def prepared_for(self, plan: Plan) -> Prepared:
        """The graph that a plan is for."""
        return self.poser.body(plan.microbatches).prepared

    def also(self, plan: Plan, other: Plan) -> Plan:
        """Another plan made of what a plan was made of."""
        posed, assignment = self.made_of(plan)
        self._planned.append((other, posed, assignment))
        return other

    def chosen(self, plan: Plan) -> Chosen:
        """The same with its candidate."""
        posed, assignment = self.made_of(plan)
        return Chosen(self._candidate(posed), posed.problem, assignment)

    def _candidate(self, posed: Posed) -> Candidate:
        """That which was posed, with whatever limit."""
        key = posed.mesh, posed.problem.pipeline
        return next(c for c, p in self._posed.items() if (p.mesh, p.problem.pipeline) == key)

    def bounding(self, chosen: Chosen) -> tuple[float, Found[Posed]]:
        """The search over all candidates whose bounds are of the chosen plan, and the bytes that it was given: those of
        a rank or, where the plan's problem says that it needs more, those."""
        needed = max(float(self.cluster.limit), peak_bytes(chosen.problem, chosen.assignment))
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
        return self._floor.quick(self.cluster.ranks, candidate.microbatches, limit, candidate.pipe)

    def _quick_again(self, candidate: Candidate, limit: float) -> Quick:
        """The same where a search within as many bytes or more has said more. No proof rests on it."""
        quick = self._quick(candidate, limit)
        known = [bounds.get(candidate, 0.0) for given, bounds in self._bounds if given >= limit]
        return quick._replace(seconds=max([quick.seconds, *known]))

    def _pose(self, candidate: Candidate, limit: float) -> Posed:
        if candidate not in self._posed:
            self._posed[candidate] = posed = self._whole_of(candidate)
            if candidate.pipe != NO_PIPE:
                pipeline = pipeline_of(posed, candidate.pipe, self.cluster)
                self._posed[candidate] = replace(posed, problem=replace(posed.problem, pipeline=pipeline))
        posed = self._posed[candidate]
        if posed.problem.memory_limit != limit:
            self._posed[candidate] = posed = replace(posed, problem=replace(posed.problem, memory_limit=limit))
        return posed

    def _on(self, mesh: Mesh, microbatches: int) -> Posed:
        """The problem of a mesh and a number of microbatches, without stages."""
        if (mesh, microbatches) not in self._whole:
            with self.timed("pose"):
                self._whole[mesh, microbatches] = self.poser.pose(mesh, microbatches)
        return self._whole[mesh, microbatches]

    def _whole_of(self, candidate: Candidate) -> Posed:
        """The problem of a candidate before its units are cut into stages."""
        whole, stages = self._on(candidate.mesh, candidate.microbatches), candidate.pipe.stages
        key = candidate.mesh, candidate.microbatches, stages
        if stages > 1 and key not in self._waiting:
            self._waiting[key] = waiting(whole, stages)
        return self._waiting.get(key, whole)

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

    def _free(self, posed: Posed, multipliers: tuple[Multipliers, ...]) -> tuple[float, tuple[Multipliers, ...]]:
        """Seconds of all units without a memory limit, once for all pipelines of the mesh with as many stages."""
        alpha = next((m.alpha for m in multipliers), 1.0)
        key = posed.mesh, self._candidate(posed).pipe.stages, alpha
        if key not in self._frees:
            with self.timed("bound"):
                self._frees[key] = lagrangian.free_bound(self._evaluation(posed), (Multipliers(alpha, 0.0),))
        return self._frees[key]

    def _fullest(self, posed: Posed, pipe: Pipe, multipliers: tuple[Multipliers, ...]) -> float:
        key = posed.mesh, self._candidate(posed).pipe.stages, pipe, multipliers[0].alpha
        if key not in self._ranks:
            with self.timed("bound"):
                self._ranks[key] = fullest(self._evaluation(posed), pipe, multipliers[0].alpha)
        return self._ranks[key]

    def _evaluation(self, posed: Posed) -> Evaluation:
        candidate = self._candidate(posed)
        whole = self._whole_of(candidate).problem
        found = self._evaluations.pop(whole, None)
        if found is None:
            with self.timed("eliminate"):
                found = Evaluation(whole)
        self._evaluations[whole] = found  # the last used is the last to go
        if len(self._evaluations) > READY:
            del self._evaluations[next(iter(self._evaluations))]
        return found.of_limit(posed.problem)

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


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Planning makes many small objects and few cycles: looking for these less often saves a tenth of its seconds."""
    before = gc.get_threshold()
    gc.set_threshold(20_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def solve_plan(captured: Capture, cluster: Cluster, pins: Pins | None = None) -> Plan:
    """The fastest plan for a captured model in train mode, its predictions, proof and next-best plans.

    ``pins``: zero, microbatches and recompute may be fixed. Raises NothingFits, with the plan of least memory, where no
    plan fits a rank; AutoparError for pins that cannot be kept.
    """
    return solved(captured, cluster, pins).plan


@_seldom_collected()
def solved(
    captured: Capture,
    cluster: Cluster,
    pins: Pins | None = None,
    *,
    effort: Effort | None = None,
    prepared: Prepared | None = None,
    nearest: bool = True,
    others: int | None = None,
) -> Solved:
    """`solve_plan` with all that led to the plan. ``effort``: see `Effort`; ``prepared``: the capture prepared for one
    microbatch; ``nearest``: whether changes that fit are looked for where nothing does; ``others``: candidates among
    which next-best plans are looked for, and predicted (default: a few, as they are priced)."""
    solver = Solver(captured, cluster, pins or Pins(), (effort or Effort()).begun(), prepared)
    fit = _that_fits(solver, nearest)
    fastest = judged(solver, fit)
    plan = recut(solver, at_work(solver, fastest, (fit.given, float(cluster.limit))))
    chosen = solver.chosen(plan)
    given, first = solver.bounding(chosen)
    saved = saved_search(first, given, chosen)
    repeatable = solver.repeatable and not solver.effort.is_over and all(f.deterministic for _, f in solver.searched)
    pinned = solver.pins.text() if solver.pins.named() else ""
    made = proof(saved, first, float(cluster.limit), fit.given, pinned)
    if solver.made_of(plan) != solver.made_of(fastest):
        made = replace(made, scope={**made.scope, "repeated": REPEATED})
    plan = replace(
        plan,
        proof=made,
        alternatives=_next(solver, fit.found, plan, others),
        deterministic=repeatable,
    )
    return Solved(plan, solver.prepared_for(plan), saved, dict(solver.seconds))


def _that_fits(solver: Solver, nearest: bool) -> Fit:
    """The fastest plan that fits. Raises NothingFits where there is none: see `_nothing_fits`."""
    fitting = Fitting(solver)
    fit = fitting.run()
    if fit is None:
        _nothing_fits(solver, solver.searched[0][1], fitting.leanest, nearest)
    return fit


# -- other plans -----------------------------------------------------------------------------------------------------


def _next(solver: Solver, found: Found[Posed], plan: Plan, looks: int | None) -> tuple[Alternative, ...]:
    """The next-best plans of other meshes, microbatch counts or stages: those that the search solved, and some that it
    could leave out. Priced as problems, or predicted where so many are to be looked at."""
    from autopar.explain.why_not import changes

    made: list[Alternative] = []
    if solver.pinned is not None or solver.effort.is_over:
        return ()
    seen = {_change(plan)}
    for posed, answer in _others(solver, found, looks or ALTERNATIVES):
        if answer.assignment is None:
            continue
        other = solver.plan(posed, answer.assignment, predicted=looks is not None)
        if _change(other) in seen:
            continue
        seen.add(_change(other))
        if looks is not None:
            made.append(_alternative("next", other, _change(other), ", ".join(changes(plan, other))))
        else:
            peak_gib = peak_bytes(posed.problem, answer.assignment) / 2**30
            made.append(Alternative("next", _change(other), _pins(other), answer.objective, peak_gib))
    return tuple(sorted(made, key=lambda a: a.step_time_s or 0.0))


def _others(solver: Solver, found: Found[Posed], looks: int) -> Iterator[tuple[Posed, Answer]]:
    solved_too = found.alternatives[:looks]
    for outcome in solved_too:
        assert outcome.problem is not None
        yield outcome.problem, outcome.answer
    left_out = [o for o in found.outcomes if o.status in ("roofline", "dominated", "multipliers") and o.bound < inf]
    left_out.sort(key=lambda o: (o.bound, o.candidate.microbatches, len(o.candidate.mesh), o.candidate.mesh))
    for outcome in left_out[: max(0, looks - len(solved_too))]:
        yield solver.glance(outcome.candidate, found)


def _alternative(kind: Any, plan: Plan, change: str, why: str = "") -> Alternative:
    found = plan.predicted
    return Alternative(
        kind, change, _pins(plan), found.step_time_s, found.peak_mem_gib, fits=plan.fits is not False, why=why
    )


def _change(plan: Plan) -> str:
    words = [f"{name}={size}" for name, size in plan.mesh.items()]
    words += [f"zero={plan.zero}", f"microbatches={plan.microbatches}"]
    words += [f"schedule={plan.schedule.name}"] * (plan.pp > 1) + [f"vp={plan.schedule.virtual}"] * (
        plan.schedule.virtual > 1
    )
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
    decided = all(o.status != "open" for o in found.outcomes)
    raise NothingFits(_message(plan, changes, decided), replace(plan, alternatives=changes))


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
        other = _fitting(Solver(solver.captured, cluster, solver.pins, Effort(0.05), solver.prepared))
        if other is not None:
            found.append(_alternative("nearest", other, f"nodes={cluster.nodes}", f"{factor} times the ranks"))
            break
    return found


def _fitting(solver: Solver) -> Plan | None:
    """A plan that fits, or None: also, without a search, where no candidate can have so few bytes."""
    if solver.least_quick((), MOST * float(solver.cluster.limit)) == inf:
        return None
    try:
        return _that_fits(solver, nearest=False).plan
    except AutoparError:
        return None


def _message(plan: Plan, nearest: Sequence[Alternative], decided: bool) -> str:
    from autopar.explain.memory import owners
    from autopar.explain.quantities import bytes_text

    limit = plan.predicted.parts.get("memory_limit_bytes", 0.0)
    needs = (plan.predicted.peak_mem_gib or 0.0) * 2**30
    named = ", ".join(f"{name} {bytes_text(size)}" for name, _, size in owners(plan)[:2])
    way = f"Nearest: {'; '.join(a.change for a in nearest)}" if nearest else "Use more nodes, or a smaller batch"
    return (
        f"no plan {'fits' if decided else 'was found that fits'}: the leanest ({plan.one_line()}) needs "
        f"{bytes_text(needs)} of {bytes_text(limit)} a rank, {bytes_text(needs - limit)} too many ({named}). {way}."
    )
