"""Seconds and bytes of a model's units, and what one pass over some of them takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.solver.simulate.engine import Owned

KIND = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}
"""What the computation of an action counts as."""


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


class Pass:
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


def held_for_weights(chunk: Chunk) -> float:
    """The share of a chunk's saved bytes that its weight gradients need."""
    saved = sum(u.saved_bytes * times for u, times in chunk.units)
    needed = sum((u.saved_bytes if u.weight_bytes is None else u.weight_bytes) * times for u, times in chunk.units)
    return needed / saved if saved else 1.0
