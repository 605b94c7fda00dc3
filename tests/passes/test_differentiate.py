"""A unit's forward and backward as graphs: text of every policy, the numbers of autograd, what is kept and what not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from explicit_step import ExplicitStep
from torch import Tensor, fx, nn

from autopar.build import apply, choose
from autopar.cluster import Cluster
from autopar.equality import FP64, Run, distances
from autopar.passes.differentiate import Differentiated, Untraceable, differentiate
from autopar.passes.lower import Local, lower, with_changes
from autopar.passes.split_units import UnitClass
from autopar.passes.text import text
from autopar.pins import Pins, resolve

POLICIES = ("none", "selective", "full")
aten, ops = torch.ops.aten, torch.ops.autopar


def class_of(forward: Callable[..., Any], kinds: str, *given: Any, recompute: str = "none") -> UnitClass:
    """A unit that ``forward`` is: an argument a letter, (p)arameter, (v)alue and (i)nput tensors, (m)icrobatch, (k)ey,
    (d)raw. All outputs flow."""
    names = {"p": "parameter", "v": "value", "i": "input", "m": "microbatch", "k": "key", "d": "draw"}
    graph = fx.Tracer().trace(forward)
    graph.eliminate_dead_code()
    for node, val in zip(graph.find_nodes(op="placeholder"), given, strict=True):
        node.meta["val"] = val.to("meta") if isinstance(val, Tensor) else val
    (output,) = graph.find_nodes(op="output")
    if not isinstance(output.args[0], tuple):
        output.args = ((output.args[0],),)
    gm = fx.GraphModule(nn.Module(), graph)
    for node, val in zip(output.args[0], gm(*given), strict=True):
        node.meta["val"] = val.to("meta")
    flows = tuple(bool(n.meta["val"].is_floating_point()) for n in output.args[0])
    return UnitClass(gm, tuple(names[k] for k in kinds), tuple(k in "pv" for k in kinds), flows, recompute)


def by_autograd(unit: UnitClass, args: list[Any], tangents: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    taken = [
        a.detach().requires_grad_(n) if isinstance(a, Tensor) else a for a, n in zip(args, unit.needs, strict=True)
    ]
    made = unit.graph(*taken)
    wanted = [a for a, n in zip(taken, unit.needs, strict=True) if n]
    flowing = [o for o, f in zip(made, unit.flows, strict=True) if f]
    return list(made), list(torch.autograd.grad(flowing, wanted, tangents, allow_unused=True))


@torch.no_grad()
def by_graphs(d: Differentiated, args: list[Any], tangents: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    made = d.forward(*args)
    n = len(made) - len(d.saved)
    assert d.backward is not None
    return list(made[:n]), list(d.backward(*(args[i] for i in d.keeps), *made[n:], *tangents))


# -- what the graphs are ---------------------------------------------------------------------------------------------


def mlp(x: Tensor, w: Tensor, v: Tensor, draw: int, key: int) -> Tensor:
    """Columns, rows, dropout: a unit of a rank of two."""
    h = torch.nn.functional.silu(aten.linear.default(ops.replicate.default(x, "tp"), w))
    whole = ops.wait_all_reduce.default(ops.start_all_reduce.default(aten.linear.default(h, v), "tp", "none"))
    return x + ops.dropout.default(whole, 0.5, draw=draw, step_key=key, shape=[4, 8], runs=[1, 0, 4, 1, 0, 8])


@pytest.mark.parametrize("recompute", POLICIES)
def test_text(tools: Any, recompute: str) -> None:
    shapes = (torch.zeros(4, 8, device="meta"), torch.zeros(8, 8, device="meta"), torch.zeros(8, 8, device="meta"))
    unit = class_of(mlp, "vppdk", *shapes, 3, 7, recompute=recompute)
    d = differentiate(unit)
    assert d.backward is not None
    told = "\n".join(f"{s.op} {list(s.shape)} {s.nbytes} bytes, memory of output {s.result}" for s in d.saved)
    tools.golden_text(
        f"differentiate_{recompute}",
        f"unit:\n{text(unit.graph)}\n\nforward:\n{text(d.forward)}\n\nbackward:\n{text(d.backward)}\n\n"
        f"keeps arguments {d.keeps}, gradients of {d.grads}, fresh {d.fresh}\nsaved:\n{told}\n",
    )


# -- the numbers of autograd -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", POLICIES)
def test_one_unit_is_what_autograd_makes_of_it_bit_for_bit(recompute: str) -> None:
    def forward(x: Tensor, w: Tensor, n: Tensor, target: Tensor, key: int, a: int, b: int) -> tuple[Tensor, Tensor]:
        y = aten.layer_norm.default(x, [8], n)
        q = aten.linear.default(y, w)
        q, k, v = aten.split_with_sizes.default(aten.reshape.default(q, [2, 5, 3, 8]), [1, 1, 1], 2)
        y = aten.scaled_dot_product_attention.default(q, k, v, is_causal=True)[:, :, 0]
        y = ops.dropout.default(y, 0.3, draw=a, step_key=key) + ops.dropout.default(x, 0.3, draw=b, step_key=key)
        return y, ops.cross_entropy_sum.default(y, target, None, -100, 0.1)

    torch.manual_seed(0)
    given = [torch.randn(s, dtype=torch.float64) for s in ((2, 5, 8), (24, 8), (8,))]
    given += [torch.randint(8, (2, 5))]
    unit = class_of(forward, "vppikdd", *given, 7, 0, 1, recompute=recompute)
    d = differentiate(unit)
    tangents = [torch.randn(2, 5, 8, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)]
    for key, a, b in ((7, 0, 1), (8, 5, 3)):
        outputs, grads = by_autograd(unit, [*given, key, a, b], tangents)
        mine, found = by_graphs(d, [*given, key, a, b], tangents)
        assert all(torch.equal(x, y) for x, y in zip(outputs, mine, strict=True))
        assert d.grads == (0, 1, 2)
        assert all(torch.equal(x, y) for x, y in zip(grads, found, strict=True) if x is not None)


def lowered(judge: Any, pins: dict[str, Any], ranks: int) -> list[Local]:
    resolved = resolve(Pins.parse(pins), ranks, judge.captured.batch)
    prepared = judge.prepared(resolved.microbatches)
    lowerable = with_changes(apply(choose(prepared, resolved, Cluster.local(ranks=ranks)), prepared))
    return [lower(lowerable, rank, {a.name: a.name for a in lowerable.mesh.axes}) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("model", "pins"),
    [
        ("tests/small_models.py:transformer_layers_with_dropout", {"tp": 2, "zero": 3}),
        ("tests/small_models.py:dropout_of_every_form", {"dp": 2, "zero": 2, "microbatches": 3}),
        ("tests/small_models.py:batch_norm_variants", {"dp": 2}),
    ],
)
def test_all_ranks_together_do_what_one_process_does(judge_of: Any, model: str, pins: dict[str, Any]) -> None:
    judge = judge_of(model)
    programs = lowered(judge, pins, pins.get("dp", 1) * pins.get("tp", 1))
    saved = []
    for recompute in POLICIES:
        explicit = ExplicitStep(programs, recompute)
        step = explicit.run(judge.attributes, judge.inputs, judge.key)
        grads = {n: step.gradients.get(n) for n in judge.captured.parameters}
        buffers = {n: step.buffers.get(n, judge.attributes[n]) for n in judge.captured.buffers}
        worst = distances(Run(step.loss, grads, buffers, {}), judge.reference, lr=1.0)[0]
        assert worst.rel <= FP64.limits[worst.kind], f"{recompute}: {worst}"
        saved.append(sum(explicit.saved))
    assert saved[0] > saved[1] >= saved[2] == 0


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_none_keeps_what_autograd_keeps(judge_of: Any) -> None:
    """Bytes of forward that saved-tensor hooks see, each storage once, arguments left out."""
    (local,) = lowered(judge_of("tests/small_models.py:transformer_layers_with_dropout"), {}, 1)
    (program,) = local.units.values()
    mine = theirs = 0
    for unit in program.classes:
        if not unit.trains:
            continue
        args = [
            _values(n.meta["val"]) if isinstance(n.meta["val"], Tensor) else n.meta["val"]
            for n in unit.graph.graph.find_nodes(op="placeholder")
        ]
        taken = [a.requires_grad_(n) if isinstance(a, Tensor) else a for a, n in zip(args, unit.needs, strict=True)]
        held = {a.untyped_storage().data_ptr() for a in taken if isinstance(a, Tensor)}
        seen: dict[int, int] = {}

        def look(t: Tensor, held: set[int] = held, seen: dict[int, int] = seen) -> Tensor:
            at = t.untyped_storage()
            if at.data_ptr() not in held:
                seen[at.data_ptr()] = at.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(look, lambda t: t):
            kept = unit.graph(*taken)
        theirs += sum(seen.values())
        del kept
        mine += sum(s.nbytes for s in differentiate(unit).saved)
    assert theirs > 100_000 and abs(mine - theirs) <= 0.02 * theirs, (mine, theirs)


def _values(like: Tensor) -> Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return made.normal_() if like.is_floating_point() else made.zero_()


@pytest.mark.parametrize("recompute", POLICIES)
def test_nothing_that_follows_from_parameters_alone_is_kept(recompute: str) -> None:
    def forward(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        scaled = aten.t.default(w * g.exp())  # as weight norm has it
        return aten.mm.default(aten.mm.default(x, scaled), aten._to_copy.default(w, dtype=torch.float64)).sin()

    given = [torch.randn(5, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 1).double()]
    d = differentiate(class_of(forward, "vpp", *given, recompute=recompute))
    assert {s.op for s in d.saved} <= {"aten.mm.default"} and 1 in d.keeps and 2 in d.keeps
    assert len(d.saved) == (0 if recompute == "full" else 2)


def test_selective_keeps_what_is_dear() -> None:
    shapes = (torch.zeros(4, 8, device="meta"), torch.zeros(8, 8, device="meta"), torch.zeros(8, 8, device="meta"))
    found = {p: differentiate(class_of(mlp, "vppdk", *shapes, 3, 7, recompute=p)) for p in POLICIES}
    assert [s.op for s in found["selective"].saved] == ["aten.mm.default"], "the mask and silu are made again"
    assert found["full"].saved == () and found["full"].keeps == (0, 1, 2, 3, 4)
    again = [str(n.target) for n in found["full"].backward.graph.nodes]  # type: ignore[union-attr]
    assert again.count("autopar.start_all_reduce.default") == 1, "a mask needs no values; `replicate` asks for one"
    assert "autopar.dropout_mask.default" in again


def test_memory_of_outputs_and_gradients() -> None:
    def forward(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = aten.mm.default(x, w).sin()
        return y.reshape(-1) + b, y.cos()

    given = [torch.randn(3, 4), torch.randn(4, 4), torch.randn(12)]
    d = differentiate(class_of(forward, "vpp", *given))
    assert [s.result for s in d.saved] == [None, None] and d.fresh == (True, True, False), "b's gradient is the tangent"
    d = differentiate(class_of(lambda x, w: (aten.mm.default(x, w).exp(),), "vp", *given[:2]))
    assert [s.result for s in d.saved] == [0]


def test_backward_formulas_that_write_in_place() -> None:
    """Of a product, a cosine (which writes into what it reads), rows picked twice."""

    def forward(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
        y = torch.nn.functional.cosine_similarity(x.cumprod(0), w, 1, 1e-8)
        return y[:, None] * aten.index.Tensor(x, [i]) + torch.nn.functional.hinge_embedding_loss(x * w, w.sign())

    torch.manual_seed(0)
    given = [torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 0, 2, 1])]
    for recompute in POLICIES:
        unit = class_of(forward, "vpi", *given, recompute=recompute)
        tangents = [torch.randn(4, 3, dtype=torch.float64)]
        outputs, grads = by_autograd(unit, given, tangents)
        mine, found = by_graphs(differentiate(unit), given, tangents)
        assert torch.equal(outputs[0], mine[0])
        assert all(torch.equal(x, y) for x, y in zip(grads, found, strict=True) if x is not None)


def spectra(x: Tensor, w: Tensor) -> Tensor:
    f = torch.fft.rfft(x * w, dim=1)
    back = torch.fft.irfft(f * f.conj(), n=x.shape[1], dim=1)
    return back + torch.fft.rfftn(x + w, dim=(0, 1)).abs().sum() + torch.fft.fft(f, dim=0).real.square().sum()


class WritesTwice(torch.autograd.Function):
    """Its backward fills new zeros piece by piece, one through a view of a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        (w,) = ctx.saved_tensors
        made, first = torch.zeros_like(g), g * w
        made[1:].copy_(first[1:])
        made[1:].select(0, 0).mul_(3)
        made[:1, 1:].add_(first[:1, 1:])
        return made, made.exp()


