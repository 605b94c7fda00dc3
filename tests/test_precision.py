"""Mixed precision: what is captured, planned and predicted, and what real ranks compute."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from building import net, par
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.build import apply, choose, plan_mesh, prepare
from autopar.capture import Capture, capture
from autopar.choosing.solve import solved
from autopar.cluster import Cluster
from autopar.equality import NORM, Run, distances, judge_low
from autopar.errors import AutoparError
from autopar.explain import explain
from autopar.load_program import load_program
from autopar.loading import ModelSpec
from autopar.mixed_precision import parameters_in
from autopar.passes.facts import fact, value
from autopar.passes.layout import Layout
from autopar.pins import Pins, resolve
from autopar.plan import Plan, Precision, loads
from autopar.predict import predict
from autopar.runtime.parameters import local
from autopar.runtime.pool import RankPool
from autopar.verify import VerifyResult, verify_many

BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    """Tied embedding and head, a norm in fp32, a frozen adapter, a buffer, a loss in fp32."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gain, self.adapter = par(8), nn.Linear(8, 8).requires_grad_(False)
        self.mix = nn.GRU(8, 8, batch_first=True) if recurrent else nn.Linear(8, 8)
        self.register_buffer("positions", torch.linspace(0, 1, 5)[:, None])

    def forward(self, ids: Tensor, weight: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.positions.to(x.dtype)
        wide = x.float()
        x = (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) * self.gain
        x = self.mix(self.adapter(x))
        x = (x[0] if isinstance(x, tuple) else x) * weight[:, :, None]
        return F.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def example() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 11, (4, 5)), torch.rand(4, 5)


def dtypes(captured: Capture, op: str) -> set[torch.dtype]:
    """Of what the nodes of one kind make."""
    nodes = captured.graph.graph.find_nodes(op=op)
    return {n.meta["val"].dtype for n in nodes if isinstance(n.meta.get("val"), Tensor)}


def test_the_graph_computes_in_param_dtype_and_the_model_stays_as_it_is() -> None:
    model, args = Block(recurrent=True), example()
    before = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
    flat = [id(t) for t in model.mix._flat_weights]
    captured = capture(model, args, param_dtype="bf16")
    assert captured.checked == "equal", "in one process, with its parameters cast"
    kinds = {n.target: n.meta["val"].dtype for n in captured.graph.graph.find_nodes(op="get_attr")}
    assert kinds.pop("positions") == FP32 and set(kinds.values()) == {BF16}
    assert dtypes(captured, "placeholder") == {torch.int64, FP32}, "inputs arrive as the user gives them"
    assert {p.dtype for p in captured.parameters.values()} == {FP32}, "and parameters rest as they are"
    assert captured.aliases == {"head.weight": "embed.weight"}
    assert {n: id(p) for n, p in model.named_parameters()} == {n: i for n, (i, _) in before.items()}
    assert all(torch.equal(p, before[n][1]) and p.grad is None for n, p in model.named_parameters())
    assert [id(t) for t in model.mix._flat_weights] == flat


def test_meta_and_real_models_have_one_graph_and_its_hash_depends_on_param_dtype_alone() -> None:
    model, args, loss = nn.Linear(4, 3), (torch.rand(4, 4),), lambda y: y.float().square().mean()
    hashes = [capture(model, args, loss=loss, param_dtype=d, check=False).hash for d in (None, "fp32", "bf16", "fp16")]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3
    far, inputs = model.to("meta"), tuple(t.to("meta") for t in args)
    captured = capture(far, inputs, loss=loss, param_dtype="bf16", reduce_dtype="fp16")
    assert captured.hash == hashes[2] and captured.precision == Precision("bf16", "fp16")
    assert [h for h in captured.hints if "vanish in fp16" in h], "nothing scales the loss"


