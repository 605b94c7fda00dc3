"""The proof of a search as plain JSON, for the plan: the bound of every candidate and what it rests on.

``check_proof`` finds the bounds again from a saved search. Multipliers are lists [alpha, per_byte, low, high, time],
one a range of transients, of stages with three more (`stage_bound.Prices`); infinite numbers are null.

>>> from autopar.solver.search import Quick
>>> one = Record(Candidate(((2, 1),), 1), "solved", 0.99, seconds=1.0, quick=Quick(0.5))
>>> two = Record(Candidate(((2, 1),), 2), "roofline", 1.2, quick=Quick(1.2))
>>> proof = proof_of(Saved((one, two), memory_limit=8.0))
>>> proof["objective"], proof["bound"], round(proof["gap"], 9), proof["scope"]["microbatches"]
(1.0, 0.99, 0.01, [1, 2])
>>> [entry["by"] for entry in proof["scope"]["pruned"]]
['solved', 'roofline']
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import inf, isfinite
from typing import Any

from autopar.solver.file import Record, Saved, digest
from autopar.solver.pipes import NO_PIPE
from autopar.solver.search import Candidate


def proof_of(saved: Saved) -> dict[str, Any]:
    """``objective``, ``bound``, ``gap`` and ``scope`` (candidates in ``pruned``: see `each`). Objective and gap are
    null where nothing fits."""
    best = saved.best
    bound = min((r.bound for r in saved.records), default=inf)
    candidates = [r.candidate for r in saved.records]
    return {
        "objective": None if best is None else best.seconds,
        "bound": bound if isfinite(bound) else None,
        "gap": None if best is None else max(0.0, 1 - bound / best.seconds) if best.seconds else 0.0,
        "scope": {
            "meshes": [list(map(list, mesh)) for mesh in dict.fromkeys(c.mesh for c in candidates)],
            "microbatches": sorted({c.microbatches for c in candidates}),
            "pipelines": [str(pipe) for pipe in dict.fromkeys(c.pipe for c in candidates)],
            "pruned": _grouped([_entry(r) for r in saved.records]),
        },
    }


def each(pruned: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """One entry a candidate: those that differ in their microbatches and bounds alone are written as one, with lists.

    >>> list(each([{"mesh": [], "microbatches": [1, 2], "by": "roofline", "bound": [3.0, 4.0]}]))[1]
    {'mesh': [], 'microbatches': 2, 'by': 'roofline', 'bound': 4.0}
    """
    for entry in pruned:
        counts, bounds = entry.get("microbatches"), entry.get("bound")
        if isinstance(counts, list) and isinstance(bounds, list) and len(counts) == len(bounds):
            yield from ({**entry, "microbatches": m, "bound": b} for m, b in zip(counts, bounds, strict=True))
        else:
            yield entry


def _grouped(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {}
    found = []
    for entry in entries:
        key = json.dumps({k: v for k, v in entry.items() if k not in ("microbatches", "bound")}, sort_keys=True)
        one = known.setdefault(key, entry)
        if one is entry:
            found.append(entry)
            continue
        for name in ("microbatches", "bound"):
            one[name] = [*(one[name] if isinstance(one[name], list) else [one[name]]), entry[name]]
    return found


def _entry(record: Record) -> dict[str, Any]:
    entry: dict[str, Any] = {
        **named(record.candidate),
        "by": record.status,
        "bound": record.bound if isfinite(record.bound) else None,
    }
    if record.why:
        entry["why"] = record.why
    if record.problem is not None:
        entry["problem"] = digest(record.problem)
    if record.multipliers:
        entry["multipliers"] = [[w if isfinite(w) else None for w in m] for m in record.multipliers]
    if record.source is not None:
        entry["of"] = named(record.source)
    return entry


def named(candidate: Candidate) -> dict[str, Any]:
    """A candidate as JSON; ``pipe`` where it has stages: ranks, stages of each, schedule and fill."""
    pipe = candidate.pipe
    stages = {} if pipe == NO_PIPE else {"pipe": [pipe.ranks, pipe.virtual, pipe.schedule, pipe.fill]}
    return {"mesh": [list(axis) for axis in candidate.mesh], "microbatches": candidate.microbatches, **stages}
