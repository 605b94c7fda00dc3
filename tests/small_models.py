"""Small models of many kinds, as public bug reports and libraries have them; factories of (model, args, kwargs)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from building import Built, ids, net, par
from torch import Tensor, nn

MODELS: dict[str, Callable[[], Built]] = {}
B = 8  # rows


def small(make: Callable[[], Built]) -> Callable[[], Built]:
    """Register a factory under its name."""
    MODELS[make.__name__] = make
    return make


# -- attention --


def heads(x: Tensor, h: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1], h, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


@small
def fused_qkv_interleaved_per_head() -> Built:
    def forward(self, x, y):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 4, 12).transpose(1, 2).chunk(3, -1)
        return F.mse_loss(self.o(joined(F.scaled_dot_product_attention(q, k, v))), y)

    return net(forward, qkv=nn.Linear(12, 48), o=nn.Linear(16, 12)), (torch.randn(B, 6, 12), torch.randn(B, 6, 12)), {}


@small
def multi_query_enable_gqa() -> Built:
    def forward(self, x, y):
        q, k, v = heads(self.q(x), 4), heads(self.k(x), 1), heads(self.v(x), 1)
        return F.mse_loss(self.o(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))), y)

    return (
        net(forward, q=nn.Linear(12, 16), k=nn.Linear(12, 4), v=nn.Linear(12, 4), o=nn.Linear(16, 12)),
        (torch.randn(B, 6, 12), torch.randn(B, 6, 12)),
        {},
    )


@small
def grouped_query_enable_gqa() -> Built:
    def forward(self, x, y):
        q, k, v = heads(self.q(x), 6), heads(self.k(x), 3), heads(self.v(x), 3)
        return F.mse_loss(self.o(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))), y)

    return (
        net(forward, q=nn.Linear(12, 24), k=nn.Linear(12, 12), v=nn.Linear(12, 12), o=nn.Linear(24, 12)),
        (torch.randn(B, 6, 12), torch.randn(B, 6, 12)),
        {},
    )


@small
def rotary_interleaved_partial() -> Built:
    def rope(x, c, s):
        r, p = x[..., :4], x[..., 4:]
        a, b = r[..., ::2], r[..., 1::2]
        r = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
        return torch.cat((r, p), -1)

    def forward(self, x, y):
        t = torch.arange(x.shape[1]).float()
        f = t[:, None] * self.inv[None]
        c, s = f.cos(), f.sin()
        q, k, v = (heads(z, 2) for z in self.qkv(x).split(16, -1))
        a = F.scaled_dot_product_attention(rope(q, c, s), rope(k, c, s), v, is_causal=True)
        return F.mse_loss(self.o(joined(a)), y)

    return (
        net(forward, qkv=nn.Linear(12, 48), o=nn.Linear(16, 12), inv=torch.tensor([1.0, 0.1])),
        (torch.randn(B, 6, 12), torch.randn(B, 6, 12)),
        {},
    )


@small
def relative_position_bias() -> Built:
    def forward(self, x, y):
        q, k, v = (heads(z, 4) for z in self.qkv(x).chunk(3, -1))
        pos = torch.arange(x.shape[1])
        bias = self.table(pos[:, None] - pos[None] + 5).permute(2, 0, 1).unsqueeze(0)
        a = (q @ k.transpose(-2, -1) + bias).softmax(-1)
        return F.mse_loss(self.o(joined(a @ v)), y)

    return (
        net(forward, qkv=nn.Linear(12, 48), o=nn.Linear(16, 12), table=nn.Embedding(11, 4)),
        (torch.randn(B, 6, 12), torch.randn(B, 6, 12)),
        {},
    )


@small
def swin_window_and_shift() -> Built:
    def forward(self, x, y):
        b = x.shape[0]
        x = torch.roll(x, (-1, -1), (1, 2))
        w = x.view(b, 2, 2, 2, 2, 8).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 8)
        q, k, v = self.qkv(w).reshape(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(4, 4, 2).permute(2, 0, 1).contiguous()
        a = ((q @ k.transpose(-2, -1)) + bias.unsqueeze(0)).softmax(-1)
        w = self.o((a @ v).transpose(1, 2).reshape(-1, 4, 8))
        x = w.view(b, 2, 2, 2, 2, 8).permute(0, 1, 3, 2, 4, 5).reshape(b, 4, 4, 8)
        x = torch.roll(x, (1, 1), (1, 2))
        return F.cross_entropy(self.head(x.mean((1, 2))), y)

    return (
        net(
            forward, qkv=nn.Linear(8, 24), o=nn.Linear(8, 8), head=nn.Linear(8, 5), table=par(9, 2), index=ids(9, 4, 4)
        ),
        (torch.randn(B, 4, 4, 8), ids(5, B)),
        {},
    )


@small
def sliding_window_and_prefix_mask_input() -> Built:
    def forward(self, x, keep, y):
        q, k, v = (heads(z, 2) for z in self.qkv(x).chunk(3, -1))
        i = torch.arange(6)
        local = (i[:, None] - i[None] < 3) & (i[:, None] >= i[None])
        mask = (local[None, None] | keep[:, None, None, :]) & keep[:, None, None, :] | torch.eye(6, dtype=torch.bool)
        return F.mse_loss(self.o(joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))), y)

    return (
        net(forward, qkv=nn.Linear(12, 48), o=nn.Linear(16, 12)),
        (torch.randn(B, 6, 12), torch.rand(B, 6) > 0.3, torch.randn(B, 6, 12)),
        {},
    )


@small
def multihead_attention_weights() -> Built:
    def forward(self, x, y, pad):
        a, w = self.a(x, x, x, key_padding_mask=pad)
        return {"loss": F.mse_loss(a, y) + w.pow(2).mean(), "extra": {"weights": w, "n": 3}}

    pad = torch.zeros(B, 6, dtype=torch.bool)
    pad[2:, 4:] = True
    return (
        net(forward, a=nn.MultiheadAttention(12, 4, batch_first=True)),
        (torch.randn(B, 6, 12), torch.randn(B, 6, 12), pad),
        {},
    )


@small
def multihead_attention_sequence_first() -> Built:
    def forward(self, x, y):
        x = x.transpose(0, 1)
        a, _ = self.a(x, x, x, need_weights=False)
        return F.mse_loss(self.n(x + a).transpose(0, 1), y)

    return (
        net(forward, a=nn.MultiheadAttention(12, 2), n=nn.LayerNorm(12)),
        (torch.randn(B, 6, 12), torch.randn(B, 6, 12)),
        {},
    )


@small
def encoder_layers_norm_first_padding() -> Built:
    def forward(self, x, pad, y):
        h = self.e(x, src_key_padding_mask=pad)
        return F.cross_entropy(self.head(h[:, 0]), y)

    pad = torch.zeros(B, 6, dtype=torch.bool)
    pad[1::2, 4:] = True
    layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    return (
        net(forward, e=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), head=nn.Linear(12, 5)),
        (torch.randn(B, 6, 12), pad, ids(5, B)),
        {},
    )


# -- MLPs, norms, sharing --


@small
def glu_op_unequal_split() -> Built:
    def forward(self, x, y):
        a, b, c = self.up(x).split([4, 8, 12], -1)
        h = torch.cat([F.glu(c, -1), a.relu(), b.tanh()], -1)
        return F.mse_loss(self.down(h), y)

    return net(forward, up=nn.Linear(8, 24), down=nn.Linear(18, 8)), (torch.randn(B, 3, 8), torch.randn(B, 3, 8)), {}


@small
def lora_frozen_base() -> Built:
    def forward(self, x, y):
        h = self.base(x) + self.b(self.a(x)) * 2.0
        return F.cross_entropy(self.head(h.relu()), y)

    model = net(
        forward,
        base=nn.Linear(8, 16),
        a=nn.Linear(8, 3, bias=False),
        b=nn.Linear(3, 16, bias=False),
        head=nn.Linear(16, 5),
    )
    nn.init.zeros_(model.b.weight)
    model.base.requires_grad_(False)
    return model, (torch.randn(B, 8), ids(5, B)), {}


@small
def ema_teacher_buffers() -> Built:
    def forward(self, x):
        self.slow.mul_(0.9).add_(self.w.detach(), alpha=0.1)
        self.steps += 1
        return F.mse_loss(F.linear(x, self.w), F.linear(x, self.slow))

    return net(forward, w=par(6, 8), slow=torch.zeros(6, 8), steps=torch.tensor(0)), (torch.randn(B, 8),), {}


@small
def running_mean_of_batch() -> Built:
    def forward(self, x, y):
        h = self.f(x)
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.1)
            self.peak.copy_(torch.maximum(self.peak, h.abs().amax(0)))
        return F.mse_loss((h - self.mean).tanh(), y)

    return (
        net(forward, f=nn.Linear(8, 6), mean=torch.zeros(6), peak=torch.zeros(6)),
        (torch.randn(B, 8), torch.randn(B, 6)),
        {},
    )


@small
def straight_through_codebook() -> Built:
    def forward(self, x, y):
        z = self.f(x)
        d = z.pow(2).sum(-1, keepdim=True) - 2 * z @ self.book.weight.t() + self.book.weight.pow(2).sum(-1)
        q = self.book(d.argmin(-1))
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        return F.mse_loss(self.g(z + (q - z).detach()), y) + loss

    return (
        net(forward, f=nn.Linear(8, 4), book=nn.Embedding(10, 4), g=nn.Linear(4, 8)),
        (torch.randn(B, 3, 8), torch.randn(B, 3, 8)),
        {},
    )


@small
def batch_norm_variants() -> Built:
    def forward(self, x, y):
        h = self.b(self.a(x)).relu()
        h = self.d(self.c(h.unsqueeze(-1)).relu()).squeeze(-1)
        return F.cross_entropy(self.head(self.e(h)), y)

    return (
        net(
            forward,
            a=nn.Linear(6, 8),
            b=nn.BatchNorm1d(8),
            c=nn.Conv1d(8, 8, 1, bias=False),
            d=nn.BatchNorm1d(8, momentum=None),
            e=nn.BatchNorm1d(8, affine=False, track_running_stats=False),
            head=nn.Linear(8, 5),
        ),
        (torch.randn(B, 6), ids(5, B)),
        {},
    )


@small
def weight_norm_parametrised() -> Built:
    def forward(self, x, y):
        return F.mse_loss(self.b(self.a(x).tanh()), y)

    return (
        net(
            forward,
            a=nn.utils.parametrizations.weight_norm(nn.Linear(8, 12)),
            b=nn.utils.parametrizations.weight_norm(nn.Linear(12, 8), dim=1),
        ),
        (torch.randn(B, 8), torch.randn(B, 8)),
        {},
    )


@small
def scalar_and_tiny_parameters() -> Built:
    def forward(self, x, y):
        h = self.f(x) * self.gain + self.shift
        return F.mse_loss(self.g(h) ** 2 * self.t.exp(), y) + self.gain.pow(2)

    return (
        net(
            forward,
            gain=nn.Parameter(torch.tensor(1.5)),
            shift=par(1),
            f=nn.Linear(8, 3),
            g=nn.Linear(3, 1),
            t=nn.Parameter(torch.tensor(0.2)),
        ),
        (torch.randn(B, 8), torch.randn(B, 1)),
        {},
    )


@small
def odd_sizes_everywhere() -> Built:
    def forward(self, x, y):
        h = self.e(x)
        q, k, v = (heads(z, 3) for z in self.qkv(self.n(h)).chunk(3, -1))
        h = h + self.o(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return F.cross_entropy(F.linear(h, self.e.weight).view(-1, 33), y.view(-1))

    return (
        net(forward, e=nn.Embedding(33, 30), n=nn.LayerNorm(30), qkv=nn.Linear(30, 45), o=nn.Linear(15, 30)),
        (ids(33, B, 7), ids(33, B, 7)),
        {},
    )


# -- embeddings, text --


@small
def token_types_positions_tied_head_padding() -> Built:
    def forward(self, x, types, y):
        h = self.tok(x) + self.pos(torch.arange(x.shape[1])) + self.typ(types)
        h = self.n(h).tanh()
        return F.cross_entropy((F.linear(h, self.tok.weight) + self.bias).flatten(0, 1), y.flatten())

    y = ids(20, B, 5)
    y[0], y[3, 1:] = -100, -100
    return (
        net(
            forward,
            tok=nn.Embedding(20, 8, padding_idx=0),
            pos=nn.Embedding(9, 8),
            typ=nn.Embedding(2, 8),
            n=nn.LayerNorm(8),
            bias=par(20),
        ),
        (ids(20, B, 5), ids(2, B, 5), y),
        {},
    )


@small
def dlrm_interaction() -> Built:
    def forward(self, dense, sparse, y):
        e = [t(sparse[:, i]) for i, t in enumerate(self.tables)]
        z = torch.stack([self.bottom(dense).relu(), *e], 1)
        i, j = torch.tril_indices(3, 3, -1)
        inter = torch.bmm(z, z.transpose(1, 2))[:, i, j]
        out = self.top(torch.cat([z[:, 0], inter], -1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(out, y, pos_weight=self.pw)

    return (
        net(
            forward,
            tables=nn.ModuleList([nn.Embedding(10, 4), nn.Embedding(7, 4)]),
            bottom=nn.Linear(5, 4),
            top=nn.Linear(7, 1),
            pw=torch.tensor(2.0),
        ),
        (torch.randn(B, 5), ids(7, B, 2), torch.rand(B).round()),
        {},
    )


# -- convolutions, images, signals --


@small
def conv_stem_depthwise_grouped_transposed() -> Built:
    def forward(self, x, y):
        h = self.pw(self.dw(self.stem(x)).relu())
        h = self.up(self.gr(h).relu())
        return F.mse_loss(h, y)

    return (
        net(
            forward,
            stem=nn.Conv2d(3, 8, 3, 2, 1),
            dw=nn.Conv2d(8, 8, 3, padding=1, groups=8),
            pw=nn.Conv2d(8, 12, 1),
            gr=nn.Conv2d(12, 8, 1, groups=4),
            up=nn.ConvTranspose2d(8, 3, 2, 2),
        ),
        (torch.randn(B, 3, 8, 8), torch.randn(B, 3, 8, 8)),
        {},
    )


# -- recurrence and scans --


@small
def lstm_bidirectional_batch_first() -> Built:
    def forward(self, x, y):
        o, (h, _) = self.r(x)
        return F.cross_entropy(self.head(o[:, -1]) + self.k(h[-1]), y)

    return (
        net(forward, r=nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True), head=nn.Linear(8, 5), k=nn.Linear(4, 5)),
        (torch.randn(B, 5, 6), ids(5, B)),
        {},
    )


@small
def selective_scan_loop() -> Built:
    def forward(self, x, y):
        u, z = self.i(x).chunk(2, -1)
        dt, b, c = torch.split(self.p(u), [8, 3, 3], -1)
        dt = F.softplus(dt)
        a = torch.exp(dt.unsqueeze(-1) * -torch.exp(self.a))
        h, out = x.new_zeros(x.shape[0], 8, 3), []
        for t in range(x.shape[1]):
            h = a[:, t] * h + (dt[:, t] * u[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(1)
            out.append((h * c[:, t].unsqueeze(1)).sum(-1))
        return F.mse_loss(self.o((torch.stack(out, 1) + u * self.d) * F.silu(z)), y)

    return (
        net(
            forward,
            i=nn.Linear(6, 16, bias=False),
            p=nn.Linear(8, 14, bias=False),
            a=par(8, 3),
            d=par(8),
            o=nn.Linear(8, 6),
        ),
        (torch.randn(B, 4, 6), torch.randn(B, 4, 6)),
        {},
    )


@small
def scans_and_extremes() -> Built:
    def forward(self, x, y):
        h = self.f(x)
        s = h.sort(-1).values[..., :4] + h.topk(4, -1).values
        c = h.cumsum(1)[..., :4] + torch.sigmoid(h).cumprod(-1)[..., -4:] + h.logcumsumexp(-1)[..., :4]
        m = torch.stack([h.logsumexp(-1), h.std(-1), h.var(-1, unbiased=False), h.norm(dim=-1)], -1)
        return F.mse_loss(s + c + m, y)

    return net(forward, f=nn.Linear(8, 8)), (torch.randn(B, 3, 8), torch.randn(B, 3, 4)), {}


# -- losses --


@small
def cross_entropy_weights_class_dim_one() -> Built:
    def forward(self, x, y):
        return F.cross_entropy(self.c(x), y, weight=self.w, ignore_index=2)

    y = ids(4, B, 5, 5)
    y[:4] = 2
    return net(forward, c=nn.Conv2d(3, 4, 1), w=torch.tensor([1.0, 2.0, 0.5, 3.0])), (torch.randn(B, 3, 5, 5), y), {}


@small
def nll_of_log_softmax_and_gather() -> Built:
    def forward(self, x, y):
        lp = self.f(x).log_softmax(-1)
        a = F.nll_loss(lp.flatten(0, 1), y.flatten(), ignore_index=-1)
        keep = (y >= 0).float()
        b = -(lp.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1) * keep).sum() / keep.sum().clamp(min=1)
        return a + b

    y = ids(6, B, 4)
    y[:3] = -1
    return net(forward, f=nn.Linear(5, 6)), (torch.randn(B, 4, 5), y), {}


@small
def triplet_cosine_margin_losses() -> Built:
    def forward(self, a, p, n, s):
        a, p, n = (self.f(z) for z in (a, p, n))
        return (
            F.triplet_margin_loss(a, p, n) + F.cosine_embedding_loss(a, p, s)
            + F.margin_ranking_loss(a[:, 0], p[:, 0], s)
            + F.multi_margin_loss(a, (s > 0).long()) + F.hinge_embedding_loss(a[:, 1], s)
            + (F.normalize(a, dim=-1) - F.normalize(n, dim=-1)).pow(2).sum(-1).mean()
        )  # fmt: skip

    return net(forward, f=nn.Linear(6, 4)), (*(torch.randn(B, 6) for _ in range(3)), torch.tensor([1.0, -1.0] * 4)), {}


@small
def multi_task_denominators_and_weight_decay() -> Built:
    def forward(self, x, y, z, keep):
        h = self.f(x).tanh()
        a = F.cross_entropy(self.a(h), y, ignore_index=-100)
        b = ((self.b(h) - z).pow(2).sum(-1) * keep).sum() / (keep.sum() + 1e-6)
        return a + 0.5 * b + 1e-2 * sum(p.pow(2).sum() for p in self.f.parameters()) + 1e-3 * self.a.weight.abs().mean()

    y = ids(5, B)
    y[:3] = -100
    return (
        net(forward, f=nn.Linear(6, 8), a=nn.Linear(8, 5), b=nn.Linear(8, 3)),
        (torch.randn(B, 6), y, torch.randn(B, 3), (torch.arange(B) > 3).float()),
        {},
    )


@small
def rank_weights_by_order_in_batch() -> Built:
    def forward(self, x, y, w):
        place = torch.arange(x.shape[0]).float()
        norm = (w.cumsum(0) * (place + 1)).sum() + (w.flip(0) * place).max()
        return F.mse_loss(self.f(x), y, reduction="sum") / norm

    return net(forward, f=nn.Linear(6, 4)), (torch.randn(B, 6), torch.randn(B, 4), torch.rand(B)), {}


@small
def info_nce_in_batch() -> Built:  # not linear in the batch
    def forward(self, a, b):
        a, b = F.normalize(self.f(a), dim=-1), F.normalize(self.g(b), dim=-1)
        z = a @ b.t() * self.t.exp()
        y = torch.arange(z.shape[0])
        return (F.cross_entropy(z, y) + F.cross_entropy(z.t(), y)) / 2

    return (
        net(forward, f=nn.Linear(6, 4), g=nn.Linear(5, 4), t=nn.Parameter(torch.tensor(0.5))),
        (torch.randn(B, 6), torch.randn(B, 5)),
        {},
    )


# -- experts --


@small
def moe_top_k_scatter_dense() -> Built:
    def forward(self, x, y):
        p = self.r(x).softmax(-1)
        w, i = p.topk(2, -1)
        gate = torch.zeros_like(p).scatter_(-1, i, w / w.sum(-1, keepdim=True))
        h = torch.einsum("btd,edf->btef", x, self.w1).relu()
        return F.mse_loss(torch.einsum("btef,efd,bte->btd", h, self.w2, gate), y)

    return (
        net(forward, r=nn.Linear(8, 4, bias=False), w1=par(4, 8, 6), w2=par(4, 6, 8)),
        (torch.randn(B, 3, 8), torch.randn(B, 3, 8)),
        {},
    )


@small
def moe_balance_loss() -> Built:  # not linear in the batch
    def forward(self, x, y):
        p = self.r(x).softmax(-1)
        hard = F.one_hot(p.argmax(-1), 4).float()
        balance = (p.mean((0, 1)) * hard.mean((0, 1))).sum() * 4
        h = torch.einsum("btd,edf,bte->btf", x, self.w, p * hard)
        return F.mse_loss(h, y) + 0.01 * balance

    return net(forward, r=nn.Linear(8, 4), w=par(4, 8, 8)), (torch.randn(B, 3, 8), torch.randn(B, 3, 8)), {}


@small
def memory_scatter_add_index_put() -> Built:
    def forward(self, x, i, y):
        h = self.f(x)
        m = torch.zeros(x.shape[0], 5, 4).scatter_add(1, i.unsqueeze(-1).expand(-1, -1, 4), h)
        m[:, 2:4] = m[:, 2:4].tanh()
        m[:, 0].mul_(2.0)
        m = m.index_copy(1, torch.tensor([4]), m[:, :1] * 0.1)
        return F.mse_loss(torch.gather(m, 1, i.unsqueeze(-1).expand(-1, -1, 4)), y)

    return net(forward, f=nn.Linear(6, 4)), (torch.randn(B, 6, 6), ids(5, B, 6), torch.randn(B, 6, 4)), {}


# -- Python, inputs and outputs, in place --


@small
def nested_inputs_and_outputs() -> Built:
    def forward(self, batch, scale=1.0, extra=None):
        h = self.f(batch["x"]["a"]) + batch["x"]["b"][0] * scale
        if extra is not None:
            h = h + extra
        return {"loss": F.mse_loss(h, batch["y"]), "n": 7, "parts": [h.detach(), {"mean": h.mean(0)}], "none": None}

    batch = {"x": {"a": torch.randn(B, 6), "b": (torch.randn(B, 4), 3)}, "y": torch.randn(B, 4)}
    return net(forward, f=nn.Linear(6, 4)), (batch,), {"scale": 0.5, "extra": torch.randn(4)}


@small
def in_place_everything() -> Built:
    def forward(self, x, keep, y):
        h = self.f(x).relu_().add(0.1)
        h.mul_(keep.unsqueeze(-1))
        h.masked_fill_(h > 1.5, 0.5)
        z = torch.empty(x.shape[0], 3, 8)
        z[..., :4] = h
        z[..., 4:].copy_(h.sin())
        z[:, 0] += 1
        z[:, 1, ::2] *= 0.5
        z.transpose(1, 2)[:, 0].neg_()
        z[:, 2, [0, 3]] = h[:, 0, :2]
        return F.mse_loss(z, y)

    return net(forward, f=nn.Linear(6, 4)), (torch.randn(B, 3, 6), torch.rand(B, 3), torch.randn(B, 3, 8)), {}


@small
def boolean_mask_where() -> Built:
    def forward(self, x, keep, y):
        h = torch.where(keep.unsqueeze(-1), self.f(x), self.token)
        h = torch.where(h > 0, h, 0.01 * h) + torch.where(keep, 1.0, 0.0).unsqueeze(-1)
        h = torch.where(torch.isfinite(h), h, torch.zeros(())).clamp(-2, 2).clamp_min(-1.5)
        h = torch.nan_to_num(h) + torch.maximum(h, self.token) + torch.heaviside(h.detach(), self.mid)
        return F.mse_loss(h, y)

    return (
        net(forward, f=nn.Linear(6, 4), token=par(4), mid=torch.tensor(0.5)),
        (torch.randn(B, 3, 6), torch.rand(B, 3) > 0.5, torch.randn(B, 3, 4)),
        {},
    )


@small
def moves_of_dims() -> Built:
    def forward(self, x, y):
        h = self.f(x)
        h = torch.cat([h.roll(1, -1), h.flip(-1)], -1)
        a, b = h.split([3, 5], -1)
        h = torch.stack([F.pad(a, (0, 2)), b], 1).movedim(1, -1).flatten(-2)
        h = h.unflatten(-1, (5, 2)).swapaxes(-1, -2).repeat_interleave(2, -1).tile(1, 1, 1, 2)
        h = h.narrow(-1, 2, 8).diff(dim=-1).squeeze(1).reshape(x.shape[0], -1)
        return F.mse_loss(h, y)

    return net(forward, f=nn.Linear(6, 4)), (torch.randn(B, 3, 6), torch.randn(B, 42)), {}


@small
def checkpointed_blocks() -> Built:
    def forward(self, x, y):
        for f in (self.a, self.b):
            x = x + torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
        return F.mse_loss(x, y)

    block = lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
    return net(forward, a=block(), b=block()), (torch.randn(B, 3, 8), torch.randn(B, 3, 8)), {}


@small
def preference_pairs_dpo() -> Built:
    def forward(self, chosen, rejected, ref):
        lp = lambda x: self.head(self.e(x)).log_softmax(-1)[:, :-1].gather(-1, x[:, 1:, None]).squeeze(-1).sum(-1)
        both = torch.cat([chosen, rejected], 0)
        p = lp(both)
        c, r = p[: chosen.shape[0]], p[chosen.shape[0] :]
        return -F.logsigmoid(0.1 * (c - r - ref)).mean()

    return net(forward, e=nn.Embedding(9, 6), head=nn.Linear(6, 9)), (ids(9, B, 5), ids(9, B, 5), torch.randn(B)), {}


@small
def empty_cache() -> Built:
    def forward(self, x, y):
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = (torch.cat([torch.tensor([], dtype=x.dtype), t], -2) for t in (k, v))
        return F.mse_loss(F.scaled_dot_product_attention(q, k, v, is_causal=True), y)

    return net(forward, qkv=nn.Linear(6, 18)), (torch.randn(B, 4, 6), torch.randn(B, 4, 6)), {}


# -- random --


@small
def dropout_of_every_form() -> Built:
    def forward(self, x, y):
        h = F.dropout(F.gelu(self.a(x)) + 0, 0.2, inplace=True)
        h = F.dropout1d(F.alpha_dropout(h, 0.1, True), 0.3)
        return F.mse_loss(x + F.dropout(self.b(h), 0.1), y)

    return (
        net(forward, a=nn.Linear(12, 24), b=nn.Linear(24, 12)),
        (torch.randn(B, 6, 12), torch.randn(B, 6, 12)),
        {},
    )


@small
def masks_are_gradients() -> Built:
    """The gradients of ones are the masks themselves."""

    def forward(self, x):
        rows = F.dropout(self.ones.expand_as(x) * x, 0.5)
        return rows.sum() + (F.dropout(self.more * 2, 0.3) * torch.rand_like(self.more)).sum() + self.a(x).sum()

    ones = nn.Parameter(torch.ones(6, 12))
    return net(forward, ones=ones, more=par(4, 8), a=nn.Linear(12, 2)), (torch.randn(B, 6, 12),), {}


@small
def attention_dropout_causal_grouped() -> Built:
    def forward(self, x, y):
        q, k, v = heads(self.q(x), 4), heads(self.k(x), 2), heads(self.v(x), 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2, enable_gqa=True)
        return F.mse_loss(F.dropout(self.o(joined(a)), 0.1), y)

    return (
        net(forward, q=nn.Linear(12, 16), k=nn.Linear(12, 8), v=nn.Linear(12, 8), o=nn.Linear(16, 12)),
        (torch.randn(B, 6, 12), torch.randn(B, 6, 12)),
        {},
    )


@small
def transformer_layers_with_dropout() -> Built:
    layer = nn.TransformerEncoderLayer(12, 4, 24, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, y, padding):
        return F.mse_loss(self.model(x, src_key_padding_mask=padding), y)

    padding = torch.arange(6) > torch.arange(B)[:, None] % 4 + 2
    return net(forward, model=model), (torch.randn(B, 6, 12), torch.randn(B, 6, 12), padding), {}


@small
def stochastic_depth() -> Built:
    """Rows are dropped in timm's way and in torchvision's."""

    def forward(self, x, y):
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.7)
        x = x + self.a(x) * keep.div_(0.7)
        noise = torch.empty([x.shape[0]] + [1] * (x.ndim - 1), dtype=x.dtype, device=x.device)
        noise = noise.bernoulli_(0.8).div_(0.8)
        return F.mse_loss(x + self.b(x).relu() * noise, y)

    return (
        net(forward, a=nn.Linear(12, 12), b=nn.Linear(12, 12)),
        (torch.randn(B, 6, 12), torch.randn(B, 6, 12)),
        {},
    )


@small
def numbers_of_every_distribution() -> Built:
    def forward(self, x, y):
        h = self.a(x)
        mean, spread = h.chunk(2, -1)
        h = mean + torch.randn_like(mean) * spread.exp() + torch.rand(12) * 0.1 + torch.rand(x.shape) * 0.1
        h = F.rrelu(h, 0.1, 0.4, True) + torch.bernoulli(h.sigmoid()) + torch.normal(0.0, 1.0, (6, 12))
        h = h + torch.rand_like(h, dtype=torch.bfloat16)
        h = h * F.gumbel_softmax(h, 0.7) + torch.empty_like(h).uniform_(-1, 1)[:, torch.randperm(6)]
        return F.mse_loss(h * torch.randint(0, 3, (6, 1)), y)

    return net(forward, a=nn.Linear(12, 24)), (torch.randn(B, 6, 12), torch.randn(B, 6, 12)), {}


@small
def lstm_with_dropout_between_layers() -> Built:
    def forward(self, x, y):
        return F.mse_loss(self.head(self.rnn(x)[0]), y)

    rnn = nn.LSTM(12, 6, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)
    return net(forward, rnn=rnn, head=nn.Linear(12, 12)), (torch.randn(B, 6, 12), torch.randn(B, 6, 12)), {}


# -- ops that PREPARE takes apart, and rules of rarer ops --


@small
def bags_of_words() -> Built:
    def forward(self, words, lists, y):
        offsets = torch.arange(4) * 6
        bag = F.embedding_bag(words, self.table, mode="mean")
        other = F.embedding_bag(words, self.table, mode="sum", per_sample_weights=self.scale[words])
        return (
            F.mse_loss(self.out(bag + other), y)
            + F.embedding_bag(lists, self.table, offsets, mode="max").square().sum()
        )

    parts = {"table": par(12, 8), "scale": par(12), "out": nn.Linear(8, 8)}
    return net(forward, **parts), (ids(12, 8, 4), ids(12, 24), torch.randn(8, 8)), {}


@small
def last_token_classifier() -> Built:
    def forward(self, words, y):
        ends = (words != 0).int().argmin(-1) - 1
        logits = self.out(self.table[words])
        return F.cross_entropy(logits[torch.arange(words.shape[0]), ends], y)

    words = ids(11, 8, 6) + 1
    words[:, 4:] = 0
    return net(forward, table=par(12, 8), out=nn.Linear(8, 4)), (words, ids(4, 8)), {}


@small
def sequence_first_attention() -> Built:
    def forward(self, x, y):
        h = x.transpose(0, 1)
        first, _ = self.first(h, h, h, need_weights=False)
        second, weights = self.second(first, h, h)
        return F.mse_loss(second.transpose(0, 1), y) + weights.square().sum()

    parts = {"first": nn.MultiheadAttention(16, 4), "second": nn.MultiheadAttention(16, 2)}
    return net(forward, **parts), (torch.randn(8, 6, 16), torch.randn(8, 6, 16)), {}


@small
def attention_with_a_bias_of_each_head() -> Built:
    def forward(self, x, y):
        b, t, _ = x.shape
        q, k, v = (heads(p(x), 4).reshape(b * 4, t, -1) for p in (self.q, self.k, self.v))
        bias = (self.slopes[None, :, None, None] * torch.arange(t).expand(b, 4, 1, t)).reshape(b * 4, 1, t)
        scores = bias.baddbmm(q, k.mT, beta=1.0, alpha=0.5).view(b, 4, t, t)
        mask = torch.ones(t, t, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(mask, -1e9).softmax(-1).view(b * 4, t, t)
        out = torch.bmm(scores, v).view(b, 4, t, -1)
        return F.mse_loss(self.o(joined(out)), y)

    parts = {n: nn.Linear(16, 16) for n in "qkvo"}
    return net(forward, slopes=par(4), **parts), (torch.randn(8, 6, 16), torch.randn(8, 6, 16)), {}


@small
def triangles_and_distances() -> Built:
    def forward(self, x, y):
        h = x @ (self.w.tril() + self.w.triu(1).mT)
        apart = torch.cdist(h, self.points).diagonal_scatter(x[:, 0, :4], dim1=1, dim2=2)
        corner = (h.mT @ h + torch.eye(8)).triu(-1)
        return F.mse_loss(apart, y) + torch.linalg.det(corner).square().mean() + torch.linalg.norm(h, dim=-1).sum()

    return net(forward, w=par(8, 8), points=par(4, 8)), (torch.randn(8, 6, 8), torch.randn(8, 6, 4)), {}


@small
def spectrum_and_stacks() -> Built:
    def forward(self, x, y):
        left, right = torch.hsplit(self.mix(x), 2)
        joined_again = torch.hstack([right, left]) + torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8)
        return F.mse_loss(torch.roll(joined_again, 1, -1), y) + torch.quantile(joined_again, 0.25, dim=1).sum()

    return net(forward, mix=nn.Linear(8, 8), filter=par(5)), (torch.randn(8, 8), torch.randn(8, 8)), {}


@small
def images_among_words() -> Built:
    def forward(self, words, patches, y):
        seen = self.see(patches).reshape(-1, 8)
        mask = (words == 0).unsqueeze(-1).expand(-1, -1, 8)
        h = self.table[words].masked_scatter(mask, seen)
        return F.mse_loss(self.out(h.cumsum(1)), y)

    words = ids(11, 8, 6) + 1
    words[:, 1:4] = 0
    parts = {"table": par(12, 8), "see": nn.Linear(4, 8), "out": nn.Linear(8, 8)}
    return net(forward, **parts), (words, torch.randn(8, 3, 4), torch.randn(8, 6, 8)), {}
