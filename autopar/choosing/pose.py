"""From a captured graph, a mesh and a number of microbatches to the `Problem` that the solver gets.

`Poser` keeps what does not depend on the mesh; `Posed` has the problem and what its states stand for. What is priced:

- op: its strategies, by roofline, and the inputs that it is the first to read; a tensor that several slots read (or
  several units touch): the one layout in which it is shared; a parameter: how it rests, is gathered and reduced.
- change of layout between two of them: exposed seconds; of parameters, and of what depends on parameters alone: hidden.
- saved bytes: at the reader whose operand backward keeps, in the layout that it reads; of a tensor with several such
  readers once, in the shared layout. A view's storage counts at the tensor that owns it. A weight gathered at its use
  counts as working memory of the op that reads it.
- what a unit makes again (its policy: a variable): instead of saved bytes bytes made again, and the seconds of that
  (`kept`). Masks, tables and ids are made once, whatever the policy.
- a thousandth of all hidden seconds is exposed: of plans that hide all of it, the one that moves least is taken.
- the side (`passes.units`) costs nothing here but what one op of the core alone keeps of it, so that bounds hold; it is
  decided afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import fx

from autopar.choosing.again import POLICIES, Style
from autopar.choosing.kept import Keeping, at_reader
from autopar.choosing.op_states import Column, Menu, OpStates, arriving_parts, op_states
from autopar.choosing.tables import UNHIDDEN, Tables
from autopar.choosing.wiring import Tensor, Wiring, groups_of, styles
from autopar.cluster import Cluster
from autopar.optimizer_states import state_bytes
from autopar.passes.calls import call_key
from autopar.passes.facts import Choice, Value, value
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.parameter_states import ParameterState, Together, parameter_states
from autopar.passes.price import local_bytes
from autopar.passes.roles import Roles
from autopar.passes.strategy import Proposal
from autopar.passes.units import Units
from autopar.plan import Optimizer
from autopar.runtime.buckets import CAP
from autopar.solver.cost import cast, update
from autopar.solver.problem import (
    COMPUTE,
    EXPOSED,
    HIDDEN,
    RESOURCES,
    SAVED,
    STATIC,
    TRANSIENT,
    Array,
    Class,
    Factor,
    Problem,
    Unit,
    Variable,
)
from autopar.wires import wire_of


@dataclass(frozen=True, eq=False)
class Posed:
    """A problem and what its states stand for. ``ops``: per class, of each op; ``parameters``: per class, of each of
    its own; ``hubs``: likewise of tensors; ``shared``: of each shared variable (layouts or parameter states);
    ``policies``: per class, of recomputation; ``roles``: of pinned axes."""

    problem: Problem
    mesh: Mesh
    units: Units
    ops: tuple[tuple[OpStates, ...], ...]
    hubs: tuple[tuple[tuple[Layout, ...], ...], ...]
    parameters: tuple[tuple[tuple[ParameterState, ...], ...], ...]
    shared: tuple[tuple[Layout, ...] | tuple[ParameterState, ...], ...]
    policies: tuple[tuple[str, ...], ...]
    roles: Roles | None = None

    def with_parameters(self, changed: Callable[[Variable, tuple[ParameterState, ...]], Variable]) -> Problem:
        """The problem with every parameter's variable ``changed``, given what its states stand for."""
        shared = tuple(
            changed(v, of) if v.kind == "parameter" else v  # type: ignore[arg-type]
            for v, of in zip(self.problem.shared, self.shared, strict=True)
        )
        classes = []
        for kind, of in zip(self.problem.classes, self.parameters, strict=True):
            *others, again = kind.variables  # the last but for what the unit makes again are its parameters
            first = len(others) - len(of)
            held = (changed(v, states) for v, states in zip(others[first:], of, strict=True))
            classes.append(replace(kind, variables=(*others[:first], *held, again)))
        return replace(self.problem, shared=shared, classes=tuple(classes))


