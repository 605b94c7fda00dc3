"""The cluster file of the ranks that run: everything that is measured, put together on rank 0."""

from __future__ import annotations

import datetime
import json
import os
import platform
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar.cluster import FOLDER, _host_memory
from autopar.hardware import KERNEL
from autopar.profiling import kernels
from autopar.profiling.collectives import collectives, overlaps
from autopar.profiling.sizes import CPU, CUDA, Sizes
from autopar.schema import read_file
from autopar.solver.cost import share

OVERLAPPED = 1 << 22  # bytes of the all-reduce that runs beside matmuls
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
Json = dict[str, Any]


def measure(rank: int, name: str = "profiled", sizes: Sizes | None = None, chip: Json | None = None) -> Json | None:
    """What `autopar.cluster.from_json` reads, on rank 0; None elsewhere. Collective: all ranks are busy at once, and a
    figure is the mean over them. ``chip``: what an earlier profile of these devices says of them; then only links are
    measured."""
    cuda = torch.cuda.is_available() and dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    sizes, said = sizes or (CUDA if cuda else CPU), _source(device)
    chip = chip or _chip(device, sizes, said)
    several = dist.get_world_size() > 1
    links = _mean(collectives(device, sizes.messages, _local())) if several else {}
    beside = _mean(overlaps(device, OVERLAPPED, _local())) if several else {}
    shape = {"nodes": _nodes(), "ranks_per_node": dist.get_world_size() // _nodes()}
    found = {"schema": 2, "name": name, **shape, "chip": chip, "tiers": _tiers(links, beside, said)}
    return json.loads(json.dumps(found)) if rank == 0 else None


def _dtypes(device: torch.device) -> dict[torch.dtype, str]:
    """fp32 first; bf16 where the device is made for it."""
    return NAMES if device.type == "cuda" else {torch.float32: "fp32"}


def _mean(own: Any) -> Any:
    """The mean over ranks of every number of a structure that all have alike."""
    if dist.get_world_size() == 1:
        return own
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return _merged(every)


def _merged(every: Sequence[Any]) -> Any:
    first = every[0]
    if isinstance(first, dict):
        return {key: _merged([e[key] for e in every]) for key in first}
    if isinstance(first, (list, tuple)):
        return [_merged(items) for items in zip(*every, strict=True)]
    same = isinstance(first, (bool, str)) or all(e == first for e in every)
    return first if same else sum(every) / len(every)


def _source(device: torch.device) -> Callable[[str], str]:
    """The words after which a figure says what was measured."""
    ranks, host = dist.get_world_size(), socket.gethostname()
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores {_cpu()}"
    head = f"measured by autopar profile, {datetime.date.today().isoformat()}, {host} ({what}), {ranks} ranks at once"
    return lambda text: f"{head}, torch {torch.__version__}: {text}"


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _chip(device: torch.device, sizes: Sizes, said: Callable[[str], str]) -> Json:
    moved = _mean(dict(kernels.by_bytes(device, sizes.nbytes)))
    rates = {d: _mean(kernels.matmuls(device, t, sizes.matmul)) for t, d in _dtypes(device).items()}
    attended = _mean([[list(key), points] for *key, points in kernels.attentions(device, torch.float32, sizes)])
    copy, shape = moved["aten.clone"], list(sizes.matmul)
    fastest = max(b / s for b, s in copy[len(copy) // 3 :])  # the smallest never leave the cache
    return {
        "kind": device.type,
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else f"one rank of {_cpu()}",
        "memory": _figure(_memory(device), said("memory of the device, or the host's over its ranks")),
        "memory_bandwidth": _figure(fastest, said("copy, bytes read and written")),
        "flops": {d: _figure(max(rate), said("the fastest matmul of those below")) for d, rate in rates.items()},
        "efficiency": {
            "matmul": _figure(1.0, said("the FLOP/s above are those of a matmul")),
            "memory": _figure(1.0, said("the bandwidth above is that of a copy")),
        },
        "launch": _figure(
            _mean(kernels.launch(device)), said("multiplication of 8 numbers, forward and backward with autograd")
        ),
        "matmul": {
            d: {"batch": [1], "m": shape, "n": shape, "k": shape, "points": rate,
                "source": said("mean of a linear's three products")}
            for d, rate in rates.items()
        },
        "attention": [
            {"kernel": KERNEL, "head": head, "causal": causal, "backward": backward, "points": points,
             "source": said("scaled_dot_product_attention")}
            for (head, causal, backward), points in attended
        ],
        "copy": {"points": copy, "source": said("clone into new memory")},
        "kernels": {op: {"points": points, "source": said("")} for op, points in moved.items()},
    }  # fmt: skip


def _tiers(links: Json, beside: Json, said: Callable[[str], str]) -> list[Json]:
    """Fastest first, the last of which reaches all ranks; the shipped figures where one rank ran alone."""
    if not links:
        shipped = read_file(FOLDER / "local.json", who="cluster")
        assert isinstance(shipped, dict)
        return [dict(shipped["tiers"][0])]
    last = list(links)[-1]
    what = said(f"all_reduce of {OVERLAPPED} bytes beside matmuls of width 512")
    return [
        {"name": tier, "spans": None if tier == last else _local(), **_tier(links[tier], said),
         "overlap": _figure(beside[tier], what)}
        for tier in links
    ]  # fmt: skip


def _tier(sizes: Json, said: Callable[[str], str]) -> Json:
    last = max(sizes)
    made = {}
    for kind in sizes[last]:
        nbytes, took = sizes[last][kind][-1]
        made[kind] = {
            "bandwidth": _figure(
                share(kind, last) * nbytes / took, said(f"{kind} of {nbytes:.0f} bytes, bus bandwidth")
            ),
            "latency": _figure(sizes[last][kind][0][1], said(f"{kind} of {sizes[last][kind][0][0]:.0f} bytes")),
            "curves": {str(n): {"points": _rising(kinds[kind]), "source": said(kind)} for n, kinds in sizes.items()},
        }
    wire = max(found["bandwidth"]["value"] for found in made.values())
    return {"bandwidth": _figure(wire, said("the fastest collective")), "collectives": made}


def _rising(points: Sequence[Sequence[float]]) -> list[list[float]]:
    """Seconds that never fall as bytes grow."""
    found, least = [], 0.0
    for nbytes, took in points:
        least = max(least, took)
        found.append([nbytes, least])
    return found


def _figure(value: float, source: str) -> Json:
    return {"value": value, "source": source}


def _local() -> int:
    """Ranks of a host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _nodes() -> int:
    return max(1, dist.get_world_size() // _local())


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return _host_memory() // (dist.get_world_size() // _nodes())
