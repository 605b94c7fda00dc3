"""Runs that stop under one plan and go on under another, against runs that never stop. ``make exact-checkpoints``.

For each model, optimizer and pair of plans: two steps, a checkpoint, and three more steps by other ranks from it, in
float64, dropout on where the last run can draw as a plan does. Right after the load all values must be the saved ones,
bit for bit, and so must those of the safetensors files; after the three steps losses, parameters, buffers and states
must be those of one process. Prints a row a pair and ends with exit code 1 where one is not equal. ``--models net``
runs a part.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

import autopar
from autopar import Cluster
from autopar.compile import Parallel
from autopar.errors import AutoparError
from autopar.runtime.pool import RankPool
from autopar.save_weights import save_weights

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
import test_checkpoint
import zero

LIMIT = 1e-10  # of the largest value of a tensor
BEFORE, AFTER = 2, 3  # steps
PLAIN, ALONE = "plain", "alone"  # one process: eager PyTorch without a process group; a plan of one rank
PAIRS = (
    (4, "dp=2 tp=2 zero=3", 4, "tp=4"),
    (4, "tp=4", 1, ALONE),
    (1, ALONE, 4, "dp=4 zero=1"),
    (4, "dp=4 zero=2", 2, "tp=2 microbatches=2"),
    (2, "dp=2 zero=3 microbatches=2", 4, "dp=2 tp=2 zero=3 recompute=full"),
    (2, "tp=2", 2, "dp=2 zero=2"),
    (4, "dp=2 tp=2 zero=3", 1, PLAIN),
    (1, PLAIN, 2, "dp=2 zero=3"),
)
MODELS = ("net", "reference/gpt2", "reference/llama")
# eps: without it gradients that are zero but for rounding are divided by their own size
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01, "eps": (1e-6, 1e-3)}),
}
Run = dict[str, Any]


def make(name: str, dropout: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model of the table in float64, and the inputs of its first step."""
    if name == "net":
        model = test_checkpoint.net()
        model.dropout.p = 0.25 if dropout == "on" else 0.0
        return model, test_checkpoint.batch(0), {}
    model, args, kwargs = zero.make(name, dropout)
    return model.double().train(), args, kwargs


def at(step: int, inputs: Any) -> Any:
    """The inputs of a step: those of the first, turned along the sequence."""
    return tree_map(lambda t: t.roll(step, -1) if isinstance(t, Tensor) else t, inputs)


