"""What a graph must look like after each PREPARE pass. Tests run `check` between passes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from autopar.passes import PREPARE
from autopar.passes.bags_to_sums import is_even_bag
from autopar.passes.composites_to_parts import is_composite
from autopar.passes.constants import Constants
from autopar.passes.counter_random import is_random
from autopar.passes.cross_entropy_keeps_dims import is_flat_loss
from autopar.passes.drop_noops import ASSERTIONS, CASTS, FRESH, is_noop, joined, trained
from autopar.passes.experts_in_token_order import is_grouped
from autopar.passes.facts import KEY, RELAXED, Fact
from autopar.passes.functionalize_mutations import is_mutating, is_tracking_instance_norm, is_training_batch_norm
from autopar.passes.loss_stays_wide import rounded_losses
from autopar.passes.means_to_sums import is_mean
from autopar.passes.ops_keep_dims import region_of
from autopar.passes.rows_to_gathers import reads_rows
from autopar.passes.shifted_losses_keep_length import is_shifted
from autopar.passes.slices_to_splits import tilings
from autopar.passes.views_to_reshapes import EXPANDS, RESHAPES, SPLITS, TRANSPOSES, counted_from_end

aten = torch.ops.aten


def check(gm: fx.GraphModule, after: str, unchanged: bool = False) -> None:
    """Raise AssertionError, naming the node, where ``gm`` is not legal after the pass ``after`` (``"capture"``: before
    all). What a pass made true stays true after the passes behind it. ``unchanged``: the pass left the graph, which was
    legal before it, as it was, so that only what this pass makes true is asked.

    Example:
        >>> gm = run(gm, PREPARE[:2])              # doctest: +SKIP
        >>> check(gm, after=PREPARE[1])            # doctest: +SKIP
    """
    names = ("capture", *PREPARE, "hoist_normalisers")
    assert after in names, f"{after} is no pass of {names}"
    gm.graph.lint()
    for name in (after,) if unchanged else names[: names.index(after) + 1]:
        for complaint in _SPEC[name](gm):
            raise AssertionError(f"after {after}: {complaint}")


def _captured(gm: fx.GraphModule) -> Iterator[str]:
    """Tensors in, tensors out, OpOverloads and getitem between, all with meta values that are what the op gives."""
    for node in gm.graph.nodes:
        if node.op == "output":
            yield from _output(gm, node)
        elif node.op not in ("placeholder", "get_attr", "call_function"):
            yield f"{node.name} is a {node.op}"
        elif node.op == "call_function" and not _is_op(node.target):
            yield f"{node.name} calls {node.target}"
        elif node.op != "call_function" or node.target not in ASSERTIONS:
            yield from _values(node)


def _is_op(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) or target is operator.getitem


def _output(gm: fx.GraphModule, node: fx.Node) -> Iterator[str]:
    held = node.args[0]
    if not isinstance(held, dict) or set(held) != {"outputs", "buffers"}:
        yield f"the output is {held}"
        return
    if any(not isinstance(a, fx.Node) for a in tree_leaves(held)):
        yield "the output has a leaf that is no node"
    for fqn, new in held["buffers"].items():
        old = operator.attrgetter(fqn)(gm)
        if (old.shape, old.dtype) != (new.meta["val"].shape, new.meta["val"].dtype):
            yield f"buffer {fqn} becomes another shape or dtype"


def _values(node: fx.Node) -> Iterator[str]:
    val = node.meta.get("val")
    leaves = [v for v in tree_leaves(val) if isinstance(v, torch.Tensor)]
    if not leaves or any(v.device.type != "meta" for v in leaves):
        yield f"{node.name} has no meta value: {val}"
    elif node.op == "call_function":
        found = _run(node)
        if found is not None and _shapes(_read(node, found)) != _shapes(_read(node, val)):
            yield f"{node.name} gives {_shapes(found)}, its value says {_shapes(val)}"


def _read(node: fx.Node, results: Any) -> Any:
    """Of several results those that are read: what a kernel keeps for its own backward differs by device."""
    if isinstance(results, torch.Tensor):
        return results
    return [results[u.args[1]] for u in node.users if u.target is operator.getitem]


def _run(node: fx.Node) -> Any:
    def value(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return tree_map(lambda v: torch.empty_like(v) if isinstance(v, torch.Tensor) else v, arg.meta["val"])
        return torch.device("meta") if isinstance(arg, torch.device) else arg

    args, kwargs = tree_map(value, (list(node.args), dict(node.kwargs)))
    try:
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except NotImplementedError:
        return None  # no meta kernel


def _shapes(values: Any) -> list[Any]:
    return [(tuple(v.shape), v.dtype) for v in tree_flatten(values)[0] if isinstance(v, torch.Tensor)]


def _each(wrong: Callable[[fx.Node], Any], words: str) -> Callable[[fx.GraphModule], Iterator[str]]:
    def find(gm: fx.GraphModule) -> Iterator[str]:
        for node in gm.graph.nodes:
            if node.op == "call_function" and wrong(node):
                yield f"{node.name} ({node.target}) {words}"

    return find


def _views(node: fx.Node) -> bool:
    old = (RESHAPES - {aten.reshape.default}) | (EXPANDS - {aten.expand.default}) | TRANSPOSES
    old |= (SPLITS - {aten.split_with_sizes.default}) | {aten.narrow.default, aten.broadcast_tensors.default}
    if node.target in old or counted_from_end(node):
        return True
    if node.target is aten.slice.Tensor:
        return len(node.args) < 4 or node.args[3] > node.args[0].meta["val"].shape[node.args[1]]  # type: ignore[union-attr]
    if node.target in (aten.reshape.default, aten.expand.default):
        return list(node.args[1]) != list(node.meta["val"].shape)  # type: ignore[arg-type]
    return False


def _does_nothing(gm: fx.GraphModule) -> Iterator[str]:
    found = trained(gm)
    for node in gm.graph.nodes:
        if node.op in ("call_function", "get_attr") and not node.users:
            yield f"{node.name} has no reader"
        elif node.op == "call_function" and (node.target in ASSERTIONS or is_noop(node)):
            yield f"{node.name} ({node.target}) does nothing"
        elif node.target is aten.cat.default and len(joined(node, found)) < len(node.args[0]):
            yield f"{node.name} joins what has no elements"
        elif node.target in FRESH:
            yield f"{node.name} ({node.target}) reads a tensor for its type"
        elif node.target in CASTS and (node.target is not aten.to.dtype or len(node.args) != 2):
            yield f"{node.name} ({node.target}) is a cast in another form"


def _rows(gm: fx.GraphModule) -> Iterator[str]:
    constants = Constants()
    return _each(lambda n: reads_rows(n, constants), "reads places of rows")(gm)


def _bags(gm: fx.GraphModule) -> Iterator[str]:
    constants = Constants()
    return _each(lambda n: is_even_bag(n, constants), "is a bag of equal rows")(gm)


def _prologue(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        fact = node.meta.get(KEY)
        if not isinstance(fact, Fact):
            yield f"{node.name} has no fact"
        elif fact.prologue and any(v is not None and v.grad for v in fact.values):
            yield f"{node.name} is in the prologue and has a gradient"
        elif fact.prologue and any(a.op == "call_function" and not a.meta[KEY].prologue for a in node.all_input_nodes):
            yield f"{node.name} is in the prologue and reads the loop"


def _masks(node: fx.Node) -> bool:
    if node.target is not aten.scaled_dot_product_attention.default:
        return False
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
    return mask is not None and bool(causal)


_SPEC: dict[str, Callable[[fx.GraphModule], Iterator[str]]] = {
    "capture": _captured,
    "counter_random": _each(lambda n: is_random(n) and RELAXED not in n.meta, "draws random numbers"),
    "composites_to_parts": _each(is_composite, "is composed of other ops"),
    "functionalize_mutations": _each(
        lambda n: is_mutating(n.target) or is_training_batch_norm(n) or is_tracking_instance_norm(n), "writes in place"
    ),
    "views_to_reshapes": _each(_views, "is a view in another form"),
    "drop_noops": _does_nothing,
    "slices_to_splits": lambda gm: (f"slices of {n.name} tile it" for n in gm.graph.nodes if tilings(n)),
    "rows_to_gathers": _rows,
    "bags_to_sums": _bags,
    "experts_in_token_order": _each(is_grouped, "is a product of sorted rows"),
    "means_to_sums": _each(is_mean, "is a mean"),
    "cross_entropy_keeps_dims": _each(is_flat_loss, "is a flat loss"),
    "ops_keep_dims": _each(
        lambda n: n.target is aten.reshape.default and region_of(n), "merges dims that are split again"
    ),
    "shifted_losses_keep_length": _each(is_shifted, "is a loss of most of its rows"),
    "recognize_causal_masks": _each(_masks, "has a mask and is causal"),
    "loss_stays_wide": lambda gm: (f"{n.name} is a loss that was rounded" for n in rounded_losses(gm)),
    "hoist_normalisers": _prologue,
}
