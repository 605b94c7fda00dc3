"""Every change of layout, as value and as adjoint: in the stacked interpreter on all meshes, on real ranks bit for bit.

A layout says what the ranks hold of a value and what they hold of its gradient (S of S, P of R, I of I, R of P). A
change is right when ranks that hold ``x`` in the first layout end with ``x`` in the second, and when ranks that hold a
gradient ``g`` of the second layout end with ``g`` as the first layout's gradient has it. Values are whole numbers, so
that sums are exact in any order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autopar.passes.changes import path, settle
from autopar.passes.emit import Emitter
from autopar.passes.facts import Value
from autopar.passes.layout import WHOLE, Axis, Layout, Mesh, Split
from autopar.runtime import collectives as c
from autopar.runtime import stacked
from autopar.runtime.pool import RankPool
from autopar.runtime.stacked import run_stacked

Walk = tuple[Layout, ...]  # neighbours differ on one axis
GRADIENT = str.maketrans("SRIP", "SPIR")
SHAPES = [(4, 8), (6, 5), (3, 2), (1, 7, 2)]


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(tuple(Axis(f"a{i}", size) for i, size in enumerate(sizes)))


def ways_of(size: int) -> Iterator[Split]:
    """Straight, in parts, and between items of two elements."""
    yield Split()
    if size >= 4:
        yield Split((), (size - 2, 2))
        yield Split((), (1, size - 3, 2))
    if size >= 6 and size % 2 == 0:
        yield Split((), (), size // 2)


def layouts(shape: Sequence[int], axes: int, with_parts: bool) -> list[Layout]:
    """All layouts of a tensor: every kind on every axis, both orders where two axes cut one dim."""
    ndim, found = len(shape), {}
    for words in itertools.product(["R", "I", "P", *range(ndim)], repeat=axes):
        kinds = "".join("S" if isinstance(w, int) else w for w in words)
        cuts = [tuple(a for a, w in enumerate(words) if w == d) for d in range(ndim)]
        choices = []
        for d, cut in enumerate(cuts):
            ways = list(ways_of(shape[d])) if with_parts else [WHOLE]
            orders = itertools.permutations(cut)
            choices.append([replace(way, axes=order) for order in orders for way in ways] if cut else [WHOLE])
        found.update(dict.fromkeys(Layout(kinds, dims) for dims in itertools.product(*choices)))
    return list(found)


def is_step(one: Layout, two: Layout) -> bool:
    """Whether the layouts differ on one axis, which is the innermost on its dims."""
    changed = [a for a in range(len(one.kinds)) if cut_of(one, a) != cut_of(two, a)]
    if len(changed) != 1 or one == two:
        return False
    (axis,) = changed
    inner = all(layout.dims[d].axes[-1] == axis for layout in (one, two) if (d := layout.dim_of(axis)) is not None)
    return inner and rest_of(one, axis) == rest_of(two, axis)


def cut_of(layout: Layout, axis: int) -> Any:
    dim = layout.dim_of(axis)
    return layout.kinds[axis] if dim is None else (dim, replace(layout.dims[dim], axes=()))


def rest_of(layout: Layout, axis: int) -> list[Split]:
    cuts = [replace(s, axes=tuple(a for a in s.axes if a != axis)) for s in layout.dims]
    return [cut if cut.axes else WHOLE for cut in cuts]


# What the ranks hold


def hold(x: Tensor, layout: Layout, mesh: Mesh, generator: torch.Generator) -> list[Tensor]:
    """Local tensors by rank; the addends of a partial axis are drawn."""
    partial = [a for a, kind in enumerate(layout.kinds) if kind == "P"]
    addends = {(): x}
    for a in partial:
        addends = {
            (*key, i): part
            for key, value in addends.items()
            for i, part in enumerate(addends_of(value, mesh.axes[a].size, generator))
        }
    out = []
    for rank in range(mesh.ranks):
        coordinates = mesh.coordinates(rank)
        local = addends[tuple(coordinates[a] for a in partial)]
        for dim, runs in enumerate(layout.runs(tuple(x.shape), mesh, coordinates)):
            local = torch.cat([local.narrow(dim, start, n) for start, n in runs], dim)
        out.append(local.clone())
    return out


def addends_of(x: Tensor, n: int, generator: torch.Generator) -> list[Tensor]:
    drawn = [numbers(x.shape, generator) for _ in range(n - 1)]
    return [*drawn, x - sum(drawn)]


def numbers(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randint(-9, 10, tuple(shape), generator=generator).double()


def assert_holds(locals_: Sequence[Tensor], x: Tensor, layout: Layout, mesh: Mesh, what: str) -> None:
    """The ranks hold ``x`` in ``layout``: pieces in place, copies equal, addends summing up."""
    sums: dict[tuple[int, ...], Tensor] = {}
    for rank, local in enumerate(locals_):
        coordinates = mesh.coordinates(rank)
        assert local.is_contiguous(), what
        placed, offsets = torch.zeros_like(x), layout.runs(tuple(x.shape), mesh, coordinates)
        index = [torch.cat([torch.arange(s, s + n) for s, n in runs]) for runs in offsets]
        assert local.shape == tuple(map(len, index)), f"{what}: rank {rank} holds {tuple(local.shape)}"
        placed[torch.meshgrid(*index, indexing="ij")] = local
        key = tuple(-1 if layout.kinds[a] == "P" else i for a, i in enumerate(coordinates))
        sums[key] = sums.get(key, 0) + placed
    for key, total in sums.items():
        coordinates = tuple(max(i, 0) for i in key)
        wanted = torch.zeros_like(x)
        index = [
            torch.cat([torch.arange(s, s + n) for s, n in r]) for r in layout.runs(tuple(x.shape), mesh, coordinates)
        ]
        grid = torch.meshgrid(*index, indexing="ij")
        wanted[grid] = x[grid]
        assert torch.equal(total, wanted), f"{what}: wrong at {key}: {total} is not {wanted}"


# The program of a walk


def program(walk: Walk, shape: Sequence[int], mesh: Mesh, rank: int, names: Sequence[str]) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for one, two in itertools.pairwise(walk):
        axis = next(a for a in range(len(one.kinds)) if cut_of(one, a) != cut_of(two, a))
        x = change(graph, x, one, two, axis, shape, mesh, rank, names[axis])
    graph.output((x,))
    return fx.GraphModule({}, graph)


def held(layout: Layout, axis: int, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[int, list[int], int]:
    """The dim that the axis cuts, the lengths of its parts before it does, and the items of each."""
    dim = layout.dim_of(axis)
    assert dim is not None
    split = replace(layout.dims[dim], axes=tuple(a for a in layout.dims[dim].axes if a != axis))
    before = Layout(layout.kinds, tuple(split if d == dim else s for d, s in enumerate(layout.dims)))
    lengths = [n for _, n in before.runs(tuple(shape), mesh, mesh.coordinates(rank))[dim]]
    item = (split.parts or (shape[dim],))[0] // split.items if split.items else 0
    return dim, lengths, lengths[0] // item if item else 0


def change(
    graph: fx.Graph,
    x: fx.Node,
    one: Layout,
    two: Layout,
    axis: int,
    shape: Sequence[int],
    mesh: Mesh,
    rank: int,
    group: str,
) -> fx.Node:
    """The ops of one row of the table."""
    n, place = mesh.axes[axis].size, mesh.coordinates(rank)[axis]
    *old, items = held(one, axis, shape, mesh, rank) if one.kinds[axis] == "S" else (0,)
    *new, to_items = held(two, axis, shape, mesh, rank) if two.kinds[axis] == "S" else (0,)
    cut, whole = (n, place, *(old or new)), (items or to_items,)
    match one.kinds[axis] + two.kinds[axis]:
        case "IR":
            return graph.call_function(c.replicate, (x, group))
        case "RI":
            return graph.call_function(c.invariant, (x, place))
        case "PI" | "PR" as kinds:
            raw = graph.call_function(c.start_all_reduce, (x, group, "none" if kinds == "PI" else "all_reduce"))
            return graph.call_function(c.wait_all_reduce, (raw,))
        case "SR" | "SI" as kinds:
            dual = "reduce_scatter" if kinds == "SR" else "slice"
            raw = graph.call_function(c.start_all_gather, (x, group, *cut, dual, *whole))
            return graph.call_function(c.wait_all_gather, (raw, *cut, *whole))
        case "PS":
            raw = graph.call_function(c.start_reduce_scatter, (x, group, *cut, *whole))
            return graph.call_function(c.wait_reduce_scatter, (raw, *cut, *whole))
        case "SS":
            raw = graph.call_function(c.start_all_to_all, (x, group, *cut, *new, items, to_items))
            return graph.call_function(c.wait_all_to_all, (raw, *cut, *new, items, to_items))
        case "IS" | "RS" as kinds:
            return graph.call_function(c.shard, (x, group, *cut, "all_gather" if kinds == "IS" else "pad", *whole))
        case "SP":
            return graph.call_function(c.pad, (x, group, *cut, *whole))
        case "IP" | "RP" as kinds:
            return graph.call_function(c.keep, (x, place, "none" if kinds == "IP" else "keep"))
    raise AssertionError(f"no change {one} -> {two}")


def groups_of(mesh: Mesh) -> dict[str, list[list[int]]]:
    """For every axis, by its name, the lists of ranks that differ in it only."""
    found: dict[str, dict[tuple[int, ...], list[int]]] = {axis.name: {} for axis in mesh.axes}
    for rank in range(mesh.ranks):
        coordinates = mesh.coordinates(rank)
        for a, axis in enumerate(mesh.axes):
            found[axis.name].setdefault(coordinates[:a] + coordinates[a + 1 :], []).append(rank)
    return {name: list(lists.values()) for name, lists in found.items()}


def inputs_of(
    walk: Walk, shape: Sequence[int], mesh: Mesh, seed: int
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """A value, a gradient, and what the ranks hold of the value at the start and of the gradient at the end."""
    generator = torch.Generator().manual_seed(seed)
    x, g = numbers(shape, generator), numbers(shape, generator)
    end = Layout(walk[-1].kinds.translate(GRADIENT), walk[-1].dims)
    return x, g, hold(x, walk[0], mesh, generator), hold(g, end, mesh, generator)


def run_in_one_process(walk: Walk, shape: Sequence[int], mesh: Mesh, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Results and input gradients by rank; both are checked against the layouts."""
    names = [axis.name for axis in mesh.axes]
    programs = [program(walk, shape, mesh, rank, names) for rank in range(mesh.ranks)]
    return check(programs, walk, shape, mesh, seed)


