"""Every call that a model's forward makes of torch, without a graph: a twentieth of the time of torch.export."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.fx import traceback
from torch.overrides import TorchFunctionMode

from autopar.custom_functions import Applied
from autopar.export_model import Call, Outputs, Trace, tracing
from autopar.fake_copies import Copies
from autopar.traps import REGION

PLAIN = {type(None), bool, int, str, bytes, type(...), torch.dtype, torch.device, torch.layout, torch.memory_format}

SCALES = {
    *("add", "sub", "mul", "div", "__add__", "__radd__", "__mul__", "__rmul__", "__truediv__"),
    *("dropout", "bernoulli_"),
}
"""Functions that put a float literal into the op that they are, and do the same whatever it is."""
PURE = {
    *("to", "tensor", "zeros", "ones", "full", "arange", "__getitem__", "contiguous", "detach"),
    *("size", "dim", "stride"),
}
"""Functions that change nothing: where nobody reads what they made, they were not called."""

Origin = tuple[Any, ...]
"""Where a tensor is from: (number of the call, place in its result), or the name and the kind of one that was there."""


@dataclass(frozen=True)
class Made:
    """One call: the function with its literals and switches, the module that made it, the checkpointed region that it
    stands in (None: none), its tensor operands, and the literals of `SCALES` apart."""

    what: tuple[Any, ...]
    module: str
    region: int | None
    operands: tuple[Origin, ...]
    scales: tuple[float, ...] = ()


@dataclass
class Record:
    """The calls of one forward with its loss, in order; the last stands for what is returned."""

    calls: list[Made] = field(default_factory=list)
    regions: int = 0  # checkpointed regions in all
    outputs: Outputs | None = None
    has_loss: bool = False
    changed: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    applied: tuple[Applied, ...] = ()


def record_calls(call: Call, rows: int) -> Record:
    """Run the model and its loss on fake tensors of ``rows`` rows, as the export does, and list what it calls.

    Two stretches of calls that are equal, operands included, are the same ops in an export. Leaves the model as it
    was; raises whatever the model raises.
    """
    record = Record()
    with tracing(call, rows, all_fake=True) as trace, trace.mode, _exporting():
        recorder = _Recorder(call.model, record, trace)
        with patch.object(nn.Module, "__call__", recorder.entering(nn.Module.__call__)), recorder:
            results = trace.flat(*trace.inputs)
        recorder.returned(results)
        seen = trace.flat.seen
    record.calls = _read(record.calls)
    record.outputs, record.has_loss, record.changed = seen.outputs, seen.has_loss, seen.changed
    record.hints, record.applied = tuple(trace.hints), tuple(trace.applied)
    return record


@contextmanager
def _exporting() -> Iterator[None]:
    """Models that ask whether they are exported are told so."""
    with (
        patch.object(torch.compiler, "_is_compiling_flag", True),
        patch.object(torch.compiler, "_is_exporting_flag", True),
    ):
        yield


class _Recorder(TorchFunctionMode):
    """Adds every call to a record. Tensors are known by identity and kept, so that none takes the place of another."""

    def __init__(self, model: nn.Module, record: Record, trace: Trace) -> None:
        super().__init__()
        self.model, self.record, self.inputs = model, record, trace.inputs
        self.copies = Copies(trace.mode)
        self.modules = {id(m): name for name, m in model.named_modules()}
        self.origins: dict[int, Origin | str] = {}
        self.kept: list[Any] = []
        self.unknown = 0
        self.inside, self.started = [""], False

    def entering(self, original: Any) -> Any:
        """``nn.Module.__call__`` that notes which module runs. What is made before the model itself is called are the
        casts of its parameters, which count as the parameters."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is self.model and not self.started:
                self.start((args, kwargs))
            self.inside.append(self.modules.get(id(module), self.inside[-1]))
            try:
                return original(module, *args, **kwargs)
            finally:
                self.inside.pop()

        return call

    def start(self, given: Any) -> None:
        """Forget the calls so far, and name the tensors that the model holds and is given."""
        self.started = True
        self.record.calls.clear()
        self.origins.clear()
        leaves = list(self.inputs)
        self._literal(given, leaves)
        for name, tensor in (*_named(self.model), *((f"input {i}", t) for i, t in enumerate(leaves))):
            self.origins.setdefault(id(tensor), name)
            self.kept.append(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__":  # a shape or a dtype, most often
            result = func(*args, **kwargs)
            if not isinstance(result, torch.Tensor):
                return result
        operands: list[torch.Tensor] = []
        made = self._made(func, name, args, kwargs, operands)
        if name == "__get__" or _mutates(name):
            result = result if name == "__get__" else self.copies.mutate(lambda: func(*args, **kwargs), operands)
        else:
            result = self.copies.result((made.what, made.scales), operands, lambda: func(*args, **kwargs))
        self.add(made, result)
        return result

    def _made(self, func: Any, name: str, args: Any, kwargs: Any, operands: list[torch.Tensor]) -> Made:
        switches = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda"),
        )
        scales: list[float] | None = [] if name in SCALES else None
        by_name = scales if name == "dropout" else None  # others have an ``alpha``, which is left out where it is 1
        literals = self._literal(args, operands, scales), self._literal(kwargs, operands, by_name)
        region = traceback.current_meta.get("custom", {}).get(REGION)
        if region is not None:
            self.record.regions = max(self.record.regions, region + 1)
        origins = tuple([self._origin(t) for t in operands])
        return Made((func, switches, *literals), self.inside[-1], region, origins, tuple(scales or ()))

    def add(self, made: Made, result: Any) -> None:
        """One more call of the record, and where its results are from."""
        self.record.calls.append(made)
        results: list[torch.Tensor] = []
        self._literal(result, results)
        for i, tensor in enumerate(results):
            if id(tensor) not in self.origins:
                self.origins[id(tensor)] = (len(self.record.calls) - 1, i)
                self.kept.append(tensor)

    def returned(self, results: Any) -> None:
        """The last call of the record."""
        self.add(self._made(None, "return", (results,), {}, []), None)

    def _origin(self, tensor: torch.Tensor) -> Origin:
        found = self.origins.get(id(tensor))
        if isinstance(found, tuple):
            return found
        if found is None:  # made where torch's Python functions do not reach
            self.unknown += 1
            found = f"unknown {self.unknown}"
            self.kept.append(tensor)
        kind = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)
        origin = self.origins[id(tensor)] = (found, kind)
        return origin

    def _literal(self, value: Any, tensors: list[torch.Tensor], scales: list[float] | None = None) -> Any:
        """``value`` as something to compare. What is left out of it is appended to ``tensors`` and, where that is a
        list, its floats to ``scales``."""
        kind = type(value)
        if kind in PLAIN:
            return kind, value
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return torch.Tensor
        if isinstance(value, (tuple, list)):
            return kind, tuple([self._literal(v, tensors, scales) for v in value])
        if kind is dict:
            return kind, tuple([(k, self._literal(v, tensors, scales)) for k, v in value.items()])
        if kind is float and scales is not None:
            scales.append(value)
            return float
        if kind in (float, complex):
            return kind, repr(value)
        if kind is slice:
            return kind, self._literal((value.start, value.stop, value.step), tensors)
        self.kept.append(value)
        return kind, id(value)


def _mutates(name: str) -> bool:
    """Whether a function changes an operand, by the convention of names."""
    if name.startswith("__") and name.endswith("__"):
        return name in ("__setitem__", "__set__") or (
            name.startswith("__i") and name not in ("__invert__", "__index__")
        )
    return name.endswith("_")


def _read(calls: Sequence[Made]) -> list[Made]:
    """The calls without those that change nothing and whose results nobody reads."""
    used, kept = set[int](), list[int]()
    for i in reversed(range(len(calls))):
        if i in used or calls[i].what[0] is None or getattr(calls[i].what[0], "__name__", "") not in PURE:
            used.update(o[0] for o in calls[i].operands if isinstance(o[0], int))
            kept.append(i)
    at = {i: n for n, i in enumerate(reversed(kept))}
    return [
        replace(calls[i], operands=tuple((at[o[0]], o[1]) if isinstance(o[0], int) else o for o in calls[i].operands))
        for i in reversed(kept)
    ]


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}", value
