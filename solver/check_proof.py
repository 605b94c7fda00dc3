"""A proof, checked: every bound found again from the saved search, by code of its own (`recompute`).

What is compared, candidate by candidate, each a small function below: that no candidate is missing or made up; that its
problem and its multipliers are those of the plan; that its bound is no more than what its cheap terms, its multipliers
(of its own problem, or of the one whose optimum dominates it) or an integer program prove; that one left out for its
bytes cannot fit. Then: that the chosen assignment is legal, fits and takes the seconds that the plan says; that the
plan's bound is the least of all and its gap is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from autopar.solver.file import Record, Saved, Weights, digest, load
from autopar.solver.pipes import NO_PIPE, Pipe
from autopar.solver.problem import Array, Assignment, Problem, Unit
from autopar.solver.proof import each
from autopar.solver.recompute import least, transients
from autopar.solver.recompute_integer import integer_bound
from autopar.solver.recompute_integer_stages import integer_stages_bound
from autopar.solver.recompute_stages import fullest_anew, stage_bytes_bound, stages_bound_anew, taken
from autopar.solver.search import Candidate

ROUNDING = 1e-9
"""Relative difference that another order of additions explains."""
SPLITS = 200
"""Evaluations at most to show that a candidate cannot fit."""


def check(proof: Mapping[str, Any], saved: Saved | str | Path) -> list[str]:
    """Differences between a plan's proof (plain JSON) and what its saved search proves; empty where there are none.

    Raises AutoparError, in one line, for a file that cannot be read.

    >>> from autopar.solver.search import Candidate, Quick
    >>> from autopar.solver.proof import proof_of
    >>> quick = Quick.of(seconds=[[("matmuls", 8e12, 4e12)]])
    >>> search = Saved((Record(Candidate(((2, 1),), 2), "roofline", 2.0, quick=quick),), memory_limit=8.0)
    >>> proof = proof_of(search)
    >>> check(proof, search)
    []
    >>> proof["scope"]["pruned"][0]["bound"] = 3.0
    >>> check(proof, search)[0]
    '2@1, 2 microbatches: bound 3 s in the plan, 2 s in the file'
    """
    if not isinstance(saved, Saved):
        saved = load(saved)
    records = {str(r.candidate): r for r in saved.records}
    anew = _Check(records, saved.memory_limit)
    return [
        *_same_candidates(proof, records),
        *_same_scope(proof, saved),
        *(line for entry, record in _pairs(proof, records) for line in _same_entry(entry, record)),
        *(line for record in saved.records for line in anew.bound(record)),
        *_choice(proof, saved),
        *_whole(proof, saved),
    ]


def _entries(proof: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    scope = proof.get("scope")
    entries = scope.get("pruned") if isinstance(scope, Mapping) else None
    return list(each(e for e in entries if isinstance(e, Mapping))) if isinstance(entries, list) else []


def _name(entry: Mapping[str, Any]) -> str:
    """As `Candidate` prints itself."""
    try:
        axes = " x ".join(f"{size}@{stride}" for size, stride in entry["mesh"]) or "1 rank"
        m, stages = entry["microbatches"], ""
        if "pipe" in entry:
            ranks, virtual, schedule, _ = entry["pipe"]
            stages = f", {ranks * virtual} stages{f' on {ranks} ranks' if virtual > 1 else ''}, {schedule}"
        return f"{axes}, {m} microbatch{'es' * (m > 1)}{stages}"
    except (KeyError, TypeError, ValueError):
        return f"an entry without mesh and microbatches ({str(dict(entry))[:60]})"


def _pairs(proof: Mapping[str, Any], records: Mapping[str, Record]) -> Iterator[tuple[Mapping[str, Any], Record]]:
    return ((e, records[_name(e)]) for e in _entries(proof) if _name(e) in records)


def _same_candidates(proof: Mapping[str, Any], records: Mapping[str, Record]) -> Iterator[str]:
    """Every candidate of the file is in the plan, once, and no other."""
    names = [_name(e) for e in _entries(proof)]
    yield from (f"{name}: in the file, not in the plan" for name in records if name not in names)
    yield from (f"{name}: in the plan, not in the file" for name in names if name not in records)
    yield from (
        f"{name}: {names.count(name)} times in the plan" for name in dict.fromkeys(names) if names.count(name) > 1
    )
    candidates = {r.candidate for r in records.values()}
    every = {c.microbatches for c in candidates}
    for mesh, pipe in dict.fromkeys((c.mesh, c.pipe) for c in candidates):
        tried = {c.microbatches for c in candidates if (c.mesh, c.pipe) == (mesh, pipe)}
        missing = {m for m in every - tried if _of_use(pipe, m)}
        yield from (f"mesh {mesh}: {m} microbatches is not among the candidates" for m in sorted(missing))


def _same_scope(proof: Mapping[str, Any], saved: Saved) -> Iterator[str]:
    """The plan names the meshes, the microbatches and the memory that the file is of."""
    scope = proof.get("scope")
    given = scope if isinstance(scope, Mapping) else {}
    candidates = [r.candidate for r in saved.records]
    meshes = [[list(axis) for axis in mesh] for mesh in dict.fromkeys(c.mesh for c in candidates)]
    counts = sorted({c.microbatches for c in candidates})
    pipelines = [str(pipe) for pipe in dict.fromkeys(c.pipe for c in candidates)]
    for key, found in (("meshes", meshes), ("microbatches", counts), ("pipelines", pipelines)):
        if given.get(key) != found:
            yield f"scope: other {key} in the plan than in the file"
    memory = given.get("memory")
    if isinstance(memory, Mapping):
        limit, bound_for, within = (_float(memory.get(key)) for key in ("limit", "bound_for", "plan_within"))
        if bound_for != saved.memory_limit:
            yield f"scope: bounds for {bound_for:g} bytes in the plan, for {saved.memory_limit:g} in the file"
        if max(limit, within) > bound_for:
            yield f"scope: bounds for {bound_for:g} bytes are none for the {max(limit, within):g} that a plan may take"


def _same_entry(entry: Mapping[str, Any], record: Record) -> Iterator[str]:
    """The plan says of a candidate what the file says."""
    name = str(record.candidate)
    if entry.get("by") != record.status:
        yield f"{name}: {entry.get('by')} in the plan, {record.status} in the file"
    if not _equal(_float(entry.get("bound")), record.bound):
        yield f"{name}: bound {_show(_float(entry.get('bound')))} in the plan, {_show(record.bound)} in the file"
    found = None if record.problem is None else digest(record.problem)
    if entry.get("problem") != found:
        yield f"{name}: problem {entry.get('problem')} in the plan, {found} in the file"
    multipliers = [[None if w == inf else w for w in m] for m in record.multipliers]
    if (entry.get("multipliers") or []) != multipliers:
        yield f"{name}: the plan and the file have other multipliers"
    source = entry.get("of")
    if (_name(source) if isinstance(source, Mapping) else None) != (record.source and str(record.source)):
        yield f"{name}: dominated by another candidate in the plan than in the file"


@dataclass(frozen=True)
class _Check:
    """Bounds of records, found anew."""

    records: Mapping[str, Record]
    limit: float
    known: dict[tuple[Candidate, tuple[Weights, ...], bool], float] = field(default_factory=dict)
    fullest: dict[tuple[str, int, int, float], float] = field(default_factory=dict)

    def bound(self, record: Record) -> Iterator[str]:
        """The bound of one candidate is no more than what can be shown."""
        name = str(record.candidate)
        if record.problem is not None and record.problem.memory_limit != self.limit:
            yield f"{name}: its problem has a limit of {record.problem.memory_limit:g} bytes, the file {self.limit:g}"
        if record.status == "illegal":
            if not record.quick.illegal:
                yield f"{name}: called illegal without a reason"
            return
        if record.bound == inf:
            yield from self._cannot_fit(record)
            return
        shown = self._shown(record)
        if record.bound > shown * (1 + ROUNDING) + 1e-15:
            yield f"{name}: bound {_show(record.bound)}, but no more than {_show(shown)} can be shown"

    def _shown(self, record: Record) -> float:
        """The highest bound that the record's evidence gives."""
        shown = _largest(record.quick.seconds_terms)
        if record.bound <= shown * (1 + ROUNDING):
            return shown
        home = record if record.source is None else self.records.get(str(record.source))
        if home is None or home.problem is None or not record.multipliers:
            return shown
        if record.source is not None and not (_is_multiple(record, home) and _is_free(record.multipliers)):
            return shown
        free = record.source is not None  # of all units, whatever stages they are in
        key = (home.candidate, record.multipliers, free)  # one optimum may dominate many
        if key not in self.known:
            problem = replace(home.problem, pipeline=None) if free else home.problem
            self.known[key] = dual_bound(problem, record.multipliers)
        if not free:
            shown = max(shown, self.known[key])
        else:
            shown = max(shown, self._of_share(record, home.problem, self.known[key]))
        if -inf < shown * (1 + ROUNDING) < record.bound and record.integer and record.source is None:
            branch = integer_bound if home.problem.pipeline is None else integer_stages_bound
            shown = max(shown, branch(home.problem, record.multipliers, record.bound))
        return shown

    def _of_share(self, record: Record, problem: Problem, whole: float) -> float:
        """What a step takes at least in a pipeline by the seconds of all units, or, if that is too little, also by
        those of the fullest rank."""
        candidate, alpha = record.candidate, record.multipliers[0][0]
        shown = whole * _share(candidate)
        if record.bound <= shown * (1 + ROUNDING) or candidate.pipe == NO_PIPE:
            return shown
        key = (digest(replace(problem, pipeline=None)), candidate.pipe.ranks, candidate.pipe.virtual, alpha)
        if key not in self.fullest:
            self.fullest[key] = fullest_anew(problem, *key[1:])
        filling = min(1.0, candidate.pipe.fill / candidate.microbatches)
        return max(shown, filling * whole + (1 - filling) * self.fullest[key])

    def _cannot_fit(self, record: Record) -> Iterator[str]:
        """A candidate without a bound has more bytes than the limit."""
        if _largest(record.quick.bytes_terms) > self.limit:
            return
        name = str(record.candidate)
        if record.problem is None:
            yield f"{name}: nothing shows that it cannot fit"
            return
        if record.multipliers and dual_bound(record.problem, record.multipliers) == inf:
            return
        if record.problem.pipeline is not None:
            if record.multipliers and integer_stages_bound(record.problem, record.multipliers) == inf:
                return
            nbytes = stage_bytes_bound(record.problem)
        else:
            nbytes = bytes_bound(record.problem, self.limit)
        if not nbytes > self.limit:
            yield f"{name}: left out for its bytes, but no more than {nbytes:g} of {self.limit:g} can be shown"


