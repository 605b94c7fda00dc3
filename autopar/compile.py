"""`compile`: plan, rewrite and emit; `Parallel`: the model as trained on the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.build import Prepared, apply, choose, plan_mesh, prepare
from autopar.capture import Capture, capture
from autopar.cluster import Cluster
from autopar.count_collectives import counted
from autopar.errors import AutoparError
from autopar.passes.lower import Local, lower, with_changes
from autopar.pins import Pins, ResolvedPins, resolve
from autopar.plan import Plan, loads
from autopar.runtime.mesh import TIMEOUT, Ranks, connect, join
from autopar.runtime.parameters import clip_grad_norm_, from_rank_0, place
from autopar.runtime.program import Program


class Parallel(nn.Module):
    """A model as trained on a cluster. Made by `compile`.

    Its parameters are DTensors under the model's own names, its buffers and ``state_dict`` keys the model's. Give
    ``parameters()`` to any optimizer; call `step` once per global batch. All ranks call the same methods.
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
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        if inputs not in ("global", "local"):
            raise AutoparError(
                f"compile: inputs={inputs!r} is not known. Use "
                "'global' (every rank has the batch) or 'local' (its rows)."
            )
        self._model = [model]  # in a list, so that nn.Module does not count it as its own
        self._cluster, self._pins, self._given, self._inputs, self._timeout = cluster, pins, plan, inputs, timeout
        self._options = dict(options)
        self._ranks: Ranks | None = None
        self._held: list[nn.Module] = []  # one: the tree of names; in a list, so that it is no submodule
        self._captured: dict[bool, Capture] = {}
        self._programs: dict[bool, Program] = {}
        self._plans: dict[bool, Plan] = {}
        self.training = model.training

    # -- planning ---------------------------------------------------------------------------------------------------

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Capture and plan for these example inputs, in the current mode; on a cluster emit this rank's program."""
        mode = self.training
        model = self._model[0]
        model.train(mode)
        started = time.perf_counter()
        options = self._options if mode else {**self._options, "loss_required": False, "global_batch": None}
        if self._inputs == "local" and options.get("global_batch") is None:
            options = {**options, "global_batch": self._rows(args, kwargs) * self._data_ranks()}
        captured = capture(model, args, kwargs, **options)
        took = {"capture": time.perf_counter() - started}
        _, size = join()
        pins = resolve(
            self._pins if mode else replace(self._pins, microbatches=None), self._cluster.ranks, captured.batch
        )
        if size != 1 and size != pins.ranks:
            raise AutoparError(
                f"compile: the cluster has {pins.ranks} ranks and {size} processes are running. Launch with "
                f"torchrun --nproc-per-node {pins.ranks}, or give Cluster.local(ranks={size})."
            )
        given = self._given if mode else None
        prepared = prepare(captured, given.microbatches if given is not None else pins.microbatches)
        took["prepare"] = time.perf_counter() - started - sum(took.values())
        plan = counted(choose(prepared, pins, self._cluster) if given is None else given, prepared)
        took["plan"] = time.perf_counter() - started - sum(took.values())
        self._captured[mode], self._plans[mode] = captured, replace(plan, timings=took)
        if size == plan.ranks:
            self._emit(mode, prepared, plan)

    def _emit(self, mode: bool, prepared: Prepared, plan: Plan) -> None:
        if self._ranks is None:
            self._ranks = connect(plan_mesh(plan), self._timeout)
        ranks = self._ranks.for_mesh(plan_mesh(plan))
        plan = loads(_text_from_rank_0(plan.dumps(), ranks))
        lowerable = with_changes(apply(plan, prepared))
        local = lower(lowerable, ranks.rank, ranks.group_names, ranks.device)
        if not self._held:
            self._adopt(place(self._model[0], local.parameters, ranks))
        self._plans[mode] = replace(plan, timings=self._plans[mode].timings)
        self._programs[mode] = Program(local, self._held[0], ranks, prepared.captured.constants)

    def _adopt(self, names: nn.Module) -> None:
        """Take over the names, so that they are this module's own; methods of `Parallel` keep precedence."""
        self._held.append(names)
        self._modules.update(names._modules)
        self._parameters.update(names._parameters)
        self._buffers.update(names._buffers)
        self._non_persistent_buffers_set |= names._non_persistent_buffers_set

    # -- training ---------------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of the whole global batch; returns its loss, 0-d, the same on every rank.

        Takes what the model's forward takes. Adds to ``.grad`` as ``backward()`` does; buffers are updated in place.
        Raises AutoparError for inputs that do not fit the plan and where another rank does not answer.
        """
        return self._step(args, kwargs, outputs=False)[0]

    def step_with_outputs(self, *args: Any, **kwargs: Any) -> Any:
        """As `step`, but returns what the model's forward returns (with ``loss=``: the loss and that), all global."""
        leaves = self._step(args, kwargs, outputs=True)
        return self._captured[True].unflatten_outputs(leaves)

    def _step(self, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: bool) -> tuple[Tensor, ...]:
        if not self.training:
            raise AutoparError(
                "step: the model is in eval mode. Call parallel.train() first, or parallel(...) for outputs."
            )
        program = self._program(args, kwargs)
        return program.step(self._tensors(program, args, kwargs), inputs_are=self._inputs, outputs=outputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's forward returns for the global batch, without gradients, in train or eval mode."""
        program = self._program(args, kwargs)
        leaves = program.forward(self._tensors(program, args, kwargs), inputs_are=self._inputs)
        return self._captured[self.training].unflatten_outputs(leaves)

    def _tensors(self, program: Program, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        captured = self._captured[self.training]
        rows = captured.batch // program.data_world_size if self._inputs == "local" else captured.batch
        return captured.flatten_inputs(args, kwargs, rows=rows)

    def _program(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
        if self.training not in self._plans:
            self.prepare(args, kwargs)
        if self.training not in self._programs:
            plan = self._plans[self.training]
            raise AutoparError(
                f"step: the plan ({plan.one_line()}) needs {plan.ranks} processes, this is one. "
                f"Launch with: torchrun --standalone --nproc-per-node {plan.ranks} your_script.py"
            )
        return self._programs[self.training]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over all parameters of the model, as one process would; the norm before."""
        if self._ranks is None or not self._held:
            raise AutoparError("clip_grad_norm_: there are no gradients yet. Call step first.")
        return clip_grad_norm_(self._held[0], self._ranks, max_norm, norm_type, error_if_nonfinite)

    # -- looking ----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of training."""
        plan = self._plans.get(True) or self._plans.get(False)
        if plan is None:
            raise AutoparError("plan: the model is not captured yet. Give compile args=, or call step once.")
        return plan

    def explain(self) -> str:
        """The plan as a page of text."""
        from autopar.explain import explain

        return explain(self.plan).text()

    @property
    def local(self) -> Local:
        """The program of this rank."""
        return next(iter(self._programs.values())).local

    @property
    def data_rank(self) -> int:
        """Which of the `data_world_size` pieces of every batch this rank reads, for a sampler."""
        return self._any_program().data_rank

    @property
    def data_world_size(self) -> int:
        """Into how many pieces the ranks cut every batch."""
        return self._any_program().data_world_size

    def _any_program(self) -> Program:
        if not self._programs:
            raise AutoparError("data_rank: there is no program yet. Give compile args= and run it under torchrun.")
        return next(iter(self._programs.values()))

    def parameters(self, recurse: bool = True) -> Any:
        """The parameters; only known once the model is captured."""
        if not self._held:
            ranks = self._cluster.ranks
            raise AutoparError(
                "parameters: they exist once the model is captured on its ranks. Give compile args=, and launch with "
                f"torchrun --standalone --nproc-per-node {ranks} your_script.py"
            )
        return super().parameters(recurse)

    def train(self, mode: bool = True) -> Parallel:
        """Set train or eval mode; the other mode is captured when it is first called."""
        self.training = mode
        return self

    @staticmethod
    def _rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        from torch.utils._pytree import tree_leaves

        first = next((t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor) and t.ndim), None)
        return first.shape[0] if first is not None else 1

    def _data_ranks(self) -> int:
        return self._pins.dp or self._cluster.ranks // (self._pins.tp or 1)


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
) -> Parallel:
    """Plan ``model`` for ``cluster``, rewrite it, and emit the program of this rank.

    ``cluster``: a `Cluster`, a shipped name or a JSON file (default: the ranks that torchrun started, or one).
    ``args``, ``kwargs``: example inputs (without them capture waits for the first step); ``global_batch``: rows that a
    step takes over all ranks (default: those of the examples). ``pins``: what is fixed, ``{"dp": 2, "tp": 2}``.
    ``plan``: a saved plan to use instead. ``loss``: see `autopar.capture.capture`. ``inputs``: ``"global"``: every rank
    gives `Parallel.step` the whole batch, ``"local"``: its own rows. ``timeout``: how long a rank waits for another.

    Raises AutoparError, one line, for whatever cannot be done exactly as asked.

    Example:
        >>> from autopar.models import mlp
        >>> model, args, _ = mlp.make()
        >>> parallel = compile(model, Cluster.local(ranks=4), args=args, pins={"dp": 2, "tp": 2})
        >>> parallel.plan.one_line()
        'dp=2 tp=2 on 4 ranks'
    """
    if not isinstance(model, nn.Module):
        raise AutoparError(f"compile: model is a {type(model).__name__}, not an nn.Module. Give the module itself.")
    if cluster is None:
        cluster = Cluster.local(ranks=join()[1])
    found = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    parsed = Pins.parse(pins)
    options = {"global_batch": global_batch, "loss": loss, "batch_dims": batch_dims}
    parallel = Parallel(
        model, Cluster.of(cluster), pins=parsed, plan=found, inputs=inputs, timeout=timeout, options=options
    )
    resolve(parsed, parallel._cluster.ranks)
    if args is not None or kwargs is not None:
        parallel.prepare(tuple(args or ()), dict(kwargs or {}))
    return parallel


def _text_from_rank_0(text: str, ranks: Ranks) -> str:
    """Rank 0's text on every rank."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    (length, *_), *_ = ranks.gather_numbers([len(data)])
    full = from_rank_0(data if ranks.rank == 0 else torch.empty(length, dtype=torch.uint8), ranks)
    return bytes(full.tolist()).decode()


__all__ = ["Parallel", "ResolvedPins", "compile"]
