"""What a class of units keeps for backward and what it makes again, by policy, as factors over what it does.

A tensor that is kept costs ``saved`` bytes; under a policy that makes it again it costs bytes ``again`` instead, as it
is there while the backward of its unit runs, and the seconds of making it. What several units keep counts once, at the
tensor itself: see `again.Style`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from autopar.choosing.again import Again, Style
from autopar.choosing.op_states import OpStates
from autopar.choosing.tables import Layouts, Tables
from autopar.choosing.wiring import Reader, Tensor, Wiring
from autopar.solver.problem import AGAIN, COMPUTE, EXPOSED, RESOURCES, SAVED, Array, Factor, Index

Arrays = Array | float


@dataclass(frozen=True, eq=False)
class Effect:
    """What a policy adds to the entries of a table."""

    saved: Arrays = 0.0
    again: Arrays = 0.0
    exposed: Arrays = 0.0
    compute: Arrays = 0.0

    def add(self, table: Array) -> Array:
        """The table with it."""
        out = table.copy()
        for resource, amount in (
            (SAVED, self.saved),
            (AGAIN, self.again),
            (EXPOSED, self.exposed),
            (COMPUTE, self.compute),
        ):
            out[..., resource] += amount
        return out


@dataclass(frozen=True, eq=False)
class Keeping:
    """One class. ``policies``: those that are open to it, the states of variable ``at``."""

    wiring: Wiring
    policies: tuple[str, ...]
    tables: Tables
    at: int

    def factor(
        self, over: tuple[int, ...], reads: tuple[Index, ...], table: Array, effects: Sequence[Effect]
    ) -> Factor:
        """The factor with each policy's effect: over the policy too, where they differ."""
        made = [e.add(table) for e in effects]
        if all(np.array_equal(made[0], other) for other in made[1:]):
            return Factor(over, reads, made[0])
        return Factor((*over, self.at), (*reads, np.arange(len(made))), np.stack(made, axis=-2))

    def op(self, i: int, states: OpStates, owned: Sequence[tuple[int, Array]]) -> list[Effect]:
        """Of an op: what it keeps besides its operands, [states]. ``owned``: its results that it keeps itself, and
        their bytes."""
        inner = states.costs[:, SAVED]
        found = []
        for policy in self.policies:
            if policy == "none":
                found.append(Effect(saved=inner + sum((n for _, n in owned), np.zeros(len(inner)))))
                continue
            a = self.wiring.again[policy]
            stay = [n for r, n in owned if (i, r) in a.stays] + [inner] * (i in a.inner)
            gone = [n for r, n in owned if (i, r) not in a.stays] + [inner] * (i not in a.inner)
            compute, exposed = (states.forward[:, k] if i in a.ops else 0.0 for k in (0, 1))
            found.append(Effect(sum(stay, 0.0), sum(gone, 0.0), exposed if policy == "full" else 0.0, compute))
        return found

    def read(self, t: Tensor, reader: Reader, sources: Layouts, targets: Layouts, *, free: bool) -> list[Effect]:
        """Of the way to one reader; ``free``: what it takes as it is counts elsewhere, unless it is made again."""
        found = []
        for policy in self.policies:
            kept = self.tables.copies(t.value, sources, targets, free=free) if reader.keeps else 0.0
            if policy == "none" or t.weight:
                found.append(Effect(saved=kept))
                continue
            a = self.wiring.again[policy]
            if reader.keeps and not free and (t.made is None or t.made in a.stays):
                kept = self.tables.copies(t.value, sources, targets, free=True)
            if (reader.op, reader.slot) not in a.read:
                found.append(Effect())
            elif policy == "full":
                found.append(Effect(again=kept, exposed=self.tables.again(t, sources, targets)))
            else:
                found.append(self._selective(t, sources, targets, kept))
        return found

    def direct(self, t: Tensor, reader: Reader, sources: Layouts, targets: Layouts) -> list[Effect]:
        """From the op that makes a tensor straight to its one reader."""
        effects = self.read(t, reader, sources, targets, free=t.own or t.view)
        for k, policy in enumerate(self.policies):
            if policy == "selective" and not t.weight and t.made in self.wiring.again[policy].stays and not t.own:
                rest = np.where(self.tables.collective(sources, targets), 0.0, self._column(t, sources))
                effects[k] = Effect(effects[k].saved + rest, effects[k].again, effects[k].exposed)
        return effects

    def make(self, t: Tensor, sources: Layouts, shared: Layouts, style: Style | None) -> list[Effect]:
        """From the op that makes a tensor to the layout in which it is shared. ``style``: None within the unit."""
        found, readers = [], any(r.keeps for r in t.readers)
        counted = (readers and not at_reader(t)) if style not in ("view", None) else t.kept > 0 and not at_reader(t)
        beyond = style in ("always", "both")  # its bytes count at the shared tensor
        for policy in self.policies:
            kept = self.tables.copies(t.value, sources, shared, free=t.own or t.view) if counted else 0.0
            if beyond:
                kept = np.where(self.tables.same(sources, shared), 0.0, self._column(t, sources)) if t.own else 0.0
            if policy == "none" or t.weight:
                found.append(Effect(saved=kept))
                continue
            needed, a = self.wiring.needs(t, policy), self.wiring.again[policy]
            stays = t.made in a.stays
            if beyond and (readers or t.own) and not stays:
                kept = np.broadcast_to(self.tables.bytes(t.value, shared), (len(sources), len(shared)))
            elif beyond:
                kept = 0.0
            elif counted and stays:
                kept = self.tables.copies(t.value, sources, shared, free=True)
            if policy == "full":
                effect = Effect(again=kept, exposed=self.tables.again(t, sources, shared) if needed else 0.0)
            elif needed and not beyond:
                effect = self._selective(t, sources, shared, kept)
                if stays and not t.own:
                    rest = np.where(self.tables.collective(sources, shared), 0.0, self._column(t, sources))
                    effect = Effect(effect.saved + rest, effect.again)
            else:
                effect = Effect(again=kept)
            if style == "view":  # other units keep it, and with it what it is a view of
                effect = Effect(effect.saved + self.tables.bytes(t.value, shared), effect.again, effect.exposed)
            found.append(effect)
        return found

    def hold(self, t: Tensor, place: int, layouts: Layouts, style: Style) -> list[Factor]:
        """Of a tensor between units: what this one keeps of it, and that a tensor that is kept says so."""
        held = [self.wiring.holds(t, p) for p in self.policies]
        if style == "one" and t.made is None:
            held = [h and not (p == "none" and at_reader(t)) for h, p in zip(held, self.policies, strict=True)]
            nbytes, zero = self.tables.bytes(t.value, layouts), np.zeros((len(layouts), len(RESOURCES)))
            effects = [Effect(saved=nbytes if h else 0.0) for h in held]
            return [self.factor((place,), (np.arange(len(layouts)),), zero, effects)] if any(held) else []
        if style == "both" and any(held):
            table = np.zeros((2, len(held), len(RESOURCES)))
            table[0, held, EXPOSED] = inf
            reads = (np.repeat(np.arange(2), len(layouts)), np.arange(len(held)))
            return [Factor((place, self.at), reads, table)]
        return []

    def _selective(self, t: Tensor, sources: Layouts, targets: Layouts, kept: Arrays) -> Effect:
        """What collectives make stays, in the place of ``kept``."""
        moved = self.tables.collective(sources, targets)
        return Effect(np.where(moved, self.tables.bytes(t.value, targets), 0.0), np.where(moved, 0.0, kept))

    def _column(self, t: Tensor, sources: Layouts) -> Array:
        return self.tables.bytes(t.value, sources)[:, None]


def at_reader(t: Tensor) -> bool:
    """Whether one copy is kept, where it is read."""
    return t.kept == 1 and not t.own and not t.view


__all__ = ["Again", "Effect", "Keeping", "at_reader"]
