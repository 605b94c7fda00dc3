"""One published configuration priced: its model, its cluster, its recipe and its layout, simulated for one step."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.pricing.compose import Layout, Priced, step_of
from autopar.pricing.fp8 import in_fp8
from autopar.pricing.kernels import unit_cost
from autopar.pricing.recipe import FLASH, Recipe, recipe
from autopar.pricing.symbols import Compiled, counted
from autopar.solver.cost.device import Device
from autopar.solver.simulate.engine import Timeline
from autopar.solver.simulate.step import run
from autopar.solver.work import Move, Op, Piece, Unit, gathered_again

if TYPE_CHECKING:
    from autopar.bench.published_rows import Row

GIB = 2**30
VOCABULARY = 50304  # where a row states none: GPT-2's, padded as Megatron-LM pads it
DEVICES = {  # words of a row's `gpu` -> the shipped cluster of such nodes
    r"\bH200\b": "h200-dgx",
    r"\bH100\b.*Grand Teton": "h100-grandteton",
    r"\bH100\b": "h100-dgx",
    r"\bA100\b.*\b40 ?GB\b": "a100-40gb",
    r"\bA100\b": "a100-dgx",
}
OTHER_BOARDS = r"PCI|\bNVL\b"  # the same name, but slower chips and no switch between them
ACTIVATIONS = {"gelu": "gelu", "swiglu": "swiglu", "geglu": "swiglu", "relu2": "relu2"}
"""A row's `ffn_type` -> the reference model's activation, with as many operations and bytes."""
BLOCKS = re.compile(r"\bblock, *(\d+)")
"""In a row's `recompute`: so many layers of each chunk, Megatron's "block" method."""
SCHEDULES = {  # letters and digits of a row's `pp_schedule` -> of the simulator
    "": "1f1b",
    "none": "1f1b",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved",
    "1f1bi": "interleaved",
    "gpipe": "gpipe",
    "zb1p": "zb-1p",
    "zb2p": "zb-2p",
}


@dataclass(frozen=True)
class PricedRow:
    """Seconds of a step; GiB of the fullest rank; whether that fits, with what allocator and driver add; ``parts``:
    seconds (``*_s``) and GiB (``*_gib``) by owner."""

    step_s: float
    peak_gib: float
    fits: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    timeline: Timeline | None = None


def price_row(row: Row, cluster: Cluster | None = None) -> PricedRow:
    """Price a row, on its own cluster unless another is given. Raises AutoparError where an input that is needed is
    unknown."""
    return price_layout(row, layout_of(row), cluster)


def price_layout(row: Row, layout: Layout, cluster: Cluster | None = None) -> PricedRow:
    """The same with another layout than the row's own."""
    cluster = cluster or cluster_of(row)
    priced = priced_units(replace(row, mbs=layout.rows), layout, recipe_of(row), cluster)
    return summary(run(step_of(layout, priced)), cluster, row.mem_kind)


def summary(timeline: Timeline, cluster: Cluster, mem_kind: str = "") -> PricedRow:
    """Step seconds and the peak of the fullest rank: of live tensors, or where ``mem_kind`` says so what the allocator
    reserved for them. Whether it fits counts the driver's context too."""
    rank, peak = timeline.worst
    held = cluster.chip.held(peak.nbytes)
    reserved = held - cluster.chip.context if "max reserved" in mem_kind else peak.nbytes
    parts = {f"{kind}_s": seconds for kind, seconds in timeline.parts(rank).items()}
    parts |= {f"{owner}_gib": nbytes / GIB for owner, nbytes in peak.owners.items()}
    return PricedRow(timeline.seconds, reserved / GIB, held <= cluster.memory, parts, timeline)


def cluster_of(row: Row) -> Cluster:
    """The cluster of a row, with the nodes, the fabric and the power cap that it states."""
    name = next((c for words, c in DEVICES.items() if re.search(words, row.gpu)), None)
    if name is None or re.search(OTHER_BOARDS, row.gpu):
        raise AutoparError(f"gpu {row.gpu!r} is not known. Legal: H200, H100, A100 and A100 40GB, on SXM boards.")
    cluster = Cluster.load(name)
    if row.gpus_per_node:
        cluster = cluster.with_node(row.gpus_per_node)
    cluster = replace(cluster, nodes=math.ceil(row.gpus / cluster.ranks_per_node))
    if row.run.fabric_gbps_per_node:
        cluster = cluster.with_fabric(row.run.fabric_gbps_per_node)
    if row.run.tdp_w:
        cluster = cluster.with_power_cap(row.run.tdp_w)
    return cluster


