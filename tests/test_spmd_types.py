"""Emitted programs under a type checker that is not ours: ``spmd-types``, whose R, I, V and P are our R, I, S and P.

Every rank's program runs op by op on a fake process group. What the checker cannot know is declared: the types of
parameters, inputs and constants as they come in, that what a rank made of its pieces is an addend (V to P), that it
does something of its own with a replicated value (R to V). All else it infers, and must find what our layouts say of
every value that has a gradient, and the loss invariant. Mutations show that it finds a wrong conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import spmd_types as spmd
import spmd_types.checker
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spmd_types import SpmdTypeError
from torch import Tensor, fx

from autopar.build import Prepared, apply, prepare
from autopar.capture import Capture, capture
from autopar.choosing.plan_training import plan_training
from autopar.cluster import Cluster
from autopar.loading import ModelSpec
from autopar.passes import make_local
from autopar.passes.emit import Emitter
from autopar.passes.facts import is_tensor, value
from autopar.passes.insert_changes import produced_layout
from autopar.passes.layout import Layout
from autopar.passes.lower import Local, Lowerable, lower, with_changes
from autopar.pins import Pins

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of the checker's own calls

MODELS = {
    "llama": {"layers": 1, "sequence": 8},
    "gpt2": {"layers": 1, "sequence": 8},
    "vit": {"layers": 1},
    "resnet": {"side": 16},
    "hf/bert": {},
}
PLANS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "dp": {"dp": 2},
    "dp tp": {"dp": 2, "tp": 2},
    "zero": {"dp": 2, "zero": 3},
    "sp": {"tp": 2, "sp": True},
}
TYPES = {"S": spmd.V, "R": spmd.R, "I": spmd.I, "P": spmd.P}


@cache
def prepared(name: str) -> Prepared:
    """The model captured and prepared."""
    if "/" in name:
        loaded = ModelSpec(f"{Path(__file__).parent / 'exact' / 'models.py'}:make", {"name": name}).load()
    else:
        loaded = ModelSpec(f"autopar.models.{name}:make", MODELS[name]).load()
    return prepare(capture(loaded.model.train(), loaded.args, loaded.kwargs, check=False), 1)


@cache
def planned(name: str, plan: str) -> Lowerable:
    """The model with its layouts and every change a node."""
    ready, pins = prepared(name), Pins.parse(PLANS[plan])
    ranks = PLANS[plan].get("dp", 1) * PLANS[plan].get("tp", 1)
    cluster = replace(Cluster.load("h100-dgx"), ranks_per_node=ranks)
    return with_changes(apply(plan_training(ready.captured, pins, cluster, {}).plan, ready))


@contextmanager
def rank_of(model: Lowerable, rank: int) -> Iterator[tuple[Local, dict[str, Any]]]:
    """The program of a rank and its process groups by axis; no other rank exists."""
    step, lower_node, names = Emitter.step, make_local.lower_node, [a.name for a in model.mesh.axes]

    def marked_step(self: Emitter, x: fx.Node, change: Any, v: Any) -> fx.Node:
        node = step(self, x, change, v)
        node.meta.setdefault("axis", self.mesh.axes[change.axis].name)  # a local change does not say on which it is
        return node

    def marked_node(node: fx.Node, emitter: Emitter) -> fx.Node:
        local = lower_node(node, emitter)
        if is_tensor(node) and "change" not in node.meta:
            local.meta["layout"] = produced_layout(node), value(node).grad
        return local

    dist.init_process_group("fake", rank=rank, world_size=model.mesh.ranks)
    try:
        mesh = dist.init_device_mesh("cpu", tuple(a.size for a in model.mesh.axes), mesh_dim_names=tuple(names))
        axes = {name: mesh.get_group(name) for name in names}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Emitter, "step", marked_step)
            patch.setattr(make_local, "lower_node", marked_node)
            local = lower(model, rank, {name: group.group_name for name, group in axes.items()})
        with spmd.set_current_mesh(mesh), spmd.checker.typecheck():
            yield local, axes
    finally:
        dist.destroy_process_group()


class Checked(fx.Interpreter):
    """Runs a local graph, changes of layout as the checker's conversions. ``wrong``: a change to run in a wrong way, by
    its place among all."""

    def __init__(self, graph: fx.GraphModule, axes: dict[str, Any], wrong: int = -1) -> None:
        super().__init__(graph)
        self.axes, self.wrong = axes, wrong
        self.groups = {group.group_name: group for group in axes.values()}
        self.changes = [n for n in graph.graph.nodes if _name(n.target) in CHANGES]

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if _name(n.target).startswith("wait_") or (_name(n.target) in CHANGES and "start_" not in _name(n.target)):
            for dim, size in enumerate(n.meta["val"].shape):
                made = _resized(made, dim, size)
        return self.declare(made, *n.meta["layout"], n) if "layout" in n.meta else made

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = _name(target)
        if name.startswith("wait_"):
            return args[0]
        if name in CHANGES:
            node = self.changes[self.at]
            self.at += 1
            call = dict(zip([a.name for a in target._schema.arguments], args)) | kwargs
            axis = self.groups[call["group"]] if "group" in call else self.axes[node.meta["axis"]]
            return CHANGES[name](call, axis) if self.at - 1 != self.wrong else WRONG[name](call, axis)
        function = _public(target)
        if len(args) > 2 and args[2] is not None and function in (torch.conv2d, F.linear):
            return self.plus(function(*args[:2], None, *args[3:], **kwargs), args[2], function)
        return function(*args, **kwargs)

    at = 0

    def plus(self, y: Tensor, bias: Tensor, function: Any) -> Tensor:
        """A bias stands outside of the sum that a product is: where it is partial, so is the product."""
        for group in self.axes.values():
            if spmd.get_axis_local_type(bias, group) is spmd.P and spmd.get_axis_local_type(y, group) is spmd.V:
                y = spmd.reinterpret(y, group, src=spmd.V, dst=spmd.P)
        return torch.add(y, bias if function is F.linear else torch.reshape(bias, (-1, 1, 1)))

    def declare(self, x: Tensor, layout: Layout, grad: bool, n: fx.Node) -> Tensor:
        """The value as our layout has it, where the step there only declares."""
        for (name, group), kind in zip(self.axes.items(), layout.kinds):
            found, wanted = spmd.get_axis_local_type(x, group), TYPES[kind]
            if (found, wanted) in ((spmd.V, spmd.P), (spmd.R, spmd.V)):
                x = spmd.reinterpret(x, group, src=found, dst=wanted, expert_mode=True)
            elif found is not wanted and grad and x.requires_grad and self.wrong < 0:
                raise AssertionError(f"{n.format_node()}: {found} on {name}, our layout is {layout}")
        return x


def _name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return schema.name.removeprefix("autopar::") if schema is not None and schema.name.startswith("autopar::") else ""


def _public(target: Any) -> Callable[..., Any]:
    """The function of torch that an overload stands for: the checker knows those."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.name.startswith("aten::"):
        return OWN.get(_name(target), target)
    name = schema.name.removeprefix("aten::")
    if name == "linear":
        return F.linear
    homes = (torch.Tensor, torch) if name in ("view", "expand", "to", "contiguous") else (torch, torch.Tensor)
    found: Callable[..., Any] = next((getattr(h, name) for h in homes if hasattr(h, name)), target)
    return found


