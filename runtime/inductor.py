"""Units whose ops Inductor compiles: ``autopar.compile(..., inductor=True)``.

Of every graph that a unit calls the ops of torch are compiled, in as few pieces as what lies between them allows:
collectives, random numbers and opaque calls stay calls. Inductor gives memory that nothing reads any more to the next
kernel, and cannot know that a collective which has begun still reads.
"""

from __future__ import annotations

import copy
import operator
import os
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from autopar.errors import AutoparError
from autopar.runtime.run import Units
from autopar.runtime.units import Explicit, Gradient, Ready, Unit, boxed, unit_of

if TYPE_CHECKING:
    from autopar.passes.lower import Local

COMPILERS = ("c++", "g++", "clang++")


def check_compiler(device: torch.device) -> None:
    """Raises AutoparError where Inductor would find no compiler for its kernels."""
    given = os.environ.get("CXX")
    names = (given,) if given else COMPILERS
    if device.type == "cpu" and not any(shutil.which(name) for name in names):
        raise AutoparError(
            f"compile: inductor=True needs a C++ compiler, and none of {', '.join(names)} is on PATH. Install one, "
            "name it in CXX, or leave inductor out."
        )


def compiled_units(local: Local, device: torch.device) -> dict[int, Units]:
    """`autopar.runtime.run.units_of`, with compiled graphs; what autograd runs is left to it."""
    known: dict[Unit, Unit] = {}

    def made(unit: Unit) -> Unit:
        if unit not in known:
            known[unit] = Compiled(unit.kind, unit.made) if isinstance(unit, Explicit) else unit
            if type(unit) is Unit:
                known[unit] = CompiledForward(unit.kind)
        return known[unit]

    found = {rows: [made(unit_of(kind, device)) for kind in p.classes] for rows, p in local.units.items()}
    return {rows: Units.of(local.units[rows], units) for rows, units in found.items()}


class CompiledForward(Unit):
    """A forward alone."""

    def _ready(self, graph: fx.GraphModule, outputs: int) -> Ready:
        return boxed(in_pieces(graph))


class Compiled(Explicit):
    """A forward and a backward graph. What Inductor returns may share memory, so no gradient is added to in place."""

    def _ready(self, graph: fx.GraphModule, outputs: int) -> Ready:
        return boxed(in_pieces(graph))

    def backward(self, read: list[Any], held: Any, tangents: list[Tensor]) -> list[Gradient]:
        return _not_fresh(super().backward(read, held, tangents))

    def inputs(self, read: list[Any], held: Any, tangents: list[Tensor]) -> tuple[list[Gradient], Any]:
        found, carried = super().inputs(read, held, tangents)
        return _not_fresh(found), carried

    def weights(self, read: list[Any], carried: Any) -> list[Gradient]:
        return _not_fresh(super().weights(read, carried))


def _not_fresh(found: Sequence[Gradient]) -> list[Gradient]:
    return [Gradient(g.arg, g.tensor, False) for g in found]


class _OfTorch(OperatorSupportBase):
    """The ops that are compiled: those of aten, and the choice of one of their results."""

    def is_node_supported(self, submodules: Any, node: fx.Node) -> bool:
        maker = node.args[0] if node.target is operator.getitem else node
        return isinstance(maker, fx.Node) and getattr(maker.target, "namespace", None) == "aten"


def in_pieces(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph that calls compiled pieces of itself."""
    found = CapabilityBasedPartitioner(copy.deepcopy(graph), _OfTorch()).partition_and_fuse()
    for name, piece in list(found.named_children()):
        if isinstance(piece, fx.GraphModule) and name.startswith("fused_"):
            delattr(found, name)
            setattr(found, name, torch.compile(piece, fullgraph=True))
    return found


__all__ = ["Compiled", "CompiledForward", "check_compiler", "compiled_units", "in_pieces"]
