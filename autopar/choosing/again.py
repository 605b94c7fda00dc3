"""What a unit keeps and what it makes again in backward, under each policy of recomputation.

It depends on the graph alone, so it is found once for all meshes and microbatch counts. As `passes.differentiate` cuts
a unit: what backward reads is kept, or it follows from what is kept. Tensors of other units are kept where they are
needed; under ``selective`` so are results of products, convolutions, attention and sorts, and what collectives made
(which depends on layouts: `kept` prices it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from autopar.passes.divide_work import has_flops
from autopar.passes.facts import operand_nodes
from autopar.passes.saves import saves

POLICIES = ("none", "selective", "full")
DEAR = frozenset({"sort", "topk", "argsort", "cummax", "vocabulary_cross_entropy"})
"""What stays under ``selective`` besides what has FLOPs."""

Place = tuple[int, int]
Style = Literal["never", "view", "one", "always", "both"]
"""Where the bytes of a tensor between units count: nowhere, as nothing keeps it; at the tensor that it is a view of; at
the one unit that may keep it; at the tensor, always or in a state of its own, as several units may keep it."""


@dataclass(frozen=True)
class Again:
    """One policy other than ``none``, in one unit: ``ops`` that run again; (op, result) that ``stays``; (op, slot) that
    backward reads, or ops that run again do; ops whose intermediates stay (``inner``)."""

    ops: frozenset[int]
    stays: frozenset[Place]
    read: frozenset[Place]
    inner: frozenset[int]


def again(ops: Sequence[fx.Node], made_by: Mapping[Place, Place], *, selective: bool) -> Again:
    """``made_by``: of each (op, slot) that the unit itself fills, the (op, result) that does."""
    dear = [selective and stays(op.target) for op in ops]
    run, kept, read, inner = set[int](), set[Place](), set[Place](), set[int]()
    waiting: list[Place] = []

    def need(op: int, slot: int) -> None:
        if (op, slot) not in read:
            read.add((op, slot))
            if (op, slot) in made_by:
                waiting.append(made_by[op, slot])

    def rerun(op: int) -> None:
        if op not in run:
            run.add(op)
            for slot in range(len(operand_nodes(ops[op]))):
                need(op, slot)

    for i, op in enumerate(ops):
        found = saves(op)
        for slot in found.operands:
            need(i, slot)
        waiting += [(i, r) for r in found.results]
        if found.new and dear[i]:
            inner.add(i)
        elif found.new:
            rerun(i)
    while waiting:
        made, result = waiting.pop()
        if dear[made]:
            kept.add((made, result))
        else:
            rerun(made)
    return Again(frozenset(run), frozenset(kept), frozenset(read), frozenset(inner))


def stays(target: Any) -> bool:
    """Whether ``selective`` keeps what the op makes."""
    name = getattr(getattr(target, "overloadpacket", None), "__name__", "")
    return has_flops(target) or name in DEAR
