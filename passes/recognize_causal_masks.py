"""PREPARE: attention says that it is causal, instead of reading a mask that says so."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, fx

from autopar.passes.constants import Constants, TooLarge, Window
from autopar.passes.drop_noops import drop_dead
from autopar.passes.facts import call
from autopar.passes.means_to_sums import arguments

aten = torch.ops.aten

ROWS_AT_ONCE = 1 << 22  # mask entries looked at together


def recognize_causal_masks(gm: fx.GraphModule) -> fx.GraphModule:
    """Attention masks that depend on constants alone are read once: a causal one (queries and keys of equal length)
    becomes ``is_causal=True``, one that lets everything pass becomes None. All else is kept: sliding windows, padding,
    biases, masks that depend on an input or differ from row to row of a large batch.

    A mask of numbers lets pass where it is 0 and blocks where it is -inf or the lowest number of its dtype.

    Example:
        ``scaled_dot_product_attention(q, k, v, le(arange(S), arange(S)[:, None]))`` ->
        ``scaled_dot_product_attention(q, k, v, None, 0.0, True)``
    """
    graph = gm.graph
    constants = Constants()
    kinds: dict[fx.Node, str] = {}
    for node in list(graph.nodes):
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        mask = arguments(node)["attn_mask"]
        if mask is None or not constants.known(mask):
            continue
        if mask not in kinds:
            kinds[mask] = kind_of(constants, mask)
        if kinds[mask] != "kept":
            _without_mask(graph, node, causal=kinds[mask] == "causal")
    drop_dead(graph)
    graph.lint()
    gm.recompile()
    return gm


def kind_of(constants: Constants, mask: fx.Node) -> Literal["causal", "open", "kept"]:
    """What a constant mask ``[..., queries, keys]`` says; ``open``: everything may pass."""
    *leading, queries, keys = mask.meta["val"].shape
    uniform = constants.uniform(mask)
    outer: Window = tuple((0, 1) if d in uniform else (0, n) for d, n in enumerate(leading))
    width = keys * math.prod(b - a for a, b in outer)
    step = max(1, ROWS_AT_ONCE // max(width, 1))
    causal, everything = queries == keys, True
    try:
        for start in range(0, queries, step):
            rows = (start, min(start + step, queries))
            allowed = _allowed(constants.window(mask, (*outer, rows, (0, keys))))
            if allowed is None:
                return "kept"
            causal = causal and bool((allowed == _causal(rows, keys)).all())
            everything = everything and bool(allowed.all())
            if not causal and not everything:
                return "kept"
    except TooLarge:
        return "kept"
    return "open" if everything else "causal"


def _causal(rows: tuple[int, int], keys: int) -> Tensor:
    return torch.arange(keys) <= torch.arange(*rows)[:, None]


def _allowed(mask: Tensor) -> Tensor | None:
    """Where a mask lets pass; None where it is a bias."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    passes, blocks = mask == 0, mask <= torch.finfo(mask.dtype).min
    return passes if bool((passes | blocks).all()) else None


def _without_mask(graph: fx.Graph, node: fx.Node, causal: bool) -> None:
    given = arguments(node)
    args = (given["query"], given["key"], given["value"], None, given["dropout_p"], causal)
    kwargs = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
    with graph.inserting_before(node):
        new = call(graph, node.target, args, kwargs, like=node)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
