"""Python that reads the value of a tensor while a model is traced: which reads have an answer that a plan may keep.

- One that hangs on no input, parameter or random number is the same in every step: the answer is a constant.
- Whether all is finite, and a truth about inputs alone, are answered as the example inputs answer them, and every step
  holds the whole batch to that (`hold`): where it would have been decided otherwise, the step raises.
- Any other is refused here, in the module that reads (`Read`); that module may be called as it is (`opaque_calls`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import autopar.runtime.decided  # noqa: F401  (defines autopar::decided)
from autopar.example_values import INPUT, ExampleValues, Unknown, untraced
from autopar.runtime.opaque import Cut, opaque, register

TRUTHS = {"__bool__", "item", "is_nonzero"}
NUMBERS = {"__int__", "__float__", "__index__", "__complex__", "tolist", "numpy", "__array__", "__format__"}
READS = TRUTHS | NUMBERS
FINITE = {"isfinite", "isnan", "isinf", "isposinf", "isneginf"}
SIGNATURE = inspect.signature(F.ctc_loss)
LOGICAL = {
    *("all", "any", "logical_not", "logical_and", "logical_or", "__and__", "__or__", "__invert__", "bitwise_not"),
    *("bitwise_and", "bitwise_or", "flatten", "reshape", "view"),
}


class Read(Exception):
    """A value was read on which what runs depends, and that other batches may answer otherwise."""


@dataclass(frozen=True)
class ConnectionistLoss:
    """`ctc_loss` of every row: log probabilities [time, rows, classes], labels [rows, most], lengths of both [rows]."""

    name: str
    blank: int
    zero_infinity: bool
    addends = True

    def run(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """One loss a row."""
        log_probs, targets, inputs, lengths = operands
        return [F.ctc_loss(log_probs, targets, inputs, lengths, self.blank, "none", self.zero_infinity)]

    def fake(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """The same without values."""
        return [operands[0].new_empty(operands[0].shape[1])]

    def flops(self, operands: Sequence[Any]) -> int:
        """No products."""
        return 0

    def cuts(self) -> tuple[Cut, ...]:
        """Rows."""
        return (Cut((1, 0, 0, 0), (0,)),)


class Decisions(TorchFunctionMode):
    """Answers reads of values while a model is traced; `hold` puts what must stay true into the graph."""

    def __init__(self, values: ExampleValues, where: Callable[[], str], numbers: dict[Hashable, Any]) -> None:
        super().__init__()
        self.values, self.where, self.numbers = values, where, numbers
        self.finite: dict[int, Tensor] = {}  # truths about what is finite, by id, kept alive
        self.reduced: dict[int, tuple[Tensor, Tensor, str]] = {}  # of all() and any(): result, operand, which
        self.selected: dict[int, tuple[Tensor, Tensor]] = {}  # of masked_select: labels in rows, and the mask
        self.broken: list[Tensor] = []  # how many elements answer otherwise than in the examples
        self.places: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else None
        if name in READS and isinstance(first, Tensor) and _traced(first):
            with torch._C.DisableTorchFunction():
                return self._answer(func, name, first, args, kwargs)
        if name == "masked_select" and isinstance(first, Tensor) and first.ndim == 2:
            return self._select(first, *args[1:], **kwargs)
        if func is F.ctc_loss:
            return self._ctc_loss(**SIGNATURE.bind(*args, **kwargs).arguments)
        if any(id(t) in self.selected for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)):
            raise Read("makes a tensor whose shape depends on values")
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self._note(name, args, kwargs, result)
        if any(isinstance(n, torch.SymInt) for t in tree_leaves(result) if isinstance(t, Tensor) for n in t.shape):
            raise Read("makes a tensor whose shape depends on values")
        return result

    def _note(self, name: str, args: Any, kwargs: Any, result: Tensor) -> None:
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if name in FINITE or (name in LOGICAL and read and all(id(t) in self.finite for t in read)):
            self.finite[id(result)] = result
        if name in ("all", "any") and len(read) == 1 and result.ndim == 0 and read[0].dtype == torch.bool:
            self.reduced[id(result)] = (result, read[0], name)

    def _select(self, tensor: Tensor, mask: Tensor) -> Tensor:
        """What a row has of ``tensor``, moved to its front: for `ctc_loss`, which takes labels in rows as well."""
        mask = mask.expand_as(tensor)
        rows = tensor.gather(1, mask.logical_not().to(torch.int8).argsort(dim=1, stable=True))
        self.selected[id(rows)] = rows, mask
        return rows

    def _ctc_loss(
        self, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, **how: Any
    ) -> Tensor:
        """Of labels in rows, one node: torch's own has no shape before it has values."""
        targets, mask = self.selected.get(id(targets), (targets, None))
        lengths = input_lengths, target_lengths
        if log_probs.ndim != 3 or targets.ndim != 2 or not all(isinstance(n, Tensor) and n.ndim for n in lengths):
            raise Read("has labels of every row after one another")
        with torch._C.DisableTorchFunction():
            if mask is not None:
                self._hold(target_lengths.ne(mask.sum(1)))
            key = "ctc_loss", how.get("blank", 0), how.get("zero_infinity", False)
            if key not in self.numbers:
                call = ConnectionistLoss(*key)
                self.numbers[key] = call, register(call)
            rows: Tensor
            (rows,) = opaque([log_probs, targets, *lengths], "ctc_loss", self.numbers[key][1])
            if how.get("reduction", "mean") == "mean":
                return (rows / target_lengths.clamp(min=1)).mean()
            return rows.sum() if how["reduction"] == "sum" else rows

    def _answer(self, func: Any, name: str, tensor: Tensor, args: Any, kwargs: Any) -> Any:
        try:
            real = self.values.of(tensor)
        except Unknown as why:
            raise Read(f"reads the value of a tensor ({why})") from None
        depends = self.values.hangs_on(real)
        with untraced():
            answer = func(real, *args[1:], **kwargs)
        if depends:
            truth = name in TRUTHS and tensor.dtype == torch.bool
            if not truth or not (depends <= {INPUT} or id(tensor) in self.finite):
                raise Read("depends on the values of tensors")
            self._expect(tensor, bool(answer))
        return answer

    def _expect(self, tensor: Tensor, answer: bool) -> None:
        """Count what answers otherwise. A truth about all elements is a sum over them, which pieces can have."""
        _, elements, which = self.reduced.get(id(tensor), (tensor, tensor, ""))
        if (which, answer) == ("all", True):
            wrong = elements.logical_not()
        elif (which, answer) == ("any", False):
            wrong = elements
        else:
            wrong = tensor.logical_not() if answer else tensor
        self._hold(wrong)

    def _hold(self, wrong: Tensor) -> None:
        self.broken.append(wrong.sum())
        self.places.append(self.where())

    def hold(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """``tensors``, the first of them such that it is there only where all was decided as in the examples."""
        if not self.broken:
            return tensors
        return torch.ops.autopar.decided(tensors[0], self.broken, self.places), *tensors[1:]


def _traced(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)
