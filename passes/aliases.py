"""Which tensors of a graph share memory, and which node holds the present value of each, while mutations go."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from autopar.passes.facts import call

aten = torch.ops.aten


@dataclass
class Alias:
    """A tensor object of the captured program: a base that owns its memory, or a view of ``parent``.

    ``origin`` first produced it; ``made_by`` is the view op (None for a base); ``node`` holds its value as of
    ``version`` of the base.
    """

    origin: fx.Node
    parent: Alias | None
    made_by: fx.Node | None
    version: int = 0
    node: fx.Node = field(init=False)

    def __post_init__(self) -> None:
        self.node = self.origin
        if self.parent is not None:
            self.version = self.base().version

    def base(self) -> Alias:
        """The alias that owns the memory."""
        return self if self.parent is None else self.parent.base()

    def chain(self) -> Iterator[Alias]:
        """This alias and all it is a view of, base last."""
        yield self
        if self.parent is not None:
            yield from self.parent.chain()

    def read(self, graph: fx.Graph) -> fx.Node:
        """The node with the present value; a view whose base changed is taken again at the insertion point."""
        if self.parent is None or self.version == self.base().version:
            return self.node
        assert self.made_by is not None
        args = (self.parent.read(graph), *self.made_by.args[1:])
        self.node = call(graph, self.made_by.target, args, dict(self.made_by.kwargs), like=self.made_by)
        self.version = self.base().version
        return self.node

    def write(self, graph: fx.Graph, new: fx.Node) -> None:
        """Let ``new`` be the present value, here and in all that share the memory."""
        if self.parent is None:
            self.version += 1
        else:
            assert self.made_by is not None
            view, whole = self.made_by, self.parent
            if view.target is operator.getitem:  # of a split: its parent is the list of pieces
                assert whole.parent is not None and whole.made_by is not None
                view, whole = whole.made_by, whole.parent
            whole.write(graph, scatter(graph, self.made_by, view, whole.read(graph), new))
            self.version = self.base().version
        self.node = new


class Shadow:
    """Runs every node on meta tensors that share memory exactly as the program's tensors do."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.values: dict[fx.Node, Any] = {}
        self._attributes: dict[int, torch.Tensor] = {}

    def run(self, node: fx.Node) -> None:
        """Run one node; nodes come in graph order, before anything about them is changed."""
        if node.op == "get_attr":
            held = operator.attrgetter(str(node.target))(self.gm)
            self.values[node] = self._attributes.setdefault(id(held), _fresh(node.meta["val"]))
        elif node.op == "call_function" and node.meta.get("val") is not None:
            self.values[node] = self._call(node)
        elif node.op == "placeholder":
            self.values[node] = _fresh(node.meta.get("val"))

    def parent(self, node: fx.Node) -> fx.Node | None:
        """The operand that ``node`` is a view of, None for a node that owns its memory."""
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, fx.Node) or source not in self.values:
            return None
        mine, theirs = _storages(self.values.get(node)), _storages(self.values[source])
        if not mine or not set(mine) <= set(theirs):
            return None
        if node.target is operator.getitem and self.parent(source) is None:
            return None  # one of several outputs that own their memory
        return source

    def _call(self, node: fx.Node) -> Any:
        args, kwargs = tree_map(
            lambda a: (
                self.values.get(a)
                if isinstance(a, fx.Node)
                else torch.device("meta")
                if isinstance(a, torch.device)
                else a
            ),
            (list(node.args), dict(node.kwargs)),
        )
        try:
            with torch.no_grad():
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, NotImplementedError, TypeError):
            return tree_map(_fresh, node.meta["val"])  # no meta kernel: nothing shared, as for all that compute


def _fresh(val: Any) -> Any:
    if not isinstance(val, torch.Tensor):
        return val
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="meta")


def _storages(values: Any) -> list[int]:
    return [v.untyped_storage()._cdata for v in tree_leaves(values) if isinstance(v, torch.Tensor)]


# -- writing through a view: the whole tensor with the view's part replaced ------------------------------------------

