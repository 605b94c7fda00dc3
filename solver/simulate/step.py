"""A training step as tasks: the units of each chunk, the schedule, and the collectives of weights and gradients.

What waits for nothing else inside a chunk is one task: its forward or backward of a microbatch. Units are told apart
only where collectives of the data axis run beside them: gathers of weights before their use, reductions of gradients.

>>> layer = UnitTimes("layer", forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
>>> stage = (Chunk(((layer, 2),)),)
>>> round(run(Step(chunks=(stage,) * 4, microbatches=8, schedule="1f1b")).bubble, 4), round(3 / (8 + 3), 4)
(0.2727, 0.2727)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import AutoparError
from autopar.solver.simulate.actions import Action, Schedule, Seconds, in_order
from autopar.solver.simulate.engine import COMPUTE, Owned, Task, Timeline, simulate
from autopar.solver.simulate.schedules import PARTED, schedule

WHEN_GATHERED = ("never", "step", "use")
WHEN_REDUCED = ("never", "step", "microbatch")


@dataclass(frozen=True)
class UnitTimes:
    """Seconds and bytes of one unit (a layer, an embedding, a head), for one microbatch on one rank.

    ``forward_s`` and the two parts of backward are computation alone; ``forward_comm_s`` and ``backward_comm_s`` are
    collectives inside that nothing hides, of kind ``comm``; ``recompute_s`` is the second forward before a backward.
    ``gather_s`` and ``reduce_s``: collectives of its weights and gradients over the data ranks.

    ``saved_bytes`` live from forward to backward (where that is parted, ``weight_bytes`` of them until the weight
    gradients; None: all); ``recompute_bytes`` during backward, besides; ``working_bytes`` during either pass.
    ``gathered_bytes`` live while the unit's weights are whole, ``gradient_bytes`` from backward until reduced.
    """

    name: str
    forward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    recompute_s: float = 0.0
    forward_comm_s: float = 0.0
    backward_comm_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    gathered_bytes: float = 0.0
    saved_bytes: float = 0.0
    recompute_bytes: float = 0.0
    working_bytes: float = 0.0
    gradient_bytes: float = 0.0
    weight_bytes: float | None = None
    comm: str = "tp"


@dataclass(frozen=True)
class Chunk:
    """Units with how often each repeats, in the order of forward; seconds to send an activation on (last chunk: 0)."""

    units: tuple[tuple[UnitTimes, int], ...]
    send_s: float = 0.0


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
    staggered = step.schedule in PARTED if step.staggered is None else step.staggered
    return simulate(tasks_of(step), step.static, staggered)


def tasks_of(step: Step) -> list[Task]:
    """The tasks of a step, each after all that it waits for. Raises AutoparError for a step that makes no sense."""
    for name, value, legal in (("gather", step.gather, WHEN_GATHERED), ("reduce", step.reduce, WHEN_REDUCED)):
        if value not in legal:
            raise AutoparError(f"step.{name} {value!r} is not known. Legal: {', '.join(legal)}.")
    return _Builder(step).tasks()


class _Part:
    """One pass over some units as one task: seconds, what of them is not computation, bytes."""

    __slots__ = ("frees", "inside", "made", "seconds")

    def __init__(self, letter: str, units: Sequence[tuple[UnitTimes, int]]) -> None:
        shares: dict[str, float] = {}
        seconds = saved = 0.0
        most: Owned = ()
        for unit, times in units:
            own, comm, again, kept = _costs(letter, unit)
            seconds += (own + comm + again) * times
            saved += kept * times
            shares[unit.comm] = shares.get(unit.comm, 0.0) + comm * times
            shares["recompute"] = shares.get("recompute", 0.0) + again * times
            working = (("working", unit.working_bytes), ("recompute", unit.recompute_bytes if letter in "BI" else 0.0))
            most = max(most, working, key=lambda owned: sum(b for _, b in owned))
        self.seconds = seconds
        self.inside: Owned = tuple(x for x in shares.items() if x[1])
        temporary = tuple(x for x in most if x[1] and letter != "W")
        kept_bytes: Owned = (("activations", abs(saved)),) if saved else ()
        self.made: Owned = temporary + (kept_bytes if saved > 0 else ())
        self.frees: Owned = temporary + (kept_bytes if saved < 0 else ())


def _costs(letter: str, unit: UnitTimes) -> tuple[float, float, float, float]:
    """(computation, communication, recomputation, bytes kept from then on) of a pass over a unit."""
    until_weight = unit.saved_bytes if unit.weight_bytes is None else unit.weight_bytes
    if letter == "F":
        return unit.forward_s, unit.forward_comm_s, 0.0, unit.saved_bytes
    if letter == "W":
        return unit.backward_weight_s, 0.0, 0.0, -until_weight
    if letter == "I":
        return unit.backward_input_s, unit.backward_comm_s, unit.recompute_s, until_weight - unit.saved_bytes
    own = unit.backward_input_s + unit.backward_weight_s
    return own, unit.backward_comm_s, unit.recompute_s, -unit.saved_bytes


def _held(chunk: Chunk) -> float:
    """The share of a chunk's saved bytes that its weight gradients need."""
    saved = sum(u.saved_bytes * times for u, times in chunk.units)
    needed = sum((u.saved_bytes if u.weight_bytes is None else u.weight_bytes) * times for u, times in chunk.units)
    return needed / saved if saved else 1.0


