"""The sequence: the rows of a model that are not those of its batch, and what an axis of its own (``cp=N``) cuts.

Rows are dims of activations that come from the inputs and not from a weight. An axis of the sequence is an obligation,
kept by leaving states out: an op keeps only what cuts a row that is not of the batch, where it can; where it cannot, it
runs whole, and what comes after it is cut again. Weights are whole on it, but for those that lie along the sequence
themselves (a table of positions). Where no work has rows but those of the batch, these are the sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.passes.completion import result_slots
from autopar.passes.divide_work import flops
from autopar.passes.facts import Strategy, operand_nodes, value
from autopar.passes.follow_time import follow_axis
from autopar.passes.layout import Axis, Layout
from autopar.passes.strategy import rule
from autopar.passes.units import core_ops, is_parameter, producer_of

DIVIDE = ("factor", "special")  # choices that divide work

Dims = frozenset[int]
Cut = tuple[int, tuple[int, ...]]  # a dim, and the parts in which it is cut one by one
Held = Callable[[fx.Node], bool]  # whether a tensor is a parameter, or depends on parameters alone


@dataclass(frozen=True)
class Rows:
    """The ``dims`` of a tensor that are rows, and how the ``batch`` would cut it (None: it has none); ``listed``: it is
    only a part of its dim, which lists the sequences of the batch one after another."""

    dims: Dims = frozenset()
    batch: Cut | None = None
    listed: bool = False

    def cut_by(self, layout: Layout, axis: int) -> bool:
        """Whether an axis cuts rows that are not of the batch."""
        dim = layout.dim_of(axis)
        return dim in self.dims and not self.batch_cut_by(layout, axis)

    def batch_cut_by(self, layout: Layout, axis: int) -> bool:
        """Whether an axis cuts the batch."""
        dim = layout.dim_of(axis)
        return dim is not None and (dim, layout.dims[dim].parts) == self.batch


@dataclass(frozen=True)
class Along:
    """The rows of an op's operands and results (weights have none)."""

    operands: tuple[Rows, ...]
    results: tuple[Rows, ...]

    def of(self, strategies: Sequence[Strategy], axis: int) -> list[Strategy]:
        """The strategies that cut the sequence; where none does, since another axis cuts the batch in the same dim,
        those that cut this between whole sequences; else those that cut nothing."""
        along = [s for s in strategies if self.cuts(s, axis)] or [s for s in strategies if self._cuts_list(s, axis)]
        return along or [s for s in strategies if all(x.kinds[axis] != "S" for x, _ in self._pairs(s))]

    def cuts(self, chosen: Strategy, axis: int) -> bool:
        """Whether the op is divided along the sequence."""
        pairs = self._pairs(chosen)
        if chosen.choices[axis].kind not in DIVIDE or any(rows.batch_cut_by(x, axis) for x, rows in pairs):
            return False
        return any(rows.cut_by(x, axis) for x, rows in pairs)

    def _cuts_list(self, chosen: Strategy, axis: int) -> bool:
        found = any(rows.listed and rows.batch_cut_by(x, axis) for x, rows in self._pairs(chosen))
        return chosen.choices[axis].kind in DIVIDE and found

    def _pairs(self, chosen: Strategy) -> list[tuple[Layout, Rows]]:
        made = zip(chosen.results, self.results, strict=True)
        read = zip(chosen.operands, self.operands, strict=True)
        return [*read, *((x, rows) for x, rows in made if x is not None)]


def along_sequence(
    gm: fx.GraphModule, parameters: frozenset[str], weights: Collection[fx.Node], batched: frozenset[str], batch: int
) -> dict[fx.Node, Along]:
    """What of every op of the core lies along the sequence. ``weights``: what depends on parameters alone; ``batched``:
    the inputs whose dim 0 is the batch, of ``batch`` rows."""
    ops = core_ops(gm, parameters)

    def held(node: fx.Node) -> bool:
        return is_parameter(node, parameters) or node in weights

    rows = rows_of(ops, held)
    cuts = _batch_cuts(gm, batched, batch)
    known = {t: _rows(t, rows.get(t, frozenset()), cuts.get(t), batch) for t in (*cuts, *rows)}
    found = {op: _along(op, known) for op in ops}
    if lengths(found) or not cuts:
        return found
    return {op: _along(op, {t: Rows(dims) for t, dims in rows.items()}) for op in ops}


