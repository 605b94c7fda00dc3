"""Messages between real ranks: what arrives, and which one line ends all ranks when one of them does not go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import AutoparError
from autopar.passes.layout import Axis, Mesh
from autopar.runtime import pool as pools
from autopar.runtime.mesh import connect
from autopar.runtime.pipeline import Action, Crossing, Message, Pipeline, Spec
from autopar.runtime.pool import RankPool
from autopar.runtime.transport import TorchTransport

F64 = torch.float64
TIMEOUT = 2.0  # seconds of each wait
GPIPE: list[Action] = [(letter, 0, m) for letter in "FB" for m in range(3)]


class Layer:
    """A toy stage: a chain that multiplies by its weight; the last one's loss is the sum of what it makes."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.stages, self.weight = stage, stages, 1.0 + stage
        self.gradient, self.saved = 0.0, {}

    def forward(self, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        x = received.get(self.stage - 1, torch.full((3,), 1.0 + microbatch, dtype=F64))
        self.saved[microbatch] = x
        return {self.stage: self.weight * x} if self.stage < self.stages - 1 else {}

    def backward(self, microbatch: int, gradients: dict[int, torch.Tensor], part: str, last: bool) -> dict[int, Any]:
        dy = gradients.get(self.stage, torch.ones(3, dtype=F64))
        self.gradient += float((dy * self.saved.pop(microbatch)).sum())
        return {self.stage - 1: self.weight * dy} if self.stage else {}


def spec(number: int, microbatch: int) -> Spec:
    return (3,), F64


def chain(stages: int) -> list[Crossing]:
    return [Crossing(i, i, (i + 1,), True) for i in range(stages - 1)]


def transport(stages: int = 4, *axes: Axis) -> TorchTransport:
    return TorchTransport(connect(Mesh(axes), timedelta(seconds=TIMEOUT), stages))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout=30, preload=["autopar.runtime.transport"]) as pool:
        yield pool


# -- what arrives


def every_kind(rank: int) -> list[str]:
    """Two columns of two stages: tensors of many kinds go there, and back as they came."""
    line = transport(2, Axis("dp", 2))
    line.open([(0, 1), (1, 0)], 2)
    base = torch.arange(24, dtype=F64).reshape(4, 6) + 100 * (rank % 2)
    kinds = [
        base,
        base.t(),
        base[:, ::2],
        base[0, 0],
        base[:0],
        base > 110,
        base.long(),
        base.to(torch.bfloat16),
        base.to(torch.complex64),
        base.clone().requires_grad_(),
    ]
    wrong = []
    for m in range(2):
        there = [Message(i, m, 0, 1, False) for i in range(len(kinds))]
        back = [message._replace(gradient=True) for message in there]
        posted = (
            [line.receive(message, (tuple(t.shape), t.dtype)) for message, t in zip(there, kinds)] if rank > 1 else []
        )
        came = [post.wait() for post in posted] if rank > 1 else kinds
        for message, tensor in zip(back if rank > 1 else there, came):
            line.send(message, tensor)
        if rank < 2:
            came = [line.receive(message, (tuple(t.shape), t.dtype)).wait() for message, t in zip(back, kinds)]
        line.drain()
        wrong += [f"{a} {b}" for a, b in zip(came, kinds) if a.dtype != b.dtype or not torch.equal(a, b.detach())]
    return wrong


def test_tensors_of_every_kind_arrive_as_they_left(pool: RankPool) -> None:
    assert pool.run(every_kind) == [[]] * 4


def trained(rank: int, steps: int) -> list[float]:
    layer = Layer(rank, 4)
    pipeline = Pipeline([GPIPE] * 4, chain(4), transport(), spec)
    made = []
    for _ in range(steps):
        pipeline.run([layer])
        made.append(layer.gradient)
    return made


def test_a_chain_trains_step_after_step(pool: RankPool) -> None:
    weights = [1.0, 2.0, 3.0, 4.0]
    product = 24.0 * 3 * (1 + 2 + 3)
    assert pool.run(trained, 3) == [[k * product / w for k in (1, 2, 3)] for w in weights]


# -- what ends all ranks


