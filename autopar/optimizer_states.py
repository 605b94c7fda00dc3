"""The tensors that an optimizer keeps for every parameter, found by running one step of it on small ones.

A plan records them (`Plan.optimizer`) in words. ``param`` is a tensor of the parameter's shape and dtype, which rests
as the parameter does, ``param:fp32`` one of another dtype; ``d0*d2:fp32`` has as many elements as dims 0 and 2 have
together, and is held whole by every rank. Counts of steps (0-d) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.loading import parse_option
from autopar.plan import Optimizer
from autopar.runtime.optimizer import kind_of
from autopar.schema import nearest
from autopar.write_plan import DTYPES

Wanted = str | type[torch.optim.Optimizer] | Callable[[list[Tensor]], torch.optim.Optimizer]

SIZES = (5, 7, 11, 13, 17, 19, 23)  # of the dims of a small parameter: a size says which dims made it
EVERY = "*"  # parameters of any dtype and number of dims


def optimizer_states(wanted: Wanted, parameters: Iterable[Tensor]) -> Optimizer:
    """What an optimizer keeps. ``wanted``: its class, a name from `torch.optim` with options, or a function that makes
    it of a list of parameters (it is given one at a time, so it may choose by the number of dims).

    Raises AutoparError for an unknown name, and where it does not take parameters such as those of the model.

    >>> optimizer_states("sgd,momentum=0.9", [torch.ones(2, 2)])
    Optimizer(name='SGD(momentum=0.9)', states={'*': ('param',)})
    >>> optimizer_states(torch.optim.Adafactor, [torch.ones(2, 2), torch.ones(2)]).states
    {'fp32 1': ('param',), 'fp32 2': ('d1:fp32', 'd0:fp32')}
    """
    make, name = _factory(wanted)
    found, kinds = dict[str, tuple[str, ...]](), dict[str, None]()
    for dtype, ndim in sorted({(p.dtype, p.ndim) for p in parameters}, key=str):
        small = nn.Parameter(torch.ones(SIZES[:ndim], dtype=dtype))
        small.grad = torch.full_like(small, 1e-2)
        try:
            optimizer = make([small])
            optimizer.step()
        except Exception as error:
            said = " ".join(str(error).split())[:160]
            raise AutoparError(
                f"optimizer: {name or 'the function'} does not step on a parameter of {ndim} dims in {_word(dtype)} "
                f"({type(error).__name__}: {said}). Give a function that makes one of a list of parameters."
            ) from error
        kinds[kind_of(optimizer).__name__] = None
        states = (v for _, v in sorted(optimizer.state[small].items()) if isinstance(v, Tensor) and v.ndim)
        found[f"{_word(dtype)} {ndim}"] = tuple(_described(state, small) for state in states)
    same, *others = set(found.values()) or {()}
    if not others and all(word.startswith("param") for word in same):
        found = {EVERY: same}
    return Optimizer(name or ", ".join(kinds), found)


def state_bytes(optimizer: Optimizer, shape: Iterable[int], dtype: torch.dtype, piece: float) -> float:
    """Bytes that a rank holds of the states of one parameter; ``piece``: of its bytes of the parameter itself.

    >>> adafactor = Optimizer("Adafactor", {"*": ("d0:fp32", "d1:fp32")})
    >>> [state_bytes(o, (64, 32), torch.float32, 1024.0) for o in (Optimizer(), adafactor)]
    [2048.0, 384.0]
    """
    sizes = tuple(shape)
    words = optimizer.states.get(f"{_word(dtype)} {len(sizes)}", optimizer.states.get(EVERY, ()))
    return sum(_bytes(word, sizes, dtype, piece) for word in words)


def _bytes(word: str, sizes: tuple[int, ...], dtype: torch.dtype, piece: float) -> float:
    dims, _, other = word.partition(":")
    width = _width(other) if other else dtype.itemsize
    if dims == "param":
        return piece * width / dtype.itemsize
    return float(width * math.prod(sizes[int(d[1:])] if d.startswith("d") else int(d) for d in dims.split("*")))


def _described(state: Tensor, small: Tensor) -> str:
    if state.shape == small.shape:
        return "param" if state.dtype == small.dtype else f"param:{_word(state.dtype)}"
    left, dims = state.numel(), []
    for i, size in enumerate(small.shape):
        while left % size == 0:
            left //= size
            dims.append(f"d{i}")
    return f"{'*'.join([*dims, *[str(left)] * (left > 1 or not dims)])}:{_word(state.dtype)}"


def _word(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def _width(word: str) -> int:
    named = {text: dtype for dtype, text in DTYPES.items()}
    dtype = named.get(word) or getattr(torch, word, None)
    if not isinstance(dtype, torch.dtype):
        raise AutoparError(f"plan: optimizer.states: {word!r} is no dtype. Legal: {', '.join(named)}, or one of torch.")
    return dtype.itemsize


def _factory(wanted: Wanted) -> tuple[Callable[[list[Tensor]], torch.optim.Optimizer], str]:
    """A function that makes the optimizer, and its name ("": what it makes has one)."""
    if isinstance(wanted, str):
        first, *settings = wanted.split(",")
        known = _known()
        if first.lower() not in known:
            hint = nearest(first.lower(), known)
            raise AutoparError(f"optimizer: {first!r} is not in torch.optim{hint or '.'} Legal: {', '.join(known)}.")
        options: dict[str, Any] = {}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals:
                raise AutoparError(f"optimizer: {setting!r} is not KEY=VALUE. Example: sgd,momentum=0.9.")
            options[key.strip()] = parse_option(value)
        return partial(known[first.lower()], **options), _called(known[first.lower()], options)
    if isinstance(wanted, partial) and isinstance(wanted.func, type):
        return wanted, _called(wanted.func, wanted.keywords)
    if isinstance(wanted, type) and issubclass(wanted, torch.optim.Optimizer):
        return wanted, wanted.__name__
    if callable(wanted) and not isinstance(wanted, type):
        return wanted, ""
    raise AutoparError(
        f"optimizer: {wanted!r} is no optimizer. Give a class as torch.optim.AdamW, its name, or a function of a list "
        "of parameters."
    )


def _called(kind: type, options: Mapping[str, Any]) -> str:
    text = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{kind.__name__}({text})" if text else kind.__name__


def _known() -> dict[str, type[torch.optim.Optimizer]]:
    kinds = (getattr(torch.optim, name) for name in sorted(dir(torch.optim), key=str.lower))
    return {
        kind.__name__.lower(): kind
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }


__all__ = ["Wanted", "optimizer_states", "state_bytes"]
