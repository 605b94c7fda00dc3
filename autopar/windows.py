"""``as_strided`` reads memory, which no layout describes: here it becomes windows and dims of its operand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor, fx

from autopar.errors import AutoparError
from autopar.passes.facts import call

aten = torch.ops.aten
Dim = tuple[int, int, int]  # length, stride, place; a dim of length 1 has no place


def strided_to_windows(graph: fx.Graph, shared: Callable[[fx.Node], bool], place: Callable[[fx.Node], str]) -> None:
    """Write each ``as_strided`` as ``permute``, ``reshape`` and ``unfold`` of its operand.

    ``shared``: whether something is written into the memory that a node lies in. Raises AutoparError, with the
    ``place``, for an operand with gaps, and where other elements are read than slices and windows of its dims.

    Example:
        ``as_strided(x, [2, 3, 4], [8, 2, 1])`` of x [2, 8] -> ``unfold(x, 1, 4, 2)``
    """
    for node in list(graph.find_nodes(op="call_function", target=aten.as_strided.default)):
        with graph.inserting_before(node):
            new = None if shared(node) else _windows(graph, node)
        if new is None:
            raise AutoparError(
                f"{place(node)}: as_strided reads memory in a way that no layout can keep. Use slices, unfold or "
                "permute."
            )
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _windows(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    source, size, stride, *offset = node.args
    assert isinstance(source, fx.Node) and isinstance(size, (list, tuple)) and isinstance(stride, (list, tuple))
    val: Tensor = source.meta["val"]
    held = _sorted(val.shape, val.stride())
    read = _sorted(size, stride)  # type: ignore[arg-type]
    if any(offset) or not _dense(held):
        return None
    groups = _groups(held, read)
    if groups is None:
        return None
    at = call(graph, aten.permute.default, (source, [p for _, _, p in held] + _ones(val.shape)), like=node)
    at = call(graph, aten.reshape.default, (at, [_length(g) for g, _ in groups]), like=node)
    places: list[int] = []
    late: list[int] = []
    for dim, (inside, wanted) in enumerate(groups):
        base, length = inside[-1][1], _length(inside)
        (n, step, first), *window = [(n, s // base, p) for n, s, p in wanted]
        w = window[0][0] if window else 1
        end = (n - 1) * step + w
        if len(window) > 1 or (window and window[0][1] != 1) or end > length:
            return None
        if window:
            if end < length:
                at = call(graph, aten.slice.Tensor, (at, dim, 0, end), like=node)
            at = call(graph, aten.unfold.default, (at, dim, w, step), like=node)
            late.append(window[0][2])
        elif (end, step) != (length, 1):
            at = call(graph, aten.slice.Tensor, (at, dim, 0, end, step), like=node)
        places.append(first)
    order = [*places, *late]
    at = call(graph, aten.permute.default, (at, sorted(range(len(order)), key=order.__getitem__)), like=node)
    return call(graph, aten.reshape.default, (at, list(node.meta["val"].shape)), like=node)


def _sorted(size: tuple[int, ...], stride: tuple[int, ...]) -> list[Dim]:
    dims = [(n, s, d) for d, (n, s) in enumerate(zip(size, stride, strict=True)) if n != 1]
    return sorted(dims, key=lambda d: (-d[1], d[2]))


def _ones(size: tuple[int, ...]) -> list[int]:
    return [d for d, n in enumerate(size) if n == 1]


def _dense(dims: list[Dim]) -> bool:
    lower = 1
    for n, s, _ in reversed(dims):
        if s != lower:
            return False
        lower *= n
    return bool(dims)


def _length(dims: list[Dim]) -> int:
    length = 1
    for n, _, _ in dims:
        length *= n
    return length


def _groups(held: list[Dim], read: list[Dim]) -> list[tuple[list[Dim], list[Dim]]] | None:
    """The dims that are held, joined only where what is read runs across them, each with what is read of it."""
    bounds = []
    for _, stride, _ in held:
        lower = sum((n - 1) * s for n, s, _ in read if s < stride)
        bounds.append(lower < stride and all(s % stride == 0 for _, s, _ in read if s >= stride))
    if not bounds[-1]:
        return None
    number, keys = 0, []
    for clean in bounds:
        keys.append(number)
        number += clean
    groups = [[d for _, d in g] for _, g in groupby(zip(keys, held, strict=True), key=lambda pair: pair[0])]
    found = []
    for i, inside in enumerate(groups):
        above = groups[i - 1][-1][1] if i else None
        wanted = [d for d in read if d[1] >= inside[-1][1] and (above is None or d[1] < above)]
        if not wanted:
            return None
        found.append((inside, wanted))
    return found
