"""What is recorded of a step: actions, waits and bytes of all ranks, the trace of them, and the reported line."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import autopar
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.measure import Measured
from autopar.models import mlp
from autopar.plan import Plan, Predicted
from autopar.runtime.pool import RankPool
from autopar.runtime.timeline import Event

PINS = {"pp": 2, "microbatches": 4, "schedule": "zero_bubble"}
WIDTH, BATCH = 16, 8


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout=60, preload=["autopar.compile"]) as pool:
        yield pool


def compiled(**options: object) -> tuple[autopar.Parallel, tuple[torch.Tensor, ...]]:
    model, args, _ = mlp.make(inputs=WIDTH, width=WIDTH, layers=4, classes=4, batch=BATCH)
    return autopar.compile(model, Cluster.local(2), args=args, pins=PINS, **options), args


def measured(rank: int, folder: str) -> tuple[Measured, list[str], bool]:
    """The last of two measured steps, this rank's actions, and whether gradients are those of a step not measured."""
    parallel, args = compiled()
    with pytest.raises(AutoparError, match="save_trace: no step was measured"):
        parallel.save_trace("nowhere.json")
    parallel.step(*args)
    before = [p.grad.to_local().clone() for p in parallel.parameters() if p.grad is not None]
    with parallel.measure() as steps:
        for _ in range(2):
            parallel.zero_grad()
            parallel.step(*args)
    same = [p.grad.to_local().clone() for p in parallel.parameters() if p.grad is not None]
    parallel.step(*args)
    assert len(steps) == 2
    if rank == 0:
        parallel.save_trace(Path(folder) / "step.json")
    actions = [f"{letter}{chunk}.{m}" for letter, chunk, m in parallel.plan.orders()[rank]]
    return steps[-1], actions, len(before) > 0 and all(map(torch.equal, before, same))


def test_every_action_of_every_rank_is_recorded(pool: RankPool, tmp_path: Path) -> None:
    (step, first, same), (other, second, also) = pool.run(measured, str(tmp_path))
    assert same
    assert also
    assert step.events == other.events
    assert [[f"{e.action[0]}{e.action[1]}.{e.action[2]}" for e in own] for own in step.events] == [first, second]
    for own in step.events:
        times = [t for e in own for t in (e.begins - e.waited, e.begins, e.ends)]
        assert times == sorted(times)
        assert 0 < times[0] < times[-1] < step.seconds
    piece = 4 * WIDTH * BATCH // PINS["microbatches"]
    sent, received = ([sum(getattr(e, what) for e in own) for own in step.events] for what in ("sent", "received"))
    assert sent == received == [4 * piece, 4 * piece]
    assert all(e.received == piece * (e.action[0] == "F") for e in step.events[1])
    assert all(e.sent == piece * (e.action[0] == "I") for e in step.events[1])
    assert 0 < step.idle < 1
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    shown = [e["name"].split(",")[0] for e in events if e["ph"] == "X" and e["cat"] != "waits"]
    assert sorted(shown) == sorted(first + second)


def reported(rank: int) -> list[str]:
    """The lines of four steps."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autopar").addHandler(handler)
    try:
        parallel, args = compiled(report=True)
        for count in range(4):
            parallel.step(*args)
            lines += [str(count)]
    finally:
        logging.getLogger("autopar").removeHandler(handler)
    return lines


def test_the_third_step_is_reported_by_the_first_rank(pool: RankPool) -> None:
    lines, others = pool.run(reported)
    assert others == ["0", "1", "2", "3"]
    line = lines.pop(2)
    assert lines == others
    assert re.fullmatch(
        r"predicted \S+ s, measured \S+ s a step without the optimizer \(bubble \d+% predicted, \d+% measured\); "
        r"peak \S+ GiB predicted",
        line,
    ), line


def test_one_rank_is_measured_too() -> None:
    model, args, _ = mlp.make(inputs=WIDTH, width=WIDTH, layers=2, classes=4, batch=BATCH)
    parallel = autopar.compile(model, Cluster.local(1), args=args, pins={"microbatches": 2})
    with parallel.measure() as steps:
        parallel.step(*args)
    assert [e.action for e in steps[0].events[0]] == [("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)]
    assert "bubble" not in steps[0].text()


def test_the_bubble_is_what_ranks_do_not_compute() -> None:
    event = Event(("F", 0, 0), 1.0, 2.0, 0.5, 0, 0)
    step = Measured(_plan(), ((event,), (event, event._replace(begins=2.0, ends=4.0))), 4.0, 2**30)
    assert step.idle == 0.5
    assert step.text() == (
        "predicted 2 s, measured 4 s a step without the optimizer (bubble 25% predicted, 50% measured); "
        "peak 0.5 GiB predicted, 1 GiB measured"
    )


def _plan() -> Plan:
    from types import SimpleNamespace

    parts = {"bubble_s": 0.3, "send_s": 0.2, "optimizer_s": 0.5}
    return SimpleNamespace(pp=2, predicted=Predicted(step_time_s=2.5, peak_mem_gib=0.5, parts=parts))  # type: ignore[return-value]
