"""Capture: one graph at the global batch that computes what the model computes, and everything that is not in it."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from autopar.capture import Capture, capture, run_graph
from autopar.errors import AutoparError
from autopar.passes import run

aten = torch.ops.aten


class Regression(nn.Module):
    """Two linears and a squared error; labels by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, labels, scale=1.0):
        return ((self.fc2(F.relu(self.fc1(x))) * scale - labels) ** 2).mean()


def batch(rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 4), torch.randn(rows, 3)


def targets(captured: Capture) -> list:
    return [n.target for n in captured.graph.graph.nodes if n.op == "call_function"]


def assert_equal_to_eager(captured: Capture, model: nn.Module, args=(), kwargs=None) -> None:
    """On the global batch: loss and gradients of the captured graph are the model's own."""
    out = captured.unflatten_outputs(
        run_graph(captured.graph, captured.flatten_inputs(args, kwargs), captured.attributes)["outputs"]
    )
    loss = out if isinstance(out, torch.Tensor) else out["loss"] if isinstance(out, dict) else out[0]
    wanted = model(*args, **(kwargs or {}))
    wanted = wanted if isinstance(wanted, torch.Tensor) else wanted["loss"] if isinstance(wanted, dict) else wanted[0]
    torch.testing.assert_close(loss, wanted)
    parameters = [p for p in captured.parameters.values() if p.requires_grad]
    got = torch.autograd.grad(loss, parameters, allow_unused=True)
    for a, b in zip(got, torch.autograd.grad(wanted, parameters, allow_unused=True), strict=True):
        torch.testing.assert_close(a, b)


# -- the graph ---------------------------------------------------------------------------------------------------------


def test_graph_has_the_conventions() -> None:
    x, y = batch()
    model = Regression()
    captured = capture(model, (x,), {"labels": y})
    graph = captured.graph.graph
    assert [n.target for n in graph.nodes if n.op == "placeholder"] == ["x", "labels"]
    assert [n.target for n in graph.nodes if n.op == "get_attr"] == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    ops = [aten.linear, aten.relu, aten.linear, aten.mul, aten.sub, aten.pow, aten.mean]
    assert [t.overloadpacket for t in targets(captured)] == ops
    (output,) = graph.find_nodes(op="output")
    assert output.args[0] == {"outputs": (list(graph.nodes)[-2],), "buffers": {}}
    assert all(n.meta["val"].is_meta for n in graph.nodes if n.op != "output")
    assert [tuple(n.meta["val"].shape) for n in graph.nodes if n.op == "call_function"] == [
        (6, 8),
        (6, 8),
        *[(6, 3)] * 4,
        (),
    ]
    assert captured.checked == "equal" and captured.training and captured.batch == 6 and captured.hints == ()
    assert captured.model_name == "Regression"
    assert [(i.path, i.shape, i.batch) for i in captured.inputs] == [
        ("args[0]", (6, 4), True),
        ("kwargs['labels']", (6, 3), True),
    ]
    assert_equal_to_eager(captured, model, (x,), {"labels": y})


def test_module_stack_and_source_lines_are_the_users() -> None:
    x, y = batch()
    captured = capture(Packed(), ({"x": x, "labels": y},))
    linear = captured.graph.graph.find_nodes(op="call_function", target=aten.linear.default)[0]
    paths = [path for path, _ in linear.meta["nn_module_stack"].values()]
    assert paths == ["", "net", "net.fc1"]
    last = [line for line in linear.meta["stack_trace"].splitlines() if line.strip().startswith("File ")][-1]
    assert os.path.basename(__file__) in last


