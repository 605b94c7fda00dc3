"""The composite ops against torch, and what every library op promises: one node, fake shapes, its input untouched."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.runtime import collectives as c
from autopar.runtime import ops
from autopar.runtime.pool import RankPool

IGNORE = -100


@pytest.fixture(scope="module", params=[2, 3], ids=str)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param) as pool:
        yield pool


# Cross entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 2)], ids=str)
def test_cross_entropy_sum_and_count_are_torch_s(shape: tuple[int, ...], weighted: bool, smoothing: float) -> None:
    logits = torch.randn(*shape, 7, requires_grad=True)
    target = torch.randint(7, shape)
    target = torch.where(torch.rand(shape) < 0.3, IGNORE, target)
    weight = torch.rand(7) if weighted else None
    flat = logits.reshape(-1, 7), target.reshape(-1), weight
    wanted = F.cross_entropy(*flat, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    found = ops.cross_entropy_sum(logits, target, weight, IGNORE, smoothing)
    assert torch.equal(found, wanted)
    assert torch.equal(*(torch.autograd.grad(y, logits)[0] for y in (found, wanted)))
    count = ops.cross_entropy_count(target, weight, IGNORE, torch.float32)
    if (target != IGNORE).any():
        mean = F.cross_entropy(*flat, ignore_index=IGNORE, label_smoothing=smoothing)
        torch.testing.assert_close(found / count, mean)
    else:
        assert found == 0 and count == 0


def test_rows_without_a_target_add_nothing() -> None:
    logits, target = torch.full((2, 3), float("inf"), requires_grad=True), torch.full((2,), IGNORE)
    assert ops.cross_entropy_sum(logits, target, None, IGNORE, 0.0) == 0
    assert ops.cross_entropy_count(target, torch.rand(3), IGNORE, torch.float64) == 0


def own_vocabulary(rank: int, logits: Tensor, target: Tensor, smoothing: float, seed: float) -> tuple[Tensor, Tensor]:
    group, n, vocab = dist.group.WORLD, dist.get_world_size(), logits.shape[-1]
    assert group is not None
    start = min(rank * -(-vocab // n), vocab)
    local = logits[..., start : start + -(-vocab // n)].clone().requires_grad_()
    args = (group.group_name, start, IGNORE, smoothing, vocab)
    loss = ops.cross_entropy_sum_sharded(local, target, *args)
    assert ops.cross_entropy_sum_sharded(local.to("meta"), target.to("meta"), *args).shape == ()
    (grad,) = torch.autograd.grad(loss, local, torch.tensor(seed, dtype=loss.dtype))
    return loss.detach(), grad


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("vocab", [6, 7, 1])
def test_cross_entropy_over_a_cut_vocabulary(pool: RankPool, vocab: int, smoothing: float) -> None:
    """Uneven and empty shards, large logits, ignored rows; the loss is the same on every rank and seeded on each."""
    logits = (torch.randn(2, 5, vocab, dtype=torch.float64) * 300).requires_grad_()
    target = torch.randint(vocab, (2, 5))
    target[0, 1] = IGNORE
    wanted = ops.cross_entropy_sum(logits, target, None, IGNORE, smoothing)
    (grad,) = torch.autograd.grad(wanted, logits, torch.tensor(0.5, dtype=torch.float64))
    found = pool.run(own_vocabulary, logits.detach(), target, smoothing, 0.5)
    for loss, _ in found:
        assert torch.equal(loss, found[0][0])
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([g for _, g in found], -1), grad, rtol=1e-12, atol=1e-12)


def test_cross_entropy_over_a_cut_vocabulary_in_bf16(pool: RankPool) -> None:
    logits, target = torch.randn(64, 12).bfloat16().requires_grad_(), torch.randint(12, (64,))
    wanted = ops.cross_entropy_sum(logits.float(), target, None, IGNORE, 0.0)
    (grad,) = torch.autograd.grad(wanted, logits)
    found = pool.run(own_vocabulary, logits.detach(), target, 0.0, 1.0)
    assert found[0][0].dtype is torch.bfloat16 and found[0][1].dtype is torch.bfloat16
    torch.testing.assert_close(found[0][0].float(), wanted.detach(), rtol=0.01, atol=0)
    torch.testing.assert_close(torch.cat([g for _, g in found], -1), grad, rtol=0.01, atol=1e-3)


# Embedding


@pytest.mark.parametrize("padding_idx", [-1, 0, 4, 6])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_shards_of_an_embedding_add_up(n: int, padding_idx: int) -> None:
    weight, indices = torch.randn(7, 3, requires_grad=True), torch.randint(7, (4, 5))
    wanted = F.embedding(indices, weight, padding_idx=None if padding_idx < 0 else padding_idx)
    step, found = -(-7 // n), torch.zeros(())
    for start in range(0, n * step, step):
        found = found + ops.embedding_shard(weight[start : start + step], indices, min(start, 7), padding_idx)
    assert torch.equal(found, wanted)
    grad = torch.randn_like(wanted)
    assert torch.equal(*(torch.autograd.grad(y, weight, grad)[0] for y in (found, wanted)))


# Batch norm


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_norm_is_torch_s_bit_for_bit(shape: tuple[int, ...], affine: bool, dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weight, bias = ((torch.randn(3, dtype=dtype, requires_grad=True)) if affine else None for _ in range(2))
    mean, var = torch.randn(3, dtype=dtype), torch.rand(3, dtype=dtype)
    before, stats = (mean.clone(), var.clone()), (mean.clone(), var.clone())
    wanted = F.batch_norm(x, *stats, weight, bias, training=True, momentum=0.3, eps=1e-3)
    y, *found = ops.batch_norm(x, weight, bias, mean, var, 0.3, 1e-3)
    assert torch.equal(mean, before[0]) and torch.equal(var, before[1])
    assert not any(s.requires_grad for s in found)
    for one, two in zip((y, *found), (wanted, *stats), strict=True):
        assert torch.equal(one, two)
    inputs = [t for t in (x, weight, bias) if t is not None]
    grad = torch.randn_like(y)
    for one, two in zip(torch.autograd.grad(y, inputs, grad), torch.autograd.grad(wanted, inputs, grad), strict=True):
        assert torch.equal(one, two)


# What all ops promise

LOCAL: list[tuple[Any, tuple[Any, ...], tuple[int, ...]]] = [
    (c.shard, ("g", 2, 1, 0, [3, 1], "pad"), (1, 3)),
    (c.pad, ("g", 2, 1, 0, [5, 4]), (9, 3)),
    (c.keep, (0, "none"), (4, 3)),
    (c.keep, (1, "keep"), (4, 3)),
    (c.invariant, (1,), (4, 3)),
    (c.time_shard, (1, [2, 6], 0), (3, 3)),
    (c.time_pad, (1, [2, 2], 0), (8, 3)),
    (c.time_keep, (0,), (4, 3)),
]


@pytest.mark.parametrize(("op", "literals", "shape"), LOCAL, ids=lambda v: getattr(v, "__name__", None))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_ops_without_communication(
    op: Any, literals: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randint(2, (3, 4)).to(dtype).T  # not contiguous
    before = x.clone()
    y = op(x, *literals)
    assert y.shape == shape == op(x.to("meta"), *literals).shape
    assert y.dtype is dtype and y.is_contiguous()
    y.zero_()
    assert torch.equal(x, before)
    if not dtype.is_floating_point:
        return
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(op(leaf, *literals).sum(), leaf)  # an expanded gradient arrives
    assert grad.shape == x.shape and grad.is_contiguous() and grad.dtype is dtype


def test_zeros_are_written() -> None:
    """0 times infinity would be nan."""
    x = torch.full((2,), float("inf"), requires_grad=True)
    for op, literals in ((c.keep, (1, "keep")), (c.invariant, (1,)), (c.time_keep, (1,))):
        y = op(x, *literals)
        (grad,) = torch.autograd.grad(y, x, torch.full((2,), float("inf")))
        assert torch.equal(grad, torch.zeros(2))
        assert torch.equal(y, torch.zeros(2)) or op is c.invariant


@pytest.mark.parametrize(("rows", "dim"), [([2, 2, 2], 0), ([3, 2, 1], 0), ([4, 2], 1)])
def test_microbatches_over_time(rows: list[int], dim: int) -> None:
    """R>S: the pieces are the whole and gradients add up to it. S>P, R>P: the addends sum to the whole."""
    x = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    every = range(len(rows))
    pieces = [c.time_shard(x, m, rows, dim) for m in every]
    assert torch.equal(torch.cat(pieces, dim), x)
    assert [p.shape[dim] for p in pieces] == [r * x.shape[dim] // sum(rows) for r in rows]
    grad = torch.randn_like(x)
    grads = [torch.autograd.grad(c.time_shard(x, m, rows, dim), x, c.time_shard(grad, m, rows, dim))[0] for m in every]
    assert torch.equal(sum(grads), grad)
    assert torch.equal(sum(c.time_pad(p, m, rows, dim) for m, p in enumerate(pieces)), x)
    assert torch.equal(sum(c.time_keep(x, m) for m in every), x)
    leaf = pieces[1].detach().requires_grad_()
    (back,) = torch.autograd.grad(c.time_pad(leaf, 1, rows, dim), leaf, grad)
    assert torch.equal(back, c.time_shard(grad, 1, rows, dim))


def test_ops_stay_one_node() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, target: Tensor) -> Any:
            x = c.wait_all_gather(c.start_all_gather(x, "g", 2, 0, 0, [4], "slice"), 2, 0, 0, [4])
            x, *_ = ops.batch_norm(x, None, None, x[0], x[0], 0.1, 1e-5), 0
            return ops.cross_entropy_sum(x[0], target, None, IGNORE, 0.0)

    names = [str(n.target) for n in fx.symbolic_trace(Model()).graph.nodes if "autopar" in str(n.target)]
    wanted = ("start_all_gather", "wait_all_gather", "batch_norm", "cross_entropy_sum")
    assert names == [f"autopar.{name}.default" for name in wanted]


def test_an_error_names_the_group() -> None:
    with pytest.raises(RuntimeError, match=r"all_reduce over group 'nowhere' \(not known in this process\)"):
        c.start_all_reduce(torch.ones(2), "nowhere", "none")


def wait_in_vain(rank: int) -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 1:
        time.sleep(2)
        return ""
    raw = c.start_all_gather(torch.ones(2), group.group_name, 2, 0, 0, [4], "slice")
    with pytest.raises(RuntimeError) as caught:
        c.wait_all_gather(raw, 2, 0, 0, [4])
    return str(caught.value)


def test_an_error_while_waiting_names_the_group() -> None:
    with RankPool(2) as pool:
        text, _ = pool.run(wait_in_vain)
    assert re.match(r"waiting for group '\w+' of ranks \[0, 1\]: .*[Tt]imed out", text, re.DOTALL)


def gather_any(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    group, n = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    name, x = group.group_name, torch.tensor([[rank, rank + 1]]).to(dtype).expand(2, 2)
    whole = c.wait_all_gather(c.start_all_gather(x, name, n, rank, 1, [2 * n], "slice"), n, rank, 1, [2 * n])
    cut = c.wait_all_to_all(c.start_all_to_all(x, name, n, rank, 1, [2 * n], 0, [2]), n, rank, 1, [2 * n], 0, [2])
    assert whole.dtype is dtype and cut.dtype is dtype and whole.is_contiguous() and cut.is_contiguous()
    assert torch.equal(cut, c.shard(whole, name, n, rank, 0, [2], "pad"))
    if dtype is not torch.bool:
        total = c.wait_all_reduce(c.start_all_reduce(x, name, "none"))
        assert torch.equal(total, torch.stack(whole.split(2, 1)).sum(0).to(dtype))
    return whole, cut


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.bfloat16, torch.float16], ids=str)
def test_collectives_of_any_dtype(pool: RankPool, dtype: torch.dtype) -> None:
    n = pool.world_size
    wanted = torch.tensor([[i for rank in range(n) for i in (rank, rank + 1)]] * 2).to(dtype)
    assert all(torch.equal(whole, wanted) for whole, _ in pool.run(gather_any, dtype))
