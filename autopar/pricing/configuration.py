"""One published configuration priced: its model, its cluster, its recipe and its layout, simulated for one step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.pricing.compose import Layout, Priced, step_of
from autopar.pricing.fp8 import in_fp8
from autopar.pricing.kernels import unit_cost
from autopar.pricing.recipe import Recipe, recipe
from autopar.pricing.symbols import Compiled, compiled, reference_units
from autopar.solver.simulate.engine import Timeline
from autopar.solver.simulate.step import run
from autopar.solver.work import Move, Op, Piece, Unit, gathered_again

if TYPE_CHECKING:
    from autopar.bench.published_rows import Row

GIB = 2**30
VOCABULARY = 50304  # where a row states none: GPT-2's, padded as Megatron-LM pads it
DEVICES = {  # words of a row's `gpu` -> the shipped cluster of such nodes
    ("H100", "Grand Teton"): "h100-grandteton",
    ("H100",): "h100-dgx",
    ("A100",): "a100-dgx",
}
FAMILIES = {"gelu": "gpt", "swiglu": "llama", "relu2": "llama"}


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
    cluster = cluster or cluster_of(row)
    how = recipe_of(row)
    layout = layout_of(row)
    priced = priced_units(row, layout, how, cluster)
    timeline = run(step_of(layout, priced))
    return summary(timeline, cluster, row.mem_kind)


def summary(timeline: Timeline, cluster: Cluster, kind: str = "") -> PricedRow:
    """Step seconds and the peak of the fullest rank: of live tensors, or where ``kind`` says so what the allocator
    reserved for them. Whether it fits counts the driver's context too."""
    rank, peak = timeline.worst
    held = cluster.chip.held(peak.nbytes)
    reserved = held - cluster.chip.context if "max reserved" in kind else peak.nbytes
    parts = {f"{kind}_s": seconds for kind, seconds in timeline.parts(rank).items()}
    parts |= {f"{owner}_gib": nbytes / GIB for owner, nbytes in peak.owners.items()}
    return PricedRow(timeline.seconds, reserved / GIB, held <= cluster.memory, parts, timeline)


def cluster_of(row: Row) -> Cluster:
    """The cluster of a row, with the fabric and the power cap that it states."""
    name = next((c for words, c in DEVICES.items() if all(w in row.gpu for w in words)), None)
    if name is None:
        raise AutoparError(f"gpu {row.gpu!r} is not known. Legal: names with H100 or A100.")
    cluster = Cluster.load(name, nodes=math.ceil(row.gpus / 8))
    if row.run.fabric_gbps_per_node:
        cluster = cluster.with_fabric(row.run.fabric_gbps_per_node)
    if row.run.tdp_w:
        cluster = cluster.with_power_cap(row.run.tdp_w)
    return cluster


def recipe_of(row: Row) -> Recipe:
    """How the run computes, with what it states."""
    run_ = row.run
    names = (
        "attention_kernel",
        "fused_norm",
        "compile",
        "async_tp",
        "tp_overlap",
        "grad_bytes",
        "dropout",
        "logits_sharded",
    )
    return recipe(run_.source_kind, **{name: getattr(run_, name) for name in names})


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
        zero=int(str(row.zero_stage or 0)[0]),
        reshard=row.run.fsdp_reshard_after_forward is not False,
        recompute=recompute_of(row.recompute),
        schedule=schedule,
        tied=FAMILIES.get(row.ffn_type) == "gpt",
    )


def schedule_of(row: Row) -> tuple[str, int]:
    """(schedule, chunks a rank). An interleaved schedule that states no chunks has as many as there are layers."""
    named = {
        "1F1B": "1f1b",
        "interleaved-1F1B": "interleaved",
        "1F1B-I": "interleaved",
        "ZB-1p": "zb-1p",
        "ZB-2p": "zb-2p",
    }
    if row.pp == 1 or row.pp_schedule in (None, "none"):
        return "1f1b", 1
    if row.pp_schedule not in named:
        raise AutoparError(f"pp_schedule {row.pp_schedule!r} is not known. Legal: none, {', '.join(named)}.")
    schedule = named[row.pp_schedule]
    vp = row.vp or (math.ceil(row.layers / row.pp) if schedule == "interleaved" else 1)
    if vp > 1:
        return "interleaved", vp
    return "1f1b" if schedule == "interleaved" else schedule, 1


def recompute_of(text: str | None) -> str:
    """What a row says of recomputation in one word; not stated: none.

    >>> recompute_of("full (per block)"), recompute_of("selective (attention core)"), recompute_of(None)
    ('full', 'attention', 'none')
    """
    words = (text or "none").lower()
    if words.startswith("full"):
        return "full"
    if words.startswith("selective"):
        return "attention" if "attention" in words else "ops"
    return "none"


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
    if not any(known in precision for known in ("bf16", "fp16", "fp8")):
        raise AutoparError(f"precision {precision!r} is not known. Legal: bf16, fp16, fp8.")
    return "fp16" if precision.startswith("fp16") else "bf16", "fp8" in precision


def priced_units(row: Row, layout: Layout, how: Recipe, cluster: Cluster) -> Priced:
    """The reference model's units at the row's sizes, priced."""
    if dtype_of(row.precision)[1] and "fp8" not in cluster.chip.flops:
        raise AutoparError(f"precision {row.precision!r}: {cluster.chip.name} has no fp8 matmuls. Take bf16.")
    sizes = sizes_of(row, layout)
    device = cluster.chip.device()
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
    family = FAMILIES.get(row.ffn_type)
    if family is None:
        raise AutoparError(f"ffn_type {row.ffn_type!r} is not known. Legal: {', '.join(FAMILIES)}.")
    return _compiled(
        family,
        tp=layout.tp > 1,
        sp=layout.sequence_parallel,
        cp=layout.cp > 1,
        tied=layout.tied,
        dtype=dtype_of(row.precision)[0],
        activation=row.ffn_type,
        dropout=how.dropout and family == "gpt",
        experts=bool(row.moe_experts),
    )


@cache
def _compiled(family: str, **structure: Any) -> Compiled:
    return compiled(reference_units(family, **structure))


def padded(vocabulary: int, tp: int) -> int:
    """A vocabulary padded to a multiple of 128 on each tensor rank, as Megatron-LM pads it.

    >>> padded(50257, 8), padded(128256, 1)
    (51200, 128256)
    """
    return -(-vocabulary // (128 * tp)) * 128 * tp
