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
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.errors import AutoparError
from autopar.passes.completion import result_slots
from autopar.passes.divide_work import flops
from autopar.passes.facts import Choice, Strategy, operand_nodes, value
from autopar.passes.follow_time import TimeChoices
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.parameter_states import ParameterState
from autopar.passes.sequence import DIVIDE, Along, Dims, Held, Rows, rows_of
from autopar.passes.strategy import choices, rule, strategy
from autopar.passes.units import Units, is_parameter, producer_of

MOST_DEGREES = 16  # that are tried where one is not legal
NEIGHBOURS = 3  # units that a residual tensor touches at most: more have what all layers share, a mask or a bias


@dataclass(frozen=True)
class Limit:
    """What an op must not do on the tensor axis. ``operands``, ``results``: the dims of each that are rows;
    ``weights``: slots of weights with two dims or more; ``obliged``: it must divide them, and its work, where it can;
    ``whole``: it is glue of a residual stream, on every rank the same, forward and backward, unless it can be cut
    ``along`` the sequence (None: it must not)."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    weights: tuple[int, ...]
    obliged: bool
    whole: bool
    along: Along | None = None

    def of(self, strategies: Sequence[Strategy], axis: int) -> list[Strategy]:
        """The strategies that keep to it: those that divide, where any may and does."""
        along = [s for s in strategies if self.cuts_sequence(s, axis)]
        if along:
            return along
        kept = [s for s in strategies if self._keeps(s, axis)]
        divided = [s for s in kept if self.divides(s, axis)] if self.obliged else []
        return divided or kept

    def divides(self, chosen: Strategy, axis: int) -> bool:
        """Whether an op is divided, with its weights."""
        whole = any(chosen.operands[slot].kinds[axis] != "S" for slot in self.weights)
        return chosen.choices[axis].kind in DIVIDE and not whole

    def cuts_sequence(self, chosen: Strategy, axis: int) -> bool:
        """Whether it is glue whose results are all cut along the sequence."""
        if not self.whole or self.along is None or not self.along.cuts(chosen, axis):
            return False
        return all(x is None or x.kinds[axis] == "S" for x in chosen.results)

    def _keeps(self, chosen: Strategy, axis: int) -> bool:
        if self.whole and chosen.choices[axis].kind not in ("I", "linear"):
            return False
        pairs = [*zip(self.operands, chosen.operands, strict=True), *zip(self.results, chosen.results, strict=True)]
        return not any(layout is not None and layout.dim_of(axis) in rows for rows, layout in pairs)


@dataclass(frozen=True, eq=False)
class Roles:
    """``follow``: of each data axis, what every op does there; ``tensor``: the axis that divides work, with the
    ``limits`` of every op of the core and the tensors that are ``whole`` there, unless they can be cut along their
    ``sequence``; ``cut``: the axis of the sequence, and what of every op lies ``along`` it; ``rests``: of parameters,
    how they must rest on some axes, ``R`` or ``S<dim>``."""

    follow: Mapping[int, TimeChoices]
    tensor: int | None
    limits: Mapping[fx.Node, Limit]
    whole: frozenset[fx.Node]
    sequence: Mapping[fx.Node, Rows] = field(default_factory=dict)
    cut: int | None = None
    along: Mapping[fx.Node, Along] = field(default_factory=dict)
    rests: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @property
    def over(self) -> tuple[int, ...]:
        """The axes over which parameters may rest in pieces: those on which they are used whole."""
        return (*self.follow, *(() if self.cut is None else (self.cut,)))

    def fixed(self, op: fx.Node) -> dict[int, Choice]:
        """The choices that are made already: axis -> choice."""
        return {axis: found.ops[op] for axis, found in self.follow.items()}

    def key(self, op: fx.Node) -> object:
        """What the states of an op depend on."""
        return tuple(self.fixed(op).items()), self.limits.get(op), self.along.get(op)

    def of(self, op: fx.Node, strategies: list[Strategy]) -> list[Strategy]:
        """The strategies of an op that are allowed."""
        if self.cut is not None:
            strategies = self.along[op].of(strategies, self.cut)
        return strategies if self.tensor is None else self.limits[op].of(strategies, self.tensor)

    def resting(self, parameter: str, states: Sequence[ParameterState], mesh: Mesh) -> list[ParameterState]:
        """The states of a parameter that are allowed. Raises AutoparError where a pinned layout leaves none."""
        kept = list(states)
        for axis, word in self.rests.get(parameter, {}).items():
            found = [s for s in kept if _at_rest(s, axis) == word]
            if not found:
                name = mesh.axes[axis].name
                legal = ", ".join(f"{name}:{x}" for x in dict.fromkeys(_at_rest(s, axis) for s in kept))
                raise AutoparError(
                    f"pin layout.{parameter}={name}:{word}: beside the other pins it may not rest so over "
                    f"{name}={mesh.axes[axis].size}. Legal: {legal}."
                )
            kept = found
        return kept

    def shared(self, tensor: fx.Node, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        """The layouts in which a tensor may be shared."""
        if self.tensor is None or tensor not in self.whole:
            return layouts
        rows = self.sequence.get(tensor)
        along = tuple(x for x in layouts if rows is not None and rows.cut_by(x, self.tensor))
        return along or tuple(x for x in layouts if x.kinds[self.tensor] != "S")


def _at_rest(state: ParameterState, axis: int) -> str:
    dim = state.rest.dim_of(axis)
    return "R" if dim is None else f"S{dim}"


def limits_of(
    ops: Sequence[fx.Node],
    units: Units,
    parameters: frozenset[str],
    weights: frozenset[fx.Node],
    along: Mapping[fx.Node, Along] | None = None,
) -> tuple[dict[fx.Node, Limit], frozenset[fx.Node]]:
    """The limit of every op of the core, and the tensors that a tensor axis leaves whole. ``weights``: what depends on
    parameters alone; ``along``: what of every op lies along the sequence, for glue to be cut so."""

    def held(node: fx.Node) -> bool:
        return is_parameter(node, parameters) or node in weights

    rows = rows_of(ops, held)
    whole_ops, whole = _residual(ops, units, held, along is not None)
    limits = {
        op: Limit(
            tuple(rows.get(o, frozenset()) for o in operand_nodes(op)),
            tuple(rows.get(r, frozenset()) if r is not None else frozenset() for r in result_slots(op)),
            tuple(i for i, o in enumerate(operand_nodes(op)) if held(o) and len(value(o).shape) > 1),
            _obliged(op),
            op in whole_ops,
            None if along is None else along[op],
        )
        for op in ops
    }
    return limits, whole


def _obliged(op: fx.Node) -> bool:
    return op.target is torch.ops.aten.embedding.default or flops(op) > 0


def _residual(
    ops: Sequence[fx.Node], units: Units, held: Held, ending: bool
) -> tuple[frozenset[fx.Node], frozenset[fx.Node]]:
    """The glue around tensors that cross a cut and are read both by glue and by something else, and all its tensors.
    ``ending``: where there is none, the glue that the model ends with."""
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
    starts = [*(op for t in stream for op in ends[t]), *(producer_of(t) for t in stream)]
    whole = _reached(starts or (ops[-1:] if ending else ()), near)
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


def divides_nothing(size: int, left: Sequence[str]) -> str:
    """What to say where a tensor axis of ``size`` ranks divides no op with FLOPs. ``left``: those that there are."""
    return (
        f"pins: tp={size} divides no matmul, attention or convolution of this model "
        f"({'; '.join(left[:3]) or 'it has none'}). Use tp=1, or a degree that divides them."
    )


def shares_nothing(size: int) -> str:
    """What to say where a tensor axis of ``size`` ranks cuts nothing along the sequence, as ``sp=true`` asks."""
    return (
        f"pin sp=true: no norm, dropout or addition of this model can be cut along its sequence over tp={size}. "
        f"Leave sp out."
    )


def why_whole(op: fx.Node, size: int, limit: Limit) -> str:
    """Why a tensor axis of ``size`` ranks does not divide an op that it should, and which would."""
    found = rule(op)
    if found is None or found.why:
        return "it has no rule" if found is None else found.why
    sizes = ", ".join(str(value(o).shape) for o in operand_nodes(op))
    legal = ", ".join(f"tp={n}" for n in range(2, MOST_DEGREES + 1) if _may_divide(op, n, limit))
    return f"no dim of {sizes} that may be cut has a piece for each of {size} ranks (legal: {legal or 'none'})"


def _may_divide(op: fx.Node, size: int, limit: Limit) -> bool:
    """Whether an axis of so many ranks could divide the op as its limit asks."""
    mesh = Mesh((Axis("tp", size),))
    found = (strategy(op, mesh, [choice], (0,)) for choice in choices(op, mesh, 0))
    return any(s is not None and s.choices[0].kind in DIVIDE for s in limit.of([s for s in found if s], 0))


__all__ = ["DIVIDE", "Limit", "Roles", "divides_nothing", "limits_of", "shares_nothing", "why_whole"]