def test_gradients_flow_to_the_models_own_parameters_in_their_dtype() -> None:
    model, args = Block(), example()
    with parameters_in(model, BF16):
        model(args[0], args[1].bfloat16()).backward()
    trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(g is not None and g.dtype == FP32 and torch.equal(g, g.bfloat16().float()) for g in trained.values())


def test_integers_complex_numbers_and_loss_inputs_are_not_cast() -> None:
    parts: dict[str, Any] = {"w": par(4, 3), "wide": par(3, dtype=torch.float64)}
    parts |= {"table": nn.Parameter(torch.arange(3), requires_grad=False)}
    parts |= {"phase": nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)}
    model = net(lambda self, x: (x @ self.w)[:, self.table] * self.wide * self.phase.real, **parts)
    loss = lambda output, target: ((output - target) ** 2).mean()
    captured = capture(model, (torch.rand(6, 4),), {"target": torch.rand(6, 3)}, loss=loss, param_dtype="bf16")
    kinds = {n.target: n.meta["val"].dtype for n in captured.graph.graph.find_nodes(op="get_attr")}
    assert kinds == {"w": BF16, "wide": BF16, "table": torch.int64, "phase": torch.complex64}
    (target,) = [n for n in captured.graph.graph.find_nodes(op="placeholder") if n.target == "target"]
    assert [str(u.target) for u in target.users] == ["aten.sub.Tensor"], "read in fp32, as it was given"


