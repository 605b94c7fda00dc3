"""Tensors made of a constant: every dim is a factor of the result alone, and the size argument becomes the local one.
``arange`` and ``eye`` count positions: a rank makes those of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.passes.facts import fact, value
from autopar.passes.rules.core import Rule, factors, localizes, placed
from autopar.passes.rules.signature import plain, put, read

if TYPE_CHECKING:
    from autopar.passes.emit import Emitter

aten = torch.ops.aten

FRESH = (aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format)
NEW = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)
EYES = (aten.eye.default, aten.eye.m)
LIKE = (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default)


@factors(*FRESH, *NEW)
def construct(node: fx.Node) -> Rule:
    """``-> y[a]``; a ``new_`` op reads only the type of its tensor, which has y's dims if it can."""
    call = read(node)
    (out,) = call.results()
    assert out is not None
    dims = plain("d", out.shape)
    same = call.has("self") and call.shape("self") == tuple(out.shape)
    return call.rule(dims, {"self": dims} if same else {})


@localizes(*FRESH, *NEW)
def local_size(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The local shape of the result is the argument."""
    return put(node, args, kwargs, "size", list(sizes.results[0]))


@factors(*LIKE)
def construct_like(node: fx.Node) -> Rule:
    """``x[a] -> y[a]``; only the shape of x is read."""
    call = read(node)
    dims = plain("d", call.shape("self"))
    return call.rule(dims, {"self": dims})


@factors(*COUNTS, *EYES)
def count(node: fx.Node) -> Rule:
    """``-> y[p]``, ``-> y[p q]``."""
    call = read(node)
    (out,) = call.results()
    assert out is not None
    dims = plain("p", out.shape)
    return call.rule(dims, {}, positions=[f for d in dims for f in d.factors])


@placed(*COUNTS)
def own_count(emitter: Emitter, node: fx.Node) -> fx.Node:
    """Taken from the whole count: its steps are as torch rounds them."""
    args, kwargs = emitter.args(node)
    whole = emitter.call(node.target, *args, **{**kwargs, "device": emitter.device})
    return emitter.call(aten.index_select.default, whole, 0, _positions(emitter, node)[0])


@placed(*EYES)
def own_eye(emitter: Emitter, node: fx.Node) -> fx.Node:
    """One where a row's position is the column's."""
    rows, columns = _positions(emitter, node)
    equal = emitter.call(aten.eq.Tensor, emitter.call(aten.unsqueeze.default, rows, 1), columns)
    return emitter.call(aten.to.dtype, equal, value(node).dtype)


def _positions(emitter: Emitter, node: fx.Node) -> list[fx.Node]:
    """Where what this rank makes of a node stands, for each dim."""
    chosen = fact(node).strategy
    assert chosen is not None and chosen.results[0] is not None
    return [emitter.positions(n, split) for n, split in zip(value(node).shape, chosen.results[0].dims, strict=True)]