def run(
    rank: int, ranks: int, pins: str, name: str, dropout: str, kind: str, steps: int, came: str | None, goes: str | None
) -> Run:
    """Steps under a plan, from a checkpoint and to one; (``here``: right after the load, ``left``: at the end)."""
    torch.set_num_threads(1)
    model, args, kwargs = make(name, dropout)
    if came is not None:
        for tensor in model.state_dict().values():
            tensor.fill_(2)  # what the model was made with must not matter
    seed = 7 if came is None else 99
    module: nn.Module = model
    step: Callable[..., Tensor] = eager(model)
    if pins != PLAIN:
        asked = "" if pins == ALONE else pins
        parallel = autopar.compile(
            model, Cluster.local(ranks=ranks), args=args, kwargs=kwargs, pins=asked, seed=seed, optimizer=kind.lower()
        )
        module, step = parallel, parallel.step
    optimizer_class, options = OPTIMIZERS[kind]
    if isinstance(module, Parallel):
        optimizer = module.optimizer(optimizer_class, **options)
    else:
        optimizer = optimizer_class([p for p in module.parameters() if p.requires_grad], **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if came is not None:
        schedule.load_state_dict(autopar.load(came, module, optimizer))
    here = held(module, optimizer)
    losses = []
    for number in range(schedule.last_epoch, schedule.last_epoch + steps):
        losses.append(step(*at(number, args), **at(number, kwargs)).detach())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if goes is not None:
        autopar.save(goes, module, optimizer, extra=schedule.state_dict())
        save_weights(module, f"{goes}/weights", 10_000)
    return {"here": here, "left": held(module, optimizer), "losses": torch.stack(losses)}


def eager(model: nn.Module) -> Callable[..., Tensor]:
    """A step of plain PyTorch."""

    def step(*args: Any, **kwargs: Any) -> Tensor:
        made = model(*args, **kwargs)
        loss: Tensor = made if isinstance(made, Tensor) else made["loss"]
        loss.backward()
        return loss

    return step


def held(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, buffers and states of the optimizer, whole."""
    names = {id(p): n for n, p in module.named_parameters()}
    found = dict(module.state_dict())
    for p, state in optimizer.state.items():
        found |= {f"{names[id(p)]} {key}": value for key, value in state.items()}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in found.items()}


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference, of the largest value of each tensor (of a thousandth of the largest, where that is
    more)."""
    if found.keys() != expected.keys():
        return float("inf")
    sizes = {n: float(t.abs().max()) if t.numel() else 0.0 for n, t in expected.items()}
    floor = max(sizes.values()) / 1000
    far = (float((found[n] - t).abs().max()) / max(sizes[n], floor) for n, t in expected.items() if t.numel())
    return max(far, default=0.0)


def alone(*args: Any) -> Run:
    """A run in this process, which has no process group before and after."""
    try:
        return run(0, 1, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> int:
    """Print a row a pair; 1 where one is not equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    bad, began = 0, time.monotonic()
    whole: dict[tuple[str, ...], Run] = {}
    with ExitStack() as stack:
        pools = {n: stack.enter_context(RankPool(n, timeout=300)) for n in (2, 4)}

        def on(ranks: int, *args: Any) -> list[Run]:
            return [alone(*args)] if ranks == 1 else pools[ranks].run(run, ranks, *args)

        for name in options.models.split(","):
            for i, pair in enumerate(PAIRS):
                first, source, then, target = pair
                if name == "net":  # its norm needs the whole batch
                    source, target = (pins.replace(" microbatches=2", "") for pins in (source, target))
                kind = tuple(OPTIMIZERS)[i % len(OPTIMIZERS)]
                dropout = "off" if PLAIN in (source, target) else "on"
                what = name, dropout, kind
                if what not in whole:
                    whole[what] = alone(PLAIN if dropout == "off" else ALONE, *what, BEFORE + AFTER, None, None)
                with tempfile.TemporaryDirectory() as folder:
                    said = row(on, whole[what], first, source, then, target, what, folder)
                bad += not said.startswith("equal")
                print(f"{name:15} {kind:10} dropout {dropout:3} {source:28} -> {target:32} {said}", flush=True)
    print(f"{bad} not equal; {time.monotonic() - began:.0f} s")
    return int(bad > 0)


def weights_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the safetensors files of a folder."""
    for path in sorted(folder.glob("*.safetensors")):
        yield from load_file(path).items()


def row(
    on: Callable[..., list[Run]],
    whole: Run,
    first: int,
    source: str,
    then: int,
    target: str,
    what: tuple[str, str, str],
    folder: str,
) -> str:
    """What came of one pair."""
    try:
        saved = on(first, source, *what, BEFORE, None, folder)[-1]
        every = on(then, target, *what, AFTER, folder, None)
    except AutoparError as error:
        return f"REFUSED {error}"
    for name, tensor in weights_in(Path(folder) / "weights"):
        if not torch.equal(tensor, saved["left"][name]):
            return f"NOT EQUAL as safetensors ({name})"
    for run in every:
        here, left = run["here"], saved["left"]
        if here.keys() != left.keys() or not all(torch.equal(here[n], left[n]) for n in left):
            return "NOT EQUAL right after the load"
    losses = torch.cat([saved["losses"], every[-1]["losses"]])
    far = max(distance(every[-1]["left"], whole["left"]), distance({"": losses}, {"": whole["losses"]}))
    return f"{'equal' if far <= LIMIT else 'NOT EQUAL'}, farthest {far:.1e}"


if __name__ == "__main__":
    sys.exit(main())
