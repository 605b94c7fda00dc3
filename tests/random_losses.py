"""The losses of ``random_models.py``: of values that nobody has read, weighted, counted and summed in many ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS_VALID = 1  # a place among the first rows, so that two rows alone have a label too


def first(made: Any) -> Any:
    return made[0] if made else None


def per_row(m: Any, x: Any) -> Any:
    """A regression to an input, weighted by tokens or not."""
    if not x.rows_first or m.chance(0.3):
        how = m.one([
            lambda x: x.square().mean(), lambda x: x.sin().sum() / 50, lambda x: x.mean(),
            lambda x: (x - 0.3).pow(4).mean(),
            lambda x: F.mse_loss(x, torch.zeros_like(x)), lambda x: x.square().sum() / x.numel(),
            lambda x: x.square().sum(-1).mean() if x.ndim else x * 0.5,
        ])  # fmt: skip
        return m.emit(lambda s, x: how(x), x)
    target = m.input(torch.randn(x.shape))
    if x.ndim > 1 and m.chance(0.4):
        keep = m.input((torch.rand(x.shape[:2]) < 0.6).float())
        return m.emit(lambda s, x, y, w: weighted(x, y, w), x, target, keep)
    how = m.one([
        F.mse_loss, F.smooth_l1_loss, lambda x, y: F.mse_loss(x, y, reduction="sum") / 40, F.huber_loss,
        lambda x, y: (x - y).square().mean(-1).sum() / x.shape[0], lambda x, y: -F.cosine_similarity(x, y, -1).mean(),
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    ])  # fmt: skip
    return m.emit(lambda s, x, y: how(x, y), x, target)


def weighted(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    w = w.reshape(*w.shape, *[1] * (x.ndim - 2)).expand_as(x)
    return ((x - y).square() * w).sum() / w.sum().clamp(min=1)


def classes(m: Any, x: Any) -> Any:
    """Cross entropy of the last dim, or of dim 1, with what it can be asked for."""
    if not x.rows_first or x.ndim < 2:
        return per_row(m, x)
    last = x.ndim == 2 or m.chance(0.7)
    n, shape = (x.shape[-1], x.shape[:-1]) if last else (x.shape[1], (x.shape[0], *x.shape[2:]))
    labels = torch.randint(0, n, shape)
    ignored = m.one([-100, -100, 0])
    labels[torch.rand(shape) < 0.3] = ignored
    labels[0] = ignored if m.chance(0.5) else labels[0]
    labels.flatten()[-1] = labels.flatten()[FEW_ROWS_VALID] = n - 1
    smoothing, how = m.one([0.0, 0.0, 0.1]), m.one(["mean", "mean", "mean", "sum", "nll", "masked", "gather"])
    weight = m.buffer(torch.rand(n) + 0.5) if m.chance(0.25) else None
    y = m.input(labels)

    def run(s: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if last:
            x, y = x.reshape(-1, n), y.reshape(-1)
        elif how == "gather":
            x, y = x.movedim(1, -1), y
        w = weight(s) if weight else None
        if how == "nll":
            return F.nll_loss(x.log_softmax(1), y, w, ignore_index=ignored)
        if how == "gather":
            keep = (y != ignored).to(x.dtype)
            picked = x.log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            return -(picked * keep).sum() / keep.sum()
        options = {"weight": w, "ignore_index": ignored, "label_smoothing": smoothing}
        if how == "masked":
            each = F.cross_entropy(x, y, reduction="none", **options)
            return each.sum() / (y != ignored).sum()
        return F.cross_entropy(x, y, reduction=how, **options) / (20 if how == "sum" else 1)

    return m.emit(run, x, y)


def finish(m: Any) -> None:
    """A loss of what nobody has read, some of which may be left out."""
    ends = [v for v in m.vars if v.float and v.at >= 0 and v.at not in m.used]
    chosen = ends[-1:] + m.rng.sample(ends[:-1], min(len(ends) - 1, m.rng.randint(0, 3))) if ends else []
    terms = [first(m.one([per_row, classes])(m, v)) for v in chosen]
    terms = [t for t in terms if t is not None and t.ndim == 0]
    if not any(t.grad for t in terms):
        terms.append(add_plain_loss(m))
    scale = m.one([1.0, 0.5])
    decay = m.parameter(4, 3) if m.chance(0.15) else None

    def total(s: nn.Module, *losses: Tensor) -> Tensor:
        loss = losses[0]
        for more in losses[1:]:
            loss = loss + scale * more
        return loss if decay is None else loss + 0.1 * decay(s).square().sum()

    m.emit(total, *terms)


def add_plain_loss(m: Any) -> Any:
    """A term whose gradient nobody doubts; after the loss, the two together."""
    m.model.register_parameter("plain", nn.Parameter(torch.randn(5)))
    x, before = m.input(torch.randn(m.rows, 5)), [v for v in m.vars[-1:] if v.ndim == 0]
    return first(m.emit(lambda s, x, *loss: (x * s.plain).sum(-1).tanh().square().mean() + sum(loss), x, *before))
