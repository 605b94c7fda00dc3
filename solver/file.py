"""A search in one file: every candidate with its bound and what that rests on, and the problems that were posed.

A ``.npz`` of three arrays, without pickle: ``header`` (JSON in UTF-8), ``numbers`` (float64), ``indices`` (int32). The
header refers to stretches of the other two; equal stretches are stored once, resources that cost nothing not at all.

>>> import tempfile
>>> from autopar.solver.problem import Class, Unit, Variable
>>> x = Variable("x", "op", ("fast", "lean"), np.array([[1.0, 0, 0, 0, 8, 0, 0], [2.0, 0, 0, 0, 4, 0, 0]]))
>>> problem = Problem("toy", (), (Class("c", (x,), (), ()),), (Unit(0, ()),), memory_limit=8.0)
>>> record = Record(Candidate((), 1), "solved", 1.0, problem=problem, assignment=Assignment((), ((0,),)), seconds=1.0)
>>> path = Path(tempfile.mkdtemp()) / "search.npz"
>>> save(path, Saved((record,), memory_limit=8.0))
>>> again = load(path).records[0]
>>> str(again.candidate), again.problem.classes[0].variables[0].states, digest(again.problem) == digest(problem)
('1 rank, 1 microbatch', ('fast', 'lean'), True)
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, cast

import numpy as np

from autopar.errors import AutoparError
from autopar.solver.pipes import Pipe
from autopar.solver.problem import (
    RESOURCES,
    Array,
    Assignment,
    Class,
    Factor,
    Index,
    Pipeline,
    Problem,
    Unit,
    Variable,
)
from autopar.solver.search import Candidate, Found, Quick, Status
from autopar.solver.stage_bound import Prices

VERSION = 3
NOTHING = Quick(0.0)
Weights = tuple[float, ...]
"""Multipliers of one range of transients: alpha, per_byte, low, high, time (see `lagrangian.Multipliers`); of stages
also the prices of a byte kept of one microbatch and of one made again, and a share (`stage_bound.Prices`)."""


@dataclass(frozen=True, eq=False)
class Record:
    """One candidate: how it ended, its bound (seconds), and what a check needs to find the bound again.

    ``source``: the candidate whose problem the multipliers belong to (None: its own). ``integer``: an integer program
    proved more than the multipliers do. ``assignment``: of the plan found, which takes ``seconds``."""

    candidate: Candidate
    status: Status
    bound: float
    seconds: float = inf
    why: str = ""
    quick: Quick = NOTHING
    multipliers: tuple[Weights, ...] = ()
    source: Candidate | None = None
    integer: bool = False
    problem: Problem | None = None
    assignment: Assignment | None = None


@dataclass(frozen=True, eq=False)
class Saved:
    """A search as saved. ``memory_limit`` in bytes a rank."""

    records: tuple[Record, ...]
    memory_limit: float

    @property
    def best(self) -> Record | None:
        """The candidate with the fastest plan; None where nothing fits."""
        best = min(self.records, key=lambda r: r.seconds, default=None)
        return best if best is not None and best.seconds < inf else None


def of_search(found: Found[Problem], memory_limit: float) -> Saved:
    """What of a search is saved: problems only where a bound or a plan rests on them."""
    needed = {o.source for o in found.outcomes if o.source is not None}
    records = []
    for o in found.outcomes:
        rests = bool(o.multipliers) and o.source is None
        posed = o.candidate in needed or rests or o.seconds < inf or (o.status == "memory" and o.answer is not None)
        integer = o.answer is not None and bool(o.answer.multipliers_bound < o.bound < inf) and rests
        records.append(
            Record(
                candidate=o.candidate,
                status=o.status,
                bound=float(o.bound),
                seconds=float(o.seconds),
                why=o.why,
                quick=o.quick,
                multipliers=tuple(_weights(m) for m in o.multipliers or ()),
                source=o.source,
                integer=integer,
                problem=o.problem if posed else None,
                assignment=o.answer.assignment if o.seconds < inf else None,
            )
        )
    return Saved(tuple(records), memory_limit)


def save(path: str | Path, saved: Saved) -> None:
    """Writes a search (a name ending in ``.npz``). Raises AutoparError in one line where that is not possible."""
    out = _Writer()
    header = {
        "version": VERSION,
        "memory_limit": _number(saved.memory_limit),
        "records": [out.record(r) for r in saved.records],
        "texts": out.texts,
    }
    text = json.dumps(header, separators=(",", ":"))
    arrays = {
        "header": np.frombuffer(text.encode(), np.uint8),
        "numbers": np.concatenate([np.zeros(0), *out.numbers.parts]),
        "indices": np.concatenate([np.zeros(0, np.int32), *out.indices.parts]),
    }
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
    except OSError as error:
        raise AutoparError(f"problem file: cannot write {path} ({error.strerror or error}).") from None


def load(path: str | Path) -> Saved:
    """Reads a search. Raises AutoparError in one line where the file is missing, damaged or of a later version."""
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            header = json.loads(bytes(file["header"]))
            version = header["version"]
            if version != VERSION:
                raise AutoparError(
                    f"problem file {path}: version {version} is not readable. Legal: {VERSION}; save anew."
                )
            reader = _Reader(header["texts"], file["numbers"], file["indices"])
            records = tuple(reader.record(r) for r in header["records"])
            return Saved(records, _float(header["memory_limit"]))
    except FileNotFoundError:
        raise AutoparError(f"problem file: no such file: {path}.") from None
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise AutoparError(f"problem file {path}: cannot be read ({error}). Save it anew with --problem.") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"[:120]
        raise AutoparError(f"problem file {path}: is no saved search ({what}). Save it anew with --problem.") from None


def digest(problem: Problem) -> str:
    """Text that differs where anything in two problems does (16 hex digits of SHA-256).

    Infinite and zero entries count as such, whatever their sign."""
    out = _Writer()
    header = json.dumps([out.problem(problem), out.texts], separators=(",", ":"))
    sha = hashlib.sha256(header.encode())
    for array in (*out.numbers.parts, *out.indices.parts):
        sha.update(array.tobytes())
    return sha.hexdigest()[:16]


@dataclass
class _Pool:
    """Stretches of one long array; equal ones are stored once."""

    parts: list[Any] = field(default_factory=list)
    length: int = 0
    known: dict[bytes, int] = field(default_factory=dict)

    def add(self, array: Any) -> int:
        """Where the array starts."""
        flat = np.ascontiguousarray(array).reshape(-1)
        key = hashlib.sha256(flat.tobytes()).digest() + flat.size.to_bytes(8, "little")
        if key not in self.known:
            self.known[key] = self.length
            self.parts.append(flat)
            self.length += flat.size
        return self.known[key]


class _Writer:
    def __init__(self) -> None:
        self.numbers, self.indices = _Pool(), _Pool()
        self.texts: list[list[str]] = []
        self._known: dict[tuple[str, ...], int] = {}

    def record(self, r: Record) -> dict[str, Any]:
        return {
            "candidate": _plain(r.candidate),
            "status": r.status,
            "bound": _number(r.bound),
            "seconds": _number(r.seconds),
            "why": r.why,
            "quick": [_number(r.quick.seconds), _number(r.quick.bytes), *r.quick[2:]],
            "multipliers": [[_number(w) for w in m] for m in r.multipliers],
            "source": None if r.source is None else _plain(r.source),
            "integer": r.integer,
            "problem": None if r.problem is None else self.problem(r.problem),
            "assignment": None if r.assignment is None else _states(r.assignment),
        }

    def problem(self, p: Problem) -> dict[str, Any]:
        return {
            "name": p.name,
            "shared": [self._variable(v) for v in p.shared],
            "classes": [
                [c.name, [self._variable(v) for v in c.variables], [self._factor(f) for f in c.factors], c.borders]
                for c in p.classes
            ],
            "units": [[u.kind, u.borders] for u in p.units],
            "memory_limit": _number(p.memory_limit),
            "counts": dict(p.counts),
            "pipeline": None if p.pipeline is None else self._pipeline(p.pipeline),
        }

    def _pipeline(self, p: Pipeline) -> list[Any]:
        sends = [[self.numbers.add(s + 0.0), s.size] for s in p.sends]
        return [p.ranks, p.virtual, p.microbatches, p.fill, list(p.in_flight), sends, p.schedule]

    def _variable(self, v: Variable) -> list[Any]:
        if v.states not in self._known:
            self._known[v.states] = len(self.texts)
            self.texts.append(list(v.states))
        return [v.name, v.kind, self._known[v.states], self._table(v.costs)]

    def _factor(self, f: Factor) -> list[Any]:
        maps = [[self.indices.add(m.astype(np.int32)), m.size] for m in f.reads]
        return [f.over, maps, self._table(f.table)]

    def _table(self, table: Array) -> list[Any]:
        """Shape, and where the planes of each resource start (-1: all zero)."""
        planes = [table[..., r] + 0.0 for r in range(len(RESOURCES))]
        return [list(table.shape[:-1]), [self.numbers.add(p) if p.any() else -1 for p in planes]]


class _Reader:
    def __init__(self, texts: list[list[str]], numbers: Array, indices: Any) -> None:
        self._texts = [tuple(t) for t in texts]
        self._numbers = numbers
        self._indices = indices.astype(np.int64)

    def record(self, r: dict[str, Any]) -> Record:
        seconds, nbytes, illegal, *terms = r["quick"]
        first, second = (tuple(tuple((str(w), float(a), float(b)) for w, a, b in s) for s in t) for t in terms)
        return Record(
            candidate=_candidate(r["candidate"]),
            status=r["status"],
            bound=_float(r["bound"]),
            seconds=_float(r["seconds"]),
            why=r["why"],
            quick=Quick(_float(seconds), _float(nbytes), illegal, first, second),
            multipliers=tuple(cast(Weights, tuple(_float(w) for w in m)) for m in r["multipliers"]),
            source=None if r["source"] is None else _candidate(r["source"]),
            integer=r["integer"],
            problem=None if r["problem"] is None else self._problem(r["problem"]),
            assignment=None if r["assignment"] is None else _assignment(*r["assignment"]),
        )

    def _problem(self, p: dict[str, Any]) -> Problem:
        classes = tuple(
            Class(name, tuple(map(self._variable, own)), tuple(map(self._factor, factors)), tuple(borders))
            for name, own, factors, borders in p["classes"]
        )
        return Problem(
            p["name"],
            tuple(map(self._variable, p["shared"])),
            classes,
            tuple(Unit(kind, tuple(borders)) for kind, borders in p["units"]),
            _float(p["memory_limit"]),
            p["counts"],
            None if p["pipeline"] is None else self._pipeline(*p["pipeline"]),
        )

    def _pipeline(
        self,
        ranks: int,
        virtual: int,
        microbatches: int,
        fill: float,
        in_flight: list[float],
        sends: list[tuple[int, int]],
        schedule: str,
    ) -> Pipeline:
        each = tuple(self._stretch(start, size) for start, size in sends)
        return Pipeline(ranks, virtual, microbatches, fill, tuple(in_flight), each, schedule)

    def _stretch(self, start: int, size: int) -> Array:
        found: Array = self._numbers[start : start + size]
        if found.size != size:
            raise ValueError("numbers are missing")
        return found

    def _variable(self, data: list[Any]) -> Variable:
        name, kind, states, costs = data
        return Variable(name, kind, self._texts[states], self._table(costs))

    def _factor(self, data: list[Any]) -> Factor:
        over, maps, table = data
        return Factor(tuple(over), tuple(self._map(*m) for m in maps), self._table(table))

    def _map(self, start: int, size: int) -> Index:
        found: Index = self._indices[start : start + size]
        if found.size != size:
            raise ValueError("indices are missing")
        return found

    def _table(self, data: list[Any]) -> Array:
        shape, starts = data
        size = int(np.prod(shape, dtype=np.int64))
        table = np.zeros((size, len(RESOURCES)))
        for r, start in enumerate(starts):
            if start >= 0:
                table[:, r] = self._numbers[start : start + size]
        return table.reshape(*shape, len(RESOURCES))


def _plain(candidate: Candidate) -> list[Any]:
    pipe = candidate.pipe
    return [candidate.mesh, candidate.microbatches, pipe.ranks, pipe.virtual, pipe.schedule, pipe.fill]


def _candidate(data: list[Any]) -> Candidate:
    mesh, microbatches, ranks, virtual, schedule, fill = data
    pipe = Pipe(int(ranks), int(virtual), str(schedule), float(fill))
    return Candidate(tuple((int(size), int(stride)) for size, stride in mesh), int(microbatches), pipe)


def _weights(m: Any) -> Weights:
    own = float(m.alpha), float(m.per_byte), float(m.low), float(m.high), float(m.time)
    return (*own, float(m.saved), float(m.again), float(m.share)) if isinstance(m, Prices) else own


def _states(assignment: Assignment) -> list[Any]:
    units = [[int(s) for s in unit] for unit in assignment.units]
    return [[int(s) for s in assignment.shared], units, [int(c) for c in assignment.cuts]]


def _assignment(shared: list[int], units: list[list[int]], cuts: list[int]) -> Assignment:
    return Assignment(tuple(shared), tuple(tuple(u) for u in units), tuple(cuts))


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return None if value == inf else float(value)


def _float(value: float | None) -> float:
    return inf if value is None else float(value)
