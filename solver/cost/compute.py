"""Seconds of what one rank computes."""

from __future__ import annotations

from typing import Any

from autopar.solver.cost.either import larger

ADAMW_PASSES = 7
"""How often AdamW touches every resting byte: it reads the parameter, its gradient and two states, and writes the
parameter and the states. (Loshchilov and Hutter, "Decoupled weight decay regularization", algorithm 2; a fused kernel
as in ``torch.optim.AdamW(fused=True)``.)"""


def roofline(flops: Any, nbytes: Any, flops_per_s: Any, bytes_per_s: Any) -> Any:
    """Seconds of an op: as long as its ``flops`` (FLOP) or its ``nbytes`` (bytes of device memory) take, the longer.

    Source: Williams, Waterman, Patterson, "Roofline", CACM 2009. Both rates are those reached, not the peaks.

    >>> roofline(flops=8e12, nbytes=3e9, flops_per_s=800e12, bytes_per_s=3e12)
    0.01
    """
    return larger(flops / flops_per_s, nbytes / bytes_per_s)


def adamw(nbytes: Any, bytes_per_s: Any) -> Any:
    """Seconds of one AdamW update of parameters that rest in ``nbytes`` bytes on this rank (gradient and states in
    the same dtype). ``bytes_per_s``: rate reached of device memory.

    >>> adamw(nbytes=3e9, bytes_per_s=3e12)
    0.007
    """
    return ADAMW_PASSES * nbytes / bytes_per_s
