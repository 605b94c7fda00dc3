"""Every rule, with no code per rule: sampled calls are run whole and split under each strategy, value and gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.passes.rules import RULES, pointwise

aten = torch.ops.aten
library = torch.ops.autopar

Check = Callable[..., list[str]]
Sample = tuple[Any, ...]


def x(*shape: int) -> Tensor:
    return torch.randn(shape)


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def m(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.5


def sample(target: Any, *args: Any, **kwargs: Any) -> Any:
    return pytest.param(target, args, kwargs, id=_name(target, args))


def _name(target: Any, args: tuple[Any, ...]) -> str:
    shapes = "x".join(str(tuple(a.shape)) if isinstance(a, Tensor) else str(a) for a in args)
    return f"{target}{shapes}".replace(" ", "").replace("torch.", "")[:90]


torch.manual_seed(1)

PRODUCTS = [
    sample(aten.linear.default, x(6, 2, 12), x(6, 12), x(6)),
    sample(aten.linear.default, x(6, 12), x(6, 12)),
    sample(aten.mm.default, x(6, 12), x(12, 6)),
    sample(aten.bmm.default, x(6, 2, 6), x(6, 6, 4)),
    sample(aten.matmul.default, x(6, 1, 2, 6), x(6, 6, 4)),
    sample(aten.matmul.default, x(6), x(6, 12)),
    sample(aten.matmul.default, x(4, 6), x(6)),
    sample(aten.matmul.default, x(6), x(6)),
    sample(aten.mv.default, x(4, 6), x(6)),
    sample(aten.addmm.default, x(6), x(12, 4), x(4, 6)),
    sample(aten.addmm.default, x(12, 6), x(12, 4), x(4, 6), beta=2, alpha=3),
    sample(aten.addmm.default, x(1, 6), x(12, 6), x(6, 6)),
    sample(aten.baddbmm.default, x(6, 1, 6), x(6, 2, 6), x(6, 6, 6)),
    sample(aten.outer.default, x(6), x(12)),
    sample(aten.einsum.default, "bhi,hio->bho", [x(6, 2, 6), x(2, 6, 4)]),
    sample(aten.einsum.default, "...i,oi->...o", [x(6, 2, 6), x(4, 6)]),
    sample(aten.einsum.default, "bi,bj", [x(6, 2), x(6, 4)]),
    sample(aten.einsum.default, "bi,bj,b->", [x(6, 2), x(1, 4), x(6)]),
    sample(aten.einsum.default, "bii->bi", [x(6, 6, 6)]),
    sample(aten.bilinear.default, x(6, 2, 4), x(6, 2, 6), x(12, 4, 6), x(12)),
]

SDPA = aten.scaled_dot_product_attention.default
ATTENTION = [
    sample(SDPA, x(6, 6, 4, 8), x(6, 6, 6, 8), x(6, 6, 6, 6)),
    sample(SDPA, x(2, 6, 6, 8), x(2, 6, 6, 8), x(2, 6, 6, 8), None, 0.0, True),
    sample(SDPA, x(6, 12, 6, 8), x(6, 6, 6, 8), x(6, 6, 6, 8), None, 0.0, True, enable_gqa=True),
    sample(SDPA, x(2, 12, 6, 8), x(2, 2, 6, 8), x(2, 2, 6, 8), enable_gqa=True),
    sample(SDPA, x(2, 12, 6, 8), x(2, 1, 6, 8), x(2, 1, 6, 8), x(1, 12, 6, 6), enable_gqa=True),
    sample(SDPA, x(2, 6, 6, 8), x(2, 3, 6, 8), x(2, 3, 6, 8), enable_gqa=True, scale=0.3),
    sample(SDPA, x(6, 2, 6, 8), x(6, 2, 4, 8), x(6, 2, 4, 8), x(6, 1, 1, 4)),
    sample(SDPA, x(6, 2, 6, 8), x(6, 2, 4, 8), x(6, 2, 4, 8), m(1, 2, 6, 4) | (torch.arange(4) == 0)),
    sample(SDPA, x(6, 2, 6, 8), x(6, 2, 4, 8), x(6, 2, 4, 8), x(6, 4)),
    sample(SDPA, x(6, 4, 8), x(6, 6, 8), x(6, 6, 8)),
]

POSITIONS = [
    sample(aten.arange.default, 12),
    sample(aten.arange.start_step, 5, 29, 2, dtype=torch.float64),
    sample(aten.eye.default, 6),
    sample(aten.eye.m, 6, 12, dtype=torch.bool),
]

LOOKUPS = [
    sample(aten.embedding.default, x(12, 6), i(12, 6, 2)),
    sample(aten.embedding.default, x(12, 6), i(12, 6, 2), 7),
    sample(aten.embedding.default, x(6, 4), i(6, 6), 0),
]

LOSSES = [
    sample(library.cross_entropy_sum.default, x(6, 2, 12), i(12, 6, 2), None, 3, 0.0),
    sample(library.cross_entropy_sum.default, x(6, 2, 5), i(5, 6, 2), torch.rand(5), 3, 0.1),
    sample(library.cross_entropy_sum.default, x(6, 12), i(12, 6), None, -100, 0.1),
    sample(library.cross_entropy_count.default, i(5, 6, 2), None, 3, torch.float64),
    sample(library.cross_entropy_count.default, i(5, 6, 2), torch.rand(5), 3, torch.float64),
    sample(aten.cross_entropy_loss.default, x(6, 5, 4), i(5, 6, 4), None, 2, 3, 0.1),
    sample(aten.cross_entropy_loss.default, x(6, 5), torch.rand(6, 5), None, 0),
    sample(aten.nll_loss_nd.default, x(6, 5), i(5, 6), torch.rand(5), 2, 3),
    sample(aten.mse_loss.default, x(6, 2), x(6, 2), 2),
    sample(aten.l1_loss.default, x(6, 2), x(6, 2), 0),
    sample(aten.smooth_l1_loss.default, x(6, 2), x(6, 2), 2, 0.7),
    sample(aten.huber_loss.default, x(6, 2), x(6, 2), 2, 0.7),
    sample(aten.binary_cross_entropy_with_logits.default, x(6, 2), torch.rand(6, 2), None, None, 2),
    sample(aten.kl_div.default, x(6, 2), torch.rand(6, 2), 2),
    sample(aten.binary_cross_entropy_with_logits.default, x(6, 2), torch.rand(6, 2), i(3, 2), i(3, 1), 2),
    sample(aten.poisson_nll_loss.default, x(6, 2), torch.rand(6, 2), True, True, 1e-8, 0),
    sample(aten.margin_ranking_loss.default, x(6), x(6), x(6).sign(), 0.5, 2),
    sample(aten.hinge_embedding_loss.default, x(6, 2), x(6, 2).sign(), 1.0, 0),
    sample(aten.cosine_embedding_loss.default, x(6, 4), x(6, 4), x(6).sign(), 0.1, 0),
    sample(aten.triplet_margin_loss.default, x(6, 4), x(6, 4), x(6, 4), 1.0, 2.0, 1e-6, False, 2),
    sample(aten.multi_margin_loss.default, x(6, 4), i(4, 6), 1, 1, None, 2),
    sample(aten.cosine_similarity.default, x(6, 2, 4), x(1, 2, 4), 1),
    sample(aten.pairwise_distance.default, x(6, 4), x(4), 2.0, 1e-6, True),
]

NORMS = [
    sample(aten.layer_norm.default, x(6, 2, 8), [8], x(8), x(8), 1e-5),
    sample(aten.layer_norm.default, x(6, 2, 8), [2, 8]),
    sample(aten.rms_norm.default, x(6, 2, 8), [8], x(8), 1e-5),
    sample(aten._fused_rms_norm.default, x(6, 2, 8), [8], x(8), 1e-5),
    sample(aten.native_layer_norm.default, x(6, 2, 8), [8], x(8), x(8), 1e-5),
    sample(aten.group_norm.default, x(6, 12, 3), 6, x(12), x(12)),
    sample(aten.batch_norm.default, x(6, 6, 2), x(6), x(6), x(6), torch.rand(6) + 1, False, 0.1, 1e-5, True),
    sample(aten.instance_norm.default, x(6, 6, 4), x(6), x(6), None, None, True, 0.1, 1e-5, True),
    sample(library.batch_norm.default, x(6, 6, 2, 3), x(6), x(6), x(6), torch.rand(6) + 1, 0.1, 1e-5),
    sample(library.batch_norm.default, x(12, 4), None, None, x(4), torch.rand(4) + 1, 0.1, 1e-5),
]

SAMPLES = [
    sample(aten.grid_sampler.default, x(6, 6, 4, 4), torch.rand(6, 2, 4, 2) * 2 - 1, 0, 0, False),
    sample(aten.affine_grid_generator.default, x(6, 2, 3), [6, 3, 4, 4], False),
    sample(aten.col2im.default, x(6, 24, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
]

CONVOLUTIONS = [
    sample(aten.conv1d.default, x(6, 6, 5), x(12, 6, 3), x(12), [1], [1]),
    sample(aten.conv2d.default, x(6, 6, 4, 4), x(6, 6, 3, 3), None, [2, 2]),
    sample(aten.conv2d.default, x(2, 6, 4, 4), x(12, 1, 3, 3), x(12), [1, 1], [1, 1], [1, 1], 6),
    sample(aten.conv2d.default, x(2, 12, 4, 4), x(12, 6, 3, 3), x(12), [1, 1], [1, 1], [1, 1], 2),
    sample(aten.conv2d.padding, x(6, 6, 4, 4), x(6, 6, 3, 3), x(6), [1, 1], "same"),
    sample(aten.conv2d.default, x(6, 4, 4), x(6, 6, 3, 3), x(6)),
    sample(aten.conv3d.default, x(2, 6, 3, 3, 3), x(6, 6, 2, 2, 2), x(6)),
    sample(aten.conv_transpose2d.input, x(6, 6, 3, 3), x(6, 6, 2, 2), x(6), [2, 2]),
    sample(aten.conv_transpose2d.input, x(2, 12, 3, 3), x(12, 6, 2, 2), x(12), [1, 1], [0, 0], [0, 0], 2),
    sample(aten.convolution.default, x(6, 6, 4), x(6, 6, 3), x(6), [1], [0], [1], False, [0], 1),
]

RECURRENT = [
    sample(aten.lstm_cell.default, x(6, 3), [x(6, 4), x(6, 4)], x(16, 3), x(16, 4), x(16), x(16)),
    sample(aten.gru_cell.default, x(6, 3), x(6, 4), x(12, 3), x(12, 4)),
    sample(
        aten.lstm.input, x(3, 6, 4), [x(1, 6, 5), x(1, 6, 5)], [x(20, 4), x(20, 5)], False, 1, 0.0, True, False, False
    ),
    sample(aten.gru.input, x(6, 3, 4), x(1, 6, 5), [x(15, 4), x(15, 5)], False, 1, 0.0, True, False, True),
]

POOLS = [
    sample(aten.max_pool2d.default, x(6, 2, 4, 4), [2, 2]),
    sample(aten.max_pool2d_with_indices.default, x(6, 2, 4, 4), [2, 2]),
    sample(aten.avg_pool2d.default, x(6, 2, 4, 4), [2, 2]),
    sample(aten.adaptive_avg_pool2d.default, x(6, 2, 4, 4), [1, 1]),
    sample(aten.adaptive_avg_pool1d.default, x(6, 2, 4), [2]),
    sample(aten.upsample_bilinear2d.vec, x(6, 2, 4, 4), None, False, [2.0, 2.0]),
    sample(aten.upsample_nearest2d.vec, x(6, 2, 4, 4), [8, 8], None),
]

VIEWS = [
    sample(aten.reshape.default, x(6, 4, 12), [24, 12]),
    sample(aten.reshape.default, x(24, 6), [6, 4, 6]),
    sample(aten.reshape.default, x(6, 4, 36), [6, 4, 3, 12]),
    sample(aten.reshape.default, x(6, 2, 36), [6, 2, 2, 6, 3]),
    sample(aten.reshape.default, x(6, 1, 12), [1, 72]),
    sample(aten.reshape.default, x(12, 10), [8, 15]),
    sample(aten.reshape.default, x(6, 4, 6), [-1]),
    sample(aten.view.default, x(6, 4), [2, -1]),
    sample(aten.flatten.using_ints, x(6, 4, 2), 1),
    sample(aten.unflatten.int, x(6, 12), -1, [-1, 2]),
    sample(aten.permute.default, x(6, 4, 2), [2, 0, -2]),
    sample(aten.transpose.int, x(6, 4, 2), -1, 0),
    sample(aten.t.default, x(6, 4)),
    sample(aten.numpy_T.default, x(6, 4)),
    sample(aten.mT.default, x(6, 4, 2)),
    sample(aten.movedim.int, x(6, 4, 2), 0, -1),
    sample(aten.unsqueeze.default, x(6, 4), -1),
    sample(aten.squeeze.dim, x(6, 1, 4), 1),
    sample(aten.squeeze.dim, x(6, 2, 4), -1),
    sample(aten.squeeze.dims, x(6, 1, 2, 1), [1, 2, -1]),
    sample(aten.expand.default, x(6, 1), [6, -1, 6]),
    sample(aten.expand.default, x(1, 4), [12, -1]),
    sample(aten.expand.default, x(6, 1, 2), [-1, 6, -1]),
    sample(aten.expand_as.default, x(6, 1), x(6, 4)),
    sample(aten.repeat.default, x(6, 2), [2, 6, 3]),
    sample(aten.repeat_interleave.self_int, x(6, 2), 3, 0),
    sample(aten.select.int, x(6, 4, 2), 1, -1),
    sample(aten.unbind.int, x(3, 6), 0),
    sample(aten.stack.default, [x(6, 2), x(6, 2)], -1),
    sample(aten.flip.default, x(6, 4), [-1]),
    sample(aten.roll.default, x(6, 4), [1], [1]),
    sample(aten.pad.default, x(6, 4), [1, 2]),
    sample(aten.pad.default, x(6, 4), [1, 2], "constant", 3.0),
    sample(aten.constant_pad_nd.default, x(6, 4, 2), [0, 0, 1, -1]),
    sample(aten.unfold.default, x(6, 4), 1, 2, 1),
    sample(aten.pixel_shuffle.default, x(6, 12, 6, 2), 2),
    sample(aten.pixel_unshuffle.default, x(6, 6, 6, 4), 2),
    sample(aten.im2col.default, x(6, 6, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
    sample(aten.view_as_real.default, torch.randn(6, 2, dtype=torch.complex128)),
    sample(aten.view_as_complex.default, x(6, 2)),
    sample(aten.tril.default, x(6, 4, 4), 1),
    sample(aten.zeros_like.default, x(6, 2)),
    sample(aten.full.default, [6, 2], 3.0, dtype=torch.float64),
    sample(aten.zeros.default, [12], dtype=torch.int64),
    sample(aten.new_zeros.default, x(6, 2), [6, 2]),
    sample(aten.new_ones.default, x(2), [6, 2]),
]

PARTS = [
    sample(aten.split.Tensor, x(6, 36), 12, 1),
    sample(aten.split.Tensor, x(6, 30), 12, 1),
    sample(aten.split_with_sizes.default, x(6, 24), [12, 6, 6], -1),
    sample(aten.chunk.default, x(6, 36), 3, -1),
    sample(aten.cat.default, [x(6, 12), x(6, 6)], 1),
    sample(aten.cat.default, [x(6, 3), x(6, 1)], -1),
    sample(aten.slice.Tensor, x(6, 24), 1, 6, 18),
    sample(aten.slice.Tensor, x(24, 2), 0, 0, 9223372036854775807),
    sample(aten.slice.Tensor, x(24, 2), 0, -12),
    sample(aten.slice.Tensor, x(6, 24), 1, 0, 24, 2),
    sample(aten.narrow.default, x(6, 24), 1, 12, 6),
    sample(aten.slice_scatter.default, x(6, 24), x(6, 12), 1, 6, 18),
    sample(aten.select_scatter.default, x(6, 4), x(6), 1, 2),
    sample(aten.glu.default, x(6, 24)),
]

REDUCTIONS = [
    sample(aten.sum.default, x(6, 2)),
    sample(aten.sum.dim_IntList, x(6, 2, 6), [-1], True),
    sample(aten.sum.dim_IntList, m(6, 2), [0]),
    sample(aten.mean.dim, x(6, 2, 6), [-1]),
    sample(aten.amax.default, x(6, 2), [1]),
    sample(aten.max.dim, x(6, 2), 1),
    sample(aten.var.correction, x(6, 2), [-1], correction=1, keepdim=True),
    sample(aten.linalg_vector_norm.default, x(6, 2), 2, [-1], True),
    sample(aten.logsumexp.default, x(6, 2), [-1]),
    sample(aten.softmax.int, x(6, 2), -1),
    sample(aten.log_softmax.int, x(6, 2), -1),
    sample(aten.cumsum.default, x(6, 2), -1),
    sample(aten.diff.default, x(6, 3), 1, -1, x(6, 1)),
    sample(aten.sort.default, x(6, 4)),
    sample(aten.topk.default, x(6, 4), 2),
    sample(aten.argmax.default, x(6, 4), -1),
    sample(aten.any.dim, m(6, 4), 1),
    sample(aten._fft_c2c.default, torch.randn(6, 4, dtype=torch.complex128), [1], 0, True),
]

INDEXING = [
    sample(aten.index.Tensor, x(6, 4, 2), [None, i(4, 6)]),
    sample(aten.index.Tensor, x(5, 4, 6), [i(5, 6, 1), i(4, 2)]),
    sample(aten.index.Tensor, x(5, 6, 4), [i(5, 6), None, i(4, 6)]),
    sample(aten.index_put.default, x(5, 6), [i(5, 6)], x(6, 6), True),
    sample(aten.index_put.default, x(5, 6), [torch.tensor([0, 2, 4])], x(3, 6)),
    sample(aten.index_select.default, x(6, 4), 1, i(4, 6)),
    sample(aten.index_add.default, x(6, 4), 1, i(4, 6), x(6, 6)),
    sample(aten.gather.default, x(6, 4), 1, i(4, 6, 6)),
    sample(aten.gather.default, x(6, 4, 3), 1, i(4, 6, 6, 2)),
    sample(aten.scatter.value, x(6, 4), 1, i(4, 6, 2), 0),
    sample(aten.scatter.src, x(6, 4), 1, torch.tensor([[0, 2]]).repeat(6, 1), x(6, 2)),
    sample(aten.scatter_add.default, x(6, 4), 1, i(4, 6, 6), x(6, 6)),
    sample(aten.one_hot.default, i(4, 6), 4),
    sample(aten.take_along_dim.default, x(6, 4), i(4, 1, 6), 1),
]

POINTWISE = [
    sample(aten.add.Tensor, x(6, 2), x(2)),
    sample(aten.add.Tensor, x(6, 1), x(1, 6), alpha=2),
    sample(aten.add.Tensor, x(6, 2), 3.0),
    sample(aten.add.Tensor, x(6, 2), x()),
    sample(aten.sub.Tensor, x(6, 2), x(6, 1)),
    sample(aten.rsub.Scalar, x(6, 2), 1.0),
    sample(aten.mul.Tensor, x(6, 2), x(6, 2)),
    sample(aten.mul.Tensor, m(6, 2), x(6, 2)),
    sample(aten.mul.Tensor, x(6, 2), 3.0),
    sample(aten.mul.Tensor, i(5, 6), i(5, 6)),
    sample(aten.div.Tensor, x(6, 2), x(2)),
    sample(aten.div.Tensor_mode, x(6, 2), x(2), rounding_mode="floor"),
    sample(aten.neg.default, x(6)),
    sample(aten.where.self, m(6, 1), x(6, 2), x(2)),
    sample(aten.where.ScalarOther, m(6, 2), x(6, 2), 0.0),
    sample(aten.where.ScalarOther, m(6, 2), x(6, 2), -1.0),
    sample(aten.masked_fill.Scalar, x(6, 2), m(2), 0),
    sample(aten.masked_fill.Scalar, x(6, 2), m(6, 1), -1e9),
    sample(aten.masked_fill.Tensor, x(6, 2), m(6, 1), x()),
    sample(aten.to.dtype, x(6, 2), torch.float64),
    sample(aten.to.dtype, i(5, 6), torch.float64),
    sample(aten.type_as.default, x(6, 2), x(3)),
    sample(aten._to_copy.default, x(6, 2), dtype=torch.complex128),
    sample(aten.clamp.default, x(6, 2), -0.5, 0.5),
    sample(aten.clamp.Tensor, x(6, 2), x(2), None),
    sample(aten.pow.Tensor_Scalar, x(6, 2), 3),
    sample(aten.lerp.Scalar, x(6, 2), x(6, 2), 0.3),
    sample(aten.lerp.Tensor, x(6, 2), x(6, 2), x(2)),
    sample(aten.addcmul.default, x(6, 2), x(6, 2), x(2), value=2),
    sample(aten.addcdiv.default, x(6, 2), x(6, 2), x(2)),
    sample(aten.gelu.default, x(6, 2), approximate="tanh"),
    sample(aten.silu.default, x(6, 2)),
    sample(aten.hardswish.default, x(6, 2)),
    sample(aten.dropout.default, x(6, 2), 0.0, True),
    sample(aten.copy.default, i(5, 6, 2), i(5, 2)),
    sample(aten.fill.Tensor, x(6, 2), x()),
    sample(aten.prelu.default, x(6, 6, 2), x(6)),
    sample(aten.clone.default, x(6, 2)),
    sample(aten.detach.default, x(6, 2)),
    sample(aten.eq.Tensor, i(3, 6, 2), i(3, 2)),
    sample(aten.__and__.Tensor, m(6, 2), m(2)),
    sample(aten.real.default, torch.randn(6, 2, dtype=torch.complex128)),
]

c = torch.randn(6, 4, dtype=torch.complex128)
WEIGHTS = (x(4, 2), x(4, 4), x(4), x(4))

# Overloads that no sample of OpInfo reaches, and what composites are made of.
VARIANTS = [
    sample(aten._adaptive_avg_pool2d.default, x(6, 6, 4, 4), [2, 2]),
    sample(aten._linalg_eigvals.default, x(6, 3, 3)),
    sample(aten._log_softmax.default, x(6, 4), -1, False),
    sample(aten._softmax.default, x(6, 4), -1, False),
    sample(aten._unsafe_index.Tensor, x(5, 6), [i(5, 6)]),
    sample(aten._unsafe_index_put.default, x(5, 6), [i(5, 6)], x(6, 6), True),
    sample(aten._unsafe_view.default, x(6, 4), [24]),
    sample(aten._upsample_bicubic2d_aa.default, x(6, 6, 4, 4), [6, 6], True),
    sample(aten._upsample_bicubic2d_aa.vec, x(6, 6, 4, 4), [6, 6], True, None),
    sample(aten._upsample_nearest_exact1d.default, x(6, 6, 4), [6]),
    sample(aten._upsample_nearest_exact2d.default, x(6, 6, 4, 4), [6, 6]),
    sample(aten._upsample_nearest_exact3d.default, x(6, 6, 2, 2, 2), [3, 3, 3]),
    sample(aten._upsample_nearest_exact3d.vec, x(6, 6, 2, 2, 2), [3, 3, 3], None),
    sample(aten.upsample_bicubic2d.default, x(6, 6, 4, 4), [6, 6], True),
    sample(aten.upsample_bilinear2d.default, x(6, 6, 4, 4), [6, 6], True),
    sample(aten.upsample_linear1d.default, x(6, 6, 4), [6], True),
    sample(aten.upsample_nearest1d.default, x(6, 6, 4), [6]),
    sample(aten.upsample_nearest2d.default, x(6, 6, 4, 4), [6, 6]),
    sample(aten.upsample_nearest3d.default, x(6, 6, 2, 2, 2), [3, 3, 3]),
    sample(aten.upsample_nearest3d.vec, x(6, 6, 2, 2, 2), [3, 3, 3], None),
    sample(aten.upsample_trilinear3d.default, x(6, 6, 2, 2, 2), [3, 3, 3], True),
    sample(aten.max_pool1d.default, x(6, 6, 4), [2]),
    sample(aten.max_pool3d.default, x(6, 6, 2, 2, 2), [2, 2, 2]),
    sample(aten.all.dims, m(6, 4), [1]),
    sample(aten.any.dims, m(6, 4), [1]),
    sample(aten.argsort.stable, x(6, 4), stable=True),
    sample(aten.sort.stable, i(3, 6, 4), stable=True),
    sample(aten.count_nonzero.dim_IntList, i(2, 6, 4), [0]),
    sample(aten.norm.ScalarOpt_dim, x(6, 4), 2, [1]),
    sample(aten.std.dim, x(6, 4), [1]),
    sample(aten.var.dim, x(6, 4), [1]),
    sample(aten.var_mean.dim, x(6, 4), [1]),
    sample(aten.concat.default, [x(6, 12), x(6, 6)], 1),
    sample(aten.ger.default, x(6), x(12)),
    sample(aten.linalg_matrix_exp.default, x(6, 3, 3)),
    sample(aten.moveaxis.int, x(6, 4, 2), 0, -1),
    sample(aten.swapaxes.default, x(6, 4, 2), 0, 2),
    sample(aten.swapdims.default, x(6, 4, 2), 0, 2),
    sample(aten.nll_loss.default, x(6, 5), i(5, 6), None, 2),
    sample(aten.rnn_relu.input, x(6, 4, 2), x(1, 6, 4), list(WEIGHTS), True, 1, 0.0, True, False, True),
    sample(aten.rnn_tanh.input, x(4, 6, 2), x(1, 6, 4), list(WEIGHTS), True, 1, 0.0, True, False, False),
    sample(aten.rnn_relu_cell.default, x(6, 2), x(6, 4), *WEIGHTS),
    sample(aten.rnn_tanh_cell.default, x(6, 2), x(6, 4), *WEIGHTS),
    sample(aten.select_copy.int, x(6, 4), 1, 2),
    sample(aten.slice_copy.Tensor, x(6, 24), 1, 6, 18),
    sample(aten.split.sizes, x(6, 24), [12, 6, 6], 1),
    sample(aten.split_copy.Tensor, x(6, 24), 12, 1),
    sample(aten.squeeze_copy.dims, x(6, 1, 2, 1), [1, 3]),
    sample(aten.tensor_split.sections, x(6, 24), 2, 1),
    sample(aten._fft_r2c.default, x(6, 4), [1], 0, True),
    sample(aten._fft_c2r.default, c, [1], 0, 6),
    sample(aten.cdist.default, x(6, 12, 3), x(6, 6, 3), 2.0, None),
    sample(aten.cdist.default, x(2, 30, 3), x(2, 6, 3)),
    sample(aten.channel_shuffle.default, x(6, 24, 2), 2),
    sample(aten.diagonal.default, x(6, 4, 4), 1, 1, 2),
    sample(aten.triu.default, x(6, 12, 6), -2),
    sample(aten.masked_scatter.default, x(6, 4), m(6, 4), x(30)),
    sample(aten.searchsorted.Tensor, torch.rand(6, 5).cumsum(-1), torch.rand(6, 6)),
    sample(aten.index_put.default, x(6, 4), [m(6, 4)], x()),
    sample(aten.histc.default, torch.rand(6, 4), 5, 0, 1),
]

TABLE = [
    *PRODUCTS, *ATTENTION, *POSITIONS, *LOOKUPS, *LOSSES, *NORMS, *SAMPLES, *CONVOLUTIONS, *POOLS, *RECURRENT,
    *VIEWS, *PARTS, *REDUCTIONS, *INDEXING, *POINTWISE, *VARIANTS,
]  # fmt: skip


@pytest.mark.parametrize(("target", "args", "kwargs"), TABLE)
def test_split_is_whole(check: Check, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert check(target, *args, **kwargs), "no strategy divides this call"


def test_every_pointwise_op(check: Check) -> None:
    """All ops that torch tags as pointwise and that run on tensors in (0.1, 0.9), integers or booleans."""
    tried = [op for op, rule in RULES.items() if rule is pointwise.pointwise and _runs(check, op)]
    assert len(tried) > 250


def _runs(check: Check, op: Any) -> bool:
    for like in (0.1 + 0.8 * torch.rand(6, 2), i(5, 6, 2) + 1, m(6, 2)):
        args = [_argument(a.type, like) for a in op._schema.arguments if not a.has_default_value() or a.name == "other"]
        try:
            op(*args)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        try:
            check(op, *args, few=True)
        except RuntimeError as error:
            if "derivative for" not in str(error):
                raise
            return False
        return True
    return False


def _argument(kind: Any, like: Tensor) -> Any:
    text = str(kind)
    if text == "Tensor":
        return like
    return {"number": 2, "int": 2, "float": 0.5, "Optional[number]": 2, "bool": False}.get(text)
