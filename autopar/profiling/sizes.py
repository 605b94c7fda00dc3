"""At which sizes a profile is taken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """``matmul``: m, n and k; ``nbytes``: of one operand of other kernels; ``lengths`` and ``heads`` of attention;
    ``messages``: bytes of collectives."""

    matmul: tuple[int, ...]
    nbytes: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: tuple[int, ...]
    messages: tuple[int, ...]


CPU = Sizes(
    matmul=(32, 128, 512, 2048),
    nbytes=(1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26),
    lengths=(64, 128, 256, 512),
    heads=(64, 128),
    messages=(64, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 25),
)
CUDA = Sizes(
    matmul=(128, 512, 2048, 8192),
    nbytes=(1 << 14, 1 << 20, 1 << 24, 1 << 28),
    lengths=(512, 1024, 2048, 4096, 8192),
    heads=(64, 128),
    messages=(64, 1 << 16, 1 << 20, 1 << 24, 1 << 28),
)
LEAST = Sizes(matmul=(32, 64), nbytes=(1 << 12, 1 << 14), lengths=(16, 32), heads=(16,), messages=(64, 1 << 12))
"""For trying it out: seconds."""
