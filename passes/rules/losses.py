"""Losses: summed over rows (PREPARE has made means into sums), so rows split and the sum is partial. The classes of
cross-entropy split by a special whose result is invariant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

import autopar.runtime.ops  # noqa: F401  (registers autopar::cross_entropy_sum)
from autopar.passes.facts import fact
from autopar.passes.rules.core import Rule, Special, factors
from autopar.passes.rules.signature import NEVER, Call, broadcast, plain, read, without

if TYPE_CHECKING:
    from autopar.passes.emit import Emitter

aten = torch.ops.aten
library = torch.ops.autopar
NONE, SUM = 0, 2  # values of torch's `reduction` argument


@factors(library.cross_entropy_sum.default)
def cross_entropy_sum(node: fx.Node) -> Rule:
    """``logits[a .], target[a], weight[.] -> loss``, partial over a."""
    call = read(node)
    rows = plain("a", call.shape("target"))
    return call.rule(
        (),
        {"logits": (*rows, NEVER), "target": rows},
        linear=[call.group("weight")],
        specials=() if call.has("weight") else (_vocabulary(call),),
    )


def _vocabulary(call: Call) -> Special:
    logits = call.shape("logits")
    return Special("vocabulary", (len(logits) - 1, "I"), ("I",), lower_vocabulary, uneven=True)


def lower_vocabulary(emitter: Emitter, node: fx.Node, axis: int) -> Any:
    """Maximum, sum of exponentials and target logit are reduced inside the op; its backward needs no collective."""
    call = read(node)
    logits, target = emitter.operand(0), emitter.operand(1)
    strategy = fact(node).strategy
    assert strategy is not None and strategy.operands[0].dims[-1].axes == (axis,), "one axis cuts the vocabulary"
    return emitter.call(
        library.cross_entropy_sum_sharded.default,
        logits,
        target,
        emitter.group(axis),
        emitter.start(0, -1),
        call["ignore_index"],
        call["smoothing"],
        call.shape("logits")[-1],
    )


@factors(library.cross_entropy_count.default)
def cross_entropy_count(node: fx.Node) -> Rule:
    """``target[a], weight[.] -> count``, partial over a."""
    call = read(node)
    return call.rule((), {"target": plain("a", call.shape("target"))}, linear=[call.group("weight")])


@factors(
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.kl_div.default,
)
def elementwise_loss(node: fx.Node) -> Rule | None:
    """``x[a], t[a] -> y[a]`` without a reduction, ``-> y`` (partial) as a sum; a mean has no rule."""
    call = read(node)
    shape = call.shape("self")
    if call["reduction"] not in (NONE, SUM) or call.shape("target") != shape:
        return None
    dims = plain("a", shape)
    named = {"self": dims, "target": dims}
    for name in ("weight", "pos_weight"):
        if call.has(name):
            if len(call.shape(name)) > len(shape):
                return None
            named[name] = broadcast(call.shape(name), dims, shape)
    groups = [call.group("weight")] if call.has("weight") else []
    return call.rule(dims if call["reduction"] == NONE else (), named, linear=groups)


@factors(aten.margin_ranking_loss.default, aten.hinge_embedding_loss.default, aten.poisson_nll_loss.default)
def elementwise_margin(node: fx.Node) -> Rule | None:
    """As `elementwise_loss`, of operands of one shape."""
    call = read(node)
    shapes = {call.shape(n) for n in call.slots if call.has(n)}
    if call["reduction"] not in (NONE, SUM) or len(shapes) > 1:
        return None
    dims = plain("a", shapes.pop())
    return call.rule(dims if call["reduction"] == NONE else (), {n: dims for n in call.slots if call.has(n)})


@factors(aten.triplet_margin_loss.default, aten.cosine_embedding_loss.default, aten.multi_margin_loss.default)
def row_loss(node: fx.Node) -> Rule | None:
    """``x[a .], y[a .] -> z[a]`` without a reduction, ``-> z`` (partial) as a sum: a row is a vector."""
    call = read(node)
    given = [n for n in call.slots if call.has(n) and n != "weight"]
    shape = max((call.shape(n) for n in given), key=len)
    if call["reduction"] not in (NONE, SUM) or len(shape) < 2:
        return None
    if any(call.shape(n) not in (shape, shape[:-1]) for n in given):
        return None
    rows = plain("a", shape[:-1])
    named = {n: rows if call.shape(n) == shape[:-1] else (*rows, NEVER) for n in given}
    return call.rule(rows if call["reduction"] == NONE else (), named)


@factors(aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default)
def class_loss(node: fx.Node) -> Rule | None:
    """``x[a . b], t[a b], w[.] -> y[a b]`` without a reduction, ``-> y`` (partial) as a sum; t may be ``[a . b]``."""
    call = read(node)
    shape, target = call.shape("self"), call.shape("target")
    at = 1 if len(shape) > 1 else 0  # the dim of classes
    if call["reduction"] not in (NONE, SUM) or (len(target) != len(shape) and len(target) != len(shape) - 1):
        return None
    dims = without(plain("a", shape), at)
    rows = (*dims[:at], *dims[at + 1 :])
    named = {"self": dims, "target": rows if len(target) < len(shape) else dims}
    return call.rule(rows if call["reduction"] == NONE else (), named)
