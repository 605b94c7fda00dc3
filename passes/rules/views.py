"""Views and copies of elements: dims move, merge, split, repeat and are cut; factors go with them.

All are linear in what they move. Literal sizes are made local from the local shapes, never by trial: an ``expand`` of a
dim that is 1 only on this rank, or a ``-1`` that absorbs another dim's cut, would run and be wrong.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.passes.rules.core import Dim, Dims, Rule, factors, localizes
from autopar.passes.rules.signature import NEVER, dim_index, plain, put, read

aten = torch.ops.aten

RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.view_copy.default)


@factors(*RESHAPES, aten.flatten.using_ints, aten.unflatten.int, aten.view_as.default, aten.reshape_as.default)
def reshape(node: fx.Node) -> Rule | None:
    """``x[(a b) c] -> y[a (b c)]``: both shapes are written over common factors, outer to inner."""
    call = read(node)
    (out,) = call.results()
    assert out is not None
    before, after = call.shape("self"), tuple(out.shape)
    if 0 in before:
        return None
    left, right, sizes, whole = common_factors(before, after)
    return call.rule(right, {"self": left, "other": right}, linear=[call.group("self")], sizes=sizes, whole=whole)


def common_factors(
    before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[Dims, Dims, dict[str, int], tuple[str, ...]]:
    """Dims of a tensor before and after a reshape, the size of each factor, and the factors that are only remainders.

    >>> left, right, sizes, whole = common_factors((6, 4), (2, 12))
    >>> [d.factors for d in left], [d.factors for d in right], sizes
    ([('f0', 'f1'), ('f2',)], [('f0',), ('f1', 'f2')], {'f0': 2, 'f1': 3, 'f2': 4})
    """
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    sizes: dict[str, int] = {}
    whole: list[str] = []
    ins = [(d, n) for d, n in enumerate(before) if n > 1]
    outs = [(d, n) for d, n in enumerate(after) if n > 1]
    while ins:
        (d, n), (e, m) = ins.pop(0), outs.pop(0)
        common = math.gcd(n, m)
        if common > 1:
            name = f"f{len(sizes)}"
            sizes[name] = common
            left[d].append(name)
            right[e].append(name)
        n, m = n // common, m // common
        if n > 1 and m > 1:  # neither divides the other: what follows, up to where the products meet, stays whole
            _remainder(left, d, n, sizes, whole)
            _remainder(right, e, m, sizes, whole)
            while n != m:
                side, dims, product = (left, ins, n) if n < m else (right, outs, m)
                at, length = dims.pop(0)
                _remainder(side, at, length, sizes, whole)
                n, m = (n * length, m) if n < m else (n, product * length)
        elif n > 1:
            ins.insert(0, (d, n))
        elif m > 1:
            outs.insert(0, (e, m))
    return tuple(Dim(tuple(f)) for f in left), tuple(Dim(tuple(f)) for f in right), sizes, tuple(whole)


def _remainder(side: list[list[str]], dim: int, length: int, sizes: dict[str, int], whole: list[str]) -> None:
    name = f"f{len(sizes)}"
    sizes[name] = length
    whole.append(name)
    side[dim].append(name)


@localizes(*RESHAPES)
def local_reshape(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The local shape of the result is the argument."""
    name = "shape" if node.target is aten.reshape.default else "size"
    return put(node, args, kwargs, name, list(sizes.results[0]))


