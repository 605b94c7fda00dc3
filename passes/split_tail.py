"""split_tail: afterwards what needs the whole batch at the end of a model stands in a graph of its own, the tail.

A loss with a term that is not linear in the batch (a router's balance over all tokens) cannot be added up over
microbatches. Where all of them run forward before the first runs backward, it need not be: what the tail reads is kept
of every microbatch, the tail runs once on the whole batch, and its gradients go back to each of them.

before:  %sum = cross_entropy_sum(%logits, %y); %aux = balance(%router); %loss = add(%sum, %aux); return %loss
after:   body: ...; return %sum, %router
         tail: %aux = balance(%router); %loss = add(%sum, %aux); return %loss
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from autopar.passes.facts import Value, is_tensor, value
from autopar.passes.follow_time import undecided
from autopar.passes.graph_module import graph_module
from autopar.passes.layout import Axis
from autopar.passes.loss_stays_wide import LOSS_DTYPE
from autopar.runtime.counter_random import draws


@dataclass(frozen=True, eq=False)
class Tail:
    """``graph``: takes whole tensors, returns the model's outputs ``returns``, the loss first. ``kept``: those that the
    body still makes; behind them it makes what the tail reads: ``inputs``."""

    graph: fx.GraphModule
    returns: tuple[int, ...]
    kept: tuple[int, ...]
    inputs: tuple[Value, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """The body's outputs: numbers of the model's, then others for what the tail reads."""
        first = len(self.returns) + len(self.kept)
        return (*self.kept, *range(first, first + len(self.inputs)))


def split_tail(
    gm: fx.GraphModule, parameters: Collection[str], batch_inputs: Collection[str], batch: int
) -> Tail | None:
    """Cut the tail off ``gm``, which is left with the body; None where nothing needs the whole batch, or what does so
    reads a parameter, draws random numbers, or changes a buffer: then microbatches are impossible, and the graph is as
    it was. Needs facts on every node."""
    first = undecided(gm, frozenset(batch_inputs), Axis("time", batch, (1,) * batch))
    tail = dict.fromkeys(first)
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(n in tail for n in node.all_input_nodes):
            tail[node] = None
    order = [n for n in gm.graph.nodes if n in tail]
    output = gm.graph.output_node()
    (result,) = output.args
    outputs, buffers = result["outputs"], result["buffers"]  # type: ignore[index, call-overload]
    if not order or outputs[0] not in tail or any(n in tail for n in buffers.values()):  # type: ignore[index, union-attr, operator]
        return None
    read = list(dict.fromkeys(n for node in order for n in node.all_input_nodes if n not in tail))
    if any(draws(n.target) for n in order) or not all(is_tensor(n) for n in read):
        return None
    if any(n.op == "get_attr" and str(n.target) in parameters for n in read):
        return None
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in read:
        env[node] = graph.placeholder(f"whole_{len(env)}")
        env[node].meta = dict(node.meta)
    for node in order:
        env[node] = graph.node_copy(node, lambda n: env[n])
    returns = [i for i, n in enumerate(outputs) if n in tail]  # type: ignore[arg-type]
    kept = [i for i in range(len(outputs)) if i not in returns]  # type: ignore[arg-type]
    graph.output(tuple(env[outputs[i]] for i in returns))  # type: ignore[index]
    output.args = ({**result, "outputs": (*(outputs[i] for i in kept), *read)},)  # type: ignore[dict-item, index]
    output.meta.pop(LOSS_DTYPE, None)
    for node in reversed(order):
        gm.graph.erase_node(node)
    gm.recompile()
    return Tail(graph_module(graph), tuple(returns), tuple(kept), tuple(value(n) for n in read))
