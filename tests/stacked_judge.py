"""Plans of one model in the stacked semantics against one process, both in float64. Tests get it as a fixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from autopar.along import carry_over, choose_along, prepare_like, same_ops
from autopar.build import Prepared, Staged, choose, prepare, staged
from autopar.capture import capture, double, run_graph, to_float64
from autopar.choosing import pipelines
from autopar.cluster import Cluster
from autopar.equality import FP64, Difference, Run, distances
from autopar.evaluate import WIDER
from autopar.orders import forwards_first
from autopar.passes import PREPARE, run
from autopar.passes.complete_layouts import complete_prologue
from autopar.passes.counter_random import counter_random
from autopar.passes.facts import KEY
from autopar.passes.layout import Axis, Mesh
from autopar.passes.lower import Lowerable, lower, with_changes
from autopar.passes.random_layouts import random_layouts
from autopar.passes.spec import check
from autopar.passes.split_prologue import copy_graph
from autopar.pins import Pins, microbatch_rows, resolve
from autopar.plan import Plan
from autopar.runtime.counter_random import random_key
from autopar.runtime.stacked_step import stacked_stages
from autopar.trees import flatten

FIRST_STEP = random_key(0, 0)  # by which a `Program` draws first, where no seed is given


class StackedJudge:
    """One captured model; every method asserts that a plan gives the loss, gradients and buffers of one process."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        key: int = FIRST_STEP,
        param_dtype: str | None = None,
    ) -> None:
        self.captured, self.key = capture(model, args, kwargs, check=False, param_dtype=param_dtype), key
        self._others: dict[str, StackedJudge] = {}
        self.model, self.given = model, (args, kwargs)
        self.graph = to_float64(counter_random(copy_graph(self.captured.graph)))
        self.attributes = double(self.captured.attributes)
        self.inputs = [t.to(WIDER.get(t.dtype, t.dtype)) for t in self.captured.flatten_inputs(args, kwargs)]
        self._prepared: dict[tuple[bool, bool], Prepared] = {}

    def in_precision(self, param_dtype: str) -> StackedJudge:
        """Of the same model with its parameters in this dtype, captured once for each."""
        if param_dtype not in self._others:
            self._others[param_dtype] = StackedJudge(self.model, *self.given, self.key, param_dtype)
        return self._others[param_dtype]

    def prepared(self, microbatches: int, first: bool = False) -> Prepared:
        """The graph after PREPARE, made once for one microbatch and once for several; ``first``: whose forwards all
        come before the first backward."""
        key = microbatches > 1, first and microbatches > 1
        if key not in self._prepared:
            self._prepared[key] = prepare(self.captured, microbatches, float64=True, forwards_first=first)
        return self._prepared[key]

    @cached_property
    def reference(self) -> Run:
        """One process, on clones of what forward may change."""
        held = {n: t.clone() if n not in self.captured.parameters else t for n, t in self.attributes.items()}
        loss = run_graph(self.graph, [t.clone() for t in self.inputs], held, self.key)["outputs"][0]
        loss.backward()
        grads = {n: held[n].grad for n in self.captured.parameters}
        return Run(loss.detach(), grads, {n: held[n].detach() for n in self.captured.buffers}, {})

    def eager(self) -> None:
        """The captured graph is the model, on the whole batch as the model is: loss, gradients, buffers."""
        captured, (args, kwargs) = self.captured, self.given
        held = {n: t if n in captured.parameters else t.clone() for n, t in captured.attributes.items()}
        outputs = run_graph(captured.graph, captured.flatten_inputs(args, kwargs), held)["outputs"]
        mine, tree = flatten(captured.unflatten_outputs(outputs))
        theirs, same = flatten(self.model(*args, **kwargs))
        runs = []
        for leaves, buffers in ((mine, held), (theirs, dict(self.model.named_buffers()))):
            loss = next(t for _, t in leaves if isinstance(t, Tensor) and t.ndim == 0 and t.requires_grad)
            loss.backward()
            grads = {n: p.grad for n, p in captured.parameters.items()}
            runs.append(Run(loss.detach(), grads, {n: buffers[n].clone() for n in captured.buffers}, {}))
            for p in captured.parameters.values():
                p.grad = None
        assert tree == same
        worst = distances(runs[0], runs[1], lr=1.0)[0]
        assert worst.rel <= 1e-5, f"captured, against eager: {worst}"

    def spec(self) -> None:
        """Every PREPARE pass leaves a legal graph."""
        gm = copy_graph(self.captured.graph)
        gm.meta["batch_inputs"] = {i.name for i in self.captured.inputs if i.batch}
        check(gm, "capture")
        before = _listed(gm)
        for name in PREPARE:
            gm = run(gm, (name,))
            now = _listed(gm)
            check(gm, name, unchanged=now == before)
            before = now

    def pinned(self, **pins: Any) -> None:
        """The plan for pins; in mixed precision all is float64 here, but the graph has other casts."""
        if pins.get("param_dtype") != self.captured.precision.param_dtype:
            self.in_precision(pins["param_dtype"]).pinned(**pins)
            return
        pp, along = pins.get("pp", 1), int(pins.get("sp") or pins.get("cp") or 1)
        ranks = pins.get("dp", 1) * pins.get("ep", 1) * pins.get("tp", 1) * along
        resolved = resolve(Pins.parse(pins), pp * ranks, self.captured.batch)
        prepared = self.prepared(resolved.microbatches, forwards_first(resolved.schedule))
        plan = choose(prepared, resolved, Cluster.local(ranks=ranks))
        if pp > 1:
            plan = pipelines.staged(plan, prepared, resolved, Cluster.local(ranks=pp * ranks))
        self._assert_near(self._distances(staged(plan, prepared)), f"{pins}")

    def along(self, training: Plan) -> Plan:
        """The plan for this batch along that of training, which is for a batch of another shape."""
        prepared, cluster = prepare_like(self.captured, training, float64=True), Cluster.local(ranks=training.ranks)
        plan = (carry_over if same_ops(training, prepared) else choose_along)(training, prepared, cluster)
        self._assert_near(self._distances(staged(plan, prepared)), f"{plan.one_line()} of {plan.batch} rows")
        return plan

    def random(self, seed: int, axes: tuple[int, ...] = (2, 2), microbatches: int = 1) -> None:
        """Layouts drawn at random for every op."""
        lowerable = self.drawn(seed, axes, microbatches)
        self.assert_equal(lowerable, f"random layouts of seed {seed} on {axes}, {microbatches} microbatches")

    def drawn(self, seed: int, axes: tuple[int, ...], microbatches: int = 1, one_nesting: bool = False) -> Lowerable:
        """Layouts drawn at random; ``one_nesting``: at rest axes nest as those of one device mesh do."""
        prepared, captured = self.prepared(microbatches), self.captured
        space = tuple(Axis("ab"[i], n) for i, n in enumerate(axes))
        rows = microbatch_rows(captured.batch, 1, microbatches)
        mesh = Mesh((*space, Axis("time", microbatches, rows)) if microbatches > 1 else space)
        batch_inputs = frozenset(i.name for i in captured.inputs if i.batch)
        parameters, hoisted = frozenset(captured.parameters), frozenset(prepared.hoisted)
        body = random_layouts(copy_graph(prepared.body), mesh, parameters, batch_inputs, seed, one_nesting, hoisted)
        prologue = None
        if prepared.prologue is not None:
            prologue = complete_prologue(copy_graph(prepared.prologue), mesh, body)
        graphs = [g.graph for g in (body, prologue) if g is not None]
        used = {str(n.target) for g in graphs for n in g.nodes if n.op == "get_attr"}
        names = (captured.parameters, captured.buffers, captured.constants)
        read = (tuple(n for n in known if n in used) for known in names)
        given = tuple(i.name for i in captured.inputs)
        return Lowerable(body, mesh, *read, given, prologue, prepared.hoisted)

    def distances(self, lowerable: Lowerable) -> list[Difference]:
        """How far a step of all ranks is from one process, the farthest tensor first."""
        whole = with_changes(lowerable)
        return self._distances(Staged((whole,), (), {}, {}, None, whole))

    def _distances(self, model: Staged) -> list[Difference]:
        """The same of stages, which have their changes."""
        mesh = model.whole.mesh
        groups = {a.name: a.name for a in mesh.axes}
        programs = [[lower(stage, rank, groups) for rank in range(mesh.ranks)] for stage in model.models]
        held = {n: t.detach() for n, t in self.attributes.items()}
        step = stacked_stages(programs, held, self.inputs, self.key, model.flow)
        grads = {n: step.gradients.get(n) for n in self.captured.parameters}
        buffers: dict[str, Tensor] = {n: step.buffers.get(n, self.attributes[n]) for n in self.captured.buffers}
        return distances(Run(step.loss, grads, buffers, {}), self.reference, lr=1.0)

    def assert_equal(self, lowerable: Lowerable, what: str) -> None:
        """Within the fp64 limits."""
        self._assert_near(self.distances(lowerable), what)

    def _assert_near(self, found: Sequence[Difference], what: str) -> None:
        worst = found[0]
        assert worst.rel <= FP64.limits[worst.kind], f"{what}: {worst}"


def _listed(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """All that a spec reads of a graph, to see whether a pass changed any of it."""
    values = lambda n: [_of(v) if isinstance(v, Tensor) else v for v in tree_leaves(n.meta.get("val"))]
    return [(n.name, n.op, n.target, str(n.args), str(n.kwargs), values(n), n.meta.get(KEY)) for n in gm.graph.nodes]


def _of(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.dtype, value.device
