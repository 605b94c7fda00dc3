"""How one unit of a rank's program is run: its forward, and the backward that was made for it.

An *explicit* unit calls the two graphs that `differentiate` made of its class. Where a class cannot be traced, autograd
runs its forward graph instead and keeps what it needs; `Fallback` says where and why. Either way a unit holds no
parameter from forward to backward: it is given those again that it `reads`. Backward is one call, or two: `inputs`, and
some time later `weights`, whose graphs are made when they are first asked for.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.graph import _BoxedCodeGen
from torch.fx.graph_module import _forward_from_src

from autopar.passes.differentiate import Untraceable, differentiate
from autopar.passes.split_backward import Part, Parted, split_backward
from autopar.runtime.opaque import OPAQUE

if TYPE_CHECKING:
    from autopar.passes.differentiate import Differentiated
    from autopar.passes.split_units import UnitClass


@dataclass(frozen=True)
class Fallback:
    """A unit that autograd runs: the module in which its ops lie, and why it could not be traced."""

    fqn: str
    why: str


@dataclass(frozen=True)
class Gradient:
    """What backward gives one argument. ``fresh``: in memory of its own, so that it may be added to in place."""

    arg: int
    tensor: Tensor
    fresh: bool


Ready = Callable[[list[Any]], Sequence[Any]]
"""Takes one list of arguments, which it empties."""


class Unit:
    """One class of units; this one has a forward alone. ``reads``: the arguments that backward is given again;
    ``tangents``: the outputs of which it takes gradients; ``grads``: the arguments of which it may give some; ``why``:
    why autograd runs it, where it does."""

    reads: tuple[int, ...] = ()
    tangents: tuple[int, ...] = ()
    grads: tuple[int, ...] = ()
    why: str | None = None

    def __init__(self, kind: UnitClass) -> None:
        self.kind = kind

    def _ready(self, graph: fx.GraphModule, outputs: int) -> Ready:
        """How a graph is run. ``outputs``: of its results those that come first; the others are held."""
        return boxed(graph)

    @cached_property
    def _run(self) -> Ready:
        return self._ready(self.kind.graph, len(self.kind.flows))

    def run(self, args: list[Any]) -> Sequence[Tensor]:
        """The outputs alone, without anything for backward. Empties ``args``, so that each may go when it was read."""
        return self._run(args)

    def forward(self, args: list[Any]) -> tuple[Sequence[Tensor], Any]:
        """The outputs, and what to hold for backward. Empties ``args``."""
        raise NotImplementedError

    def backward(self, read: list[Any], held: Any, tangents: list[Tensor]) -> list[Gradient]:
        """``read``: the arguments that it reads; ``held``: of forward; one gradient for each of ``tangents``. Empties
        all three."""
        raise NotImplementedError

    @property
    def input_reads(self) -> tuple[int, ...]:
        """The arguments that `inputs` is given again: some of ``reads``, with all values among them."""
        return self.reads

    @property
    def weight_reads(self) -> tuple[int, ...]:
        """The arguments that `weights` is given again, none of them a value."""
        return ()

    def inputs(self, read: list[Any], held: Any, tangents: list[Tensor]) -> tuple[list[Gradient], Any]:
        """The first part of `backward`: the gradients of arguments that are no parameters, and what to carry to
        `weights`. This unit makes all at once. Empties all three."""
        found = self.backward(read, held, tangents)
        mine, carried = list[Gradient](), list[Gradient]()
        for gradient in found:
            (carried if self.kind.kinds[gradient.arg] == "parameter" else mine).append(gradient)
        return mine, carried

    def weights(self, read: list[Any], carried: Any) -> list[Gradient]:
        """The second part: the gradients of parameters. Empties both."""
        made = list(carried)
        carried.clear()
        return made


OPS = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")


def boxed(gm: fx.GraphModule) -> Ready:
    """The same graph as a function of one list of its arguments, which it empties. Its ops are bound once: looked up by
    ``torch.ops.aten.mm.default`` at every call, a small one would spend more than half of its time on names."""
    codegen = gm.graph._codegen
    gm.graph.set_codegen(_BoxedCodeGen())
    code = gm.graph.python_code("self")
    gm.graph.set_codegen(codegen)
    names = dict(code.globals)

    def bound(match: re.Match[str]) -> str:
        namespace, packet, overload = match.groups()
        name = f"{namespace}_{packet}_{overload}"
        names[name] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._op
        return name

    return partial(_forward_from_src(OPS.sub(bound, code.src), names), gm)


class Explicit(Unit):
    """Runs a forward and a backward graph."""

    def __init__(self, kind: UnitClass, made: Differentiated) -> None:
        super().__init__(kind)
        self.made, self.reads, self.tangents, self.grads = made, made.keeps, made.tangents, made.grads
        self.outputs = len(kind.flows)
        assert made.backward is not None
        taken = made.backward.graph.find_nodes(op="placeholder")
        self.strides = [n.meta["val"].stride() for n in taken[len(taken) - len(made.tangents) :]]

    @cached_property
    def _forward(self) -> Ready:
        return self._ready(self.made.forward, self.outputs)

    @cached_property
    def _backward(self) -> Ready:
        assert self.made.backward is not None
        return self._ready(self.made.backward, len(self.grads))

    @cached_property
    def parted(self) -> Parted:
        """Its backward in two parts."""
        return split_backward(self.made, self.kind.kinds)

    @cached_property
    def _inputs(self) -> Ready | None:
        part = self.parted.inputs
        return self._ready(part.graph, len(part.grads)) if part else None

    @cached_property
    def _weights(self) -> Ready | None:
        part = self.parted.weights
        return self._ready(part.graph, len(part.grads)) if part else None

    @property
    def input_reads(self) -> tuple[int, ...]:
        return self.parted.held

    @property
    def weight_reads(self) -> tuple[int, ...]:
        return self.parted.weights.reads if self.parted.weights else ()

    def forward(self, args: list[Any]) -> tuple[Sequence[Tensor], Any]:
        made = self._forward(args)
        return made[: self.outputs], list(made[self.outputs :])

    def backward(self, read: list[Any], held: Any, tangents: list[Tensor]) -> list[Gradient]:
        return _gradients(self.made, self._backward(self._given(read, held, tangents)))

    def inputs(self, read: list[Any], held: Any, tangents: list[Tensor]) -> tuple[list[Gradient], Any]:
        given = self._given(read, held, tangents)
        if self._inputs is None:
            return [], given
        made, part = self._inputs(given), self.parted.inputs
        assert part is not None
        n = len(part.grads)
        return _gradients(part, made[:n]), list(made[n:])

    def weights(self, read: list[Any], carried: Any) -> list[Gradient]:
        given = [*read, *carried]
        read.clear()
        carried.clear()
        part = self.parted.weights
        return [] if self._weights is None or part is None else _gradients(part, self._weights(given))

    def _given(self, read: list[Any], held: Any, tangents: list[Tensor]) -> list[Any]:
        """What a graph of backward is called with."""
        given = [*read, *held, *(laid_out(g, strides) for g, strides in zip(tangents, self.strides, strict=True))]
        for emptied in (read, held, tangents):
            emptied.clear()
        return given


def _gradients(of: Differentiated | Part, made: Sequence[Tensor | None]) -> list[Gradient]:
    return [Gradient(arg, g, fresh) for arg, g, fresh in zip(of.grads, made, of.fresh, strict=True) if g is not None]


def laid_out(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    """With the strides that its graph was traced for."""
    if gradient.stride() == strides:
        return gradient
    return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


class Autograd(Unit):
    """Runs the forward graph under autograd. What is kept of a parameter is kept as a view to be taken of it again;
    where anything is to be recomputed, all of the forward is. What an opaque call of it did not use has zeros, so that
    all ranks have the same gradients."""

    def __init__(self, kind: UnitClass, why: str) -> None:
        super().__init__(kind)
        self.why = why
        self.grads = tuple(i for i, wanted in enumerate(kind.needs) if wanted)
        self.tangents = tuple(i for i, flows in enumerate(kind.flows) if flows)
        again = kind.recompute != "none"
        self.reads = tuple(i for i, word in enumerate(kind.kinds) if again or word == "parameter")
        opaque = any(n.target in OPAQUE for n in kind.graph.graph.nodes)
        self.filled = [n.meta["val"] for n in kind.graph.graph.find_nodes(op="placeholder")] if opaque else None

    def forward(self, args: list[Any]) -> tuple[Sequence[Tensor], Any]:
        if self.kind.recompute != "none":
            return self.run(args), None
        read: list[Any] = []  # filled by backward
        places: dict[int, list[int]] = {}
        for place, i in enumerate(self.reads):
            places.setdefault(args[i].untyped_storage()._cdata, []).append(place)
        starts = [args[i].storage_offset() for i in self.reads]

        def pack(tensor: Tensor) -> Any:
            at = places.get(tensor.untyped_storage()._cdata, ())
            if len(at) != 1:
                return tensor
            return at[0], tensor.size(), tensor.stride(), tensor.storage_offset() - starts[at[0]]

        def unpack(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            place, size, stride, offset = kept
            return torch.as_strided(read[place], size, stride, read[place].storage_offset() + offset)

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            edges, outs = self._traced(args)
        args.clear()
        return [out.detach() for out in outs], (edges, [outs[i] for i in self.tangents], read)

    def backward(self, read: list[Any], held: Any, tangents: list[Tensor]) -> list[Gradient]:
        if held is None:
            with torch.enable_grad():
                edges, outs = self._traced(read)
            outs = [outs[i] for i in self.tangents]
        else:
            edges, outs, given = held
            given.extend(read)
        found = torch.autograd.grad(outs, edges, tangents, allow_unused=True)
        read.clear()
        tangents.clear()
        if self.filled is not None:
            like = [self.filled[i] for i in self.grads]
            found = tuple(outs[0].new_zeros(t.shape, dtype=t.dtype) if g is None else g for t, g in zip(like, found))
        return [Gradient(i, g, False) for i, g in zip(self.grads, found, strict=True) if g is not None]

    def _traced(self, args: list[Any]) -> tuple[list[Any], list[Tensor]]:
        """The outputs with their graph, and where in it the arguments come in; it does not hold these."""
        args = list(args)
        for i in self.grads:
            args[i] = _Enter.apply(args[i].new_empty(0).requires_grad_(), args[i])  # type: ignore[no-untyped-call]
        edges = [torch.autograd.graph.get_gradient_edge(args[i]) for i in self.grads]
        return edges, list(self.kind.graph(*args))


class _Enter(torch.autograd.Function):
    """A tensor into the graph by an edge that does not hold it, as a leaf would."""

    @staticmethod
    def forward(ctx: Any, edge: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


MOST = 512  # classes that are remembered
_UNITS: OrderedDict[Hashable, Unit] = OrderedDict()


def unit_of(kind: UnitClass, device: torch.device = torch.device("cpu")) -> Unit:  # noqa: B008
    """How a class is run on ``device``; made once for all programs that have its like."""
    key = (kind if kind.key is None else kind.key, device)
    if key not in _UNITS:
        _UNITS[key] = _made(kind, device)
        if len(_UNITS) > MOST:
            _UNITS.popitem(last=False)
    return _UNITS[key]


def _made(kind: UnitClass, device: torch.device) -> Unit:
    if not kind.trains:
        return Unit(kind)
    try:
        made = differentiate(kind, device)
    except Untraceable as error:
        return Autograd(kind, str(error))
    return Explicit(kind, made) if made.backward is not None else Unit(kind)


__all__ = ["Autograd", "Explicit", "Fallback", "Gradient", "Unit", "unit_of"]
