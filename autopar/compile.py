"""`compile`: plan, rewrite and emit; `Parallel`: the model as trained on the cluster."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture import Capture
from autopar.cluster import Cluster
from autopar.emit import emit
from autopar.errors import AutoparError
from autopar.measure import Measures, Measuring
from autopar.optimizer_states import Wanted
from autopar.passes.lower import Local
from autopar.pins import Pins, ResolvedPins, resolve
from autopar.plan import Plan, Precision
from autopar.programs import Programs, Ready
from autopar.runtime.finite import check_finite
from autopar.runtime.inductor import check_compiler
from autopar.runtime.mesh import TIMEOUT, join, naming
from autopar.runtime.program import Program
from autopar.solver.effort import GAP, Effort, Watch
from autopar.solver.file import Saved


class Parallel(Programs, Measures):
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
        self, model: nn.Module, cluster: Cluster, *, error_if_nonfinite: bool, report: bool, **planning: Any
    ) -> None:
        super().__init__(model, cluster, **planning)
        self._measuring = Measuring(report)
        self.error_if_nonfinite = error_if_nonfinite  # may be set at any time, on every rank alike
        self.training = model.training

    # -- running ----------------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of the whole global batch; returns its loss, 0-d, the same on every rank.

        Takes what the model's forward takes (with ``loss=`` also what only the loss takes). Adds to ``.grad`` as
        ``backward()`` does; buffers are updated in place. Another number of rows or another length is compiled when it
        first comes, under the same plan (`prepare` does it ahead). Raises AutoparError for inputs that the model does
        not take or the plan cannot hold, and where another rank does not answer.
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
        with self._counted(program):
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
        with self._counted(program):
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
        for first in self._ready[self.training][:1]:
            self._program(first)
        found = self._find(args, kwargs)
        if found is None:
            self._make(args, kwargs)
            ready = self._ready[self.training][-1]
            found = ready, self._tensors(ready.captured, args, kwargs)
        ready, tensors = found
        return ready, self._program(ready), tensors

    @contextmanager
    def _counted(self, program: Program) -> Iterator[None]:
        """The programs of a mode draw random numbers by one count of its steps."""
        program.steps = self._counts[self.training]
        yield
        self._counts[self.training] = program.steps

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
        return self._counts[True]

    @steps.setter
    def steps(self, steps: int) -> None:
        self._counts[True] = steps

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
        `autopar.load_program` runs the folder without this model's code. One process that only plans writes the
        programs of all ranks, with the model's first buffers."""
        ready = self._first("save_source")
        if ready.program is not None:
            ready.program.save(folder)
        else:
            emit(ready.plan, ready.prepared, self._model[0], Path(folder), torch.device(self._cluster.device))
        if ready.program is None or ready.program.ranks.rank == 0:
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
    inductor: bool = False,
    gap: float = GAP,
    time_limit: float | None = None,
    watch: Watch | None = None,
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
    ``inductor``: the ops between collectives are compiled by Inductor in the first step, and their numbers are then
    those of ``torch.compile``, which differ from eager ones in the last bits.
    ``gap``: relative, how near to the best a plan must be proved; ``time_limit``: seconds after which the search ends
    as soon as it knows a plan, whose proof then says how far off that may be; ``watch``: see `solver.effort.Watch`.

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
    if inductor:
        check_compiler(torch.device(cluster.device))
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
        effort=Effort(gap, time_limit, watch),
        inductor=inductor,
        options=options,
    )
    if args is not None or kwargs is not None:
        parallel.prepare(tuple(args or ()), dict(kwargs or {}))
    return parallel


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


__all__ = ["Parallel", "ResolvedPins", "compile"]
