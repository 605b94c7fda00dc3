"""A call read by its op's schema: arguments by name, tensor operands by slot. Rules and localisers look through it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autopar.passes.facts import is_tensor
from autopar.passes.rules.core import Dim, Dims, Rule, Special

NEVER = Dim()  # a dim that is never split


@dataclass(frozen=True)
class Call:
    """``values``: every argument by name, defaults filled in. ``slots``: for each argument the operand indices of its
    tensors, in order."""

    node: fx.Node
    values: dict[str, Any]
    slots: dict[str, tuple[int, ...]]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def has(self, name: str) -> bool:
        """Whether the argument is given and is a tensor or a list with tensors."""
        return bool(self.slots.get(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a tensor argument."""
        return shape_of(self.values[name])

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a tensor argument."""
        found = self.values[name].meta["val"].dtype
        assert isinstance(found, torch.dtype)
        return found

    def group(self, *names: str) -> frozenset[int]:
        """The operand slots of those of the named arguments that are tensors."""
        return frozenset(i for n in names for i in self.slots.get(n, ()))

    def results(self) -> tuple[torch.Tensor | None, ...]:
        """The (meta) tensors that the node produces; None for results that are none."""
        val = self.node.meta["val"]
        outs = val if isinstance(val, (tuple, list)) else (val,)
        return tuple(v if isinstance(v, torch.Tensor) else None for v in outs)

    def rule(
        self,
        results: Dims | Sequence[Dims | None],
        named: Mapping[str, Dims | Sequence[Dims]],
        *,
        linear: Iterable[frozenset[int]] = (),
        outside: dict[str, Iterable[str]] | None = None,
        sizes: dict[str, int] | None = None,
        whole: Iterable[str] = (),
        specials: tuple[Special, ...] = (),
        positions: Iterable[str] = (),
        why: str = "",
    ) -> Rule:
        """A `Rule` with dims by argument name: one `Dims`, or for a list argument one per tensor. Tensor arguments that
        are not named are never split. Linear groups with an operand that would lose digits in the result are dropped.
        """
        tensors = [n for n in tree_leaves((self.node.args, self.node.kwargs), is_leaf=_is_node) if is_tensor(n)]
        operands: list[Dims] = [(NEVER,) * n.meta["val"].dim() for n in tensors]
        for name, given in named.items():
            if not self.has(name):
                continue
            for i, tensor_dims in zip(self.slots.get(name, ()), _listed(given), strict=True):
                assert len(tensor_dims) == len(operands[i]), f"{self.node.target}: {name} has {len(operands[i])} dims"
                operands[i] = tensor_dims
        outs = tuple(_listed(results))
        kept = [g for g in linear if g and all(carries(tensors[i].meta["val"].dtype, self.results()) for i in g)]
        return Rule(
            tuple(operands),
            outs,
            sizes or {},
            frozenset(whole),
            {self.slots[n][0]: frozenset(f) for n, f in (outside or {}).items() if self.has(n)},
            tuple(dict.fromkeys(kept)),
            specials,
            frozenset(positions),
            why,
        )


def _listed(given: Dims | Sequence[Dims | None]) -> Sequence[Any]:
    """One `Dims` as a list of one; a 0-d tensor's empty dims count as one `Dims`."""
    return [given] if all(isinstance(d, Dim) for d in given) and isinstance(given, tuple) else given


def _is_node(x: object) -> bool:
    return isinstance(x, fx.Node)


def read(node: fx.Node) -> Call:
    """The call of an aten or library op, by the argument names of its schema."""
    values: dict[str, Any] = {}
    slots: dict[str, tuple[int, ...]] = {}
    schema = node.target._schema  # type: ignore[union-attr]
    names = [a.name for a in schema.arguments]
    given = list(zip(names, node.args)) + list(node.kwargs.items())
    at = 0
    for name, arg in given:
        count = sum(is_tensor(n) for n in tree_leaves(arg, is_leaf=_is_node))
        values[name], slots[name] = arg, tuple(range(at, at + count))
        at += count
    for argument in schema.arguments:
        if argument.name not in values:
            values[argument.name] = argument.default_value if argument.has_default_value() else None
    return Call(node, values, slots)


def put(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` with the argument ``name`` replaced, wherever it stands."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    at = names.index(name)
    if name in kwargs or at >= len(args):
        return args, {**kwargs, name: value}
    return (*args[:at], value, *args[at + 1 :]), kwargs


def shape_of(node: Any) -> tuple[int, ...]:
    """Global shape of the one tensor that a node produces."""
    return tuple(int(s) for s in node.meta["val"].shape)


def dim_index(dim: int, ndim: int) -> int:
    """A possibly negative dim as an index from the left."""
    return dim % ndim if ndim else 0


def carries(source: torch.dtype, results: Iterable[torch.Tensor | None] | torch.dtype) -> bool:
    """Whether addends of type ``source`` keep all their digits and range in the results (so that a sum may pass)."""
    targets = [results] if isinstance(results, torch.dtype) else [r.dtype for r in results if r is not None]
    return all(_carries(source, t) for t in targets)


def _carries(source: torch.dtype, target: torch.dtype) -> bool:
    if source == torch.bool or target == torch.bool:
        return False
    if source == target:
        return True
    floats = (source.is_floating_point and target.is_floating_point) or (source.is_complex and target.is_complex)
    if source.is_floating_point and target.is_complex:
        source, floats = source.to_complex(), True
    if not floats:
        return False
    a, b = torch.finfo(source), torch.finfo(target)
    return b.eps <= a.eps and b.max >= a.max


def plain(prefix: str, shape: Sequence[int]) -> Dims:
    """One factor a dim, named ``prefix`` and the dim's index; dims of size 1 are never split."""
    return tuple(Dim((f"{prefix}{d}",)) if n > 1 else NEVER for d, n in enumerate(shape))


def without(dims: Dims, *indices: int) -> Dims:
    """``dims`` with those at ``indices`` never split."""
    return tuple(NEVER if d in indices else dim for d, dim in enumerate(dims))


def broadcast(shape: Sequence[int], to: Dims, to_shape: Sequence[int]) -> Dims:
    """Dims of an operand of ``shape`` that broadcasts to a tensor of dims ``to``: aligned on the right, size 1 is not
    the factor."""
    lead = len(to_shape) - len(shape)
    return tuple(to[lead + d] if n == to_shape[lead + d] and n > 1 else NEVER for d, n in enumerate(shape))
