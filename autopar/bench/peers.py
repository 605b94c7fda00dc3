"""How others train the models of `autopar.bench.workloads`: what PyTorch itself offers, used as its documentation does.

Each peer takes a family's model, the whole batch and the number of ranks, and gives the parameters for an optimizer and
a function that runs forward and backward and returns a loss, of which the mean over all ranks is that of the batch.
Tensor parallelism is that of Megatron by `parallelize_module`, with the vocabulary cut in embedding, head and loss;
the stages of pipelines have equally many blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.bench.workloads import Made

Step = Callable[[], Tensor]
Trained = tuple[Step, Iterable[nn.Parameter]]


@dataclass(frozen=True)
class Family:
    """What the recipes of other systems say of a kind of model: ``blocks``: the attribute that lists its layers;
    ``columns``, ``rows``: linears of a block to cut by outputs and by inputs; ``tables``: embeddings of tokens to cut;
    ``heads``: classifiers to cut; ``fused``: linears of a block that make queries, keys and values at once, beside
    their attention; ``pieces``: modules that give the logits one after another."""

    blocks: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    tables: tuple[str, ...]
    heads: tuple[str, ...]
    fused: tuple[str, str] | None
    pieces: Callable[[Any], Sequence[nn.Module]]


class Chain(nn.Module):
    """Modules one after another, around functions of a tensor."""

    def __init__(self, modules: Sequence[nn.Module], run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.parts, self.run = nn.ModuleList(modules), run

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.run(x, *self.parts)
        return out


def _gpt(model: Any) -> Sequence[nn.Module]:
    body = model.transformer
    first = lambda ids, tokens, positions: tokens(ids) + positions(torch.arange(ids.shape[1]))
    last = lambda x, norm, head: head(norm(x))
    return [Chain([body.wte, body.wpe], first), *body.h, Chain([body.ln_f, model.lm_head], last)]


def _llama(model: Any) -> Sequence[nn.Module]:
    from autopar.models.llama import rotary

    body = model.model
    turned = lambda x, layer: layer(x, *rotary(x.shape[1], body.config.head_width, body.config.theta, x.device))
    layers = [Chain([layer], turned) for layer in body.layers]
    return [body.embed_tokens, *layers, Chain([body.norm, model.lm_head], lambda x, norm, head: head(norm(x)))]


def _mlp(model: Any) -> Sequence[nn.Module]:
    first, *rest = model.layers
    return [first, *(Chain([layer], lambda x, linear: linear(F.relu(x))) for layer in rest)]


def _vit(model: Any) -> Sequence[nn.Module]:
    token, positions = model.cls_token, model.pos_embed

    class First(nn.Module):
        """Patches behind the class token."""

        def __init__(self) -> None:
            super().__init__()
            self.patches, self.token, self.positions = model.patch_embed, token, positions

        def forward(self, images: Tensor) -> Tensor:
            patches = self.patches(images)
            tokens = torch.cat((self.token.expand(len(patches), -1, -1), patches), dim=1)
            return tokens + self.positions  # type: ignore[no-any-return]

    return [First(), *model.blocks, Chain([model.norm, model.head], lambda x, norm, head: head(norm(x)[:, 0]))]


FAMILIES = {
    "gpt": Family(
        "transformer.h",
        ("attn.c_attn", "mlp.c_fc"),
        ("attn.c_proj", "mlp.c_proj"),
        ("transformer.wte",),
        ("lm_head",),
        ("attn", "c_attn"),
        _gpt,
    ),
    "llama": Family(
        "model.layers",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        ("self_attn.o_proj", "mlp.down_proj"),
        ("model.embed_tokens",),
        ("lm_head",),
        None,
        _llama,
    ),
    "mlp": Family("layers", (), (), (), (), None, _mlp),
    "vit": Family("blocks", ("attn.qkv", "mlp.fc1"), ("attn.proj", "mlp.fc2"), (), (), ("attn", "qkv"), _vit),
}


def eager(family: Family, made: Made, ranks: int) -> Trained:
    """One process."""
    model, args = made
    return _plain(model, args), model.parameters()


def inductor(family: Family, made: Made, ranks: int) -> Trained:
    """One process, compiled by `torch.compile`."""
    model, args = made
    return _plain(torch.compile(model), args), model.parameters()  # type: ignore[arg-type]


def ddp(family: Family, made: Made, ranks: int) -> Trained:
    """Every rank its rows; gradients reduced in buckets beside the backward."""
    model, args = made
    return _plain(nn.parallel.DistributedDataParallel(model), _rows(args)), model.parameters()


def fsdp2(family: Family, made: Made, ranks: int) -> Trained:
    """`fully_shard` of every block and of the whole."""
    from torch.distributed.device_mesh import init_device_mesh

    model, args = made
    _shard(family, model, init_device_mesh("cpu", (ranks,)))
    return _plain(model, _rows(args)), model.parameters()


def tensor_parallel(family: Family, made: Made, ranks: int) -> Trained:
    """`parallelize_module` over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    model, args = made
    _parallelize(family, model, init_device_mesh("cpu", (ranks,)))
    return _with_parallel_loss(_plain(model, args)), model.parameters()


