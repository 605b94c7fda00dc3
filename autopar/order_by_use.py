"""Neighbours that no weight reaches stand in the order in which they are read, so a loop over a set gives one graph."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx


def order_by_use(graph: fx.Graph, kinds: Mapping[str, str]) -> None:
    """Sort every run of neighbouring ops that read no parameter, directly or not, by the first op behind it that reads
    them, operands first. ``kinds``: as of `clean_graph`. Models go through sets of names (of kinds of layers, say),
    whose order is another in every process; ranks would not agree on the graph.

    Ops that draw random numbers stay, and so does all that an op in place may touch.

    Example:
        ``b = sin(inv_b); a = sin(inv_a); x = q * a; y = x * b`` -> ``a = ...; b = ...; x = ...; y = ...``
    """
    moving, nodes = _free(graph, kinds), list(graph.nodes)
    stop = len(nodes)
    while stop:  # from the last run on, so that what reads a run is in its order already
        if nodes[stop - 1] not in moving:
            stop -= 1
            continue
        start = stop
        while start and nodes[start - 1] in moving:
            start -= 1
        nodes[start:stop] = _sorted(nodes[start:stop], nodes[stop:])
        for before, node in zip(nodes[start : stop - 1], nodes[start + 1 : stop], strict=True):
            before.append(node)
        stop = start
    graph.lint()


def _sorted(run: list[fx.Node], behind: list[fx.Node]) -> list[fx.Node]:
    """The nodes of a run by their first reader behind it, what each needs before it."""
    inside, found = set(run), dict[fx.Node, None]()
    for reader in behind:
        if len(found) == len(run):
            break
        stack = [(operand, False) for operand in reversed(reader.all_input_nodes)]
        while stack:
            node, entered = stack.pop()
            if node not in inside or node in found:
                continue
            if entered:
                found[node] = None
            else:
                stack.append((node, True))
                stack += [(operand, False) for operand in reversed(node.all_input_nodes)]
    return [*found, *(n for n in run if n not in found)]


def _free(graph: fx.Graph, kinds: Mapping[str, str]) -> set[fx.Node]:
    """Ops that may move: pure, of no parameter, and of nothing that is written in place."""
    touched, weights = set[fx.Node](), set[fx.Node]()  # touched: what is written in place, and all that reads it
    for node in graph.nodes:
        reads_weight = node.op == "get_attr" and kinds.get(str(node.target)) in ("trainable", "frozen")
        if reads_weight or not weights.isdisjoint(node.all_input_nodes):
            weights.add(node)
        if _writes(node):
            touched |= _ancestors(node)
    for node in graph.nodes:
        if not touched.isdisjoint(node.all_input_nodes):
            touched.add(node)
    return {n for n in graph.nodes if n.op in ("get_attr", "call_function") and n not in weights | touched and _pure(n)}


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, todo = {node}, [node]
    while todo:
        for operand in todo.pop().all_input_nodes:
            if operand not in found:
                found.add(operand)
                todo.append(operand)
    return found


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _pure(node: fx.Node) -> bool:
    target = node.target
    return not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags
