"""Equal calls: ops that differ in names alone have equal rules, strategies and choices, so these are found once."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import fx

from autopar.passes.facts import fact
from autopar.passes.saves import call_of

aten = torch.ops.aten
SLICES = (aten.slice.Tensor, aten.slice_scatter.default, aten.narrow.default)
_NUMBERS: dict[Hashable, int] = {}


def call_key(node: fx.Node) -> int:
    """A number that two ops of annotated graphs share where they have the same target, literal arguments, and operands
    and results of the same shapes, strides, dtypes and gradients. Found once a node."""
    known = node.meta.get("autopar_call")
    if known is None:
        key: Hashable = (call_of(node), fact(node).values)
        if node.target in SLICES:
            key = (key, object())  # its rule looks at the other slices of its operand
        known = node.meta["autopar_call"] = _NUMBERS.setdefault(key, len(_NUMBERS))
    return int(known)