class Packed(nn.Module):
    """One positional dict holds what `Regression` takes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Regression()

    def forward(self, packed):
        return self.net(packed["x"], labels=packed["labels"])


def test_global_batch_is_not_the_rows_given() -> None:
    model, (x, y) = Regression(), batch(3)
    captured = capture(model, (x, y), global_batch=12)
    assert captured.batch == 12
    assert [i.shape for i in captured.inputs] == [(12, 4), (12, 3)]
    big = batch(12)
    assert_equal_to_eager(captured, model, big)


@pytest.mark.parametrize("rows", [1, 2, 3, 64])
def test_any_batch_size_gives_the_same_ops(rows: int) -> None:
    model = Rows()
    captured = capture(model, (torch.randn(rows, 4),))
    assert targets(captured) == targets(capture(model, (torch.randn(5, 4),)))
    assert captured.graph.graph.find_nodes(op="call_function", target=aten.view.default)[0].args[1] == [rows * 2, 2]
    assert_equal_to_eager(captured, model, (torch.randn(rows, 4),))


class Rows(nn.Module):
    """Hard-coded sizes made from the batch, strides that depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4))

    def forward(self, x):
        pairs = x.contiguous().view(x.shape[0] * 2, 2)
        return (pairs @ self.weight).t().pow(2).sum() / x.shape[0] + torch.arange(x.shape[0]).sum()


def test_meta_model_needs_no_memory() -> None:
    with torch.device("meta"):
        model = Regression()
    captured = capture(model, batch())
    assert captured.checked == "unchecked"
    real = Regression()
    attributes = {**captured.attributes, **dict(real.named_parameters())}
    x, y = batch()
    loss = run_graph(captured.graph, captured.flatten_inputs((x, y)), attributes)["outputs"][0]
    torch.testing.assert_close(loss, real(x, y))


def test_meta_and_real_have_one_hash() -> None:
    with torch.device("meta"):
        on_meta = capture(Regression(), batch())
    assert capture(Regression(), batch()).hash == on_meta.hash


class Attention(nn.Module):
    """Kernels of different devices give different strides here, and ``contiguous`` then does nothing on one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.shift = nn.Linear(8, 24), torch.arange(8.0)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (self.qkv(x) + 0.0).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous().view(*x.shape)
        return (out + self.shift + torch.tensor(2.0, device=x.device)).pow(2).mean()


def test_the_graph_does_not_depend_on_the_device() -> None:
    x = torch.randn(6, 5, 8)
    model = Attention()
    real = capture(model, (x,))
    with torch.device("meta"):
        held = Attention()
    meta = capture(held, (x,))
    assert meta.hash == real.hash and meta.graph.code == real.graph.code
    assert meta.constants["shift"] is held.shift and meta.constants["lifted_tensor_0"].item() == 2.0
    assert held.qkv.weight is meta.parameters["qkv.weight"] and held.qkv.weight.is_meta
    torch.testing.assert_close(run_graph(meta.graph, (x,), real.attributes)["outputs"][0], model(x))


def test_hash_is_stable_over_processes_and_sees_changes() -> None:
    x, y = batch()
    one = capture(Regression(), (x, y)).hash
    assert capture(Regression(), (x,), {"labels": y}).hash == one
    assert capture(Regression(), (x, y), global_batch=7).hash != one
    assert capture(Regression(), (x, y, 2.0)).hash != one
    assert capture(Regression().double(), (x.double(), y.double())).hash != one
    frozen = Regression()
    frozen.fc1.weight.requires_grad_(False)
    assert capture(frozen, (x, y)).hash != one
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); from test_capture import *; "
    code += "print(capture(Regression(), batch()).hash)"
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert other.stdout.strip() == one


# -- inputs and outputs ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    extras: dict[str, object]


@dataclasses.dataclass
class Answer:
    loss: torch.Tensor
    parts: list[object]
    note: str


class Nested(nn.Module):
    """Dataclass, dict, list and None in; dataclass with constants out."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, sample, *, weights=None, flag=True):
        out = self.fc(sample.x)
        if flag and weights is not None:
            out = out * weights[0] + weights[1]
        loss = (out - sample.extras["y"]).pow(2).mean()
        return Answer(loss, [out, None, 3, {"argmax": out.argmax(-1)}], "note")


