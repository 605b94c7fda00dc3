"""The static check of a schedule: what it passes, what it counts, and the line that names what cannot be run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from autopar.errors import AutoparError
from autopar.solver.simulate import in_flight, schedule
from autopar.solver.simulate.check import InFlight, check_schedule, schedule_from_words, words_of


@dataclass(frozen=True)
class Crossing:
    number: int
    source: int
    targets: tuple[int, ...]
    grad: bool = True


def words(*rows: str) -> list[list[str]]:
    return [row.split() for row in rows]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"])
def test_every_named_schedule_can_be_run(name: str) -> None:
    for chunks in (2, 3) if name == "interleaved" else (1,):
        for ranks in range(1, 7):
            for microbatches in range(1, 13):
                actions = schedule(name, ranks, microbatches, chunks)
                held = check_schedule(actions)
                assert held.ranks == tuple(in_flight(rank) for rank in actions)
                assert len(held.stages) == ranks * chunks
                assert schedule_from_words(words_of(actions)) == actions


def test_what_is_in_flight() -> None:
    assert check_schedule(schedule("gpipe", 3, 8)) == InFlight((8, 8, 8), (8, 8, 8))
    assert check_schedule(schedule("1f1b", 3, 8)) == InFlight((3, 2, 1), (3, 2, 1))
    assert check_schedule(schedule("zb-h1", 3, 8)) == InFlight((3, 3, 3), (3, 3, 3))
    assert check_schedule(schedule("interleaved", 2, 4, 2)) == InFlight((5, 3), (4, 3, 2, 1))
    forwards = [[a for a in rank if a[0] == "F"] for rank in schedule("1f1b", 3, 8)]
    assert check_schedule(forwards, train=False) == InFlight((8, 8, 8), (8, 8, 8))


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (("F0.0 F0.0 B0.0",), "schedule: rank 0 runs F0.0 twice. Name each action once."),
        (
            ("F0.0 B0.0", "F0.0 I0.0"),
            "schedule: rank 1 runs F then I of chunk 0, microbatch 0. Every rank runs F and B, or F, I and W, of each ",
        ),
        (("F0.0 B0.0 F0.1 B0.1", "F0.0 B0.0"), "schedule: rank 1 runs nothing of chunk 0, microbatch 1."),
        (("F0.0 W0.0 I0.0",), "schedule: rank 0 runs F then W then I of chunk 0, microbatch 0."),
        (("B0.0 F0.0",), "schedule: rank 0 runs B then F of chunk 0, microbatch 0."),
        (("F0.0 B0.0 I0.0 W0.0",), "schedule: rank 0 runs F then B then I then W of chunk 0, microbatch 0."),
        (
            ("F0.0 B0.0 F0.1 B0.1", "F0.1 F0.0 B0.0 B0.1"),
            "schedule: rank 0 waits for ever to run B0.0 (stage 0): it needs B0.0 of stage 1, which rank 1 has not run",
        ),
        (
            ("F1.0 F0.0 B1.0 B0.0",),
            "schedule: rank 0 waits for ever to run F1.0 (stage 1): it needs F0.0 of stage 0, which comes later on the",
        ),
    ],
)
def test_what_cannot_be_run_is_named(rows: tuple[str, ...], line: str) -> None:
    with pytest.raises(AutoparError) as raised:
        check_schedule(schedule_from_words(words(*rows)))
    assert str(raised.value).startswith(line)


def test_stages_wait_for_all_that_they_read_and_for_nothing_else() -> None:
    apart = schedule_from_words(words("F0.0 B0.0 F0.1 B0.1", "F0.1 F0.0 B0.0 B0.1"))
    assert check_schedule(apart, []) == InFlight((1, 2), (1, 2))
    assert check_schedule(apart, [Crossing(0, 0, (1,), grad=False)]) == InFlight((1, 2), (1, 2))
    with pytest.raises(AutoparError, match="rank 0 waits for ever to run B0.0"):
        check_schedule(apart, [Crossing(0, 0, (1,))])
    early = schedule_from_words(words("F0.0 B0.0", "F0.0 B0.0", "F0.0 B0.0"))
    assert check_schedule(early, [Crossing(0, 0, (1, 2)), Crossing(1, 1, (2,))]).ranks == (1, 1, 1)
    with pytest.raises(AutoparError, match="a value crosses from stage 2 to 3, and the schedule has 3 stages"):
        check_schedule(early, [Crossing(0, 2, (3,))])


@pytest.mark.parametrize("word", ["G0.1", "F0", "F0.1.2", "F-1.0", " F0.0", 7, None])
def test_a_word_that_is_none_is_named(word: object) -> None:
    with pytest.raises(AutoparError, match="of rank 1 is not known. Write F, B, I or W, then chunk.microbatch"):
        schedule_from_words([["F0.0"], [word]])  # type: ignore[list-item]
