"""Seconds of a collective: its latency, and what each rank must move over the bus bandwidth.

Source: nccl-tests, doc/PERFORMANCE.md. It defines the *bus bandwidth* so that the figure of one link stands for any
number of ranks: a ring moves ``(n-1)/n`` of the bytes over each link for a gather or a scatter, twice that for both.
"""

from __future__ import annotations

from typing import Any

from autopar.solver.cost.either import where_several

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def share(kind: str, ranks: Any) -> Any:
    """Bytes that cross a rank's link, over the bytes counted (see `collective`); no unit.

    >>> share("all_reduce", 4), share("all_gather", 4), share("send", 2)
    (1.5, 0.75, 1.0)
    """
    assert kind in KINDS, f"{kind!r} is none of {KINDS}"
    if kind == "send":
        return where_several(ranks, 1.0)
    part = (ranks - 1) / ranks
    return 2 * part if kind == "all_reduce" else part


def collective(kind: str, ranks: Any, nbytes: Any, latency: Any, bandwidth: Any) -> Any:
    """Seconds of one collective over ``ranks`` ranks; 0 for one rank.

    ``nbytes`` counts as nccl-tests does: all_reduce and all_to_all, what each rank holds; all_gather, the result;
    reduce_scatter, the input; send, the message. ``latency`` in seconds; ``bandwidth``: bus bandwidth in bytes/s.

    >>> collective("all_reduce", 8, 1e9, latency=2e-5, bandwidth=350e9)
    0.00502
    >>> collective("all_gather", 1, 1e9, latency=2e-5, bandwidth=350e9)
    0.0
    """
    return where_several(ranks, latency + share(kind, ranks) * nbytes / bandwidth)
