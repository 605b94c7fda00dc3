"""Emitter: writes the local program of one rank, node by node, into a new fx graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

import autopar.runtime.collectives
import autopar.runtime.ops  # noqa: F401  registers the library ops
from autopar.passes.changes import Step
from autopar.passes.facts import KEY, UNIT, Fact, Value, call, fact, operand_nodes, value
from autopar.passes.layout import Layout, Mesh, Split, parts_before
from autopar.runtime.counter_random import SEEDED

ops = torch.ops.autopar


class Emitter:
    """Local nodes of one rank. ``env`` maps nodes of the global graph to nodes of the local one."""

    def __init__(
        self,
        mesh: Mesh,
        coordinates: tuple[int, ...],
        groups: Mapping[str, str],
        device: torch.device = torch.device("cpu"),  # noqa: B008  immutable
    ) -> None:
        self.device = device
        self.graph = fx.Graph()
        self.mesh = mesh
        self.coordinates = coordinates
        self.groups = groups
        self.env: dict[fx.Node, fx.Node] = {}
        self.microbatch: fx.Node | None = None
        self.key: fx.Node | None = None  # what random ops draw by
        self.place: dict[str, Any] = {}  # which piece a relaxed op makes, while it is lowered
        self.at: fx.Node | None = None  # the global node being lowered
        self.made: dict[Hashable, fx.Node] = {}  # what several nodes need, made once

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A local call_function node; its ``meta["val"]`` has the local shape."""
        assert self.at is not None
        if self.place and target in SEEDED:
            target, kwargs = SEEDED[target], {**kwargs, **self.place}
        made, known = call(self.graph, target, args, kwargs, like=self.at), self.at.meta.get(KEY)
        if isinstance(known, Fact):
            made.meta[UNIT] = known.unit
        return made

    def operand(self, slot: int) -> fx.Node:
        """The local node of a tensor operand of the node being lowered."""
        assert self.at is not None
        return self.env[operand_nodes(self.at)[slot]]

    def args(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The node's arguments with its operands replaced by local nodes."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(
            lambda a: self.env[a] if isinstance(a, fx.Node) else a, (node.args, node.kwargs)
        )
        return found

    def group(self, axis: int) -> str:
        """Name of the c10d group of this rank on ``axis``."""
        return self.groups[self.mesh.axes[axis].name]

    def n(self, axis: int) -> int:
        """Ranks of ``axis``."""
        return self.mesh.axes[axis].size

    def c(self, axis: int) -> int:
        """This rank's coordinate on ``axis``."""
        return self.coordinates[axis]

    def start(self, slot: int, dim: int) -> int:
        """Where this rank's piece of a dim of a tensor operand of the node being lowered begins; it is one run."""
        assert self.at is not None
        strategy, v = fact(self.at).strategy, value(operand_nodes(self.at)[slot])
        assert strategy is not None
        ((start, _),) = strategy.operands[slot].runs(v.shape, self.mesh, self.coordinates)[dim]
        return start

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Local shape of a local node."""
        return tuple(node.meta["val"].shape)

    def once(self, key: Hashable, make: Callable[[], fx.Node]) -> fx.Node:
        """What ``make`` emits, the same node for equal keys. A key must not hang on the rank: all run the same ops."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def positions(self, length: int, split: Split) -> fx.Node:
        """Where in a dim of ``length``, cut so, the elements of this rank stand: int64, in the order it holds them."""
        (runs,) = Layout("", (split,)).runs((length,), self.mesh, self.coordinates)

        def make() -> fx.Node:
            options = {"dtype": torch.int64, "device": self.device}
            pieces = [self.call(torch.ops.aten.arange.start, lo, lo + n, **options) for lo, n in runs]
            return pieces[0] if len(pieces) == 1 else self.call(torch.ops.aten.cat.default, pieces)

        return self.once(("positions", length, split), make)

    def all_reduce(self, x: fx.Node, axis: int, dual: str = "none") -> fx.Node:
        """P>I (``dual="none"``) or P>R (``dual="all_reduce"``) of a local node."""
        return self.call(
            ops.wait_all_reduce.default, self.call(ops.start_all_reduce.default, x, self.group(axis), dual)
        )

    def step(self, x: fx.Node, step: Step, v: Value) -> fx.Node:
        """Lower one change of layout to its collective or local op."""
        if self.mesh.axes[step.axis].is_time:
            return self._over_time(x, step)
        axis, source, target = step.axis, step.source, step.target
        group, n, c = self.group(axis), self.n(axis), self.c(axis)
        if step.row in ("P>I", "P>R"):
            return self.all_reduce(x, axis, "none" if step.row == "P>I" else "all_reduce")
        if step.row == "I>R":
            return self.call(ops.replicate.default, x, group) if v.grad else x
        if step.row == "R>I":
            return self.call(ops.invariant.default, x, c) if v.grad else x
        if step.row in ("I>P", "R>P"):
            return self.call(ops.keep.default, x, c, "none" if step.row == "I>P" else "keep")
        if step.row == "S>S":
            (dim, parts, *items), (to_dim, to_parts, *to_items) = self._cut(source, v, axis), self._cut(target, v, axis)
            both = (*(items or [0]), *(to_items or [0])) if items or to_items else ()
            args = (dim, parts, to_dim, to_parts, *both)
            raw = self.call(ops.start_all_to_all.default, x, group, n, c, *args)
            return self.call(ops.wait_all_to_all.default, raw, n, c, *args)
        if step.row in ("S>R", "S>I"):
            dim, parts, *items = self._cut(source, v, axis)
            dual = "reduce_scatter" if step.row == "S>R" else "slice"
            raw = self.call(ops.start_all_gather.default, x, group, n, c, dim, parts, dual, *items)
            return self.call(ops.wait_all_gather.default, raw, n, c, dim, parts, *items)
        if step.row == "S>P":
            return self.call(ops.pad.default, x, group, n, c, *self._cut(source, v, axis))
        dim, parts, *items = self._cut(target, v, axis)
        if step.row == "P>S":
            raw = self.call(ops.start_reduce_scatter.default, x, group, n, c, dim, parts, *items)
            return self.call(ops.wait_reduce_scatter.default, raw, n, c, dim, parts, *items)
        assert step.row in ("I>S", "R>S"), step.row
        dual = "all_gather" if step.row == "I>S" else "pad"
        return self.call(ops.shard.default, x, group, n, c, dim, parts, dual, *items)

    def _over_time(self, x: fx.Node, step: Step) -> fx.Node:
        assert self.microbatch is not None
        rows = list(self.mesh.axes[step.axis].rows)
        if step.row == "R>P":
            return self.call(ops.time_keep.default, x, self.microbatch)
        dim = (step.target if step.row == "R>S" else step.source).dim_of(step.axis)
        op = ops.time_shard.default if step.row == "R>S" else ops.time_pad.default
        return self.call(op, x, self.microbatch, rows, dim)

    def _cut(self, layout: Layout, v: Value, axis: int) -> tuple[Any, ...]:
        """The dim that ``axis`` cuts and the lengths of its parts as held before the cut; where these are cut between
        items the number of these."""
        dim = layout.dim_of(axis)
        assert dim is not None
        parts, items = parts_before(axis, v.shape[dim], layout.dims[dim], self.mesh, self.coordinates)
        return (dim, list(parts), items) if items else (dim, list(parts))