@fx.wrap
def writes_twice(x: Tensor, w: Tensor) -> Tensor:
    return WritesTwice.apply(x, w)


@pytest.mark.parametrize("forward", [spectra, lambda x, w: writes_twice(x, w)])
@pytest.mark.parametrize("shape", [(4, 6), (3, 5)])
def test_backward_formulas_that_write_into_a_piece(forward: Any, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64) for _ in range(2)]
    for recompute in POLICIES:
        unit = class_of(forward, "vp", *given, recompute=recompute)
        tangents = [torch.randn(shape, dtype=torch.float64)]
        outputs, grads = by_autograd(unit, given, tangents)
        mine, found = by_graphs(differentiate(unit), given, tangents)
        assert torch.equal(outputs[0], mine[0])
        assert all(torch.equal(x, y) for x, y in zip(grads, found, strict=True) if x is not None)


# -- what is lifted, what is refused ---------------------------------------------------------------------------------


def test_backward_is_told_the_microbatch() -> None:
    def forward(x: Tensor, w: Tensor, m: int) -> Tensor:
        return (
            ops.time_shard.default(x, m, [2, 2], 0) * ops.time_keep.default(w, m)
            + ops.time_pad.default(w, m, [2, 2], 0)[:2]
        )

    given = [torch.randn(4, 3), torch.randn(2, 3)]
    unit = class_of(forward, "vpm", *given, 1)
    d = differentiate(unit)
    assert 2 in d.keeps
    for m in (0, 1):
        tangents = [torch.randn(2, 3)]
        outputs, grads = by_autograd(unit, [*given, m], tangents)
        mine, found = by_graphs(d, [*given, m], tangents)
        assert torch.equal(outputs[0], mine[0])
        assert all(torch.equal(x, y) for x, y in zip(grads, found, strict=True) if x is not None)


