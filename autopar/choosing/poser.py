"""What a capture gives once for all meshes: its prepared graph, units and their wiring, what is forced over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autopar.build import Prepared, in_microbatches, with_way_out
from autopar.capture import Capture
from autopar.choosing.again import POLICIES
from autopar.choosing.op_states import Menu
from autopar.choosing.pose import Posed, mesh_of, pose
from autopar.choosing.wiring import Known, Wiring, first_reads, kept_sides, weights_of, wire
from autopar.cluster import Cluster
from autopar.errors import NeedsWholeBatch
from autopar.passes.complete_layouts import batch_dims
from autopar.passes.divide_work import propose_parts
from autopar.passes.expert_dims import EXPERTS, Held, experts_of
from autopar.passes.facts import operand_nodes, value
from autopar.passes.follow_time import TimeChoices, cut_alike, follow_axis, follow_time
from autopar.passes.keepers import keepers
from autopar.passes.layout import Axis
from autopar.passes.roles import Limit, Roles, limits_of
from autopar.passes.sequence import along_sequence, sequences
from autopar.passes.split_prologue import copy_graph
from autopar.passes.strategy import Proposal
from autopar.passes.units import Units, core_ops, cut_units
from autopar.pins import SEQUENCE, Pins, ResolvedPins, microbatch_rows
from autopar.solver.meshes import MOST_MICROBATCHES


@dataclass(eq=False)
class Body:
    """The graph that runs per microbatch, with all that does not depend on the mesh."""

    prepared: Prepared
    units: Units
    wirings: tuple[Wiring, ...]
    proposals: Mapping[fx.Node, Sequence[Proposal]]
    core: frozenset[fx.Node]
    outputs: Mapping[fx.Node, str]

    @staticmethod
    def of(prepared: Prepared, pins: Pins | None = None) -> Body:
        gm, captured = prepared.body, prepared.captured
        parameters = frozenset(captured.parameters)
        ops = core_ops(gm, parameters)
        held = keepers(ops)

        def mark(tensor: fx.Node) -> tuple[object, ...]:
            return min(held.count.get(tensor, 0), 2), tensor in held.own, tensor in held.views

        inputs = first_reads(ops, {i.name for i in captured.inputs})
        alone = kept_sides(ops, held)
        reads = dict(inputs.values())
        keeps = dict(alone.values())
        rests = {n: tuple(rests_pinned(captured, pins or Pins(), n).items()) for n in parameters}

        def mark_op(op: fx.Node) -> tuple[object, ...]:
            pinned = tuple(rests.get(str(o.target)) for o in operand_nodes(op))
            return held.slots[op], reads.get(op), keeps.get(op), pinned

        units = cut_units(gm, parameters, mark_op, mark)
        outputs, core = outputs_of(gm), frozenset(ops)
        known = Known(parameters, held, outputs, weights_of(gm, parameters), core, inputs, alone)
        wirings = tuple(wire(units.units[first], known) for first in units.first)
        return Body(prepared, units, wirings, propose_parts(gm), core, outputs)

    def regular(self, times: TimeChoices) -> bool:
        """Whether equal units do the same over time."""
        done = [
            (unit.kind, [times.ops[op] for op in unit.ops], [times.layouts[b] for b in unit.borders])
            for unit in self.units.units
        ]
        return all(same == done[self.units.first[same[0]]] for same in done)


@dataclass(eq=False)
class Poser:
    """Poses the problem of a capture on any mesh, with any number of equal microbatches.

    ``prepared``: the capture prepared for one microbatch; ``zero``: the only stage of ZeRO that is allowed;
    ``recompute``: the only policy that is; ``pinned``: the axes, and what they are for (None: neutral axes).
    """

    prepared: Prepared
    cluster: Cluster
    zero: int | None = None
    pinned: ResolvedPins | None = None
    recompute: str | None = None

    def __post_init__(self) -> None:
        self.menu = Menu()
        self._times: dict[int, TimeChoices | str] = {}
        self._finest: TimeChoices | None = None
        self._refused: NeedsWholeBatch | None = None
        self._roles: dict[Body, Roles] = {}

    @property
    def captured(self) -> Capture:
        return self.prepared.captured

    @property
    def policies(self) -> tuple[str, ...]:
        """Of recomputation, those allowed."""
        return POLICIES if self.recompute is None else (self.recompute,)

    @property
    def _layouts(self) -> Pins | None:
        return None if self.pinned is None else self.pinned.pins

    @cached_property
    def _whole(self) -> Body:
        return Body.of(self.prepared, self._layouts)

    @cached_property
    def _split(self) -> Body:
        whole = self._whole.prepared
        return Body.of(in_microbatches(replace(whole, body=copy_graph(whole.body))), self._layouts)

    def body(self, microbatches: int) -> Body:
        """The graph of a step of one microbatch, or of several."""
        return self._whole if microbatches == 1 else self._split

    def rows(self, microbatches: int) -> tuple[int, ...]:
        """Rows of each microbatch."""
        return microbatch_rows(self.captured.batch, self._rows_together, microbatches)

    def times(self, microbatches: int) -> TimeChoices | str:
        """What every op does over time, or why there cannot be so many microbatches."""
        if microbatches not in self._times:
            most = self.captured.batch // self._rows_together
            if microbatches > 1 and self._finest is None and most not in self._times and most <= MOST_MICROBATCHES:
                self._times[most] = self._follow(most)
            self._times[microbatches] = self._times.get(microbatches) or self._follow(microbatches)
        return self._times[microbatches]

    def _follow(self, microbatches: int) -> TimeChoices | str:
        """What is done with one row a microbatch is done with any number, wherever that is legal."""
        if microbatches == 1:
            return TimeChoices({}, {})
        if self.captured.batch < microbatches:
            return f"{microbatches} microbatches are more than the batch of {self.captured.batch} rows"
        body, rows = self.body(microbatches), self.rows(microbatches)
        batched = frozenset(i.name for i in self.captured.inputs if i.batch)
        if self._finest is not None and cut_alike(self._finest, rows):
            return self._finest
        try:
            found = follow_time(body.prepared.body, batched, rows)
        except NeedsWholeBatch as error:
            self._refused = self._refused or with_way_out(error, self.captured)
            return str(self._refused)
        if not body.regular(found):
            return "equal layers would treat their microbatches differently"
        if max(rows) == self._rows_together:
            self._finest = found
        return found

    def pose(self, axes: Sequence[tuple[int, int]], microbatches: int) -> Posed:
        """The problem on a mesh of axes (size, stride), outermost first. `times` must be legal."""
        times, body = self.times(microbatches), self.body(microbatches)
        assert isinstance(times, TimeChoices), times
        names = [name for name, _ in self.pinned.axes()] if self.pinned else ()
        mesh = mesh_of(self.cluster, axes, self.rows(microbatches), names)
        name = " x ".join(f"{size}@{stride}" for size, stride in axes) or "1 rank"
        return pose(
            f"{name}, microbatches={microbatches}",
            mesh,
            body.units,
            body.wirings,
            times.ops,
            body.proposals,
            self.cluster,
            zero=self.zero,
            policies=self.policies,
            menu=self.menu,
            optimizer=self.captured.optimizer,
            roles=self._roles_on(body, self.pinned) if self.pinned else None,
        )

    @property
    def _rows_together(self) -> int:
        """Rows that no microbatch may part: a pinned data axis has one on each rank."""
        return self.pinned.data_ranks if self.pinned else 1

    def _roles_on(self, body: Body, pins: ResolvedPins) -> Roles:
        if body not in self._roles:
            gm, parameters = body.prepared.body, frozenset(self.captured.parameters)
            batched = frozenset(i.name for i in self.captured.inputs if i.batch)
            named = {name: i for i, (name, _) in enumerate(pins.axes())}
            follow = {named["dp"]: follow_axis(gm, batched, Axis("dp", pins.dp))} if "dp" in named else {}
            if EXPERTS in named:
                held = Held(experts_of(gm, parameters, pins.ep), batch_dims(gm, batched, self.captured.batch))
                follow[named[EXPERTS]] = follow_axis(gm, batched, Axis(EXPERTS, pins.ep), held)
            tensor, cut, weights = named.get("tp"), named.get(SEQUENCE), weights_of(gm, parameters)
            shares = pins.pins.sp is True and tensor is not None
            along = {}
            if shares or cut is not None:
                along = along_sequence(gm, parameters, weights, batched, self.captured.batch)
            limits, whole = dict[fx.Node, Limit](), frozenset[fx.Node]()
            if tensor is not None:
                ops = core_ops(gm, parameters)
                limits, whole = limits_of(ops, body.units, parameters, weights, along if shares else None)
            sequence = sequences(along) if shares else {}
            words = {n: rests_pinned(self.captured, pins.pins, n) for n in parameters}
            rests = {n: {named[axis]: word for axis, word in found.items()} for n, found in words.items() if found}
            whole_there = {n for n, found in words.items() if found.get("tp") == "R"}
            free = [op for op in limits if any(str(o.target) in whole_there for o in operand_nodes(op))]
            limits |= {op: replace(limits[op], obliged=False) for op in free}
            self._roles[body] = Roles(follow, tensor, limits, whole, sequence, cut, along, rests)
        return self._roles[body]


def rests_pinned(captured: Capture, pins: Pins, parameter: str) -> dict[str, str]:
    """How pins have a parameter rest, by axis, under any of its names."""
    return pins.at_rest([parameter, *(alias for alias, name in captured.aliases.items() if name == parameter)])


def outputs_of(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """The tensors that must be returned in a layout of their own: the loss, buffers."""
    (result,) = next(n for n in gm.graph.nodes if n.op == "output").args
    assert isinstance(result, dict)
    found = {n: "loss" for n in result["outputs"][:1] if value(n).shape == ()}
    return {**found, **dict.fromkeys(result["buffers"].values(), "buffer")}
