"""A training step as tasks: the units of each chunk, the schedule, and the collectives of weights and gradients.

What waits for nothing else inside a chunk is one task: its forward or backward of a microbatch. Units are told apart
only where collectives of the data axis run beside them: gathers of weights before their use, reductions of gradients.

>>> layer = UnitTimes("layer", forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
>>> stage = (Chunk(((layer, 2),)),)
>>> round(run(Step(chunks=(stage,) * 4, microbatches=8, schedule="1f1b")).bubble, 4), round(3 / (8 + 3), 4)
(0.2727, 0.2727)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autopar.errors import AutoparError
from autopar.solver.simulate.actions import Action, Schedule, Seconds, in_order
from autopar.solver.simulate.engine import COMPUTE, Owned, Task, Timeline, simulate
from autopar.solver.simulate.schedules import PARTED, schedule
from autopar.solver.simulate.units import KIND, Chunk, Pass, UnitTimes, held_for_weights

__all__ = ["Chunk", "Step", "UnitTimes", "run", "tasks_of"]

WHEN_GATHERED = ("never", "step", "use")
WHEN_REDUCED = ("never", "step", "microbatch")
MOST = 1_000_000
"""Tasks of a step: seconds to simulate, and bytes to hold, grow with them."""


@dataclass(frozen=True)
class Step:
    """All of a step. ``chunks[rank][i]`` is stage ``i * ranks + rank`` of the model.

    ``gather``: weights are gathered "never", once a "step" before their first use, or before each "use" (and let go
    of after forward where ``reshard_after_forward``), ``prefetch`` units ahead. ``reduce``: gradients "never", once a
    "step", or after each "microbatch". ``overlap_...``: whether they run beside computation. ``shared_data``: gathers
    and reductions take turns, because they take the same links. ``optimizer_s`` and ``static`` bytes: by rank.
    ``tied_s``: adding up what the first and the last rank found of a weight that both hold. ``staggered``: steps
    follow each other without meeting (None: where the schedule is a zero-bubble one, whose optimizer checks afterwards
    what others wait for). ``order``: each rank's actions, where they are not those of ``schedule``.
    """

    chunks: tuple[tuple[Chunk, ...], ...]
    microbatches: int = 1
    schedule: str = "none"
    gather: str = "never"
    reduce: str = "never"
    overlap_gather: bool = True
    overlap_reduce: bool = True
    overlap_p2p: bool = False
    optimizer_s: tuple[float, ...] = ()
    static: tuple[Owned, ...] = ()
    reshard_after_forward: bool = True
    prefetch: int = 1
    shared_data: bool = True
    tied_s: float = 0.0
    staggered: bool | None = None
    order: tuple[tuple[Action, ...], ...] = ()


def run(step: Step) -> Timeline:
    """Simulates a step."""
    return simulate(tasks_of(step), step.static, staggered(step))


def staggered(step: Step) -> bool:
    """Whether steps follow each other without meeting."""
    return step.schedule in PARTED if step.staggered is None else step.staggered


def tasks_of(step: Step) -> list[Task]:
    """The tasks of a step, each after all that it waits for. Raises AutoparError for a step that makes no sense."""
    for name, value, legal in (("gather", step.gather, WHEN_GATHERED), ("reduce", step.reduce, WHEN_REDUCED)):
        if value not in legal:
            raise AutoparError(f"step.{name} {value!r} is not known. Legal: {', '.join(legal)}.")
    stages = [chunk for rank in step.chunks for chunk in rank]
    units = sum(times for chunk in stages for _, times in chunk.units)
    by_unit = step.gather == "use" or step.reduce == "microbatch"
    if 2 * step.microbatches * (units if by_unit else len(stages)) + units > MOST:
        raise AutoparError(
            f"step: {step.microbatches} microbatches through {len(stages)} stages of {units} units are more than "
            f"{MOST} tasks. Simulate fewer microbatches."
        )
    return _Builder(step).build()


class _Route(NamedTuple):
    """What an action of a chunk leads to: its stage, the next one to run, the seconds of computation that waits for
    the send and of the send beside it, the stream of the latter, and the action's label."""

    stage: int
    to: int
    blocking: float
    beside: float
    stream: str
    label: str


