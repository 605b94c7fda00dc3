"""A whole step of all ranks in one process: what `Program.step` does on real ranks, in the stacked semantics.

For meshes larger than this machine, and for judging thousands of plans without starting a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autopar.passes.layout import Layout, Mesh
from autopar.runtime.parameters import piece
from autopar.runtime.runs import take
from autopar.runtime.stacked import run_stacked

if TYPE_CHECKING:
    from autopar.passes.lower import Local, ParameterUse


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
    first, mesh = programs[0], programs[0].mesh
    groups = axis_groups(mesh)
    rests: list[dict[str, Tensor]] = []
    for p in programs:
        held = {u.fqn: piece(attributes[u.fqn].detach(), u.rest, mesh, p.coordinates) for u in p.parameters}
        rests.append({u.fqn: held[u.fqn].requires_grad_(u.trainable) for u in p.parameters})
    entries: list[list[Tensor]] = [[] for _ in programs]
    for use in first.parameters:
        own = [rest[use.fqn] for rest in rests]
        if use.fqn in first.enter:
            own = run_stacked([p.enter[use.fqn] for p in programs], [[x] for x in own], groups)
        for rank, x in enumerate(own):
            entries[rank].append(x)
    fixed = [[*entry, *(attributes[n].detach() for n in (*first.buffers, *first.constants))] for entry in entries]
    rows = (0,) if mesh.time is None else mesh.axes[mesh.time].rows
    pieces = [[_pieces(p, rank, m, inputs) for m in range(len(rows))] for rank, p in enumerate(programs)]
    hoisted: list[tuple[Tensor, ...]] = [() for _ in programs]
    if first.prologue is not None:
        whole = [[*fixed[r], *_rejoined(p, pieces[r]), key] for r, p in enumerate(programs)]
        made = run_stacked([p.prologue for p in programs if p.prologue is not None], whole, groups)
        hoisted = [outputs for outputs, _ in made]
    losses, updates = [], []
    for m, n in enumerate(rows):
        given = [[*fixed[r], *pieces[r][m], *hoisted[r], m, key] for r in range(len(programs))]
        made = run_stacked([p.body[n] for p in programs], given, groups)
        losses.append([outputs[0] for outputs, _ in made])
        updates = [update for _, update in made]
    total = sum((loss for per_rank in losses for loss in per_rank), torch.zeros(()))
    assert isinstance(total, Tensor)
    torch.autograd.backward(total)
    loss = sum((per_rank[0] for per_rank in losses[1:]), losses[0][0])
    assert isinstance(loss, Tensor)
    gradients = {u.fqn: _global_gradient(u, mesh, [rest[u.fqn].grad for rest in rests]) for u in first.parameters}
    return StackedStep(
        loss.detach(), gradients, dict(zip(first.buffer_updates, updates[0] if updates else (), strict=True))
    )


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


def assemble(layout: Layout, shape: tuple[int, ...], mesh: Mesh, pieces: Sequence[Tensor], name: str) -> Tensor:
    """The global tensor that the ranks hold in ``layout`` (``S`` and ``I``); copies must agree bit for bit."""
    full = pieces[0].new_full(shape, float("nan"))
    for rank, own in enumerate(pieces):
        index = []
        for dim, runs in enumerate(layout.runs(shape, mesh, mesh.coordinates(rank))):
            places = torch.cat([torch.arange(start, start + n) for start, n in runs])
            index.append(places.reshape([-1 if d == dim else 1 for d in range(len(shape))]))
        where = tuple(index) if index else ...
        there = full[where]
        assert there.shape == own.shape, f"{name}: rank {rank} holds {tuple(own.shape)}, not {tuple(there.shape)}"
        known = ~there.isnan()
        assert torch.equal(there[known], own[known]), f"{name}: rank {rank} has another value than the ranks before it"
        full[where] = own
    return full
