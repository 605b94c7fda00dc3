"""Random numbers that depend on a counter alone: library ops ``torch.ops.autopar.uniform`` and ``.dropout``.

The number of an element is a hash of (seed, step, op, index of the element in the global tensor), so it is the same on
whatever rank and in whatever microbatch it is made, and when it is made again. Both ops take, by keyword:

- ``draw``: the number of the op in its program; ``step_key``: `random_key` of the seed and the step;
- ``shape`` and ``runs`` (`runs_of`): the global shape, and the runs of indices that this rank has of every dim, for
  every microbatch; none where the tensor is whole; ``microbatch``: which one it is.

>>> import torch
>>> key = random_key(seed=1, step=0)
>>> whole = torch.ops.autopar.uniform([2, 3], step_key=key)
>>> column = torch.ops.autopar.uniform([2, 1], step_key=key, shape=[2, 3], runs=[1, 0, 2, 1, 1, 1])
>>> torch.equal(whole[:, 1:2], column)
True

``.seeded_dropout`` and ``.seeded_attention`` are the relaxation: torch's own kernels, their generator started anew for
every piece.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autopar.runtime.library import LIBRARY, composite, kernels

Runs = tuple[tuple[tuple[int, int], ...], ...]  # of every dim the (start, length) runs of global indices

WEYL = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
ROUNDS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # odd multipliers, of splitmix64
BITS = {torch.float32: 24, torch.float64: 53}  # uniform numbers have as many as their type holds exactly
AT_ONCE = {"cpu": 1 << 18}  # elements hashed at a time, 8 bytes each: what a cache holds
MANY = 1 << 22  # the same on other devices
INNER = 1 << 10  # elements, at least, of the inner of the two vectors of which indices are sums
PLACE = "int draw=0, int step_key=0, int microbatch=0, int[] shape=[], int[] runs=[]"


def random_key(seed: int, step: int) -> int:
    """What all ops of one step draw by, an integer of 64 bits.

    >>> random_key(0, 0) != random_key(0, 1) != random_key(1, 0)
    True
    """
    return _signed(_mix(_mix(seed) + step))


def seed_of(draw: int, step_key: int) -> int:
    """Where a generator of torch starts for all numbers of one draw in one step."""
    return _mix(_mix(step_key) ^ _mix(draw)) >> 1


def runs_of(pieces: Sequence[Runs]) -> list[int]:
    """The argument ``runs`` for the pieces of all microbatches: of every dim the number of its runs, and these.

    >>> runs_of([(((0, 2),), ((0, 1), (4, 1)))])
    [1, 0, 2, 2, 0, 1, 4, 1]
    """
    return [n for piece in pieces for dim in piece for n in (len(dim), *itertools.chain(*dim))]


def draws(target: Any) -> bool:
    """Whether an op of a graph takes a key: it is a random op of this library."""
    schema = getattr(target, "_schema", None)
    return (
        schema is not None
        and schema.name.startswith("autopar::")
        and any(a.name == "step_key" for a in schema.arguments)
    )


# -- hashes of global indices ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 12)
def _read_runs(ndim: int, runs: tuple[int, ...], microbatch: int) -> Runs:
    """What `runs_of` wrote of one microbatch."""
    numbers = iter(runs)
    for _ in range(microbatch + 1):
        piece = tuple(tuple((next(numbers), next(numbers)) for _ in range(next(numbers))) for _ in range(ndim))
    return piece


@lru_cache(maxsize=64)
def _indices(shape: tuple[int, ...], piece: Runs, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two vectors, outer and inner, whose sums are the row-major global indices of a piece, times `WEYL`."""
    dims = []
    for d, runs in enumerate(piece):
        places = torch.cat([torch.arange(start, start + length) for start, length in runs])
        dims.append(places * _signed(math.prod(shape[d + 1 :]) * WEYL))
    inner = outer = torch.zeros(1, dtype=torch.int64)
    while dims and inner.numel() < INNER:
        inner = (dims.pop()[:, None] + inner).flatten()
    for dim in dims:
        outer = (outer[:, None] + dim).flatten()
    return outer.to(device), inner.to(device)


