"""A model's own autograd.Function, captured as the ops of its forward where their derivative is its backward.

torch.export would trace the forward under no_grad, so that the gradient stops there. Here it is traced as plain ops.
Afterwards `other_backwards` runs the function itself and its forward's ops on random inputs of the same shapes: where
values or gradients differ (a straight-through or reversed gradient), the function is one opaque node (`opaque_calls`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves, tree_map

SPREADS = (1.0, 8.0, 0.05)  # of the random inputs: usual, where functions saturate, near zero
CLOSE = 1e-7  # of the largest value, in float64: constants that a backward writes out are rounded to fp32
SEED = 20

Function = torch.autograd.Function
Opaque = Callable[[type, tuple[Any, ...]], Callable[[], Any] | None]
"""Of a function and its arguments: how to call it as one node, or None where its forward's ops stand for it."""


@dataclass(frozen=True)
class Applied:
    """One call. ``args``: as given, tensors as meta tensors; ``where``: module FQN and file:line."""

    function: type[Function]
    args: tuple[Any, ...]
    where: str


@contextmanager
def inlined(where: Callable[[], str], applied: list[Applied], opaque: Opaque) -> Iterator[None]:
    """While a model is traced, run ``forward`` of users' functions in place of ``apply`` and list the calls, but for
    those that are ``opaque``."""
    module = torch.autograd.function
    asked: Callable[[Any], Any] = module._is_setup_context_defined
    active: Callable[[], bool] = torch._C._are_functorch_transforms_active
    taken: Callable[..., Any] = vars(module)["custom_function_call"]

    def setup_context_defined(function: Any) -> Any:
        # Function.apply asks this first; patching apply itself would miss ``fn = MyFunction.apply`` bound before
        cls = sys._getframe(1).f_locals.get("cls")
        if not isinstance(cls, type) or _is_torchs(cls):
            return asked(function)
        return True if asked(function) else _SecondTime()

    def transforms_active() -> bool:
        cls = sys._getframe(1).f_locals.get("cls")
        users = isinstance(cls, type) and issubclass(cls, Function) and not _is_torchs(cls)
        return users or active()

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_torchs(cls):
            return taken(cls, *args, **kwargs)
        if kwargs:
            args = (*args, *kwargs.values())
        one = opaque(cls, args)
        if one is not None:
            return one()
        applied.append(Applied(cls, tree_map(_meta, args), where()))
        return forward_of(cls, args)

    with ExitStack() as stack:
        stack.enter_context(patch.object(module, "_is_setup_context_defined", setup_context_defined))
        stack.enter_context(patch.object(torch._C, "_are_functorch_transforms_active", transforms_active))
        stack.enter_context(patch.object(module, "custom_function_call", call))
        yield


class _SecondTime:
    """False, then true. ``apply`` first asks whether to bind arguments to a forward without ``ctx``, which would fail
    for the older form, then whether it may hand the call to `call`."""

    def __init__(self) -> None:
        self.asked = 0

    def __bool__(self) -> bool:
        self.asked += 1
        return self.asked > 1


class _Context:
    """What forward writes its notes on; nobody reads them."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Nothing to do."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Nothing to do: `other_backwards` would see a gradient that the function does not give."""

    def mark_dirty(self, *tensors: Any) -> None:
        """Nothing to do: ops in place are traced as such."""

    def set_materialize_grads(self, value: bool) -> None:
        """Nothing to do."""


def forward_of(cls: Any, args: Sequence[Any]) -> Any:
    """The function's forward as plain ops."""
    if cls.setup_context is not Function.setup_context:
        return cls.forward(*args)
    return cls.forward(_Context(args), *args)


def other_backwards(applied: Sequence[Applied]) -> dict[type, str]:
    """The functions whose backward is not the derivative of their forward: where they are called, and what differs."""
    found: dict[type, str] = {}
    seen = set()
    for call in applied:
        key = (call.function, repr(tree_map(_kind, call.args)))
        if key in seen or call.function in found:
            continue
        seen.add(key)
        with torch.random.fork_rng([]), torch.enable_grad():
            torch.manual_seed(SEED)
            why = next((w for spread in SPREADS if (w := _difference(call, spread))), "")
        if why:
            found[call.function] = f"{call.where}: autograd.Function {call.function.__name__} {why}"
    return found


def _difference(call: Applied, spread: float) -> str:
    """Why the function is not its forward's ops; empty where it is, on one random sample."""
    try:
        args = tree_map(lambda a: _sample(a, spread), call.args)
        own, plain = _run(call.function.apply, args), _run(lambda *a: forward_of(call.function, a), args)
    except Exception as error:
        return f"cannot be tried on random inputs ({type(error).__name__}: {str(error).splitlines()[0][:150]})"
    if not _alike(own[0], plain[0]):
        return "gives other values than its forward"
    if not _alike(own[1], plain[1]):
        return "has a backward that is not the derivative of its forward"
    return ""


def _run(function: Callable[..., Any], args: Any) -> tuple[list[Any], list[Any]]:
    """Results, and gradients of a fixed combination of them."""
    own = tree_map(lambda a: a.clone() if isinstance(a, torch.Tensor) else a, args)
    leaves = [a for a in tree_leaves(args) if isinstance(a, torch.Tensor) and a.requires_grad]
    results = [r for r in tree_leaves(function(*own)) if isinstance(r, torch.Tensor)]
    passed = [r for r in results if r.requires_grad]
    if not leaves or not passed:
        return [r.detach() for r in results], [None] * len(leaves)
    torch.manual_seed(SEED)
    total = torch.stack([(r * torch.randn_like(r)).sum().real for r in passed]).sum()
    return [r.detach() for r in results], list(torch.autograd.grad(total, leaves, allow_unused=True))


def _alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        x, y = (torch.zeros(()) if t is None and (y is None or x is None) else t for t in (x, y))
        wide = torch.complex128 if x.is_complex() else torch.float64
        x, y = x.to(wide), y.to(wide)
        largest = max((float(t.abs().nan_to_num(0.0, 0.0).max()) for t in (x, y) if t.numel()), default=0.0)
        shape = x.shape if x.dim() else y.shape  # a missing gradient is a zero of any shape
        if (y.dim() and y.shape != shape) or not torch.allclose(
            x.expand(shape), y.expand(shape), rtol=0, atol=CLOSE * largest, equal_nan=True
        ):
            return False
    return True


def sampled(args: Any, spread: float) -> Any:
    """``args`` with random tensors for its tensors, float64 where they are floating, the same in every call."""
    with torch.random.fork_rng([]):
        torch.manual_seed(SEED)
        return tree_map(lambda a: _sample(a, spread), args)


def described(args: Any) -> Any:
    """``args`` with meta tensors for its tensors."""
    return tree_map(_meta, args)


def _sample(a: Any, spread: float) -> Any:
    if not isinstance(a, torch.Tensor):
        return a
    if a.dtype == torch.bool:
        return torch.rand(a.shape) < 0.5
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return torch.randint(0, 2, a.shape, dtype=a.dtype)
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    return (torch.randn(a.shape, dtype=wide) * spread).requires_grad_(a.requires_grad)


def _meta(a: Any) -> Any:
    if not isinstance(a, torch.Tensor):
        return a
    return torch.empty(a.shape, dtype=a.dtype, device="meta", requires_grad=a.requires_grad)


def _kind(a: Any) -> Any:
    return (tuple(a.shape), a.dtype, a.requires_grad) if isinstance(a, torch.Tensor) else a


def _is_torchs(cls: type) -> bool:
    return cls.__module__.startswith("torch.")