def nested(rows: int = 6) -> tuple[tuple[Sample], dict[str, object]]:
    sample = Sample(torch.randn(rows, 4), {"y": torch.randn(rows, 3), "n": 5})
    return (sample,), {"weights": [torch.randn(rows, 1), torch.randn(3)], "flag": True}


def test_nested_inputs_and_outputs() -> None:
    args, kwargs = nested()
    captured = capture(Nested(), args, kwargs)
    paths = [(i.name, i.path, i.batch) for i in captured.inputs]
    assert paths == [
        ("sample_x", "args[0].x", True),
        ("sample_extras_y", "args[0].extras['y']", True),
        ("weights_0", "kwargs['weights'][0]", True),
        ("weights_1", "kwargs['weights'][1]", False),
    ]
    got = captured.unflatten_outputs(
        run_graph(captured.graph, captured.flatten_inputs(args, kwargs), captured.attributes)["outputs"]
    )
    assert isinstance(got, Answer) and got.note == "note" and got.parts[1:3] == [None, 3]
    assert got.parts[3]["argmax"].dtype == torch.int64 and got.parts[0].shape == (6, 3)
    assert got.loss.ndim == 0


def test_arguments_by_position_or_keyword_in_any_order() -> None:
    x, y = batch()
    captured = capture(Regression(), (x,), {"labels": y})
    for args, kwargs in [((x, y), {}), ((), {"labels": y, "x": x}), ((x,), {"scale": 1.0, "labels": y})]:
        assert [t is not None and t.data_ptr() for t in captured.flatten_inputs(args, kwargs)] == [
            x.data_ptr(),
            y.data_ptr(),
        ]


def test_dicts_in_another_order_are_the_same_input() -> None:
    x, y = batch()
    captured = capture(Packed(), ({"x": x, "labels": y},))
    assert captured.flatten_inputs(({"labels": y, "x": x},))[0] is x


def test_local_rows() -> None:
    captured = capture(Regression(), batch(6))
    assert captured.flatten_inputs(batch(2), rows=2)[0].shape == (2, 4)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (torch.randn(5, 4), torch.randn(6, 3)),
            {},
            r"args\[0\]: has shape \(5, 4\), the captured graph takes \(6, 4\)",
        ),
        ((torch.randn(6, 4).double(), torch.randn(6, 3)), {}, r"args\[0\]: has dtype torch.float64"),
        ((torch.randn(6, 4),), {}, "missing a required argument: 'labels'"),
        (batch(), {"labels": torch.randn(6, 3)}, "multiple values for argument 'labels'"),
        (batch(), {"scale": 2.0}, r"kwargs\['scale'\]: was not given at capture"),
        (batch(), {"mask": None}, "unexpected keyword argument 'mask'"),
        ((3, torch.randn(6, 3)), {}, r"args\[0\]: is 3 \(at capture it was a tensor\)"),
        (([torch.randn(6, 4)], torch.randn(6, 3)), {}, "has another structure than at capture"),
    ],
)
def test_other_inputs_are_refused(args, kwargs, message: str) -> None:
    captured = capture(Regression(), batch())
    with pytest.raises(AutoparError, match=message):
        captured.flatten_inputs(args, kwargs)


def test_a_changed_constant_is_refused() -> None:
    captured = capture(Regression(), (*batch(), 2.0))
    assert len(captured.flatten_inputs(batch(), {"scale": 2.0})) == 2
    with pytest.raises(AutoparError, match=r"args\[2\]: is 3.0, at capture it was 2.0"):
        captured.flatten_inputs((*batch(), 3.0))
    with pytest.raises(AutoparError, match="scale: is missing"):
        captured.flatten_inputs(batch())


def test_one_tensor_as_two_inputs_is_two_placeholders() -> None:
    model = Shared()
    x = torch.randn(6, 4)
    captured = capture(model, (x, x))
    assert len(captured.graph.graph.find_nodes(op="placeholder")) == 2
    assert_equal_to_eager(captured, model, (x, torch.randn(6, 4)))


