"""A torch optimizer over some elements at a time, so that the states of large parameters need no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from autopar.runtime.parameters import local
from autopar.stored import Stored, store

LARGE = 1 << 24  # elements: of larger pieces of parameters, as many at a time


class Piecewise:
    """Steps as the optimizer that ``make`` gives for ``params`` would, bit for bit, where that treats every element
    alone. The states of parameters of which this rank has more than `LARGE` elements lie in files whose names begin
    with ``path``."""

    def __init__(
        self, params: Sequence[Tensor], make: Callable[[list[Tensor]], torch.optim.Optimizer], path: Path
    ) -> None:
        self._params, self._make, self._path = params, make, path
        self._large = [p for p in params if local(p).numel() > LARGE]
        small = [p for p in params if local(p).numel() <= LARGE]
        self._small = make(small) if small else None
        self._states: dict[tuple[int, int], Stored] = {}

    def zero_grad(self) -> None:
        """No parameter has a gradient afterwards."""
        for p in self._params:
            p.grad = None

    def step(self) -> None:
        """One step of all that have a gradient."""
        if self._small is not None:
            self._small.step()
        for i, p in enumerate(self._large):
            if p.grad is not None:
                value, grads = local(p).detach().view(-1), local(p.grad).reshape(-1)
                for j, (piece, grad) in enumerate(zip(torch.split(value, LARGE), torch.split(grads, LARGE))):
                    self._step(i, j, piece, grad)

    def _step(self, i: int, j: int, piece: Tensor, grad: Tensor) -> None:
        piece.grad = grad
        optimizer = self._make([piece])
        if (i, j) in self._states:
            optimizer.state[piece] = dict(self._states[i, j])
        optimizer.step()
        self._states[i, j] = store(self._path.with_suffix(f".{i}.{j}"), optimizer.state[piece].items())
