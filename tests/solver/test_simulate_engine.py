"""The simulation of tasks on streams, against timelines worked out by hand."""

import json

import pytest

from autopar.errors import AutoparError
from autopar.solver.simulate import Task, simulate


def task(stream: str, seconds: float, *after: int, rank: int = 0, kind: str = "", **more) -> Task:
    return Task(rank, stream, seconds, after, kind=kind or stream, **more)


def test_a_stream_runs_in_order_and_waits_for_others():
    line = simulate(
        [
            task("compute", 2.0),
            task("data", 5.0, 0),
            task("compute", 1.0),  # beside the second
            task("compute", 1.0, 1),  # waits for it
            task("compute", 1.0, 1, rank=1),
        ]
    )
    assert line.start.tolist() == [0.0, 2.0, 2.0, 7.0, 7.0]
    assert line.end.tolist() == [2.0, 7.0, 3.0, 8.0, 8.0]
    assert (line.seconds, line.ranks) == (8.0, 2)


def test_a_task_that_waits_for_a_later_one_is_refused():
    with pytest.raises(AutoparError, match=r"task 0 \(early\): waits for task 1, which is not before it"):
        simulate([Task(0, "compute", 1.0, (1,), "early"), Task(0, "data", 1.0)])


def test_nothing_takes_no_time():
    line = simulate([], [(("weights", 5.0),)])
    assert (line.seconds, line.bubble, line.parts(0), line.peak(0).nbytes) == (0.0, 0.0, {"bubble": 0.0}, 5.0)


def test_time_goes_to_what_keeps_computation_waiting():
    """Compute 0-2 and 9-10; gather 1-5, reduce 3-7: of 7 idle seconds 3 are the gather's, 2 the reduction's."""
    line = simulate(
        [
            task("compute", 1.0, kind="forward"),
            task("gather", 4.0, 0),
            task("compute", 1.0, 0, kind="forward"),
            task("lag", 1.0, 2, kind="reduce", rank=1),
            task("reduce", 4.0, 3),
            task("lag", 2.0, 4, kind="other", rank=1),
            task("compute", 1.0, 1, 5, kind="backward"),
        ]
    )
    assert line.seconds == 10.0
    assert line.parts(0) == {"forward": 2.0, "backward": 1.0, "gather": 3.0, "reduce": 2.0, "bubble": 2.0}
    assert line.busy(0) == {"forward": 2.0, "gather": 4.0, "reduce": 4.0, "backward": 1.0}
    assert line.parts(1) == {"reduce": 1.0, "other": 2.0, "bubble": 7.0}
    assert line.bubble == (2.0 + 7.0) / 2 / 10.0
    assert sum(line.mean_parts().values()) == 10.0


def test_what_is_inside_a_task_counts_as_its_own_kind():
    line = simulate([task("compute", 3.0, kind="forward", inside=(("tp", 0.5), ("p2p", 0.25)))])
    assert line.parts(0) == {"tp": 0.5, "p2p": 0.25, "forward": 2.25, "bubble": 0.0}


def test_staggered_steps_take_as_long_as_their_busiest_rank():
    """Ranks are at it from 0 to 5 and from 3 to 9: the next step of the first may begin at 6."""
    tasks = [task("compute", 3.0), task("compute", 6.0, 0, rank=1), task("compute", 2.0)]
    assert simulate(tasks).seconds == 9.0
    line = simulate(tasks, staggered=True)
    assert (line.seconds, line.window(0), line.window(1)) == (6.0, (0.0, 5.0), (3.0, 9.0))
    assert line.parts(0) == {"compute": 5.0, "bubble": 1.0}


def held(owner: str, nbytes: float) -> dict[str, tuple[tuple[str, float], ...]]:
    return {"allocates": ((owner, nbytes),)}


def test_memory_frees_before_it_allocates_and_names_its_owners():
    line = simulate(
        [
            task("compute", 1.0, allocates=(("saved", 10.0), ("work", 4.0)), frees=(("work", 4.0),)),
            task("compute", 1.0, allocates=(("work", 6.0),), frees=(("work", 6.0), ("saved", 10.0))),
            task("compute", 1.0, **held("rest", 15.0)),
        ],
        [(("weights", 100.0),)],
    )
    peak = line.peak(0)
    assert (peak.nbytes, peak.seconds) == (116.0, 1.0)
    assert peak.owners == {"weights": 100.0, "saved": 10.0, "work": 6.0}
    times, nbytes = line.memory(0)
    assert times.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert nbytes.tolist() == [100.0, 110.0, 114.0, 110.0, 116.0, 110.0, 100.0, 115.0]


def test_memory_of_a_task_without_duration_counts():
    line = simulate([task("compute", 0.0, allocates=(("work", 7.0),), frees=(("work", 7.0),))])
    assert line.peak(0).nbytes == 7.0
    assert line.memory(0)[1].tolist() == [0.0, 7.0, 0.0]


def test_the_worst_rank_is_the_one_that_holds_most():
    line = simulate([task("compute", 1.0, **held("a", 1.0)), task("compute", 1.0, rank=1, **held("a", 2.0))])
    rank, peak = line.worst
    assert (rank, peak.owners) == (1, {"a": 2.0})


def test_a_trace_shows_every_task_and_the_bytes(tmp_path):
    line = simulate(
        [
            task("compute", 1.0, label="F0", kind="forward", **held("saved", 8.0)),
            task("data", 0.5, 0, kind="reduce", rank=1),
        ],
        [(), (("weights", 3.0),)],
    )
    file = tmp_path / "trace.json"
    line.trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    shown = [(e["name"], e["pid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert shown == [("F0", 0, 0.0, 1e6), ("reduce", 1, 1e6, 0.5e6)]
    assert [(e["pid"], e["args"]["held"]) for e in events if e["ph"] == "C"] == [(0, 0.0), (0, 8.0), (1, 3.0)]
    named = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert named == {(0, "compute"), (1, "data"), (0, "stage 0"), (1, "stage 1")}
    with pytest.raises(AutoparError, match="--trace: cannot write"):
        line.trace(str(tmp_path / "no" / "trace.json"))


def test_a_chain_over_many_ranks():
    tasks = [Task(i % 16, "compute", 1.0, (i - 1,) if i else (), "", "forward") for i in range(60_000)]
    line = simulate(tasks)
    assert line.seconds == 60_000