@localizes(aten.unflatten.int)
def local_unflatten(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The part of the local result that the unflattened dim became."""
    call = read(node)
    dim = dim_index(call["dim"], len(call.shape("self")))
    return put(node, args, kwargs, "sizes", list(sizes.results[0][dim : dim + len(call["sizes"])]))


@factors(aten.permute.default, aten.transpose.int, aten.t.default, aten.numpy_T.default, aten.mT.default)
@factors(aten.swapaxes.default, aten.swapdims.default, aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int)
@factors(aten.permute_copy.default, aten.transpose_copy.int, aten.t_copy.default)
def permute(node: fx.Node) -> Rule:
    """``x[a b] -> y[b a]``, for any order."""
    call = read(node)
    dims = plain("d", call.shape("self"))
    order = _order(call, len(dims))
    return call.rule(tuple(dims[i] for i in order), {"self": dims}, linear=[call.group("self")])


def _order(call: Any, ndim: int) -> list[int]:
    """Which dim of the operand each dim of the result is: asked of torch on a tensor with distinct strides."""
    probe = torch.empty(tuple(range(2, ndim + 2)), device="meta")
    args = [probe if n == "self" else v for n, v in call.values.items()]
    return [int(n) - 2 for n in call.node.target(*args).shape]


@factors(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
@factors(aten.unsqueeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims)
def add_or_drop_ones(node: fx.Node) -> Rule:
    """Dims of size 1 come and go; ``squeeze`` of a longer dim keeps it, and whole, lest it be 1 on a rank."""
    call = read(node)
    shape = call.shape("self")
    dims = list(plain("d", shape))
    given = call["dim"] if isinstance(call["dim"], (list, tuple)) else [call["dim"]]
    if node.target in (aten.unsqueeze.default, aten.unsqueeze_copy.default):
        result = [*dims]
        result.insert(dim_index(given[0], len(shape) + 1), NEVER)
    else:
        named = {dim_index(d, len(shape)) for d in given}
        dims = [NEVER if d in named else dim for d, dim in enumerate(dims)]
        result = [dim for d, dim in enumerate(dims) if not (d in named and shape[d] == 1)]
    return call.rule(tuple(result), {"self": tuple(dims)}, linear=[call.group("self")])


@factors(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default, aten.expand_copy.default)
def expand(node: fx.Node) -> Rule:
    """``x[a 1] -> y[n a b]``: the new lengths are factors that only the result has."""
    call = read(node)
    (out,) = call.results()
    assert out is not None
    shape = call.shape("self")
    result = plain("d", out.shape)
    lead = len(result) - len(shape)
    dims = tuple(result[lead + d] if n > 1 else NEVER for d, n in enumerate(shape))
    named = {"self": dims}
    if call.has("other"):
        named["other"] = result
    return call.rule(result, named, linear=[call.group("self")])


@localizes(aten.expand.default, aten.broadcast_to.default, aten.expand_copy.default)
def local_expand(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The local shape of the result is the argument."""
    return put(node, args, kwargs, "size", list(sizes.results[0]))


@factors(aten.repeat.default, aten.tile.default)
def repeat(node: fx.Node) -> Rule:
    """``x[a] -> y[(r a)]``: r is a factor of the result alone."""
    call = read(node)
    (out,) = call.results()
    assert out is not None
    shape = call.shape("self")
    lead = out.dim() - len(shape)
    dims: list[Dim] = []
    result: list[Dim] = []
    sizes: dict[str, int] = {}
    for d, n in enumerate(out.shape):
        own = shape[d - lead] if d >= lead else 1
        lengths = {f"r{d}": n // own if own else 1, f"d{d}": own}
        sizes |= lengths
        result.append(Dim(tuple(f for f, size in lengths.items() if size > 1)))
        if d >= lead:
            dims.append(Dim((f"d{d}",)) if own > 1 else NEVER)
    return call.rule(tuple(result), {"self": tuple(dims)}, linear=[call.group("self")], sizes=sizes)


@localizes(aten.repeat.default, aten.tile.default)
def local_repeat(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How often the local operand fits into the local result."""
    own, out = sizes.operands[0], sizes.results[0]
    lead = len(out) - len(own)
    times = [n // own[d - lead] if d >= lead and own[d - lead] else n for d, n in enumerate(out)]
    return put(node, args, kwargs, "repeats" if node.target is aten.repeat.default else "dims", times)


@factors(aten.repeat_interleave.self_int)
def repeat_interleave(node: fx.Node) -> Rule | None:
    """``x[a] -> y[(a r)]``; r stays whole, for it is a literal."""
    call = read(node)
    shape = call.shape("self")
    if call["dim"] is None:
        if len(shape) != 1:
            return None
        dim = 0
    else:
        dim = dim_index(call["dim"], len(shape))
    dims = plain("d", shape)
    result = list(dims)
    result[dim] = Dim((*dims[dim].factors, "r"))
    sizes = {"r": call["repeats"]} | dict.fromkeys(dims[dim].factors, shape[dim])
    return call.rule(tuple(result), {"self": dims}, linear=[call.group("self")], sizes=sizes, whole=["r"])


@localizes(aten.repeat_interleave.self_int)
def local_repeat_interleave(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The output size, where it is given, is the local one."""
    call = read(node)
    if call["output_size"] is None:
        return args, kwargs
    dim = dim_index(call["dim"] or 0, len(call.shape("self")))
    return put(node, args, kwargs, "output_size", sizes.results[0][dim])


@factors(aten.select.int, aten.unbind.int, aten.select_copy.int, aten.unbind_copy.int)
def select(node: fx.Node) -> Rule:
    """``x[a .] -> y[a]``: the dim that is taken apart is whole."""
    call = read(node)
    shape = call.shape("self")
    dim = dim_index(call["dim"], len(shape))
    dims = tuple(NEVER if d == dim else x for d, x in enumerate(plain("d", shape)))
    result = tuple(x for d, x in enumerate(dims) if d != dim)
    return call.rule([result] * len(call.results()), {"self": dims}, linear=[call.group("self")])


@factors(aten.stack.default)
def stack(node: fx.Node) -> Rule:
    """``x[a], y[a] -> z[. a]``, linear in all together."""
    call = read(node)
    shape = tuple(call["tensors"][0].meta["val"].shape)
    dims = plain("d", shape)
    at = dim_index(call["dim"], len(shape) + 1)
    result = (*dims[:at], NEVER, *dims[at:])
    return call.rule(result, {"tensors": [dims] * len(call["tensors"])}, linear=[call.group("tensors")])


@factors(aten.flip.default, aten.roll.default, aten.rot90.default)
def reorder(node: fx.Node) -> Rule:
    """``x[a .] -> y[a .]``: dims whose elements change places are whole."""
    call = read(node)
    shape = call.shape("self")
    moved = call["dims"] or range(len(shape))
    gone = {dim_index(d, len(shape)) for d in moved}
    dims = tuple(NEVER if d in gone else x for d, x in enumerate(plain("d", shape)))
    return call.rule(dims, {"self": dims}, linear=[call.group("self")])


@factors(aten.pad.default, aten.constant_pad_nd.default)
def pad(node: fx.Node) -> Rule:
    """``x[a .] -> y[a .]``: padded dims are whole; linear unless a constant other than 0 is written."""
    call = read(node)
    shape = call.shape("self")
    padded = {len(shape) - 1 - i // 2 for i, n in enumerate(call["pad"]) if n}
    mode = call.values.get("mode", "constant")
    if mode != "constant":
        padded = {len(shape) - 1 - i // 2 for i in range(len(call["pad"]))}
    dims = tuple(NEVER if d in padded else x for d, x in enumerate(plain("d", shape)))
    zero = mode != "constant" or not call["value"]
    return call.rule(dims, {"self": dims}, linear=[call.group("self")] if zero else ())


@factors(aten.unfold.default, aten.unfold_copy.default)
def unfold(node: fx.Node) -> Rule:
    """``x[a .] -> y[a . .]``: windows are taken from a whole dim."""
    call = read(node)
    shape = call.shape("self")
    dim = dim_index(call["dimension"], len(shape))
    dims = tuple(NEVER if d == dim else x for d, x in enumerate(plain("d", shape)))
    return call.rule((*dims, NEVER), {"self": dims}, linear=[call.group("self")])


@factors(aten.pixel_shuffle.default)
def pixel_shuffle(node: fx.Node) -> Rule:
    """``x[b (c . .) h w] -> y[b c (h .) (w .)]``."""
    call = read(node)
    shape, r = call.shape("self"), call["upscale_factor"]
    lead = plain("b", shape[:-3])
    c, h, w = shape[-3] // (r * r), shape[-2], shape[-1]
    sizes = {"c": c, "h": h, "w": w, "i": r, "j": r}
    before = (*lead, Dim(("c", "i", "j")), Dim(("h",)), Dim(("w",)))
    after = (*lead, Dim(("c",)), Dim(("h", "i")), Dim(("w", "j")))
    return call.rule(after, {"self": before}, linear=[call.group("self")], sizes=sizes, whole=["i", "j"])


@factors(aten.pixel_unshuffle.default)
def pixel_unshuffle(node: fx.Node) -> Rule:
    """``x[b c (h .) (w .)] -> y[b (c . .) h w]``."""
    call = read(node)
    shape, r = call.shape("self"), call["downscale_factor"]
    lead = plain("b", shape[:-3])
    sizes = {"c": shape[-3], "h": shape[-2] // r, "w": shape[-1] // r, "i": r, "j": r}
    before = (*lead, Dim(("c",)), Dim(("h", "i")), Dim(("w", "j")))
    after = (*lead, Dim(("c", "i", "j")), Dim(("h",)), Dim(("w",)))
    return call.rule(after, {"self": before}, linear=[call.group("self")], sizes=sizes, whole=["i", "j"])


@factors(aten.channel_shuffle.default)
def channel_shuffle(node: fx.Node) -> Rule:
    """``x[n (. c) a] -> y[n (c .) a]``: groups and the channels of a group change places."""
    call = read(node)
    shape, groups = call.shape("self"), call["groups"]
    lead, rest = plain("n", shape[:1]), plain("a", shape[2:])
    sizes = {"g": groups, "c": shape[1] // groups}
    c = tuple(f for f in ("c",) if sizes[f] > 1)
    before, after = (*lead, Dim(("g", *c)), *rest), (*lead, Dim((*c, "g")), *rest)
    return call.rule(after, {"self": before}, linear=[call.group("self")], sizes=sizes, whole=["g"])


@factors(aten.im2col.default)
def windows(node: fx.Node) -> Rule:
    """``x[n c . .] -> y[n (c .) .]``: every channel becomes one row a kernel place."""
    call = read(node)
    shape = call.shape("self")
    lead, places = plain("n", shape[:-3]), call["kernel_size"][0] * call["kernel_size"][1]
    after = (*lead, Dim(("c", "k")), NEVER)
    sizes = {"c": shape[-3], "k": places}
    before = (*lead, Dim(("c",)), NEVER, NEVER)
    return call.rule(after, {"self": before}, linear=[call.group("self")], sizes=sizes, whole=["k"])


@factors(aten.col2im.default)
def joined_windows(node: fx.Node) -> Rule:
    """``x[n (c .) .] -> y[n c . .]``: what `windows` takes apart."""
    call = read(node)
    shape = call.shape("self")
    places = call["kernel_size"][0] * call["kernel_size"][1]
    sizes = {"c": shape[-2] // places, "k": places}
    lead, c = plain("n", shape[:-2]), Dim(tuple(n for n in ("c",) if sizes[n] > 1))
    before = (*lead, Dim((*c.factors, "k")), NEVER)
    return call.rule((*lead, c, NEVER, NEVER), {"self": before}, linear=[call.group("self")], sizes=sizes, whole=["k"])


@factors(aten.view_as_real.default, aten.view_as_complex.default)
def complex_view(node: fx.Node) -> Rule:
    """``x[a] <-> y[a .]``, the last dim being real and imaginary part."""
    call = read(node)
    shape = call.shape("self")
    if node.target is aten.view_as_real.default:
        dims = plain("d", shape)
        return call.rule((*dims, NEVER), {"self": dims})
    dims = plain("d", shape[:-1])
    return call.rule(dims, {"self": (*dims, NEVER)})
