"""`verify`: run plans on local ranks and compare them with one process, by the definition of `autopar.equality`.

The model is captured once here and once in every rank, however many plans follow. Every plan is run twice for three
steps: in float64 with AdamW against the captured graph run op by op, and as it is with SGD against plain eager; in half
precision both are held against float64. The weights and inputs are this process's, so a factory need not be seeded.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import math
import random
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.build import Prepared, plan_mesh, prepare, staged
from autopar.capture import Capture, capture, double, run_graph, to_float64
from autopar.choosing.plan_training import plan_training
from autopar.cluster import Cluster
from autopar.divided import divided
from autopar.equality import (
    FP32,
    FP64,
    HALF,
    NORM,
    Difference,
    Doubt,
    Run,
    distances,
    farthest_by_kind,
    judge,
    judge_low,
)
from autopar.errors import AutoparError
from autopar.evaluate import WIDER
from autopar.export_model import Call
from autopar.loading import LoadedModel, ModelSpec
from autopar.mixed_precision import as_read, param_dtype, precision, reduced_in
from autopar.passes.counter_random import counter_random
from autopar.passes.split_prologue import copy_graph
from autopar.piecewise import Piecewise
from autopar.pins import Pins
from autopar.plan import Plan, Precision, Share, loads
from autopar.runtime.counter_random import draws, random_key
from autopar.runtime.mesh import connect
from autopar.runtime.parameters import place
from autopar.runtime.pool import RankPool
from autopar.runtime.program import Program
from autopar.runtime.whole import everywhere
from autopar.schema import write
from autopar.stored import store

STEPS = 3
SEED = 0  # of random ops
LR = {"adamw": 1e-3, "sgd": 1e-2}
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=LR["adamw"]),
    "sgd": lambda params: torch.optim.SGD(params, lr=LR["sgd"], momentum=0.9),
}
PRECISIONS = {"fp64": "adamw", "fp32": "sgd"}  # in fp32 Adam divides rounding errors by their own size
PRELOAD = ("autopar.verify", "torch.export", "torch._dynamo")  # what every rank would import by itself
NEAR = 8  # runs of one process in half precision that show how far it is, where one is not enough
NOISY = 8  # runs of eager that show how far its last bits carry
WORST = 16  # differences in a result
TIMEOUT = 300.0  # seconds for one plan, capture in the ranks included
GROUP_TIMEOUT = 240.0  # seconds that a rank waits for another


@dataclass(frozen=True)
class VerifyResult:
    """One plan against one process. ``worst``: the farthest tensors, farthest first, in the better of the two
    precisions that fails, else in float64; ``divided``: what each axis takes off the busiest rank, 0 to 1;
    ``limits``: which limit applied to what; ``probed``: the ops whose strategies were probed, not proved; ``seconds``:
    wall time of this plan."""

    ok: bool
    ranks: int
    plan: str
    worst: tuple[Difference, ...]
    divided: Mapping[str, Share]
    seconds: float
    limits: tuple[str, ...]
    probed: tuple[str, ...] = ()


def verify(
    model: ModelSpec, ranks: int, pins: Any = None, *, batch: int | None = None, cluster: Cluster | None = None
) -> VerifyResult:
    """Compare one plan with one process; see `verify_many`. Raises AutoparError where the plan or model is refused.

    Example: ``verify(ModelSpec.parse("autopar.models.mlp:make"), 2, {"tp": 2}).ok``
    """
    (result,) = verify_many(model, ranks, [Pins.parse(pins)], batch=batch, cluster=cluster)
    if isinstance(result, AutoparError):
        raise result
    return result


def verify_many(
    model: ModelSpec,
    ranks: int,
    plans: Sequence[Pins | Plan],
    *,
    batch: int | None = None,
    pool: RankPool | None = None,
    cluster: Cluster | None = None,
    subject: Subject | None = None,
) -> list[VerifyResult | AutoparError]:
    """Compare plans of one model with one process, in one launch of ``ranks`` local processes.

    ``plans``: pins, whose plan is the one that `autopar.compile` would make, or finished plans. ``batch``: rows of the
    global batch (default: those of the example). ``pool``: ranks that are running, to be kept for further models.
    ``cluster``: of ``ranks`` ranks, whose figures and memory the plans are made for (default: this machine); what runs
    is local all the same. ``subject``: the model captured at ``batch`` rows, where it is at hand; for plans of another
    precision it is captured anew. A plan that is refused gives its AutoparError in place of a result; a model that is
    refused raises it.
    """
    started = time.perf_counter()
    cluster = _cluster_of(cluster, ranks)
    subject = subject or Subject.of(model, batch)
    results: list[VerifyResult | AutoparError] = []
    with ExitStack() as stack:
        values = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autopar-verify-"))) / "values.pt"
        torch.save((subject.captured.attributes, subject.inputs), values)
        if pool is None:
            homes = {type(module).__module__ for module in subject.loaded.model.modules()} - {"__main__"}
            pool = stack.enter_context(RankPool(ranks, timeout=TIMEOUT, preload=(*PRELOAD, *sorted(homes))))
        for given in plans:
            try:
                own = subject.computed_in(given.precision if isinstance(given, Plan) else given)
                plan = given if isinstance(given, Plan) else _plan(own, given, cluster)
                every = pool.run(run_plan, str(values), model, batch, plan.dumps())
                results.append(_compare(own, plan, every, started))
            except AutoparError as error:
                results.append(error)
            started = time.perf_counter()
    return results


@dataclass(frozen=True)
class Subject:
    """A captured model with its values, and its runs in one process, each made when first asked for."""

    loaded: LoadedModel
    captured: Capture
    inputs: tuple[Tensor, ...]

    @staticmethod
    def of(model: ModelSpec, batch: int | None, *, check: bool = True) -> Subject:
        """Build and capture the model, in train mode; ``check``: against eager."""
        torch.manual_seed(0)
        random.seed(0)
        loaded = model.load()
        loaded.model.train()
        captured = capture(loaded.model, loaded.args, loaded.kwargs, global_batch=batch, loss=loaded.loss, check=check)
        return Subject(loaded, captured, _rows(captured))

    def computed_in(self, asked: Precision | Pins) -> Subject:
        """The model in the precision of a plan or pins, captured once for each dtype of parameters. Raises AutoparError
        where it cannot be."""
        word, captured = asked.param_dtype, self.captured
        if word == captured.precision.param_dtype:
            return self
        if word not in self._others:
            loaded, check = self.loaded, captured.checked == "equal"
            again = capture(
                loaded.model,
                loaded.args,
                loaded.kwargs,
                global_batch=captured.batch,
                loss=loaded.loss,
                check=check,
                param_dtype=word,
            )
            self._others[word] = replace(self, captured=again)
        return self._others[word]

    @cached_property
    def _others(self) -> dict[str | None, Subject]:
        return {}

    def reducing(self, asked: Precision | Pins) -> Capture:
        """The capture for plans that reduce gradients as ``asked``."""
        assert asked.param_dtype == self.captured.precision.param_dtype
        return replace(self.captured, precision=precision(asked.param_dtype, asked.reduce_dtype))

    @property
    def low(self) -> torch.dtype | None:
        """The half precision that a parameter which trains is computed with, where one is."""
        nodes = self.captured.graph.graph.find_nodes(op="get_attr")
        used = {n.meta["val"].dtype for n in nodes if self.captured.trainable(str(n.target))}
        return next((dtype for dtype in HALF if dtype in used), None)

    def with_values(self, attributes: Mapping[str, Tensor], inputs: tuple[Tensor, ...]) -> Subject:
        """The same with another process's values, whose memory it shares."""
        for name, tensor in self.captured.attributes.items():
            tensor.data = attributes[name]
        return replace(self, inputs=inputs)

    @cached_property
    def graph64(self) -> fx.GraphModule:
        """The captured graph in float64, its random ops drawing by a counter."""
        return to_float64(counter_random(copy_graph(self.captured.graph)))

    @property
    def random(self) -> bool:
        """Whether a step draws random numbers."""
        return any(draws(node.target) for node in self.graph64.graph.nodes)

    @cached_property
    def _folder(self) -> Path:
        """Where its runs are kept, for as long as it lives."""
        folder = tempfile.mkdtemp(prefix="autopar-runs-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)

    @cached_property
    def judge(self) -> Run:
        """One process in float64."""
        return self._run64("judge", self.inputs, "adamw")

    @cached_property
    def permuted(self) -> Run:
        """The same with the rows of the batch in another order; where these draw random numbers, which would be other
        rows' then, with weights and inputs whose last bit differs."""
        if self.random:
            return self._run64("permuted", self.inputs, "adamw", _last_bit())
        order = torch.randperm(self.captured.batch, generator=torch.Generator().manual_seed(1))
        pairs = zip(self.captured.inputs, self.inputs, strict=True)
        return self._run64("permuted", tuple(spec.taken(t, order) if spec.batch else t for spec, t in pairs), "adamw")

    @cached_property
    def truth(self) -> Run:
        """One process in float64 with the optimizer of `eager`."""
        return self._run64("truth", self.inputs, "sgd")

    @cached_property
    def eager(self) -> Run:
        """The model itself, as it is or in mixed precision; its captured graph where it draws random numbers, which
        torch draws otherwise."""
        return self._run32("eager", lambda t: t)

    @cached_property
    def eagers_own(self) -> Mapping[str, float]:
        """How far eager is from float64 by kind: the farthest of several runs whose weights and inputs differ in the
        last bit. A unit near zero flips in some of them, as it may in a plan that adds in another order."""
        last_bit = _last_bit()
        runs = (self._run32("noisy", last_bit) if i else self.eager for i in range(1 + NOISY))
        found = [farthest_by_kind(distances(run, self.truth, lr=LR["sgd"])) for run in runs]
        return {kind: max(f[kind] for f in found) for kind in found[0]}

    @cached_property
    def lows_own(self) -> Mapping[str, float]:
        """How far one process in half precision is from float64, by kind, in norm."""
        return farthest_by_kind(distances(self.eager, self.truth, lr=LR["sgd"], size=NORM))

    @cached_property
    def lows_near(self) -> Mapping[str, float]:
        """The same of several runs whose weights and inputs are a rounding away, each against float64 on its own: the
        farthest. How far a small tensor is in one run is a matter of luck."""
        found = [farthest_by_kind(self._near(number)) for number in range(NEAR)]
        return {kind: max(f[kind] for f in found) for kind in found[0]}

    def _near(self, number: int) -> list[Difference]:
        assert self.low is not None
        move = _moved_by(torch.finfo(self.low).eps / 2, number)
        captured, inputs = self.captured, [move(t) for t in self.inputs]
        held = {n: t.detach().clone() for n, t in captured.attributes.items()}
        for fqn, parameter in captured.parameters.items():
            held[fqn] = move(held[fqn]).requires_grad_(parameter.requires_grad)
        wide = [t.to(WIDER.get(t.dtype, t.dtype)) for t in inputs]
        truth = self._run("near64", self.graph64, double(held), wide, "sgd")
        graph = counter_random(copy_graph(captured.graph))
        own = self._run("near", graph, held, inputs, "sgd")
        return distances(own, truth, lr=LR["sgd"], size=NORM)

    def unit(self, d: Difference, asked: Precision) -> float:
        """Under which no distance means anything: the unit roundoff of what a tensor is kept in. A gradient is rounded
        to what it is reduced in, and so is what three steps made of a parameter."""
        if d.kind == "loss":
            return _roundoff(self.eager.loss.dtype)
        tensor = (self.captured.buffers if d.kind == "buffer" else self.captured.parameters).get(d.name)
        if tensor is None:
            return 0.0
        own, reduced = _roundoff(tensor.dtype), _roundoff(reduced_in(tensor.dtype, asked))
        if d.kind == "buffer" or reduced <= own:
            return own
        if d.kind == "grad":
            return reduced
        end = self.truth.params[d.name]
        moved, floor = NORM.whole(end - tensor.detach().to(end)), LR["sgd"] * math.sqrt(end.numel())
        return reduced * moved / max(NORM.whole(end), floor)

    def _eager(self, name: str, moved: Callable[[Tensor], Tensor]) -> Run:
        model = copy.deepcopy(self.loaded.model)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(moved(p))
        inputs = [moved(t) for t in self.inputs]
        call = Call(model, self.captured.signature, self.loaded.loss, True, param_dtype(self.captured.precision))
        buffers, params = lambda: dict(model.named_buffers()), dict(model.named_parameters())
        loss = _backward(lambda: call(inputs)[0][0])
        return self._three_steps(name, loss, params, buffers, "sgd", names_of(model))

    def _run32(self, name: str, moved: Callable[[Tensor], Tensor]) -> Run:
        """``name``: of the files of the run; one of the same name is lost."""
        if not self.random:
            return self._eager(name, moved)
        held = {n: moved(t.detach()).clone() for n, t in self.captured.attributes.items()}
        for fqn, parameter in self.captured.parameters.items():
            held[fqn].requires_grad_(parameter.requires_grad)
        graph = counter_random(copy_graph(self.captured.graph))
        return self._run(name, graph, held, [moved(t) for t in self.inputs], "sgd")

    def _run64(
        self, name: str, inputs: Sequence[Tensor], update: str, moved: Callable[[Tensor], Tensor] = lambda t: t
    ) -> Run:
        held = double(self.captured.attributes)
        with torch.no_grad():
            for tensor in held.values():
                tensor.copy_(moved(tensor))
        wide = [moved(t.to(WIDER.get(t.dtype, t.dtype))) for t in inputs]
        return self._run(name, self.graph64, held, wide, update)

    def _run(
        self, name: str, graph: fx.GraphModule, held: dict[str, Tensor], inputs: Sequence[Tensor], update: str
    ) -> Run:
        buffers = {n: t for n, t in held.items() if n in self.captured.buffers}
        params = {n: t for n, t in held.items() if n in self.captured.parameters}
        steps = itertools.count()

        def loss() -> Tensor:
            made = run_graph(graph, inputs, as_read(graph, held), random_key(SEED, next(steps)))["outputs"]
            value: Tensor = made[0]
            return value

        return self._three_steps(name, _backward(loss), params, lambda: buffers, update, names_of(self.loaded.model))

    def _three_steps(
        self,
        name: str,
        loss: Callable[[], Tensor],
        params: Mapping[str, Tensor],
        buffers: Callable[[], Mapping[str, Tensor]],
        update: str,
        names: tuple[str, ...],
    ) -> Run:
        with tempfile.TemporaryDirectory(dir=self._folder) as states:
            optimizer = Piecewise(list(params.values()), OPTIMIZERS[update], Path(states) / "state")
            return three_steps(loss, params, buffers, optimizer, names, _keeper(self._folder / name))

    @cached_property
    def _prepared(self) -> dict[tuple[bool, str, Precision, bool], Prepared]:
        return {}

    def prepared(
        self, microbatches: int, precision: str, asked: Precision | None = None, *, forwards_first: bool = False
    ) -> Prepared:
        """The graph after PREPARE in one precision, for plans of a `Plan.precision` (default: the capture's); made
        once."""
        captured = self.reducing(asked or self.captured.precision)
        key = (microbatches > 1, precision, captured.precision, forwards_first)
        if key not in self._prepared:
            made = prepare(captured, microbatches, float64=precision == "fp64", forwards_first=forwards_first)
            self._prepared[key] = made
        return self._prepared[key]

    def prepared_for(self, plan: Plan, precision: str) -> Prepared:
        """The same for a plan."""
        return self.prepared(plan.microbatches, precision, plan.precision, forwards_first=plan.forwards_first)


Keep = Callable[[str, Iterable[tuple[str, Tensor | None]]], Mapping[str, Any]]
"""Keeps gradients or parameters (the word) under their names."""


def three_steps(
    loss: Callable[[], Tensor],
    params: Mapping[str, Tensor],
    buffers: Callable[[], Mapping[str, Tensor]],
    optimizer: torch.optim.Optimizer | Piecewise,
    names: tuple[str, ...],
    keep: Keep,
    whole: Callable[[Tensor, Tensor | None], Tensor | None] = lambda p, t: t,
) -> Run:
    """Three steps on the same batch. ``loss``: one forward and backward; ``whole``: of a parameter, and its value or
    gradient here, the global tensor of the latter."""
    first: Run | None = None
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss()
        if first is None:
            grads = keep("grads", ((n, whole(p, p.grad)) for n, p in params.items()))
            kept = {n: b.detach().clone() for n, b in buffers().items()}
            first = Run(value.detach(), grads, kept, {}, names)
        optimizer.step()
    assert first is not None
    return replace(first, params=keep("params", ((n, whole(p, p.detach())) for n, p in params.items())))


def _keeper(path: Path) -> Keep:
    """Keeps them in files whose names begin with ``path``."""
    return lambda what, named: store(path.with_suffix(f".{what}"), named)


# In the ranks

_subjects: dict[str, Subject] = {}


def run_plan(
    rank: int, values: str, model: ModelSpec, batch: int | None, text: str
) -> tuple[dict[str, Run], list[Tensor]]:
    """What a rank does for one plan: both runs, which only rank 0 returns, and the losses. ``values``: a file with the
    parent's weights and inputs, which also names the model among those captured here; the runs' tensors are kept
    beside it until the next plan."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(
        logging.ERROR
    )  # gathers axis by axis: so be it
    if values not in _subjects:
        _subjects.clear()
        subject = Subject.of(model, batch, check=False)
        _subjects[values] = subject.with_values(*torch.load(values, weights_only=False, mmap=True))
    plan = loads(text)
    subject = _subjects[values].computed_in(plan.precision)
    runs = {precision: _run(subject, plan, precision, Path(values)) for precision in PRECISIONS}
    return runs if rank == 0 else {}, [run.loss for run in runs.values()]


def _run(subject: Subject, plan: Plan, precision: str, values: Path) -> Run:
    ranks = connect(plan_mesh(plan), timedelta(seconds=GROUP_TIMEOUT), plan.pp)
    model = staged(plan, subject.prepared_for(plan, precision))
    cast = _wide if precision == "fp64" else torch.clone
    inputs = tuple(map(cast, subject.inputs))
    constants = {name: cast(subject.captured.constants[name]) for name in model.whole.constants}
    tensors = place(_copy(subject.loaded.model, cast, ranks.rank == 0), model.uses, ranks, model.holders)
    program = Program(model.locals(ranks), tensors, ranks, constants, SEED, model.pipeline, flow=model.flow)
    with tempfile.TemporaryDirectory(dir=values.parent) as states:
        return three_steps(
            lambda: program.step(inputs)[0],
            dict(tensors.named_parameters()),
            lambda: dict(tensors.named_buffers()),
            Piecewise(list(tensors.parameters()), OPTIMIZERS[PRECISIONS[precision]], Path(states) / "state"),
            names_of(tensors),
            _keeper(values.with_name(precision)) if ranks.rank == 0 else _count_only,
            lambda p, t: everywhere(p, t, ranks),
        )


def _copy(model: nn.Module, cast: Callable[[Tensor], Tensor], values: bool) -> nn.Module:
    """The model with every tensor cast, on the meta device where its ``values`` are another rank's."""
    tensors: dict[int, Any] = {}
    for t in itertools.chain(model.parameters(), model.buffers()):
        made = cast(t.detach() if values else t.detach().to("meta"))
        tensors[id(t)] = nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made
    return copy.deepcopy(model, tensors)


def _count_only(_: str, named: Iterable[tuple[str, Tensor | None]]) -> Mapping[str, Any]:
    """Of a rank whose run nobody asks for: it only takes part in making the tensors whole."""
    return {name: None for name, _ in named}


# Here


def names_of(model: nn.Module) -> tuple[str, ...]:
    """Every name by which a parameter, a buffer or an entry of the state dict is known, ties included, in order."""
    parameters = (n for n, _ in model.named_parameters(remove_duplicate=False))
    buffers = (n for n, _ in model.named_buffers(remove_duplicate=False))
    return (*parameters, *buffers, *model.state_dict())


def _rows(captured: Capture) -> tuple[Tensor, ...]:
    """The global batch. Rows beyond the example's are its rows rolled along their last dim, so that ranks differ."""
    had = captured.signature.rows
    tensors = [t.detach().clone() for t in captured.signature.example(captured.batch)]
    for spec, tensor in zip(captured.inputs, tensors, strict=True):
        for start in range(had, captured.batch if spec.batch and tensor.ndim > 1 else 0, had):
            rows = tensor[start * spec.each : (start + had) * spec.each]
            rows.copy_(rows.roll(start // had, -1))
    return tuple(tensors)


def _backward(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    return step


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def _last_bit() -> Callable[[Tensor], Tensor]:
    """Moves each element of a tensor by up to its last bit, each time otherwise."""
    return _moved_by(None, 0)


def _moved_by(unit: float | None, seed: int) -> Callable[[Tensor], Tensor]:
    """The same by up to so much of its value (None: its last bit)."""
    generator = torch.Generator().manual_seed(seed)

    def move(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        noise = torch.rand(t.shape, generator=generator) * 2 - 1
        return t + t.nan_to_num(0.0, 0.0, 0.0) * noise.to(t) * (unit or torch.finfo(t.dtype).eps)

    return move


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(WIDER.get(tensor.dtype, tensor.dtype))


def _compare(
    subject: Subject, plan: Plan, every: list[tuple[dict[str, Run], list[Tensor]]], started: float
) -> VerifyResult:
    runs = every[0][0]
    wide, low = distances(runs["fp64"], subject.judge, lr=LR["adamw"]), subject.low
    if low is None:
        narrow = distances(runs["fp32"], subject.eager, lr=LR["sgd"])
    else:
        narrow = distances(runs["fp32"], subject.truth, lr=LR["sgd"], size=NORM)
    for rank, (_, losses) in enumerate(every):
        for found, own, first in zip((wide, narrow), losses, every[0][1], strict=True):
            if not torch.equal(own.nan_to_num(), first.nan_to_num()):
                found.insert(0, Difference(f"loss (rank {rank} has another than rank 0)", "loss", math.inf, math.inf))
    ok64, said64 = judge(wide, FP64, lambda: Doubt(_moved(subject)))
    if low is None:
        doubt = lambda: Doubt(subject.eagers_own, distances(runs["fp32"], subject.truth, lr=LR["sgd"]))
        ok32, said32 = judge(narrow, FP32, doubt)
    else:
        unit = lambda d: subject.unit(d, plan.precision)
        ok32, said32 = judge_low(narrow, low, subject.lows_own, unit, lambda: subject.lows_near)
    return VerifyResult(
        ok=ok64 and ok32,
        ranks=plan.ranks,
        plan=plan.one_line(),
        worst=tuple(map(_finite, (narrow if ok64 and not ok32 else wide)[:WORST])),
        divided=divided(plan, subject.prepared_for(plan, "fp32")),
        seconds=time.perf_counter() - started,
        limits=(*said64, *said32),
        probed=plan.predicted.probed,
    )


def _moved(subject: Subject) -> Mapping[str, float]:
    return farthest_by_kind(distances(subject.permuted, subject.judge, lr=LR["adamw"]))


def _cluster_of(cluster: Cluster | None, ranks: int) -> Cluster:
    if cluster is not None and cluster.ranks != ranks:
        raise AutoparError(
            f"verify: the cluster {cluster.name} has {cluster.ranks} ranks, {ranks} are to run. Give {cluster.ranks}, "
            f"or a cluster of {ranks}."
        )
    return cluster or Cluster.local(ranks=ranks)


_plans: dict[tuple[str, str, str], Plan] = {}  # by graph, cluster and pins: the solver takes its time


def _plan(subject: Subject, pins: Pins, cluster: Cluster) -> Plan:
    """The plan that `autopar.compile` would make; it is given to the ranks, which decide nothing."""
    key = (subject.captured.hash, json.dumps(write(cluster)), pins.text())
    if key not in _plans:
        _plans[key] = plan_training(subject.reducing(pins), pins, cluster, {}).plan
    return _plans[key]


def _finite(d: Difference) -> Difference:
    """JSON has no infinity."""
    return replace(d, abs=min(d.abs, sys.float_info.max), rel=min(d.rel, sys.float_info.max))
