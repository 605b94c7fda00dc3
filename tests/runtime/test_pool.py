"""The rank pool: many runs, errors that name the rank, dead and hung ranks."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime.pool import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3, timeout=60) as pool:
        yield pool


def all_sum(rank: int, x: float) -> torch.Tensor:
    value = torch.tensor([x * (rank + 1)])
    dist.all_reduce(value)
    return value


def process_and_threads(rank: int) -> tuple[int, int, int]:
    return os.getpid(), torch.get_num_threads(), dist.get_world_size()


def raise_on(rank: int, guilty: int, wait: bool) -> int:
    if rank == guilty:
        raise ValueError(f"a bad value {rank}")
    if wait:
        dist.barrier()
    return rank


def refuse(rank: int) -> None:
    raise AutoparError("pins: tp=3 does not divide 4 ranks (3 x 1). Give tp=2.")


def die_on(rank: int, guilty: int) -> None:
    if rank == guilty:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave_on(rank: int, guilty: int) -> None:
    if rank == guilty:
        os._exit(7)
    time.sleep(60)


def hang_on(rank: int, guilty: int) -> None:
    while rank == guilty:
        time.sleep(0.1)
    dist.barrier()


def local_result(rank: int) -> object:
    return lambda: rank


def nothing(rank: int) -> None:
    return None


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_by_rank(pool: RankPool) -> None:
    assert [t.item() for t in pool.run(all_sum, 2.0)] == [12.0] * 3
    assert pool.run(math.pow, 2.0) == [0.0, 1.0, 4.0]
    assert pool.run(nothing) == [None, None, None]


def test_an_interrupted_run_leaves_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with RankPool(2) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_receive", interrupt)
            with pytest.raises(KeyboardInterrupt):
                pool.run(math.pow, 2.0)
        assert pool.run(nothing) == [None, None]


def test_ranks_are_kept_and_have_one_thread(pool: RankPool) -> None:
    first = pool.run(process_and_threads)
    assert first == pool.run(process_and_threads)
    assert len({pid for pid, _, _ in first} | {os.getpid()}) == 4
    assert {(threads, size) for _, threads, size in first} == {(1, 3)}


@pytest.mark.parametrize("wait", [False, True])
def test_an_exception_names_its_rank(pool: RankPool, wait: bool) -> None:
    with pytest.raises(ValueError, match="a bad value 1") as caught:
        pool.run(raise_on, 1, wait)
    assert "rank 1" in caught.value.__notes__[0]
    assert "raise_on" in caught.value.__notes__[0]
    assert len(pool.run(all_sum, 1.0)) == 3


def test_ranks_that_refuse_alike_live_on(pool: RankPool) -> None:
    before = pool.run(process_and_threads)
    with pytest.raises(AutoparError, match=r"^pins: tp=3 does not divide"):
        pool.run(refuse)
    assert pool.run(process_and_threads) == before


def test_a_result_that_cannot_be_sent_is_an_error(pool: RankPool) -> None:
    with pytest.raises(TypeError, match="the result cannot be pickled"):
        pool.run(local_result)


def test_a_dead_rank_is_named_and_the_others_end(pool: RankPool) -> None:
    pids = [pid for pid, _, _ in pool.run(process_and_threads)]
    started = time.monotonic()
    with pytest.raises(AutoparError, match=r"pool: rank 2 was ended by SIGKILL during die_on"):
        pool.run(die_on, 2)
    assert time.monotonic() - started < 20  # far from the timeout, also where tests share the cores
    assert not any(map(alive, pids))
    with pytest.raises(AutoparError, match="pool: rank 0 ended with exit code 7"):
        pool.run(leave_on, 0)


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_hung_rank_is_named_within_the_timeout(guilty: int) -> None:
    with RankPool(2, timeout=6) as pool:
        pids = [pid for pid, _, _ in pool.run(process_and_threads)]
        started = time.monotonic()
        with pytest.raises(AutoparError, match=rf"rank {guilty} did not answer hang_on within 6 s .*test_pool.py:\d+"):
            pool.run(hang_on, guilty)
        assert time.monotonic() - started < 10
        assert not any(map(alive, pids))


def test_hung_without_a_collective_error() -> None:
    """The pool's own clock ends first: the ranks that wait in a collective are not blamed."""
    with RankPool(2, timeout=6) as pool:
        pool.run(nothing)  # this file is imported
        with pytest.raises(AutoparError, match=r"pool: rank 1 did not answer late_barrier"):
            pool.run(late_barrier, 1)


def late_barrier(rank: int, guilty: int) -> None:
    time.sleep(3)
    hang_on(rank, guilty)


def test_nonsense_is_refused() -> None:
    with pytest.raises(AutoparError, match="0 ranks"):
        RankPool(0)
