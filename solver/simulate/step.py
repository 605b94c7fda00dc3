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


@dataclass(frozen=True)
class Step:
    """All of a step. ``chunks[rank][i]`` is stage ``i * ranks + rank`` of the model.

    ``gather``: weights are gathered "never", once a "step" before their first use, or before each "use" (and let go
    of after forward where ``reshard_after_forward``), ``prefetch`` units ahead. ``reduce``: gradients "never", once a
    "step", or after each "microbatch". ``overlap_...``: whether they run beside computation. ``shared_data``: gathers
    and reductions take turns, because they take the same links. ``optimizer_s`` and ``static`` bytes: by rank.
    ``tied_s``: adding up what the first and the last rank found of a weight that both hold. ``staggered``: steps
    follow each other without meeting (None: where the schedule is a zero-bubble one, whose optimizer checks afterwards
    what others wait for).
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
    return _Builder(step).build()


class _Doing(NamedTuple):
    """One action of a rank, and the one that follows it."""

    rank: int
    letter: str
    chunk: int
    microbatch: int
    following: Action | None


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

    def add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def orders(self) -> Schedule:
        """Each rank's actions."""
        step = self.step
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

    def build(self) -> list[Task]:
        order = self.orders()
        if self.step.gather == "step":
            self.gather_all()
        at = [0] * self.ranks
        for rank, action in in_order(order):
            at[rank] += 1
            self.act(_Doing(rank, *action, order[rank][at[rank]] if at[rank] < len(order[rank]) else None))
        self.finish()
        return self.tasks

    def act(self, do: _Doing) -> None:
        """The tasks of one action: one, or one a unit where collectives of the data axis run beside them."""
        step, stage, forward = self.step, do.chunk * self.ranks + do.rank, do.letter == "F"
        after = self.ready.get((do.letter, stage, do.microbatch))
        waits = () if after is None else (after,)
        label = f"{do.letter}{do.microbatch}" + (f" chunk {do.chunk}" if len(step.chunks[0]) > 1 else "")
        send = self.send_seconds(do.letter, stage)
        blocking = 0.0 if step.overlap_p2p else send
        if self.gathers(do) or self.reduces(do):
            self.by_unit(do, waits, label, blocking)
        else:
            part = self.passes[do.rank][do.chunk][do.letter]
            self.compute(do.rank, part, do.letter, waits, label, blocking)
        made = self.last[do.rank]
        to = stage + (1 if forward else -1)
        if send > blocking:
            name = "receive" if forward else "receive back"
            made = self.add(Task(to % self.ranks, name, send, (made,), label, "p2p"))
        if do.letter != "W":
            self.ready[do.letter, to, do.microbatch] = made

    def gathers(self, do: _Doing) -> bool:
        """Whether an action's units have their weights gathered."""
        once = self.step.gather == "step" and do.letter == "F" and do.microbatch == 0
        return once or (self.step.gather == "use" and do.letter != "W")

    def reduces(self, do: _Doing) -> bool:
        """Whether an action's units have their gradients reduced beside it."""
        once = self.step.reduce == "step" and self.step.overlap_reduce and do.microbatch == self.step.microbatches - 1
        return do.letter in "BW" and (once or self.step.reduce == "microbatch")

    def send_seconds(self, letter: str, stage: int) -> float:
        """Seconds to send on what an action made."""
        if letter == "W" or (letter != "F" and stage == 0):
            return 0.0
        source = stage if letter == "F" else stage - 1
        return self.step.chunks[source % self.ranks][source // self.ranks].send_s

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

    def by_unit(self, do: _Doing, waits: tuple[int, ...], label: str, send: float) -> None:
        """One task a unit, with the gathers before and the reductions after it."""
        step, units, rank = self.step, self.units[do.rank][do.chunk], do.rank
        reduces, uses = self.reduces(do), step.gather == "use" and do.letter != "W"
        ahead = step.prefetch if step.overlap_gather else 0
        order = range(len(units)) if do.letter == "F" else range(len(units))[::-1]
        ended = [self.last[rank]]  # ended[i]: the computation before the i-th unit
        for i, u in enumerate(order):
            if uses:  # what may be gathered by now: the first time all that is so near, then one more
                for j in range(i + ahead if i else 0, min(i + ahead + 1, len(units))):
                    self.gather((rank, do.chunk, order[j]), ended[max(0, j - ahead)])
            place, final = (rank, do.chunk, u), i == len(units) - 1
            needs = waits if i == 0 else ()
            if place in self.whole:
                needs = (*needs, self.whole[place])
            frees: Owned = ()
            if uses and self.lets_go(do, final):
                self.whole.pop(place, None)
                frees = _owned("gathered", units[u].gathered_bytes)
            made = _owned("gradients", units[u].gradient_bytes) if reduces else ()
            part = self.pass_over(do.letter, units[u])
            name = f"{label} {units[u].name}"
            self.compute(rank, part, do.letter, needs, name, send if final else 0.0, made, frees)
            if reduces:
                self.reduce(rank, units[u], made)
            ended.append(self.last[rank])

    def pass_over(self, letter: str, unit: UnitTimes) -> Pass:
        found = self.single.get((letter, id(unit)))
        if found is None:
            found = self.single[letter, id(unit)] = Pass(letter, ((unit, 1),))
        return found

    def lets_go(self, do: _Doing, final: bool) -> bool:
        """Whether a unit's weights are whole no longer after an action; they stay where backward begins with it."""
        if do.letter != "F":
            return True
        turns = do.following is not None and do.following[0] != "F" and do.following[1] == do.chunk
        return self.step.reshard_after_forward and not (final and turns)

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
