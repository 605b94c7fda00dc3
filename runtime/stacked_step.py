"""A whole step of all ranks in one process: what `Program.step` does on real ranks, in the stacked semantics.

For meshes larger than this machine, and for judging thousands of plans without starting a process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autopar.passes.layout import INVARIANT, REPLICATE, Layout, Mesh
from autopar.runtime.opaque import PASSED, Flow
from autopar.runtime.parameters import piece
from autopar.runtime.runs import take
from autopar.runtime.stacked import run_stacked

if TYPE_CHECKING:
    from autopar.passes.lower import Local, OutputUse, ParameterUse


@dataclass(frozen=True)
class StackedStep:
    """``loss``: 0-d; ``gradients``: global tensors by FQN (None where nothing flowed); ``buffers``: updated values."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def axis_groups(mesh: Mesh) -> dict[str, list[list[int]]]:
    """For every axis of ranks the lists of ranks that differ on it only, in order of their coordinates.

    >>> from autopar.passes.layout import Axis
    >>> axis_groups(Mesh((Axis("dp", 2), Axis("tp", 2))))
    {'dp': [[0, 2], [1, 3]], 'tp': [[0, 1], [2, 3]]}
    """
    groups: dict[str, list[list[int]]] = {}
    for axis in mesh.space:
        rows: dict[tuple[int, ...], list[int]] = {}
        for rank in range(mesh.ranks):
            where = mesh.coordinates(rank)
            rows.setdefault(where[:axis] + where[axis + 1 :], []).append(rank)
        groups[mesh.axes[axis].name] = list(rows.values())
    return groups


def stacked_step(
    programs: Sequence[Local], attributes: Mapping[str, Tensor], inputs: Sequence[Tensor], key: int = 0
) -> StackedStep:
    """Run one step of ``programs``, one a rank in order (`lower` with groups named like the axes).

    ``attributes``: full parameters, buffers and constants by name; ``inputs``: the whole global batch, in the order of
    the programs' inputs; ``key``: of the step (`random_key`). Invariant gradients must agree on all ranks bit for bit:
    raises AssertionError where not.
    """
    return stacked_stages([programs], attributes, inputs, key)


def stacked_stages(
    stages: Sequence[Sequence[Local]],
    attributes: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    key: int = 0,
    flow: Flow | None = None,
) -> StackedStep:
    """`stacked_step` of a pipeline: ``stages`` has the programs of each stage; ``flow``: through opaque calls.

    No schedule is followed: of every microbatch all stages run in turn, and values go by the numbers of their crossings
    from rank to rank, gradients back by autograd. A parameter of several stages has the sum of its gradients.
    """
    first, passed = stages[0][0], PASSED.copy()
    rows = (0,) if first.mesh.time is None else first.mesh.axes[first.mesh.time].rows
    steps = [_Stage(programs, attributes, inputs, rows, key) for programs in stages]
    for m in range(len(rows)):
        crossed: dict[int, list[Tensor]] = {}  # by number: of every rank
        for step in steps:
            crossed |= step.forward(m, crossed)
    loss = next(found for step in steps if (found := step.loss()) is not None)
    gradients: dict[str, Tensor | None] = {}
    for name, own in (pair for step in steps for pair in step.gradients()):
        other = gradients.get(name)
        gradients[name] = own if other is None else other if own is None else other + own
    if flow is not None:
        reached = flow.parameters([slot for slot in flow.operands if PASSED[slot] > passed[slot]])
        gradients = {name: g if name in reached else None for name, g in gradients.items()}
    buffers = {name: value for step in steps for name, value in step.buffers()}
    return StackedStep(loss.detach(), gradients, buffers)


