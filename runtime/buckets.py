"""Buckets: parameters that go the same way from rest to use do so together, and their gradients go back together.

The way of a parameter is a chain of library ops (`lower.enter_graph`). Parameters of one dtype whose chains are the
same ops over the same groups share a bucket of up to `CAP` bytes: each op then sends one flat buffer for all of them.
Pieces are padded, cut and joined by the same functions as in the ops themselves. An op that has no link of its own
runs as it is, for one parameter alone.

A bucket under way is a `Flight`: its collective is launched, and waited for where the tensors are needed.

Every rank makes the same buckets in the same order: they depend on sizes of the largest rank only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from autopar.runtime.collectives import sent
from autopar.runtime.library import ADJOINTS
from autopar.runtime.pieces import Runs, exchange, join, pieces, split, total, widen

if TYPE_CHECKING:
    from autopar.passes.lower import Local, ParameterUse

CAP = 25 * 2**20  # bytes of a bucket as used, DDP's default; a larger parameter has a bucket to itself

Moving = Generator[None, None, list[Tensor]]
"""Yields after each collective that it has launched; returns the tensors."""


class Flight:
    """What a bucket brings, under way: its first collective is launched. ``members``: places in `Local.parameters`."""

    def __init__(self, members: Sequence[int], moving: Moving) -> None:
        self.members, self._moving = tuple(members), moving
        self._done: list[Tensor] | None = None
        self._advance()

    def _advance(self) -> None:
        try:
            next(self._moving)
        except StopIteration as stop:
            self._done = stop.value

    def land(self) -> list[tuple[int, Tensor]]:
        """(member, tensor) of all, once they may be read. Collectives after the first are launched and waited for."""
        while self._done is None:
            self._advance()
        landed, self._done = self._done, []
        return list(zip(self.members, landed, strict=True))


@dataclass(frozen=True)
class Bucket:
    """``members``: places in `Local.parameters`; ``chains``: the links of each, equal in `Link.key`."""

    members: tuple[int, ...]
    chains: tuple[tuple[Link, ...], ...]

    @property
    def passes_on(self) -> bool:
        """Whether a gradient may come back as the tensor that it was."""
        return all(isinstance(link, (Alone, Cast, Invariant)) for link in self.chains[0])

    def enter(self, rests: Sequence[Tensor]) -> Flight:
        """The members as units read them, from their pieces at rest; may bring what it was given."""
        return Flight(self.members, self._there(list(rests)))

    def leave(self, gradients: Sequence[Tensor | None]) -> Flight:
        """The members' gradients as they rest, contiguous; those that are None stay where they are."""
        there = [i for i, g in enumerate(gradients) if g is not None]
        chains = [self.chains[i] for i in there]
        return Flight([self.members[i] for i in there], _back(chains, [g for g in gradients if g is not None]))

    def _there(self, tensors: list[Tensor]) -> Moving:
        for links in zip(*self.chains, strict=True):
            tensors = yield from links[0].forward(links, tensors)
        return tensors


def _back(chains: Sequence[tuple[Link, ...]], tensors: list[Tensor]) -> Moving:
    for links in reversed(list(zip(*chains, strict=True))):
        step = links[0].backward(links, tensors)
        del tensors  # held by the link alone, until it is sent
        tensors = yield from step
    return [t.contiguous() for t in tensors]


def buckets(
    local: Local,
    members: Iterable[int],
    cap: int = CAP,
    apart: Callable[[ParameterUse], Hashable] = lambda use: None,
) -> tuple[Bucket, ...]:
    """The buckets of some parameters, filled and listed in the order of ``members``; those that are used as they rest
    have none. ``apart``: what members of one bucket have in common besides their way."""
    made: list[tuple[list[int], list[tuple[Link, ...]]]] = []
    opened: dict[Hashable, tuple[int, int]] = {}  # key -> (place in made, bytes so far)
    for i in members:
        use = local.parameters[i]
        if use.fqn not in local.enter:
            continue
        links = in_dtypes(chain(local.enter[use.fqn]), use)
        key, size = (use.dtype, apart(use), tuple(link.key for link in links)), _size(local, use)
        place, full = opened.get(key, (-1, cap))
        if place < 0 or full + size > cap:
            place, full = len(made), 0
            made.append(([], []))
        made[place][0].append(i)
        made[place][1].append(links)
        opened[key] = (place, full + size)
    return tuple(Bucket(tuple(places), tuple(chains)) for places, chains in made)


def _size(local: Local, use: ParameterUse) -> int:
    """Bytes as used on the rank that holds most, so that all ranks agree."""
    first = (0,) * len(local.mesh.axes)
    return math.prod(use.use.local_shape(use.shape, local.mesh, first)) * use.value.dtype.itemsize


