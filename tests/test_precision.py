"""Mixed precision: what is captured, planned and predicted, and what real ranks compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from building import net, par
from torch import Tensor, nn

from autopar.capture import Capture, capture
from autopar.errors import AutoparError
from autopar.mixed_precision import parameters_in

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
    model, args = Block(), example()
    hashes = [capture(model, args, param_dtype=d, check=False).hash for d in (None, "fp32", "bf16", "fp16")]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3
    with torch.device("meta"):
        model = Block()
    far = capture(model, tuple(t.to("meta") for t in args), param_dtype="bf16", reduce_dtype="fp16")
    assert far.hash == hashes[2] and (far.precision.param_dtype, far.precision.reduce_dtype) == ("bf16", "fp16")


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


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (net(lambda self, x: self.f(x.float()).sum(), f=nn.Linear(4, 4)), r"linear is given torch.bfloat16 and torch"),
        (net(lambda self, x: self.f(x).float().sum(), f=nn.BatchNorm1d(4)), r"batch_norm is given torch.bfloat16 and"),
    ],
    ids=["product", "batch norm"],
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