def recipe_of(row: Row) -> Recipe:
    """How the run computes, with what it states."""
    return recipe(row.run.source_kind or framework_of(row), **vars(row.run))


def framework_of(row: Row) -> str:
    """The framework of a row that states none: PyTorch's FSDP where weights or gradients are sharded; Megatron-LM of
    2021 for a GPT on A100s; else what came after it, with flash attention."""
    if (row.zero_stage or 0) >= 2:
        return "torchtitan"
    return "megatron" if family_of(row) == "gpt" and "A100" in row.gpu else "nemo"


def family_of(row: Row) -> str:
    """The reference model of a row; what has fewer heads of keys and values is no GPT-2.

    Raises AutoparError for an MLP that is not known.
    """
    if row.ffn_type == "gelu" and row.kv_heads in (0, row.heads):
        return "gpt"
    if row.ffn_type not in ACTIVATIONS:
        raise AutoparError(f"ffn_type {row.ffn_type!r} is not known. Legal: {', '.join(ACTIVATIONS)}.")
    return "llama"


def layout_of(row: Row) -> Layout:
    """How the row's model lies on its ranks."""
    for name in ("tp", "pp", "dp", "mbs", "gbs", "seq", "layers", "hidden", "heads", "ffn"):
        if not getattr(row, name):
            raise AutoparError(f"{name} is not stated.")
    schedule, vp = schedule_of(row)
    return Layout(
        layers=row.layers,
        tp=row.tp,
        cp=row.cp or 1,
        dp=row.dp,
        ep=experts_axis(row),
        pp=row.pp,
        vp=vp,
        rows=row.mbs,
        microbatches=max(1, math.ceil(row.gbs / (row.dp * row.mbs))),
        sequence_parallel=bool(row.sequence_parallel) and row.tp > 1,
        zero=row.zero_stage or 0,
        reshard=row.run.fsdp_reshard_after_forward is not False,
        recompute=recompute_of(row.recompute),
        recomputed=int(found[1]) if (found := BLOCKS.search(row.recompute or "")) else 0,
        schedule=schedule,
        tied=family_of(row) == "gpt",
    )


def schedule_of(row: Row) -> tuple[str, int]:
    """(schedule, chunks a rank). An interleaved schedule that states no chunks has as many as there are layers; several
    chunks without another schedule are interleaved."""
    if row.pp == 1:
        return "1f1b", 1
    name = re.sub(r"[^a-z0-9]", "", (row.pp_schedule or "").lower())
    if name not in SCHEDULES:
        legal = "none, 1F1B, interleaved-1F1B, 1F1B-I, GPipe, ZB-1p, ZB-2p"
        raise AutoparError(f"pp_schedule {row.pp_schedule!r} is not known. Legal: {legal}.")
    schedule = SCHEDULES[name]
    vp = row.vp or (math.ceil(row.layers / row.pp) if schedule == "interleaved" else 1)
    if schedule in ("1f1b", "interleaved"):
        schedule = "interleaved" if vp > 1 else "1f1b"
    return schedule, vp


def recompute_of(text: str | None) -> str:
    """What a row says of recomputation in one word; not stated: none.

    >>> recompute_of("full (per block)"), recompute_of("selective (attention core)"), recompute_of(None)
    ('full', 'attention', 'none')
    """
    words = (text or "none").lower()
    if words.startswith("selective"):
        return "attention" if "attention" in words else "ops"
    found = next((known for known in ("none", "full") if words.startswith(known)), None)
    if found is None:
        raise AutoparError(f"recompute {text!r} is not known. Legal: none, full, selective.")
    return found


def experts_axis(row: Row) -> int:
    """Ranks that share the experts of a layer: neighbours among those of context and data. 1 where there are none.
    Raises AutoparError where they do not divide experts and ranks."""
    if not row.moe_experts:
        return 1
    if not row.moe_topk:
        raise AutoparError("moe_topk is not stated.")
    ep, shards = row.ep or 1, (row.cp or 1) * row.dp
    if row.moe_experts % ep or shards % ep:
        raise AutoparError(f"ep={ep}: does not divide moe_experts={row.moe_experts} and cp x dp={shards}.")
    return ep


def dtype_of(precision: str) -> tuple[str, bool]:
    """The 16-bit type of weights and activations, and whether linears run in fp8.

    >>> dtype_of("fp16/bf16 (not stated)"), dtype_of("fp8")
    (('fp16', False), ('bf16', True))
    """
    words = precision.lower()
    if not any(known in words for known in ("bf16", "fp16", "fp8")):
        raise AutoparError(f"precision {precision!r} is not known. Legal: bf16, fp16, fp8.")
    return "fp16" if words.startswith("fp16") else "bf16", "fp8" in words


