"""Seconds of single kernels on this rank's device: matmuls by shape, attention by length, others by bytes."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.dry_run import Watch
from autopar.profiling.clock import seconds
from autopar.profiling.sizes import Sizes

aten = torch.ops.aten
WIDTH = 512  # of the last dim of what is normalised, looked up and reduced
COLD, COPIES = 1 << 25, 8  # bytes of equal operands used in turn, so that they come from memory as in training
Call = Callable[[], object]


def matmuls(device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> list[float]:
    """FLOP/s of ``[m, k] x [k, n]`` for all of ``sizes``, k fastest: the mean seconds of the three products of a
    linear's training (forward, and the gradients of its input and weight)."""
    found = []
    for m in sizes:
        for n in sizes:
            for k in sizes:
                x, w, g = (torch.randn(s, device=device).to(dtype) for s in ((m, k), (n, k), (m, n)))
                took = [seconds(partial(torch.mm, *pair), device) for pair in ((x, w.t()), (g, w), (g.t(), x))]
                found.append(2.0 * m * n * k / (sum(took) / 3))
    return found


def attentions(
    device: torch.device, dtype: torch.dtype, sizes: Sizes
) -> Iterator[tuple[int, bool, bool, list[tuple[float, float]]]]:
    """(head, causal, backward, points of [length, FLOP/s]) of scaled dot product attention."""
    for head in sizes.heads:
        for causal in (True, False):
            forward, backward = [], []
            for length in sizes.lengths:
                batch = max(1, 2**18 // (length * head)) if device.type == "cpu" else 8
                q, k, v = (torch.randn(batch, 1, length, head, device=device).to(dtype) for _ in range(3))
                took = _attention(q, k, v, causal, device)
                flops = (2.0 if causal else 4.0) * batch * length * length * head
                forward.append((float(length), flops / took[0]))
                backward.append((float(length), 2.5 * flops / took[1]))
            yield head, causal, False, forward
            yield head, causal, True, backward


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, device: torch.device) -> tuple[float, float]:
    """Seconds forward and backward."""
    for t in (q, k, v):
        t.requires_grad_()
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(q, k, v, is_causal=causal)
    gradient = torch.ones_like(out)
    back = seconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), device)
    with torch.no_grad():
        return seconds(lambda: attend(q, k, v, is_causal=causal), device), back


