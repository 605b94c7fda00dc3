"""Composite library ops ``torch.ops.autopar.*``: what the passes put in the place of ops that hide a global sum.

| op | what it is |
|---|---|
| ``cross_entropy_sum`` | summed cross entropy of logits ``[..., V]`` and class indices ``[...]``, dims kept apart |
| ``cross_entropy_count`` | what its mean divides by: the number, or class weight, of targets that count |
| ``cross_entropy_sum_sharded`` | the same sum of logits whose V is cut over a group; a result ``I`` |
| ``embedding_shard`` | rows of a table cut over V; zeros for an index that lies elsewhere, so the results are addends |
| ``take_shard`` | likewise of any tensor, whose dim ``dim`` is indexed; ``gather_shard``: as ``gather`` |
| ``batch_norm`` | train-mode batch norm that returns the new running statistics instead of writing them |

>>> import torch
>>> logits, target = torch.zeros(2, 3, 4), torch.tensor([[0, 1, -100], [2, -100, -100]])
>>> torch.ops.autopar.cross_entropy_sum(logits, target, None, -100, 0.0)
tensor(4.1589)
>>> torch.ops.autopar.cross_entropy_count(target, None, -100, torch.float32)
tensor(3.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.collectives import launch, wait
from autopar.runtime.library import LIBRARY, composite, kernels

# Cross entropy


def _cross_entropy_sum(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float
) -> Tensor:
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        weight,
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=smoothing,
    )


def _cross_entropy_count(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    valid = target != ignore_index
    if weight is None:
        return valid.sum(dtype=dtype)
    return torch.where(valid, weight[torch.where(valid, target, 0)], 0).sum(dtype=dtype)


cross_entropy_sum = composite(
    "cross_entropy_sum(Tensor logits, Tensor target, Tensor? weight, int ignore_index, float smoothing) -> Tensor",
    _cross_entropy_sum,
)
cross_entropy_count = composite(
    "cross_entropy_count(Tensor target, Tensor? weight, int ignore_index, ScalarType dtype) -> Tensor",
    _cross_entropy_count,
)


def _all_reduce(x: Tensor, how: str, group: str) -> Tensor:
    return wait(launch("all_reduce", group, x.contiguous(), how), group)


def _own(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Where the target class lies in this shard, and its index there (0 elsewhere)."""
    inside = (target >= start) & (target < start + logits.shape[-1])
    return inside, torch.where(inside, target - start, 0)


def _vocabulary(
    logits: Tensor, target: Tensor, group: str, start: int, ignore_index: int, smoothing: float, vocab: int
) -> tuple[Tensor, Tensor]:
    x = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    empty = x.shape[-1] == 0
    top = x.new_full(x.shape[:-1], float("-inf")) if empty else x.amax(-1)
    top = _all_reduce(top, "max", group)
    inside, index = _own(x, target, start)
    picked = x.new_zeros(target.shape) if empty else torch.where(inside, x.gather(-1, index[..., None])[..., 0], 0)
    addends = [(x - top[..., None]).exp().sum(-1), picked]
    if smoothing:
        addends.append(x.sum(-1))
    exp_sum, picked, *rest = _all_reduce(torch.stack(addends), "sum", group)
    lse = top + exp_sum.log()
    each = lse - (1 - smoothing) * picked
    if smoothing:
        each = each - smoothing / vocab * rest[0]
    return torch.where(target != ignore_index, each, 0).sum().to(logits.dtype), lse


def _vocabulary_fake(
    logits: Tensor, target: Tensor, group: str, start: int, ignore_index: int, smoothing: float, vocab: int
) -> tuple[Tensor, Tensor]:
    wide = torch.float32 if logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype
    return logits.new_empty(()), logits.new_empty(logits.shape[:-1], dtype=wide)


def _vocabulary_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, _, *ctx.literals = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _vocabulary_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    ops = torch.ops.autopar
    return ops.vocabulary_cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.literals), *[None] * 6


def _vocabulary_gradient(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    start: int,
    ignore_index: int,
    smoothing: float,
    vocab: int,
) -> Tensor:
    """Softmax minus the (smoothed) one-hot of the rows that count: nothing is sent, as the result is ``I``."""
    out = (logits.to(lse.dtype) - lse[..., None]).exp_()
    inside, index = _own(logits, target, start)
    if logits.shape[-1]:
        out.scatter_add_(-1, index[..., None], inside.to(out.dtype)[..., None] * (smoothing - 1))
    if smoothing:
        out -= smoothing / vocab
    out *= torch.where(target != ignore_index, grad.to(out.dtype), 0)[..., None]
    return out.to(logits.dtype)


kernels(
    "vocabulary_cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor lse, int start, "
    "int ignore_index, float smoothing, int vocab) -> Tensor",
    _vocabulary_gradient,
    lambda grad, logits, *_: torch.empty_like(logits),
)
kernels(
    "vocabulary_cross_entropy(Tensor logits, Tensor target, str group, int start, int ignore_index, float smoothing, "
    "int vocab) -> (Tensor, Tensor)",
    _vocabulary,
    _vocabulary_fake,
)
torch.library.register_autograd(
    "autopar::vocabulary_cross_entropy", _vocabulary_backward, setup_context=_vocabulary_setup, lib=LIBRARY
)
cross_entropy_sum_sharded = composite(
    "cross_entropy_sum_sharded(Tensor logits, Tensor target, str group, int start, int ignore_index, float smoothing, "
    "int vocab) -> Tensor",
    lambda *args: torch.ops.autopar.vocabulary_cross_entropy(*args)[0],
)


# Embedding


def _embedding_shard(weight: Tensor, indices: Tensor, start: int, padding_idx: int) -> Tensor:
    size = weight.shape[0]
    if size == 0:
        return (weight.sum() * 0).expand(*indices.shape, weight.shape[1]).contiguous()
    local = indices - start
    inside = (local >= 0) & (local < size)
    rows = torch.where(inside, local, 0)
    pad = padding_idx - start if 0 <= padding_idx - start < size and padding_idx >= 0 else -1
    return torch.where(inside[..., None], torch.ops.aten.embedding(weight, rows, pad), 0)


embedding_shard = composite(
    "embedding_shard(Tensor weight, Tensor indices, int start, int padding_idx) -> Tensor", _embedding_shard
)


def _take_shard(x: Tensor, index: Tensor, dim: int, start: int, total: int) -> Tensor:
    local = torch.where(index < 0, index + total, index) - start
    inside = (local >= 0) & (local < x.shape[dim])
    place: Any = (*[slice(None)] * dim, torch.where(inside, local, 0))
    taken = x[place]
    return torch.where(inside.reshape(*inside.shape, *[1] * (x.ndim - dim - 1)), taken, 0)


def _gather_shard(x: Tensor, index: Tensor, dim: int, start: int, total: int) -> Tensor:
    local = index - start
    inside = (local >= 0) & (local < x.shape[dim])
    return torch.where(inside, x.gather(dim, torch.where(inside, local, 0)), 0)


take_shard = composite("take_shard(Tensor x, Tensor index, int dim, int start, int total) -> Tensor", _take_shard)
gather_shard = composite("gather_shard(Tensor x, Tensor index, int dim, int start, int total) -> Tensor", _gather_shard)


# Batch norm


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    mean, var = running_mean.detach().clone(), running_var.detach().clone()
    y = torch.batch_norm(x, weight, bias, mean, var, True, momentum, eps, torch.backends.cudnn.enabled)
    return y, mean, var


batch_norm = composite(
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, float momentum, "
    "float eps) -> (Tensor, Tensor, Tensor)",
    _batch_norm,
)
