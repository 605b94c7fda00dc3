"""Parameters as users know them: DTensors under their original names, each rank holding its piece.

The program reads and writes the local tensors; ``state_dict``, checkpoints, clipping and optimizers see the names,
shapes and values of the model that was given.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import AutoparError
from autopar.passes.layout import Layout, Mesh
from autopar.runtime.deferred import Value, recall
from autopar.runtime.mesh import Ranks, nesting, placements
from autopar.runtime.replay import Target, refuse_unwritten, replay
from autopar.runtime.runs import Region, Runs, chunks, put_chunk, take, whole_runs
from autopar.runtime.stage_tensors import Elsewhere

if TYPE_CHECKING:
    from autopar.passes.lower import ParameterUse

EMPTY = bytes(range(0xA5, 0xA5 + 16))  # how elements without a value begin


class Names(nn.Module):
    """A module that only holds names: submodules, parameters and buffers of the module it stands for."""


def place(
    model: nn.Module,
    uses: Iterable[ParameterUse],
    ranks: Ranks,
    stages: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Names:
    """A tree of `Names` with the model's parameters as DTensors and its buffers as plain tensors.

    Collective. Names, their order, ties, ``requires_grad`` and non-persistent buffers stay as they are. A parameter in
    no ``uses`` rests whole on every rank. ``stages``: the places along a pipeline where each parameter is held
    (default: the first); other ranks have an `Elsewhere` on the ranks of the first of them. Values are rank 0's, sent
    some megabytes at a time, wherever the model of the other ranks is. Where rank 0's is on the meta device, every rank
    computes its own pieces of what `autopar.deferred_init` recorded; where nothing is recorded, tensors have no values
    yet, and `lacking` names them.
    Raises AutoparError where ranks were given different models.

    Example: ``place(model, local.parameters, connect(mesh)).state_dict()`` has the keys of ``model.state_dict()``.
    """
    tensors = _named(model)
    values = {name: recall(name, t) for name, t in tensors.items()}
    real = _agree(tensors, values, ranks)
    rests = {use.fqn: use.rest for use in uses}
    layouts: dict[int, Layout] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if fqn in rests or id(parameter) not in layouts:
            whole = Layout.uniform("I", len(ranks.mesh.axes), parameter.ndim)
            layouts[id(parameter)] = rests.get(fqn, whole)
    order = nesting(layouts.values(), ranks.mesh)
    device_meshes = [ranks.device_mesh(order, stage) for stage in range(ranks.stages)]
    holders = {id(p): tuple(stages[fqn]) for fqn, p in model.named_parameters(remove_duplicate=False) if fqn in stages}
    placed: dict[int, Tensor] = {}
    for parameter in model.parameters():
        shape, layout = tuple(parameter.shape), layouts[id(parameter)]
        held = holders.get(id(parameter), (0,))
        here = ranks.stage in held
        runs = layout.runs(shape, ranks.mesh, ranks.coordinates)
        own = _filled(parameter, runs if here else (((0, 0),),) * len(shape), ranks, real)
        dtensor = at_places(own, shape, placements(layout, order), device_meshes, held, ranks.stage)
        placed[id(parameter)] = made = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
        made._autopar_home = device_meshes[held[0]]  # type: ignore[attr-defined]
    for buffer in model.buffers():
        placed[id(buffer)] = _filled(buffer, whole_runs(buffer.shape), ranks, real)
    names = _mirror(model, placed, {})
    if not real:
        for tensor in _named(names).values():
            _mark_empty(tensor)
        compute(names, {name: value for name, value in values.items() if value is not None})
    return names


def at_places(
    own: Tensor,
    shape: Sequence[int],
    held_as: Sequence[Placement],
    device_meshes: Sequence[DeviceMesh],
    places: Sequence[int],
    place: int,
) -> DTensor:
    """A parameter of which ``own`` is this rank's piece where its ``place`` along the pipeline is one of ``places``;
    else an `Elsewhere`. ``device_meshes``: of every place."""
    here = place in places
    meta = TensorMeta(torch.Size(shape), torch.empty(tuple(shape), device="meta").stride(), own.dtype)
    spec = DTensorSpec(device_meshes[place if here else places[0]], tuple(held_as), meta)
    kind = DTensor if here else Elsewhere  # not from_local, which takes the shape () for none
    return kind(own if here else own.new_empty(0), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def compute(names: nn.Module, values: Mapping[str, Value]) -> dict[str, str]:
    """Give tensors that `place` made the values that were recorded for them, each rank its own pieces; by name.

    Returns what had to be made whole for a while, with the op that needs it. Not collective. Raises AutoparError for a
    tensor that nothing wrote, on whichever rank it is, and then writes none of its recording.
    """
    targets: dict[int, list[Target]] = {}
    others: dict[int, list[Target]] = {}  # of other stages: all ranks refuse alike
    tensors = _named(names)
    for name, value in values.items():
        into = tensors[name]
        target = Target(name, value.place, runs_of(into), local(into).detach())
        (targets if is_here(into) else others).setdefault(id(value.recording), []).append(target)
    for absent in others.values():
        refuse_unwritten(values[absent[0].name].recording, absent)
    made_whole: dict[str, str] = {}
    for own in targets.values():
        made_whole |= replay(values[own[0].name].recording, own)
    return made_whole


def lacking(names: nn.Module, ranks: Ranks | None = None) -> list[str]:
    """The names of tensors that `place` made without values and that nothing has written since: here, or of a pipeline
    with ``ranks`` on any of its stages, and then collective."""
    tensors = {**dict(names.named_parameters()), **dict(names.named_buffers())}
    empty = [int(_is_empty(tensor)) for tensor in tensors.values()]
    every = [empty] if ranks is None or ranks.stages == 1 else ranks.gather_numbers(empty)
    return [name for name, found in zip(tensors, zip(*every, strict=True), strict=True) if any(found)]


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a parameter or gradient, sharing its memory; a buffer is its own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_here(tensor: Tensor) -> bool:
    """Whether this rank is one of those that hold a tensor; of a pipeline it may be on another stage."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def home(tensor: DTensor) -> DeviceMesh:
    """The ranks whose pieces count: of a parameter that several stages hold those of the first."""
    found = getattr(tensor, "_autopar_home", tensor.device_mesh)
    assert isinstance(found, DeviceMesh)
    return found


