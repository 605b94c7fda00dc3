"""PREPARE: rows that were sorted by expert for a grouped product are in the order of the tokens again."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

import autopar.runtime.experts  # noqa: F401  (registers autopar::experts_mm)
from autopar.passes.drop_noops import drop_dead
from autopar.passes.facts import call, is_tensor, operand_nodes
from autopar.passes.means_to_sums import arguments
from autopar.passes.rules import rule_of

aten = torch.ops.aten
experts_mm = torch.ops.autopar.experts_mm.default

GROUPED = {"aten::_grouped_mm", "autopar::grouped_mm", "transformers::grouped_mm_fallback"}
SORTS = {aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable}
CASTS = {aten.to.dtype}
ONE_HOT = {aten.one_hot.default}


@dataclass(frozen=True)
class Sorted:
    """What a tensor with rows in sorted order holds: ``rows`` is the same with dim ``dim`` in the order of tokens."""

    rows: fx.Node
    dim: int


def experts_in_token_order(gm: fx.GraphModule) -> fx.GraphModule:
    """Grouped products become ``autopar.experts_mm``, whose rows need no order. Where rows were sorted by expert and
    put back behind it, what lies between is computed on unsorted rows: no op there mixes them. Then tokens can be cut
    as in any linear, which a sort of the whole batch would forbid.

    Rows sorted for anything else, and products of rows that are in groups for a reason that is not seen, stay as they
    are (``experts_mm`` is then given the number of each row's group).

    Example:
        ``order = sort(ids)[1]; y = grouped_mm(x[order // 2], w, ends)[inverse of order]`` ->
        ``y = experts_mm(repeat_interleave(x, 2, 0), w, ids)``
    """
    graph = gm.graph
    if not any(is_grouped(n) for n in graph.nodes):
        return gm
    keys = {_key_of(groups(n)[2]) for n in graph.nodes if is_grouped(n)}
    for sort in [n for n in graph.nodes if n.target in SORTS]:
        if _bare(sort.args[0]) in keys or any(_made_by(key) is sort for key in keys):
            _Unsorted(graph, sort).run()
    drop_dead(graph)
    for node in [n for n in graph.nodes if is_grouped(n)]:
        _by_number(graph, node)
    drop_dead(graph)
    graph.lint()
    gm.recompile()
    return gm


def is_grouped(node: fx.Node) -> bool:
    """A product of rows in contiguous groups with one matrix a group."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or schema.name not in GROUPED:
        return False
    x, w, ends = groups(node)
    extra = [v for n, v in arguments(node).items() if n in ("bias", "out_dtype") and v is not None]
    return ends is not None and not extra and x.meta["val"].ndim == 2 and w.meta["val"].ndim == 3


def groups(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """(rows, weights, where each group ends)."""
    x, w, *_ = node.args
    given = arguments(node)
    return x, w, given["offs"]  # type: ignore[return-value]


def _bare(node: Any) -> Any:
    """What a node is a cast of."""
    while isinstance(node, fx.Node) and node.target in CASTS:
        node = node.args[0]
    return node


def _made_by(node: Any) -> Any:
    return node.args[0] if isinstance(node, fx.Node) and node.target is operator.getitem else None


def _key_of(ends: fx.Node | None) -> fx.Node | None:
    """The expert numbers that the groups count: ``ends`` is the running sum of a histogram of them. Casts are looked
    through."""
    total = _bare(ends)
    if not isinstance(total, fx.Node) or total.target is not aten.cumsum.default:
        return None
    counts, size = _bare(total.args[0]), total.meta["val"].shape[0]
    if not isinstance(counts, fx.Node):
        return None
    given = arguments(counts) if isinstance(counts.target, torch._ops.OpOverload) else {}
    if counts.target is aten.histc.default and (given["bins"], given["min"], given["max"]) == (size, 0, size - 1):
        return _bare(given["self"])  # type: ignore[no-any-return]
    each = _bare(given.get("self"))
    if counts.target is aten.sum.dim_IntList and given["dim"] == [0] and getattr(each, "target", None) in ONE_HOT:
        return _bare(each.args[0])  # type: ignore[no-any-return]
    return None


class _Unsorted:
    """One sort of expert numbers: follows what is read in its order up to where that order ends."""

    def __init__(self, graph: fx.Graph, sort: fx.Node) -> None:
        self.graph, self.sort = graph, sort
        self.ids: fx.Node = sort.args[0]  # type: ignore[assignment]
        self.size: int = self.ids.meta["val"].shape[0] if self.ids.meta["val"].ndim == 1 else 0
        self.held: dict[fx.Node, Sorted] = {}
        self.several: dict[fx.Node, tuple[fx.Node, list[int]]] = {}
        self.inverses: set[fx.Node] = set()
        self.products: set[fx.Node] = set()  # what depends on a product, in sorted order
        self.arange: fx.Node | None = None
        self.order: fx.Node | None = None

    def run(self) -> None:
        given = arguments(self.sort)
        if not self.size or given["descending"]:
            return
        for node in list(self.graph.nodes):
            if node.op == "call_function":
                with self.graph.inserting_before(node):
                    self._follow(node)
        self._sort_again()

    def _follow(self, node: fx.Node) -> None:
        if node is self.sort or node.target is operator.getitem:
            self._results_of_sort(node)
            return
        operands = operand_nodes(node)
        if not any(o in self.held or o in self.inverses for o in operands):
            return
        if self._is_inverse(node):
            self.inverses.add(node)
        elif (unsorted := self._put_back(node)) is not None:
            node.replace_all_uses_with(unsorted)
        elif is_grouped(node):
            self._grouped(node)
        elif not any(o in self.inverses for o in operands):
            self._row_by_row(node)

    def _results_of_sort(self, node: fx.Node) -> None:
        source = node.args[0]
        if source in self.several:
            made, dims = self.several[source]  # type: ignore[index]
            at: Any = node.args[1]
            self.held[node] = Sorted(call(self.graph, operator.getitem, (made, at), like=node), dims[at])
            self._mark(node, source)
        picks_values = source is self.sort and node.args[1] == 0
        if picks_values:
            self.held[node] = Sorted(self.ids, 0)
        elif (source is self.sort and node.args[1] == 1) or (node is self.sort and is_tensor(node)):
            self.order = node
            how = {"device": self._device()}
            self.arange = call(self.graph, aten.arange.default, (self.size,), how, like=self.sort)
            self.held[node] = Sorted(self.arange, 0)

    def _device(self) -> torch.device:
        found = (n.kwargs.get("device") for n in self.graph.nodes if n.target is aten.arange.default)
        return next((d for d in found if isinstance(d, torch.device)), torch.device("cpu"))

    def _is_order(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and node is self.order

    def _is_inverse(self, node: fx.Node) -> bool:
        """Whether the node is where each row went: ``inverse[order] = arange``, or the order of the order."""
        if node.target in SORTS:
            return self._is_order(node.args[0]) and is_tensor(node) and not arguments(node)["descending"]
        if node.meta["val"].shape != (self.size,) if is_tensor(node) else True:
            return False
        given = arguments(node) if isinstance(node.target, torch._ops.OpOverload) else {}
        if node.target is aten.index_put.default and not given["accumulate"]:
            return len(given["indices"]) == 1 and self._is_order(given["indices"][0]) and _counts_up(given["values"])
        if node.target is aten.scatter.src:
            return self._is_order(given["index"]) and _counts_up(given["src"])
        return False

    def _put_back(self, node: fx.Node) -> fx.Node | None:
        """The unsorted rows, where the node is sorted rows put back in their places."""
        if node.target is aten.index.Tensor:
            indices: Any = node.args[1]
            held = self.held.get(node.args[0])  # type: ignore[arg-type]
            where = [d for d, i in enumerate(indices) if i is not None]
            if held is not None and where == [held.dim] and indices[held.dim] in self.inverses:
                return held.rows
        if node.target is aten.index_select.default and node.args[2] in self.inverses:
            held = self.held.get(node.args[0])  # type: ignore[arg-type]
            if held is not None and held.dim == node.args[1]:
                return held.rows
        if node.target is aten.index_put.default:
            given = arguments(node)
            held = self.held.get(given["values"])
            whole = given["self"].meta["val"].shape == given["values"].meta["val"].shape
            plain = not given["accumulate"] and len(given["indices"]) == 1 and self._is_order(given["indices"][0])
            if held is not None and held.dim == 0 and whole and plain:
                return held.rows
        return None

    def _grouped(self, node: fx.Node) -> None:
        x, w, ends = groups(node)
        held, key = self.held.get(x), _key_of(ends)
        if held is None or held.dim != 0 or key is None or w in self.held:
            return
        in_order = self.held.get(key)
        if _bare(self.ids) is key or (in_order is not None and _bare(in_order.rows) is _bare(self.ids)):
            args = (held.rows, w, self.ids, 0, w.meta["val"].shape[0])
            self.held[node] = Sorted(call(self.graph, experts_mm, args, like=node), 0)
            self.products.add(node)

    def _row_by_row(self, node: fx.Node) -> None:
        """An op that takes every row by itself, or sums over rows, does the same to rows in another order."""
        if not isinstance(node.target, torch._ops.OpOverload) or _by_place(node):
            return
        rule = rule_of(node)
        if rule is None:
            return
        names = set[str]()
        for o, dims in zip(operand_nodes(node), rule.operands, strict=True):
            if o in self.held:
                dim = dims[self.held[o].dim]
                if len(dim.factors) != 1 or dim.parts or dim.factors[0] in rule.whole:
                    return
                names.add(dim.factors[0])
        if len(names) != 1:
            return
        (row,) = names
        for o, dims in zip(operand_nodes(node), rule.operands, strict=True):
            if o not in self.held and any(row in d.factors for d in dims):
                return  # rows that are not sorted meet rows that are
        found = [[d for d, dim in enumerate(r or ()) if row in dim.factors] for r in rule.results]
        merged = any(len(d.factors) > 1 or d.parts for r in rule.results for d in r or () if row in d.factors)
        if merged or any(len(f) > 1 for f in found) or len({len(f) for f in found}) != 1:
            return
        args, kwargs = tree_map(self._rows, (node.args, node.kwargs))
        made = _simpler(self.graph, node, args) or call(self.graph, node.target, args, kwargs, like=node)
        if not found[0]:
            node.replace_all_uses_with(made)
        elif is_tensor(node):
            self.held[node] = Sorted(made, found[0][0])
        else:
            self.several[node] = (made, [f[0] for f in found])
        self._mark(node, *operand_nodes(node))

    def _mark(self, node: fx.Node, *sources: Any) -> None:
        if not self.products.isdisjoint(sources):
            self.products.add(node)

    def _rows(self, a: Any) -> Any:
        return self.held[a].rows if isinstance(a, fx.Node) and a in self.held else a

    def _sort_again(self) -> None:
        """What reads products in sorted order, and is not followed, reads them sorted again."""
        followed = {*self.held, *self.several}
        for node in [n for n in self.held if n in self.products]:
            held, readers = self.held[node], {u for u in node.users if u not in followed}
            if not readers or self.order is None:
                continue
            with self.graph.inserting_after(node):
                where = [*[None] * held.dim, self.order]
                again = call(self.graph, aten.index.Tensor, (held.rows, where), like=node)
            node.replace_all_uses_with(again, delete_user_cb=readers.__contains__)


def _by_place(node: fx.Node) -> bool:
    """Whether what the op makes of a row may hang on where the row stands: random numbers, causal attention."""
    name, schema = str(node.target), node.target._schema  # type: ignore[union-attr]
    draws = torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]
    return draws or "attention" in name or any(a.name == "key" for a in schema.arguments)


def _counts_up(node: Any) -> bool:
    """Whether a tensor is 0, 1, 2, ..."""
    if not isinstance(node, fx.Node):
        return False
    node = _bare(node)
    if node.target is aten.arange.default:
        return True
    return node.target is aten.arange.start_step and arguments(node)["start"] == 0 and arguments(node)["step"] == 1


def _repeats(node: Any) -> int | None:
    """k where a tensor is 0, 0, ..., 1, 1, ..., each number k times."""
    if _counts_up(node):
        return 1
    if not isinstance(node, fx.Node) or not node.args:
        return None
    source, times = node.args[0], node.args[1] if len(node.args) > 1 else None
    if not _counts_up(source) or not isinstance(times, int):
        return None
    if node.target is aten.repeat_interleave.self_int:
        return times
    floors = node.target is aten.floor_divide.default
    if node.target is aten.div.Tensor_mode:
        floors = arguments(node)["rounding_mode"] in ("floor", "trunc")
    divides = times > 0 and node.meta["val"].shape[0] % times == 0
    return times if floors and divides else None


def _simpler(graph: fx.Graph, node: fx.Node, args: Any) -> fx.Node | None:
    """Rows taken, or summed, each k times in turn: a repetition, or a sum over a dim of k."""
    if node.target in (aten.index.Tensor, aten.index_select.default):
        x = args[0]
        index: Any = args[1][0] if node.target is aten.index.Tensor and len(args[1]) == 1 else None
        index = args[2] if node.target is aten.index_select.default and args[1] == 0 else index
        k = _repeats(index)
        if k is None or index.meta["val"].shape[0] != k * x.meta["val"].shape[0]:
            return None
        return x if k == 1 else call(graph, aten.repeat_interleave.self_int, (x, k, 0), like=node)
    if node.target is aten.index_add.default and args[1] == 0 and not node.kwargs and len(args) == 4:
        base, _, index, rows = args
        k, shape = _repeats(index), list(rows.meta["val"].shape)
        if k is None or shape[0] != k * base.meta["val"].shape[0]:
            return None
        if k > 1:
            rows = call(graph, aten.reshape.default, (rows, [shape[0] // k, k, *shape[1:]]), like=node)
            rows = call(graph, aten.sum.dim_IntList, (rows, [1]), like=node)
        return call(graph, aten.add.Tensor, (base, rows), like=node)
    return None


def _by_number(graph: fx.Graph, node: fx.Node) -> None:
    """The number of its group for every row: as many groups end at or before it."""
    x, w, ends = groups(node)
    with graph.inserting_before(node):
        how = {"dtype": ends.meta["val"].dtype, "device": torch.device("cpu")}  # type: ignore[union-attr]
        rows = call(graph, aten.arange.default, (x.meta["val"].shape[0],), how, like=node)
        ids = call(graph, aten.bucketize.Tensor, (rows, ends), {"right": True}, like=node)
        new = call(graph, experts_mm, (x, w, ids, 0, w.meta["val"].shape[0]), like=node)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