def _vocabulary(logits: Tensor, target: Tensor, group: str, *_: Any) -> Tensor:
    """What cross entropy of a cut vocabulary is to types: addends of every rank, summed."""
    return spmd.all_reduce(
        logits.sum() + target.sum(), dist.distributed_c10d._resolve_process_group(group), src=spmd.V, dst=spmd.I
    )


OWN: dict[str, Callable[..., Any]] = {"cross_entropy_sum_sharded": _vocabulary}
DUALS = {"none": spmd.I, "all_reduce": spmd.R, "slice": spmd.I, "reduce_scatter": spmd.R}
Change = Callable[[dict[str, Any], Any], Tensor]


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    """So long along ``dim``: where pieces are uneven the checker's collectives, which know no others, get even ones."""
    while x.shape[dim] < size:
        x = torch.cat([x, x], dim)
    return x if x.shape[dim] == size else torch.narrow(x, dim, 0, size)


def _even(x: Tensor, dim: int, axis: Any) -> Tensor:
    return _resized(x, dim, -(-x.shape[dim] // axis.size()) * axis.size())


def _shard(call: dict[str, Any], axis: Any) -> Tensor:
    src = spmd.I if call["dual"] == "all_gather" else spmd.R
    return spmd.convert(_even(call["x"], call["dim"], axis), axis, src=src, dst=spmd.S(call["dim"]), expert_mode=True)


CHANGES: dict[str, Change] = {
    "start_all_reduce": lambda c, axis: spmd.all_reduce(c["x"].contiguous(), axis, src=spmd.P, dst=DUALS[c["dual"]]),
    "start_all_gather": lambda c, axis: spmd.all_gather(c["x"], axis, src=spmd.S(c["dim"]), dst=DUALS[c["dual"]]),
    "start_reduce_scatter": lambda c, axis: spmd.reduce_scatter(
        _even(c["x"], c["dim"], axis), axis, src=spmd.P, dst=spmd.S(c["dim"])
    ),
    "start_all_to_all": lambda c, axis: spmd.all_to_all(
        _even(c["x"], c["to_dim"], axis), axis, src=spmd.S(c["dim"]), dst=spmd.S(c["to_dim"])
    ),
    "shard": _shard,
    "pad": lambda c, axis: spmd.convert(c["x"], axis, src=spmd.S(c["dim"]), dst=spmd.P, expert_mode=True),
    "keep": lambda c, axis: spmd.convert(
        c["x"], axis, src=spmd.I if c["dual"] == "none" else spmd.R, dst=spmd.P, expert_mode=True
    ),
    "replicate": lambda c, axis: spmd.convert(c["x"], axis, src=spmd.I, dst=spmd.R),
    "invariant": lambda c, axis: spmd.convert(c["x"], axis, src=spmd.R, dst=spmd.I, expert_mode=True),
}
WRONG: dict[str, Change] = {
    "start_all_reduce": lambda c, axis: c["x"],  # dropped
    "replicate": lambda c, axis: c["x"],  # I used as R
    "start_all_gather": lambda c, axis: spmd.all_gather(
        c["x"], axis, src=spmd.S(c["dim"]), dst=spmd.R if DUALS[c["dual"]] is spmd.I else spmd.I
    ),
    "start_reduce_scatter": lambda c, axis: spmd.convert(c["x"], axis, src=spmd.R, dst=spmd.S(c["dim"])),
}


def check(model: Lowerable, captured: Capture, rank: int, wrong: int = -1) -> list[str]:
    """Run the program of a rank under the checker, the change at place ``wrong`` run in a wrong way; its changes."""
    with rank_of(model, rank) as (local, axes):
        given = [*_parameters(local, axes), *_others(local, axes, captured)]
        (program,) = local.body.values()
        run = Checked(program, axes, wrong)
        (loss, *_), _ = run.run(*given, 0, 0)  # microbatch, key
        for name, group in axes.items():
            found = spmd.get_axis_local_type(loss, group)
            if found is not spmd.I:
                raise SpmdTypeError(f"the loss is {found} on {name}")
        loss.backward()
        return [_name(n.target) for n in run.changes]


def _typed(shape: Sequence[int], dtype: torch.dtype, axes: dict[str, Any], layout: Layout) -> Tensor:
    with spmd.no_typecheck():
        x = torch.rand(tuple(shape)).to(dtype)
    return _as(x, axes, layout)


def _as(x: Tensor, axes: dict[str, Any], layout: Layout) -> Tensor:
    """Declare a type, or assert it where there is one."""
    return spmd.assert_type(x, {group: TYPES[kind] for group, kind in zip(axes.values(), layout.kinds)})


def _parameters(local: Local, axes: dict[str, Any]) -> Iterator[Tensor]:
    """Every parameter as the program takes it: from rest through its own changes."""
    for use in local.parameters:
        x = _typed(use.rest.local_shape(use.shape, local.mesh, local.coordinates), use.dtype, axes, use.rest)
        x.requires_grad_(use.trainable)
        if use.fqn in local.enter:
            x = Checked(local.enter[use.fqn], axes).run(x)
        yield _as(x, axes, use.use) if use.trainable else x


def _others(local: Local, axes: dict[str, Any], captured: Capture) -> Iterator[Tensor]:
    """Buffers, constants and this rank's pieces of the inputs."""
    for name in (*local.buffers, *local.constants):
        x = captured.attributes[name]
        yield _typed(x.shape, x.dtype, axes, Layout.uniform("R", len(axes), 0))
    for use in local.inputs:
        dtype = next(i.dtype for i in captured.inputs if i.name == use.name)
        yield _typed(use.layout.local_shape(use.shape, local.mesh, local.coordinates), dtype, axes, use.layout)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_emitted_programs_are_well_typed(name: str, plan: str) -> None:
    model = planned(name, plan)
    for rank in range(model.mesh.ranks):
        check(model, prepared(name).captured, rank)


@pytest.mark.parametrize("plan", ["dp tp", "sp"])
def test_a_wrong_conversion_is_found(plan: str) -> None:
    """Each change of the program in turn: an all-reduce left out, I read as R, a gather with the other dual."""
    model, captured = planned("llama", plan), prepared("llama").captured
    changes = check(model, captured, 1)
    tried = [i for i, name in enumerate(changes) if name in WRONG]
    assert tried and (plan != "sp" or "start_reduce_scatter" in changes)
    for i in tried:
        with pytest.raises(SpmdTypeError):
            check(model, captured, 1, wrong=i)
