"""torch.export's module as the graph that the passes take.

Flat, names canonical, values on meta, and nothing in it that a plan could not keep.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from autopar.autocast_casts import Autocast
from autopar.errors import AutoparError
from autopar.name_dtypes import name_dtypes
from autopar.order_by_use import order_by_use
from autopar.passes.graph_module import graph_module
from autopar.rejoin import rejoin
from autopar.traps import REGION, VALUES, is_users
from autopar.windows import strided_to_windows

aten = torch.ops.aten
CHECKS = (  # assertions about metadata that capture has proved, or that a split run cannot repeat
    "aten::_assert_tensor_metadata",
    "aten::_assert_async",
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
    "aten::_assert_scalar",
)
LIFTED = re.compile(r"(.*lifted_tensor_)(\d+)")  # the name that torch.export gives a tensor that it met in the code
OWN_OPERAND = (
    *(aten.to.dtype, aten.to.device, aten.to.other, aten.to.dtype_layout, aten.contiguous.default),
    *(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default),
)
REGIONS = (
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
)


def clean_graph(
    program: fx.GraphModule, names: Sequence[str], aliases: Mapping[str, str], kinds: Mapping[str, str]
) -> tuple[fx.GraphModule, dict[str, torch.Tensor]]:
    """The graph by the conventions of `Capture`, and the tensors that tracing lifted out of the code, by name.

    ``names``: placeholder names. ``aliases``: further names of tied tensors -> the canonical one. ``kinds``: canonical
    FQN -> ``trainable``, ``frozen`` or ``buffer``. What ops under no_grad read passes through ``detach``, ops under
    autocast get the casts that eager makes. Control-flow operators and autocast of another device than the CPU raise
    AutoparError.
    """
    inliner = _Inliner(names, aliases, kinds)
    outputs = inliner.top(program)
    inliner.graph.output({"outputs": outputs, "buffers": {}})
    graph = inliner.graph
    rejoin(graph)
    _drop_dead(graph)
    strided_to_windows(graph, _written_later, place)
    name_dtypes(graph)
    order_by_use(graph, kinds)
    for node in graph.nodes:
        _refuse_symbolic(node)
    used = [n for n in graph.find_nodes(op="get_attr") if n.target not in kinds]
    tensors = [inliner.tensors[str(n.target)] for n in used]
    _number_constants(used)
    constants = {str(n.target): tensor for n, tensor in zip(used, tensors, strict=True)}
    return graph_module(graph, holder(graph, kinds)), constants


class _Inliner:
    """Copies nodes into one new graph. ``flows``: the nodes that a gradient passes through; ``enabled``: whether
    gradients are on where it stands, ``detached`` what was cut off since they are not; ``autocast``: the regions it is
    in, None where autocast is off."""

    def __init__(self, names: Sequence[str], aliases: Mapping[str, str], kinds: Mapping[str, str]) -> None:
        self.graph = fx.Graph()
        self.names, self.aliases, self.kinds = names, aliases, kinds
        self.attributes: dict[str, fx.Node] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.flows: set[fx.Node] = set()
        self.enabled, self.detached = True, dict[fx.Node, fx.Node]()
        self.autocast: list[Autocast | None] = []

    def top(self, program: fx.GraphModule) -> tuple[fx.Node, ...]:
        env: dict[fx.Node, Any] = {}
        inputs = program.graph.find_nodes(op="placeholder")
        for node, name in zip(inputs, self.names, strict=True):
            env[node] = self.graph.placeholder(name)
            env[node].meta = _meta(node)
        for node in program.graph.nodes:
            if node.op == "placeholder" or (node.op == "call_module" and node.target == "_guards_fn"):
                continue
            if node.op == "output":
                return tuple(env[a] for a in tree_leaves(node.args[0]))
            env[node] = self.copy(program, node, env)
        raise AssertionError("a graph without an output")

    def copy(self, module: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            found = operator.attrgetter(str(node.target))(module)
            return None if isinstance(found, fx.GraphModule) else self.attribute(str(node.target), found, node)
        assert node.op == "call_function", f"{node.op} {node.target} in an exported graph"
        if node.target in REGIONS:
            self.cross(node)
            return None
        plain = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        if not plain and not _symbolic(node):
            functional = str(getattr(node.target, "__module__", "")).startswith("torch._functorch")
            name = "torch.vmap or torch.func" if functional else getattr(node.target, "__name__", node.target)
            raise AutoparError(f"{_raw_place(node)}: uses {name} (only plain ops can be split). Write it with them.")
        if getattr(node.target, "_schema", None) is not None:
            name = node.target._schema.name  # type: ignore[union-attr]
            source: Any = env.get(node.args[0]) if node.args else None  # type: ignore[arg-type]
            if name in CHECKS:
                return None
            if name in ("aten::detach_", "aten::lift_fresh", "aten::lift") and source not in self.flows:
                return source
        self._refuse_op(node, env)
        if not self.enabled and _gives_its_operand(node):
            return env[node.args[0]]  # type: ignore[index]
        operands = {n: env[n] if self.enabled else self.detach(env[n], node) for n in node.all_input_nodes}
        operands = self.cast(node, operands)
        new = self.graph.node_copy(node, operands.__getitem__)
        new.meta = _meta(node)
        if new.target is aten.lift_fresh_copy.default:
            new.target = aten.clone.default
        if new.target is not aten.detach.default and any(n in self.flows for n in new.all_input_nodes) and _floats(new):
            self.flows.add(new)
            if writes_in_place(new):
                self.flows |= sharing_memory(new)
        return new

    def cross(self, node: fx.Node) -> None:
        """Enter or leave a region where gradients or autocast are on or off."""
        if node.target is torch._C._set_grad_enabled:
            (self.enabled,), self.detached = node.args, {}  # type: ignore[assignment]
            return
        if node.target is torch.amp.autocast_mode._exit_autocast:
            self.autocast.pop()
            return
        device_type, dtype, enabled, *_ = node.args
        if not enabled:
            self.autocast.append(None)
            return
        if device_type != "cpu":
            raise AutoparError(
                f"{_raw_place(node)}: runs under autocast({device_type!r}, {dtype}) (the trace is on the CPU and sees "
                "no casts of another device). Cast with .to(), or convert the model to the dtype."
            )
        low = dtype if isinstance(dtype, torch.dtype) else torch.get_autocast_dtype("cpu")
        outer = next((a for a in self.autocast if a is not None), None)
        self.autocast.append(Autocast(low) if outer is None else outer.nested(low))

    def detach(self, value: fx.Node, like: fx.Node) -> fx.Node:
        if value not in self.flows:
            return value
        if value not in self.detached:
            self.detached[value] = self.graph.call_function(aten.detach.default, (value,))
            self.detached[value].meta = {**_meta(like), "val": value.meta["val"]}
        return self.detached[value]

    def cast(self, node: fx.Node, operands: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
        """The operands of an op, those that autocast casts before it as their casts."""
        autocast = self.autocast[-1] if self.autocast else None
        if autocast is None:
            return operands
        args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        try:
            wanted = autocast.casts(node.target, args, kwargs)
        except AutoparError as error:
            raise AutoparError(f"{_raw_place(node)}: {error}") from None
        made = {}
        for operand, dtype in wanted.items():
            made[operand] = autocast.weights.get((operand, dtype)) or self.graph.call_function(
                aten.to.dtype, (operand, dtype)
            )
            made[operand].meta = {**_meta(node), "val": operand.meta["val"].to(dtype)}
            if operand in self.flows:
                self.flows.add(made[operand])
                if operand.op == "get_attr":
                    autocast.weights[operand, dtype] = made[operand]
        return {n: made.get(operand, operand) for n, operand in operands.items()}

    def attribute(self, target: str, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        name = target.removeprefix("model.")
        name = self.aliases.get(name, name) if name != target else name
        while name in self.tensors and self.tensors[name] is not tensor:
            name += "_"
        if name not in self.attributes:
            self.attributes[name] = self.graph.get_attr(name)
            self.attributes[name].meta = _meta(node)
            self.tensors[name] = tensor
            if self.kinds.get(name) == "trainable":
                self.flows.add(self.attributes[name])
        return self.attributes[name]

    def _refuse_op(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> None:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            return
        if schema.name in ("aten::embedding", "aten::embedding_bag") and argument(node, "sparse"):
            raise AutoparError(
                f"{_raw_place(node)}: embeds with sparse=True (sparse gradients cannot be reduced). Use sparse=False."
            )
        if self.enabled:
            return
        written = [
            argument(node, a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        if any(env[w] in self.flows for w in written if isinstance(w, fx.Node)):
            raise AutoparError(
                f"{_raw_place(node)}: changes in place, under no_grad, a tensor that needs a gradient. "
                "Make a new tensor."
            )


def _gives_its_operand(node: fx.Node) -> bool:
    """Whether eager returns the operand itself, which keeps its history under no_grad too."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or node.target not in OWN_OPERAND:
        return False
    a, b = source.meta.get("val"), node.meta.get("val")
    if argument(node, "copy") or argument(node, "train") or not isinstance(a, torch.Tensor):
        return False
    return isinstance(b, torch.Tensor) and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def writes_in_place(node: fx.Node) -> bool:
    """Whether the op changes its first operand."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def sharing_memory(node: fx.Node) -> set[fx.Node]:
    """The tensors that a write into ``node`` changes: what it is a view of, all views of that, and writes into them."""
    while _is_view(node):
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    found, todo = set[fx.Node](), [node]
    while todo:
        at = todo.pop()
        found.add(at)
        todo += [u for u in at.users if u not in found and u.args and u.args[0] is at and _is_view(u)]
    return found


def _written_later(node: fx.Node) -> bool:
    """Whether something is written, after a node, into the memory that it lies in."""
    return any(writes_in_place(n) and node < n for n in sharing_memory(node))


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is aten.detach.default:
        return False
    if node.target is operator.getitem:
        return True
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return any(r.alias_info is not None for r in returns)


def argument(node: fx.Node, name: str) -> Any:
    """The value of an op's argument by its schema name, given or default; None where it has none."""
    for i, a in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if a.name == name:
            return (
                node.args[i]
                if i < len(node.args)
                else node.kwargs.get(name, a.default_value if a.has_default_value() else None)
            )
    return None