class _Builder:
    """Makes the tasks of a step, action by action, in an order in which each comes after what it needs."""

    def __init__(self, step: Step) -> None:
        self.step, self.ranks = step, len(step.chunks)
        self.tasks: list[Task] = []
        self.units = [[[u for u, times in c.units for _ in range(times)] for c in rank] for rank in step.chunks]
        self.passes = [[{x: Pass(x, chunk.units) for x in KIND} for chunk in rank] for rank in step.chunks]
        self.single: dict[tuple[str, int], Pass] = {}  # the same of one unit, by its id
        self.ready: dict[tuple[str, int, int], int] = {}  # after which task others may use what a stage made
        self.last = [-1] * self.ranks  # a rank's last task of computation
        self.whole: dict[tuple[int, int, int], int] = {}  # the task that gathered a unit: rank, chunk, position
        self.gathering, self.reducing = ("data", "data") if step.shared_data else ("gather", "reduce")
        # letters of the actions whose units gather or reduce: always, of the first and of the last microbatch
        self.gathers, self.gathers_first = {"use": ("FBI", ""), "step": ("", "F")}.get(step.gather, ("", ""))
        self.reduces = "BW" if step.reduce == "microbatch" else ""
        self.reduces_last = "BW" if step.reduce == "step" and step.overlap_reduce else ""

    def add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def orders(self) -> Schedule:
        """Each rank's actions."""
        step = self.step
        if step.order:
            return [[*rank] for rank in step.order]
        chunks = {len(rank) for rank in step.chunks}
        if len(chunks) != 1:
            raise AutoparError(f"step.chunks: ranks have {sorted(chunks)} chunks. Give each rank as many.")
        seconds = None
        if step.schedule in PARTED:
            seconds = [
                Seconds(x["F"].seconds, x["I"].seconds, x["W"].seconds, rank[0].send_s, held_for_weights(rank[0]))
                for (x, *_), rank in zip(self.passes, step.chunks)
            ]
        return schedule(step.schedule, self.ranks, step.microbatches, chunks.pop(), seconds)

    def route(self, rank: int, chunk: int, letter: str) -> _Route:
        forward, step, stage = letter == "F", self.step, chunk * self.ranks + rank
        source = stage if forward else stage - 1  # whose output, or its gradient, is sent
        sends = letter != "W" and source >= 0
        send = step.chunks[source % self.ranks][source // self.ranks].send_s if sends else 0.0
        blocking, beside = (0.0, send) if step.overlap_p2p else (send, 0.0)
        label = letter if len(step.chunks[0]) == 1 else f"{letter} chunk {chunk} "
        to, stream = (stage + 1, "receive") if forward else (stage - 1, "receive back")
        return _Route(stage, to, blocking, beside, stream, label)

    def build(self) -> list[Task]:
        """All tasks: one for each action, or one a unit where collectives of the data axis run beside them."""
        step, order, ready, last = self.step, self.orders(), self.ready, self.last
        routes = [
            [{x: self.route(r, c, x) for x in KIND} for c in range(len(step.chunks[r]))] for r in range(self.ranks)
        ]
        if step.gather == "step":
            self.gather_all()
        at, final = [0] * self.ranks, step.microbatches - 1
        for rank, (letter, chunk, microbatch) in in_order(order):
            at[rank] += 1
            stage, to, blocking, beside, stream, label = routes[rank][chunk][letter]
            after = ready.get((letter, stage, microbatch))
            waits = () if after is None else (after,)
            label = f"{label}{microbatch}"
            gathers = letter in self.gathers or (microbatch == 0 and letter in self.gathers_first)
            reduces = letter in self.reduces or (microbatch == final and letter in self.reduces_last)
            if gathers or reduces:
                following = order[rank][at[rank]] if at[rank] < len(order[rank]) else ("", 0, 0)
                lets_go = self.lets_go(letter, chunk, following)
                self.by_unit(rank, letter, chunk, waits, label, blocking, reduces, lets_go)
            else:
                self.compute(rank, self.passes[rank][chunk][letter], letter, waits, label, blocking)
            made = last[rank]
            if beside:
                made = self.add(Task(to % self.ranks, stream, beside, (made,), label, "p2p"))
            if letter != "W":
                ready[letter, to, microbatch] = made
        self.finish()
        return self.tasks

    def compute(
        self, rank: int, part: Pass, letter: str, after: tuple[int, ...], label: str, send: float = 0.0,
        made: Owned = (), frees: Owned = (),
    ) -> None:  # fmt: skip
        """Adds a pass to the computation of a rank."""
        seconds, inside = part.seconds, part.inside
        if send:
            seconds, inside = seconds + send, (*inside, ("p2p", send))
        if made or frees:
            made, frees = part.made + made, part.frees + frees
        else:
            made, frees = part.made, part.frees
        self.last[rank] = self.add(Task(rank, COMPUTE, seconds, after, label, KIND[letter], inside, made, frees))

    def by_unit(
        self, rank: int, letter: str, chunk: int, waits: tuple[int, ...], label: str, send: float, reduces: bool,
        lets_go: tuple[bool, bool],
    ) -> None:  # fmt: skip
        """One task a unit, with the gathers before and the reductions after it. ``lets_go``: whether units' weights
        are whole no longer afterwards, and whether those of the last unit are not."""
        units = self.units[rank][chunk]
        order = range(len(units)) if letter == "F" else range(len(units))[::-1]
        ahead = self.step.prefetch if self.step.overlap_gather else 0
        ended = [self.last[rank]]  # ended[i]: the computation before the i-th unit
        for i, u in enumerate(order):
            if letter in self.gathers:  # at first all that is near enough, then one more with each unit
                for j in range(i + ahead if i else 0, min(i + ahead + 1, len(units))):
                    self.gather((rank, chunk, order[j]), ended[max(0, j - ahead)])
            unit, place, final = units[u], (rank, chunk, u), i == len(units) - 1
            needs = waits if i == 0 else ()
            if place in self.whole:
                needs = (*needs, self.whole[place])
            frees: Owned = ()
            if lets_go[final]:
                self.whole.pop(place, None)
                frees = _owned("gathered", unit.gathered_bytes)
            made = _owned("gradients", unit.gradient_bytes) if reduces else ()
            part = self.pass_over(letter, unit)
            self.compute(rank, part, letter, needs, f"{label} {unit.name}", send if final else 0.0, made, frees)
            if reduces:
                self.reduce(rank, unit, made)
            ended.append(self.last[rank])

    def pass_over(self, letter: str, unit: UnitTimes) -> Pass:
        found = self.single.get((letter, id(unit)))
        if found is None:
            found = self.single[letter, id(unit)] = Pass(letter, ((unit, 1),))
        return found

    def lets_go(self, letter: str, chunk: int, following: Action) -> tuple[bool, bool]:
        """Whether an action lets go of its units' weights, and of its last unit's, with which backward may begin."""
        if letter not in self.gathers:
            return False, False
        if letter != "F":
            return True, True
        turns = following[0] in ("B", "I") and following[1] == chunk
        return self.step.reshard_after_forward, self.step.reshard_after_forward and not turns

    def gather(self, place: tuple[int, int, int], after: int) -> None:
        """Gathers the weights of a unit, if they are not whole."""
        rank, chunk, u = place
        unit = self.units[rank][chunk][u]
        if place not in self.whole and (unit.gather_s or unit.gathered_bytes):
            waits = (after,) if after >= 0 else ()
            made = _owned("gathered", unit.gathered_bytes)
            task = Task(rank, self.gathering, unit.gather_s, waits, unit.name, "gather", (), made)
            self.whole[place] = self.add(task)

    def gather_all(self) -> None:
        """Gathers all weights at the start, in the order of their first use; where nothing overlaps, all come first."""
        for rank, chunks in enumerate(self.units):
            places = [(rank, chunk, u) for chunk, units in enumerate(chunks) for u in range(len(units))]
            for place in places:
                self.gather(place, -1)
            if not self.step.overlap_gather:
                self.whole.update((place, len(self.tasks) - 1) for place in places if place in self.whole)

    def reduce(self, rank: int, unit: UnitTimes, gradients: Owned) -> None:
        """Reduces the gradients of a unit after its backward."""
        task = Task(rank, self.reducing, unit.reduce_s, (self.last[rank],), unit.name, "reduce", (), (), gradients)
        done = self.add(task)
        if not self.step.overlap_reduce:
            self.last[rank] = self.add(Task(rank, COMPUTE, 0.0, (done,), kind="reduce"))

    def finish(self) -> None:
        """Reductions that waited for the end, a tied weight, the optimizer."""
        step = self.step
        done = [[last] for last in self.last]
        for i, task in enumerate(self.tasks):
            if task.kind == "reduce":
                done[task.rank] = [self.last[task.rank], i]
        if step.reduce == "step" and not step.overlap_reduce:
            for rank, chunks in enumerate(step.chunks):
                seconds = sum(u.reduce_s * times for chunk in chunks for u, times in chunk.units)
                done[rank] = [self.add(Task(rank, self.reducing, seconds, (self.last[rank],), kind="reduce"))]
        if step.tied_s:
            ends = sorted({0, self.ranks - 1})
            waits = tuple(i for rank in ends for i in done[rank])
            for rank in ends:
                done[rank] = [self.add(Task(rank, COMPUTE, step.tied_s, waits, "tied weight", "reduce"))]
        everything = tuple(i for own in done for i in own)
        for rank, seconds in enumerate(step.optimizer_s):
            waits = tuple(done[rank]) if staggered(step) else everything
            self.add(Task(rank, COMPUTE, seconds, waits, "optimizer", "optimizer"))


def _owned(owner: str, nbytes: float) -> Owned:
    return ((owner, nbytes),) if nbytes else ()
