"""Small models of the structures that public code has: what blocks pass on, state, sharing, regions, parametrizations.

``WHOLE_BATCH``: those whose loss or buffers are no sum over rows, so that they run in one microbatch only.
"""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize
import torch.nn.utils.prune
import torch.utils.checkpoint
from building import Built, net, par
from torch import Tensor, nn

B = 8  # rows
WHOLE_BATCH: set[str] = set()


def structure(make: Callable[[], Built]) -> Callable[[], Built]:
    """Mark a factory as one of the table."""
    return make


def whole_batch(make: Callable[[], Built]) -> Callable[[], Built]:
    """Mark one that needs the whole batch at once."""
    WHOLE_BATCH.add(make.__name__)
    return make


def xy(i: int = 8, o: int = 8, *more: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    return torch.randn(B, *more, i), torch.randn(B, *more, o)


# -- what blocks pass on, inputs, outputs --


@structure
def state_of_dicts_and_tuples() -> Built:
    class Block(nn.Module):
        def __init__(self, emits: bool) -> None:
            super().__init__()
            self.f, self.emits = nn.Linear(8, 8), emits

        def forward(self, state):
            h = self.f(state["h"]).tanh() + (0 if state["aux"] is None else state["aux"])
            aux = h.mean(-1, keepdim=True) if self.emits else None
            return {"h": h, "aux": aux, "depth": state["depth"] + 1, "past": (*state["past"], (h, None, [aux]))}

    def forward(self, x, y, flag=True):
        state = {"h": x, "aux": None, "depth": 0, "past": ()}
        for block in self.blocks.values():
            state = block(state)
        out = state["h"] / state["depth"] if flag else state["h"]
        loss = F.mse_loss(out, y) + 0.1 * state["past"][1][0].pow(2).mean()
        return {"past": None, "loss": loss, "all": [state["past"], "text", 3], "self": (out, out)}

    return net(forward, blocks=nn.ModuleDict({str(i): Block(i % 2 == 0) for i in range(3)})), xy(), {"flag": True}


@dataclasses.dataclass
class Output:
    """As Hugging Face has them."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None
    steps: int = 0


@structure
def dataclass_outputs_between_and_out() -> Built:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(8, 12)

        def forward(self, x, *, hidden=False):
            h = self.f(x).relu()
            return Output(logits=h, hidden=(x, h) if hidden else None, steps=2)

    def forward(self, x, labels=None):
        out = self.encoder(x, hidden=True)
        logits = self.head(out.logits * out.steps + out.hidden[1])
        return Output(F.cross_entropy(logits, labels) if labels is not None else None, logits)

    return net(forward, encoder=Encoder(), head=nn.Linear(12, 5)), (), {
        "labels": torch.randint(0, 5, (B,)), "x": torch.randn(B, 8)
    }  # fmt: skip


Pair = collections.namedtuple("Pair", ["a", "b"])


@structure
def inputs_of_every_container() -> Built:
    def forward(self, pairs, /, named, *rest, table, scale: float = 1.0, mode: str = "sum", **more):
        h = self.f(pairs[0][0] + pairs[0][1]) + self.g(named.a) * named.b
        for t in rest:
            h = h + t
        h = h * scale if mode == "sum" else h
        if more.get("mask") is not None:
            h = h * more["mask"].unsqueeze(-1)
        return F.mse_loss(h, table["y"]["of"][0])

    x, y = xy()
    return (
        net(forward, f=nn.Linear(8, 8), g=nn.Linear(8, 8)),
        ([(x, torch.randn(B, 8))], Pair(torch.randn(B, 8), 3), torch.randn(B, 8), torch.randn(1, 8)),
        {"table": {"y": {"of": [y], "n": None}}, "scale": 0.5, "mask": torch.rand(B).round(), "unused": None},
    )


@structure
def one_tensor_for_two_inputs() -> Built:
    def forward(self, x, y):
        return F.mse_loss(self.g(self.f(x).relu()) + x, y)

    x = torch.randn(B, 8)
    return net(forward, f=nn.Linear(8, 16), g=nn.Linear(16, 8)), (x, x), {}


@structure
def outputs_that_are_inputs_weights_and_views() -> Built:
    def forward(self, x, y):
        h = self.f(x)
        loss = F.mse_loss(h, y)
        right = (h.argmax(-1) == y.argmax(-1)).sum()
        return loss, x, self.f.weight, self.scale, h[:, :2], {"right": right, "again": loss, "rows": x.shape[0] > 1}

    return net(forward, f=nn.Linear(8, 8), scale=torch.ones(8)), xy(), {}


# -- ops with several outputs, loops, control flow on shapes --


@structure
def ops_with_several_outputs() -> Built:
    def forward(self, x, y):
        a, b, c = self.f(x).split([3, 5, 8], -1)
        top, _ = b.topk(2, -1)
        most, at = c.max(-1)
        least, _ = c.min(1)
        var, mean = torch.var_mean(a, -1)
        low, high = torch.aminmax(b, dim=-1)
        ranked, _ = a.sort(-1, descending=True)
        middle, _ = b.median(-1)
        grow, _ = c.cummax(-1)
        third, _ = c.kthvalue(3, -1)
        h = torch.stack([top.sum(-1), most, least.sum(-1, keepdim=True).expand(-1, 4), var, mean, low + high], -1)
        out = h.sum(-1) + ranked[..., 0] + middle + grow.mean(-1) * third + at.float() * 0.01
        return F.mse_loss(out, y.mean(-1))

    return net(forward, f=nn.Linear(8, 16)), xy(8, 8, 4), {}


@structure
def loops_over_chunks_and_pieces() -> Built:
    def forward(self, x, y):
        parts = [f(t) for f, t in zip(self.fs, x.chunk(3, -1), strict=True)]
        state, seen = x.new_zeros(x.shape[0], 4), []
        for t in torch.cat(parts, -1).unbind(1):
            state = torch.tanh(self.cell(torch.cat([t, state], -1)))
            seen.append(state)
        out = torch.stack(seen, 1)
        if x.shape[1] > 3 and out.size(-1) % 2 == 0:
            out = out + out.flip(1)
        for i in range(0, x.shape[1], 2):
            out = out * 1.1 if i else out - 0.1
        return F.mse_loss(out, y)

    return (
        net(forward, fs=nn.ModuleList(nn.Linear(n, 2) for n in (3, 3, 2)), cell=nn.Linear(10, 4)),
        xy(8, 4, 5),
        {},
    )


@structure
def einsums_and_masks() -> Built:
    def forward(self, x, keep, y):
        q, k = torch.einsum("bsd,dhe->bhse", x, self.q), torch.einsum("bsd,dhe->bhse", x, self.k)
        a = torch.einsum("bhse,bhte->bhst", q, k)
        s = x.shape[1]
        causal = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
        a = torch.where(causal & keep[:, None, None, :], a, torch.finfo(a.dtype).min)
        a = a.softmax(-1) * torch.linspace(0.5, 1, s) + torch.eye(s)
        h = torch.einsum("bhst,bte->bshe", a, x[..., :4]).flatten(-2)
        return F.mse_loss(torch.einsum("...i,oi->...o", h, self.o) * torch.full((8,), 2.0), y)

    keep = torch.ones(B, 5, dtype=torch.bool)
    keep[::2, 3:] = False
    return (
        net(forward, q=par(8, 2, 4), k=par(8, 2, 4), o=par(8, 8)),
        (torch.randn(B, 5, 8), keep, torch.randn(B, 5, 8)),
        {},
    )


# -- sharing --


@structure
def one_block_at_several_depths() -> Built:
    def forward(self, x, y):
        h = self.seq(x)
        return F.mse_loss(self.again(self.head(h)), y)

    a = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    b = nn.Linear(8, 8)
    b.bias = a[3].bias
    return net(forward, seq=nn.Sequential(a, b, a, nn.Tanh(), a), again=b, head=nn.Linear(8, 8)), xy(8, 8, 3), {}


@structure
def tied_weights_transposed_and_sliced() -> Built:
    def forward(self, x, labels):
        h = self.emb(x) + self.pos
        h = h + F.linear(F.linear(h, self.w), self.w.t())
        z = F.linear(h, self.emb.weight) + (h @ self.pos.t()).mean(-1, keepdim=True)
        return F.cross_entropy(z.flatten(0, 1), labels.flatten()) + self.twin.weight[:4].pow(2).sum()

    emb = nn.Embedding(12, 8)
    return (
        net(forward, emb=emb, twin=emb, w=par(16, 8), pos=par(3, 8)),
        (torch.randint(0, 12, (B, 3)), torch.randint(0, 12, (B, 3))),
        {},
    )


@structure
def buffers_under_two_names() -> Built:
    def forward(self, x, y):
        self.seen.add_(1)
        return F.mse_loss(self.b(self.a(x) * self.mask) * self.b.mask / self.other.clamp(max=1.0), y)

    model = net(
        forward, a=nn.Linear(8, 6), b=nn.Linear(6, 6), mask=torch.tensor([1.0, 0, 1, 1, 0, 1]), seen=torch.zeros(1)
    )
    model.b.register_buffer("mask", model.mask)
    model.register_buffer("other", model.seen)
    model.register_buffer("hidden", torch.rand(3), persistent=False)
    model.register_buffer("none", None)
    model.register_parameter("no", None)
    return model, xy(8, 6), {}


# -- parameters --


@structure
def unused_frozen_and_detached() -> Built:
    def forward(self, x, y):
        h = self.a(x)
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        side = self.side(h)
        return {"loss": F.mse_loss(self.head(h) + self.cut(x).detach(), y) + h.mul(target).mean(), "side": side}

    model = net(
        forward, a=nn.Linear(8, 8), teacher=nn.Linear(8, 8), side=nn.Linear(8, 3), head=nn.Linear(8, 8),
        cut=nn.Linear(8, 8), never=nn.Linear(4, 4), w=par(),
    )  # fmt: skip
    model.head.bias.requires_grad_(False)
    model.never.weight.requires_grad_(False)
    return model, xy(), {}


@structure
def lists_and_dicts_of_parameters() -> Built:
    def forward(self, x, kind, y):
        h = x
        for w, b in zip(self.ws, self.bs, strict=True):
            h = torch.tanh(F.linear(h, w, b))
        h = h * self.named["gain"] + self.named["shift"][kind]
        return F.mse_loss(h * self.named["t"].exp(), y)

    return (
        net(
            forward,
            ws=nn.ParameterList([par(12, 8), par(8, 12)]),
            bs=nn.ParameterList([par(12), par(8)]),
            named=nn.ParameterDict({"gain": par(1), "shift": par(2, 8), "t": par()}),
        ),
        (torch.randn(B, 8), torch.arange(B) % 2, torch.randn(B, 8)),
        {},
    )


@structure
def parameters_of_other_dtypes() -> Built:
    def forward(self, x, y):
        h = (x.bfloat16() @ self.low).float() + F.linear(x.double(), self.high).float()
        return F.mse_loss(h[:, self.order] * self.small.float(), y)

    model = net(
        forward, low=par(8, 6, dtype=torch.bfloat16), high=par(6, 8, dtype=torch.float64),
        small=par(6, dtype=torch.float16), order=nn.Parameter(torch.tensor([3, 1, 0, 5, 4, 2]), requires_grad=False),
    )  # fmt: skip
    return model, xy(8, 6), {}


@structure
def low_rank_adapters() -> Built:
    class Lora(nn.Module):
        def __init__(self, i: int, o: int) -> None:
            super().__init__()
            self.base = nn.Linear(i, o).requires_grad_(False)
            self.a, self.b, self.merged = par(3, i), par(o, 3), o > i

        def forward(self, x):
            if self.merged:
                return F.linear(x, self.base.weight + self.b @ self.a * 0.5, self.base.bias)
            return self.base(x) + x @ self.a.t() @ self.b.t() * 0.5

    def forward(self, x, y):
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, y)

    layers = nn.ModuleList(nn.Sequential(Lora(8, 16), nn.GELU(), Lora(16, 8)) for _ in range(2))
    return net(forward, layers=layers), xy(8, 8, 3), {}


@structure
def complex_rotations() -> Built:
    def forward(self, x, y):
        h = torch.view_as_complex(self.f(x).float().reshape(*x.shape[:-1], 2, 2, 2))
        h = torch.view_as_real(h * self.turns[: x.shape[1]].unsqueeze(1)).flatten(-3)
        return F.mse_loss(self.g(h), y) + torch.fft.rfft(h, dim=-1).abs().mean()

    turns = torch.polar(torch.ones(6, 2), torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.3])))
    return net(forward, f=nn.Linear(8, 8), g=nn.Linear(8, 8), turns=turns), xy(8, 8, 5), {}


# -- buffers written in forward, regions, hooks --


@whole_batch
def queue_of_keys_with_a_pointer() -> Built:
    def forward(self, x, y):
        q = F.normalize(self.f(x), dim=-1)
        with torch.no_grad():
            for p, s in zip((self.w, self.b), self.f.parameters(), strict=True):
                p.mul_(0.9).add_(s, alpha=0.1)
            k = F.normalize(F.linear(y, self.w, self.b), dim=-1)
        z = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().detach().t()], -1) / 0.2
        loss = F.cross_entropy(z, torch.zeros(x.shape[0], dtype=torch.long, device=x.device))
        with torch.no_grad():
            rows = (self.at + torch.arange(x.shape[0])) % 12
            self.queue[rows] = k
            self.at[0] = (self.at[0] + x.shape[0]) % 12
        return loss

    return (
        net(
            forward,
            f=nn.Linear(8, 4),
            w=torch.randn(4, 8),
            b=torch.zeros(4),
            queue=F.normalize(torch.randn(12, 4), dim=-1),
            at=torch.zeros(1, dtype=torch.long),
        ),
        xy(),
        {},
    )


@structure
def counters_and_schedules_in_buffers() -> Built:
    def forward(self, x, y):
        self.steps += 1
        warm = (self.steps.float() / 10).clamp(max=1.0)
        self.last = torch.full_like(self.last, 3.0)
        self.table[1:3, ::2] = self.steps.float()
        h = self.f(x) * warm + self.table.sum() * 0.1
        return F.mse_loss(torch.where(self.steps < 5, h, h * 0.5), y) * self.last

    return (
        net(
            forward,
            f=nn.Linear(8, 8),
            steps=torch.zeros((), dtype=torch.long),
            last=torch.zeros(()),
            table=torch.zeros(4, 4),
        ),
        xy(),
        {},
    )


@structure
def autocast_regions() -> Built:
    def forward(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.norm(self.f(x))
            q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
            h = h + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            with torch.autocast("cpu", enabled=False):
                h = self.g(h.float())
            h = torch.cat([h, self.f(h)], -1)
            h = h @ self.w + torch.einsum("bsd,de->bse", h, self.w)
            loss = F.mse_loss(h, y) + F.cross_entropy(h.flatten(0, 1), y.argmax(-1).flatten())
        return loss + self.g(x).pow(2).mean()

    return (
        net(forward, f=nn.Linear(8, 8), norm=nn.LayerNorm(8), qkv=nn.Linear(8, 24), g=nn.Linear(8, 8), w=par(16, 8)),
        xy(8, 8, 5),
        {},
    )


@structure
def autocast_decorated_and_disabled() -> Built:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.c = nn.Linear(8, 8), nn.Conv1d(5, 5, 3, padding=1)

        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x):
            return torch.bmm(self.c(self.f(x)).relu(), x.transpose(1, 2)).softmax(-1)

    class Whole(nn.Module):
        def forward(self, x):
            with torch.autocast(device_type=x.device.type, enabled=False):
                return (x.float() @ x.float().transpose(1, 2)).sin()

    def forward(self, x, y):
        return F.mse_loss(self.low(x).float() + self.whole(x), y)

    return net(forward, low=Half(), whole=Whole()), xy(8, 5, 5), {}


@structure
def checkpoint_regions() -> Built:
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    def forward(self, x, y):
        h, aux = checkpoint(lambda a, scale: (self.a(a) * scale, a.mean()), x, 2.0, use_reentrant=False)
        h = checkpoint_sequential(self.seq, 2, h, use_reentrant=False)
        return F.mse_loss(h, y) + aux * 0

    block = lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
    return net(forward, a=block(), seq=nn.Sequential(block(), block())), xy(8, 8, 3), {}


@structure
def forward_hooks_and_pre_hooks() -> Built:
    def forward(self, x, y):
        return F.mse_loss(self.b(self.a(x)), y) + sum(h.pow(2).mean() for h in self.seen)

    model = net(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    model.seen = []
    model.register_forward_pre_hook(lambda m, args: m.seen.clear())
    model.a.register_forward_hook(lambda m, args, out: out.relu() * 2)
    model.b.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    model.b.register_forward_hook(lambda m, args, kwargs, out: model.seen.append(out), with_kwargs=True)
    return model, xy(), {}


# -- parametrizations --


@structure
def weights_made_of_others() -> Built:
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).transpose(-1, -2)

    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = par(8, 2), par(2, 8)

        def forward(self, w):
            return w + self.a @ self.b

    def forward(self, x, y):
        with nn.utils.parametrize.cached():
            h = self.sym(x).tanh() + self.sym(x * 0.5)
        return F.mse_loss(self.old(self.pruned(self.rank(h))), y)

    model = net(forward, sym=nn.Linear(8, 8), rank=nn.Linear(8, 8), old=nn.Linear(8, 8), pruned=nn.Linear(8, 8))
    nn.utils.parametrize.register_parametrization(model.sym, "weight", Symmetric())
    nn.utils.parametrize.register_parametrization(model.rank, "weight", LowRank())
    nn.utils.parametrizations.weight_norm(model.old)
    torch.nn.utils.prune.l1_unstructured(model.pruned, "weight", amount=0.3)
    return model, xy(), {}


@structure
def spectral_norms() -> Built:
    def forward(self, x, y):
        return F.mse_loss(self.b(self.a(x)), y)

    model = net(forward, a=nn.utils.parametrizations.spectral_norm(nn.Linear(8, 12)), b=nn.Linear(12, 8))
    return model, xy(), {}


@structure
def spectral_norm_of_old() -> Built:
    def forward(self, x, y):
        return F.mse_loss(self.b(self.a(x)), y)

    return net(forward, a=nn.utils.spectral_norm(nn.Linear(8, 12)), b=nn.Linear(12, 8)), xy(), {}


@structure
def weight_norm_of_old() -> Built:
    def forward(self, x, y):
        return F.mse_loss(self.b(self.a(x)), y)

    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # the new one is a parametrization
        a = torch.nn.utils.weight_norm(nn.Linear(8, 12))
    return net(forward, a=a, b=nn.Linear(12, 8)), xy(), {}


@structure
def orthogonal_weights() -> Built:
    def forward(self, x, y):
        return F.mse_loss(self.b(self.a(x)) + self.c(x), y)

    o = nn.utils.parametrizations.orthogonal
    return (
        net(
            forward,
            a=o(nn.Linear(8, 6), orthogonal_map="cayley"),
            b=nn.Linear(6, 8),
            c=o(nn.Linear(8, 8), orthogonal_map="matrix_exp"),
        ),
        xy(),
        {},
    )


@structure
def orthogonal_householder() -> Built:
    def forward(self, x, y):
        return F.mse_loss(self.b(self.a(x)), y)

    o = nn.utils.parametrizations.orthogonal
    return net(forward, a=o(nn.Linear(8, 6)), b=nn.Linear(6, 8)), xy(), {}


# -- in place --


@structure
def writes_into_slices() -> Built:
    def forward(self, x, at, y):
        h = self.f(x)
        h[:, 0] = 0
        h[:, 1, ::3] += x[:, 0, :3]
        h[h > 1] = 0.5
        h[torch.arange(x.shape[0], device=x.device), at] = self.token
        h[:, :, [1, 4]] = h[:, :, [4, 1]] * 2
        cut = h.narrow(1, 2, 2)
        cut.clamp_(-1, 1).mul_(2)
        z = torch.zeros(x.shape[0], 4, 9)
        z[..., 1:].copy_(h)
        z.index_put_((torch.arange(x.shape[0], device=x.device), at), h[:, 1, 0:1], accumulate=True)
        z = z.index_fill_(1, torch.tensor([3]), 0.1).scatter_(2, at.view(-1, 1, 1), 5.0)
        row = z.select(1, 2)
        row.add_(1)
        return F.mse_loss(z, y)

    return (
        net(forward, f=nn.Linear(8, 8), token=par(8)),
        (torch.randn(B, 4, 8), torch.arange(B) % 4, torch.randn(B, 4, 9)),
        {},
    )


@structure
def frozen_parts_under_no_grad() -> Built:
    def forward(self, x, y):
        with torch.no_grad():
            base = self.base(x)
            scale = base.abs().amax(-1, keepdim=True).clamp_(min=1e-3)
            with torch.set_grad_enabled(False):
                code = (base / scale * 7).round()
        h = self.f(base) + (code * scale / 7).detach()
        with torch.set_grad_enabled(self.training):
            h = h + self.f(h.detach())
        stop = h - h.detach() + h.detach().sign()
        return F.mse_loss(stop, y)

    return net(forward, base=nn.Linear(8, 8), f=nn.Linear(8, 8)), xy(), {}


# -- more of what public code does --


@structure
def helpers_that_torch_would_compile() -> Built:
    scripted_gelu = lambda x: 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))

    def forward(self, x, y):
        h = scripted_gelu(self.f(x))
        h = h * self.g(x)
        with torch.autograd.set_detect_anomaly(False), torch.profiler.record_function("block"):
            h = h.clamp(min=-3).type_as(x).to(x).to(x.device, x.dtype).contiguous().view(-1, 8).view_as(x)
        assert h.shape == x.shape and h.is_floating_point() and h.requires_grad
        return F.smooth_l1_loss(h, y, reduction="none").sum(-1).mean()

    return net(forward, f=nn.Linear(8, 8), g=nn.Linear(8, 8)), xy(), {}


@structure
def transformer_layers_of_torch() -> Built:
    def forward(self, x, pad, y):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = self.enc(x, mask=mask, src_key_padding_mask=pad, is_causal=True)
        h = self.dec(h, x, tgt_mask=mask)
        return F.mse_loss(h * ~pad.unsqueeze(-1), y)

    pad = torch.zeros(B, 4, dtype=torch.bool)
    pad[::3, 3] = True
    enc = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2, enable_nested_tensor=False
    )
    dec = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
    return net(forward, enc=enc, dec=dec), (torch.randn(B, 4, 8), pad, torch.randn(B, 4, 8)), {}


@structure
def cells_and_convolutions() -> Built:
    def forward(self, x, y):
        h = self.conv(x.transpose(1, 2)).transpose(1, 2)
        h, _ = self.gru(h)
        state = self.start.expand(x.shape[0], -1)
        for t in h.unbind(1):
            state = self.cell(t, state)
        out = self.up(state.unsqueeze(-1)).squeeze(-1)
        return F.mse_loss(F.pixel_shuffle(out.view(-1, 4, 1, 2), 2).flatten(1), y)

    return (
        net(forward, conv=nn.Conv1d(8, 8, 3, padding="same", groups=2), gru=nn.GRU(8, 8, batch_first=True),
            cell=nn.GRUCell(8, 8), up=nn.ConvTranspose1d(8, 8, 1), start=par(1, 8)),
        (torch.randn(B, 4, 8), torch.randn(B, 8)),
        {},
    )  # fmt: skip


@structure
def weights_made_in_forward() -> Built:
    def forward(self, x, task, y):
        w = self.hyper(self.codes[task]).view(-1, 8, 8)
        h = torch.bmm(x, w.softmax(-1))
        h = torch.func.functional_call(self.g, {"weight": self.g.weight * 2, "bias": self.b}, (h,))
        mask = (self.scores.abs() >= self.scores.abs().median()).float()
        mask = mask + self.scores - self.scores.detach()
        return F.mse_loss(F.linear(h, self.f.weight * mask) + torch.kron(self.a, self.c), y)

    return (
        net(forward, hyper=nn.Linear(4, 64), codes=par(3, 4), g=nn.Linear(8, 8), b=par(8), f=nn.Linear(8, 8),
            scores=par(8, 8), a=par(2), c=par(4)),
        (torch.randn(B, 3, 8), torch.arange(B) % 3, torch.randn(B, 3, 8)),
        {},
    )  # fmt: skip


@structure
def losses_of_losses() -> Built:
    def forward(self, x, labels):
        hs, losses, metrics = x, {}, {}
        for i, layer in enumerate(self.layers):
            hs = layer(hs).relu()
            losses[f"aux{i}"] = F.cross_entropy(self.head(hs), labels, label_smoothing=0.1)
            metrics[f"right{i}"] = (self.head(hs).argmax(-1) == labels).float().mean()
        weights = torch.tensor([0.3, 0.7])
        losses["all"] = sum(losses.values()) + (torch.stack(list(losses.values())) * weights).sum()
        losses["decay"] = 1e-2 * torch.stack([p.norm() for p in self.parameters()]).sum()
        total = sum(v for k, v in losses.items() if not k.startswith("aux"))
        return {"loss": total, **{k: v.detach() for k, v in losses.items()}, **metrics, "n": labels.numel()}

    return (
        net(forward, layers=nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 12)]), head=nn.Linear(12, 5)),
        (torch.randn(B, 8), torch.randint(0, 5, (B,))),
        {},
    )


@structure
def adapters_on_frozen_norms() -> Built:
    def forward(self, x, y):
        h = self.stem(x)
        h = self.frozen(h.transpose(1, 2)).transpose(1, 2)
        h = F.layer_norm(h, (8,), self.scale) + F.group_norm(h.transpose(1, 2), 2, self.scale).transpose(1, 2)
        return F.mse_loss(F.rms_norm(h, (8,), self.scale) @ self.frozen.weight.diag(), y)

    model = net(forward, stem=nn.Linear(8, 8), frozen=nn.BatchNorm1d(8).requires_grad_(False), scale=par(8))
    model.register_load_state_dict_post_hook(lambda *_: None)
    real = model.train

    def train(mode: bool = True) -> nn.Module:  # batch norms that stay in eval mode, as detection models have them
        real(mode)
        model.frozen.eval()
        return model

    model.train = train
    model.frozen.running_mean.normal_()
    return model.train(), xy(8, 8, 3), {}


@structure
def distributions() -> Built:
    def forward(self, x, y):
        mean, spread = self.f(x).chunk(2, -1)
        q = torch.distributions.Normal(mean, spread.exp())
        kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(torch.zeros_like(mean), 1.0)).sum(-1)
        which = torch.distributions.Categorical(logits=self.g(x))
        likely = torch.distributions.Independent(torch.distributions.Normal(mean.unflatten(-1, (2, 4)), 1.0), 1)
        mixed = torch.distributions.MixtureSameFamily(which, likely).log_prob(y)
        return 0.1 * kl.mean() - mixed.mean()

    return net(forward, f=nn.Linear(8, 16), g=nn.Linear(8, 2)), xy(8, 4), {}


@structure
def tables_kept_in_python() -> Built:
    def forward(self, x, y):
        n = x.shape[1]
        if self.cos is None or self.cos.shape[0] < n:
            self.cos = torch.arange(n).float().cos().unsqueeze(-1)
        if n not in self.tables:
            self.tables[n] = torch.arange(n).float().sin().unsqueeze(-1)
        self.last = self.f(x) * self.cos[:n] + self.tables[n]
        return F.mse_loss(self.last, y)

    model = net(forward, f=nn.Linear(8, 8))
    model.cos, model.tables = None, {}
    return model, xy(8, 8, 5), {}


@whole_batch
def the_worst_rows() -> Built:
    def forward(self, x, labels):
        each = F.cross_entropy(self.f(x), labels, reduction="none")
        return each.topk(4).values.mean()

    return net(forward, f=nn.Linear(8, 5)), (torch.randn(B, 8), torch.randint(0, 5, (B,))), {}
