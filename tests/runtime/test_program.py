"""A hand-written program on real ranks does what its model does in one process."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.errors import AutoparError
from autopar.passes import facts
from autopar.passes.layout import Axis, Layout, Mesh
from autopar.passes.lower import InputUse, Local, OutputUse, ParameterUse, enter_graph
from autopar.runtime import collectives, stage
from autopar.runtime.mesh import RankError, Ranks, connect
from autopar.runtime.parameters import place
from autopar.runtime.pool import RankPool
from autopar.runtime.program import Program
from autopar.runtime.weights import ways_of

Pools = Callable[[int], RankPool]
aten, own = torch.ops.aten, torch.ops.autopar
BATCH, IN, HIDDEN, OUT = 12, 3, 6, 5
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}
FQNS = ("up.weight", "up.bias", "down.weight", "down.bias", "gain")
USED = {"up.weight": "S0", "up.bias": "S0", "down.weight": "S1", "down.bias": "I", "gain": "I"}  # over tp
SHAPES = {
    "up.weight": (HIDDEN, IN),
    "up.bias": (HIDDEN,),
    "down.weight": (OUT, HIDDEN),
    "down.bias": (OUT,),
    "gain": (1,),
}


class Net(nn.Module):
    """Two linears, a gain, a loss over the rows that ``mask`` keeps. Counts its calls; ``spare`` has no gradient."""

    def __init__(self, seed: int | None = 0, frozen: Sequence[str] = ()) -> None:
        super().__init__()
        if seed is not None:
            torch.manual_seed(seed)
        self.up, self.down = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)
        self.gain, self.spare = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(2, 2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.double()
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        self.calls.add_(1)
        hidden = self.up(x).relu()
        y = self.down(hidden) * self.gain
        loss = ((y - target).square().sum(1) * mask).sum() / mask.sum()
        return loss, y, hidden, y.sum(0), self.gain > 0


def mesh_of(dp: int, tp: int, rows: Sequence[int] = ()) -> Mesh:
    return Mesh((Axis("dp", dp), Axis("tp", tp), *([Axis("time", len(rows), tuple(rows))] if rows else [])))


def layout(mesh: Mesh, dp: str, tp: str, ndim: int, over: str = "R") -> Layout:
    out = Layout.uniform("I", len(mesh.axes), ndim)
    for axis, word in ((2, over), (1, tp), (0, dp))[mesh.time is None :]:  # outermost first: time, tp, dp
        out = out.with_shard(axis, int(word[1])) if word[0] == "S" else out.with_kind(axis, word)
    return out


def use(mesh: Mesh, fqn: str, zero: bool, reduce: str, frozen: Sequence[str]) -> ParameterUse:
    shape, tp = SHAPES[fqn], USED[fqn]
    rest, entry = layout(mesh, "S0" if zero else "I", tp, len(shape)), layout(mesh, "R", tp, len(shape))
    return ParameterUse(fqn, shape, torch.float64, fqn not in frozen, rest, entry, reduce)


def body(mesh: Mesh, rank: int, groups: dict[str, str], rows: int) -> fx.GraphModule:
    """Column- then row-parallel linear over tp, the batch over dp; the sum of losses over the count is P over time."""
    graph, n = fx.Graph(), rows // mesh.axes[0].size

    def holder(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> fx.Node:
        node = graph.placeholder(name.replace(".", "_"))
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def call(target: Any, *args: Any) -> fx.Node:
        return facts.call(graph, target, args, like=x)

    locals_ = {
        f: use(mesh, f, False, "step", ()).use.local_shape(SHAPES[f], mesh, mesh.coordinates(rank)) for f in FQNS
    }
    up, up_bias, down, down_bias, gain = (holder(f, *shape) for f, shape in locals_.items())
    calls, shift = holder("calls", dtype=torch.int64), holder("shift", OUT)
    x, target, mask, count = holder("x", n, IN), holder("target", n, OUT), holder("mask", n), holder("count")
    for name in ("microbatch", "key"):
        graph.placeholder(name).meta["val"] = 0

    def all_reduce(x: fx.Node, axis: str) -> fx.Node:
        return call(own.wait_all_reduce.default, call(own.start_all_reduce.default, x, groups[axis], "none"))

    hidden = call(aten.relu.default, call(aten.linear.default, x, up, up_bias))
    y = all_reduce(call(aten.linear.default, hidden, down), "tp")
    y = call(aten.mul.Tensor, call(aten.add.Tensor, call(aten.add.Tensor, y, down_bias), shift), gain)
    losses = call(aten.sum.dim_IntList, call(aten.square.default, call(aten.sub.Tensor, y, target)), [1])
    loss = call(aten.div.Tensor, call(aten.sum.default, call(aten.mul.Tensor, losses, mask)), count)
    others = (y, hidden, call(aten.sum.dim_IntList, y, [0]), call(aten.gt.Scalar, gain, 0))
    graph.output(((all_reduce(loss, "dp"), *others), (call(aten.add.Tensor, calls, 1),)))
    return fx.GraphModule(nn.Module(), graph)


def prologue(groups: dict[str, str]) -> fx.GraphModule:
    """The count of kept rows of the whole batch."""
    graph = fx.Graph()
    held = [graph.placeholder(f"p{i}") for i in range(len(FQNS) + 2 + 3 + 1)]  # the last is the key
    total = graph.call_function(aten.sum.default, (held[-2],))
    start = graph.call_function(own.start_all_reduce.default, (total, groups["dp"], "none"))
    graph.output(((graph.call_function(own.wait_all_reduce.default, (start,)),), ()))
    return fx.GraphModule(nn.Module(), graph)


def local_of(
    mesh: Mesh, rank: int, groups: dict[str, str], zero: bool = False, reduce: str = "step", frozen: Sequence[str] = ()
) -> Local:
    rows = mesh.axes[mesh.time].rows if mesh.time is not None else (0,)
    uses = tuple(use(mesh, fqn, zero, reduce, frozen) for fqn in FQNS)
    loss = layout(mesh, "I", "I", 0, "P")
    return Local(
        mesh=mesh,
        coordinates=mesh.coordinates(rank),
        parameters=uses,
        buffers=("calls",),
        constants=("shift",),
        inputs=tuple(
            InputUse(name, (BATCH, *rest), torch.float64, batch_layout(mesh, 1 + len(rest)))
            for name, rest in (("x", (IN,)), ("target", (OUT,)), ("mask", ()))
        ),
        outputs=(
            OutputUse((), torch.float64, loss),
            OutputUse((BATCH, OUT), torch.float64, batch_layout(mesh, 2)),
            OutputUse((BATCH, HIDDEN), torch.float64, layout(mesh, "S0", "S1", 2, "S0")),
            OutputUse((OUT,), torch.float64, layout(mesh, "P", "I", 1, "P")),
            OutputUse((1,), torch.bool, layout(mesh, "I", "I", 1)),
        ),
        buffer_updates=("calls",),
        body={r: body(mesh, rank, groups, r or BATCH) for r in rows},
        prologue=prologue(groups),
        enter={u.fqn: enter_graph(u, mesh, rank, groups) for u in uses if u.rest != u.use},
    )


def batch_layout(mesh: Mesh, ndim: int) -> Layout:
    return layout(mesh, "S0", "I", ndim, "S0")


def batch(seed: int = 1) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(BATCH) % 5 != 1).double()
    return [torch.randn(BATCH, n, generator=g, dtype=torch.float64) for n in (IN, OUT)] + [mask]


def program_of(
    mesh: Mesh, model: nn.Module, timeout: timedelta = timedelta(seconds=30), **options: Any
) -> tuple[Program, nn.Module, Ranks]:
    ranks = connect(mesh, timeout)
    local = local_of(mesh, ranks.rank, ranks.group_names, **options)
    tensors = place(model, local.parameters, ranks)
    return Program([local], tensors, ranks, {"shift": torch.zeros(OUT, dtype=torch.float64)}), tensors, ranks


def full(tensors: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().full_tensor() for name, p in tensors.named_parameters()}  # type: ignore[attr-defined]


def grads(tensors: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.full_tensor() for name, p in tensors.named_parameters()}  # type: ignore[attr-defined]


# what the ranks run


def three_steps(rank: int, mesh: Mesh, optimizer: str, inputs_are: str, options: dict[str, Any]) -> dict[str, Any]:
    program, tensors, _ = program_of(mesh, Net(frozen=options.get("frozen", ())), **options)
    update = OPTIMIZERS[optimizer](tensors.parameters())
    losses, seen = [], None
    for step in range(3):
        update.zero_grad()
        inputs = batch(step)
        if inputs_are == "local":
            inputs = [rows_of(t, mesh, program.data_rank, program.data_world_size) for t in inputs]
        loss, *y = program.step(inputs, inputs_are=inputs_are, outputs=True)
        losses.append(loss)
        seen = seen or grads(tensors)
        update.step()
    return {"losses": losses, "y": y, "grads": seen, "parameters": full(tensors), "calls": tensors.get_buffer("calls")}


def rows_of(t: Tensor, mesh: Mesh, rank: int, size: int) -> Tensor:
    rows = mesh.axes[mesh.time].rows if mesh.time is not None else (BATCH,)
    return torch.cat([piece.chunk(size)[rank] for piece in t.split(list(rows))])


def accumulate(rank: int, mesh: Mesh) -> dict[str, Any]:
    """Two steps without zero_grad, then clipping; forward alone leaves gradients be."""
    program, tensors, _ = program_of(mesh, Net(), zero=True)
    program.step(batch(0))
    program.step(batch(1))
    before = grads(tensors)
    _, *y = program.forward(batch(2))
    same(grads(tensors), before)
    norms = {p: program.clip_grad_norm_(1e9, p) for p in (1.0, 2.0, 3.5, math.inf)}
    norms["clip"] = program.clip_grad_norm_(0.5)
    return {"grads": before, "y": y, "norms": norms, "clipped": grads(tensors)}


def outputs_alive(rank: int, mesh: Mesh, outputs: bool) -> list[bool]:
    """At the start of every microbatch after the first: whether the output y of the one before still has its memory."""
    program, _, _ = program_of(mesh, Net())
    made: list[StorageWeakRef] = []
    alive: list[bool] = []

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(args: list[Any]) -> Any:
            alive.extend(not ref.expired() for ref in made[-1:])
            outs, held = run(args)
            (y,) = (t for t in outs if t.ndim == 2 and t.shape[1] == OUT)
            made.append(StorageWeakRef(y.untyped_storage()))
            return outs, held

        return call

    for unit in {unit for units in program.stages[0].units.values() for unit in units.units if unit.kind.trains}:
        unit.forward = watched(unit.forward)  # type: ignore[method-assign]
    program.step(batch(), outputs=outputs)
    return alive


class Sent:
    """Counts collectives as they are launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        monkeypatch.setattr(collectives, "launch", self.counted(collectives.launch))

    def counted(self, launch: Any) -> Any:
        def call(name: str, *args: Any) -> Tensor:
            self.names.append(name)
            return launch(name, *args)  # type: ignore[no-any-return]

        return call


