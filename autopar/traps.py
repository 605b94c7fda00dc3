"""What a model must not do, found before and while it is traced: each ends in one `AutoparError`.

torch.export drops these without a word (hooks, custom backwards, autocast around the call) or makes a graph that cannot
be split; ``docs/design.md`` section 10 has the figures.
"""

from __future__ import annotations

import contextlib
import os
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributions
import torch.utils.checkpoint
from torch import fx, nn
from torch.fx.traceback import annotate, preserve_node_meta

from autopar.custom_functions import Applied, Opaque, inlined
from autopar.errors import AutoparError
from autopar.passes.graph_module import graph_module

TORCH = os.path.dirname(torch.__file__) + os.sep
HERE = os.path.dirname(os.path.abspath(__file__))
CONTEXTS = {contextlib.__file__, unittest.mock.__file__}
REGION = "checkpoint"  # the key in a node's meta: which region of torch.utils.checkpoint it stands in
OF_VALUES = {
    *("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode"),
    *("Read", "Wider"),
}
VALUES = (
    "{where}: what runs here depends on the values of tensors (a plan must hold for every batch). Use torch.where or "
    "masks, or pass the decision as a Python argument."
)
WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "DataParallel": "DataParallel",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP2 (fully_shard)",
    "OptimizedModule": "torch.compile",
    "ScriptModule": "TorchScript",
}


class Failed(AutoparError):
    """A trace that failed. ``fqn``: the module in which ("": the model itself; None: outside of all), ``where`` with
    file and line; ``values``: whether for a value that is not known while tracing."""

    def __init__(self, message: str, fqn: str | None, where: str, values: bool) -> None:
        super().__init__(message)
        self.fqn, self.where, self.values = fqn, where, values


_TAKEN = frozenset(dir(graph_module(fx.Graph()))) - frozenset(dir(nn.Module()))  # code, graph, meta, ...


def refuse_model(model: nn.Module, *, backward: bool) -> None:
    """Raise unless ``model`` is a plain module whose forward (and, if asked, ``backward``) torch.export keeps."""
    if not isinstance(model, nn.Module):
        raise AutoparError(f"model: is a {type(model).__name__} (not a torch.nn.Module). Pass the module itself.")
    for name, module in model.named_modules(remove_duplicate=False):
        _refuse_module(name or type(model).__name__, module, backward)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _refuse_parameter(name, parameter, backward)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if nn.parameter.is_lazy(buffer):
            raise AutoparError(f"{name}: is not initialised yet (lazy module). Run one forward pass first.")
        if buffer.requires_grad:
            raise AutoparError(
                f"{name}: is a buffer that requires a gradient (only parameters do). Make it a Parameter."
            )
    named = (
        n for n, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    )
    taken = next((n for n in named if n.partition(".")[0] in _TAKEN), None)
    if taken is not None:
        raise AutoparError(
            f"{taken}: {taken.partition('.')[0]!r} is a name of torch.fx's own (graphs could not hold it). Rename it."
        )
    devices = sorted({str(t.device) for t in (*model.parameters(), *model.buffers())})
    if len(devices) > 1:
        raise AutoparError(f"model: is spread over devices {', '.join(devices)}. Put all of it on one, or on meta.")
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    if any(torch.is_autocast_enabled(kind) for kind in kinds):
        raise AutoparError(
            "autocast: is on around capture (torch.export drops it). Leave it, or cast the model's parts."
        )


