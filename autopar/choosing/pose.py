"""From a captured graph, a mesh and a number of microbatches to the `Problem` that the solver gets.

`Poser` keeps what does not depend on the mesh; `Posed` has the problem and what its states stand for. What is priced:

- op: its strategies, by roofline, and the inputs that it is the first to read; a tensor that several slots read (or
  several units touch): the one layout in which it is shared; a parameter: how it rests, is gathered and reduced.
- change of layout between two of them: exposed seconds; of parameters, and of what depends on parameters alone: hidden.
- saved bytes: at the reader whose operand autograd keeps, in the layout that it reads; of a tensor with several such
  readers once, in the shared layout. A view's storage counts at the tensor that owns it. A weight gathered at its use
  counts as working memory of the op that reads it.
- a thousandth of all hidden seconds is exposed: of plans that hide all of it, the one that moves least is taken.
- the side (`passes.units`) costs nothing here but what one op of the core alone keeps of it, so that bounds hold; it is
  decided afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import fx

from autopar.choosing.op_states import Column, Menu, OpStates, arriving_parts, op_states
from autopar.choosing.wiring import Tensor, Wiring
from autopar.cluster import Cluster
from autopar.optimizer_states import state_bytes
from autopar.passes.calls import call_key
from autopar.passes.changes import costs
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

UNHIDDEN = 1e-3  # of hidden seconds, taken as exposed so that ties are broken


@dataclass(frozen=True, eq=False)
class Posed:
    """A problem and what its states stand for. ``ops``: per class, of each op; ``parameters``: per class, of each of
    its own; ``hubs``: likewise of tensors; ``shared``: of each shared variable (layouts or parameter states);
    ``roles``: of pinned axes."""

    problem: Problem
    mesh: Mesh
    units: Units
    ops: tuple[tuple[OpStates, ...], ...]
    hubs: tuple[tuple[tuple[Layout, ...], ...], ...]
    parameters: tuple[tuple[tuple[ParameterState, ...], ...], ...]
    shared: tuple[tuple[Layout, ...] | tuple[ParameterState, ...], ...]
    roles: Roles | None = None


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
    menu: Menu | None = None,
    roles: Roles | None = None,
    optimizer: Optimizer,
) -> Posed:
    """The problem on ``mesh``. ``times``: the choice of each op on the time axis; ``zero``: the only stage allowed;
    ``roles``: of pinned axes."""
    return _Pose(mesh, cluster, zero, menu or Menu(), optimizer, roles).run(name, units, wirings, times, proposals)


@dataclass(eq=False)
class _Pose:
    mesh: Mesh
    cluster: Cluster
    zero: int | None
    menu: Menu
    optimizer: Optimizer
    roles: Roles | None = None

    def __post_init__(self) -> None:
        self.plain = self.mesh.without_wires()
        self.microbatches = 1 if self.mesh.time is None else self.mesh.axes[self.mesh.time].size
        self._together: dict[object, Together] = {}
        self._op_states: dict[object, OpStates] = {}
        self._seconds: dict[tuple[Value, tuple[Layout, ...], tuple[Layout, ...]], Array] = {}

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
        shared, states = self._shared(units, wirings, ops)
        classes, hubs, parameters = [], [], []
        for k, wiring in enumerate(wirings):
            borders = [states[s] for s in self._places(units, k)]
            made, layouts, held = self._class(wiring, ops[k], borders)
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
        return Posed(problem, self.mesh, units, ops, tuple(hubs), tuple(parameters), states, self.roles)

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
        self, units: Units, wirings: Sequence[Wiring], ops: Sequence[tuple[OpStates, ...]]
    ) -> tuple[tuple[Variable, ...], tuple[tuple[Layout, ...] | tuple[ParameterState, ...], ...]]:
        groups = _groups(units)
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
        outputs = {t.node: t for w in wirings for t in w.tensors if t.output is not None}
        variables, states = list[Variable](), list[tuple[Layout, ...] | tuple[ParameterState, ...]]()
        made: dict[int, tuple[Variable, tuple[Layout, ...] | tuple[ParameterState, ...]]] = {}
        for i, node in enumerate(units.shared):
            group = groups[i]
            if group not in made or node in outputs:
                t = outputs.get(node, view[group])
                made[group] = self._variable(t, tuple(layouts[group]))
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
        self, t: Tensor, layouts: tuple[Layout, ...]
    ) -> tuple[Variable, tuple[Layout, ...] | tuple[ParameterState, ...]]:
        name = str(t.node.target) if t.parameter else t.node.name
        if t.parameter:
            uses = tuple(dict.fromkeys(map(_made_of, layouts)))
            over = None if self.roles is None else self.roles.over
            together = self._together[_alike(t.value)]
            states = tuple(parameter_states(t.value, uses, self.mesh, self.zero, over, together))
            return Variable(name, "parameter", tuple(map(str, states)), self._held(t.value, states)), states
        if self.roles is not None:
            layouts = self.roles.shared(t.node, layouts)
        rows = np.zeros((len(layouts), len(RESOURCES)))
        rows[:, EXPOSED] = self._returned(t, layouts)
        return Variable(name, "tensor", tuple(map(str, layouts)), rows), layouts

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
            row[HIDDEN] = s.seconds(self.microbatches)
            row[EXPOSED] = UNHIDDEN * row[HIDDEN]
        return rows

    # -- a class -------------------------------------------------------------------------------------------------

    def _class(
        self,
        wiring: Wiring,
        ops: tuple[OpStates, ...],
        borders: Sequence[tuple[Layout, ...] | tuple[ParameterState, ...]],
    ) -> tuple[Class, tuple[tuple[Layout, ...], ...], tuple[tuple[ParameterState, ...], ...]]:
        unary = [o.costs.copy() for o in ops]
        for i, slot, node in wiring.inputs:
            unary[i][:, STATIC] += self._arriving(value(node), [s.operands[slot] for s in ops[i].strategies])
        for i, slot, node in wiring.sides:
            unary[i][:, SAVED] += self._bytes(value(node), [s.operands[slot] for s in ops[i].strategies])
        kinds: list[Variable] = []
        place: dict[fx.Node, int] = {}
        states: dict[fx.Node, tuple[Layout, ...] | tuple[ParameterState, ...]] = {}
        for t in (*wiring.own(parameters=False), *wiring.own(parameters=True)):
            variable, states[t.node] = self._variable(t, tuple(dict.fromkeys(self._touching(t, ops))))
            place[t.node] = len(ops) + len(kinds)
            kinds.append(variable)
        for t in wiring.tensors:
            if t.border is not None:
                place[t.node] = len(ops) + len(kinds) + t.border
                states[t.node] = borders[t.border]
        factors: list[Factor] = []
        for t in wiring.tensors:
            if t.made is not None and t.own:
                self._keep_own(t, ops, unary)
            if t.parameter:
                factors += self._read_parameter(t, ops, place[t.node], states[t.node])  # type: ignore[arg-type]
            elif t.hub:
                factors += self._share(t, ops, place[t.node], states[t.node])  # type: ignore[arg-type]
            elif t.made is not None and t.readers:
                factors.append(self._direct(t, ops))
            elif t.made is not None and t.output is not None:
                column = _column(ops[t.made[0]].results, t.made[1])
                unary[t.made[0]][:, EXPOSED] += self._returned(t, column.layouts)[column.of]
        named = [
            Variable(op.name, "op", tuple(_text(s.choices) for s in o.strategies), rows)
            for op, o, rows in zip(wiring.ops, ops, unary, strict=True)
        ]
        made = Class(wiring.name, (*named, *kinds), tuple(factors), tuple(b.name for b in wiring.borders))
        hubs = tuple(states[t.node] for t in wiring.own(parameters=False))
        held = tuple(states[t.node] for t in wiring.own(parameters=True))
        return made, hubs, held  # type: ignore[return-value]

    def _keep_own(self, t: Tensor, ops: Sequence[OpStates], unary: list[Array]) -> None:
        """A result that its own op keeps."""
        assert t.made is not None
        column = _column(ops[t.made[0]].results, t.made[1])
        unary[t.made[0]][:, SAVED] += self._bytes(t.value, column.layouts)[column.of]

    def _direct(self, t: Tensor, ops: Sequence[OpStates]) -> Factor:
        """From the op that makes a tensor straight to its one reader."""
        assert t.made is not None
        (reader,) = t.readers
        source = _column(ops[t.made[0]].results, t.made[1])
        target = _column(ops[reader.op].operands, reader.slot)
        table = self._changes(t, source.layouts, target.layouts)
        if reader.keeps:
            free = t.own or t.view
            table[..., SAVED] = self._copies(t.value, source.layouts, target.layouts, same_is_free=free)
        return Factor((t.made[0], reader.op), (source.of, target.of), table)

    def _share(self, t: Tensor, ops: Sequence[OpStates], at: int, layouts: tuple[Layout, ...]) -> list[Factor]:
        """From the op that makes a tensor to its shared layout, and from there to each reader."""
        every, found = np.arange(len(layouts)), []
        at_reader = t.kept == 1 and not t.own and not t.view  # one copy is kept: count it where it is read
        if t.made is not None:
            source = _column(ops[t.made[0]].results, t.made[1])
            table = self._changes(t, source.layouts, layouts)
            if t.kept and not at_reader:
                free = t.own or t.view
                table[..., SAVED] = self._copies(t.value, source.layouts, layouts, same_is_free=free)
            found.append(Factor((t.made[0], at), (source.of, every), table))
        for reader in t.readers:
            target = _column(ops[reader.op].operands, reader.slot)
            table = self._changes(t, layouts, target.layouts)
            if reader.keeps:
                table[..., SAVED] = self._copies(t.value, layouts, target.layouts, same_is_free=not at_reader)
            found.append(Factor((at, reader.op), (every, target.of), table))
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
        held = self._bytes(t.value, layouts)
        found = []
        for reader in t.readers:
            target = _column(ops[reader.op].operands, reader.slot)
            working = ops[reader.op].costs[:, TRANSIENT]
            pairs, cols = np.unique(np.stack([target.of, working], axis=1), axis=0, return_inverse=True)
            of = pairs[:, 0].astype(np.int64)
            table = self._changes(t, layouts, target.layouts)
            if reader.keeps:
                table[..., SAVED] = self._copies(t.value, layouts, target.layouts, same_is_free=True)
            if t.slots == 1:
                table[~_as_read(layouts, target.layouts)] = np.inf
            table = table[:, of]
            table[..., TRANSIENT] = np.where(gathered[:, None], held[:, None] + pairs[None, :, 1], 0.0)
            found.append(Factor((at, reader.op), (rows, cols.reshape(-1).astype(np.int64)), table))
        return found

    # -- tables --------------------------------------------------------------------------------------------------

    def _changes(self, t: Tensor, sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> Array:
        table = np.zeros((len(sources), len(targets), len(RESOURCES)))
        key = (t.value, sources, targets)
        if key not in self._seconds:
            self._seconds[key] = costs(sources, targets, t.value, self.mesh) * self.microbatches
        table[..., EXPOSED] = self._seconds[key] * (UNHIDDEN if t.weight else 1.0)
        if t.weight:
            table[..., HIDDEN] = self._seconds[key]
        return table

    def _returned(self, t: Tensor, layouts: tuple[Layout, ...]) -> Array:
        """Seconds of the change to what the program returns."""
        if t.output is None:
            return np.zeros(len(layouts))
        return self._changes(t, layouts, (returned_layout(t.output, t.value, self.mesh),))[:, 0, EXPOSED]

    def _bytes(self, v: Value, layouts: Sequence[Layout]) -> Array:
        return np.array([local_bytes(v, x, self.plain) for x in layouts], np.float64)

    def _arriving(self, v: Value, layouts: Sequence[Layout]) -> Array:
        """Bytes of an input that arrives, for all microbatches, as its first reader wants it."""
        time = self.mesh.time
        times = [self.microbatches if time is not None and x.kinds[time] == "S" else 1 for x in layouts]
        return self._bytes(v, layouts) * times

    def _copies(self, v: Value, sources: Sequence[Layout], targets: Sequence[Layout], *, same_is_free: bool) -> Array:
        """Bytes of each target, none where the source is the same storage and is counted elsewhere."""
        held = np.broadcast_to(self._bytes(v, targets), (len(sources), len(targets))).copy()
        if same_is_free:
            a, b = ([x.kinds.replace("R", "I") for x in group] for group in (sources, targets))
            for i, source in enumerate(sources):
                for j, target in enumerate(targets):
                    if a[i] == b[j] and source.dims == target.dims:
                        held[i, j] = 0.0
        return held


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


def _groups(units: Units) -> list[int]:
    """Shared variables that play the same part in equal units have the same states: a number a group."""
    place = {node: i for i, node in enumerate(units.shared)}
    parent = list(range(len(units.shared)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    first: dict[tuple[int, int], int] = {}
    for unit in units.units:
        for b, node in enumerate(unit.borders):
            known = first.setdefault((unit.kind, b), place[node])
            low, high = sorted((root(known), root(place[node])))
            parent[high] = low
    return [root(i) for i in range(len(parent))]


def _text(choices: Sequence[Choice]) -> str:
    return " ".join(c.kind if not c.name else f"{c.kind}:{c.name}" for c in choices)