def by_bytes(device: torch.device, sizes: Sequence[int]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """(op, points of [bytes read and written, seconds]) of memory-bound kernels, which write into new memory as they do
    in training."""
    for op, make in KERNELS.items():
        points = []
        for nbytes in sizes:
            rows = max(2, nbytes // 4 // WIDTH)
            sets = [make(rows, device) for _ in range(max(1, min(COPIES, COLD // nbytes)))]
            with torch.no_grad():
                points.append((float(_moved(op, sets[0])), seconds(_in_turn(sets), device)))
        yield op, points


def _in_turn(calls: Sequence[Call]) -> Call:
    """The calls one after another; the results of the last round stay, as autograd keeps them."""
    turn, kept = itertools.cycle(calls), deque[object](maxlen=len(calls))
    return lambda: kept.append(next(turn)())


def _moved(op: str, call: Call) -> int:
    with Watch() as watch:
        call()
    found = [x for x in watch.launches if x.op == op]
    assert len(found) == 1, f"{op}: {[x.op for x in watch.launches]}"
    return int(found[0].nbytes)


def launch(device: torch.device) -> float:
    """Seconds of a kernel that has nothing to do, forward and backward with autograd."""
    x, ops = torch.ones(8, device=device, requires_grad=True), 64

    def call() -> None:
        y = x
        for _ in range(ops):
            y = y * 1.5
        torch.autograd.backward(y, torch.ones_like(y))

    return seconds(call, device) / (2 * ops)


def _unary(function: Any) -> Callable[[int, torch.device], Call]:
    def make(rows: int, device: torch.device) -> Call:
        x = torch.rand(rows, WIDTH, device=device)
        return lambda: function(x)

    return make


def _binary(function: Any) -> Callable[[int, torch.device], Call]:
    def make(rows: int, device: torch.device) -> Call:
        x, y = torch.rand(rows, WIDTH, device=device), torch.rand(rows, WIDTH, device=device)
        return lambda: function(x, y)

    return make


def _norm(rows: int, device: torch.device) -> Call:
    x, w = torch.rand(rows, WIDTH, device=device), torch.ones(WIDTH, device=device)
    return lambda: aten.native_layer_norm.default(x, (WIDTH,), w, w, 1e-5)


def _norm_backward(rows: int, device: torch.device) -> Call:
    x, w = torch.rand(rows, WIDTH, device=device), torch.ones(WIDTH, device=device)
    _, mean, rstd = aten.native_layer_norm.default(x, (WIDTH,), w, w, 1e-5)
    return lambda: aten.native_layer_norm_backward.default(x, x, (WIDTH,), mean, rstd, w, w, [True, True, True])


def _embedding(rows: int, device: torch.device) -> Call:
    table, ids = torch.rand(8192, WIDTH, device=device), torch.randint(8192, (rows,), device=device)
    return lambda: aten.embedding.default(table, ids)


def _embedding_backward(rows: int, device: torch.device) -> Call:
    gradient, ids = torch.rand(512, WIDTH, device=device), torch.randint(rows, (512,), device=device)
    return lambda: aten.embedding_dense_backward.default(gradient, ids, rows, -1, False)


def _loss(rows: int, device: torch.device) -> Call:
    x, y = torch.rand(rows, WIDTH, device=device), torch.randint(WIDTH, (rows,), device=device)
    return lambda: aten.nll_loss_forward.default(x, y, None, 2, -100)


def _loss_backward(rows: int, device: torch.device) -> Call:
    x, y = torch.rand(rows, WIDTH, device=device), torch.randint(WIDTH, (rows,), device=device)
    one, total = torch.ones((), device=device), torch.tensor(float(rows), device=device)
    return lambda: aten.nll_loss_backward.default(one, x, y, None, 2, -100, total)


def _adamw(rows: int, device: torch.device) -> Call:
    parameter, gradient, first, second = ([torch.rand(rows, WIDTH, device=device)] for _ in range(4))
    step = [torch.ones((), device=device)]
    return lambda: torch._fused_adamw_(
        parameter,
        gradient,
        first,
        second,
        [],
        step,
        lr=1e-3,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.01,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


KERNELS: dict[str, Callable[[int, torch.device], Call]] = {
    "aten.clone": _unary(lambda x: aten.clone.default(x)),
    "aten.add": _binary(lambda x, y: aten.add.Tensor(x, y)),
    "aten.add_": _binary(lambda x, y: aten.add_.Tensor(x, y)),
    "aten.mul": _binary(lambda x, y: aten.mul.Tensor(x, y)),
    "aten.neg": _unary(lambda x: aten.neg.default(x)),
    "aten.pow": _unary(lambda x: aten.pow.Tensor_Scalar(x, 2)),
    "aten.cat": _binary(lambda x, y: aten.cat.default([x, y], -1)),
    "aten.copy_": _binary(lambda x, y: aten.copy_.default(x, y)),
    "aten.zeros_like": _unary(lambda x: aten.zeros_like.default(x)),
    "aten.sum": _unary(lambda x: aten.sum.dim_IntList(x, [0], True)),
    "aten.mean": _unary(lambda x: aten.mean.dim(x, [-1], True)),
    "aten.gelu": _unary(lambda x: aten.gelu.default(x, approximate="tanh")),
    "aten.gelu_backward": _binary(lambda x, y: aten.gelu_backward.default(x, y, approximate="tanh")),
    "aten.silu": _unary(lambda x: aten.silu.default(x)),
    "aten.silu_backward": _binary(lambda x, y: aten.silu_backward.default(x, y)),
    "aten.relu": _unary(lambda x: aten.relu.default(x)),
    "aten.threshold_backward": _binary(lambda x, y: aten.threshold_backward.default(x, y, 0)),
    "aten.exp": _unary(lambda x: aten.exp.default(x)),
    "aten._log_softmax": _unary(lambda x: aten._log_softmax.default(x, -1, False)),
    "aten._log_softmax_backward_data": _binary(
        lambda x, y: aten._log_softmax_backward_data.default(x, y, -1, torch.float32)
    ),
    "aten.native_layer_norm": _norm,
    "aten.native_layer_norm_backward": _norm_backward,
    "aten.nll_loss_forward": _loss,
    "aten.nll_loss_backward": _loss_backward,
    "aten.embedding": _embedding,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten._fused_adamw_": _adamw,
}  # fmt: skip
