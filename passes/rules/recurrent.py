"""Recurrent layers and cells as one op: only the batch splits."""

from __future__ import annotations

import torch
from torch import fx

from autopar.passes.rules.core import Dim, Dims, Rule, factors
from autopar.passes.rules.signature import NEVER, read

aten = torch.ops.aten


@factors(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def recurrent(node: fx.Node) -> Rule | None:
    """``x[. b .], h[. b .], weights -> y[. b .], h[. b .]``; the batch is dim 0 of x and y if ``batch_first``."""
    call = read(node)
    if call["train"] and call["dropout"] > 0:
        return None  # draws random numbers
    states = len(call.slots["hx"])
    at = 0 if call["batch_first"] else 1
    b = Dim(("b",)) if call.shape("input")[at] > 1 else NEVER
    sequence: Dims = (b, NEVER, NEVER) if at == 0 else (NEVER, b, NEVER)
    state: Dims = (NEVER, b, NEVER)
    return call.rule([sequence, *[state] * states], {"input": sequence, "hx": [state] * states})


@factors(aten.lstm_cell.default, aten.gru_cell.default, aten.rnn_tanh_cell.default, aten.rnn_relu_cell.default)
def cell(node: fx.Node) -> Rule | None:
    """``x[b .], h[b .], weights -> h[b .]``."""
    call = read(node)
    shape = call.shape("input")
    if len(shape) != 2:
        return None
    state: Dims = (Dim(("b",)) if shape[0] > 1 else NEVER, NEVER)
    hx = call.slots["hx"]
    return call.rule([state] * len(call.results()), {"input": state, "hx": [state] * len(hx)})
