"""`compile`: plan, rewrite and emit; `Parallel`: the model as trained on the cluster."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore

from autopar.build import Prepared, choose, choose_along, plan_mesh, prepare, staged
from autopar.capture import Capture, capture
from autopar.choosing.plan_training import Planned, plan_training, solves
from autopar.cluster import Cluster
from autopar.errors import AutoparError, NothingFits
from autopar.initialise import Initialised
from autopar.measure import Measures, Measuring
from autopar.optimizer_states import Wanted, optimizer_states
from autopar.passes.layout import Layout
from autopar.passes.lower import Local
from autopar.pins import Pins, ResolvedPins, resolve
from autopar.plan import Plan, Precision, loads
from autopar.predict import predict
from autopar.rests import resting, rests_of
from autopar.runtime.agree import agree
from autopar.runtime.finite import check_finite
from autopar.runtime.mesh import TIMEOUT, Ranks, connect, join, naming
from autopar.runtime.parameters import place
from autopar.runtime.program import Program
from autopar.signature import Signature
from autopar.solver.file import Saved

_FIRST = (
    "forward: the plan is a pipeline, and where parameters lie follows from training. Call parallel.train() and "
    "parallel.prepare(args, kwargs), or a first step, before eval mode."
)
_programs = itertools.count()  # ranks compile in the same order, so the number is the same on all


@dataclass(frozen=True)
class Ready:
    """One capture with its plan, the program of this rank where the plan's ranks are running, and the search behind
    the plan where there was one here."""

    captured: Capture
    prepared: Prepared
    plan: Plan
    program: Program | None
    search: Saved | None = None


class Parallel(Initialised, Measures):
    """A model as trained on a cluster. Made by `compile`.

    Its parameters are DTensors under the model's own names, its buffers and ``state_dict`` keys the model's. Give
    ``parameters()`` to an optimizer, or its class to `optimizer`, whose step is faster; call `step` once per global
    batch, or the module itself in eval mode. All ranks call the same methods in the same order. The model that was
    given keeps its first values: read ``state_dict()``. Gradients are written by `step`, so hooks on parameters do not
    run. `autopar.save` and `autopar.load` keep a run, `save_weights` the model alone.

    ``train()`` and ``eval()`` choose the mode. In train mode modules that the user had in eval mode when compiling stay
    in it (a frozen BatchNorm). A submodule named like one of these methods is reached by `get_submodule`.
    """

    def __init__(
        self,
        model: nn.Module,
        cluster: Cluster,
        *,
        pins: Pins,
        plan: Plan | None,
        inputs: str,
        timeout: timedelta,
        seed: int,
        error_if_nonfinite: bool,
        optimizer: Wanted | None,
        report: bool,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(model, cluster.ranks)
        if inputs not in ("global", "local"):
            raise AutoparError(
                f"compile: inputs={inputs!r} is not known. Use "
                "'global' (every rank has the batch) or 'local' (its rows)."
            )
        self._modes = {module: module.training for module in model.modules()}
        self._cluster, self._pins, self._given, self._inputs, self._timeout = cluster, pins, plan, inputs, timeout
        self._options = dict(options)
        self._seed, self._steps = seed, 0
        self._optimizer, self._measuring = optimizer, Measuring(report)
        self.error_if_nonfinite = error_if_nonfinite  # may be set at any time, on every rank alike
        self._ranks: Ranks | None = None
        self._rests: dict[str, Layout] = {}
        self._ready: dict[bool, list[Ready]] = {True: [], False: []}  # of train mode there is one
        self.training = model.training

    # -- planning ---------------------------------------------------------------------------------------------------

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Capture and plan for these example inputs, in the current mode; on a cluster emit this rank's program.

        Collective. `step` and the call do it themselves when they need it. In train mode there is one program; in eval
        mode one for each shape of the inputs. Raises AutoparError for what cannot be captured or planned.
        """
        mode = self.training
        if mode and self._ready[True]:
            raise AutoparError("prepare: training is planned already. Call compile again for other inputs.")
        started = time.perf_counter()
        rank, size = join(self._timeout)
        took: dict[str, float] = {}
        made: list[Planned] = []
        refused: list[NothingFits] = []

        def own() -> Capture:
            captured = self._capture(args, kwargs, check=rank == 0)
            took["capture"] = time.perf_counter() - started
            return captured

        def decide(captured: Capture) -> str:
            try:
                made.append(self._choose(captured))
            except NothingFits as error:
                refused.append(error)
                raise
            return made[0].plan.dumps()

        try:
            captured, text = agree("compile", own, lambda captured: captured.hash, decide, self._timeout)
        except AutoparError:
            if refused:  # with its plan, which the ranks' agreement has only as a line
                raise refused[0] from None
            raise
        took["plan"] = time.perf_counter() - started - sum(took.values())
        plan = replace(loads(text), timings=took | dict(made[0].seconds if made else {}))
        prepared = made[0].prepared if made else _prepared(captured, plan)
        program = self._emit(prepared, plan) if size == plan.ranks else None
        search = made[0].search if made else None
        self._ready[mode].append(Ready(captured, prepared, plan, program, search))

    def _capture(self, args: Sequence[Any], kwargs: Mapping[str, Any], check: bool) -> Capture:
        model, mode, options = self._model[0], self.training, dict(self._options)
        if not mode:
            options |= {"loss": None, "loss_required": False, "global_batch": None}
        if self._inputs == "local" and options["global_batch"] is None:
            examples = Signature.of(model, args, kwargs, options["batch_dims"] or {}, options["loss"] is not None)
            options["global_batch"] = examples.rows * self._data_ranks()
        kept = mode and self._modes[model]
        with _in_modes(self._modes if kept else dict.fromkeys(self._modes, mode), after=self._modes):
            captured = capture(model, args, kwargs, check=check, **options)
        if self._optimizer is None:
            return captured
        return replace(captured, optimizer=optimizer_states(self._optimizer, captured.parameters.values()))

    def _choose(self, captured: Capture) -> Planned:
        """The plan: the given one, or one for the pins, for parameters that rest where they rest already."""
        cluster, training = self._cluster, self._training()
        if captured.training and self._given is not None:
            prepared = _prepared(captured, self._given)
            plan = resting(self._given, self._rests or rests_of(self._given))
            plan = plan if self._optimizer is None else replace(plan, optimizer=captured.optimizer)
        elif captured.training:
            return plan_training(captured, self._pins, cluster, self._rests)
        else:
            prepared = prepare(captured, 1)
            if training is not None:
                plan = choose_along(prepared, training, cluster, self._read(training))
            else:
                pins = replace(self._pins, microbatches=None)
                if (pins.pp or 1) > 1:
                    raise AutoparError(_FIRST)
                plan = choose(prepared, resolve(pins, cluster.ranks, captured.batch), cluster)
            plan = resting(plan, self._rests) if self._rests else plan
        return Planned(predict(plan, prepared, cluster), prepared)

    def _read(self, training: Plan) -> Mapping[str, tuple[int, ...]]:
        """The stages of a pipeline that read each parameter in training."""
        if training.pp == 1:
            return {}
        if not self._ready[True]:
            raise AutoparError(_FIRST)
        return staged(training, self._ready[True][0].prepared).read

    def _training(self) -> Plan | None:
        """The plan of training, where there is one by now."""
        return self._given or next((ready.plan for ready in self._ready[True]), None)

    def _emit(self, prepared: Prepared, plan: Plan) -> Program:
        if self._ranks is None:
            self._ranks = connect(plan_mesh(plan), self._timeout, plan.pp)
        ranks = self._ranks.for_mesh(plan_mesh(plan))
        ranks = replace(ranks, store=PrefixStore(f"program/{next(_programs)}", ranks.store))
        with naming(ranks, 0):
            model = staged(plan, prepared)
            constants = {name: prepared.captured.constants[name] for name in model.whole.constants}
            empty = next((name for name, tensor in constants.items() if tensor.is_meta), None)
            if empty is not None:
                raise AutoparError(
                    f"{empty}: is a tensor on the meta device and neither parameter nor buffer, so nothing gives it a "
                    "value. Make it a buffer, or build the model by autopar.deferred_init."
                )
            if not self._held:
                self._adopt(place(self._model[0], model.uses, ranks, model.holders))
                self._rests = rests_of(plan)
            program = Program(model.locals(ranks), self._names("step"), ranks, constants, self._seed, model.pipeline)
            program.steps = self._steps
            return program

    def _data_ranks(self) -> int:
        """Into how many pieces the ranks cut the batch, as known before there is a plan."""
        training = self._training()
        if training is not None:
            return math.prod(training.axes[i].size for i in training.data)
        if self.training and solves(self._pins):
            raise AutoparError(
                "compile: inputs='local' says how many rows this rank has, but how many ranks cut the batch is not "
                "decided yet. Give global_batch=, or pin dp."
            )
        return self._pins.dp or self._cluster.ranks // (self._pins.sequence * (self._pins.tp or 1))

    # -- running ----------------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of the whole global batch; returns its loss, 0-d, the same on every rank.

        Takes what the model's forward takes (with ``loss=`` also what only the loss takes). Adds to ``.grad`` as
        ``backward()`` does; buffers are updated in place. Raises AutoparError for inputs that do not fit the plan and
        where another rank does not answer.
        """
        return self._step(args, kwargs, outputs=False)[1][0]

    def step_with_outputs(self, *args: Any, **kwargs: Any) -> Any:
        """As `step`, but returns what the model's forward returns (with ``loss=``: the loss and that), all global."""
        ready, leaves = self._step(args, kwargs, outputs=True)
        return ready.captured.unflatten_outputs(leaves)

    def _step(self, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: bool) -> tuple[Ready, tuple[Tensor, ...]]:
        if not self.training:
            raise AutoparError(
                "step: the model is in eval mode. Call parallel.train() first, or parallel(...) for outputs."
            )
        if not torch.is_grad_enabled():
            raise AutoparError(
                "step: gradients are off (no_grad or inference_mode around it). Leave it, or call parallel(...)."
            )
        ready, program, tensors = self._call(args, kwargs)
        self.refuse_without_values("step")
        run = partial(program.step, tensors, inputs_are=self._inputs, outputs=outputs)
        made = self._measuring.run(program, ready.plan, run)
        if self.error_if_nonfinite:
            with naming(program.ranks, program.steps):
                check_finite(self._names("step"), program.ranks, made[0], program.steps)
        return ready, made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's forward returns for the global batch, as global tensors without gradients.

        For eval mode; inputs of another shape are captured anew, whatever the global batch of training. In train mode
        only under ``torch.no_grad()``, with what `step` takes; buffers are then updated.
        """
        if self.training and torch.is_grad_enabled():
            raise AutoparError(
                "forward: the model is in train mode, and a call gives no gradients. Use parallel.step(...) to train, "
                "parallel.eval() or torch.no_grad() for outputs alone."
            )
        ready, program, tensors = self._call(args, kwargs)
        self.refuse_without_values("forward")
        leaves = program.forward(tensors, inputs_are=self._inputs)
        made = ready.captured.unflatten_outputs(leaves)
        return made[1] if ready.captured.has_loss and ready.captured.outputs.loss_leaf is None else made

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Ready, Program, tuple[Tensor, ...]]:
        """The program for these inputs, made if there is none, and their tensors."""
        if torch.is_autocast_enabled(self._ranks.device.type if self._ranks else "cpu"):
            raise AutoparError(
                "autocast: is on around the step (the plan computes in the model's own dtypes). Leave it, or cast the "
                "model before compile."
            )
        mode = self.training
        for ready in self._ready[False] * (not mode):
            program = self._program(ready)
            with suppress(AutoparError):
                return ready, program, self._tensors(ready, program, args, kwargs)
        if not mode or not self._ready[True]:
            self.prepare(args, kwargs)
        ready = self._ready[mode][-1]
        program = self._program(ready)
        with naming(program.ranks, program.steps + 1):
            return ready, program, self._tensors(ready, program, args, kwargs)

    def _tensors(
        self, ready: Ready, program: Program, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, ...]:
        batch = ready.captured.batch
        rows = batch // program.data_world_size if self._inputs == "local" else batch
        return ready.captured.flatten_inputs(args, kwargs, rows=rows)

    def _program(self, ready: Ready) -> Program:
        if ready.program is None:
            _, size = join(self._timeout)
            raise AutoparError(
                f"step: the plan ({ready.plan.one_line()}) needs {ready.plan.ranks} processes, there is {size}. "
                f"Launch with: torchrun --standalone --nproc-per-node {ready.plan.ranks} your_script.py"
            )
        return ready.program

    @property
    def steps(self) -> int:
        """The steps of training so far, by which random ops draw. Set it, on every rank, to go on where a run ended."""
        program = self._ready[True][0].program if self._ready[True] else None
        return self._steps if program is None else program.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        for ready in self._ready[True]:
            if ready.program is not None:
                ready.program.steps = steps

    @property
    def seed(self) -> int:
        """What random ops draw by, beside `steps`. Set it, on every rank, to go on as another run."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        for ready in itertools.chain(*self._ready.values()):
            if ready.program is not None:
                ready.program.seed = seed

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over all parameters of the model, as one process would; the norm before."""
        if not self._ready[True]:
            raise AutoparError("clip_grad_norm_: there are no gradients yet. Call step first.")
        return self._program(self._ready[True][0]).clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    # -- looking ----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of training (of the first call, where there was none in train mode)."""
        return self._first("plan").plan

    def save_source(self, folder: str | Path) -> None:
        """Write the program of training as readable Python (`Program.save`), beside its ``plan.json``; collective.
        `autopar.load_program` runs the folder without this model's code."""
        ready = self._first("save_source")
        program = self._program(ready)
        program.save(folder)
        if program.ranks.rank == 0:
            ready.plan.save(Path(folder) / "plan.json")

    @property
    def search(self) -> Saved | None:
        """What the solver went through for `plan`; None where the plan was given or made by another rank."""
        return self._first("search").search

    @property
    def captured(self) -> Capture:
        """The captured graph that `plan` is for."""
        return self._first("captured").captured

    def detailed_plan(self) -> Plan:
        """The plan with ``predicted.divided`` filled in, for which the program is emitted once more per axis."""
        from autopar.divided import divided

        first = self._first("plan")
        shares = divided(first.plan, first.prepared)
        return replace(first.plan, predicted=replace(first.plan.predicted, divided=shares))

    def explain(self) -> str:
        """The plan as a page of text, with the share that each axis takes off a rank."""
        from autopar.explain import explain

        return explain(self.detailed_plan()).text()

    @property
    def local(self) -> Local:
        """The program of this rank, in train mode where there is one."""
        return self._program(self._first("local")).local

    @property
    def data_rank(self) -> int:
        """Which of the `data_world_size` pieces of every batch this rank reads, for a sampler."""
        return self._program(self._first("data_rank")).data_rank

    @property
    def data_world_size(self) -> int:
        """Into how many pieces the ranks cut every batch."""
        return self._program(self._first("data_world_size")).data_world_size

    def _first(self, what: str) -> Ready:
        found = [*self._ready[True], *self._ready[False]]
        if not found:
            raise AutoparError(f"{what}: the model is not captured yet. Give compile args=, or call step once.")
        return found[0]


