"""torch.export of a model with its loss on fake inputs of a chosen batch size."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autopar.clean_graph import clean_graph, sharing_memory, writes_in_place
from autopar.custom_functions import Applied, described, forward_of, sampled
from autopar.errors import AutoparError
from autopar.example_values import INPUT, PARAMETER
from autopar.mixed_precision import cast, parameters_in, refuse_mixed, replaced, slots, to_cast
from autopar.opaque_calls import apply_function
from autopar.python_state import python_state_kept
from autopar.signature import Signature
from autopar.traps import refuse_failure, watched_trace
from autopar.trees import PLAIN, Tree, flatten, in_lists, joined
from autopar.ways import Ways

Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Outputs:
    """What the model returned: its structure, the leaves that are not tensors, and which leaf is the loss."""

    tree: Tree
    constants: Mapping[int, Any]  # leaf index -> value
    loss_leaf: int | None  # None where ``loss=`` made the loss, or there is none
    paths: tuple[str, ...] = ()
    lists: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """First leaf -> how many that graphs have in one tensor, and their dims: a list as long as there are rows."""


@dataclass(frozen=True)
class Exported:
    """One export: the clean graph, lifted constants, the structure of the output."""

    graph: fx.GraphModule
    constants: dict[str, torch.Tensor]
    outputs: Outputs
    has_loss: bool
    changed: tuple[str, ...]  # what modules keep in Python that forward changed
    hints: tuple[str, ...]
    applied: tuple[Applied, ...]  # calls of the model's own autograd.Functions


@dataclass(frozen=True)
class Call:
    """How the model and the loss are called on the tensor leaves of the inputs. ``lists``: of its outputs, by path,
    those that have a tensor for each row, which are joined."""

    model: nn.Module
    signature: Signature
    loss: Loss | None
    loss_required: bool
    param_dtype: torch.dtype | None = None  # of the parameters and of forward's floating inputs (None: their own)
    ways: Ways = field(default_factory=Ways)
    lists: frozenset[str] = frozenset()

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Outputs, bool]:
        """The loss (if any) and the other tensor leaves; the output's structure; whether there is a loss."""
        args, kwargs, extra = self.signature.unflatten(tensors)
        own_args, own_kwargs, _ = self.signature.unflatten(cast(tensors, self.param_dtype))
        with (
            patch.object(nn.SyncBatchNorm, "forward", nn.modules.batchnorm._BatchNorm.forward),  # one process has all
            parameters_in(self.model, self.param_dtype),
        ):
            out = self.model(*own_args, **own_kwargs)
        pairs, tree = flatten(out, "output")
        leaves = [leaf for _, leaf in pairs]
        loss = _returned_loss(out) if self.loss is None else self._given_loss(out, args, kwargs, extra)
        self._refuse_loss(loss, out)
        at = next((i for i, leaf in enumerate(leaves) if loss is not None and leaf is loss), None)
        constants = {i: v for i, v in enumerate(leaves) if not isinstance(v, torch.Tensor)}
        rest, lists, i = [], dict[int, tuple[int, int]](), 0
        for path, found in in_lists(pairs, self.lists):
            if path in self.lists and all(isinstance(v, torch.Tensor) for v in found):
                lists[i] = len(found), found[0].ndim
                rest.append(joined(found, path))
            else:
                rest += [v for j, v in enumerate(found, start=i) if isinstance(v, torch.Tensor) and j != at]
            i += len(found)
        outputs = Outputs(tree, constants, at, tuple(path for path, _ in pairs), lists)
        return (*([] if loss is None else [loss]), *rest), outputs, loss is not None

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that get a gradient: none where only the forward is wanted."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad and self.loss_required}

    @property
    def kinds(self) -> dict[str, str]:
        """Canonical FQN of every parameter and buffer -> ``trainable``, ``frozen`` or ``buffer``."""
        kinds = {n: "buffer" for n, _ in self.model.named_buffers()}
        kinds |= {n: "frozen" for n, _ in self.model.named_parameters()}
        return kinds | dict.fromkeys(self.trainable, "trainable")

    def opaque(self, function: type, args: tuple[Any, ...]) -> Callable[[], Any] | None:
        """How to call an autograd.Function as one node; None where it is not to be."""
        if function not in self.ways.functions:
            return None
        sample = functools.partial(sampled, described(args))
        return functools.partial(apply_function, self.ways.numbers, function, args, forward_of, sample)

    def _given_loss(self, out: Any, args: Sequence[Any], kwargs: dict[str, Any], extra: dict[str, Any]) -> Any:
        assert self.loss is not None
        if extra:
            return self.loss(out, **extra)
        try:
            parameters = inspect.signature(
                self.loss.forward if isinstance(self.loss, nn.Module) else self.loss
            ).parameters
        except ValueError:  # a builtin of torch, as torch.mean
            return self.loss(out)
        wanted = [p for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        alone = len(wanted) == 1 and wanted[0].kind is not inspect.Parameter.VAR_POSITIONAL
        return self.loss(out) if alone else self.loss(out, *args, **kwargs)

    def _refuse_loss(self, loss: Any, out: Any) -> None:
        if loss is None:
            if self.loss_required:
                kind = "Tensor" if isinstance(out, torch.Tensor) else type(out).__name__
                raise AutoparError(
                    f"{type(self.model).__name__}: returns no loss (a {kind} without .loss). Return a "
                    "scalar, pass labels, or give loss=."
                )
            return
        if isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.is_floating_point():
            return
        what = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise AutoparError(f"loss: is {what} (a step needs one real number). Return a 0-d float tensor.")


@dataclass(frozen=True)
class Trace:
    """What a trace runs, and what it learns by the way."""

    flat: Flat
    mode: FakeTensorMode
    inputs: tuple[torch.Tensor, ...]  # fake, of the rows asked for
    hints: list[str]
    applied: list[Applied]


@contextlib.contextmanager
def tracing(call: Call, rows: int, *, all_fake: bool = False) -> Iterator[Trace]:
    """The state that the model is traced in at ``rows`` rows: on fake CPU tensors, watched, and quiet. ``all_fake``:
    real tensors of the model have stand-ins too, as torch.export makes them for itself."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, export=True)
    with mode:
        inputs = tuple(torch.empty(s.at(rows).shape, dtype=s.dtype) for s in call.signature.inputs)
    trace = Trace(Flat(call, rows), mode, inputs, [], [])
    with (
        _on_cpu(trace.flat, mode, call.param_dtype, all_fake),
        torch.enable_grad(),
        _quiet(),
        _regions_stay_nodes(),
        _countable(call.model),
        watched_trace(call.model, trace.hints, call.loss_required, trace.applied, call.opaque),
    ):
        yield trace


def export_model(call: Call, rows: int) -> Exported:
    """Export the model and its loss at ``rows`` rows; computes nothing and leaves the model as it is.

    The trace sees CPU tensors wherever the model is: kernels choose strides, and models choose code, by device, and a
    plan made on a laptop must be that of the cluster. Device literals of the graph are therefore ``cpu``.

    Raises AutoparError where the model cannot be traced or what it does cannot be kept.
    """
    handled = sys.exception()
    try:
        with tracing(call, rows) as trace:
            program = torch.export.export(trace.flat, trace.inputs, strict=False).module(check_guards=False)
    except Exception as error:
        raise refuse_failure(call.model, error, rows, call.signature.rows, call.param_dtype, handled) from error
    flat, hints, applied = trace.flat, trace.hints, trace.applied
    assert isinstance(program, fx.GraphModule)
    model, kinds = call.model, call.kinds
    graph, constants = clean_graph(program, [s.name for s in call.signature.inputs], aliases_of(model), kinds)
    constants = {name: _own(flat, name, tensor) for name, tensor in constants.items()}
    stale = next((name for name, tensor in constants.items() if isinstance(tensor, FakeTensor)), None)
    if stale is not None:
        raise AutoparError(
            f"{type(model).__name__}: reads a tensor without values that an earlier trace left in a cache ({stale}; "
            "functools.cache, say). Keep no tensors between calls, or run the model once before capture."
        )
    if call.param_dtype is not None:
        refuse_mixed(graph, call.param_dtype)
    outputs = without_opaque(flat.seen.outputs, hints)
    if flat.seen.has_loss and call.loss_required and not _learns(graph, kinds):
        raise AutoparError(
            f"{type(model).__name__}: its loss depends on no parameter that requires a gradient (frozen, under "
            "no_grad or detached). Unfreeze one, or use eval() for forward only."
        )
    return Exported(graph, constants, outputs, flat.seen.has_loss, flat.seen.changed, tuple(hints), tuple(applied))


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Every further name of a tensor that the model holds under several -> the name that named_parameters() lists."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        canonical = first.setdefault(id(tensor), name)
        if canonical != name:
            aliases[name] = canonical
    return aliases


class _Seen:
    """What a trace learns beside the graph."""

    outputs: Outputs
    has_loss: bool
    changed: tuple[str, ...]


class Flat(nn.Module):
    """The model and its loss with flat tensors in and out."""

    def __init__(self, call: Call, rows: int) -> None:
        super().__init__()
        self.model = call.model
        self.training = call.model.training
        if isinstance(call.loss, nn.Module):
            self.given_loss = call.loss
        self.call, self.seen = call, _Seen()
        self.around = functools.partial(
            call.ways.around, call.model, _held(self), functools.partial(call.signature.example, rows)
        )

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        held = buffer_slots(self.model)
        with python_state_kept(self.model) as changed:
            with self.around() as hold:
                tensors, self.seen.outputs, self.seen.has_loss = self.call(leaves)
                tensors = hold(tensors)
            self.seen.changed = changed()
        for name, module, key, tensor in held:
            _write_back(name, module, key, tensor)
        return tensors


def _held(flat: nn.Module) -> list[tuple[torch.Tensor, str]]:
    """Its parameters and buffers by all their names, in the order of torch.export."""
    parameters = [(t, PARAMETER) for _, t in flat.named_parameters(remove_duplicate=False)]
    return [*parameters, *((t, INPUT) for _, t in flat.named_buffers(remove_duplicate=False))]


def buffer_slots(model: nn.Module) -> list[tuple[str, nn.Module, str, torch.Tensor]]:
    """(FQN, module, key, tensor) of every buffer as the model holds it now."""
    return [
        (f"{name}.{key}".lstrip("."), module, key, tensor)
        for name, module in model.named_modules()
        for key, tensor in module._buffers.items()
        if tensor is not None
    ]


def _write_back(name: str, module: nn.Module, key: str, tensor: torch.Tensor) -> None:
    """Where forward put another tensor in a buffer's place, write that one's value into the buffer instead."""
    new = module._buffers.get(key)
    if new is tensor:
        return
    if not isinstance(new, torch.Tensor) or new.shape != tensor.shape or new.dtype != tensor.dtype:
        raise AutoparError(f"{name}: is replaced in forward by another shape or dtype. Keep the buffer's own.")
    with torch.no_grad():
        tensor.copy_(new)
    module._buffers[key] = tensor


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


def without_opaque(outputs: Outputs, hints: list[str]) -> Outputs:
    """Leaves that are neither tensors nor plain values (a key-value cache) are returned as None, and a hint says so."""
    constants = dict(outputs.constants)
    for i, leaf in constants.items():
        if not isinstance(leaf, PLAIN):
            hints.append(
                f"output: a {type(leaf).__name__} is no tensor and no container; None is returned in its place."
            )
            constants[i] = None
    return replace(outputs, constants=constants)


def _learns(graph: fx.GraphModule, kinds: Mapping[str, str]) -> bool:
    """Whether the loss reaches a trainable parameter through ops that pass gradients."""
    (output,) = graph.graph.find_nodes(op="output")
    todo, seen = [output.args[0]["outputs"][0]], set[fx.Node]()
    writing = {n for n in graph.graph.nodes if writes_in_place(n)}
    while todo:
        node = todo.pop()
        if node in seen or node.target is torch.ops.aten.detach.default:
            continue
        seen.add(node)
        if node.op == "get_attr" and kinds.get(str(node.target)) == "trainable":
            return True
        todo += node.all_input_nodes
        if writing:
            todo += writing & sharing_memory(node)
    return False


@contextlib.contextmanager
def _countable(model: nn.Module) -> Iterator[None]:
    """Batch norms with ``momentum=None`` read their counter as a Python number; while traced their momentum is nan,
    which stands for None in the graph."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.momentum is None]
    try:
        for norm in norms:
            norm.momentum = math.nan
        yield
    finally:
        for norm in norms:
            norm.momentum = None


@contextlib.contextmanager
def _regions_stay_nodes() -> Iterator[None]:
    """Keep the switches of gradients and autocast as nodes of the graph; torch.export would make graphs of their own,
    and loses a no_grad that stands inside an autocast."""
    with (
        patch.object(replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass", _as_it_is),
        patch.object(replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", _as_it_is),
    ):
        yield


def _as_it_is(program: fx.GraphModule, signature: Any) -> tuple[fx.GraphModule, Any]:
    return program, signature


@contextlib.contextmanager
def _on_cpu(flat: Flat, mode: FakeTensorMode, param_dtype: torch.dtype | None, all_fake: bool) -> Iterator[None]:
    """While traced, fake CPU tensors stand for parameters, buffers and tensor attributes that are elsewhere, and for
    parameters of another dtype than they are computed with."""
    dtypes = {id(p): param_dtype for p in to_cast(flat.call.model, param_dtype)}
    stand_ins: dict[int, torch.Tensor] = {}
    for _, _, tensor in slots(flat):
        dtype = dtypes.get(id(tensor)) or tensor.dtype
        if all_fake or tensor.device.type != "cpu" or dtype != tensor.dtype:
            stand_ins.setdefault(id(tensor), _stand_in(tensor, mode, dtype))
    with replaced(flat, stand_ins):
        yield


def _stand_in(tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake


def _own(flat: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the model holds under ``name``, or ``tensor`` itself where tracing made it."""
    at: Any = flat if name.startswith("given_loss.") else flat.get_submodule("model")
    for part in name.split("."):
        at = getattr(at, part, None)
    return at if isinstance(at, torch.Tensor) else tensor


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep back torch's warnings and the partial graph that it prints when a trace fails."""
    logs = [logging.getLogger(n) for n in ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")]
    levels, printed = [log.level for log in logs], io.StringIO()
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(printed):
            warnings.simplefilter("ignore")
            yield
        sys.stderr.write(printed.getvalue())  # what the model itself printed
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