def _refuse_module(name: str, module: nn.Module, backward: bool) -> None:
    for kind in type(module).__mro__:
        if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch."):
            what = WRAPPERS[kind.__name__]
            more = ", and inductor=True to have it compiled" if what == "torch.compile" else ""
            raise AutoparError(
                f"{name}: is wrapped by {what} (autopar places the model itself). Pass the plain model{more}."
            )
    if getattr(module, "_compiled_call_impl", None) is not None:
        raise AutoparError(f"{name}: was compiled by .compile() (capture needs plain code). Pass the plain model.")
    global_hooks = nn.modules.module._global_backward_hooks or nn.modules.module._global_backward_pre_hooks
    for attribute, value in vars(module).items():
        if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf:
            raise AutoparError(
                f"{name}.{attribute}: is a tensor that requires a gradient but no parameter. Make it an nn.Parameter."
            )
    if isinstance(module, nn.SyncBatchNorm) and module.process_group is not None:
        raise AutoparError(
            f"{name}: is a SyncBatchNorm of a group of ranks (ranks are autopar's; it has statistics of the whole "
            "batch). Leave out process_group."
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
        raise AutoparError(
            f"{name}: has sparse=True (sparse gradients cannot be reduced over ranks). Use sparse=False."
        )
    if backward and (module._backward_hooks or module._backward_pre_hooks or global_hooks):
        raise AutoparError(
            f"{name}: has a backward hook (capture would drop it). Remove it; forward hooks are kept, gradients "
            "can be changed between step() and the optimizer."
        )


def _refuse_parameter(name: str, parameter: nn.Parameter, backward: bool) -> None:
    if nn.parameter.is_lazy(parameter):
        raise AutoparError(f"{name}: is not initialised yet (lazy module). Run one forward pass first.")
    if type(parameter.data).__name__ == "DTensor":
        raise AutoparError(f"{name}: is a DTensor (autopar shards parameters itself). Pass the plain model.")
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(parameter):
        raise AutoparError(f"{name}: is a {type(parameter).__name__} (not a plain tensor). Use plain parameters.")
    if parameter.layout is not torch.strided:
        raise AutoparError(
            f"{name}: has layout {parameter.layout} (only dense parameters can be split). Make it dense."
        )
    if parameter.is_complex() and parameter.requires_grad:
        raise AutoparError(f"{name}: is complex (collectives sum real numbers). Keep it as two real parameters.")
    if backward and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
        raise AutoparError(
            f"{name}: has a gradient hook (it would see a shard of the gradient). Remove it and change the gradient "
            "between step() and the optimizer."
        )


@contextmanager
def watched_trace(
    model: nn.Module, hints: list[str], backward: bool, applied: list[Applied], opaque: Opaque
) -> Iterator[None]:
    """While the model is traced: list custom backwards in ``applied`` and refuse tensor hooks where ``backward``
    matters, mark the nodes of checkpointed regions (``meta["custom"][REGION]``, counted) and note them in ``hints``.
    ``opaque``: what becomes of a function that is not inlined."""
    names = {id(m): n or type(model).__name__ for n, m in model.named_modules()}
    regions: list[str] = []

    def register_hook(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_users(sys._getframe(1).f_code.co_filename):
            return original_hook(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        raise AutoparError(f"{where_now(names)}: puts a gradient hook on a tensor (capture would drop it). Remove it.")

    def enter_inference(self: Any) -> None:
        if not self.mode:
            return original_inference(self)
        raise AutoparError(f"{where_now(names)}: uses inference_mode (capture would drop it). Use torch.no_grad().")

    def checkpoint(*args: Any, **kwargs: Any) -> Iterator[None]:
        regions.append(where_now(names))
        with preserve_node_meta(), annotate({REGION: len(regions) - 1}):
            yield from original_checkpoint(*args, **kwargs)

    def reentrant(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        regions.append(where_now(names))  # without an operand that needs a gradient it gives none, to weights neither
        learns = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with preserve_node_meta(), annotate({REGION: len(regions) - 1}), torch.set_grad_enabled(learns):
            return run(*args)

    def differentiate(*args: Any, **kwargs: Any) -> Any:
        if not is_users(sys._getframe(1).f_code.co_filename):
            return original_grad(*args, **kwargs)
        raise AutoparError(
            f"{where_now(names)}: takes a gradient inside forward (capture would not see how it was made). Write the "
            "derivative with plain ops."
        )

    original_grad = torch.autograd.grad
    original_inference: Callable[[Any], None] = torch.inference_mode.__enter__
    original_hook = torch.Tensor.register_hook
    original_checkpoint = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", checkpoint))
        stack.enter_context(patch.object(torch.utils.checkpoint.CheckpointFunction, "apply", reentrant))
        stack.enter_context(patch.object(torch.distributions.Distribution, "_validate_args", False))  # reads values
        if backward:
            stack.enter_context(inlined(lambda: where_now(names), applied, opaque))
            stack.enter_context(patch.object(torch.autograd, "grad", differentiate))
            stack.enter_context(patch.object(torch.Tensor, "register_hook", register_hook))
            stack.enter_context(patch.object(torch.inference_mode, "__enter__", enter_inference))
        yield
    if regions:
        more = f" and {len(regions) - 1} more" if len(regions) > 1 else ""
        hints.append(f"{regions[0]}{more}: checkpointed regions are hints; recomputation is the plan's choice.")


def refuse_failure(
    model: nn.Module,
    error: BaseException,
    rows: int,
    examples: int,
    param_dtype: torch.dtype | None = None,
    handled: BaseException | None = None,
) -> AutoparError:
    """The one-line error for a failed trace at ``rows`` rows (the example inputs had ``examples``), with file:line.
    ``param_dtype``: what parameters were cast to; ``handled``: what a caller was handling when it began."""
    chain = _chain(error, handled)
    for link in chain:
        if isinstance(link, AutoparError):
            return link
    where, fqn = _where_failed(model, chain), _module_failed(model, chain)
    if {type(link).__name__ for link in chain} & OF_VALUES:
        return Failed(VALUES.format(where=where), fqn, where, True)
    failed = str(refuse_run(model, error, f"cannot be captured at batch size {rows}", param_dtype))
    if rows != examples:
        failed += " Inputs whose dim 0 is not the batch are named by batch_dims={'mask': None}."
    return Failed(failed, fqn, where, False)


def refuse_run(
    model: nn.Module, error: BaseException, what: str, param_dtype: torch.dtype | None = None
) -> AutoparError:
    """The one-line error for a run of the model that raised ``error``: where, ``what``, and torch's own words."""
    text = str(error).strip().splitlines() or [""]
    where = _where_failed(model, _chain(error))
    way = f" Parameters are cast to {param_dtype}: cast what meets them, or leave out the pin param_dtype."
    said = f"{where}: {what} ({type(error).__name__}: {text[0][:300].rstrip('.')})."
    return AutoparError(said + way * (param_dtype is not None))


def _chain(error: BaseException, handled: BaseException | None = None) -> list[BaseException]:
    """What led to an error, up to what was ``handled`` when the trace began."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at is not handled and at not in chain:
        chain.append(at)
        at = at.__cause__ or at.__context__
    return chain


def _where_failed(model: nn.Module, chain: list[BaseException]) -> str:
    names = {id(m): n or type(model).__name__ for n, m in model.named_modules()}
    return next((w for w in (_where_raised(link, names) for link in chain) if w), type(model).__name__)


def _module_failed(model: nn.Module, chain: list[BaseException]) -> str | None:
    """FQN of the module whose code raised."""
    names: dict[int, str] = {id(m): n for n, m in model.named_modules()}
    for link in chain:
        frames = []
        traceback = link.__traceback__
        while traceback is not None:
            frames.append(traceback.tb_frame)
            traceback = traceback.tb_next
        for frame in reversed(frames):
            name = names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return name
    return None


def where_now(names: dict[int, str]) -> str:
    """Module FQN and file:line of the innermost user frame that is running; ``names``: FQN by id of module."""
    frames: list[tuple[FrameType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _place(frames, names)


def _where_raised(error: BaseException, names: dict[int, str]) -> str:
    """The same for the frame that raised ``error``; empty where no user frame is in its traceback."""
    frames: list[tuple[FrameType, int]] = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _place(frames[::-1], names)


def _place(frames: list[tuple[FrameType, int]], names: dict[int, str]) -> str:
    user = [(f, line) for f, line in frames if not _inside_torch(f)]
    modules = [id(f.f_locals["self"]) for f, _ in frames if isinstance(f.f_locals.get("self"), nn.Module)]
    fqn = next((names[m] for m in modules if m in names), "")
    if not fqn or not user:
        return fqn
    frame, line = user[0]
    return f"{fqn} ({frame.f_code.co_filename}:{line})"


def _inside_torch(frame: FrameType) -> bool:
    return not is_users(frame.f_code.co_filename)


def is_users(filename: str) -> bool:
    """Whether code in ``filename`` is the user's (or a model library's), not torch's or autopar's own."""
    return not filename.startswith((TORCH, "<")) and os.path.dirname(filename) != HERE and filename not in CONTEXTS
