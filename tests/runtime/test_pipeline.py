"""The executor of a pipeline's schedule, all ranks in one process: numbers, bits, buffers, errors."""

from __future__ import annotations

import pytest
from exact.schedules import judge
from stage_graphs import F64, Graph, Outcome, run_in_threads, wrong

from autopar.runtime.mesh import RankError
from autopar.runtime.pipeline import Action, Crossing, Message, Pipeline
from autopar.runtime.queues import Hub
from autopar.solver.simulate import schedule


def chain(ranks: int, microbatches: int, chunks: int = 1) -> Graph:
    stages = ranks * chunks
    crossings = tuple(Crossing(i, i, (i + 1,), True) for i in range(stages - 1))
    return Graph(ranks, chunks, microbatches, crossings, dict.fromkeys(range(stages), ((1, 3), F64)), frozenset())


def run(graph: Graph, actions: list[list[Action]]) -> Outcome:
    outcome = run_in_threads(graph, actions)
    assert not wrong(graph, outcome)
    return outcome


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_graphs_and_schedules_do_as_the_check_says(first: int) -> None:
    """A slice of ``make exact-schedules``."""
    judged = [(seed, *judge(seed)) for seed in range(first, first + 20)]
    assert not [j for j in judged if j[2]]
    assert {"runs", "deadlocks"} == {predicted for _, predicted, _ in judged}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-2p"])
def test_named_schedules_give_the_gradients_of_the_composed_function(name: str) -> None:
    chunks = 2 if name == "interleaved" else 1
    for ranks, microbatches in ((1, 1), (3, 5), (4, 3)):
        run(chain(ranks, microbatches, chunks), schedule(name, ranks, microbatches, chunks))


def test_buffers_do_not_grow_with_microbatches() -> None:
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)):
        few, many = (run(chain(4, m, chunks), schedule(name, 4, m, chunks)).buffers for m in (4, 32))
        assert max(many) <= max(few) + 1 <= 4, (name, few, many)


def test_a_rank_gets_a_value_once_and_keeps_it_for_all_that_read_it() -> None:
    graph = Graph(2, 2, 2, (Crossing(7, 0, (1, 2, 3), True),), {7: ((2,), F64)}, frozenset({(7, 3)}))
    actions = schedule("interleaved", 2, 2, 2)
    pipeline = Pipeline(actions, graph.crossings, Hub(2).transport(1), graph.spec)
    assert pipeline.sent(0, ("F", 0, 1)) == [Message(7, 1, 0, 1, False)]
    assert pipeline.needed(("F", 0, 1)) == pipeline.needed(("F", 1, 1)) == [Message(7, 1, 0, 1, False)]
    assert pipeline.sent(1, ("B", 1, 0)) == [Message(7, 0, 0, 3, True)]
    assert run(graph, actions).buffers[1] <= 2


def test_receives_are_posted_in_the_order_of_the_sends() -> None:
    """Stage 1 sends for stage 4 long before it is read there, and other values after it."""
    crossings = (Crossing(0, 0, (1,), True), Crossing(1, 0, (3,), True), Crossing(2, 1, (2,), True))
    crossings += (Crossing(3, 2, (3,), True), Crossing(4, 0, (1,), False))
    graph = Graph(2, 2, 4, crossings, {n: ((1, 1 + n), F64) for n in range(5)}, frozenset())
    run(graph, schedule("interleaved", 2, 4, 2))
    by_chunk: list[Action] = [("F", c, m) for c in (0, 1) for m in range(4)]
    run(graph, [by_chunk + [("B", c, m) for c in (1, 0) for m in range(4)]] * 2)


def test_an_error_in_a_chunk_is_raised_there_and_named_elsewhere() -> None:
    twice: list[Action] = [("F", 0, 0), ("B", 0, 0), ("B", 0, 0)]
    outcome = run_in_threads(chain(3, 1), [twice[:2], twice[:2], twice])
    assert outcome.errors[2] == "KeyError: 0"
    assert set(outcome.errors[:2]) <= {"", "RankError: rank 2 failed with KeyError: 0"}


def test_what_is_never_sent_is_said() -> None:
    outcome = run_in_threads(chain(2, 1), [[], [("F", 0, 0), ("B", 0, 0)]])
    assert outcome.errors[1] == (
        "AutoparError: schedule: no rank sends microbatch 0's value 0 from stage 0 to stage 1. Check the schedule."
    )


def test_a_wait_has_an_end() -> None:
    """Rank 0 computes for ever, as far as rank 1 can see."""
    hub = Hub(2, timeout=0.2)
    message = Message(5, 2, 0, 1, False)
    with pytest.raises(RankError, match="rank 1: waited 0.2 s for microbatch 2's value 5 from stage 0 to stage 1"):
        hub.transport(1).receive(message, ((3,), F64)).wait()
