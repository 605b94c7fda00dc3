"""Gradients of pipelines against ``torch.distributed.pipelining`` on 2 and 4 gloo ranks.

Stages that autograd runs in both: the same bits. A compiled model, whose backward is written out, against hand-cut
stages of it: within 1e-12 in double precision. Prints a row a case and ends with exit code 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

import autopar
from autopar.bench.pipelines import Case, ours, theirs, torch_step
from autopar.cluster import Cluster
from autopar.plan import Plan
from autopar.runtime.pool import RankPool

TIMEOUT, CLOSE = 120.0, 1e-12
SCHEDULES = ("gpipe", "1f1b", "interleaved")


def toys(ranks: int) -> Iterator[Case]:
    """Small stages under each schedule, microbatches as many as stages, and more."""
    for name in SCHEDULES:
        for m in (ranks, 2 * ranks, 3 * ranks + 2):
            if name == "interleaved" and m % ranks:
                continue  # torch takes rounds of equally many microbatches alone
            for dtype in (torch.float32, torch.float64):
                yield Case(ranks, name, m, 8, 2, 3, dtype)


def differs(rank: int, case: Case) -> list[str]:
    """Gradients of this rank that have other bits than torch's, after two steps each."""
    own, other = ours(case, rank), theirs(case, rank)
    for step in (own[0], other[0]) * 2:
        step()
    pairs = [(a, b) for m, n in zip(own[1], other[1]) for a, b in zip(m.parameters(), n.parameters(), strict=True)]
    assert pairs and all(float(b.grad.abs().sum()) > 0 for _, b in pairs), "nothing to compare"
    return [f"{tuple(a.shape)}" for a, b in pairs if not torch.equal(a.grad, b.grad)]


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding, layers, and a head with its loss, all in double precision; also a range of the layers alone."""

    def __init__(self, layers: int = 8, width: int = 12, vocabulary: int = 20) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Part(nn.Module):
    """Layers ``[first, last)`` of a model, with its embedding and its head where they are at an end."""

    def __init__(self, model: Model, first: int, last: int) -> None:
        super().__init__()
        self.emb = model.emb if first == 0 else None
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in range(first, last)})
        self.head = model.head if last == len(model.layers) else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.emb is None else self.emb(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def compiled(rank: int, plan: Plan, case: Case) -> float:
    """The largest difference of a compiled model's gradients from torch's, beside the largest of torch's."""
    model, (ids, labels) = made(case)
    parallel = autopar.compile(model, Cluster.local(case.ranks), args=(ids, labels), plan=plan)
    for _ in range(2):
        parallel.zero_grad()
        parallel.step(ids, labels)
    begins = [0, *(int(plan.units[s.first].fqn.split(".")[1]) for s in plan.stages[1:]), len(model.layers)]
    numbers = range(rank, case.stages, case.ranks)
    parts = [Part(made(case)[0], begins[s], begins[s + 1]) for s in numbers]
    x = torch.empty(case.rows, *ids.shape[1:], case.width, dtype=torch.float64, requires_grad=True)
    logits = torch.empty(*x.shape[:-1], 20, dtype=torch.float64, requires_grad=True)
    piece = ids[: case.rows]
    shapes = [(piece if s == 0 else x, logits if s == case.stages - 1 else x) for s in numbers]

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="sum") / labels.numel()

    torch_step(case, rank, parts, shapes, loss, ids, labels)()
    own, worst, largest = dict(parallel.named_parameters()), 0.0, 0.0
    for part in parts:
        for fqn, parameter in part.named_parameters():
            gradient = own[fqn].grad
            assert parameter.grad is not None, fqn
            assert gradient is not None, fqn
            assert float(parameter.grad.abs().max()) > 1e-6, f"{fqn} has nothing to compare"
            worst = max(worst, float((gradient.to_local() - parameter.grad).abs().max()))
            largest = max(largest, float(parameter.grad.abs().max()))
    return worst / largest


def made(case: Case) -> tuple[Model, tuple[Tensor, Tensor]]:
    """The model with its values, and a batch."""
    torch.manual_seed(0)
    model = Model(width=case.width)
    ids, labels = torch.randint(20, (2, case.microbatches * case.rows, 5))
    return model, (ids.contiguous(), labels.contiguous())


def planned(case: Case) -> Plan:
    """Its plan, cut between layers."""
    model, args = made(case)
    each = len(model.layers) // case.stages
    pins = {
        "pp": case.ranks,
        "microbatches": case.microbatches,
        "schedule": case.schedule,
        "vp": case.chunks,
        "cut": ",".join(f"layers.{each * s}" for s in range(1, case.stages)),
    }
    return autopar.compile(model, Cluster.local(case.ranks), args=args, pins=pins).plan


def rows(pool: RankPool, cases: list[Case]) -> Iterator[tuple[bool, str]]:
    """Whether each case is right, and a line."""
    for case in cases:
        words = f"{case.schedule:12s} M={case.microbatches:<3d} on {case.ranks}"
        wrong = sorted({name for own in pool.run(differs, case) for name in own})
        found = f"other bits: {', '.join(wrong)}" if wrong else "the same bits"
        yield not wrong, f"{words} {str(case.dtype)[6:]:8s} by autograd: {found}"
        if case.dtype == torch.float64:
            case = replace(case, width=12)
            worst = max(pool.run(compiled, planned(case), case))
            yield worst <= CLOSE, f"{words} {'float64':8s} compiled:    {worst:.1e}"


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    started, wrong, done = time.perf_counter(), 0, 0
    for ranks in map(int, options.ranks.split(",")):
        with RankPool(ranks, timeout=TIMEOUT) as pool:
            for good, text in rows(pool, list(toys(ranks))):
                wrong, done = wrong + (not good), done + 1
                print(f"{'equal  ' if good else 'WRONG  '} {text}", flush=True)
    print(f"\n{done - wrong} equal, {wrong} wrong; {(time.perf_counter() - started) / 60:.0f} minutes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
