"""What the passes know of a node: one frozen `Fact` in ``node.meta["autopar"]``, and how to read and make nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_map

from autopar.errors import AutoparError
from autopar.passes.layout import Layout

KEY = "autopar"
LAYOUT = "autopar_layout"  # in the meta of a local node: as what the ranks hold the global tensor that it is a piece of
UNIT = "autopar_unit"  # in the meta of local nodes: the unit of the global node that they were made for
Dtypes = tuple[torch.dtype | None, torch.dtype | None]  # `Value.rest_dtype` and `Value.reduce_dtype`
DRAWN = "autopar_drawn"  # in the meta of nodes of a pipeline stage: their place in the graph of all stages
RELAXED = "autopar_relaxed"  # in the meta of random ops that may drop otherwise on every rank


@dataclass(frozen=True)
class Value:
    """One tensor that a node produces: global shape (elements), dtype, and whether a gradient flows back to it.

    Of a parameter ``dtype`` is what ops read; in mixed precision it may rest in another one (``rest_dtype``), and its
    gradient may be reduced in another one than it rests in (``reduce_dtype``)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = False
    rest_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def resting(self) -> Value:
        """The same in the dtype in which it rests, and its gradient and the optimizer's states."""
        return Value(self.shape, self.rest_dtype or self.dtype, self.grad)

    @property
    def reduced(self) -> Value:
        """The same in the dtype in which its gradient is reduced."""
        return Value(self.shape, self.reduce_dtype or self.rest_dtype or self.dtype, self.grad)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        n = self.dtype.itemsize
        for s in self.shape:
            n *= s
        return n


@dataclass(frozen=True)
class Choice:
    """What one node does on one mesh axis (``docs/design.md`` section 4).

    kind: ``I`` all invariant, ``R`` all replicated, ``factor`` (``name``: the factor that is split, ``parts``: cut in
    these parts, ``items``: unevenly, between so many items), ``linear`` (``name``: index of the linear group that is
    partial), ``special`` (``name`` of it).
    """

    kind: str
    name: str = ""
    parts: tuple[int, ...] = ()
    items: int = 0


@dataclass(frozen=True)
class Strategy:
    """One `Choice` a mesh axis, the order in which axes nest where they cut one dim, and the layouts that follow.

    ``operands`` has one layout per tensor operand (order of `operand_nodes`), ``results`` one per produced tensor
    (None for a result that is no tensor).
    """

    choices: tuple[Choice, ...]
    order: tuple[int, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout | None, ...]


@dataclass(frozen=True)
class Fact:
    """All a pass may rely on. ``values``: what the node produces, one entry, or one per output of a multi-output op."""

    values: tuple[Value | None, ...]
    fqn: str = ""  # module that made the node; for get_attr the parameter's or buffer's own name
    source: str = ""  # file:line in the user's model
    strategy: Strategy | None = None  # after complete_layouts
    prologue: bool = False  # after hoist_normalisers: computed once a step on the whole batch
    rest: Layout | None = None  # after complete_layouts, parameters only: how it is held between steps
    gather: str = "never"  # likewise: when rest becomes use, "never", once a "step" or at every "use"
    reduce: str = "step"  # likewise: when its gradient is reduced, once a "step" or per "microbatch"
    unit: int | None = None  # in an applied plan, ops only: index of the plan's unit; changes have their reader's


def fact(node: fx.Node) -> Fact:
    """The node's fact; every node has one after `annotate`."""
    found = node.meta[KEY]
    assert isinstance(found, Fact)
    return found


def value(node: fx.Node) -> Value:
    """The single tensor that ``node`` produces."""
    (only,) = fact(node).values
    assert only is not None, f"{node} produces no tensor"
    return only


def is_tensor(node: object) -> bool:
    """Whether ``node`` is an fx node that produces exactly one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def operand_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensor operands in the order of args then kwargs, lists flattened; a tensor used twice is listed twice."""
    found: list[fx.Node] = []
    _collect(node.args, found)
    _collect(node.kwargs, found)
    return tuple(found)


