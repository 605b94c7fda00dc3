"""From the program of one rank to its `Unit`s: products, traffic, what autograd keeps, and moves.

Every op of the annotated graph is lowered for the rank and microbatch with most, and what it keeps is seen under
saved-tensor hooks on fake tensors of these local shapes (`passes.saves`): nothing is known by hand but which factors
of an op are multiplied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from autopar.choosing.wiring import weights_of
from autopar.passes.emit import Emitter
from autopar.passes.facts import KEY, Fact, Value, fact, is_tensor, operand_nodes, value
from autopar.passes.insert_changes import change, is_getitem, produced_layout
from autopar.passes.lower import Lowerable
from autopar.passes.make_local import lower_node
from autopar.passes.moves import COLLECTIVES, COPIES, Step
from autopar.passes.price import largest
from autopar.passes.saves import STRIDES, call_of, observe
from autopar.pricing.products import attend_of, kind_of, products_of
from autopar.solver.work import Move, Op, Piece, Unit

LAYER = re.compile(r"(?:[^.\d][^.]*\.)*\d+(?=\.|$)")  # the path of a layer: down to the first number
Pieces = tuple[Piece | None, ...]


def units_of(model: Lowerable) -> list[Unit]:
    """The units of a lowerable model with its changes inserted (`passes.lower.with_changes`), in order.

    Layers are the modules with a number for a name; ``prefix`` is what comes before the first of them, ``suffix`` what
    comes after the last. Sizes are those of the rank, and the microbatch, with most.
    """
    rank = _Rank(model)
    for node in model.body.graph.nodes:
        rank.visit(node)
    return _cut(rank)


class _Rank:
    """The program of one rank, lowered node by node. ``found``: (path, entry, keys of the storages it makes);
    ``leaves``: the parameters; ``stored``: the piece of each storage."""

    def __init__(self, model: Lowerable) -> None:
        mesh = self.mesh = model.mesh
        self.emitter = Emitter(mesh, largest(mesh), {a.name: a.name for a in mesh.axes})
        self.emitter.at = next(iter(model.body.graph.nodes))
        self.emitter.microbatch = self._scalar("microbatch")
        self.emitter.key = self._scalar("key")
        self.parameters = frozenset(model.parameters)
        self.weights = weights_of(model.body, self.parameters)
        self.stored: list[Piece] = []
        self.pieces: dict[fx.Node, Pieces] = {}
        self.found: list[tuple[str, Op | Move, tuple[int, ...]]] = []
        self.leaves: dict[str, Piece] = {}

    def _scalar(self, name: str) -> fx.Node:
        local = self.emitter.graph.placeholder(name)
        local.meta |= {"val": 0, KEY: Fact((None,)), STRIDES: ()}
        return local

    def visit(self, node: fx.Node) -> None:
        """Lower a node of the annotated graph, and take down what it does."""
        emitter = self.emitter
        emitter.at = node
        if node.op in ("placeholder", "get_attr"):
            self._leaf(node)
        elif node.op == "call_function":
            before = len(emitter.graph.nodes)
            emitter.env[node] = lower_node(node, emitter)
            new = list(emitter.graph.nodes)[before:]
            if node.target is change:
                self._change(node, new)
            elif is_getitem(node):
                self._run(new[0], {}, weight=node in self.weights)
            else:
                self._op(node, new)

    def _leaf(self, node: fx.Node) -> None:
        """An input, parameter or constant."""
        v = value(node)
        shape = produced_layout(node).local_shape(v.shape, self.mesh, self.emitter.coordinates)
        local = self.emitter.env[node] = self.emitter.graph.placeholder(node.name)
        local.meta["val"] = torch.empty(shape, dtype=v.dtype, device="meta")
        piece = self._new(local.meta["val"], weight=node in self.weights)
        self._hold(local, (piece,), grad=v.grad)
        if node.op == "get_attr" and str(node.target) in self.parameters:
            self.leaves[str(node.target)] = piece

    def _new(self, val: torch.Tensor, *, weight: bool) -> Piece:
        """A new storage."""
        floating = val.is_floating_point() or val.is_complex()
        piece = Piece(len(self.stored), tuple(val.shape), val.itemsize, floating, weight)
        self.stored.append(piece)
        return piece

    def _hold(self, local: fx.Node, pieces: Pieces, *, grad: bool) -> None:
        """Write down what a local node holds, and what `call_of` asks of it."""
        self.pieces[local] = pieces
        local.meta[KEY] = Fact(
            tuple(
                Value(p.shape, v.dtype, grad and p.floating) if p is not None else None
                for p, v in zip(pieces, _vals(local), strict=True)
            )
        )

    def _change(self, node: fx.Node, new: Sequence[fx.Node]) -> None:
        """A change of layout: a move, a copy on this rank, or nothing."""
        step, v, known = node.meta["change"], value(node), fact(node)
        assert isinstance(step, Step)
        local, before = self.emitter.env[node], self.emitter.env[operand_nodes(node)[0]]
        (source,) = self.pieces[before]
        assert source is not None
        forward, backward = (kind or "" for kind in COLLECTIVES[step.row])
        makes = bool(forward) or COPIES.get(step.row, (None, None))[0] is not None
        result = self._new(local.meta["val"], weight=node in self.weights) if makes else source
        for n in new:
            self._hold(n, (result,), grad=v.grad)
            n.meta[STRIDES] = (tuple(n.meta["val"].stride()),)
        back, keys = backward if v.grad else "", (result.key,) * makes
        if forward or back:
            piece = replace(result, shape=self._counted(step, v.shape))
            axis = self.mesh.axes[step.axis].name
            move = Move(
                known.fqn, axis, forward, piece, back, piece if back else None, node in self.weights, source, result
            )
            self.found.append((known.fqn, move, keys))
        elif makes:
            copy = Op("autopar.shard", known.fqn, "copy", reads=(source,), writes=(result,), grad=v.grad)
            self.found.append((known.fqn, copy, keys))

    def _counted(self, step: Step, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of that of which a collective's bytes are counted."""
        at = self.emitter.coordinates
        if step.row == "S>S":
            return step.source.local_shape(shape, self.mesh, at)
        cut = step.source if step.row[0] == "S" else step.target
        return cut.with_kind(step.axis, "R").local_shape(shape, self.mesh, at)

    def _op(self, node: fx.Node, new: Sequence[fx.Node]) -> None:
        """An op of the model: all that it was lowered to."""
        weight, known = node in self.weights, fact(node)
        kept: dict[int, Piece] = {}
        made = [key for n in new for key in self._run(n, kept, weight=weight)]
        results = self.pieces[self.emitter.env[node]]
        nodes = operand_nodes(node)
        operands = [self._piece(o) for o in nodes]
        reads, old = {o: self._piece(o) for o in nodes}, {p.key for p in operands}
        writes = tuple(p for p in results if p is not None and p.key not in old)
        kind, shapes = kind_of(node, is_view=not writes), [p.shape for p in operands]
        attend = attend_of(node, shapes)
        if attend is not None:  # the mask that tells one piece of the sequence from another is no part of the kernel
            inside = {p.key for n in new for p in self.pieces[n] if p is not None} - {p.key for p in writes}
            kept = {k: p for k, p in kept.items() if k in old or (k in made and k not in inside)}
        needs = [(value(o).grad, o in self.weights) for o in nodes]
        forward, inputs, weights = products_of(node, shapes, needs, [p.shape for p in results if p is not None])
        if kind == "lookup" and writes:  # of its table, the first operand, it reads as much as it makes
            reads[nodes[0]] = replace(operands[0], shape=writes[0].shape)
        op = Op(
            str(node.target).rpartition(".")[0] or str(node.target),
            known.fqn,
            kind,
            forward,
            inputs,
            weights,
            attend,
            reads=() if kind == "view" else tuple(reads.values()),
            writes=writes,
            kept=tuple(kept.values()),
            grad=any(v is not None and v.grad for v in known.values),
        )
        self.found.append((known.fqn, op, tuple(made)))
        if kind == "loss":
            self._reduced_over_vocabulary(node, operands[0])

    def _reduced_over_vocabulary(self, node: fx.Node, logits: Piece) -> None:
        """The reductions inside a loss whose vocabulary is cut: each row's maximum, then two sums."""
        chosen = fact(node).strategy
        assert chosen is not None
        for axis, choice in enumerate(chosen.choices):
            if choice.kind == "special":
                for count in (1, 2):
                    piece = Piece(len(self.stored), (count, *logits.shape[:-1]), 4)
                    self.stored.append(piece)
                    name, path = self.mesh.axes[axis].name, fact(node).fqn
                    move = Move(path, name, "all_reduce", piece, "", None, False, piece, piece)
                    self.found.append((path, move, (piece.key,)))

    def _piece(self, node: fx.Node) -> Piece:
        (piece,) = self.pieces[self.emitter.env[node]]
        assert piece is not None
        return piece

    def _run(self, n: fx.Node, kept: dict[int, Piece], *, weight: bool) -> list[int]:
        """One local node: what it holds and keeps. Returns the keys of its new storages."""
        grad = any(v is not None and v.grad for o in n.all_input_nodes for v in fact(o).values)
        if is_getitem(n):
            whole, index = n.args
            assert isinstance(whole, fx.Node) and isinstance(index, int)
            self._hold(n, (self.pieces[whole][index],), grad=grad)
            return []
        args = tree_map(lambda a: 0 if isinstance(a, fx.Node) and not is_tensor(a) else a, (n.args, n.kwargs))
        seen, first = observe(call_of(n, args=args)).saves, len(self.stored)
        operands = [self.pieces[o][0] for o in operand_nodes(n)]
        pieces: list[Piece | None] = []
        for i, val in enumerate(_vals(n)):
            of = seen.aliases[i] if i < len(seen.aliases) else None
            source = operands[of] if of is not None else None
            if isinstance(val, torch.Tensor):
                pieces.append(replace(source, shape=tuple(val.shape)) if source else self._new(val, weight=weight))
            else:
                pieces.append(None)
        self._hold(n, tuple(pieces), grad=grad and n.target is not torch.ops.aten.detach.default)
        for piece in (*(operands[i] for i in seen.operands), *(pieces[i] for i in seen.results)):
            if piece is not None:
                kept[piece.key] = self.stored[piece.key]
        for extra in seen.new:
            size = extra.nbytes // extra.itemsize
            kept[len(self.stored)] = piece = Piece(len(self.stored), (size,), extra.itemsize, extra.flows)
            self.stored.append(piece)
        return list(range(first, len(self.stored)))


