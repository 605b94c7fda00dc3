"""The ranks of a mesh as process groups: one group an axis, with a timeout, for collectives and for DTensors.

A mesh numbers its ranks with the last axis fastest. DTensor cuts one dim by several mesh dims from left to right, so
the device mesh of the parameters lists the axes in the order in which they nest at rest (`nesting`): a weight cut by
``tp`` and, inside that, by ``dp`` is ``[Shard(0), Shard(0)]`` on a device mesh ``("tp", "dp")``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import AutoparError
from autopar.passes.layout import INVARIANT, REPLICATE, Layout, Mesh, replace

TIMEOUT = timedelta(minutes=10)
WAITED = ("gloo", "NCCL", "Timed out", "Connection", "closed by peer", "c10d")
"""Words of errors of a collective that waited for another rank."""

_groups: dict[tuple[dist.ProcessGroup, tuple[int, ...], timedelta], dist.ProcessGroup] = {}


class RankError(AutoparError, RuntimeError):
    """Another rank failed, hangs or has left: this one only waited."""


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of a mesh. ``groups``: per axis of ranks the process group of this rank's row.

    Of a pipeline ``mesh`` is that of one stage's ranks, ``stages`` how often it stands along the pipeline, outermost;
    ``world`` has all of them, ``column`` those with this rank's place, one a stage.

    Made by `connect`; `for_mesh` gives the same ranks with other microbatches.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    world: dist.ProcessGroup
    groups: dict[str, dist.ProcessGroup]
    store: Store
    timeout: timedelta
    stages: int = 1
    column: dist.ProcessGroup | None = None

    @property
    def count(self) -> int:
        """All ranks, of all stages."""
        return self.mesh.ranks * self.stages

    @property
    def place(self) -> int:
        """This rank's number in the mesh."""
        return self.rank % self.mesh.ranks

    @property
    def stage(self) -> int:
        """This rank's place along the pipeline."""
        return self.rank // self.mesh.ranks

    @property
    def coordinates(self) -> tuple[int, ...]:
        """This rank's coordinate on every axis; 0 on the time axis."""
        return self.mesh.coordinates(self.place)

    def peer(self, stage: int) -> int:
        """The rank with this one's place at another place along the pipeline."""
        return stage * self.mesh.ranks + self.place

    @property
    def group_names(self) -> dict[str, str]:
        """Axis name -> name of the process group, as the collective ops take it."""
        return {axis: group.group_name for axis, group in self.groups.items()}

    def for_mesh(self, mesh: Mesh) -> Ranks:
        """The same ranks on a mesh that differs in its time axis only."""
        own, other = ([m.axes[i] for i in m.space] for m in (self.mesh, mesh))
        assert own == other, f"{own} are not the axes {other}"
        return replace(self, mesh=mesh)

    def device_mesh(self, order: Sequence[int], stage: int | None = None) -> DeviceMesh:
        """The ranks of a stage (default: of this one) as a DeviceMesh whose dims are the axes in ``order``, outermost
        first. One of another stage can be asked where its ranks are, and no more."""
        axes = [self.mesh.axes[i] for i in order]
        names = tuple(a.name for a in axes) or ("rank",)
        ids = torch.arange(self.mesh.ranks).reshape([self.mesh.axes[i].size for i in self.mesh.space] or [1])
        if axes:
            ids = ids.permute([self.mesh.space.index(i) for i in order]).contiguous()
        if stage not in (None, self.stage):
            ids = ids + stage * self.mesh.ranks
            return DeviceMesh(self.device.type, ids, mesh_dim_names=names, _init_backend=False)
        ids = ids + self.stage * self.mesh.ranks
        groups = [self.groups[n] for n in names] if axes else [_group([self.rank], self.timeout)]
        return DeviceMesh.from_group(groups, self.device.type, ids, mesh_dim_names=names)

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """What every rank gave, by rank; all give equally many 64-bit integers."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        every = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(every, own, group=self.world)
        return [t.tolist() for t in every]

    def __str__(self) -> str:
        where = " ".join(f"{self.mesh.axes[i].name}={self.coordinates[i]}" for i in self.mesh.space)
        where = f"pp={self.stage} {where}".strip() if self.stages > 1 else where
        return f"rank {self.rank} ({where})" if where else f"rank {self.rank}"


def join(timeout: timedelta = TIMEOUT) -> tuple[int, int]:
    """(rank, world size) of this process; joins the process group that torchrun announces unless there is one.

    NCCL where every local rank has a GPU of its own, else gloo. Without a process group and without torchrun: (0, 1).
    """
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        nccl = torch.cuda.is_available() and torch.cuda.device_count() >= local
        dist.init_process_group("nccl" if nccl else "gloo", timeout=timeout)
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def connect(mesh: Mesh, timeout: timedelta = TIMEOUT, stages: int = 1) -> Ranks:
    """Make the process groups of ``mesh``, which stands ``stages`` times along the pipeline; collective over all ranks.
    One rank needs no process group.

    Raises AutoparError where the number of processes is not the number of ranks.
    """
    rank, size = join(timeout)
    if size != mesh.ranks * stages:
        plan = " x ".join(
            [f"pp={stages}"] * (stages > 1) + [f"{mesh.axes[i].name}={mesh.axes[i].size}" for i in mesh.space]
        )
        raise AutoparError(
            f"step: the plan ({plan}) is for {mesh.ranks * stages} ranks and there are {size} processes. "
            f"Launch with: torchrun --nproc-per-node {mesh.ranks * stages} your_script.py, or change the pins."
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timeout)
    world = _group(range(size), timeout)
    place, first = rank % mesh.ranks, rank - rank % mesh.ranks
    coordinates, groups = mesh.coordinates(place), {}
    for axis in mesh.space:
        others = (first + r for r in range(mesh.ranks) if _same_but(mesh.coordinates(r), coordinates, axis))
        groups[mesh.axes[axis].name] = _group(others, timeout)
    column = _group(range(place, size, mesh.ranks), timeout) if stages > 1 else None
    if not mesh.space:
        _group([rank], timeout)
    store = PrefixStore("autopar", dist.distributed_c10d._get_default_store())
    return Ranks(mesh, rank, _device(), world, groups, store, timeout, stages, column)


def nesting(layouts: Iterable[Layout], mesh: Mesh) -> tuple[int, ...]:
    """An order of the rank axes in which every dim of every layout nests its axes, outermost first.

    Raises AutoparError where two parameters nest the same two axes the other way round.
    """
    inside: dict[int, set[int]] = {a: set() for a in mesh.space}
    for layout in layouts:
        for split in layout.dims:
            for outer, inner in zip(split.axes, split.axes[1:]):
                inside[inner].add(outer)
    order: list[int] = []
    while len(order) < len(inside):
        free = [a for a in mesh.space if a not in order and inside[a] <= set(order)]
        if not free:
            names = ", ".join(mesh.axes[a].name for a in mesh.space if a not in order)
            raise AutoparError(
                f"layouts: two parameters nest the axes {names} in opposite orders at rest. Use one order."
            )
        order.append(free[0])
    return tuple(order)


def placements(layout: Layout, order: Sequence[int]) -> list[Placement]:
    """A layout at rest (``S``, ``I`` or ``R``, no parts) as DTensor placements on `Ranks.device_mesh` of ``order``."""
    out: list[Placement] = []
    for axis in order:
        dim = layout.dim_of(axis)
        assert dim is not None or layout.kinds[axis] in (INVARIANT, REPLICATE), f"{layout} at rest"
        assert dim is None or not (layout.dims[dim].parts or layout.dims[dim].items), f"{layout} rests in parts"
        out.append(Replicate() if dim is None else Shard(dim))
    return out or [Replicate()]


def blames_another(error: BaseException) -> bool:
    """Whether an error is that of a collective which waited for another rank in vain."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in WAITED)