def tensor_parallel_fsdp2(family: Family, made: Made, ranks: int) -> Trained:
    """`parallelize_module` over pairs of ranks, `fully_shard` across them."""
    from torch.distributed.device_mesh import init_device_mesh

    model, args = made
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    _parallelize(family, model, mesh["tp"])
    _shard(family, model, mesh["dp"])
    own = tuple(t.chunk(ranks // 2)[mesh["dp"].get_local_rank()] for t in args)
    return _with_parallel_loss(_plain(model, own)), model.parameters()


def pipelining(family: Family, made: Made, ranks: int, microbatches: int) -> Trained:
    """1F1B of `torch.distributed.pipelining`, a stage a rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, (x, y) = made
    pieces, rank = family.pieces(model), dist.get_rank()
    blocks = len(pieces) - 1  # the first block stands with the embedding, the last with the head
    edges = [0, *(1 + round(blocks * r / ranks) for r in range(1, ranks)), len(pieces)]
    with torch.no_grad():
        takes = [x.chunk(microbatches)[0]]
        for low, high in pairwise(edges):
            takes.append(nn.Sequential(*pieces[low:high])(takes[-1]))
    own = nn.Sequential(*pieces[edges[rank] : edges[rank + 1]])
    like = [torch.empty_like(t, requires_grad=t.is_floating_point() and i > 0) for i, t in enumerate(takes)]
    stage = PipelineStage(own, rank, ranks, x.device, input_args=like[rank], output_args=like[rank + 1])
    losses: list[Tensor] = []
    schedule = Schedule1F1B(stage, n_microbatches=microbatches, loss_fn=_loss)

    def step() -> Tensor:
        losses.clear()
        target: dict[str, Any] = {"target": y, "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*[x] * (rank == 0), return_outputs=False, **target)
        return torch.stack(losses).mean().detach() * ranks if losses else torch.zeros(())

    return step, own.parameters()


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _plain(model: nn.Module, args: tuple[Tensor, ...]) -> Step:
    def step() -> Tensor:
        loss: Tensor = model(*args)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step


def _rows(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.chunk(dist.get_world_size())[dist.get_rank()] for t in args)


def _shard(family: Family, model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in _blocks(family, model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _blocks(family: Family, model: nn.Module) -> Iterator[nn.Module]:
    yield from operator.attrgetter(family.blocks)(model)


def _parallelize(family: Family, model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    head = partial(ColwiseParallel, output_layouts=Shard(-1), use_local_output=False)
    if not family.columns:  # linears in a row: by outputs, by inputs, and so on; the last makes the logits
        blocks = list(_blocks(family, model))
        for i, block in enumerate(blocks):
            last = i == len(blocks) - 1
            style = head() if last else RowwiseParallel() if i % 2 else ColwiseParallel()
            parallelize_module(block, mesh, style)
        return
    for block in _blocks(family, model):
        if family.fused is not None:
            attention = block.get_submodule(family.fused[0])
            _heads_together(attention.get_submodule(family.fused[1]), mesh.size())
            attention.heads //= mesh.size()
            if hasattr(attention, "qkv"):
                attention.forward = MethodType(_attention_of_own_heads, attention)
        plan: dict[str, Any] = {name: ColwiseParallel() for name in family.columns}
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in family.rows})
    plan = {name: RowwiseParallel(input_layouts=Replicate()) for name in family.tables}
    parallelize_module(model, mesh, plan | {name: head() for name in family.heads})


def _heads_together(linear: nn.Module, ranks: int) -> None:
    """Order the rows of a linear so that a rank's share holds queries, keys and values of its own heads."""
    for parameter in linear.parameters():
        order = torch.arange(len(parameter)).view(3, ranks, -1).transpose(0, 1).flatten()
        parameter.data = parameter.data[order]


def _attention_of_own_heads(self: Any, x: Tensor) -> Tensor:
    """ViT's attention, which reads the width of a head off its input, on some of the heads."""
    q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    return out


def _with_parallel_loss(step: Step) -> Step:
    from torch.distributed.tensor.parallel import loss_parallel

    def parallel() -> Tensor:
        with loss_parallel():
            loss = step()
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    return parallel