def _hashes(
    made: Tensor,
    draw: int = 0,
    step_key: int = 0,
    microbatch: int = 0,
    shape: Sequence[int] = (),
    runs: Sequence[int] = (),
) -> Iterator[tuple[Tensor, Tensor]]:
    """The elements of a contiguous ``made`` as rows of a matrix, a few at a time, and their hashes in int64."""
    whole = tuple(((0, n),) for n in made.shape)
    piece = _read_runs(made.ndim, tuple(runs), microbatch) if runs else whole
    outer, inner = _indices(tuple(shape or made.shape), piece, made.device)
    assert outer.numel() * inner.numel() == made.numel(), f"{piece} of {shape} is no piece of shape {made.shape}"
    outer = outer + _signed(_mix(_mix(step_key) ^ _mix(draw)))
    rows = max(1, AT_ONCE.get(made.device.type, MANY) // max(1, inner.numel()))
    matrix = made.view(len(outer), len(inner))
    for start in range(0, len(outer), rows):
        yield matrix[start : start + rows], _hash(outer[start : start + rows, None] + inner)


def _hash(z: Tensor) -> Tensor:
    """In place, twice: xor of the upper half into the lower, and a product."""
    halves = z.view(torch.int32)
    low, high = halves[:, 0::2], halves[:, 1::2]
    for factor in ROUNDS:
        low.bitwise_xor_(high)
        z.mul_(_signed(factor))
    return z


def _mix(n: int) -> int:
    """A hash of an integer to 64 bits, that of splitmix64."""
    n = (n + WEYL) % 2**64
    for shift, factor in zip((30, 27), ROUNDS, strict=True):
        n = (n ^ n >> shift) * factor % 2**64
    return n ^ n >> 31


def _signed(n: int) -> int:
    n %= 2**64
    return n - 2**64 if n >= 2**63 else n


# -- uniform: numbers in [0, 1), float32 or float64; ``like`` gives its device ---------------------------------------


def _uniform_like(x: Tensor, **place: Any) -> Tensor:
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    bits = BITS[x.dtype]
    for rows, hashes in _hashes(made, **place):
        numbers = hashes.bitwise_right_shift_(64 - bits).add_(2 ** (bits - 1))
        rows.copy_(numbers).mul_(2.0**-bits)
    return made


def _uniform(
    size: list[int], like: Tensor | None = None, *, dtype: Any = torch.float32, device: Any = None, **place: Any
) -> Tensor:
    empty = torch.empty((), dtype=dtype, device=device if like is None else like.device)
    made: Tensor = torch.ops.autopar.uniform_like(empty.expand(size), **place)
    return made


kernels(f"uniform_like(Tensor x, *, {PLACE}) -> Tensor", _uniform_like, lambda x, **_: torch.empty_like(x))
uniform = composite(
    f"uniform(int[] size, Tensor? like=None, *, ScalarType? dtype=None, Device? device=None, {PLACE}) -> Tensor",
    _uniform,
)


# -- dropout ---------------------------------------------------------------------------------------------------------


def _dropout_mask(like: Tensor, p: float, **place: Any) -> Tensor:
    kept = torch.empty(like.shape, dtype=torch.bool, device=like.device)
    limit = min(round((1 - p) * 2**32) - 2**31, 2**31 - 1)
    for rows, hashes in _hashes(kept, **place):
        torch.lt(hashes.view(torch.int32)[:, 1::2], limit, out=rows)
    return kept


def _masked(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """``x * kept / (1 - p)``; zeros where nothing is kept."""
    return (x * kept).div_(1 - p if p < 1 else 1)


def _masked_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, kept, ctx.p = inputs
    ctx.save_for_backward(kept)


def _masked_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (kept,) = ctx.saved_tensors
    return torch.ops.autopar.masked(grad, kept, ctx.p), None, None


def _dropout(x: Tensor, p: float, **place: Any) -> Tensor:
    """The mask is not made of ``x``, which need not be there to make it again."""
    like = torch.empty((), dtype=torch.bool, device=x.device).expand(x.shape)
    made: Tensor = torch.ops.autopar.masked(x, torch.ops.autopar.dropout_mask(like, p, **place), p)
    return made


kernels(
    f"dropout_mask(Tensor like, float p, *, {PLACE}) -> Tensor",
    _dropout_mask,
    lambda like, p, **_: torch.empty(like.shape, dtype=torch.bool, device=like.device),
)
kernels("masked(Tensor x, Tensor kept, float p) -> Tensor", _masked, lambda x, kept, p: x * kept)
torch.library.register_autograd("autopar::masked", _masked_backward, setup_context=_masked_setup, lib=LIBRARY)
dropout = composite(f"dropout(Tensor x, float p, *, {PLACE}) -> Tensor", _dropout)


# -- dropout that is not exact: torch's kernels, which know no place in the whole ------------------------------------


@contextmanager
def _started(x: Tensor, **place: Any) -> Iterator[None]:
    """Torch's generator started anew for a piece: ranks that hold the same one drop the same."""
    generators = torch.cuda.default_generators if x.is_cuda else (torch.default_generator,)
    generator = generators[x.device.index or 0]
    state = generator.get_state()
    try:
        generator.manual_seed(_start(**place))
        yield
    finally:
        generator.set_state(state)


def _start(
    draw: int = 0, step_key: int = 0, microbatch: int = 0, shape: Sequence[int] = (), runs: Sequence[int] = ()
) -> int:
    start = 0
    for word in (step_key, draw, microbatch, *runs):
        start = _mix(start ^ _mix(word))
    return start >> 1


def _seeded_dropout_and_mask(x: Tensor, p: float, **place: Any) -> tuple[Tensor, Tensor]:
    with _started(x, **place):
        made, kept = torch.ops.aten.native_dropout(x, p, True)
    return made, kept


def _seeded_dropout_setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    ctx.p, kept = inputs[1], output[1]
    ctx.save_for_backward(kept)
    ctx.mark_non_differentiable(kept)


def _seeded_dropout_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
    (kept,) = ctx.saved_tensors
    return torch.ops.aten.native_dropout_backward(grad, kept, 1 / (1 - ctx.p) if ctx.p < 1 else 0.0), None


def _seeded_attention(query: Tensor, *args: Any, **named: Any) -> Tensor:
    place = {name: named.pop(name) for name in ("draw", "step_key", "microbatch", "shape", "runs") if name in named}
    attention = torch.ops.aten.scaled_dot_product_attention.default
    if query.device.type == "meta" or isinstance(query, FakeTensor):
        return attention(query, *args, **named)  # type: ignore[no-any-return]
    with _started(query, **place):
        return attention(query, *args, **named)  # type: ignore[no-any-return]


kernels(
    f"seeded_dropout_and_mask(Tensor x, float p, *, {PLACE}) -> (Tensor, Tensor)",
    _seeded_dropout_and_mask,
    lambda x, p, **_: (torch.empty_like(x), torch.empty(x.shape, dtype=torch.bool, device=x.device)),
)
torch.library.register_autograd(
    "autopar::seeded_dropout_and_mask", _seeded_dropout_backward, setup_context=_seeded_dropout_setup, lib=LIBRARY
)
seeded_dropout = composite(
    f"seeded_dropout(Tensor input, float p, bool train, *, {PLACE}) -> Tensor",
    lambda x, p, train, **place: torch.ops.autopar.seeded_dropout_and_mask(x, p, **place)[0] if train and p else x,
)
seeded_attention = composite(
    "seeded_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    f"bool is_causal=False, *, float? scale=None, bool enable_gqa=False, {PLACE}) -> Tensor",
    _seeded_attention,
)
SEEDED = {
    torch.ops.aten.dropout.default: seeded_dropout,
    torch.ops.aten.scaled_dot_product_attention.default: seeded_attention,
}
