"""`emit`: the programs of a plan as readable Python, of all its ranks, written by one process that is none of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from autopar.build import Prepared, plan_mesh, staged
from autopar.errors import AutoparError
from autopar.passes.lower import Lowerable, lower
from autopar.plan import Plan
from autopar.runtime.run import units_of
from autopar.runtime.write_folder import Piece, write, write_stages
from autopar.runtime.write_source import Tree, source_of


def emit(plan: Plan, prepared: Prepared, model: nn.Module, folder: Path, device: torch.device) -> None:
    """Write what `Program.save` writes on the ranks of ``plan``, which compute on ``device``; buffers have the values
    of ``model``. Every rank's program is made in turn.

    Raises AutoparError for a unit without source, for buffers or constants without values, and as `refuse_device`.
    """
    refuse_device(device)
    made, captured, mesh = staged(plan, prepared), prepared.captured, plan_mesh(plan)
    tensors = {f"buffer/{name}": buffer for name, buffer in model.named_buffers()}
    tensors |= {f"constant/{name}": captured.constants[name] for name in made.whole.constants}
    empty = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if empty is not None:
        raise AutoparError(
            f"save_source: {empty.partition('/')[2]} has no value, as the model is on the meta device. Give a model "
            "with values, or call save_source on the ranks of the plan."
        )
    tensors = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    tree = Tree.of(model, {use.fqn for use in made.uses})
    groups = {axis.name: axis.name for axis in mesh.axes}

    orders = [] if made.pipeline is None else made.pipeline.schedule
    parted = any(letter == "W" for actions in orders for letter, _, _ in actions)

    def pieces(stage: Lowerable) -> Iterator[Piece]:
        for rank in range(mesh.ranks):
            local = lower(stage, rank, groups, device)
            source = source_of(local, units_of(local, device), groups, None if made.pipeline else tree, parted)
            yield Piece(source, local.parameters, {})

    stages = [list(pieces(stage)) for stage in made.models]
    if made.pipeline is None:
        write(folder, [piece.source for piece in stages[0]], mesh, tensors)
    else:
        write_stages(folder, stages, made.pipeline, tree, mesh, tensors)


def refuse_device(device: torch.device) -> None:
    """Raise AutoparError where this PyTorch cannot trace a backward for ``device``, whose kernels are in the source."""
    if device.type == "cuda" and torch.version.cuda is None:
        raise AutoparError(
            "save_source: the ranks compute on cuda, for which this build of PyTorch traces no backward. Use one with "
            "CUDA (no GPU is needed), or a cluster of cpu ranks."
        )


__all__ = ["emit", "refuse_device"]
