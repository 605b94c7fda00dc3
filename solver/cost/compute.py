"""Seconds of what one rank computes."""

from __future__ import annotations

from typing import Any

from autopar.solver.cost.either import larger

PASSES = 3
"""How often an update touches a resting byte: it reads the parameter and its gradient and writes the parameter. Of a
byte of the optimizer's states `STATE_PASSES`: it is read and written. So AdamW with its two states makes 7 passes
(Loshchilov and Hutter, "Decoupled weight decay regularization", algorithm 2; one fused kernel as in
``torch.optim.AdamW(fused=True)``)."""
STATE_PASSES = 2


def roofline(flops: Any, nbytes: Any, flops_per_s: Any, bytes_per_s: Any) -> Any:
    """Seconds of an op: as long as its ``flops`` (FLOP) or its ``nbytes`` (bytes of device memory) take, the longer.

    Source: Williams, Waterman, Patterson, "Roofline", CACM 2009. Both rates are those reached, not the peaks.

    >>> roofline(flops=8e12, nbytes=3e9, flops_per_s=800e12, bytes_per_s=3e12)
    0.01
    """
    return larger(flops / flops_per_s, nbytes / bytes_per_s)


def cast(read: Any, written: Any, bytes_per_s: Any) -> Any:
    """Seconds of a cast: ``read`` and ``written`` bytes at the rate reached of device memory.

    >>> cast(read=4e9, written=2e9, bytes_per_s=3e12)
    0.002
    """
    return (read + written) / bytes_per_s


def update(nbytes: Any, states: Any, bytes_per_s: Any) -> Any:
    """Seconds of one update of parameters that rest in ``nbytes`` bytes on this rank, by an optimizer that keeps
    ``states`` bytes of them. ``bytes_per_s``: rate reached of device memory.

    >>> update(nbytes=3e9, states=6e9, bytes_per_s=3e12)
    0.007
    """
    return (PASSES * nbytes + STATE_PASSES * states) / bytes_per_s
