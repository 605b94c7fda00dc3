"""In which order every rank of a pipeline runs its microbatches: by the name of a schedule, or as a user lists it.

A user's own order is a JSON file, for each rank of the pipeline a list of words ``"F0.2"``: a letter (F forward, B
backward, or parted I input and W weight gradients), the chunk of that rank, and the microbatch.

>>> ["".join(f"{letter}{m} " for letter, _, m in rank) for rank in actions("1f1b", ranks=2, microbatches=2)]
['F0 F1 B0 B1 ', 'F0 B0 F1 B1 ']
>>> word(("F", 0, 2)), action("W1.0")
('F0.2', ('W', 1, 0))
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import product

from autopar.errors import AutoparError
from autopar.schema import read_file
from autopar.solver.simulate.actions import Action, Schedule, in_order
from autopar.solver.simulate.schedules import schedule

Words = tuple[tuple[str, ...], ...]
WORD = re.compile(r"([FBIW])(\d{1,6})\.(\d{1,6})")
IN_SIMULATOR = {"zero_bubble": "zb-h1"}
"""What the simulator calls a schedule, where that is another name."""
FORM = 'a JSON list of one list a pipeline rank, of words as "F0.2" (F, B, I or W; chunk; microbatch)'


def actions(
    name: str, ranks: int, microbatches: int, virtual: int = 1, words: Sequence[Sequence[str]] = ()
) -> Schedule:
    """Each rank's actions, in order. ``name``: of `autopar.plan.Schedule`; ``words``: the order itself, where it is a
    user's own."""
    if words:
        return [[action(text) for text in rank] for rank in words]
    if name == "accumulate":
        return [[(letter, 0, m) for m in range(microbatches) for letter in "FB"]]
    return schedule(IN_SIMULATOR.get(name, name), ranks, microbatches, virtual)


def action(text: str) -> Action:
    """The action that a word stands for. Raises AutoparError where it is none."""
    match = WORD.fullmatch(text)
    if match is None:
        raise AutoparError(f"schedule: {text!r} is no action. Legal: {FORM}.")
    return match[1], int(match[2]), int(match[3])


def word(of: Action) -> str:
    """The word of an action."""
    letter, chunk, microbatch = of
    return f"{letter}{chunk}.{microbatch}"


def read_words(path: str) -> Words:
    """The words in a user's own file. Raises AutoparError where it is none; whether the order can run is not asked."""
    data = read_file(path, who="schedule")
    if not isinstance(data, list) or not data or not all(isinstance(rank, list) and rank for rank in data):
        raise AutoparError(f"schedule {path}: is no order of a pipeline. Legal: {FORM}.")
    for rank in data:
        for text in rank:
            if not isinstance(text, str) or WORD.fullmatch(text) is None:
                raise AutoparError(f"schedule {path}: {text!r} is no action. Legal: {FORM}.")
    return tuple(tuple(rank) for rank in data)


def size_of(words: Sequence[Sequence[str]]) -> tuple[int, int]:
    """(chunks of a rank, microbatches) of a user's own order."""
    found = [action(text) for rank in words for text in rank]
    return 1 + max(chunk for _, chunk, _ in found), 1 + max(microbatch for _, _, microbatch in found)


def check_order(orders: Schedule, ranks: int, microbatches: int, virtual: int) -> None:
    """Raises AutoparError, naming rank and action, where an order misses or repeats an action, or gets stuck."""
    if len(orders) != ranks:
        raise AutoparError(f"schedule: has {len(orders)} ranks, the pipeline has {ranks}.")
    for rank, listed in enumerate(orders):
        seen = Counter(listed)
        if again := next((a for a, n in seen.items() if n > 1), None):
            raise AutoparError(f"schedule: rank {rank} runs {word(again)} twice. Keep one of them.")
        for chunk, m in product(range(virtual), range(microbatches)):
            letters = "".join(letter for letter in "FBIW" if seen.pop((letter, chunk, m), 0))
            if letters not in ("FB", "FIW"):
                has = ", ".join(word((letter, chunk, m)) for letter in letters) or "nothing"
                raise AutoparError(
                    f"schedule: rank {rank} has {has} of chunk {chunk}, microbatch {m}. Legal: F and B, or F, I and W."
                )
        if left := next(iter(seen), None):
            raise AutoparError(
                f"schedule: rank {rank} runs {word(left)}, there are {virtual} chunks and {microbatches} microbatches."
            )
    for _ in in_order(orders):
        pass
