"""``torch.ops.autopar.opaque``: a call that is one node of the graph, since capture cannot or must not see into it.

Operands and results are lists of tensors; what is called is known by its name, and by a number where a process has
several of that name. Backward runs the call again and then autograd through it: so an ``autograd.Function`` has its own
backward, and nothing but the operands is kept.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from autopar.runtime.counter_random import PLACE, seed_of
from autopar.runtime.library import LIBRARY, kernels


@dataclass(frozen=True)
class Cut:
    """A way of cutting a call on one axis, found to be exact: per operand and result the dim that is cut, or None: an
    operand whole, a result that is the sum of what the pieces give."""

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]


class Called(Protocol):
    """What an opaque node calls."""

    @property
    def name(self) -> str:
        """Of the function or module."""

    def run(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """The results; autograd works through them."""

    def fake(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Tensors like the results, from operands without values."""

    def flops(self, operands: Sequence[Any]) -> int:
        """Of its forward, by the shapes of the operands."""

    def cuts(self) -> tuple[Cut, ...]:
        """The ways of cutting it; none share a dim."""

    @property
    def addends(self) -> bool:
        """Whether backward of addends of the results' gradients gives addends: not where it clips them, say."""


Slot = tuple[str, int, int]
"""The name and the number of a call, and the place of one of its operands."""


@dataclass(frozen=True)
class Flow:
    """How gradients come through opaque calls: what those of the loss reach without any, and those of each operand
    without another one. Reached are parameters, by FQN, and calls, by name and number."""

    loss: frozenset[str | tuple[str, int]]
    operands: Mapping[Slot, frozenset[str | tuple[str, int]]]

    def parameters(self, passed: Collection[Slot]) -> frozenset[str]:
        """What has a gradient where only the operands ``passed`` are given one."""
        found, open_ends = set[str | tuple[str, int]](), set(self.loss)
        while open_ends:
            found |= open_ends
            slots = [s for s in passed if s[:2] in open_ends]
            open_ends = {end for s in slots for end in self.operands.get(s, ())} - found
        return frozenset(end for end in found if isinstance(end, str))


PASSED = Counter[Slot]()  # how often backward found a gradient of an operand, in this process
CALLS: dict[str, list[Called]] = {}
BEFORE = threading.local()  # the state of the generator before the call of this thread that just ran
LOCK = threading.RLock()  # a call may put tensors into a module while it runs


def register(call: Called) -> int:
    """The number by which ``call`` is known among those of its name; it lives as long as the process."""
    CALLS.setdefault(call.name, []).append(call)
    return len(CALLS[call.name]) - 1


def called(name: str, number: int) -> Called:
    """What a node with these literals calls."""
    return CALLS[name][number]


def _forward(operands: list[Tensor], name: str, number: int) -> list[Tensor]:
    with LOCK:
        return _apart(called(name, number).run(operands), operands)


def _drawing(operands: list[Tensor], name: str, number: int) -> list[Tensor]:
    BEFORE.state = torch.get_rng_state()
    return _forward(operands, name, number)


def _seeded(
    operands: list[Tensor], name: str, number: int, *, draw: int = 0, step_key: int = 0, **place: Any
) -> list[Tensor]:
    with _draws(draw, step_key):
        return _forward(operands, name, number)


def _fake(operands: list[Tensor], name: str, number: int, **place: Any) -> list[Tensor]:
    return called(name, number).fake(operands)


@contextmanager
def _draws(draw: int, step_key: int, state: Tensor | None = None) -> Iterator[None]:
    """Inside, torch's generators stand where the numbers of this draw and step begin, or the CPU's at ``state``."""
    with torch.random.fork_rng():
        if state is not None:
            torch.set_rng_state(state)
        else:
            torch.manual_seed(seed_of(draw, step_key))
        yield


def _gradients(
    grads: list[Tensor | None],
    operands: list[Tensor],
    wanted: list[bool],
    name: str,
    number: int,
    state: Tensor | None = None,
    *,
    draw: int = -1,
    step_key: int = 0,
) -> list[Tensor]:
    asked = [t for t, w in zip(operands, wanted, strict=True) if w]
    found = _found(grads, operands, wanted, name, number, state, draw=draw, step_key=step_key)
    made = [torch.zeros_like(t) if g is None else g.contiguous() for t, g in zip(asked, found, strict=True)]
    return _apart(made, [g for g in grads if g is not None])


