"""Random graphs of stages with toy chunks whose gradients are known, and random schedules of them.

A toy adds up what it receives, multiplies by its weight and makes each value that it sends from that; where it sends
nothing that a gradient comes back for, what it holds is its loss. `reference` composes the same in one piece.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.pipeline import Action, Crossing, Pipeline, Spec
from autopar.runtime.queues import Hub

F64 = torch.float64
DTYPES = (F64, F64, F64, torch.bool, torch.int64)


@dataclass(frozen=True)
class Graph:
    """``shapes``: of each value, whose first dim grows with the microbatch; ``unread``: (value, stage) that comes and
    is not used, so that no gradient goes back."""

    ranks: int
    chunks: int
    microbatches: int
    crossings: tuple[Crossing, ...]
    specs: Mapping[int, Spec]
    unread: frozenset[tuple[int, int]]

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def spec(self, number: int, microbatch: int) -> Spec:
        (rows, *rest), dtype = self.specs[number]
        return (rows * (1 + microbatch % 2), *rest), dtype

    def made(self, stage: int) -> list[Crossing]:
        return [c for c in self.crossings if c.source == stage]

    def read(self, stage: int) -> list[Crossing]:
        return [c for c in self.crossings if stage in c.targets]


def random_graph(draw: random.Random) -> Graph:
    """2 to 8 stages on 1 to 4 ranks; values skip stages, fan out, are masks, are empty, or go nowhere useful."""
    ranks = draw.choice((1, 2, 2, 3, 3, 4))
    chunks = draw.randint(1 if ranks > 1 else 2, 2 if ranks > 2 else 3)
    stages = ranks * chunks
    crossings, specs, unread = [], {}, set()
    for number in range(draw.randint(1, 2 * stages)):
        source = draw.randrange(stages - 1)
        later = range(source + 1, stages)
        targets = tuple(sorted(draw.sample(later, min(len(later), draw.choice((1, 1, 1, 2, 3))))))
        dtype = draw.choice(DTYPES)
        crossings.append(Crossing(number, source, targets, dtype == F64 and draw.random() < 0.9))
        specs[number] = (draw.choice((1, 1, 2, 0)), draw.randint(1, 3))[: draw.choice((1, 2, 2))], dtype
        unread |= {(number, target) for target in targets if draw.random() < 0.1}
    draw.shuffle(crossings)
    return Graph(ranks, chunks, draw.randint(1, 5), tuple(crossings), specs, frozenset(unread))


def of(
    graph: Graph, stage: int, weight: Tensor, m: int, received: Mapping[int, Tensor]
) -> tuple[dict[int, Tensor], Tensor]:
    """(what a stage sends, its loss)."""
    used = [received[c.number] for c in graph.read(stage) if (c.number, stage) not in graph.unread]
    total = torch.tensor(0.1 + 0.3 * m, dtype=F64)
    for i, value in enumerate(used):
        total = total + (1 + 0.1 * i) * torch.tanh(value.to(F64)).sum()
    held = torch.sin(total * weight)
    sent = {}
    for crossing in graph.made(stage):
        shape, dtype = graph.spec(crossing.number, m)
        base = torch.arange(torch.Size(shape).numel(), dtype=F64).reshape(shape) + crossing.number
        value = torch.cos(base + held * (1 + crossing.number))
        sent[crossing.number] = value if dtype == F64 else (value > 0).to(dtype)
    return sent, held * held


class Toy:
    """A stage as `Pipeline` runs it. ``gradient``: of its weight; ``most``: the most microbatches that it held."""

    def __init__(self, graph: Graph, stage: int) -> None:
        self.graph, self.stage = graph, stage
        self.weight = torch.tensor(0.7 + 0.1 * stage, dtype=F64, requires_grad=True)
        self.gradient = torch.zeros((), dtype=F64)
        self.held: dict[int, tuple[dict[int, Tensor], dict[int, Tensor], Tensor]] = {}
        self.late: dict[int, Tensor] = {}
        self.lasts: list[bool] = []
        self.most = 0

    def forward(self, microbatch: int, received: dict[int, Tensor]) -> dict[int, Tensor]:
        reads = {c.number: c.grad for c in self.graph.read(self.stage)}
        assert received.keys() == reads.keys()
        own = {n: t.detach().requires_grad_() if reads[n] else t for n, t in received.items()}
        sent, loss = of(self.graph, self.stage, self.weight, microbatch, own)
        self.held[microbatch] = own, sent, loss
        self.most = max(self.most, len(self.held) + len(self.late))
        return {n: t.detach() for n, t in sent.items()}

    def backward(self, microbatch: int, gradients: dict[int, Tensor], part: str, last: bool) -> dict[int, Tensor]:
        if part != "I":
            self.lasts.append(last)
        if part == "W":
            self.gradient += self.late.pop(microbatch)
            return {}
        assert gradients.keys() == {c.number for c in self.graph.made(self.stage) if c.grad}
        own, sent, loss = self.held.pop(microbatch)
        wanted = {n: t for n, t in own.items() if t.requires_grad}
        total = loss + sum((gradient * sent[n]).sum() for n, gradient in gradients.items())
        weight, *rest = torch.autograd.grad(total, [self.weight, *wanted.values()], allow_unused=True)
        self.late[microbatch] = weight
        if part == "B":
            self.gradient += self.late.pop(microbatch)
        return {n: g for n, g in zip(wanted, rest) if g is not None}


def reference(graph: Graph) -> list[Tensor]:
    """The gradient of each stage's weight, by autograd over the composed function."""
    weights = [torch.tensor(0.7 + 0.1 * s, dtype=F64, requires_grad=True) for s in range(graph.stages)]
    loss = torch.zeros((), dtype=F64)
    for m in range(graph.microbatches):
        values: dict[int, Tensor] = {}
        for stage, weight in enumerate(weights):
            received = {c.number: values[c.number] if c.grad else values[c.number].detach() for c in graph.read(stage)}
            sent, own = of(graph, stage, weight, m, received)
            values |= sent
            loss = loss + own
    return list(torch.autograd.grad(loss, weights))


