"""divide_work: afterwards every op has a choice on one more axis, so that as much work as possible is divided.

Ops are decided in order. What earlier choices still matter for is the layouts of the tensors that later ops read, so
of all ways to reach the same layouts of those only the cheapest is kept, and of these the `BEAM` cheapest. The batch
dim is never cut here: that would be data parallelism under another name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from autopar.passes.changes import cost, settle
from autopar.passes.completion import Completion, is_op, produced_parts, result_slots
from autopar.passes.facts import Choice, Strategy, Value, fact, operand_nodes, value
from autopar.passes.layout import BYTE, Layout
from autopar.passes.strategy import MOST_PARTS, Proposal, rule

BEAM = 96  # partial assignments kept
FLOP = 100.0  # an undivided FLOP costs as much as moving this many bytes: a pinned axis is an obligation
WEIGHT = 100.0  # likewise a byte of an undivided weight or embedding table
IDLE = 1e-4  # a byte of an undivided result: breaks ties in favour of dividing
PARTIAL_BYTE = 1e-3  # a byte kept as a partial sum: breaks ties in favour of reducing early
PRODUCTS = {
    *("linear", "mm", "bmm", "matmul", "addmm", "baddbmm", "einsum", "addbmm", "bilinear", "experts_mm"),
    *("opaque", "opaque_drawing", "opaque_seeded"),
}

aten = torch.ops.aten

Option = tuple[Choice, Strategy]
Keep = Callable[[fx.Node, list[Option], int], list[Option]]  # of what an op may do on an axis, what it should


@dataclass(frozen=True)
class Undivided:
    """An op that the axis leaves whole, and why."""

    fqn: str
    op: str
    why: str


@dataclass(frozen=True, eq=False)
class Live:
    """A tensor that later ops still read: how it is left, and the layouts in which it already exists. Interned.

    ``debt``: what reducing it will cost where it exists as a partial sum only.
    """

    layout: Layout
    reached: frozenset[Layout]
    debt: float


@dataclass(frozen=True, eq=False)
class Partial:
    """Choices for the ops so far, as a chain; ``live`` in the order of the live tensors. ``rank``: price and debts, by
    which assignments are kept."""

    rank: float
    price: float
    live: tuple[Live | None, ...]
    parent: Partial | None
    node: fx.Node | None
    option: Option | None


RANK = attrgetter("rank")


def divide_work(
    state: Completion, axis: int, batched: Mapping[fx.Node, int], keep: Keep | None = None
) -> list[Undivided]:
    """Decide ``axis`` for all ops and leaves of ``state``. ``batched``: the dim of each tensor that carries the batch;
    ``keep``: leaves options out.

    Returns the matmuls, attentions and convolutions that are left whole.
    """
    for leaf, layout in state.leaves.items():
        state.leaves[leaf] = layout.with_kind(axis, "I")
    search = _Search(state, axis, batched, keep)
    best: Partial | None = search.run()
    menu = search.menu
    while best is not None:
        if best.node is not None and best.option is not None:
            state.take(best.node, axis, *best.option)
        best = best.parent
    for leaf, layout in search.leaves(state).items():
        state.leaves[leaf] = layout
    return _left_whole(state, axis, menu)


class _Search:
    def __init__(self, state: Completion, axis: int, batched: Mapping[fx.Node, int], keep: Keep | None = None) -> None:
        self.state, self.axis, self.batched, self.keep = state, axis, batched, keep
        self.mesh, self.n = state.mesh.without_wires(), state.mesh.axes[axis].size
        self.proposals = propose_parts(state.gm)
        self.parameters = {n for n in state.leaves if n.op == "get_attr" and n.target in state.parameters}
        self.menu: dict[fx.Node, list[tuple[Choice, Strategy]]] = {}
        self.live: list[fx.Node] = []
        self.interned: dict[tuple[Value, Layout, frozenset[Layout]], Live] = {}

    def run(self) -> Partial:
        """The cheapest assignment found; its chain holds the choices, last op first."""
        nodes = list(self.state.gm.graph.nodes)
        place = {n: i for i, n in enumerate(nodes)}
        last = {n: max((place[u] for u in n.users), default=-1) for n in nodes}
        beam = [Partial(0.0, 0.0, (), None, None, None)]
        for at, node in enumerate(nodes):
            if node in self.parameters:
                continue  # nothing is known of it before its first reader: see _decide
            if node in self.state.leaves:
                beam = self._grown(beam, [node], self._fresh(node, self.state.leaves[node]))
            elif is_op(node):
                beam = self._decide(node, beam)
            elif node.op == "output":
                beam = self._finish(node, beam)
            beam = self._drop([t for t in self.live if last[t] <= at], beam)
        return min(beam, key=lambda p: p.price)

    def leaves(self, state: Completion) -> dict[fx.Node, Layout]:
        """How each parameter is left for the program: as its consumers first asked, given the final choices."""
        found: dict[fx.Node, Layout] = {}
        for node in state.gm.graph.nodes:
            if node in state.plans:
                for operand, want in zip(operand_nodes(node), state.plans[node].operands, strict=True):
                    if operand in self.parameters and operand not in found:
                        found[operand] = self._entry(operand, want)
        return found

    def _entry(self, leaf: fx.Node, want: Layout) -> Layout:
        """The leaf's layout on the other axes, with what ``want`` has on this one."""
        base, dim = self.state.leaves[leaf], want.dim_of(self.axis)
        if dim is None:
            return base.with_kind(self.axis, want.kinds[self.axis])
        try:
            return base.with_kind(self.axis, "R").with_shard(self.axis, dim, want.dims[dim].parts, want.dims[dim].items)
        except ValueError:
            return base

    def _fresh(self, node: fx.Node, layout: Layout) -> Live:
        layout = settle(layout, value(node), self.mesh)
        return self._live(value(node), layout, frozenset((layout,)))

    def _live(self, v: Value, layout: Layout, reached: frozenset[Layout]) -> Live:
        key = (v, layout, reached)
        if key not in self.interned:
            partial = all(r.kinds[self.axis] == "P" for r in reached)
            settled = layout.with_kind(self.axis, "I")
            self.interned[key] = Live(layout, reached, self._moved(layout, settled, v) if partial else 0.0)
        return self.interned[key]

    def _moved(self, source: Layout, target: Layout, v: Value) -> float:
        """The cheapest change in bytes moved on neutral wires: what is divided does not hang on the cluster."""
        return cost(source, target, v, self.mesh) / BYTE

    def _read(self, operand: fx.Node, have: Live | None, want: Layout) -> tuple[float, Live]:
        """Price of reading a tensor in layout ``want``, and how it exists afterwards."""
        v, price = value(operand), 0.0
        if have is None:  # a parameter is left as its first reader wants it
            entry = self._entry(operand, want)
            if entry.kinds[self.axis] == "R":
                price += self._moved(entry.with_kind(self.axis, "I"), entry, v)
            entry = settle(entry, v, self.mesh)
            have = self._live(v, entry, frozenset((entry,)))
        want = settle(want, v, self.mesh)
        if want not in have.reached:
            price += min(self._moved(r, want, v) for r in have.reached)
            have = self._live(v, have.layout, have.reached | {want})
        return price, have

    def _decide(self, node: fx.Node, beam: list[Partial]) -> list[Partial]:
        parts = list(self.proposals.get(node, ()))
        unread = dict.fromkeys(o for o in operand_nodes(node) if o in self.parameters and o not in self.live)
        beam = self._grown(beam, list(unread), None)
        index = {t: i for i, t in enumerate(self.live)}
        operands = [(index[o], o) for o in operand_nodes(node)]
        found = rule(node)
        for slot, (at, _) in enumerate(operands if found is not None else ()):
            for have in dict.fromkeys(
                p.live[at] for p in beam
            ):  # what arrives cut in parts may go on in the same parts
                if have is not None and found is not None:
                    parts += produced_parts(found, slot, have.layout, self.axis)
        options = self.state.candidates(node, self.axis, list(dict.fromkeys(parts)))
        options = [(c, p) for c, p in options if not _cuts_batch(node, p, self.axis, self.batched)]
        options = self.keep(node, options, self.axis) if self.keep else options
        self.menu[node] = options
        results = result_slots(node)
        produced = [r for r in results if r is not None]
        after: dict[tuple[Live | None, ...], tuple[float, Partial, tuple[Choice, Strategy]]] = {}
        for choice, plan in options:
            own = own_cost(node, choice, plan, self.axis, self.n)
            left = zip(results, plan.results, strict=True)
            new = [self._fresh(r, layout) for r, layout in left if r is not None and layout is not None]
            read: dict[tuple[int, Live | None], tuple[float, Live]] = {}
            for partial in beam:
                price, live = partial.price + own, [*partial.live, *new]
                for slot, (at, operand) in enumerate(operands):
                    seen = (slot, live[at])
                    if seen not in read:
                        read[seen] = self._read(operand, live[at], plan.operands[slot])
                    more, live[at] = read[seen]
                    price += more
                key = tuple(live)
                if key not in after or price < after[key][0] - 1e-9:
                    after[key] = (price, partial, (choice, plan))
        self.live += produced
        made = [Partial(_rank(price, key), price, key, p, node, option) for key, (price, p, option) in after.items()]
        return sorted(made, key=RANK)[: 4 * BEAM]

    def _finish(self, output: fx.Node, beam: list[Partial]) -> list[Partial]:
        (result,) = output.args
        assert isinstance(result, dict)
        outputs = result["outputs"]
        loss = outputs[0] if outputs else None
        if not isinstance(loss, fx.Node) or value(loss).shape or loss not in self.live:
            return beam
        at = self.live.index(loss)
        done = []
        for p in beam:
            have = p.live[at]
            price = 0.0
            if have is not None:
                want = settle(have.layout.with_kind(self.axis, "I"), value(loss), self.mesh)
                price = self._moved(have.layout, want, value(loss))
            done.append(Partial(p.rank, p.price + price, p.live, p, None, None))
        return done

    def _grown(self, beam: list[Partial], nodes: list[fx.Node], held: Live | None) -> list[Partial]:
        """The assignments with more live tensors, all left alike."""
        if not nodes:
            return beam
        self.live += nodes
        more = (held,) * len(nodes)
        return [Partial(p.rank, p.price, (*p.live, *more), p.parent, p.node, p.option) for p in beam]

    def _drop(self, dead: list[fx.Node], beam: list[Partial]) -> list[Partial]:
        """Forget tensors that nothing reads any more; equal remainders are one."""
        if dead:
            gone = set(dead)
            keep = [i for i, t in enumerate(self.live) if t not in gone]
            self.live = [self.live[i] for i in keep]
            kept: dict[tuple[Live | None, ...], Partial] = {}
            for p in beam:
                have = p.live
                live = tuple([have[i] for i in keep])
                if live not in kept or p.price < kept[live].price:
                    kept[live] = p
            beam = [
                Partial(_rank(p.price, live), p.price, live, p.parent, p.node, p.option) for live, p in kept.items()
            ]
        return sorted(beam, key=RANK)[:BEAM]


