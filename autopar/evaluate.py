"""Running a captured graph in one process: the reference that every plan must equal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from autopar.passes.experts_in_token_order import groups, is_grouped
from autopar.passes.graph_module import graph_module
from autopar.runtime.counter_random import draws

WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}


def run_graph(
    graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor], attrs: Mapping[str, torch.Tensor], key: int = 0
) -> Any:
    """Run the graph op by op and return what its output node holds, ``{"outputs": (loss, ...), "buffers": {...}}``.

    ``inputs``: one tensor per placeholder, of the placeholders' shapes. ``attrs``: parameters, buffers and constants by
    FQN; buffers that the graph changes in place are changed. Ops that create tensors do so on the device of ``attrs``,
    whatever device was captured. Autograd works through it. ``key``: what random ops draw by in a graph after
    `counter_random` (`random_key`); in the captured one they draw as torch does.

    Example:
        >>> from autopar.capture import capture
        >>> from autopar.models import mlp
        >>> model, args, _ = mlp.make()
        >>> captured = capture(model, args)
        >>> loss = run_graph(captured.graph, captured.flatten_inputs(args), captured.attributes)["outputs"][0]
        >>> torch.equal(loss, model(*args))
        True
    """
    device = next((t.device for t in (*attrs.values(), *inputs)), torch.device("cpu"))
    return _Evaluator(graph_module, attrs, device, key).run(*inputs)


class _Evaluator(fx.Interpreter):
    def __init__(
        self, graph_module: fx.GraphModule, attrs: Mapping[str, torch.Tensor], device: torch.device, key: int
    ) -> None:
        super().__init__(graph_module)
        self.extra_traceback = False
        self._attrs = attrs
        self._device, self._key = device, key

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._attrs[target]

    def run_node(self, n: fx.Node) -> Any:
        if n.target is not torch.ops.aten.batch_norm.default or not (
            isinstance(n.args[6], float) and math.isnan(n.args[6])
        ):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)  # momentum None: the average over all batches so far
        mean = str(n.args[3].target)  # type: ignore[union-attr]
        count = self._attrs[mean.removesuffix("running_mean") + "num_batches_tracked"]
        return n.target(*args[:6], 1.0 / float(count), *args[7:], **kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default  # strides may be another device's
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._device}
        if draws(target):
            kwargs = {**kwargs, "step_key": self._key}
        return target(*(self._device if isinstance(a, torch.device) else a for a in args), **kwargs)


def to_float64(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph that computes in float64: dtype literals of casts and constructors, and ``meta["val"]``.

    Node for node the same graph, since a captured one names every dtype that ops would choose (`name_dtypes`). Give the
    copy's `run_graph` float64 attributes and inputs (`double`).
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        new = env[node] = graph.node_copy(node, env.__getitem__)
        if node.target is torch.ops.aten._grouped_mm.default and is_grouped(node):  # has no kernel for float64
            new.target, new.args, new.kwargs = torch.ops.autopar.grouped_mm.default, groups(new), {}
        new.args = tree_map(_wider, new.args)
        new.kwargs = tree_map(_wider, new.kwargs)
        new.meta["val"] = tree_map(_wider, node.meta.get("val"))
    wide = graph_module(graph, gm)
    wide.meta |= gm.meta
    return wide


def double(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Float tensors as float64 leaves with the same ``requires_grad``, others cloned; names of one object stay one."""
    made: dict[int, torch.Tensor] = {}
    for t in tensors.values():
        wide = t.detach().to(WIDER.get(t.dtype, t.dtype), copy=True)
        made.setdefault(id(t), wide.requires_grad_(t.requires_grad))
    return {name: made[id(t)] for name, t in tensors.items()}


def _wider(a: Any) -> Any:
    if isinstance(a, torch.dtype):
        return WIDER.get(a, a)
    if isinstance(a, torch.Tensor):
        return a.to(WIDER.get(a.dtype, a.dtype))
    return a
