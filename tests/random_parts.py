"""More of what ``random_models.py`` draws from: attention, random numbers, convolutions, indexing,
experts, loops, blocks, norms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def first(made: Any) -> Any:
    return made[0] if made else None


def sequence(m: Any) -> Any:
    return m.pick(lambda v: v.rows_first and v.ndim == 3)


def linear(m: Any, inside: int, outside: int, bias: bool = True) -> Any:
    return m.module(("linear", inside, outside, bias), lambda: nn.Linear(inside, outside, bias))


# -- attention

MASKS = {
    "none": lambda q, k: None,
    "triu": lambda q, k: torch.full((q, k), float("-inf")).triu(1),
    "compare": lambda q, k: torch.arange(q)[:, None] >= torch.arange(k)[None],
    "window": lambda q, k: (torch.arange(q)[:, None] - torch.arange(k)[None]).abs() <= 1,
    "alibi": lambda q, k: -0.5 * (torch.arange(q)[:, None] - torch.arange(k)[None]).abs().float(),
}


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e9) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ v


def attention(m: Any) -> Any:
    """Self attention: one projection packed in some order, or three; heads grouped or not; masks."""
    x = sequence(m)
    if not x:
        return None
    heads, size, length = m.one([1, 2, 3, 4, 6]), m.one([2, 3, 4]), x.shape[1]
    groups = m.one([g for g in range(1, heads + 1) if heads % g == 0])
    mask, fused, keep = MASKS[m.one(list(MASKS))], m.chance(0.5), None
    if m.chance(0.2):
        keep = m.input(torch.arange(length) < torch.randint(1, length + 1, (m.rows, 1)))
    p = 0.2 if m.chance(0.1) else 0.0
    causal = fused and keep is None and m.chance(0.4)
    sizes = [heads * size, groups * size, groups * size]
    packed = linear(m, x.shape[2], sum(sizes), m.chance(0.5))
    interleaved = groups == heads and m.chance(0.3)

    def run(s: nn.Module, x: Tensor, *more: Tensor) -> Tensor:
        h = packed(s)(x)
        if interleaved:
            q, k, v = h.view(x.shape[0], length, heads, 3 * size).transpose(1, 2).chunk(3, -1)
        else:
            q, k, v = (heads_of(t, n) for t, n in zip(h.split(sizes, -1), (heads, groups, groups)))
        own = mask(length, length)
        for kept in more:
            own = kept[:, None, None] if own is None or own.dtype != torch.bool else own & kept[:, None, None]
        if fused and causal:
            out = F.scaled_dot_product_attention(q, k, v, None, p, True, enable_gqa=groups < heads)
        else:
            k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, own, p) if fused else by_hand(q, k, v, own)
        return out.transpose(1, 2).flatten(2)

    made = first(m.emit(run, x, *([keep] if keep else [])))
    if made is None or m.chance(0.2):
        return made
    out = linear(m, heads * size, x.shape[2])
    return m.emit(lambda s, x, a: x + out(s)(a), x, made)


def cross_attention(m: Any) -> Any:
    x, y, heads = sequence(m), sequence(m), m.one([1, 2, 4])
    if not x or not y:
        return None
    q, k, v = (linear(m, t.shape[2], heads * 3, False) for t in (x, y, y))
    fused = m.chance(0.5)

    def run(s: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        parts = heads_of(q(s)(x), heads), heads_of(k(s)(y), heads), heads_of(v(s)(y), heads)
        out = F.scaled_dot_product_attention(*parts) if fused else by_hand(*parts, None)
        return out.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)

    return m.emit(run, x, y)


def rotary(m: Any) -> Any:
    x = m.pick(lambda v: v.rows_first and v.ndim == 3 and v.shape[2] % 2 == 0)
    if not x:
        return None
    interleaved, half = m.chance(0.5), x.shape[2] // 2

    def run(s: nn.Module, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1])[:, None] * 0.5 ** torch.arange(half)[None]
        cos, sin = angle.cos(), angle.sin()
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        pair = (a * cos - b * sin, a * sin + b * cos)
        return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

    return m.emit(run, x)


# -- random numbers


def noise(m: Any) -> Any:
    x, p = m.pick(lambda v: v.ndim >= 1), m.one([0.1, 0.5])
    if not x or not x.rows_first:
        return None
    how = m.one([
        lambda x: F.dropout(x, p, True), lambda x: x + 0.1 * torch.randn_like(x), lambda x: x * torch.rand(x.shape),
        lambda x: x * (torch.rand(x.shape[0], *[1] * (x.ndim - 1)) < p).to(x.dtype) / p,
    ])  # fmt: skip
    return m.emit(lambda s, x: how(x), x)


# -- convolutions, pooling


def convolution(m: Any) -> Any:
    x = m.pick(lambda v: v.rows_first and v.ndim in (3, 4) and min(v.shape[2:]) >= 3)
    if not x:
        return None
    inside, n = x.shape[1], x.ndim - 2
    groups = m.one([g for g in range(1, inside + 1) if inside % g == 0])
    outside, kernel = groups * m.one([1, 2, 3]), m.one([1, 2, 3])
    stride, dilation = m.one([1, 1, 2]), m.one([1, 1, 2])
    key = (inside, outside, kernel, stride, m.one([0, 1]), dilation, groups, m.chance(0.6))
    if m.chance(0.2):
        key = (inside, outside, kernel, stride, 0, 0, groups, key[-1])
        kind = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d}[n]
    else:
        kind = {1: nn.Conv1d, 2: nn.Conv2d}[n]
        if min(x.shape[2:]) + 2 * key[4] <= dilation * (kernel - 1):
            return None
    layer = m.module((kind, *key), lambda: kind(*key))
    return m.emit(lambda s, x: layer(s)(x), x)


def pooling(m: Any) -> Any:
    x = m.pick(lambda v: v.rows_first and v.ndim in (3, 4) and min(v.shape[2:]) >= 2)
    two = x and x.ndim == 4
    how = m.one([
        lambda x: (F.max_pool2d if two else F.max_pool1d)(x, 2),
        lambda x: (F.avg_pool2d if two else F.avg_pool1d)(x, 2),
        lambda x: (F.adaptive_avg_pool2d if two else F.adaptive_avg_pool1d)(x, 1),
        lambda x: F.interpolate(x, scale_factor=2.0),
    ])  # fmt: skip
    return x and m.emit(lambda s, x: how(x), x, sharp=True)


# -- indexing, experts


def by_ids(m: Any) -> Any:
    """Positions of a sequence chosen by an input of ids, or written to by it."""
    x = sequence(m)
    if not x:
        return None
    n, width = x.shape[1], x.shape[2]
    ids = m.input(torch.randint(0, n, (m.rows, m.one([2, 3, n]))))
    as_long = lambda i: i.unsqueeze(-1).expand(-1, -1, width)
    how = m.one(["gather", "index", "add", "scatter_sum", "one_hot", "take", "put", "select"])
    size, k = m.one([n, n + 1]), ids.shape[1]
    every = {
        "gather": lambda x, i: x.gather(1, as_long(i)),
        "index": lambda x, i: x[torch.arange(x.shape[0])[:, None], i],
        "add": lambda x, i: x.new_zeros(len(x), size, width).scatter_add(1, as_long(i), x[:, :1] + i[..., None]),
        "scatter_sum": lambda x, i: x.scatter_reduce(1, as_long(i), x[:, :1].expand(-1, k, -1), "sum"),
        "one_hot": lambda x, i: F.one_hot(i, n).to(x.dtype) @ x,
        "take": lambda x, i: torch.take_along_dim(x, i[..., None], 1),
        "put": lambda x, i: x.index_put((torch.arange(x.shape[0])[:, None], i), x[:, :1], accumulate=True),
        "select": lambda x, i: x[torch.arange(x.shape[0]), i[:, 0]],
    }  # fmt: skip
    f = every[how]
    return m.emit(lambda s, x, i: f(x, i), x, ids)


def in_place(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim == 3 and v.fixed == [1, 2] and v.shape[1] > 1)
    if not x:
        return None
    n = x.shape[1]

    def run(s: nn.Module, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        z[:, 1:] = x[:, :-1]
        z[:, 0] += x[:, n - 1] * 2
        z[..., ::2].mul_(0.5)
        return z.index_add(1, torch.tensor([0, n - 1]), x[:, :2])

    return m.emit(run, x)


def experts(m: Any) -> Any:
    """Top-k of a few, mixed densely."""
    x = m.pick(lambda v: v.ndim >= 2 and not v.dims[-1][1])
    if not x:
        return None
    n, width, out = m.one([2, 3, 4, 6]), x.shape[-1], m.width()
    router, up, k = linear(m, width, n, False), m.parameter(n, width, out), m.rng.randint(1, n)
    p = first(m.emit(lambda s, x: router(s)(x).softmax(-1), x))
    if p is None or _ties(p.values[0]):
        return None

    def run(s: nn.Module, x: Tensor, p: Tensor) -> Tensor:
        top, chosen = p.topk(k, -1)
        gate = torch.zeros_like(p).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        return torch.einsum("...d,edf,...e->...f", x, up(s), gate)

    return m.emit(run, x, p)


def _ties(x: Tensor) -> bool:
    return bool((x.sort(-1)[0].diff(dim=-1) < 1e-4).any())


# -- loops, blocks, buffers


def recurrence(m: Any) -> Any:
    x = sequence(m)
    if not x:
        return None
    width = m.width()
    a, b = linear(m, x.shape[2], width), linear(m, width, width, False)

    def run(s: nn.Module, x: Tensor) -> Tensor:
        h, out = x.new_zeros(x.shape[0], width), []
        for t in range(min(x.shape[1], 4)):
            h = torch.tanh(a(s)(x[:, t]) + b(s)(h))
            out.append(h)
        return torch.stack(out, 1)

    return m.emit(run, x)


def recurrent_layer(m: Any) -> Any:
    x, kind = sequence(m), m.one([nn.LSTM, nn.GRU])
    if not x or m.chance(0.6):  # slow
        return None
    key = (x.shape[2], m.width(), 1, True, True, 0.0, m.chance(0.3))
    layer = m.module((kind, *key), lambda: kind(*key))
    return m.emit(lambda s, x: layer(s)(x)[0], x)


class Block(nn.Module):
    """A gated block before a residual."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(a) * b)


