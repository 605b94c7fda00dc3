"""In which order every rank of a pipeline runs its microbatches: by the name of a schedule, or as a user lists it.

A user's own order is a JSON file, for each rank of the pipeline a list of words ``"F0.2"``: a letter (F forward, B
backward, or parted I input and W weight gradients), the chunk of that rank, and the microbatch.

>>> ["".join(f"{letter}{m} " for letter, _, m in rank) for rank in actions("1f1b", ranks=2, microbatches=2)]
['F0 F1 B0 B1 ', 'F0 B0 F1 B1 ']
>>> actions("custom", ranks=1, microbatches=1, words=[["F0.0", "B0.0"]])
[[('F', 0, 0), ('B', 0, 0)]]
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import AutoparError
from autopar.schema import read_file
from autopar.solver.pipes import IN_SIMULATOR
from autopar.solver.simulate.actions import Schedule
from autopar.solver.simulate.check import check_schedule, schedule_from_words
from autopar.solver.simulate.schedules import schedule

Words = tuple[tuple[str, ...], ...]
FORM = 'a JSON list of one list a pipeline rank, of words as "F0.2" (F, B, I or W; chunk; microbatch)'


def actions(
    name: str, ranks: int, microbatches: int, virtual: int = 1, words: Sequence[Sequence[str]] = ()
) -> Schedule:
    """Each rank's actions, in order. ``name``: of `autopar.plan.Schedule`; ``words``: the order itself, where it is a
    user's own."""
    if words:
        return schedule_from_words(words)
    if name == "accumulate":
        return [[(letter, 0, m) for m in range(microbatches) for letter in "FB"]]
    return schedule(IN_SIMULATOR.get(name, name), ranks, microbatches, virtual)


def read_words(path: str) -> Words:
    """The words in a user's own file. Raises AutoparError where it is none; whether the order can run is not asked."""
    data = read_file(path, who="schedule")
    if not isinstance(data, list) or not data or not all(isinstance(rank, list) and rank for rank in data):
        raise AutoparError(f"schedule {path}: is no order of a pipeline. Legal: {FORM}.")
    schedule_from_words(data)
    return tuple(tuple(rank) for rank in data)


def size_of(words: Sequence[Sequence[str]]) -> tuple[int, int]:
    """(chunks of a rank, microbatches) of a user's own order."""
    found = [action for rank in schedule_from_words(words) for action in rank]
    return 1 + max(chunk for _, chunk, _ in found), 1 + max(microbatch for _, _, microbatch in found)


def forwards_first(name: str, words: Sequence[Sequence[str]] = ()) -> bool:
    """Whether every rank runs all its forwards before its first backward, however many microbatches there are.

    >>> forwards_first("gpipe"), forwards_first("1f1b"), forwards_first("custom", [["F0.0", "F0.1", "B0.0", "B0.1"]])
    (True, False, True)
    """
    orders = ["".join(letter for letter, _, _ in rank) for rank in schedule_from_words(words)] if words else []
    return name == "gpipe" or (bool(orders) and all("F" not in rank.lstrip("F") for rank in orders))


def check_order(orders: Schedule, ranks: int, microbatches: int, virtual: int) -> None:
    """Raises AutoparError, naming rank and action, where an order is for another pipeline, misses or repeats an action,
    or gets stuck."""
    has = (
        len(orders),
        1 + max(m for rank in orders for _, _, m in rank),
        1 + max(chunk for rank in orders for _, chunk, _ in rank),
    )
    for found, wanted, what in zip(
        has, (ranks, microbatches, virtual), ("ranks", "microbatches", "chunks a rank"), strict=True
    ):
        if found != wanted:
            raise AutoparError(f"schedule: the order has {found} {what}, the plan {wanted}. Write the plan's.")
    check_schedule(orders)
