"""What pipelines keep in flight, by few of their microbatches: `solver.pipes`."""

from __future__ import annotations

import pytest

from autopar.solver.pipes import IN_SIMULATOR, Pipe, flying
from autopar.solver.simulate.check import check_schedule
from autopar.solver.simulate.schedules import schedule


@pytest.mark.parametrize("name, virtual", [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 4)])
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_few_microbatches_keep_in_flight_what_many_do(name: str, virtual: int, ranks: int) -> None:
    for times in (1, 2, 3, 4, 7):
        microbatches = times * ranks
        found = flying(Pipe(ranks, virtual, name, 1.0), microbatches)
        every = check_schedule(schedule(IN_SIMULATOR.get(name, name), ranks, microbatches, virtual))
        assert tuple(sum(found[r::ranks]) for r in range(ranks)) == every.ranks
