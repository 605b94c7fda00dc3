"""What cannot be captured exactly is refused: one line that names the module, file:line and the way out."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture import capture, run_graph
from autopar.errors import AutoparError

HERE = Path(__file__).name


class Model(nn.Module):
    """A linear and what the test puts between it and the loss."""

    def __init__(self, between=None, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.fc, self.inner, self.between = nn.Linear(4, 4), inner, between

    def forward(self, x):
        out = self.fc(x)
        if self.inner is not None:
            out = self.inner(out)
        if self.between is not None:
            out = self.between(out)
        return out.float().pow(2).mean()


X = torch.randn(6, 4)
VALUELESS = (X.to("meta"),)  # with values, a model that reads some is called as it is


def refused(model: nn.Module, *parts: str, args=(X,), **options) -> str:
    with pytest.raises(AutoparError) as caught:
        capture(model, args, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "}")), message
    for part in parts:
        assert part in message, message
    return message


# -- the model ---------------------------------------------------------------------------------------------------------


class Straight(torch.autograd.Function):
    """A straight-through sign."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_custom_autograd_function_is_fine_forward_only() -> None:
    assert capture(Model(Straight.apply).eval(), (X,), loss_required=False).checked == "equal"


def test_full_backward_hook() -> None:
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        model = Model()
        getattr(model.fc, register)(lambda *_: None)
        refused(model, "fc: has a backward hook", "Remove it")


def test_parameter_hooks() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = Model()
        getattr(model.fc.weight, register)(lambda *_: None)
        refused(model, "fc.weight: has a gradient hook", "between step() and the optimizer")


def test_tensor_hook_in_forward() -> None:
    def between(out):
        out.register_hook(lambda g: g * 0)
        return out

    refused(Model(between), "Model (", HERE, "gradient hook on a tensor")


def test_sparse_embedding() -> None:
    refused(
        nn.Sequential(nn.Embedding(5, 4, sparse=True)), "0: has sparse=True", args=(torch.zeros(6, dtype=torch.long),)
    )
    table = torch.randn(4, 4)

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(table)

        def forward(self, ids):
            return F.embedding(ids, self.table, sparse=True).sum()

    refused(Lookup(), "Lookup (", HERE, "sparse=False", args=(torch.zeros(6, dtype=torch.long),))


def test_sync_batch_norm_of_some_ranks() -> None:
    norm = nn.SyncBatchNorm(4)
    norm.process_group = object()
    refused(Model(inner=norm), "inner: is a SyncBatchNorm of a group of ranks", "Leave out process_group")


def test_autocast_around() -> None:
    with torch.autocast("cpu"):
        refused(Model(), "autocast: is on around capture")


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_wrapped_models() -> None:
    refused(torch.compile(Model()), "OptimizedModule: is wrapped by torch.compile", "plain model")
    refused(nn.DataParallel(Model()), "is wrapped by DataParallel")
    refused(torch.jit.trace(nn.Linear(4, 4), X), "is wrapped by TorchScript")
    model = Model()
    model.fc.compile()
    refused(model, "fc: was compiled by .compile()")


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_distributed_models(one_rank) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_module

    refused(nn.parallel.DistributedDataParallel(Model()), "is wrapped by DistributedDataParallel")
    refused(fully_shard(Model(), mesh=one_rank), "is wrapped by FSDP2")
    refused(distribute_module(Model(), one_rank), "fc.weight: is a DTensor")


def test_lazy_module() -> None:
    refused(Model(inner=nn.LazyLinear(4)), "inner.weight: is not initialised yet", "forward pass first")


def test_data_dependent_branch() -> None:
    def between(out):
        return out * 2 if out.mean() > 0 else out

    message = refused(Model(between), HERE, "depends on the values of tensors", "torch.where", args=VALUELESS)
    line = int(message.partition(HERE + ":")[2].partition(")")[0])
    assert Path(__file__).read_text().splitlines()[line - 1].strip().startswith("return out * 2 if")


def test_data_dependent_shape_and_number() -> None:
    refused(Model(lambda out: out[out > 0]), HERE, "depends on the values of tensors", args=VALUELESS)
    refused(Model(lambda out: out * out.max().item()), HERE, "depends on the values of tensors", args=VALUELESS)
    refused(Model(lambda out: out * out.tolist()[0][0]), HERE, "depends on the values of tensors", args=VALUELESS)


