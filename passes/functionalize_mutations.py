"""PREPARE: no op writes into its operands; what a buffer holds after the step is an output of the graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import autopar.runtime.ops  # noqa: F401  (defines autopar::batch_norm)
from autopar.errors import AutoparError
from autopar.passes.aliases import Alias, Shadow
from autopar.passes.facts import _source, call

aten = torch.ops.aten

_RENAMED = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div"}
_RESHAPING = {"unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "detach_"}


def functionalize_mutations(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace every mutating op by its functional form; later uses of the tensor, of its views and of the tensors it is
    a view of, read the new value. Buffers that change become ``{fqn: node}`` under ``"buffers"`` of the output.

    ``batch_norm`` in training becomes ``autopar.batch_norm``, its running statistics outputs. A ``momentum`` of nan
    stands for torch's None: the cumulative average over ``num_batches_tracked``. ``instance_norm`` with running
    statistics is one without, and these move to the mean of all instances' own.

    Raises:
        AutoparError: the graph writes into an input, a parameter or a constant, or by an op or through a view that
            has no functional form; names the op and file:line.

    Example:
        ``y = x + 1; y[0].mul_(z); return y`` -> ``y = x + 1; m = y[0] * z; return select_scatter(y, m, 0, 0)``
    """
    if any(_mutates(n) for n in gm.graph.nodes):
        _Rewriter(gm).run()
        gm.graph.lint()
        gm.recompile()
    return gm


def is_mutating(target: object) -> bool:
    """Whether an op's schema says that it writes into an argument."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def is_training_batch_norm(node: fx.Node) -> bool:
    """Whether the node is aten's batch norm over batch statistics (it updates its buffers unseen by its schema)."""
    return node.target is aten.batch_norm.default and bool(node.args[5])


def is_tracking_instance_norm(node: fx.Node) -> bool:
    """Whether the node is an instance norm that updates its buffers, unseen by its schema."""
    return node.target is aten.instance_norm.default and bool(node.args[5]) and node.args[3] is not None


