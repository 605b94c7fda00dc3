"""What a run of units takes at least if it is a stage, at prices of its resources: all runs at once.

For prices p >= 0 of the resources, a stage of units ``[i, j)`` costs at least the least of ``p @ resources`` over the
assignments of its units alone. The units of a problem stand in a row; what two units in succession share is a *link*
between them. The least of a run is found along the row as a shortest path over the states of links, for all ends
together, and starts whose units cost the same are taken once. Three things are relaxed, so that it is never above what
a stage takes:

- units beyond both ends are left out, so a link at an end takes the state that suits the run;
- a shared variable whose units do not follow each other, or that would make a link too wide (`LINK`), is *long*: every
  unit of the run sees it in the state that suits that unit;
- of a long variable a run with one of its units pays once, in the cheapest of its states.

A run pays bytes of all that it touches; seconds of a tensor only where it has the unit that makes it, as `stages`.
As no cost is negative, a run costs no less than one inside of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod

import numpy as np
import numpy.typing as npt

from autopar.solver.eliminate import Elimination, Scope
from autopar.solver.evaluate import Evaluation, Point
from autopar.solver.problem import COMPUTE, EXPOSED, HIDDEN, RESOURCES, TRANSIENT, Array, Index, joined, together

LINK = 512
"""States of a link at most."""
Mask = npt.NDArray[np.bool_]
SECONDS = (COMPUTE, EXPOSED, HIDDEN)


@dataclass(frozen=True, eq=False)
class _Step:
    """A unit between two links. ``locals``: its shared variables; ``new``: those that it is the first to touch;
    ``long``: those that it sees for itself; ``ins``, ``outs``: places in ``locals`` of those of the links."""

    kind: int
    locals: tuple[int, ...]
    new: tuple[int, ...]
    long: tuple[int, ...]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    elimination: Elimination


@dataclass(frozen=True, eq=False)
class _Offset:
    """The runs of one length: of each different one the run that it prolongs, and by which step; of each start which
    one it is (-1: past the end)."""

    parents: tuple[int, ...]
    steps: tuple[int, ...]
    of: Index


class Row:
    """The units of a problem in a row, ready for prices. ``longest``: units of the longest run that is priced (longer
    ones cost no less than their first ``longest`` units). ``floors``: [starts, lengths], bytes of a transient that each
    run has at least."""

    def __init__(self, evaluation: Evaluation, longest: int) -> None:
        self.evaluation, self.problem = evaluation, evaluation.problem
        self.units = len(self.problem.units)
        touched: dict[int, list[int]] = {}
        for k, unit in enumerate(self.problem.units):
            for v in dict.fromkeys(unit.borders):
                touched.setdefault(v, []).append(k)
        self.touched: Mapping[int, Sequence[int]] = touched
        self.first = {v: ks[0] for v, ks in touched.items()}
        self.links, self.long = self._links()
        self.untouched = tuple(v for v in range(len(self.problem.shared)) if v not in touched)
        self._costs = self._equal_costs()
        self.steps: list[_Step] = []
        self.step_of = self._number_steps()
        self.entries: list[int] = []
        entry_of = self._number_entries()
        self.longest = max(1, min(longest if self._nonnegative() else self.units, self.units))
        self.offsets = self._share(entry_of)
        self.floors = self._floors()
        self.once = self._long_runs()

    @cached_property
    def sends(self) -> Array:
        """Seconds of a microbatch's messages to each run at least, [starts, lengths]."""
        pipeline, shared = self.problem.pipeline, self.problem.shared
        total = np.zeros((self.units, self.longest))
        for v, touching in self.touched.items() if pipeline is not None else ():
            assert pipeline is not None
            legal = np.isfinite(shared[v].costs).all(1)
            least = float(pipeline.sends[v][legal].min(initial=inf)) if legal.any() else 0.0
            if least > 0 and len(touching) > 1:
                any_, made = self._has(v)
                total += least * (any_ & ~made)
        return total

    def _links(self) -> tuple[list[tuple[int, ...]], frozenset[int]]:
        """The variables of each link (before unit k), and the long ones."""
        sizes, long = self.evaluation.sizes, set[int]()
        for v, ks in self.touched.items():
            if ks[-1] - ks[0] + 1 != len(ks):
                long.add(v)
        across: list[list[int]] = [[] for _ in range(self.units + 1)]
        for v, ks in self.touched.items():
            for k in range(ks[0] + 1, ks[-1] + 1) if v not in long else ():
                across[k].append(v)
        for vs in across:
            width = 1
            for v in sorted(vs, key=lambda v: (-sizes[v], v)):
                if width * sizes[v] > LINK:
                    long.add(v)
                elif v not in long:
                    width *= sizes[v]
        return [tuple(sorted(v for v in vs if v not in long)) for vs in across], frozenset(long)

    def _equal_costs(self) -> list[int]:
        """Of each shared variable a number that those with equal costs have, too."""
        known: dict[tuple[bool, bytes], int] = {}
        keys = [(v.kind == "parameter", v.costs.tobytes()) for v in self.problem.shared]
        return [known.setdefault(key, len(known)) for key in keys]

    def _number_steps(self) -> list[int]:
        """Of each unit its step; equal units have the same."""
        known: dict[object, int] = {}
        found = []
        for k, unit in enumerate(self.problem.units):
            mine = tuple(dict.fromkeys(unit.borders))
            ins, outs = (tuple(mine.index(v) for v in links) for links in (self.links[k], self.links[k + 1]))
            new = tuple(i for i, v in enumerate(mine) if self.first[v] == k and v not in self.long)
            long = tuple(i for i, v in enumerate(mine) if v in self.long)
            places = tuple(mine.index(b) for b in unit.borders)
            costs = tuple(self._costs[v] for v in mine)
            key = (unit.kind, places, costs, new, long, ins, outs)
            if key not in known:
                known[key] = len(known)
                elimination = self._elimination(unit.kind, places, mine, {*ins, *outs})
                self.steps.append(_Step(unit.kind, mine, new, long, ins, outs, elimination))
            found.append(known[key])
        return found

    def _elimination(self, kind: int, places: tuple[int, ...], mine: tuple[int, ...], keep: set[int]) -> Elimination:
        """A class's tables over a unit's shared variables, down to those of its links."""
        sizes = [self.evaluation.sizes[v] for v in mine]
        scopes = [Scope((i,), (np.arange(n),)) for i, n in enumerate(sizes)]
        own, inner = len(self.problem.classes[kind].variables), self.evaluation._classes[kind].elimination
        for t in inner.left:
            scope = inner.scopes[t]
            scopes.append(Scope(tuple(places[v - own] for v in scope.variables), scope.maps))
        return Elimination(sizes, scopes, keep, self.evaluation._top.limit)

    def _number_entries(self) -> list[int]:
        """Of each start which link it enters by; those with equal costs are one (``_entries``: a unit of each)."""
        known: dict[object, int] = {}
        found = []
        for k in range(self.units):
            key = tuple(self._costs[v] for v in self.links[k])
            if key not in known:
                known[key] = len(known)
                self.entries.append(k)
            found.append(known[key])
        return found

    def _share(self, entry_of: list[int]) -> list[_Offset]:
        """Runs of equal units from equal links, once each, length by length."""
        now, offsets = np.array(entry_of, np.int64), []
        steps = np.array(self.step_of, np.int64)
        for length in range(self.longest):
            live = np.arange(self.units - length)
            key = now[live] * len(self.steps) + steps[live + length]
            kinds, of = np.unique(key, return_inverse=True)
            parents, by = kinds // len(self.steps), kinds % len(self.steps)
            now = np.full(self.units, -1, np.int64)
            now[live] = of
            offsets.append(_Offset(tuple(parents.tolist()), tuple(by.tolist()), now))
        return offsets

    def paid(self, v: int, state: int, first: int) -> Array:
        """What a stage that begins at unit ``first`` pays for a shared variable that it touches."""
        costs: Array = self.problem.shared[v].costs[state].copy()
        if v in self.first and self.first[v] < first and self.problem.shared[v].kind != "parameter":
            costs[list(SECONDS)] = 0.0
        return costs

    def _floors(self) -> Array:
        rows = {k: self.evaluation._classes[k].rows for k in {u.kind for u in self.problem.units}}
        floor = {}
        for k, r in rows.items():
            spans = list(zip(r.starts[:-1], r.starts[1:], strict=True))
            legal = [r.transient[a:b][~r.illegal[a:b]] for a, b in spans]
            floor[k] = max((float(t.min()) for t in legal if len(t)), default=0.0)
        mine = np.array([floor[u.kind] for u in self.problem.units])
        for v, ks in self.touched.items():
            costs = self.problem.shared[v].costs
            least = float(costs[np.isfinite(costs).all(1), TRANSIENT].min(initial=inf))
            mine[list(ks)] = np.maximum(mine[list(ks)], least if least < inf else 0.0)
        found = np.zeros((self.units, self.longest))
        for length in range(self.longest):
            before = found[: self.units - length, length - 1] if length else 0.0
            found[: self.units - length, length] = np.maximum(before, mine[length:])
        return found

    def _long_runs(self) -> list[tuple[Array, Array, int]]:
        """For long variables: the runs that touch it, those that also pay its seconds, and one of those with its costs
        (runs by how many there are)."""
        found: dict[int, tuple[Array, Array, int]] = {}
        for v in sorted(self.long):
            any_, made = self._has(v)
            pays = any_ if self.problem.shared[v].kind == "parameter" else made
            has, makes, one = found.get(self._costs[v], (0.0, 0.0, v))
            found[self._costs[v]] = (has + any_.astype(float), makes + pays.astype(float), one)
        return [f for f in found.values() if self.problem.shared[f[2]].costs.any()]

    def _has(self, v: int) -> tuple[Mask, Mask]:
        """Which runs touch a variable, and which of them make it: [starts, lengths]."""
        count = np.zeros(self.units + self.longest + 1, np.int64)
        count[np.array(self.touched[v]) + 1] = 1
        count = count.cumsum()
        starts, ends = np.arange(self.units)[:, None], np.arange(self.units)[:, None] + np.arange(1, self.longest + 1)
        return np.asarray(count[ends] > count[starts]), np.asarray((starts <= self.first[v]) & (self.first[v] < ends))

    def _nonnegative(self) -> bool:
        rows = [self.evaluation._shared.rows, *(c.rows.rows for c in self.evaluation._classes)]
        return all(bool((r >= 0).all()) for r in rows)