@pytest.mark.parametrize(
    "between",
    [
        nn.Dropout(0.5),
        lambda out: out + torch.rand(4),
        lambda out: out[:, torch.randperm(4)],
        lambda out: out + torch.empty_like(out).normal_(),
    ],
)
def test_random_ops_are_compared_with_eager_from_one_seed(between) -> None:
    model, state = Model(between), torch.get_rng_state()
    assert capture(model, (X,)).checked == "equal"
    assert torch.equal(torch.get_rng_state(), state)


def test_random_ops_that_do_nothing() -> None:
    model = Model(inner=nn.Sequential(nn.Dropout(0.0), nn.RReLU())).eval()
    assert capture(model, (X,)).checked == "equal"
    assert capture(Model(inner=nn.Dropout(0.0)), (X,)).checked == "equal"

    def unused(out):
        torch.rand(3)
        return out

    assert capture(Model(unused), (X,)).checked == "equal"


def test_nothing_to_train() -> None:
    refused(Model().requires_grad_(False), "loss depends on no parameter that requires a gradient", "eval()")
    refused(Model(torch.detach), "loss depends on no parameter")


def test_no_loss() -> None:
    refused(nn.Linear(4, 4), "Linear: returns no loss (a Tensor without .loss)", "loss=")
    refused(nn.Linear(4, 4), "loss: is torch.float32 of shape (6, 4)", loss=lambda out: out)
    refused(nn.Linear(4, 4), "loss: is float (", loss=lambda out: 1.0)
    refused(Model(), "loss: is torch.int64 of shape ()", loss=lambda out: out.long())


def test_in_a_handler_of_another_refusal_it_is_its_own() -> None:
    try:
        capture(nn.Linear(4, 4), (torch.randn(8, 4),))
    except AutoparError as error:
        assert "returns no loss" in str(error)
        with pytest.raises(AutoparError, match="mat1 and mat2"):
            capture(nn.Linear(4, 4), (torch.randn(8, 3),), loss=torch.mean)
    else:
        pytest.fail("a linear layer has no loss")


def test_a_loss_with_parameters() -> None:
    refused(
        nn.Linear(4, 4), "loss: has parameters that require a gradient", loss=nn.Sequential(nn.Linear(4, 1), Model())
    )


def test_inputs_that_the_model_rejects() -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x, labels):
            return F.cross_entropy(self.fc(x), labels)

    refused(
        Classes(),
        "Classes (",
        HERE,
        "fails on two rows of the example inputs (IndexError",
        args=(X, torch.full((6,), 3)),
    )


def test_complex_parameter() -> None:
    model = Model()
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    refused(model, "phase: is complex")


def test_gradients_outside_parameters() -> None:
    model = Model()
    model.register_buffer("scale", torch.ones(4, requires_grad=True))
    refused(model, "scale: is a buffer that requires a gradient")

    class Attribute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.scale = nn.Linear(4, 4), torch.ones(4, requires_grad=True)

        def forward(self, x):
            return (self.fc(x) * self.scale).mean()

    refused(Attribute(), "scale", "nn.Parameter")


def test_spread_over_devices() -> None:
    model = Model()
    model.fc.bias = nn.Parameter(torch.zeros(4, device="meta"))
    refused(model, "spread over devices cpu, meta")


def test_gradients_switched_on_or_written_under_no_grad() -> None:
    def switched_on(out):
        with torch.no_grad():
            out = out * 2
            with torch.enable_grad():
                return out * 3

    def written(out):
        out = out * 1.0
        with torch.no_grad():
            out.mul_(2)
        return out

    refused(Model(written), HERE, "changes in place, under no_grad")
    refused(Model(switched_on), "no_grad")


def test_inference_mode() -> None:
    def between(out):
        with torch.inference_mode():
            target = out * 2
        return out + target

    refused(Model(between), "Model (", HERE, "inference_mode", "no_grad")


def test_vmap_and_sparse() -> None:
    refused(Model(torch.func.vmap(torch.sin)), "Model (", HERE, "torch.vmap", "only plain ops")
    refused(Model(lambda out: out.to_sparse().to_dense()), "Model (", HERE, "sparse")


