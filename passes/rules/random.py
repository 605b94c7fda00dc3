"""Random ops by a counter: the number of an element depends on its place alone, so every dim splits, and all ranks that
hold an element hold the same."""

from __future__ import annotations

import torch
from torch import fx

import autopar.runtime.counter_random  # noqa: F401  registers the ops
from autopar.passes.rules.construct import local_size
from autopar.passes.rules.core import Rule, factors, localizes
from autopar.passes.rules.signature import plain, read

ops = torch.ops.autopar


@factors(ops.dropout.default)
def dropout(node: fx.Node) -> Rule:
    """``x[a] -> y[a]``, linear in x: addends that are dropped alike."""
    call = read(node)
    dims = plain("d", call.shape("x"))
    return call.rule(dims, {"x": dims}, linear=[call.group("x")])


@factors(ops.uniform.default)
def uniform(node: fx.Node) -> Rule:
    """``-> y[a]``; of ``like[a]`` only the size is read."""
    call = read(node)
    dims = plain("d", call["size"])
    return call.rule(dims, {"like": dims})


localizes(ops.uniform.default)(local_size)