def counted_step(rank: int, mesh: Mesh, together: bool, options: dict[str, Any]) -> Any:
    """Gradients of a step in microbatches, and the collectives between rest and use: (gathers, reductions)."""
    with pytest.MonkeyPatch.context() as patch:
        if not together:
            patch.setattr(stage, "ways_of", lambda local, units, parted: ways_of(local, units, cap=0))
        made, tensors, _ = program_of(mesh, Net(frozen=options.get("frozen", ())), **options)
        sent = Sent(patch)
        with torch.no_grad():
            weights = made._weights(made.stages[0], "FB")
            gathers, sent.names = sent.names, []
            for i, use in enumerate(made.local.parameters):
                read = weights.read[i]
                if use.trainable and use.fqn != "gain" and read is not None:
                    weights.add(i, torch.ones_like(read), True)
            for after in dict.fromkeys(r.after for r in made.stages[0].ways.reduced):
                weights.reduce(after, last=True)
            weights.finish()
        reductions, sent.names = sent.names, []
        made.step(batch())
        return grads(tensors), gathers, reductions


def stay_away(rank: int, mesh: Mesh) -> str:
    program, _, _ = program_of(mesh, Net(), timeout=timedelta(seconds=2))
    program.step(batch(0))
    if rank == 1:
        time.sleep(4)
        return ""
    with pytest.raises(RankError) as caught:
        program.step(batch(1))
    return str(caught.value)


