"""Values that are recorded instead of computed: what a constructor does to every tensor, and what it draws, in order.

`record` runs ordinary code with every new tensor on the meta device. Each op that computes something becomes an `Event`
on storages; views need none, because an operand is described by the memory that it covers (`Place`). Code sees CPU
tensors, and where it asks for a value (``item()``), that one is computed. `autopar.runtime.replay` computes the rest
later, any piece of it. Nothing here uses processes or layouts.

>>> twice, recorder = record(lambda: torch.zeros(4).uniform_().mul_(2), seed=3)
>>> twice.device.type, [str(e.op) for e in recorder.recording.events if isinstance(e, Event)]
('meta', ['aten.zeros.default', 'aten.uniform_.default', 'aten.mul_.Tensor'])
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from autopar.errors import AutoparError

T = TypeVar("T")
aten = torch.ops.aten
TOKEN = 0x6175746F70617200  # seeds from here on mark where a stream stands while its draws are not made

# These make memory and no values.
EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# Of their first operand these read the description alone.
LIKE = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
# What torch draws by filling new memory: (the op in place, its arguments from those of the op).
FILLS: dict[OpOverload, tuple[OpOverload, Callable[..., tuple[Any, ...]]]] = {
    aten.randn.default: (aten.normal_.default, lambda size: (0.0, 1.0)),
    aten.randn.generator: (aten.normal_.default, lambda size: (0.0, 1.0)),
    aten.randn_like.default: (aten.normal_.default, lambda like: (0.0, 1.0)),
    aten.normal.float_float: (aten.normal_.default, lambda mean, std, size: (mean, std)),
    aten.rand.default: (aten.uniform_.default, lambda size: (0.0, 1.0)),
    aten.rand.generator: (aten.uniform_.default, lambda size: (0.0, 1.0)),
    aten.rand_like.default: (aten.uniform_.default, lambda like: (0.0, 1.0)),
    aten.randint.default: (getattr(aten.random_, "from"), lambda high, size: (0, high)),
    aten.randint.generator: (getattr(aten.random_, "from"), lambda high, size: (0, high)),
    aten.randint.low: (getattr(aten.random_, "from"), lambda low, high, size: (low, high)),
    aten.randint.low_generator: (getattr(aten.random_, "from"), lambda low, high, size: (low, high)),
    aten.randint_like.default: (getattr(aten.random_, "from"), lambda like, high: (0, high)),
    aten.randint_like.low_dtype: (getattr(aten.random_, "from"), lambda like, low, high: (low, high)),
}


@dataclass(frozen=True)
class Place:
    """The memory that a tensor covers: a numbered storage, seen as ``dtype`` with these sizes, strides and offset."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        n = 1
        for length in self.size:
            n *= length
        return n

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after another."""
        expected = 1
        for length, step in zip(reversed(self.size), reversed(self.stride), strict=True):
            if length != 1 and step != expected:
                return False
            expected *= length
        return True


@dataclass(frozen=True)
class Stream:
    """Stands for a generator among the arguments of an event."""

    number: int


@dataclass(frozen=True, eq=False)
class Event:
    """One op. In ``args`` and ``kwargs`` places stand for tensors. ``reads``: what it needs the values of; ``writes``:
    operands it writes into, ``blind`` where it does not read these; ``makes``: its results in new memory (None: a view
    of an operand); ``stream``: the generator it draws from."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    blind: bool
    makes: tuple[Place | None, ...]
    stream: int | None
    default_dtype: torch.dtype

    @property
    def outputs(self) -> tuple[Place, ...]:
        """All that it writes."""
        return (*self.writes, *(m for m in self.makes if m is not None))


@dataclass(frozen=True, eq=False)
class Seek:
    """The code moved a generator: to where a stream stood after event ``after``, or to ``state``."""

    stream: int
    after: int | None
    state: Tensor | None


