"""Is a step's loss finite, and every gradient? One small exchange of numbers, and the same answer on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.runtime.mesh import Ranks
from autopar.runtime.parameters import local


class NonfiniteError(AutoparError, FloatingPointError):
    """The loss or a gradient of a step is nan or inf."""


@torch.no_grad()
def check_finite(tensors: nn.Module, ranks: Ranks, loss: Tensor, step: int) -> None:
    """Raise `NonfiniteError`, on every rank alike, where the loss or a gradient is nan or inf. Collective.

    ``step``: the number to name, from 1. Of several gradients the one nearest the loss is named: those before it may
    have it from there.
    """
    named = list(tensors.named_parameters())  # the same on all ranks, whatever the stage
    held = [(place, local(p.grad)) for place, (_, p) in enumerate(named) if p.grad is not None]
    held = [(place, piece) for place, piece in held if piece.numel()]
    wrong = _wrong([piece for _, piece in held])
    last = max((held[i][0] for i in wrong), default=-1)
    every = ranks.gather_numbers([int(loss.isfinite().all()), last, len(wrong)])
    if not all(finite for finite, _, _ in every):
        raise NonfiniteError(
            f"step {step}: the loss is {loss.item():g}, parameters are as before. Look at this step's batch and at the "
            "learning rate."
        )
    rank = max(range(len(every)), key=lambda r: every[r][1])
    _, place, count = every[rank]
    if place >= 0:
        more = f" (and of {count - 1} more)" if count > 1 else ""
        raise NonfiniteError(
            f"step {step}: the gradient of {named[place][0]}{more} is nan or inf on {replace(ranks, rank=rank)}, the "
            f"loss is {loss.item():g}, parameters are as before. Look at what has no gradient there (sqrt or log of 0)."
        )


def _wrong(pieces: Sequence[Tensor]) -> list[int]:
    """The places of the tensors with an element that is nan or inf."""
    if not pieces:
        return []
    norms: Sequence[Tensor] = torch._foreach_norm(list(pieces), float("inf"))
    found: list[bool] = torch.stack([n.double() for n in norms]).isfinite().tolist()
    return [i for i, finite in enumerate(found) if not finite]


__all__ = ["NonfiniteError", "check_finite"]
