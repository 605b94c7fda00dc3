"""What capture cannot or must not see into, as one node of the graph: ``autopar::opaque``.

An `autograd.Function` whose backward is not the derivative of its forward, and a module whose Python decides by values.
Either is called as it is written when the program runs, whole on every rank unless `try_cuts` finds that pieces do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from autopar.errors import AutoparError
from autopar.example_values import ExampleValues, Unknown, untraced
from autopar.mixed_precision import replaced
from autopar.python_state import in_modes, python_state_kept
from autopar.runtime.opaque import Cut, drawing, opaque, register
from autopar.trees import PLAIN, Tree, flatten, in_lists, joined, lists_of_rows, parted, unflatten
from autopar.try_cuts import Held, may_cut, takes_addends

Kind = tuple[tuple[int, ...], torch.dtype]


class Wider(Exception):
    """A module cannot be called alone: its caller has to be called as it is."""


Numbers = dict[Hashable, tuple[Any, int]]
"""The calls of one capture that are registered: what is called, and its number."""


@dataclass(frozen=True)
class _Given:
    """How a value is made of its tensors and of what is constant in it. ``lists``: by their first leaf those, given by
    path, whose leaves are joined to one tensor: how many, and their dims. Values that differ in how many are alike."""

    tree: Tree = field(compare=False)
    constants: tuple[tuple[bool, Any], ...] = field(compare=False)  # per leaf: whether a tensor, and what it is if not
    paths: tuple[str, ...] = field(compare=False)
    lists: Mapping[int, tuple[int, int]] = field(compare=False)
    kind: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any, lists: Collection[str] = (), where: str = "") -> tuple[_Given, list[Tensor]]:
        pairs, tree = flatten(value)
        constants = tuple((isinstance(x, Tensor), None if isinstance(x, Tensor) else x) for _, x in pairs)
        tensors, counts, i = list[Tensor](), dict[int, tuple[int, int]](), 0
        for path, found in in_lists(pairs, lists):
            if path in lists and all(isinstance(x, Tensor) for x in found):
                counts[i] = len(found), found[0].ndim
                tensors.append(joined(found, f"{where}: result{path}"))
            else:
                tensors += [x for x in found if isinstance(x, Tensor)]
            i += len(found)
        short = tuple(path for path, _ in in_lists(pairs, lists))
        kind = (short, tuple(c for c in constants if not c[0])) if counts else (tree, constants)
        return cls(tree, constants, tuple(path for path, _ in pairs), counts, kind), tensors

    def value(self, tensors: Sequence[Tensor]) -> Any:
        feed, leaves = iter(tensors), list[Any]()
        while (i := len(leaves)) < len(self.constants):
            is_tensor, constant = self.constants[i]
            if i in self.lists:
                leaves += parted(next(feed), *self.lists[i])
            else:
                leaves.append(next(feed) if is_tensor else constant)
        return unflatten(leaves, self.tree)

    @property
    def count(self) -> int:
        """Of its tensors."""
        return sum(is_tensor for is_tensor, _ in self.constants) - sum(n - 1 for n, _ in self.lists.values())


# -- functions -------------------------------------------------------------------------------------------------------


class OpaqueFunction:
    """An autograd.Function with its own backward. ``sample``: random float64 operands of a given spread."""

    def __init__(self, cls: Any, given: _Given, forward: Callable[..., Any], sample: Callable[[float], Any]) -> None:
        self.name = cls.__qualname__
        self.cls, self.given, self.forward, self.sample = cls, given, forward, sample
        self.returned: _Given | None = None

    def run(self, operands: Sequence[Tensor]) -> list[Tensor]:
        return self._results(self.cls.apply(*self.given.value(operands)))

    def fake(self, operands: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            results = self._results(self.forward(self.cls, self.given.value(operands)))
        return [torch.empty_like(r) for r in results]

    def flops(self, operands: Sequence[Any]) -> int:
        return 0

    @cached_property
    def addends(self) -> bool:
        try:
            return takes_addends(self.run, _Given.of(self.sample(1.0))[1])
        except Exception:  # not known to
            return False

    def _results(self, value: Any) -> list[Tensor]:
        self.returned, tensors = _Given.of(value)
        return tensors

    def cuts(self) -> tuple[Cut, ...]:
        return self._cuts

    @cached_property
    def _cuts(self) -> tuple[Cut, ...]:
        """Of every dim of the first result, with all tensors that have as many dims and are as long there."""
        _, operands = _Given.of(self.sample(1.0))
        try:
            results = self.run(operands)
        except Exception:
            return ()
        found = []
        for dim, length in enumerate(results[0].shape if results else ()):
            alike = lambda t, d=dim, n=length: d if t.ndim == results[0].ndim and t.shape[d] == n else None
            cut = Cut(tuple(map(alike, operands)), tuple(map(alike, results)))
            samples = [_Given.of(self.sample(spread))[1] for spread in (1.0, 8.0)]
            held = may_cut(self.run, cut, samples) if any(d is not None for d in cut.operands) else None
            if held is not None and not held.numbers:
                found.append(cut)
        return tuple(found)


def apply_function(
    numbers: Numbers, cls: Any, args: Sequence[Any], forward: Callable[..., Any], sample: Callable[[float], Any]
) -> Any:
    """``cls.apply(*args)`` as one node. ``forward(cls, args)``: what it computes, on tensors without values too."""
    given, tensors = _Given.of(tuple(args))
    key = cls, given.tree, repr(given.constants)
    if key not in numbers:
        made = OpaqueFunction(cls, given, forward, sample)
        numbers[key] = made, register(made)
    call, number = numbers[key]
    results = opaque(tensors, call.name, number)
    assert call.returned is not None
    return call.returned.value(results)


# -- modules ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ran:
    """One run: the kinds of operands and results, and FLOPs."""

    operands: tuple[Kind, ...]
    results: tuple[Kind, ...]
    flops: int


class OpaqueModule:
    """One call of a module with these arguments. Operands: the tensors it is given, its parameters, its buffers;
    results: the tensors that it returns, and the new values of ``changed`` buffers."""

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any], given: _Given, where: str) -> None:
        self.name, self.module, self.forward, self.given, self.where = name, module, forward, given, where
        self.training = {m: m.training for m in module.modules()}
        self.returned: _Given | None = None
        self.lists: frozenset[str] = frozenset()  # that it returns, by path, with a tensor for each row
        self.found_lists = False
        self.changed: tuple[int, ...] = ()
        self.draws = False  # random numbers, of torch
        self.ran: list[_Ran] = []
        self.sample: list[Tensor] = []  # operands of the run with the fewest rows
        self.holds: Held | None = None  # what pieces of the batch are exact for

    def held(self) -> list[Tensor]:
        """Parameters and buffers, as the module holds them now."""
        return [*self.module.parameters(), *self.module.buffers()]

    def run(self, operands: Sequence[Tensor]) -> list[Tensor]:
        rows = self._rows_of(operands)
        with nullcontext() if rows is None or self.holds is None else self.holds.checked(self.where, rows):
            results = self._run(operands)
        for result, kind in zip(results, self._kinds(operands), strict=True):
            if tuple(result.shape) != kind[0]:
                raise AutoparError(
                    f"{self.where}: gave a tensor of shape {tuple(result.shape)} where {kind[0]} follows from its "
                    "operands (shapes that depend on values cannot be planned). Pad to one length."
                )
        return results

    def _rows_of(self, operands: Sequence[Tensor]) -> int | None:
        """The rows of a piece of the batch; None of the whole of it, and where a piece reads what it likes."""
        if len(self.ran) < 2 or not self.cuts() or self.holds is None or not self.holds.numbers:
            return None
        (cut,) = self.cuts()
        own, whole = (
            min(shape[d] for shape, d in zip(shapes, cut.operands, strict=True) if d is not None)
            for shapes in ([t.shape for t in operands], [shape for shape, _ in self.ran[0].operands])
        )
        return own if own < whole else None

    def fake(self, operands: Sequence[Tensor]) -> list[Tensor]:
        return [operands[0].new_empty(shape, dtype=dtype) for shape, dtype in self._kinds(operands)]

    def flops(self, operands: Sequence[Any]) -> int:
        shapes = [tuple(getattr(t, "shape", t)) for t in operands]
        base = self.ran[0]
        whole = sum(torch.Size(s).numel() for s, _ in base.operands[: self.given.count])
        return base.flops * sum(torch.Size(s).numel() for s in shapes[: self.given.count]) // max(whole, 1)

    def try_on(self, operands: Sequence[Tensor]) -> None:
        """Run on real operands and learn what it returns. Raises `Wider` where it cannot stand alone."""
        state, python = torch.get_rng_state(), random.getstate()
        before, changed = self.returned, self.changed
        with FlopCounterMode(display=False) as counter:
            results = self._run(operands, learn=True)
        if python != random.getstate():
            raise AutoparError(
                f"{self.where}: draws from Python's generator where capture cannot see it (every plan must draw the "
                "same). Draw with torch."
            )
        self.draws |= not torch.equal(state, torch.get_rng_state())
        assert self.returned is not None
        if before is not None and before != self.returned:
            one, other = next(
                ((a[0][0], t.shape[0]) for a, t in zip(self.ran[0].operands, operands) if a[0] != tuple(t.shape)),
                (1, 1),
            )
            lists = lists_of_rows(before.paths, one, self.returned.paths, other) - self.lists
            self.lists, self.found_lists = self.lists | lists, self.found_lists or bool(lists)
        if before not in (None, self.returned) or any(not isinstance(c, PLAIN) for _, c in self.returned.constants):
            raise Wider("returns what a graph cannot hold, or something else for other rows")
        if changed != self.changed:
            self.ran.clear()
        kinds = tuple((tuple(t.shape), t.dtype) for t in operands), tuple((tuple(t.shape), t.dtype) for t in results)
        if all(r.operands != kinds[0] for r in self.ran):
            self.ran.append(_Ran(*kinds, counter.get_total_flops()))
        if not self.sample or sum(t.numel() for t in operands) < sum(t.numel() for t in self.sample):
            self.sample = [t.detach() for t in operands]

    def begin_again(self) -> None:
        """Forgets what it returned when lists of rows were not joined yet."""
        self.found_lists, self.returned, self.changed, self.sample = False, None, (), []
        self.ran.clear()

    def _run(self, operands: Sequence[Tensor], learn: bool = False) -> list[Tensor]:
        count, held = self.given.count, self.held()
        buffers = {id(b) for b in self.module.buffers()}
        fresh = [t.clone() if id(h) in buffers else t for h, t in zip(held, operands[count:], strict=True)]
        versions = [t._version for t in fresh]
        with ExitStack() as stack:
            stack.enter_context(in_modes(self.training, after={m: m.training for m in self.training}))
            if _wide(operands) and self.ran and not _wide_kinds(self.ran[0].operands):
                stack.enter_context(_in_float64())
            stack.enter_context(python_state_kept(self.module))
            stack.enter_context(replaced(self.module, {id(h): t for h, t in zip(held, fresh, strict=True)}))
            args, kwargs = self.given.value(operands[:count])
            value = self.forward(*args, **kwargs)
            now = [self.module.get_buffer(n) for n, _ in self.module.named_buffers()]
        returned, results = _Given.of(value, self.lists, self.where)
        last = dict(enumerate(now, start=len(fresh) - len(now)))
        changed = tuple(i for i, t in last.items() if t is not fresh[i] or t._version != versions[i])
        if learn:
            self.returned, self.changed = returned, tuple(sorted({*self.changed, *changed}))
        elif returned != self.returned or set(changed) - set(self.changed):
            raise AutoparError(
                f"{self.where}: returned, or changed, something else than at capture (a program has one structure). "
                "Let it return the same for every batch."
            )
        return [*results, *(last[i] for i in self.changed)]

    def _kinds(self, operands: Sequence[Any]) -> list[Kind]:
        """Shapes and dtypes of the results: those of the same operands before, or what two runs let conclude."""
        shapes = [tuple(t.shape) for t in operands]
        wide = _wide(operands) and not _wide_kinds(self.ran[0].operands)
        known = next((r for r in self.ran if [s for s, _ in r.operands] == shapes), None)
        made = (
            [s for s, _ in known.results]
            if known
            else [self._shape(i, shapes) for i in range(len(self.ran[0].results))]
        )
        return [
            (shape, torch.float64 if wide and dtype == torch.float32 else dtype)
            for shape, (_, dtype) in zip(made, self.ran[0].results, strict=True)
        ]

    def _shape(self, result: int, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        one, other = self.ran[0], self.ran[-1]
        made = []
        for dim, (n, m) in enumerate(zip(one.results[result][0], other.results[result][0], strict=True)):
            if n == m:
                made.append(n)
                continue
            pairs = ((i, d) for i, (s, _) in enumerate(one.operands) for d in range(len(s)))
            like = next((p for p in pairs if _at(one, p) * m == _at(other, p) * n), None)
            if like is None:
                raise AutoparError(
                    f"{self.where}: dim {dim} of what it returns follows no dim that it is given (its length cannot be "
                    "planned). Pad to one length."
                )
            made.append(n * shapes[like[0]][like[1]] // _at(one, like))
        return tuple(made)

    addends = True  # autograd's backward is linear

    def cuts(self) -> tuple[Cut, ...]:
        return self._cuts

    @cached_property
    def _cuts(self) -> tuple[Cut, ...]:
        """Of the rows, where two runs show what has them."""
        if len(self.ran) < 2:
            return ()
        one, other = self.ran[0], self.ran[-1]
        operands = tuple(_rows(a, b) for a, b in zip(one.operands, other.operands, strict=True))
        results = tuple(_rows(a, b) for a, b in zip(one.results, other.results, strict=True))
        sample = [t.to(torch.float64) if t.dtype == torch.float32 else t for t in self.sample]
        self.sample = []
        cut = Cut(operands, results)
        if 0 not in operands or self.changed or self.draws:
            return ()
        self.holds = may_cut(self._run, cut, [sample])
        return () if self.holds is None else (cut,)


@contextmanager
def modules_called(
    model: nn.Module, modules: Mapping[str, str], numbers: Numbers, values: ExampleValues
) -> Iterator[None]:
    """While a model is traced, calls of ``modules`` (FQN -> where and why it cannot be traced) become nodes."""
    with ExitStack() as stack:
        for fqn, where in modules.items():
            module = model.get_submodule(fqn)
            calls = _Calls(fqn or type(model).__name__, module, module.forward, where, numbers, values)
            stack.enter_context(patch.object(module, "forward", calls))
        yield


@dataclass
class _Calls:
    """Stands for a module's ``forward`` while it is traced."""

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    where: str
    numbers: Numbers
    values: ExampleValues
    count: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, number, tensors = self._call(args, kwargs)
        operands = [*tensors, *call.held()]
        try:
            real = [self.values.of(t) for t in operands]
        except Unknown as unknown:
            raise Wider(f"needs example values ({unknown})") from None
        with untraced(), torch.no_grad():
            call.try_on(real)
        held, at = call.held(), len(tensors)
        for i in call.changed:
            operands[at + i] = held[i].clone()  # as it was: below another value is written into it
        results = (drawing if call.draws else opaque)(operands, call.name, number)
        assert call.returned is not None
        outputs = call.returned.count
        for i, new in zip(call.changed, results[outputs:], strict=True):
            with torch.no_grad():
                held[i].copy_(new)
        return call.returned.value(results[:outputs])

    def _call(self, args: Any, kwargs: Any) -> tuple[OpaqueModule, int, list[Tensor]]:
        given, tensors = _Given.of((args, kwargs))
        if any(not is_tensor and not isinstance(c, PLAIN) for is_tensor, c in given.constants) or not tensors:
            raise Wider("is given what is neither a tensor nor a plain value")
        key = self.name, self.count
        self.count += 1
        if key not in self.numbers:
            made = OpaqueModule(self.name, self.module, self.forward, given, self.where)
            self.numbers[key] = made, register(made)
        call, number = self.numbers[key]
        if call.given != given:
            raise Wider("is given other numbers for other rows")
        return call, number, tensors


class _Wider(TorchFunctionMode):
    """float64 where code asks for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "float" and args:
            return args[0].double()
        wider = lambda a: torch.float64 if a is torch.float32 else a
        return func(*tree_map(wider, args), **tree_map(wider, kwargs or {}))


@contextmanager
def _in_float64() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wider():
            yield
    finally:
        torch.set_default_dtype(default)


def _wide(operands: Sequence[Any]) -> bool:
    return any(t.dtype == torch.float64 for t in operands)


def _wide_kinds(kinds: Sequence[Kind]) -> bool:
    return any(dtype == torch.float64 for _, dtype in kinds)


def _rows(a: Kind, b: Kind) -> int | None:
    """The dim in which the same tensor of two runs differs, if that is the first alone."""
    return 0 if a[0] != b[0] and a[0][1:] == b[0][1:] else None


def _at(ran: _Ran, place: tuple[int, int]) -> int:
    return ran.operands[place[0]][0][place[1]]


__all__ = ["Numbers", "OpaqueFunction", "OpaqueModule", "Wider", "apply_function", "modules_called"]
