"""From an ``nn.Module`` and example inputs to one fx graph of the whole global batch.

`capture` runs torch.export (training IR, ``strict=False``) on fake inputs, so nothing is computed, at two batch sizes: the global
batch, whose graph is kept, and a tiny one, which proves that the model does the same ops at any batch and is compared
with eager where weights are real.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten

from autopar.clean_graph import clean_graph, place
from autopar.compare_with_eager import compare_with_eager
from autopar.errors import AutoparError
from autopar.evaluate import double, run_graph, to_float64
from autopar.signature import InputSpec, Signature
from autopar.traps import refuse_failure, refuse_model, watched_trace
from autopar.trees import Tree, flatten, unflatten

__all__ = ["Capture", "InputSpec", "capture", "double", "run_graph", "to_float64"]

TINY = 2  # rows of the second export; never 1, where broadcasting hides what depends on the batch
Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Outputs:
    """What the model returned: its structure, the leaves that are not tensors, and which tensor leaf is the loss."""

    tree: Tree
    constants: Mapping[int, Any]  # leaf index -> value
    loss_leaf: int | None  # leaf index of the loss in the output; None where ``loss=`` made it


@dataclass(frozen=True)
class Capture:
    """A model as one graph at the global batch, and everything that is not in the graph.

    ``graph``: placeholders are the tensor inputs, ``get_attr`` targets are canonical FQNs (keys of `attributes`), the output node holds
    ``{"outputs": (loss, *other tensor leaves), "buffers": {}}``, ``meta["val"]`` are meta tensors of global shapes.
    """

    graph: fx.GraphModule
    inputs: tuple[InputSpec, ...]
    parameters: dict[str, nn.Parameter]  # canonical FQN -> the model's own object
    aliases: dict[str, str]  # FQN of a tied parameter or buffer -> canonical FQN
    buffers: dict[str, torch.Tensor]
    persistent: frozenset[str]  # buffers that state_dict() holds
    constants: dict[str, torch.Tensor]
    batch: int  # rows of the global batch
    checked: str  # "equal" to eager in loss, gradients and buffers | "unchecked"
    training: bool
    has_loss: bool
    hash: str
    model_name: str
    signature: Signature
    outputs: Outputs
    hints: tuple[str, ...] = field(default=())

    @property
    def attributes(self) -> dict[str, torch.Tensor]:
        """Every tensor that a ``get_attr`` node may name."""
        return {**self.constants, **self.buffers, **self.parameters}

    def trainable(self, fqn: str) -> bool:
        """Whether ``fqn`` is a parameter that wants a gradient (for `annotate`)."""
        return fqn in self.parameters and self.parameters[fqn].requires_grad

    def flatten_inputs(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, rows: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The tensors for the placeholders, contiguous, keywords in any order; ``rows`` (default: the global batch) is
        what dim 0 of batch inputs must be. AutoparError where structure, shape, dtype or a constant differs.
        """
        return self.signature.flatten(args, kwargs or {}, rows=self.batch if rows is None else rows)

    def unflatten_outputs(self, leaves: Sequence[Any]) -> Any:
        """The model's own output structure around the graph's ``outputs``; with ``loss=`` it is ``(loss, output)``."""
        out, at = self.outputs, 1 if self.has_loss else 0
        values: list[Any] = []
        for i in range(out.tree.size):
            if i in out.constants:
                values.append(out.constants[i])
            elif i == out.loss_leaf:
                values.append(leaves[0])
            else:
                values.append(leaves[at])
                at += 1
        value = unflatten(values, out.tree)
        return (leaves[0], value) if self.has_loss and out.loss_leaf is None else value


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    global_batch: int | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    loss: Loss | None = None,
    loss_required: bool = True,
    check: bool = True,
) -> Capture:
    """Capture ``model(*args, **kwargs)`` in its current train or eval mode, without running it.

    ``args``, ``kwargs``: example inputs, real or meta, tensors in any nesting of containers; all else is a constant of the graph.
    ``global_batch``: rows of the graph (default: those of the examples). ``batch_dims``: input name to 0 or None; by default
    dim 0 is the batch wherever it equals that of the first tensor input. ``loss``: called as
    ``loss(output, **extra)`` where ``extra`` are the keyword inputs that forward does not take; without such as ``loss(output)``
    if it has one required parameter, else as ``loss(output, *args, **kwargs)``. Without ``loss`` the model returns it: a
    scalar, an output with ``.loss`` or ``["loss"]``, or a tuple that begins with a scalar. ``check``: compare with eager on two rows where
    weights and inputs are real (done once, leaves no trace on the model).

    Raises AutoparError for what cannot be captured exactly.

    Example:
        >>> captured = capture(model, (x,), {"target": y}, loss=torch.nn.functional.cross_entropy)
        >>> run_graph(captured.graph, captured.flatten_inputs((x,), {"target": y}), captured.attributes)["outputs"][0]
    """
    refuse_model(model)
    signature = Signature.of(model, args, kwargs or {}, batch_dims or {}, loss is not None)
    batch = signature.rows if global_batch is None else global_batch
    if batch < 1:
        raise AutoparError(f"global_batch: is {batch} (a batch has rows). Give at least 1.")
    hints: list[str] = []
    call = _Call(model, signature, loss, loss_required)
    whole = _export(call, batch, hints)
    tiny = _export(call, TINY if batch != TINY else TINY + 1, hints)
    _same_program(whole.graph, tiny.graph, batch)
    probe = whole if batch == TINY else tiny
    real = check and signature.real and all(not t.is_meta for t in (*model.parameters(), *model.buffers()))
    attributes = {**whole.constants, **dict(model.named_buffers()), **dict(model.named_parameters())}
    if real:
        compare_with_eager(model, lambda: call.eager(TINY), probe.graph, signature.example(TINY), attributes)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return Capture(
        graph=whole.graph,
        inputs=tuple(spec.at(batch) for spec in signature.inputs),
        parameters=parameters,
        aliases=_aliases(model),
        buffers=buffers,
        persistent=frozenset(set(model.state_dict(keep_vars=True)) & set(buffers)),
        constants=whole.constants,
        batch=batch,
        checked="equal" if real else "unchecked",
        training=model.training,
        has_loss=whole.has_loss,
        hash=_hash(whole.graph, parameters, model.training),
        model_name=type(model).__name__,
        signature=signature,
        outputs=whole.outputs,
        hints=tuple(hints),
    )


