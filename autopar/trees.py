"""Nested inputs and outputs as a flat list of leaves, and back.

Containers are those that ``torch.utils._pytree`` knows (dict, list, tuple, namedtuple, Hugging Face's ``ModelOutput``)
and plain dataclasses; everything else is a leaf.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""Leaves that a graph may hold as they are."""


@dataclasses.dataclass(frozen=True)
class Tree:
    """The structure that `flatten` took off. ``inner`` has, for a leaf that is a dataclass, its type and the tree
    of its fields; None as type is a field, whose value is the subtree itself."""

    spec: pytree.TreeSpec
    inner: tuple[tuple[type | None, Tree] | None, ...]
    size: int  # leaves in all


def flatten(value: Any, path: str = "") -> tuple[list[tuple[str, Any]], Tree]:
    """The leaves of ``value`` with their paths (``path`` is put in front), and the structure around them.

    Example:
        >>> flatten({"x": [1, 2]}, "args[0]")[0]
        [("args[0]['x'][0]", 1), ("args[0]['x'][1]", 2)]
    """
    pairs, spec = pytree.tree_flatten_with_path(value)
    leaves: list[tuple[str, Any]] = []
    inner: list[tuple[type | None, Tree] | None] = []
    for keys, leaf in pairs:
        where = path + pytree.keystr(keys)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if f.init}
            below = [(name, *flatten(v)) for name, v in fields.items()]
            leaves += [(f"{where}.{name}{p}", v) for name, found, _ in below for p, v in found]
            _, fields_spec = pytree.tree_flatten(dict.fromkeys(fields, 0))
            trees = tuple((None, tree) for _, _, tree in below)
            inner.append((type(leaf), Tree(fields_spec, trees, sum(t.size for _, t in trees))))
        else:
            leaves.append((where, leaf))
            inner.append(None)
    return leaves, Tree(spec, tuple(inner), len(leaves))


def unflatten(leaves: Sequence[Any], tree: Tree) -> Any:
    """The value of which ``leaves`` are the leaves, in `flatten`'s order."""
    assert len(leaves) == tree.size, f"{len(leaves)} leaves for a tree of {tree.size}"
    at, values = 0, []
    for below in tree.inner:
        if below is None:
            values.append(leaves[at])
            at += 1
        else:
            kind, subtree = below
            piece = leaves[at : at + subtree.size]
            at += subtree.size
            value = unflatten(piece, subtree)
            values.append(value if kind is None else kind(**value))
    return pytree.tree_unflatten(values, tree.spec)


def lists_of_rows(one: Collection[str], rows: int, other: Collection[str], others: int) -> frozenset[str]:
    """The paths of lists that have as many leaves for each row in both of two values. ``one``, ``other``: the paths of
    their leaves; ``rows``, ``others``: the rows that they were made of.

    Example:
        >>> lists_of_rows(["out.images[0]", "out.images[1]", "out.loss"], 2, ["out.images[0]", "out.loss"], 1)
        frozenset({'out.images'})
    """
    lengths = [Counter(m[1] for p in paths if (m := re.fullmatch(r"(.*)\[\d+\]", p))) for paths in (one, other)]
    return frozenset(p for p, n in lengths[0].items() if n * others == lengths[1][p] * rows and n != lengths[1][p])


def in_lists(pairs: Sequence[tuple[str, Any]], lists: Collection[str]) -> Iterator[tuple[str, list[Any]]]:
    """The leaves with their paths, those of one of ``lists`` together under the path of that."""
    at = 0
    while at < len(pairs):
        parent = re.sub(r"\[\d+\]$", "", pairs[at][0])
        if parent not in lists:
            yield pairs[at][0], [pairs[at][1]]
            at += 1
            continue
        end = next((i for i in range(at, len(pairs)) if re.sub(r"\[\d+\]$", "", pairs[i][0]) != parent), len(pairs))
        yield parent, [leaf for _, leaf in pairs[at:end]]
        at = end


def joined(pieces: Sequence[torch.Tensor], what: str) -> torch.Tensor:
    """The tensors of a list, one after the other in one. Raises AutoparError where they differ in shape."""
    shapes = list(dict.fromkeys(tuple(piece.shape) for piece in pieces))
    if len(shapes) > 1:
        raise AutoparError(
            f"{what}: is a list with a tensor for each row, of other shapes ({shapes[0]} and {shapes[1]}), which no "
            "plan can hold. Pad to one length."
        )
    return torch.cat(list(pieces)) if pieces[0].ndim else torch.stack(list(pieces))


def parted(whole: torch.Tensor, count: int, ndim: int) -> tuple[torch.Tensor, ...]:
    """The ``count`` tensors of ``ndim`` dims that `joined` put together."""
    return torch.split(whole, whole.shape[0] // count) if ndim else whole.unbind()


def ordered_like(value: Any, like: Any) -> Any:
    """``value`` with the keys of its dicts in the order of ``like``'s, wherever the two have the same keys."""
    if type(value) is dict and type(like) is dict and value.keys() == like.keys():
        return {k: ordered_like(value[k], like[k]) for k in like}
    if type(value) in (list, tuple) and type(like) is type(value) and len(value) == len(like):
        return type(value)(ordered_like(v, w) for v, w in zip(value, like))
    return value
