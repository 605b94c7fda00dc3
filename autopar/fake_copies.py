"""Results of calls on fake tensors, made from those of an equal call before: a tenth of the time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Pattern = tuple[torch.Tensor, torch.device, bool]
"""A meta tensor of the shape, the fake tensor's device, and whether it requires a gradient."""


class Copies:
    """What functions of fake tensors gave, by function, literals and kinds of operands. Copies have the kind of the
    first result, but no history: no view knows its base, and what requires a gradient is a leaf."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.patterns: dict[Hashable, Pattern | list[Pattern] | tuple[Pattern, ...] | None] = {}
        self.kinds: dict[int, Hashable] = {}  # by id; what is asked about here must live on
        self.leaves: set[int] = set()  # ids of copies that require a gradient

    def result(self, what: Hashable, operands: Sequence[torch.Tensor], run: Callable[[], Any]) -> Any:
        """What ``run`` gives, or copies of what an equal call gave. ``what``: the function and its literals."""
        try:
            key = (what, tuple([self._kind(t) for t in operands]))
            known = key in self.patterns
        except TypeError:  # a literal that cannot be compared
            return run()
        if not known:
            result = run()
            self.patterns[key] = self._pattern(result, operands) if operands else None
            if any(result is t for t in operands):
                self._forget(operands)
            return result
        pattern = self.patterns[key]
        if pattern is None:
            return run()
        if isinstance(pattern, list):
            return [self._copy(p) for p in pattern]
        if isinstance(pattern[0], torch.Tensor):
            return self._copy(pattern)
        return tuple([self._copy(p) for p in pattern])

    def mutate(self, run: Callable[[], Any], operands: Sequence[torch.Tensor]) -> Any:
        """What ``run`` gives, which may change the operands. Copies are no leaves in truth, so they may be changed."""
        self._forget(operands)
        if any(id(t) in self.leaves for t in operands):
            with torch.no_grad():
                return run()
        return run()

    def _forget(self, operands: Sequence[torch.Tensor]) -> None:
        for tensor in operands:
            self.kinds.pop(id(tensor), None)

    def _kind(self, tensor: torch.Tensor) -> Hashable:
        kind = self.kinds.get(id(tensor))
        if kind is None:
            constant = getattr(tensor, "constant", None) is not None  # it has a value, and so may the result
            where = (type(tensor), tensor.device, id(tensor) if constant else None)
            kind = self.kinds[id(tensor)] = (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, where)
        return kind

    def _pattern(self, result: Any, operands: Sequence[torch.Tensor]) -> Any:
        if type(result) in (list, tuple):
            found = [self._pattern(r, operands) for r in result]
            return None if not found or None in found else type(result)(found)
        plain = type(result) is FakeTensor and result.constant is None and result.layout is torch.strided
        if not plain or result.is_complex() or any(result is t for t in operands):
            return None
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
        return meta, result.device, result.requires_grad

    def _copy(self, pattern: Pattern) -> torch.Tensor:
        meta, device, requires_grad = pattern
        with torch._C._DisableTorchDispatch():
            made = FakeTensor(self.mode, meta, device)
            if requires_grad:
                made.requires_grad_()
                self.leaves.add(id(made))
        return made