def block(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim >= 2 and not v.dims[-1][1])
    hidden = m.one([3, 4, 6])
    layer = x and m.module((Block, x.shape[-1], hidden), lambda: Block(x.shape[-1], hidden))
    return x and m.emit(lambda s, x: layer(s)(x), x)


def counter(m: Any) -> Any:
    """A buffer that forward changes: by what every row agrees on, or (mixing rows) by their mean."""
    x = m.pick(lambda v: v.ndim >= 1 and not v.dims[-1][1])
    if not x or m.chance(0.5):
        return None
    kept, crossing = m.buffer(torch.zeros(x.shape[-1])), m.crossing

    def run(s: nn.Module, x: Tensor) -> Tensor:
        own = kept(s)
        seen = x.detach().reshape(-1, x.shape[-1]).mean(0) if crossing else own + 1
        own.mul_(0.9).add_(0.1 * seen)
        return x + own if crossing else x * 1.5

    return m.emit(run, x)


# -- norms


def layer_norm(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim >= 2 and v.fixed and v.fixed[-1] == v.ndim - 1 and v.shape[-1] > 1)
    if not x:
        return None
    n = m.rng.randint(1, sum(1 for d in reversed(range(x.ndim)) if d in x.fixed) if x.rows_first else 1)
    shape, affine = x.shape[x.ndim - n :], m.chance(0.7)
    layer = m.module(("layer_norm", shape, affine), lambda: _shaken(nn.LayerNorm(shape, elementwise_affine=affine)))
    return m.emit(lambda s, x: layer(s)(x), x)


