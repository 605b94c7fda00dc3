"""sides: afterwards the side of a graph, too, has a strategy on every node, chosen by what reads it.

The side (masks, tables, ids, buffers) depends on no parameter and needs no gradient; the core's strategies are given.
Backwards, every op takes the strategy that leaves its results as they are wanted; inputs arrive as their readers want
them, cut by the batch where any reader wants that; then each op in turn takes what is cheapest between what its
operands have and what its readers want, until nothing changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from autopar.passes.calls import call_key
from autopar.passes.changes import costs
from autopar.passes.completion import is_op, result_slots
from autopar.passes.facts import KEY, Choice, Strategy, fact, is_tensor, operand_nodes, value
from autopar.passes.follow_time import TimeChoices
from autopar.passes.insert_changes import is_getitem, output_layouts
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.moves import settle
from autopar.passes.strategy import choices, strategy

SWEEPS = 4


def sides(
    gm: fx.GraphModule,
    mesh: Mesh,
    times: TimeChoices,
    batch_inputs: Collection[str],
    hoisted: Collection[str] = (),
    follow: Mapping[int, TimeChoices] | None = None,
) -> fx.GraphModule:
    """Give every node without a strategy one. ``times``: what every op of ``gm`` does over time; ``hoisted``: the
    placeholders that the prologue fills, whole on every rank; ``follow``: what is done on axes that are decided."""
    return _Sides(gm, mesh, times, frozenset(batch_inputs), frozenset(hoisted), follow or {}).run()


@dataclass(eq=False)
class _Sides:
    gm: fx.GraphModule
    mesh: Mesh
    times: TimeChoices
    batch_inputs: frozenset[str]
    hoisted: frozenset[str]
    follow: Mapping[int, TimeChoices]
    plans: dict[fx.Node, Strategy] = field(default_factory=dict)
    leaves: dict[fx.Node, Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plain = self.mesh.without_wires()
        self.order = tuple(range(len(self.mesh.axes)))
        self._menus: dict[Hashable, list[Strategy]] = {}
        self._chosen: dict[Hashable, Strategy] = {}

    def run(self) -> fx.GraphModule:
        nodes = list(self.gm.graph.nodes)
        open_ops = [n for n in nodes if is_op(n) and fact(n).strategy is None]
        self.output = nodes[-1]
        for node in reversed(open_ops):
            self.plans[node] = self._choose(node, None)
        inputs = [n for n in nodes if n.op == "placeholder"]
        for node in nodes:
            if node.op == "get_attr" and fact(node).strategy is None:
                self.leaves[node] = self._over_time(node)
        for node in inputs:
            self.leaves[node] = self._arrives(node)
        self._like_others(inputs)
        for _ in range(SWEEPS):
            before = dict(self.plans)
            for node in open_ops:
                self.plans[node] = self._choose(node, self._have(node))
            if all(self.plans[n] is before[n] for n in open_ops):
                break
        self._record(nodes)
        return self.gm

    # -- what is wanted, what there is ---------------------------------------------------------------------------

    def _wants(self, tensor: fx.Node) -> tuple[Layout, ...]:
        """In which layouts the readers want a tensor, each once, settled."""
        found: dict[Layout, None] = {}
        for user in tensor.users:
            plan = self.plans.get(user) or fact(user).strategy
            if plan is None or is_getitem(user):
                continue
            for operand, want in zip(operand_nodes(user), plan.operands, strict=True):
                if operand is tensor:
                    found[settle(want, value(tensor), self.mesh)] = None
        if self.output in tensor.users and tensor in _buffers(self.output):
            found[settle(_whole(tensor, self.mesh), value(tensor), self.mesh)] = None
        return tuple(found)

    def _have(self, node: fx.Node) -> tuple[Layout, ...]:
        return tuple(self._layout(o) for o in operand_nodes(node))

    def _layout(self, tensor: fx.Node) -> Layout:
        if tensor in self.leaves:
            return self.leaves[tensor]
        plan = self.plans.get(_maker(tensor)) or fact(_maker(tensor)).strategy
        assert plan is not None, f"{tensor} is read before it has a layout"
        made = plan.results[tensor.args[1] if is_getitem(tensor) else 0]  # type: ignore[index]
        assert made is not None
        return made

    # -- leaves --------------------------------------------------------------------------------------------------

    def _over_time(self, node: fx.Node) -> Layout:
        """Whole on every rank; over time as it must be."""
        whole = Layout.uniform("I", len(self.mesh.axes), len(value(node).shape))
        time = self.mesh.time
        if time is None:
            return whole
        held = self.times.layouts[node]
        dim = held.dim_of(0)
        return whole.with_kind(time, held.kinds) if dim is None else whole.with_shard(time, dim, held.dims[dim].parts)

    def _arrives(self, node: fx.Node) -> Layout:
        """As the readers want it: cut by the batch on an axis where one does, else as all agree."""
        whole = self._over_time(node)
        if node.name in self.hoisted:
            return whole
        wants = self._wants(node)
        layout = whole
        for axis in self.mesh.space:
            dims = {want.dim_of(axis) for want in wants}
            if axis in self.follow:
                dims = {self.follow[axis].layouts[node].dim_of(0)}
            dim = 0 if 0 in dims and node.name in self.batch_inputs else next(iter(dims)) if len(dims) == 1 else None
            if dim is not None and not any(want.dims[dim].parts for want in wants):
                layout = self._cut(node, layout, axis, dim)
        return layout

    def _cut(self, node: fx.Node, layout: Layout, axis: int, dim: int) -> Layout:
        cut = layout.with_shard(axis, dim)
        return cut if cut.is_even(value(node).shape, self.mesh) else layout

    def _like_others(self, inputs: Sequence[fx.Node]) -> None:
        """Batch inputs that nothing here reads arrive with the rows of those that are read."""
        read = [n for n in inputs if n.name in self.batch_inputs and self._wants(n)]
        for node in inputs:
            if node.name in self.batch_inputs and not self._wants(node):
                for axis in self.mesh.space:
                    if axis not in self.follow and any(self.leaves[n].dim_of(axis) == 0 for n in read):
                        self.leaves[node] = self._cut(node, self.leaves[node], axis, 0)

    # -- ops -----------------------------------------------------------------------------------------------------

    def _choose(self, node: fx.Node, have: tuple[Layout, ...] | None) -> Strategy:
        wants = tuple(self._wants(t) if t is not None else () for t in result_slots(node))
        call = call_key(node)
        fixed = tuple((axis, found.ops[node]) for axis, found in self.follow.items())
        key = (call, self.times.ops.get(node), fixed, have, wants)
        if key not in self._chosen:
            menu = self._menu(node, call, fixed)
            self._chosen[key] = menu[int(self._seconds(node, menu, have, wants).argmin())]
        return self._chosen[key]

    def _menu(self, node: fx.Node, call: Hashable, fixed: tuple[tuple[int, Choice], ...]) -> list[Strategy]:
        time, decided = self.times.ops.get(node), dict(fixed)
        key = (call, time, fixed)
        if key not in self._menus:
            per_axis: list[Sequence[Choice]] = [
                [decided[a]] if a in decided else choices(node, Mesh((Axis("alone", self.mesh.axes[a].size),)), 0)
                for a in self.mesh.space
            ]
            last = [] if time is None else [[time]]
            found = (strategy(node, self.plain, c, self.order) for c in itertools.product(*per_axis, *last))
            self._menus[key] = [s for s in found if s is not None]
        return self._menus[key]

    def _seconds(
        self,
        node: fx.Node,
        menu: Sequence[Strategy],
        have: tuple[Layout, ...] | None,
        wants: Sequence[tuple[Layout, ...]],
    ) -> np.ndarray:
        """Of each strategy: changes before and after it, and writing its results."""
        total = np.zeros(len(menu))
        for slot, operand in enumerate(operand_nodes(node) if have is not None else ()):
            assert have is not None
            read = value(operand)
            arrives = settle(have[slot], read, self.mesh)
            total += costs([arrives], [s.operands[slot] for s in menu], read, self.mesh)[0]
        copy = self.mesh.wire(0).copy if self.mesh.axes else 0.0
        for r, v in enumerate(fact(node).values):
            if v is None:
                continue
            made = [s.results[r] for s in menu]
            assert all(m is not None for m in made)
            if wants[r]:
                total += costs(made, wants[r], v, self.mesh).sum(1)  # type: ignore[arg-type]
            total += [copy * v.nbytes * _share(m, self.mesh) for m in made]  # type: ignore[arg-type]
        return total

    def _record(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            if node in self.plans:
                node.meta[KEY] = replace(fact(node), strategy=self.plans[node])
        for node in nodes:
            if node in self.leaves or (is_getitem(node) and is_tensor(node)):
                plan = Strategy((), self.order, (), (self._layout(node),))
                node.meta[KEY] = replace(fact(node), strategy=plan)


def _share(layout: Layout, mesh: Mesh) -> float:
    share = 1.0
    for axis in mesh.space:
        if layout.kinds[axis] == "S":
            share /= mesh.axes[axis].size
    return share


def _maker(tensor: fx.Node) -> fx.Node:
    return tensor.args[0] if is_getitem(tensor) else tensor  # type: ignore[return-value]


def _buffers(output: fx.Node) -> Collection[fx.Node]:
    (result,) = output.args
    assert isinstance(result, dict)
    return list(result["buffers"].values())


def _whole(tensor: fx.Node, mesh: Mesh) -> Layout:
    whole = Layout.uniform("I", len(mesh.axes), len(value(tensor).shape))
    return whole if mesh.time is None else whole.with_kind(mesh.time, "R")


__all__ = ["output_layouts", "sides"]
