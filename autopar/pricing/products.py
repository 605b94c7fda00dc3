"""What is multiplied in an op of the annotated graph, forward and backward, and what kind of kernel the op is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from autopar.passes import price
from autopar.passes.divide_work import flops
from autopar.passes.facts import operand_nodes, value
from autopar.solver.work import Attend, Product

Shape = tuple[int, ...]
DTYPES = {**price.DTYPES, torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}
COPIES = {"clone", "contiguous", "cat", "stack", "reshape", "repeat", "roll", "flip", "pad", "constant_pad_nd", "copy"}
LOOKUPS = {"embedding", "index", "index_select", "gather", "take_along_dim", "scatter", "index_put"}
REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "prod", "logsumexp", "softmax", "log_softmax", "var", "std"}


def name_of(node: fx.Node) -> str:
    """The op's name without namespace and overload.

    >>> name_of(fx.Graph().call_function(torch.ops.aten.linear.default))
    'linear'
    """
    return getattr(node.target, "__name__", str(node.target)).split(".")[0]


def kind_of(node: fx.Node, *, is_view: bool) -> str:
    """One of `autopar.solver.work.KINDS`."""
    name = name_of(node)
    if is_view:
        return "view"
    if "conv" in name:
        return "conv"
    if "attention" in name:
        return "attention"
    if flops(node):
        return "matmul"
    if "cross_entropy" in name or name.endswith("_loss"):
        return "loss"
    if "norm" in name:
        return "norm"
    if name in LOOKUPS:
        return "lookup"
    if name in REDUCTIONS or name.strip("_") in REDUCTIONS:
        return "reduction"
    if "dropout" in name or "rand" in name or "bernoulli" in name or "uniform" in name:
        return "random"
    return "copy" if name.strip("_") in COPIES else "pointwise"


def attend_of(node: fx.Node, shapes: Sequence[Shape]) -> Attend | None:
    """The attention of an op on operands of these shapes, ``[..., heads, length, head]`` each."""
    if "attention" not in name_of(node) or not flops(node):
        return None
    q, k, v = shapes[:3]
    named = dict(zip([a.name for a in node.target._schema.arguments], node.args)) | node.kwargs  # type: ignore[union-attr]
    return Attend(
        batch=math.prod(q[:-3]),
        heads=q[-3] if len(q) > 2 else 1,
        kv_heads=k[-3] if len(k) > 2 else 1,
        queries=q[-2],
        keys=k[-2],
        head=(q[-1] + v[-1]) // 2,
        dtype=_dtype(node),
        causal=bool(named.get("is_causal", False)),
    )


Products = tuple[tuple[Product, ...], tuple[Product, ...], tuple[Product, ...]]


def products_of(
    node: fx.Node, shapes: Sequence[Shape], needs: Sequence[tuple[bool, bool]], results: Sequence[Shape]
) -> Products:
    """The matmuls of an op: forward, those of its activations' gradients, those of its weights' gradients.

    Args:
        node: The op (attention has none here).
        shapes: Local shapes of its operands.
        needs: Per operand whether it needs a gradient, and whether it is a weight.
        results: Local shapes of its results.
    """
    if not flops(node) or "attention" in name_of(node):
        return (), (), ()
    factors = _factors(node, shapes, results)
    forward, back = (Product(*factors[0], _dtype(node)),), (Product(*f, _dtype(node)) for f in factors[1:])
    slots = {"addmm": (1, 2), "baddbmm": (1, 2), "addbmm": (1, 2)}.get(name_of(node), (0, 1))
    wanted = [(p, *needs[slot]) for slot, p in zip(slots, back, strict=True) if slot < len(needs)]
    inputs = tuple(p for p, grad, weight in wanted if grad and not weight)
    return forward, inputs, tuple(p for p, grad, weight in wanted if grad and weight)


def _dtype(node: fx.Node) -> str:
    return DTYPES.get(value(operand_nodes(node)[0]).dtype, "fp32")


def _factors(node: fx.Node, shapes: Sequence[Shape], results: Sequence[Shape]) -> list[tuple[int, int, int, int]]:
    """(batch, m, n, k) of the product, of the first factor's gradient and of the second's."""
    name = name_of(node)
    if name == "linear":
        m, k, n = math.prod(shapes[0][:-1]), shapes[0][-1], shapes[1][0]
        return [(1, m, n, k), (1, m, k, n), (1, n, k, m)]
    if name == "einsum" and len(shapes) == 2:
        batch, m, n, k = _einsum(str(node.args[0]), shapes)
    elif name in ("mm", "bmm", "matmul", "addmm", "baddbmm", "addbmm"):
        batch, m, n, k = _matmul(*shapes[-2:])
    else:  # as many multiply-adds, of a shape that is not known: convolutions as the matmul of their patches
        whole = math.prod(value_shape(node))
        made = results[0] if results else ()
        work = round(flops(node) / 2 * math.prod(made) / max(whole, 1))
        channels = made[1] if "conv" in name and len(made) > 2 else 1
        rows = max(math.prod(made) // channels, 1)
        batch, m, n, k = 1, rows, channels, max(work // (rows * channels), 1)
    return [(batch, m, n, k), (batch, m, k, n), (batch, k, n, m)]


def value_shape(node: fx.Node) -> Shape:
    """The global shape of an op's first result."""
    val: Any = node.meta["val"]
    return tuple((val[0] if isinstance(val, (tuple, list)) else val).shape)


def _matmul(a: Shape, b: Shape) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of ``matmul``: a second factor without batch folds that of the first into its rows.

    >>> _matmul((2, 3, 4, 5), (2, 3, 5, 6)), _matmul((2, 3, 5), (5, 6)), _matmul((3, 5), (5,))
    ((6, 4, 6, 5), (1, 6, 6, 5), (1, 3, 1, 5))
    """
    if len(b) <= 2:
        return 1, math.prod(a[:-1]), b[1] if len(b) == 2 else 1, a[-1]
    if len(a) <= 2:
        return math.prod(b[:-2]), a[0] if len(a) == 2 else 1, b[-1], a[-1]
    batch = math.prod(max(pair) for pair in zip_longest(a[-3::-1], b[-3::-1], fillvalue=1))  # broadcast
    return batch, a[-2], b[-1], a[-1]


def _einsum(equation: str, shapes: Sequence[Shape]) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of an einsum of two operands.

    >>> _einsum("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)])
    (6, 4, 6, 5)
    """
    inputs, _, out = equation.replace(" ", "").partition("->")
    a, b = inputs.split(",")
    sizes = dict(zip(a, shapes[0])) | dict(zip(b, shapes[1]))
    groups = (
        [x for x in sizes if x in a and x in b and x in out],
        [x for x in sizes if x in a and x not in b],
        [x for x in sizes if x not in a],
        [x for x in sizes if x in a and x in b and x not in out],
    )
    batch, m, n, k = (math.prod(sizes[x] for x in group) for group in groups)
    return batch, m, n, k