REFUSALS = [
    "step: got 2 tensor inputs, the plan takes 3 (x, target, mask).",
    "step: input 'x' has shape (4, 3), the plan takes (12, 3) as global input.",
    "step: input 'target' is torch.float32, the plan was made for torch.float64. Cast it.",
    "step: inputs_are='mine' is not known.",
    "step: input 'x' has shape (12, 3), the plan takes (6, 3) as local input.",
    "step: input 'x' differs between ranks 0 and 1, which need the same batch.",
    "step: input 'mask' differs between ranks 0 and 1, which need the same rows.",
    "gain: was frozen when compiled and now requires a gradient. Compile again.",
]


def refusals(rank: int, mesh: Mesh) -> list[str]:
    program, tensors, _ = program_of(mesh, Net(frozen=["gain"]), frozen=["gain"])
    x, target, mask = batch()
    said = []

    def refused(*args: Any, **kwargs: Any) -> None:
        with pytest.raises(AutoparError) as caught:
            program.step(*args, **kwargs)
        said.append(str(caught.value))

    refused([x, target])
    refused([x[:4], target, mask])
    refused([x, target.float(), mask])
    refused([x, target, mask], inputs_are="mine")
    refused([x, target, mask], inputs_are="local")
    refused([x + rank, target, mask])
    refused([x[:6], target[:6] + rank // 2, mask[:6] + rank % 2], inputs_are="local")
    tensors.get_parameter("gain").requires_grad_(True)
    refused([x, target, mask])
    return said


# the same in one process


def reference(optimizer: str, frozen: Sequence[str] = ()) -> dict[str, Any]:
    model = Net(frozen=frozen)
    update = OPTIMIZERS[optimizer](model.parameters())
    losses, seen = [], None
    for step in range(3):
        update.zero_grad()
        loss, *y = model(*batch(step))
        loss.backward()
        losses.append(loss.detach())
        seen = seen or {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        update.step()
    parameters = dict(model.named_parameters())
    return {
        "losses": losses,
        "y": [t.detach() for t in y],
        "grads": seen,
        "parameters": parameters,
        "calls": model.calls,
    }


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Pools by size, started when first asked for."""
    made: dict[int, RankPool] = {}
    yield lambda size: made.setdefault(size, RankPool(size, timeout=60))
    for pool in made.values():
        pool.close()


CASES = [
    (1, 1, (), {}, "sgd", "global"),
    (2, 1, (), {}, "sgd", "global"),
    (2, 1, (), {"zero": True}, "adamw", "local"),
    (1, 2, (4, 8), {}, "adamw", "global"),
    (2, 1, (6, 4, 2), {"zero": True, "reduce": "microbatch"}, "sgd", "local"),
    (2, 2, (6, 4, 2), {"zero": True}, "adamw", "local"),
    (2, 2, (6, 6), {"zero": True, "reduce": "microbatch", "frozen": ["up.weight", "gain"]}, "adamw", "global"),
]


@pytest.mark.parametrize(("dp", "tp", "rows", "options", "optimizer", "inputs_are"), CASES)
def test_three_steps_equal_one_process(
    dp: int, tp: int, rows: tuple[int, ...], options: dict[str, Any], optimizer: str, inputs_are: str, pools: Pools
) -> None:
    expected = reference(optimizer, options.get("frozen", ()))
    every = pools(dp * tp).run(three_steps, mesh_of(dp, tp, rows), optimizer, inputs_are, options)
    for result in every:
        same(result, expected)
        assert torch.equal(result["losses"][0], every[0]["losses"][0])


def test_gradients_add_up_and_are_clipped_as_in_one_process(pools: Pools) -> None:
    model = Net()
    for step in range(2):
        model(*batch(step))[0].backward()
    expected = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    norm = lambda p, most=1e9: torch.nn.utils.clip_grad_norm_(model.parameters(), most, p)
    norms = {p: norm(p) for p in (1.0, 2.0, 3.5, math.inf)} | {"clip": norm(2.0, 0.5)}
    for result in pools(4).run(accumulate, mesh_of(2, 2, (4, 8))):
        same(result["grads"], expected)
        same(result["norms"], norms)
        same(result["clipped"], {n: p.grad for n, p in model.named_parameters()})
        same(result["y"], [t.detach() for t in model(*batch(2))[1:]])


BUCKETED: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((), {}),
    ((6, 4, 2), {}),
    ((6, 4, 2), {"zero": True}),
    ((6, 4, 2), {"zero": True, "reduce": "microbatch", "frozen": ["up.weight"]}),
]


@pytest.mark.parametrize(("rows", "options"), BUCKETED)
def test_one_collective_a_bucket_and_the_same_gradients(
    rows: tuple[int, ...], options: dict[str, Any], pools: Pools
) -> None:
    mesh = mesh_of(2, 2, rows)
    apart, together = (pools(4).run(counted_step, mesh, t, options) for t in (False, True))
    for (expected, gathers_apart, reductions_apart), (gradients, gathers, reductions) in zip(
        apart, together, strict=True
    ):
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
        assert gathers == (["all_gather_into_tensor"] if options.get("zero") else [])
        assert reductions == (["reduce_scatter_tensor"] if options.get("zero") else ["all_reduce_"])
        assert len(reductions_apart) >= 3 and (len(gathers_apart) >= 3) == bool(options.get("zero"))


def test_outputs_live_on_only_where_asked_for(pools: Pools) -> None:
    assert pools(1).run(outputs_alive, mesh_of(1, 1, (4, 4, 4)), True) == [[True, True]]
    assert pools(1).run(outputs_alive, mesh_of(1, 1, (4, 4, 4)), False) == [[False, False]]


def test_bad_inputs_are_refused_in_one_line(pools: Pools) -> None:
    every = pools(4).run(refusals, mesh_of(2, 2))
    for said, expected in zip(every[3], REFUSALS, strict=True):
        assert said.startswith(expected)
    assert all(said == every[0] for said in every)


def test_a_rank_that_stays_away_is_named() -> None:
    with RankPool(2, timeout=30) as pool:
        said, _ = pool.run(stay_away, mesh_of(2, 1))
    assert said.startswith("rank 0 (dp=0 tp=0): waited in vain for another rank in step 2: rank 1 is in step 1 (")
    assert "timeout 2 s" in said


def test_a_wholly_frozen_model_is_refused(pools: Pools) -> None:
    with pytest.raises(AutoparError, match="no trainable parameter reaches the loss"):
        pools(1).run(three_steps, mesh_of(1, 1), "sgd", "global", {"frozen": FQNS})


def test_a_mesh_of_one_rank_needs_no_process_group() -> None:
    call = "three_steps(0, mesh_of(1, 1), 'sgd', 'global', {})['losses'][0].item()"
    command = [sys.executable, "-c", f"from test_program import *; print({call})"]
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    assert float(run.stdout) == pytest.approx(reference("sgd")["losses"][0].item(), rel=1e-12)


def test_too_few_processes_say_how_to_launch() -> None:
    with pytest.raises(
        AutoparError, match=r"the plan \(dp=2 x tp=1\) is for 2 ranks and there are 1 processes. Launch with: torchrun"
    ):
        connect(mesh_of(2, 1))
