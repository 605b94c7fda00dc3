"""Where the units of a model are cut into the stages of a pipeline.

Stages are balanced: the one that takes most is to take as little as possible; of equals those with the fewest bytes
that cross, then those whose stages differ least. Every cut sends something, beside compute: what counts of a send is
by how much it takes longer than the least. Cuts are where one tensor crosses; elsewhere only where that is needed, or
takes a tenth off the largest stage. Modules that pins name each begin a stage.

>>> work = Work(np.array([1.0, 1.0, 1.0, 3.0]), np.zeros(3), np.array([8, 8, 8]))
>>> balanced(work, [1, 2, 3], 2)
[3]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf

import numpy as np
import numpy.typing as npt
from torch import fx

from autopar.errors import AutoparError
from autopar.passes.cut_stages import moved
from autopar.passes.facts import fact, value
from autopar.passes.insert_changes import change
from autopar.passes.lower import Lowerable
from autopar.passes.price import local_bytes
from autopar.passes.units import common_fqn, core_ops, producer_of
from autopar.plan import Op, Plan, PlanClass, Stage, Unit
from autopar.predict_ops import places
from autopar.schema import nearest

FINER = 0.9  # of the seconds of the largest stage: with fewer, cuts where several tensors cross are worth it
SHOWN = 4  # modules that an error names
MOST = 1200  # places of a cut that are tried
CLOSE = 1 + 1e-9  # seconds that are a sum of the same ones in another order

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """``seconds`` of each op, and whether it ``reads`` a parameter (None: all do): every stage has an op that does. Of
    each place between two ops the seconds that a cut there costs (``send``), and the ``nbytes`` that cross it."""

    seconds: Array
    send: Array
    nbytes: npt.NDArray[np.int64]
    reads: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Crossed:
    """Of each place before an op but the first, what is alive there: tensors, and bytes on one rank, there and back."""

    count: npt.NDArray[np.int64]
    forward: npt.NDArray[np.int64]
    backward: npt.NDArray[np.int64]


def crossed(model: Lowerable, parameters: frozenset[str]) -> Crossed:
    """Of a model with changes inserted: what depends on a parameter, made before a place and read after it."""
    at, core, ops = places(model.body), _core(model.body, parameters), 1
    made: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    for node, place in at.items():
        ops = max(ops, place + 1)
        for read in node.all_input_nodes:
            tensor = read
            if producer_of(tensor) in core and producer_of(tensor) in at:
                made[tensor] = at[producer_of(tensor)]
                last[tensor] = max(place, last.get(tensor, 0))
    count, forward, backward = (np.zeros(ops + 1, np.int64) for _ in range(3))
    for tensor, start in made.items():
        v, layout = value(tensor), fact(tensor).strategy
        assert layout is not None and layout.results[0] is not None
        nbytes = local_bytes(v, layout.results[0], model.mesh)
        for table, each in ((count, 1), (forward, nbytes), (backward, nbytes * v.grad)):
            table[start + 1] += each
            table[last[tensor] + 1] -= each
    return Crossed(*(np.cumsum(table)[1:ops] for table in (count, forward, backward)))


def _core(graph: fx.GraphModule, parameters: frozenset[str]) -> set[fx.Node]:
    """The ops that depend on a parameter, and changes of what they make: not those of a parameter's own layout."""
    return set(core_ops(graph, parameters)) - moved(graph.graph)


# -- places of a cut -------------------------------------------------------------------------------------------------


def levels(model: Lowerable, plan: Plan, found: Crossed) -> Iterator[list[int]]:
    """Places where stages may begin, as numbers of ops: between units and where one tensor crosses; then anywhere."""
    at, core = places(model.body), _core(model.body, frozenset(plan.parameters))
    own = sorted({place for node, place in at.items() if node in core and node.target is not change})
    legal = set(own[1:])
    between = {min((p for p in own if p >= start), default=0) for start in unit_edges(plan)[1:-1]} & legal
    narrow = between | {p for p in legal if found.count[p - 1] <= 1}
    every = sorted(legal, key=lambda p: (p not in narrow, int(found.forward[p - 1]), p))[:MOST]
    yield sorted(narrow)
    yield sorted(every)


def cuts(work: Work, places: Iterator[list[int]], stages: int) -> list[int]:
    """Where stages but the first begin. Raises AutoparError where the model has too few ops."""
    best: list[int] = []
    least = inf
    for level in places:
        if len(level) < stages - 1:
            continue
        found = balanced(work, level, stages)
        if not found:
            continue
        slowest = _slowest(work, found)
        if slowest < FINER * least:
            best, least = found, slowest
    if not best:
        raise AutoparError(f"pins: {stages} stages are more than the model has pieces with parameters. Pin fewer.")
    return best


def _slowest(work: Work, at: Sequence[int]) -> float:
    edges = [0, *at, len(work.seconds)]
    sent = np.concatenate([[0.0], work.send, [0.0]])
    return max(float(work.seconds[a:b].sum() + sent[a] + sent[b]) for a, b in pairwise(edges))


