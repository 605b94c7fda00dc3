"""Values of tensors that depend on no input and no parameter, a window at a time: masks are too large to make whole."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from autopar.passes.facts import is_tensor
from autopar.runtime.counter_random import draws

aten = torch.ops.aten

Window = tuple[tuple[int, int], ...]  # (start, stop) a dim

WHOLE = 1 << 22  # elements; what is no larger is computed whole and once
FILLS: dict[Any, Any] = {
    aten.ones.default: 1, aten.zeros.default: 0, aten.ones_like.default: 1, aten.zeros_like.default: 0,
    aten.new_ones.default: 1, aten.new_zeros.default: 0, aten.full.default: None, aten.full_like.default: None,
    aten.new_full.default: None,
}  # fmt: skip
ALONG = {aten.cumsum.default, aten.diff.default, aten.flip.default}  # ops that mix entries of the dims they are given
ELEMENTWISE = {  # that torch does not tag as such
    aten.to.dtype, aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default,
    aten.__and__.Tensor, aten.__and__.Scalar, aten.__or__.Tensor, aten.__or__.Scalar, aten.__xor__.Tensor,
    aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.min.other, aten.max.other, aten.floor_divide.default,
    aten.less.Tensor, aten.less_equal.Tensor, aten.greater.Tensor, aten.greater_equal.Tensor, aten.not_equal.Tensor,
}  # fmt: skip


class TooLarge(Exception):
    """A window of a node cannot be had without computing something too large."""


class Constants:
    """Reads constant nodes of one graph."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, bool] = {}
        self._uniform: dict[fx.Node, frozenset[int]] = {}
        self._whole: dict[fx.Node, Any] = {}

    def known(self, node: fx.Node) -> bool:
        """Whether the node's values depend on ops alone (``zeros_like(x)`` depends on the shape of x only)."""
        todo = [node]
        while todo:
            at = todo[-1]
            read = [] if at.target in FILLS or at.op != "call_function" else at.all_input_nodes
            unknown = [a for a in read if a not in self._known]
            if not unknown:
                plain = at.op == "call_function" and not draws(at.target)
                self._known[at] = plain and all(self._known[a] for a in read)
                todo.pop()
            todo += unknown
        return self._known[node]

    def uniform(self, node: fx.Node) -> frozenset[int]:
        """Dims along which all entries are provably equal."""
        if node not in self._uniform:
            shape = _shape(node)
            found = _uniform(self, node) if node.op == "call_function" and is_tensor(node) else frozenset[int]()
            self._uniform[node] = found | {d for d, n in enumerate(shape) if n == 1}
        return self._uniform[node]

    def window(self, node: fx.Node, window: Window) -> Tensor:
        """The entries of a constant node in ``window``, on the CPU. Raises TooLarge."""
        with contextlib.suppress(TooLarge):  # it, or what it is made from
            value: Tensor = self.whole(node)[tuple(slice(a, b) for a, b in window)]
            return value
        found = _windowed(self, node, window)
        assert tuple(found.shape) == tuple(b - a for a, b in window), (node, found.shape, window)
        return found

    def whole(self, node: fx.Node) -> Any:
        """All of a constant node, kept. Raises TooLarge."""
        if node not in self._whole:
            if is_tensor(node) and math.prod(_shape(node)) > WHOLE:
                raise TooLarge
            if node.target in FILLS:
                self._whole[node] = _filled(node, list(_shape(node)))
            else:
                self._whole[node] = run(node, {a: self.whole(a) for a in node.all_input_nodes})
        return self._whole[node]


