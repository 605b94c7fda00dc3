"""Parameters as users know them: DTensors under their original names, each rank holding its piece.

The program reads and writes the local tensors; ``state_dict``, checkpoints, clipping and optimizers see the names,
shapes and values of the model that was given.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.passes.layout import Layout, Mesh
from autopar.runtime.mesh import Ranks, nesting, placements

if TYPE_CHECKING:
    from autopar.passes.lower import ParameterUse

Runs = tuple[tuple[tuple[int, int], ...], ...]


class Names(nn.Module):
    """A module that only holds names: submodules, parameters and buffers of the module it stands for."""


def place(model: nn.Module, uses: Iterable[ParameterUse], ranks: Ranks) -> Names:
    """A tree of `Names` with the model's parameters as DTensors and its buffers as plain tensors, all from rank 0.

    Collective. The values of ``model`` count on rank 0 only: elsewhere it may be on the meta device. Names, their
    order, ties, ``requires_grad`` and non-persistent buffers stay as they are. A parameter in no ``uses`` rests whole
    on every rank. Raises AutoparError where ranks were given different models or rank 0 has no values.

    Example: ``place(model, local.parameters, connect(mesh)).state_dict()`` has the keys of ``model.state_dict()``.
    """
    _agree(model, ranks)
    rests = {use.fqn: use.rest for use in uses}
    layouts: dict[int, Layout] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if fqn in rests or id(parameter) not in layouts:
            whole = Layout.uniform("I", len(ranks.mesh.axes), parameter.ndim)
            layouts[id(parameter)] = rests.get(fqn, whole)
    order = nesting(layouts.values(), ranks.mesh)
    device_mesh = ranks.device_mesh(order)
    placed: dict[int, Tensor] = {}
    for parameter in model.parameters():
        full, layout = from_rank_0(parameter, ranks), layouts[id(parameter)]
        dtensor = DTensor.from_local(
            piece(full, layout, ranks.mesh, ranks.coordinates),
            device_mesh,
            placements(layout, order),
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        placed[id(parameter)] = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        placed[id(buffer)] = from_rank_0(buffer, ranks).clone()
    return _mirror(model, placed, {})


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a parameter or gradient, sharing its memory."""
    assert isinstance(tensor, DTensor), type(tensor)
    return tensor._local_tensor


def piece(full: Tensor, layout: Layout, mesh: Mesh, coordinates: tuple[int, ...]) -> Tensor:
    """The piece of ``full`` that the rank at ``coordinates`` holds, contiguous, in memory of its own."""
    return take(full, layout.runs(tuple(full.shape), mesh, coordinates)).clone(memory_format=torch.contiguous_format)


def take(tensor: Tensor, runs: Runs) -> Tensor:
    """The (start, length) runs of every dim of ``tensor``; a view where each dim has one run.

    >>> take(torch.arange(8), (((2, 2), (5, 1)),)).tolist()
    [2, 3, 5]
    """
    for dim, pieces in enumerate(runs):
        if len(pieces) == 1:
            tensor = tensor.narrow(dim, *pieces[0])
        else:
            tensor = torch.cat([tensor.narrow(dim, start, length) for start, length in pieces], dim)
    return tensor


def from_rank_0(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Rank 0's value of ``tensor``, bit for bit, on this rank's device; shape and dtype agree on all ranks."""
    if ranks.rank == 0:
        full = tensor.detach().to(ranks.device).contiguous()
    else:
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=ranks.device)
    if full.numel() and ranks.mesh.ranks > 1:
        dist.broadcast(full.reshape(-1).view(torch.uint8), src=0, group=ranks.world)
    return full


@torch.no_grad()
def clip_grad_norm_(
    tensors: nn.Module, ranks: Ranks, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` of one process, on parameters that `place` made; collective.

    Every element counts once however it is held. Returns the norm before clipping, a 0-d tensor, the same on every
    rank. Raises AutoparError for ``norm_type <= 0``, RuntimeError for a norm of inf or nan with ``error_if_nonfinite``.
    """
    if not norm_type > 0:
        raise AutoparError(f"clip_grad_norm_: norm_type={norm_type} is not a norm. Use a positive number or inf.")
    gradients = [p.grad for p in tensors.parameters() if p.grad is not None]
    own = [local(g) for g in gradients if _counts_here(g)]
    infinite = math.isinf(norm_type)
    norms = [torch.linalg.vector_norm(g, norm_type).double() for g in own if g.numel()]
    stacked = torch.stack(norms or [torch.zeros((), dtype=torch.float64, device=ranks.device)])
    total = stacked.max() if infinite else stacked.pow(norm_type).sum()
    dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=ranks.world)
    if not infinite:
        total = total.pow(1 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so it cannot be clipped"
        )
    coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local(gradient).mul_(coefficient)
    return total.to(gradients[0].dtype) if gradients else total.float()


def _counts_here(gradient: Tensor) -> bool:
    """Whether this rank is the first of those that hold this piece."""
    assert isinstance(gradient, DTensor)
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(c == 0 for c, held in zip(coordinate, gradient.placements, strict=True) if held.is_replicate())


def digest(text: bytes) -> int:
    """64 bits that differ, but for a chance of 2**-64, where ``text`` does; signed, as int64 tensors are."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _agree(model: nn.Module, ranks: Ranks) -> None:
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    described = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items()]
    own = [digest("\n".join(described).encode()), int(any(t.is_meta for t in tensors.values()))]
    every = ranks.gather_numbers(own)
    for other, (number, _) in enumerate(every):
        if number != every[0][0]:
            raise AutoparError(
                f"compile: rank {other} has other parameter names, shapes or dtypes than rank 0 "
                "(a model built from the rank or from random sizes). Build the same model on every rank."
            )
    if every[0][1]:
        raise AutoparError(
            "compile: rank 0's model is on the meta device, so there are no values to train. Give it weights."
        )


def _mirror(module: nn.Module, placed: Mapping[int, Tensor], seen: dict[int, Names]) -> Names:
    """The names of ``module``; a submodule or tensor that stands under two names stays one object."""
    if id(module) in seen:
        return seen[id(module)]
    names = seen[id(module)] = Names()
    for name, parameter in module._parameters.items():
        own = None if parameter is None else placed[id(parameter)]
        assert own is None or isinstance(own, nn.Parameter)
        names.register_parameter(name, own)
    for name, buffer in module._buffers.items():
        own = None if buffer is None else placed[id(buffer)]
        names.register_buffer(name, own, persistent=name not in module._non_persistent_buffers_set)
    for name, child in module._modules.items():
        names.add_module(name, None if child is None else _mirror(child, placed, seen))
    return names