def test_relaxed_dropout_is_made_again_equal() -> None:
    given = [torch.randn(4, 8), torch.randn(8, 8)]
    forward = lambda x, w, d, k: ops.seeded_dropout.default(aten.mm.default(x, w), 0.5, True, draw=d, step_key=k)
    for recompute in POLICIES:
        unit = class_of(forward, "vpdk", *given, 3, 7, recompute=recompute)
        outputs, grads = by_autograd(unit, [*given, 4, 8], [torch.ones(4, 8)])
        mine, found = by_graphs(differentiate(unit), [*given, 4, 8], [torch.ones(4, 8)])
        assert torch.equal(outputs[0], mine[0]) and 0 < (mine[0] == 0).sum() < 32
        assert all(torch.equal(x, y) for x, y in zip(grads, found, strict=True) if x is not None)


def test_what_has_no_graphs_says_why() -> None:
    attend = lambda q, p, d, k: ops.seeded_attention.default(q * p, q, q, None, 0.5, draw=d, step_key=k)
    q, p = torch.randn(2, 2, 4, 8), torch.randn(8)
    with pytest.raises(Untraceable, match="draws random numbers of torch's generator"):
        differentiate(class_of(attend, "vpdk", q, p, 3, 7))
    some = lambda x, p: aten.index_select.default(x * p, 0, aten.nonzero.default(x)[:, 0]).sum()
    with pytest.raises(Untraceable, match="DynamicOutputShape"):
        differentiate(class_of(some, "vp", torch.ones(3), torch.ones(3)))
    layer = lambda x, w, r, h: aten.lstm.input(x, [h, h], [w, r], False, 1, 0.0, True, False, True)[0]
    recurrent = [torch.randn(4, 5, 8), torch.randn(32, 8), torch.randn(32, 8), torch.zeros(1, 4, 8)]
    with pytest.raises(Untraceable, match="only where autograd records"):
        differentiate(class_of(layer, "vppv", *recurrent))
    nothing = differentiate(class_of(lambda x, p: (aten.detach.default(x) * 2, x.argmax()), "vp", q, p))
    assert nothing.backward is None and nothing.grads == ()
