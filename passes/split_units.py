"""split_units: afterwards a rank's body is a list of calls of unit programs, and equal units share one.

A unit is what `passes.units` cut, with the changes of layout that it asks for first. The side of the graph (masks,
tables, ids: no parameter) goes into the unit that alone reads it; what several read stands in a call of its own in
front. Two calls are of one class where their ops, literals, wiring, and the shapes, strides and dtypes of what they
take are the same; which numbers a random op draws, the key of the step and the microbatch are arguments.

before:  %l0 = linear(%x, %w0); %d0 = dropout(%l0, draw=0, step_key=%key); %l1 = linear(%d0, %w1); %d1 = ..., draw=1
after:   class 0: %l = linear(%x, %w); %d = dropout(%l, draw=%draw, step_key=%key); return %d
         calls:   0 (x, w0, draw 0, key) -> value 0;  0 (value 0, w1, draw 1, key) -> value 1
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from autopar.passes.facts import UNIT
from autopar.passes.graph_module import graph_module
from autopar.passes.insert_changes import is_getitem
from autopar.passes.units import common_fqn
from autopar.runtime.counter_random import draws

Ref = tuple[str, int]
"""What an argument is: its kind and index. ``parameter``, ``buffer``, ``constant``, ``input``, ``hoisted``: in the
lists of `Local`; ``received``: a value of another stage; ``value``: what a call made; ``microbatch`` and ``key``;
``draw``: the number of a random op."""


@dataclass(frozen=True, eq=False)
class UnitClass:
    """``graph``: the forward of one unit on one rank; its placeholders are the arguments of a call, its output a tuple
    of tensors. ``kinds``: of each argument the kind of its `Ref`; ``needs``: per argument, whether a gradient is wanted
    of it; ``flows``: per output, whether one comes to it."""

    graph: fx.GraphModule
    kinds: tuple[str, ...]
    needs: tuple[bool, ...]
    flows: tuple[bool, ...]
    recompute: str = "none"
    key: Hashable = None  # equal in classes of any programs whose units do the same (names and modules do not count)

    @property
    def trains(self) -> bool:
        """Whether anything flows through; else only its forward is ever run."""
        return any(self.needs) and any(self.flows)


@dataclass(frozen=True)
class UnitCall:
    """``kind``: index of its class; ``fqn``: the module that its ops lie in; ``results``: numbers of its outputs."""

    kind: int
    fqn: str
    args: tuple[Ref, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class UnitProgram:
    """``calls`` in forward order; ``outputs`` of the body, the loss first; ``updates`` of its buffers."""

    classes: tuple[UnitClass, ...]
    calls: tuple[UnitCall, ...]
    outputs: tuple[Ref, ...]
    updates: tuple[Ref, ...]


FRONT = -1  # the unit of what several units read


def split_units(
    gm: fx.GraphModule,
    refs: Sequence[Ref],
    wanted: Collection[Ref],
    recompute: Sequence[str] = (),
    roots: Sequence[int] = (0,),
) -> UnitProgram:
    """Cut a graph that `make_local` made. ``refs``: what its placeholders are, in order; ``wanted``: those of which a
    gradient is (parameters, values of other stages); ``recompute``: of each unit what backward makes again (none given:
    nothing); ``roots``: the outputs to which a gradient comes."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return _Splitting(gm, dict(zip(placeholders, refs, strict=True)), wanted, roots).run(recompute)


