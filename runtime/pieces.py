"""The pieces of a tensor dim that the ranks of one axis hold, and the local moves on them; nothing is sent here."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from autopar.passes.layout import Axis

Run = tuple[int, int]  # (start, length) along one dim
Runs = tuple[Run, ...]


@lru_cache(maxsize=1 << 14)
def _cut(parts: tuple[int, ...], n: int, items: int) -> tuple[Runs, ...]:
    """For every coordinate the runs of ``dim`` that it holds."""
    axis, starts = Axis("", n), [sum(parts[:i]) for i in range(len(parts))]
    return tuple(tuple(axis.cut(s, p, c, items) for s, p in zip(starts, parts, strict=True)) for c in range(n))


def pieces(parts: list[int], n: int, items: int = 0) -> tuple[Runs, ...]:
    """For every coordinate the (start, length) runs it holds of a dim of these parts, each cut between so many items
    (0: every element is one).

    >>> pieces([4, 3], 2)
    (((0, 2), (4, 2)), ((2, 2), (6, 1)))
    >>> pieces([12], 2, items=3)
    (((0, 8),), ((8, 4),))
    """
    return _cut(tuple(parts), n, items)


def total(runs: Runs) -> int:
    """Length of the runs together."""
    return sum(length for _, length in runs)


@lru_cache(maxsize=1 << 12)
def exchange(
    parts: tuple[int, ...], to_parts: tuple[int, ...], n: int, c: int, items: int = 0, to_items: int = 0
) -> tuple[tuple[Runs, ...], tuple[Runs, ...], int]:
    """Recutting one dim: what ``c`` sends to each coordinate and gets from each, as runs of its own piece before and
    after, and the longest message of any pair."""
    before, after = _cut(parts, n, items), _cut(to_parts, n, to_items)

    def common(inside: Runs, other: Runs) -> Runs:
        """The runs common to both, as positions within ``inside``."""
        found, offset = [], 0
        for start, length in inside:
            for lo, size in other:
                first, last = max(start, lo), min(start + length, lo + size)
                if first < last:
                    found.append((offset + first - start, last - first))
            offset += length
        return tuple(found)

    send = tuple(common(before[c], after[j]) for j in range(n))
    receive = tuple(common(after[c], before[i]) for i in range(n))
    return send, receive, max(total(common(b, a)) for b in before for a in after)


def with_size(x: Tensor, dim: int, size: int) -> list[int]:
    """The shape of ``x`` with another size of ``dim``."""
    shape = list(x.shape)
    shape[dim] = size
    return shape


def _is_plain(runs: tuple[Runs, ...], width: int) -> bool:
    return all(r == ((c * width, width),) for c, r in enumerate(runs))


def take(x: Tensor, dim: int, runs: Runs) -> Tensor:
    """A fresh contiguous tensor of these runs of ``dim``."""
    if len(runs) == 1:
        return x.narrow(dim, *runs[0]).clone(memory_format=torch.contiguous_format)
    return torch.cat([x.narrow(dim, start, length) for start, length in runs], dim)


def put(x: Tensor, dim: int, runs: Runs, size: int) -> Tensor:
    """Zeros of length ``size`` with ``x`` at these runs of ``dim``, which ascend; contiguous."""
    found, offset, end = list[Tensor](), 0, 0
    for start, length in runs:
        found += [_zeros(x, dim, start - end), x.narrow(dim, offset, length)]
        offset, end = offset + length, start + length
    return torch.cat([*found, _zeros(x, dim, size - end)], dim).contiguous()


def _zeros(x: Tensor, dim: int, size: int) -> Tensor:
    return x.new_zeros(with_size(x, dim, size))


def widen(x: Tensor, dim: int, width: int) -> Tensor:
    """``x``, contiguous, with zeros behind it up to ``width``."""
    return x.contiguous() if x.shape[dim] == width else put(x, dim, ((0, x.shape[dim]),), width)


def split(x: Tensor, dim: int, runs: tuple[Runs, ...], width: int) -> Tensor:
    """One piece a coordinate, padded to ``width`` and stacked: ``[n, ..., width, ...]``; a view where it can be."""
    if _is_plain(runs, width):
        return torch.unflatten(x, dim, (len(runs), width)).movedim(dim, 0)
    found = list[Tensor]()
    for wanted in runs:
        found += [x.narrow(dim, start, length) for start, length in wanted]
        found.append(_zeros(x, dim, width - total(wanted)))
    return torch.unflatten(torch.cat(found, dim), dim, (len(runs), width)).movedim(dim, 0)


def join(stacked: Tensor, dim: int, runs: tuple[Runs, ...]) -> Tensor:
    """The inverse of `split`: the runs in ascending order, pads dropped; contiguous."""
    if _is_plain(runs, stacked.shape[dim + 1]):
        return stacked.movedim(0, dim).flatten(dim, dim + 1).contiguous()
    found = []
    for piece, held in zip(stacked, runs, strict=True):
        offset = 0
        for start, length in held:
            if length:
                found.append((start, piece.narrow(dim, offset, length)))
            offset += length
    found.sort(key=lambda item: item[0])
    return torch.cat([piece for _, piece in found] or [stacked[0].narrow(dim, 0, 0)], dim)