class Priced:
    """A row at one choice of weights of the resources, without transients above ``high`` bytes: the least of each run,
    and what reaches it."""

    def __init__(self, row: Row, weights: Array, high: float = inf) -> None:
        self.row, self.weights = row, weights
        self.point = Point(row.evaluation, weights, high)
        held = weights.copy()
        held[list(SECONDS)] = 0.0
        shared = row.evaluation._shared
        self.full = shared.price(weights, high)
        without = shared.price(held, high)
        parameter = [v.kind == "parameter" for v in row.problem.shared]
        self.held = [f if p else h for f, h, p in zip(self.full, without, parameter, strict=True)]
        self._tables: dict[int, list[Array]] = {}
        self._matrices: dict[int, Array] = {}

    @cached_property
    def least(self) -> Array:
        """The least of ``weights @ resources`` of each run, [starts, lengths]; infinite where no assignment is legal,
        and past the end."""
        row = self.row
        states = [self._entry(k) for k in row.entries]
        found = np.full((row.units, row.longest), inf)
        for length, offset in enumerate(row.offsets):
            states = [_through(states[p], self._matrix(s)) for p, s in zip(offset.parents, offset.steps, strict=True)]
            values = np.array([*(s.min(initial=inf) for s in states), inf])
            found[:, length] = values[offset.of]
        for has, makes, v in row.once:
            held, full = (float(p[v].min()) for p in (self.held, self.full))
            found = found + (has - makes) * held + makes * full if full < inf else np.where(has > 0, inf, found)
        found[0] += sum(float(self.full[v].min()) for v in row.untouched)
        return found

    @cached_property
    def beyond(self) -> Array:
        """What a run grows by at least with each unit that it is longer, added up from the first unit: [units + 1]."""
        least = {number: float(self._matrix(number).min(initial=inf)) for number in set(self.row.step_of)}
        each = np.array([least[number] if np.isfinite(least[number]) else 0.0 for number in self.row.step_of])
        return np.concatenate([[0.0], each.cumsum()])

    def total(self, first: int, last: int) -> Array:
        """The resources of an assignment that reaches the least of a run, as `problem.joined` has them (comes near it:
        long variables take their cheapest states)."""
        row = self.row
        passed = [self._entry(first)]
        for k in range(first, last):
            passed.append(_through(passed[-1], self._matrix(row.step_of[k])))
        if not np.isfinite(passed[-1]).any():
            return np.full(len(RESOURCES), inf)
        at, rows, shared = int(passed[-1].argmin()), list[Array](), dict[int, int]()
        for k in range(last - 1, first - 1, -1):
            before = int((passed[k - first] + self._matrix(row.step_of[k])[:, at]).argmin())
            states = self._states(k, before, at)
            shared.update({v: s for v, s in states.items() if v not in row.long})
            unit = row.problem.units[k]
            rows.append(self.point.between(unit.kind, tuple(states[b] for b in unit.borders)).total)
            at = before
        for v in sorted(row.long):
            if any(first <= k < last for k in row.touched[v]):
                shared[v] = int(self.held[v].argmin())
        if first == 0:
            shared.update({v: int(self.full[v].argmin()) for v in row.untouched})
        own = [row.paid(v, s, first) for v, s in sorted(shared.items())]
        return joined([*([together(np.stack(own))] if own else []), *rows])

    def _states(self, k: int, before: int, after: int) -> dict[int, int]:
        """The states of a unit's shared variables between states of its links."""
        row, number = self.row, self.row.step_of[k]
        mine = tuple(dict.fromkeys(row.problem.units[k].borders))
        kept = {}
        for links, at in ((row.links[k], before), (row.links[k + 1], after)):
            sizes = [row.evaluation.sizes[v] for v in links]
            for v, s in zip(links, np.unravel_index(at, sizes) if links else (), strict=True):
                kept[mine.index(v)] = int(s)
        found = row.steps[number].elimination.decode(self._step_tables(number), kept)
        return dict(zip(mine, found, strict=True))

    def _entry(self, k: int) -> Array:
        """What a run pays for the link that it enters by, before unit k, by its state."""
        links = self.row.links[k]
        total = np.zeros([self.row.evaluation.sizes[v] for v in links])
        for axis, v in enumerate(links):
            total += self.held[v].reshape([-1 if a == axis else 1 for a in range(len(links))])
        return total.reshape(-1)

    def _step_tables(self, number: int) -> list[Array]:
        """The tables of a step, given and made."""
        if number not in self._tables:
            step = self.row.steps[number]
            legal = [np.where(np.isfinite(self.full[v]), 0.0, inf) for v in step.locals]
            own = [self.full[v] if i in step.new else legal[i] for i, v in enumerate(step.locals)]
            inner, tables = self.row.evaluation._classes[step.kind].elimination, self.point.tables(step.kind)
            self._tables[number] = step.elimination.run([*own, *(tables[t] for t in inner.left)])
        return self._tables[number]

    def _matrix(self, number: int) -> Array:
        """What a step costs between the states of its links, [states, states]."""
        if number not in self._matrices:
            step, tables = self.row.steps[number], self._step_tables(number)
            every = [self.row.evaluation.sizes[v] for v in step.locals]
            axes = [*step.ins, *step.outs]
            total = np.zeros([every[i] for i in axes])
            for t in step.elimination.left:
                scope = step.elimination.scopes[t]
                values = tables[t][np.ix_(*scope.maps)] if scope.variables else tables[t]
                places = [axes.index(i) for i in scope.variables]
                values = values.transpose(np.argsort(places)) if places else values
                total = total + values.reshape([every[i] if a in places else 1 for a, i in enumerate(axes)])
            for i in set(step.ins) & set(step.outs):
                a, b = step.ins.index(i), len(step.ins) + step.outs.index(i)
                same = np.where(np.eye(every[i], dtype=bool), 0.0, inf)
                total = total + same.reshape([every[i] if x in (a, b) else 1 for x in range(len(axes))])
            self._matrices[number] = total.reshape(prod(every[i] for i in step.ins), -1)
        return self._matrices[number]


def _through(states: Array, matrix: Array) -> Array:
    return np.asarray((states[:, None] + matrix).min(0))