def test_batch_norms_are_used_as_they_rest() -> None:
    """Their statistics are buffers in fp32, and torch's kernels want parameters of that dtype beside them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    captured = capture(model, (torch.rand(6, 4),), loss=lambda y: y.float().square().mean(), param_dtype="bf16")
    assert captured.checked == "equal"
    plan = planned(captured, ranks=1)
    assert {n: p.use_dtype for n, p in plan.parameters.items() if p.use_dtype != "bf16"} == {
        "1.weight": "fp32",
        "1.bias": "fp32",
    }
    assert loads(plan.dumps()) == plan


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (net(lambda self, x: self.f(x.float()).sum(), f=nn.Linear(4, 4)), r"linear is given torch.bfloat16 and torch"),
        (net(lambda self, x: F.conv1d(x[None], self.g.to(FP32)[None]).sum(), g=par(4, 2)), r"conv1d is given"),
    ],
    ids=["product", "convolution"],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_cannot_run_so_is_refused(model: nn.Module, text: str, device: str) -> None:
    with pytest.raises(AutoparError, match=text + ".*Cast what meets them, or leave out the pin param_dtype") as error:
        capture(model.to(device), (torch.rand(4, 4, device=device),), param_dtype="bf16")
    assert "\n" not in str(error.value)


def test_words_that_are_no_dtype() -> None:
    for key in ("param_dtype", "reduce_dtype"):
        with pytest.raises(AutoparError, match=f"{key}: 'fp8' is not known. Legal: fp32, bf16, fp16."):
            capture(nn.Linear(2, 2), (torch.rand(2, 2),), **{key: "fp8"})  # type: ignore[arg-type]


# -- plans ------------------------------------------------------------------------------------------------------------


def planned(captured: Capture, ranks: int = 2, **pins: Any) -> Plan:
    cluster, pins = Cluster.local(ranks=ranks), {"dp": ranks} | pins
    resolved = resolve(Pins.parse(pins), ranks, captured.batch)
    prepared = prepare(captured, resolved.microbatches)
    return predict(choose(prepared, resolved, cluster), prepared, cluster)


@pytest.fixture(scope="module")
def captures() -> dict[str, Capture]:
    """The model in fp32, and in mixed precision, reduced in fp32 and in half."""
    torch.manual_seed(0)
    model, args = Block(), tuple(t.repeat(3, *[1] * (t.ndim - 1)) for t in example())
    low = capture(model, args, param_dtype="bf16", check=False)
    return {
        "fp32": capture(model, args, check=False),
        "bf16": low,
        "both": replace(low, precision=Precision("bf16", "bf16")),
        "reduced": capture(model, args, reduce_dtype="bf16", check=False),
    }


def moved(plan: Plan) -> dict[str, int]:
    """Bytes of the collectives of parameters, and of those of gradients."""
    found: Counter[str] = Counter()
    for c in plan.predicted.collectives:
        found[c.phase] += c.bytes
    return {phase: found[phase] for phase in ("parameters", "gradients")}


@pytest.mark.parametrize("pins", [{"zero": 1, "microbatches": 3}, {"zero": 3}, {"dp": 1, "tp": 2}], ids=str)
def test_bytes_rest_in_fp32_move_in_param_dtype_and_are_reduced_in_reduce_dtype(
    captures: dict[str, Capture], pins: dict[str, int]
) -> None:
    plans = {name: planned(captured, **pins) for name, captured in captures.items()}
    parts = {name: plan.predicted.parts for name, plan in plans.items()}
    for key in ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "buffers_bytes", "inputs_bytes"):
        assert len({p[key] for p in parts.values()}) == 1 and parts["fp32"][key] > 0, key
    whole, low, both, reduced = (moved(plans[name]) for name in ("fp32", "bf16", "both", "reduced"))
    assert low["parameters"] * 2 == both["parameters"] * 2 == whole["parameters"] == reduced["parameters"]
    assert low["gradients"] == whole["gradients"] == both["gradients"] * 2 == reduced["gradients"] * 2
    assert (whole["gradients"] > 0) == ("tp" not in pins)
    assert parts["bf16"]["saved_bytes"] < parts["fp32"]["saved_bytes"]
    assert parts["bf16"]["compute_s"] > 0 and parts["reduced"]["compute_s"] == parts["fp32"]["compute_s"]
    held = {name: p["gathered_step_bytes"] for name, p in parts.items()}
    if pins.get("zero") == 3:
        assert held["bf16"] == held["fp32"] == 0, "cast for each unit that reads it"
    else:
        assert held["bf16"] == sum(n * 2 for n in elements(plans["bf16"]).values()), "as it is used, all step"
        assert held["fp32"] <= 2 * held["bf16"], "what does not move is no copy"
    for fqn, parameter in plans["both"].parameters.items():
        assert (parameter.dtype, parameter.use_dtype, parameter.grad_dtype) == ("fp32", "bf16", "bf16"), fqn
    assert plans["bf16"].precision == Precision("bf16") and plans["bf16"].one_line().count("param_dtype=bf16") == 1


def elements(plan: Plan) -> dict[str, int]:
    """Of each parameter as the first rank uses it."""
    mesh = plan_mesh(plan)
    layouts = {fqn: Layout.parse(p.use, len(p.shape)) for fqn, p in plan.parameters.items()}
    return {
        n: math.prod(x.local_shape(plan.parameters[n].shape, mesh, mesh.coordinates(0))) for n, x in layouts.items()
    }


def test_the_solver_prices_the_dtypes(captures: dict[str, Capture]) -> None:
    """The problem and the program say the same of memory, and matmuls run at the rate of what they multiply."""
    cluster = replace(Cluster.load("h100-dgx"), ranks_per_node=2)
    found = {}
    for name in ("fp32", "bf16", "both"):
        captured = captures[name]
        made = solved(captured, cluster, Pins(dp=2, zero=1, microbatches=1), nearest=False)
        found[name] = made.plan
        chosen = made.plan.predicted
        assert chosen.step_time_s is not None and made.plan.proof.objective is not None
        assert made.plan.proof.objective <= chosen.step_time_s * 1.05
    rates = {name: plan.predicted.parts["peak_flops"] / 2 for name, plan in found.items()}
    assert rates == {"fp32": 67e12, "bf16": 989e12, "both": 989e12}
    hidden = {name: plan.predicted.parts["hidden_s"] for name, plan in found.items()}
    assert hidden["both"] < hidden["bf16"] < hidden["fp32"]


def test_plans_say_their_precision_and_are_checked(captures: dict[str, Capture]) -> None:
    plan = planned(captures["both"], zero=3)
    data = json.loads(plan.dumps())
    assert loads(plan.dumps()) == plan and data["precision"] == {"param_dtype": "bf16", "reduce_dtype": "bf16"}
    data["parameters"]["gain"]["use_dtype"] = "fp16"
    with pytest.raises(AutoparError, match=r"gain.*.use_dtype: 'fp16' is not what .* Legal: bf16, fp32"):
        loads(json.dumps(data))
    data["precision"]["param_dtype"] = "fp8"
    with pytest.raises(AutoparError, match=r"\$.precision.param_dtype: \"fp8\" is not legal"):
        loads(json.dumps(data))
    with pytest.raises(AutoparError, match=r"\$.precision: the plan has bf16, bf16, the model was .* with bf16, own"):
        apply(plan, prepare(captures["bf16"], 1))
    with pytest.raises(AutoparError, match="was made for another model"):
        apply(plan, prepare(captures["fp32"], 1))
    assert "fp32, used in bf16" in explain(plan).text() and "in backward in bf16" in explain(plan).text()


def test_no_partial_sum_is_rounded(captures: dict[str, Capture]) -> None:
    """Inside the graph a cast to a lower dtype takes whole values; what is partial is made whole before it."""

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.last = nn.Linear(8, 16), nn.Linear(16, 8), par(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.down(self.up(x).relu()).to(BF16)
            return (y @ self.last.to(BF16)).float().square().mean().to(BF16)

    model = capture(Casts(), (torch.rand(12, 8),), check=False)
    rounded = partial = 0
    for captured in (captures["bf16"], model):
        for pins in ({"tp": 2, "dp": 1}, {"dp": 2}, {"dp": 2, "microbatches": 2}):
            cluster, ranks = Cluster.local(ranks=2), 2
            resolved = resolve(Pins.parse(pins), ranks, captured.batch)
            prepared = prepare(captured, resolved.microbatches)
            lowerable = apply(choose(prepared, resolved, cluster), prepared)
            for node in lowerable.body.graph.nodes:
                found = fact(node).strategy if node.op == "call_function" else None
                partial += found is not None and any("P" in x.kinds for x in found.results if x is not None)
                if node.target is torch.ops.aten.to.dtype and found is not None:
                    narrower = value(node).dtype.itemsize < value(node.args[0]).dtype.itemsize  # type: ignore[arg-type]
                    rounded += narrower
                    assert not (narrower and "P" in found.operands[0].kinds), f"{pins}: {node}"
    assert rounded > 0 and partial > 0


# -- what equal means -------------------------------------------------------------------------------------------------


def test_the_rule_of_half_precision() -> None:
    """1.5 times as far from float64 as one process, in norm."""
    truth = Run(torch.tensor(1.0), {"w": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}, {}, {"w": torch.ones(4)})
    plan = replace(truth, grads={"w": torch.tensor([3.3, 4.4]), "b": torch.tensor([3e-4, -4e-4])})
    found = distances(plan, truth, lr=0.5, size=NORM)
    far = {(d.kind, d.name): d.rel for d in found if d.rel}
    assert far == {("grad", "w"): pytest.approx(0.1), ("grad", "b"): pytest.approx(0.1)}, "floor: 1e-3 of the largest"
    none = lambda d: 0.0
    ok, said = judge_low(found, BF16, {"grad": 0.06}, none)
    assert not ok and said[1] == "bf16 grad 9.0e-02 (1.5 times one process's own distance from fp64, 6.0e-02)"
    assert judge_low(found, BF16, {"grad": 0.07}, none)[0]
    assert judge_low(found, BF16, {"grad": 0.06}, none, lambda: {"grad": 0.07})[0], "of other runs of one process"
    assert judge_low(found, BF16, {}, lambda d: 0.07)[0], "what rounding alone makes is no error"
    never = distances(replace(plan, grads={"w": None, "b": None}), truth, lr=0.5, size=NORM)
    assert not judge_low(never, BF16, {"grad": 1.0}, none, lambda: {"grad": 1.0})[0]


# -- on ranks ---------------------------------------------------------------------------------------------------------


def make() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    return Block(), tuple(t.repeat(3, *[1] * (t.ndim - 1)) for t in example()), {}


PLANS = (
    "dp=2 zero=1 microbatches=3 param_dtype=bf16 reduce_dtype=bf16",
    "dp=2 zero=3 microbatches=3 param_dtype=bf16",
    "tp=2 param_dtype=bf16",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout=120, preload=("autopar.verify", "torch.export", "torch._dynamo")) as made:
        yield made


def test_plans_in_half_precision_equal_one_process(pool: RankPool) -> None:
    results = verify_many(ModelSpec(f"{__file__}:make"), 2, [Pins.parse(p) for p in PLANS], pool=pool)
    for text, result in zip(PLANS, results, strict=True):
        assert isinstance(result, VerifyResult) and result.ok, f"{text}: {result}"
        assert [said.split()[0] for said in result.limits[-3:]] == ["bf16"] * 3, "which limit applied"


def trains(rank: int, folder: str) -> None:
    """What users see: parameters, gradients and optimizer states in fp32, a loss as one process returns it; eval mode
    in the same precision; a saved plan has its precision with it, and so has a program that was written."""
    torch.manual_seed(0)
    (model, args, _), pins = make(), {"dp": 2, "zero": 3, "microbatches": 3, "param_dtype": "bf16"}
    parallel = autopar.compile(model, Cluster.local(ranks=2), args=args, pins=pins)
    optimizer = torch.optim.AdamW(parallel.parameters())
    loss = parallel.step(*args)
    with parameters_in(model, BF16), torch.no_grad():
        expected = model(args[0], args[1].bfloat16())
    assert loss.dtype == expected.dtype == FP32 and abs(loss - expected) < 1e-2
    first = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in parallel.state_dict().items()}
    parallel._program(parallel._ready[True][0]).save(folder)
    written = load_program(folder)
    written.load_state_dict(first)
    assert torch.equal(written.step(*args), loss)
    for name, p in written.named_parameters():
        own = parallel.get_parameter(name).grad
        assert (p.grad is None) == (own is None) and (own is None or torch.equal(local(p.grad), local(own))), name
    gradients = [p.grad for p in parallel.parameters() if p.grad is not None]
    assert {p.dtype for p in parallel.parameters()} == {g.dtype for g in gradients} == {FP32}
    assert len(gradients) == 4 and any(not torch.equal(g, g.bfloat16().float()) for g in map(local, gradients))
    optimizer.step()
    parts = parallel.plan.predicted.parts
    held = [local(p) for p in parallel.parameters()]
    assert parts["parameters_bytes"] == sum(map(nbytes, held))
    assert parts["gradients_bytes"] == sum(map(nbytes, map(local, gradients)))
    assert {s.dtype for state in optimizer.state.values() for s in state.values()} == {FP32}
    trained = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in parallel.state_dict().items()}
    model.load_state_dict(trained)
    with parameters_in(model, BF16), torch.no_grad():
        expected = model.eval()(args[0], args[1].bfloat16())
    torch.testing.assert_close(parallel.eval()(*args), expected, rtol=2e-3, atol=0)
    again = autopar.compile(model.train(), Cluster.local(ranks=2), args=args, plan=loads(parallel.plan.dumps()))
    assert again.plan.precision == Precision("bf16") and again.captured.precision == Precision("bf16")
    frozen = [use for use in again.local.parameters if not use.trainable]
    assert {use.fqn for use in frozen} == {"adapter.weight", "adapter.bias"} and {use.use_dtype for use in frozen} == {
        BF16
    }


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def test_training_in_mixed_precision(pool: RankPool, tmp_path: Path) -> None:
    pool.run(trains, str(tmp_path))
