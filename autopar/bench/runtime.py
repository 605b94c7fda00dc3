"""Training on this machine's ranks beside what PyTorch offers, in turns in one launch.

A cell is a model, a number of ranks and a peer of `autopar.bench.peers`. Three train the same batch with the same fused
AdamW: the peer, our program under the same plan (``same``), and our program under our own plan (``own``). ``ratio`` is
the peer's seconds over ours, so above 1 we are faster: the median over rounds of the ratio within a round, with a 90 %
interval by drawing the rounds anew. Before anything is timed all three must have the same loss after some steps.
``calls`` and ``mib`` are collectives and messages that a rank starts in a step, and what crosses the loopback device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.bench import peers
from autopar.bench.peers import FAMILIES, Trained
from autopar.bench.rows import Figure, bench, chosen
from autopar.bench.turns import in_turns, interval, pooled
from autopar.bench.workloads import made
from autopar.cluster import Cluster
from autopar.errors import AutoparError

SECONDS, ROUNDS = 20.0, (15, 101)  # that the rounds of a cell take about; the fewest and most of them
WARM = 3  # steps before the loss is compared
CLOSE = 1e-3  # relative, of losses in fp32 after the warm steps
LR = 1e-3
TIMEOUT = 900.0  # seconds that a cell may take
LOOPBACK = Path("/proc/net/dev")


@dataclass(frozen=True)
class Cell:
    """``pins``: the peer's plan, for our own program; ``options``: of the peer; ``sizes``: of the model; ``inductor``:
    whether Inductor compiles our programs."""

    model: str
    ranks: int
    peer: Callable[..., Trained]
    pins: Mapping[str, int | str]
    options: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    inductor: bool = False


INDUCTOR = "torch.compile"


def _cells() -> dict[str, Cell]:
    stages: dict[str, int | str] = {"pp": 2, "microbatches": 4, "schedule": "1f1b"}
    kinds: dict[str, tuple[int, Callable[..., Trained], Mapping[str, int | str], Mapping[str, int]]] = {
        "eager": (1, peers.eager, {}, {}),
        INDUCTOR: (1, peers.inductor, {}, {}),
        "ddp": (2, peers.ddp, {"dp": 2, "zero": 0}, {}),
        "fsdp2": (2, peers.fsdp2, {"dp": 2, "zero": 3}, {}),
        "tp": (2, peers.tensor_parallel, {"tp": 2}, {}),
        "1f1b": (2, peers.pipelining, stages, {"microbatches": 4}),
        "tp+fsdp2": (4, peers.tensor_parallel_fsdp2, {"dp": 2, "tp": 2, "zero": 3}, {}),
    }
    return {
        f"{model} {peer}": Cell(
            model, ranks, make, pins, options, {"rows": 4096 if model == "mlp" else 8}, peer == INDUCTOR
        )
        for model in FAMILIES
        for peer, (ranks, make, pins, options) in kinds.items()
    }


CELLS = _cells()


@bench("runtime")
def runtime(cases: Sequence[str]) -> Iterator[tuple[str, dict[str, Figure]]]:
    """Seconds of a step of our programs and of the peer, and their ratios."""
    for name, pool in pooled(chosen(cases, CELLS, "runtime"), lambda name: CELLS[name].ranks, TIMEOUT):
        yield name, _figures(name, pool.run(_measure, name))


@dataclass(frozen=True)
class Measured:
    """What a rank saw of a variant: seconds of each round, collectives of one step, bytes over loopback in it (of all
    ranks together), and its plan in a line, where it has one."""

    seconds: list[float]
    calls: int
    nbytes: int
    plan: str


def _figures(name: str, every: Sequence[Mapping[str, Measured]]) -> dict[str, Figure]:
    seconds = {which: np.array([own[which].seconds for own in every]).max(axis=0) for which in every[0]}
    found: dict[str, Figure] = {"peer": name.split(" ", 1)[1], "plan": every[0]["own"].plan}
    for which in ("same", "own"):
        ratios = seconds["peer"] / seconds[which]
        low, high = interval(ratios, 0.9)
        end = "" if which == "same" else "_own"
        found |= {f"ratio{end}": float(np.median(ratios)), f"low{end}": low, f"high{end}": high}
    found |= {f"{which}_ms": float(np.median(took)) * 1e3 for which, took in seconds.items()}
    for which in seconds:
        found[f"{which}_calls"] = every[0][which].calls
        found[f"{which}_mib"] = every[0][which].nbytes / 2**20
    found["rounds"] = len(seconds["peer"])
    return found


def _measure(rank: int, name: str) -> dict[str, Measured]:
    """Every variant of a cell; runs on every rank."""
    cell = CELLS[name]
    variants = {"peer": _peer(cell), "same": _ours(cell, cell.pins), "own": _ours(cell, {})}
    _refuse_other_losses(name, {which: [step() for _ in range(WARM)][-1] for which, (step, _) in variants.items()})
    traffic = {which: _traffic(step) for which, (step, _) in variants.items()}
    seconds = in_turns([step for step, _ in variants.values()], SECONDS, ROUNDS)
    return {
        which: Measured(took, *traffic[which], plan)
        for (which, (_, plan)), took in zip(variants.items(), seconds, strict=True)
    }


def _peer(cell: Cell) -> tuple[Callable[[], Tensor], str]:
    step, parameters = cell.peer(FAMILIES[cell.model], _made(cell), cell.ranks, **cell.options)
    kinds: dict[tuple[object, ...], list[Tensor]] = {}
    for parameter in parameters:  # one call of a fused optimizer takes DTensors of one mesh, or plain tensors
        kinds.setdefault((type(parameter), getattr(parameter, "device_mesh", None)), []).append(parameter)
    groups = [{"params": alike} for alike in kinds.values()]
    return _training(step, torch.optim.AdamW(groups, lr=LR, fused=True)), ""


def _ours(cell: Cell, pins: Mapping[str, int | str]) -> tuple[Callable[[], Tensor], str]:
    import autopar

    model, args = _made(cell)
    cluster = Cluster.local(cell.ranks)
    parallel = autopar.compile(model, cluster, args=args, pins=pins or None, inductor=cell.inductor)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=LR, fused=True)
    return _training(partial(parallel.step, *args), optimizer), parallel.plan.one_line()


def _made(cell: Cell) -> Any:
    sizes = dict(cell.sizes)
    return made(cell.model, sizes | {"tied": False} if cell.model == "gpt" else sizes)


def _training(step: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    def train() -> Tensor:
        loss = step()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train


def _refuse_other_losses(name: str, losses: Mapping[str, Tensor]) -> None:
    """A peer that trains something else is no peer."""
    whole = {which: _mean(loss) for which, loss in losses.items()}
    for which, loss in whole.items():
        if not math.isclose(loss, whole["own"], rel_tol=CLOSE):
            raise AutoparError(
                f"bench runtime {name}: after {WARM} steps the loss of {which} is {loss:.6g}, ours {whole['own']:.6g}. "
                "They do not train the same."
            )


def _mean(loss: Tensor) -> float:
    """Over all ranks."""
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return float(whole) / dist.get_world_size()


def _traffic(step: Callable[[], Tensor]) -> tuple[int, int]:
    """Collectives and messages that this rank starts in a step; bytes over loopback meanwhile, of all ranks."""
    dist.barrier()
    before = _loopback()
    dist.barrier()
    idle = _loopback() - before  # a barrier's own
    before = _loopback()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    dist.barrier()
    events: Any = profiler.profiler
    calls = sum(event.name().startswith("gloo:") for event in events.kineto_results.events())
    return calls, max(0, _loopback() - before - idle)


def _loopback() -> int:
    """Bytes that came over the loopback device so far; 0 where the system does not say."""
    if not LOOPBACK.exists():
        return 0
    lines = (line.split(":", 1) for line in LOOPBACK.read_text().splitlines() if ":" in line)
    return next((int(rest.split()[0]) for device, rest in lines if device.strip() == "lo"), 0)
