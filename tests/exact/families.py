"""The solver's own plans of model families that it was not tuned for, in the stacked semantics (float64, one process).

Families x clusters x memory limits: ``loose`` (the cluster's own) and ``tight`` (half way to the leanest plan). The
clusters are as unlike as can be: on ``local`` messages are dear, so small models share out work that ranks would repeat
faster (`choosing/at_work.py`: their gaps are wide, and called so); on ``busy``, two nodes, compute is, and nearly
everything is divided. Prints a row a plan; ends with exit code 1 where a plan is not equal, does not fit, has a wide
gap or none, or is predicted slower than a pinned one. ``--families t5,lstm``, ``--clusters busy`` and ``--minutes 20``
run a part; families that were left out for time are named.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar.build import apply
from autopar.choosing.solve import Solved, solved
from autopar.cluster import Cluster
from autopar.equality import FP64
from autopar.errors import AutoparError, NothingFits
from autopar.hardware import Figure

sys.path.insert(0, str(Path(__file__).parent.parent))
import limits
from stacked_judge import StackedJudge

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
FAMILIES: dict[str, Callable[[], Built]] = {}
ROWS, LENGTH, VOCABULARY = 8, 12, 48
WIDEST_GAP = 0.05
SLOWER = 1.02  # than a pinned plan, by independent prediction: the side is decided after the core
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def family(make: Callable[[], Built]) -> Callable[[], Built]:
    """Register a factory under its name."""
    FAMILIES[make.__name__] = make
    return make


def ids(*shape: int) -> Tensor:
    return torch.randint(5, VOCABULARY, shape)


def images(side: int) -> Tensor:
    return torch.randn(ROWS, 3, side, side)


class WithLoss(nn.Module):
    """A model and a loss of whatever it returns: its own, else the mean square of all that has a gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Loss ``[]``."""
        out = self.model(*args, **kwargs)
        own = out.get("loss") if isinstance(out, dict) else None
        if own is not None:
            return own
        floats = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        return torch.stack([t.square().mean() for t in floats]).sum()


def hf(name: str, **settings: Any) -> nn.Module:
    """A model class of transformers from its config; ``name``: ``Config:Model``."""
    import transformers

    config, model = name.split(":")
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    made.config.use_cache = False
    for part in made.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return made


def text(model: nn.Module, **more: Any) -> Built:
    tokens = ids(ROWS, LENGTH)
    labels = tokens.clone()
    labels[1, 3:] = -100
    return model, (), {"input_ids": tokens, "labels": labels, **more}


# -- of transformers -------------------------------------------------------------------------------------------------


@family
def llama_tied() -> Built:
    grouped = {**TEXT, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return text(hf("LlamaConfig:LlamaForCausalLM", **grouped))


@family
def gpt2_last_layers_trained() -> Built:
    model = hf(
        "GPT2Config:GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=32,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model.requires_grad_(False)
    model.get_submodule("transformer.h.2").requires_grad_(True)
    return text(model)


@family
def bert_padded() -> Built:
    keep = (torch.arange(LENGTH) < torch.tensor([12, 7, 9, 3, 12, 5, 8, 10])[:, None]).long()
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return text(hf("BertConfig:BertForMaskedLM", **TEXT, **dropout), attention_mask=keep)


@family
def gemma_sliding_window() -> Built:
    windows = {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 4, "query_pre_attn_scalar": 8}
    return text(hf("Gemma3TextConfig:Gemma3ForCausalLM", **TEXT, **windows))


@family
def deberta() -> Built:
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return text(hf("DebertaV2Config:DebertaV2ForMaskedLM", **TEXT, **relative, **dropout))


@family
def mamba() -> Built:
    return text(
        hf(
            "MambaConfig:MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip


@family
def t5() -> Built:
    model = hf(
        "T5Config:T5ForConditionalGeneration", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2,
        num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return model, (), {"input_ids": ids(ROWS, LENGTH), "labels": ids(ROWS, 8), "use_cache": False}


@family
def whisper() -> Built:
    model = hf(
        "WhisperConfig:WhisperForConditionalGeneration", vocab_size=VOCABULARY, d_model=32, num_mel_bins=8,
        encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_attention_heads=4,
        decoder_attention_heads=4, max_source_positions=10, max_target_positions=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=3, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    return model, (), {"input_features": torch.randn(ROWS, 8, 20), "labels": ids(ROWS, 8), "use_cache": False}


@family
def siglip() -> Built:
    model = hf(
        "SiglipConfig:SiglipModel",
        text_config={**TEXT, "max_position_embeddings": LENGTH},
        vision_config={**TEXT, "image_size": 16, "patch_size": 4},
    )
    return WithLoss(model), (), {"input_ids": ids(ROWS, LENGTH), "pixel_values": images(16), "return_loss": True}


@family
def swin() -> Built:
    model = hf(
        "SwinConfig:SwinForImageClassification", image_size=16, patch_size=2, embed_dim=16, depths=[2, 2],
        num_heads=[2, 4], window_size=4, num_labels=6, drop_path_rate=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    return model, (), {"pixel_values": images(16), "labels": torch.randint(0, 6, (ROWS,))}


@family
def convnext() -> Built:
    model = hf("ConvNextConfig:ConvNextForImageClassification", hidden_sizes=[8, 16], depths=[2, 2], num_labels=6,
               num_stages=2, drop_path_rate=0.0)  # fmt: skip
    return model, (), {"pixel_values": images(32), "labels": torch.randint(0, 6, (ROWS,))}


# -- of torch --------------------------------------------------------------------------------------------------------


class Dense(nn.Module):
    """Every layer reads all before it; BatchNorm; pooling between the blocks (Huang et al. 2017)."""

    def __init__(self, layers: int = 4, growth: int = 4) -> None:
        super().__init__()
        self.stem, width, self.blocks = nn.Conv2d(3, 8, 3, padding=1), 8, nn.ModuleList()
        for _ in range(2):
            block = nn.ModuleList()
            for _ in range(layers):
                block.append(nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, growth, 3, padding=1)))
                width += growth
            self.blocks.append(block)
        self.head = nn.Linear(width, 6)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        """``x [B, 3, H, W], labels [B]``."""
        x = self.stem(x)
        for block in self.blocks:
            parts = [x]
            for layer in block.children():
                parts.append(layer(torch.cat(parts, 1)))
            x = F.avg_pool2d(torch.cat(parts, 1), 2)
        logits = self.head(x.mean((2, 3)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits, "features": [x]}


@family
def densenet() -> Built:
    return Dense(), (images(8), torch.randint(0, 6, (ROWS,))), {}


class UNet(nn.Module):
    """Skips from each scale down to the same scale up."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        pairs = list(zip([3, *widths], widths, strict=False))
        self.down = nn.ModuleList(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b)) for a, b in pairs)
        self.up = nn.ModuleList(nn.Conv2d(a + b, a, 3, padding=1) for a, b in reversed(pairs[1:]))
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """``x, target [B, 3, H, W]``."""
        skips = []
        for i, step in enumerate(self.down):
            x = F.silu(step(x if i == 0 else F.max_pool2d(x, 2)))
            skips.append(x)
        x = skips.pop()
        for step in self.up:
            x = F.silu(step(torch.cat([skips.pop(), F.interpolate(x, scale_factor=2.0)], 1)))
        return F.mse_loss(self.out(x), target)


