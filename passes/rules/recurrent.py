"""Recurrent layers and cells as one op: the batch splits, and the hidden units.

Where its units are cut a rank holds their rows of every gate in the weights, projects the input of all times at once,
and takes the recurrence step by step, unrolled in the emitted program. Each step gathers the hidden state of all units:
the next one reads it, and it is what the layer gives.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from autopar.passes.rules.core import Dim, Dims, Rule, Special, Word, factors
from autopar.passes.rules.signature import NEVER, Call, read, shape_of

if TYPE_CHECKING:
    from autopar.passes.emit import Emitter

MOST_STEPS = 256  # of all layers and directions together, that are unrolled
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}  # stacked in the rows of the weights

aten, ops = torch.ops.aten, torch.ops.autopar


@factors(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def layers(node: fx.Node) -> Rule | None:
    """``x[. b .], h[. b u], w[u .] -> y[. b u], h[. b u]``: the batch is dim 0 of x and y if ``batch_first``; u, the
    hidden units, are cut by the special ``hidden``."""
    call = read(node)
    if call["train"] and call["dropout"] > 0:
        return None  # draws random numbers
    at = 0 if call["batch_first"] else 1
    b, units = Dim(("b",)) if call.shape("input")[at] > 1 else NEVER, _state(call)[-1]
    x, y = ([NEVER, NEVER, d] for d in (NEVER, Dim(("u",), (units, units) if call["bidirectional"] else ())))
    x[at] = y[at] = b
    state: Dims = (NEVER, b, Dim(("u",)))
    states, params = [state] * len(call.slots["hx"]), [_rows(call, w) for w in call["params"]]
    why = _why_whole(call)
    rule = call.rule([tuple(y), *states], {"input": [tuple(x)], "hx": states, "params": params}, whole=["u"], why=why)
    return rule if why else _hidden(rule, ("R", "R", 2)[: len(rule.results)], lower_layers)


@factors(aten.lstm_cell.default, aten.gru_cell.default, aten.rnn_tanh_cell.default, aten.rnn_relu_cell.default)
def cell(node: fx.Node) -> Rule | None:
    """``x[b .], h[b u], w[u .] -> h[b u]``, likewise."""
    call = read(node)
    shape = call.shape("input")
    if len(shape) != 2:
        return None
    state: Dims = (Dim(("b",)) if shape[0] > 1 else NEVER, Dim(("u",)))
    states = [state] * len(call.slots["hx"])
    weights = {n: _rows(call, call[n]) for n in ("w_ih", "w_hh", "b_ih", "b_hh") if call.has(n)}
    rule = call.rule(states, {"input": (state[0], NEVER), "hx": states, **weights}, whole=["u"])
    return _hidden(rule, (1,) * len(states), lower_cell)


def _hidden(rule: Rule, results: tuple[Word, ...], lower: Callable[[Emitter, fx.Node, int], fx.Node]) -> Rule:
    """With the special that cuts every operand along its units."""
    words = (next(((d, dim.parts) for d, dim in enumerate(o) if "u" in dim.factors), "R") for o in rule.operands)
    return replace(rule, specials=(Special("hidden", tuple(words), results, lower, uneven=True),))


def _rows(call: Call, weight: fx.Node) -> Dims:
    """The rows of a weight are those of every gate."""
    gates = GATES[_name(call)]
    parts = (shape_of(weight)[0] // gates,) * gates if gates > 1 else ()
    return (Dim(("u",), parts), *(NEVER,) * (len(shape_of(weight)) - 1))


def _name(call: Call) -> str:
    return str(call.node.target.overloadpacket.__name__).removesuffix("_cell")  # type: ignore[union-attr]


def _state(call: Call) -> tuple[int, ...]:
    """The shape of the hidden state: layers and directions if the op has these, batch, units."""
    hx = call["hx"]
    return shape_of(hx[0] if isinstance(hx, (list, tuple)) else hx)


def _why_whole(call: Call) -> str:
    """What keeps the units of layers whole; empty where they may be cut."""
    steps = call.shape("input")[int(call["batch_first"])] * _state(call)[0]
    if steps > MOST_STEPS:
        return f"its {steps} steps are more than the {MOST_STEPS} that are unrolled to cut the hidden units"
    projected = _name(call) == "lstm" and shape_of(call["hx"][0]) != shape_of(call["hx"][1])
    return "its hidden state is projected" if projected else ""


def lower_layers(emitter: Emitter, node: fx.Node, axis: int) -> fx.Node:
    """All layers, each in both directions where it has two; y and the last hidden states are whole, cells are cut."""
    call = read(node)
    do, turn = emitter.call, call["batch_first"]
    x, *rest = (emitter.operand(slot) for slot in range(sum(len(s) for s in call.slots.values())))
    states, params = rest[: len(call.slots["hx"])], rest[len(call.slots["hx"]) :]
    each = len(params) // _state(call)[0]
    starts = [_gathered(emitter, states[0], axis, call), *states]
    x = do(aten.transpose.int, x, 0, 1) if turn else x
    last: list[list[fx.Node]] = []
    while len(last) < _state(call)[0]:
        outs = []
        for backward in (False, True)[: 1 + call["bidirectional"]]:
            at = len(last)
            held = [do(aten.select.int, s, 0, at) for s in starts]
            steps, end = _unrolled(emitter, axis, call, x, held, params[at * each : (at + 1) * each], backward)
            outs.append(do(aten.stack.default, steps))
            last.append(end)
        x = outs[0] if len(outs) == 1 else do(aten.cat.default, outs, 2)
    whole, *own = (do(aten.stack.default, list(s)) for s in zip(*last, strict=True))
    return do(tuple, [do(aten.transpose.int, x, 0, 1) if turn else x, whole, *own[1:]])


def lower_cell(emitter: Emitter, node: fx.Node, axis: int) -> fx.Node:
    """One step; the new states are cut."""
    call = read(node)
    x, *rest = (emitter.operand(slot) for slot in range(sum(len(s) for s in call.slots.values())))
    states, weights = rest[: len(call.slots["hx"])], rest[len(call.slots["hx"]) :]
    x = emitter.call(aten.linear.default, x, weights[0], *weights[2:3])
    own = _step(emitter, _name(call), x, _gathered(emitter, states[0], axis, call), states, weights)
    return emitter.call(tuple, own) if len(own) > 1 else own[0]


def _unrolled(
    emitter: Emitter,
    axis: int,
    call: Call,
    x: fx.Node,
    held: list[fx.Node],
    weights: list[fx.Node],
    backward: bool,
) -> tuple[list[fx.Node], list[fx.Node]]:
    """One layer in one direction: the whole hidden state after every step, in the order of time, and the last of
    ``held``: the whole hidden state and this rank's part of every state."""
    x = emitter.call(aten.linear.default, x, weights[0], *weights[2:3])
    moments = range(emitter.shape(x)[0])
    rows = emitter.call(aten.unbind.int, x)
    made: dict[int, fx.Node] = {}
    for t in reversed(moments) if backward else moments:
        whole, *own = held
        own = _step(emitter, _name(call), emitter.call(operator.getitem, rows, t), whole, own, weights)
        held = [_gathered(emitter, own[0], axis, call), *own]
        made[t] = held[0]
    return [made[t] for t in moments], held


