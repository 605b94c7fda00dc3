"""Seconds of collectives on the ranks that run, by kind, number of ranks and bytes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from autopar.profiling.clock import seconds
from autopar.runtime.collectives import launch, wait

CALLS = 8
ROUNDS = 24  # of an overlap, which scatters
LEAST_OVERLAP = 0.01  # a figure is more than 0
SLOW = 1.0  # seconds of a call beyond which larger messages are left out
Points = list[tuple[float, float]]


def groups(world: int) -> list[int]:
    """Sizes of groups that are measured: 2, 4, 8 and so on, and all ranks.

    >>> groups(1), groups(4), groups(6)
    ([], [2, 4], [2, 6])
    """
    found, size = [], 2
    while size < world:
        if world % size == 0:
            found.append(size)
        size *= 2
    return [*found, world] if world > 1 else []


def rows(world: int, local: int) -> dict[str, dict[int, list[list[int]]]]:
    """Groups of ranks that are busy at once, by tier and by their size: ``local`` ranks stand in a host, and tier
    "network" has one rank of each host, or all ranks.

    >>> rows(4, 2)["network"]
    {2: [[0, 2], [1, 3]], 4: [[0, 1, 2, 3]]}
    >>> rows(4, 4)
    {'host': {2: [[0, 1], [2, 3]], 4: [[0, 1, 2, 3]]}}
    """
    found = {"host": {n: [list(range(i, i + n)) for i in range(0, world, n)] for n in groups(local)}}
    if local < world:
        across = {
            n: [
                [first + place + local * h for h in range(n)]
                for first in range(0, world, local * n)
                for place in range(local)
            ]
            for n in groups(world // local)
        }
        found["network"] = across | {world: [list(range(world))]}
    return {tier: sizes for tier, sizes in found.items() if sizes}


def collectives(device: torch.device, messages: Sequence[int], local: int) -> dict[str, dict[int, dict[str, Points]]]:
    """Points of [bytes, seconds] by tier, group size and kind, with all groups of that size busy at once. Collective;
    bytes count as in `autopar.solver.cost.collective`. ``local``: ranks of a host."""
    world, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, dict[int, dict[str, Points]]] = {}
    for tier, sizes in rows(world, local).items():
        found[tier] = {}
        for size, every in sizes.items():
            made = {tuple(ranks): dist.new_group(ranks) for ranks in every}
            own = next(ranks for ranks in every if rank in ranks)
            name, place = made[tuple(own)].group_name, own.index(rank)
            found[tier][size] = {kind: _points(kind, device, messages, name, size, place) for kind in KINDS}
    return found


def overlaps(device: torch.device, nbytes: int, local: int) -> dict[str, float]:
    """By tier: of the seconds of an all-reduce of ``nbytes`` those in which matmuls go on as if they were alone, a
    fraction. Collective; all ranks are busy at once."""
    world, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for tier, sizes in rows(world, local).items():
        every = sizes[min(sizes)]
        made = {tuple(ranks): dist.new_group(ranks) for ranks in every}
        own = next(ranks for ranks in every if rank in ranks)
        found[tier] = _overlap(device, nbytes, made[tuple(own)].group_name)
    return found


def _overlap(device: torch.device, nbytes: int, group: str) -> float:
    """Matmuls that take twice as long as the collective, alone and beside it, in turns."""
    whole, a = torch.zeros(nbytes // 4, device=device), torch.rand(512, 512, device=device)

    def alone() -> None:
        wait(launch("all_reduce", group, whole, "sum"), group)

    def matmuls() -> None:
        for _ in range(times):
            a.mm(a)

    def both() -> None:
        handle = launch("all_reduce", group, whole, "sum")
        matmuls()
        wait(handle, group)

    times = 1
    moved, one = _agreed(seconds(alone, device, CALLS)), _agreed(seconds(matmuls, device, CALLS))
    times = max(1, round(2 * moved / one))
    found = []
    for _ in range(ROUNDS):
        dist.barrier()
        moved, computed, together = (seconds(call, device, 1) for call in (alone, matmuls, both))
        found.append(1 - (together - computed) / moved)
    return min(1.0, max(LEAST_OVERLAP, statistics.median(found)))


def _points(kind: str, device: torch.device, messages: Sequence[int], group: str, size: int, place: int) -> Points:
    """Of one kind; messages that would take long are left out, and a straight line goes on from the last."""
    found: Points = []
    for nbytes in messages:
        whole = torch.zeros(max(size, nbytes // 4 // size * size), device=device)
        slow = bool(found) and _agreed(found[-1][1]) * whole.nbytes / found[-1][0] > SLOW
        if slow and len(found) > 2:
            break
        dist.barrier()
        took = seconds(lambda: _run(kind, whole, group, size, place), device, CALLS)  # noqa: B023
        found.append((float(whole.nbytes), took))
    return found


def _agreed(took: float) -> float:
    """The same on every rank, which must all go on or stop."""
    longest = torch.tensor(took)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def _run(kind: str, whole: Tensor, group: str, n: int, place: int) -> None:
    if kind == "all_reduce":
        wait(launch("all_reduce", group, whole, "sum"), group)
    elif kind == "all_gather":
        wait(launch("all_gather_into_tensor", group, whole.view(n, -1)[place], n), group)
    elif kind == "reduce_scatter":
        wait(launch("reduce_scatter_tensor", group, whole, "sum", n), group)
    elif kind == "all_to_all":
        part = [whole.numel() // n] * n
        wait(launch("all_to_all_single", group, whole, part, part), group)
    else:
        _around(whole, group, n, place)


def _around(whole: Tensor, group: str, n: int, place: int) -> None:
    """Everyone sends to the next and receives from the one before."""
    found = _resolve_process_group(group)  # type: ignore[arg-type]
    ranks = dist.get_process_group_ranks(found)
    got = torch.empty_like(whole)
    waits = [
        dist.isend(whole, ranks[(place + 1) % n], group=found),
        dist.irecv(got, ranks[(place - 1) % n], group=found),
    ]
    for work in waits:
        if work is not None:
            work.wait()
