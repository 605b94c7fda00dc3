"""One op run whole and split: what every rule is judged by. Ranks are a loop in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

import autopar.passes.rules  # noqa: F401  (registers the rules)
from autopar.passes.emit import Emitter
from autopar.passes.facts import KEY, Choice, Strategy, annotate, call, fact, operand_nodes
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.make_local import Sizes
from autopar.passes.rules.core import LOCALIZE, PLACES, rule_of
from autopar.passes.strategy import Proposal, at_positions, choices, special_of, strategy
from autopar.runtime.stacked import run_stacked

TOLERANCE = 1e-10  # of the largest element of a result or of the operands, in float64
FROZEN: dict[tuple[Any, ...], tuple[int, ...]] = {}  # by op and operand types: see `frozen`
DUAL = {"S": "S", "R": "P", "P": "R", "I": "I"}
MESHES = (
    Mesh((Axis("a", 2),)),
    Mesh((Axis("a", 3),)),
    Mesh((Axis("time", 2, rows=(2, 4)),)),
    Mesh((Axis("a", 2), Axis("b", 2))),
    Mesh((Axis("a", 2), Axis("b", 3))),
    Mesh((Axis("a", 2), Axis("time", 2, rows=(2, 4)))),
)
MOST_PAIRS = 16  # pairs of choices on two axes tried a call and mesh, spread evenly over all

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Verdict:
    """What became of the strategies of one call: how many were tried, and those that were wrong, with how."""

    tried: tuple[str, ...]
    wrong: tuple[str, ...]


def judge(node: fx.Node, operands: Tensors, meshes: Iterable[Mesh]) -> Verdict:
    """Every strategy of the call's rule against the whole run, value and gradient.

    Raises RuntimeError or ValueError where the op itself does not take the operands.
    """
    whole = Whole(node, operands)
    tried, wrong = [], []
    for mesh in meshes:
        for chosen, order in combinations(node, mesh):
            found = strategy(node, mesh, chosen, order)
            if found is None:
                continue
            tried.append(f"{[a.size for a in mesh.axes]} {[shown(c) for c in chosen]} {order}")
            try:
                run_split(node, found, mesh, operands, whole)
            except (AssertionError, RuntimeError, IndexError, ValueError) as error:
                wrong.append(f"{tried[-1]}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
    return Verdict(tuple(tried), tuple(wrong))


def shown(choice: Choice) -> str:
    """A choice as short text."""
    return f"{choice.kind}:{choice.name}{list(choice.parts) or ''}{f'/{choice.items}' if choice.items else ''}"


def check_call(target: Any, *args: Any, few: bool = False, **kwargs: Any) -> list[str]:
    """The strategies that were tried. Raises AssertionError where the value or a gradient of one differs from the whole
    run's. ``few``: on two ranks only."""
    node, operands = build(target, args, kwargs)
    assert rule_of(node) is not None, f"no rule for {target}"
    verdict = judge(node, operands, MESHES[:1] if few else MESHES)
    assert not verdict.wrong, f"{target}: {verdict.wrong}"
    return list(verdict.tried)


