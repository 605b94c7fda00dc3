"""Tensors made of a constant: every dim is a factor of the result alone, and the size argument becomes the local one.
``arange`` and ``eye`` count positions and have no rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes.rules.core import Rule, factors, localizes
from autopar.passes.rules.signature import plain, put, read

aten = torch.ops.aten

FRESH = (aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format)
NEW = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
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