def compile(
    model: nn.Module,
    cluster: Cluster | str | Path | None = None,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    global_batch: int | None = None,
    pins: Pins | Mapping[str, Any] | Sequence[str] | None = None,
    plan: Plan | str | Path | None = None,
    loss: Callable[..., Tensor] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    inputs: str = "global",
    timeout: timedelta = TIMEOUT,
    seed: int = 0,
    dropout: str | None = None,
    error_if_nonfinite: bool = False,
    optimizer: Wanted | None = None,
    report: bool = False,
) -> Parallel:
    """Plan ``model`` for ``cluster``, rewrite it, and emit the program of this rank. Collective under torchrun.

    ``model``: every rank starts from rank 0's values; on the meta device from those of `autopar.deferred_init`, or from
    none, which `Parallel.init_weights` and `Parallel.load_weights` give. ``cluster``: a `Cluster`, a shipped name or a
    JSON file (default: the ranks that torchrun started, or the plan's).
    ``args``, ``kwargs``: example inputs (without them capture waits for the first step); ``global_batch``: rows that a
    step takes over all ranks (default: those of the examples). ``pins``: what is fixed, ``{"dp": 2, "tp": 2}``, or
    ``{"param_dtype": "bf16"}`` for mixed precision: parameters rest as they are, are gathered and computed with in that
    dtype, and their gradients reduced in ``reduce_dtype`` (default: as they rest). ``plan``: a saved plan to use
    instead. ``loss``: see `autopar.capture.capture`. ``inputs``: ``"global"``: every rank gives `Parallel.step` the
    whole batch, ``"local"``: its own rows (also as example, where ``global_batch`` does not say otherwise).
    ``timeout``: how long a rank waits for another. ``seed``: of random ops, the same on every rank; what they draw
    depends on it, on the number of the step and on the place in the global tensor, never on the plan.
    ``dropout``: ``"per-rank"`` is a relaxation: see `autopar.capture.capture` (default: the plan's, else ``"exact"``).
    ``error_if_nonfinite``: `Parallel.step` raises NonfiniteError, on every rank, where its loss or a gradient is nan or
    inf, with the number of the step, the rank and the parameter; costs one small exchange a step.
    ``optimizer``: what will train the model (default AdamW), so that plans count the bytes of its states: a class, a
    name as ``"sgd,momentum=0.9"``, or a function of a list of parameters (`autopar.optimizer_states`). ``report``:
    rank 0 logs, as "autopar" at INFO, how long the third step took beside what was predicted (`Parallel.measure`).

    Raises AutoparError, one line, for whatever cannot be done exactly as asked; NothingFits, with the plan that comes
    closest, where none that keeps the pins fits the memory of a rank.

    Example:
        >>> from autopar.models import mlp
        >>> model, args, _ = mlp.make()
        >>> parallel = compile(model, Cluster.local(ranks=4), args=args, pins={"dp": 2, "tp": 2})
        >>> parallel.plan.one_line()
        'dp=2 tp=2 on 4 ranks'
    """
    if not isinstance(model, nn.Module):
        raise AutoparError(f"compile: model is a {type(model).__name__}, not an nn.Module. Give the module itself.")
    found = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    parsed = Pins.parse(pins)
    _, size = join(timeout)
    if cluster is None:
        cluster = Cluster.local(ranks=found.ranks if found is not None and size == 1 else size)
    cluster = Cluster.of(cluster)
    if found is not None:
        _refuse_beside_plan(found, parsed, cluster, global_batch)
        global_batch = found.batch
    if size not in (1, cluster.ranks):
        raise AutoparError(
            f"compile: the cluster has {cluster.ranks} ranks and {size} processes are running. Launch with "
            f"torchrun --nproc-per-node {cluster.ranks}, or give Cluster.local(ranks={size})."
        )
    resolve(parsed, cluster.ranks)
    if dropout is None:
        dropout = found.relaxations.get("dropout", "exact") if found is not None else "exact"
    asked: Pins | Precision = parsed if found is None else found.precision
    options = {"global_batch": global_batch, "loss": loss, "batch_dims": batch_dims, "dropout": dropout}
    options |= {"param_dtype": asked.param_dtype, "reduce_dtype": asked.reduce_dtype}
    parallel = Parallel(
        model,
        cluster,
        pins=parsed,
        plan=found,
        inputs=inputs,
        timeout=timeout,
        seed=seed,
        error_if_nonfinite=error_if_nonfinite,
        optimizer=optimizer,
        report=report,
        options=options,
    )
    if args is not None or kwargs is not None:
        parallel.prepare(tuple(args or ()), dict(kwargs or {}))
    return parallel


def _prepared(captured: Capture, plan: Plan) -> Prepared:
    return prepare(captured, plan.microbatches, forwards_first=plan.forwards_first)


def _refuse_beside_plan(plan: Plan, pins: Pins, cluster: Cluster, global_batch: int | None) -> None:
    if pins.named():
        raise AutoparError(f"compile: pins ({pins.text()}) beside a plan, which is finished. Give one of them.")
    if plan.ranks != cluster.ranks:
        raise AutoparError(
            f"compile: the plan ({plan.one_line()}) is for {plan.ranks} ranks, the cluster has {cluster.ranks}. Launch "
            f"with torchrun --nproc-per-node {plan.ranks}, or plan again."
        )
    if global_batch not in (None, plan.batch):
        raise AutoparError(
            f"compile: global_batch={global_batch}, the plan is for {plan.batch} rows. Leave it out, or plan again."
        )


@contextmanager
def _in_modes(modes: Mapping[nn.Module, bool], after: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Every module in its mode, and afterwards as the user had it."""
    try:
        for module, mode in modes.items():
            module.training = mode
        yield
    finally:
        for module, mode in after.items():
            module.training = mode


__all__ = ["Parallel", "ResolvedPins", "compile"]
