"""Buckets: parameters that enter the program alike do so together, and their gradients go back together.

The way of a parameter from rest to entry is a chain of library ops (`lower.enter_graph`). Parameters of one dtype whose
chains are the same ops over the same groups share a bucket of up to `CAP` bytes: each op then sends one flat buffer for
all of them. Pieces are padded, cut and joined by the same functions as in the ops themselves. Chains with other ops
have a bucket each, and run as they are.

Every rank makes the same buckets in the same order: they depend on sizes of the largest rank only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from autopar.runtime.collectives import launch, wait
from autopar.runtime.pieces import Runs, exchange, join, pieces, split, total, widen

if TYPE_CHECKING:
    from autopar.passes.lower import Local, ParameterUse

CAP = 25 * 2**20  # bytes of a bucket as entered, DDP's default; a larger parameter has a bucket to itself


@dataclass(frozen=True)
class Bucket:
    """``members``: places in `Local.parameters`; ``chains``: the links of each, equal in `Link.key`; None where the one
    member runs through its enter graph. ``reduce``: when the gradients go back."""

    members: tuple[int, ...]
    chains: tuple[tuple[Link, ...], ...] | None
    reduce: str

    @torch.no_grad()
    def enter(self, rests: Sequence[Tensor]) -> list[Tensor]:
        """The members as the program takes them, from their pieces at rest; may return what it was given."""
        assert self.chains is not None
        tensors = list(rests)
        for links in zip(*self.chains, strict=True):
            tensors = links[0].forward(links, tensors)
        return tensors

    @torch.no_grad()
    def leave(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The members' gradients as they rest, contiguous; None stays None."""
        assert self.chains is not None
        there = [i for i, g in enumerate(gradients) if g is not None]
        tensors = [g for g in gradients if g is not None]
        for links in reversed(list(zip(*(self.chains[i] for i in there), strict=True))):
            tensors = links[0].backward(links, tensors)
        back = dict(zip(there, tensors, strict=True))
        return [back.get(i) for i in range(len(gradients))]


def buckets(local: Local, cap: int = CAP) -> tuple[Bucket, ...]:
    """The buckets of the parameters that do not enter as they rest, in the order of their first members."""
    made: list[tuple[list[int], list[tuple[Link, ...]] | None]] = []
    opened: dict[Any, tuple[int, int]] = {}  # key -> (place in made, bytes so far)
    for i, use in enumerate(local.parameters):
        if use.fqn not in local.enter:
            continue
        links = chain(local.enter[use.fqn])
        if links is None:
            made.append(([i], None))
            continue
        key, size = (use.dtype, use.reduce, tuple(link.key for link in links)), _size(local, use)
        place, full = opened.get(key, (-1, cap))
        if place < 0 or full + size > cap:
            place, full = len(made), 0
            made.append(([], []))
        members, chains = made[place]
        assert chains is not None
        members.append(i)
        chains.append(links)
        opened[key] = (place, full + size)
    return tuple(
        Bucket(tuple(members), None if chains is None else tuple(chains), local.parameters[members[0]].reduce)
        for members, chains in made
    )


def _size(local: Local, use: ParameterUse) -> int:
    """Bytes of the entry on the rank that holds most, so that all ranks agree."""
    first = (0,) * len(local.mesh.axes)
    return math.prod(use.entry.local_shape(use.shape, local.mesh, first)) * use.dtype.itemsize