@dataclass(eq=False)
class Recording:
    """What `record` saw. ``events`` in order; ``nbytes`` of every storage; ``constants``: storages whose values came
    from outside, with the version at which they were read."""

    seed: int
    events: list[Event | Seek] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    constants: dict[int, tuple[Tensor, int]] = field(default_factory=dict)

    def constant(self, storage: int) -> Tensor:
        """The value of a constant storage. Raises AutoparError where it was changed since."""
        value, version = self.constants[storage]
        if value._version != version:
            raise AutoparError(
                f"deferred_init: a tensor {tuple(value.shape)} that the constructor read was changed afterwards. "
                "Give it a copy."
            )
        return value

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that two recordings share where they give the same values."""
        hashed = hashlib.blake2b(str(self.seed).encode(), digest_size=16)
        for event in self.events:
            if isinstance(event, Seek):
                hashed.update(f"\nseek {event.stream} {event.after}".encode())
                hashed.update(b"" if event.state is None else event.state.numpy().tobytes())
            else:
                kwargs = sorted(event.kwargs.items())
                hashed.update(f"\n{event.op} {event.args} {kwargs} {event.makes} {event.stream}".encode())
        for storage in sorted(self.constants):
            value = self.constant(storage).detach().contiguous()
            flat = value.reshape(-1).view(torch.uint8) if value.numel() else value
            hashed.update(f"\n{storage} {value.dtype} {tuple(value.shape)}".encode() + flat.numpy().tobytes())
        return hashed.digest()


@dataclass(frozen=True, eq=False)
class Value:
    """What a tensor on meta stands for: what a recording leaves at a place. ``version``: of the tensor then."""

    recording: Recording
    place: Place
    version: int


def record(fn: Callable[[], T], seed: int) -> tuple[T, Recorder]:
    """What ``fn`` returns, its tensors on meta, and the recorder, which has the recording of their values: those that
    it would give after ``torch.manual_seed(seed)``. No generator of this process moves."""
    default = torch.default_generator
    before, recorder = default.get_state(), Recorder(seed)
    try:
        default.manual_seed(seed)
        with torch.device("cpu"), _LikeCPU(recorder), recorder:
            made = fn()
    finally:
        default.set_state(before)
        for generator, state in recorder.moved:
            generator.set_state(state)
    return made, recorder


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every op on the meta device and notes what it does."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording(seed)
        self.moved: list[tuple[torch.Generator, Tensor]] = []  # generators of the code, with their states before
        self._storages: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []  # so that no address is given twice
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}  # id of an outer tensor -> it and what stands for it
        self._streams: dict[int, int] = {}
        self._states: dict[int, bytes] = {}  # stream -> where it stands
        self._known: dict[bytes, int] = {}  # state -> the event after which a stream stood there

    def place(self, tensor: Tensor) -> Place:
        """Where a tensor on meta lies."""
        if tensor.is_conj() or tensor.is_neg():
            raise AutoparError("deferred_init: the constructor keeps a conjugated view. Call resolve_conj() on it.")
        number = self._number(tensor.untyped_storage())
        return Place(number, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def value(self, tensor: Tensor) -> Value:
        """What a tensor, on meta or from outside, has as value now."""
        return Value(self.recording, self.place(self._on_meta(tensor)), tensor._version)

    def real(self, tensor: Tensor) -> Tensor:
        """The value of a tensor on meta now, computed."""
        from autopar.runtime.replay import value_of

        return value_of(self.recording, self.place(tensor))

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # here tensors say where they are
            return self._record(func, args, dict(kwargs or {}))

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = _slots(func, args, kwargs)
        written = [t for name, value in slots for t in _tensors(value) if name in _written(func)]
        outer = [t for t in _tensors((args, kwargs)) if not t.is_meta]
        if written and len(outer) == len(list(_tensors((args, kwargs)))) and not _draws(func):
            return func(*args, **kwargs)  # computes on tensors from outside alone
        if any(not t.is_meta for t in written):
            raise AutoparError(
                f"deferred_init: {func} writes into a tensor from outside the constructor. Make it there, or give the "
                "constructor a copy: tensor.clone()."
            )
        generator = next((value for _, value in slots if isinstance(value, torch.Generator)), None)
        self._refuse_devices(func, slots)
        args, kwargs = tree_map(self._on_meta, (args, kwargs))
        on_meta = dict(kwargs)
        if any(a.name == "device" for a in func._schema.arguments) and (
            kwargs.get("device") is not None or not list(_tensors((args, kwargs)))
        ):
            on_meta |= {"device": torch.device("meta")}
        if kwargs.get("pin_memory"):
            on_meta["pin_memory"] = False
        for tensor in _tensors((args, kwargs)):
            self._number(tensor.untyped_storage())
        known = len(self._alive)
        without = tree_map(lambda a: None if isinstance(a, torch.Generator) else a, (args, on_meta))
        try:
            out = func(*without[0], **without[1])
        except (NotImplementedError, RuntimeError):
            return self._really(func, args, kwargs)
        if torch.Tag.inplace_view not in func.tags:
            self._note(func, args, kwargs, out, known, generator)
        for tensor in written:  # it may have been resized
            self.recording.nbytes[self._number(tensor.untyped_storage())] = int(tensor.untyped_storage().nbytes())
        return out

    def _note(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        known: int,
        generator: torch.Generator | None,
    ) -> None:
        slots = _slots(func, args, kwargs)
        operands = [(name, self.place(t)) for name, value in slots for t in _tensors(value)]
        made = [place if place.storage >= known else None for place in map(self.place, _tensors(out))]
        writes = tuple(place for name, place in operands if name in _written(func))
        if func in EMPTY or not (writes or any(made)):
            return
        reads = tuple(place for name, place in operands if name not in _written(func))
        blind = _blind(func)
        stream = self._stream(generator) if _draws(func) else None
        if func in FILLS and made[0] is not None and not made[0].dtype.is_complex:
            func, rest = FILLS[func][0], FILLS[func][1](*(value for name, value in slots if _positional(func, name)))
            args, kwargs, writes, made, reads, blind = (made[0], *rest), {}, (made[0],), [], (), True
        elif func in LIKE:
            reads = ()
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        if "dtype" in (a.name for a in func._schema.arguments) and kwargs.get("dtype") is None and made:
            kwargs |= {"dtype": made[0].dtype} if made[0] is not None else {}
        args, kwargs = tree_map(self._as_noted, (args, kwargs))
        default = torch.get_default_dtype()
        self.recording.events.append(
            Event(func, args, kwargs, reads, writes, blind, tuple(made), stream, default),
        )
        if stream is not None:
            self._mark(generator or torch.default_generator, stream)

    def _as_noted(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            return self.place(a)
        return Stream(self._streams[id(a)]) if isinstance(a, torch.Generator) else a

    # -- tensors ----------------------------------------------------------------------------------------------------

    def _number(self, storage: torch.UntypedStorage) -> int:
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = len(self._alive)
            self._alive.append(storage)
            self.recording.nbytes.append(int(storage.nbytes()))
        return self._storages[storage._cdata]

    def _on_meta(self, a: Any) -> Any:
        """A tensor from outside as a constant; anything else as it is."""
        if not isinstance(a, Tensor) or a.is_meta:
            return a
        known = self._twins.get(id(a))
        if known is not None and self.recording.constants[self.place(known[1]).storage][1] == a._version:
            return known[1]
        if a.device.type != "cpu":
            raise AutoparError(
                f"deferred_init: the constructor reads a tensor on {a.device}. Move it to the CPU first."
            )
        value = a.detach()
        twin = torch.empty(value.shape, dtype=value.dtype, device="meta")
        self.recording.constants[self.place(twin).storage] = (value, value._version)
        self._twins[id(a)] = (a, twin)
        return twin

    def _really(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op that the meta device cannot do, because its result, or the shape of it, depends on values."""
        if _draws(func) or _written(func):
            raise AutoparError(
                f"deferred_init: {func} does not run without values (the meta device has no kernel of it). "
                "Build the model for real."
            )
        args, kwargs = tree_map(lambda a: self.real(a) if isinstance(a, Tensor) else a, (args, kwargs))
        return tree_map(self._on_meta, func(*args, **kwargs))

    def _refuse_devices(self, func: OpOverload, slots: list[tuple[str, Any]]) -> None:
        device = next((value for name, value in slots if name == "device" and value is not None), None)
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            raise AutoparError(
                f"deferred_init: the constructor makes a tensor on {device} ({func}; only a CPU's numbers can be drawn "
                "again elsewhere). Build on the CPU: the ranks move their pieces."
            )

    # -- generators -------------------------------------------------------------------------------------------------

    def _stream(self, generator: torch.Generator | None) -> int:
        """The number of a generator's stream, with a `Seek` where the code has moved it."""
        generator = generator or torch.default_generator
        state = generator.get_state()
        if id(generator) not in self._streams:
            self._streams[id(generator)] = len(self._streams)
            if generator is not torch.default_generator:
                self.moved.append((generator, state))
        number, now = self._streams[id(generator)], state.numpy().tobytes()
        if self._states.get(number) != now:
            after = self._known.get(now)
            self.recording.events.append(Seek(number, after, state if after is None else None))
        return number

    def _mark(self, generator: torch.Generator, stream: int) -> None:
        """Stand at a state that says: after the last event."""
        after = len(self.recording.events) - 1
        generator.manual_seed(TOKEN + after)
        self._states[stream] = generator.get_state().numpy().tobytes()
        self._known[self._states[stream]] = after


