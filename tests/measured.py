"""What a step of real ranks holds, counted on real tensors: for the tests of what is predicted."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.build import apply, plan_mesh
from autopar.loading import ModelSpec
from autopar.passes.lower import lower, with_changes
from autopar.plan import loads
from autopar.runtime.mesh import connect
from autopar.runtime.parameters import local, place
from autopar.runtime.program import Program
from autopar.verify import Subject


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank: at rest, of gradients, of AdamW's states (its step counters apart), and the most that
    autograd kept at once, storages once, those of parameters and inputs apart."""

    parameters: int
    gradients: int
    optimizer: int
    saved: int


class _Kept:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclass
class Watch:
    """Counts what autograd holds, as it holds it."""

    own: set[int] = field(default_factory=set)
    readers: dict[int, int] = field(default_factory=dict)
    now: int = 0
    most: int = 0

    def before_body(self, _: Any, args: tuple[Any, ...]) -> None:
        """Storages that are there before the body runs do not count."""
        self.own = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}

    def pack(self, tensor: Tensor) -> _Kept:
        """Called by autograd for every tensor that it keeps."""
        kept, storage = _Kept(tensor), tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if key not in self.own:
            self.readers[key] = self.readers.get(key, 0) + 1
            self.now += size if self.readers[key] == 1 else 0
            self.most = max(self.most, self.now)
            weakref.finalize(kept, self._freed, key, size)
        return kept

    def _freed(self, key: int, size: int) -> None:
        self.readers[key] -= 1
        self.now -= size if not self.readers[key] else 0


_subjects: dict[tuple[str, int | None], Subject] = {}


def measured(rank: int, model: ModelSpec, batch: int | None, text: str) -> Measured:
    """One step and AdamW's on this rank, of the plan ``text``. Collective."""
    key = (repr(model), batch)
    if key not in _subjects:
        _subjects[key] = Subject.of(model, batch, check=False)
    subject, plan, watch = _subjects[key], loads(text), Watch()
    ranks = connect(plan_mesh(plan), timedelta(seconds=60))
    program_of = lower(
        with_changes(apply(plan, subject.prepared(plan.microbatches, "fp32"))), ranks.rank, ranks.group_names
    )
    tensors = place(subject.loaded.model, program_of.parameters, ranks)
    program = Program(program_of, tensors, ranks, subject.captured.constants)
    for body in program_of.body.values():
        body.register_forward_pre_hook(watch.before_body)
    optimizer = torch.optim.AdamW(tensors.parameters())
    with torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda kept: kept.tensor):
        program.step(subject.inputs)
    optimizer.step()
    parameters = list(tensors.parameters())
    states = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return Measured(_nbytes(parameters), _nbytes(gradients), _nbytes(states), watch.most)


def _nbytes(tensors: list[Any]) -> int:
    pieces = [local(t) if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in pieces)
