"""The casts that `torch.autocast` makes when ops run, found by running each op on fake tensors and watching.

The lists of ops are torch's own, whatever its version: nothing is written down here a second time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autopar.errors import AutoparError


class Autocast:
    """One outermost ``with torch.autocast("cpu", dtype)``. Like eager's, it casts a weight once for all its uses.

    Example:
        >>> x = fx.Graph().placeholder("x")
        >>> x.meta["val"] = torch.empty(3, 3, device="meta")
        >>> Autocast(torch.bfloat16).casts(torch.ops.aten.mm.default, (x, x), {}), x
        ({x: torch.bfloat16}, x)
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.weights: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}  # (weight, dtype) -> its cast
        self._known: dict[Any, dict[int, torch.dtype]] = {}

    def casts(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[fx.Node, torch.dtype]:
        """Which operands of an op are cast, and to what. Raises AutoparError where it casts inside itself otherwise."""
        operands = list(dict.fromkeys(a for a in tree_leaves((tuple(args), kwargs)) if isinstance(a, fx.Node)))
        described = tree_map(lambda a: _describe(a, operands), (tuple(args), kwargs))
        key = (target, self.dtype, repr(described))
        if key not in self._known:
            self._known[key] = _watched(target, args, kwargs, operands, self.dtype)
        return {operands[i]: dtype for i, dtype in self._known[key].items()}

    def nested(self, dtype: torch.dtype) -> Autocast:
        """A region inside this one: the same weights' casts."""
        inner = Autocast(dtype)
        inner.weights, inner._known = self.weights, self._known
        return inner


def _describe(a: Any, operands: list[fx.Node]) -> Any:
    if not isinstance(a, fx.Node):
        return a
    vals = [(v.dtype, tuple(v.shape)) for v in tree_leaves(a.meta.get("val")) if isinstance(v, torch.Tensor)]
    return operands.index(a), vals


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the operands (by position) that are copied to another float dtype, and counts such copies of others."""

    def __init__(self, operands: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operands, self.found, self.inside = operands, set[tuple[int, torch.dtype]](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = kwargs.get("dtype")
        if func is torch.ops.aten._to_copy.default and dtype is not None and dtype.is_floating_point:
            if id(args[0]) in self.operands:
                self.found.add((self.operands[id(args[0])], dtype))
            self.inside += id(args[0]) not in self.operands
        return func(*args, **kwargs)


def _watched(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any], operands: list[fx.Node], low: torch.dtype
) -> dict[int, torch.dtype]:
    with FakeTensorMode():
        fakes = [tree_map(_fake, n.meta.get("val")) for n in operands]
        places = {id(fake): i for i, fake in enumerate(fakes)}

        def run(given: Sequence[Any]) -> tuple[Any, _Casts]:
            at = dict(zip(operands, given, strict=True))
            real_args, real_kwargs = fx.map_arg((tuple(args), kwargs), at.__getitem__)
            with _Casts(places) as seen:
                return target(*real_args, **real_kwargs), seen

        with torch.autocast("cpu", dtype=low, cache_enabled=False):
            out, casting = run(fakes)
        if not casting.found and not casting.inside:
            return {}
        with _silent(), torch.autocast("cpu", enabled=False):
            try:
                plain = run(fakes)[1]
            except RuntimeError:  # operands of several dtypes, which autocast brings together
                plain = _Casts(places)
            found = dict(sorted(casting.found - plain.found, key=lambda cast: cast[0]))  # the same in every process
            if not found and casting.inside == plain.inside:
                return {}
            if not found:  # an op made of others, as einsum
                found = {i: low for i, v in enumerate(fakes) if _floats(v) and v.dtype != low}
            try:
                again = run([v.to(found[i]) if i in found else v for i, v in enumerate(fakes)])[0]
            except RuntimeError:
                again = None
    if _dtypes(again) != _dtypes(out):
        name = str(target).removesuffix(".default")
        raise AutoparError(f"{name} casts inside itself under autocast (no graph can show it). Disable autocast there.")
    return found


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep back what torch logs of an op that fails on fakes."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _fake(v: Any) -> Any:
    if not isinstance(v, torch.Tensor):
        return v
    return torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="cpu")


def _floats(v: Any) -> bool:
    return isinstance(v, torch.Tensor) and v.is_floating_point()


def _dtypes(value: Any) -> list[torch.dtype]:
    return [v.dtype for v in tree_leaves(value) if isinstance(v, torch.Tensor)]
