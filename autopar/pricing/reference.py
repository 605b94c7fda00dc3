"""The reference models laid out as Megatron-LM does, for one rank of the tensor and context axes.

Linears into a block are cut by columns, those out of it by rows, tables and heads along the vocabulary; norms are whole
on every tensor rank, or cut along the sequence with ``sp``. Context ranks cut the sequence, keys and values are
gathered. All of it is on the meta device: nothing is computed, sizes may be as large as they like.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

from autopar.build import Prepared, completed, lowerable, prepare
from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.models.gpt2 import GPT2, GPT2Config
from autopar.models.llama import Llama, LlamaConfig
from autopar.passes.layout import Axis, Mesh
from autopar.passes.lower import Lowerable, with_changes
from autopar.pins import SEQUENCE

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROWS = re.compile(r".*\.(o_proj|down_proj|c_proj)\.weight")  # cut along what they sum over
COLUMNS = re.compile(
    r".*\b(q_proj|k_proj|v_proj|gate_proj|up_proj|embed_tokens|c_attn|c_fc|wte|lm_head)\.(weight|bias)"
)


@dataclass(frozen=True)
class Structure:
    """What of a reference model its sizes do not say.

    ``tp``, ``sp``, ``cp``: whether tensor ranks divide it, along the sequence too, and context ranks. ``activation``:
    "gelu" or "relu2" of family "gpt", "swiglu", "relu2" or "gelu" of "llama", or "" for the family's own. ``experts``:
    whether its MLP is a mixture of experts, which `autopar.pricing.experts` makes of the dense one.
    """

    family: str = "llama"
    tp: bool = False
    sp: bool = False
    cp: bool = False
    tied: bool = False
    dtype: str = "bf16"
    activation: str = ""
    dropout: bool = False
    experts: bool = False

    def __post_init__(self) -> None:
        legal = {"gpt": ("gelu", "relu2", ""), "llama": ("swiglu", "relu2", "gelu", "")}
        if self.family not in legal:
            raise AutoparError(f"family {self.family!r}: is not known. Legal: {', '.join(legal)}.")
        if self.activation not in legal[self.family]:
            words = ", ".join(w for w in legal[self.family] if w)
            raise AutoparError(f"activation {self.activation!r}: {self.family} has none such. Legal: {words}.")
        if self.dtype not in DTYPES:
            raise AutoparError(f"dtype {self.dtype!r}: is not known. Legal: {', '.join(DTYPES)}.")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a reference model and its run: rows of a microbatch, sequence, width, heads, heads of keys and values,
    width of a head, width inside the MLP, vocabulary; tensor and context ranks."""

    b: int
    s: int
    h: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocab: int
    tp: int = 1
    cp: int = 1


def model_of(structure: Structure, sizes: Sizes, layers: int = 2) -> nn.Module:
    """The model, on the meta device."""
    common = {"vocabulary": sizes.vocab, "width": sizes.h, "layers": layers, "heads": sizes.heads, "head": sizes.head}
    with torch.device("meta"):
        model: nn.Module
        if structure.family == "gpt":
            if sizes.kv_heads != sizes.heads:
                raise AutoparError(f"kv_heads={sizes.kv_heads}: gpt has as many as heads, {sizes.heads}. Take llama.")
            more = {"positions": sizes.s, "hidden": sizes.ffn, "tied": structure.tied}
            kind = {"activation": structure.activation or "gelu", "dropout": 0.1 * structure.dropout}
            model = GPT2(GPT2Config(**common, **more, **kind))  # type: ignore[arg-type]
        else:
            more = {"hidden": sizes.ffn, "kv_heads": sizes.kv_heads, "tied": structure.tied}
            config = LlamaConfig(**common, **more, activation=structure.activation or "swiglu")  # type: ignore[arg-type]
            model = Llama(config)
        return model.to(DTYPES[structure.dtype])


def dims_of(names: Iterable[str]) -> dict[str, int | None]:
    """The dim that tensor ranks cut of each parameter; None where they hold it whole.

    >>> dims_of(["model.layers.0.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"])
    {'model.layers.0.mlp.down_proj.weight': 1, 'lm_head.weight': 0, 'model.norm.weight': None}
    """
    return {name: 1 if ROWS.fullmatch(name) else 0 if COLUMNS.fullmatch(name) else None for name in names}


@lru_cache(maxsize=16)
def prepared_model(structure: Structure, sizes: Sizes, layers: int) -> Prepared:
    """The model's step for one microbatch, captured; what ranks do is not looked at."""
    model = model_of(structure, sizes, layers)
    ids = torch.empty(sizes.b, sizes.s, dtype=torch.int64, device="meta")
    return prepare(capture(model, (ids, ids), check=False), 1)


def laid_out(structure: Structure, sizes: Sizes, layers: int = 2) -> Lowerable:
    """The model's step for one microbatch of ``sizes.b`` rows, laid out, every change of layout a node."""
    whole = replace(structure, tp=False, sp=False, cp=False, experts=False)
    prepared = prepared_model(whole, replace(sizes, tp=1, cp=1), layers)
    axes = ((SEQUENCE, sizes.cp if structure.cp else 1), ("tp", sizes.tp if structure.tp else 1))
    mesh = Mesh(tuple(Axis(name, size) for name, size in axes if size > 1))
    shares = ("tp",) if structure.tp and structure.sp else ()
    dims = dims_of(prepared.captured.parameters) if structure.tp else {}
    gm, _, _ = completed(prepared, mesh, 0, ("tp",), (SEQUENCE,), shares, dims)
    return with_changes(lowerable(gm, mesh, prepared))


__all__ = ["Sizes", "Structure", "dims_of", "laid_out", "model_of", "prepared_model"]