class Shared(nn.Module):
    """Uses its two inputs differently."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, a, b):
        return (self.fc(a) * b).sum()


def test_batch_dims() -> None:
    model = Masked()
    x, mask = torch.randn(5, 5), torch.ones(5, 5)
    with pytest.raises(AutoparError, match="batch_dims"):
        capture(model, (x, mask))
    captured = capture(model, (x, mask), batch_dims={"mask": None})
    assert [i.batch for i in captured.inputs] == [True, False]
    assert capture(model, (x, mask), batch_dims={"args[1]": None}, global_batch=8).inputs[0].shape == (8, 5)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x, mask):
        return (self.fc(x) @ mask).pow(2).mean()


class Logits(nn.Module):
    """Returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, input):
        return self.fc(input)


class Criterion(nn.Module):
    """A loss with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, out, target):
        return F.cross_entropy(out, target, self.weight)


def squared(out, x):
    return (out.sum(1) - x.sum(1)).pow(2).mean()


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(), Criterion()])
def test_loss_takes_what_forward_does_not(loss) -> None:
    model, x, y = Logits(), torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    captured = capture(model, (x,), {"target": y}, loss=loss)
    assert captured.checked == "equal"
    got = run_graph(captured.graph, captured.flatten_inputs((x,), {"target": y}), captured.attributes)["outputs"]
    torch.testing.assert_close(got[0], loss(model(x), y))
    _, out = captured.unflatten_outputs(got)
    torch.testing.assert_close(out, model(x))
    assert list(captured.parameters) == ["fc.weight", "fc.bias"]
    assert list(captured.constants) == (["given_loss.weight"] if isinstance(loss, Criterion) else [])


def test_loss_of_the_output_and_of_the_inputs() -> None:
    model, x = Logits(), torch.randn(6, 4)
    for loss, want in [
        (lambda out: out.pow(2).sum(), model(x).pow(2).sum()),
        (torch.sum, model(x).sum()),
        (squared, squared(model(x), x)),
    ]:
        captured = capture(model, (x,), loss=loss)
        got = run_graph(captured.graph, captured.flatten_inputs((x,)), captured.attributes)["outputs"][0]
        torch.testing.assert_close(got, want)


class Returns(nn.Module):
    """Returns its loss in a given form."""

    def __init__(self, form) -> None:
        super().__init__()
        self.fc, self.form = nn.Linear(4, 3), form

    def forward(self, x):
        out = self.fc(x)
        return self.form(out.pow(2).mean(), out)


@pytest.mark.parametrize(
    "form",
    [
        lambda loss, out: loss,
        lambda loss, out: (loss, out),
        lambda loss, out: {"logits": out, "loss": loss, "n": 3},
        lambda loss, out: Answer(loss, [out], "x"),
    ],
)
def test_loss_is_found_in_the_output(form) -> None:
    model, x = Returns(form), torch.randn(6, 4)
    captured = capture(model, (x,))
    got = run_graph(captured.graph, captured.flatten_inputs((x,)), captured.attributes)["outputs"]
    torch.testing.assert_close(got[0], model.fc(x).pow(2).mean())
    rebuilt, wanted = captured.unflatten_outputs(got), model(x)
    assert type(rebuilt) is type(wanted)
    if isinstance(wanted, dict):
        assert list(rebuilt) == list(wanted) and rebuilt["n"] == 3
        torch.testing.assert_close(rebuilt["logits"], wanted["logits"])


def test_forward_only() -> None:
    model = Logits().eval()
    x = torch.randn(6, 4)
    captured = capture(model, (x,), loss_required=False)
    assert not captured.has_loss and not captured.training and captured.checked == "equal"
    got = captured.unflatten_outputs(
        run_graph(captured.graph, captured.flatten_inputs((x,)), captured.attributes)["outputs"]
    )
    torch.testing.assert_close(got, model(x))


class Cache:
    """An object that is neither a tensor nor a container."""


def test_an_opaque_output_is_a_hint() -> None:
    captured = capture(Returns(lambda loss, out: {"loss": loss, "cache": Cache()}), (torch.randn(6, 4),))
    assert captured.hints == ("output: a Cache is no tensor and no container; None is returned in its place.",)
    assert captured.unflatten_outputs([torch.tensor(1.0)]) == {"loss": torch.tensor(1.0), "cache": None}


# -- parameters, buffers, constants -----------------------------------------------------------------------------------


class Tied(nn.Module):
    """The head's weight is the embedding's; the head is used first."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x, ids):
        return (self.head(x) + self.head(self.emb(ids))).pow(2).mean()