@dataclass(frozen=True)
class _Exported:
    graph: fx.GraphModule
    constants: dict[str, torch.Tensor]
    outputs: Outputs
    has_loss: bool


@dataclass(frozen=True)
class _Call:
    """How the model and the loss are called on the tensor leaves of the inputs."""

    model: nn.Module
    signature: Signature
    loss: Loss | None
    loss_required: bool

    def __call__(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, list[tuple[str, Any]], Tree, int | None]:
        """The loss, the output's leaves, its structure, and the index of the loss among the leaves."""
        args, kwargs, extra = self.signature.unflatten(tensors)
        out = self.model(*args, **kwargs)
        leaves, tree = flatten(out, "output")
        if self.loss is not None:
            loss = self._given_loss(out, args, kwargs, extra)
            where = None
        else:
            loss = _returned_loss(out)
            where = next((i for i, (_, leaf) in enumerate(leaves) if leaf is loss), None)
        self._refuse_loss(loss, out)
        return loss, leaves, tree, where

    def eager(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Loss and other tensor outputs of the model itself on ``rows`` rows of the example inputs."""
        loss, leaves, _, where = self(self.signature.example(rows))
        rest = [v for i, (_, v) in enumerate(leaves) if isinstance(v, torch.Tensor) and i != where]
        return (*([] if loss is None else [loss]), *rest)

    def _given_loss(self, out: Any, args: Sequence[Any], kwargs: dict[str, Any], extra: dict[str, Any]) -> Any:
        assert self.loss is not None
        if extra:
            return self.loss(out, **extra)
        forward = self.loss.forward if isinstance(self.loss, nn.Module) else self.loss
        wanted = [p for p in inspect.signature(forward).parameters.values() if p.default is p.empty]
        alone = len(wanted) == 1 and wanted[0].kind is not wanted[0].VAR_POSITIONAL
        return self.loss(out) if alone else self.loss(out, *args, **kwargs)

    def _refuse_loss(self, loss: Any, out: Any) -> None:
        if loss is None:
            if not self.loss_required:
                return
            raise AutoparError(
                f"{type(self.model).__name__}: returns no loss (a {type(out).__name__} without .loss). Return a scalar, pass labels, "
                "or give loss=."
            )
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0 or not loss.is_floating_point():
            what = (
                f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            )
            raise AutoparError(f"loss: is {what} (it must be one real number). Return a 0-d float tensor.")


class _Flat(nn.Module):
    """The model and its loss with flat tensors in and out, for torch.export."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.model = call.model
        self.training = call.model.training
        if isinstance(call.loss, nn.Module):
            self.given_loss = call.loss
        self._call, self._seen = call, _Seen()

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss, found, tree, where = self._call(leaves)
        constants = {i: v for i, (_, v) in enumerate(found) if not isinstance(v, torch.Tensor)}
        self._seen.outputs = Outputs(tree, constants, where)
        self._seen.has_loss = loss is not None
        rest = [v for i, (_, v) in enumerate(found) if isinstance(v, torch.Tensor) and i != where]
        return (*([] if loss is None else [loss]), *rest)


class _Seen:
    """What the trace learnt beside the graph."""

    outputs: Outputs
    has_loss: bool


def _export(call: _Call, rows: int, hints: list[str]) -> _Exported:
    flat = _Flat(call)
    device = next((t.device for t in (*call.model.parameters(), *call.model.buffers())), torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True, export=True):
        inputs = tuple(torch.empty(s.at(rows).shape, dtype=s.dtype, device=device) for s in call.signature.inputs)
    try:
        with torch.enable_grad(), warnings.catch_warnings(), watched_trace(call.model, hints):
            warnings.simplefilter("ignore")
            program = torch.export.export(flat, inputs, strict=False).module(check_guards=False)
    except Exception as error:
        raise refuse_failure(call.model, error, rows) from error
    trainable = {n for n, p in call.model.named_parameters() if p.requires_grad}
    graph, constants = clean_graph(
        program, [s.name for s in call.signature.inputs], _aliases(call.model), trainable, _names(call.model)
    )
    outputs = flat._seen.outputs
    for i, leaf in outputs.constants.items():
        if not isinstance(leaf, (type(None), bool, int, float, str)):
            note = f"output leaf {i}: a {type(leaf).__name__} is not a tensor; it is returned as None."
            outputs = Outputs(outputs.tree, {**outputs.constants, i: None}, outputs.loss_leaf)
            if note not in hints:
                hints.append(note)
    if flat._seen.has_loss and call.loss_required and not _learns(graph, trainable):
        raise AutoparError(
            f"{type(call.model).__name__}: its loss depends on no parameter that requires a gradient (frozen, under "
            "no_grad, or detached). Unfreeze one, or use eval() for forward only."
        )
    return _Exported(graph, constants, outputs, flat._seen.has_loss)


def _names(model: nn.Module) -> set[str]:
    return {n for n, _ in (*model.named_parameters(), *model.named_buffers())}


def _returned_loss(out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        return out if out.ndim == 0 else None
    found = getattr(out, "loss", None)
    if found is None and isinstance(out, Mapping):
        found = out.get("loss")
    if (
        found is None
        and isinstance(out, (tuple, list))
        and out
        and isinstance(out[0], torch.Tensor)
        and out[0].ndim == 0
    ):
        found = out[0]
    return found


def _learns(graph: fx.GraphModule, trainable: set[str]) -> bool:
    """Whether the loss reaches a trainable parameter through ops that pass gradients."""
    (output,) = graph.graph.find_nodes(op="output")
    todo, seen = [output.args[0]["outputs"][0]], set()
    while todo:
        node = todo.pop()
        if node in seen or node.target is torch.ops.aten.detach.default:
            continue
        seen.add(node)
        if node.op == "get_attr" and node.target in trainable:
            return True
        todo += node.all_input_nodes
    return False


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every further name of a tensor that the model holds under several, to the name that named_parameters() lists."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for listing in (model.named_parameters, model.named_buffers):
        for name, tensor in listing(remove_duplicate=False):  # type: ignore[operator]
            canonical = first.setdefault(id(tensor), name)
            if canonical != name:
                aliases[name] = canonical
    return aliases


def _same_program(whole: fx.GraphModule, tiny: fx.GraphModule, batch: int) -> None:
    """Raise unless the two graphs are the same ops on the same operands; sizes may differ."""
    a_nodes, b_nodes = list(whole.graph.nodes), list(tiny.graph.nodes)
    index = {n: i for nodes in (a_nodes, b_nodes) for i, n in enumerate(nodes)}
    for a, b in zip(a_nodes, b_nodes, strict=False):
        a_flat, a_spec = tree_flatten((a.args, a.kwargs))
        b_flat, b_spec = tree_flatten((b.args, b.kwargs))
        same = a.op == b.op and (a.op == "output" or a.target == b.target) and a_spec == b_spec
        if not same or any(index.get(x) != index.get(y) for x, y in zip(a_flat, b_flat) if isinstance(x, fx.Node)):
            break
    else:
        if len(a_nodes) == len(b_nodes):
            return
        a = a_nodes[min(len(a_nodes), len(b_nodes)) - 1]
    raise AutoparError(
        f"{place(a)}: does other ops at batch size {batch} than at another (a plan needs the same program for any rows). Make the "
        "code independent of the batch size, or name inputs that are no batch: batch_dims={'mask': None}."
    )


def _hash(graph: fx.GraphModule, parameters: Mapping[str, nn.Parameter], training: bool) -> str:
    """sha256 over ops, operands, literals, FQNs, shapes and dtypes; free of node names, devices and processes."""
    index: dict[fx.Node, int] = {}
    digest = hashlib.sha256(f"train={training}".encode())
    for name, p in parameters.items():
        digest.update(f"\n{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}".encode())
    for i, node in enumerate(graph.graph.nodes):
        index[node] = i
        flat, _ = tree_flatten((node.args, {k: v for k, v in sorted(node.kwargs.items()) if k != "device"}))
        words = [f"%{index[a]}" if isinstance(a, fx.Node) else repr(a) for a in flat if not isinstance(a, torch.device)]
        vals, _ = tree_flatten(node.meta.get("val"))
        words += [f"{v.dtype}{tuple(v.shape)}" for v in vals if isinstance(v, torch.Tensor)]
        digest.update(f"\n{node.op} {node.target} {' '.join(words)}".encode())
    return digest.hexdigest()
