"""The programs of a model: one for every mode and shape of its inputs, over the same parameters.

The first plan of train mode says where parameters rest. Batches of other shapes are captured anew and planned along it
(`autopar.along`); their programs add to the same gradients, and draw random numbers by one count of steps.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore

from autopar.along import carry_over, choose_along, prepare_like, same_ops
from autopar.build import Prepared, choose, plan_mesh, prepare, staged
from autopar.capture import Capture, capture
from autopar.choosing.plan_training import Planned, plan_training, solves
from autopar.cluster import Cluster
from autopar.errors import AutoparError, NothingFits
from autopar.initialise import Initialised
from autopar.optimizer_states import Wanted, optimizer_states
from autopar.passes.layout import Layout
from autopar.pins import Pins, resolve
from autopar.plan import Plan, loads
from autopar.predict import predict
from autopar.python_state import in_modes
from autopar.rests import resting, rests_of
from autopar.runtime.agree import agree
from autopar.runtime.inductor import compiled_units
from autopar.runtime.mesh import Ranks, begun, connect, join, naming
from autopar.runtime.parameters import place
from autopar.runtime.program import Program
from autopar.signature import Signature
from autopar.solver.effort import Effort
from autopar.solver.file import Saved

log = logging.getLogger("autopar")
MOST = 8  # programs of each mode that are kept: the first, and those used last
GIB = 2**30
_FIRST = (
    "forward: the plan is a pipeline, and where parameters lie follows from training. Call parallel.train() and "
    "parallel.prepare(args, kwargs), or a first step, before eval mode."
)
_models, _programs = itertools.count(), itertools.count()  # ranks compile in the same order, so numbers are the same


@dataclass(frozen=True)
class Ready:
    """One capture with its plan, the program of this rank where the plan's ranks are running, and the search behind
    the plan where there was one here."""

    captured: Capture
    prepared: Prepared
    plan: Plan
    program: Program | None
    search: Saved | None = None


class Programs(Initialised):
    """The part of `autopar.Parallel` that captures, plans and emits, and keeps what it made."""

    training: bool

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
        optimizer: Wanted | None,
        effort: Effort,
        inductor: bool,
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
        self._options, self._effort, self._optimizer = dict(options), effort, optimizer
        self._inductor = inductor
        self._seed, self._number, self._meetings = seed, next(_models), itertools.count()
        self._counts = {True: 0, False: 0}  # by mode: steps, or calls, so far
        self._ranks: Ranks | None = None
        self._rests: dict[str, Layout] = {}
        self._ready: dict[bool, list[Ready]] = {True: [], False: []}  # by mode: the first, then as they were last used

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Capture and plan for these example inputs, in the current mode; on a cluster emit this rank's program.

        Collective. `step` and the call do it themselves where inputs come in another shape; a program that is there
        already stays. At most `MOST` of each mode are kept. Raises AutoparError for what cannot be captured or planned.
        """
        if self._find(args, kwargs) is None:
            self._make(args, kwargs)

    def _find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Ready, tuple[Tensor, ...]] | None:
        """What is there for these inputs, and their tensors. Raises AutoparError where in train mode something else
        than shapes differs from the first ones."""
        kept = self._ready[self.training]
        for i in reversed(range(len(kept))):
            with suppress(AutoparError):
                found = kept[i], self._tensors(kept[i].captured, args, kwargs)
                if i:
                    kept.append(kept.pop(i))
                return found
        if self.training and kept:
            with self._noted():
                kept[0].captured.signature.flatten(args, kwargs, rows=None)
        return None

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Tell ranks that have begun a step already what this one failed with before it."""
        try:
            yield
        except AutoparError:
            last = next((ready.program for ready in self._ready[self.training][-1:]), None)
            if last is None:
                raise
            with naming(last.ranks, self._counts[self.training] + 1):
                raise

    def _tensors(self, captured: Capture, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Of inputs in the captured shapes."""
        rows = captured.batch // self._data_ranks() if self._inputs == "local" else captured.batch
        return captured.flatten_inputs(args, kwargs, rows=rows)

    def _make(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        mode = self.training
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
            with self._noted():
                meeting = f"{self._number}.{next(self._meetings)}"
                captured, text = agree(
                    "compile", own, lambda c: c.hash, decide, self._timeout, self._ran_ahead, meeting
                )
        except AutoparError:
            if refused:  # with its plan, which the ranks' agreement has only as a line
                raise refused[0] from None
            raise
        took["plan"] = time.perf_counter() - started - sum(took.values())
        plan = replace(loads(text), timings=took | dict(made[0].seconds if made else {}))
        prepared = made[0].prepared if made else self._prepared(captured, plan)
        program = self._emit(prepared, plan) if size == plan.ranks else None
        kept = self._ready[mode]
        kept.append(Ready(captured, prepared, plan, program, made[0].search if made else None))
        if len(kept) > MOST:
            del kept[1]
        if len(kept) > 1 and rank == 0:
            shapes = ", ".join(f"{i.name} {list(i.shape)}" for i in captured.inputs)
            took_s = time.perf_counter() - started
            log.info("compiled for %s in %.1f s: %s (%d programs)", shapes, took_s, plan.one_line(), len(kept))

    def _ran_ahead(self) -> str:
        """Names a rank that has begun a step with a program it has, while this one would compile for its inputs."""
        step = self._counts[self.training] + 1
        for ready in self._ready[self.training]:
            for other in begun(ready.program.ranks, step) if ready.program is not None else ():
                return (
                    f"step {step}: rank {other} began it with inputs of a shape that it knew, this rank has others. "
                    "Give all ranks the same shapes (with inputs='local' as many rows each)."
                )
        return ""

    def _capture(self, args: Sequence[Any], kwargs: Mapping[str, Any], check: bool) -> Capture:
        model, mode, options = self._model[0], self.training, dict(self._options)
        if not mode:
            options |= {"loss": None, "loss_required": False, "global_batch": None}
        elif self._ready[True]:
            known = self._ready[True][0].captured.inputs
            told = {i.name: 0 if i.batch else None for i in known if i.each == 1}
            options |= {"global_batch": None, "batch_dims": told}
        if self._inputs == "local" and options["global_batch"] is None:
            examples = Signature.of(model, args, kwargs, options["batch_dims"] or {}, options["loss"] is not None)
            options["global_batch"] = examples.rows * self._data_ranks()
        kept = mode and self._modes[model]
        with in_modes(self._modes if kept else dict.fromkeys(self._modes, mode), after=self._modes):
            captured = capture(model, args, kwargs, check=check, **options)
        if self._optimizer is None:
            return captured
        return replace(captured, optimizer=optimizer_states(self._optimizer, captured.parameters.values()))

    def _choose(self, captured: Capture) -> Planned:
        """The plan: the given one, or one for the pins, for parameters that rest where they rest already; along that of
        training, where there is one."""
        cluster, training = self._cluster, self._training()
        if captured.training and self._ready[True]:
            return self._along(captured)
        if captured.training and self._given is not None:
            prepared = self._prepared(captured, self._given)
            plan = resting(self._given, self._rests or rests_of(self._given))
            plan = plan if self._optimizer is None else replace(plan, optimizer=captured.optimizer)
        elif captured.training:
            return plan_training(captured, self._pins, cluster, self._rests, self._effort)
        else:
            prepared = prepare(captured, 1)
            if training is not None:
                plan = choose_along(training, prepared, cluster, self._read(training))
            else:
                pins = replace(self._pins, microbatches=None)
                if (pins.pp or 1) > 1:
                    raise AutoparError(_FIRST)
                plan = choose(prepared, resolve(pins, cluster.ranks, captured.batch), cluster)
            plan = resting(plan, self._rests) if self._rests else plan
        return Planned(predict(plan, prepared, cluster), prepared)

    def _along(self, captured: Capture) -> Planned:
        """For a batch of another shape than training's first; where that does not fit, with all made again."""
        training, cluster = self._ready[True][0].plan, self._cluster
        prepared = self._prepared(captured, training)
        if same_ops(training, prepared):
            plan = carry_over(training, prepared, cluster)
        else:
            plan = choose_along(training, prepared, cluster, self._read(training))
        plan = resting(plan, self._rests or rests_of(training))
        planned = predict(plan, prepared, cluster)
        if planned.fits is False:
            again = replace(plan, classes=tuple(replace(c, recompute="full") for c in plan.classes))
            planned = predict(again, prepared, cluster)
        if planned.fits is False:
            need, limit = planned.predicted.peak_mem_gib or 0.0, planned.predicted.parts["memory_limit_bytes"] / GIB
            raise NothingFits(
                f"no plan fits: with parameters where they rest {planned.one_line()} needs {need:.3g} GiB of "
                f"{limit:.3g} a rank for these inputs. Give fewer or shorter rows, or compile for this shape first.",
                planned,
            )
        return Planned(planned, prepared)

    def _prepared(self, captured: Capture, plan: Plan) -> Prepared:
        """The graph that a plan is for."""
        if captured.training and self._ready[True]:
            return prepare_like(captured, self._ready[True][0].plan)
        return prepare(captured, plan.microbatches, forwards_first=plan.forwards_first)

    def _read(self, training: Plan) -> Mapping[str, tuple[int, ...]]:
        """The stages of a pipeline that read each parameter in training; of one that none reads, those where it is."""
        if training.pp == 1:
            return {}
        if not self._ready[True]:
            raise AutoparError(_FIRST)
        first = self._ready[True][0]
        unread = dict.fromkeys(first.captured.parameters, tuple(range(0, len(training.stages), training.pp)))
        return unread | dict(staged(training, first.prepared).read)

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
            locals_ = model.locals(ranks)
            units = [compiled_units(local, ranks.device) for local in locals_] if self._inductor else None
            return Program(
                locals_, self._names("step"), ranks, constants, self._seed, model.pipeline, units, model.flow
            )

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
        ep, inner = self._pins.ep or 1, self._pins.sequence * (self._pins.tp or 1)
        return ep * (self._pins.dp or self._cluster.ranks // (ep * inner))


__all__ = ["MOST", "Programs", "Ready"]