def test_tied_weights_have_one_name() -> None:
    model, args = Tied(), (torch.randn(6, 4), torch.randint(0, 7, (6,)))
    captured = capture(model, args)
    assert captured.aliases == {"head.weight": "emb.weight"}
    assert [n.target for n in captured.graph.graph.find_nodes(op="get_attr")] == ["emb.weight"]
    assert captured.parameters["emb.weight"] is model.head.weight
    assert_equal_to_eager(captured, model, args)


def test_frozen_and_unused_parameters() -> None:
    model = Regression()
    model.fc1.requires_grad_(False)
    model.unused = nn.Linear(2, 2)
    captured = capture(model, batch())
    assert (
        not captured.trainable("fc1.weight") and captured.trainable("fc2.weight") and captured.trainable("unused.bias")
    )
    assert "unused.weight" not in {n.target for n in captured.graph.graph.find_nodes(op="get_attr")}
    assert not captured.trainable("x")


class Stateful(nn.Module):
    """Batch norms, a buffer without a place in state_dict, a tensor attribute, a tensor made in forward."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum)
        self.register_buffer("seen", torch.zeros(4), persistent=False)
        self.shift = torch.arange(4.0)

    def forward(self, x):
        out = self.norm(self.fc(x)) + self.shift + torch.tensor([1.0, 2.0, 3.0, 4.0])
        with torch.no_grad():
            self.seen.add_(x.mean(0))
        return (out + self.seen).pow(2).mean()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_buffers_and_constants(momentum: float | None) -> None:
    model, x = Stateful(momentum), torch.randn(6, 4)
    before = {n: (b, b.clone()) for n, b in model.named_buffers()}
    captured = capture(model, (x,))
    assert captured.checked == "equal" and captured.hints == ()
    assert captured.persistent == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert set(captured.constants) == {"shift", "lifted_tensor_0"}
    for name, (tensor, value) in before.items():
        assert captured.buffers[name] is tensor, "capture leaves the model's own buffers"
        torch.testing.assert_close(tensor, value)
    assert all(p.grad is None for p in model.parameters())
    (norm,) = captured.graph.graph.find_nodes(op="call_function", target=aten.batch_norm.default)
    assert norm.args[6] == 0.1 if momentum else math.isnan(norm.args[6])
    assert model.norm.momentum == momentum
    held = {n: t.clone() if n in captured.buffers else t for n, t in captured.attributes.items()}
    for _ in range(3):
        got = run_graph(captured.graph, (x,), held)["outputs"][0]
        torch.testing.assert_close(got, model(x))
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(held[name], buffer)


class Replaces(nn.Module):
    """Puts a new tensor in a buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps = self.steps + 1
        return self.fc(x).mean() * self.steps


def test_a_buffer_that_is_replaced_is_written() -> None:
    model, x = Replaces(), torch.randn(6, 4)
    captured = capture(model, (x,))
    assert captured.checked == "equal" and model.steps == 0
    held = {**captured.attributes, "steps": model.steps.clone()}
    for _ in range(2):
        torch.testing.assert_close(run_graph(captured.graph, (x,), held)["outputs"][0], model(x))
    assert held["steps"] == 2


# -- regions ---------------------------------------------------------------------------------------------------------


