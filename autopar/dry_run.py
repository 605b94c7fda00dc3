"""One step of a rank's program on fake tensors: every kernel that it launches, and the bytes alive at each.

What runs is the program itself, with its buckets, its autograd and AdamW; nothing is computed or sent.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.passes.lower import Local, OutputUse, ParameterUse, tail_uses
from autopar.passes.split_tail import Tail
from autopar.runtime.collectives import keep_until_settled, kept_apart, settle
from autopar.runtime.pipeline import Transport
from autopar.runtime.program import Batch, Program
from autopar.runtime.run import Units, units_of
from autopar.runtime.stage import Nobody, Stage, Stages, alone
from autopar.runtime.weights import Weights

if TYPE_CHECKING:
    from autopar.capture import Capture

LOOKUPS = ("aten.embedding", "aten.index", "aten.gather")  # read of their table as much as they make
SAME = ("replicate", "invariant", "keep", "wait_all_reduce")  # library ops that return their operand where they can

IN_PLACE = ("_c10d_functional.all_reduce_", "_c10d_functional.wait_tensor")  # whose fakes make new tensors


@dataclass(frozen=True)
class Launch:
    """One kernel: its op (``"aten.mm"``), the shapes of the tensors that it reads, the bytes that it reads and writes
    (none for a view), other arguments by place, and the width of an element."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    read: int
    written: int
    literals: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


@dataclass(frozen=True)
class Ran:
    """A whole step: ``launches`` in order, those of the optimizer apart; ``peak``: the most bytes of tensors alive."""

    launches: tuple[Launch, ...]
    optimizer: tuple[Launch, ...]
    peak: int


def dry_run(local: Local, captured: Capture) -> Ran:
    """Run the second step of training with fused AdamW: the first has no states of the optimizer yet."""
    units = units_of(local)
    with kept_apart() as kept, FakeTensorMode(allow_non_fake_inputs=True), Watch(kept) as watch:
        program = _Dry([local], [units], captured)
        optimizer = torch.optim.AdamW(program.leaves(), lr=1e-3, fused=True)
        for _ in range(2):
            watch.restart()
            program.run()
            launches = tuple(watch.launches)
            watch.launches.clear()
            optimizer.step()
            update = tuple(watch.launches)
            optimizer.zero_grad()
    return Ran(launches, update, watch.most)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every kernel, and follows the storages. ``kept``: what `collectives.launch` keeps."""

    def __init__(self, kept: deque[tuple[Any, ...]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept
        self.flying: dict[int, tuple[Any, ...]] = {}
        self.launches: list[Launch] = []
        self.alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.now = self.most = 0

    def restart(self) -> None:
        """Forget the launches and the peak so far."""
        self.launches.clear()
        self.most = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one kernel."""
        name = func.name().replace("::", ".").split(".")
        op = ".".join(name[:2])
        x = args[0] if args and isinstance(args[0], Tensor) else None
        ours = name[0] == "autopar"
        if ours and self.kept is not None and name[1].startswith("wait_"):
            keep_until_settled(self.flying.pop(id(args[0].untyped_storage()), ()))
        if ours and name[1] in SAME and x is not None and x.is_contiguous() and _whole(name[1], args):
            return x
        in_place = op in IN_PLACE
        made = args[0] if in_place else func(*args, **(kwargs or {}))
        if ours and self.kept is not None and name[1].startswith("start_"):
            self.flying[id(made.untyped_storage())] = (made, x)
            keep_until_settled((made, x))
        self._write_down(func, op, (args, kwargs), made)
        return made

    def _write_down(self, func: Any, op: str, given: Any, made: Any) -> None:
        tensors, results = list(_tensors(given)), list(_tensors(made))
        fresh = [self._born(t) for t in results]
        launch = Launch(
            op,
            shapes=tuple(tuple(t.shape) for t in tensors),
            read=0,
            written=0,
            literals=tuple(a for a in tree_leaves(given) if not isinstance(a, Tensor)),
            dtype=next((t.dtype for t in (*tensors, *results)), torch.float32),
        )
        if any(fresh) or op == IN_PLACE[0] or func._schema.is_mutable:
            same = {id(t.untyped_storage()) for t in tensors} if any(fresh) else set()
            written = sum(_nbytes(t) for t in results if id(t.untyped_storage()) not in same)
            read = written if op in LOOKUPS else sum(map(_nbytes, tensors))
            launch = replace(launch, read=read, written=written)
        self.launches.append(launch)

    def _born(self, t: Tensor) -> bool:
        storage = t.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self.alive:
            return False

        def died(_: Any) -> None:
            del self.alive[key]
            self.now -= size

        self.alive[key] = (weakref.ref(storage, died), size)
        self.now += size
        self.most = max(self.most, self.now)
        return True