def dual_bound(problem: Problem, multipliers: tuple[Weights, ...]) -> float:
    """Seconds that no assignment within the limit beats: the least over ranges that cover every transient; with a
    pipeline `stages_bound_anew`."""
    if problem.pipeline is not None:
        return stages_bound_anew(problem, multipliers)
    floor, sizes = transients(problem)
    needed = sizes[sizes >= floor]
    covered = np.zeros(len(needed), bool)
    bound = inf
    for alpha, per_byte, low, high, time, *more in multipliers:
        if more or not (0 <= alpha <= 1 and per_byte >= 0 and time in (0.0, 1.0)):
            return -inf
        covered |= (needed >= low) & (needed <= high)
        weights = np.array([time * alpha, time, time * (1 - alpha), per_byte, per_byte, 0.0, 0.0])
        value = least(problem, weights, high) - per_byte * (problem.memory_limit - low)
        bound = min(bound, value if time else inf if value > 0 else -inf)
    return bound if covered.all() else -inf


def bytes_bound(problem: Problem, limit: float) -> float:
    """Bytes that no assignment's peak goes below; as soon as more than the limit is shown, that."""
    weights = np.array([0.0, 0, 0, 1, 1, 0, 0])
    floor, sizes = transients(problem)
    sizes = sizes[sizes >= floor]
    if len(sizes) == 0:
        return least(problem, weights)
    ranges = [(least(problem, weights) + float(sizes[0]), 0, len(sizes) - 1)]
    for _ in range(SPLITS):
        ranges.sort()
        bound, first, last = ranges[0]
        if bound > limit or first == last:
            return bound
        ranges.pop(0)
        middle = (first + last) // 2
        for a, b in ((first, middle), (middle + 1, last)):
            ranges.append((least(problem, weights, float(sizes[b])) + float(sizes[a]), a, b))
    return min(ranges)[0]