_SAME_ORDER = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.view_as.default,
    aten.alias.default, aten.detach.default, aten.contiguous.default, aten.to.dtype, aten.to.device,
    aten.to.dtype_layout, aten.reshape_as.default, aten.lift_fresh.default, aten.lift.default,
}  # fmt: skip
_OWN_INVERSE = {
    aten.transpose.int, aten.swapaxes.default, aten.swapdims.default, aten.t.default, aten.numpy_T.default,
    aten.mT.default,
}  # fmt: skip


def scatter(graph: fx.Graph, piece: fx.Node, view: fx.Node, whole: fx.Node, new: fx.Node) -> fx.Node:
    """``whole`` with what ``view`` (for a split: its ``piece``) shows of it replaced by ``new``.

    A slice or select is replaced by concatenating what lies before it, the new values and what lies after: ``cat``
    divides like any other op. A slice with a step is scattered. Raises NotImplementedError with the op's name for views
    that have no such form (expand, as_strided ...).
    """
    shape, dims = list(whole.meta["val"].shape), whole.meta["val"].ndim
    rest: tuple[Any, ...] = view.args[1:]
    if view.target is aten.expand.default and list(new.meta["val"].shape) == shape:
        return new
    if view.target in _SAME_ORDER:
        return (
            new if list(new.meta["val"].shape) == shape else call(graph, aten.reshape.default, (new, shape), like=view)
        )
    if view.target is aten.select.int:
        dim, index = rest[0] % dims, rest[1] % shape[rest[0]]
        return _splice(graph, view, whole, _unsqueezed(graph, view, new, dim), dim, index)
    if view.target is aten.slice.Tensor:
        given: tuple[Any, ...] = (*rest, *(0, None, None, 1)[len(rest) :])
        dim, start, end, step = given
        start, end, step = slice(start, end, step).indices(shape[dim])
        if step == 1:
            return _splice(graph, view, whole, new, dim % dims, start)
        return call(graph, aten.slice_scatter.default, (whole, new, dim % dims, start, end, step), like=view)
    if view.target is aten.narrow.default:
        return _splice(graph, view, whole, new, rest[0] % dims, rest[1] % shape[rest[0]])
    if view.target is aten.diagonal.default:
        return call(graph, aten.diagonal_scatter.default, (whole, new, *rest), dict(view.kwargs), like=view)
    if view.target in _OWN_INVERSE:
        return call(graph, view.target, (new, *rest), like=view)
    if view.target is aten.permute.default:
        order = [d % dims for d in rest[0]]
        return call(graph, aten.permute.default, (new, [order.index(d) for d in range(dims)]), like=view)
    if piece.target is operator.getitem:
        return _splice_piece(graph, piece, view, whole, new)
    raise NotImplementedError(str(view.target).removesuffix(".default"))


def _splice(graph: fx.Graph, like: fx.Node, whole: fx.Node, new: fx.Node, dim: int, start: int) -> fx.Node:
    """``whole`` with ``new`` in the place of as many entries along ``dim``, the first being ``start``."""
    size = whole.meta["val"].shape[dim]
    end = start + new.meta["val"].shape[dim]
    before = [call(graph, aten.slice.Tensor, (whole, dim, 0, start), like=like)] if start > 0 else []
    after = [call(graph, aten.slice.Tensor, (whole, dim, end, size), like=like)] if end < size else []
    pieces = [*before, new, *after]
    return new if len(pieces) == 1 else call(graph, aten.cat.default, (pieces, dim), like=like)


def _unsqueezed(graph: fx.Graph, like: fx.Node, new: fx.Node, dim: int) -> fx.Node:
    return call(graph, aten.unsqueeze.default, (new, dim), like=like)


def _splice_piece(graph: fx.Graph, piece: fx.Node, split: fx.Node, whole: fx.Node, new: fx.Node) -> fx.Node:
    index: Any = piece.args[1]
    names = [a.name for a in split.target._schema.arguments]  # type: ignore[union-attr]
    if "dim" not in names:
        raise NotImplementedError(str(split.target))
    place = names.index("dim")
    given: Any = split.args[place] if place < len(split.args) else split.kwargs.get("dim", 0)
    dim = given % whole.meta["val"].ndim
    if split.target is aten.unbind.int:
        return _splice(graph, split, whole, _unsqueezed(graph, split, new, dim), dim, index)
    return _splice(graph, split, whole, new, dim, sum(v.shape[dim] for v in split.meta["val"][:index]))
