"""PREPARE: reading one place (or some) of every row is a gather, writing there a scatter, so that rows divide."""

from __future__ import annotations

import torch
from torch import fx

from autopar.passes.constants import WHOLE, Constants, TooLarge
from autopar.passes.drop_noops import drop_dead
from autopar.passes.facts import call
from autopar.passes.means_to_sums import arguments

aten = torch.ops.aten
READS = (aten.index.Tensor, aten._unsafe_index.Tensor)
WRITES = (aten.index_put.default, aten._unsafe_index_put.default)


def rows_to_gathers(gm: fx.GraphModule) -> fx.GraphModule:
    """``x[arange(n), places]``, in which x has n rows, becomes a ``gather`` along dim 1: it shows that row i is read
    for row i only. Places count from the end where they are negative, as in an index; what lies outside raises.
    ``x[arange(n), places] = v`` becomes a ``scatter``, with ``accumulate`` a ``scatter_add``; where a row has several
    places and they do not add up it stays, as the last of equal ones would not be the same in both.

    Example:
        ``index(x, [arange(4), places])`` of x [4, 9, 8] -> ``gather(x, 1, places as [4, 1, 8])`` as [4, 8]
    """
    constants, graph = Constants(), gm.graph
    for node in list(graph.nodes):
        if reads_rows(node, constants):
            with graph.inserting_before(node):
                node.replace_all_uses_with((_gathered if node.target in READS else _scattered)(graph, node))
            graph.erase_node(node)
    drop_dead(graph)
    graph.lint()
    gm.recompile()
    return gm


def reads_rows(node: fx.Node, constants: Constants) -> bool:
    """Whether the node reads or writes places of rows, each row's for itself."""
    if node.op != "call_function" or node.target not in (*READS, *WRITES):
        return False
    given = arguments(node)
    indices, shape = given["indices"], tuple(given["self"].meta["val"].shape)
    if len(indices) < 2 or any(i is None for i in indices[:2]) or any(i is not None for i in indices[2:]):
        return False
    rows, places = indices[:2]
    wide, n = rows.meta["val"].shape, shape[0]
    if any(i.meta["val"].dtype not in (torch.int64, torch.int32) for i in (rows, places)):
        return False
    spread = places.meta["val"].shape
    if not spread or spread[0] != n or len(wide) != len(spread) or tuple(wide) != (n, *[1] * (len(wide) - 1)):
        return False
    if node.target in WRITES and not given["accumulate"] and spread[1:].numel() > 1:
        return False
    if n > WHOLE or not constants.known(rows):
        return False
    try:
        return bool(torch.equal(constants.whole(rows).reshape(-1), torch.arange(n)))
    except TooLarge:
        return False


def _gathered(graph: fx.Graph, node: fx.Node) -> fx.Node:
    given = arguments(node)
    column = _column(graph, node)
    found = call(graph, aten.gather.default, (given["self"], 1, column), like=node)
    return _view(graph, aten.reshape.default, found, list(node.meta["val"].shape))


def _scattered(graph: fx.Graph, node: fx.Node) -> fx.Node:
    given = arguments(node)
    column, values = _column(graph, node), given["values"]
    spread, rest = given["indices"][1].meta["val"].shape, node.meta["val"].shape[2:]
    values = _view(graph, aten.expand.default, values, [*spread, *rest])
    values = _view(graph, aten.reshape.default, values, list(column.meta["val"].shape))
    op = aten.scatter_add.default if given["accumulate"] else aten.scatter.src
    return call(graph, op, (given["self"], 1, column, values), like=node)


def _column(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The places as the index of a gather or scatter along dim 1."""
    given = arguments(node)
    source, places = given["self"], given["indices"][1]
    n, length, *rest = source.meta["val"].shape
    each = places.meta["val"].shape[1:].numel()
    if places.meta["val"].dtype != torch.int64:
        places = call(graph, aten.to.dtype, (places, torch.int64), like=node)
    behind = call(graph, aten.lt.Scalar, (places, 0), like=node)
    counted = call(graph, aten.add.Tensor, (places, length), like=node)
    places = call(graph, aten.where.self, (behind, counted, places), like=node)
    column = _view(graph, aten.reshape.default, places, [n, each, *[1] * len(rest)])
    return _view(graph, aten.expand.default, column, [n, each, *rest])


def _view(graph: fx.Graph, view: torch._ops.OpOverload, x: fx.Node, shape: list[int]) -> fx.Node:
    return x if list(x.meta["val"].shape) == shape else call(graph, view, (x, shape), like=x)


__all__ = ["reads_rows", "rows_to_gathers"]