class NoGrad(nn.Module):
    """A target made under no_grad, a region inside a region, a detached use."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        out = self.fc(x)
        with torch.no_grad():
            target = self.other(out) * self.fc.weight.sum()
            with torch.autocast("cpu", enabled=False):
                target = target + out
        with torch.enable_grad():
            out = out * 2
        return (out - target).pow(2).mean() + self.other.bias.detach().sum()


def test_no_grad_regions_are_inlined_and_detached() -> None:
    model, x = NoGrad(), torch.randn(6, 4)
    captured = capture(model, (x,))
    assert not any(isinstance(t, torch._ops.HigherOrderOperator) for t in targets(captured))
    assert_equal_to_eager(captured, model, (x,))
    assert len(captured.graph.graph.find_nodes(op="call_function", target=aten.linear.default)) == 2


class NoOpUnderNoGrad(nn.Module):
    """What ``float`` and ``contiguous`` return under no_grad is the tensor itself; what follows reads it with its
    history."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        with torch.no_grad():
            scale = y.float().abs().mean() + F.dropout(y.contiguous(), training=False).max()
        return (y.float() / scale).contiguous().square().mean()


def test_an_op_that_does_nothing_under_no_grad_cuts_nothing() -> None:
    model, x = NoOpUnderNoGrad(), torch.randn(6, 4)
    captured = capture(model, (x,))
    assert captured.checked == "equal"
    assert_equal_to_eager(captured, model, (x,))


