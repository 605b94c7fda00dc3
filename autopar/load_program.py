"""`load_program`: run what `Program.save` wrote, without the model's code and without planning."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore

from autopar.placed import Placed
from autopar.runtime.mesh import TIMEOUT, Ranks, connect, naming, nesting, placements
from autopar.runtime.parameters import Names, at_places
from autopar.runtime.program import Program
from autopar.runtime.source import Read, mesh_of, read_source

_programs = itertools.count()


class Loaded(Placed):
    """A written program on its ranks. Made by `load_program`.

    Parameters are DTensors under the model's own names, as of `autopar.compile.Parallel`; they hold no values until
    `load_state_dict`, or a checkpoint of torch.distributed.checkpoint, gives them some. Buffers have the values that
    they had when the program was written.
    """

    def __init__(self, program: Program, names: nn.Module, inputs: str) -> None:
        super().__init__(program.ranks.count)
        self._program, self._inputs = program, inputs
        self._adopt(names)

    def step(self, *inputs: Tensor) -> Tensor:
        """Forward and backward of the whole global batch; its loss. ``inputs``: as ``inputs`` of ``program.py`` lists
        them. Adds to ``.grad``."""
        return self._program.step(inputs, inputs_are=self._inputs)[0]

    def step_with_outputs(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """As `step`; all outputs as global tensors, the loss first."""
        return self._program.step(inputs, inputs_are=self._inputs, outputs=True)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """All outputs as global tensors, without gradients."""
        return self._program.forward(inputs, inputs_are=self._inputs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over all parameters, as one process would; the norm before."""
        return self._program.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    @property
    def data_rank(self) -> int:
        """Which of the ``data_world_size`` pieces of each batch this rank's rows are."""
        return self._program.data_rank

    @property
    def data_world_size(self) -> int:
        """Into how many pieces the ranks cut the batch."""
        return self._program.data_world_size

    @property
    def steps(self) -> int:
        """The steps so far, by which random ops draw. Set it, on every rank, to go on where a run ended."""
        return self._program.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._program.steps = steps


def load_program(folder: str | Path, *, inputs: str = "global", timeout: timedelta = TIMEOUT, seed: int = 0) -> Loaded:
    """The program in ``folder`` on the ranks that torchrun started; collective. ``inputs``, ``timeout``, ``seed``: as
    of `autopar.compile.compile`.

    Raises AutoparError where the folder has no program, or one for another number of ranks.

    Example: ``program = load_program("out")``; ``program.load_state_dict(torch.load("weights.pt"))``;
    ``loss = program.step(tokens, labels)``.
    """
    path = Path(folder)
    mesh, stages = mesh_of(path)
    ranks = connect(mesh, timeout, stages)
    ranks = replace(ranks, store=PrefixStore(f"written/{next(_programs)}", ranks.store))
    with naming(ranks, 0):
        read = read_source(path, ranks)
        names = _names(read, ranks)
        constants = {
            name.removeprefix("constant/"): tensor
            for name, tensor in read.tensors.items()
            if name.startswith("constant/")
        }
        program = Program(read.locals, names, ranks, constants, seed, read.pipeline, read.units)
    return Loaded(program, names, inputs)


def _names(read: Read, ranks: Ranks) -> Names:
    """The model's names, with parameters that hold no values."""
    order = nesting((p.layout(p.rest) for p in read.parameters), ranks.mesh)
    device_meshes, root = [ranks.device_mesh(order, stage) for stage in range(ranks.stages)], Names()
    for p in read.parameters:
        rest, here = p.layout(p.rest), ranks.stage in p.places
        shape = rest.local_shape(p.shape, ranks.mesh, ranks.coordinates) if here else (0,)
        own = torch.full(shape, float("nan"), dtype=p.dtype, device=ranks.device)
        placed = at_places(own, p.shape, placements(rest, order), device_meshes, p.places, ranks.stage)
        parameter = nn.Parameter(placed, requires_grad=p.trainable)
        parameter._autopar_home = device_meshes[p.places[0]]  # type: ignore[attr-defined]
        for name in (p.name, *p.also):
            module, last = _module(root, name)
            module.register_parameter(last, parameter)
    for name, kept in read.state.items():
        module, last = _module(root, name)
        module.register_buffer(last, read.tensors[f"buffer/{name}"].to(ranks.device), persistent=kept)
    return root


def _module(root: Names, fqn: str) -> tuple[nn.Module, str]:
    """The module of that name, made where there is none, and the last word."""
    module: nn.Module = root
    *path, last = fqn.split(".")
    for word in path:
        if word not in module._modules:
            module.add_module(word, Names())
        child = module._modules[word]
        assert child is not None
        module = child
    return module, last


__all__ = ["Loaded", "load_program"]
