"""What a training run is besides its model and its layout: kernels, precisions, what is overlapped with what.

A property that a run's report does not state is the default of its framework at that time. The table below is the
whole list; nothing else depends on where a run comes from.

>>> recipe("nemo").attention, recipe("megatron", attention_kernel="flash2").attention
('cudnn', 'flash2')
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import AutoparError

ATTENTION = ("eager", "fused_softmax", "triton", "flash1", "flash2", "cudnn", "flash3")
FOREACH = 80
"""Bytes an element of AdamW as single operations over all tensors: weight decay 8, first moment 12, second 8 + 12,
root, division, epsilon 8 each, update 16 (``torch/optim/adamw.py``, ``_multi_tensor_adamw``)."""
FLASH = ATTENTION[2:]


@dataclass(frozen=True)
class Recipe:
    """``attention``: one of `ATTENTION`. ``fused``: which runs of memory-bound ops are one kernel, "norm" (with a
    reduction inside), "pointwise", "loss"; ``compiled``: all of a run, across modules.

    Bytes of each parameter: ``weight`` as computed with, ``gradient`` as accumulated and reduced, ``optimizer`` all
    states with the fp32 master copy. (Where ZeRO-3 gathers weights, that copy is all that rests.)
    """

    attention: str = "flash2"
    fused: frozenset[str] = frozenset()
    compiled: bool = False
    dropout: bool = False
    weight: int = 2
    gradient: int = 4
    optimizer: int = 12
    fused_accumulation: bool = True  # a weight gradient is added inside its matmul
    overlap_reduce: bool = False  # gradients over the data axis, with the last backward
    overlap_gather: bool = False  # parameters of a sharded optimizer, with the first forward
    overlap_send: bool = False  # activations between stages
    overlap_tensor: bool = False  # tensor-parallel collectives, with the matmul beside them
    overlap_backward: bool = False  # tensor-parallel sums of gradients, with the matmul of the weights' gradients
    sharded_logits: bool = True  # the loss reads its rank's part of the vocabulary; else logits are gathered
    scatter_send: bool = False  # each tensor rank sends its part, gathered again inside the node
    compiled_loss: bool = True  # where modules are compiled, the loss is too
    holds_outputs: bool = False  # logits and their fp32 copy stay alive until backward has ended
    gradient_scratch: int = 0  # bytes of each gradient before it is added to what is accumulated
    gathers_again: bool = True  # what tensor ranks gather is gathered a second time for backward, and not kept
    gather_copies: int = 0  # bytes copied for each element of a weight that is gathered at its use
    reduce_copies: int = 0  # bytes copied for each element of a gradient before it is reduced
    keeps_fp8: bool = True  # of an fp8 matmul's activation, backward keeps what was cast, not what it was cast from
    optimizer_traffic: int = 0  # bytes that the optimizer reads and writes an element; 0: one kernel's
    source: str = ""


STATED = (  # what a run may state -> the field of its recipe
    ("compile", "compiled"),
    ("tp_overlap", "overlap_tensor"),
    ("grad_bytes", "gradient"),
    ("logits_sharded", "sharded_logits"),
)
HAND_WRITTEN = frozenset({"norm", "pointwise", "loss"})
MEGATRON = Recipe(
    attention="fused_softmax",
    fused=frozenset({"norm", "pointwise"}),
    dropout=True,
    source="Megatron-LM 2021-22: fused softmax, layer norm, bias-gelu; fp32 main gradients; dropout 0.1",
)
FRAMEWORKS = {
    "megatron": replace(MEGATRON, scatter_send=True),
    "zerobubble": replace(MEGATRON, overlap_backward=True, source="Megatron-LM 2023: as megatron"),
    "vtrain": replace(
        MEGATRON,
        gradient=2,
        source="Megatron-DeepSpeed: as megatron, gradients accumulated and reduced in fp16 by DeepSpeed",
    ),
    "nemo": Recipe(
        attention="cudnn",
        fused=HAND_WRITTEN,
        overlap_reduce=True,
        overlap_gather=True,
        overlap_send=True,
        overlap_backward=True,
        source="NeMo with Transformer Engine on H100: cuDNN attention, fused norms, swiglu, rotary, cross-entropy; "
        "Megatron-core's asynchronous backward of tensor-parallel linears",
    ),
    "nanotron": Recipe(
        attention="flash2",
        fused=frozenset({"norm"}),
        overlap_tensor=True,
        gradient_scratch=2,
        source="nanotron 2024: asynchronous tensor-parallel linears; flash-attention 2 and its norm kernel; bf16 "
        "gradients of a microbatch are whole before they are added to fp32 ones",
    ),
    "aleph_alpha": Recipe(
        attention="flash2",
        gradient=2,
        sharded_logits=False,
        holds_outputs=True,
        gathers_again=False,
        source="Hagemann et al. 2023: own framework on PyTorch, ZeRO-1; kernels stated per row. Which of its runs fit "
        "says that gradients are bf16, that every rank has all logits, and that tensors stay in scope as in a plain "
        "loop",
    ),
    "fsdp1": Recipe(
        attention="triton",
        fused=frozenset({"norm", "loss"}),
        overlap_reduce=True,
        overlap_gather=True,
        reduce_copies=10,
        optimizer_traffic=FOREACH,
        source="llm-foundry v0.0.4: flash attention of version 1 in triton, fused cross-entropy, low-precision norms. "
        "FSDP 1 concatenates the gradients of a unit (2 + 2 bytes) and casts them to fp32 (2 + 4)",
    ),
    "torchtitan": Recipe(
        attention="flash2",
        overlap_reduce=True,
        overlap_gather=True,
        gather_copies=4,
        reduce_copies=6,
        optimizer_traffic=FOREACH,
        compiled_loss=False,
        keeps_fp8=False,
        gathers_again=False,
        source="torchtitan 2024-12: SDPA with flash-attention 2, fp32 parameters. FSDP 2 copies what it gathers "
        "(2 + 2 bytes) and lays out gradients in fp32 (2 + 4). What tensor ranks gather of a DTensor is "
        "kept for backward. torchao's Float8Linear saves its input in bf16",
    ),
    "maxtext": Recipe(
        attention="cudnn", fused=HAND_WRITTEN, compiled=True, overlap_reduce=True, overlap_gather=True, source="XLA"
    ),
}


def recipe(framework: str | None, **stated: Any) -> Recipe:
    """The recipe of a framework (None: megatron) with what a run states of itself; None: not stated.

    Raises AutoparError for a framework that is not in the table, or an attention kernel nobody has figures of.
    """
    name = framework or "megatron"
    if name not in FRAMEWORKS:
        raise AutoparError(f"run.source_kind {name!r} is not known. Legal: {', '.join(FRAMEWORKS)}.")
    found = FRAMEWORKS[name]
    kernel = stated.get("attention_kernel")
    if kernel is not None:
        kernel = {"torch": "eager"}.get(kernel, kernel)
        if kernel not in ATTENTION:
            raise AutoparError(f"run.attention_kernel {kernel!r} is not known. Legal: torch, {', '.join(ATTENTION)}.")
        found = replace(found, attention=kernel)
    if stated.get("fused_norm") is not None:
        fused = found.fused | {"norm"} if stated["fused_norm"] else found.fused - {"norm"}
        found = replace(found, fused=fused)
    for key, field in STATED:
        if stated.get(key) is not None:
            found = replace(found, **{field: stated[key]})
    if stated.get("async_tp"):
        found = replace(found, overlap_tensor=True)
    if stated.get("dropout") is not None:
        found = replace(found, dropout=bool(stated["dropout"]))
    return found
