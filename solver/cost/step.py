"""Seconds and bytes of a whole step of one rank."""

from __future__ import annotations

from typing import Any

from autopar.solver.cost.either import larger


def step_time(compute: Any, exposed: Any, hidden: Any) -> Any:
    """Seconds of a step: ``exposed`` communication is waited for; ``hidden`` communication (of parameters and
    gradients) runs beside ``compute``, so that the longer of the two counts.

    >>> step_time(compute=0.8, exposed=0.1, hidden=0.3)
    0.9
    """
    return exposed + larger(compute, hidden)


def peak_bytes(static: Any, saved: Any, transient: Any) -> Any:
    """Bytes of a rank at the fullest moment: held all the time, kept by autograd for the microbatches in flight, and
    the largest working memory.

    >>> peak_bytes(static=60e9, saved=10e9, transient=2e9)
    72000000000.0
    """
    return static + saved + transient
