"""Batches of other sizes and lengths: planned along the first plan, equal to one process, never compiled twice."""

from __future__ import annotations

import gc
import inspect
import io
import logging
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import autopar
from autopar import Cluster
from autopar.along import at_batch
from autopar.capture import capture
from autopar.choosing.plan_training import plan_training
from autopar.compile import Parallel
from autopar.pins import Pins
from autopar.runtime.parameters import is_here
from autopar.runtime.pool import RankPool

WORDS, WIDTH, PAD, IGNORED = 61, 16, 0, -100
SHAPES = [(6, 8), (3, 8), (6, 9), (6, 8), (3, 8)]
PLANS = ["dp=2 tp=2 zero=3 microbatches=2", "pp=2 sp=2 microbatches=2"]


class Tagger(nn.Module):
    """Ids and labels ``[batch, positions]`` to a loss over the labels that count. Attention over what is no padding, a
    second way for rows of 9 and more, dropout, a buffer that counts all tokens."""

    def __init__(self, attends: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.attends, self.embed, self.places = attends, nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.long, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        batch, positions = ids.shape
        if self.training:
            self.tokens.add_((ids != PAD).sum())
        x = self.embed(ids) + self.places(torch.arange(positions, device=ids.device))
        if self.attends:
            q, k, v = (t.view(batch, positions, 4, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
            made = F.scaled_dot_product_attention(q, k, v, attn_mask=(ids != PAD)[:, None, None, :])
            x = x + self.out(made.transpose(1, 2).reshape(batch, positions, WIDTH))
        if positions >= 9:
            x = x + self.long(x)
        x = x + self.dropout(self.down(F.gelu(self.up(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def tagger(**options: Any) -> Tagger:
    torch.manual_seed(0)
    return Tagger(**options)


def batch(rows: int, positions: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(97 * rows + positions + seed)
    ids = torch.randint(1, WORDS, (rows, positions), generator=generator)
    lengths = torch.randint(positions // 2, positions + 1, (rows, 1), generator=generator)
    ids = ids.masked_fill(torch.arange(positions) >= lengths, PAD)
    return ids, ids.roll(1, 1).masked_fill(ids == PAD, IGNORED)


def planned(pins: str) -> Any:
    """The plan for the first shape."""
    sizes = Pins.parse(pins)
    ranks = (sizes.dp or 1) * (sizes.tp or 1) * (sizes.pp or 1) * sizes.sequence
    return plan_training(capture(tagger(), batch(*SHAPES[0]), check=False), sizes, Cluster.local(ranks=ranks), {}).plan


@pytest.fixture(scope="module")
def judge() -> Callable[[int, int], Any]:
    from stacked_judge import StackedJudge

    return cache(lambda *shape: StackedJudge(tagger(), batch(*shape), {}))


@pytest.mark.parametrize("pins", PLANS)
def test_plans_for_other_shapes_are_equal(pins: str, judge: Callable[[int, int], Any]) -> None:
    training = planned(pins)
    for shape in [(3, 8), (1, 7), (5, 9)]:
        plan = judge(*shape).along(training)
        assert plan.batch == shape[0] and plan.ranks == training.ranks
        idle = {training.axes[i].name for i in training.data} - {plan.axes[i].name for i in plan.data}
        assert not idle or shape[0] < 2, f"{shape}: {plan.one_line()} leaves rows whole"


def test_microbatches_are_as_many_as_have_rows_for_all_ranks() -> None:
    training = planned("dp=2 microbatches=3")
    assert [at_batch(training, rows).microbatches for rows in range(1, 9)] == [1, 1, 1, 2, 2, 3, 3, 3]
    assert at_batch(training, 7).axes[-1].size == 3 and len(at_batch(training, 3).axes) == 1


# what the ranks run


def compiled(pins: str, dropout: float = 0.0, **options: Any) -> Parallel:
    model = tagger(attends=False, dropout=dropout)
    return autopar.compile(model, Cluster.local(ranks=2), args=batch(*SHAPES[0]), pins=pins, **options)


def state(module: nn.Module) -> dict[str, Tensor]:
    """What of it is on this rank, whole."""
    here = {name: t for name, t in module.state_dict().items() if not isinstance(t, DTensor) or is_here(t)}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in here.items()}


def train(module: nn.Module, step: Callable[..., Tensor], clip: Callable[..., Tensor]) -> dict[str, Any]:
    """Steps in all shapes, two of them into one gradient."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses, norms = [], []
    for number, shape in enumerate(SHAPES):
        losses.append(step(*batch(*shape, seed=number)).detach())
        if number != 1:
            norms.append(clip(0.5).detach())
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
    return {"losses": losses, "norms": norms, "state": state(module)}


def trains(rank: int, pins: str) -> dict[str, Any]:
    parallel = compiled(pins)
    made = train(parallel, parallel.step, parallel.clip_grad_norm_)
    assert len(parallel._ready[True]) == len(set(SHAPES)), "a program for every shape, and no more"
    made["evaluated"] = parallel.eval()(*batch(3, 8))
    return made


def alternates(rank: int) -> list[Tensor]:
    """Steps in two shapes in turn compile nothing, make no groups and hold no more tensors; masks depend on the step
    and the place alone. Of many shapes the last ones are kept, and the first."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autopar").addHandler(handler)
    logging.getLogger("autopar").setLevel(logging.INFO)
    autopar.programs.MOST = 2
    parallel = compiled("dp=2", dropout=0.5)
    shapes, losses, tensors = [(6, 8), (3, 8)], [], list[int]()
    for number in range(6):
        losses.append(parallel.step(*batch(*shapes[number % 2])))
        parallel.zero_grad()
        gc.collect()
        tensors.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()))
    assert tensors[5] <= tensors[3] + 2, tensors  # the losses
    assert len(records) == (rank == 0) and all("ids [3, 8]" in line for line in records)
    parallel.steps = 1
    assert torch.equal(parallel.step(*batch(3, 8)), losses[1]) and not torch.equal(losses[0], losses[2])
    groups, first = len(dist.distributed_c10d._world.pg_map), parallel.plan
    parallel.step(*batch(2, 8))
    assert [ready.plan.batch for ready in parallel._ready[True]] == [6, 2] and parallel.plan is first
    assert len(dist.distributed_c10d._world.pg_map) == groups
    return losses


# a real loader


def source_lines() -> list[Tensor]:
    """Lines of the standard library's code as ids of their tokens, of many lengths."""
    lines: dict[int, list[int]] = {}
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(tokenize)).readline):
        if token.string.strip():
            lines.setdefault(token.start[0], []).append(1 + sum(map(ord, token.string)) % (WORDS - 1))
    return [torch.tensor(ids) for ids in lines.values() if 4 <= len(ids) <= 12][:19]


def padded(lines: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A batch, as long as a multiple of 6, so that there are few lengths."""
    longest = max(map(len, lines))
    lines[0] = F.pad(lines[0], (0, -(-longest // 6) * 6 - len(lines[0])), value=PAD)
    ids = nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=PAD)
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], PAD)], 1)
    return ids, labels.masked_fill(labels == PAD, IGNORED)


def loader() -> DataLoader[Any]:
    return DataLoader(source_lines(), batch_size=4, collate_fn=padded, drop_last=False)  # type: ignore[arg-type]


def epoch(module: nn.Module, step: Callable[..., Tensor]) -> dict[str, Any]:
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), []
    for rows in loader():
        losses.append(step(*rows).detach())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "state": state(module)}


def reads(rank: int, pins: str) -> dict[str, Any]:
    parallel = autopar.compile(tagger(), Cluster.local(ranks=2), args=next(iter(loader())), pins=pins)
    return epoch(parallel, parallel.step)


# the same in one process


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def reference(model: nn.Module) -> Callable[..., Tensor]:
    def step(*rows: Tensor) -> Tensor:
        loss: Tensor = model(*rows)
        loss.backward()
        return loss

    return step


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout=120) as made:
        yield made


def test_training_in_many_shapes_follows_one_process(pool: RankPool) -> None:
    model = tagger(attends=False)
    expected = train(model, reference(model), lambda most: nn.utils.clip_grad_norm_(model.parameters(), most))
    expected["evaluated"] = model.eval()(*batch(3, 8)).detach()
    seen = set[str]()
    for made in pool.run(trains, "pp=2 vp=2 microbatches=3"):
        seen |= set(made["state"])
        same(made, {**expected, "state": {name: expected["state"][name] for name in made["state"]}})
    assert seen == set(expected["state"])


def test_a_loader_with_padding_and_a_last_partial_batch(pool: RankPool) -> None:
    shapes = [tuple(rows[0].shape) for rows in loader()]
    assert len({length for _, length in shapes}) > 1 and shapes[-1][0] == 3, shapes
    model = tagger()
    expected = epoch(model, reference(model))
    for made in pool.run(reads, "dp=2 zero=3"):
        same(made, expected)


def test_programs_in_turn_hold_no_more_and_draw_by_the_step(pool: RankPool) -> None:
    one, other = pool.run(alternates)
    same(one, other)