def _rank(price: float, live: Iterable[Live | None]) -> float:
    return price + sum([t.debt for t in live if t is not None])


def own_cost(node: fx.Node, choice: Choice, plan: Strategy, axis: int, n: int) -> float:
    """Work and weights that the axis does not divide, in bytes moved; small terms break ties.

    A product with a weight counts as divided only where the weight is: cutting its rows instead would be data or
    sequence parallelism under the name of the axis.
    """
    share, idle = (n - 1) / n, choice.kind in ("I", "R", "linear")
    out = sum(v.nbytes for v in fact(node).values if v is not None)
    total = {"I": 0.0, "factor": 0.0, "special": 0.0, "R": 0.02, "linear": 0.02 + PARTIAL_BYTE * out}[choice.kind]
    whole = [
        value(o).nbytes
        for o, want in zip(operand_nodes(node), plan.operands, strict=True)
        if o.op == "get_attr" and len(value(o).shape) > 1 and want.kinds[axis] != "S"
    ]
    weighted = flops(node) > 0 or node.target is aten.embedding.default
    if weighted:
        total += share * WEIGHT * sum(whole)
    if idle or (weighted and whole):
        total += share * FLOP * flops(node)
    if idle:
        total += share * IDLE * out
    return total


_COUNTED: dict[tuple[Any, str], float] = {}  # FLOPs of equal calls