def place(node: fx.Node) -> str:
    """Module FQN and the user's file:line of a node of a clean graph, for errors."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    fqn = (str(stack[-1][0]) or str(stack[-1][1]).rpartition(".")[2]) if stack else str(node.target)
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    files = [line for line in lines if line.startswith("File ")]
    if not files:
        return fqn
    number = files[-1].partition("line ")[2].split(",")[0]
    return f"{fqn} ({files[-1].split(chr(34))[1]}:{number})"


def _raw_place(node: fx.Node) -> str:
    """The same for a node of torch.export's graph."""
    copy = fx.Graph().placeholder(node.name)
    copy.meta = _meta(node)
    return place(copy)


def _refuse_symbolic(node: fx.Node) -> None:
    """Sizes and numbers that are read from tensors while the graph runs."""
    for value in tree_leaves(node.meta.get("val")):
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(s, (torch.SymInt, torch.SymFloat, torch.SymBool)) for s in sizes):
            raise AutoparError(VALUES.format(where=place(node)))
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise AutoparError(f"{place(node)}: makes a sparse tensor (only dense ones can be split). Keep it dense.")


def _drop_dead(graph: fx.Graph) -> None:
    """Erase nodes that nothing reads and that write nothing."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            graph.erase_node(node)


def _number_constants(nodes: Sequence[fx.Node]) -> None:
    """Number the tensors that tracing met in the code in the order in which they stand; it counted dead ones too."""
    number = 0
    for node in nodes:
        found = LIFTED.fullmatch(str(node.target))
        if found is not None:
            node.target = f"{found[1]}{number}"
            node._rename(node.graph._target_to_str(node.target).replace(".", "_"))
            number += 1


def _symbolic(node: fx.Node) -> bool:
    """Whether a node computes with numbers read from tensors; refused where something depends on it."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float))


