"""What one op may do on a mesh: all its legal strategies, with what each costs on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from autopar.choosing.inside import inside
from autopar.hardware import Chip
from autopar.passes.calls import call_key
from autopar.passes.completion import produced_parts
from autopar.passes.facts import Choice, Strategy, fact, operand_nodes, value
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.moves import settle
from autopar.passes.price import prices
from autopar.passes.strategy import Proposal, choices, rule, strategy
from autopar.solver.cost import roofline
from autopar.solver.problem import COMPUTE, EXPOSED, RESOURCES, SAVED, TRANSIENT, Array, Index

Parts = tuple[Proposal, ...]


PARTIAL = 1e-4  # of its seconds, for work on partial sums: of equal plans the one that reduces early is taken


@dataclass(frozen=True, eq=False)
class Column:
    """The different layouts of one operand or result over an op's states, and which each state has."""

    layouts: tuple[Layout, ...]
    of: Index


@dataclass(frozen=True, eq=False)
class OpStates:
    """``operands``: a column for each slot (None: not of the core); ``results``: for each result that is a tensor.
    ``costs``: [states, resources], seconds of all microbatches, of which ``forward`` [states, 2] (compute, exposed) are
    of forward. ``generated``: strategies before equal ones went."""

    strategies: tuple[Strategy, ...]
    operands: tuple[Column | None, ...]
    results: tuple[Column | None, ...]
    costs: Array
    forward: Array
    generated: int


class Menu:
    """The strategies of ops. Keeps what does not depend on the other axes of a mesh."""

    def __init__(self) -> None:
        self._alone: dict[tuple[int, int, Parts], list[Choice]] = {}

    def strategies(
        self,
        op: fx.Node,
        mesh: Mesh,
        time: Choice | None,
        proposals: Sequence[Proposal],
        fixed: Mapping[int, Choice] | None = None,
    ) -> list[Strategy]:
        """All legal combinations of a choice on each axis of ranks; ``time``: the choice on the time axis; ``fixed``:
        the only choice on some others."""
        fixed = fixed or {}
        order = tuple(range(len(mesh.axes)))
        per_axis = [
            [fixed[a]] if a in fixed else self._choices(op, mesh.axes[a].size, tuple(proposals)) for a in mesh.space
        ]
        last = [] if time is None else [time]
        found = (strategy(op, mesh, [*chosen, *last], order) for chosen in itertools.product(*per_axis))
        return [s for s in found if s is not None]

    def _choices(self, op: fx.Node, size: int, proposals: Parts) -> list[Choice]:
        key = (call_key(op), size, proposals)
        if key not in self._alone:
            self._alone[key] = choices(op, Mesh((Axis("alone", size),)), 0, proposals)
        return self._alone[key]


def op_states(
    op: fx.Node, strategies: Sequence[Strategy], core: tuple[int, ...], mesh: Mesh, chip: Chip, microbatches: int
) -> OpStates:
    """The states of an op: strategies that agree on the core's layouts and are no better in anything are left out.

    ``mesh``: with wires, for the collectives that some strategies have inside."""
    wired, mesh = mesh, mesh.without_wires()
    priced = prices(op, strategies, mesh)
    rate, moved = chip.matmul_rate(priced.dtype), chip.memory_rate
    costs, forward = np.zeros((len(strategies), len(RESOURCES))), np.zeros((len(strategies), 2))
    forward[:, 0] = microbatches * roofline(priced.flops_forward, priced.moved_forward, rate, moved)
    backward = microbatches * roofline(priced.flops_backward, priced.moved_backward, rate, moved)
    costs[:, COMPUTE] = forward[:, 0] + backward
    costs[:, SAVED] = priced.saved_new
    costs[:, TRANSIENT] = priced.transient
    for row, first, chosen in zip(costs, forward, strategies, strict=True):
        row[COMPUTE] *= 1 + PARTIAL * sum(c.kind == "linear" for c in chosen.choices)
        within = inside(op, chosen, mesh)
        if within is not None:
            row[EXPOSED] = microbatches * within.seconds(wired)
            row[SAVED] = within.kept
            first[1] = microbatches * within.seconds(wired, train=False)
    nodes = operand_nodes(op)
    ins = [_settled([s.operands[i] for s in strategies], value(nodes[i]), mesh) for i in core]
    outs = [
        _settled([s.results[r] for s in strategies], v, mesh) if v is not None else None
        for r, v in enumerate(fact(op).values)
    ]
    keep = _best(np.stack([c.of for c in (*ins, *outs) if c is not None], axis=1), np.hstack([costs, forward]))
    columns: list[Column | None] = [None] * len(nodes)
    for i, column in zip(core, ins, strict=True):
        columns[i] = _taken(column, keep)
    return OpStates(
        tuple(strategies[k] for k in keep),
        tuple(columns),
        tuple(None if c is None else _taken(c, keep) for c in outs),
        costs[keep],
        forward[keep],
        len(strategies),
    )


def arriving_parts(op: fx.Node, slot: int, layouts: Sequence[Layout], mesh: Mesh) -> Parts:
    """Proposals: an operand that arrives cut in parts may be read so."""
    found = rule(op)
    if found is None:
        return ()
    made = (p for layout in layouts for a in mesh.space for p in produced_parts(found, slot, layout, a))
    return tuple(dict.fromkeys(made))


def _settled(layouts: Sequence[Layout | None], v: object, mesh: Mesh) -> Column:
    from autopar.passes.facts import Value

    assert isinstance(v, Value)
    index: dict[Layout, int] = {}
    of = np.empty(len(layouts), np.int64)
    for k, layout in enumerate(layouts):
        assert layout is not None
        settled = settle(layout, v, mesh)
        of[k] = index.setdefault(settled, len(index))
    return Column(tuple(index), of)


def _taken(column: Column, keep: Index) -> Column:
    used, of = np.unique(column.of[keep], return_inverse=True)
    return Column(tuple(column.layouts[i] for i in used), of.astype(np.int64))


def _best(keys: Index, costs: Array) -> Index:
    """Of states with equal keys those that no other one beats or equals in everything; in order."""
    _, groups = np.unique(keys, axis=0, return_inverse=True)
    groups = groups.reshape(-1)
    order = np.argsort(groups, kind="stable")
    kept = np.ones(len(groups), bool)
    for rivals in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        if len(rivals) > 1:
            no_worse = (costs[rivals, None] <= costs[rivals]).all(-1)  # [rival, state]
            equal = no_worse & no_worse.T
            kept[rivals] = ~(np.triu(no_worse, 1) | (no_worse & ~equal)).any(0)
    return np.flatnonzero(kept)