def chain(graph: fx.GraphModule) -> tuple[Link, ...]:
    """The links of an enter graph."""
    found: list[Link] = []
    waits = False
    for node in graph.graph.nodes:
        if node.op != "call_function" or waits:
            waits = False
            continue
        namespace, name = node.target._schema.name.split("::")
        if namespace == "aten":
            continue  # the cast, which `in_dtypes` has
        link = _link(name, node.args[1:])
        waits = link is not None and name.startswith("start_")  # the node after it, of the same link
        found.append(link or Alone(node.target, tuple(node.args[0].meta["val"].shape), tuple(node.args[1:])))
    return tuple(found)


def in_dtypes(links: tuple[Link, ...], use: ParameterUse) -> tuple[Link, ...]:
    """The links with the casts of mixed precision: of the value before it moves; of the gradient, which may have added
    up in the dtype of rest, before it moves and afterwards."""
    v = use.value
    if v.rest_dtype is None and v.reduce_dtype is None:
        return links
    last = (Cast(v.dtype, v.reduced.dtype),) if links else ()
    return (Cast(v.dtype, v.resting.dtype), *links, *last)


def _link(name: str, args: Sequence[Any]) -> Link | None:
    if name == "replicate":
        return Replicate(*args)
    if name == "invariant":
        return Invariant(*args)
    if name == "start_all_gather":
        group, n, c, dim, parts, dual, *items = args
        return Gather(group, n, c, dim, tuple(parts), dual, *items)
    if name == "start_all_to_all":
        group, n, c, dim, parts, to_dim, to_parts, *items = args
        return Recut(group, n, c, dim, tuple(parts), tuple(to_parts), *items) if dim == to_dim else None
    return None


class Link:
    """One op of a chain. ``forward`` and ``backward`` do it for all members of a bucket at once, each of which has a
    link of its own; ``self`` is any of them. What they are given they let go of once it is sent. Groups, their size
    ``n`` and the place ``c`` in them are the same in all."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What members of one bucket have in common."""
        raise NotImplementedError

    def forward(self, links: Sequence[Any], tensors: Sequence[Tensor]) -> Moving:
        """Values one step nearer to use."""
        raise NotImplementedError

    def backward(self, links: Sequence[Any], gradients: Sequence[Tensor]) -> Moving:
        """Gradients one step nearer to rest."""
        raise NotImplementedError


@dataclass(frozen=True)
class Cast(Link):
    """Values go on in ``dtype``, gradients back in ``gradient``."""

    dtype: torch.dtype
    gradient: torch.dtype

    @property
    def key(self) -> tuple[Any, ...]:
        return "cast", self.dtype, self.gradient

    def forward(self, links: Sequence[Cast], tensors: Sequence[Tensor]) -> Moving:
        yield from ()
        return [t.to(self.dtype) for t in tensors]

    def backward(self, links: Sequence[Cast], gradients: Sequence[Tensor]) -> Moving:
        yield from ()
        return [g.to(self.gradient) for g in gradients]


@dataclass(frozen=True)
class Replicate(Link):
    """I->R: gradients are summed."""

    group: str

    @property
    def key(self) -> tuple[Any, ...]:
        return "replicate", self.group

    def forward(self, links: Sequence[Replicate], tensors: Sequence[Tensor]) -> Moving:
        yield from ()
        return [t.contiguous() for t in tensors]

    def backward(self, links: Sequence[Replicate], gradients: Sequence[Tensor]) -> Moving:
        if len(gradients) == 1:  # into a new tensor: a gradient may share its memory
            (own,) = gradients
            return [(yield from sent("all_reduce", self.group, own.contiguous(), "sum"))]
        shapes, flat = [g.shape for g in gradients], torch.cat([g.reshape(-1) for g in gradients])
        del gradients
        return _cut((yield from sent("all_reduce_", self.group, flat, "sum")), shapes)


@dataclass(frozen=True)
class Invariant(Link):
    """R->I: the gradient is that of coordinate 0."""

    c: int

    @property
    def key(self) -> tuple[Any, ...]:
        return "invariant", self.c

    def forward(self, links: Sequence[Invariant], tensors: Sequence[Tensor]) -> Moving:
        yield from ()
        return [t.contiguous() for t in tensors]

    def backward(self, links: Sequence[Invariant], gradients: Sequence[Tensor]) -> Moving:
        yield from ()
        if self.c:
            return [torch.zeros_like(g, memory_format=torch.contiguous_format) for g in gradients]
        return [g.contiguous() for g in gradients]