@family
def unet() -> Built:
    return UNet(), (images(16), images(16)), {}


@family
def lstm() -> Built:
    return WithLoss(nn.LSTM(8, 16, 2, batch_first=True)), (torch.randn(ROWS, 5, 8),), {}


@family
def encoder_decoder_of_torch() -> Built:
    model = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    return (
        WithLoss(model),
        (torch.randn(ROWS, 8, 16), torch.randn(ROWS, 6, 16)),
        {"tgt_mask": mask, "tgt_is_causal": True},
    )


class Experts(nn.Module):
    """Top-2 of 4 experts in each of two layers, a balance loss that is not linear in the batch."""

    def __init__(self, width: int = 16, hidden: int = 24, experts: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.routers = nn.ModuleList(nn.Linear(width, experts, bias=False) for _ in range(2))

        def make(*shape: int) -> nn.ParameterList:
            return nn.ParameterList(nn.Parameter(torch.randn(experts, *shape) * 0.2) for _ in range(2))

        self.up, self.down = make(width, hidden), make(hidden, width)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """``tokens, labels [B, T]``."""
        x, balance = self.embed(tokens), torch.zeros(())
        for router, up, down in zip(self.routers, self.up, self.down, strict=True):
            p = router(x).softmax(-1)
            top, chosen = p.topk(2, -1)
            gate = torch.zeros_like(p).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
            balance = balance + (p.mean((0, 1)) * (gate > 0).to(p.dtype).mean((0, 1))).sum()
            hidden = F.silu(torch.einsum("btd,edf->btef", x, up))
            x = x + torch.einsum("btef,efd,bte->btd", hidden, down, gate)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.01 * balance


@family
def experts() -> Built:
    return Experts(), (ids(ROWS, 6), ids(ROWS, 6)), {}


# -- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One plan. ``wrong``: what is; empty where nothing is."""

    family: str
    cluster: str
    memory: str
    plan: str = ""
    worst: float = 0.0
    gap: float | None = None
    seconds: float = 0.0
    wrong: str = ""

    def __str__(self) -> str:
        gap = "-" if self.gap is None else f"{self.gap:.2%}"
        said = (
            f"{'WRONG' if self.wrong else 'equal'} {self.family:26s} {self.cluster:6s} {self.memory:6s} {self.plan:48s}"
        )
        return f"{said} worst {self.worst:.1e} gap {gap} {self.seconds:.1f} CPU s {self.wrong}"


def cluster_of(name: str) -> Cluster:
    """``one`` and ``local``: 1 and 4 ranks of this machine. ``busy``: two nodes of 4, an H100's links without latency
    and a chip 3000 times slower, so that tiny models divide as large ones do."""
    if name != "busy":
        return Cluster.local(ranks={"one": 1, "local": 4}[name])
    figures = Cluster.load("h100-dgx")
    slow = {dtype: _times(f, 1 / 3000) for dtype, f in figures.chip.flops.items()}
    bandwidth = _times(figures.chip.memory_bandwidth, 1 / 3000)
    tiers = tuple(
        replace(
            tier,
            spans=tier.spans and 4,
            collectives={k: replace(c, latency=_times(c.latency, 1e-3)) for k, c in tier.collectives.items()},
        )
        for tier in figures.tiers
    )
    chip = replace(figures.chip, kind="cpu", flops=slow, memory_bandwidth=bandwidth)
    return replace(figures, nodes=2, ranks_per_node=4, chip=chip, tiers=tiers, protocols=())


def _times(figure: Figure, factor: float) -> Figure:
    return Figure(figure.value * factor, "a test's figure", verified=False)


def rows(name: str, clusters: list[str]) -> Iterator[Row]:
    """All plans of one family."""
    torch.manual_seed(0)
    model, args, kwargs = FAMILIES[name]()
    judge = StackedJudge(model.train(), args, kwargs)
    for cluster_name in clusters:
        cluster = cluster_of(cluster_name)
        started = time.process_time()
        loose = solved(judge.captured, cluster, prepared=judge.prepared(1))
        yield judged(Row(name, cluster_name, "loose"), judge, loose, cluster, started)
        leanest = limits.leanest(judge.captured, cluster, loose.plan, prepared=judge.prepared(1))
        short = limits.with_memory(cluster, (limits.peak(loose.plan) + limits.peak(leanest)) / 2)
        started = time.process_time()
        try:
            tight = solved(judge.captured, short, prepared=judge.prepared(1))
        except NothingFits as error:
            yield Row(name, cluster_name, "tight", seconds=time.process_time() - started, wrong=str(error))
            continue
        yield judged(Row(name, cluster_name, "tight"), judge, tight, short, started)


def judged(row: Row, judge: StackedJudge, found: Solved, cluster: Cluster, started: float) -> Row:
    """The row with what the plan is worth."""
    plan, took, wrong = found.plan, time.process_time() - started, []
    worst = judge.distances(apply(plan, judge.prepared(plan.microbatches)))[0]
    if worst.rel > FP64.limits[worst.kind]:
        wrong.append(f"not equal: {worst}")
    if plan.fits is False:
        wrong.append("does not fit")
    if plan.proof.gap is None or plan.proof.gap > WIDEST_GAP:
        wrong.append("wide gap")
    rival = limits.fastest_pinned(judge.prepared, cluster, counts=(1,))
    if rival is not None and (plan.predicted.step_time_s or 0.0) > SLOWER * (rival.predicted.step_time_s or 0.0):
        wrong.append(f"{plan.predicted.step_time_s} s, {rival.one_line()} takes {rival.predicted.step_time_s}")
    return replace(row, plan=plan.one_line(), worst=worst.rel, gap=plan.proof.gap, seconds=took, wrong="; ".join(wrong))


def main() -> int:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--clusters", default="one,local,busy")
    parser.add_argument("--minutes", type=float, default=60.0, help="no further family is begun after so many")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    began, count, wrong, left = time.perf_counter(), 0, 0, []
    for name in options.families.split(","):
        if time.perf_counter() - began > 60 * options.minutes:
            left.append(name)
            continue
        try:
            for row in rows(name, options.clusters.split(",")):
                print(row, flush=True)
                count, wrong = count + 1, wrong + bool(row.wrong)
        except AutoparError as error:
            print(f"WRONG {name}: refused: {error}", flush=True)
            count, wrong = count + 1, wrong + 1
    print(f"\n{count} plans, {wrong} wrong{'; left out for time: ' + ', '.join(left) if left else ''}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
