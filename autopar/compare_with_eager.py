"""The guard: a captured graph and the model itself, run once on two rows, must agree in loss, gradients and buffers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import fx, nn

from autopar.errors import AutoparError
from autopar.evaluate import run_graph

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # relative to the largest of the tensor; the ops are the same
COARSE = 3e-2  # half precisions: order of sums may differ


def compare_with_eager(
    model: nn.Module,
    eager: Callable[[], Sequence[torch.Tensor]],
    graph: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    attributes: Mapping[str, torch.Tensor],
) -> None:
    """Raise unless ``graph`` on ``inputs`` equals ``eager()``. Leaves buffers, gradients and random state as they were."""
    wanted = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad(), torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _buffers_kept(model) as buffers:
            expected = eager()
            expected_grads = _gradients(expected, wanted)
            expected_buffers = {n: b.detach().clone() for n, b in buffers().items()}
        held = {n: t if isinstance(t, nn.Parameter) else t.clone() for n, t in attributes.items()}
        outputs = run_graph(graph, inputs, held)["outputs"]
        grads = _gradients(outputs, wanted)
    floor = (
        max((float(g.abs().max()) for g in expected_grads.values() if g is not None and g.numel()), default=0.0) * 1e-3
    )
    for i, (got, want) in enumerate(zip(outputs, expected, strict=True)):
        _refuse_difference("loss" if i == 0 else f"output {i}", got, want, 0.0)
    for name, want_grad in expected_grads.items():
        got_grad = grads[name]
        if (got_grad is None) != (want_grad is None):
            which = "no gradient" if got_grad is None else "a gradient"
            raise AutoparError(f"{name}: has {which} in the captured graph, unlike in eager. {_WAY_OUT}")
        if got_grad is not None and want_grad is not None:
            _refuse_difference(f"gradient of {name}", got_grad, want_grad, floor)
    for name, want in expected_buffers.items():
        _refuse_difference(f"buffer {name}", held[name], want, 0.0)


_WAY_OUT = "Report the model; state kept in Python or a backward of its own is what capture loses."


def _gradients(outputs: Sequence[torch.Tensor], wanted: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor | None]:
    if not wanted or not outputs or not outputs[0].requires_grad or outputs[0].ndim:
        return dict.fromkeys(wanted)
    found = torch.autograd.grad(outputs[0], list(wanted.values()), allow_unused=True)
    return dict(zip(wanted, found, strict=True))


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[Callable[[], dict[str, torch.Tensor]]]:
    """Yields a view of the buffers as the model has them now; puts objects and values back at the end."""
    slots = [(m, n, b, b.detach().clone()) for m in model.modules() for n, b in m._buffers.items() if b is not None]
    try:
        yield lambda: dict(model.named_buffers())
    finally:
        for module, name, tensor, saved in slots:
            with torch.no_grad():
                tensor.copy_(saved)
            module._buffers[name] = tensor


def _refuse_difference(what: str, got: torch.Tensor, want: torch.Tensor, floor: float) -> None:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AutoparError(
            f"{what}: is {got.dtype} {tuple(got.shape)} captured, {want.dtype} {tuple(want.shape)} in eager. {_WAY_OUT}"
        )
    if not got.numel() or torch.equal(got, want):
        return
    wide = torch.complex128 if got.is_complex() else torch.float64
    a, b = got.detach().to(wide), want.detach().to(wide)
    scale = max(float(b.abs().nan_to_num(0, 0, 0).max()), floor)
    limit = TOLERANCE.get(got.dtype, COARSE) if got.is_floating_point() or got.is_complex() else 0.0
    if not torch.allclose(a, b, rtol=0.0, atol=limit * scale, equal_nan=True):
        worst = float((a - b).abs().nan_to_num(float("inf")).max())
        raise AutoparError(
            f"{what}: differs from eager by {worst:.1e} (largest value {scale:.1e}) in the captured graph. {_WAY_OUT}"
        )
