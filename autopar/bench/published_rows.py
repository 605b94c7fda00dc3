"""Published measurements of training runs, as a JSON file lists them: one object a row, read into a `Row`.

An input that a row does not state is null in the file, and 0 or None here. A row must say who it is (``id``) and hold
values of the right kind; whether it says enough to be priced is asked of it later, by `lacks`.

>>> row = row_of({"id": "a-1", "source": "a", "tp": 2, "pp": None, "zero_stage": "3 (FSDP 128)"}, "rows.json", "$[0]")
>>> row.tp, row.pp, row.zero_stage
(2, 0, 3)
>>> lacks(row)
'not stated: layers, hidden, heads, ffn, seq, gpus, pp, dp, mbs, gbs, ffn_type, gpu, precision.'
>>> row_of({"id": "a-1", "tp": 0}, "rows.json", "$[0]")
Traceback (most recent call last):
autopar.errors.AutoparError: rows.json: row a-1: at $[0].tp: 0 is not legal. Legal: 1 and more, or null: not stated.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from autopar.errors import AutoparError
from autopar.schema import fail, read, read_file

WHO = "bench published"
REMARKED = re.compile(r"(\d+)\s*\(.*\)")  # "3 (FSDP 128/256)": a number and a remark


@dataclass(frozen=True)
class Run:
    """What a row's source says of its kernels, overlap and fabric; None: not stated. Bytes a gradient, watts a device,
    Gbit/s a node."""

    attention_kernel: str | None = None
    fused_norm: bool | None = None
    compile: bool | None = None
    async_tp: bool | None = None
    tp_overlap: bool | None = None
    tdp_w: float | None = None
    fabric_gbps_per_node: float | None = None
    logits_sharded: bool | None = None
    grad_bytes: int | None = None
    dropout: bool | float | None = None
    fsdp_reshard_after_forward: bool | None = None
    optimizer: str | None = None
    source_kind: str | None = None


@dataclass(frozen=True)
class Use:
    """For which comparisons a row is sound: step seconds, peak bytes, whether it fits, ranking among its sweep."""

    time: bool = False
    memory: bool = False
    fits: bool = False
    rank: bool = False
    why_not: str | None = None


@dataclass(frozen=True)
class Row:
    """One run: model, cluster, layout, what was measured. Sizes: 0 where not stated. ``step_time_s``: seconds;
    ``peak_mem_gib``: GiB of the fullest rank; ``gbs``, ``mbs``: sequences a step and a microbatch of one rank."""

    id: str
    source: str = ""
    kind: str = "pretrain"
    status: str = "ok"  # other: the run failed, mostly out of memory
    model: str = ""
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    ffn: int = 0
    ffn_type: str = ""
    moe_experts: int = 0
    moe_topk: int = 0
    vocab: int = 0
    seq: int = 0
    gpu: str = ""
    gpus: int = 0
    gpus_per_node: int = 0
    tp: int = 0
    pp: int = 0
    vp: int = 0
    cp: int = 0
    ep: int = 0
    dp: int = 0
    zero_stage: int | None = None
    mbs: int = 0
    gbs: int = 0
    grad_accum: int = 0
    recompute: str | None = None
    precision: str = ""
    sequence_parallel: bool | None = None
    pp_schedule: str | None = None
    step_time_s: float | None = None
    peak_mem_gib: float | None = None
    mem_kind: str = ""  # what the source says that it measured
    tier: str = ""
    run: Run = field(default_factory=Run)
    use: Use = field(default_factory=Use)
    layout_key: str = ""  # equal for repeats of one layout by one source


SIZES = ("layers", "hidden", "heads", "ffn", "seq", "gpus", "tp", "pp", "dp", "mbs", "gbs")
ESSENTIAL = (*SIZES, "ffn_type", "gpu", "precision")
RAN = "ok"
TINY = sys.float_info.min
MOST = 10**12
RANGES = {  # the least and the most that a number may be
    "zero_stage": (0, 3),
    "moe_experts": (0, MOST),
    "moe_topk": (0, MOST),
    "step_time_s": (TINY, MOST),
    "peak_mem_gib": (TINY, MOST),
    "run.dropout": (0, 1),
    "run.grad_bytes": (1, 4),
}
WITHOUT_STEPS = ("per-layer-time", "inference", "lora")  # kinds of rows that say nothing of a whole training step
# Fields of the form that neither pricing nor scoring reads.
UNREAD = {
    "provenance",
    "verified",
    "verified_by",
    "verified_how",
    "params_b",
    "tokens_per_s_per_gpu",
    "samples_per_s",
    "tflops_per_gpu",
    "tflops_kind",
    "mfu_pct",
    "mfu_peak_tflops",
    "hfu_pct",
    "mem_detail",
    "derived",
    "complete",
    "notes",
    "check",
}


def read_rows(path: str | Path) -> tuple[list[Row], list[str]]:
    """The rows of a file, and the keys in it that nothing reads. Raises AutoparError naming file, row and field."""
    data, where = read_file(path, who=WHO), str(path)
    if not isinstance(data, list) or not data:
        raise fail(where, "$", "not a list of rows, or an empty one. A file of rows is a JSON list of objects.")
    rows = [row_of(item, where, f"$[{i}]") for i, item in enumerate(data)]
    seen: set[str] = set()
    for i, row in enumerate(rows):
        if row.id in seen:
            raise fail(where, f"$[{i}].id", f"two rows are called {row.id!r}. An id names one row.")
        seen.add(row.id)
    return rows, sorted({key for item in data for key in _unread(item)})


def row_of(data: object, where: str, path: str) -> Row:
    """One row from its JSON object at ``path`` of the file ``where``."""
    if not isinstance(data, dict):
        raise fail(where, path, "a row is a JSON object.")
    if not isinstance(data.get("id"), str) or not data["id"]:
        raise fail(where, f"{path}.id", f"{json.dumps(data.get('id'))[:60]} is not legal. Legal: a word for this row.")
    where = f"{where}: row {data['id']}"
    try:
        row = read(Row, _cleaned(Row, data), where=where)
    except AutoparError as error:
        raise AutoparError(str(error).replace(": at $.", f": at {path}.", 1)) from None
    for name, value in _numbers(row, data):
        least, most = RANGES.get(name, (1, MOST))
        if not least <= value <= most:
            raise fail(where, f"{path}.{name}", f"{str(value)[:30]} is not legal. Legal: {_legal(least, most)}.")
    return _completed(row if data.get("use") is not None else replace(row, use=_sound(row)))


def _legal(least: float, most: float) -> str:
    first = "more than 0" if least == TINY else f"{least:g}"
    return f"{first} {'and more' if most == MOST else f'to {most:g}'}, or null: not stated"


def lacks(row: Row) -> str | None:
    """Why a row cannot be priced whatever the pricer knows: inputs not stated, or that contradict one another."""
    if row.kind in WITHOUT_STEPS:
        return f"kind {row.kind!r} is not a whole step."
    unknown = [name for name in ESSENTIAL if not getattr(row, name)]
    if unknown:
        return f"not stated: {', '.join(unknown)}."
    ranks = row.tp * row.pp * max(row.cp, 1) * row.dp
    if ranks != row.gpus:
        return f"tp={row.tp} x pp={row.pp} x cp={max(row.cp, 1)} x dp={row.dp} are {ranks} ranks, gpus={row.gpus}."
    if row.gbs < row.mbs * row.dp:
        return f"gbs={row.gbs} is less than mbs={row.mbs} x dp={row.dp}: ranks have nothing to do."
    if row.kv_heads and row.heads % row.kv_heads:
        return f"kv_heads={row.kv_heads} does not divide heads={row.heads}."
    if row.moe_topk > row.moe_experts:
        return f"moe_topk={row.moe_topk} of moe_experts={row.moe_experts}."
    if row.hidden % row.heads:
        return f"hidden={row.hidden} is no multiple of heads={row.heads}, and the size of a head is not stated."
    return None


def _numbers(row: Row, data: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """The numbers that a row states, by field."""
    for at, own, stated in (("", row, data), ("run.", row.run, data.get("run") or {})):
        for item in dataclasses.fields(own):
            value = getattr(own, item.name)
            if stated.get(item.name) is not None and isinstance(value, (int, float)) and not isinstance(value, bool):
                yield at + item.name, value


def _sound(row: Row) -> Use:
    """A row that does not say for what it is sound is sound for all that it measured."""
    return Use(time=row.step_time_s is not None, memory=row.peak_mem_gib is not None, fits=row.status in (RAN, "OOM"))


def _cleaned(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are stated, and that we read: 4.0 and "4 (of 8)" are the integer 4."""
    hints = get_type_hints(kind)
    out = {}
    for name, hint in hints.items():
        value = data.get(name)
        if value is None:
            continue
        if name in ("run", "use") and isinstance(value, dict):
            value = _cleaned(hint, value)
        elif hint in (int, int | None):
            value = _whole(value)
        out[name] = value
    return out


def _whole(value: object) -> object:
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    remarked = REMARKED.fullmatch(value) if isinstance(value, str) else None
    return int(remarked[1]) if remarked else value


def _completed(row: Row) -> Row:
    """What the other inputs of a row determine."""
    others = row.tp * row.pp * max(row.cp, 1)
    if not row.dp and others and row.gpus and row.gpus % others == 0:
        row = replace(row, dp=row.gpus // others)
    if not row.gbs:
        row = replace(row, gbs=row.mbs * row.dp * row.grad_accum)
    return row if row.layout_key else replace(row, layout_key=row.id)


def _unread(data: Mapping[str, Any]) -> Iterable[str]:
    yield from data.keys() - {f.name for f in dataclasses.fields(Row)} - UNREAD
    for name, kind in (("run", Run), ("use", Use)):
        if isinstance(data.get(name), dict):
            yield from (f"{name}.{key}" for key in data[name].keys() - {f.name for f in dataclasses.fields(kind)})
