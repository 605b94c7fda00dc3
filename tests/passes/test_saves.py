"""What fake tensors say autograd keeps is what it keeps of real ones, op by op and of whole models."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.build import prepare
from autopar.passes.completion import is_op, result_slots
from autopar.passes.facts import annotate, fact, operand_nodes, value
from autopar.passes.saves import Call, Saves, alias, call_of, observe, saves, strides_of

SMALL = Path(__file__).parent.parent / "small_models.py"
NAMES = re.findall(r"^@small\ndef (\w+)", SMALL.read_text(), re.MULTILINE)
REFERENCE = ("gpt2", "llama", "mlp", "resnet", "vit")
Seen = dict[Call, tuple[Saves, list[tuple[int, bool]], str]]
aten = torch.ops.aten  # its lstm on a CPU keeps a workspace of oneDNN, which nothing foretells


def storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


class Kept:
    """What autograd keeps inside a ``with``: bytes and whether it is a float tensor, by storage."""

    def __enter__(self) -> dict[int, tuple[int, bool]]:
        self.alive: list[Tensor] = []
        found: dict[int, tuple[int, bool]] = {}

        def pack(t: Tensor) -> Tensor:
            self.alive.append(t)
            found.setdefault(storage(t), (t.untyped_storage().nbytes(), t.is_floating_point()))
            return t

        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        self.hooks.__enter__()
        return found

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__()


class Real(fx.Interpreter):
    """Runs a prepared graph on real tensors and, before each op, the op alone on leaves of its own."""

    def __init__(self, gm: fx.GraphModule, attributes: dict[str, Tensor]) -> None:
        super().__init__(gm)
        self.attributes = attributes
        self.seen: Seen = {}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.attributes[target]

    def run_node(self, node: fx.Node) -> Any:
        if is_op(node) and call_of(node) not in self.seen:
            self.seen[call_of(node)] = (*self.alone(node), node.format_node() or "")
        return super().run_node(node)

    def alone(self, node: fx.Node) -> tuple[Saves, list[tuple[int, bool]]]:
        """What the op keeps, and what of it is neither operand nor result."""
        leaves = {o: self.leaf(o) for o in operand_nodes(node)}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: leaves.get(n, self.env[n]))
        with torch.enable_grad(), Kept() as kept:
            made = node.target(*args, **kwargs)  # type: ignore[operator]
        results = list(made) if isinstance(made, (tuple, list)) else [made]
        ins = [storage(leaves[o]) for o in operand_nodes(node)]
        outs = [storage(r) if isinstance(r, Tensor) else None for r in results]
        new = [kept[s] for s in kept if s not in ins and s not in outs]
        found = Saves(
            tuple(i for i, s in enumerate(ins) if s in kept),
            tuple(i for i, s in enumerate(outs) if s in kept and s not in ins and outs.index(s) == i),
            (),
            tuple(ins.index(s) if s in ins else None for s in outs),
        )
        return found, new

    def leaf(self, node: fx.Node) -> Tensor:
        """A tensor of its own with the strides that the graph knows."""
        held, strides = self.env[node].detach(), strides_of(node)
        assert all(n == 1 or a == b for n, a, b in zip(held.shape, held.stride(), strides, strict=True)), node
        own = torch.empty_strided(held.shape, strides, dtype=held.dtype)
        once = tuple(slice(0, None if s else 1) for s in strides)  # what expand repeats is there once
        own[once].copy_(held[once])
        return own.requires_grad_(value(node).grad)


def target_of(name: str) -> str:
    return f"autopar.models.{name}:make" if name in REFERENCE else f"{SMALL}:{name}"


@cache
def run_real(judge: Any) -> tuple[fx.GraphModule, Seen, dict[int, tuple[int, bool]]]:
    """The prepared graph, what its run on real numbers saw of every op, and what autograd kept of the whole run."""
    captured = judge.captured
    gm = prepare(captured, 1).body
    inputs = [t.float() if t.is_floating_point() else t for t in judge.inputs]
    real = Real(gm, captured.attributes)
    with Kept() as kept:
        real.run(*inputs)
    for held in captured.attributes.values():
        kept.pop(storage(held), None)
    return gm, real.seen, kept


@pytest.mark.parametrize("name", [*NAMES, *REFERENCE])
def test_every_op_keeps_what_fake_tensors_say(name: str, judge_of: Callable[[str], Any]) -> None:
    _, seen, _ = run_real(judge_of(target_of(name)))
    for call, (found, new, text) in seen.items():
        expected = observe(call).saves
        assert not expected.guessed, text
        assert replace(expected, new=()) == found, text
        if call.target is not aten.lstm.input:
            assert sorted((n.nbytes, n.flows) for n in expected.new) == sorted(new), text


def predicted_bytes(gm: fx.GraphModule) -> int:
    """Bytes kept for backward, every tensor once, parameters and buffers apart."""
    roots: dict[fx.Node, tuple[fx.Node, int]] = {}
    kept: dict[tuple[fx.Node, int], int] = {}
    new = 0
    for node in gm.graph.nodes:
        if not is_op(node):
            roots.setdefault(node, (node, 0))
            continue
        found, operands = saves(node), operand_nodes(node)
        made = [(node, i) if slot is None else roots[operands[slot]] for i, slot in enumerate(found.aliases)]
        roots |= {n: root for n, root in zip(result_slots(node), made, strict=True) if n is not None}
        for owner, index in [*(roots[operands[i]] for i in found.operands), *(made[i] for i in found.results)]:
            v = fact(owner).values[index]
            assert v is not None
            kept[owner, index] = v.nbytes if owner.op != "get_attr" else 0
        new += sum(n.nbytes for n in found.new)
    return new + sum(kept.values())


@pytest.mark.parametrize("name", [*(n for n in NAMES if not n.startswith("lstm")), *REFERENCE])
def test_whole_models_keep_the_sum_of_their_ops(name: str, judge_of: Callable[[str], Any]) -> None:
    gm, _, kept = run_real(judge_of(target_of(name)))
    measured = sum(nbytes for nbytes, _ in kept.values())
    assert predicted_bytes(gm) == pytest.approx(measured, rel=0.02, abs=256)


def graph_of(
    target: Any, *operands: tuple[tuple[int, ...], torch.dtype, bool], literals: tuple[Any, ...] = ()
) -> fx.Node:
    """A graph of one op: operands are (shape, dtype, needs a gradient); its node."""
    graph, held = fx.Graph(), {}
    nodes = []
    for i, (shape, dtype, grad) in enumerate(operands):
        nodes.append(graph.get_attr(f"p{i}") if grad else graph.placeholder(f"x{i}"))
        nodes[-1].meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        if grad:
            held[f"p{i}"] = torch.nn.Parameter(nodes[-1].meta["val"])
    node = graph.call_function(target, (*nodes, *literals))
    node.meta["val"] = target(*(n.meta["val"] for n in nodes), *literals)
    annotate(fx.GraphModule(held, graph), lambda name: True)
    return node


F32, INT = torch.float32, torch.int64


def test_a_kept_operand_depends_on_whose_gradient_is_wanted() -> None:
    x, w = ((4, 3), F32, True), ((5, 3), F32, True)
    assert saves(graph_of(aten.linear.default, x, w)).operands == (0, 1)
    assert saves(graph_of(aten.linear.default, x, (*w[:2], False))).operands == (1,)
    assert saves(graph_of(aten.linear.default, (*x[:2], False), (*w[:2], False))).operands == ()


def test_one_tensor_in_two_slots_is_kept_in_both() -> None:
    graph = fx.Graph()
    x = graph.get_attr("x")
    x.meta["val"] = torch.empty(3, device="meta")
    square = graph.call_function(aten.mul.Tensor, (x, x))
    square.meta["val"] = x.meta["val"]
    annotate(fx.GraphModule({"x": torch.nn.Parameter(torch.empty(3))}, graph), lambda name: True)
    assert saves(square).operands == (0, 1)


def test_views_share_storage_and_copies_do_not() -> None:
    x = ((4, 6), F32, True)
    assert alias(graph_of(aten.reshape.default, x, literals=([2, 12],)))
    assert alias(graph_of(aten.split_with_sizes.default, x, literals=([2, 2],)))
    assert not alias(graph_of(aten.clone.default, x))
    graph = graph_of(aten.transpose.int, x, literals=(0, 1)).graph
    turned = next(n for n in graph.nodes if n.op == "call_function")
    flat = graph.call_function(aten.reshape.default, (turned, [24]))
    flat.meta["val"] = torch.empty(24, device="meta")
    annotate(fx.GraphModule({"p0": torch.nn.Parameter(torch.empty(4, 6))}, graph), lambda name: True)
    assert alias(turned) and not alias(flat)


def test_an_op_that_cannot_run_without_data_is_guessed() -> None:
    graph = fx.Graph()
    x, keep = graph.get_attr("x"), graph.placeholder("keep")
    x.meta["val"], keep.meta["val"] = (torch.empty(3, dtype=d, device="meta") for d in (F32, torch.bool))
    node = graph.call_function(aten.masked_select.default, (x, keep))
    node.meta["val"] = torch.empty(2, device="meta")
    annotate(fx.GraphModule({"x": torch.nn.Parameter(torch.empty(3))}, graph), lambda name: True)
    assert saves(node) == Saves((0, 1), (0,), aliases=(None,), guessed=True)
