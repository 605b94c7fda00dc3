"""Products with the weights of experts: rows, and both dims of a weight, split as in a linear; the experts themselves
by a special, whose ranks each compute the rows of their own experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

import autopar.runtime.experts  # noqa: F401  (registers autopar::experts_mm)
from autopar.passes.facts import fact
from autopar.passes.rules.core import Rule, Special, factors
from autopar.passes.rules.signature import NEVER, plain, read

if TYPE_CHECKING:
    from autopar.passes.emit import Emitter

library = torch.ops.autopar


@factors(library.experts_mm.default)
def experts_mm(node: fx.Node) -> Rule:
    """``x[s i], w[. i o], ids[s] -> y[s o]``; by the special ``experts`` w is cut over experts and y partial.

    Dispatch by all-to-all is no choice of its own: its buffers have a static size, so each must hold all rows, as many
    as the gather of x before and the reduce-scatter of y behind the special move.
    """
    call = read(node)
    w = call.shape("w")
    (s,) = plain("s", call.shape("ids"))
    i, o = (plain(name, (n,))[0] for name, n in (("i", w[1]), ("o", w[2])))
    return call.rule(
        (s, o),
        {"x": (s, i), "w": (NEVER, i, o), "ids": (s,)},
        linear=[call.group("x"), call.group("w")],
        specials=(Special("experts", ("R", 0, "R"), ("P",), lower_experts, uneven=True),),
    )


def lower_experts(emitter: Emitter, node: fx.Node, axis: int) -> Any:
    """The rows of the experts that this rank holds, zeros for the others."""
    call = read(node)
    x, w, ids = (emitter.operand(i) for i in range(3))
    strategy = fact(node).strategy
    assert strategy is not None and strategy.operands[1].dims[0].axes == (axis,), "one axis cuts the experts"
    start = call["start"] + emitter.start(1, 0)
    return emitter.call(library.experts_mm.default, x, w, ids, start, call["experts"])
