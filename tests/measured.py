"""What a step of real ranks holds, counted on real tensors: for the tests of what is predicted."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from autopar.build import apply, plan_mesh
from autopar.loading import ModelSpec
from autopar.passes.lower import lower, with_changes
from autopar.plan import loads
from autopar.runtime.mesh import connect
from autopar.runtime.parameters import local, place
from autopar.runtime.program import Program
from autopar.runtime.run import Run
from autopar.verify import Subject


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank: at rest, of gradients, of AdamW's states (its step counters apart), and the most that
    units kept for backward at once, storages once, those of parameters and inputs apart."""

    parameters: int
    gradients: int
    optimizer: int
    saved: int


@dataclass
class Watch:
    """Counts what units hold when the forward of a microbatch is over: what their backwards read of values, and what
    they keep themselves, storages once."""

    parameters: set[int]
    most: int = 0

    def look(self, run: Run) -> None:
        """Before backward. Storages of parameters, inputs and the like do not count."""
        there = [*run.given["buffer"], *run.given["constant"], *run.given["hoisted"], *run.given["input"]]
        own = self.parameters | {t.untyped_storage().data_ptr() for t in there}
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tree_leaves(run.held) if _is(t)}
        self.most = max(self.most, sum(size for key, size in sizes.items() if key not in own))


def _is(t: Any) -> bool:
    return isinstance(t, Tensor)


_subjects: dict[tuple[str, int | None], Subject] = {}


def measured(rank: int, model: ModelSpec, batch: int | None, text: str) -> Measured:
    """One step and AdamW's on this rank, of the plan ``text``. Collective."""
    key = (repr(model), batch)
    if key not in _subjects:
        _subjects[key] = Subject.of(model, batch, check=False)
    subject, plan = _subjects[key], loads(text)
    ranks = connect(plan_mesh(plan), timedelta(seconds=60))
    program_of = lower(
        with_changes(apply(plan, subject.prepared(plan.microbatches, "fp32"))), ranks.rank, ranks.group_names
    )
    tensors = place(subject.loaded.model, program_of.parameters, ranks)
    program = Program([program_of], tensors, ranks, subject.captured.constants)
    optimizer = torch.optim.AdamW(tensors.parameters())
    watch = Watch({local(p).untyped_storage().data_ptr() for p in tensors.parameters() if isinstance(p, DTensor)})
    backward = Run.backward

    def looked(run: Run, **how: Any) -> None:
        watch.look(run)
        backward(run, **how)

    with mock.patch.object(Run, "backward", looked):
        program.step(subject.inputs)
    optimizer.step()
    parameters = list(tensors.parameters())
    states = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    gradients = [p.grad for p in parameters if p.grad is not None]
    return Measured(_nbytes(parameters), _nbytes(gradients), _nbytes(states), watch.most)


def _nbytes(tensors: list[Any]) -> int:
    pieces = [local(t) if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in pieces)
