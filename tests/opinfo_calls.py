"""Calls of aten ops that torch's OpInfo samples make: as capture has them, as PREPARE does, as they reach a kernel."""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.testing._internal.common_methods_invocations as common
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autopar.errors import AutoparError
from autopar.passes import PREPARE, run
from autopar.passes.composites_to_parts import Recorder
from autopar.passes.facts import call as make_call

EVEN = {"L": 24, "M": 12, "S": 4, "XS": 2}  # lengths that samples are made of; torch's own (20, 10, 5, 3) are odd
BY_THREE = {"L": 24, "M": 12, "S": 6, "XS": 3}
ODD = {"L": 20, "M": 10, "S": 5, "XS": 3}
UNSET = ("empty", "resize", "new_empty", "fill_empty")  # what they make has no value


def _seed(seed: int) -> None:
    """The CPU's generators alone."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


# Both read the source of the whole stack, for every sample: most of the time that samples take.
common_utils.extract_test_fn = core.extract_test_fn = lambda: None
common_utils.set_rng_seed = _seed


@dataclass(frozen=True)
class Call:
    """One aten op with the tensors it was given."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def key(self) -> str:
        """What tells calls apart: op, shapes, dtypes and everything that is no tensor."""
        shown = tree_map(lambda a: (tuple(a.shape), a.dtype) if isinstance(a, Tensor) else a, (self.args, self.kwargs))
        return f"{self.target} {shown}"

    @property
    def large(self) -> bool:
        """Whether there is anything to divide: a dim of more than one element."""
        return any(n > 1 for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor) for n in t.shape)


def in_regime(call: Call, regime: str) -> Call:
    """The call on other numbers: ``large`` and ``small`` ones, or whole numbers, many of them 0, equal or negative."""

    def change(a: Any) -> Any:
        if not isinstance(a, Tensor) or not (a.dtype.is_floating_point or a.dtype.is_complex):
            return a
        return {"normal": a, "large": a * 1e3, "small": a * 1e-4, "whole": torch.sgn(a) * (a.abs() / 3).round()}[regime]

    return Call(call.target, *tree_map(change, (call.args, call.kwargs)))


REFUSED = (RuntimeError, NotImplementedError, AssertionError, TypeError, IndexError, AutoparError)
"""What samples raise that do not run on this machine, or calls that cannot be captured."""
REGIMES = ("normal", "large", "small", "whole")


@contextlib.contextmanager
def sizes(lengths: dict[str, int]) -> Iterator[None]:
    """Samples are made of these lengths."""
    before = {name: getattr(core, name) for name in lengths}
    for module in (core, common):
        for name, length in lengths.items():
            setattr(module, name, length)
    try:
        yield
    finally:
        for module in (core, common):
            for name, length in before.items():
                setattr(module, name, length)


def op_infos() -> dict[str, list[Any]]:
    """Every OpInfo of torch by its name (variants together)."""
    found: dict[str, list[Any]] = {}
    for info in common.op_db:
        found.setdefault(info.name, []).append(info)
    return found


def samples(info: Any, most: int) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """(op, args, kwargs) of at most ``most`` samples of one OpInfo, spread over those without dropout, in float64."""
    kinds = [d for d in (torch.float64, torch.complex128, torch.int64, torch.bool) if d in info.dtypes]
    if not kinds:
        return
    torch.manual_seed(0)
    try:
        every = [s for s in info.sample_inputs("cpu", kinds[0], requires_grad=False) if not s.kwargs.get("dropout_p")]
    except (RuntimeError, IndexError, ValueError):
        return  # not at these lengths
    for sample in every[:: max(1, -(-len(every) // most))]:
        yield info.op, (sample.input, *sample.args), dict(sample.kwargs)


def captured_calls(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    """The ops that capture would put into a graph."""
    with torch.no_grad(), enable_python_dispatcher(), Recorder() as recorder:
        op(*args, **kwargs)
    return [Call(p.target, p.args, p.kwargs) for p in recorder.parts if p.target.namespace in ("aten", "autopar")]


def dispatched_calls(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    """The ops that reach a kernel: composites are taken apart."""
    calls: list[Call] = []

    class Keep(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(Call(func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Keep():
        op(*args, **kwargs)
    return [c for c in calls if c.target.namespace == "aten"]


def judgeable(call: Call) -> bool:
    """Whether the op is a function of its arguments, whose results have values."""
    target = call.target
    attention = target is torch.ops.aten.scaled_dot_product_attention.default  # random with dropout only
    random = torch.Tag.nondeterministic_seeded in target.tags and not attention
    unset = any(word in str(target) for word in UNSET)
    return not (target._schema.is_mutable or random or unset)


def prepared_calls(call: Call) -> list[Call]:
    """What PREPARE makes of the call, with the tensors that each op is then given; raises where nothing can."""
    graph, given = fx.Graph(), []

    def placeholder(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        given.append(a)
        node = graph.placeholder(f"x{len(given)}")
        node.meta["val"] = a.to("meta")
        return node

    args, kwargs = tree_map(placeholder, (call.args, call.kwargs))
    like = fx.Node(graph, "", "placeholder", "x", (), {})
    made = make_call(graph, call.target, args, kwargs, like=like)
    outputs: tuple[fx.Node, ...] = (made,)
    if not isinstance(made.meta["val"], Tensor):
        outputs = tuple(make_call(graph, operator.getitem, (made, i), like=like) for i in range(len(made.meta["val"])))
    graph.output({"outputs": outputs, "buffers": {}})
    gm = fx.GraphModule(torch.nn.Module(), graph)
    gm.meta["batch_inputs"] = set()
    gm = run(gm, PREPARE)
    found: list[Call] = []

    class Keep(fx.Interpreter):
        def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if isinstance(target, torch._ops.OpOverload):
                found.append(Call(target, args, kwargs))
            return super().call_function(target, args, kwargs)

    with torch.no_grad():
        Keep(gm).run(*given)
    return found
