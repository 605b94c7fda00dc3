"""saves: what autograd keeps of one op for its backward, and which of its results are views of operands.

Nothing here is known by hand: the op runs once on fake tensors (no data, on the CPU, whose fused attention keeps what
the fused kernels of a GPU keep) under saved-tensor hooks, and what is kept is recognised by its storage. Answers are
cached by op, shapes, strides, dtypes and arguments, so equal layers cost one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, fx

import autopar.runtime.ops  # noqa: F401  registers the library ops
from autopar.passes.facts import fact, operand_nodes, value
from autopar.passes.insert_changes import is_getitem

STRIDES = "autopar_strides"


@dataclass(frozen=True)
class New:
    """A tensor that the op keeps besides its operands and results: log-sum-exp, statistics, a mask, probabilities."""

    nbytes: int
    flows: bool  # a float tensor: backward may make a gradient of it
    itemsize: int = field(default=1, compare=False)  # bytes of an element


@dataclass(frozen=True)
class Saves:
    """What one op keeps for backward. ``operands``: slots, in the order of `operand_nodes`; ``results``: which of its
    results; ``new``: the rest, of the whole op; ``aliases``: per result the slot whose storage it shares (a view).

    ``guessed``: the op does not run on fake tensors, so all its operands and results are taken as kept.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    new: tuple[New, ...] = ()
    aliases: tuple[int | None, ...] = ()
    guessed: bool = False


@dataclass(frozen=True)
class Seen:
    """What one run on fake tensors showed: what is kept, and the strides of the results (None: not known)."""

    saves: Saves
    strides: tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class Operand:
    """Shape (elements), strides, dtype of a tensor operand, whether it needs a gradient, and the first slot that holds
    the same tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    first: int


@dataclass(frozen=True)
class Call:
    """One call of an op without data: hashable. ``args``: positional and keyword arguments, operands as `Slot`."""

    target: Any
    operands: tuple[Operand, ...]
    args: Any


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor operand in the arguments of a `Call`."""

    index: int


@dataclass(frozen=True)
class _Items:
    """A list, tuple or dict of arguments, hashable."""

    kind: type
    items: tuple[Any, ...]


def saves(node: fx.Node) -> Saves:
    """What autograd keeps of an op of the annotated graph, were it run whole.

    >>> from autopar.passes.facts import annotate
    >>> graph = fx.Graph()
    >>> x, w = graph.placeholder("x"), graph.get_attr("w")
    >>> x.meta["val"], w.meta["val"] = torch.empty(4, 3, device="meta"), torch.empty(5, 3, device="meta")
    >>> y = graph.call_function(torch.ops.aten.linear.default, (x, w))
    >>> y.meta["val"] = torch.empty(4, 5, device="meta")
    >>> annotate(fx.GraphModule({"w": torch.nn.Parameter(torch.empty(5, 3))}, graph), lambda name: True)
    >>> saves(y)  # the gradient of w reads x; x needs none, so w is not kept
    Saves(operands=(0,), results=(), new=(), aliases=(None,), guessed=False)
    """
    found = observe(call_of(node)).saves
    if not found.guessed:
        return found
    made = tuple(i for i, v in enumerate(fact(node).values) if v is not None)
    return replace(found, results=made if found.operands else (), aliases=(None,) * len(fact(node).values))


def alias(node: fx.Node) -> bool:
    """Whether every result is a view: it shares the storage of an operand."""
    found = saves(node).aliases
    return bool(found) and all(a is not None for a in found)


def call_of(
    node: fx.Node,
    shapes: Sequence[tuple[int, ...]] | None = None,
    args: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
) -> Call:
    """The node's call; ``shapes``: of its operands in the place of the global ones, ``args``: its arguments likewise.

    Operands of other shapes are dense, their dims in the order that the strides of the whole tensor have.
    """
    nodes = operand_nodes(node)
    operands = []
    for slot, operand in enumerate(nodes):
        v, strides = value(operand), strides_of(operand)
        shape = v.shape if shapes is None else shapes[slot]
        if shape != v.shape:
            strides = _dense(shape, strides)
        first = next(i for i in range(slot + 1) if nodes[i] is operand and (shapes is None or shapes[i] == shape))
        operands.append(Operand(shape, strides, v.dtype, v.grad, first))
    count = iter(range(len(nodes)))
    positional, named = args or (node.args, node.kwargs)
    named = {k: v for k, v in named.items() if k != "draw"}  # which numbers a random op draws changes nothing here
    return Call(node.target, tuple(operands), _freeze((positional, named), count, set(nodes)))


