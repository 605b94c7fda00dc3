"""Reading and writing at indices: the indices split, dims that are not indexed split, an indexed dim is whole."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

import autopar.runtime.ops  # noqa: F401  (registers autopar::take_shard and gather_shard)
from autopar.passes.facts import fact
from autopar.passes.rules.core import Dim, Dims, Rule, Special, factors
from autopar.passes.rules.signature import NEVER, Call, broadcast, dim_index, plain, read, shape_of, without

if TYPE_CHECKING:
    from autopar.passes.emit import Emitter

aten = torch.ops.aten


@factors(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(node: fx.Node) -> Rule | None:
    """``x[. b], i[a] -> y[a b]``, as advanced indexing places the dims; masks have no rule. Where one dim is indexed x
    is cut there by the special ``lookup``."""
    call = read(node)
    placed = _placed(call)
    if placed is None:
        return None
    dims, indices, result = placed
    where, _ = _indexed(call)
    specials = (_lookup(where[0]),) if len(where) == 1 else ()
    return call.rule(result, {"self": dims, "indices": indices}, linear=[call.group("self")], specials=specials)


def _lookup(dim: int) -> Special:
    """A table cut over the dim that is looked up in: addends, each rank having what it holds."""
    return Special("lookup", (dim, "R"), ("P",), lower_lookup, uneven=True)


def lower_lookup(emitter: Emitter, node: fx.Node, axis: int) -> Any:
    """What lies in the piece of this rank, zeros for the rest."""
    table, index = emitter.operand(0), emitter.operand(1)
    strategy = fact(node).strategy
    assert strategy is not None
    (dim,) = (d for d, split in enumerate(strategy.operands[0].dims) if axis in split.axes)
    assert strategy.operands[0].dims[dim].axes == (axis,), "one axis cuts the dim that is looked up in"
    op = torch.ops.autopar.gather_shard if node.target is aten.gather.default else torch.ops.autopar.take_shard
    total = read(node).shape("self")[dim]
    return emitter.call(op.default, table, index, dim, emitter.start(0, dim), total)


@factors(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(node: fx.Node) -> Rule | None:
    """``x[. b], i[a], v[a b] -> y[. b]``; a splits where values accumulate, x being outside that sum."""
    call = read(node)
    if _masked(call):
        return _put_one_value(call)
    placed = _placed(call)
    if placed is None:
        return None
    dims, indices, region = placed
    split = [f for t in indices for d in t for f in d.factors]
    shape = _region_shape(call)
    values = broadcast(call.shape("values"), region, shape)
    if not call["accumulate"] or any(f not in {g for d in values for g in d.factors} for f in split):
        indices, values = [(NEVER,) * len(t) for t in indices], tuple(_unless(d, split) for d in values)
        split = []
    return call.rule(
        dims,
        {"self": dims, "indices": indices, "values": values},
        outside={"self": split} if split else None,
        linear=[call.group("self", "values")],
    )


def _masked(call: Call) -> bool:
    given = [i for i in call["indices"] if i is not None]
    return len(given) == 1 and given[0].meta["val"].dtype == torch.bool and math.prod(call.shape("values")) == 1


def _put_one_value(call: Call) -> Rule:
    """``x[a b], mask[a], v -> y[a b]``: one value wherever the mask says."""
    dims = plain("d", call.shape("self"))
    (at,) = (d for d, i in enumerate(call["indices"]) if i is not None)
    mask = shape_of(call["indices"][at])
    return call.rule(
        dims, {"self": dims, "indices": [dims[at : at + len(mask)]]}, linear=[call.group("self", "values")]
    )


def _unless(dim: Dim, names: list[str]) -> Dim:
    return NEVER if any(f in names for f in dim.factors) else dim


def _indexed(call: Call) -> tuple[list[int], tuple[int, ...]]:
    """The dims of ``self`` that are indexed, and the shape to which the indices broadcast."""
    given = call["indices"]
    where = [d for d, i in enumerate(given) if i is not None]
    return where, _broadcast([shape_of(given[d]) for d in where])


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    longest = max(map(len, shapes))
    aligned = [(1,) * (longest - len(s)) + s for s in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*aligned))


def _region_shape(call: Call) -> tuple[int, ...]:
    where, spread = _indexed(call)
    at = where[0] if where == list(range(where[0], where[-1] + 1)) else 0
    rest = [n for d, n in enumerate(call.shape("self")) if d not in where]
    return (*rest[:at], *spread, *rest[at:])


def _placed(call: Call) -> tuple[Dims, list[Dims], Dims] | None:
    """Dims of ``self``, of every index, and of ``self[indices]``."""
    given = [i for i in call["indices"] if i is not None]
    if not given or any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in given):
        return None
    where, spread = _indexed(call)
    dims = tuple(NEVER if d in where else x for d, x in enumerate(plain("d", call.shape("self"))))
    common = plain("a", spread)
    indices = [broadcast(shape_of(i), common, spread) for i in given]
    at = where[0] if where == list(range(where[0], where[-1] + 1)) else 0
    rest = [x for d, x in enumerate(dims) if d not in where]
    return dims, indices, (*rest[:at], *common, *rest[at:])


@factors(aten.index_select.default)
def index_select(node: fx.Node) -> Rule | None:
    """``x[a .], i[k] -> y[a k]``."""
    call = read(node)
    shape, picked = call.shape("self"), call.shape("index")
    if not shape or len(picked) != 1:
        return None
    dim = dim_index(call["dim"], len(shape))
    dims, k = _whole_at(plain("d", shape), dim), Dim(("k",)) if picked[0] > 1 else NEVER
    return call.rule(
        _at(dims, dim, k), {"self": dims, "index": (k,)}, linear=[call.group("self")], specials=(_lookup(dim),)
    )


@factors(aten.index_add.default, aten.index_copy.default)
def index_add(node: fx.Node) -> Rule | None:
    """``x[a .], i[k], s[a k] -> y[a .]``; a copy is no sum over k."""
    call = read(node)
    shape, picked = call.shape("self"), call.shape("index")
    if not shape or len(picked) != 1:
        return None
    dim = dim_index(call["dim"], len(shape))
    adds = node.target is aten.index_add.default
    dims, k = _whole_at(plain("d", shape), dim), Dim(("k",)) if picked[0] > 1 and adds else NEVER
    return call.rule(
        dims,
        {"self": dims, "index": (k,), "source": _at(dims, dim, k)},
        outside={"self": ("k",)},
        linear=[call.group("self", "source")],
    )


@factors(aten.gather.default)
def gather(node: fx.Node) -> Rule | None:
    """``x[a .], i[a k] -> y[a k]``; a dim of which only the beginning is read is whole."""
    call = read(node)
    shape, picked = call.shape("self"), call.shape("index")
    if not shape or len(picked) != len(shape):
        return None
    dim = dim_index(call["dim"], len(shape))
    dims = _equal(_whole_at(plain("d", shape), dim), shape, picked)
    result = _at(dims, dim, Dim(("k",)) if picked[dim] > 1 else NEVER)
    return call.rule(result, {"self": dims, "index": result}, linear=[call.group("self")], specials=(_lookup(dim),))


@factors(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.scatter.reduce,
    aten.scatter_reduce.two,
)
def scatter(node: fx.Node) -> Rule | None:
    """``x[a .], i[a k], s[a k] -> y[a .]``; k splits where values are added, x being outside that sum."""
    call = read(node)
    shape, picked = call.shape("self"), call.shape("index")
    source = call.shape("src") if call.has("src") else picked
    if not shape or not len(shape) == len(picked) == len(source):
        return None
    dim = dim_index(call["dim"], len(shape))
    dims = _equal(_equal(_whole_at(plain("d", shape), dim), shape, picked), shape, source)
    adds = node.target is aten.scatter_add.default
    k = Dim(("k",)) if adds and picked[dim] > 1 and picked[dim] == source[dim] else NEVER
    named: dict[str, Any] = {"self": dims, "index": _at(dims, dim, k)}
    if call.has("src"):
        named["src"] = _at(dims, dim, k)
    writes = adds or node.target is aten.scatter.src or call.values.get("value") == 0
    linear = [call.group("self", "src")] if writes and not call.values.get("reduce") else []
    return call.rule(dims, named, outside={"self": ("k",)} if k.factors else None, linear=linear)


@factors(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(node: fx.Node) -> Rule | None:
    """``x[a .], i[.], v -> y[a .]``."""
    call = read(node)
    shape = call.shape("self")
    if not shape:
        return None
    dims = _whole_at(plain("d", shape), dim_index(call["dim"], len(shape)))
    zero = call.has("value") or not call["value"]
    return call.rule(dims, {"self": dims}, linear=[call.group("self", "value")] if zero else ())


@factors(aten.index_reduce.default)
def index_reduce(node: fx.Node) -> Rule | None:
    """``x[a .], i[.], s[a .] -> y[a .]``."""
    call = read(node)
    shape = call.shape("self")
    if not shape:
        return None
    dims = _whole_at(plain("d", shape), dim_index(call["dim"], len(shape)))
    return call.rule(dims, {"self": dims, "source": dims})


@factors(aten.take.default)
def take(node: fx.Node) -> Rule:
    """``x[.], i[a] -> y[a]``: places count through all of x."""
    call = read(node)
    dims = plain("a", call.shape("index"))
    return call.rule(dims, {"index": dims}, linear=[call.group("self")])


@factors(aten.put.default)
def put_at(node: fx.Node) -> Rule:
    """``x[.], i[a], s[a] -> y[.]``; a splits where values accumulate, x being outside that sum."""
    call = read(node)
    picked, source = call.shape("index"), call.shape("source")
    named: dict[str, Any] = {}
    dims = plain("a", picked)
    if call["accumulate"] and picked == source:
        named = {"index": dims, "source": dims}
    return call.rule(
        (NEVER,) * len(call.shape("self")),
        named,
        outside={"self": [f for d in dims for f in d.factors]} if named else None,
        linear=[call.group("self", "source")],
    )


@factors(aten.masked_scatter.default)
def masked_scatter(node: fx.Node) -> Rule:
    """``x[. h], mask[. h], s[. h] -> y[. h]``, linear in both: elements are taken in the order of the mask, so that
    only dims along which it is expanded (features of tokens) split."""
    call = read(node)
    shape, source, mask = call.shape("self"), call.shape("source"), call["mask"]
    before = shape_of(mask.args[0]) if mask.target is aten.expand.default else shape_of(mask)
    before = (1,) * (len(shape) - len(before)) + before
    alike = 0
    while alike < min(len(shape), len(source)) and before[-1 - alike] == 1 and source[-1 - alike] == shape[-1 - alike]:
        alike += 1
    at = len(shape) - alike
    dims = without(plain("d", shape), *range(at))
    named = {"self": dims, "source": ((NEVER,) * (len(source) - alike)) + dims[at:]}
    named["mask"] = broadcast(shape_of(mask), dims, shape)
    return call.rule(dims, named, linear=[call.group("self", "source")])


@factors(aten.searchsorted.Tensor)
def searchsorted(node: fx.Node) -> Rule:
    """``s[b .], x[b q] -> y[b q]``; one row of places serves all x."""
    call = read(node)
    dims = plain("d", call.shape("self"))
    row = call.shape("sorted_sequence")
    rows = (*(dims[:-1] if len(row) > 1 else ()), NEVER)
    return call.rule(dims, {"self": dims, "sorted_sequence": rows, "sorter": rows})


@factors(aten.one_hot.default, aten.take_along_dim.default)
def one_hot(node: fx.Node) -> Rule | None:
    """``i[a] -> y[a .]``; the class dim compares positions."""
    call = read(node)
    if node.target is not aten.one_hot.default:
        return _take_along(call)
    dims = plain("d", call.shape("self"))
    return call.rule((*dims, NEVER), {"self": dims}) if call["num_classes"] > 0 else None


def _take_along(call: Call) -> Rule | None:
    shape, picked = call.shape("self"), call.shape("indices")
    if call["dim"] is None or len(shape) != len(picked):
        return None
    dim = dim_index(call["dim"], len(shape))
    out = tuple(call.results()[0].shape)  # type: ignore[union-attr]
    result = _at(plain("d", out), dim, Dim(("k",)) if picked[dim] > 1 else NEVER)
    own = tuple(NEVER if d == dim else x for d, x in enumerate(broadcast(shape, result, out))) if shape[dim] else ()
    return call.rule(result, {"self": own, "indices": broadcast(picked, result, out)}, linear=[call.group("self")])


def _whole_at(dims: Dims, dim: int) -> Dims:
    return _at(dims, dim, NEVER)


def _at(dims: Dims, dim: int, new: Dim) -> Dims:
    return (*dims[:dim], new, *dims[dim + 1 :])


def _equal(dims: Dims, shape: tuple[int, ...], other: tuple[int, ...]) -> Dims:
    return tuple(x if n == m else NEVER for x, n, m in zip(dims, shape, other))
