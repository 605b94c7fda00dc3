"""What one run of a graph makes and lets go of, node by node: the bytes that are alive at every moment.

A graph runs as its generated code does: a name is dropped after the last node that reads it, and results are there
while their operands still are. Views share the storage of what they look at. Nothing is computed: every node runs once
on fake tensors; what our own kernels need besides is said in `_packed`,
`_unpacked` and `_besides`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.runtime.counter_random import AT_ONCE, MANY, draws
from autopar.runtime.pieces import exchange, join, pieces, split, total, widen

PASSED_ON = ("replicate", "invariant", "wait_all_reduce", "wait_tensor", "all_reduce_")
"""Ops that return their operand where it is contiguous; their fakes make a tensor."""

KEPT_AT = {"keep": 1, "time_keep": 1}
"""Ops that return their operand on coordinate 0 and make zeros elsewhere -> the place of the coordinate."""


@dataclass(frozen=True)
class Moment:
    """One node. ``made``: the storages that it makes; ``extra``: bytes that it needs besides while it runs; ``gone``:
    storages that the graph lets go of after it; ``sent``: what a collective that it starts or waits for works on, which
    `runtime.collectives` keeps for a while."""

    node: str
    made: tuple[int, ...] = ()
    extra: int = 0
    gone: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()


@dataclass(frozen=True)
class View:
    """How a tensor looks at its storage, in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> View:
        """As this tensor does."""
        return View(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


@dataclass(frozen=True)
class Walk:
    """One run of a graph. Storages are numbers: ``arguments[i]`` is that of argument i, ``results[i]`` that of output i
    (None for what is no tensor), which looks at it as ``views[i]`` says; ``nbytes`` has the size of each. Output names
    never go."""

    nbytes: tuple[int, ...]
    arguments: tuple[int | None, ...]
    results: tuple[int | None, ...]
    views: tuple[View | None, ...]
    moments: tuple[Moment, ...]

    def live(self, boxed: bool = False) -> list[int]:
        """Bytes alive during every node, arguments included; ``boxed``: the caller holds none of them, so that each may
        go after its last reader."""
        given = {s for s in self.arguments if s is not None}
        alive, found = set(given), []
        for moment in self.moments:
            alive |= set(moment.made)
            found.append(sum(self.nbytes[s] for s in alive) + moment.extra)
            alive -= {s for s in moment.gone if boxed or s not in given}
        return found


def walk(graph: fx.GraphModule) -> Walk:
    """Run ``graph`` on fake tensors like those in the ``meta["val"]`` of its placeholders.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.empty(256, device="meta")
    >>> y = graph.call_function(torch.ops.aten.relu.default, (x,))
    >>> z = graph.call_function(torch.ops.aten.view.default, (y, [16, 16]))
    >>> _ = graph.output((graph.call_function(torch.ops.aten.neg.default, (z,)),))
    >>> walk(fx.GraphModule({}, graph)).live()  # x and relu; the view makes nothing; x, relu and neg
    [2048, 2048, 3072]
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return _Walker(graph).run()


class _Walker:
    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.env: dict[fx.Node, Any] = {}
        self.numbers: dict[int, int] = {}  # key of a storage -> its number
        self.nbytes: list[int] = []
        self.alive: list[torch.UntypedStorage] = []  # so that no key is given to another storage
        self.names: dict[int, int] = {}  # number -> names that hold it
        self.flying: dict[fx.Node, tuple[int, ...]] = {}  # raw tensor -> storages on the wire
        self.last = _last_uses(graph.graph)

    def run(self) -> Walk:
        arguments: list[int | None] = []
        results: list[int | None] = []
        views: list[View | None] = []
        moments: list[Moment] = []
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = _like(node.meta.get("val"))
                arguments.append(next(iter(self._hold(self.env[node])), None))
            elif node.op == "output":
                outputs = tree_leaves(self._values(node.args[0]))
                results = [self._number(t) if isinstance(t, Tensor) else None for t in outputs]
                views = [View.of(t) if isinstance(t, Tensor) else None for t in outputs]
            else:
                moments.append(self._run(node))
        return Walk(tuple(self.nbytes), tuple(arguments), tuple(results), tuple(views), tuple(moments))

    def _run(self, node: fx.Node) -> Moment:
        before, extra = len(self.nbytes), 0
        sent: tuple[Tensor, ...] = ()
        if node.op == "get_attr":
            made = _like(getattr(self.graph, str(node.target)))
        else:
            args, kwargs = self._values(node.args), self._values(node.kwargs)
            made, extra, sent = self._call(node.target, args, kwargs)
        self.env[node] = made
        self._hold(made)
        on_wire, landed = self._fly(node, sent)
        gone = [*landed, *(n for dead in self.last.get(node, ()) for n in self._drop(dead))]
        return Moment(node.name, tuple(range(before, len(self.nbytes))), extra, tuple(gone), on_wire)

    def _fly(self, node: fx.Node, sent: tuple[Tensor, ...]) -> tuple[tuple[int, ...], list[int]]:
        """What is on the wire now, or was until this wait, and the storages that go with it: both the operand and the
        raw tensor are held from start to wait."""
        if sent:
            numbers = tuple(dict.fromkeys(self._number(t) for t in sent))
            for number in numbers:
                self.names[number] = self.names.get(number, 0) + 1
            self.flying[node] = numbers
            return numbers, []
        numbers = self.flying.pop(node.args[0], ()) if node.args else ()  # type: ignore[arg-type]
        for number in numbers:
            self.names[number] -= 1
        return numbers, [number for number in numbers if not self.names[number]]

    def _call(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, int, tuple[Tensor, ...]]:
        """What a node makes, the bytes that it needs besides, and the tensors that go on the wire."""
        name, x = _name(target), next(iter(_tensors(args)), None)
        passed_on = name in PASSED_ON or (name in KEPT_AT and args[KEPT_AT[name]] == 0)
        if passed_on and x is not None and x.is_contiguous():
            return x, 0, ()
        with _Inner(self.numbers) as inner:
            made = target(*args, **kwargs)
        if x is not None and name.startswith("start_"):
            return made, 0, (_packed(name.removeprefix("start_"), x, args), made)
        if x is not None and name.startswith("wait_"):
            return _unpacked(name.removeprefix("wait_"), x, args), 0, ()
        return made, inner.besides(made) + _besides(target, args, made), ()

    def _hold(self, made: Any) -> list[int]:
        """The storages of a value, which have one name more now."""
        numbers = list(dict.fromkeys(self._number(t) for t in _tensors(made)))
        for number in numbers:
            self.names[number] = self.names.get(number, 0) + 1
        return numbers

    def _drop(self, node: fx.Node) -> Iterator[int]:
        """The storages that go with a name."""
        for number in dict.fromkeys(self._number(t) for t in _tensors(self.env.pop(node))):
            self.names[number] -= 1
            if not self.names[number]:
                yield number

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self.numbers:
            self.numbers[key] = len(self.nbytes)
            self.nbytes.append(storage.nbytes())
            self.alive.append(storage)
        return self.numbers[key]

    def _values(self, args: Any) -> Any:
        return fx.map_arg(args, lambda node: self.env[node])


class _Inner(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that the parts of a composite op hold at once. ``known``: storages that were there before."""

    def __init__(self, known: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known, self.own = known, dict[int, int]()
        self.now = self.most = self.parts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one part."""
        made = func(*args, **(kwargs or {}))
        self.parts += 1
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            key, size = int(storage._cdata), storage.nbytes()
            if key not in self.known and key not in self.own:
                self.own[key] = size
                self.now += size
                weakref.finalize(storage, self._died, key, size)
        self.most = max(self.most, self.now)
        return made

    def _died(self, key: int, size: int) -> None:
        if self.own.pop(key, None) is not None:
            self.now -= size

    def besides(self, made: Any) -> int:
        """Bytes at the fullest but for those of ``made``."""
        if self.parts < 2:
            return 0
        results = {int(t.untyped_storage()._cdata): t.untyped_storage().nbytes() for t in _tensors(made)}
        return max(0, self.most - sum(size for key, size in results.items() if key in self.own))


def _packed(kind: str, x: Tensor, args: Any) -> Tensor:
    """What ``start_`` gives to the wire, as `runtime.collectives` makes it of its operand."""
    if kind in ("all_reduce", "scatter", "swap"):
        return x.contiguous()
    n, c, dim, parts = args[2:6]
    if kind == "all_gather":
        held = pieces(parts, n, *args[7:])
        return widen(x, dim, total(held[0]))
    if kind == "reduce_scatter":
        held = pieces(parts, n, *args[6:])
        return split(x, dim, held, total(held[0])).contiguous()
    to_dim, to_parts, items, to_items = (*args[6:], 0, 0)[:4]
    if dim == to_dim:
        send, _, width = exchange(tuple(parts), tuple(to_parts), n, c, items, to_items)
        return split(x, dim, send, width).contiguous()
    held, wanted = pieces(parts, n, items), pieces(to_parts, n, to_items)
    return split(widen(x, dim, total(held[0])), to_dim, wanted, total(wanted[0])).contiguous()


def _unpacked(kind: str, raw: Tensor, args: Any) -> Tensor:
    """What ``wait_`` makes of the raw tensor; a view of it where it can be."""
    if kind == "stacked":
        return raw
    n, *literals = args[1:]
    if kind == "all_gather":
        _, dim, parts, *items = literals
        return join(raw, dim, pieces(parts, n, *items))
    if kind == "reduce_scatter":
        c, dim, parts, *items = literals
        return raw.narrow(dim, 0, total(pieces(parts, n, *items)[c])).contiguous()
    c, dim, parts, to_dim, to_parts, items, to_items = (*literals, 0, 0)[:7]
    if dim == to_dim:
        return join(raw, dim, exchange(tuple(parts), tuple(to_parts), n, c, items, to_items)[1])
    held, wanted = pieces(parts, n, items), pieces(to_parts, n, to_items)
    return join(raw.narrow(to_dim + 1, 0, total(wanted[c])), dim, held)


def _besides(target: Any, args: Any, made: Any) -> int:
    """What our own kernels need: a random op a few hashes at a time, the next made while the last are there; a loss of
    logits that are cut by classes their differences from the largest, and the exponentials, in float32 at least."""
    if _name(target) == "vocabulary_cross_entropy":
        logits: Tensor = args[0]
        return logits.numel() * (2 * max(4, logits.itemsize) + (4 if logits.itemsize < 4 else 0))
    if not draws(target):
        return 0
    numel = max(t.numel() for t in _tensors(made))
    at_once = AT_ONCE.get(next(_tensors(made)).device.type, MANY)
    return 8 * min(numel, 2 * at_once)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The names that generated code drops after each node: those that it reads last, and its own where none does."""
    last: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for read in dict.fromkeys((*node.all_input_nodes, node)):
            if read not in seen:
                seen.add(read)
                if node.op not in ("placeholder", "output"):
                    last.setdefault(node, []).append(read)
    return last


def _like(val: Any) -> Any:
    """A fake tensor of the same shape, strides and dtype; 0 for a number."""
    if not isinstance(val, Tensor):
        return 0 if val is None else val
    device = "cpu" if val.device.type == "meta" else val.device
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=device)


def _name(target: Any) -> str:
    """``start_all_gather`` of an op of ours or of a functional collective; empty for any other."""
    schema = getattr(target, "_schema", None)
    space, _, name = schema.name.partition("::") if schema is not None else ("", "", "")
    return name if space in ("autopar", "_c10d_functional") else ""


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (t for t in tree_leaves(tree) if isinstance(t, Tensor))


__all__ = ["Moment", "View", "Walk", "walk"]
