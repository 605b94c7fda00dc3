"""split_backward: afterwards the gradients of a unit's parameters have a graph of their own, which may run later.

Schedules without bubbles send the gradients of what a unit read as soon as they can, and fill gaps with those of its
parameters. So backward becomes two graphs: *inputs* gives the gradients of arguments that are no parameters, and what
is *carried* to the other one; *weights* gives those of parameters.

What both need is made in inputs. What only parameters' gradients follow from goes to weights: all products, and of the
rest what makes the carried bytes fewest, by a minimum cut (a gain's gradient is carried rather than the two tensors
that it is summed over). Views and relabels are made again of what they show, so that nothing is carried twice.
Arguments that are there at any time are not carried but given again. A collective is never parted from its wait.

before:  backward(x, w, tangent):  %dw = mm(t(%tangent), %x); %dx = mm(%tangent, %w); return %dx, %dw
after:   inputs(x, w, tangent):    %dx = mm(%tangent, %w); return %dx, %x, %tangent
         weights(x, tangent):      %dw = mm(t(%tangent), %x); return %dw
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import networkx
import torch
from torch import Tensor, fx

from autopar.passes.differentiate import RELABEL, Differentiated, copied, is_fresh, is_view
from autopar.passes.insert_changes import is_getitem

aten = torch.ops.aten
ops = torch.ops.autopar

PRODUCTS = {  # what weights are for: as dear as the gradients of inputs beside which they stand
    *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten._grouped_mm.default),
    *(aten.mv.default, aten.addmv.default, aten.convolution.default, aten.convolution_backward.default),
    *(ops.experts_mm.default, ops.experts_outer.default),
}
GIVEN = {"parameter", "buffer", "constant", "input", "hoisted", "microbatch", "key", "draw"}
"""Kinds of arguments that a unit does not hold: they are there, or gathered, whenever they are asked for."""
SOURCE, SINK = "source", "sink"


@dataclass(frozen=True, eq=False)
class Part:
    """One of two graphs. ``reads``: the arguments that it takes, first of all; ``grads``: the arguments whose gradients
    it returns, first of all; ``fresh``: of each, whether its memory is its own, so that it may be added to in place."""

    graph: fx.GraphModule
    reads: tuple[int, ...]
    grads: tuple[int, ...]
    fresh: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class Parted:
    """``inputs(*reads, *saved, *tangents) -> (*gradients, *carried)``, ``weights(*reads, *carried) -> gradients``.

    ``inputs`` is None where parameters alone have gradients: then the arguments in ``held``, saved and tangents are
    carried as they are. ``weights`` is None where no parameter has one: then nothing is carried. ``held``: the
    arguments that come before saved, be they read or only carried.
    """

    inputs: Part | None
    weights: Part | None
    held: tuple[int, ...]

    @property
    def carried(self) -> tuple[Tensor, ...]:
        """What is carried, without data."""
        if self.weights is None:
            return ()
        takes = self.weights.graph.graph.find_nodes(op="placeholder")
        return tuple(n.meta["val"] for n in takes[len(self.weights.reads) :])


def split_backward(made: Differentiated, kinds: Sequence[str]) -> Parted:
    """Part the backward of a unit that has one. ``kinds``: of each argument, as `UnitClass` has them."""
    assert made.backward is not None
    return _Parting(made, made.backward.graph, kinds).run()


class _Parting:
    def __init__(self, made: Differentiated, backward: fx.Graph, kinds: Sequence[str]) -> None:
        graph = fx.Graph()
        ends = graph.graph_copy(backward, {})
        assert isinstance(ends, tuple)
        self.fresh = dict(zip(made.grads, made.fresh, strict=True))
        self.of_weights = {arg: n for arg, n in zip(made.grads, ends, strict=True) if kinds[arg] == "parameter"}
        self.of_inputs = {arg: n for arg, n in zip(made.grads, ends, strict=True) if kinds[arg] != "parameter"}
        if self.of_inputs and self.of_weights:
            _part_convolutions(graph)
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        takes = graph.find_nodes(op="placeholder")
        self.args = dict(zip(takes, made.keeps, strict=False))
        self.others = tuple(takes[len(made.keeps) :])  # saved and tangents
        self.parameters = {n for n, arg in self.args.items() if kinds[arg] == "parameter"}
        self.given = {n for n, arg in self.args.items() if kinds[arg] in GIVEN}

    def run(self) -> Parted:
        if not self.of_inputs:
            held = tuple(n for n in self.args if n not in self.given)
            whole = self._part(self.of_weights, (*held, *self.others), ())
            return Parted(None, whole, tuple(self.args[n] for n in held))
        carried = self._carried() if self.of_weights else ()
        inputs = self._part(self.of_inputs, self.others, carried)
        weights = self._part(self.of_weights, carried, ()) if self.of_weights else None
        return Parted(inputs, weights, inputs.reads)

    def _part(self, grads: dict[int, fx.Node], takes: Sequence[fx.Node], carried: Sequence[fx.Node]) -> Part:
        """The graph of some gradients that takes ``takes`` after its arguments and returns ``carried`` besides."""
        ends = (*grads.values(), *carried)
        nodes = self._closure(ends, takes)
        reads = [n for n in self.args if n in nodes and n not in takes]
        graph = copied([(n, n.name) for n in (*reads, *takes)], [n for n in nodes if n.op == "call_function"], ends)
        fresh = tuple(self.fresh[arg] and is_fresh(n, ends) for arg, n in grads.items())
        return Part(graph, tuple(self.args[n] for n in reads), tuple(grads), fresh)

    def _closure(self, wanted: Collection[fx.Node], known: Collection[fx.Node] = ()) -> dict[fx.Node, None]:
        """What these follow from, in order; no further than what is ``known``."""
        found, open_nodes, stop = set[fx.Node](), list(wanted), set(known)
        while open_nodes:
            node = open_nodes.pop()
            if node not in found and node not in stop:
                found.add(node)
                open_nodes += node.all_input_nodes
        return dict.fromkeys(sorted(found, key=self.place.__getitem__))

    def _carried(self) -> tuple[fx.Node, ...]:
        """The nodes of fewest bytes of which the gradients of parameters can be made; the earliest such.

        Bytes flow from what is made anyway to the gradients, through each node as many as it holds. A parameter counts
        as well: to be given it again is no cheaper than to carry it.
        """
        before = self._closure(self.of_inputs.values())
        network, pinned = networkx.DiGraph(), set[fx.Node]()
        network.add_nodes_from((SOURCE, SINK))
        for node in self._closure(self.of_weights.values()):
            if node not in before and (node.target in PRODUCTS or not pinned.isdisjoint(node.all_input_nodes)):
                pinned.add(node)
            again, there = _made_again(node), node in self.given and node not in self.parameters
            whole = again or there or node in pinned or _goes_on(node)
            network.add_edge((node, "made"), (node, "read"), **({} if whole else {"capacity": node.meta["val"].nbytes}))
            network.add_edges_from(((n, "read"), (node, "made")) for n in node.all_input_nodes)
            if not again and not there and (node in before or node.op == "placeholder"):
                network.add_edge(SOURCE, (node, "made"))
        network.add_edges_from(((n, "read"), SINK) for n in self.of_weights.values())
        _, (_, early) = networkx.minimum_cut(network.reverse(copy=False), SINK, SOURCE)  # reversed: the earliest cut
        cut = (n for n in self.place if (n, "made") in early and (n, "read") not in early)
        return tuple(n for n in cut if n not in self.given)


def _made_again(node: fx.Node) -> bool:
    """Whether a node holds no memory, or nothing is needed to make it."""
    if node.op != "call_function":
        return False
    if is_getitem(node):
        return _made_again(node.all_input_nodes[0])
    return node.target in RELABEL or is_view(node) or not node.all_input_nodes


def _goes_on(node: fx.Node) -> bool:
    """Whether a node is nothing that could be carried: several results, or a collective under way."""
    name = str(node.target)
    started = name.startswith(("autopar.start_", "_c10d_functional.")) and "wait" not in name
    return started or not isinstance(node.meta["val"], Tensor)


def _part_convolutions(graph: fx.Graph) -> None:
    """One op makes all gradients of a convolution: it becomes one for the input and one for weight and bias. The second
    asks of the weight only how it lies."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        *args, (of_input, *others) = node.args
        if not of_input or not any(others):
            continue
        weight = args[2].meta["val"]
        with graph.inserting_before(node):
            like = graph.call_function(
                aten.empty_strided.default,
                (list(weight.shape), list(weight.stride())),
                {"dtype": weight.dtype, "device": weight.device},
            )
            second = graph.call_function(node.target, (*args[:2], like, *args[3:], [False, *others]))
        like.meta = {**args[2].meta}
        second.meta = {**node.meta, "val": (None, *node.meta["val"][1:])}
        node.args = (*args, [True, False, False])
        node.meta["val"] = (node.meta["val"][0], None, None)
        for user in list(node.users):
            if user.args[1] != 0:
                user.update_arg(0, second)


__all__ = ["GIVEN", "PRODUCTS", "Part", "Parted", "split_backward"]
