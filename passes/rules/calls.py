"""Calls of Python code: what was decided at capture is held to, and an opaque call is cut where trials allow it."""

from __future__ import annotations

import torch
from torch import fx

import autopar.runtime.decided  # noqa: F401  (defines autopar::decided)
from autopar.passes.facts import operand_nodes, value
from autopar.passes.rules.core import Dim, Dims, Rule, factors
from autopar.passes.rules.signature import NEVER, plain
from autopar.runtime.opaque import OPAQUE, called


@factors(torch.ops.autopar.decided.default)
def decided(node: fx.Node) -> Rule:
    """``x[a], counts -> x[a]``: counts of addends are addends of the count, and each must be 0."""
    x, *counts = operand_nodes(node)
    dims = plain("d", value(x).shape)
    return Rule((dims, *((),) * len(counts)), (dims,), linear=(frozenset(range(1 + len(counts))),))


@factors(*OPAQUE)
def opaque_call(node: fx.Node) -> Rule:
    """A factor for every way of cutting that was found: of operands dims or nothing, of results dims or addends."""
    name, number = node.args[1:3]
    call = called(str(name), int(number))  # type: ignore[arg-type]
    cuts = call.cuts()
    return Rule(
        tuple(_named([c.operands[i] for c in cuts], value(n).shape) for i, n in enumerate(operand_nodes(node))),
        tuple(_named([c.results[i] for c in cuts], v.shape) for i, v in enumerate(node.meta["val"])),
        why="" if cuts else "it is Python that was not seen to do for pieces what it does for the whole",
        addends=call.addends,
    )


def _named(cuts: list[int | None], shape: tuple[int, ...]) -> Dims:
    dims = [NEVER] * len(shape)
    for number, dim in enumerate(cuts):
        if dim is not None:
            dims[dim] = Dim((f"c{number}",))
    return tuple(dims)