def check(
    programs: list[fx.GraphModule], walk: Walk, shape: Sequence[int], mesh: Mesh, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    x, g, xs, gs = inputs_of(walk, shape, mesh, seed)
    leaves = [local.requires_grad_() for local in xs]
    ys = [y for (y,) in run_stacked(programs, [[leaf] for leaf in leaves], groups_of(mesh))]
    what = f"{shape} on {[a.size for a in mesh.axes]}: " + " -> ".join(map(str, walk))
    assert_holds([y.detach() for y in ys], x, walk[-1], mesh, what)
    grads = list(torch.autograd.grad(ys, leaves, gs))
    assert_holds(grads, g, Layout(walk[0].kinds.translate(GRADIENT), walk[0].dims), mesh, "gradient of " + what)
    return [y.detach() for y in ys], grads


def all_steps(shape: Sequence[int], axes: int, with_parts: bool) -> list[Walk]:
    known = layouts(shape, axes, with_parts)
    return [(one, two) for one in known for two in known if is_step(one, two)]


def random_walks(shape: Sequence[int], axes: int, count: int, seed: int) -> list[Walk]:
    """Walks of two to six legal steps through all layouts."""
    draw, known, found = random.Random(seed), layouts(shape, axes, with_parts=True), []
    while len(found) < count:
        walk = [draw.choice(known)]
        for _ in range(draw.randint(2, 6)):
            walk.append(draw.choice([two for two in known if is_step(walk[-1], two)]))
        found.append(tuple(walk))
    return found


# One process


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_changes_of_one_axis(size: int, shape: tuple[int, ...]) -> None:
    steps = all_steps(shape, 1, with_parts=True)
    for seed, walk in enumerate(steps):
        run_in_one_process(walk, shape, mesh_of(size), seed)
    assert {one.kinds + two.kinds for one, two in steps} == {
        *("IR", "RI", "PI", "PR", "SR", "SI", "PS", "SS", "IS", "RS", "SP", "IP", "RP")
    }


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
def test_all_changes_of_one_of_two_axes(sizes: tuple[int, ...]) -> None:
    for seed, walk in enumerate(all_steps((4, 6), 2, with_parts=False)):
        run_in_one_process(walk, (4, 6), mesh_of(*sizes), seed)


@pytest.mark.parametrize("shape", [(6, 5), (12, 4)], ids=str)
@pytest.mark.parametrize("sizes", [(3,), (4,), (2, 2), (2, 3)])
def test_compositions(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    for seed, walk in enumerate(random_walks(shape, len(sizes), 60, seed=len(sizes))):
        run_in_one_process(walk, shape, mesh_of(*sizes), seed)


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        *(("start_all_reduce", m) for m in ("P>I", "P>R")),
        *(("start_all_gather", m) for m in ("S>R", "S>I")),
        *(("shard", m) for m in ("I>S", "R>S")),
        *(("keep", m) for m in ("I>P", "R>P")),
        *(("replicate", "I>R"), ("invariant", "R>I"), ("pad", "S>P")),
    ],
)
def test_a_wrong_dual_is_caught(op: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the checks of this file see: each row of the table with the dual of another row of the same shapes."""
    right = stacked._CHANGES[op]
    others = {
        "P>I": lambda a: stacked._sum,
        "P>R": lambda a: stacked._same,
        "S>R": lambda a: stacked._own(a["dim"], a["parts"]),
        "S>I": lambda a: stacked._then(stacked._sum, stacked._own(a["dim"], a["parts"])),
        "I>S": lambda a: stacked._zeros_elsewhere(a["dim"], a["parts"]),
        "R>S": lambda a: stacked._whole(a["dim"], a["parts"]),
        "I>P": lambda a: stacked._first(a["c"]),
        "R>P": lambda a: stacked._same,
        "I>R": lambda a: stacked._same,
        "R>I": lambda a: stacked._same,
        "S>P": lambda a: stacked._then(stacked._sum, stacked._own(a["dim"], a["parts"])),
    }
    monkeypatch.setitem(stacked._CHANGES, op, lambda a: (right(a)[0], others[wrong](a)))
    walk = next(w for w in all_steps((4, 6), 1, with_parts=False) if w[0].kinds + ">" + w[1].kinds == wrong)
    with pytest.raises(AssertionError, match="gradient of"):
        run_in_one_process(walk, (4, 6), mesh_of(2), 0)


# The paths that the passes emit


def emitted(one: Layout, two: Layout, v: Value, mesh: Mesh, rank: int) -> fx.GraphModule:
    steps = path(one, two, v, mesh)
    assert steps is not None, f"no way {one} -> {two}"
    coordinates = mesh.coordinates(rank)
    emitter = Emitter(mesh, coordinates, {axis.name: axis.name for axis in mesh.axes})
    x = emitter.at = emitter.graph.placeholder("x")
    x.meta["val"] = torch.empty(one.local_shape(v.shape, mesh, coordinates), dtype=v.dtype, device="meta")
    for step in steps:
        x = emitter.step(x, step, v)
    emitter.graph.output((x,))
    return fx.GraphModule({}, emitter.graph)


def check_paths(pairs: Sequence[Walk], shape: tuple[int, ...], mesh: Mesh, grad: bool) -> None:
    v = Value(shape, torch.float64, grad)
    for seed, (one, two) in enumerate(pairs):
        programs = [emitted(one, two, v, mesh, rank) for rank in range(mesh.ranks)]
        if grad:
            check(programs, (one, two), shape, mesh, seed)
            continue
        x, _, xs, _ = inputs_of((one, two), shape, mesh, seed)
        ys = [y for (y,) in run_stacked(programs, [[local] for local in xs], groups_of(mesh))]
        assert_holds(ys, x, settle(two, v, mesh), mesh, f"{one} -> {two}")


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("sizes", "shape"), [((2, 2), (4, 8)), ((2, 3), (6, 12))], ids=str)
def test_paths_between_all_layouts_of_two_axes(sizes: tuple[int, ...], shape: tuple[int, ...], grad: bool) -> None:
    known = layouts(shape, 2, with_parts=False)
    pairs = list(itertools.permutations(known, 2))
    assert len(known) == 27
    check_paths(pairs[:: 5 if grad else 9], shape, mesh_of(*sizes), grad)


@pytest.mark.parametrize(
    ("sizes", "shape"), [((2,), (5, 6)), ((3,), (4, 7)), ((4,), (7, 14)), ((2, 2), (8, 8)), ((2, 3), (6, 5))], ids=str
)
def test_paths_with_parts_and_uneven_cuts(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """A dim that two axes cut they cut evenly; one axis moves uneven shards directly."""
    known, mesh = layouts(shape, len(sizes), with_parts=True), mesh_of(*sizes)
    if len(sizes) > 1:
        known = [x for x in known if x.is_even(shape, mesh) or all(len(s.axes) < 2 for s in x.dims)]
    pairs = list(itertools.permutations(known, 2))
    check_paths(random.Random(0).sample(pairs, min(len(pairs), 150)), shape, mesh, grad=True)


# Real ranks


@pytest.fixture(scope="module", params=[(2,), (3,), (4,), (2, 2)], ids=str)
def real(request: pytest.FixtureRequest) -> Iterator[tuple[RankPool, Mesh]]:
    mesh = mesh_of(*request.param)
    with RankPool(mesh.ranks) as pool:
        yield pool, mesh


class Shapes(fx.Interpreter):
    """Runs a program and keeps the shape of every tensor on the way."""

    def __init__(self, program: fx.GraphModule) -> None:
        super().__init__(program)
        self.shapes: dict[fx.Node, torch.Size] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.shapes[n] = result.shape
        return result


def run_on_rank(
    rank: int, mesh: Mesh, cases: list[tuple[Walk, tuple[int, ...], int, Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    names = [""] * len(mesh.axes)
    for a, lists in enumerate(groups_of(mesh).values()):
        for ranks in lists:
            group = dist.new_group(ranks)
            if rank in ranks:
                names[a] = group.group_name
    out = []
    for walk, shape, _, xs, gs in cases:
        x, local = xs[rank].requires_grad_(), Shapes(program(walk, shape, mesh, rank, names))
        (y,) = local.run(x)
        real = local.shapes.copy()
        local.run(x.detach().to("meta"))
        assert local.shapes == real, f"fake shapes {local.shapes}, real ones {real}"
        (grad,) = torch.autograd.grad(y, x, gs[rank])
        assert y.is_contiguous() and grad.is_contiguous()
        out.append((y.detach(), grad))
    return out


def test_real_ranks_agree_with_the_stacked_interpreter(real: tuple[RankPool, Mesh]) -> None:
    pool, mesh = real
    cases: list[Any] = []
    for shape in SHAPES if len(mesh.axes) == 1 else [(4, 6)]:
        walks = all_steps(shape, len(mesh.axes), with_parts=len(mesh.axes) == 1)
        walks = random.Random(0).sample(walks, min(len(walks), 20))
        walks += random_walks(shape, len(mesh.axes), 8, seed=1)
        cases += [(walk, shape, seed, *inputs_of(walk, shape, mesh, seed)[2:]) for seed, walk in enumerate(walks)]
    found = pool.run(run_on_rank, mesh, cases)
    for i, (walk, shape, seed, _, _) in enumerate(cases):
        ys, grads = run_in_one_process(walk, shape, mesh, seed)
        for rank in range(mesh.ranks):
            y, grad = found[rank][i]
            assert torch.equal(y, ys[rank]), f"rank {rank}, {shape}: {' -> '.join(map(str, walk))}"
            assert torch.equal(grad, grads[rank]), f"gradient, rank {rank}, {shape}: {' -> '.join(map(str, walk))}"


def test_no_gather_has_the_name_that_breaks_the_heap() -> None:
    """See broken_heap.py: gathers go as themselves, not as lists of one, those of DTensor too."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        gathered = c.wait(c.launch("all_gather_into_tensor", world.group_name, torch.arange(6).view(2, 3).t(), 1), "")
        mesh = DeviceMesh.from_group(world, "cpu")
        whole = DTensor.from_local(torch.arange(4), mesh, [Shard(0)]).full_tensor()
    assert torch.equal(gathered, torch.arange(6).view(2, 3).t()) and torch.equal(whole, torch.arange(4))
    ran = {event.name for event in profiler.events() or () if event.name.startswith("c10d::")}
    assert ran == {"c10d::_allgather_base_"}