def build(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.Node, Tensors]:
    """A graph with one call, and the tensors of its operand slots; float32 becomes float64."""
    graph = fx.Graph()
    operands: Tensors = []

    def placeholder(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        operands.append(x.detach().double() if x.dtype == torch.float32 else x.detach())
        node = graph.placeholder(f"x{len(operands)}")
        node.meta["val"] = operands[-1].to("meta")
        return node

    inner = tree_map(placeholder, (args, kwargs))
    node = call(graph, target, inner[0], inner[1], like=fx.Node(graph, "", "placeholder", "x", (), {}))
    graph.output(node)
    module = fx.GraphModule(torch.nn.Module(), graph)
    annotate(module, lambda _: True)
    return next(n for n in module.graph.nodes if n.op == "call_function"), operands


def combinations(node: fx.Node, mesh: Mesh) -> Iterator[tuple[tuple[Choice, ...], tuple[int, ...]]]:
    """Every choice that divides on one axis; pairs of them, in both nest orders, on two."""
    named = [[c for c in choices(node, mesh, a) if c.kind not in ("I", "R")] for a in range(len(mesh.axes))]
    if len(mesh.axes) == 1:
        in_parts = choices(node, mesh, 0, proposals(node))
        yield from (((c,), (0,)) for c in dict.fromkeys([*named[0], *(c for c in in_parts if c.parts or c.items)]))
        return
    every = list(itertools.product(itertools.product(*named), ((0, 1), (1, 0))))
    yield from every[:: max(1, -(-len(every) // MOST_PAIRS))]


def proposals(node: fx.Node) -> list[Proposal]:
    """Each factor of at least four elements cut in a third and the rest, and in halves, also between pairs of elements;
    or between items of two or three elements."""
    found = rule_of(node)
    assert found is not None
    lengths = dict(found.sizes)
    slots = [(dims, v.meta["val"].shape) for dims, v in zip(found.operands, operand_nodes(node))]
    slots += [
        (dims, v.shape) for dims, v in zip(found.results, fact(node).values) if dims is not None and v is not None
    ]
    for dims, shape in slots:
        lengths |= {d.factors[0]: n for d, n in zip(dims, shape) if len(d.factors) == 1 and not d.parts}
    long = {f: n for f, n in lengths.items() if n >= 4 and f in found.factors()}
    cuts = [(f, (n // by, n - n // by)) for f, n in long.items() for by in (2, 3)]
    in_parts = [(f, parts, items) for f, parts in cuts for items in (0, parts[0] // 2)]
    return in_parts + [(f, (), n // size) for f, n in long.items() for size in (2, 3) if n % size == 0]


class Whole:
    """The op run whole: its values, cotangents drawn for them, and the gradient that reaches each operand slot."""

    def __init__(self, node: fx.Node, operands: Tensors) -> None:
        key = (node.target, *(x.dtype for x in operands))
        if key not in FROZEN:
            FROZEN[key] = frozen(node, operands)
        self.frozen = FROZEN[key]
        leaves = [leaf(x, i not in self.frozen) for i, x in enumerate(operands)]
        self.results = run(node, leaves)
        self.cotangents = [torch.randn_like(r) if differentiable(r) else None for r in self.results]
        self.grads = gradients(self.results, leaves, self.cotangents)
        sizes = [float(x.detach().abs().max()) for x in operands if differentiable(x) and x.numel()]
        self.floor = TOLERANCE * (max(sizes, default=1.0) or 1.0)


def frozen(node: fx.Node, operands: Tensors) -> tuple[int, ...]:
    """The operand slots that torch has no gradient for: found by trying each."""
    found = []
    for i in range(len(operands)):
        leaves = [leaf(y, i == j) for j, y in enumerate(operands)]
        try:
            results = run(node, leaves)
            gradients(results, leaves, [torch.randn_like(r) if differentiable(r) else None for r in results])
        except (RuntimeError, NotImplementedError):
            found.append(i)
    return tuple(found)


def run_split(node: fx.Node, chosen: Strategy, mesh: Mesh, operands: Tensors, whole: Whole) -> None:
    """The op run on every coordinate of the mesh with its piece of each operand; pieces put together are the whole."""
    adds = any(c.kind == "linear" for c in chosen.choices)
    special = next((c.name for c in chosen.choices if c.kind == "special"), None)
    pieces = [distribute(x, layout, mesh) for x, layout in zip(operands, chosen.operands)]
    leaves = [{c: leaf(x, i not in whole.frozen) for c, x in piece.items()} for i, piece in enumerate(pieces)]
    if special is None and not any(at_positions(node, c) for c in chosen.choices):
        outs = {c: run_local(node, chosen, mesh, c, [x[c] for x in leaves]) for c in coordinates(mesh)}
    else:
        outs = run_emitted(node, chosen, mesh, leaves)
    flows = []
    for i, result in enumerate(whole.results):
        layout = chosen.results[i]
        assert layout is not None
        made = {c: outs[c][i] for c in coordinates(mesh)}
        close(assemble(made, layout, mesh, result), result, f"result {i}", whole.floor, adds)
        cotangent = whole.cotangents[i]
        if cotangent is not None:
            parts = distribute(cotangent, dual(layout), mesh)
            flows += [(made[c], parts[c]) for c in coordinates(mesh) if made[c].requires_grad]
    wanted = [x for piece in leaves for x in piece.values()]
    grads = iter(gradients([r for r, _ in flows], wanted, [g for _, g in flows]))
    for i, (operand, layout) in enumerate(zip(operands, chosen.operands)):
        got = {c: next(grads) for c in leaves[i]}
        if differentiable(operand):
            close(assemble(got, dual(layout), mesh, operand), whole.grads[i], f"gradient {i}", whole.floor, adds)


def run_local(node: fx.Node, chosen: Strategy, mesh: Mesh, at: tuple[int, ...], local: Tensors) -> Tensors:
    """The op on the local operands of one coordinate, its literal sizes made local."""
    values = iter(local)
    args, kwargs = tree_map(lambda a: next(values) if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
    results = tuple(
        layout.local_shape(v.shape, mesh, at) if v is not None and layout is not None else None
        for v, layout in zip(fact(node).values, chosen.results)
    )
    if node.target in LOCALIZE:
        sizes = Sizes(tuple(tuple(x.shape) for x in local), results)
        args, kwargs = LOCALIZE[node.target](node, args, kwargs, sizes)
    outs = tensors(node.target(*args, **kwargs))
    assert [tuple(o.shape) for o in outs] == [r for r in results if r is not None], f"{node.target} {chosen}: shapes"
    return outs


def run_emitted(
    node: fx.Node, chosen: Strategy, mesh: Mesh, leaves: list[dict[tuple[int, ...], torch.Tensor]]
) -> dict[tuple[int, ...], Tensors]:
    """The lowering of a special, or of a cut along positions, on every rank, run by the stacked interpreter."""
    node.meta[KEY] = replace(fact(node), strategy=chosen)
    programs = []
    for at in coordinates(mesh):
        emitter = Emitter(mesh, at, {a.name: a.name for a in mesh.axes})
        emitter.at = node
        for operand, piece in zip([n for n in node.graph.nodes if n.op == "placeholder"], leaves):
            emitter.env[operand] = emitter.graph.placeholder(operand.name)
            emitter.env[operand].meta["val"] = piece[at].to("meta")
        special = next(((c.name, a) for a, c in enumerate(chosen.choices) if c.kind == "special"), None)
        lowered = special_of(node, special[0]).lower(emitter, node, special[1]) if special else None
        emitter.graph.output(lowered or PLACES[node.target](emitter, node))
        programs.append(fx.GraphModule(torch.nn.Module(), emitter.graph))
    ranks = {at: rank for rank, at in enumerate(coordinates(mesh))}
    groups = {}
    for a, named in enumerate(mesh.axes):
        peers = {at: [ranks[(*at[:a], c, *at[a + 1 :])] for c in range(named.size)] for at in ranks}
        groups[named.name] = [list(g) for g in dict.fromkeys(map(tuple, peers.values()))]
    outs = run_stacked(programs, [[piece[at] for piece in leaves] for at in ranks], groups)
    return {at: tensors(outs[rank]) for at, rank in ranks.items()}


def coordinates(mesh: Mesh) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(a.size) for a in mesh.axes)))


def distribute(x: torch.Tensor, layout: Layout, mesh: Mesh) -> dict[tuple[int, ...], torch.Tensor]:
    """The piece of ``x`` at each coordinate: cut where sharded, random addends where partial."""
    partial = [a for a, kind in enumerate(layout.kinds) if kind == "P"]
    keys = list(itertools.product(*(range(mesh.axes[a].size) for a in partial)))
    addends = {key: noise(x) for key in keys[1:]}
    addends[keys[0]] = x - sum(addends.values()) if len(keys) > 1 else x
    return {
        at: take(addends[tuple(at[a] for a in partial)], layout.runs(tuple(x.shape), mesh, at))
        for at in coordinates(mesh)
    }


def noise(x: torch.Tensor) -> torch.Tensor:
    """Of the size of x."""
    if not differentiable(x):
        return torch.randint_like(x, -9, 9)
    finite = x.abs().nan_to_num(0, 0, 0)
    return torch.randn_like(x) * (float(finite.max()) if x.numel() and float(finite.max()) else 1.0)


def take(x: torch.Tensor, runs: tuple[tuple[tuple[int, int], ...], ...]) -> torch.Tensor:
    for d, pieces in enumerate(runs):
        if pieces != ((0, x.shape[d]),):
            x = torch.cat([x.narrow(d, lo, n) for lo, n in pieces], d)
    return x


def assemble(
    pieces: dict[tuple[int, ...], torch.Tensor], layout: Layout, mesh: Mesh, like: torch.Tensor
) -> torch.Tensor:
    """The whole value from its pieces: placed where sharded, summed where partial, equal where replicated."""
    same = [a for a, kind in enumerate(layout.kinds) if kind in "RI"]
    versions: dict[tuple[int, ...], torch.Tensor] = {}
    for at, piece in pieces.items():
        key = tuple(at[a] for a in same)
        version = versions.setdefault(key, torch.zeros(like.shape, dtype=like.dtype))
        runs = layout.runs(tuple(like.shape), mesh, at)
        assert list(piece.shape) == [sum(n for _, n in own) for own in runs], f"{layout}: a piece of {piece.shape}"
        for block in itertools.product(*map(spans, runs)):
            here, there = tuple(h for h, _ in block), tuple(t for _, t in block)
            had, more = version[here], piece.detach()[there]
            version[here] = had + more if like.dtype != torch.bool else had | more
    first, *others = versions.values()
    for other in others:
        close(other, first, f"{layout}: replicas differ")
    return first


def spans(runs: tuple[tuple[int, int], ...]) -> list[tuple[slice, slice]]:
    """Where each run of one dim lies in the whole and in the piece."""
    found, at = [], 0
    for start, length in runs:
        found.append((slice(start, start + length), slice(at, at + length)))
        at += length
    return found


def dual(layout: Layout) -> Layout:
    return Layout("".join(DUAL[k] for k in layout.kinds), layout.dims)


def leaf(x: torch.Tensor, trainable: bool) -> torch.Tensor:
    return x.detach().clone().requires_grad_(trainable and differentiable(x))


def differentiable(x: torch.Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex


def run(node: fx.Node, operands: Tensors) -> Tensors:
    values = iter(operands)
    args, kwargs = tree_map(lambda a: next(values) if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
    return tensors(node.target(*args, **kwargs))  # type: ignore[operator]


def tensors(value: Any) -> Tensors:
    return [v for v in tree_leaves(value) if isinstance(v, torch.Tensor)]


def gradients(results: Tensors, leaves: Tensors, cotangents: list[Any]) -> Tensors:
    """Gradients of the leaves; zeros where none flows."""
    pairs = [(r, g) for r, g in zip(results, cotangents) if r.requires_grad and g is not None]
    wanted = [x for x in leaves if x.requires_grad]
    if not pairs or not wanted:
        return [torch.zeros_like(x) for x in leaves]
    found = iter(torch.autograd.grad([r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    grads = [next(found) if x.requires_grad else None for x in leaves]
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads)]


def close(got: torch.Tensor, want: torch.Tensor, say: str, floor: float = TOLERANCE, adds: bool = False) -> None:
    """Within the tolerance of the largest finite element, or ``floor``. ``adds``: addends of inf may add up to nan."""
    if not want.dtype.is_floating_point and not want.dtype.is_complex:
        assert torch.equal(got, want), say
        return
    finite = want.detach().abs().nan_to_num(0.0, 0.0, 0.0)
    limit = max(TOLERANCE * float(finite.max()) if want.numel() else 0.0, floor)
    if adds:
        beyond = ~want.isfinite()
        got, want = got.masked_fill(beyond & ~got.isfinite(), 0), want.masked_fill(beyond & ~got.isfinite(), 0)
    same = torch.allclose(got.detach(), want.detach(), rtol=0, atol=limit, equal_nan=True)
    assert same, f"{say}: off by {float((got - want).detach().abs().max()):.3g}"
