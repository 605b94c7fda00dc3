"""What ``random_models.py`` draws from: inputs to begin with, ops on values of any shape, by group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Op = Callable[[Any], Any]
OPS: dict[str, list[Op]] = {}
SOURCES: list[Op] = []


def op(group: str) -> Callable[[Op], Op]:
    """Register a function of the `Maker`, which emits steps or finds nothing to work on."""

    def register(function: Op) -> Op:
        OPS.setdefault(group, []).append(function)
        return function

    return register


def source(function: Op) -> Op:
    SOURCES.append(function)
    return function


def first(made: Any) -> Any:
    return made[0] if made else None


# -- what models begin with


@source
def sequence(m: Any) -> Any:
    return m.input(torch.randn(m.rows, m.one([3, 4, 5, 6, 8]), m.width()))


@source
def rows(m: Any) -> Any:
    return m.input(torch.randn(m.rows, m.width()))


@source
def image(m: Any) -> Any:
    return m.input(torch.randn(m.rows, m.one([1, 2, 3, 4, 6]), m.one([4, 5, 6]), m.one([4, 6])))


@source
def tokens(m: Any) -> Any:
    vocabulary, length, width = m.one([5, 7, 8, 12]), m.one([3, 4, 6, 7]), m.width()
    ids, w = m.input(torch.randint(0, vocabulary, (m.rows, length))), m.parameter(vocabulary, width)
    pad = m.one([None, None, 0, vocabulary - 1])
    x = first(m.emit(lambda s, i: F.embedding(i, w(s), pad), ids))
    if x is not None and m.chance(0.4):
        at = m.parameter(length + m.one([0, 2]), width)
        x = first(m.emit(lambda s, x: x + at(s)[: x.shape[1]], x)) or x
    if x is not None and m.chance(0.3):  # a tied head
        m.emit(lambda s, x: F.linear(x, w(s)), x)
    return x


# -- pointwise

SMOOTH: list[Callable[[Tensor], Tensor]] = [
    torch.tanh, torch.sigmoid, F.gelu, F.silu, F.softplus, torch.sin, torch.square, F.elu, F.mish, F.logsigmoid,
    lambda x: x.tanh().exp(), lambda x: (x.square() + 1).sqrt(), lambda x: x.square().log1p(), lambda x: -x,
    lambda x: (x.square() + 0.5).rsqrt(), lambda x: (1 + x.square()).reciprocal(), lambda x: 1 - x, lambda x: x / 3,
    lambda x: (x.tanh() + 1.5) ** 1.5, lambda x: F.gelu(x, approximate="tanh"), lambda x: x.clone().mul_(0.5),
    lambda x: torch.erf(x) + x.cos(), lambda x: x.float().type_as(x), lambda x: x + x.detach(), lambda x: x.atan(),
]  # fmt: skip
SHARP: list[Callable[[Tensor], Tensor]] = [
    F.relu, F.leaky_relu, torch.abs, F.hardtanh, lambda x: x.clamp(min=0), lambda x: torch.where(x > 0, x, 0.1 * x),
    lambda x: x.masked_fill(x < 0, -0.5), lambda x: x * (x > 0).to(x.dtype), lambda x: x.sign() * x.abs().sqrt(),
    lambda x: (x + 0).relu_(), lambda x: F.hardswish(x), lambda x: torch.relu(x).square(),
]  # fmt: skip


@op("unary")
def smooth(m: Any) -> Any:
    f, x = m.one(SMOOTH), m.pick()
    return m.emit(lambda s, x: f(x), x)


@op("unary")
def sharp(m: Any) -> Any:
    f, x = m.one(SHARP), m.pick()
    return m.emit(lambda s, x: f(x), x, sharp=True)


BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda a, b: a / (1 + b.square()),
    lambda a, b: torch.where(a > b, a, b * 0.5), lambda a, b: torch.lerp(a, b, 0.3), lambda a, b: a + 0.5 * b,
    lambda a, b: torch.addcmul(a, b, b, value=0.3), lambda a, b: torch.add(a, b, alpha=2), lambda a, b: a * b.sigmoid(),
    lambda a, b: torch.rsub(a, b), lambda a, b: F.silu(a) * b, lambda a, b: torch.hypot(a, b + 3),
]  # fmt: skip


def broadcasts(a: Any, b: Any) -> bool:
    """Whether two values go together, neither of them larger than the larger."""
    pairs = list(zip(reversed(a.dims), reversed(b.dims)))
    return all(x == y or (1, False) in (x, y) for x, y in pairs)


@op("binary")
@op("binary")
def two_values(m: Any) -> Any:
    f, a = m.one(BINARY), m.pick()
    b = m.pick(lambda v: broadcasts(a, v) and v.at != a.at)
    return b and m.emit(lambda s, a, b: f(a, b), a, b, sharp=f in BINARY[3:5])


@op("binary")
def residual(m: Any) -> Any:
    """A linear back to the shape of an older value, and their sum."""
    old = m.pick(lambda v: v.ndim >= 2 and not v.dims[-1][1])
    new = old and m.pick(lambda v: v.ndim == old.ndim and v.dims[:-1] == old.dims[:-1] and not v.dims[-1][1])
    if not new or new.at == old.at:
        return None
    w = m.parameter(old.shape[-1], new.shape[-1])
    return m.emit(lambda s, x, h: x + F.linear(h, w(s)), old, new)


@op("binary")
def with_parameter(m: Any) -> Any:
    f, x = m.one(BINARY), m.pick(lambda v: v.ndim > 0)
    shapes = [(), (1,)] + [
        tuple(x.shape[e] if e == d else 1 for e in range(first, x.ndim))
        for d in x.fixed
        for first in {d, 0 if d else d}
    ]
    p, other_way = m.parameter(*m.one(shapes)), m.chance(0.3)
    return m.emit(lambda s, x: f(p(s), x) if other_way else f(x, p(s)), x, sharp=f in BINARY[3:5])


@op("binary")
def with_buffer(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim > 1 and not v.dims[-1][1])
    b = x and m.buffer(torch.randn(x.shape[-1]))
    return x and m.emit(lambda s, x: x * b(s) + torch.arange(x.shape[-1]) * 0.1, x)


# -- products


@op("matmul")
@op("matmul")
@op("matmul")
def linear(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim >= 2 and not v.dims[-1][1])
    if not x:
        return None
    inside, outside, bias = x.shape[-1], m.width(), m.chance(0.6)
    layer = m.module(("linear", inside, outside, bias), lambda: nn.Linear(inside, outside, bias))
    return m.emit(lambda s, x: layer(s)(x), x)


@op("matmul")
def plain_weight(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim >= 2 and not v.dims[-1][1])
    w = x and m.parameter(x.shape[-1], m.width())
    how = m.one([torch.matmul, lambda x, w: F.linear(x, w.t()), lambda x, w: torch.einsum("...d,de->...e", x, w)])
    return x and m.emit(lambda s, x: how(x, w(s)), x)


@op("matmul")
def mix_positions(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim == 3 and v.fixed == [1, 2])
    w = x and m.parameter(m.width(), x.shape[1])
    how = m.one([torch.matmul, lambda w, x: torch.einsum("st,btd->bsd", w, x), lambda w, x: (w @ x).contiguous()])
    return x and m.emit(lambda s, x: how(w(s), x), x)


@op("matmul")
def per_position(m: Any) -> Any:
    """A weight for every entry of a dim, as experts and grouped linears have."""
    x = m.pick(lambda v: v.ndim == 3 and v.fixed == [1, 2])
    w = x and m.parameter(x.shape[1], x.shape[2], m.width())
    how = m.one([
        lambda x, w: torch.einsum("btd,tde->bte", x, w),
        lambda x, w: torch.bmm(x.transpose(0, 1), w).transpose(0, 1),
        lambda x, w: torch.baddbmm(w[:, :1] * 0.1, x.transpose(0, 1), w).transpose(0, 1),
    ])  # fmt: skip
    return x and m.emit(lambda s, x: how(x, w(s)), x)


@op("matmul")
def pairs(m: Any) -> Any:
    """Products of all pairs of rows of two values."""
    a = m.pick(lambda v: v.ndim >= 3 and v.ndim - 2 not in [d for d in range(v.ndim) if d not in v.fixed])
    b = a and m.pick(lambda v: v.ndim == a.ndim and v.dims[:-2] == a.dims[:-2] and v.dims[-1] == a.dims[-1])
    if not b or a.dims[-1][1] or b.dims[-2][1]:
        return None
    scale = a.shape[-1] ** -0.5
    return m.emit(lambda s, a, b: a @ b.transpose(-1, -2) * scale, a, b)


@op("matmul")
def outer(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim == 3 and v.fixed == [1, 2])
    y = x and m.pick(lambda v: v.dims[:2] == x.dims[:2] and v.ndim == 3)
    how = m.one(["btd,bte->bde", "btd,bte->btde", "btd,bte->bte"])
    return y and m.emit(lambda s, x, y: torch.einsum(how, x, y) * 0.3, x, y)


@op("matmul")
def addmm(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim == 2 and not v.dims[1][1])
    if not x:
        return None
    width = m.width()
    bias, w = m.parameter(*m.one([(width,), (1, width), ()])), m.parameter(x.shape[1], width)
    return m.emit(lambda s, x: torch.addmm(bias(s), x, w(s), beta=0.5, alpha=2), x)


# -- views


@op("view")
@op("view")
def permute(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim >= 2)
    order = x and m.rng.sample(range(x.ndim), x.ndim)
    how = m.one([lambda x: x.permute(order), lambda x: x.movedim(0, -1), lambda x: x.transpose(-1, -2), torch.t])
    if how is torch.t and x and x.ndim != 2:
        return None
    return x and m.emit(lambda s, x: how(x), x)


@op("view")
@op("view")
def flatten(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim >= 2)
    d = x and m.rng.randrange(x.ndim - 1)
    end = x and m.rng.randint(d + 1, x.ndim - 1)
    return x and m.emit(lambda s, x: x.flatten(d, end), x)


@op("view")
@op("view")
def unflatten(m: Any) -> Any:
    """Cut a dim in two; one that grows keeps its rows outside, or inside where they were merged so."""
    found = [(v, d) for v in m.vars if v.float for d in range(v.ndim) if v.dims[d][0] > 1]
    if not found:
        return None
    x, d = m.one(found)
    sizes = [n for n in range(1, x.dims[d][0] + 1) if x.dims[d][0] % n == 0]
    n, flip = m.one(sizes[1:] or sizes), m.chance(0.3)
    return m.emit(lambda s, x: x.unflatten(d, (n, -1) if flip else (-1, n)), x)


@op("view")
def reshape_all(m: Any) -> Any:
    x = m.pick(lambda v: v.rows_first and v.ndim >= 3)
    shape = x and m.one([(x.shape[2], x.shape[1], *x.shape[3:]), (-1,), (*x.shape[1:], 1)])
    return x and m.emit(lambda s, x: x.reshape(x.shape[0], *shape), x)


@op("view")
def pieces(m: Any) -> Any:
    x = m.pick(lambda v: any(v.shape[d] > 1 for d in v.fixed))
    d = x and m.one([d for d in x.fixed if x.shape[d] > 1])
    if not x:
        return None
    n, cut = x.shape[d], m.rng.randrange(1, x.shape[d])
    how = m.one(["chunk", "split", "unequal", "unbind", "slices"])
    if how == "unbind":
        made = m.emit(lambda s, x: x.unbind(d), x)
    elif how == "unequal":
        made = m.emit(lambda s, x: x.split([cut, n - cut], d), x)
    elif how == "split":
        made = m.emit(lambda s, x: x.split(cut, d), x)
    elif how == "slices":
        made = m.emit(lambda s, x: (x.narrow(d, 0, cut), x.narrow(d, cut, n - cut)), x)
    else:
        made = m.emit(lambda s, x: x.chunk(2, d), x)
    if not made or len(made) < 2:
        return made
    if how in ("unequal", "split", "slices"):
        return m.emit(lambda s, *xs: torch.cat(xs[::-1], d), *made)
    if m.chance(0.5):
        return m.emit(lambda s, *xs: torch.stack(xs[::-1], d), *made) if how == "unbind" else None
    return made[0].dims == made[1].dims and m.emit(lambda s, a, b: F.silu(a) * b, made[0], made[1])


@op("view")
def join(m: Any) -> Any:
    x = m.pick(lambda v: v.fixed)
    d = x and m.one(x.fixed)
    y = x and m.pick(lambda v: v.ndim == x.ndim and all(v.dims[e] == x.dims[e] for e in range(x.ndim) if e != d))
    if not y or y.dims[d][1]:
        return None
    if x.dims == y.dims and m.chance(0.5):
        at = m.rng.randint(0, x.ndim)
        return m.emit(lambda s, x, y: torch.stack([x, y, x * y], at), x, y)
    return m.emit(lambda s, x, y: torch.cat([x, y], d), x, y)


@op("view")
def token_in_front(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim == 3 and v.fixed == [1, 2])
    p = x and m.parameter(1, 1, x.shape[2])
    return x and m.emit(lambda s, x: torch.cat([p(s).expand(x.shape[0], -1, -1), x], 1), x)


@op("view")
@op("view")
def part_of(m: Any) -> Any:
    x = m.pick(lambda v: any(v.shape[d] > 1 for d in v.fixed))
    if not x:
        return None
    d = m.one([d for d in x.fixed if x.shape[d] > 1])
    n, end, step = x.shape[d], m.rng.randint(1, x.shape[d]), m.one([1, 1, 2])
    at = [slice(None)] * d
    how = m.one([
        lambda x: x[(*at, slice(0, end, step))], lambda x: x[(*at, slice(-end, None))], lambda x: x.select(d, end - 1),
        lambda x: x.roll(1, d), lambda x: x.flip(d), lambda x: x.roll((1, 2), (d, d)), lambda x: x.diff(dim=d),
        lambda x: x.narrow(d, n - end, end), lambda x: x[(*at, None)], lambda x: x.index_select(d, torch.arange(end)),
        lambda x: x.repeat_interleave(2, d), lambda x: torch.cat([x, x.flip(d)], d),
        lambda x: x.unfold(d, min(2, n), 1),
        lambda x: x[(*at, torch.tensor([0, end - 1, 0]))], lambda x: F.pad(x, (0, 0) * (x.ndim - 1 - d) + (1, 2)),
        lambda x: torch.where(torch.arange(n).reshape(-1, *[1] * (x.ndim - 1 - d)) < end, x, 0.0),
    ])  # fmt: skip
    return m.emit(lambda s, x: how(x), x)


@op("view")
def ones(m: Any) -> Any:
    x = m.pick()
    d, n = m.rng.randint(0, x.ndim), m.one([2, 3, 4])
    how = m.one([
        lambda x: x.unsqueeze(d), lambda x: x.squeeze(), lambda x: x.unsqueeze(d).expand(*x.shape[:d], n, *x.shape[d:]),
        lambda x: x.unsqueeze(d).transpose(0, -1).squeeze(0) if x.shape[-1:] == (1,) else x.unsqueeze(-1),
        lambda x: x.repeat(*[1] * (x.ndim - 1), 2) if x.ndim else x.reshape(1), lambda x: x.contiguous().view_as(x),
    ])  # fmt: skip
    return m.emit(lambda s, x: how(x), x)


@op("view")
def triangle(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim >= 2 and {v.ndim - 1, v.ndim - 2} <= set(v.fixed))
    how, k = m.one([torch.tril, torch.triu]), m.one([-1, 0, 1])
    return x and m.emit(lambda s, x: how(x, k), x)


# -- reductions

REDUCE: list[Callable[[Tensor, Any, bool], Tensor]] = [
    lambda x, d, k: x.sum(d, keepdim=k), lambda x, d, k: x.mean(d, keepdim=k), lambda x, d, k: x.amax(d, keepdim=k),
    lambda x, d, k: x.var(d, unbiased=False, keepdim=k), lambda x, d, k: (x.var(d, keepdim=k) + 0.1).sqrt(),
    lambda x, d, k: x.square().sum(d, keepdim=k).add(1e-3).sqrt(), lambda x, d, k: x.logsumexp(d, keepdim=k),
    lambda x, d, k: torch.linalg.vector_norm(x + 2, dim=d, keepdim=k),
]  # fmt: skip


@op("reduce")
@op("reduce")
def reduction(m: Any) -> Any:
    x, f, keep = m.pick(), m.one(REDUCE), m.chance(0.5)
    dims = [d for d in range(x.ndim) if x.shape[d] > 1 and (d in x.fixed or m.crossing)]
    chosen = dims and m.rng.sample(dims, m.rng.randint(1, min(2, len(dims))))
    if not chosen:
        return None
    made = m.emit(lambda s, x: f(x, chosen, keep), x)
    return m.emit(lambda s, x, r: x - r, x, made[0]) if made and keep and m.chance(0.6) else made


@op("reduce")
def extreme(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim > 0)
    d = m.dim(x, 2) if x else None
    k = 0 if d is None else m.rng.randint(1, 2 if x.dims[d][1] else x.shape[d])
    how = m.one([
        lambda x: x.max(d).values, lambda x: x.min(d, keepdim=True)[0], lambda x: x.topk(k, d).values,
        lambda x: x.sort(d).values, lambda x: x.sort(d, descending=True)[0], lambda x: x.prod(d),
        lambda x: x.gather(d, x.argsort(d)), lambda x: x.take_along_dim(x.argmax(d, keepdim=True), d),
    ])  # fmt: skip
    return None if d is None else m.emit(lambda s, x: how(x), x, sharp=True)


@op("reduce")
def along(m: Any) -> Any:
    x = m.pick(lambda v: v.ndim > 0)
    d = m.dim(x) if x else None
    how = m.one([
        lambda x: x.softmax(d), lambda x: x.log_softmax(d), lambda x: x.cumsum(d) * 0.5,
        lambda x: F.normalize(x, dim=d),
        lambda x: x.logcumsumexp(d), lambda x: x.sigmoid().cumprod(d), lambda x: x.flip(d).cumsum(d).flip(d),
        lambda x: (x - x.detach().amax(d, keepdim=True)).exp(), lambda x: F.softmin(x, dim=d),
    ])  # fmt: skip
    return None if d is None else m.emit(lambda s, x: how(x), x)