def flops(node: fx.Node) -> float:
    """FLOPs of the whole op, forward, as torch's counter has them; 0 but of products, convolutions and the like."""
    if not has_flops(node.target):
        return 0.0
    if "autopar_flops" not in node.meta:
        from torch.utils.flop_counter import FlopCounterMode

        args, kwargs = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
        if is_recurrent(node.target):
            node.meta["autopar_flops"] = float(recurrent_flops(args))
            return float(node.meta["autopar_flops"])
        described = tree_map(
            lambda a: (tuple(a.shape), a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a, (args, kwargs)
        )
        key = node.target, repr(described)
        if key not in _COUNTED:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                node.target(*args, **kwargs)  # type: ignore[operator]
            _COUNTED[key] = float(counter.get_total_flops())
        node.meta["autopar_flops"] = _COUNTED[key]
    return float(node.meta["autopar_flops"])


def recurrent_flops(args: tuple[Any, ...]) -> int:
    """Of a recurrent layer or cell, forward: every row and moment times every weight. Torch's counter, which sees no
    such op, has as many once it is taken apart, cell by cell.

    >>> x, h, w = (torch.empty(s, device="meta") for s in ((5, 8, 3), (1, 8, 4), (12, 3)))
    >>> recurrent_flops((x, h, [w, torch.empty(12, 4, device="meta")]))
    6720
    """
    x, _, *rest = args
    weights = [w for w in tree_leaves(rest) if isinstance(w, torch.Tensor) and w.dim() == 2]
    return int(2 * x.numel() // x.shape[-1] * sum(w.numel() for w in weights))


def is_recurrent(target: Any) -> bool:
    """Whether an op is a recurrent layer or cell."""
    return getattr(target, "namespace", "") == "aten" and _name(target).partition("_")[0] in ("lstm", "gru", "rnn")


def _name(target: Any) -> str:
    return str(getattr(getattr(target, "overloadpacket", None), "__name__", ""))


@lru_cache(maxsize=1 << 10)
def has_flops(target: Any) -> bool:
    """Whether the op may have FLOPs."""
    name = _name(target)
    return name in PRODUCTS or "conv" in name or "attention" in name or is_recurrent(target)


def _cuts_batch(node: fx.Node, plan: Strategy, axis: int, batched: Mapping[fx.Node, int]) -> bool:
    for operand, want in zip(operand_nodes(node), plan.operands, strict=True):
        dim = want.dim_of(axis)
        if dim is not None and batched.get(operand) == dim:
            return True
    return any(
        layout is not None and layout.dim_of(axis) is not None and batched.get(result) == layout.dim_of(axis)
        for result, layout in zip(result_slots(node), plan.results, strict=True)
        if result is not None
    )


def propose_parts(gm: fx.GraphModule) -> dict[fx.Node, list[Proposal]]:
    """Parts, and items, in which consumers further down will want a dim cut, carried back to the op that makes it."""
    wanted: dict[tuple[fx.Node, int], dict[tuple[tuple[int, ...], int], None]] = {}
    proposals: dict[fx.Node, list[Proposal]] = {}
    for node in reversed(list(gm.graph.nodes)):
        if not is_op(node):
            continue
        found = rule(node)
        if found is None:
            continue
        mine: dict[Proposal, None] = {}
        for result, named in zip(result_slots(node), found.results, strict=True):
            for d, dim in enumerate(named or ()):
                if result is not None and len(dim.factors) == 1:
                    asked = wanted.get((result, d), {})
                    mine.update(
                        dict.fromkeys((dim.factors[0], () if p == dim.parts else p, items) for p, items in asked)
                    )
        proposals[node] = _few(mine)
        for operand, dims in zip(operand_nodes(node), found.operands, strict=True):
            for d, dim in enumerate(dims):
                into = wanted.setdefault((operand, d), {})
                if dim.parts:
                    into[dim.parts, 0] = None
                if len(dim.factors) == 1:
                    own = ((p or dim.parts, items) for f, p, items in mine if f == dim.factors[0])
                    into.update(dict.fromkeys(way for way in own if not dim.parts or way[0] == dim.parts))
                else:
                    outer = 1
                    for f in dim.factors:
                        size, length = found.sizes[f], value(operand).shape[d]
                        if f not in found.whole and outer <= MOST_PARTS:
                            parts = (length // outer,) * outer if outer > 1 else ()
                            if parts:
                                into[parts, 0] = None
                            if outer * size < length:
                                into[parts, size] = None
                        outer *= size
    return proposals


def _few(proposals: Iterable[Proposal]) -> list[Proposal]:
    """The first few, those in items counted apart."""
    listed = list(proposals)
    return [p for p in listed if not p[2]][:4] + [p for p in listed if p[2]][:4]


def _left_whole(state: Completion, axis: int, menu: Mapping[fx.Node, list[tuple[Choice, Strategy]]]) -> list[Undivided]:
    left = []
    for node in menu:
        if state.chosen[node][axis].kind in ("factor", "special") or not flops(node):
            continue
        n = state.mesh.axes[axis].size
        divisible = [c for c, _ in menu[node] if c.kind in ("factor", "special")]
        found = rule(node)
        if found is None:
            why = "it has no rule"
        elif divisible:
            why = "dividing it would cost more than it saves"
        elif found.why:
            why = found.why
        else:
            sizes = ", ".join(str(value(o).shape) for o in operand_nodes(node))
            why = f"no dim of {sizes} that may be cut has a piece for each of {n} ranks"
        left.append(Undivided(fact(node).fqn or node.name, str(node.target), why))
    return left