def priced_units(row: Row, layout: Layout, how: Recipe, cluster: Cluster) -> Priced:
    """The reference model's units at the row's sizes, priced."""
    if dtype_of(row.precision)[1] and "fp8" not in cluster.chip.flops:
        raise AutoparError(f"precision {row.precision!r}: {cluster.chip.name} has no fp8 matmuls. Take bf16.")
    sizes = sizes_of(row, layout)
    device = cluster.chip.device()
    how = available(how, device, row.run.attention_kernel)
    units = units_at(row, layout, how, sizes)
    prefix, layer, suffix = (unit_cost(units[name], how, device) for name in ("prefix", "layer", "suffix"))
    beside = cluster.chip.efficiency.get("beside")
    return Priced(
        prefix,
        layer,
        suffix,
        boundary=2.0 * row.mbs * row.seq * row.hidden / layout.cp,
        recipe=how,
        device=device,
        network=cluster.network(),
        beside=beside.value if beside is not None else 1.0,
        table=sizes["vocab"] * row.hidden / layout.tp,
    )


def available(how: Recipe, device: Device, stated: str | None) -> Recipe:
    """The recipe with an attention kernel that the device has: libraries that prefer cuDNN's on Hopper run
    flash-attention 2 before it (Transformer Engine). A kernel that a run states stays."""
    if stated or how.attention not in FLASH or how.attention in {name for name, *_ in device.attentions}:
        return how
    return replace(how, attention="flash2")


def sizes_of(row: Row, layout: Layout) -> dict[str, int]:
    """Values of the symbols of closed forms."""
    return {
        "b": row.mbs,
        "s": row.seq,
        "tp": layout.tp,
        "cp": layout.cp,
        "ep": layout.ep,
        "h": row.hidden,
        "heads": row.heads,
        "kv_heads": max(row.kv_heads or row.heads, layout.tp),
        "head": row.hidden // row.heads,
        "ffn": row.ffn,
        "vocab": padded(row.vocab or VOCABULARY, layout.tp),
        "experts": row.moe_experts,
        "topk": row.moe_topk,
    }


def units_at(row: Row, layout: Layout, how: Recipe, sizes: Mapping[str, int]) -> dict[str, Unit]:
    """Units of the reference model as the row's framework runs them."""
    units = reference(row, layout, how)(sizes)
    if layout.tp > 1 and not how.sharded_logits:
        alone = reference(row, replace(layout, tp=1, sequence_parallel=False), how)
        units["suffix"] = gathered_logits(units["suffix"], alone({**sizes, "tp": 1})["suffix"])
    if how.gathers_again:
        units = {name: gathered_again(unit) for name, unit in units.items()}
    if dtype_of(row.precision)[1]:
        units["layer"] = in_fp8(units["layer"], how.keeps_fp8)
    return units


def gathered_logits(parted: Unit, whole: Unit) -> Unit:
    """The last unit with logits gathered before the loss: to the head as it is ``parted``, then as it is ``whole``."""
    (head, own), (loss, logits) = (_head(unit) for unit in (parted, whole))
    gather = Move("", "tp", "all_gather", logits, "", None, weight=False, source=own, result=logits)
    entries = (*parted.entries[: head + 1], gather, *whole.entries[loss + 1 :])
    return replace(parted, entries=entries, made=parted.made | whole.made)


def _head(unit: Unit) -> tuple[int, Piece]:
    """The place of the last matmul of a unit, and what it writes."""
    heads = [(i, e.writes[0]) for i, e in enumerate(unit.entries) if isinstance(e, Op) and e.kind == "matmul"]
    return heads[-1]


def reference(row: Row, layout: Layout, how: Recipe) -> Compiled:
    """Closed forms of the units of a row's structure, as one function of the sizes."""
    family = family_of(row)
    return counted(
        family,
        tp=layout.tp > 1,
        sp=layout.sequence_parallel,
        cp=layout.cp > 1,
        tied=layout.tied,
        dtype=dtype_of(row.precision)[0],
        activation=ACTIVATIONS[row.ffn_type],
        dropout=how.dropout and family == "gpt",
        experts=bool(row.moe_experts),
    )


def padded(vocabulary: int, tp: int) -> int:
    """A vocabulary padded to a multiple of 128 on each tensor rank, as Megatron-LM pads it.

    >>> padded(50257, 8), padded(128256, 1)
    (51200, 128256)
    """
    return -(-vocabulary // (128 * tp)) * 128 * tp