def balanced(
    work: Work, legal: Sequence[int], stages: int, allowed: Callable[[int], npt.NDArray[np.bool_]] | None = None
) -> list[int]:
    """The places of ``legal`` (ascending) at which to cut, exact, by dynamic programming. ``allowed``: for a stage, of
    each pair of edges (0, the places, the end) whether it may lie between them. Empty where there is no way."""
    edges = np.array([0, *legal, len(work.seconds)])
    until = np.concatenate([[0.0], np.cumsum(work.seconds)])[edges]
    sent = np.concatenate([[0.0], work.send, [0.0]])[edges]
    nbytes = np.concatenate([[0], work.nbytes, [0]])[edges]
    cost = until[None, :] - until[:, None] + sent[None, :] + sent[:, None]
    cost[np.tril_indices(len(edges))] = inf
    if work.reads is not None:
        read = np.concatenate([[0], np.cumsum(work.reads)])[edges]
        cost[read[None, :] <= read[:, None]] = inf
    costs = [cost if allowed is None else np.where(allowed(s), cost, inf) for s in range(stages)]
    best = costs[0][0]
    for each in costs[1:]:
        best = np.maximum(best[:, None], each).min(axis=0)
    limit = best[-1] * CLOSE
    if not limit < inf:
        return []
    return _fewest_bytes([np.where(each <= limit, each, inf) for each in costs], nbytes, edges)


def _fewest_bytes(costs: Sequence[Array], nbytes: npt.NDArray[np.int64], edges: npt.NDArray[np.int64]) -> list[int]:
    """Of the cuts whose stages ``costs`` allows those of the fewest bytes, then of the least sum of squares."""
    moved = np.where(np.isfinite(costs[0][0]), nbytes.astype(float), inf)
    square = costs[0][0] ** 2
    back = []
    for each in costs[1:]:
        total = np.where(np.isfinite(each), moved[:, None] + nbytes[None, :], inf)
        squares = np.where(total <= total.min(axis=0), square[:, None] + each**2, inf)
        back.append(squares.argmin(axis=0))
        moved, square = total.min(axis=0), squares.min(axis=0)
    at, found = len(edges) - 1, list[int]()
    for before in reversed(back):
        at = int(before[at])
        found.append(int(edges[at]))
    return found[::-1]


def pinned(model: Lowerable, plan: Plan, modules: Sequence[str]) -> list[int]:
    """Where stages begin that begin with these modules. Raises AutoparError for a name that no op is of, and where they
    do not follow each other."""
    at, core = places(model.body), _core(model.body, frozenset(plan.parameters))
    named = sorted((place, fact(n).fqn) for n, place in at.items() if n in core and n.target is not change)
    known = list(dict.fromkeys(prefix for _, fqn in named for prefix in _prefixes(fqn)))
    found = list[int]()
    for name in modules:
        first = next((place for place, fqn in named if f"{fqn}.".startswith(f"{name}.")), None)
        if first is None:
            ends = next((f", did you mean {k!r}?" for k in known if k.endswith(f".{name}")), "")
            meant = nearest(name, known) or ends or f". There are {', '.join(known[:SHOWN])} and others."
            raise AutoparError(f"pin cut: no op of the model is in a module {name!r}{meant}")
        before = found[-1] if found else named[0][0]
        if first <= before:
            after = modules[len(found) - 1] if found else "the beginning of the model"
            raise AutoparError(f"pin cut: {name} does not come after {after}. Name modules in the order they run in.")
        found.append(first)
    return found


def _prefixes(fqn: str) -> list[str]:
    words = fqn.split(".") if fqn else []
    return [".".join(words[: i + 1]) for i in range(len(words))]


# -- the plan --------------------------------------------------------------------------------------------------------


def unit_edges(plan: Plan) -> list[int]:
    """The ops at which units begin, and the number of ops."""
    return [0, *accumulate(len(plan.classes[unit.kind].ops) for unit in plan.units)]


def with_stages(plan: Plan, at: Sequence[int]) -> Plan:
    """The plan cut before these ops. A unit that is cut becomes two, of classes of their own."""
    classes, units, stages = list(plan.classes), list[Unit](), list[Stage]()
    known: dict[tuple[int, int, int], int] = {}
    start, first, cut_at = 0, 0, [*at]
    for unit in plan.units:
        stop = start + len(plan.classes[unit.kind].ops)
        edges = [start, *(p for p in cut_at if start < p < stop), stop]
        for begin, end in pairwise(edges):
            if begin in cut_at:
                stages.append(Stage(first, len(units)))
                first = len(units)
            piece = (unit.kind, begin - start, end - start)
            if end - begin == stop - start:
                units.append(unit)
                continue
            if piece not in known:
                known[piece] = len(classes)
                classes.append(_piece(plan.classes[unit.kind], begin - start, end - start))
            made = classes[known[piece]]
            units.append(Unit(_renamed(made.fqn, classes[unit.kind].fqn, unit.fqn), known[piece]))
        start = stop
    stages.append(Stage(first, len(units)))
    used = sorted({u.kind for u in units})
    return replace(
        plan,
        classes=tuple(classes[k] for k in used),
        units=tuple(replace(u, kind=used.index(u.kind)) for u in units),
        stages=tuple(stages),
    )


def _piece(group: PlanClass, begin: int, end: int) -> PlanClass:
    ops: tuple[Op, ...] = tuple(replace(op, index=k) for k, op in enumerate(group.ops[begin:end]))
    extra = tuple(replace(x, of=x.of - begin) for x in group.extra if begin <= x.of < end)
    return PlanClass(common_fqn([op.fqn for op in ops]) or group.fqn, ops, extra, group.recompute)


def _renamed(piece: str, of: str, unit: str) -> str:
    """The name of a piece in another unit of its class."""
    return unit + piece.removeprefix(of) if f"{piece}.".startswith(f"{of}.") else piece


__all__ = ["Crossed", "Work", "balanced", "crossed", "cuts", "levels", "pinned", "unit_edges", "with_stages"]
