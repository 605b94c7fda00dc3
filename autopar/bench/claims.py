"""Claims about training speed and rules of thumb, priced: ``autopar bench claims``.

A claim is looked at twice: at measured rates, as `autopar.pricing` predicts any run, and at the figures of the data
sheet (`at_data_sheet`), which nothing real exceeds. FLOPs are the model's own, attention counted in full and nothing
that is recomputed, so that they compare with what others print.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from autopar.bench.published_rows import Row, Run
from autopar.cluster import Cluster
from autopar.explain.closed_forms import forward_flops, parameters
from autopar.hardware import Attention, Figure, Link
from autopar.pricing import PricedRow, price_row
from autopar.pricing.configuration import cluster_of, family_of
from autopar.pricing.symbols import counted
from autopar.solver.cost import KINDS
from autopar.solver.work import Unit

CLAIMED_MFU, CLAIMED_FLOPS = 0.642, 614e12
GPUS = 512
SHEET = "data sheet"


@dataclass(frozen=True)
class Priced:
    """A configuration: what it is, and its price at measured rates and, where asked for, at those of the data sheet.
    ``flops``: of the model, a step and a device; ``peak``: FLOP/s of the device."""

    model: str
    words: str
    row: Row
    found: PricedRow
    sheet: PricedRow | None
    flops: float
    peak: float

    @property
    def rate(self) -> float:
        """FLOP/s of a device."""
        return self.flops / self.found.step_s

    @property
    def bound(self) -> float:
        """FLOP/s of a device at the figures of the data sheet."""
        return self.flops / self.sheet.step_s if self.sheet else float("nan")

    @property
    def mfu(self) -> float:
        """`rate` over the peak."""
        return self.rate / self.peak

    @property
    def row_words(self) -> str:
        """What the row adds to the claimed layout."""
        run, row = self.row.run, self.row
        said = {
            str(row.pp_schedule): True,
            "tensor collectives beside matmuls": run.tp_overlap,
            "all recomputed": row.recompute,
            "gradients in bf16": run.grad_bytes == 2,
        }
        return ", ".join(words for words, there in said.items() if there)

    def to_json(self) -> dict[str, Any]:
        """Its figures."""
        bound = (
            {} if self.sheet is None else {"roofline_flops_per_s": self.bound, "roofline_mfu": self.bound / self.peak}
        )
        return {
            "model": self.model,
            "how": self.words,
            "step_time_s": self.found.step_s,
            "flops_per_s": self.rate,
            "mfu": self.mfu,
            **bound,
            "peak_mem_gib": self.found.peak_gib,
            "fits": self.found.fits,
            "parts": dict(self.found.parts),
        }

    def seconds(self, *kinds: str) -> float:
        """Seconds of a step that go to these kinds."""
        return sum(self.found.parts.get(f"{kind}_s", 0.0) for kind in kinds)

    def gib(self, *owners: str) -> float:
        """GiB at the peak of these owners."""
        return sum(self.found.parts.get(f"{owner}_gib", 0.0) for owner in owners)


_BASE = Row(
    "claim", gpu="H100", gpus=GPUS, tp=8, pp=4, cp=1, dp=16, mbs=1, gbs=1024, seq=4096, zero_stage=1,
    precision="bf16", sequence_parallel=True, pp_schedule="1F1B", run=Run(source_kind="nemo"),
)  # fmt: skip
MODELS = {
    "70B": replace(_BASE, layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, ffn_type="swiglu", vocab=128256),
    "175B": replace(_BASE, layers=96, hidden=12288, heads=96, ffn=49152, ffn_type="gelu", vocab=51200),
    "500B": replace(_BASE, layers=100, hidden=20480, heads=160, ffn=81920, ffn_type="gelu", vocab=51200),
}


_INTERLEAVED = {"pp_schedule": "interleaved-1F1B"}  # a layer a chunk
_RECOMPUTED = {"recompute": "full"}
_OVERLAPPED, _SMALL = {"tp_overlap": True}, {"grad_bytes": 2}


def throughput() -> list[Priced]:
    """The claimed layout for each model, from plain to all that may help it."""
    found = []
    for model, row in MODELS.items():
        steps: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
            ("1F1B", {}, {}),
            ("interleaved", _INTERLEAVED, {}),
            ("and tensor collectives beside matmuls", _INTERLEAVED, _OVERLAPPED),
            ("and all recomputed", _INTERLEAVED | _RECOMPUTED, _OVERLAPPED),
            ("or gradients in bf16", _INTERLEAVED, _OVERLAPPED | _SMALL),
            ("and both", _INTERLEAVED | _RECOMPUTED, _OVERLAPPED | _SMALL),
        )
        for words, more, run in steps:
            asked = replace(row, **more, run=replace(row.run, **run))
            found.append(priced(model, words, asked, sheet=True))
    return found


def tensor_axis() -> list[Priced]:
    """Tensor parallelism inside a node against across two."""
    layouts = ((4, 4, 32), (8, 4, 16), (16, 4, 8), (16, 2, 16))
    return [
        priced(model, f"tp={tp} pp={pp} dp={dp}", replace(MODELS[model], tp=tp, pp=pp, dp=dp))
        for model in ("70B", "175B")
        for tp, pp, dp in layouts
    ]


def recomputation() -> list[Priced]:
    """What is recomputed, where attention writes its scores out and where it does not: GPT-3 at its length, 2048."""
    row = replace(MODELS["175B"], seq=2048)
    kernels = {
        "scores written out, dropout": Run(source_kind="nemo", attention_kernel="fused_softmax", dropout=0.1),
        "flash attention": row.run,
    }
    levels = {"nothing": None, "attention's core": "selective (attention core)", "everything": "full"}
    return [
        priced(kernel, level, replace(row, run=run, recompute=recompute))
        for kernel, run in kernels.items()
        for level, recompute in levels.items()
    ]


ZERO = replace(
    MODELS["175B"], layers=36, hidden=4096, heads=32, ffn=16384, vocab=50304, seq=2048, gpus=64, gbs=64, tp=1, pp=1,
    dp=64, sequence_parallel=False, recompute="full", run=Run(source_kind="nemo", grad_bytes=2),
)  # fmt: skip
STATES = ("parameters", "gradients", "optimizer", "gathered")
ZERO_BYTES = ("2 + 2 + 12", "2 + 2 + 12/n", "2 + (2 + 12)/n", "(2 + 2 + 12)/n")
ZERO_PAPER = (120.0, 31.4, 16.6, 1.9)
"""GB a device for 7.5B parameters on 64 devices (Rajbhandari et al. 2020, "ZeRO", figure 1)."""


def zero() -> list[Priced]:
    """ZeRO's stages on the case of its paper: 7.5 billion parameters, 64 devices, bf16 gradients."""
    return [priced("7.5B", str(stage), replace(ZERO, zero_stage=stage)) for stage in range(4)]