def _whole(name: str, args: tuple[Any, ...]) -> bool:
    """Whether this coordinate keeps its tensor (the others write zeros)."""
    return name not in ("keep", "invariant") or args[1] == 0


def _nbytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (t for t in tree_leaves(tree) if isinstance(t, Tensor))


class _Buffers(nn.Module):
    """Buffers by the names of the model."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.named = named

    def get_buffer(self, target: str) -> Tensor:
        return self.named[target]


class _Dry(Program):
    """A program without ranks. ``locals`` and ``units``: of each of its stages; ``pipeline``: where there are other
    ranks along it, of which this one is ``at``; ``unused``: parameters that no stage of any rank reads."""

    def __init__(
        self,
        locals: Sequence[Local],
        units: Sequence[Mapping[int, Units]],
        captured: Capture,
        pipeline: Stages | None = None,
        at: int = 0,
        unused: Collection[str] | None = None,
    ) -> None:
        self.mesh, self.at = locals[0].mesh, at
        self.rows = (0,) if self.mesh.time is None else self.mesh.axes[self.mesh.time].rows
        self.pipeline, self.seed, self.steps = pipeline or alone(locals[0], len(self.rows)), 0, 0
        named = dict.fromkeys(n for x in locals for n in (*x.buffers, *x.buffer_updates))
        self.tensors = _Buffers({n: _like(captured.buffers[n]) for n in named})
        constants = {n: _like(captured.constants[n]) for x in locals for n in x.constants}
        parted = any(letter == "W" for letter, _, _ in self.actions)
        self.stages = tuple(
            Stage(c * len(self.pipeline.schedule) + at, x, u, x.prologue, [constants[n] for n in x.constants], parted)
            for c, (x, u) in enumerate(zip(locals, units, strict=True))
        )
        self.rests = {u.fqn: self._rest(u) for x in locals for u in x.parameters}
        left = captured.parameters.keys() - self.rests.keys() if unused is None else unused
        self.unused = [_like(p) for n, p in captured.parameters.items() if n in left]  # alive all the same
        self._executors = {}

    def _rest(self, use: ParameterUse) -> Tensor:
        shape = use.rest.local_shape(use.shape, self.mesh, self.local.coordinates)
        return torch.empty(shape, dtype=use.dtype).requires_grad_(use.trainable)

    def leaves(self) -> list[Tensor]:
        """What the optimizer updates."""
        return [t for t in self.rests.values() if t.requires_grad]

    @torch.no_grad()
    def run(self) -> None:
        """`step`, but for what needs other ranks."""
        settle()
        for step in self._run(self._inputs(), train=True, keep=False):
            for i, gradient in step.weights.finish().items():
                rest = self.rests[step.local.parameters[i].fqn]
                rest.grad = gradient if rest.grad is None else rest.grad.add_(gradient)
            for name, update in zip(step.local.buffer_updates, step.updates, strict=True):
                self.tensors.get_buffer(name).copy_(update)

    def _weights(self, stage: Stage, letters: Sequence[str]) -> Weights:
        uses = stage.local.parameters
        rests = [self.rests[u.fqn].detach() for u in uses]
        return Weights(stage.ways, uses, rests, [u.trainable for u in uses], letters)

    def _transport(self) -> Transport:
        return Nobody()

    def join(self, use: OutputUse, pieces: list[Tensor]) -> Tensor:
        """See `Program`."""
        return torch.empty(use.shape, dtype=use.dtype)

    def run_tail(
        self, tail: Tail, whole: list[Tensor], wanted: Sequence[bool]
    ) -> tuple[tuple[Tensor, ...], Sequence[Tensor | None]]:
        """See `Program`."""
        made = tuple(torch.empty(use.shape, dtype=use.dtype) for use in tail_uses(tail))
        return made, [torch.empty_like(t) if wants else None for t, wants in zip(whole, wanted, strict=True)]

    def share(self, use: OutputUse, gradient: Tensor, microbatch: int) -> Tensor:
        """See `Program`."""
        at = self.mesh.coordinates(0, microbatch)
        return torch.empty(use.layout.local_shape(use.shape, self.mesh, at), dtype=use.dtype)

    def _inputs(self) -> Batch:
        pieces = []
        for m in range(len(self.rows)):
            at = self.mesh.coordinates(0, m)
            uses = self.local.inputs
            pieces.append([torch.empty(u.layout.local_shape(u.shape, self.mesh, at), dtype=u.dtype) for u in uses])
        return Batch(pieces, self._whole(pieces))


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype)


__all__ = ["Launch", "Ran", "dry_run"]
