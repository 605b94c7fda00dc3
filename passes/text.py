"""A graph as text: one node a line, shapes and dtypes first. What golden files hold and what one debugs with."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.passes.facts import KEY, Fact

_SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b1",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def text(gm: fx.GraphModule) -> str:
    """The graph of ``gm``, a node a line: ``name: f32[4, 8] = aten.relu(x)``; prologue nodes are marked ``prologue``,
    and layouts of operands and results follow a ``#`` where they are decided.

    Example:
        >>> class Twice(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x + x
        >>> print(text(fx.symbolic_trace(Twice())))
        x = placeholder
        add = operator.add(x, x)
        return add
    """
    return "\n".join(_line(node) + _layouts(node) for node in gm.graph.nodes)


def _layouts(node: fx.Node) -> str:
    fact = node.meta.get(KEY)
    if not isinstance(fact, Fact) or fact.strategy is None:
        return ""
    operands = ", ".join(f"{o}" for o in fact.strategy.operands)
    results = ", ".join(f"{r}" for r in fact.strategy.results if r is not None)
    rest = f", rests {fact.rest}" if fact.rest is not None and fact.rest not in fact.strategy.results else ""
    return f"  # {operands} -> {results}" if operands else f"  # {results}{rest}"


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_arg(node.args[0])}"
    val = node.meta.get("val")
    kind = f": {_value(val)}" if val is not None else ""
    fact = node.meta.get(KEY)
    mark = "prologue " if isinstance(fact, Fact) and fact.prologue else ""
    if node.op == "placeholder":
        return f"{node.name}{kind} = {mark}placeholder"
    if node.op == "get_attr":
        return f"{node.name}{kind} = {mark}self.{node.target}"
    args = [_arg(a) for a in node.args] + [f"{k}={_arg(v)}" for k, v in node.kwargs.items()]
    return f"{node.name}{kind} = {mark}{_target(node.target)}({', '.join(args)})"


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '').lstrip('_')}.{getattr(target, '__name__', target)}"


def _value(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        return f"{_SHORT.get(val.dtype, str(val.dtype))}{list(val.shape)}"
    if isinstance(val, (tuple, list)):
        return "(" + ", ".join(_value(v) for v in val) + ")"
    return type(val).__name__


def _arg(arg: Any) -> str:
    if isinstance(arg, fx.Node):
        return arg.name
    if isinstance(arg, (list, tuple)):
        inner = ", ".join(_arg(a) for a in arg)
        if isinstance(arg, list):
            return f"[{inner}]"
        return f"({inner},)" if len(arg) == 1 else f"({inner})"
    if isinstance(arg, dict):
        return "{" + ", ".join(f"{k!r}: {_arg(v)}" for k, v in arg.items()) + "}"
    return _SHORT.get(arg, str(arg)) if isinstance(arg, torch.dtype) else repr(arg)