def rms_norm(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim >= 2 and not v.dims[-1][1])
    if not x:
        return None
    w, shape = m.parameter(x.shape[-1], scale=1.0), (x.shape[-1],)
    how = m.one([
        lambda x, w: w * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt()),
        lambda x, w: F.rms_norm(x, shape, w, 1e-3),
        lambda x, w: (x - x.mean(-1, keepdim=True)) / (x.std(-1, unbiased=False, keepdim=True) + 0.1) * (1 + w),
    ])  # fmt: skip
    return m.emit(lambda s, x: how(x, w(s)), x)


def group_norm(m: Any) -> Any:
    x = m.pick(lambda v: v.rows_first and v.ndim >= 2 and v.shape[-1] > 1)
    groups = x and m.one([g for g in range(1, x.shape[1] + 1) if x.shape[1] % g == 0])
    if not x or x.shape[1] // groups * _numel(x.shape[2:]) < 2:
        return None
    layer = m.module(("group_norm", groups, x.shape[1]), lambda: _shaken(nn.GroupNorm(groups, x.shape[1])))
    return m.emit(lambda s, x: layer(s)(x), x)


def batch_norm(m: Any) -> Any:
    x = m.pick(lambda v: m.crossing and v.rows_first and v.ndim in (2, 3, 4))
    kind = x and {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[x.ndim]
    layer = x and m.module(("batch_norm", x.ndim, x.shape[1]), lambda: _shaken(kind(x.shape[1])))
    return x and m.emit(lambda s, x: layer(s)(x), x)


def _shaken(layer: nn.Module) -> nn.Module:
    """Its parameters away from ones and zeros."""
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return layer


def _numel(shape: Any) -> int:
    return int(torch.Size(shape).numel())


PARTS = {
    "norm": [layer_norm, rms_norm, group_norm, batch_norm],
    "attention": [attention, attention, attention, cross_attention, rotary],
    "random": [noise],
    "convolution": [convolution, convolution, pooling],
    "index": [by_ids, by_ids, in_place, experts],
    "loop": [recurrence, recurrent_layer, block, block, counter],
}