class Tables(nn.Module):
    """Makes its tables when first asked, as rotary embeddings do, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.tables, self.cos, self.longest, self.seen = nn.Linear(4, 4), {}, None, 0, []

    def forward(self, x):
        n = x.shape[1]
        if n > self.longest:
            self.longest, self.cos = n, torch.arange(n).float().cos()[:, None]
        if n not in self.tables:
            self.tables[n] = torch.arange(n).float().sin()[:, None]
        if "places" not in self._buffers:
            self.register_buffer("places", torch.arange(4.0), persistent=False)
        self.seen.append(self.fc(x) + self.places)
        self.last = self.seen.pop() * self.cos[:n] + self.tables[n]
        return self.last.pow(2).mean()


def test_tables_made_when_first_asked() -> None:
    model, x = Tables(), torch.randn(6, 3, 4)
    captured = capture(model, (x,))
    assert captured.checked == "equal" and not captured.buffers and not captured.hints
    assert (model.tables, model.cos, model.longest, model.seen) == ({}, None, 0, [])
    assert not hasattr(model, "last") and "places" not in dict(model.named_buffers())
    assert_equal_to_eager(captured, model, (x,))
    made = model.cos
    assert capture(model, (x,)).checked == "equal" and model.cos is made
    with torch.device("meta"):
        hints = capture(Tables(), (torch.empty(6, 3, 4),)).hints
    assert hints == (
        "cos, last, longest, places, tables: changed by forward; the graph keeps what it computed at capture.",
    )


def test_hooks_that_forward_installs_are_installed_anew() -> None:
    class Records(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.installed, self.seen = nn.Linear(4, 4), False, []

        def forward(self, x):
            if not self.installed:
                self.fc.register_forward_hook(lambda module, inputs, out: self.seen.append(out))
                self.installed = True
            self.seen.clear()
            return self.fc(x).sum() + torch.stack(self.seen).pow(2).mean()

    model, x = Records(), torch.randn(6, 4)
    captured = capture(model, (x,))
    assert captured.checked == "equal" and not model.installed and not model.fc._forward_hooks
    assert_equal_to_eager(captured, model, (x,))
    assert len(model.fc._forward_hooks) == 1


def test_rows_that_few_rows_do_not_have() -> None:
    class Hardest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x, labels):
            return F.cross_entropy(self.fc(x), labels, reduction="none").topk(4).values.mean()

    model, x, labels = Hardest(), torch.randn(6, 4), torch.arange(6) % 3
    captured = capture(model, (x, labels))
    assert captured.checked == "equal"
    assert_equal_to_eager(captured, model, (x, labels))


class Checkpointed(nn.Module):
    def __init__(self, **how: bool) -> None:
        super().__init__()
        self.fc, self.inside, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x):
        checkpoint = torch.utils.checkpoint.checkpoint
        out = checkpoint(self.inside, x * 1.0, **self.how)
        return checkpoint(lambda h, c: self.inside(h).sin() * c, self.fc(out), 2.0, **self.how).sum()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_checkpointed_regions_are_a_hint(reentrant: bool) -> None:
    model, x = Checkpointed(use_reentrant=reentrant), torch.randn(6, 4)
    captured = capture(model, (x,))
    (hint,) = captured.hints
    assert "test_capture.py" in hint and "and 1 more: checkpointed regions are hints" in hint
    assert captured.checked == "equal" and model.fc.weight.grad is None
    nodes = [n for n in captured.graph.graph.nodes if n.op == "call_function" and n.target is not aten.detach.default]
    assert [n.meta.get("checkpoint") for n in nodes] == [None, 0, None, 1, 1, 1, None]
    assert all("test_capture.py" in n.meta["stack_trace"] for n in nodes)
    gm = run(captured.graph, ("views_to_reshapes", "drop_noops"))
    assert {n.meta.get("checkpoint") for n in gm.graph.nodes} == {None, 0, 1}


def test_forward_hooks_are_traced() -> None:
    model, args = Regression(), batch()
    model.fc1.register_forward_hook(lambda module, inputs, out: out * 3)
    model.fc2.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    captured = capture(model, args)
    assert_equal_to_eager(captured, model, args)


def test_parametrizations_keep_their_names() -> None:
    model, args = Regression(), batch()
    nn.utils.parametrizations.weight_norm(model.fc1)
    captured = capture(model, args)
    assert "fc1.parametrizations.weight.original0" in captured.parameters
    assert_equal_to_eager(captured, model, args)


def test_capture_under_no_grad_keeps_gradients() -> None:
    model, args = Regression(), batch()
    with torch.no_grad():
        captured = capture(model, args)
    assert_equal_to_eager(captured, model, args)


def test_random_state_is_left_alone() -> None:
    args = batch()
    model = Regression()
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    capture(model, args)
    assert torch.equal(torch.rand(2), want)


def test_inputs_and_numbers_are_left_alone() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.rows = nn.Linear(4, 4), 0

        def forward(self, x, shift):
            self.rows = 4  # set once, then always the same
            return self.fc(x.add_(1) + shift.mul_(2)).mean()

    model, x, shift = Writes(), torch.ones(6, 4), torch.ones(4)
    captured = capture(model, (x, shift))
    assert captured.checked == "equal" and captured.hints == ()
    assert x.eq(1).all() and shift.eq(1).all() and model.rows == 0


def test_complex_numbers_inside() -> None:
    model, x = Rotary(), torch.randn(6, 4)
    assert_equal_to_eager(capture(model, (x,)), model, (x,))


class Rotary(nn.Module):
    """Rotates pairs by complex numbers, as Meta's Llama does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("angles", torch.polar(torch.ones(2), torch.tensor([0.3, 0.7])))

    def forward(self, x):
        pairs = torch.view_as_complex(self.fc(x).reshape(-1, 2, 2))
        return torch.view_as_real(pairs * self.angles).pow(3).mean()


def test_gradients_pass_writes_into_views() -> None:
    """The loss reaches the parameters through what is written, and no_grad cuts what was written into."""

    class Written(nn.Linear):
        def forward(self, x):
            out = torch.zeros(x.shape[0], 8)
            out[:, :4] = super().forward(x)
            with torch.no_grad():
                scale = out.abs() + 1
            return (out * scale).sum()

    assert capture(Written(4, 4), (torch.randn(6, 4),)).checked == "equal"


