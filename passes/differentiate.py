"""differentiate: afterwards a unit has a backward: a graph that takes what forward kept and gives gradients.

The unit is traced once, forward and backward together, on fake tensors; ops of the library stay single nodes, their
adjoints are ops of the library too. The joint graph is then cut in two by what is kept between them:

- ``none``: what autograd would keep, that is, whatever of forward backward reads;
- ``selective``: results of products, convolutions, attention, collectives, sorting; the rest is made again;
- ``full``: nothing but the arguments.

Whatever the policy, backward takes arguments again where it needs them (a gathered parameter is gathered for it once
more), and views, what follows from parameters alone, and changes of layout that only relabel are made again: they would
hold memory that is held anyway, or should be let go. Random ops are hashes, so that made again they are equal.

before:  %mm = mm(%x, %w); %silu = silu(%mm); return %silu            # needs: w; flows: silu
after:   none       forward: ...; return %silu, %mm                  backward(x, mm, tangent): ...
         full       forward: ...; return %silu                       backward(x, w, tangent): %mm = mm(%x, %w); ...
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from autopar.passes.graph_module import graph_module
from autopar.passes.insert_changes import is_getitem
from autopar.passes.split_units import UnitClass, fqn_of
from autopar.runtime.counter_random import draws

aten = torch.ops.aten
ops = torch.ops.autopar

KEPT = {  # by what is selective: what is dear to make again
    *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten._grouped_mm.default),
    *(aten.convolution.default, aten.linear.default, aten.matmul.default, aten.addmv.default, aten.mv.default),
    *(aten.sort.default, aten.sort.stable, aten.topk.default, aten.argsort.default, aten.cummax.default),
    *(ops.experts_mm.default, ops.vocabulary_cross_entropy.default),
    *(ops.wait_all_reduce.default, ops.wait_all_gather.default),
    *(ops.wait_reduce_scatter.default, ops.wait_all_to_all.default),
}
RELABEL = {ops.keep.default, ops.replicate.default, ops.invariant.default, ops.time_keep.default}
SCATTERS: dict[Any, Any] = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
RECORDING = {aten.mkldnn_rnn_layer.default}  # what their backward reads they make only where gradients are recorded
LIFTED = ("step_key", "draw", "microbatch")  # arguments of library ops that are arguments of the graphs
DRAW, KEY, MICROBATCH = 1 << 48, (1 << 47) + 1, (1 << 47) + 2  # what stands for them while tracing


class Untraceable(Exception):
    """Why a unit has no graph of its backward: it is run under autograd."""


@dataclass(frozen=True)
class Saved:
    """One tensor that forward keeps for backward: the op that made it and the module of that; ``shape`` in elements.
    ``result``: the output whose memory it is, which need not be held twice (None: it has its own)."""

    fqn: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    result: int | None

    @property
    def nbytes(self) -> int:
        """Bytes, whoever holds them."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Differentiated:
    """``forward(*args) -> (*outputs, *saved)`` and ``backward(*[args[i] for i in keeps], *saved, *tangents) ->
    gradients``, one for each index of an argument in ``grads`` (None: nothing flows).

    ``tangents``: the outputs whose gradients it takes, laid out as ``meta["val"]`` of its placeholders says (strides
    count). ``fresh``: of each gradient, whether its memory is its own, so that it may be added to in place.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    keeps: tuple[int, ...]
    saved: tuple[Saved, ...]
    tangents: tuple[int, ...]
    grads: tuple[int, ...]
    fresh: tuple[bool, ...]


def differentiate(unit: UnitClass, device: torch.device = torch.device("cpu")) -> Differentiated:  # noqa: B008
    """Cut the joint graph of a unit on ``device`` by its policy. Raises Untraceable, with the reason."""
    known = _TRACED.setdefault(unit.graph, {})
    key = (unit.kinds, unit.needs, unit.flows, device)
    if key not in known:
        known[key] = _trace(unit, device)
    return _Cut(unit, known[key]).run()


_TRACED: WeakKeyDictionary[fx.GraphModule, dict[Any, _Joint]] = WeakKeyDictionary()  # all policies cut the same


# -- forward and backward in one graph -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Joint:
    """``args``: a placeholder for each argument of the unit; ``tangents``: by output; ``grads``: by argument, the node
    of its gradient; ``forward``: the nodes of forward."""

    graph: fx.Graph
    args: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    tangents: dict[int, fx.Node]
    grads: dict[int, fx.Node]
    forward: frozenset[fx.Node]


class _Run(fx.Interpreter):
    """Runs a unit; a random op is told the place holder of a microbatch, as its fake kernel does not look."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if draws(target) and "microbatch" in kwargs:
            kwargs = {**kwargs, "microbatch": MICROBATCH}
        return super().call_function(target, args, kwargs)