def _rows(tensor: fx.Node, dims: Dims, cut: Cut | None, batch: int) -> Rows:
    return Rows(dims, cut, cut is not None and not cut[1] and value(tensor).shape[cut[0]] > batch)


def _along(op: fx.Node, known: Mapping[fx.Node, Rows]) -> Along:
    tensors = (operand_nodes(op), result_slots(op))
    return Along(*(tuple(Rows() if t is None else known.get(t, Rows()) for t in group) for group in tensors))


def _batch_cuts(gm: fx.GraphModule, batched: frozenset[str], batch: int) -> dict[fx.Node, Cut]:
    if batch < 2:
        return {}
    found = follow_axis(gm, batched, Axis("batch", batch)).layouts
    places = {node: layout.dim_of(0) for node, layout in found.items()}
    return {node: (dim, found[node].dims[dim].parts) for node, dim in places.items() if dim is not None}


def sequences(along: Mapping[fx.Node, Along]) -> dict[fx.Node, Rows]:
    """The rows of every tensor that an op of the core makes."""
    pairs = ((op, zip(result_slots(op), known.results, strict=True)) for op, known in along.items())
    return {tensor: rows for _, made in pairs for tensor, rows in made if tensor is not None}


def lengths(along: Mapping[fx.Node, Along]) -> list[int]:
    """How long the sequence is in what ops with FLOPs make, the most common first. What has lost the batch on the way
    counts only where nothing has it."""
    made = ((op, zip(result_slots(op), known.results, strict=True)) for op, known in along.items() if flops(op))
    pairs = [(tensor, rows) for _, found in made for tensor, rows in found if tensor is not None]
    known = [(t, rows.dims - {rows.batch[0]}) for t, rows in pairs if rows.batch is not None]
    found = Counter(value(t).shape[d] for t, dims in known or ((t, r.dims) for t, r in pairs) for d in dims)
    return [n for n, _ in found.most_common() if n > 1]


def why_uncut(op: fx.Node, size: int, known: Along) -> str:
    """Why an axis of ``size`` ranks does not cut the sequence of an op."""
    found = rule(op)
    if found is None:
        return "it has no rule"
    rows = [x for x in (*known.operands, *known.results) if x.dims - ({x.batch[0]} if x.batch else set())]
    return f"no dim of its sequence may be cut over {size} ranks" if rows else "it has no dim of the sequence"


def cuts_nothing(size: int, along: Mapping[fx.Node, Along]) -> str:
    """What to say where an axis of ``size`` ranks divides no op with FLOPs along the sequence."""
    what = f"pins: cp={size} divides no matmul, attention or convolution of this model along its sequence"
    found = lengths(along)
    if not found:
        return f"{what} (it has none). Pin dp or tp instead."
    legal = [f"cp={d}" for d in range(2, found[0] + 1) if Axis("", d).fills(found[0])]
    if f"cp={size}" in legal:
        return f"{what} (its {found[0]} places are read together). Pin dp or tp instead."
    shown = ", ".join(legal[:8]) + ", ..." * (len(legal) > 8)
    return f"{what} of {found[0]}. Legal: {shown}; or pin dp or tp instead."


def rows_of(ops: Sequence[fx.Node], held: Held) -> dict[fx.Node, Dims]:
    """The dims of every activation that come from rows of the inputs, not from a dim of a weight."""
    core, rows = frozenset(ops), dict[fx.Node, Dims]()
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
                like = next(
                    (rows.get(o, frozenset[int]()) for _, o in groups[0] if len(value(o).shape) == len(named)), None
                )
                rows[r] = frozenset(
                    d
                    for d, dim in enumerate(named)
                    if any(origin.get(f, made) for f in dim.factors)
                    or (not dim.factors and value(r).shape[d] > 1 and _uncut_row(op, d, like))
                )
    return rows


def _uncut_row(op: fx.Node, dim: int, like: Dims | None) -> bool:
    """Whether a dim that is never cut is a row: as it is of the activation that the op reads; of those that come
    straight from inputs, what is not normalised."""
    return dim in like if like is not None else "norm" not in str(op.target)


__all__ = [
    "DIVIDE",
    "Along",
    "Dims",
    "Held",
    "Rows",
    "along_sequence",
    "cuts_nothing",
    "rows_of",
    "sequences",
    "why_uncut",
]