class Cubed(torch.autograd.Function):
    """``x ** 3`` with its derivative written out, in the older form."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Scaled(torch.autograd.Function):
    """``x * factor``, in the newer form."""

    @staticmethod
    def forward(x, factor):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class WithFunctions(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.cubed = nn.Linear(3, 2), Cubed.apply

    def forward(self, x):
        return Scaled.apply(self.cubed(self.fc(x)), 0.5).sum()


def test_a_function_whose_backward_is_the_derivative_is_its_ops() -> None:
    torch.manual_seed(0)
    model, x = WithFunctions(), torch.randn(4, 3)
    captured = capture(model, (x,))
    assert captured.checked == "equal"
    assert [str(n.target) for n in captured.graph.graph.nodes if n.op == "call_function"] == [
        "aten.linear.default",
        "aten.pow.Tensor_Scalar",
        "aten.mul.Tensor",
        "aten.sum.default",
    ]
    loss = run_graph(captured.graph, (x,), captured.attributes)["outputs"][0]
    got = torch.autograd.grad(loss, list(model.parameters()))
    want = torch.autograd.grad(model(x), list(model.parameters()))
    torch.testing.assert_close(got, want)


def test_lists_of_rows_that_are_joined_again() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(self, x):
            h = self.f(x)
            flat = torch.cat(list(h), dim=0) + torch.cat(list(h.split(1))).flatten(0, 1)
            back, turned = torch.stack(list(h), 0), torch.stack(list(h), 2)
            wide = torch.cat(h.unbind(0), dim=-1).sum(0) + torch.cat(torch.chunk(h, h.shape[0]), 0).flatten()[0]
            back.mul_(2)
            pairs = h.split(2)
            flat = (
                flat
                + torch.stack(pairs).mul(torch.stack(pairs, 1).transpose(0, 1)).sum()
                + torch.cat(pairs, 1).sin().sum()
            )
            return flat.sin().sum() + (h * back).sum() + turned.cumsum(1).sum() + wide.pow(2).sum()

    captured = capture(Rows(), (torch.randn(6, 3, 4),))
    targets = {n.target for n in captured.graph.graph.nodes}
    assert captured.checked == "equal"
    assert not targets & {torch.ops.aten.unbind.int, torch.ops.aten.split.Tensor, torch.ops.aten.cat.default}


def test_a_list_with_a_tensor_a_row_is_returned() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(self, x):
            h = self.f(x)
            return {
                "loss": h.sum(),
                "rows": list(h.relu().split(1)),
                "halves": h.chunk(2, -1),
                "numbers": list(h[:, 0]),
            }

    model, x = Lists(), torch.randn(6, 4)
    captured = capture(model, (x,))
    assert captured.checked == "equal" and len(captured.graph.graph.output_node().args[0]["outputs"]) == 5
    made = captured.unflatten_outputs(run_graph(captured.graph, (x,), captured.attributes)["outputs"])
    torch.testing.assert_close(made, model(x))


class ThroughASet(nn.Module):
    """Tables by name, made in the order in which a set gives the names (another in every process)."""

    def __init__(self, names):
        super().__init__()
        self.names, self.fc = names, nn.Linear(4, 4)
        for name in ("near", "far"):
            self.register_buffer(name, torch.rand(4))

    def forward(self, x):
        tables = {name: getattr(self, name).sin() * 2 for name in self.names}
        return ((self.fc(x) * tables["near"]).relu() + tables["far"]).sum()


def test_what_no_weight_reaches_stands_where_it_is_read() -> None:
    torch.manual_seed(0)
    one, two = (ThroughASet(names) for names in (("near", "far"), ("far", "near")))
    hashes = {capture(model, (torch.randn(3, 4),)).hash for model in (one, two)}
    assert len(hashes) == 1


class WrittenBetween(nn.Module):
    """A buffer that is read, written in place, and read again."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("level", torch.rand(4))

    def forward(self, x):
        before = self.level[:2] + 1
        self.level.mul_(2)
        return self.fc(x).sum() * before.sum() + self.level.sum()


def test_what_is_written_in_place_keeps_its_order() -> None:
    torch.manual_seed(0)
    assert capture(WrittenBetween(), (torch.randn(3, 4),)).checked == "equal"