def _trace(unit: UnitClass, device: torch.device) -> _Joint:
    placeholders = unit.graph.graph.find_nodes(op="placeholder")
    (results,) = next(n for n in unit.graph.graph.nodes if n.op == "output").args
    assert isinstance(results, tuple)
    mode = FakeTensorMode()
    with mode:
        given = [_given(n, kind, i, device) for i, (n, kind) in enumerate(zip(placeholders, unit.kinds, strict=True))]
        seeds = [_fake(n.meta["val"], device, dense=True) for n, f in zip(results, unit.flows, strict=True) if f]
    tensors = [i for i, a in enumerate(given) if isinstance(a, Tensor)]
    flowing = [i for i, f in enumerate(unit.flows) if f]
    seen: dict[str, Any] = {}

    def joint(*flat: Tensor) -> tuple[Tensor, ...]:
        args = list(given)
        for i, t in zip(tensors, flat, strict=False):
            args[i] = t.detach().requires_grad_() if unit.needs[i] else t
        with torch.enable_grad():
            outputs = _Run(unit.graph).run(*args)
        tracer = get_proxy_mode().tracer  # type: ignore[union-attr]
        for node in tracer.graph.nodes:
            node.meta["forward"] = True
        pairs = [(i, t) for i, t in zip(flowing, flat[len(tensors) :], strict=True) if outputs[i].requires_grad]
        wanted = [i for i in tensors if unit.needs[i]]
        made: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            made = torch.autograd.grad(
                [outputs[i] for i, _ in pairs], [args[i] for i in wanted], [t for _, t in pairs], allow_unused=True
            )
        seen["pairs"] = [i for i, _ in pairs]
        seen["grads"] = [i for i, g in zip(wanted, made, strict=True) if g is not None]
        return (*outputs, *(g for g in made if g is not None))

    try:
        with mode, fx.traceback.preserve_node_meta():
            gm = make_fx(joint)(*(given[i] for i in tensors), *seeds)
    except Exception as error:
        raise Untraceable(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
    found = iter(gm.graph.find_nodes(op="placeholder"))
    args = {i: next(found) for i in tensors}
    tangents = {i: node for i, node in zip(flowing, found, strict=True) if i in seen["pairs"]}
    (ends,) = next(n for n in gm.graph.nodes if n.op == "output").args
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        for i, node in enumerate(placeholders):
            if i not in args:
                args[i] = gm.graph.placeholder(node.name)
                args[i].meta = {"val": node.meta["val"], "forward": True}
    _lift(gm.graph, unit, args)
    _without_detach(gm.graph)
    _refuse(gm.graph)
    _without_mutations(gm.graph)
    (ends,) = next(n for n in gm.graph.nodes if n.op == "output").args
    assert isinstance(ends, tuple)
    return _Joint(
        gm.graph,
        tuple(args[i] for i in range(len(placeholders))),
        ends[: len(results)],
        tangents,
        dict(zip(seen["grads"], ends[len(results) :], strict=True)),
        frozenset(n for n in gm.graph.nodes if n.meta.get("forward")),
    )


def _given(node: fx.Node, kind: str, place: int, device: torch.device) -> Any:
    val = node.meta["val"]
    if isinstance(val, Tensor):
        return _fake(val, device)
    return {"draw": DRAW + place, "key": KEY}.get(kind, val)


def _fake(val: Tensor, device: torch.device, dense: bool = False) -> Tensor:
    """A fake tensor like ``val``; ``dense``: contiguous unless that is dense as it is."""
    strides = val.stride()
    if dense and not torch._prims_common.is_non_overlapping_and_dense_or_false(val):
        strides = torch.empty(val.shape, device="meta").stride()
    return torch.empty_strided(val.shape, strides, dtype=val.dtype, device=device)


def _lift(graph: fx.Graph, unit: UnitClass, args: dict[int, fx.Node]) -> None:
    """What stood for the key, draws and the microbatch becomes a placeholder again."""
    holders: dict[int, fx.Node] = {DRAW + i: args[i] for i, kind in enumerate(unit.kinds) if kind == "draw"}
    for i, kind in enumerate(unit.kinds):
        if kind == "key":
            holders[KEY] = args[i]
        elif kind == "microbatch":
            holders[MICROBATCH] = args[i]
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.name.startswith("autopar::"):
            continue
        for place, argument in enumerate(schema.arguments):
            if argument.name not in LIFTED:
                continue
            if place < len(node.args) and argument.name == "microbatch" and MICROBATCH in holders:
                node.update_arg(place, holders[MICROBATCH])  # of time ops, which know it by its true number
            elif argument.name in node.kwargs and node.kwargs[argument.name] in holders:
                node.update_kwarg(argument.name, holders[node.kwargs[argument.name]])


def _without_detach(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _without_mutations(graph: fx.Graph) -> None:
    """What is read after an op wrote into a tensor is what that op returns, put back into what that is a view of; where
    somebody reads the tensor as it was, the op makes a new one."""
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        if written != [0] or len(schema.returns) != 1:
            raise Untraceable(f"{node.target} writes into more than its first operand")
        place = {n: i for i, n in enumerate(graph.nodes)}
        alike = [n for n in graph.nodes if n is not node and _storage(n) == _storage(operand)]
        views, later = ([n for n in alike if (place[n] < place[node]) is before] for before in (True, False))
        late = {n: [u for u in n.users if place[u] > place[node]] for n in views}
        seen_through = [operand]
        while seen_through[-1].target in SCATTERS:
            seen_through.append(seen_through[-1].args[0])  # type: ignore[arg-type]
        if any(users and n not in seen_through for n, users in late.items()):
            raise Untraceable(f"{node.target} writes into a tensor of which there is a view")
        if operand.op == "placeholder" or operand.target in RELABEL or len(operand.users) > 1 or len(views) > 1:
            node.target, node.meta["val"] = _out_of_place(node.target), _val(node).clone()
        made = node
        for i, n in enumerate(seen_through):
            if i:
                made = _put_back(graph, seen_through[i - 1], made)
            for user in late[n]:
                user.replace_input_with(n, made)
            if not any(late[n] for n in seen_through[i + 1 :]):
                break
        for n in later if made is not node else ():
            n.meta["val"] = n.target(*fx.node.map_arg(n.args, _val), **fx.node.map_arg(n.kwargs, _val))


def _put_back(graph: fx.Graph, view: fx.Node, made: fx.Node) -> fx.Node:
    """What ``view`` is of, with ``made`` in its place."""
    (source, *where) = view.args
    assert isinstance(source, fx.Node)
    with graph.inserting_after(made):
        node = graph.call_function(SCATTERS[view.target], (source, made, *where), view.kwargs)
    node.meta = {**made.meta, "val": _val(source).clone()}
    return node


def _out_of_place(target: Any) -> Any:
    name, overload = target._schema.name.removeprefix("aten::").removesuffix("_"), target._overloadname
    found = getattr(getattr(aten, name, None), overload, None)
    if found is None:
        raise Untraceable(f"{target} writes into its operand, and there is no op that does not")
    return found


def _refuse(graph: fx.Graph) -> None:
    """Torch's own random numbers are other ones the second time; a tensor found while tracing has no values."""
    for node in graph.nodes:
        if node.op == "get_attr":
            raise Untraceable("a tensor is made of numbers while the unit runs")
        if node.op != "call_function" or not hasattr(node.target, "tags"):
            continue
        if node.target in RECORDING:
            raise Untraceable(f"{node.target} makes what its backward reads only where autograd records")
        if torch.Tag.nondeterministic_seeded in node.target.tags and _drops(node):
            raise Untraceable(f"{node.target} draws random numbers of torch's generator")


def _drops(node: fx.Node) -> bool:
    """Whether a random op draws: attention does not where it drops nothing."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    bound: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "attention" not in str(node.target) or bool(bound.get("dropout_p", 0.0))


# -- cut in two ------------------------------------------------------------------------------------------------------


class _Cut:
    def __init__(self, unit: UnitClass, joint: _Joint) -> None:
        self.unit, self.joint = unit, joint
        self.place = {node: i for i, node in enumerate(joint.graph.nodes)}
        parameters = {n for n, kind in zip(joint.args, unit.kinds, strict=True) if kind == "parameter"}
        self.of_parameters = set(parameters)  # what follows from parameters alone
        self.again = set[fx.Node]()
        for node in joint.graph.nodes:
            if node.op != "call_function":
                continue
            read = node.all_input_nodes
            if read and all(n in self.of_parameters for n in read):
                self.of_parameters.add(node)
            if self._made_again(node):
                self.again.add(node)

    def _made_again(self, node: fx.Node) -> bool:
        """Whether backward makes a result of forward again rather than that it is kept."""
        if node in self.of_parameters or node.target in RELABEL or is_view(node):
            return True
        if is_getitem(node):
            return self._made_again(node.all_input_nodes[0])
        if self.unit.recompute == "none":
            return False
        return self.unit.recompute == "full" or not _is_kept(node)

    def run(self) -> Differentiated:
        joint = self.joint
        grads = tuple(joint.grads)
        again, kept = self._backward([joint.grads[i] for i in grads])
        saved = sorted((n for n in kept if n.op != "placeholder"), key=self.place.__getitem__)
        keeps = tuple(i for i, n in enumerate(joint.args) if n in kept)
        roots = {_root(n): i for i, n in reversed(list(enumerate(joint.outputs)))}
        names = [n.name for n in self.unit.graph.graph.find_nodes(op="placeholder")]
        forward = copied(
            list(zip(joint.args, names, strict=True)),
            self._closure([*joint.outputs, *saved]),
            (*joint.outputs, *saved),
        )
        if not grads:
            return Differentiated(forward, None, (), (), (), (), ())
        tangents = tuple(joint.tangents)
        holders = [(joint.args[i], names[i]) for i in keeps] + [(n, n.name) for n in saved]
        holders += [(joint.tangents[i], f"tangent_{i}") for i in tangents]
        made = [joint.grads[i] for i in grads]
        return Differentiated(
            forward,
            copied(holders, again, tuple(made)),
            keeps,
            tuple(Saved(fqn_of(n), _op(n), tuple(_val(n).shape), _val(n).dtype, roots.get(n)) for n in saved),
            tangents,
            grads,
            tuple(is_fresh(n, made) for n in made),
        )

    def _closure(self, wanted: Sequence[fx.Node]) -> list[fx.Node]:
        """The ops that these follow from, in order."""
        found, open_nodes = set[fx.Node](), list(wanted)
        while open_nodes:
            node = open_nodes.pop()
            if node.op == "call_function" and node not in found:
                found.add(node)
                open_nodes += node.all_input_nodes
        return sorted(found, key=self.place.__getitem__)

    def _backward(self, made: Sequence[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
        """The ops of backward, each behind what is made again for it; and what it takes, made or given in forward."""
        ours = [n for n in self._closure(made) if n not in self.joint.forward]
        done, kept, order = set[fx.Node](), set[fx.Node](), list[fx.Node]()
        tangents = set(self.joint.tangents.values())
        for node in [*ours, *(n for n in made if n in self.joint.forward)]:
            missing, open_nodes = set[fx.Node](), [node] if node in self.joint.forward else list(node.all_input_nodes)
            while open_nodes:
                n = open_nodes.pop()
                if n in done or n in missing or n in tangents or n not in self.joint.forward:
                    continue
                if n in self.again:
                    missing.add(n)
                    open_nodes += n.all_input_nodes
                else:
                    kept.add(n)
            order += sorted(missing, key=self.place.__getitem__)
            done |= missing
            if node not in self.joint.forward:
                order.append(node)
        return order, kept


def copied(
    holders: Sequence[tuple[fx.Node, str]], nodes: Collection[fx.Node], ends: tuple[fx.Node, ...]
) -> fx.GraphModule:
    """A graph that takes ``holders``, by the names given, runs copies of ``nodes`` and returns ``ends``."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    words = set[str]()
    for node, name in holders:
        while name in words:  # an argument may be called as an op of the joint graph
            name += "_"
        words.add(name)
        env[node] = graph.placeholder(name)
        env[node].meta = _meta(node)
    for node in nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
        env[node].meta = _meta(node)
    graph.output(tuple(env[n] for n in ends))
    graph.lint()
    return graph_module(graph)


def _meta(node: fx.Node) -> dict[str, Any]:
    return {k: node.meta[k] for k in ("val", "nn_module_stack", "stack_trace") if k in node.meta}


def _is_kept(node: fx.Node) -> bool:
    """Whether a selective policy keeps a result."""
    name = str(node.target)
    return node.target in KEPT or "attention" in name or name.startswith("aten.mkldnn") or "_lstm" in name


def _val(node: fx.Node) -> Tensor:
    val = node.meta["val"]
    assert isinstance(val, Tensor), f"{node} is no tensor"
    return val


def _op(node: fx.Node) -> str:
    return str((node.all_input_nodes[0] if is_getitem(node) else node).target)


# -- who shares memory -----------------------------------------------------------------------------------------------


def _storage(node: fx.Node) -> int | None:
    val = node.meta.get("val")
    return int(val.untyped_storage()._cdata) if isinstance(val, Tensor) else None


def is_view(node: fx.Node) -> bool:
    """Whether all that an op makes lies in the memory of an operand."""
    val = node.meta.get("val")
    made = [v for v in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(v, Tensor)]
    schema = getattr(node.target, "_schema", None)
    if not made or (schema is not None and schema.is_mutable):
        return False
    read = {_storage(n) for n in node.all_input_nodes}
    return all(int(v.untyped_storage()._cdata) in read for v in made)


def _root(node: fx.Node) -> fx.Node:
    """The node in whose memory a tensor lies, or may lie."""
    while node.op == "call_function":
        if is_getitem(node):
            source = node.all_input_nodes[0]
            if not is_view(source):
                return node
            node = source.all_input_nodes[0]
        elif node.target in RELABEL:
            node = node.all_input_nodes[0]
        elif is_view(node):
            node = next(n for n in node.all_input_nodes if _storage(n) == _storage(node))
        else:
            schema = getattr(node.target, "_schema", None)
            if schema is None or not schema.is_mutable:
                return node
            node = node.all_input_nodes[0]
    return node


def is_fresh(node: fx.Node, made: Sequence[fx.Node]) -> bool:
    """Whether the memory of a result is its own, and dense, when a graph returns ``made``."""
    root = _root(node)
    alone = sum(_root(n) is root for n in made) == 1
    return (
        root.op == "call_function" and alone and torch._prims_common.is_non_overlapping_and_dense_or_false(_val(node))
    )


__all__ = ["Differentiated", "Saved", "Untraceable", "copied", "differentiate", "is_fresh", "is_view"]