@dataclass(frozen=True)
class Gather(Link):
    """S->R (``dual="reduce_scatter"``), S->I (``"slice"``): the pieces of all ranks; gradients are summed, or cut."""

    group: str
    n: int
    c: int
    dim: int
    parts: tuple[int, ...]
    dual: str
    items: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        return "gather", self.group, self.dual

    @property
    def held(self) -> tuple[Runs, ...]:
        """What each coordinate holds of ``dim``; 0 holds most."""
        return pieces(list(self.parts), self.n, self.items)

    def forward(self, links: Sequence[Gather], tensors: Sequence[Tensor]) -> Moving:
        padded = [widen(t, link.dim, total(link.held[0])) for link, t in zip(links, tensors, strict=True)]
        flat = _joined([p.reshape(-1) for p in padded])
        shapes = [p.shape for p in padded]
        del padded
        every = yield from sent("all_gather_into_tensor", self.group, flat, self.n)
        stacks = _cut(every.view(self.n, -1), shapes)
        return [join(stack, link.dim, link.held) for link, stack in zip(links, stacks, strict=True)]

    def backward(self, links: Sequence[Gather], gradients: Sequence[Tensor]) -> Moving:
        stacks = [split(g, k.dim, k.held, total(k.held[0])) for k, g in zip(links, gradients, strict=True)]
        if self.dual == "slice":
            own = [stack[self.c] for stack in stacks]
        else:
            shapes = [s.shape[1:] for s in stacks]
            flat = _joined([stack.reshape(self.n, -1) for stack in stacks]).view(-1)
            del stacks, gradients
            own = _cut((yield from sent("reduce_scatter_tensor", self.group, flat, "sum", self.n)), shapes)
        cut = (t.narrow(k.dim, 0, total(k.held[k.c])) for k, t in zip(links, own, strict=True))
        return [t.clone(memory_format=torch.contiguous_format) for t in cut]


@dataclass(frozen=True)
class Recut(Link):
    """S->S' of one dim: the ranks exchange pieces, and pieces of gradients the other way."""

    group: str
    n: int
    c: int
    dim: int
    parts: tuple[int, ...]
    to_parts: tuple[int, ...]
    items: int = 0
    to_items: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        return "recut", self.group

    def forward(self, links: Sequence[Recut], tensors: Sequence[Tensor]) -> Moving:
        given, got, widths = zip(*(link.messages for link in links), strict=True)
        return (yield from self._swap(links, tensors, given, got, widths))

    def backward(self, links: Sequence[Recut], gradients: Sequence[Tensor]) -> Moving:
        given, got, widths = zip(*(link.messages for link in links), strict=True)
        return (yield from self._swap(links, gradients, got, given, widths))

    @property
    def messages(self) -> tuple[tuple[Runs, ...], tuple[Runs, ...], int]:
        """What goes to each coordinate and comes from each, and the longest message of any pair."""
        return exchange(self.parts, self.to_parts, self.n, self.c, self.items, self.to_items)

    def _swap(
        self,
        links: Sequence[Recut],
        tensors: Sequence[Tensor],
        given: Sequence[tuple[Runs, ...]],
        got: Sequence[tuple[Runs, ...]],
        widths: Sequence[int],
    ) -> Moving:
        stacks = [split(t, k.dim, runs, w) for t, k, runs, w in zip(tensors, links, given, widths, strict=True)]
        flat, ones = _joined([stack.reshape(self.n, -1) for stack in stacks]), [1] * self.n
        shapes = [s.shape[1:] for s in stacks]
        del stacks
        back = _cut((yield from sent("all_to_all_single", self.group, flat, ones, ones)), shapes)
        return [join(t, k.dim, runs) for t, k, runs in zip(back, links, got, strict=True)]


@dataclass(frozen=True, eq=False)
class Alone(Link):
    """Any other library op, as it is, of one tensor of this shape."""

    op: Any
    shape: tuple[int, ...]
    args: tuple[Any, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return "alone", self

    def forward(self, links: Sequence[Alone], tensors: Sequence[Tensor]) -> Moving:
        yield from ()
        return [link.op(t, *link.args) for link, t in zip(links, tensors, strict=True)]

    def backward(self, links: Sequence[Alone], gradients: Sequence[Tensor]) -> Moving:
        yield from ()
        pairs = zip(links, gradients, strict=True)
        return [ADJOINTS[k.op._opname](g, torch.Size(k.shape), *k.args) for k, g in pairs]


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """Side by side along the last dim, contiguous."""
    return rows[0].contiguous() if len(rows) == 1 else torch.cat(list(rows), -1)


def _cut(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The inverse of `_joined`: views, the last dim in these shapes."""
    cut = torch.split(flat, [shape.numel() for shape in shapes], -1)
    return [t.view(t.shape[:-1] + shape) for t, shape in zip(cut, shapes, strict=True)]


__all__ = [
    "CAP",
    "Alone",
    "Bucket",
    "Cast",
    "Flight",
    "Gather",
    "Invariant",
    "Link",
    "Recut",
    "Replicate",
    "buckets",
    "chain",
]