def _choice(proof: Mapping[str, Any], saved: Saved) -> Iterator[str]:
    """The plans found take the seconds that are said, and fit; the objective is the fastest."""
    for record in saved.records:
        if record.seconds == inf:
            continue
        if record.problem is None or record.assignment is None:
            yield f"{record.candidate}: {_show(record.seconds)} without an assignment that takes it"
            continue
        cost = _cost if record.problem.pipeline is None else taken
        time, nbytes = cost(record.problem, record.assignment)
        if not _equal(time, record.seconds):
            yield f"{record.candidate}: its assignment takes {_show(time)}, the file says {_show(record.seconds)}"
        if nbytes > saved.memory_limit:
            yield f"{record.candidate}: its assignment needs {nbytes:g} bytes of {saved.memory_limit:g}"
    objective = min((r.seconds for r in saved.records), default=inf)
    if not _equal(_float(proof.get("objective")), objective):
        yield f"objective {_show(_float(proof.get('objective')))} in the plan, {_show(objective)} in the file"


def _whole(proof: Mapping[str, Any], saved: Saved) -> Iterator[str]:
    """Bound and gap of the plan follow from its candidates."""
    bound = min((r.bound for r in saved.records), default=inf)
    claimed, objective, gap = (_float(proof.get(key)) for key in ("bound", "objective", "gap"))
    if not _equal(claimed, bound):
        yield f"bound {_show(claimed)} in the plan, {_show(bound)} is the least of the file"
    if objective < inf and claimed > objective * (1 + ROUNDING):
        yield f"bound {_show(claimed)} is above the objective {_show(objective)}"
    if gap < inf and objective < inf and objective > 0 and abs(gap - max(0.0, 1 - claimed / objective)) > ROUNDING:
        yield f"gap {gap:g} in the plan, {max(0.0, 1 - claimed / objective):g} by its bound and objective"


