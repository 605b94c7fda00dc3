"""Pieces of tensors: the (start, length) runs of every dim that a rank holds, read and written a chunk at a time.

A chunk is a range of the flat tensor. Whoever has whole tensors only in chunks (a stream of random numbers, a
broadcast) gives them to `put_chunk`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

Runs = tuple[tuple[tuple[int, int], ...], ...]
Box = tuple[tuple[int, int], ...]

CHUNK = 16 << 20  # bytes at a time
GROUP = 16  # elements that `normal_` transforms together: chunks but the last are whole groups


@dataclass(frozen=True)
class Region:
    """The (start, length) runs of every dim that are needed of a contiguous tensor, which fills its storage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: Runs

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of the needed piece."""
        return tuple(sum(n for _, n in runs) for runs in self.runs)


def whole_runs(shape: Sequence[int]) -> Runs:
    """All of a tensor of this shape, as runs."""
    return tuple(((0, n),) for n in shape)


def take(tensor: Tensor, runs: Runs) -> Tensor:
    """The (start, length) runs of every dim of ``tensor``; a view where each dim has one run.

    >>> take(torch.arange(8), (((2, 2), (5, 1)),)).tolist()
    [2, 3, 5]
    """
    for dim, pieces in enumerate(runs):
        if len(pieces) == 1:
            tensor = tensor.narrow(dim, *pieces[0])
        else:
            tensor = torch.cat([tensor.narrow(dim, start, length) for start, length in pieces], dim)
    return tensor


def put_chunk(piece: Tensor, region: Region, start: int, chunk: Tensor) -> None:
    """Write into a piece what it has of the elements from ``start`` on of the flat tensor that it is a piece of.

    >>> piece = torch.zeros(2, 2, dtype=torch.int64)
    >>> put_chunk(piece, Region((3, 4), torch.int64, (((1, 2),), ((2, 2),))), 3, torch.arange(3, 11))
    >>> piece.tolist()
    [[6, 7], [10, 0]]
    """
    for box, offset in _boxes(start, start + chunk.numel(), region.shape):
        source = chunk.narrow(0, offset - start, prod(n for _, n in box)).view([n for _, n in box])
        for own, theirs in meet(region.runs, box):
            narrow(piece, own).copy_(narrow(source, theirs))


def overlaps(region: Region, start: int, length: int) -> bool:
    """Whether a piece has any of these elements of the flat tensor that it is a piece of.

    >>> region = Region((3, 4), torch.int64, (((1, 2),), ((2, 2),)))
    >>> overlaps(region, 0, 6), overlaps(region, 5, 2), overlaps(region, 8, 2)
    (False, True, False)
    """
    boxes = _boxes(start, start + length, region.shape)
    return any(True for box, _ in boxes for _ in meet(region.runs, box))


def chunks(numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the chunks of a flat tensor; the last one ends in a whole group.

    >>> [n for _, n in chunks(2 * (CHUNK // 4) + 3, 4)] == [CHUNK // 4, CHUNK // 4 + 3]
    True
    """
    step, start = CHUNK // itemsize // GROUP * GROUP, 0
    while start < numel:
        length = min(step, numel - start)
        if numel - start - length < GROUP:
            length = numel - start
        yield start, length
        start += length


def _boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[tuple[Box, int]]:
    """The boxes that a range of a flat tensor of ``shape`` is made of, each with the flat index of its first element.

    >>> [box for box, _ in _boxes(3, 11, (3, 4))]
    [((0, 1), (3, 1)), ((1, 1), (0, 4)), ((2, 1), (0, 3))]
    """
    if not shape:
        yield (), start
        return
    row = prod(shape[1:])
    while start < stop:
        index, inside = divmod(start, row)
        if inside or stop - start < row:
            end = min(stop, (index + 1) * row)
            for box, at in _boxes(inside, end - index * row, shape[1:]):
                yield ((index, 1), *box), index * row + at
        else:
            end = stop // row * row
            yield ((index, end // row - index), *((0, n) for n in shape[1:])), start
        start = end


def meet(runs: Runs, box: Box) -> Iterator[tuple[Box, Box]]:
    """Where the runs of a piece and a box have elements in common: (where in the piece, where in the box)."""
    if not runs:
        yield (), ()
        return
    (lo, n), at = box[0], 0
    for start, length in runs[0]:
        first, last = max(lo, start), min(lo + n, start + length)
        if first < last:
            for own, theirs in meet(runs[1:], box[1:]):
                yield ((at + first - start, last - first), *own), ((first - lo, last - first), *theirs)
        at += length


def narrow(tensor: Tensor, box: Box) -> Tensor:
    """The (start, length) of every dim of ``tensor``, a view."""
    for dim, (start, length) in enumerate(box):
        tensor = tensor.narrow(dim, start, length)
    return tensor
