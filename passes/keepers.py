"""Who keeps what for backward: of every tensor, which ops that read it make autograd keep the copy they read.

A view shares the storage of its operand, so it keeps its operand where anybody keeps the view: storages then count
once, at the tensor that owns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.passes.completion import result_slots
from autopar.passes.facts import operand_nodes
from autopar.passes.price import saves


@dataclass(frozen=True)
class Keepers:
    """``slots``: of each op, the operand slots whose tensor it keeps (a view: those somebody keeps of its result).
    ``count``: of each tensor, how many slots keep it; ``own``: tensors that their own op keeps; ``views``: tensors that
    share the storage of an operand."""

    slots: dict[fx.Node, tuple[int, ...]]
    count: dict[fx.Node, int]
    own: frozenset[fx.Node]
    views: frozenset[fx.Node]

    def kept(self, tensor: fx.Node) -> bool:
        """Whether anything keeps it as it is made, or a copy."""
        return tensor in self.own or self.count.get(tensor, 0) > 0


def keepers(ops: Sequence[fx.Node]) -> Keepers:
    """For ops in the order of the graph; none of them runs under another's name."""
    slots: dict[fx.Node, tuple[int, ...]] = {}
    count: dict[fx.Node, int] = {}
    own, views = set[fx.Node](), set[fx.Node]()
    for op in reversed(ops):
        known, tensors = saves(op), result_slots(op)
        mine = dict.fromkeys(known.operands)
        for i, tensor in enumerate(tensors):
            if tensor is None:
                continue
            storage = known.aliases[i] if i < len(known.aliases) else None
            if storage is not None:
                views.add(tensor)
                if i in known.results or count.get(tensor):
                    mine[storage] = None
            elif i in known.results:
                own.add(tensor)
        slots[op] = tuple(sorted(mine))
        operands = operand_nodes(op)
        for slot in slots[op]:
            count[operands[slot]] = count.get(operands[slot], 0) + 1
    return Keepers(slots, count, frozenset(own), frozenset(views))