def chain(graph: fx.GraphModule) -> tuple[Link, ...] | None:
    """The links of an enter graph; None where it has an op that is none of them."""
    found: list[Link] = []
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        name = node.target._schema.name.split("::")[1]
        if name.startswith("wait_"):
            continue  # of the start before it
        link = _link(name, node.args[1:])
        if link is None:
            return None
        found.append(link)
    return tuple(found)


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
    link of its own; ``self`` is any of them. Groups, their size ``n`` and the place ``c`` in them are the same in all.
    """

    @property
    def key(self) -> tuple[Any, ...]:
        """What members of one bucket have in common."""
        raise NotImplementedError

    def forward(self, links: Sequence[Any], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Values one step nearer to the entry."""
        raise NotImplementedError

    def backward(self, links: Sequence[Any], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients one step nearer to rest."""
        raise NotImplementedError


@dataclass(frozen=True)
class Replicate(Link):
    """I->R: gradients are summed."""

    group: str

    @property
    def key(self) -> tuple[Any, ...]:
        return "replicate", self.group

    def forward(self, links: Sequence[Replicate], tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.contiguous() for t in tensors]

    def backward(self, links: Sequence[Replicate], gradients: Sequence[Tensor]) -> list[Tensor]:
        if len(gradients) == 1:  # into a new tensor: a gradient may share its memory
            (own,) = gradients
            return [_sent("all_reduce", own.contiguous(), self.group, "sum")]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        return _cut(_sent("all_reduce_", flat, self.group, "sum"), [g.shape for g in gradients])


@dataclass(frozen=True)
class Invariant(Link):
    """R->I: the gradient is that of coordinate 0."""

    c: int

    @property
    def key(self) -> tuple[Any, ...]:
        return "invariant", self.c

    def forward(self, links: Sequence[Invariant], tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.contiguous() for t in tensors]

    def backward(self, links: Sequence[Invariant], gradients: Sequence[Tensor]) -> list[Tensor]:
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

    def forward(self, links: Sequence[Gather], tensors: Sequence[Tensor]) -> list[Tensor]:
        padded = [widen(t, link.dim, total(link.held[0])) for link, t in zip(links, tensors, strict=True)]
        flat = _joined([p.reshape(-1) for p in padded])
        every = _sent("all_gather_into_tensor", flat, self.group, self.n).view(self.n, -1)
        stacks = _cut(every, [p.shape for p in padded])
        return [join(stack, link.dim, link.held) for link, stack in zip(links, stacks, strict=True)]

    def backward(self, links: Sequence[Gather], gradients: Sequence[Tensor]) -> list[Tensor]:
        stacks = [split(g, k.dim, k.held, total(k.held[0])) for k, g in zip(links, gradients, strict=True)]
        if self.dual == "slice":
            own = [stack[self.c] for stack in stacks]
        else:
            flat = _joined([stack.reshape(self.n, -1) for stack in stacks])
            own = _cut(
                _sent("reduce_scatter_tensor", flat.view(-1), self.group, "sum", self.n), [s.shape[1:] for s in stacks]
            )
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

    def forward(self, links: Sequence[Recut], tensors: Sequence[Tensor]) -> list[Tensor]:
        given, got, widths = zip(*(link.messages for link in links), strict=True)
        return self._swap(links, tensors, given, got, widths)

    def backward(self, links: Sequence[Recut], gradients: Sequence[Tensor]) -> list[Tensor]:
        given, got, widths = zip(*(link.messages for link in links), strict=True)
        return self._swap(links, gradients, got, given, widths)

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
    ) -> list[Tensor]:
        stacks = [split(t, k.dim, runs, w) for t, k, runs, w in zip(tensors, links, given, widths, strict=True)]
        flat, ones = _joined([stack.reshape(self.n, -1) for stack in stacks]), [1] * self.n
        back = _cut(_sent("all_to_all_single", flat, self.group, ones, ones), [s.shape[1:] for s in stacks])
        return [join(t, k.dim, runs) for t, k, runs in zip(back, links, got, strict=True)]


def _sent(name: str, flat: Tensor, group: str, *args: Any) -> Tensor:
    """A functional collective, waited for."""
    return wait(launch(name, group, flat, *args), group)


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """Side by side along the last dim, contiguous."""
    return rows[0].contiguous() if len(rows) == 1 else torch.cat(list(rows), -1)


def _cut(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The inverse of `_joined`: views, the last dim in these shapes."""
    cut = torch.split(flat, [shape.numel() for shape in shapes], -1)
    return [t.view(t.shape[:-1] + shape) for t, shape in zip(cut, shapes, strict=True)]


__all__ = ["CAP", "Bucket", "Gather", "Invariant", "Link", "Recut", "Replicate", "buckets", "chain"]