def _floats(node: fx.Node) -> bool:
    return any(
        v.is_floating_point() or v.is_complex()
        for v in tree_leaves(node.meta.get("val"))
        if isinstance(v, torch.Tensor)
    )


def _meta(node: fx.Node) -> dict[str, Any]:
    """What is kept of a node's meta: its value on meta, the module stack, the lines of the user's own code, the
    checkpointed region."""

    def bare(v: Any) -> Any:
        if not isinstance(v, torch.Tensor) or any(isinstance(s, torch.SymInt) for s in v.shape):
            return v
        if v.layout is not torch.strided:
            return v
        with torch.no_grad():
            return torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta")

    meta = {"val": tree_map(bare, node.meta.get("val"))}
    stack = node.meta.get("nn_module_stack")
    if stack:
        kept = {k: v for k, v in stack.items() if v[0] == "model" or str(v[0]).startswith("model.")}
        meta["nn_module_stack"] = {k: (str(p)[len("model.") :], kind) for k, (p, kind) in kept.items()}
    region = (node.meta.get("custom") or {}).get(REGION)
    if region is not None:
        meta[REGION] = region
    if node.meta.get("stack_trace"):
        meta["stack_trace"] = "\n".join(_users_frames(node.meta["stack_trace"])) or node.meta["stack_trace"]
    return meta


def _users_frames(trace: str) -> Iterator[str]:
    keep = True
    for line in trace.splitlines():
        if line.strip().startswith("File "):
            keep = is_users(line.split('"')[1])
        if keep:
            yield line


def holder(graph: fx.Graph, kinds: Mapping[str, str]) -> torch.nn.Module:
    """A module with a meta tensor under each FQN, so that the graph module is whole and copies of it cost nothing."""
    root = torch.nn.Module()
    for node in graph.find_nodes(op="get_attr"):
        *path, last = str(node.target).split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = at.get_submodule(part)
        kind, value = kinds.get(str(node.target)), node.meta["val"]
        if kind in ("trainable", "frozen"):
            at.register_parameter(last, torch.nn.Parameter(value, requires_grad=kind == "trainable"))
        else:
            at.register_buffer(last, value)
    return root
