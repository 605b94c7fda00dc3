"""A backward in two parts: text, the numbers of the whole one, what is carried, and whose memory is whose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.passes.differentiate import Differentiated, differentiate
from autopar.passes.split_backward import Parted, split_backward
from autopar.passes.split_units import UnitClass
from autopar.passes.text import text
from autopar.runtime.stacked import run_stacked
from autopar.runtime.units import Autograd, Explicit, Gradient, Unit

POLICIES = ("none", "selective", "full")
KINDS = {"p": "parameter", "v": "value", "i": "input"}
GROUPS = {"tp": [[0, 1]]}
aten, ops = torch.ops.aten, torch.ops.autopar


def class_of(forward: Callable[..., Any], kinds: str, *given: Tensor, recompute: str = "none") -> UnitClass:
    """A unit that ``forward`` is: an argument a letter, (p)arameter, (v)alue or (i)nput. All outputs flow."""
    graph = fx.Tracer().trace(forward)
    for node, val in zip(graph.find_nodes(op="placeholder"), given, strict=True):
        node.meta["val"] = val.to("meta")
    (output,) = graph.find_nodes(op="output")
    output.args = (output.args[0] if isinstance(output.args[0], tuple) else (output.args[0],),)
    gm = fx.GraphModule(nn.Module(), graph)
    for node, val in zip(output.args[0], gm(*(g.to("meta") for g in given)), strict=True):
        node.meta["val"] = val
    needs = tuple(k in "pv" for k in kinds)
    return UnitClass(gm, tuple(KINDS[k] for k in kinds), needs, (True,) * len(output.args[0]), recompute)


def parted(unit: UnitClass) -> tuple[Differentiated, Parted]:
    made = differentiate(unit)
    return made, split_backward(made, unit.kinds)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return aten.linear.default(x, w, b)


def mlp(x: Tensor, gain: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    width = (x.shape[-1],)
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, width, gain), up, bias)), down)


def gated(x: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gain
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


def attention(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
    q, k, v = aten.split_with_sizes.default(aten.reshape.default(F.linear(x, qkv), [2, 5, 3, 8]), [1, 1, 1], 2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = aten.scaled_dot_product_attention.default(q, k, v, is_causal=True)
    return x + F.linear(y.transpose(1, 2).reshape(2, 5, 8), out)


def norm(x: Tensor, gain: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return F.layer_norm(x, (8,), gain, bias), x + bias


def embedding(ids: Tensor, words: Tensor, places: Tensor) -> Tensor:
    return F.embedding(ids, words) + places


def tied(x: Tensor, ids: Tensor, words: Tensor) -> Tensor:
    return F.linear(x + F.embedding(ids, words), words)


def convolutions(x: Tensor, first: Tensor, bias: Tensor, second: Tensor, back: Tensor) -> Tensor:
    y = aten.relu.default(aten.conv2d.default(x, first, bias, [2, 2], [1, 1]))
    y = aten.conv2d.default(y, second, None, [1, 1], [1, 1], [1, 1], 4)
    return aten.conv_transpose2d.input(y, back, None, [2, 2])


def low_rank(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, a @ b)


def scaled(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x * (a * b)


def without(x: Tensor, y: Tensor) -> Tensor:
    return x.sin() * y


X = (2, 5, 8)
UNITS: dict[str, tuple[Callable[..., Any], str, tuple[tuple[int, ...], ...]]] = {
    "linear": (linear, "vpp", (X, (6, 8), (6,))),
    "mlp": (mlp, "vpppp", (X, (8,), (16, 8), (16,), (8, 16))),
    "gated": (gated, "vpppp", (X, (8,), (16, 8), (16, 8), (8, 16))),
    "attention": (attention, "vpp", (X, (24, 8), (8, 8))),
    "norm": (norm, "vpp", (X, (8,), (8,))),
    "embedding": (embedding, "ipp", ((2, 5), (11, 8), (5, 8))),
    "tied": (tied, "vip", (X, (2, 5), (11, 8))),
    "convolutions": (convolutions, "vpppp", ((2, 3, 8, 8), (4, 3, 3, 3), (4,), (4, 1, 3, 3), (4, 3, 2, 2))),
    "low_rank": (low_rank, "vpp", (X, (6, 2), (2, 8))),
    "scaled": (scaled, "vpp", (X, (8,), (8,))),
    "without": (without, "vv", (X, X)),
}


def unit_of(name: str, recompute: str = "none") -> tuple[UnitClass, list[Tensor]]:
    forward, kinds, shapes = UNITS[name]
    torch.manual_seed(0)
    given = [torch.randint(5, s) if k == "i" else torch.randn(s) for k, s in zip(kinds, shapes, strict=True)]
    return class_of(forward, kinds, *given, recompute=recompute), given


# -- what the graphs are ---------------------------------------------------------------------------------------------


def test_text(tools: Any) -> None:
    made, parts = parted(unit_of("mlp")[0])
    assert made.backward and parts.inputs and parts.weights
    tools.golden_text(
        "split_backward",
        f"backward:\n{text(made.backward)}\n\ninputs:\n{text(parts.inputs.graph)}\n\n"
        f"weights:\n{text(parts.weights.graph)}\n\n"
        f"inputs takes arguments {parts.inputs.reads}, gives gradients of {parts.inputs.grads}, "
        f"fresh {parts.inputs.fresh}\n"
        f"weights takes arguments {parts.weights.reads}, gives gradients of {parts.weights.grads}, "
        f"fresh {parts.weights.fresh}\n",
    )


# -- the numbers of the whole ----------------------------------------------------------------------------------------


def ran(unit: Unit, given: list[Tensor]) -> Callable[[], tuple[list[Tensor], Any, list[Tensor]]]:
    """Forward of a unit with its arguments; each call gives all that a backward takes."""

    def once() -> tuple[list[Tensor], Any, list[Tensor]]:
        torch.manual_seed(1)
        outputs, held = unit.forward([g.clone() for g in given])
        return list(given), held, [torch.randn(outputs[i].shape) for i in unit.tangents]

    return once


@torch.no_grad()
def in_parts(unit: Unit, given: list[Tensor], held: Any, tangents: list[Tensor]) -> list[Gradient]:
    """Gradients by two calls, after each of which what may be added to is written over."""
    found = list[Gradient]()

    def take(gradients: list[Gradient]) -> None:
        for gradient in gradients:
            found.append(replace(gradient, tensor=gradient.tensor.clone()))
        for gradient in gradients:
            if gradient.fresh:
                gradient.tensor.fill_(torch.nan)

    read = [given[i] for i in unit.input_reads]
    gradients, carried = unit.inputs(read, held, tangents)
    assert not read and not tangents
    take(gradients)
    again = [given[i] for i in unit.weight_reads]
    gradients = unit.weights(again, carried)
    assert not again and not carried
    for gradient in gradients:
        take([gradient])  # the next ones must not see what is written over it
    return sorted(found, key=lambda g: g.arg)


@pytest.mark.parametrize("name", UNITS)
def test_both_parts_are_what_the_whole_is_bit_for_bit(name: str) -> None:
    for policy in POLICIES:
        kind, given = unit_of(name, policy)
        unit = Explicit(kind, differentiate(kind))
        once = ran(unit, given)
        with torch.no_grad():
            args, held, tangents = once()
            whole = unit.backward([args[i] for i in unit.reads], held, tangents)
        assert "parted" not in unit.__dict__, "no price where nothing is parted"
        found = in_parts(unit, *once())
        storages = [t.untyped_storage()._cdata for t in unit.parted.carried]
        assert len(set(storages)) == len(storages), "a view is carried beside what it shows"
        assert [g.arg for g in found] == [g.arg for g in whole] == list(unit.grads)
        for mine, theirs in zip(found, whole, strict=True):
            assert mine.tensor.stride() == theirs.tensor.stride() and torch.equal(mine.tensor, theirs.tensor)
            assert theirs.fresh or not mine.fresh


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_unit_left_to_autograd_makes_all_at_once(recompute: str) -> None:
    kind, given = unit_of("mlp", recompute)
    unit = Autograd(kind, "to see")
    args, held, tangents = ran(unit, given)()
    whole = unit.backward([args[i] for i in unit.reads], held, tangents)
    args, held, tangents = ran(unit, given)()
    gradients, carried = unit.inputs([args[i] for i in unit.input_reads], held, tangents)
    assert [g.arg for g in gradients] == [0] and unit.weight_reads == ()
    for mine, theirs in zip([*gradients, *unit.weights([], carried)], whole, strict=True):
        assert mine.arg == theirs.arg and torch.equal(mine.tensor, theirs.tensor)


def sharded(c: int) -> Callable[..., Any]:
    """A unit of rank ``c`` of two: rows gathered, columns, rows, summed and cut into rows again; a gain that both have,
    a bias in halves."""
    cut, half = (2, c, 0, [3, 2]), (2, c, 0, [4, 4])

    def forward(x: Tensor, gain: Tensor, bias: Tensor, up: Tensor, down: Tensor) -> Tensor:
        both = ops.wait_all_gather.default(ops.start_all_gather.default(bias, "tp", *half, "reduce_scatter"), *half)
        y = x * ops.replicate.default(gain, "tp") + both
        whole = ops.wait_all_gather.default(ops.start_all_gather.default(y, "tp", *cut, "reduce_scatter"), *cut)
        y = F.linear(F.gelu(F.linear(whole, up)), down)
        return x + ops.wait_reduce_scatter.default(ops.start_reduce_scatter.default(y, "tp", *cut), *cut)

    return forward


@pytest.mark.parametrize("recompute", POLICIES)
def test_ranks_together(recompute: str) -> None:
    """What two ranks find is equal, by the same collectives, each with its wait."""
    torch.manual_seed(0)
    shapes = [((3 - c, 8), (8,), (4,), (6, 8), (8, 6)) for c in range(2)]
    args = [[torch.randn(s) for s in of] for of in shapes]
    pairs = [parted(class_of(sharded(c), "vpppp", *args[c], recompute=recompute)) for c in range(2)]
    forward = run_stacked([d.forward for d, _ in pairs], args, GROUPS)
    saved = [list(made[1:]) for made in forward]
    rest = [[*s, torch.randn_like(a[0])] for s, a in zip(saved, args, strict=True)]
    pick = lambda which: [[a[i] for i in of] for a, of in zip(args, which, strict=True)]
    joined = lambda left, right: [[*a, *b] for a, b in zip(left, right, strict=True)]
    backwards = [d.backward for d, _ in pairs if d.backward]
    inputs, weights = [p.inputs for _, p in pairs if p.inputs], [p.weights for _, p in pairs if p.weights]
    whole = run_stacked(backwards, joined(pick(d.keeps for d, _ in pairs), rest), GROUPS)
    first = run_stacked([p.graph for p in inputs], joined(pick(p.reads for p in inputs), rest), GROUPS)
    carried = joined(pick(p.reads for p in weights), [made[1:] for made in first])
    second = run_stacked([p.graph for p in weights], carried, GROUPS)
    assert len(backwards) == len(inputs) == len(weights) == 2 and inputs[0].grads == (0,)
    for expected, made, rest_made in zip(whole, first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(expected, (made[0], *rest_made), strict=True))
    sent = [sends(gm) for gm in (backwards[0], inputs[0].graph, weights[0].graph)]
    assert all(started == waited for started, waited in sent)
    assert sent[0][0] == sent[1][0] + sent[2][0] and sent[2][0] == 1, "nobody waits for the gain's sum"


def sends(gm: fx.GraphModule) -> tuple[int, int]:
    names = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    return sum(".start_" in n for n in names), sum(".wait_" in n for n in names)


# -- what is carried -------------------------------------------------------------------------------------------------


def nbytes(parts: Parted) -> int:
    return sum(t.nbytes for t in parts.carried)


@pytest.mark.parametrize("recompute", POLICIES)
def test_a_linear_carries_its_input_and_the_incoming_gradient(recompute: str) -> None:
    _, parts = parted(unit_of("linear", recompute)[0])
    assert nbytes(parts) == 4 * 2 * 5 * (8 + 6)
    assert parts.held == (0, 1) and parts.weights and parts.weights.reads == ()


def test_fewest_bytes() -> None:
    rows, carried = 4 * 2 * 5, {name: nbytes(parted(unit_of(name)[0])[1]) for name in ("gated", "norm", "attention")}
    # gate and up read one tensor; their product is carried, not both
    assert carried["gated"] == rows * (8 + 16 + 16 + 16 + 8) + 4 * 8
    assert carried["norm"] == 4 * (8 + 8), "gradients of gain and bias, which stand beside that of the input"
    assert carried["attention"] == rows * (8 + 24 + 8 + 8)


def test_what_has_one_part_has_one_graph() -> None:
    _, parts = parted(unit_of("embedding")[0])
    assert parts.inputs is None and parts.weights and parts.weights.reads == (0,), "ids are there whenever asked for"
    _, parts = parted(unit_of("without")[0])
    assert parts.weights is None and parts.inputs and parts.carried == ()


def test_parameters_are_given_again_where_they_are_factors() -> None:
    _, parts = parted(unit_of("low_rank")[0])
    assert parts.weights and parts.weights.reads == (1, 2)
    assert nbytes(parts) == 4 * 2 * 5 * (8 + 6), "no copy of a gathered parameter"
    _, parts = parted(unit_of("scaled")[0])
    assert parts.weights and parts.weights.reads == (), "two small gradients, and nothing is gathered for them"


def test_products_are_where_gaps_are() -> None:
    """A convolution's backward is one op for all gradients: each part has its own, and weights reads no weight."""
    _, parts = parted(unit_of("convolutions")[0])
    assert parts.inputs and parts.weights and parts.weights.reads == ()
    for part in (parts.inputs, parts.weights):
        assert len(part.graph.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)) == 3
