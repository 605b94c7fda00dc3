"""Small models with losses, statistics or normalisers of the whole batch; factories of (model, args, kwargs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import building
import torch
import torch.nn.functional as F
from building import Built
from torch import Tensor, nn

MODELS: dict[str, Callable[[], Built]] = {}
WHOLE: set[str] = set()  # those that no microbatch can compute from its own rows
B, T, D, C = 12, 4, 6, 8  # rows, tokens, width, classes


def batch(make: Callable[[], Built]) -> Callable[[], Built]:
    """Register a factory that any number of microbatches computes exactly."""
    MODELS[make.__name__] = make
    return make


def whole(make: Callable[[], Built]) -> Callable[[], Built]:
    """Register a factory that needs the whole batch at once."""
    WHOLE.add(make.__name__)
    return batch(make)


def net(forward: Callable[..., Any], *args: Any, **parts: nn.Module | Tensor) -> Built:
    """As `building.net`, with its inputs."""
    return building.net(forward, **parts), args, {}


def images(*size: int) -> Tensor:
    return torch.randn(B, 4, *size) + torch.arange(float(B)).reshape(B, 1, *[1] * len(size))


def labels(*shape: int) -> Tensor:
    """Of ever fewer valid tokens from row to row; the last rows have none."""
    found = torch.randint(0, C, shape)
    if len(shape) > 1:
        for row in range(shape[0]):
            found[row, max(shape[1] - row // 2, 0) :] = -100
    return found


# -- statistics of the batch --


def normed(norm: nn.Module, *size: int) -> Built:
    conv: Any = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(size)]

    def forward(self, x):
        h = self.norm(self.conv(x))
        return (torch.tanh(h) * x.mean(1, keepdim=True)).square().mean()

    return net(forward, images(*size), conv=conv(4, 6, *([1] if size else [])), norm=norm)


@whole
def batch_norm_1d() -> Built:
    return normed(nn.BatchNorm1d(6))


@whole
def batch_norm_1d_of_sequences_cumulative() -> Built:
    return normed(nn.BatchNorm1d(6, momentum=None), 4)


@whole
def batch_norm_2d() -> Built:
    return normed(nn.BatchNorm2d(6), 4, 2)


@whole
def batch_norm_2d_without_buffers() -> Built:
    return normed(nn.BatchNorm2d(6, track_running_stats=False), 4, 2)


@whole
def batch_norm_3d_without_weights() -> Built:
    return normed(nn.BatchNorm3d(6, affine=False), 2, 4, 2)


@whole
def sync_batch_norm() -> Built:
    return normed(nn.SyncBatchNorm(6), 4, 2)


@batch
def group_norm() -> Built:
    return normed(nn.GroupNorm(3, 6), 4, 2)


@batch
def instance_norm() -> Built:
    return normed(nn.InstanceNorm2d(6, affine=True), 4, 2)


@whole
def instance_norm_with_running_statistics() -> Built:
    return normed(nn.InstanceNorm2d(6, affine=True, track_running_stats=True), 4, 2)


@batch
def frozen_instance_norm() -> Built:
    def forward(self, x):
        h = F.instance_norm(self.conv(x), self.mean, self.var, self.weight, self.bias, use_input_stats=False)
        return h.square().mean()

    numbers = {"mean": torch.randn(6), "var": torch.rand(6) + 0.5}
    trained = {n: nn.Parameter(torch.randn(6)) for n in ("weight", "bias")}
    return net(forward, images(4), conv=nn.Conv1d(4, 6, 1), **numbers, **trained)


@batch
def local_response_norm() -> Built:
    return normed(nn.LocalResponseNorm(3), 4, 2)


@batch
def rms_norm() -> Built:
    def forward(self, x):
        return self.norm(self.fc(x)).square().mean()

    return net(forward, torch.randn(B, T, D), fc=nn.Linear(D, C), norm=nn.RMSNorm(C))


@whole
def standardised_by_the_batch() -> Built:
    def forward(self, x):
        h = self.fc(x)
        h = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-3).sqrt()
        return (h * self.scale).tanh().sum()

    return net(forward, torch.randn(B, D), fc=nn.Linear(D, C), scale=nn.Parameter(torch.randn(C)))


@whole
def standard_deviation_of_losses() -> Built:
    def forward(self, x, y):
        each = (self.fc(x).squeeze(-1) - y).square()
        return each.mean() + 0.5 * each.std() + each.mean() * self.fc(x).mean()

    return net(forward, torch.randn(B, D), torch.randn(B), fc=nn.Linear(D, 1))


@whole
def covariance_of_features() -> Built:  # as Barlow Twins and VICReg have it
    def forward(self, x, y):
        a, b = self.fc(x), self.fc(y)
        a, b = ((v - v.mean(0)) / v.std(0) for v in (a, b))
        c = a.T @ b / len(a)
        off = c - torch.diag(torch.diagonal(c))
        return (torch.diagonal(c) - 1).square().sum() + 0.01 * off.square().sum()

    return net(forward, torch.randn(B, D), torch.randn(B, D), fc=nn.Linear(D, C))


@whole
def softmax_over_rows() -> Built:
    def forward(self, x):
        h = self.fc(x)
        pooled = (h.softmax(0) * h).sum(0) + h.logsumexp(0) + F.normalize(h, dim=0).amax(0)
        return pooled.square().mean()

    return net(forward, torch.randn(B, D), fc=nn.Linear(D, C))


@whole
def sinkhorn_assignments() -> Built:  # as SwAV balances prototypes
    def forward(self, x, y):
        scores = self.fc(x)
        q = torch.exp(self.fc(y) / 0.5).T
        q = q / q.sum()
        for _ in range(2):
            q = q / q.sum(1, keepdim=True) / q.shape[0]
            q = q / q.sum(0, keepdim=True) / q.shape[1]
        return -(q.T * q.shape[1] * scores.log_softmax(1)).sum(1).mean()

    return net(forward, torch.randn(B, D), torch.randn(B, D), fc=nn.Linear(D, C, bias=False))


@whole
def hard_examples() -> Built:
    def forward(self, x, y):
        each = F.cross_entropy(self.fc(x), y, reduction="none")
        return each.topk(2).values.mean() + (each.sort().values * torch.arange(len(each))).mean() + each.quantile(0.5)

    return net(forward, torch.randn(B, D), torch.randint(0, C, (B,)), fc=nn.Linear(D, C))


# -- losses over rows --


def classified(loss: Callable[[Tensor, Tensor], Tensor], target: Tensor, *dims: int) -> Built:
    """``loss`` of scores ``[B, dims, C]``."""

    def forward(self, x, y):
        return loss(self.fc(torch.tanh(self.first(x))), y)

    return net(forward, torch.randn(B, *dims, D), target, first=nn.Linear(D, D), fc=nn.Linear(D, C))


@batch
def cross_entropy_smoothed_weighted_ignored() -> Built:
    weight = torch.rand(C) + 0.5

    def loss(x, y):
        return F.cross_entropy(x.flatten(0, 1), y.flatten(), weight.to(x.dtype), label_smoothing=0.1)

    return classified(loss, labels(B, T), T)


@batch
def cross_entropy_of_probabilities() -> Built:
    target = torch.rand(B, C).softmax(-1)
    return classified(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), target)


@batch
def cross_entropy_of_dense_maps() -> Built:
    def loss(x, y):
        return F.cross_entropy(x.permute(0, 3, 1, 2), y, ignore_index=3)

    return classified(loss, torch.randint(0, C, (B, T, 2)), T, 2)


@batch
def nll_weighted() -> Built:
    weight = torch.rand(C) + 0.5
    return classified(lambda x, y: F.nll_loss(F.log_softmax(x, -1), y, weight.to(x.dtype)), labels(B))


@batch
def binary_with_positive_weights() -> Built:
    weight, positive = torch.rand(C), torch.rand(C) + 1

    def loss(x, y):
        return F.binary_cross_entropy_with_logits(x, y, weight.to(x.dtype), pos_weight=positive.to(x.dtype))

    return classified(loss, torch.rand(B, C).round())


@batch
def kl_batchmean() -> Built:
    target = torch.randn(B, C).softmax(-1)
    return classified(lambda x, y: F.kl_div(F.log_softmax(x, -1), y, reduction="batchmean"), target)


@batch
def kl_batchmean_of_logarithms() -> Built:
    target = torch.randn(B, T, C).log_softmax(-1)
    return classified(lambda x, y: F.kl_div(F.log_softmax(x, -1), y, reduction="batchmean", log_target=True), target, T)


@batch
def focal() -> Built:
    def loss(x, y):
        each = F.cross_entropy(x, y, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()

    return classified(loss, torch.randint(0, C, (B,)))


# -- contrast within the batch --


@whole
def clip() -> Built:
    def forward(self, x, y):
        a, b = F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1)
        logits = self.scale.exp() * a @ b.T
        own = torch.arange(len(a))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    parts = {"image": nn.Linear(D, C), "text": nn.Linear(D, C), "scale": nn.Parameter(torch.tensor(1.0))}
    return net(forward, torch.randn(B, D), torch.randn(B, D), **parts)


@whole
def siglip() -> Built:
    def forward(self, x, y):
        a, b = F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1)
        logits = a @ b.T * self.scale.exp() + self.bias
        sign = 2 * torch.eye(len(a)).to(logits.dtype) - 1
        return -F.logsigmoid(sign * logits).sum() / len(a)

    parts = {"image": nn.Linear(D, C), "text": nn.Linear(D, C)}
    numbers = {"scale": nn.Parameter(torch.tensor(1.0)), "bias": nn.Parameter(torch.tensor(-1.0))}
    return net(forward, torch.randn(B, D), torch.randn(B, D), **parts, **numbers)


@whole
def supervised_contrast() -> Built:
    def forward(self, x, y):
        z = F.normalize(self.fc(x), dim=-1)
        itself = torch.eye(len(z), dtype=torch.bool)
        logits = (z @ z.T / 0.5).masked_fill(itself, -1e9)
        positive = (y[:, None] == y[None]) & ~itself
        logp = logits - logits.logsumexp(1, keepdim=True)
        return -(logp * positive).sum(1).div(positive.sum(1).clamp(min=1)).mean()

    return net(forward, torch.randn(B, D), torch.arange(B) % 3, fc=nn.Linear(D, C))


# -- routers --


@whole
def balance_of_experts() -> Built:
    def forward(self, x, y):
        logits = self.router(x)
        p = logits.softmax(-1)
        top, ids = p.topk(2, -1)
        gate = torch.zeros_like(p).scatter(-1, ids, top)
        used = F.one_hot(ids, 4).to(p.dtype).sum(-2).mean((0, 1))
        out = torch.einsum("bte,btd,edf->btf", gate, x, self.experts)
        return F.mse_loss(out, y) + 0.1 * 4 * (used * p.mean((0, 1))).sum()

    parts = {"router": nn.Linear(D, 4), "experts": nn.Parameter(torch.randn(4, D, D) * 0.3)}
    return net(forward, torch.randn(B, T, D), torch.randn(B, T, D), **parts)


@whole
def tokens_dropped_by_capacity() -> Built:  # as Switch Transformers: who comes first in the batch gets the place
    def forward(self, x, y):
        tokens = x.flatten(0, 1)
        p = self.router(tokens).softmax(-1)
        gate, expert = p.max(-1)
        chosen = F.one_hot(expert, 4)
        place = (chosen.cumsum(0) * chosen).sum(-1) - 1
        kept = gate * (place < 6)
        out = torch.einsum("ne,nd,edf->nf", chosen.to(p.dtype) * kept[:, None], tokens, self.experts)
        return F.mse_loss(out.view_as(x), y)

    parts = {"router": nn.Linear(D, 4), "experts": nn.Parameter(torch.randn(4, D, D) * 0.3)}
    return net(forward, torch.randn(B, T, D), torch.randn(B, T, D), **parts)


@batch
def z_loss_of_router() -> Built:
    def forward(self, x, y):
        logits = self.router(x)
        out = torch.einsum("bte,btd,edf->btf", logits.softmax(-1), x, self.experts)
        return F.mse_loss(out, y) + 0.01 * logits.logsumexp(-1).square().mean()

    parts = {"router": nn.Linear(D, 4), "experts": nn.Parameter(torch.randn(4, D, D) * 0.3)}
    return net(forward, torch.randn(B, T, D), torch.randn(B, T, D), **parts)


# -- normalisers that depend on inputs only --


@batch
def mean_over_a_mask() -> Built:
    def forward(self, x, y, mask):
        each = (self.fc(x).squeeze(-1) - y).square()
        return (each * mask).sum() / mask.sum()

    mask = (torch.arange(B)[:, None] // 3 > torch.arange(T)).float()
    return net(forward, torch.randn(B, T, D), torch.randn(B, T), mask, fc=nn.Linear(D, 1))


@batch
def mean_of_means_of_rows() -> Built:
    def forward(self, x, y, mask):
        each = (self.fc(x).squeeze(-1) - y).square()
        rows = (each * mask).sum(1) / mask.sum(1).clamp(min=1)
        return rows.sum() / (mask.sum(1) > 0).sum()

    mask = (torch.arange(B)[:, None] // 3 > torch.arange(T)).float()
    return net(forward, torch.randn(B, T, D), torch.randn(B, T), mask, fc=nn.Linear(D, 1))


@batch
def weights_normalised_over_the_batch() -> Built:
    def forward(self, x, y, weight):
        each = F.cross_entropy(self.fc(x), y, reduction="none")
        weight = weight / weight.sum() + weight.softmax(0) + (weight - weight.mean()) / weight.std()
        return (each * weight).sum()

    return net(forward, torch.randn(B, D), torch.randint(0, C, (B,)), torch.rand(B), fc=nn.Linear(D, C))


@batch
def tokens_and_rows_weighted() -> Built:
    def forward(self, x, y, weight):
        each = F.cross_entropy(self.fc(x).flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
        valid = y != -100
        per_token = (each * weight[:, None] * valid).sum() / (weight[:, None] * valid).sum().clamp(min=1e-6)
        return per_token + each.sum() / valid.sum().to(each.dtype)

    return net(forward, torch.randn(B, T, D), labels(B, T), torch.rand(B), fc=nn.Linear(D, C))


@batch
def number_of_items_given() -> Built:  # as transformers does with gradient accumulation
    def forward(self, x, y, n):
        total = F.cross_entropy(self.fc(x).flatten(0, 1), y.flatten(), reduction="sum")
        return total / n + self.fc(x).logsumexp(-1).square().sum() / n.clamp(min=1)

    y = labels(B, T)
    return net(forward, torch.randn(B, T, D), y, (y != -100).sum(), fc=nn.Linear(D, C))


@batch
def valid_token_in_one_row_only() -> Built:
    y = torch.full((B, T), -100)
    y[7, 1:3] = 2
    return classified(lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()), y, T)


@batch
def no_valid_token() -> Built:
    y = torch.full((B, T), -100)
    return classified(lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()), y, T)


@batch
def classes_without_weight() -> Built:
    weight = torch.rand(C)
    weight[3] = 0.0

    def loss(x, y):
        return F.cross_entropy(x.flatten(0, 1), y.flatten(), weight.to(x.dtype), label_smoothing=0.1)

    return classified(loss, torch.full((B, T), 3), T)


@batch
def nothing_in_the_mask() -> Built:
    def forward(self, x, mask):
        return (self.fc(x).squeeze(-1) * mask).sum() / mask.sum()

    return net(forward, torch.randn(B, D), torch.zeros(B), fc=nn.Linear(D, 1))
