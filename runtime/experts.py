"""Products with the weights of experts, every row with those of its own expert: ``torch.ops.autopar.experts_mm``;
``grouped_mm`` is the same of rows in groups, and torch's own where that has no kernel (float64).

Rows need not be sorted: the kernel sorts them. A rank that holds some of the experts computes their rows and leaves
zeros for the others, so the results of all ranks add up.

>>> import torch
>>> x, w = torch.ones(3, 2), torch.stack([torch.eye(2), 5 * torch.eye(2)])
>>> torch.ops.autopar.experts_mm(x, w, torch.tensor([1, 0, 1]), 0, 2)[:, 0]
tensor([5., 1., 5.])
>>> torch.ops.autopar.experts_mm(x, w[1:], torch.tensor([1, 0, 1]), 1, 2)[:, 0]
tensor([5., 0., 5.])
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from autopar.runtime.library import LIBRARY, composite, kernels


def _rows(ids: Tensor, start: int, held: int) -> Iterator[tuple[int, Tensor]]:
    """Of every expert held here that has rows: its place, and which rows these are. One wait for the device."""
    local = ids - start
    local = torch.where((local >= 0) & (local < held), local, held)
    counts = torch.bincount(local, minlength=held + 1).tolist()
    for expert, rows in enumerate(torch.split(local.argsort(stable=True), counts)[:held]):
        if len(rows):
            yield expert, rows


def _experts_mm(x: Tensor, w: Tensor, ids: Tensor, start: int, experts: int) -> Tensor:
    out = x.new_zeros(x.shape[0], w.shape[2])
    for expert, rows in _rows(ids, start, w.shape[0]):
        out[rows] = x[rows] @ w[expert]
    return out


def _experts_mm_fake(x: Tensor, w: Tensor, ids: Tensor, start: int, experts: int) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


def _experts_outer(x: Tensor, y: Tensor, ids: Tensor, start: int, held: int, experts: int) -> Tensor:
    """``out[e] = sum of the outer products x[r] y[r] over the rows r of expert e``: the gradient of the weights."""
    out = x.new_zeros(held, x.shape[1], y.shape[1])
    for expert, rows in _rows(ids, start, held):
        out[expert] = x[rows].T @ y[rows]
    return out


def _experts_outer_fake(x: Tensor, y: Tensor, ids: Tensor, start: int, held: int, experts: int) -> Tensor:
    return x.new_empty(held, x.shape[1], y.shape[1])


def numbers(rows: int, ends: Tensor) -> Tensor:
    """The number of the group of each row, groups ending at ``ends``.

    >>> numbers(4, torch.tensor([1, 1, 3])).tolist()
    [0, 2, 2, 3]
    """
    return torch.bucketize(torch.arange(rows, dtype=ends.dtype, device=ends.device), ends, right=True)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ids, *ctx.literals = inputs
    ctx.save_for_backward(x, w, ids)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (x, w, ids), (start, experts) = ctx.saved_tensors, ctx.literals
    needs_x, needs_w, *_ = ctx.needs_input_grad
    ops = torch.ops.autopar
    grad_x = ops.experts_mm(grad, w.transpose(1, 2), ids, start, experts) if needs_x else None
    grad_w = ops.experts_outer(x, grad, ids, start, w.shape[0], experts) if needs_w else None
    return grad_x, grad_w, None, None, None


kernels("experts_mm(Tensor x, Tensor w, Tensor ids, int start, int experts) -> Tensor", _experts_mm, _experts_mm_fake)
kernels(
    "experts_outer(Tensor x, Tensor y, Tensor ids, int start, int held, int experts) -> Tensor",
    _experts_outer,
    _experts_outer_fake,
)
grouped_mm = composite(
    "grouped_mm(Tensor x, Tensor w, Tensor offs) -> Tensor",
    lambda x, w, offs: torch.ops.autopar.experts_mm(x, w, numbers(len(x), offs), 0, len(w)),
)
torch.library.register_autograd("autopar::experts_mm", _backward, setup_context=_setup, lib=LIBRARY)


@register_flop_formula(torch.ops.autopar.experts_mm)
def _experts_mm_flops(x: Any, w: Any, ids: Any, start: int, experts: int, **_: Any) -> int:
    """Where all experts have equally many rows: which rank has how many is not known before the step."""
    return int(2 * x[0] * w[0] * w[1] * w[2] // experts)


@register_flop_formula(torch.ops.autopar.experts_outer)
def _experts_outer_flops(x: Any, y: Any, ids: Any, start: int, held: int, experts: int, **_: Any) -> int:
    return int(2 * x[0] * x[1] * y[1] * held // experts)
