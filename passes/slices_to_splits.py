"""PREPARE: slices that tile a dim are one split, whose parts a layout can cut one by one."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.passes.facts import call

aten = torch.ops.aten

Range = tuple[int, int]


def slices_to_splits(gm: fx.GraphModule) -> fx.GraphModule:
    """Slices of one tensor along one dim that together are the whole of it, each element once, become one
    ``split_with_sizes``: the queries, keys and values of a fused projection, gate and up of a fused MLP.

    Example:
        ``q = slice(x, 2, 0, 8); k = slice(x, 2, 8, 12)`` of x [.., .., 12] -> ``s = split_with_sizes(x, [8, 4], 2);
        q = s[0]; k = s[1]``
    """
    graph = gm.graph
    for source in graph.nodes:  # new pieces come after what they are split from, and are looked at in turn
        for dim, siblings in tilings(source).items():
            _split(graph, source, dim, siblings)
    graph.lint()
    gm.recompile()
    return gm


def tilings(source: fx.Node) -> dict[int, dict[Range, list[fx.Node]]]:
    """Per dim of ``source`` that its slices tile: the slices of each (start, end), in order of start."""
    by_dim: dict[int, dict[Range, list[fx.Node]]] = {}
    for user in source.users:
        if user.target is aten.slice.Tensor and user.args[0] is source and len(user.args) == 4:
            _, dim, start, end = user.args
            by_dim.setdefault(dim, {}).setdefault((start, end), []).append(user)  # type: ignore[arg-type]
    return {
        dim: dict(sorted(ranges.items()))
        for dim, ranges in by_dim.items()
        if len(ranges) > 1 and _tiles(sorted(ranges), source.meta["val"].shape[dim])
    }


def _tiles(ranges: list[Range], size: int) -> bool:
    starts, ends = zip(*ranges)
    return starts == (0, *ends[:-1]) and ends[-1] == size and all(a < b for a, b in ranges)


def _split(graph: fx.Graph, source: fx.Node, dim: int, siblings: dict[Range, list[fx.Node]]) -> None:
    first = next(iter(siblings.values()))[0]
    with graph.inserting_after(source):
        lengths = [end - start for start, end in siblings]
        split = call(graph, aten.split_with_sizes.default, (source, lengths, dim), like=first)
    after = split
    for i, slices in enumerate(siblings.values()):
        with graph.inserting_after(after):
            after = call(graph, operator.getitem, (split, i), like=slices[0])
        for old in slices:
            old.replace_all_uses_with(after)
            graph.erase_node(old)
