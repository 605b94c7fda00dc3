"""A training step as it unfolds: what each rank runs when, what waits for what, and which bytes live meanwhile.

`engine` runs tasks on streams, `schedules` orders the microbatches of a pipeline, `step` turns the priced units of a
model into tasks.
"""

from autopar.solver.simulate.actions import Action, Seconds, in_flight, in_order
from autopar.solver.simulate.engine import Peak, Task, Timeline, simulate
from autopar.solver.simulate.schedules import NAMES, schedule
from autopar.solver.simulate.step import Step, run, tasks_of
from autopar.solver.simulate.units import Chunk, UnitTimes

__all__ = [
    "NAMES",
    "Action",
    "Chunk",
    "Peak",
    "Seconds",
    "Step",
    "Task",
    "Timeline",
    "UnitTimes",
    "in_flight",
    "in_order",
    "run",
    "schedule",
    "simulate",
    "tasks_of",
]
