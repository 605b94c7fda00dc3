"""The full product of schedules, microbatches, ranks and recomputation for one model: the ranks of a pipeline are
threads of one process, and messages go through queues and take random times. ``pipelines.py --threads`` runs it."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from stacked_judge import StackedJudge
from torch import Tensor

from autopar.build import choose, staged
from autopar.choosing import pipelines
from autopar.cluster import Cluster
from autopar.equality import FP64, Run, distances
from autopar.models import gpt2
from autopar.orders import actions
from autopar.passes.lower import OutputUse, lower
from autopar.passes.split_tail import Tail
from autopar.pins import Pins, resolve
from autopar.runtime.pipeline import Action, Pipeline, Spec
from autopar.runtime.queues import Hub
from autopar.runtime.run import units_of
from autopar.runtime.stacked_step import _pieces, _rejoined
from autopar.runtime.stage import Stage, Stages, StageStep
from autopar.runtime.weights import Weights

RANKS, COUNTS = (2, 3, 4), (1, 2, 3, 8)
SCHEDULES = {1: ("gpipe", "1f1b", "zero_bubble"), 2: ("interleaved",)}  # by chunks of a rank
RECOMPUTE = ("none", "selective", "full")


class NoTail:
    """`autopar.runtime.stage.WholeBatch` of a model that has no tail."""

    def join(self, use: OutputUse, pieces: list[Tensor]) -> Tensor:
        """Nobody asks."""
        raise AssertionError(use)

    def share(self, use: OutputUse, gradient: Tensor, microbatch: int) -> Tensor:
        """Nobody asks."""
        raise AssertionError(use)

    def run_tail(self, tail: Tail, whole: list[Tensor], wanted: Sequence[bool]) -> Any:
        """Nobody asks."""
        raise AssertionError(tail)


@dataclass
class Column:
    """A plan of one model, its stages on ranks of their own. ``judge``: has the model, its inputs and what one process
    computes."""

    judge: StackedJudge
    pins: dict[str, Any]
    stages: list[Stage] = field(init=False)
    pipeline: Stages = field(init=False)
    rows: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        ranks, attributes = self.pins["pp"], self.judge.attributes
        resolved = resolve(Pins.parse(self.pins), ranks, self.judge.captured.batch)
        prepared = self.judge.prepared(resolved.microbatches)
        plan = choose(prepared, resolved, Cluster.local(ranks=1))
        model = staged(pipelines.staged(plan, prepared, resolved, Cluster.local(ranks=ranks)), prepared)
        assert model.pipeline is not None
        self.pipeline, self.rows = model.pipeline, resolved.rows if resolved.microbatches > 1 else (0,)
        self.stages = []
        for number, local in enumerate(lower(each, 0, {}) for each in model.models):
            constants = [attributes[name].detach() for name in local.constants]
            self.stages.append(Stage(number, local, units_of(local), local.prologue, constants))

    def step(self, schedule: str, delay: random.Random) -> list[str]:
        """One step under a schedule, on a thread for each rank: what is wrong."""
        order = actions(schedule, self.pins["pp"], self.pins["microbatches"], self.pins["vp"])
        hub = Hub(self.pins["pp"], lambda: delay.random() * 1e-3)
        steps = [self.chunk(stage, order) for stage in self.stages]
        errors: list[str] = []

        @torch.no_grad()
        def work(rank: int) -> None:
            end = hub.transport(rank)
            try:
                Pipeline(order, self.pipeline.crossings, end, self.spec).run(steps[rank :: hub.ranks])
            except Exception as error:
                errors.append(f"rank {rank}: {type(error).__name__}: {error}")
            end.finish()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(hub.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors or self.compared(steps)

    @torch.no_grad()
    def chunk(self, stage: Stage, order: Sequence[Sequence[Action]]) -> StageStep:
        """A stage at the start of a step, as `Program` makes it."""
        judge, local, ranks = self.judge, stage.local, len(order)
        letters = [letter for letter, chunk, _ in order[stage.number % ranks] if chunk == stage.number // ranks]
        stage = replace(stage, parted="W" in letters)
        rests = [judge.attributes[use.fqn].detach() for use in local.parameters]
        weights = Weights(stage.ways, local.parameters, rests, [use.trainable for use in local.parameters], letters)
        pieces = [_pieces(local, 0, m, judge.inputs) for m in range(len(self.rows))]
        given = {"buffer": [judge.attributes[n] for n in local.buffers], "key": [judge.key]}
        read = (self.rows, pieces, _rejoined(local, pieces), given)
        return StageStep(stage, weights, *read, NoTail(), train=True, keep=False)

    def spec(self, number: int, microbatch: int) -> Spec:
        """What a value is on the wire."""
        use = self.pipeline.crossed[number]
        mesh = self.stages[0].local.mesh
        return use.layout.local_shape(use.shape, mesh, mesh.coordinates(0, microbatch)), use.dtype

    def compared(self, steps: Sequence[StageStep]) -> list[str]:
        """How a step differs from one process, where it does."""
        gradients: dict[str, Tensor | None] = dict.fromkeys(self.judge.captured.parameters)
        for step in steps:
            for i, gradient in step.weights.finish().items():
                fqn = step.local.parameters[i].fqn
                other = gradients[fqn]
                gradients[fqn] = gradient if other is None else other + gradient
        made = next(step.outputs for step in steps if step.local.has_loss)
        loss = torch.stack([made[m][0] for m in range(len(self.rows))]).sum()
        worst = distances(Run(loss, gradients, {}, {}), self.judge.reference, lr=1.0)[0]
        return [] if worst.rel <= FP64.limits[worst.kind] else [str(worst)]


def product(seed: int) -> Iterator[tuple[str, list[str]]]:
    """Every plan of a GPT of two layers with dropout, and what is wrong with it. ``seed``: of messages' times."""
    delay = random.Random(seed)
    torch.manual_seed(0)
    model = gpt2.GPT2(replace(gpt2.SIZES["tiny"], layers=2, width=32, heads=4, dropout=0.1))
    judge = StackedJudge(model, *gpt2.make(layers=1)[1:])
    for pp, chunks, count, recompute in itertools.product(RANKS, SCHEDULES, COUNTS, RECOMPUTE):
        pins = {"pp": pp, "vp": chunks, "microbatches": count, "recompute": recompute}
        column = Column(judge, pins)
        for schedule in SCHEDULES[chunks]:
            yield " ".join(f"{k}={v}" for k, v in (pins | {"schedule": schedule}).items()), column.step(schedule, delay)