@contextmanager
def naming(ranks: Ranks, step: int) -> Iterator[None]:
    """Say which ranks a failed collective waited for. Every rank notes in the store which step it has begun (0: what
    comes before the first), and what it failed with."""
    begun = str(step)
    try:
        ranks.store.set(f"step/{ranks.rank}", begun)
        yield
    except RankError:
        raise
    except Exception as error:
        text = str(error)
        if not blames_another(error):
            with suppress(RuntimeError):  # the others time out without knowing why
                ranks.store.set(f"step/{ranks.rank}", f"{begun} {type(error).__name__}: {' '.join(text.split())[:200]}")
            raise
        when = f"in step {step}" if step else "before the first step"
        raise RankError(
            f"{ranks}: waited in vain for another rank {when}: {_missing(ranks, step)} "
            f"(timeout {ranks.timeout.total_seconds():g} s; {text.splitlines()[0][:200]}). Look at its own error first."
        ) from error


def _missing(ranks: Ranks, step: int) -> str:
    behind = []
    for other in range(ranks.count):
        try:
            key = f"step/{other}"
            noted = ranks.store.get(key).decode() if ranks.store.check([key]) else "0"
        except Exception:  # the store went with the rank that held it
            return "the store is gone too, so rank 0's host has left"
        begun, _, failure = noted.partition(" ")
        if failure:
            behind.append(f"rank {other} failed in step {begun} with {failure}")
        elif int(begun) < step:
            behind.append(f"rank {other} is in step {begun}")
    return ", ".join(behind) or "every rank has begun it, one stopped inside"


def begun(ranks: Ranks, step: int) -> list[int]:
    """The other ranks that have begun a step, as `naming` has it, and not failed in it."""
    notes = {other: f"step/{other}" for other in range(ranks.count) if other != ranks.rank}
    found = [other for other, key in notes.items() if ranks.store.check([key])]
    return [other for other in found if ranks.store.get(notes[other]).decode() == str(step)]


def everyone(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of a device mesh, of which this is one; where there is none yet, collective over them."""
    ids = tuple(sorted(mesh.mesh.flatten().tolist()))
    default = dist.group.WORLD
    assert default is not None
    if len(ids) == dist.get_world_size():
        return default
    return _group(ids, next((timeout for of, _, timeout in _groups if of is default), TIMEOUT))


def _same_but(a: tuple[int, ...], b: tuple[int, ...], axis: int) -> bool:
    return a[:axis] == b[:axis] and a[axis + 1 :] == b[axis + 1 :]


def _group(members: Iterable[int], timeout: timedelta) -> dist.ProcessGroup:
    """The group of ``members``, made once per default group: meshes of one process share their rows."""
    ids = tuple(members)
    default = dist.group.WORLD
    assert default is not None
    key = (default, ids, timeout)
    if key not in _groups:
        _groups[key] = dist.new_group(list(ids), timeout=timeout, use_local_synchronization=True)
    return _groups[key]


def _device() -> torch.device:
    if dist.get_backend() != "nccl":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", dist.get_rank() % torch.cuda.device_count()))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
