"""The program of one rank: one step over the whole global batch, microbatch by microbatch.

A step cuts the inputs to this rank's pieces, runs the prologue once, then forward and backward of every microbatch,
unit by unit (`runtime.run`), for which parameters go from rest to use and their gradients back (`runtime.weights`),
where they add to ``.grad`` as ``backward()`` does. Time is the outermost cut of the batch: a rank's own rows come in
(microbatch, data rank) order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.passes.layout import PARTIAL, SHARD, Mesh
from autopar.runtime.collectives import settle
from autopar.runtime.counter_random import random_key
from autopar.runtime.mesh import Ranks, naming, placements
from autopar.runtime.parameters import clip_grad_norm_, digest, from_rank_0, local
from autopar.runtime.run import Run, Units, units_of
from autopar.runtime.runs import take
from autopar.runtime.units import Fallback
from autopar.runtime.weights import Weights, ways_of

if TYPE_CHECKING:
    from autopar.passes.lower import InputUse, Local, OutputUse


class Program:
    """Executes a lowered step on this rank. All ranks call the same methods in the same order.

    ``local``: what `lower` made for this rank; ``tensors``: what `place` made; ``constants``: full values by name, of
    which rank 0's count; ``seed``: of random ops, the same on all ranks, whose numbers also depend on ``steps``, the
    calls of `step` and `forward` so far; ``units``: how the units are run (default: as `units_of` makes them).

    Example:
        ``program = Program(local, place(model, local.parameters, ranks), ranks, constants)``, then in each step
        ``(loss,) = program.step([tokens, labels])``; ``optimizer.step()``.
    """

    def __init__(
        self,
        local: Local,
        tensors: nn.Module,
        ranks: Ranks,
        constants: Mapping[str, Tensor],
        seed: int = 0,
        units: Mapping[int, Units] | None = None,
    ) -> None:
        self.local, self.tensors, self.mesh = local, tensors, local.mesh
        self.ranks = ranks.for_mesh(local.mesh)
        self.rows = (0,) if self.mesh.time is None else self.mesh.axes[self.mesh.time].rows
        self.constants = [from_rank_0(constants[name], ranks) for name in local.constants]
        names = next((p.device_mesh.mesh_dim_names for p in tensors.parameters() if isinstance(p, DTensor)), None) or ()
        self.units = units_of(local, ranks.device) if units is None else units
        self.ways = ways_of(local, self.units)
        self._order = tuple(self.mesh.index(name) for name in names if self.mesh.space)
        self.data_axes = _data_axes(local.inputs, self.mesh)
        self.seed, self.steps, self._compared = seed, 0, False

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The units that autograd runs, since their class could not be traced."""
        return tuple(dict.fromkeys(f for units in self.units.values() for f in units.fallbacks))

    @property
    def data_rank(self) -> int:
        """Which of the `data_world_size` pieces of each batch this rank's local rows are, for a sampler."""
        index = 0
        for axis in self.data_axes:
            index = index * self.mesh.axes[axis].size + self.ranks.coordinates[axis]
        return index

    @property
    def data_world_size(self) -> int:
        """Into how many pieces the ranks cut the batch."""
        return math.prod(self.mesh.axes[axis].size for axis in self.data_axes)

    @torch.no_grad()
    def step(
        self, inputs: Sequence[Tensor], *, inputs_are: str = "global", outputs: bool = False
    ) -> tuple[Tensor, ...]:
        """Forward and backward of the whole global batch.

        ``inputs``: in the order of ``local.inputs``; ``"global"``: every rank has the whole batch, ``"local"``: this
        rank has its own rows of inputs that are cut by the batch, shape ``[B / data_world_size, ...]``, in
        (microbatch, data rank) order. Returns the loss of the global batch, the same on every rank, and with
        ``outputs`` after it the other outputs as global tensors. Adds to ``.grad``; updates buffers in place.

        Raises AutoparError for inputs that do not fit the plan, that differ among ranks which must have the same ones
        (checked on the first step), and where another rank does not answer.
        """
        settle()
        with naming(self.ranks, self.steps + 1):
            batch = self._batch(inputs, inputs_are)
            weights = self._weights(train=True)
            made, updates = self._loop(batch, weights, len(self.local.outputs) if outputs else 1, train=True)
            self._deliver(weights.finish())
            self._write(updates)
            loss = sum((m[0] for m in made[1:]), made[0][0]).to(self.local.outputs[0].dtype)
            assert isinstance(loss, Tensor)
            self.steps += 1
            return (loss, *self._assemble(made, range(1, len(self.local.outputs)))) if outputs else (loss,)

    @torch.no_grad()
    def forward(self, inputs: Sequence[Tensor], *, inputs_are: str = "global") -> tuple[Tensor, ...]:
        """All outputs of the whole global batch as global tensors, without gradients; inputs as `step` takes them.
        Buffers are updated as the captured forward does."""
        settle()
        with naming(self.ranks, self.steps + 1):
            batch = self._batch(inputs, inputs_are)
            weights = self._weights(train=False)
            made, updates = self._loop(batch, weights, len(self.local.outputs), train=False)
            self._write(updates)
            self.steps += 1
            return tuple(self._assemble(made, range(len(self.local.outputs))))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """`parameters.clip_grad_norm_` of this program's parameters: the norm of the whole model on every rank."""
        with naming(self.ranks, self.steps):
            return clip_grad_norm_(self.tensors, self.ranks, max_norm, norm_type, error_if_nonfinite)

    def save(self, folder: str | Path) -> None:
        """Write this program, of all ranks, into ``folder`` as readable Python: units with their FQNs, layouts and what
        is saved, and the calls of them. `autopar.load_program` runs it without the model's code or a plan. Collective.

        Raises AutoparError where autograd runs a unit: it has no source of a backward.
        """
        from autopar.runtime.write_source import save

        with naming(self.ranks, self.steps):
            save(self, Path(folder))

    def _loop(
        self, batch: Batch, weights: Weights, keep: int, train: bool
    ) -> tuple[list[tuple[Tensor, ...]], tuple[Tensor, ...]]:
        """Every microbatch in turn: (the first ``keep`` outputs of each, buffer updates of the last)."""
        buffers = [self.tensors.get_buffer(name) for name in self.local.buffers]
        key = random_key(self.seed, self.steps)
        weights.arrive()
        hoisted: tuple[Tensor, ...] = ()
        if self.local.prologue is not None:
            hoisted, _ = self.local.prologue(*weights.read, *buffers, *self.constants, *batch.whole, key)
        weights.release()
        given = {"buffer": buffers, "constant": self.constants, "hoisted": hoisted, "key": [key]}
        made: list[tuple[Tensor, ...]] = []
        updates: tuple[Tensor, ...] = ()
        for m, rows in enumerate(self.rows):
            run = Run(self.units[rows], {**given, "input": batch.pieces[m], "microbatch": [m]}, weights)
            outs, updates = run.forward(keep, train=train)
            if train:
                run.backward(last=m + 1 == len(self.rows))
            made.append(outs)
        return made, updates

    def _weights(self, *, train: bool) -> Weights:
        """The parameters at the start of a step."""
        rests, wanted = [], []
        for use in self.local.parameters:
            parameter = self.tensors.get_parameter(use.fqn)
            assert isinstance(parameter, DTensor)
            if parameter.requires_grad and not use.trainable:
                raise AutoparError(f"{use.fqn}: was frozen when compiled and now requires a gradient. Compile again.")
            there = placements(use.rest, self._order) == list(parameter.placements)
            assert there, f"{use.fqn} does not rest as {use.rest}"
            rests.append(local(parameter).detach())
            wanted.append(parameter.requires_grad)
        if train and not any(wanted[i] for i in self.ways.reached):
            raise AutoparError("step: no trainable parameter reaches the loss. Unfreeze one, or call in eval mode.")
        return Weights(self.ways, self.local.parameters, rests, wanted, len(self.rows), train=train)

    def _deliver(self, gradients: Mapping[int, Tensor]) -> None:
        """Add the step's gradients to those of the parameters, as ``backward()`` does."""
        for i, use in enumerate(self.local.parameters):
            if i not in gradients:
                continue
            parameter = self.tensors.get_parameter(use.fqn)
            assert isinstance(parameter, DTensor)
            old = parameter.grad
            if old is not None:
                assert isinstance(old, DTensor) and old.placements == parameter.placements, f"{use.fqn}.grad"
                local(old).add_(gradients[i])
            else:  # what from_local does, without finding out again what the parameter's own description says
                parameter.grad = DTensor(gradients[i], parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _write(self, updates: tuple[Tensor, ...]) -> None:
        for name, update in zip(self.local.buffer_updates, updates, strict=True):
            self.tensors.get_buffer(name).copy_(update)

    # -- inputs -----------------------------------------------------------------------------------------------------

    def _batch(self, inputs: Sequence[Tensor], inputs_are: str) -> Batch:
        if inputs_are not in ("global", "local"):
            raise AutoparError(f"step: inputs_are={inputs_are!r} is not known. Use 'global' or 'local'.")
        uses = self.local.inputs
        if len(inputs) != len(uses):
            names = ", ".join(u.name for u in uses)
            raise AutoparError(f"step: got {len(inputs)} tensor inputs, the plan takes {len(uses)} ({names}).")
        for use, tensor in zip(uses, inputs, strict=True):
            self._check(use, tensor, inputs_are)
        if not self._compared:
            self._same(inputs, inputs_are)
            self._compared = True
        inputs = [tensor.to(self.ranks.device) for tensor in inputs]
        pieces = [
            [self._piece(u, t, inputs_are, m) for u, t in zip(uses, inputs, strict=True)] for m in range(len(self.rows))
        ]
        return Batch(pieces, self._whole(pieces))

    def _whole(self, pieces: list[list[Tensor]]) -> list[Tensor]:
        """This rank's rows of all microbatches, as the prologue takes them."""
        if self.local.prologue is None:
            return []
        whole = []
        for i, use in enumerate(self.local.inputs):
            dim = None if self.mesh.time is None else use.layout.dim_of(self.mesh.time)
            whole.append(pieces[0][i] if dim is None else torch.cat([own[i] for own in pieces], dim))
        return whole

    def _piece(self, use: InputUse, tensor: Tensor, inputs_are: str, microbatch: int) -> Tensor:
        runs = self._runs(use, microbatch)
        if inputs_are == "local" and runs:
            start = sum(_length(self._runs(use, m)[0]) for m in range(microbatch)) if self._by_batch(use) else 0
            runs = (((start, _length(runs[0])),), *runs[1:])
        return take(tensor, runs).contiguous()

    def _runs(self, use: InputUse, microbatch: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        return use.layout.runs(use.shape, self.mesh, self.mesh.coordinates(self.ranks.rank, microbatch))

    def _by_batch(self, use: InputUse) -> bool:
        return bool(use.layout.dims) and bool(use.layout.dims[0].axes)

    def _check(self, use: InputUse, tensor: Tensor, inputs_are: str) -> None:
        shape = use.shape
        if inputs_are == "local" and self._by_batch(use):
            axes = tuple(a for a in use.layout.dims[0].axes if a != self.mesh.time)
            if axes != self.data_axes:
                raise AutoparError(
                    f"step: ranks need rows of input {use.name!r} that are not theirs. Use inputs_are='global'."
                )
            shape = (sum(_length(self._runs(use, m)[0]) for m in range(len(self.rows))), *use.shape[1:])
        if tuple(tensor.shape) != tuple(shape):
            raise AutoparError(
                f"step: input {use.name!r} has shape {tuple(tensor.shape)}, the plan takes {tuple(shape)} "
                f"as {inputs_are} input. Compile again for another batch size, or see inputs_are."
            )
        if tensor.dtype != use.dtype:
            raise AutoparError(
                f"step: input {use.name!r} is {tensor.dtype}, the plan was made for {use.dtype}. Cast it."
            )

    def _same(self, inputs: Sequence[Tensor], inputs_are: str) -> None:
        """Ranks that must have the same inputs compare their hashes."""
        own = [_hash(tensor) for tensor in inputs]
        data_rank = self.data_rank if inputs_are == "local" else 0
        every = self.ranks.gather_numbers([data_rank, random_key(self.seed, self.steps), *own])
        first: dict[int, int] = {}
        for rank, (group, key, *hashes) in enumerate(every):
            if key != every[0][1]:
                raise AutoparError(
                    f"step: ranks 0 and {rank} draw other random numbers. Give compile the same seed= on every rank, "
                    "and set parallel.steps alike."
                )
            other = first.setdefault(group, rank)
            for use, a, b in zip(self.local.inputs, hashes, every[other][2:], strict=True):
                if a != b:
                    raise AutoparError(
                        f"step: input {use.name!r} differs between ranks {other} and {rank}, which need the same "
                        f"{'rows' if inputs_are == 'local' else 'batch'}. Seed the data alike, or feed each rank "
                        "by parallel.data_rank with inputs_are='local'."
                    )

    # -- outputs ----------------------------------------------------------------------------------------------------

    def _assemble(self, made: list[tuple[Tensor, ...]], indices: Sequence[int]) -> list[Tensor]:
        return [self._global(self.local.outputs[i], [outs[i] for outs in made]) for i in indices]

    def _global(self, use: OutputUse, pieces: list[Tensor]) -> Tensor:
        """The global tensor of one output from the pieces that this rank made of it, one a microbatch."""
        time = self.mesh.time
        if time is not None and use.layout.kinds[time] == PARTIAL:
            pieces = [sum(pieces[1:], pieces[0])]
        elif time is None or use.layout.kinds[time] != SHARD:
            pieces = pieces[-1:]
        full = pieces[0].new_empty(use.shape)
        for m, own in enumerate(pieces):
            gathered = own.contiguous()
            for axis in self.mesh.space:
                if use.layout.kinds[axis] == PARTIAL:
                    dist.all_reduce(gathered := gathered.clone(), group=self._group(axis))
            cut = [axis for axis in self.mesh.space if use.layout.kinds[axis] == SHARD]
            for axis in reversed(cut):
                gathered = self._stack(gathered, axis)
            for places in itertools.product(*(range(self.mesh.axes[a].size) for a in cut)):
                coordinates = list(self.mesh.coordinates(self.ranks.rank, m))
                for axis, place in zip(cut, places, strict=True):
                    coordinates[axis] = place
                _put(full, use.layout.runs(use.shape, self.mesh, tuple(coordinates)), gathered[places])
        return full.to(use.dtype)

    def _stack(self, tensor: Tensor, axis: int) -> Tensor:
        """Equal pieces of the ranks of one axis, stacked along a new first dim."""
        n = self.mesh.axes[axis].size
        flat = torch.empty((n, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if tensor.numel():
            dist.all_gather(list(flat.unbind()), tensor, group=self._group(axis))
        return flat

    def _group(self, axis: int) -> dist.ProcessGroup:
        return self.ranks.groups[self.mesh.axes[axis].name]


@dataclass(frozen=True)
class Batch:
    """This rank's inputs: ``pieces[m][i]`` for microbatch m, ``whole[i]`` with the rows of all microbatches."""

    pieces: list[list[Tensor]]
    whole: list[Tensor]


def _data_axes(inputs: Sequence[InputUse], mesh: Mesh) -> tuple[int, ...]:
    """The rank axes that cut the batch: the longest cut of dim 0 of an input, outermost first."""
    cuts = [u.layout.dims[0].axes for u in inputs if u.layout.dims]
    return max((tuple(a for a in axes if a != mesh.time) for axes in cuts), key=len, default=())


def _length(runs: tuple[tuple[int, int], ...]) -> int:
    return sum(length for _, length in runs)


def _put(full: Tensor, runs: tuple[tuple[tuple[int, int], ...], ...], own: Tensor) -> None:
    """Write ``own`` where ``runs`` of every dim say; the inverse of `take`."""
    index = []
    for dim, pieces in enumerate(runs):
        places = torch.cat([torch.arange(start, start + n, device=full.device) for start, n in pieces])
        index.append(places.reshape([-1 if d == dim else 1 for d in range(len(runs))]))
    if index:
        full[tuple(index)] = own
    else:
        full.copy_(own)


def _hash(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return digest(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


__all__ = ["Batch", "Program"]