# -- schedules


def random_schedule(graph: Graph, draw: random.Random) -> list[list[Action]]:
    """One that can be run: a random order of the whole graph, rank by rank."""
    parts = {(s, m): draw.choice(("FB", "FB", "FIW")) for s in range(graph.stages) for m in range(graph.microbatches)}
    if draw.random() < 0.5:
        parts = dict.fromkeys(parts, draw.choice(("FB", "FIW")))
    left = {key: list(letters) for key, letters in parts.items()}
    done: set[tuple[str, int, int]] = set()
    made: list[list[Action]] = [[] for _ in range(graph.ranks)]

    def ready(stage: int, m: int) -> bool:
        letter = left[stage, m][0]
        if letter == "F":
            return all(("F", c.source, m) in done for c in graph.read(stage))
        return letter == "W" or all(("B", t, m) in done for c in graph.made(stage) if c.grad for t in c.targets)

    while left:
        stage, m = draw.choice([key for key in left if ready(*key)])
        letter = left[stage, m].pop(0)
        done.add(("B" if letter == "I" else letter, stage, m))
        made[stage % graph.ranks].append((letter, stage // graph.ranks, m))
        if not left[stage, m]:
            del left[stage, m]
    return made


def disturbed(schedule: Sequence[Sequence[Action]], draw: random.Random) -> list[list[Action]]:
    """Some actions of each rank moved, the parts of each chunk and microbatch in order: it may deadlock."""
    made = []
    for rank in schedule:
        actions = list(rank)
        for _ in range(draw.randint(0, 3)):
            action = actions.pop(i := draw.randrange(len(actions)))
            before = [j for j, a in enumerate(actions) if a[1:] == action[1:] and j < i]
            after = [j for j, a in enumerate(actions) if a[1:] == action[1:] and j >= i]
            actions.insert(draw.randint(before[-1] + 1 if before else 0, after[0] if after else len(actions)), action)
        made.append(actions)
    return made


# -- all ranks of a pipeline in one process


@dataclass
class Outcome:
    """``buffers``: the most receives under way at once, by rank; ``errors``: by rank, "" where none."""

    toys: list[Toy]
    buffers: list[int]
    errors: list[str]


def run_in_threads(
    graph: Graph, schedule: Sequence[Sequence[Action]], delay: Callable[[], float] = lambda: 0.0, timeout: float = 30.0
) -> Outcome:
    """One step on a thread for each rank."""
    hub = Hub(graph.ranks, delay, timeout)
    toys = [Toy(graph, stage) for stage in range(graph.stages)]
    outcome = Outcome(toys, [0] * graph.ranks, [""] * graph.ranks)

    def work(rank: int) -> None:
        end = hub.transport(rank)
        try:
            Pipeline(schedule, graph.crossings, end, graph.spec).run(toys[rank :: graph.ranks])
        except Exception as error:
            outcome.errors[rank] = f"{type(error).__name__}: {error}"
        end.finish()
        outcome.buffers[rank] = end.most

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(graph.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def wrong(graph: Graph, outcome: Outcome) -> str:
    """What is wrong with a step that ran; "" where nothing is."""
    if any(outcome.errors):
        return "; ".join(error for error in outcome.errors if error)
    for stage, (toy, expected) in enumerate(zip(outcome.toys, reference(graph))):
        if not torch.allclose(toy.gradient, expected, rtol=1e-10, atol=1e-12):
            return f"stage {stage}: gradient {toy.gradient.item()} and not {expected.item()}"
        if toy.held or toy.late or toy.lasts != [False] * (graph.microbatches - 1) + [True]:
            return f"stage {stage}: held {list(toy.held)}, late {list(toy.late)}, last {toy.lasts}"
    return ""
