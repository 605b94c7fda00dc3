"""The whole of a tensor that rests in pieces, on one rank or on all.

With plain collectives into one room for pieces: what a collective works on, the threads of gloo may keep for a while,
and after DTensor's own gathers they kept up to four whole tensors (measured with torch 2.13).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from autopar.runtime.mesh import Ranks, everyone
from autopar.runtime.parameters import home, is_here, local


def whole(tensor: Tensor, room: Tensor) -> Tensor:
    """The whole tensor on every rank of its device mesh, collective over these; one that no rank has in pieces is the
    tensor itself. Pieces come in ``room``, of `room_for`."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not any(held.is_shard() for held in tensor.placements):
        return tensor._local_tensor
    mesh, own = tensor.device_mesh, tensor._local_tensor.detach().contiguous()
    return _broadcast(tensor, own, mesh, everyone(mesh), lambda shape: _in(room, shape, tensor.dtype))


def everywhere(parameter: Tensor, value: Tensor | None, ranks: Ranks) -> Tensor | None:
    """The whole of what lies as ``parameter`` does, itself or its gradient, on every rank; None where no rank has it.
    ``value``: what this rank has. Collective."""
    if ranks.stages == 1:
        return value.full_tensor() if isinstance(value, DTensor) else value
    assert isinstance(parameter, DTensor)
    if not any(here for (here,) in ranks.gather_numbers([int(value is not None and is_here(parameter))])):
        return None
    own = None if value is None else local(value).detach().contiguous()
    empty = lambda shape: torch.empty(shape, dtype=parameter.dtype, device=ranks.device)
    return _broadcast(parameter, own, home(parameter), ranks.world, empty)


def _broadcast(
    like: DTensor,
    own: Tensor | None,
    mesh: DeviceMesh,
    group: dist.ProcessGroup,
    room: Callable[[tuple[int, ...]], Tensor],
) -> Tensor:
    """The whole tensor on every rank of ``group``. ``own``: the piece of this rank; ``mesh``: the ranks whose pieces
    count; ``room``: where a piece of such a shape comes in."""
    full = torch.empty(like.shape, dtype=like.dtype, device=like._local_tensor.device)
    for holder, shape, index in pieces(like, mesh):
        piece = own if dist.get_rank() == holder else room(shape)
        assert piece is not None
        dist.broadcast(piece, src=holder, group=group)
        full[index] = piece
    return full


def on_rank_0(tensor: Tensor, room: Tensor) -> Tensor | None:
    """The whole tensor on rank 0, None elsewhere; pieces come in ``room``, of `room_for`. Collective. Give a parameter
    itself: what is detached of one that several stages hold has lost its `home`."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    own, rank = tensor._local_tensor.detach().contiguous(), dist.get_rank()
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=own.device) if rank == 0 else None
    for holder, shape, index in pieces(tensor):
        if rank == holder != 0:
            dist.send(own, dst=0)
        if full is not None:
            piece = own if holder == 0 else _in(room, shape, tensor.dtype)
            if holder != 0:
                dist.recv(piece, src=holder)
            full[index] = piece
    return full


def pieces(tensor: DTensor, mesh: DeviceMesh | None = None) -> Iterator[tuple[int, tuple[int, ...], tuple[slice, ...]]]:
    """Every piece once: (the first rank of ``mesh``, by default its `home`, that holds it, its shape, where it lies).

    The same on every rank.
    """
    mesh = mesh or home(tensor)
    for at in itertools.product(*map(range, mesh.shape)):
        if any(c and not held.is_shard() for c, held in zip(at, tensor.placements, strict=True)):
            continue
        shape, starts = _compute_local_shape_and_global_offset(tensor.shape, mesh.shape, list(at), tensor.placements)
        if 0 not in shape:
            yield int(mesh.mesh[at]), shape, tuple(slice(s, s + n) for s, n in zip(starts, shape, strict=True))


def room_for(tensors: Iterable[Tensor]) -> Tensor:
    """Bytes for the largest piece of any of the tensors on any rank."""
    most, device = 0, torch.device("cpu")
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            device = tensor._local_tensor.device
            most = max(most, *(math.prod(shape) * tensor.dtype.itemsize for _, shape, _ in pieces(tensor)), 0)
    return torch.empty(most, dtype=torch.uint8, device=device)


def _in(room: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return room[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


__all__ = ["everywhere", "on_rank_0", "pieces", "room_for", "whole"]
