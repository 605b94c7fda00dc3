"""PREPARE: cross entropy is a sum over rows over a count of labels, and rows keep the dims they came from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import autopar.runtime.ops  # noqa: F401  (defines autopar::cross_entropy_sum and cross_entropy_count)
from autopar.passes.drop_noops import drop_dead
from autopar.passes.facts import call
from autopar.passes.means_to_sums import MEAN, NARROW, SUM, arguments

aten = torch.ops.aten

NLL = {aten.nll_loss.default, aten.nll_loss_nd.default, aten.nll_loss2d.default}
LOG_SOFTMAX = {aten.log_softmax.int, aten._log_softmax.default}


@dataclass(frozen=True)
class _Loss:
    """A summed or averaged loss of class scores: ``dim`` of ``logits`` runs over classes."""

    logits: fx.Node
    target: fx.Node
    weight: fx.Node | None
    dim: int
    ignore_index: int
    smoothing: float
    mean: bool


def cross_entropy_keeps_dims(gm: fx.GraphModule) -> fx.GraphModule:
    """``cross_entropy`` of class indices, averaged or summed, becomes ``autopar.cross_entropy_sum`` of logits
    ``[..., V]`` and target ``[...]``, over ``autopar.cross_entropy_count`` of the target where it was a mean. Reshapes
    that only flattened the rows are looked through, so that batch and sequence stay two dims. So does ``nll_loss`` of
    a ``log_softmax``.

    Half precision logits are cast to float32 first: a sum over all tokens does not fit bfloat16. Probability targets
    keep their op: a mean of it becomes a sum over a literal count. So does the mean of an ``nll_loss`` of anything
    else, over `cross_entropy_count`. ``reduction="none"`` stays as it is.

    Example:
        ``cross_entropy_loss(view(h, [-1, V]), view(labels, [-1]))`` -> ``div(cross_entropy_sum(h, labels, None, -100,
        0.0), cross_entropy_count(labels, None, -100, float32))``
    """
    graph = gm.graph
    for node in list(graph.nodes):
        if not is_flat_loss(node):
            continue
        with graph.inserting_before(node):
            loss = _recognise(graph, node)
            if loss is not None:
                new = _sum_over_count(graph, node, loss)
            else:
                new = (_picked if node.target in NLL else _probabilities)(graph, node)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    drop_dead(graph)
    graph.lint()
    gm.recompile()
    return gm


def is_flat_loss(node: fx.Node) -> bool:
    """Whether the node is a reduced cross entropy, a mean of log likelihoods, or a sum of those of a log softmax."""
    if node.target is aten.cross_entropy_loss.default:
        given = arguments(node)
        return given["reduction"] == MEAN or (given["reduction"] == SUM and not _of_probabilities(given))
    if node.target not in NLL or arguments(node)["reduction"] not in (MEAN, SUM):
        return False
    return arguments(node)["reduction"] == MEAN or _log_softmax_of(arguments(node)["self"]) is not None


def _of_probabilities(given: dict[str, Any]) -> bool:
    return bool(given["target"].meta["val"].is_floating_point())


def _class_dim(logits: fx.Node) -> int:
    return 0 if logits.meta["val"].ndim == 1 else 1


def _recognise(graph: fx.Graph, node: fx.Node) -> _Loss | None:
    """None for probability targets, and for an ``nll_loss`` of no log softmax."""
    given = arguments(node)
    smoothing = float(given.get("label_smoothing", 0.0))
    logits = given["self"]
    if node.target in NLL:
        logits = _log_softmax_of(logits)
        if logits is None:
            return None
    elif _of_probabilities(given):
        return None
    mean = given["reduction"] == MEAN
    return _Loss(
        logits, given["target"], given["weight"], _class_dim(logits), int(given["ignore_index"]), smoothing, mean
    )


def _log_softmax_of(node: fx.Node) -> fx.Node | None:
    """What ``node`` is the log softmax over classes of."""
    if node.target not in LOG_SOFTMAX:
        return None
    x: Any = node.args[0]
    dim: Any = node.args[1]
    same = x.meta["val"].dtype == node.meta["val"].dtype and dim % x.meta["val"].ndim == _class_dim(node)
    return x if same else None


def _sum_over_count(graph: fx.Graph, node: fx.Node, loss: _Loss) -> fx.Node:
    logits, target = _keep_dims(graph, node, loss)
    dtype = node.meta["val"].dtype
    wide = torch.float32 if dtype in NARROW else dtype
    weight = loss.weight
    if wide != logits.meta["val"].dtype:
        logits = call(graph, aten.to.dtype, (logits, wide), like=node)
        weight = None if weight is None else call(graph, aten.to.dtype, (weight, wide), like=node)
    ops = torch.ops.autopar
    args = (logits, target, weight, loss.ignore_index, loss.smoothing)
    new = call(graph, ops.cross_entropy_sum.default, args, like=node)
    if loss.mean:
        count = call(graph, ops.cross_entropy_count.default, (target, weight, loss.ignore_index, wide), like=node)
        new = call(graph, aten.div.Tensor, (new, count), like=node)
        if weight is not None and loss.smoothing:  # torch divides two sums, of which one is 0 where the count is
            nothing = call(graph, aten.sub.Tensor, (count, count), like=node)
            new = call(
                graph, aten.add.Tensor, (new, call(graph, aten.div.Tensor, (nothing, count), like=node)), like=node
            )
    return new if wide == dtype else call(graph, aten.to.dtype, (new, dtype), like=node)


def _keep_dims(graph: fx.Graph, node: fx.Node, loss: _Loss) -> tuple[fx.Node, fx.Node]:
    """Logits with classes last and the target beside them, rows in the dims they had before they were flattened."""
    logits, target = loss.logits, loss.target
    ndim = logits.meta["val"].ndim
    if loss.dim != ndim - 1:
        order = [d for d in range(ndim) if d != loss.dim] + [loss.dim]
        return call(graph, aten.permute.default, (logits, order), like=node), target
    if ndim != 2:
        return logits, target
    unflat = _before_flattening(graph, node, logits, classes=True)
    rows = list(unflat.meta["val"].shape[:-1])
    if len(rows) < 2 and unflat is logits:
        return logits, target
    labels = _before_flattening(graph, node, target, classes=False)
    if list(labels.meta["val"].shape) != rows:
        labels = call(graph, aten.reshape.default, (target, rows), like=node)
    return unflat, labels


def _before_flattening(graph: fx.Graph, node: fx.Node, flat: fx.Node, classes: bool) -> fx.Node:
    """The tensor whose rows ``flat`` lists one after another; a cast on the way is done again after it."""
    if flat.target is aten.to.dtype and isinstance(flat.args[0], fx.Node):
        inner = _before_flattening(graph, node, flat.args[0], classes)
        if inner is flat.args[0]:
            return flat
        return call(graph, aten.to.dtype, (inner, flat.args[1]), like=flat)
    if flat.target is not aten.reshape.default or not isinstance(flat.args[0], fx.Node):
        return flat
    inner = _before_flattening(graph, node, flat.args[0], classes)
    want, have = flat.meta["val"].shape, inner.meta["val"].shape
    if len(have) < len(want) or (classes and have[-1] != want[-1]) or math.prod(have) != math.prod(want):
        return flat
    return inner


def _probabilities(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The mean over rows of a loss with probability targets: its sum over their number."""
    given = arguments(node)
    args = (given["self"], given["target"], given["weight"], SUM, given["ignore_index"], given["label_smoothing"])
    logits = given["self"].meta["val"]
    rows = logits.numel() // logits.shape[_class_dim(given["self"])]
    total = call(graph, aten.cross_entropy_loss.default, args, like=node)
    return total if rows == 1 else call(graph, aten.div.Tensor, (total, rows), like=node)


def _picked(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The mean of the log likelihoods that targets pick, as a sum over the count (or weight) of valid targets."""
    given = arguments(node)
    x, target, weight, ignore_index = (given[n] for n in ("self", "target", "weight", "ignore_index"))
    dtype = node.meta["val"].dtype
    wide = torch.float32 if dtype in NARROW else dtype
    if wide != dtype:
        x = call(graph, aten.to.dtype, (x, wide), like=node)
        weight = None if weight is None else call(graph, aten.to.dtype, (weight, wide), like=node)
    total = call(graph, node.target, (x, target, weight, SUM, ignore_index), like=node)
    args = (target, weight, ignore_index, wide)
    count = call(graph, torch.ops.autopar.cross_entropy_count.default, args, like=node)
    new = call(graph, aten.div.Tensor, (total, count), like=node)
    return new if wide == dtype else call(graph, aten.to.dtype, (new, dtype), like=node)
