"""What pinned axes are for: on a data axis every op follows the batch, on a tensor axis work is divided.

A tensor axis is an obligation, kept by leaving states out, never by prices: an op with FLOPs, or a lookup in a table,
only keeps states that divide its weights, where it has any. Rows (batch and sequence: dims that come from the inputs)
are never cut. What lies between such ops is *glue*; glue connected to a residual stream stays whole, so that the axis
divides what lies inside of layers, as Megatron-LM does: columns, then rows, one reduction at the end. With sequence
parallelism (pinned ``sp=true``) that glue is cut along the sequence instead, where it can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.passes.completion import result_slots
from autopar.passes.divide_work import flops
from autopar.passes.facts import Choice, Strategy, operand_nodes, value
from autopar.passes.follow_time import TimeChoices
from autopar.passes.layout import Layout
from autopar.passes.strategy import rule
from autopar.passes.units import Units, is_parameter, producer_of

DIVIDE = ("factor", "special")  # choices that divide work
NEIGHBOURS = 3  # units that a residual tensor touches at most: more have what all layers share, a mask or a bias

Dims = frozenset[int]


@dataclass(frozen=True)
class Limit:
    """What an op must not do on the tensor axis. ``operands``, ``results``: the dims of each that are rows;
    ``weights``: slots of weights with two dims or more; ``obliged``: it must divide them, and its work, where it can;
    ``whole``: it is glue of a residual stream, on every rank the same, forward and backward; ``sequence``: unless it
    can be cut along rows that are not those of the batch, whose dims ``batch`` has for operands and results."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    weights: tuple[int, ...]
    obliged: bool
    whole: bool
    sequence: bool = False
    batch: tuple[int | None, ...] = ()

    def of(self, strategies: Sequence[Strategy], axis: int) -> list[Strategy]:
        """The strategies that keep to it: those that divide, where any may and does."""
        along = [s for s in strategies if self._along(s, axis)] if self.whole and self.sequence else []
        if along:
            return along
        kept = [s for s in strategies if self._keeps(s, axis)]
        divided = [s for s in kept if self.divides(s, axis)] if self.obliged else []
        return divided or kept

    def divides(self, chosen: Strategy, axis: int) -> bool:
        """Whether an op is divided, with its weights."""
        whole = any(chosen.operands[slot].kinds[axis] != "S" for slot in self.weights)
        return chosen.choices[axis].kind in DIVIDE and not whole

    def _along(self, chosen: Strategy, axis: int) -> bool:
        """Whether all results are cut along the sequence."""
        rows, layouts = (*self.operands, *self.results), (*chosen.operands, *chosen.results)
        cuts = [None if x is None else x.dim_of(axis) for x in layouts]
        legal = all(
            cut is None or (cut in dims and cut != batch) or not dims
            for cut, dims, batch in zip(cuts, rows, self.batch, strict=True)
        )
        made = [cut for cut, x in zip(cuts, layouts, strict=True) if x is not None][len(self.operands) :]
        return legal and chosen.choices[axis].kind in DIVIDE and all(cut is not None for cut in made)

    def _keeps(self, chosen: Strategy, axis: int) -> bool:
        if self.whole and chosen.choices[axis].kind not in ("I", "linear"):
            return False
        pairs = [*zip(self.operands, chosen.operands, strict=True), *zip(self.results, chosen.results, strict=True)]
        return not any(layout is not None and layout.dim_of(axis) in rows for rows, layout in pairs)


