"""How the tests of passes make graphs, compare their text with golden files, and compare what they compute."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from autopar.passes.text import text

GOLDEN = Path(__file__).parent / "golden"


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.GraphModule:
    """The training IR of ``model`` in the form that capture hands to the passes."""
    gm = torch.export.export(model, args, kwargs or {}, strict=False).module()
    assert isinstance(gm, fx.GraphModule)
    graph = gm.graph
    graph.set_codegen(fx.graph.CodeGen())
    for node in reversed(list(graph.nodes)):
        if node.op == "call_module" or (node.op == "placeholder" and not isinstance(node.meta["val"], Tensor)):
            graph.erase_node(node)
        elif node.op == "output":
            node.args = (
                {"outputs": tuple(a for a in tree_leaves(node.args[0]) if isinstance(a, fx.Node)), "buffers": {}},
            )
            node.meta.pop("val", None)
        elif "val" in node.meta:
            node.meta["val"] = tree_map(to_meta, node.meta["val"])
    return fx.GraphModule(gm, graph)


def to_meta(val: Any) -> Any:
    """A meta tensor with the same shape, strides and dtype."""
    if isinstance(val, Tensor):
        return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="meta")
    return val


def as_float64(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy with float32 parameters, buffers, constants and casts in float64."""
    gm = copy.deepcopy(gm).double()
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            held = getattr(gm.get_submodule(owner), name)
            if held.dtype == torch.float32 and not isinstance(held, nn.Parameter):
                setattr(gm.get_submodule(owner), name, held.double())
        swap = lambda a: torch.float64 if a is torch.float32 else a
        node.args = tuple(tree_map(swap, list(node.args)))
        node.kwargs = tree_map(swap, dict(node.kwargs))
    gm.recompile()
    return gm


def numbers(
    gm: fx.GraphModule, inputs: tuple[Tensor, ...]
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """What the graph computes: outputs, gradients of the first by FQN, and buffers after the run (of a copy)."""
    gm = copy.deepcopy(gm)
    result = gm(*(i.clone() for i in inputs))
    outputs, updates = result["outputs"], result["buffers"]
    if outputs[0].requires_grad:
        outputs[0].sum().backward()
    grads = {k: p.grad for k, p in gm.named_parameters() if p.grad is not None}
    buffers = {k: updates.get(k, b).detach() for k, b in gm.named_buffers()}
    return [o.detach() for o in outputs], grads, buffers


def assert_same_numbers(before: fx.GraphModule, after: fx.GraphModule, inputs: tuple[Tensor, ...]) -> None:
    """Outputs, gradients and buffers agree in float64 to 1e-12 and in float32 to 2e-6, by largest entry."""
    doubled = tuple(i.double() if i.dtype == torch.float32 else i for i in inputs)
    pairs = ((as_float64(before), as_float64(after), doubled, 1e-12), (before, after, inputs, 2e-6))
    for old, new, given, limit in pairs:
        left, right = numbers(old, given), numbers(new, given)
        a, where = tree_flatten(left)
        b, there = tree_flatten(right)
        assert where == there, "other outputs, gradients or buffers"
        floor = 1e-3 * max((float(g.abs().max()) for g in left[1].values() if g.numel()), default=1e-3)
        for x, y in zip(a, b, strict=True):
            assert x.shape == y.shape and x.dtype == y.dtype
            gap = torch.where(x == y, 0, (x.double() - y.double()).abs()).masked_fill(x.isnan() & y.isnan(), 0)
            if gap.numel():
                assert gap.max() <= limit * max(float(x.double().abs().nan_to_num(0, 0, 0).max()), floor, 1e-6), (x, y)


def assert_golden(name: str, before: str, after: fx.GraphModule) -> None:
    """Compare with ``golden/<name>.txt``; ``EXPECTTEST_ACCEPT=1`` writes it."""
    assert_golden_text(name, f"before:\n{before}\n\nafter:\n{text(after)}\n")


def assert_golden_text(name: str, found: str) -> None:
    """The same, of any text."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path.write_text(found)
    assert path.read_text() == found, f"{path} differs (EXPECTTEST_ACCEPT=1 rewrites it)"


class Tools:
    """What the tests call, as one fixture: with pytest's importlib mode test files cannot import each other."""

    copy = staticmethod(copy.deepcopy)
    export = staticmethod(export)
    as_float64 = staticmethod(as_float64)
    numbers = staticmethod(numbers)
    golden_text = staticmethod(assert_golden_text)
    same_numbers = staticmethod(assert_same_numbers)

    @staticmethod
    def golden(run: Callable[[fx.GraphModule], fx.GraphModule], name: str, gm: fx.GraphModule) -> fx.GraphModule:
        """Run the pass on a copy, compare texts with the golden file, return the copy."""
        before = text(gm)
        after = run(copy.deepcopy(gm))
        assert_golden(name, before, after)
        return after


@pytest.fixture
def tools() -> type[Tools]:
    """Graphs, goldens and numbers."""
    return Tools
