"""A second semantics of local programs: all ranks in one process, in lockstep, collectives as cat, sum and index.

Written apart from `autopar.runtime.collectives`, so that the two check each other. Ops that stay on a rank run as they
are; an op that changes a layout is applied to the values of all ranks of its group at once, and its backward is the
dual that it declares. Backward of the sum of all ranks' losses is what real ranks compute when each seeds its loss
with 1.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.runtime import collectives, ops  # noqa: F401  register the ops that programs hold

Values = list[Tensor]  # one a rank of a group, in the order of the group
Move = Callable[[Values], Values]
Groups = Mapping[str, Sequence[Sequence[int]]]


def run_stacked(programs: Sequence[fx.GraphModule], inputs: Sequence[Sequence[Any]], groups: Groups) -> list[Any]:
    """Run one program a rank; what each returns, by rank.

    ``inputs[rank]`` go to the placeholders of ``programs[rank]``. The programs have the same changes of layout in the
    same order; what a rank does by itself between two of them, and literals, may differ. ``groups`` gives for every
    group name in them the lists of ranks that communicate, in order of their coordinates: ``{"tp": [[0, 1], [2, 3]]}``.

    >>> graph = fx.Graph()
    >>> raw = graph.call_function(torch.ops.autopar.start_all_reduce.default, (graph.placeholder("x"), "tp", "none"))
    >>> _ = graph.output(graph.call_function(torch.ops.autopar.wait_all_reduce.default, (raw,)))
    >>> program = fx.GraphModule({}, graph)
    >>> run_stacked([program, program], [[torch.tensor(1)], [torch.tensor(2)]], {"tp": [[0, 1]]})
    [tensor(3), tensor(3)]
    """
    ranks = [_Rank(p, i) for p, i in zip(programs, inputs, strict=True)]
    while True:
        step = tuple(rank.advance() for rank in ranks)
        node = step[0]
        assert len({(n.op, str(n.target)) for n in step}) == 1, f"ranks disagree at {node}: {[n.target for n in step]}"
        if node.op == "output":
            return [rank.given(n.args[0]) for rank, n in zip(ranks, step, strict=True)]
        calls = [_bind(n.target, *rank.given((n.args, n.kwargs))) for rank, n in zip(ranks, step, strict=True)]
        for rank, n, result in zip(ranks, step, _over_groups(_own_name(node.target), calls, groups), strict=True):
            rank.record(n, result)


class _Rank:
    """One rank between two changes of layout."""

    def __init__(self, program: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.program, self.inputs = program, iter(inputs)
        self.nodes, self.unused = iter(program.graph.nodes), _last_uses(program)
        self.values: dict[fx.Node, Any] = {}

    def given(self, args: Any) -> Any:
        """Arguments with values in the place of nodes."""
        return fx.node.map_arg(args, self.values.__getitem__)

    def record(self, node: fx.Node, result: Any) -> None:
        """What a node made; what nobody reads any more is let go."""
        self.values[node] = result
        for dead in self.unused[node]:
            del self.values[dead]

    def advance(self) -> fx.Node:
        """Run up to the next change of layout, or the output: that node."""
        node: fx.Node
        for node in self.nodes:
            if node.op == "placeholder":
                self.record(node, next(self.inputs))
            elif node.op == "get_attr":
                self.record(node, operator.attrgetter(str(node.target))(self.program))
            elif node.op == "output" or _changes(node):
                return node
            else:
                self.record(node, self._call(node))
        raise AssertionError("a program without output")

    def _call(self, node: fx.Node) -> Any:
        args, kwargs = self.given((node.args, node.kwargs))
        name = _own_name(node.target)
        if name.startswith("wait_"):
            _check_pair(name, node)
            return args[0]
        assert node.op == "call_function" and callable(node.target), f"{node.op} {node.target} in a local program"
        return node.target(*args, **kwargs)


def _changes(node: fx.Node) -> bool:
    name = _own_name(node.target)
    return name in _CHANGES or name in _LOSSES


def _last_uses(program: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """For each node those whose values nobody reads after it."""
    last = {node: node for node in program.graph.nodes}
    for node in program.graph.nodes:
        last.update(dict.fromkeys(node.all_input_nodes, node))
    uses: dict[fx.Node, list[fx.Node]] = {node: [] for node in program.graph.nodes}
    for node, user in last.items():
        uses[user].append(node)
    return uses


def _own_name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return schema.name.split("::")[1] if schema is not None and schema.name.startswith("autopar::") else ""


def _bind(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(zip([a.name for a in target._schema.arguments], args, strict=False)) | dict(kwargs)


def _check_pair(name: str, node: fx.Node) -> None:
    """A wait names the same cut as its start; real ranks would put the elements in a wrong order."""
    start = node.args[0]
    if isinstance(start, fx.Node) and _own_name(start.target) == name.replace("wait_", "start_"):
        wanted = _bind(start.target, start.args, start.kwargs)
        found = _bind(node.target, node.args, node.kwargs)
        wrong = [k for k, v in found.items() if k != "raw" and wanted[k] != v]
        assert not wrong, f"{node.format_node()} differs from its start in {wrong}: {wanted}"


def _over_groups(name: str, calls: list[dict[str, Any]], groups: Groups) -> list[Any]:
    """Run the op once for every group of ranks that take part in it together."""
    results: list[Any] = [None] * len(calls)
    done: set[int] = set()
    for rank, call in enumerate(calls):
        if rank in done:
            continue
        ranks = [rank]  # an op without a group changes what each rank holds by itself
        if "group" in call:
            ranks = next((list(g) for g in groups[call["group"]] if rank in g), [])
            assert ranks, f"{name}: rank {rank} is in no group {call['group']!r}"
        members = [calls[r] for r in ranks]
        for place, member in enumerate(members):
            assert member.get("n", len(ranks)) == len(ranks), f"{name}: n={member['n']} in a group of {ranks}"
            assert "group" not in call or member.get("c", place) == place, f"{name}: {member} at place {place}"
        for r, result in zip(ranks, _run(name, members), strict=True):
            results[r] = result
        done.update(ranks)
    return results


def _run(name: str, calls: list[dict[str, Any]]) -> Sequence[Any]:
    if name in _LOSSES:
        return _LOSSES[name](calls)
    first = calls[0]
    assert all(_shared(c) == _shared(first) for c in calls), f"{name}: ranks of a group disagree: {calls}"
    forward, backward = _CHANGES[name](first)
    given = [c["stacked"] if "stacked" in c else c["x"] for c in calls]
    done: Sequence[Any] = _Change.apply(forward, backward, *given)  # type: ignore[no-untyped-call]
    return done


def _shared(call: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in call.items() if k not in ("x", "stacked", "c", "group")}


class _Change(torch.autograd.Function):
    """One op over all ranks of a group: values by one move, gradients by its declared dual."""

    @staticmethod
    def forward(ctx: Any, move: Move, dual: Move, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.dual = dual
        return tuple(move(list(xs)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.dual(list(grads))


# Moves: what a group holds before -> after


@lru_cache(maxsize=1 << 12)
def _where(parts: tuple[int, ...], n: int, items: int) -> tuple[Tensor, ...]:
    """The indices of a dim that each coordinate holds: every part is cut on its own, between whole items."""
    held: list[list[Tensor]] = [[] for _ in range(n)]
    for part in torch.split(torch.arange(sum(parts)), list(parts)):
        rows = part.reshape(items, -1) if items else part[:, None]
        for coordinate, piece in enumerate(torch.split(rows, -(-len(rows) // n) or 1)):
            held[coordinate].append(piece.flatten())
    return tuple(torch.cat(h) if h else torch.arange(0) for h in held)


def _same(xs: Values) -> Values:
    return [x.clone(memory_format=torch.contiguous_format) for x in xs]


def _sum(xs: Values) -> Values:
    return _same([reduce(torch.add, xs)] * len(xs))


def _whole(dim: int, parts: Sequence[int], items: int = 0) -> Move:
    def move(xs: Values) -> Values:
        order = torch.cat(_where(tuple(parts), len(xs), items)).argsort()
        return _same([torch.cat(xs, dim).index_select(dim, order.to(xs[0].device))] * len(xs))

    return move


def _own(dim: int, parts: Sequence[int], items: int = 0) -> Move:
    def move(xs: Values) -> Values:
        return [
            x.index_select(dim, w.to(x.device)) for x, w in zip(xs, _where(tuple(parts), len(xs), items), strict=True)
        ]

    return move


def _zeros_elsewhere(dim: int, parts: Sequence[int], items: int = 0) -> Move:
    def one(x: Tensor, where: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[dim] = sum(parts)
        return x.new_zeros(shape).index_copy(dim, where.to(x.device), x)

    return lambda xs: [one(x, w) for x, w in zip(xs, _where(tuple(parts), len(xs), items), strict=True)]


def _first(coordinate: int) -> Move:
    return lambda xs: _same(xs) if coordinate == 0 else [torch.zeros_like(x).contiguous() for x in xs]


def _then(*moves: Move) -> Move:
    return lambda xs: reduce(lambda held, move: move(held), moves, xs)


def _none(xs: Values) -> Values:
    raise AssertionError("an op of backward has no dual")


def _cut(call: dict[str, Any], to: str = "") -> tuple[int, Sequence[int], int]:
    return call[f"{to}dim"], call[f"{to}parts"], call.get(f"{to}items", 0)


_CHANGES: dict[str, Callable[[dict[str, Any]], tuple[Move, Move]]] = {
    "start_all_reduce": lambda a: (_sum, {"none": _same, "all_reduce": _sum}[a["dual"]]),
    "start_all_gather": lambda a: (
        _whole(*_cut(a)),
        {"reduce_scatter": _then(_sum, _own(*_cut(a))), "slice": _own(*_cut(a))}[a["dual"]],
    ),
    "start_reduce_scatter": lambda a: (_then(_sum, _own(*_cut(a))), _whole(*_cut(a))),
    "start_all_to_all": lambda a: (
        _then(_whole(*_cut(a)), _own(*_cut(a, "to_"))),
        _then(_whole(*_cut(a, "to_")), _own(*_cut(a))),
    ),
    "start_scatter": lambda a: (lambda xs: [sum(x[c] for x in xs) for c in range(len(xs))], _none),
    "start_swap": lambda a: (lambda xs: [torch.stack([x[c] for x in xs]) for c in range(len(xs))], _none),
    "shard": lambda a: (
        _own(*_cut(a)),
        {"all_gather": _whole(*_cut(a)), "pad": _zeros_elsewhere(*_cut(a))}[a["dual"]],
    ),
    "pad": lambda a: (_zeros_elsewhere(*_cut(a)), _own(*_cut(a))),
    "keep": lambda a: (_first(a["c"]), {"none": _same, "keep": _first(a["c"])}[a["dual"]]),
    "replicate": lambda a: (_same, _sum),
    "invariant": lambda a: (_same, _first(a["c"])),
}


def _cross_entropy(calls: list[dict[str, Any]]) -> Values:
    """Each rank's sum over the whole vocabulary; its gradient goes to its own shard only (the result is ``I``)."""
    shards = [c["logits"] for c in calls]
    starts = [sum(s.shape[-1] for s in shards[:i]) for i in range(len(shards))]
    assert [c["start"] for c in calls] == starts, f"vocabulary shards start at {[c['start'] for c in calls]}"
    sums = []
    for place, call in enumerate(calls):
        logits = torch.cat([s if i == place else s.detach() for i, s in enumerate(shards)], -1)
        assert logits.shape[-1] == call["vocab"], f"shards of {logits.shape[-1]} classes, not {call['vocab']}"
        sums.append(
            F.cross_entropy(
                logits.reshape(-1, logits.shape[-1]),
                call["target"].reshape(-1),
                ignore_index=call["ignore_index"],
                reduction="sum",
                label_smoothing=call["smoothing"],
            )
        )
    return sums


def _vocabulary(calls: list[dict[str, Any]]) -> list[Any]:
    """Of the op that `cross_entropy_sum_sharded` is made of: the sum, and the logarithm of each row's whole sum."""
    whole = torch.cat([c["logits"] for c in calls], -1)
    rows = whole.float() if whole.dtype in (torch.float16, torch.bfloat16) else whole
    return [(loss, rows.logsumexp(-1)) for loss in _cross_entropy(calls)]


_LOSSES: dict[str, Callable[[list[dict[str, Any]]], list[Any]]] = {
    "cross_entropy_sum_sharded": _cross_entropy,
    "vocabulary_cross_entropy": _vocabulary,
}
