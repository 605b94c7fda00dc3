"""How the ops of ``torch.ops.autopar`` are registered, so that each stays one node under fx, export and compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ADJOINTS: dict[str, Callable[..., Any]] = {}  # of differentiable ops, by name: see `differentiable`
LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]  # lives with the process


def kernels(
    schema: str, forward: Callable[..., Any], fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()
) -> str:
    """Define an op with one kernel for CPU and CUDA and one for fake tensors; its name."""
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=tags)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, forward, device)
    torch.library.register_fake(f"autopar::{name}", fake, lib=LIBRARY)
    return name


def differentiable(
    schema: str, forward: Callable[..., Any], fake: Callable[..., Any], adjoint: Callable[..., Any]
) -> Any:
    """An op of one tensor and literals, linear in the tensor; ``adjoint(grad, shape of the tensor, *literals)``."""
    name = kernels(schema, forward, fake)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.shape, ctx.literals = inputs[0].shape, inputs[1:]

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return adjoint(grad, ctx.shape, *ctx.literals), *(None for _ in ctx.literals)

    torch.library.register_autograd(f"autopar::{name}", backward, setup_context=setup, lib=LIBRARY)
    ADJOINTS[name] = adjoint
    return getattr(torch.ops.autopar, name).default


def composite(schema: str, function: Callable[..., Any]) -> Any:
    """An op made of torch ops: its fake and autograd kernels are theirs."""
    name = schema.split("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.autopar, name).default