def mesh_of(
    cluster: Cluster, axes: Sequence[tuple[int, int]], rows: tuple[int, ...], names: Sequence[str] = ()
) -> Mesh:
    """The mesh of axes (size, stride), outermost first, neutral ones if not named, and of several microbatches of
    ``rows``."""
    names = names or [f"axis{i}" for i in range(len(axes))]
    space = [Axis(names[i], size, wire=wire_of(cluster, size, stride)) for i, (size, stride) in enumerate(axes)]
    return Mesh((*space, Axis("time", len(rows), rows)) if len(rows) > 1 else tuple(space))


def pose(
    name: str,
    mesh: Mesh,
    units: Units,
    wirings: Sequence[Wiring],
    times: Mapping[fx.Node, Choice],
    proposals: Mapping[fx.Node, Sequence[Proposal]],
    cluster: Cluster,
    *,
    zero: int | None = None,
    policies: Sequence[str] = POLICIES,
    menu: Menu | None = None,
    roles: Roles | None = None,
    optimizer: Optimizer,
) -> Posed:
    """The problem on ``mesh``. ``times``: the choice of each op on the time axis; ``zero``: the only stage allowed;
    ``policies``: of recomputation, those allowed; ``roles``: of pinned axes."""
    return _Pose(mesh, cluster, zero, policies, menu or Menu(), optimizer, roles).run(
        name, units, wirings, times, proposals
    )


