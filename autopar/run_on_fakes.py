"""The emitted body run on fake tensors, node by node: what autograd keeps of a microbatch, and its FLOPs.

Storages count once. Those of parameters, buffers and inputs are held anyway and do not count; those of weights that are
gathered at each use are apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from autopar.passes.divide_work import has_flops, is_recurrent, recurrent_flops

if TYPE_CHECKING:
    from autopar.passes.lower import Local

PASSED_ON = ("replicate", "invariant")
"""Ops that return their operand where they can; their fakes cannot. (``keep`` does on one rank, and writes zeros on all
others: what is counted is the rank that holds most.)"""


@dataclass(frozen=True)
class Ran:
    """One microbatch of one rank.

    ``flops``: of matmuls, attention and convolutions, forward and backward, as torch's counter has them; ``saved``:
    bytes that autograd keeps, weights gathered at each use (``gathered``) apart; ``live``: without gradients, the most
    bytes of results alive at once; ``reached``: parameters that the loss has a gradient for.
    """

    flops: int = 0
    saved: int = 0
    gathered: int = 0
    live: int = 0
    reached: frozenset[str] = frozenset()


def run_on_fakes(
    local: Local, graph: fx.GraphModule, *, train: bool = True, at_use: frozenset[str] = frozenset()
) -> Ran:
    """Run a body of ``local``. ``train=False``: forward only, without gradients; ``at_use``: the parameters that are
    gathered at each use, whose copies count as `Ran.gathered`."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(train):
        inputs = _fake_inputs(local, graph, train)
        used = [t for u, t in zip(local.parameters, inputs, strict=False) if u.fqn in at_use]
        run = Run(graph, inputs, used)
        with torch.autograd.graph.saved_tensors_hooks(run.pack, lambda held: held.tensor):
            outputs, _ = run.run(*inputs)
        saved, gathered = run.bytes_held()
        reached = _reached(outputs[0]) if train and outputs else set()
    names = (u.fqn for u, t in zip(local.parameters, inputs, strict=False) if id(t) in reached)
    return Ran(run.flops, saved, gathered, run.most, frozenset(names))


def _fake_inputs(local: Local, graph: fx.GraphModule, train: bool) -> list[Any]:
    """What the placeholders of a body take, in local shapes."""
    trainable = [u.trainable and train for u in local.parameters]
    inputs: list[Any] = []
    for i, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        val = node.meta.get("val")
        if isinstance(val, Tensor):
            val = torch.empty(val.shape, dtype=val.dtype).requires_grad_(i < len(trainable) and trainable[i])
        inputs.append(val)
    return inputs


class _Held:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Run(fx.Interpreter):
    """Runs a body and knows of every storage whether it is held anyway, or is that of a gathered weight."""

    def __init__(self, graph: fx.GraphModule, inputs: list[Any], gathered: list[Tensor]) -> None:
        super().__init__(graph)
        self.held: list[weakref.ref[_Held]] = []
        self.stands_for: dict[int, int] = {}  # key of a storage -> of the one that it shares in a real run
        self.weights = {_key(t) for t in gathered}
        self.own = {_key(t) for t in _tensors(inputs)} - self.weights
        self.alive: list[torch.UntypedStorage] = []  # so that no key above is given to another storage
        self.live: dict[fx.Node, dict[int, int]] = {}
        self.most = self.flops = 0
        self.known: dict[Any, int] = {}

    def pack(self, tensor: Tensor) -> _Held:
        """Keep a tensor for the backward, as autograd does, and remember it."""
        held = _Held(tensor)
        self.held.append(weakref.ref(held))
        return held

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and note what its results share and derive from."""
        if n.op != "call_function":
            return super().run_node(n)
        made = super().run_node(n)
        if has_flops(n.target):
            self.flops += self._flops(n)
        elif getattr(n.target, "namespace", "") == "autopar":
            self._note_change(n, made)
        if not torch.is_grad_enabled():
            self._note_live(n, made)
        return made

    def _note_change(self, n: fx.Node, made: Any) -> None:
        """A change of layout of a weight is a weight; one that returns its operand makes no storage."""
        x = self.env.get(n.args[0]) if n.args and isinstance(n.args[0], fx.Node) else None
        if not isinstance(x, Tensor) or not isinstance(made, Tensor) or len(n.all_input_nodes) != 1:
            return
        name = n.target._schema.name.split("::")[1]  # type: ignore[union-attr]
        source, result = self._root(_key(x)), _key(made)
        if name in PASSED_ON and x.is_contiguous():
            self.stands_for[result] = source
        elif source in self.weights:
            self.weights.add(result)
        self.alive += [made.untyped_storage(), x.untyped_storage()]

    def _root(self, key: int) -> int:
        return self.stands_for.get(key, key)

    def _note_live(self, n: fx.Node, made: Any) -> None:
        self.live[n] = {self._root(_key(t)): t.untyped_storage().nbytes() for t in _tensors(made)}
        now = {k: size for sizes in self.live.values() for k, size in sizes.items() if k not in self.own}
        self.most = max(self.most, sum(now.values()))
        for dead in self.user_to_last_uses.get(n, ()):
            self.live.pop(dead, None)

    def _flops(self, n: fx.Node) -> int:
        """Forward and backward of one op by itself; equal calls are counted once."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        described = tree_map(
            lambda a: (tuple(a.shape), a.dtype, a.requires_grad) if isinstance(a, Tensor) else a, (args, kwargs)
        )
        key = (n.target, repr(described))
        if key not in self.known:
            self.known[key] = _count(n.target, args, kwargs)
        return self.known[key]

    def bytes_held(self) -> tuple[int, int]:
        """What autograd holds now: (results, gathered weights)."""
        sizes: dict[int, int] = {}
        for reference in self.held:
            held = reference()
            if held is not None:
                sizes[self._root(_key(held.tensor))] = held.tensor.untyped_storage().nbytes()
        free = {key: size for key, size in sizes.items() if key not in self.own}
        gathered = sum(size for key, size in free.items() if key in self.weights)
        return sum(free.values()) - gathered, gathered


def _count(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """On the meta device, where attention is two products that the counter knows; it knows no fused kernel of CPUs."""
    args, kwargs = tree_map(_alone, (args, kwargs))
    if is_recurrent(target):
        return recurrent_flops(args) * (3 if any(t.requires_grad for t in _tensors(args)) else 1)
    with FlopCounterMode(display=False) as counter:
        made = [t for t in _tensors(target(*args, **kwargs)) if t.requires_grad]
        torch.autograd.backward(made, [torch.empty_like(t) for t in made])
    return int(counter.get_total_flops())


def _alone(a: Any) -> Any:
    if not isinstance(a, Tensor):
        return a
    like = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta")
    return like.requires_grad_(a.requires_grad)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(made: Any) -> Iterator[Tensor]:
    return (t for t in tree_leaves(made) if isinstance(t, Tensor))


def _reached(loss: Tensor) -> set[int]:
    """The ids of the leaves that a backward would give a gradient."""
    seen: set[Any] = set()
    found: set[int] = {id(loss)} if loss.grad_fn is None and loss.requires_grad else set()
    waiting = [loss.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            found.add(id(function.variable))
        waiting += [f for f, _ in function.next_functions]
    return found


__all__ = ["Ran", "run_on_fakes"]
