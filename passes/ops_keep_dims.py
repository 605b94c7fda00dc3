"""PREPARE: where dims are merged only to be split again, the ops between keep them apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.passes.constants import is_elementwise
from autopar.passes.drop_noops import drop_dead
from autopar.passes.facts import call, is_tensor, operand_nodes
from autopar.passes.means_to_sums import NARROW, arguments
from autopar.passes.rules.views import common_factors

aten = torch.ops.aten

Groups = tuple[tuple[int, ...], ...]  # for each dim the lengths that it is the product of, outer to inner
LONGEST = 64  # ops between a merge and its end

LINEARS = (aten.linear.default, aten.addmm.default, aten.mm.default)
ALONG = {aten.softmax.int: 1, aten._softmax.default: 1, aten.log_softmax.int: 1, aten._log_softmax.default: 1}


def ops_keep_dims(gm: fx.GraphModule) -> fx.GraphModule:
    """A reshape that merges dims (batch and heads, sequence and batch) is taken back where every way from it ends in
    another reshape, and one of these splits what was merged. Elementwise ops, transposes, softmax, linear and batched
    products on the way work on the dims themselves, so that each can be cut by an axis of its own.

    Example:
        ``reshape(linear(reshape(x, [L*B, E]), w), [L, B, O])`` of x [L, B, E] -> ``linear(x, w)``
    """
    graph = gm.graph
    before = graph._root
    while (seed := before.next).op != "root":
        region = region_of(seed) if seed.target is aten.reshape.default else {}
        if region:
            _rewrite(graph, seed, region)  # what stands in its place is looked at next
        else:
            before = seed
    drop_dead(graph)
    graph.lint()
    gm.recompile()
    return gm


def region_of(seed: fx.Node) -> dict[fx.Node, Groups]:
    """The nodes between a merge and the reshapes that end it, with what their dims are made of; empty where there is no
    merge, or some way does not end so."""
    groups = _merged(seed)
    if groups is None:
        return {}
    region: dict[fx.Node, Groups] = {seed: groups}
    todo, split = [seed], False
    while todo:
        node = todo.pop(0)
        for user in node.users:
            if user in region:
                continue
            if user.target is aten.reshape.default:
                split = split or _splits(region[node], user)
                continue
            found = _groups_after(user, region)
            if found is None or len(region) > LONGEST:
                return {}
            if any(len(g) > 1 for g in found):
                region[user] = found
                todo.append(user)
            else:
                return {}
    for node in region:  # what an op was told of one operand must hold for all that are in the region
        if node is not seed and _groups_after(node, region) != region[node]:
            return {}
    return region if split else {}


def _merged(node: fx.Node) -> Groups | None:
    """What the dims of a reshape are made of, where it merges some and leaves no remainder."""
    before, after = _shape(node.args[0]), _shape(node)
    if 0 in before:
        return None
    left, right, sizes, whole = common_factors(before, after)
    merges = any(len({i for i, d in enumerate(left) for f in r.factors if f in d.factors}) > 1 for r in right)
    if whole or not merges:
        return None
    return tuple(tuple(sizes[f] for f in d.factors) or (1,) for d in right)


def _splits(groups: Groups, end: fx.Node) -> bool:
    left, _, _, _ = common_factors(tuple(map(math.prod, groups)), _shape(end))
    return any(len(g) > 1 and len(d.factors) > 1 for g, d in zip(groups, left))


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _groups_after(node: fx.Node, region: dict[fx.Node, Groups]) -> Groups | None:
    """What the dims of a node's result are made of, given those of its operands in the region; None where the op does
    not take its operands so."""
    if node.op != "call_function" or not is_tensor(node):
        return None
    if node.target in (aten.transpose.int, aten.permute.default):
        groups = region[node.args[0]]  # type: ignore[index]
        return tuple(groups[d] for d in _order(node))
    if node.target in ALONG:
        groups, dim = region[node.args[0]], arguments(node)["dim"]  # type: ignore[index]
        return _joined(groups, [dim % len(groups)])
    if node.target in LINEARS:
        rows, weight, bias = _linear(node)
        scaled = any(arguments(node).get(name, 1) != 1 for name in ("alpha", "beta"))
        if (
            rows not in region
            or weight in region
            or bias in region
            or scaled
            or (bias is not None and len(_shape(bias)) > 1)
        ):
            return None
        return (*region[rows][:-1], (_shape(node)[-1],))
    if node.target in (aten.bmm.default, aten.baddbmm.default):
        batches = {region[a][0] for a in operand_nodes(node)[-2:] if a in region}
        adds = node.target is aten.baddbmm.default  # as several ops it would round more often
        if len(batches) != 1 or (adds and (operand_nodes(node)[0] in region or node.meta["val"].dtype in NARROW)):
            return None
        return (batches.pop(), *((n,) for n in _shape(node)[1:]))
    if is_elementwise(node):
        return _broadcast(node, region)
    return None


def _linear(node: fx.Node) -> tuple[Any, Any, Any]:
    """Rows, weight (``[out, in]`` of a linear, ``[in, out]`` of the others) and bias, if any."""
    names: dict[Any, tuple[str, str, str]] = {
        aten.linear.default: ("input", "weight", "bias"),
        aten.addmm.default: ("mat1", "mat2", "self"),
        aten.mm.default: ("self", "mat2", "bias"),
    }
    given = arguments(node)
    rows, weight, bias = names[node.target]
    return given[rows], given[weight], given.get(bias)


def _joined(groups: Groups, dims: Sequence[int]) -> Groups:
    return tuple((math.prod(g),) if d in dims else g for d, g in enumerate(groups))


def _order(node: fx.Node) -> list[int]:
    given = arguments(node)
    ndim = len(_shape(node))
    if node.target is aten.permute.default:
        return [d % ndim for d in given["dims"]]
    order = list(range(ndim))
    a, b = given["dim0"] % ndim, given["dim1"] % ndim
    order[a], order[b] = b, a
    return order


def _broadcast(node: fx.Node, region: dict[fx.Node, Groups]) -> Groups | None:
    shape = _shape(node)
    found: list[tuple[int, ...]] = [(n,) for n in shape]
    for operand in operand_nodes(node):
        if operand not in region:
            continue
        lead = len(shape) - len(region[operand])
        for d, group in enumerate(region[operand], start=lead):
            if math.prod(group) != shape[d] or len(group) == 1:
                continue
            if len(found[d]) > 1 and found[d] != group:
                return None
            found[d] = group
    return tuple(found)


def _rewrite(graph: fx.Graph, seed: fx.Node, region: dict[fx.Node, Groups]) -> None:
    """Make every node of the region once more on the dims themselves, and let what reads it read that."""
    fine: dict[fx.Node, fx.Node] = {}
    for node in [n for n in graph.nodes if n in region]:
        with graph.inserting_before(node):
            if node is seed:
                fine[node] = _view(graph, node.args[0], _flat(region[node]))
                continue
            take: Callable[[fx.Node, Groups], fx.Node] = lambda x, groups: _view(graph, fine.get(x, x), _flat(groups))
            fine[node] = _remade(graph, node, region, take)
    for node in fine:
        for end in [u for u in node.users if u not in region]:
            with graph.inserting_before(end):
                end.replace_all_uses_with(_view(graph, fine[node], list(_shape(end))))
            graph.erase_node(end)
    for node in reversed(list(fine)):
        graph.erase_node(node)


def _flat(groups: Groups) -> list[int]:
    return [n for g in groups for n in g]


def _view(graph: fx.Graph, x: Any, shape: list[int]) -> fx.Node:
    assert isinstance(x, fx.Node)
    return x if list(_shape(x)) == shape else call(graph, aten.reshape.default, (x, shape), like=x)


def _remade(
    graph: fx.Graph, node: fx.Node, region: dict[fx.Node, Groups], take: Callable[[fx.Node, Groups], fx.Node]
) -> fx.Node:
    groups = region[node]
    starts = [sum(map(len, groups[:d])) for d in range(len(groups))]
    first: Any = node.args[0]
    if node.target in (aten.transpose.int, aten.permute.default):
        before = region[first]
        at = [sum(map(len, before[:d])) for d in range(len(before))]
        order = [at[d] + i for d in _order(node) for i in range(len(before[d]))]
        return call(graph, aten.permute.default, (take(first, before), order), like=node)
    if node.target in ALONG:
        dim: Any = node.args[1]
        rest = (starts[dim % len(groups)], *node.args[2:])
        return call(graph, node.target, (take(first, groups), *rest), dict(node.kwargs), like=node)
    if node.target in LINEARS:
        rows, weight, bias = _linear(node)
        if node.target is not aten.linear.default:
            weight = call(graph, aten.permute.default, (weight, [1, 0]), like=node)
        rows = take(rows, (*groups[:-1], _shape(rows)[-1:]))
        given = (rows, weight) if bias is None else (rows, weight, bias)
        return call(graph, aten.linear.default, given, like=node)
    if node.target in (aten.bmm.default, aten.baddbmm.default):
        return _product(graph, node, groups, take)
    shape = _shape(node)
    return _with_operands(graph, node, lambda x: take(x, _aligned(_shape(x), groups, shape)))


def _product(graph: fx.Graph, node: fx.Node, groups: Groups, take: Callable[[fx.Node, Groups], fx.Node]) -> fx.Node:
    *added, left, right = operand_nodes(node)
    pair = [take(x, (groups[0], *((n,) for n in _shape(x)[1:]))) for x in (left, right)]
    product = call(graph, aten.matmul.default, tuple(pair), like=node)
    if not added:
        return product
    given = arguments(node)
    term = take(added[0], _aligned(_shape(added[0]), groups, _shape(node)))
    for name, x in (("alpha", product), ("beta", term)):
        if given[name] != 1:
            scaled = call(graph, aten.mul.Tensor, (x, given[name]), like=node)
            product, term = (scaled, term) if name == "alpha" else (product, scaled)
    return product if given["beta"] == 0 else call(graph, aten.add.Tensor, (term, product), like=node)


def _aligned(own: tuple[int, ...], groups: Groups, shape: tuple[int, ...]) -> Groups:
    """What the dims of an operand of shape ``own`` are made of, that is broadcast to a result of these groups."""
    lead = len(shape) - len(own)
    return tuple(groups[lead + d] if n == shape[lead + d] else (1,) * len(groups[lead + d]) for d, n in enumerate(own))


def _with_operands(graph: fx.Graph, node: fx.Node, take: Callable[[fx.Node], fx.Node]) -> fx.Node:
    replace = lambda a: take(a) if is_tensor(a) else a
    args = fx.node.map_aggregate(node.args, replace)
    kwargs = fx.node.map_aggregate(dict(node.kwargs), replace)
    return call(graph, node.target, tuple(args), dict(kwargs), like=node)


__all__ = ["ops_keep_dims", "region_of"]