def runs_of(tensor: Tensor) -> Runs:
    """The (start, length) runs of every dim that this rank holds of a tensor that `place` made."""
    if not isinstance(tensor, DTensor):
        return whole_runs(tensor.shape)
    if not is_here(tensor):
        return (((0, 0),),) * tensor.ndim
    lengths, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(((start, length),) for start, length in zip(starts, lengths, strict=True))


def piece(full: Tensor, layout: Layout, mesh: Mesh, coordinates: tuple[int, ...]) -> Tensor:
    """The piece of ``full`` that the rank at ``coordinates`` holds, contiguous, in memory of its own."""
    return take(full, layout.runs(tuple(full.shape), mesh, coordinates)).clone(memory_format=torch.contiguous_format)


def from_rank_0(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Rank 0's value of ``tensor``, bit for bit, on this rank's device; shape and dtype agree on all ranks."""
    if ranks.rank == 0:
        full = tensor.detach().to(ranks.device).contiguous()
    else:
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=ranks.device)
    if full.numel() and ranks.count > 1:
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
    own = [local(p.grad) for p in tensors.parameters() if p.grad is not None and _counts_here(p)]
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
    return total.to(next((p.dtype for p in tensors.parameters() if p.requires_grad), torch.float32))


def _counts_here(parameter: Tensor) -> bool:
    """Whether this rank is the first of those that hold this piece."""
    assert isinstance(parameter, DTensor)
    coordinate = home(parameter).get_coordinate()
    if coordinate is None:
        return False
    return all(c == 0 for c, held in zip(coordinate, parameter.placements, strict=True) if held.is_replicate())


def digest(text: bytes) -> int:
    """64 bits that differ, but for a chance of 2**-64, where ``text`` does; signed, as int64 tensors are."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _named(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, tied ones by all their names."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


def _agree(tensors: Mapping[str, Tensor], values: Mapping[str, Value | None], ranks: Ranks) -> bool:
    """Whether rank 0 has real tensors, once all ranks have shown that theirs are the same."""
    described = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items()]
    recordings = [
        b"" if value is None else value.recording.digest + repr(value.place).encode()
        for value in {id(tensors[name]): value for name, value in values.items()}.values()
    ]
    own = [digest("\n".join(described).encode()), int(any(t.is_meta for t in tensors.values()))]
    every = ranks.gather_numbers([*own, digest(b"\n".join(recordings))])
    for other, (number, meta, recording) in enumerate(every):
        if number != every[0][0]:
            raise AutoparError(
                f"compile: rank {other} has other parameter names, shapes or dtypes than rank 0 "
                "(a model built from the rank or from random sizes). Build the same model on every rank."
            )
        if every[0][1] and (not meta or recording != every[0][2]):
            differs = "was made by another deferred_init" if meta else "is real"
            raise AutoparError(
                f"compile: rank 0's model is on the meta device, and that of rank {other} {differs}. Build the same "
                "model on every rank."
            )
    return not every[0][1]


def _mark_empty(tensor: Tensor) -> None:
    """Note that a tensor has no value: in its first and last element, since what writes into a DTensor's piece (as
    torch.distributed.checkpoint does) changes no version of the DTensor."""
    for end in _ends(tensor):
        end.copy_(torch.tensor(list(EMPTY[: len(end)]), dtype=torch.uint8))
    tensor._autopar_empty = tensor._version  # type: ignore[attr-defined]


def _is_empty(tensor: Tensor) -> bool:
    """Whether nothing has been written since; a piece of no elements needs nothing."""
    if getattr(tensor, "_autopar_empty", None) != tensor._version or not local(tensor).numel():
        return False
    return all(bytes(end.tolist()) == EMPTY[: len(end)] for end in _ends(tensor))


def _ends(tensor: Tensor) -> list[Tensor]:
    """The bytes of the first and the last element that this rank holds; none where any byte may be a value."""
    own = local(tensor).detach()
    if tensor.dtype.itemsize == 1 or not own.numel():
        return []
    flat = own.view(-1)
    return [flat[:1].view(torch.uint8)[: len(EMPTY)], flat[-1:].view(torch.uint8)[: len(EMPTY)]]


def _filled(tensor: Tensor, runs: Runs, ranks: Ranks, real: bool) -> Tensor:
    """This rank's runs of rank 0's value of ``tensor``, contiguous, in memory of its own; without ``real`` just the
    memory."""
    region = Region(tuple(tensor.shape), tensor.dtype, runs)
    made = torch.empty(region.local, dtype=tensor.dtype, device=ranks.device)
    if not real:
        return made
    flat = tensor.detach().contiguous().reshape(-1) if ranks.rank == 0 else None
    for start, length in chunks(tensor.numel(), tensor.dtype.itemsize):
        if flat is not None:
            chunk = flat[start : start + length].to(ranks.device)
        else:
            chunk = torch.empty(length, dtype=tensor.dtype, device=ranks.device)
        if ranks.count > 1:
            dist.broadcast(chunk.view(torch.uint8), src=0, group=ranks.world)
        put_chunk(made, region, start, chunk)
    return made


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
