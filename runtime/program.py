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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.passes.layout import PARTIAL, REPLICATE, SHARD, Mesh
from autopar.runtime.collectives import settle
from autopar.runtime.counter_random import random_key
from autopar.runtime.mesh import Ranks, naming, placements
from autopar.runtime.opaque import PASSED, Flow, Slot
from autopar.runtime.parameters import clip_grad_norm_, digest, from_rank_0, local
from autopar.runtime.pipeline import Action, Pipeline, Spec, Transport
from autopar.runtime.run import Units, units_of
from autopar.runtime.runs import take
from autopar.runtime.stage import Nobody, Stage, Stages, StageStep, alone
from autopar.runtime.stage_tensors import Gradient
from autopar.runtime.timeline import Recorder
from autopar.runtime.transport import TorchTransport
from autopar.runtime.units import Fallback
from autopar.runtime.weights import Weights

if TYPE_CHECKING:
    from autopar.passes.lower import InputUse, Local, OutputUse, ParameterUse
    from autopar.passes.split_tail import Tail

UNREACHED = "step: no trainable parameter reaches the loss. Unfreeze one, or call in eval mode."


class Program:
    """Executes a lowered step on this rank. All ranks call the same methods in the same order.

    ``locals``: what `lower` made for this rank, of each stage that it has; ``tensors``: what `place` made;
    ``constants``: full values by name, of which rank 0's count; ``seed``: of random ops, the same on all ranks, whose
    numbers also depend on ``steps``, the calls of `step` and `forward` so far; ``pipeline``: where there are several
    stages; ``units``: how the units of each stage are run (default: as `units_of` makes them); ``flow``: how gradients
    come through opaque calls, where there are any.

    Example:
        ``program = Program([local], place(model, local.parameters, ranks), ranks, constants)``, then in each step
        ``(loss,) = program.step([tokens, labels])``; ``optimizer.step()``.
    """

    recorder: Recorder | None = None  # of the next step

    def __init__(
        self,
        locals: Sequence[Local],
        tensors: nn.Module,
        ranks: Ranks,
        constants: Mapping[str, Tensor],
        seed: int = 0,
        pipeline: Stages | None = None,
        units: Sequence[Mapping[int, Units]] | None = None,
        flow: Flow | None = None,
    ) -> None:
        self.tensors, self.mesh = tensors, locals[0].mesh
        self.ranks = ranks.for_mesh(locals[0].mesh)
        self.rows = (0,) if self.mesh.time is None else self.mesh.axes[self.mesh.time].rows
        self.pipeline, self.at = pipeline or alone(locals[0], len(self.rows)), ranks.stage
        self.flow = flow
        held = {name: from_rank_0(tensor, ranks) for name, tensor in sorted(constants.items())}
        parted = any(letter == "W" for letter, _, _ in self.actions)
        self.stages = tuple(
            Stage(
                chunk * ranks.stages + ranks.stage,
                local,
                units_of(local, ranks.device) if units is None else units[chunk],
                local.prologue,
                [held[name] for name in local.constants],
                parted,
            )
            for chunk, local in enumerate(locals)
        )
        names = next((p.device_mesh.mesh_dim_names for p in tensors.parameters() if isinstance(p, DTensor)), None) or ()
        self._order = tuple(self.mesh.index(name) for name in names if self.mesh.space)
        self._held = {use.fqn: self._resting(use) for stage in self.stages for use in stage.local.parameters}
        self.data_axes = _data_axes(self.local.inputs, self.mesh)
        self.seed, self.steps, self._compared = seed, 0, False
        self._executors: dict[bool, Pipeline] = {}

    @property
    def local(self) -> Local:
        """The first of this rank's stages, or all there is."""
        return self.stages[0].local

    @property
    def actions(self) -> Sequence[Action]:
        """What this rank does in a step."""
        return self.pipeline.schedule[self.at]

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The units that autograd runs, since their class could not be traced."""
        return tuple(dict.fromkeys(f for s in self.stages for units in s.units.values() for f in units.fallbacks))

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
        if self.ranks.stages > 1 and not any(parameter.requires_grad for parameter in self.tensors.parameters()):
            raise AutoparError(UNREACHED)
        with naming(self.ranks, self.steps + 1):
            passed = dict(PASSED)
            steps = self._run(self._batch(inputs, inputs_are), train=True, keep=outputs)
            self._deliver(steps, passed)
            self._write(steps)
            loss = self._loss(steps)
            self.steps += 1
            return (loss, *self._assemble(steps, range(1, len(self.pipeline.outputs)))) if outputs else (loss,)

    @torch.no_grad()
    def forward(self, inputs: Sequence[Tensor], *, inputs_are: str = "global") -> tuple[Tensor, ...]:
        """All outputs of the whole global batch as global tensors, without gradients; inputs as `step` takes them.
        Buffers are updated as the captured forward does."""
        settle()
        with naming(self.ranks, self.steps + 1):
            steps = self._run(self._batch(inputs, inputs_are), train=False, keep=True)
            self._write(steps)
            self.steps += 1
            return tuple(self._assemble(steps, range(len(self.pipeline.outputs))))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """`parameters.clip_grad_norm_` of this program's parameters: the norm of the whole model on every rank."""
        with naming(self.ranks, self.steps):
            return clip_grad_norm_(self.tensors, self.ranks, max_norm, norm_type, error_if_nonfinite)

    def save(self, folder: str | Path) -> None:
        """Write this program, of all ranks, into ``folder`` as readable Python: units with their FQNs, layouts and what
        is saved, and the calls of them. `autopar.load_program` runs it without the model's code or a plan. Collective.

        Raises AutoparError where autograd runs a unit: it has no source of a backward.
        """
        from autopar.runtime.write_folder import save

        with naming(self.ranks, self.steps):
            save(self, Path(folder))

    def _run(self, batch: Batch, *, train: bool, keep: bool) -> list[StageStep]:
        """What the schedule says, of all stages here; without ``train`` forwards alone; ``keep``: outputs too."""
        key, steps = [random_key(self.seed, self.steps)], list[StageStep]()
        for chunk, stage in enumerate(self.stages):
            buffers = [self.tensors.get_buffer(name) for name in stage.local.buffers]
            letters = [letter for letter, c, _ in self.actions if c == chunk and (train or letter == "F")]
            weights = self._weights(stage, letters)
            given: dict[str, Sequence[Any]] = {"buffer": buffers, "key": key}
            mine = StageStep(stage, weights, self.rows, batch.pieces, batch.whole, given, self, train=train, keep=keep)
            steps.append(mine)
        reached = any(step.weights.wanted[i] for step in steps for i in step.stage.ways.reached)
        if train and len(self.pipeline.schedule) == 1 and not reached:
            raise AutoparError(UNREACHED)
        self._execute(steps, train=train)
        return steps

    def _execute(self, steps: Sequence[StageStep], *, train: bool) -> None:
        if train not in self._executors:
            schedule = [[a for a in rank if train or a[0] == "F"] for rank in self.pipeline.schedule]
            self._executors[train] = Pipeline(schedule, self.pipeline.crossings, self._transport(), self._spec)
        if self.recorder is None:
            self._executors[train].run(steps)
        else:
            self.recorder.run(self._executors[train], steps)

    def _transport(self) -> Transport:
        if self.ranks.column is None:
            return Nobody()
        return TorchTransport(self.ranks)

    def _spec(self, number: int, microbatch: int) -> Spec:
        """What crosses, as the ranks of this column hold it."""
        use = self.pipeline.crossed[number]
        at = self.mesh.coordinates(self.ranks.place, microbatch)
        return use.layout.local_shape(use.shape, self.mesh, at), use.dtype

    def _resting(self, use: ParameterUse) -> DTensor:
        """The parameter, which rests as its use says."""
        parameter = self.tensors.get_parameter(use.fqn)
        assert isinstance(parameter, DTensor)
        there = placements(use.rest, self._order) == list(parameter.placements)
        assert there, f"{use.fqn} does not rest as {use.rest}"
        return parameter

    def _weights(self, stage: Stage, letters: Sequence[str]) -> Weights:
        """The parameters of a stage at the start of a step."""
        parameters = [self._held[use.fqn] for use in stage.local.parameters]
        wanted = [parameter.requires_grad for parameter in parameters]
        for use, wants in zip(stage.local.parameters, wanted, strict=True):
            if wants and not use.trainable:
                raise AutoparError(f"{use.fqn}: was frozen when compiled and now requires a gradient. Compile again.")
        rests = [local(parameter).detach() for parameter in parameters]
        return Weights(stage.ways, stage.local.parameters, rests, wanted, letters)

    def _deliver(self, steps: Sequence[StageStep], passed: Mapping[Slot, int]) -> None:
        """Add the step's gradients to those of the parameters, as ``backward()`` does. ``passed``: of opaque calls,
        before the step."""
        found: dict[str, Tensor] = {}
        for step in steps:
            for i, gradient in step.weights.finish().items():
                fqn = step.local.parameters[i].fqn
                found[fqn] = found[fqn].add_(gradient) if fqn in found else gradient
        self._tie(found)
        reached = found.keys() if self.flow is None else self._reached(self.flow, passed)
        for fqn, gradient in found.items():
            if fqn not in reached:
                continue
            parameter = self._held[fqn]
            old = parameter.grad
            if old is not None:
                assert isinstance(old, DTensor) and old.placements == parameter.placements, f"{fqn}.grad"
                local(old).add_(gradient)
            else:  # what from_local does, without finding out again what the parameter's own description says
                kind = Gradient if self.ranks.stages > 1 else DTensor
                parameter.grad = kind(gradient, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def _reached(self, flow: Flow, passed: Mapping[Slot, int]) -> frozenset[str]:
        """The parameters that have a gradient in this step: opaque calls of some rank used them."""
        slots = list(flow.operands)
        used = torch.tensor([PASSED[s] > passed.get(s, 0) for s in slots], dtype=torch.int32, device=self.ranks.device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.ranks.world)
        return flow.parameters({slot for slot, any_rank in zip(slots, used.tolist(), strict=True) if any_rank})

    def _tie(self, gradients: dict[str, Tensor]) -> None:
        """Sum the gradients of copies that several stages hold: in the order of the stages, so that all have the same
        bits, whatever the collective adds first."""
        for fqn, stages in self.pipeline.ties:
            if self.ranks.stage not in stages:
                continue
            parameter = self.tensors.get_parameter(fqn)
            if not parameter.requires_grad:
                continue
            own = gradients.get(fqn)
            sent = torch.zeros_like(local(parameter)) if own is None else own
            first, *others = (self.ranks.peer(stage) for stage in stages)
            if self.ranks.rank == first:
                for other in others:
                    theirs = torch.empty_like(sent)
                    dist.recv(theirs, src=other, group=self.ranks.column)
                    sent = sent + theirs
                for other in others:
                    dist.send(sent, dst=other, group=self.ranks.column)
            else:
                dist.send(sent.contiguous(), dst=first, group=self.ranks.column)
                sent = torch.empty_like(sent)
                dist.recv(sent, src=first, group=self.ranks.column)
            gradients[fqn] = sent

    def _write(self, steps: Sequence[StageStep]) -> None:
        """Give buffers their new values, which one stage knows."""
        own = {n: t for step in steps for n, t in zip(step.local.buffer_updates, step.updates, strict=True)}
        for name, stage in self.pipeline.updates:
            buffer = self.tensors.get_buffer(name)
            if name in own:
                buffer.copy_(own[name])
            self._from(stage, buffer)

    def _from(self, stage: int, tensor: Tensor) -> None:
        """Give a tensor of all stages the value that it has on one, in place."""
        if self.ranks.stages > 1 and tensor.numel():
            assert tensor.is_contiguous()
            src = self.ranks.peer(stage % self.ranks.stages)
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), src=src, group=self.ranks.column)

    def _loss(self, steps: Sequence[StageStep]) -> Tensor:
        use, stage = self.pipeline.outputs[0]
        own = next((step for step in steps if step.stage.number == stage), None)
        if own is None:
            loss = torch.empty(use.shape, dtype=use.dtype, device=self.ranks.device)
        elif own.local.tail is not None:
            loss = own.tail()[0][0].to(use.dtype)
        else:
            made = [own.outputs[m][0] for m in range(len(self.rows))]
            loss = sum(made[1:], made[0]).to(use.dtype).contiguous()
        self._from(stage, loss)
        return loss

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
        if all(stage.local.prologue is None for stage in self.stages):
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
        return use.layout.runs(use.shape, self.mesh, self.mesh.coordinates(self.ranks.place, microbatch))

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

    def _assemble(self, steps: Sequence[StageStep], indices: Sequence[int]) -> list[Tensor]:
        """Global outputs of the model, on every rank."""
        found = []
        for i in indices:
            use, stage = self.pipeline.outputs[i]
            step = next((step for step in steps if step.stage.number == stage), None)
            if step is None:
                whole = torch.empty(use.shape, dtype=use.dtype, device=self.ranks.device)
            elif step.local.tail is not None and i in step.local.tail.returns:
                whole = step.tail()[0][step.local.tail.returns.index(i)].to(use.dtype).contiguous()
            else:
                place = i if step.local.returns is None else step.local.returns.index(i)
                whole = self.join(use, [step.outputs[m][place] for m in range(len(self.rows))]).contiguous()
            self._from(stage, whole)
            found.append(whole)
        return found

    def join(self, use: OutputUse, pieces: list[Tensor]) -> Tensor:
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
                coordinates = list(self.mesh.coordinates(self.ranks.place, m))
                for axis, place in zip(cut, places, strict=True):
                    coordinates[axis] = place
                _put(full, use.layout.runs(use.shape, self.mesh, tuple(coordinates)), gathered[places])
        return full.to(use.dtype)

    def share(self, use: OutputUse, gradient: Tensor, microbatch: int) -> Tensor:
        """This rank's share of the gradient of a global tensor that it made a piece of: where several hold the same and
        their gradients will be added, one has all of it."""
        at = self.mesh.coordinates(self.ranks.place, microbatch)
        own = take(gradient, use.layout.runs(use.shape, self.mesh, at))
        others = any(kind == REPLICATE and c for kind, c in zip(use.layout.kinds, at, strict=True))
        return torch.zeros_like(own) if others else own.contiguous()

    def run_tail(
        self, tail: Tail, whole: list[Tensor], wanted: Sequence[bool]
    ) -> tuple[tuple[Tensor, ...], Sequence[Tensor | None]]:
        """A tail on whole tensors, the same on every rank of its stage: its results, and gradients where ``wanted``."""
        leaves = [t.requires_grad_() if wants else t for t, wants in zip(whole, wanted, strict=True)]
        with torch.set_grad_enabled(any(wanted)):
            made: tuple[Tensor, ...] = tail.graph(*leaves)
        found: list[Tensor | None] = [None] * len(whole)
        if made[0].requires_grad:
            read = [i for i, wants in enumerate(wanted) if wants]
            for i, gradient in zip(read, torch.autograd.grad(made[0], [leaves[i] for i in read], allow_unused=True)):
                found[i] = gradient
        return tuple(t.detach() for t in made), found

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