def _collect(a: Any, into: list[fx.Node]) -> None:
    if isinstance(a, fx.Node):
        if is_tensor(a):
            into.append(a)
    elif isinstance(a, (tuple, list)):
        for x in a:
            _collect(x, into)
    elif isinstance(a, dict):
        for x in a.values():
            _collect(x, into)


def annotate(
    graph_module: fx.GraphModule, trainable: Callable[[str], bool], dtypes: Mapping[str, Dtypes] | None = None
) -> None:
    """Give every node its `Fact` from ``meta["val"]``; a gradient flows wherever a float result depends on a trainable
    parameter and no ``detach`` stands between. Keeps strategy and prologue marks of nodes that have them. ``dtypes``:
    of parameters that rest, or whose gradients are reduced, in others than they are used in."""
    from dataclasses import replace

    dtypes = dtypes or {}
    for node in graph_module.graph.nodes:
        val = node.meta.get("val")
        outs: Sequence[Any] = val if isinstance(val, (tuple, list)) else (val,)
        if node.op == "get_attr":
            flows = trainable(str(node.target))
        elif node.op == "call_function" and node.target is not torch.ops.aten.detach.default:
            flows = any(v is not None and v.grad for n in node.all_input_nodes for v in fact(n).values)
        else:
            flows = False
        others = dtypes.get(str(node.target), (None, None)) if node.op == "get_attr" else (None, None)
        values = tuple(
            Value(tuple(v.shape), v.dtype, flows and (v.is_floating_point() or v.is_complex()), *others)
            if isinstance(v, torch.Tensor)
            else None
            for v in outs
        )
        if (
            node.op == "call_function"
            and getattr(node.target, "__name__", "") == "getitem"
            and isinstance(node.args[0], fx.Node)
        ):
            source = fact(node.args[0])
            index = node.args[1]
            if (isinstance(index, int) and len(source.values) > 1) or isinstance(
                node.args[0].meta.get("val"), (tuple, list)
            ):
                values = (source.values[index],)
        old = node.meta.get(KEY)
        if isinstance(old, Fact):
            node.meta[KEY] = replace(old, values=values)
        else:
            node.meta[KEY] = Fact(values, fqn=_fqn(node), source=_source(node))


def call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, like: fx.Node
) -> fx.Node:
    """A new call_function node at the graph's insertion point, its ``meta["val"]`` computed on the meta device, its
    module stack and source line those of ``like``. Raises AutoparError where torch has no meta kernel for the op."""
    kwargs = kwargs or {}
    node = graph.call_function(target, args, kwargs)
    real = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (args, kwargs))
    flat, spec = tree_flatten(real)
    asked = (
        target,
        spec,
        *((v.shape, v.stride(), v.dtype) if isinstance(v, torch.Tensor) else (type(v), v) for v in flat),
    )
    if asked not in _MADE:
        if len(_MADE) > MOST_MADE:
            _MADE.clear()
        try:
            _MADE[asked] = _on_meta(target, *real)
        except NotImplementedError as error:
            raise AutoparError(
                f"{_fqn(like) or like.name}: torch cannot say what {target} ({_source(like)}) makes without computing "
                "it (it has no meta kernel). Give it one with torch.library.register_fake, or write it with other ops."
            ) from error
    node.meta["val"] = _MADE[asked]
    for key in ("nn_module_stack", "stack_trace", "from_node", "checkpoint", RELAXED):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node


_MADE: dict[Any, Any] = {}  # what an op makes on the meta device: all ranks and layers ask for the same
MOST_MADE = 1 << 14


def _on_meta(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs = {k: torch.device("meta") if k == "device" and v is not None else v for k, v in kwargs.items()}
    with torch.no_grad():
        return tree_map(lambda v: v.to("meta") if isinstance(v, torch.Tensor) else v, target(*args, **kwargs))


def _fqn(node: fx.Node) -> str:
    if node.op == "get_attr":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    names = [path for path, _ in stack.values()]
    return str(names[-1]) if names else ""


def _source(node: fx.Node) -> str:
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return ""
    bits = lines[-1].split('"')
    number = lines[-1].partition("line ")[2].split(",")[0]
    return f"{bits[1]}:{number}"