def _vals(n: fx.Node) -> tuple[Any, ...]:
    val = n.meta["val"]
    return tuple(val) if isinstance(val, (tuple, list)) else (val,)


def _cut(rank: _Rank) -> list[Unit]:
    """The entries by unit."""
    layers = [m[0] if (m := LAYER.match(path)) else "" for path, _, _ in rank.found]
    numbered = [i for i, layer in enumerate(layers) if layer]
    first, last = (numbered[0], numbered[-1]) if numbered else (len(layers), -1)
    names: list[str] = []
    for i, layer in enumerate(layers):
        names.append(layer or ("prefix" if i < first else "suffix" if i > last else names[-1]))
    units = []
    for name in dict.fromkeys(names):
        mine = [found for found, n in zip(rank.found, names, strict=True) if n == name]
        entries = tuple(entry for _, entry, _ in mine)
        made = frozenset(key for _, _, keys in mine for key in keys)
        units.append(Unit(name, entries, tuple(_parameters(rank, entries)), made))
    return units


def _parameters(rank: _Rank, entries: Iterable[Op | Move]) -> Iterator[tuple[str, Piece]]:
    """The parameters that a unit reads."""
    keys = {p.key for e in entries for p in (e.reads if isinstance(e, Op) else (e.source,))}
    return ((name, piece) for name, piece in rank.leaves.items() if piece.key in keys)


__all__ = ["units_of"]