def _mutates(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    return is_mutating(node.target) or is_training_batch_norm(node) or is_tracking_instance_norm(node)


def _refusal(node: fx.Node, why: str, way_out: str) -> AutoparError:
    return AutoparError(f"{_source(node) or node.name}: {node.target} {why}. {way_out}.")


class _Rewriter:
    """One walk over the graph. `Shadow` tells which tensors share memory; every `Alias` knows the node that holds its
    present value."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.shadow = Shadow(gm)
        self.aliases: dict[fx.Node, Alias] = {}

    def run(self) -> None:
        done: list[fx.Node] = []
        for node in list(self.graph.nodes):
            self.shadow.run(node)
            if node.op == "output":
                self._finish(node)
                continue
            if not _mutates(node):
                alias = self._alias(node)
                self._read_operands(node)
                self.aliases[node] = alias
                continue
            with self.graph.inserting_before(node):
                if is_training_batch_norm(node):
                    self._batch_norm(node)
                elif is_tracking_instance_norm(node):
                    self._instance_norm(node)
                else:
                    self._mutation(node)
            done.append(node)
        for node in reversed(done):
            self.graph.erase_node(node)

    def _alias(self, node: fx.Node) -> Alias:
        parent = self.shadow.parent(node)
        if parent is None:
            return Alias(node, None, None)
        return Alias(node, self.aliases[parent], node)

    def _read_operands(self, node: fx.Node) -> None:
        """Let a node that writes nothing read present values."""
        with self.graph.inserting_before(node):
            present = {a: self._read(a) for a in node.all_input_nodes if a in self.aliases}
        node.args = fx.map_arg(node.args, lambda a: present.get(a, a))
        node.kwargs = fx.map_arg(node.kwargs, lambda a: present.get(a, a))

    def _read(self, node: fx.Node) -> fx.Node:
        return self.aliases[node].read(self.graph)

    def _write(self, node: fx.Node, target: fx.Node, new: fx.Node) -> None:
        """Let ``target`` hold ``new`` from here on."""
        self._check_writable(node, self.aliases[target])
        try:
            self.aliases[target].write(self.graph, new)
        except NotImplementedError as error:
            raise _refusal(node, f"writes through a view ({error})", "Write with torch.where or to a clone") from None

    def _check_writable(self, node: fx.Node, alias: Alias) -> None:
        base = alias.base().origin
        if base.op == "placeholder":
            raise _refusal(node, f"writes into the input {base.target!r}", "Clone the input first")
        if base.op == "get_attr":
            name = str(base.target)
            if name not in dict(self.gm.named_buffers(remove_duplicate=False)):
                kind = "parameter" if name in dict(self.gm.named_parameters(remove_duplicate=False)) else "constant"
                raise _refusal(node, f"writes into the {kind} {name!r} during forward", "Make it a buffer")
        detached = any(a.made_by is not None and a.made_by.target is aten.detach.default for a in alias.chain())
        if detached and _trained(self.gm, base):
            raise _refusal(node, "writes through detach()", "Detach after the write")

    # -- the mutating ops ------------------------------------------------------------------------------------------

    def _mutation(self, node: fx.Node) -> None:
        schema = node.target._schema  # type: ignore[union-attr]
        written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        if [schema.arguments[i].name for i in written] == ["out"] and isinstance(node.kwargs.get("out"), fx.Node):
            self._out(node, node.kwargs["out"])  # type: ignore[arg-type]
            return
        if written != [0] or schema.arguments[0].kwarg_only or not isinstance(node.args[0], fx.Node):
            raise _refusal(node, "writes into its arguments", "Use the form that returns a new tensor")
        target = node.args[0]
        name = schema.name.split("::")[1]
        if name in _RESHAPING:
            self._reshaping(node, target, name)
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: self._read(a) if a in self.aliases else a)
        new = self._like(node, target, _functional(node, name)(self.graph, node, args, kwargs))
        self._write(node, target, new)
        self.aliases[node] = self.aliases[target]

    def _out(self, node: fx.Node, target: fx.Node) -> None:
        """``div(a, b, out=c)``."""
        given = {k: v for k, v in node.kwargs.items() if k != "out"}
        args, kwargs = fx.map_arg((node.args, given), lambda a: self._read(a) if a in self.aliases else a)
        new = call(self.graph, _without_out(node), args, kwargs, like=node)
        if new.meta["val"].shape != target.meta["val"].shape:
            raise _refusal(node, "gives out= another shape", "Use the form that returns a new tensor")
        self._write(node, target, self._like(node, target, new))
        self.aliases[node] = self.aliases[target]

    def _like(self, node: fx.Node, target: fx.Node, new: fx.Node) -> fx.Node:
        """An in-place op keeps the dtype of what it writes to; its functional form may have promoted."""
        dtype = self.aliases[target].read(self.graph).meta["val"].dtype
        if new.meta["val"].dtype == dtype:
            return new
        return call(self.graph, aten.to.dtype, (new, dtype), like=node)

    def _reshaping(self, node: fx.Node, target: fx.Node, name: str) -> None:
        """``x.unsqueeze_(0)`` changes what ``x`` is, not what its memory holds: from here on both names are a view."""
        functional = _overload(node, name[:-1])
        view = call(self.graph, functional, (self._read(target), *node.args[1:]), dict(node.kwargs), like=node)
        alias = Alias(view, self.aliases[target], view)
        self.aliases[node] = self.aliases[target] = alias

    def _batch_norm(self, node: fx.Node) -> None:
        x, weight, bias, mean, var, _, momentum, eps, *_ = node.args
        read = {a: self._read(a) for a in (x, weight, bias, mean, var) if isinstance(a, fx.Node)}
        held_mean, held_var = mean, var
        if mean is None or var is None:
            size = (read[x].meta["val"].shape[1],)  # type: ignore[index]
            dtype = read[x].meta["val"].dtype  # type: ignore[index]
            mean, var = (self._full(node, size, v, dtype) for v in (0, 1))
            read |= {mean: mean, var: var}
        cumulative = isinstance(momentum, float) and math.isnan(momentum)
        args = (*(read.get(a, a) for a in (x, weight, bias, mean, var)), 1.0 if cumulative else momentum, eps)  # type: ignore[arg-type]
        out = call(self.graph, torch.ops.autopar.batch_norm.default, args, like=node)
        result, new_mean, new_var = (call(self.graph, operator.getitem, (out, i), like=node) for i in range(3))
        self.aliases[node] = Alias(result, None, None)
        if not (isinstance(held_mean, fx.Node) and isinstance(held_var, fx.Node)):
            return
        if cumulative:
            new_mean = self._cumulative(node, held_mean, new_mean)
            new_var = self._cumulative(node, held_var, new_var)
        self._write(node, held_mean, new_mean)
        self._write(node, held_var, new_var)

    def _full(self, node: fx.Node, size: tuple[int, ...], fill: int, dtype: torch.dtype) -> fx.Node:
        how = {"dtype": dtype, "device": torch.device("cpu")}  # wherever it runs, it is that device
        return call(self.graph, aten.full.default, (list(size), fill), how, like=node)

    def _instance_norm(self, node: fx.Node) -> None:
        given: Any = fx.map_arg(node.args, lambda a: self._read(a) if a in self.aliases else a)
        targets: Any = node.args[3:5]
        x, weight, bias, mean, var, _, momentum, *rest = given
        made = call(self.graph, node.target, (x, weight, bias, None, None, True, momentum, *rest), like=node)
        self.aliases[node] = Alias(made, None, None)
        x = call(self.graph, aten.detach.default, (x,), like=node)
        if x.meta["val"].dtype != mean.meta["val"].dtype:
            x = call(self.graph, aten.to.dtype, (x, mean.meta["val"].dtype), like=node)
        places = list(range(2, x.meta["val"].ndim))
        for target, held, statistic in zip(targets, (mean, var), (aten.mean.dim, aten.var.dim), strict=True):
            new = call(self.graph, statistic, (x, places), like=node)
            new = call(self.graph, aten.mean.dim, (new, [0]), like=node)
            new = call(self.graph, aten.mul.Tensor, (new, momentum), like=node)
            old = call(self.graph, aten.mul.Tensor, (held, 1 - momentum), like=node)
            self._write(node, target, call(self.graph, aten.add.Tensor, (old, new), like=node))

    def _cumulative(self, node: fx.Node, held: fx.Node, batch: fx.Node) -> fx.Node:
        """old + (batch - old) / num_batches_tracked, which the module has already counted up."""
        counter = str(self.aliases[held].base().origin.target).rpartition(".")[0] + ".num_batches_tracked"
        owner = next((n for n in self.aliases if n.op == "get_attr" and n.target == counter.lstrip(".")), None)
        if owner is None:
            raise _refusal(node, "has momentum=None and no num_batches_tracked", "Give it a momentum")
        old = self._read(held)
        count = call(self.graph, aten.to.dtype, (self._read(owner), old.meta["val"].dtype), like=node)
        step = call(self.graph, aten.sub.Tensor, (batch, old), like=node)
        return call(
            self.graph, aten.add.Tensor, (old, call(self.graph, aten.div.Tensor, (step, count), like=node)), like=node
        )

    def _finish(self, output: fx.Node) -> None:
        assert isinstance(output.args[0], dict), "the output node holds {'outputs': ..., 'buffers': ...}"
        with self.graph.inserting_before(output):
            outputs = fx.map_arg(output.args[0]["outputs"], self._read)
            buffers = {
                str(node.target): alias.read(self.graph)
                for node, alias in list(self.aliases.items())
                if node.op == "get_attr" and alias.base().version > 0
            }
        output.args = ({"outputs": outputs, "buffers": buffers},)


def _trained(gm: fx.GraphModule, node: fx.Node) -> bool:
    trainable = {k for k, p in gm.named_parameters(remove_duplicate=False) if p.requires_grad}
    seen, todo = set[fx.Node](), [node]
    while todo:
        at = todo.pop()
        if at.op == "get_attr" and str(at.target) in trainable:
            return True
        todo += [a for a in at.all_input_nodes if a not in seen]
        seen.update(at.all_input_nodes)
    return False


# -- functional forms ----------------------------------------------------------------------------------------------

_Emit = Callable[[fx.Graph, fx.Node, tuple[Any, ...], dict[str, Any]], fx.Node]


def _functional(node: fx.Node, name: str) -> _Emit:
    if name in ("copy_", "fill_", "zero_"):
        return {"copy_": _copy, "fill_": _fill, "zero_": _zero}[name]
    overload = _overload(node, _RENAMED.get(name) or ("__" + name[3:] if name.startswith("__i") else name[:-1]))
    return lambda graph, like, args, kwargs: call(graph, overload, args, kwargs, like=like)


def _overload(node: fx.Node, name: str) -> Any:
    """The overload of op ``name`` that takes the arguments of the mutating one."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    packet = getattr(getattr(torch.ops, target.namespace), name, None)
    found = getattr(packet, target._overloadname, None)
    wanted = [a.name for a in target._schema.arguments]
    if found is None or found._schema.is_mutable or [a.name for a in found._schema.arguments] != wanted:
        raise _refusal(node, "writes in place and has no form that does not", "Use an op that returns a new tensor")
    return found


def _without_out(node: fx.Node) -> Any:
    """The overload of an op that takes what the one with ``out=`` takes and returns a new tensor."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    packet = getattr(getattr(torch.ops, target.namespace), target._schema.name.split("::")[1])
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments if a.name != "out"]
    for name in packet.overloads():
        found = getattr(packet, name)
        if not found._schema.is_mutable and [(a.name, str(a.type)) for a in found._schema.arguments] == wanted:
            return found
    raise _refusal(node, "has no form without out=", "Use an op that returns a new tensor")


def _copy(graph: fx.Graph, like: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    return _spread(graph, like, args[0], args[1])


def _fill(graph: fx.Graph, like: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    if isinstance(args[1], fx.Node):
        return _spread(graph, like, args[0], args[1])
    return call(graph, aten.full_like.default, (args[0], args[1]), like=like)


def _zero(graph: fx.Graph, like: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    return call(graph, aten.zeros_like.default, (args[0],), like=like)


def _spread(graph: fx.Graph, like: fx.Node, held: fx.Node, source: fx.Node) -> fx.Node:
    """``source`` in the dtype and shape of ``held``."""
    want, have = held.meta["val"], source.meta["val"]
    if have.dtype != want.dtype:
        source = call(graph, aten.to.dtype, (source, want.dtype), like=like)
    if have.shape != want.shape:
        source = call(graph, aten.expand.default, (source, list(want.shape)), like=like)
    return source
