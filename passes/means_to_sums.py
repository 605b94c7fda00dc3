"""PREPARE: a mean is a sum over a global count, so that a piece of it is an addend of it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.passes.drop_noops import drop_dead
from autopar.passes.facts import call

aten = torch.ops.aten

MEANS = {aten.mean.default, aten.mean.dim}
VARIANCES = {
    aten.var.default,
    aten.var.dim,
    aten.var.correction,
    aten.var_mean.default,
    aten.var_mean.dim,
    aten.var_mean.correction,
}
POOLS = {aten.adaptive_avg_pool1d.default: 1, aten.adaptive_avg_pool2d.default: 2, aten.adaptive_avg_pool3d.default: 3}
LOSSES = {
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default, aten.kl_div.default,
    aten.soft_margin_loss.default, aten.poisson_nll_loss.default, aten.margin_ranking_loss.default,
    aten.hinge_embedding_loss.default, aten.cosine_embedding_loss.default, aten.triplet_margin_loss.default,
    aten.multi_margin_loss.default,
}  # fmt: skip
MEAN, SUM = 1, 2  # torch's numbers for a loss's reduction
NARROW = (torch.float16, torch.bfloat16)


def means_to_sums(gm: fx.GraphModule) -> fx.GraphModule:
    """Means, variances, average pools to one point and elementwise losses become sums divided by a literal count: the
    graph has the global batch, so the count is that of the whole batch on every rank and in every microbatch.

    Losses are taken apart into their elementwise form (``reduction=0``; squares and absolute values for ``mse_loss``
    and ``l1_loss``) and a sum. Half precision is summed and divided in float32, as torch's own means are.

    Example:
        ``mean.dim(x, [1], True)`` of x [4, 8] -> ``div(sum.dim_IntList(x, [1], True), 8)``
    """
    graph = gm.graph
    for node in list(graph.nodes):
        rewrite = _rewrite_of(node)
        if rewrite is None:
            continue
        with graph.inserting_before(node):
            rewrite(_Builder(graph, node))
        graph.erase_node(node)
    drop_dead(graph)
    graph.lint()
    gm.recompile()
    return gm


def is_mean(node: fx.Node) -> bool:
    """Whether the pass has something to do with the node."""
    return _rewrite_of(node) is not None


class _Builder:
    """Makes nodes in the place of ``node``."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node
        self.given = arguments(node)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(self.graph, target, args, kwargs, like=self.node)

    def replace(self, new: fx.Node) -> None:
        want = self.node.meta["val"].dtype
        self.node.replace_all_uses_with(new if new.meta["val"].dtype == want else self(aten.to.dtype, new, want))

    def sum(self, x: fx.Node, dims: list[int] | None, keepdim: bool, dtype: torch.dtype | None = None) -> fx.Node:
        """Summed over ``dims`` (None: all), half precision in float32."""
        wide = dtype or x.meta["val"].dtype
        wide = torch.float32 if wide in NARROW else wide
        how = {} if wide == x.meta["val"].dtype else {"dtype": wide}
        if dims is None:
            return self(aten.sum.default, x, **how)
        return self(aten.sum.dim_IntList, x, dims, keepdim, **how)

    def mean(self, x: fx.Node, dims: list[int] | None, keepdim: bool, dtype: torch.dtype | None = None) -> fx.Node:
        shape = x.meta["val"].shape
        count = math.prod(shape if dims is None else (shape[d] for d in dims))
        return self.over(self.sum(x, dims, keepdim, dtype), count)

    def over(self, total: fx.Node, count: int) -> fx.Node:
        return total if count == 1 else self(aten.div.Tensor, total, count)


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = {a.name: a.default_value for a in schema.arguments}
    return given | dict(zip(given, node.args)) | dict(node.kwargs)


def _rewrite_of(node: fx.Node) -> Callable[[_Builder], None] | None:
    if node.op != "call_function":
        return None
    if node.target in MEANS:
        return _mean
    if node.target in VARIANCES:
        return _variance
    if node.target in POOLS and all(n == 1 for n in node.args[1]):  # type: ignore[union-attr]
        return _pool
    if node.target in LOSSES and arguments(node)["reduction"] in (MEAN, SUM):
        return _loss
    return None


def _mean(make: _Builder) -> None:
    x, dims = make.given["self"], make.given.get("dim")
    make.replace(make.mean(x, _dims(x, dims), make.given.get("keepdim", False), make.given["dtype"]))


def _dims(x: fx.Node, dims: Any) -> list[int] | None:
    if dims is None:
        return None
    ndim = x.meta["val"].ndim
    return [d % ndim for d in dims] if dims else list(range(ndim))


def _variance(make: _Builder) -> None:
    x, dims, keepdim = make.given["self"], make.given.get("dim"), make.given.get("keepdim", False)
    every = list(range(x.meta["val"].ndim))
    dims = _dims(x, dims) or every
    correction = make.given.get("correction", 1)
    correction = 1 if correction is None else correction
    if not make.given.get("unbiased", True):
        correction = 0
    if x.meta["val"].dtype in NARROW:
        x = make(aten.to.dtype, x, torch.float32)
    mean = make.mean(x, dims, True)
    centred = make(aten.sub.Tensor, x, mean)
    count = math.prod(x.meta["val"].shape[d] for d in dims)
    squares = make(aten.pow.Tensor_Scalar, centred, 2)
    degrees = max(count - correction, 0)
    var = make.over(make.sum(squares, dims, keepdim), degrees)
    if isinstance(make.node.meta["val"], torch.Tensor):
        make.replace(var)
        return
    if not keepdim:
        mean = make(aten.reshape.default, mean, list(make.node.meta["val"][1].shape))
    _replace_items(make, (var, mean))


def _replace_items(make: _Builder, values: tuple[fx.Node, ...]) -> None:
    for user in list(make.node.users):
        assert user.target is operator.getitem
        new, want = values[user.args[1]], user.meta["val"].dtype  # type: ignore[index]
        user.replace_all_uses_with(new if new.meta["val"].dtype == want else make(aten.to.dtype, new, want))
        make.graph.erase_node(user)


def _pool(make: _Builder) -> None:
    x = make.given["self"]
    ndim = x.meta["val"].ndim
    pooled = next(dims for op, dims in POOLS.items() if op is make.node.target)
    make.replace(make.mean(x, list(range(ndim - pooled, ndim)), True))


def _loss(make: _Builder) -> None:
    each = _elementwise(make)
    total = make.sum(each, None, False)
    if make.given["reduction"] == MEAN:
        total = make.over(total, each.meta["val"].numel())
    make.replace(total)


def _elementwise(make: _Builder) -> fx.Node:
    """The loss of every element (or of every row, where it has one a row), not reduced."""
    target = make.node.target
    if target in (aten.mse_loss.default, aten.l1_loss.default):
        gap = make(aten.sub.Tensor, make.given["self"], make.given["target"])
        return make(aten.pow.Tensor_Scalar, gap, 2) if target is aten.mse_loss.default else make(aten.abs.default, gap)
    args, kwargs = list(make.node.args), dict(make.node.kwargs)
    names = [a.name for a in make.node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index("reduction")
    if place < len(args):
        args[place] = 0
    else:
        kwargs["reduction"] = 0
    return call(make.graph, make.node.target, tuple(args), kwargs, like=make.node)
