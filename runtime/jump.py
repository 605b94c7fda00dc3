"""Moving a CPU generator past numbers that nobody on this rank wants, without drawing them.

torch's CPU stream is MT19937: its words are a linear recurrence over GF(2), so the word J places on is a fixed sum of
the next 19937 words: the sum that ``x**J`` leaves when divided by the recurrence's polynomial. Finding it takes some
hundredths of a second for each J (equal layers share theirs), applying it as long as drawing a million numbers.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._ops import OpOverload

from autopar.runtime.runs import GROUP

Words = NDArray[numpy.uint32]

N, M = 624, 397
DEGREE = 19937
UPPER, LOWER, TWIST = numpy.uint32(0x80000000), numpy.uint32(0x7FFFFFFF), numpy.uint32(0x9908B0DF)
LEAST = 1 << 22  # fewer words are drawn
# The state as `torch.Generator.get_state` gives it: the seed, how many words of the block are left, whether it is
# seeded, the place of the next word, and the words; what follows, a kept normal number, stays as it is.
LEFT, NEXT, WORDS = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * N)


def skip(generator: torch.Generator, words: int) -> None:
    """Move ``generator`` past so many 32-bit words, as drawing them would.

    >>> a, b = (torch.Generator().manual_seed(7) for _ in range(2))
    >>> skip(a, LEAST + 5)
    >>> _ = torch.empty(LEAST + 5).uniform_(generator=b)
    >>> bool((torch.rand(9, generator=a) == torch.rand(9, generator=b)).all())
    True
    """
    if words >= LEAST and _works():
        generator.set_state(jumped(generator.get_state(), words))
        return
    scratch = torch.empty(min(words, LEAST))
    while words:
        scratch[:words].uniform_(generator=generator)
        words -= min(words, len(scratch))


@cache
def words_of(op: OpOverload, dtype: torch.dtype, count: int) -> int | None:
    """How many words of the stream ``uniform_`` or ``normal_`` takes for so many elements, at least 16; None for other
    ops and types.

    >>> words_of(torch.ops.aten.uniform_.default, torch.float32, 1000003)
    1000003
    """
    if op not in (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default) or not dtype.is_floating_point:
        return None
    few = GROUP + count % GROUP  # what comes after the last whole group is treated in other ways for other types
    taken, more = _taken(op, dtype, few), _taken(op, dtype, few + GROUP)
    if taken is None or more is None:
        return None
    return taken + (count - few) // GROUP * (more - taken)


@cache
def _taken(op: OpOverload, dtype: torch.dtype, count: int) -> int | None:
    """`words_of` by trial."""
    generator, other = (torch.Generator().manual_seed(5) for _ in range(2))
    op(torch.empty(count, dtype=dtype), 0.0, 1.0, generator=generator)
    following, words = torch.rand(8, generator=generator), torch.rand(8 * count, generator=other)
    places = range(len(words) - len(following))
    return next((i for i in places if torch.equal(words[i : i + len(following)], following)), None)


def jumped(state: Tensor, words: int) -> Tensor:
    """A generator's state after so many more words, at least one."""
    raw = state.numpy().copy()
    block = raw[WORDS].view(numpy.uint64).astype(numpy.uint32)
    place = N if raw[LEFT].view(numpy.int32)[0] == 1 else int(raw[NEXT].view(numpy.uint64)[0])
    ahead = _ahead(block, place + DEGREE + N)[place:]
    window = numpy.zeros(N, dtype=numpy.uint32)
    for i in _summands(words - 1):
        window ^= ahead[i : i + N]
    raw[WORDS] = window.astype(numpy.uint64).view(numpy.uint8)
    raw[LEFT].view(numpy.int32)[0], raw[NEXT].view(numpy.uint64)[0] = N, 1  # the first word is the last that is skipped
    return torch.from_numpy(raw)


def _ahead(block: Words, count: int) -> Words:
    """At least ``count`` words of the recurrence, not tempered, from those of ``block`` on."""
    blocks = [block]
    while len(blocks) * N < count:
        old, new = blocks[-1], numpy.empty(N, dtype=numpy.uint32)
        following = numpy.append(old[1:], numpy.uint32(0))
        for start in range(0, N - 1, N - M):
            stop = min(start + N - M, N - 1)
            far = old[start + M : stop + M] if start + M < N else new[start + M - N : stop + M - N]
            new[start:stop] = _twist(old[start:stop], following[start:stop], far)
        new[N - 1] = _twist(old[N - 1], new[0], new[M - 1])
        blocks.append(new)
    return numpy.concatenate(blocks)


def _twist(word: Words, following: Words, far: Words) -> Words:
    mixed = (word & UPPER) | (following & LOWER)
    made: Words = far ^ (mixed >> numpy.uint32(1)) ^ ((mixed & numpy.uint32(1)) * TWIST)
    return made


@lru_cache(maxsize=256)
def _summands(exponent: int) -> tuple[int, ...]:
    """The powers of x in ``x**exponent`` divided by the polynomial."""
    taps, left = _taps(), 1
    for bit in bin(exponent)[2:] if exponent else "":
        left = int("0".join(bin(left)[2:]), 2)  # squared
        left = _divided(left << (bit == "1"), taps)
    digits = bin(left)[:1:-1]
    return tuple(i for i, digit in enumerate(digits) if digit == "1")


def _divided(value: int, taps: tuple[int, ...]) -> int:
    mask = (1 << DEGREE) - 1
    while value >> DEGREE:
        high, value = value >> DEGREE, value & mask
        for tap in taps:
            value ^= high << tap
    return value


@cache
def _taps() -> tuple[int, ...]:
    """The powers of x below the highest in the polynomial that the recurrence obeys, found from one bit of its words by
    Berlekamp and Massey's algorithm."""
    bits = (numpy.random.MT19937(1).random_raw(2 * DEGREE) & 1).tolist()
    now, before, length, since, seen = 1, 1, 0, 1, 0
    for n, bit in enumerate(bits):
        seen = seen << 1 | bit
        if not (now & seen).bit_count() & 1:
            since += 1
        elif 2 * length <= n:
            now, before, length, since = now ^ before << since, now, n + 1 - length, 1
        else:
            now, since = now ^ before << since, since + 1
    assert length == DEGREE, length
    return tuple(DEGREE - i for i in range(1, DEGREE + 1) if now >> i & 1)


@cache
def _works() -> bool:
    """Whether this torch's generator is the one described here."""
    words, generator = 3 * N + 5, torch.Generator().manual_seed(11)
    state = generator.get_state()
    if len(state) < WORDS.stop:
        return False
    torch.empty(words).uniform_(generator=generator)
    other = torch.Generator()
    other.set_state(jumped(state, words))
    return torch.equal(torch.empty(2 * N).uniform_(generator=generator), torch.empty(2 * N).uniform_(generator=other))