class _Splitting:
    def __init__(
        self, gm: fx.GraphModule, refs: Mapping[fx.Node, Ref], wanted: Collection[Ref], roots: Sequence[int]
    ) -> None:
        self.ops = [n for n in gm.graph.nodes if n.op == "call_function"]
        self.output = next(n for n in gm.graph.nodes if n.op == "output")
        self.refs = dict(refs)
        outputs, updates = self.output.args[0]
        self.outputs: Sequence[fx.Node] = outputs
        self.updates: Sequence[fx.Node] = updates
        self.grads = _grads(gm, {n for n, ref in refs.items() if ref in wanted})
        self.reach = reach(gm.graph, [self.outputs[i] for i in roots if i < len(self.outputs)], self.grads)
        self.unit = self._units()

    def run(self, recompute: Sequence[str]) -> UnitProgram:
        pieces: dict[int, list[fx.Node]] = {}
        for node in self.ops:
            pieces.setdefault(self.unit[node], []).append(node)
        known: dict[Hashable, int] = {}
        classes, calls, made = list[UnitClass](), list[UnitCall](), 0
        for unit in sorted(pieces):
            ops = pieces[unit]
            results = [n for n in ops if isinstance(n.meta["val"], Tensor) and self._leaves(n, unit)]
            policy = recompute[unit] if recompute and unit != FRONT else "none"
            key, args = self._key(ops, results, policy)
            if key not in known:
                known[key] = len(classes)
                classes.append(self._class(ops, args, results, policy, key))
            numbers = tuple(range(made, made + len(results)))
            made += len(results)
            named = [n for n in ops if not str(n.target).startswith("autopar.")] or ops  # changes have their producer's
            calls.append(UnitCall(known[key], common_fqn([fqn_of(n) for n in named]), tuple(args), numbers))
            self.refs.update((n, ("value", i)) for n, i in zip(results, numbers, strict=True))
        return UnitProgram(
            tuple(classes),
            tuple(calls),
            tuple(self.refs[n] for n in self.outputs),
            tuple(self.refs[n] for n in self.updates),
        )

    def _units(self) -> dict[fx.Node, int]:
        """The unit of every op: of the core as its fact says, of the side by who reads it."""
        core = {n for n, (kind, _) in self.refs.items() if kind in ("parameter", "received")}
        unit: dict[fx.Node, int] = {}
        for node in self.ops:
            if any(n in core for n in node.all_input_nodes):
                core.add(node)
                before = max((unit[n] for n in node.all_input_nodes if n in unit), default=0)
                said = unit[node.all_input_nodes[0]] if is_getitem(node) else node.meta.get(UNIT)
                unit[node] = before if said is None else said
                assert unit[node] >= before, f"{node} of unit {said} reads what unit {before} makes"
        readers: dict[fx.Node, set[int]] = {}
        for node in reversed(self.ops):
            if node not in core:
                found = [readers[u] if is_getitem(u) and u not in core else {unit.get(u, FRONT)} for u in node.users]
                readers[node] = set().union(*found)
                if not is_getitem(node):
                    unit[node] = next(iter(readers[node])) if len(readers[node]) == 1 else FRONT
        for node in self.ops:
            if node not in unit:
                unit[node] = unit[node.all_input_nodes[0]]
        return unit

    def _leaves(self, node: fx.Node, unit: int) -> bool:
        return any(user is self.output or self.unit[user] != unit for user in node.users)

    def _key(self, ops: Sequence[fx.Node], results: Sequence[fx.Node], policy: str) -> tuple[Hashable, list[Ref]]:
        """What makes a unit equal to another, and its arguments in the order in which its ops read them."""
        inside = {node: i for i, node in enumerate(ops)}
        args: dict[Ref, int] = {}
        about: list[Hashable] = []

        def argument(ref: Ref, node: fx.Node | None) -> tuple[str, int]:
            if ref not in args:
                args[ref] = len(args)
                about.append((ref[0], _about(node), self._needs(node, inside)))
            return ("arg", args[ref])

        lines = []
        for node in ops:
            words = _Words(
                lambda n: ("op", inside[n]) if n in inside else argument(self.refs[n], n),
                lambda number: argument(("draw", number), None),
            )
            lines.append((node.target, words.of(node)))
        ends = tuple((inside[n], n in self.reach) for n in results)
        return (tuple(lines), tuple(about), ends, policy), list(args)

    def _needs(self, node: fx.Node | None, inside: Mapping[fx.Node, int]) -> bool:
        """Whether a gradient flows back to an argument through this unit."""
        return node is not None and node in self.grads and any(u in inside and u in self.reach for u in node.users)

    def _class(
        self, ops: Sequence[fx.Node], args: Sequence[Ref], results: Sequence[fx.Node], policy: str, key: Hashable
    ) -> UnitClass:
        graph = fx.Graph()
        inside = {node: i for i, node in enumerate(ops)}
        nodes = {self.refs[n]: n for node in ops for n in node.all_input_nodes if n not in inside}
        holders: dict[Ref, fx.Node] = {}
        env: dict[fx.Node, fx.Node] = {}
        for ref in args:
            node = nodes.get(ref)
            holders[ref] = graph.placeholder(node.name if node is not None else f"draw_{ref[1]}")
            holders[ref].meta = dict(node.meta) if node is not None else {"val": ref[1]}
            if node is not None:
                env[node] = holders[ref]
        for node in ops:
            env[node] = graph.node_copy(node, lambda n: env[n])
            if draws(node.target) and "draw" in node.kwargs:
                env[node].update_kwarg("draw", holders["draw", int(node.kwargs["draw"])])  # type: ignore[arg-type]
        graph.output(tuple(env[n] for n in results))
        return UnitClass(
            graph_module(graph),
            tuple(kind for kind, _ in args),
            tuple(self._needs(nodes.get(ref), inside) for ref in args),
            tuple(n in self.reach for n in results),
            policy,
            key,
        )