def _found(
    grads: Sequence[Tensor | None],
    operands: Sequence[Tensor],
    wanted: Sequence[bool],
    name: str,
    number: int,
    state: Tensor | None,
    *,
    draw: int = -1,
    step_key: int = 0,
) -> Sequence[Tensor | None]:
    """The gradients of the operands that are wanted; none of those that the call did not use."""
    leaves = [t.detach().requires_grad_(w) for t, w in zip(operands, wanted, strict=True)]
    places = [i for i, w in enumerate(wanted) if w]
    again = nullcontext() if draw == -1 and state is None else _draws(draw, step_key, state)
    with LOCK, differentiating(), again:
        results = called(name, number).run(leaves)
        passed = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
        if not passed:
            return [None] * len(places)
        ends, weights = zip(*passed)
        found = torch.autograd.grad(ends, [leaves[i] for i in places], weights, allow_unused=True)
    PASSED.update((name, number, i) for i, g in zip(places, found, strict=True) if g is not None)
    return found


def _fake_gradients(
    grads: Any, operands: list[Tensor], wanted: list[bool], name: str, number: int, *state: Any, **draws: int
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, w in zip(operands, wanted, strict=True) if w]


@contextmanager
def differentiating() -> Iterator[None]:
    """Inside a kernel, where autograd is switched off, ops are recorded again."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "AutogradFunctionality", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def _apart(results: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    """The results, each in memory of its own, as an op must give them."""
    taken = {t.untyped_storage()._cdata for t in operands}
    own = []
    for result in results:
        key = result.untyped_storage()._cdata
        own.append(result.detach().clone() if key in taken else result.detach())
        taken.add(key)
    return own


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    operands, ctx.name, ctx.number = inputs
    ctx.save_for_backward(*operands)
    ctx.state, ctx.draws = None, {}
    ctx.set_materialize_grads(False)  # a result that is not used has no gradient
    ctx.mark_non_differentiable(*(t for t in output if not _floats(t)))


def _setup_drawing(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _setup(ctx, inputs, output)
    ctx.state = getattr(BEFORE, "state", None)


def _setup_seeded(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: list[Tensor]) -> None:
    _setup(ctx, inputs, output)
    ctx.draws = {word: keyword_only_inputs[word] for word in ("draw", "step_key")}


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], None, None]:
    wanted = [w and _floats(t) for w, t in zip(ctx.needs_input_grad[0], ctx.saved_tensors, strict=True)]
    call = grads, list(ctx.saved_tensors), wanted, ctx.name, ctx.number, ctx.state
    plain = not any(isinstance(t, FakeTensor) or t.is_meta for t in ctx.saved_tensors)
    made = iter(_found(*call, **ctx.draws) if plain else torch.ops.autopar.opaque_backward(*call, **ctx.draws))
    return [next(made) if w else None for w in wanted], None, None


def _floats(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


SIGNATURE = "(Tensor[] operands, str name, int number{}) -> Tensor[]"
SEED = f", *, {PLACE}"  # where a piece lies is not asked: a call that draws is whole
kernels(f"opaque{SIGNATURE.format('')}", _forward, _fake)
kernels(f"opaque_drawing{SIGNATURE.format('')}", _drawing, _fake, (torch.Tag.nondeterministic_seeded,))
kernels(f"opaque_seeded{SIGNATURE.format(SEED)}", _seeded, _fake)
kernels(
    "opaque_backward(Tensor?[] grads, Tensor[] operands, bool[] wanted, str name, int number, Tensor? state=None, *, "
    "int draw=-1, int step_key=0) -> Tensor[]",
    _gradients,
    _fake_gradients,
)
for _name, _setting in (("opaque", _setup), ("opaque_drawing", _setup_drawing), ("opaque_seeded", _setup_seeded)):
    torch.library.register_autograd(f"autopar::{_name}", _backward, setup_context=_setting, lib=LIBRARY)

opaque = torch.ops.autopar.opaque.default
drawing = torch.ops.autopar.opaque_drawing.default
seeded = torch.ops.autopar.opaque_seeded.default
OPAQUE = (opaque, drawing, seeded)
"""A call that draws no random numbers; one that draws torch's; one that draws by step and number, as in all plans."""


@register_flop_formula([torch.ops.autopar.opaque, torch.ops.autopar.opaque_drawing, torch.ops.autopar.opaque_seeded])
def _flops(operands: Sequence[Any], name: str, number: int, *args: Any, **kwargs: Any) -> int:
    return called(name, number).flops(operands)


@register_flop_formula(torch.ops.autopar.opaque_backward)
def _backward_flops(
    grads: Any, operands: Sequence[Any], wanted: Any, name: str, number: int, *args: Any, **kwargs: Any
) -> int:
    return 2 * called(name, number).flops(operands)
