"""PREPARE: a loss in half precision is the float32 that it is rounded from; the program rounds what it returns.

before:  %loss = to.dtype(%mean, bfloat16); return (%loss,)
after:   return (%mean,)                                       # output.meta[LOSS_DTYPE] = bfloat16

A loss is a sum over ranks and microbatches, and no partial sum may be rounded: with the cast inside, a loss in half
precision would allow one microbatch only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes.drop_noops import drop_dead
from autopar.passes.facts import call

aten = torch.ops.aten
LOSS_DTYPE = "loss_dtype"  # key in the meta of the output node
NARROW = (torch.float16, torch.bfloat16)
ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.add.Scalar)


def loss_stays_wide(gm: fx.GraphModule) -> fx.GraphModule:
    """Take the last cast to half precision off the loss, also where losses were scaled and added after theirs."""
    output = gm.graph.output_node()
    (result,) = output.args
    assert isinstance(result, dict)
    outputs = result["outputs"]
    for loss in rounded_losses(gm):
        with gm.graph.inserting_before(output):
            wide = _widened(loss, gm.graph, {})
        output.args = ({**result, "outputs": (wide, *outputs[1:])},)
        output.meta[LOSS_DTYPE] = loss.meta["val"].dtype
    drop_dead(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def rounded_losses(gm: fx.GraphModule) -> list[fx.Node]:
    """The loss, where the pass has something to do with it."""
    (result,) = gm.graph.output_node().args
    assert isinstance(result, dict)
    return [n for n in result["outputs"][:1] if _is_narrow_number(n) and _rounded(n)]


def _is_narrow_number(node: Any) -> bool:
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(val, torch.Tensor) and val.ndim == 0 and val.dtype in NARROW


def _is_cast_down(node: fx.Node) -> bool:
    if node.target is not aten.to.dtype:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and source.meta["val"].dtype == torch.float32


def _rounded(node: fx.Node) -> bool:
    """Whether a number comes, by arithmetic alone, of one that was rounded."""
    if _is_cast_down(node):
        return True
    return node.target in ARITHMETIC and any(_is_narrow_number(n) and _rounded(n) for n in node.all_input_nodes)


def _widened(node: fx.Node, graph: fx.Graph, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """The number in float32."""
    if node not in made:
        if _is_cast_down(node):
            (made[node],) = node.all_input_nodes
        elif _rounded(node) and all(map(_is_narrow_number, node.all_input_nodes)):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _widened(n, graph, made))
            made[node] = call(graph, node.target, args, kwargs, like=node)
        else:
            made[node] = call(graph, aten.to.dtype, (node, torch.float32), like=node)
    return made[node]
