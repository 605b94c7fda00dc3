"""``torch.ops.autopar.decided``: its first operand, if Python decided as it did at capture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.library import LIBRARY, kernels


def _decided(x: Tensor, broken: list[Tensor], places: list[str]) -> Tensor:
    if int(torch.stack(broken).sum()):
        place = next(p for count, p in zip(broken, places, strict=True) if int(count))
        raise AutoparError(
            f"{place}: would decide otherwise for this batch than for the one captured (a program has one way; "
            "buffers may have changed already). Capture with such a batch, or decide outside of the model."
        )
    return x.clone()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.counts = len(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[None], None]:
    return grad, [None] * ctx.counts, None


def _fake(x: Tensor, broken: list[Tensor], places: list[str]) -> Tensor:
    return torch.empty_like(x)


kernels("decided(Tensor x, Tensor[] broken, str[] places) -> Tensor", _decided, _fake)
torch.library.register_autograd("autopar::decided", _backward, setup_context=_setup, lib=LIBRARY)