KIND = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


class _Builder:
    """Makes the tasks of a step, action by action, in an order in which each comes after what it needs."""

    def __init__(self, step: Step) -> None:
        self.step, self.ranks = step, len(step.chunks)
        self.made: list[Task] = []
        self.units = [[[u for u, times in c.units for _ in range(times)] for c in rank] for rank in step.chunks]
        self.whole = [
            [{letter: _Part(letter, chunk.units) for letter in "FBIW"} for chunk in rank] for rank in step.chunks
        ]
        self.single: dict[tuple[str, int], _Part] = {}
        self.ready: dict[tuple[str, int, int], int] = {}  # the task after which a stage may use what another made
        self.last = [-1] * self.ranks  # the last task on a rank's compute stream
        self.held: set[tuple[int, int, int]] = set()  # rank, chunk and unit whose weights are whole
        self.gathers: dict[tuple[int, int, int], int] = {}
        self.streams = ("data", "data") if step.shared_data else ("gather", "reduce")

    def tasks(self) -> list[Task]:
        step = self.step
        order = self.orders()
        if step.gather == "step":
            self.gather_all()
        at = [0] * self.ranks
        for rank, action in in_order(order):
            at[rank] += 1
            following = order[rank][at[rank]] if at[rank] < len(order[rank]) else None
            self.act(rank, action, following)
        self.finish()
        return self.made

    def orders(self) -> Schedule:
        step = self.step
        chunks = {len(rank) for rank in step.chunks}
        if len(chunks) != 1:
            raise AutoparError(f"step.chunks: ranks have {sorted(chunks)} chunks. Give each rank as many.")
        seconds = None
        if step.schedule in PARTED:
            seconds = [
                Seconds(part["F"].seconds, part["I"].seconds, part["W"].seconds, rank[0].send_s, _held(rank[0]))
                for (part, *_), rank in zip(self.whole, step.chunks)
            ]
        return schedule(step.schedule, self.ranks, step.microbatches, chunks.pop(), seconds)

    def act(self, rank: int, action: Action, following: Action | None) -> None:
        """The tasks of one action: one, or one a unit where collectives run beside them."""
        letter, chunk, microbatch = action
        step, stage = self.step, chunk * self.ranks + rank
        after = self.waits(letter, stage, microbatch)
        label = f"{letter}{microbatch}" if len(step.chunks[0]) == 1 else f"{letter}{microbatch}.{chunk}"
        first, last = microbatch == 0, microbatch == step.microbatches - 1
        gathers = (step.gather == "use" and letter != "W") or (step.gather == "step" and first and letter == "F")
        reduces = letter in "BW" and (
            step.reduce == "microbatch" or (step.reduce == "step" and last and step.overlap_reduce)
        )
        send = self.send_seconds(letter, stage)
        if gathers or reduces:
            self.by_unit(rank, action, following, after, label, reduces, send)
        else:
            part = self.whole[rank][chunk][letter]
            self.compute(rank, part, letter, after, label, 0.0 if step.overlap_p2p else send)
        self.ready[_made(letter), stage, microbatch] = self.last[rank]
        if send and step.overlap_p2p:
            to = (rank + (1 if letter == "F" else -1)) % self.ranks
            name = "receive" if letter == "F" else "receive back"
            sent = self.add(Task(to, name, send, (self.last[rank],), label, "p2p"))
            self.ready["sent " + _made(letter), stage, microbatch] = sent

    def waits(self, letter: str, stage: int, microbatch: int) -> tuple[int, ...]:
        """What of other ranks an action waits for."""
        if letter == "W":
            return ()
        before = stage - 1 if letter == "F" else stage + 1
        found = self.ready.get(("sent " + _made(letter), before, microbatch))
        if found is None:
            found = self.ready.get((_made(letter), before, microbatch))
        return () if found is None else (found,)

    def send_seconds(self, letter: str, stage: int) -> float:
        """Seconds to send on what an action made."""
        if letter == "W" or (letter != "F" and stage == 0):
            return 0.0
        source = stage if letter == "F" else stage - 1
        return self.step.chunks[source % self.ranks][source // self.ranks].send_s

    def add(self, task: Task) -> int:
        self.made.append(task)
        return len(self.made) - 1

    def compute(
        self,
        rank: int,
        part: _Part,
        letter: str,
        after: tuple[int, ...],
        label: str,
        send: float = 0.0,
        made: Owned = (),
        frees: Owned = (),
    ) -> None:
        inside = (*part.inside, ("p2p", send)) if send else part.inside
        made, frees = (part.made + made, part.frees + frees) if made or frees else (part.made, part.frees)
        self.last[rank] = self.add(
            Task(rank, COMPUTE, part.seconds + send, after, label, KIND[letter], inside, made, frees)
        )

    def by_unit(
        self,
        rank: int,
        action: Action,
        following: Action | None,
        after: tuple[int, ...],
        label: str,
        reduces: bool,
        send: float,
    ) -> None:
        """One task a unit, with the gathers before and the reductions after it."""
        letter, chunk, _ = action
        step, units = self.step, self.units[rank][chunk]
        order = list(range(len(units)))[:: 1 if letter == "F" else -1]
        ends = [self.last[rank]]  # after which a gather may start: the unit `prefetch` + 1 before
        next_gather = 0
        for i, u in enumerate(order):
            unit = units[u]
            if step.gather == "use" and letter != "W":
                reach = min(len(order), i + 1 + (step.prefetch if step.overlap_gather else 0))
                for j in range(next_gather, reach):
                    self.gather(rank, chunk, order[j], ends[max(0, j - step.prefetch if step.overlap_gather else j)])
                next_gather = max(next_gather, reach)
            gathered = self.gathers.pop((rank, chunk, u), None)
            needs = after if i == 0 else ()
            needs = needs if gathered is None else (*needs, gathered)
            frees: Owned = ()
            if self.lets_go(letter, chunk, u, u == order[-1], following):
                self.held.discard((rank, chunk, u))
                frees = (("gathered", unit.gathered_bytes),) if unit.gathered_bytes else ()
            made: Owned = (("gradients", unit.gradient_bytes),) if reduces and unit.gradient_bytes else ()
            part = self.part(letter, unit)
            ending = send if i == len(order) - 1 and not step.overlap_p2p else 0.0
            self.compute(rank, part, letter, needs, f"{label} {unit.name}", ending, made, frees)
            ends.append(self.last[rank])
            if reduces and unit.reduce_s:
                waited = (self.last[rank],)
                index = self.add(Task(rank, self.streams[1], unit.reduce_s, waited, unit.name, "reduce", (), (), made))
                if not step.overlap_reduce:
                    self.last[rank] = self.add(Task(rank, COMPUTE, 0.0, (index,), "", "reduce"))

    def lets_go(self, letter: str, chunk: int, unit: int, final: bool, following: Action | None) -> bool:
        """Whether a unit's weights are whole no longer after a pass: not where the next pass begins with it."""
        kept = letter == "W" or (letter == "F" and not self.step.reshard_after_forward)
        if self.step.gather != "use" or kept:
            return False
        same_chunk = following is not None and following[1] == chunk
        turns = following is not None and (letter == "F") != (following[0] == "F")
        return not (final and same_chunk and turns)

    def part(self, letter: str, unit: UnitTimes) -> _Part:
        found = self.single.get((letter, id(unit)))
        if found is None:
            found = self.single[letter, id(unit)] = _Part(letter, ((unit, 1),))
        return found

    def gather(self, rank: int, chunk: int, u: int, after: int) -> None:
        """Gathers a unit's weights on the data stream, if they are not whole."""
        unit = self.units[rank][chunk][u]
        if (rank, chunk, u) in self.held or not (unit.gather_s or unit.gathered_bytes):
            return
        self.held.add((rank, chunk, u))
        made: Owned = (("gathered", unit.gathered_bytes),) if unit.gathered_bytes else ()
        waits = (after,) if after >= 0 else ()
        task = Task(rank, self.streams[0], unit.gather_s, waits, unit.name, "gather", (), made)
        self.gathers[rank, chunk, u] = self.add(task)

    def gather_all(self) -> None:
        """Gathers the weights of all units at the start, in the order in which they are used."""
        for rank, chunks in enumerate(self.units):
            index = -1
            for chunk, units in enumerate(chunks):
                for u in range(len(units)):
                    self.gather(rank, chunk, u, -1)
                    index = self.gathers.get((rank, chunk, u), index)
            if not self.step.overlap_gather and index >= 0:
                self.gathers = {key: (index if key[0] == rank else i) for key, i in self.gathers.items()}

    def finish(self) -> None:
        """Reductions that waited for the end, a tied weight, the optimizer."""
        step = self.step
        done = [[self.last[rank]] for rank in range(self.ranks)]
        for i, task in enumerate(self.made):
            if task.kind == "reduce":
                done[task.rank] = [self.last[task.rank], i]
        if step.reduce == "step" and not step.overlap_reduce:
            for rank, chunks in enumerate(step.chunks):
                seconds = sum(u.reduce_s * times for chunk in chunks for u, times in chunk.units)
                done[rank] = [self.add(Task(rank, self.streams[1], seconds, (self.last[rank],), "", "reduce"))]
        if step.tied_s:
            ends = sorted({0, self.ranks - 1})
            waits = tuple(i for rank in ends for i in done[rank])
            for rank in ends:
                done[rank] = [self.add(Task(rank, COMPUTE, step.tied_s, waits, "tied", "tied"))]
        meet = not (step.schedule in PARTED if step.staggered is None else step.staggered)
        everything = tuple(i for own in done for i in own)
        for rank, seconds in enumerate(step.optimizer_s):
            after = everything if meet else tuple(done[rank])
            self.add(Task(rank, COMPUTE, seconds, after, "optimizer", "optimizer"))


def _made(letter: str) -> str:
    return {"F": "F", "W": "W"}.get(letter, "I")