@dataclass(frozen=True)
class _Words:
    """A node's arguments as something that can be compared."""

    of_node: Callable[[fx.Node], Hashable]
    of_draw: Callable[[int], Hashable]

    def of(self, node: fx.Node) -> Hashable:
        """Positional and named arguments."""
        named = {**node.kwargs}
        drawn = self.of_draw(int(named.pop("draw"))) if draws(node.target) and "draw" in named else None  # type: ignore[arg-type]
        return self._word(node.args), tuple((k, self._word(a)) for k, a in sorted(named.items())), drawn

    def _word(self, a: Any) -> Hashable:
        if isinstance(a, fx.Node):
            return self.of_node(a)
        if isinstance(a, (tuple, list)):
            return (type(a).__name__, *(self._word(x) for x in a))
        return (type(a).__name__, repr(a))  # 1, 1.0 and True are equal, but not as arguments; nan is not even nan


def _about(node: fx.Node | None) -> Hashable:
    val = None if node is None else node.meta.get("val")
    if not isinstance(val, Tensor):
        return None
    return tuple(val.shape), val.stride(), val.dtype


def fqn_of(node: fx.Node) -> str:
    """The module that made a local node."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(stack.values()))[0]) if stack else ""


# -- where gradients flow --------------------------------------------------------------------------------------------


def _grads(gm: fx.GraphModule, leaves: set[fx.Node]) -> set[fx.Node]:
    """The nodes whose value needs a gradient, as autograd finds it."""
    found = set(leaves)
    known: dict[Hashable, tuple[bool, ...]] = {}
    of_results: dict[fx.Node, tuple[bool, ...]] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or not any(n in found for n in node.all_input_nodes):
            continue
        if is_getitem(node):
            source, index = node.args
            if source in of_results and of_results[source][index]:
                found.add(node)
            continue
        words = _Words(lambda n: (n in found, _about(n)), lambda number: None).of(node)
        key = (node.target, words)
        if key not in known:
            known[key] = _tried(node, found)
        of_results[node] = known[key]
        if any(known[key]):
            found.add(node)
    return found


def _tried(node: fx.Node, grads: set[fx.Node]) -> tuple[bool, ...]:
    """Of each result, whether it needs a gradient: the op is run on tensors without data."""

    def given(n: fx.Node) -> Any:
        val = n.meta["val"]
        if not isinstance(val, Tensor):
            return val
        return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="meta").requires_grad_(n in grads)

    args, kwargs = tree_map(lambda a: given(a) if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
    kwargs = {k: torch.device("meta") if k == "device" and v is not None else v for k, v in kwargs.items()}
    assert callable(node.target)
    with torch.enable_grad():
        made = node.target(*args, **kwargs)
    return tuple(
        isinstance(t, Tensor) and t.requires_grad for t in (made if isinstance(made, (tuple, list)) else [made])
    )


def reach(graph: fx.Graph, roots: Collection[fx.Node], grads: set[fx.Node]) -> set[fx.Node]:
    """The nodes to which a gradient comes from ``roots``, of those that need one (``grads``)."""
    found = {n for n in grads if n in roots}
    for node in reversed(graph.nodes):
        if node in grads and any(user in found for user in node.users):
            found.add(node)
    return found


__all__ = ["Ref", "UnitCall", "UnitClass", "UnitProgram", "fqn_of", "reach", "split_units"]