def outcome(rank: int, folder: str, what: str) -> tuple[float, str]:
    """Seconds and the line with which this rank ends."""
    begun = time.monotonic()
    line = transport()
    specs, actions, layer = spec, [GPIPE] * 4, Layer(rank, 4)
    if rank == 2 and what == "shapes":
        specs = lambda number, m: ((4,), F64)
    if what == "deadlock":
        actions = [*actions[:3], [(letter, 0, m) for m in (2, 1, 0) for letter in "FB"]]
        actions[1] = [("F", 0, 0), ("B", 0, 0), *(a for a in GPIPE if a[2])]
    if rank == 2 and what in ("raise", "size", "SIGKILL", "SIGSTOP"):
        layer.forward = partial(fail, layer.forward, what)  # type: ignore[method-assign]
    (Path(folder) / f"{rank}.pid").write_text(str(os.getpid()))
    try:
        Pipeline(actions, chain(4), line, specs).run([layer])
        text = "no error"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    if what == "SIGSTOP" and rank == 3:
        os.kill(int((Path(folder) / "2.pid").read_text()), signal.SIGCONT)
    (Path(folder) / f"{rank}.txt").write_text(text)
    return time.monotonic() - begun, text


def fail(forward: Any, what: str, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    if microbatch == 1 and what == "raise":
        raise ValueError("of no use")
    if microbatch == 1 and what == "size":
        return {2: torch.zeros(4, dtype=F64)}
    if microbatch == 1:
        os.kill(os.getpid(), getattr(signal, what))
    return forward(microbatch, received)


def test_an_error_ends_every_rank_with_its_line(pool: RankPool, tmp_path: Path) -> None:
    outcomes = pool.run(outcome, str(tmp_path), "raise")
    lines = [text for _, text in outcomes]
    assert lines.pop(2) == "ValueError: of no use"
    assert lines == ["RankError: rank 2 failed with ValueError: of no use"] * 3
    assert max(seconds for seconds, _ in outcomes) < TIMEOUT


def test_a_wrong_shape_ends_every_rank(pool: RankPool, tmp_path: Path) -> None:
    lines = [text for _, text in pool.run(outcome, str(tmp_path), "size")]
    own = (
        "AutoparError: pipeline: the forward of stage 2 made torch.float64 (4,) for value 2 of microbatch 1, and the "
        "ranks expect torch.float64 (3,). Compile again for these inputs."
    )
    assert lines.pop(2) == own
    assert all(line.startswith("RankError: rank 2 failed with AutoparError: pipeline: the forward") for line in lines)


def test_ranks_that_expect_other_shapes_say_so_before_the_first_step(pool: RankPool, tmp_path: Path) -> None:
    line = (
        "AutoparError: pipeline: ranks 0 and 2 of the pipeline differ in the shapes of what crosses. "
        "Compile the same model with the same plan on every rank."
    )
    assert [text for _, text in pool.run(outcome, str(tmp_path), "shapes")] == [line] * 4


def test_a_deadlock_is_named(pool: RankPool, tmp_path: Path) -> None:
    lines = [text for _, text in pool.run(outcome, str(tmp_path), "deadlock")]
    assert len(set(lines)) == 1
    assert lines[0].startswith("RankError: rank ")
    assert lines[0].endswith(": a deadlock. Check the schedule.")


def test_a_rank_that_is_stopped_is_named(pool: RankPool, tmp_path: Path) -> None:
    outcomes = pool.run(outcome, str(tmp_path), "SIGSTOP")
    lines = {text for _, text in outcomes}
    assert len(lines) == 1
    assert "rank 2, which neither waits" in lines.pop().replace("rank 2 (stage 2)", "rank 2")
    assert max(seconds for seconds, _ in outcomes) < 3 * TIMEOUT


def test_a_rank_that_is_killed_ends_the_others_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "GRACE", 2 * TIMEOUT)
    with RankPool(4, timeout=30) as own, pytest.raises(AutoparError, match="pool: rank 2 was ended by SIGKILL"):
        own.run(outcome, str(tmp_path), "SIGKILL")
    lines = {(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1, 3)}
    assert len(lines) == 1
    assert "rank 2 (stage 2), and the connection was lost" in lines.pop()
