"""The guard: a captured graph and the model itself, run once on two rows, must agree in loss, gradients and buffers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx, nn

from autopar.errors import AutoparError
from autopar.evaluate import run_graph
from autopar.export_model import Call, buffer_slots
from autopar.mixed_precision import as_read
from autopar.python_state import python_state_kept
from autopar.traps import refuse_run

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # of the largest value; the ops are the same
COARSE = 3e-2  # half precisions: the order of sums may differ
SEED = 0  # of the random numbers of every run
FLOOR = 1e-3  # of the largest gradient of any parameter: gradients that are zero but for noise
WAY_OUT = "State kept in Python, or a backward of its own, is what capture loses: write it with buffers and plain ops."


def compare_with_eager(
    call: Call, graph: fx.GraphModule, rows: int, attributes: Mapping[str, torch.Tensor], *, twice: bool
) -> None:
    """Raise unless ``graph``, captured at ``rows`` rows, equals the model run on as many rows of the example inputs.

    ``attributes``: the tensors behind the graph's ``get_attr`` nodes. ``twice``: the model must also give the same when
    run again from the same buffers. Leaves buffers, numbers, gradients and the random state as they were. Raises
    AutoparError with the name of the first difference. Every run draws its random numbers from the same start.
    """
    model = call.model
    gpus = sorted({t.device.index for t in attributes.values() if t.is_cuda})
    with warnings.catch_warnings(), torch.random.fork_rng(gpus), torch.enable_grad():
        warnings.simplefilter("ignore")
        eager, again = _eager(call, rows, twice)
        held = {n: t if isinstance(t, nn.Parameter) else t.clone() for n, t in attributes.items()}
        held = as_read(graph, held)
        try:
            torch.manual_seed(SEED)
            outputs = tuple(run_graph(graph, call.signature.example(rows), held)["outputs"])
            captured = _Result(outputs, _gradients(outputs, call.trainable), held)
        except Exception as error:
            what = "fails in the captured graph, unlike in eager"
            raise refuse_run(model, error, what, call.param_dtype) from error
    for got, want in zip(again, eager.outputs):
        _refuse_difference("a second run of the model", got, want, 0.0, exact=not got.is_cuda)
    for i, (got, want) in enumerate(zip(captured.outputs, eager.outputs, strict=True)):
        _refuse_difference("loss" if i == 0 else f"output {i}", got, want, 0.0, computed=call.param_dtype)
    floor = FLOOR * max((_largest(g) for g in eager.gradients.values() if g is not None), default=0.0)
    for name, wanted in eager.gradients.items():
        _refuse_gradient(name, captured.gradients[name], wanted, floor, call.param_dtype)
    for name, buffer in eager.buffers.items():
        if name in held:
            _refuse_difference(f"buffer {name}", held[name], buffer, 0.0, computed=call.param_dtype)


@dataclass(frozen=True)
class _Result:
    """What one run gave: loss and outputs, gradients by FQN, and the buffers as it left them."""

    outputs: tuple[torch.Tensor, ...]
    gradients: dict[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]


def _eager(call: Call, rows: int, twice: bool) -> tuple[_Result, tuple[torch.Tensor, ...]]:
    """The model's own result, and, if ``twice``, the outputs of a second run from the same buffers."""
    try:
        with python_state_kept(call.model):
            with _buffers_kept(call.model):
                torch.manual_seed(SEED)
                outputs, _, _ = call(call.signature.example(rows))
                gradients = _gradients(outputs, call.trainable)
                buffers = {n: b.detach().clone() for n, b in call.model.named_buffers()}
            with _buffers_kept(call.model):
                torch.manual_seed(SEED)
                again = call(call.signature.example(rows))[0] if twice else ()
        return _Result(outputs, gradients, buffers), again
    except AutoparError:
        raise
    except Exception as error:
        raise refuse_run(call.model, error, "fails on two rows of the example inputs", call.param_dtype) from error


def _gradients(outputs: Sequence[torch.Tensor], wanted: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor | None]:
    if not wanted or not outputs or not outputs[0].requires_grad or outputs[0].ndim:
        return dict.fromkeys(wanted)
    held = {name: p.grad for name, p in wanted.items()}
    try:
        for p in wanted.values():
            p.grad = None
        outputs[0].backward()  # type: ignore[no-untyped-call]  # autograd.grad fails under reentrant checkpointing
        return {name: p.grad for name, p in wanted.items()}
    finally:
        for name, p in wanted.items():
            p.grad = held[name]


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put the model's buffers, objects and values, back at the end."""
    slots = [(module, key, tensor, tensor.detach().clone()) for _, module, key, tensor in buffer_slots(model)]
    try:
        yield
    finally:
        for module, key, tensor, saved in slots:
            with torch.no_grad():
                tensor.copy_(saved)
            module._buffers[key] = tensor


def _refuse_gradient(
    name: str, got: torch.Tensor | None, want: torch.Tensor | None, floor: float, param_dtype: torch.dtype | None
) -> None:
    if got is None and want is None:
        return
    if got is None or want is None:
        which = "no gradient" if got is None else "a gradient"
        raise AutoparError(f"{name}: has {which} in the captured graph, unlike in eager. {WAY_OUT}")
    _refuse_difference(f"gradient of {name}", got, want, floor, computed=param_dtype)


def _refuse_difference(
    what: str,
    got: torch.Tensor,
    want: torch.Tensor,
    floor: float,
    *,
    exact: bool = False,
    computed: torch.dtype | None = None,
) -> None:
    """Raise unless equal within the dtype's tolerance times the largest value (at least ``floor``). ``computed``: the
    dtype in which it was, where that is narrower than its own."""
    if got.shape != want.shape or got.dtype != want.dtype:
        a, b = (f"{t.dtype} {tuple(t.shape)}" for t in (got, want))
        raise AutoparError(f"{what}: is {a} in the captured graph, {b} in eager. {WAY_OUT}")
    if torch.equal(got, want):
        return
    wide = torch.complex128 if got.is_complex() else torch.float64
    a64, b64 = got.detach().to(wide), want.detach().to(wide)
    scale = max(_largest(want), floor)
    inexact = (got.is_floating_point() or got.is_complex()) and not exact
    limit = max(TOLERANCE.get(d, COARSE) for d in (got.dtype, computed or got.dtype)) * scale if inexact else 0.0
    if not torch.allclose(a64, b64, rtol=0.0, atol=limit, equal_nan=True):
        worst = float((a64 - b64).abs().nan_to_num(float("inf")).max())
        raise AutoparError(f"{what}: differs from eager by {worst:.1e} (largest value {scale:.1e}). {WAY_OUT}")


def _largest(t: torch.Tensor) -> float:
    return float(t.detach().abs().double().nan_to_num(0, 0, 0).max()) if t.numel() else 0.0