def strides_of(node: fx.Node) -> tuple[int, ...]:
    """Strides of the node's tensor when the graph runs as it stands (``meta["val"]`` may tell of ops that PREPARE took
    out). Found once a node, in the graph's order."""
    if STRIDES not in node.meta:
        for n in node.graph.nodes:
            if STRIDES not in n.meta and n.op != "output":
                n.meta[STRIDES] = _strides(n)
            if n is node:
                break
    (only,) = node.meta[STRIDES]
    return tuple(only)


def _strides(node: fx.Node) -> tuple[tuple[int, ...] | None, ...]:
    if is_getitem(node):
        producer, index = node.args[0], node.args[1]
        assert isinstance(producer, fx.Node) and isinstance(index, int)
        return (producer.meta[STRIDES][index],)
    val = node.meta.get("val")
    known = tuple(
        tuple(v.stride()) for v in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(v, Tensor)
    )
    if node.op != "call_function":
        return known
    return observe(call_of(node)).strides or known


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    out, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        if strides[d]:
            out[d] = step
            step *= max(shape[d], 1)
    return tuple(out)


def _freeze(a: Any, count: Any, tensors: set[fx.Node]) -> Any:
    if isinstance(a, fx.Node) and a in tensors:
        return Slot(next(count))
    if isinstance(a, (list, tuple)):
        return _Items(list if isinstance(a, list) else tuple, tuple(_freeze(x, count, tensors) for x in a))
    if isinstance(a, dict):
        return _Items(dict, tuple((k, _freeze(x, count, tensors)) for k, x in a.items()))
    return (type(a), a) if isinstance(a, (bool, int, float)) else a  # 1, 1.0 and True are equal, but not as arguments


def _thaw(a: Any, operands: list[Tensor]) -> Any:
    if isinstance(a, Slot):
        return operands[a.index]
    if isinstance(a, _Items):
        if a.kind is dict:
            return {k: _thaw(x, operands) for k, x in a.items}
        return a.kind(_thaw(x, operands) for x in a.items)
    if isinstance(a, torch.device):
        return torch.device("cpu")
    return a[1] if isinstance(a, tuple) else a


@lru_cache(maxsize=1 << 14)
def observe(call: Call) -> Seen:
    """Run the call on fake tensors and look."""
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)  # type: ignore[func-returns-value]
    operands: list[Tensor] = []
    try:
        with fake_mode(), torch.enable_grad():
            for o in call.operands:
                operands.append(_fake(o) if o.first == len(operands) else operands[o.first])
            with hooks:
                args, kwargs = _thaw(call.args, operands)
                made = call.target(*args, **kwargs)
    except Exception:  # data-dependent shapes, ops without a fake kernel: whatever the reason, we cannot look
        return Seen(_guess(call), ())
    results = list(made) if isinstance(made, (tuple, list)) else [made]
    slots: dict[int, list[int]] = {}
    for slot, t in enumerate(operands):
        slots.setdefault(_storage(t), []).append(slot)
    aliases = tuple(slots.get(_storage(r), [None])[0] if isinstance(r, Tensor) else None for r in results)
    of_results = {_storage(r): i for i, r in reversed(list(enumerate(results))) if isinstance(r, Tensor)}
    mine: set[int] = set()
    made_here: set[int] = set()
    new: dict[int, New] = {}
    for t in kept:
        at = _storage(t)
        if at in slots:
            mine.update(slots[at])
        elif at in of_results:
            made_here.add(of_results[at])
        elif at not in new:
            new[at] = New(t.untyped_storage().nbytes(), t.is_floating_point() or t.is_complex(), t.itemsize)
    strides = tuple(tuple(r.stride()) if isinstance(r, Tensor) else None for r in results)
    return Seen(Saves(tuple(sorted(mine)), tuple(sorted(made_here)), tuple(new.values()), aliases), strides)


@cache
def fake_mode() -> Any:
    """The one mode in which calls are observed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def _fake(o: Operand) -> Tensor:
    t = torch.empty_strided(o.shape, o.strides, dtype=o.dtype, device="cpu")
    return t.requires_grad_(o.grad)


def _storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def _guess(call: Call) -> Saves:
    grad = any(o.grad for o in call.operands)
    return Saves(tuple(range(len(call.operands))) if grad else (), (), guessed=True)