def _step(
    emitter: Emitter, name: str, x: fx.Node, whole: fx.Node, own: list[fx.Node], weights: list[fx.Node]
) -> list[fx.Node]:
    """This rank's units after a step, of the hidden state and the cell. ``x``: the input, projected; ``whole``: the
    hidden state of all units before; ``own``: this rank's part of every state."""
    do = emitter.call
    hidden = do(aten.linear.default, whole, weights[1], *weights[3:4])
    if name == "gru":
        (xr, xz, xn), (hr, hz, hn) = _gates(emitter, x, 3), _gates(emitter, hidden, 3)
        r, z = (do(aten.sigmoid.default, do(aten.add.Tensor, *pair)) for pair in ((xr, hr), (xz, hz)))
        n = do(aten.tanh.default, do(aten.add.Tensor, xn, do(aten.mul.Tensor, r, hn)))
        return [do(aten.add.Tensor, do(aten.mul.Tensor, do(aten.sub.Tensor, own[0], n), z), n)]
    both = do(aten.add.Tensor, x, hidden)
    if name != "lstm":
        return [do(aten.tanh.default if name == "rnn_tanh" else aten.relu.default, both)]
    i, f, g, o = _gates(emitter, both, 4)
    i, f, o = (do(aten.sigmoid.default, gate) for gate in (i, f, o))
    entered = do(aten.mul.Tensor, i, do(aten.tanh.default, g))
    c = do(aten.add.Tensor, do(aten.mul.Tensor, f, own[1]), entered)
    return [do(aten.mul.Tensor, o, do(aten.tanh.default, c)), c]


def _gates(emitter: Emitter, x: fx.Node, count: int) -> list[fx.Node]:
    parts = emitter.call(aten.chunk.default, x, count, 1)
    return [emitter.call(operator.getitem, parts, i) for i in range(count)]


def _gathered(emitter: Emitter, x: fx.Node, axis: int, call: Call) -> fx.Node:
    """All units of a state of which every rank has its own; their gradient is scattered back."""
    how = (emitter.n(axis), emitter.c(axis), len(emitter.shape(x)) - 1, [_state(call)[-1]])
    raw = emitter.call(ops.start_all_gather.default, x, emitter.group(axis), *how, "reduce_scatter")
    return emitter.call(ops.wait_all_gather.default, raw, *how)
