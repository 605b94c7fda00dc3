"""Mixed precision: parameters rest in their own dtype and are computed with in ``param_dtype``.

What is captured, and what every plan must equal, is the model in one process with its real floating parameters cast to
``param_dtype``, and the floating inputs of its forward too (as FSDP2's ``cast_forward_inputs`` does). Buffers and
constants stay as they are, and so do explicit casts of the model. Integer and complex parameters are not cast, and
neither are those of batch norms: their statistics are buffers, and torch's kernels want both in one dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from autopar.clean_graph import place
from autopar.errors import AutoparError
from autopar.plan import Precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRODUCTS = {
    *("linear", "mm", "bmm", "matmul", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention"),
    *("convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    "batch_norm",
}
"""Ops whose float operands are of one dtype."""
CAST = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of what is cast."""


def precision(param_dtype: str | None, reduce_dtype: str | None) -> Precision:
    """The two words as a `Precision`. Raises AutoparError for one that is not known."""
    for key, word in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if word is not None and word not in DTYPES:
            raise AutoparError(f"{key}: {word!r} is not known. Legal: {', '.join(DTYPES)}.")
    return Precision(param_dtype, reduce_dtype)  # type: ignore[arg-type]


def param_dtype(asked: Precision) -> torch.dtype | None:
    """What parameters and inputs are cast to; None: nothing is."""
    return None if asked.param_dtype is None else DTYPES[asked.param_dtype]


def reduced_in(dtype: torch.dtype, asked: Precision) -> torch.dtype:
    """The dtype that the gradient of a parameter which rests in ``dtype`` is reduced in."""
    return dtype if asked.reduce_dtype is None or dtype not in CAST else DTYPES[asked.reduce_dtype]


def refuse_mixed(graph: fx.GraphModule, dtype: torch.dtype) -> None:
    """Raise for a product of parameters in ``dtype`` and something else: it could not run, but meta tensors pass."""
    for node in graph.graph.nodes:
        name = node.target.__name__.split(".")[0] if isinstance(node.target, torch._ops.OpOverload) else ""
        first = 1 if name == "batch_norm" else 0  # whose input alone may differ
        operands = [a.meta.get("val") for a in tree_leaves(node.args)[first:] if isinstance(a, fx.Node)]
        found = sorted({str(v.dtype) for v in operands if isinstance(v, torch.Tensor) and v.is_floating_point()})
        if name in PRODUCTS and len(found) > 1:
            raise AutoparError(
                f"{place(node)}: {name} is given {' and '.join(found)}, as parameters are cast to {dtype}. Cast what "
                "meets them, or leave out the pin param_dtype."
            )


def cast(tensors: Sequence[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The floating ones of the inputs in ``dtype``."""
    return [t.to(dtype) if dtype not in (None, t.dtype) and t.dtype in CAST else t for t in tensors]


@contextmanager
def parameters_in(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, the model reads its parameters cast to ``dtype`` (None: as they are); gradients flow to its own.

    >>> model = nn.Linear(2, 2)
    >>> with parameters_in(model, torch.bfloat16):
    ...     model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    >>> model.weight.dtype, model.weight.grad.dtype
    (torch.float32, torch.float32)
    """
    with replaced(model, {id(p): p.to(dtype) for p in to_cast(model, dtype)}):
        yield


def to_cast(model: nn.Module, dtype: torch.dtype | None) -> list[nn.Parameter]:
    """The parameters that are read in ``dtype`` and are not in it."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.running_mean is not None]
    apart = {id(p) for m in norms for p in m.parameters(recurse=False)}
    return [p for p in model.parameters() if dtype not in (None, p.dtype) and p.dtype in CAST and id(p) not in apart]


def as_read(graph: fx.GraphModule, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by name, in the dtypes in which a graph reads them; gradients flow to those that are given."""
    read = {str(n.target): n.meta["val"].dtype for n in graph.graph.find_nodes(op="get_attr")}
    return {name: t.to(read.get(name, t.dtype)) for name, t in tensors.items()}


@contextmanager
def replaced(model: nn.Module, stand_ins: dict[int, torch.Tensor]) -> Iterator[None]:
    """Inside, other tensors stand in for those of the model, by id: parameters, buffers, and tensors in attributes,
    also in the lists that recurrent modules keep of their weights."""
    swapped = [(holder, key, t) for holder, key, t in slots(model) if id(t) in stand_ins] if stand_ins else []
    lists = [(m.__dict__, k, v) for m in model.modules() for k, v in m.__dict__.items() if type(v) is list]
    try:
        for holder, key, tensor in swapped:
            holder[key] = stand_ins[id(tensor)]
        yield
    finally:
        for holder, key, whole in lists if swapped else ():  # torch.export leaves others
            holder[key] = whole
        for holder, key, tensor in swapped:
            holder[key] = tensor


def slots(model: nn.Module) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """(container, key, tensor) of every place where the modules of a model hold a tensor."""
    for module in model.modules():
        containers: list[Any] = [module._parameters, module._buffers, module.__dict__]
        containers += [v for v in module.__dict__.values() if type(v) is list]
        for holder in containers:
            for key, held in list(enumerate(holder) if isinstance(holder, list) else holder.items()):
                if isinstance(held, torch.Tensor):
                    yield holder, key, held


__all__ = [
    "Precision",
    "as_read",
    "cast",
    "param_dtype",
    "parameters_in",
    "precision",
    "reduced_in",
    "refuse_mixed",
    "replaced",
    "slots",
    "to_cast",
]
