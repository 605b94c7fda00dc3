"""The second table: random complete layouts of four models are exact. ``make exact-slice`` runs it after the first.

Every node takes a random legal strategy on two axes, nested in random orders; parameters rest and enter, and inputs
arrive, in random layouts. Judged in float64 against one process: loss, every gradient, every buffer. ``--seeds`` in the
stacked semantics (all ranks in one process), ``--real`` of them on gloo ranks too.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from autopar.build import copy_graph, prepare
from autopar.capture import Capture, capture, double, run_graph, to_float64
from autopar.loading import ModelSpec
from autopar.passes.complete_layouts import complete_prologue
from autopar.passes.layout import Axis, Mesh
from autopar.passes.lower import Lowerable, lower, with_changes
from autopar.passes.random_layouts import random_layouts
from autopar.pins import microbatch_rows
from autopar.runtime.mesh import connect
from autopar.runtime.parameters import local as own_piece
from autopar.runtime.parameters import place
from autopar.runtime.pool import RankPool
from autopar.runtime.program import Program
from autopar.runtime.stacked_step import stacked_step

LIMIT = 1e-10
BATCH = 8
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 1, "sequence": 8},
    "llama": {"layers": 1, "sequence": 8},
    "vit": {"layers": 1},
    "resnet": {"side": 16},
}
WHOLE_BATCH = ("resnet",)  # batch statistics: one microbatch
MESHES = ((2, 2), (2, 2), (2, 2), (2, 3))


@dataclass(frozen=True)
class Subject:
    """A model in float64 and what one process computes of it."""

    captured: Capture
    attributes: Mapping[str, Tensor]
    inputs: Sequence[Tensor]
    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


@lru_cache(maxsize=1)
def subject(name: str) -> Subject:
    """Capture a reference model and run it in one process."""
    model, args, kwargs, _ = ModelSpec(f"autopar.models.{name}:make", MODELS[name]).load()
    captured = capture(model.train(), args, kwargs, check=False)
    held = double(captured.attributes)
    inputs = [t.double() if t.is_floating_point() else t for t in captured.flatten_inputs(args, kwargs)]
    before = {n: t.detach().clone() for n, t in held.items()}
    loss = run_graph(to_float64(captured.graph), inputs, held)["outputs"][0]
    loss.backward()
    gradients = {n: held[n].grad for n in captured.parameters}
    return Subject(captured, before, inputs, loss.detach(), gradients, {n: held[n] for n in captured.buffers})


def mesh_of(name: str, seed: int, sizes: tuple[int, int] | None = None) -> Mesh:
    """Two axes, and for every other seed two or three microbatches of unequal sizes."""
    axes = [Axis(n, s) for n, s in zip("ab", sizes or MESHES[seed % len(MESHES)], strict=True)]
    microbatches = 1 if name in WHOLE_BATCH else (1, 2, 1, 3)[seed // len(MESHES) % 4]
    if microbatches > 1:
        axes.append(Axis("time", microbatches, microbatch_rows(BATCH, 1, microbatches)))
    return Mesh(tuple(axes))


def drawn(name: str, seed: int, mesh: Mesh, one_nesting: bool = False) -> Lowerable:
    """The model with random layouts."""
    captured = subject(name).captured
    prepared = prepare(captured, 1 if mesh.time is None else 2, float64=True)
    batch_inputs = frozenset(i.name for i in captured.inputs if i.batch)
    body = random_layouts(
        copy_graph(prepared.body),
        mesh,
        frozenset(captured.parameters),
        batch_inputs,
        seed,
        one_nesting,
        frozenset(prepared.hoisted),
    )
    prologue = None
    if prepared.prologue is not None:
        prologue = complete_prologue(copy_graph(prepared.prologue), mesh, body)
    used = {str(n.target) for g in (body, prologue) if g is not None for n in g.graph.nodes if n.op == "get_attr"}
    return with_changes(
        Lowerable(
            body,
            mesh,
            tuple(p for p in captured.parameters if p in used),
            tuple(b for b in captured.buffers if b in used),
            tuple(c for c in captured.constants if c in used),
            tuple(i.name for i in captured.inputs),
            prologue,
            prepared.hoisted,
        )
    )


def distance(name: str, loss: Tensor, gradients: Mapping[str, Tensor | None], buffers: Mapping[str, Tensor]) -> float:
    """The largest relative difference from one process; infinite where one side has a gradient and the other none."""
    ref = subject(name)
    worst = ((loss - ref.loss).abs() / ref.loss.abs()).item()
    largest = max(g.abs().max().item() for g in ref.gradients.values() if g is not None)
    for fqn, want in ref.gradients.items():
        got = gradients.get(fqn)
        if (want is None) != (got is None):
            return float("inf")
        if want is not None and got is not None:
            scale = max(want.abs().max().item(), 1e-3 * largest)
            worst = max(worst, ((want - got).abs().max() / scale).nan_to_num(float("inf")).item())
    for fqn, got in buffers.items():
        want = ref.buffers[fqn]
        worst = max(worst, ((want - got).abs().max() / want.abs().max().clamp(min=1e-12)).item())
    return worst


def stacked(name: str, seed: int) -> float:
    """One random plan, all ranks in this process."""
    torch.set_num_threads(1)
    mesh = mesh_of(name, seed)
    model = drawn(name, seed, mesh)
    programs = [lower(model, r, {a.name: a.name for a in mesh.axes}) for r in range(mesh.ranks)]
    got = stacked_step(programs, subject(name).attributes, subject(name).inputs)
    return distance(name, got.loss, got.gradients, got.buffers)


def real(rank: int, name: str, seed: int, sizes: tuple[int, int]) -> float:
    """One random plan on this and the other ranks."""
    ref, mesh = subject(name), mesh_of(name, seed, sizes)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it advises on full_tensor of nested shards
    ranks = connect(mesh)
    program = lower(drawn(name, seed, mesh, one_nesting=True), ranks.rank, ranks.group_names)
    model, _, _, _ = ModelSpec(f"autopar.models.{name}:make", MODELS[name]).load()
    model.train().double()
    names = place(model, program.parameters, ranks)
    (loss,) = Program([program], names, ranks, ref.captured.constants).step(ref.inputs)
    gradients = {n: None if p.grad is None else p.grad.full_tensor() for n, p in names.named_parameters()}  # type: ignore[attr-defined]
    assert all(own_piece(p).is_contiguous() for p in names.parameters())
    return distance(name, loss, gradients, dict(names.named_buffers()))


def _chunk(name: str, seeds: Sequence[int]) -> list[tuple[int, float]]:
    warnings.filterwarnings("ignore")
    return [(seed, stacked(name, seed)) for seed in seeds]


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--real", type=int, default=50)
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    bad = 0
    for name in options.models.split(","):
        started = time.perf_counter()
        groups = [range(options.seeds)[i::20] for i in range(20)]
        with ProcessPoolExecutor(2, mp_context=get_context("forkserver")) as workers:
            found = [pair for done in workers.map(_chunk, [name] * len(groups), groups) for pair in done]
        bad += _report(name, "stacked", found, started)
    for name in options.models.split(",") if options.real else ():
        started = time.perf_counter()
        with RankPool(4, timeout=600.0) as pool:
            found = [(seed, max(pool.run(real, name, seed, (2, 2)))) for seed in range(options.real)]
        bad += _report(name, "4 gloo ranks", found, started)
    return 1 if bad else 0


def _report(name: str, how: str, found: list[tuple[int, float]], started: float) -> int:
    wrong = sorted(seed for seed, worst in found if not worst <= LIMIT)
    worst = max((w for _, w in found), default=0.0)
    took = (time.perf_counter() - started) / 60
    print(
        f"{name:8s} {how:14s} {len(found) - len(wrong)} of {len(found)} equal, worst {worst:.1e}, {took:.1f} minutes",
        flush=True,
    )
    if wrong:
        print(f"         wrong seeds: {wrong[:20]}", flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