class _LikeCPU(TorchFunctionMode):
    """While recording, tensors on meta say that they are on the CPU, and give their values to Python."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if not isinstance(first, Tensor) or not _is_meta(first):
            return func(*args, **kwargs)
        if func in _LOOKS:
            return _LOOKS[func]
        if func in _VALUES:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                return func(self.recorder.real(first), *args[1:], **kwargs)
        if func is Tensor.cpu:
            return first
        if func is Tensor.to:
            args, kwargs = tree_map(_no_device, (args, kwargs))
        return func(*args, **kwargs)


_LOOKS: dict[Any, Any] = {
    vars(torch._C.TensorBase)[name].__get__: looks
    for name, looks in (("device", torch.device("cpu")), ("is_meta", False), ("is_cpu", True))
}
_VALUES = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


def _is_meta(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


def _no_device(a: Any) -> Any:
    return torch.device("meta") if a == "cpu" or (isinstance(a, torch.device) and a.type == "cpu") else a


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (a for a in tree_iter(tree) if isinstance(a, Tensor))


def _slots(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(name, value) of every argument that was given."""
    named = [(a.name, value) for a, value in zip(func._schema.arguments, args, strict=False)]
    return named + list(kwargs.items())


def _written(func: OpOverload) -> frozenset[str]:
    return frozenset(a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def _positional(func: OpOverload, name: str) -> bool:
    """Whether an argument of an op of `FILLS` is one of those that its entry takes."""
    return name not in ("generator", "dtype", "layout", "device", "pin_memory", "memory_format")


def _draws(func: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _blind(func: OpOverload) -> bool:
    """Whether the op writes without reading what was there."""
    name = func._schema.name.removeprefix("aten::")
    overwrites = {"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_"}
    overwrites |= {"log_normal_", "geometric_"}
    return name in overwrites or any(a.is_out for a in func._schema.arguments)


def remember(tensor: Tensor, value: Value) -> None:
    """Note on a tensor on meta what it stands for."""
    tensor._autopar_value = value  # type: ignore[attr-defined]


def recall(name: str, tensor: Tensor) -> Value | None:
    """What was noted; None for nothing. Raises AutoparError where the tensor was changed since."""
    value = getattr(tensor, "_autopar_value", None)
    if not isinstance(value, Value):
        return None
    place = value.place
    if (place.size, place.dtype, value.version) != (tuple(tensor.shape), tensor.dtype, tensor._version):
        raise AutoparError(
            f"{name}: was changed after deferred_init, which cannot see it. Change it in what deferred_init calls."
        )
    return value
