"""The search over meshes and microbatch counts: cheap bounds first, then the most promising candidate in full.

Every candidate ends with a status and a lower bound of its seconds, so that the least of all bounds holds for the whole
search:

- *illegal*: the model has no such plan (no bound; it is none of the plans).
- *memory*: its least bytes are above the limit (none of the plans that fit).
- *roofline*: its cheap bound is not under what was found, less the target gap.
- *multipliers*: the same of one evaluation at the multipliers of another candidate, or of a solve that stopped there.
- *dominated*: the same of what a smaller microbatch count takes without a memory limit. Cutting each microbatch into k
  equal ones never makes a step shorter: a layout that divides the small batch divides the large one, and every price
  is a maximum or a sum of affine functions ``a + b * rows`` with ``a >= 0`` (weights read, latencies), of which k times
  the k-th part, ``k * a + b * rows``, is no less. So that optimum bounds every multiple of the count on its mesh. Cut
  into stages, the same work takes at least its `Pipe.share`, since the fullest rank has no less than the mean one (of
  as many stages or more: their beginnings may be priced), and
  what is known of the fullest rank over all cuts: units do not divide evenly.
- *solved*; *open*: neither a plan found nor shown that there is none, or not reached within the work limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from autopar.solver.effort import Effort, Progress
from autopar.solver.meshes import Mesh
from autopar.solver.pipes import NO_PIPE, Pipe

NEARER = 1e-3
"""Of a bound: by so much more a glance puts a candidate behind others before it is solved."""
LEAN = 12
"""Candidates at most whose leanest plan is looked for where nothing fits."""
Status = Literal["solved", "roofline", "multipliers", "memory", "illegal", "dominated", "open"]
P = TypeVar("P")


@dataclass(frozen=True)
class Candidate:
    """A mesh, a number of equal microbatches, and a pipeline, of which each rank is such a mesh."""

    mesh: Mesh
    microbatches: int
    pipe: Pipe = NO_PIPE

    @property
    def share(self) -> float:
        """Of the seconds of all units on the mesh, what a step takes at least."""
        return self.pipe.share(self.microbatches)

    def __str__(self) -> str:
        """
        >>> str(Candidate(((2, 4), (4, 1)), 16)), str(Candidate((), 2, Pipe(4, 1, "1f1b", 1.0)))
        ('2@4 x 4@1, 16 microbatches', '1 rank, 2 microbatches, 4 stages, 1f1b')
        """
        axes = " x ".join(f"{size}@{stride}" for size, stride in self.mesh) or "1 rank"
        stages = f", {self.pipe}" if self.pipe != NO_PIPE else ""
        return f"{axes}, {self.microbatches} microbatch{'es' * (self.microbatches > 1)}{stages}"


Term = tuple[str, float, float]


class Quick(NamedTuple):
    """What is known of a candidate without posing it: lower bounds of seconds and bytes, or why it is illegal.

    Each bound is the largest of several sums of ``amount / rate``, kept so that a check adds them up again.

    >>> quick = Quick.of(seconds=[[("matmuls", 8e12, 4e12), ("adamw", 3e9, 3e12)]], bytes=[[("parameters", 64.0, 8)]])
    >>> quick.seconds, quick.bytes
    (2.001, 8.0)
    """

    seconds: float
    bytes: float = 0.0
    illegal: str | None = None
    seconds_terms: tuple[tuple[Term, ...], ...] = ()
    bytes_terms: tuple[tuple[Term, ...], ...] = ()

    @staticmethod
    def of(
        *, seconds: Iterable[Iterable[Term]], bytes: Iterable[Iterable[Term]] = (), illegal: str | None = None
    ) -> Quick:
        """From the terms (what, amount, amount a second or share of a rank), one list a sum."""
        first, second = (tuple(tuple(terms) for terms in sums) for sums in (seconds, bytes))
        return Quick(_largest(first), _largest(second), illegal, first, second)


class Answer(Protocol):
    """What the search reads of a solved problem. ``objective``: seconds of a plan that fits, infinite without one.
    ``least_bytes``: of the leanest plan found, where none fits; ``least_bound``: bytes that no plan goes below."""

    @property
    def status(self) -> str: ...
    @property
    def objective(self) -> float: ...
    @property
    def bound(self) -> float: ...
    @property
    def multipliers(self) -> Any: ...
    @property
    def least_bytes(self) -> float: ...
    @property
    def least_bound(self) -> float: ...


@dataclass(frozen=True, eq=False)
class Outcome(Generic[P]):
    """How one candidate ended. ``bound``: seconds it cannot go below (infinite where it is no plan). ``bytes``: its
    least known; ``seconds``: of the plan found. ``problem``, ``answer``: where it was posed, where it was solved.
    ``multipliers``: those of the bound, in its own problem or in that of ``source``, whose optimum dominates it."""

    candidate: Candidate
    quick: Quick
    status: Status = "open"
    bound: float = 0.0
    seconds: float = inf
    bytes: float = 0.0
    why: str = ""
    problem: P | None = None
    answer: Any = None
    multipliers: Any = None
    source: Candidate | None = None


@dataclass(frozen=True, eq=False)
class Found(Generic[P]):
    """The end of a search. ``best``: None where nothing fits (then ``least`` has the fewest bytes of all).

    ``outcomes``: one a candidate, in the order given. ``bound``: seconds that no candidate goes below; ``gap``: of
    ``best``, as a fraction. ``work``: what was counted. ``deterministic``: False where the clock ended it."""

    best: Outcome[P] | None
    outcomes: tuple[Outcome[P], ...]
    bound: float
    gap: float | None
    least: Outcome[P] | None
    work: Mapping[str, int] = field(default_factory=dict)
    deterministic: bool = True

    @property
    def alternatives(self) -> tuple[Outcome[P], ...]:
        """The other candidates with a plan that fits, fastest first."""
        others = [o for o in self.outcomes if o.seconds < inf and o is not self.best]
        return tuple(sorted(others, key=lambda o: (o.seconds, _tie(o.candidate))))


def search(
    candidates: Iterable[Candidate],
    *,
    quick_bound: Callable[[Candidate], Quick],
    pose: Callable[[Candidate], P],
    solve: Callable[[P, float], Answer],
    limit: float,
    target_gap: float = 0.005,
    lower_bound: Callable[[P, Any], tuple[float, Any]] | None = None,
    free_bound: Callable[[P, Any], tuple[float, Any]] | None = None,
    fullest_bound: Callable[[P, Pipe, Any], float] | None = None,
    may_pose: Callable[[Candidate], bool] = lambda candidate: True,
    first: Callable[[Candidate], bool] = lambda candidate: candidate.pipe == NO_PIPE,
    known: float = inf,
    work_limit: float = inf,
    in_vain: float = inf,
    effort: Effort | None = None,
) -> Found[P]:
    """The best plan over all candidates, and a bound of all of them.

    ``solve(problem, cutoff)`` may stop once its bound reaches ``cutoff`` seconds. ``limit``: bytes a rank may take.
    ``lower_bound(problem, multipliers)``: one cheap evaluation at the multipliers of another problem;
    ``free_bound(problem, multipliers)``: seconds of all units, without stages and without the memory limit; both with
    the multipliers that give the bound again; ``fullest_bound(problem, pipe, multipliers)``: of those seconds, what the
    fullest rank of a pipeline has, over all cuts. Best bound first (until something fits: more microbatches of the mesh
    at hand); ties: fewer stages, axes, microbatches.
    ``first``: candidates that are looked at before others, once something fits; ``known``: seconds of a plan found
    elsewhere, which is to be beaten. ``may_pose``: whether a candidate may still be posed once something fits (it is
    open, if not); ``work_limit``: problems posed at most, ``in_vain``: before something fits (all: the same answer
    every time); ``effort``: ends by the clock, or where who watches says so, but not before something fits.

    >>> from types import SimpleNamespace
    >>> solve = lambda n, cutoff: SimpleNamespace(
    ...     status="solved", objective=10.0 + n, bound=10.0 + n, multipliers=None, least_bound=1.0
    ... )
    >>> found = search(
    ...     [Candidate(((8, 1),), m) for m in (1, 2, 4, 8)],
    ...     quick_bound=lambda c: Quick(seconds=8.0 + c.microbatches, bytes=8.0 / c.microbatches),
    ...     pose=lambda c: c.microbatches,
    ...     solve=solve,
    ...     limit=4.0,
    ... )
    >>> found.best.seconds, found.gap, [(o.candidate.microbatches, o.status, o.bound) for o in found.outcomes]
    (12.0, 0.0, [(1, 'memory', inf), (2, 'solved', 12.0), (4, 'roofline', 12.0), (8, 'roofline', 16.0)])
    """
    run = _Search(
        quick_bound, pose, solve, limit, target_gap, lower_bound, free_bound, fullest_bound, may_pose, first, known
    )
    effort = effort or Effort()
    waiting, aside = run.sift(tuple(candidates)), list[Candidate]()
    deterministic = True
    while waiting:
        past = {c: run.hopeless(c) or (run.has_plan and not may_pose(c)) for c in waiting}
        aside += [c for c in waiting if past[c]]
        waiting = sorted((c for c in waiting if not past[c]), key=run.rank)
        if not waiting:
            break
        if run.work["posed"] >= min(work_limit, inf if run.has_plan else in_vain):
            break
        if run.has_plan and effort.is_over:
            deterministic = False
            break
        if run.probe(waiting[0]):
            continue
        candidate = run.dive if not run.has_plan and run.dive in waiting else waiting[0]
        if run.visit(candidate):
            waiting.remove(candidate)
        run.dive = run.deeper(candidate, waiting)
        effort.tell(run.progress(waiting))
    for candidate in (*waiting, *aside):
        run.close(candidate)
    if not run.has_plan and not waiting:
        run.find_least()
    return run.found(deterministic)


@dataclass(eq=False)
class _Search(Generic[P]):
    """The state of a search: an outcome a candidate, and the best so far."""

    quick_bound: Callable[[Candidate], Quick]
    pose: Callable[[Candidate], P]
    solve: Callable[[P, float], Answer]
    limit: float
    target_gap: float
    lower_bound: Callable[[P, Any], tuple[float, Any]] | None
    free_bound: Callable[[P, Any], tuple[float, Any]] | None
    fullest_bound: Callable[[P, Pipe, Any], float] | None
    may_pose: Callable[[Candidate], bool]
    first: Callable[[Candidate], bool]
    known: float
    outcomes: dict[Candidate, Outcome[P]] = field(default_factory=dict)
    best: Outcome[P] | None = None
    dive: Candidate | None = None
    probed: dict[Mesh, set[int]] = field(default_factory=dict)
    balanced: set[tuple[Mesh, Pipe]] = field(default_factory=set)
    work: dict[str, int] = field(default_factory=lambda: {"posed": 0, "solved": 0, "evaluated": 0})

    def sift(self, candidates: tuple[Candidate, ...]) -> list[Candidate]:
        """Cheap bounds of all; those that are illegal or cannot fit are closed. Returns the others."""
        waiting = []
        for candidate in candidates:
            assert candidate not in self.outcomes, f"{candidate} is given twice"
            quick = Quick(*self.quick_bound(candidate))
            outcome = Outcome[P](candidate, quick, bound=quick.seconds, bytes=quick.bytes)
            if quick.illegal is not None:
                outcome = replace(outcome, status="illegal", bound=inf, why=quick.illegal)
            elif quick.bytes > self.limit:
                outcome = replace(outcome, status="memory", bound=inf, why=self._over(quick.bytes))
            else:
                waiting.append(candidate)
            self.outcomes[candidate] = outcome
        return waiting

    def progress(self, waiting: Sequence[Candidate]) -> Progress:
        """What is known by now."""
        bound = min(o.bound for o in self.outcomes.values())
        seconds = inf if self.best is None else self.best.seconds
        return Progress(seconds, min(bound, seconds), sum(not self.hopeless(c) for c in waiting), len(self.outcomes))

    @property
    def cutoff(self) -> float:
        """Seconds from which on a bound ends a candidate."""
        return min(self.known, inf if self.best is None else self.best.seconds) * (1 - self.target_gap)

    @property
    def has_plan(self) -> bool:
        """Whether a plan is known, here or elsewhere."""
        return self.best is not None or self.known < inf

    def rank(self, candidate: Candidate) -> tuple[Any, ...]:
        """The order of visits. Once a plan is known: some first, then candidates without stages, as their bounds say
        more; of those with equal bounds the one of most microbatches, as probes between halve what is left."""
        bound, (stages, axes, count, *rest) = self.outcomes[candidate].bound, _tie(candidate)
        if not self.has_plan:
            return (bound, stages, axes, count, *rest)
        later = (not self.first(candidate), candidate.pipe != NO_PIPE)
        return (later if later[0] else (False,), bound, stages, axes, -count, *rest)

    def hopeless(self, candidate: Candidate) -> bool:
        return self.outcomes[candidate].bound >= self.cutoff

    def close(self, candidate: Candidate) -> None:
        """A candidate that stays unvisited: pruned by the bound it has, or open."""
        outcome = self.outcomes[candidate]
        status: Status = "open"
        if self.hopeless(candidate):
            own = bool(outcome.multipliers) and outcome.source in (None, candidate)
            status = "multipliers" if own else "roofline" if outcome.source is None else "dominated"
        self.outcomes[candidate] = replace(outcome, status=status)

    def probe(self, candidate: Candidate) -> bool:
        """Looks at fewer microbatches of a mesh first, halving what may still be of use: a bound there holds for all
        multiples. Whether there was something to look at."""
        if self.free_bound is None or not self.has_plan:
            return False
        mesh, most = candidate.mesh, candidate.microbatches
        known = self.probed.setdefault(mesh, set())
        lower = max((m for m in known if most % m == 0), default=1)
        same = [c for c, o in self.outcomes.items() if c.mesh == mesh and o.status != "illegal" and self.may_pose(c)]
        counts = sorted({c.microbatches for c in same if c.microbatches % lower == most % c.microbatches == 0} - known)
        if len(counts) <= 1:
            return False
        fewest = candidate.pipe == NO_PIPE and not known  # that may well be the best, while a pipeline wants several
        count = counts[0 if fewest else (len(counts) - 1) // 2]
        known.add(count)
        first = min((c for c in same if c.microbatches == count), key=_tie)
        self.work["posed"] += 1
        problem = self.pose(first)
        self.outcomes[first] = replace(self.outcomes[first], problem=problem)
        self._dominate(first, problem, (self.best and self.best.multipliers) or ())
        self._balance(first, problem)
        return True

    def visit(self, candidate: Candidate) -> bool:
        """Poses a candidate, looks at it at the multipliers of the best so far, and solves it. Whether it is done with:
        not where a glance has put it behind others."""
        problem, outcome = self.pose(candidate), self.outcomes[candidate]
        self.work["posed"] += outcome.problem is None
        outcome = replace(outcome, problem=problem)
        known = None if self.best is None else self.best.multipliers
        glanced = None if known is None else self._glance(candidate, problem, known)
        if glanced is not None and glanced[0] > outcome.bound * (1 + NEARER):
            bound, multipliers, source = glanced
            done = bound >= self.cutoff
            outcome = replace(outcome, bound=bound, multipliers=multipliers, source=source)
            self.outcomes[candidate] = replace(outcome, status="multipliers" if done else "open")
            self._dominate(candidate, problem, known)
            return done
        self.work["solved"] += 1
        answer = self.solve(problem, self.cutoff)
        self.outcomes[candidate] = self._read(outcome, problem, answer)
        self._take(self.outcomes[candidate])
        self._dominate(candidate, problem, answer.multipliers)
        return True

    def _glance(self, candidate: Candidate, problem: P, known: Any) -> tuple[float, Any, Candidate | None] | None:
        """One evaluation at the multipliers of another candidate: the bound, with what it is found again, and the
        candidate of whose units, without stages, it is a share."""
        if candidate.pipe == NO_PIPE and self.lower_bound is not None:
            self.work["evaluated"] += 1
            return *self.lower_bound(problem, known), None
        if candidate.pipe != NO_PIPE and self.free_bound is not None:
            self.work["evaluated"] += 1
            free, multipliers = self.free_bound(problem, known)
            return free * candidate.share, multipliers, candidate
        return None

    def deeper(self, candidate: Candidate, waiting: list[Candidate]) -> Candidate | None:
        """While nothing fits: the next count on the same mesh that may, if all its bytes fall as the microbatches do.
        A choice of order alone: the sooner a plan is known, the fewer candidates are posed."""
        outcome = self.outcomes[candidate]
        if outcome.status != "memory" or self.limit <= 0:
            return None
        enough = candidate.microbatches * outcome.bytes / self.limit
        multiples = [
            c for c in waiting if c.pipe == candidate.pipe and _is_dominated(c, candidate) and c.microbatches >= enough
        ]
        return min(multiples, key=_tie, default=None)

    def _read(self, outcome: Outcome[P], problem: P, answer: Answer) -> Outcome[P]:
        outcome = replace(outcome, problem=problem, answer=answer)
        if answer.bound >= outcome.bound or answer.least_bound > self.limit:
            outcome = replace(outcome, multipliers=answer.multipliers, source=None)
        if answer.bound == inf or max(answer.least_bound, outcome.quick.bytes) > self.limit:
            nbytes = max(outcome.bytes, answer.least_bound)
            return replace(outcome, status="memory", bound=inf, bytes=nbytes, why=self._over(nbytes))
        known = max(outcome.bound, answer.bound)
        if answer.objective < inf:
            return replace(outcome, status="solved", bound=min(known, answer.objective), seconds=answer.objective)
        return replace(outcome, status="multipliers" if answer.bound >= self.cutoff else "open", bound=known)

    def _take(self, outcome: Outcome[P]) -> None:
        if outcome.seconds < (self.known if self.best is None else self.best.seconds):
            self.best = outcome

    def _dominate(self, candidate: Candidate, problem: P, multipliers: Any) -> None:
        """Multiples of a microbatch count take at least what it takes without a memory limit, or their share of it."""
        if self.free_bound is None:
            return
        self.work["evaluated"] += 1
        free, multipliers = self.free_bound(problem, multipliers)
        for other, outcome in self.outcomes.items():
            bound = free * other.share
            if _is_dominated(other, candidate) and outcome.status == "open" and bound > outcome.bound:
                self.outcomes[other] = replace(outcome, bound=bound, source=candidate, multipliers=multipliers)

    def _balance(self, first: Candidate, problem: P) -> None:
        """Bounds of pipelines by their fullest rank, over all cuts: of those that ``first`` dominates already."""
        if self.fullest_bound is None:
            return
        same = [c for c, o in self.outcomes.items() if o.source == first and c.pipe != NO_PIPE and not self.hopeless(c)]
        for pipe in dict.fromkeys(c.pipe for c in same if (c.mesh, c.pipe) not in self.balanced):
            self.balanced.add((first.mesh, pipe))
            among = [c for c in same if c.pipe == pipe]
            fullest = self.fullest_bound(problem, pipe, self.outcomes[among[0]].multipliers)
            for candidate in among:
                outcome = self.outcomes[candidate]
                filling = min(1.0, pipe.fill / candidate.microbatches)
                all_units = outcome.bound / candidate.share
                bound = filling * all_units + (1 - filling) * fullest
                self.outcomes[candidate] = replace(outcome, bound=max(outcome.bound, bound))

    def find_least(self) -> None:
        """Nothing fits: solves for the fewest bytes, where the cheap bound of them is under what was found."""
        solved = [o.answer.least_bytes for o in self.outcomes.values() if o.answer is not None]
        least = min(solved, default=inf)
        unsolved = [o for o in self.outcomes.values() if o.status == "memory" and o.answer is None]
        for outcome in sorted(unsolved, key=lambda o: (o.bytes, _tie(o.candidate)))[:LEAN]:
            if outcome.bytes >= least * (1 - self.target_gap):
                break
            problem = self.pose(outcome.candidate)
            answer = self.solve(problem, inf)
            self.work["posed"] += 1
            self.work["solved"] += 1
            read = self._read(outcome, problem, answer)
            self.outcomes[outcome.candidate] = read
            self._take(read)
            least = min(least, answer.least_bytes)

    def found(self, deterministic: bool) -> Found[P]:
        outcomes = tuple(self.outcomes.values())
        bound = min((o.bound for o in outcomes), default=inf)
        gap = None
        least = None
        if self.best is None:
            tried = [o for o in outcomes if o.answer is not None and o.answer.least_bytes < inf]
            least = min(tried, key=lambda o: (o.answer.least_bytes, _tie(o.candidate)), default=None)
        else:
            gap = max(0.0, 1 - bound / self.best.seconds)
        deterministic &= all(getattr(o.answer, "deterministic", True) for o in outcomes)
        return Found(self.best, outcomes, bound, gap, least, self.work, deterministic)

    def _over(self, nbytes: float) -> str:
        return f"needs at least {nbytes:.6g} bytes a rank of {self.limit:.6g}"


def _largest(sums: tuple[tuple[Term, ...], ...]) -> float:
    return max((sum(amount / rate for _, amount, rate in terms) for terms in sums), default=0.0)


def _is_dominated(one: Candidate, other: Candidate) -> bool:
    """The same mesh, every microbatch of the other or each of several pieces of it, and no fewer stages: what waits at
    the beginning of a stage may be priced."""
    multiple = one.microbatches % other.microbatches == 0
    return one.mesh == other.mesh and multiple and one.pipe.stages >= other.pipe.stages


def _tie(candidate: Candidate) -> tuple[Any, ...]:
    pipe = candidate.pipe
    return (pipe.stages, len(candidate.mesh), candidate.microbatches, candidate.mesh, pipe.schedule)