class _Stage:
    """One stage of all its ranks."""

    def __init__(
        self,
        programs: Sequence[Local],
        attributes: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        rows: Sequence[int],
        key: int,
    ) -> None:
        first = programs[0]
        self.programs, self.rows, self.key, self.groups = programs, rows, key, axis_groups(first.mesh)
        self.made: list[list[tuple[Tensor, ...]]] = []  # the outputs of each microbatch, of each rank
        self.updates: tuple[Tensor, ...] = ()
        self.rests: list[dict[str, Tensor]] = []
        for p in programs:
            held = {u.fqn: piece(attributes[u.fqn].detach(), u.rest, p.mesh, p.coordinates) for u in p.parameters}
            self.rests.append({u.fqn: held[u.fqn].requires_grad_(u.trainable) for u in p.parameters})
        entries: list[list[Tensor]] = [[] for _ in programs]
        for use in first.parameters:
            own = [rest[use.fqn] for rest in self.rests]
            if use.fqn in first.enter:
                own = run_stacked([p.enter[use.fqn] for p in programs], [[x] for x in own], self.groups)
            for rank, x in enumerate(own):
                entries[rank].append(x)
        others = [attributes[n].detach() for n in (*first.buffers, *first.constants)]
        self.fixed = [[*entry, *others] for entry in entries]
        self.pieces = [[_pieces(p, rank, m, inputs) for m in range(len(rows))] for rank, p in enumerate(programs)]
        self.hoisted: list[tuple[Tensor, ...]] = [() for _ in programs]
        if first.prologue is not None:
            whole = [[*self.fixed[r], *_rejoined(p, self.pieces[r]), key] for r, p in enumerate(programs)]
            made = run_stacked([p.prologue for p in programs if p.prologue is not None], whole, self.groups)
            self.hoisted = [outputs for outputs, _ in made]

    def forward(self, m: int, crossed: Mapping[int, list[Tensor]]) -> dict[int, list[Tensor]]:
        """Run a microbatch. ``crossed``: what earlier stages made; what this one makes for later ones."""
        first = self.programs[0]
        given = []
        for rank in range(len(self.programs)):
            received = [crossed[c.number][rank] for c in first.received]
            received = [x if c.grad else x.detach() for c, x in zip(first.received, received, strict=True)]
            given.append([*self.fixed[rank], *self.pieces[rank][m], *self.hoisted[rank], *received, m, self.key])
        made = run_stacked([p.body[self.rows[m]] for p in self.programs], given, self.groups)
        self.made.append([outputs for outputs, _ in made])
        self.updates = made[0][1]
        ends = range(len(first.outputs), len(first.outputs) + len(first.sent))
        return {c.number: [outputs[i] for outputs, _ in made] for i, c in zip(ends, first.sent, strict=True)}

    def loss(self) -> Tensor | None:
        """The loss, after its backward; None where another stage has it."""
        first = self.programs[0]
        if first.tail is not None:
            read = [[[outputs[i] for outputs in ranks] for ranks in self.made] for i, _ in first.tailed]
            uses = [first.outputs[i] for i, _ in first.tailed]
            loss: Tensor = first.tail.graph(*(_whole(u, first.mesh, x) for u, x in zip(uses, read, strict=True)))[0]
            torch.autograd.backward(loss)
            return loss
        if not first.has_loss:
            return None
        torch.autograd.backward([outputs[0] for ranks in self.made for outputs in ranks])
        return torch.stack([ranks[0][0].detach() for ranks in self.made]).sum()

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Global gradients of its parameters, by FQN."""
        for use in self.programs[0].parameters:
            own = [rest[use.fqn].grad for rest in self.rests]
            yield use.fqn, _global_gradient(use, self.programs[0].mesh, own)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """New values of the buffers that it changes."""
        return zip(self.programs[0].buffer_updates, self.updates, strict=True)


def _pieces(program: Local, rank: int, microbatch: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    where = program.mesh.coordinates(rank, microbatch)
    return [
        take(x, use.layout.runs(use.shape, program.mesh, where)).contiguous()
        for use, x in zip(program.inputs, inputs, strict=True)
    ]


def _rejoined(program: Local, pieces: list[list[Tensor]]) -> list[Tensor]:
    """A rank's rows of all microbatches, as the prologue takes them."""
    joined = []
    for i, use in enumerate(program.inputs):
        dim = None if program.mesh.time is None else use.layout.dim_of(program.mesh.time)
        joined.append(pieces[0][i] if dim is None else torch.cat([own[i] for own in pieces], dim))
    return joined


def _global_gradient(use: ParameterUse, mesh: Mesh, pieces: list[Tensor | None]) -> Tensor | None:
    if all(p is None for p in pieces):
        return None
    assert all(p is not None for p in pieces), f"{use.fqn}: some ranks have a gradient and some have none"
    return assemble(use.rest, use.shape, mesh, [p for p in pieces if p is not None], use.fqn)


def _whole(use: OutputUse, mesh: Mesh, pieces: Sequence[Sequence[Tensor]]) -> Tensor:
    """The global tensor of what the ranks made, ``pieces[microbatch][rank]``, with gradients as each kind has them:
    copies (``I``) all get the whole gradient, of ``R`` one does."""
    full = pieces[0][0].new_zeros(use.shape)
    for m, ranks in enumerate(pieces):
        for rank, own in enumerate(ranks):
            at = mesh.coordinates(rank, m)
            copies = [a for a, c in enumerate(at) if c and use.layout.kinds[a] in (INVARIANT, REPLICATE)]
            if any(use.layout.kinds[a] == REPLICATE or a == mesh.time for a in copies):
                continue
            more = own - own.detach() if copies else own  # nothing, with a gradient
            where = _places(use.layout, use.shape, mesh, at)
            full = full.index_put(where, more, accumulate=True) if where else full + more
    return full


def assemble(layout: Layout, shape: tuple[int, ...], mesh: Mesh, pieces: Sequence[Tensor], name: str) -> Tensor:
    """The global tensor that the ranks hold in ``layout`` (``S`` and ``I``); copies must agree bit for bit."""
    full = pieces[0].new_full(shape, float("nan"))
    for rank, own in enumerate(pieces):
        where = _places(layout, shape, mesh, mesh.coordinates(rank)) or ...
        there = full[where]
        assert there.shape == own.shape, f"{name}: rank {rank} holds {tuple(own.shape)}, not {tuple(there.shape)}"
        known = ~there.isnan()
        assert torch.equal(there[known], own[known]), f"{name}: rank {rank} has another value than the ranks before it"
        full[where] = own
    return full


def _places(layout: Layout, shape: tuple[int, ...], mesh: Mesh, at: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The indices of the piece at a place, one a dim."""
    index = []
    for dim, runs in enumerate(layout.runs(shape, mesh, at)):
        places = torch.cat([torch.arange(start, start + n) for start, n in runs])
        index.append(places.reshape([-1 if d == dim else 1 for d in range(len(shape))]))
    return tuple(index)