def test_gradients_inside_forward() -> None:
    def penalty(out):
        x = out.detach().requires_grad_()
        (grad,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        return out + grad

    refused(Model(penalty), "Model (", HERE, "takes a gradient inside forward")


def test_tensors_kept_outside_of_the_model() -> None:
    @functools.cache
    def table(n):
        return torch.arange(float(n))

    refused(Model(lambda out: out + table(4)), "Model: reads a tensor without values", "functools.cache")
    table.cache_clear()
    model = Model(lambda out: out + table(4))
    model(X)
    assert capture(model, (X,)).checked == "equal"


def test_control_flow_operator() -> None:
    def between(out):
        return torch.cond(out.sum() > 0, lambda a: a * 2, lambda a: a * 3, (out,))

    refused(Model(between), "cond")


def test_a_model_that_fails_by_itself() -> None:
    refused(
        Model(lambda out: out @ torch.ones(5, 5)), "Model (", HERE, "cannot be captured at batch size 6 (RuntimeError"
    )


def test_other_ops_at_another_batch_size() -> None:
    def between(out):
        return sum(out[i] for i in range(out.shape[0]))

    refused(Model(between), "Model (", HERE, "other ops at batch size 6", "batch_dims")


def test_state_kept_in_python_is_found_by_the_comparison() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.calls = nn.Linear(4, 4), 0

        def forward(self, x):
            self.calls += 1
            return self.fc(x).mean() * self.calls

    refused(Counts(), "a second run of the model: differs from eager")
    with torch.device("meta"):
        model = Counts()
    assert capture(model, (X,)).hints == ("calls: changed by forward; the graph keeps what it computed at capture.",)


def test_tensors_carried_in_python_are_found_by_the_comparison() -> None:
    class Carries(nn.Module):
        def __init__(self, container) -> None:
            super().__init__()
            self.fc, self.seen = nn.Linear(4, 4), container

        def forward(self, x):
            out = self.fc(x)
            before = sum(self.seen.values()) if isinstance(self.seen, dict) else sum(self.seen or ())
            if isinstance(self.seen, dict):
                self.seen["x"] = out.detach().mean()
            elif isinstance(self.seen, list):
                self.seen.append(out.detach().mean())
            else:
                self.seen = [out.detach().mean()]
            return (out + before).pow(2).mean()

    for container in (None, [], {}):
        model = Carries(container)
        refused(model, "a second run of the model: differs from eager")
        assert not model.seen


def test_not_a_module() -> None:
    refused(lambda x: x, "is a function (not a torch.nn.Module)")


@pytest.mark.parametrize("name", ["code", "graph", "recompile"])
def test_names_that_graphs_cannot_hold(name: str) -> None:
    model = Model()
    model.add_module(name, nn.Linear(4, 4))
    refused(model, f"{name}", "torch.fx's own", "Rename it")


# -- the inputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((), {}, "inputs: missing a required argument: 'x'"),
        ((3,), {}, "inputs: hold no tensor"),
        ((torch.tensor(1.0),), {}, "none has a batch dim"),
        ((torch.zeros(0, 4),), {}, "args[0]: has no rows"),
        ((torch.zeros(6, 4, requires_grad=True),), {}, "args[0]: requires a gradient"),
        ((object(),), {}, "args[0]: is a object"),
        ((torch.zeros(6, 4).to_sparse(),), {}, "args[0]: is not a dense tensor"),
        ((X,), {"batch_dims": {"x": 1}}, "batch_dims: 'x' has dim 1"),
        ((X,), {"batch_dims": {"y": 0}}, "batch_dims: 'y' is no tensor input. Inputs are x"),
        ((X,), {"batch_dims": {"x": None}}, "none has a batch dim"),
        ((X,), {"global_batch": 0}, "global_batch: is 0"),
        ((X,), {"global_batch": 2.5}, "global_batch: is 2.5"),
    ],
)
def test_inputs(args, options, message: str) -> None:
    with pytest.raises(AutoparError) as caught:
        capture(Model(), args, **options)
    assert message in str(caught.value)


def test_refusals_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    refused(Model(lambda out: out * 2 if out.mean() > 0 else out), args=VALUELESS)
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""


def test_after_a_refusal_torch_is_as_before() -> None:
    apply, hook = vars(torch.autograd.Function)["apply"], torch.Tensor.register_hook
    refused(Model(lambda out: out.max().item() * Straight.apply(out)), args=VALUELESS)
    assert vars(torch.autograd.Function)["apply"] is apply and torch.Tensor.register_hook is hook
    model = Model()
    captured = capture(model, (X,))
    run_graph(captured.graph, (X,), captured.attributes)["outputs"][0].backward()
    assert model.fc.weight.grad is not None
