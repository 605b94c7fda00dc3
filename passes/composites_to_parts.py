"""PREPARE: an op without a rule that torch composes of others is those others."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._pytree import tree_leaves, tree_map

from autopar.passes.bags_to_sums import BAGS
from autopar.passes.cross_entropy_keeps_dims import NLL
from autopar.passes.drop_noops import CASTS
from autopar.passes.facts import call, is_tensor, operand_nodes
from autopar.passes.means_to_sums import LOSSES, POOLS
from autopar.passes.rules import rule_of
from autopar.passes.views_to_reshapes import EXPANDS, RESHAPES, SPLITS, TRANSPOSES

aten = torch.ops.aten

KEPT = {  # what later passes take care of
    *BAGS, *RESHAPES, *EXPANDS, *TRANSPOSES, *SPLITS, *CASTS, *POOLS, *LOSSES, *NLL, aten.cross_entropy_loss.default,
    aten.broadcast_tensors.default, aten.batch_norm.default, aten.instance_norm.default, aten.dropout.default,
    aten.feature_dropout.default, aten.alpha_dropout.default, aten.feature_alpha_dropout.default,
    aten.scaled_dot_product_attention.default,
}  # fmt: skip


def composites_to_parts(gm: fx.GraphModule) -> fx.GraphModule:
    """Every op that has no rule and no kernel of its own (torch says CompositeImplicitAutograd: eager runs other ops in
    its place) is replaced by what eager runs, over and over until each part has a rule or a kernel.

    Example:
        ``hstack([x, y])`` -> ``cat([x, y], 1)``; ``linalg_norm(x)`` -> ``linalg_vector_norm(x, 2)``
    """
    graph = gm.graph
    todo = list(reversed(graph.nodes))
    while todo:
        node = todo.pop()
        if is_composite(node):
            todo += reversed(_replaced(graph, node))
    graph.lint()
    gm.recompile()
    return gm


def is_composite(node: fx.Node) -> bool:
    """Whether the pass takes the node apart."""
    if node.op != "call_function" or not _composed(node.target):
        return False
    made = tree_leaves(node.meta.get("val"))
    return (
        bool(made) and all(isinstance(v, Tensor) for v in made) and rule_of(node) is None and _parts(node) is not None
    )


@cache
def _composed(target: Any) -> bool:
    """Whether an op is a function of its arguments in whose place eager runs others."""
    if not isinstance(target, torch._ops.OpOverload) or target in KEPT or target._schema.is_mutable:
        return False
    composed = torch._C.DispatchKey.CompositeImplicitAutograd
    name = target._schema.name + ("." + target._schema.overload_name).rstrip(".")
    if torch.Tag.nondeterministic_seeded in target.tags or composed in target.py_kernels:
        return False  # what Python has in an op's place is not what eager runs
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, composed))


@dataclass(frozen=True)
class _Part:
    """One op that eager runs: its arguments and what it made, meta tensors in them."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Any


class Recorder(SchemaCheckMode):  # type: ignore[no-untyped-call]  # the one kind of mode that may stand before autograd by itself
    """Keeps every op as the dispatcher is asked for it, before it is taken apart any further."""

    def __init__(self) -> None:
        super().__init__()
        self._dispatch_key = torch._C.DispatchKey.PreDispatch
        self.parts: list[_Part] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is aten._linalg_check_errors.default:
            return made  # raises, or makes nothing
        self.parts.append(_Part(func, args, kwargs or {}, made))
        return made


def _parts(node: fx.Node) -> tuple[list[_Part], Any, list[Tensor]] | None:
    """What eager runs in the node's place, one level down, the result, and the tensors that were given; None where that
    needs values or makes a tensor of numbers."""
    given = [torch.empty_like(n.meta["val"]) for n in operand_nodes(node)]
    for tensor in given:  # without a gradient eager would run other ops
        tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
    tensors = iter(given)
    args, kwargs = tree_map(
        lambda a: next(tensors) if is_tensor(a) else torch.device("meta") if isinstance(a, torch.device) else a,
        (node.args, dict(node.kwargs)),
    )
    try:
        with torch.enable_grad(), enable_python_dispatcher(), Recorder() as recorder:
            made = node.target.decompose(*args, **kwargs)  # type: ignore[union-attr]
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    known = {id(t) for t in given}
    for part in recorder.parts:
        if any(id(t) not in known for t in _tensors((part.args, part.kwargs))) or not _tensors(part.made):
            return None
        known |= {id(t) for t in _tensors(part.made)}
    return (recorder.parts, made, given) if all(id(t) in known for t in _tensors(made)) else None


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _new_view(target: Any) -> Any:
    """``squeeze_`` and its like change what a tensor looks like: a view does."""
    if torch.Tag.inplace_view not in target.tags:
        return target
    packet, _, overload = str(target).removeprefix("aten.").partition("_.")
    return getattr(getattr(aten, packet), "int" if packet == "transpose" else overload)


def _replaced(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """The parts, which stand where the node stood."""
    found = _parts(node)
    assert found is not None
    parts, made, given = found
    device = node.kwargs.get("device") or torch.device("cpu")
    env: dict[int, fx.Node] = {id(t): n for t, n in zip(given, operand_nodes(node), strict=True)}
    new: list[fx.Node] = []
    with graph.inserting_before(node):
        for part in parts:
            args, kwargs = tree_map(
                lambda a: env[id(a)] if isinstance(a, Tensor) else device if isinstance(a, torch.device) else a,
                (part.args, part.kwargs),
            )
            new.append(call(graph, _new_view(part.target), args, kwargs, like=node))
            if isinstance(part.made, Tensor):
                env[id(part.made)] = new[-1]
                continue
            for i, tensor in enumerate(part.made):
                env[id(tensor)] = call(graph, operator.getitem, (new[-1], i), like=node)
        if isinstance(made, Tensor):
            node.replace_all_uses_with(env[id(made)])
    for user in list(node.users):
        assert user.target is operator.getitem, f"{user} reads all of {node}"
        user.replace_all_uses_with(env[id(made[user.args[1]])])
        graph.erase_node(user)
    graph.erase_node(node)
    return new


__all__ = ["Recorder", "composites_to_parts", "is_composite"]