def _cost(problem: Problem, assignment: Assignment) -> tuple[float, float]:
    """Seconds and bytes of an assignment; infinite where it is not one."""
    total, largest = np.zeros(6), 0.0
    try:
        for rows in _rows(problem, assignment):
            working = made_again = 0.0
            for row in rows:
                total = total + row[:6]
                working, made_again = max(working, float(row[5])), made_again + float(row[6])
            largest = max(largest, working + made_again)
    except (IndexError, ValueError):
        return inf, inf
    compute, exposed, hidden, static, kept, _ = (float(x) for x in total)
    return exposed + max(compute, hidden), static + kept + largest


def _rows(problem: Problem, assignment: Assignment) -> Iterator[list[Array]]:
    """The cost rows of each shared variable, then those of each unit."""
    for v, s in zip(problem.shared, assignment.shared, strict=True):
        yield [v.costs[s]]
    for unit, states in zip(problem.units, assignment.units, strict=True):
        yield list(_unit_rows(problem, unit, states, [assignment.shared[b] for b in unit.borders]))


def _unit_rows(problem: Problem, unit: Unit, states: tuple[int, ...], borders: list[int]) -> Iterator[Array]:
    kind = problem.classes[unit.kind]
    for v, s in zip(kind.variables, states, strict=True):
        yield v.costs[s]
    every = [*states, *borders]
    for f in kind.factors:
        yield f.table[tuple(reads[every[v]] for v, reads in zip(f.over, f.reads, strict=True))]


def _of_use(pipe: Pipe, microbatches: int) -> bool:
    """Whether a pipeline is tried with so many microbatches: with one, schedules do not differ."""
    legal = pipe.virtual == 1 or microbatches % pipe.ranks == 0
    return legal and (microbatches > 1 or pipe.schedule in ("accumulate", "1f1b"))


def _share(candidate: Candidate) -> float:
    """Of the seconds of all units, what a step takes at least: M microbatches and the fill, on the mean rank."""
    ranks, m = candidate.pipe.ranks, candidate.microbatches
    return (candidate.pipe.fill * ranks + m - candidate.pipe.fill) / (ranks * m)


def _is_multiple(record: Record, home: Record) -> bool:
    one, other = record.candidate, home.candidate
    stages = [c.pipe.ranks * c.pipe.virtual for c in (one, other)]
    return one.mesh == other.mesh and one.microbatches % other.microbatches == 0 and stages[0] >= stages[1]


def _is_free(multipliers: tuple[Weights, ...]) -> bool:
    """No price on bytes, no range of transients left out."""
    return all(len(m) == 5 and m[1:] == (0.0, 0.0, inf, 1.0) for m in multipliers)


def _largest(sums: tuple[tuple[tuple[str, float, float], ...], ...]) -> float:
    return max((sum(amount / rate for _, amount, rate in terms) for terms in sums), default=0.0)


def _equal(a: float, b: float) -> bool:
    return a == b or (isfinite(a) and isfinite(b) and abs(a - b) <= ROUNDING * max(abs(a), abs(b)))


def _float(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else inf


def _show(seconds: float) -> str:
    return "none" if seconds == inf else f"{seconds:.9g} s"
