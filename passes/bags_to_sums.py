"""PREPARE: bags of equal length are sums of embeddings, so that bags, features and the table divide."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.passes.constants import Constants, TooLarge
from autopar.passes.drop_noops import drop_dead
from autopar.passes.facts import call
from autopar.passes.means_to_sums import arguments

aten = torch.ops.aten
BAGS = (aten.embedding_bag.padding_idx, aten.embedding_bag.default)
SUM, MEAN = 0, 1


def bags_to_sums(gm: fx.GraphModule) -> fx.GraphModule:
    """``embedding_bag`` over the rows of a matrix of indices, a sum or a mean, becomes an ``embedding`` and a sum over
    each row. (Functional's way there, offsets that count through a flat list, shows no dim of bags.)

    Example:
        ``embedding_bag(w, reshape(i, [12]), [0, 3, 6, 9])`` of i [4, 3] -> ``sum(embedding(w, i), [1])``
    """
    constants, graph = Constants(), gm.graph
    for node in list(graph.nodes):
        if is_even_bag(node, constants):
            with graph.inserting_before(node):
                new = _summed(graph, node)
            for user in list(node.users):
                user.replace_all_uses_with(new)
                graph.erase_node(user)
            graph.erase_node(node)
    drop_dead(graph)
    graph.lint()
    gm.recompile()
    return gm


def is_even_bag(node: fx.Node, constants: Constants) -> bool:
    """Whether the pass has something to do with the node: known offsets at equal distances, and no padding."""
    if node.op != "call_function" or node.target not in BAGS:
        return False
    given = arguments(node)
    padding = given.get("padding_idx")
    if given["mode"] not in (SUM, MEAN) or given["sparse"] or given["include_last_offset"] or padding is not None:
        return False
    read = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    if not read or not constants.known(given["offsets"]):
        return False
    (count,), (bags,) = given["indices"].meta["val"].shape, given["offsets"].meta["val"].shape
    if not bags or count % bags:
        return False
    try:
        return bool((constants.whole(given["offsets"]) == torch.arange(bags) * (count // bags)).all())
    except TooLarge:
        return False


def _summed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    given = arguments(node)
    (count,), (bags,) = given["indices"].meta["val"].shape, given["offsets"].meta["val"].shape
    shape = [bags, count // bags]
    index = _rows(graph, given["indices"], shape)
    settings = (-1, given["scale_grad_by_freq"], False)
    found = call(graph, aten.embedding.default, (given["weight"], index, *settings), like=node)
    if given["per_sample_weights"] is not None:
        scale = call(graph, aten.unsqueeze.default, (_rows(graph, given["per_sample_weights"], shape), 2), like=node)
        found = call(graph, aten.mul.Tensor, (found, scale), like=node)
    total = call(graph, aten.sum.dim_IntList, (found, [1]), like=node)
    return total if given["mode"] == SUM else call(graph, aten.div.Tensor, (total, shape[1]), like=node)


def _rows(graph: fx.Graph, flat: fx.Node, shape: list[int]) -> fx.Node:
    """A flat list as rows: what it was made from, where that has this shape."""
    source = flat.args[0] if flat.target is aten.reshape.default else flat
    if isinstance(source, fx.Node) and list(source.meta["val"].shape) == shape:
        return source
    return call(graph, aten.reshape.default, (flat, shape), like=flat)


__all__ = ["bags_to_sums", "is_even_bag"]
