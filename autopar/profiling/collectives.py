"""Seconds of collectives on the ranks that run, by kind, number of ranks and bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from autopar.profiling.clock import seconds
from autopar.runtime.collectives import launch, wait

CALLS = 8
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


def collectives(device: torch.device, messages: Sequence[int]) -> dict[int, dict[str, Points]]:
    """Points of [bytes, seconds] by group size and kind, with all groups of that size busy at once. Collective; bytes
    count as in `autopar.solver.cost.collective`."""
    world, rank = dist.get_world_size(), dist.get_rank()
    found: dict[int, dict[str, Points]] = {}
    for size in groups(world):
        rows = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
        name = rows[rank // size].group_name
        found[size] = {kind: [] for kind in KINDS}
        for nbytes in messages:
            whole = torch.zeros(max(size, nbytes // 4 // size * size), device=device)
            for kind in KINDS:
                dist.barrier()
                took = seconds(lambda: _run(kind, whole, name, size, rank % size), device, CALLS)  # noqa: B023
                found[size][kind].append((float(whole.nbytes), took))
    return found


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