@dataclass(frozen=True, eq=False)
class Roles:
    """``follow``: of each data axis, what every op does there; ``tensor``: the axis that divides work, with the
    ``limits`` of every op of the core and the tensors that are ``whole`` there (with ``sequence``: unless
    they can be cut along these dims)."""

    follow: Mapping[int, TimeChoices]
    tensor: int | None
    limits: Mapping[fx.Node, Limit]
    whole: frozenset[fx.Node]
    sequence: Mapping[fx.Node, Dims] | None = None

    def fixed(self, op: fx.Node) -> dict[int, Choice]:
        """The choices that are made already: axis -> choice."""
        return {axis: found.ops[op] for axis, found in self.follow.items()}

    def key(self, op: fx.Node) -> object:
        """What the states of an op depend on."""
        return tuple(self.fixed(op).items()), self.limits.get(op)

    def of(self, op: fx.Node, strategies: list[Strategy]) -> list[Strategy]:
        """The strategies of an op that are allowed."""
        return strategies if self.tensor is None else self.limits[op].of(strategies, self.tensor)

    def shared(self, tensor: fx.Node, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        """The layouts in which a tensor may be shared."""
        if self.tensor is None or tensor not in self.whole:
            return layouts
        if self.sequence is not None:
            dims = self.sequence.get(tensor, frozenset())
            along = tuple(x for x in layouts if x.dim_of(self.tensor) in dims)
            if along:
                return along
        return tuple(x for x in layouts if x.kinds[self.tensor] != "S")


def limits_of(
    ops: Sequence[fx.Node],
    units: Units,
    parameters: frozenset[str],
    weights: frozenset[fx.Node],
    batch: Mapping[fx.Node, int | None] | None = None,
) -> tuple[dict[fx.Node, Limit], frozenset[fx.Node]]:
    """The limit of every op of the core, and the tensors that a tensor axis leaves whole. ``weights``: what depends on
    parameters alone; ``batch``: the dim of the batch of every tensor, for glue to be cut along the sequence."""
    core = frozenset(ops)

    def held(node: fx.Node) -> bool:
        return is_parameter(node, parameters) or node in weights

    rows = _rows(ops, core, held)
    whole_ops, whole = _residual(ops, units, held)
    limits = {
        op: Limit(
            tuple(rows.get(o, frozenset()) for o in operand_nodes(op)),
            tuple(rows.get(r, frozenset()) if r is not None else frozenset() for r in result_slots(op)),
            tuple(i for i, o in enumerate(operand_nodes(op)) if held(o) and len(value(o).shape) > 1),
            _obliged(op),
            op in whole_ops,
            batch is not None,
            tuple((batch or {}).get(n) if n is not None else None for n in (*operand_nodes(op), *result_slots(op))),
        )
        for op in ops
    }
    return limits, whole


def sequence_of(limits: Mapping[fx.Node, Limit]) -> dict[fx.Node, Dims]:
    """The dims of every tensor that are rows, but not those of the batch."""
    found: dict[fx.Node, Dims] = {}
    for op, limit in limits.items():
        for result, rows, batch in zip(
            result_slots(op), limit.results, limit.batch[len(limit.operands) :], strict=True
        ):
            if result is not None:
                found[result] = rows - {batch}
    return found


def _obliged(op: fx.Node) -> bool:
    return op.target is torch.ops.aten.embedding.default or flops(op) > 0


def _rows(ops: Sequence[fx.Node], core: frozenset[fx.Node], held: object) -> dict[fx.Node, Dims]:
    """The dims of every activation that come from rows of the inputs, not from a dim of a weight."""
    assert callable(held)
    rows: dict[fx.Node, Dims] = {}
    for op in ops:
        found = rule(op)
        if found is None or all(held(o) for o in operand_nodes(op)):
            continue
        origin: dict[str, bool] = {}
        groups: tuple[list[tuple[int, fx.Node]], ...] = ([], [], [])
        for slot, o in enumerate(operand_nodes(op)):
            groups[1 if held(o) else 0 if producer_of(o) in core else 2].append((slot, o))
        for rank, group in enumerate(groups):  # what activations say comes before weights, and these before inputs
            here: dict[str, bool] = {}
            for slot, o in group:
                for d, dim in enumerate(found.operands[slot]):
                    for f in dim.factors:
                        here[f] = here.get(f, False) or (d in rows.get(o, ()) if rank == 0 else rank == 2)
            origin = {**here, **origin}
        made = not groups[0]  # a dim that no operand has: what an activation is repeated along is no row
        for r, named in zip(result_slots(op), found.results, strict=True):
            if r is not None and named is not None:
                rows[r] = frozenset(
                    d
                    for d, dim in enumerate(named)
                    if any(origin.get(f, made) for f in dim.factors) or (not dim.factors and value(r).shape[d] > 1)
                )
    return rows


def _residual(ops: Sequence[fx.Node], units: Units, held: object) -> tuple[frozenset[fx.Node], frozenset[fx.Node]]:
    """The glue around tensors that cross a cut and are read both by glue and by something else, and all its tensors."""
    assert callable(held)
    glue = {op for op in ops if not _obliged(op) and not all(held(o) for o in operand_nodes(op))}
    reads = Counter(o for op in ops for o in operand_nodes(op))
    touched = Counter(b for unit in units.units for b in unit.borders)
    near: dict[fx.Node, list[fx.Node]] = {op: [] for op in glue}
    ends: dict[fx.Node, list[fx.Node]] = {}
    for op in glue:
        for o in operand_nodes(op):
            if not held(o):
                ends.setdefault(o, []).append(op)
                if producer_of(o) in glue:
                    near[op].append(producer_of(o))
                    near[producer_of(o)].append(op)
    for readers in ends.values():
        for other in readers[1:]:
            near[readers[0]].append(other)
            near[other].append(readers[0])
    stream = [t for t in units.shared if t in ends and reads[t] > 1 and touched[t] <= NEIGHBOURS and t.op != "get_attr"]
    whole = _reached([*(op for t in stream for op in ends[t]), *(producer_of(t) for t in stream)], near)
    made = [r for op in whole for r in result_slots(op) if r is not None]
    return frozenset(whole), frozenset((*made, *stream))


def _reached(starts: Iterable[fx.Node], near: Mapping[fx.Node, Sequence[fx.Node]]) -> set[fx.Node]:
    waiting = [op for op in starts if op in near]
    found = set(waiting)
    while waiting:
        for other in near[waiting.pop()]:
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found


def why_whole(op: fx.Node, size: int) -> str:
    """Why a tensor axis of ``size`` ranks does not divide an op that it should."""
    if rule(op) is None:
        return "it has no rule"
    sizes = ", ".join(str(value(o).shape) for o in operand_nodes(op))
    return f"no dim of {sizes} that may be cut divides by {size}"


__all__ = ["DIVIDE", "Limit", "Roles", "limits_of", "sequence_of", "why_whole"]