@dataclass(eq=False)
class _Pose:
    mesh: Mesh
    cluster: Cluster
    zero: int | None
    policies: Sequence[str]
    menu: Menu
    optimizer: Optimizer
    roles: Roles | None = None

    def __post_init__(self) -> None:
        self.tables = Tables(self.mesh)
        self.plain, self.microbatches = self.tables.plain, self.tables.microbatches
        self._together: dict[object, Together] = {}
        self._op_states: dict[object, OpStates] = {}

    def run(
        self,
        name: str,
        units: Units,
        wirings: Sequence[Wiring],
        times: Mapping[fx.Node, Choice],
        proposals: Mapping[fx.Node, Sequence[Proposal]],
    ) -> Posed:
        self._together = _together(units, wirings)
        ops = tuple(self._ops(w, times, proposals) for w in wirings)
        groups, kept = groups_of(units), styles(units, wirings, self.policies)
        shared, states = self._shared(units, wirings, ops, groups, kept)
        classes, hubs, parameters = [], [], []
        for k, wiring in enumerate(wirings):
            places = self._places(units, k)
            made, layouts, held = self._class(
                wiring, ops[k], [states[s] for s in places], [kept[groups[s]] for s in places]
            )
            classes.append(made)
            hubs.append(layouts)
            parameters.append(held)
        generated = sum(o.generated for line in ops for o in line)
        dropped = generated - sum(len(o.strategies) for line in ops for o in line)
        place = {node: i for i, node in enumerate(units.shared)}
        problem = Problem(
            name,
            shared,
            tuple(classes),
            tuple(Unit(u.kind, tuple(place[b] for b in u.borders)) for u in units.units),
            float(self.cluster.limit),
            {"generated": generated, "dominated": dropped},
        )
        policies = tuple(w.policies(self.policies) for w in wirings)
        return Posed(problem, self.mesh, units, ops, tuple(hubs), tuple(parameters), states, policies, self.roles)

    # -- ops -----------------------------------------------------------------------------------------------------

    def _ops(
        self,
        wiring: Wiring,
        times: Mapping[fx.Node, Choice],
        proposals: Mapping[fx.Node, Sequence[Proposal]],
    ) -> tuple[OpStates, ...]:
        """Equal calls share their states."""
        made: dict[fx.Node, tuple[Layout, ...]] = {}
        found: list[OpStates] = []
        outputs = _results(wiring)
        operands = _operands(wiring)
        for i, op in enumerate(wiring.ops):
            parts = list(proposals.get(op, ()))
            for slot in wiring.core[i]:
                parts += arriving_parts(op, slot, made.get(operands[i, slot], ()), self.plain)
            offered, roles = tuple(dict.fromkeys(parts)), self.roles
            key = (call_key(op), times.get(op), offered, wiring.core[i], roles and roles.key(op))
            if key not in self._op_states:
                fixed = roles.fixed(op) if roles else None
                strategies = self.menu.strategies(op, self.plain, times.get(op), offered, fixed)
                strategies = roles.of(op, strategies) if roles else strategies
                self._op_states[key] = op_states(
                    op, strategies, wiring.core[i], self.mesh, self.cluster.chip, self.microbatches
                )
            states = self._op_states[key]
            found.append(states)
            for r, column in enumerate(states.results):
                if column is not None and (i, r) in outputs:
                    made[outputs[i, r]] = column.layouts
        return tuple(found)

    # -- shared variables ----------------------------------------------------------------------------------------

    def _places(self, units: Units, kind: int) -> list[int]:
        """The shared variables of the first unit of a class."""
        place = {node: i for i, node in enumerate(units.shared)}
        return [place[b] for b in units.units[units.first[kind]].borders]

    def _shared(
        self,
        units: Units,
        wirings: Sequence[Wiring],
        ops: Sequence[tuple[OpStates, ...]],
        groups: Sequence[int],
        kept: Mapping[int, Style],
    ) -> tuple[tuple[Variable, ...], tuple[tuple[Layout, ...] | tuple[ParameterState, ...], ...]]:
        layouts: dict[int, dict[Layout, None]] = {}
        view: dict[int, Tensor] = {}
        seen: dict[tuple[int, int], int] = {}
        place = {node: i for i, node in enumerate(units.shared)}
        for unit in units.units:
            for b, node in enumerate(unit.borders):
                seen[unit.kind, b] = groups[place[node]]
        for kind, wiring in enumerate(wirings):
            for t in wiring.tensors:
                if t.border is not None:
                    group = seen[kind, t.border]
                    layouts.setdefault(group, {}).update(dict.fromkeys(self._touching(t, ops[kind])))
                    view.setdefault(group, t)
        in_units: dict[fx.Node, list[Tensor]] = {}
        for unit in units.units:
            for t in wirings[unit.kind].tensors:
                if t.border is not None:
                    in_units.setdefault(unit.borders[t.border], []).append(t)
        outputs = {t.node: t for w in wirings for t in w.tensors if t.output is not None}
        variables, states = list[Variable](), list[tuple[Layout, ...] | tuple[ParameterState, ...]]()
        made: dict[int, tuple[Variable, tuple[Layout, ...] | tuple[ParameterState, ...]]] = {}
        for i, node in enumerate(units.shared):
            group = groups[i]
            if group not in made or node in outputs:
                t = outputs.get(node, view[group])
                made[group] = self._variable(t, tuple(layouts[group]), kept[group], in_units[node])
            variable, of = made[group]
            variables.append(
                Variable(str(node.target if t.parameter else node), variable.kind, variable.states, variable.costs)
            )
            states.append(of)
        return tuple(variables), tuple(states)

    def _touching(self, t: Tensor, ops: Sequence[OpStates]) -> list[Layout]:
        """The layouts in which a unit makes or reads a tensor."""
        found: dict[Layout, None] = {}
        if t.made is not None:
            found.update(dict.fromkeys(_column(ops[t.made[0]].results, t.made[1]).layouts))
        for reader in t.readers:
            found.update(dict.fromkeys(_column(ops[reader.op].operands, reader.slot).layouts))
        return list(found)

    def _variable(
        self, t: Tensor, layouts: tuple[Layout, ...], style: Style = "never", in_units: Sequence[Tensor] = ()
    ) -> tuple[Variable, tuple[Layout, ...] | tuple[ParameterState, ...]]:
        """``style``: of a tensor between units; where several of these may keep it, its layouts come twice, the second
        time for where it is kept. ``in_units``: as each unit that touches it sees it (none: it is one's own)."""
        name = str(t.node.target) if t.parameter else t.node.name
        if t.parameter:
            uses = tuple(dict.fromkeys(map(_made_of, layouts)))
            over = None if self.roles is None else self.roles.over
            together = self._together[_alike(t.value)]
            gathers = sum(1 + any(r.keeps for r in seen.readers) for seen in in_units or [t])
            states = tuple(parameter_states(t.value, uses, self.mesh, self.zero, over, together, gathers))
            if self.roles is not None:
                states = tuple(self.roles.resting(name, states, self.mesh))
            return Variable(name, "parameter", tuple(map(str, states)), self._held(t.value, states)), states
        if self.roles is not None:
            layouts = self.roles.shared(t.node, layouts)
        rows = np.zeros((len(layouts), len(RESOURCES)))
        rows[:, EXPOSED] = self._returned(t, layouts)
        words, twice = tuple(map(str, layouts)), style == "both"
        if twice:
            words, rows = (*words, *(f"{w}, kept" for w in words)), np.tile(rows, (2, 1))
        if style in ("always", "both"):
            rows[-len(layouts) :, SAVED] += self.tables.bytes(t.value, layouts)
        return Variable(name, "tensor", words, rows), layouts * (1 + twice)

    def _held(self, v: Value, states: Sequence[ParameterState]) -> Array:
        """Costs of a parameter's states of their own. In mixed precision what is used is a copy also where it does not
        move, and gradients of several microbatches add up in the dtype of rest."""
        rows, rate = np.zeros((len(states), len(RESOURCES))), self.cluster.chip.memory_rate
        summed = v.resting if self.microbatches > 1 else v
        for row, s in zip(rows, states, strict=True):
            rest, use = local_bytes(v.resting, s.rest, self.plain), local_bytes(v, s.use, self.plain)
            kept = state_bytes(self.optimizer, v.shape, v.resting.dtype, rest) if v.grad else 0.0
            row[STATIC] = rest * (2 if v.grad else 1) + kept
            if s.gather == "step" or (s.gather == "never" and v.rest_dtype):
                row[STATIC] += use
            if s.gather == "step" and v.grad and s.reduce == "step":
                row[STATIC] += local_bytes(summed, s.use, self.plain)
            row[COMPUTE] = update(rest, kept, rate) if v.grad else 0.0
            if v.rest_dtype:
                row[COMPUTE] += s.enters(self.microbatches) * cast(rest, local_bytes(v, s.rest, self.plain), rate)
            moved = s.moved(self.microbatches)
            row[HIDDEN], row[EXPOSED] = moved.hidden, moved.exposed + UNHIDDEN * moved.hidden
        return rows

    # -- a class -------------------------------------------------------------------------------------------------

    def _class(
        self,
        wiring: Wiring,
        ops: tuple[OpStates, ...],
        borders: Sequence[tuple[Layout, ...] | tuple[ParameterState, ...]],
        kept: Sequence[Style],
    ) -> tuple[Class, tuple[tuple[Layout, ...], ...], tuple[tuple[ParameterState, ...], ...]]:
        unary = [o.costs.copy() for o in ops]
        for rows in unary:
            rows[:, SAVED] = 0.0
        for i, slot, node in wiring.inputs:
            unary[i][:, STATIC] += self._arriving(value(node), [s.operands[slot] for s in ops[i].strategies])
        for i, slot, node in wiring.sides:
            unary[i][:, SAVED] += self.tables.bytes(value(node), [s.operands[slot] for s in ops[i].strategies])
        kinds: list[Variable] = []
        place: dict[fx.Node, int] = {}
        states: dict[fx.Node, tuple[Layout, ...] | tuple[ParameterState, ...]] = {}
        for t in (*wiring.own(parameters=False), *wiring.own(parameters=True)):
            variable, states[t.node] = self._variable(t, tuple(dict.fromkeys(self._touching(t, ops))))
            place[t.node] = len(ops) + len(kinds)
            kinds.append(variable)
        policies = wiring.policies(self.policies)
        keeping = Keeping(wiring, policies, self.tables, len(ops) + len(kinds))
        kinds.append(Variable("recompute", "recompute", policies, np.zeros((len(policies), len(RESOURCES)))))
        for t in wiring.tensors:
            if t.border is not None:
                place[t.node] = len(ops) + len(kinds) + t.border
                states[t.node] = borders[t.border]
        styled = {t.node: kept[t.border] for t in wiring.tensors if t.border is not None}
        factors: list[Factor] = []
        owned: dict[int, list[tuple[int, Array]]] = {}
        for t in wiring.tensors:
            style = styled.get(t.node)
            if t.made is not None and t.own and style not in ("always", "both"):
                column = _column(ops[t.made[0]].results, t.made[1])
                nbytes = self.tables.bytes(t.value, column.layouts)[column.of]
                owned.setdefault(t.made[0], []).append((t.made[1], nbytes))
            if t.parameter:
                factors += self._read_parameter(t, ops, place[t.node], states[t.node])  # type: ignore[arg-type]
            elif t.hub:
                factors += self._share(t, ops, keeping, place[t.node], states[t.node], style)  # type: ignore[arg-type]
            elif t.made is not None and t.readers:
                factors.append(self._direct(t, ops, keeping))
            elif t.made is not None and t.output is not None:
                column = _column(ops[t.made[0]].results, t.made[1])
                unary[t.made[0]][:, EXPOSED] += self._returned(t, column.layouts)[column.of]
        for i, o in enumerate(ops):
            made = keeping.factor(
                (i,), (np.arange(len(o.costs)),), np.zeros_like(o.costs), keeping.op(i, o, owned.get(i, ()))
            )
            if len(made.over) == 1:
                unary[i] += made.table
            else:
                factors.append(made)
        named = [
            Variable(op.name, "op", tuple(_text(s.choices) for s in o.strategies), rows)
            for op, o, rows in zip(wiring.ops, ops, unary, strict=True)
        ]
        found = Class(wiring.name, (*named, *kinds), tuple(factors), tuple(b.name for b in wiring.borders))
        hubs = tuple(states[t.node] for t in wiring.own(parameters=False))
        held = tuple(states[t.node] for t in wiring.own(parameters=True))
        return found, hubs, held  # type: ignore[return-value]

    def _direct(self, t: Tensor, ops: Sequence[OpStates], keeping: Keeping) -> Factor:
        """From the op that makes a tensor straight to its one reader."""
        assert t.made is not None
        (reader,) = t.readers
        source = _column(ops[t.made[0]].results, t.made[1])
        target = _column(ops[reader.op].operands, reader.slot)
        table = self.tables.changes(t, source.layouts, target.layouts)
        effects = keeping.direct(t, reader, source.layouts, target.layouts)
        return keeping.factor((t.made[0], reader.op), (source.of, target.of), table, effects)

    def _share(
        self,
        t: Tensor,
        ops: Sequence[OpStates],
        keeping: Keeping,
        at: int,
        states: tuple[Layout, ...],
        style: Style | None,
    ) -> list[Factor]:
        """From the op that makes a tensor to its shared layout, and from there to each reader."""
        layouts = states[: len(states) // 2] if style == "both" else states
        every, found = np.arange(len(states)) % len(layouts), []
        if t.made is not None:
            source = _column(ops[t.made[0]].results, t.made[1])
            table = self.tables.changes(t, source.layouts, layouts)
            effects = keeping.make(t, source.layouts, layouts, style)
            found.append(keeping.factor((t.made[0], at), (source.of, every), table, effects))
        for reader in t.readers:
            target = _column(ops[reader.op].operands, reader.slot)
            table = self.tables.changes(t, layouts, target.layouts)
            free = style not in ("one", "never", None) or not at_reader(t)
            effects = keeping.read(t, reader, layouts, target.layouts, free=free)
            found.append(keeping.factor((at, reader.op), (every, target.of), table, effects))
        if style is not None:
            found += keeping.hold(t, at, layouts, style)
        return found

    def _read_parameter(
        self, t: Tensor, ops: Sequence[OpStates], at: int, states: tuple[ParameterState, ...]
    ) -> list[Factor]:
        """From how a parameter is used to each reader. One that is gathered here is held while the reader works."""
        uses = tuple(dict.fromkeys((s.use, s.gather == "use") for s in states))
        index = {use: i for i, use in enumerate(uses)}
        rows = np.array([index[s.use, s.gather == "use"] for s in states], np.int64)
        layouts = tuple(use for use, _ in uses)
        gathered = np.array([here for _, here in uses])
        held = self.tables.bytes(t.value, layouts)
        found = []
        for reader in t.readers:
            target = _column(ops[reader.op].operands, reader.slot)
            working = ops[reader.op].costs[:, TRANSIENT]
            pairs, cols = np.unique(np.stack([target.of, working], axis=1), axis=0, return_inverse=True)
            of = pairs[:, 0].astype(np.int64)
            table = self.tables.changes(t, layouts, target.layouts)
            if reader.keeps:
                table[..., SAVED] = self.tables.copies(t.value, layouts, target.layouts, free=True)
            if t.slots == 1:
                table[~_as_read(layouts, target.layouts)] = np.inf
            table = table[:, of]
            table[..., TRANSIENT] = np.where(gathered[:, None], held[:, None] + pairs[None, :, 1], 0.0)
            found.append(Factor((at, reader.op), (rows, cols.reshape(-1).astype(np.int64)), table))
        return found

    def _returned(self, t: Tensor, layouts: tuple[Layout, ...]) -> Array:
        """Seconds of the change to what the program returns."""
        if t.output is None:
            return np.zeros(len(layouts))
        return self.tables.changes(t, layouts, (returned_layout(t.output, t.value, self.mesh),))[:, 0, EXPOSED]

    def _arriving(self, v: Value, layouts: Sequence[Layout]) -> Array:
        """Bytes of an input that arrives, for all microbatches, as its first reader wants it."""
        time = self.mesh.time
        times = [self.microbatches if time is not None and x.kinds[time] == "S" else 1 for x in layouts]
        return self.tables.bytes(v, layouts) * times


def _made_of(want: Layout) -> Layout:
    """How a parameter is used for a reader that wants it so: a partial sum is made of a whole one."""
    return Layout(want.kinds.replace("P", "I"), want.dims)


def _as_read(uses: Sequence[Layout], wants: Sequence[Layout]) -> npt.NDArray[np.bool_]:
    """Whether the one reader of a parameter takes it as it is used: a change would better be part of the gather. (A
    partial sum is made of a whole one.)"""

    def fits(use: Layout, want: Layout) -> bool:
        pairs = zip(use.kinds, want.kinds, strict=True)
        return use.dims == want.dims and all(a == b or (b == "P" and a in "RI") for a, b in pairs)

    return np.array([[fits(use, want) for want in wants] for use in uses])


def _together(units: Units, wirings: Sequence[Wiring]) -> dict[object, Together]:
    """By dtypes, how parameters share the latencies of buckets: by bytes where they fill more than one."""
    values = [value(n) for n in units.shared if n.op == "get_attr"]
    for unit in units.units:
        values += [t.value for t in wirings[unit.kind].own(parameters=True)]
    found: dict[object, Together] = {}
    for key in dict.fromkeys(map(_alike, values)):
        alike = [v for v in values if _alike(v) == key]
        full = sum(min(1.0, v.nbytes / CAP) for v in alike)
        found[key] = Together(cap=CAP) if full >= 1 else Together(len(alike))
    return found


def _alike(v: Value) -> tuple[object, ...]:
    """What parameters of one bucket have in common, their way aside."""
    return v.dtype, v.resting.dtype, v.reduced.dtype


def returned_layout(output: str, v: Value, mesh: Mesh) -> Layout:
    """The layout in which the program returns its loss (summed over microbatches) or a buffer."""
    whole = Layout.uniform("I", len(mesh.axes), len(v.shape))
    if mesh.time is None:
        return whole
    return whole.with_kind(mesh.time, "P" if output == "loss" else "R")


def _column(columns: Sequence[Column | None], index: int) -> Column:
    found = columns[index]
    assert found is not None
    return found


def _results(wiring: Wiring) -> dict[tuple[int, int], fx.Node]:
    return {t.made: t.node for t in wiring.tensors if t.made is not None}


def _operands(wiring: Wiring) -> dict[tuple[int, int], fx.Node]:
    return {(r.op, r.slot): t.node for t in wiring.tensors for r in t.readers}


def _text(choices: Sequence[Choice]) -> str:
    return " ".join(c.kind if not c.name else f"{c.kind}:{c.name}" for c in choices)
