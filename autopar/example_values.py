"""The values that a trace's tensors have on the example inputs: its graph so far, run node by node as it grows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

INPUT, PARAMETER, RANDOM = "input", "parameter", "random number"


class Unknown(Exception):
    """The value cannot be found: the examples have none, or the graph does what cannot be run here."""


class ExampleValues:
    """``given``: the real tensors behind the graph's placeholders in their order, which is that of torch.export
    (parameters, buffers, inputs), and what each is (`INPUT`, `PARAMETER`)."""

    def __init__(self, given: Sequence[tuple[Tensor, str]]) -> None:
        self.given = list(given)
        self.done: dict[fx.Node, Any] = {}
        self.depends: dict[int, frozenset[str]] = {}  # by the storage of real tensors: what their values hang on
        self.unknown: str = ""

    def of(self, tensor: Tensor) -> Tensor:
        """The real tensor that ``tensor`` stands for. Raises `Unknown`."""
        tracer = _tracer()
        node = _node(tensor, tracer)
        with untraced():
            self._catch_up(tracer)
        if node is None or node not in self.done:
            raise Unknown(self.unknown or "it is made outside of the graph")
        value = self.done[node]
        assert isinstance(value, Tensor)
        return value

    def hangs_on(self, real: Tensor) -> frozenset[str]:
        """What a value that `of` gave depends on; nothing where it is the same in every step."""
        return self.depends.get(_storage(real), frozenset())

    def _catch_up(self, tracer: Any) -> None:
        places = tracer.graph.find_nodes(op="placeholder")
        if [n.meta["val"].shape for n in places] != [t.shape for t, _ in self.given]:
            raise Unknown("the trace has other inputs than the model")
        real = dict(zip(places, self.given, strict=True))
        for node in tracer.graph.nodes:
            if node in self.done or self.unknown:
                continue
            try:
                with torch.no_grad():
                    self._run(node, tracer, real)
            except Exception as error:
                self.unknown = f"{node.target} cannot be run on the example inputs ({type(error).__name__}: {error})"

    def _run(self, node: fx.Node, tracer: Any, real: Mapping[fx.Node, tuple[Tensor, str]]) -> None:
        if node.op == "placeholder":
            value, kind = real[node]
            self.done[node] = value.detach().to("cpu", node.meta["val"].dtype, copy=kind == INPUT)
            self.depends[_storage(self.done[node])] = frozenset({kind})
            return
        if node.op == "get_attr":
            value = getattr(tracer.root, str(node.target))
            self.done[node] = getattr(value, "constant", None) if _fake(value) else value.clone()
            return
        if node.target is torch._C._set_grad_enabled:
            return
        if not isinstance(node.target, torch._ops.OpOverload) and getattr(node.target, "__name__", "") != "getitem":
            raise Unknown(f"{node.target} is no op")
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.done.__getitem__)
        result = self.done[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        kinds = frozenset[str]().union(*(self.hangs_on(t) for t in read))
        if isinstance(node.target, torch._ops.OpOverload):
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                kinds |= {RANDOM}
            if node.target._schema.is_mutable:
                made += read
        for tensor in made:
            self.depends[_storage(tensor)] = self.hangs_on(tensor) | kinds


@contextmanager
def untraced() -> Iterator[None]:
    """Inside, torch computes on real tensors, and nobody looks on or says that a model is exported."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.random.fork_rng([]), not_exporting():
        yield


@contextmanager
def not_exporting() -> Iterator[None]:
    """Models that ask whether they are exported are told no."""
    with (
        patch.object(torch.compiler, "_is_compiling_flag", False),
        patch.object(torch.compiler, "_is_exporting_flag", False),
    ):
        yield


def _tracer() -> Any:
    mode = get_proxy_mode()
    if mode is None:
        raise Unknown("nothing is traced")
    return mode.tracer


def _node(tensor: Tensor, tracer: Any) -> fx.Node | None:
    slot = get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node


def _fake(value: Any) -> bool:
    return isinstance(value, torch._subclasses.fake_tensor.FakeTensor)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
