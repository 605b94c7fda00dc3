"""The demo: a small GPT learns Python from the standard library's own sources, on the 4 ranks that torchrun starts.

``torchrun --standalone --nproc-per-node 4 -m autopar.demo`` trains with the plan that the solver chooses, explains it,
then trains the same model on the same batches again in one process and prints the largest difference of the two loss
curves. Exits with 1 where that is more than its one of `LIMITS`. ``--pin tp=2`` fixes a part of the plan; in ``--dtype
fp64`` rounding does not grow over the steps as it does in fp32, so that a long run tells it from an error.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import autopar
from autopar import AutoparError, Cluster
from autopar.models.gpt2 import GPT2, GPT2Config

CONFIG = GPT2Config(vocabulary=256, positions=128, width=192, layers=6, heads=6)
RANK = int(os.environ.get("RANK", "0"))  # this process among those that torchrun started
RANKS = int(os.environ.get("WORLD_SIZE", "4"))
OUT = Console(width=None if sys.stdout.isatty() else 120, quiet=RANK != 0, highlight=False, markup=False)
BATCH = 16  # rows of the global batch
STEPS = 60
RATE = 1e-3  # learning rate of AdamW, reached after WARMUP steps; without them the first steps amplify rounding
WARMUP = 20
NORM = 1.0  # gradients are clipped to this norm
CORPUS = 4 << 20  # bytes of text read
LIMITS = {"fp32": 1e-4, "fp64": 1e-9}  # relative
# in fp32 first weights moved by 1e-7 of themselves move the curve of one process by 5e-6 in 60 steps


def corpus() -> Tensor:
    """The first `CORPUS` bytes of the standard library's modules, in the order of their names; uint8 ``[bytes]``."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
    if len(text) <= CONFIG.positions:
        raise AutoparError("demo: this Python came without the sources of its standard library. Use a full install.")
    return torch.frombuffer(text[:CORPUS], dtype=torch.uint8)


def batches(text: Tensor, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For every step ids and labels ``[BATCH, positions]`` from random places of ``text``; one seed, one sequence."""
    generator = torch.Generator().manual_seed(seed)
    reach = torch.arange(CONFIG.positions + 1)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONFIG.positions, (BATCH, 1), generator=generator)
        rows = text[starts + reach].long()
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train(title: str, model: nn.Module, step: Callable[[Tensor, Tensor], Tensor], steps: int, seed: int) -> list[float]:
    """AdamW over all batches, with a progress bar; the losses in nats per byte. ``step`` leaves clipped gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / WARMUP))
    losses: list[float] = []
    start = time.perf_counter()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=OUT, disable=OUT.quiet) as progress:
        task = progress.add_task(title, total=steps)
        OUT.print(f"{title}:")
        for ids, labels in batches(corpus(), steps, seed):
            losses.append(step(ids, labels).item())
            optimizer.step()
            optimizer.zero_grad()
            warmup.step()
            progress.update(task, advance=1, description=f"{title}: loss {losses[-1]:.3f}")
            if len(losses) % 10 == 0 or len(losses) == 1:
                speed = len(losses) * BATCH * CONFIG.positions / (time.perf_counter() - start)
                OUT.print(f"  step {len(losses):3d}  loss {losses[-1]:.4f}  {speed:6,.0f} bytes/s")
    return losses


def compiled(steps: int, seed: int, pins: Sequence[str] = (), dtype: str = "fp32") -> list[float]:
    """The losses on the ranks that torchrun started; explains the plan."""
    ids, labels = next(batches(corpus(), 1, seed))
    parallel = autopar.compile(fresh(seed, dtype), Cluster.local(RANKS), args=(ids, labels), pins=pins)

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = parallel.step(ids, labels)
        parallel.clip_grad_norm_(NORM)
        return loss

    losses = train(parallel.plan.one_line(), parallel, step, steps, seed)
    OUT.print(parallel.explain(), soft_wrap=True)
    return losses


def alone(steps: int, seed: int, dtype: str = "fp32") -> list[float]:
    """The losses of plain PyTorch in one process."""
    model = fresh(seed, dtype)

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = model(ids, labels)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        return loss

    return train("1 process, plain PyTorch", model, step, steps, seed)


def fresh(seed: int, dtype: str) -> GPT2:
    """The model with its first weights."""
    torch.manual_seed(seed)
    model = GPT2(CONFIG)
    return model.double() if dtype == "fp64" else model


def main() -> int:
    """Train twice and compare. 0: the curves agree; 1: they do not; 2: launched in a way that cannot work."""
    parser = argparse.ArgumentParser(prog="autopar.demo", description="Train a small GPT on several ranks, and alone.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pin", action="append", default=[], metavar="KEY=VALUE", help="fix a part of the plan")
    parser.add_argument("--dtype", default="fp32", choices=LIMITS, help="of all parameters (default: fp32)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps} is not a number of steps. Legal: 1 or more.")
    try:
        losses = compiled(options.steps, options.seed, options.pin, options.dtype)
    except AutoparError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if RANK != 0:
        return 0
    reference, limit = alone(options.steps, options.seed, options.dtype), LIMITS[options.dtype]
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
    verdict = "within" if worst <= limit else "MORE THAN"
    OUT.print(
        f"Loss {losses[0]:.4f} -> {losses[-1]:.4f}. Largest relative difference from one process over "
        f"{options.steps} steps: {worst:.1e} ({verdict} {limit:.0e})."
    )
    return 0 if worst <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