def run(node: fx.Node, operands: dict[fx.Node, Any]) -> Any:
    """What the node computes from ``operands`` on the CPU."""

    def value(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return operands[arg]
        return torch.device("cpu") if isinstance(arg, torch.device) else arg

    args, kwargs = tree_map(value, (list(node.args), dict(node.kwargs)))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def is_elementwise(node: fx.Node) -> bool:
    """Whether every entry of the result comes from the entries of the operands at its place, broadcast."""
    target = node.target
    return target in ELEMENTWISE or (isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape) if is_tensor(node) else ()


def _operand_dim(node: fx.Node, operand: fx.Node, dim: int) -> int | None:
    """The dim of a broadcast operand that lies under ``dim`` of the result."""
    below = dim - (len(_shape(node)) - len(_shape(operand)))
    return below if below >= 0 else None


def _is_uniform_under(of: Constants, node: fx.Node, operand: fx.Node, dim: int) -> bool:
    under = _operand_dim(node, operand, dim)
    return under is None or under in of.uniform(operand)


def _uniform(of: Constants, node: fx.Node) -> frozenset[int]:
    dims = range(len(_shape(node)))
    operands = [a for a in node.all_input_nodes if is_tensor(a)]
    if node.target in FILLS:
        return frozenset(dims)
    if is_elementwise(node) or node.target is aten.expand.default:
        return frozenset(d for d in dims if all(_is_uniform_under(of, node, a, d) for a in operands))
    if node.target in ALONG:
        mixed = _dims_of(node)
        return frozenset(d for d in dims if d not in mixed and all(d in of.uniform(a) for a in operands))
    if node.target is aten.unsqueeze.default:
        new = _dim(node)
        return frozenset(d for d in dims if d == new or d - (d > new) in of.uniform(operands[0]))
    if node.target is aten.slice.Tensor:
        return of.uniform(operands[0])
    if _gathers(node):
        return frozenset(d for d in dims if _gather_is_uniform(of, node, d))
    return frozenset()


def _dim(node: fx.Node, place: int = 1) -> int:
    dim: Any = node.args[place] if len(node.args) > place else 0
    return int(dim) % max(len(_shape(node)), 1)


def _dims_of(node: fx.Node) -> set[int]:
    given: Any = node.args[2] if node.target is aten.diff.default and len(node.args) > 2 else None
    if node.target is not aten.diff.default:
        given = node.args[1]
    ndim = len(_shape(node))
    return {d % ndim for d in (given if isinstance(given, (list, tuple)) else [-1 if given is None else given])}


def _gathers(node: fx.Node) -> bool:
    """``x[i, j, ...]`` with an index tensor for every dim of x."""
    if node.target is not aten.index.Tensor:
        return False
    source: Any = node.args[0]
    indices: Any = node.args[1]
    return len(indices) == len(_shape(source)) and all(map(is_tensor, indices))


def _gather_is_uniform(of: Constants, node: fx.Node, dim: int) -> bool:
    """Where an index varies along ``dim``, what it indexes does not."""
    source: Any = node.args[0]
    indices: Any = node.args[1]
    return all(_is_uniform_under(of, node, i, dim) or place in of.uniform(source) for place, i in enumerate(indices))


def _windowed(of: Constants, node: fx.Node, window: Window) -> Tensor:
    sizes = [b - a for a, b in window]
    if node.target in FILLS:
        return _filled(node, sizes)
    if is_elementwise(node):
        found: Tensor = run(node, {a: of.window(a, _under(node, a, window)) for a in node.all_input_nodes})
        return found
    operands = [a for a in node.all_input_nodes if is_tensor(a)]
    source: Any = node.args[0] if node.args else None
    if node.target is aten.expand.default:
        return of.window(source, _under(node, source, window)).expand(sizes)
    if node.target is aten.unsqueeze.default:
        new = _dim(node)
        return of.window(source, window[:new] + window[new + 1 :]).unsqueeze(new)[
            tuple(slice(*window[d]) if d == new else slice(None) for d in range(len(window)))
        ]
    if node.target is aten.slice.Tensor and len(node.args) == 4:
        start: Any = node.args[2]
        dim = _dim(node)
        shifted = (*window[:dim], (window[dim][0] + start, window[dim][1] + start), *window[dim + 1 :])
        return of.window(source, shifted)
    if node.target in (aten.tril.default, aten.triu.default):
        diagonal: Any = node.args[1] if len(node.args) > 1 else 0
        piece = of.window(source, window)
        keep = torch.tril if node.target is aten.tril.default else torch.triu
        return keep(piece, diagonal + window[-2][0] - window[-1][0])
    if _gathers(node):
        return _gathered(of, node, window).expand(sizes)
    if node.target in ALONG:
        mixed = _dims_of(node)
        given = {a: tuple((0, n) if d in mixed else window[d] for d, n in enumerate(_shape(a))) for a in operands}
        whole_along: Tensor = run(node, {a: of.window(a, w) for a, w in given.items()})
        return whole_along[tuple(slice(*w) if d in mixed else slice(None) for d, w in enumerate(window))]
    raise TooLarge


def _gathered(of: Constants, node: fx.Node, window: Window) -> Tensor:
    """What the indices of ``window`` pick; where all entries along a dim are equal, the first stands for them."""
    source: Any = node.args[0]
    indices: Any = node.args[1]
    equal = of.uniform(source)
    held = of.window(source, tuple((0, 1) if d in equal else (0, n) for d, n in enumerate(_shape(source))))
    values = [of.window(index, _under(node, index, window)) for index in indices]
    return held[tuple(torch.zeros_like(v) if d in equal else v for d, v in enumerate(values))]


def _under(node: fx.Node, operand: fx.Node, window: Window) -> Window:
    """The window of a broadcast operand under a window of the result."""
    shape = _shape(operand)
    aligned = window[len(window) - len(shape) :] if shape else ()
    return tuple((0, 1) if n == 1 else w for n, w in zip(shape, aligned, strict=True))


def _filled(node: fx.Node, sizes: list[int]) -> Tensor:
    fill = FILLS[node.target]
    if fill is None:
        fill = node.args[2] if node.target is aten.new_full.default else node.args[1]
    return torch.full(sizes, fill, dtype=node.meta["val"].dtype)