def zero_bytes(stage: int, ranks: int) -> float:
    """Bytes a parameter by ZeRO's formulas.

    >>> [zero_bytes(stage, 64) for stage in range(4)]
    [16.0, 4.1875, 2.21875, 0.25]
    """
    whole = (16, 4, 2, 0)[stage]
    return whole + (16 - whole) / ranks


@dataclass(frozen=True)
class Claims:
    """All that is priced, by what it is about."""

    throughput: tuple[Priced, ...]
    tensor: tuple[Priced, ...]
    recomputed: tuple[Priced, ...]
    zero: tuple[Priced, ...]

    def reached(self) -> dict[str, Priced | None]:
        """For each model the fastest of the claimed layout that fits; None where nothing does."""
        fitting = {model: [p for p in self.throughput if p.model == model and p.found.fits] for model in MODELS}
        return {model: max(own, key=lambda p: p.rate, default=None) for model, own in fitting.items()}

    def to_json(self) -> dict[str, Any]:
        """The figures of each, and what was claimed."""
        claimed = {"mfu": CLAIMED_MFU, "flops_per_s": CLAIMED_FLOPS, "gpus": GPUS}
        return {"claimed": claimed, **{f.name: [p.to_json() for p in getattr(self, f.name)] for f in fields(self)}}


def claims() -> Claims:
    """Price everything: some fifty configurations, a quarter of a minute."""
    return Claims(tuple(throughput()), tuple(tensor_axis()), tuple(recomputation()), tuple(zero()))


def priced(model: str, words: str, row: Row, *, sheet: bool = False) -> Priced:
    """Price one configuration."""
    cluster = cluster_of(row)
    peak = cluster.chip.peak("bf16")
    bound = _bare(price_row(row, at_data_sheet(cluster))) if sheet else None
    return Priced(model, words, row, _bare(price_row(row, cluster)), bound, model_flops(row) / row.gpus, peak)


def _bare(found: PricedRow) -> PricedRow:
    return replace(found, timeline=None)


def at_data_sheet(cluster: Cluster) -> Cluster:
    """The cluster with every kernel at the peak of its data sheet or at the bandwidth of memory, every collective at
    the rate of its wires, nothing beside them, and clocks that never fall."""
    chip, source = cluster.chip, SHEET
    flat = {(a.kernel, a.head, a.causal, a.backward) for a in chip.attention}
    rate = chip.peak("bf16")
    curves = tuple(Attention(*key, ((1, rate), (2, rate)), source) for key in sorted(flat))
    full = {"matmul": Figure(1.0, source), "memory": Figure(1.0, source)}
    ideal = replace(chip, efficiency=full, power=None, launch=None, matmul={}, attention=curves, copy=None, kernels={})
    shared = [tier.spans for tier in cluster.tiers[:-1]]
    tiers = tuple(
        replace(tier, collectives={k: Link(Figure(tier.wire * (n or 1), source), Figure(0.0, source)) for k in KINDS})
        for tier, n in zip(cluster.tiers, (1, *shared), strict=True)
    )
    return replace(cluster, chip=ideal, tiers=tiers, protocols=())


def model_flops(row: Row) -> float:
    """FLOPs of a step by the model's own shapes: three forwards, attention in full."""
    forward = {name: float(forward_flops(unit)) for name, unit in _numbers(row).items()}
    return 3 * row.gbs * (forward["prefix"] + row.layers * forward["layer"] + forward["suffix"]) + spared_flops(row)


def spared_flops(row: Row) -> float:
    """FLOPs of a step that count as the model's, and that a causal mask spares: half of attention's."""
    return 3.0 * row.gbs * row.layers * 2 * row.seq**2 * row.hidden


def model_parameters(row: Row) -> float:
    """Elements of all parameters, shared ones once."""
    units = _numbers(row)
    own = dict([*units["prefix"].parameters, *units["suffix"].parameters])
    return float(row.layers * parameters(units["layer"]) + sum(piece.elements for piece in own.values()))


def _sizes(row: Row) -> Mapping[str, int]:
    heads = {"heads": row.heads, "kv_heads": row.kv_heads or row.heads, "head": row.hidden // row.heads}
    return {"b": 1, "s": row.seq, "h": row.hidden, "ffn": row.ffn, "vocab": row.vocab, **heads}


def _numbers(row: Row) -> Mapping[str, Unit]:
    family = family_of(row)
    return counted(family, tied=family == "gpt")(_sizes(row))
