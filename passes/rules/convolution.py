"""Convolutions: batch, output channels, input channels (a sum, the bias outside of it) and groups split."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes.rules.core import Dim, Rule, factors, localizes
from autopar.passes.rules.signature import NEVER, put, read

aten = torch.ops.aten

CONVOLUTIONS = (
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
)
TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)


@factors(*CONVOLUTIONS, *TRANSPOSED, aten.convolution.default)
def convolution(node: fx.Node) -> Rule:
    """``x[n (g i) ...], w[(g o) i ...], b[(g o)] -> y[n (g o) ...]``; transposed the weight is ``w[(g i) o ...]``."""
    call = read(node)
    x, w, groups = call.shape("input"), call.shape("weight"), call["groups"]
    transposed = node.target in TRANSPOSED or bool(call.values.get("transposed"))
    sizes = {"g": groups, "i": x[-len(w) + 1] // groups, "o": (w[1] if transposed else w[0] // groups)}
    ins, outs = _dim(sizes, "g", "i"), _dim(sizes, "g", "o")
    spatial = (NEVER,) * (len(w) - 2)
    batch = (Dim(("n",)) if x[0] > 1 else NEVER,) if len(x) == len(w) else ()
    weight = (ins, _dim(sizes, "o")) if transposed else (outs, _dim(sizes, "i"))
    return call.rule(
        (*batch, outs, *spatial),
        {"input": (*batch, ins, *spatial), "weight": (*weight, *spatial), "bias": (outs,)},
        outside={"bias": ("i",)},
        linear=[call.group("input", "bias"), call.group("weight", "bias")],
        sizes=sizes,
    )


def _dim(sizes: dict[str, int], *names: str) -> Dim:
    return Dim(tuple(n for n in names if sizes[n] > 1))


@localizes(*CONVOLUTIONS, *TRANSPOSED, aten.convolution.default)
def local_convolution(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As many groups as local channels make: input channels a group are in the weight, or (transposed) output ones."""
    call = read(node)
    if call["groups"] == 1:
        return args, kwargs
    x, w = sizes.operands[call.slots["input"][0]], sizes.operands[call.slots["weight"][0]]
    transposed = node.target in TRANSPOSED or bool(call.values.get("transposed"))
    groups = sizes.results[0][-len(w) + 1] // w[1] if transposed else x[-len(w) + 1] // w[1]
    return put(node, args, kwargs, "groups", groups)
