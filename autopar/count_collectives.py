"""The collectives of a step, counted in the program that a rank runs: what `Plan.predicted.collectives` and
``explain`` say.

Each library op that communicates is listed with what its forward and its backward send. Bytes are counted as nccl-tests
counts sizes: the whole tensor (a gather's result, a scatter's input, what every rank of an all-reduce holds).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.build import Prepared, apply
from autopar.passes.lower import Local, lower, with_changes
from autopar.plan import Collective, Plan

FORWARD, BACKWARD, PROLOGUE, GATHERED, REDUCED = "forward", "backward", "prologue", "parameters", "gradients"


@dataclass(frozen=True)
class Sends:
    """What an op sends: kinds of the forward and of the backward (by the op's ``dual``, where it has one)."""

    forward: tuple[str, ...] = ()
    backward: Mapping[str, tuple[str, ...]] | tuple[str, ...] = ()
    times: bool = False  # the whole tensor is as many times the result as the group has ranks

    def back(self, dual: str) -> tuple[str, ...]:
        """The kinds of the backward."""
        return self.backward if isinstance(self.backward, tuple) else self.backward.get(dual, ())


OPS = {
    "start_all_reduce": Sends(("all_reduce",), {"all_reduce": ("all_reduce",)}),
    "start_all_gather": Sends(("all_gather",), {"reduce_scatter": ("reduce_scatter",)}),
    "start_reduce_scatter": Sends(("reduce_scatter",), ("all_gather",), times=True),
    "start_all_to_all": Sends(("all_to_all",), ("all_to_all",)),
    "shard": Sends((), {"all_gather": ("all_gather",)}, times=True),
    "replicate": Sends((), ("all_reduce",)),
}


def count_collectives(local: Local, axis_of: Mapping[str, str]) -> tuple[Collective, ...]:
    """What one rank takes part in during one step. ``axis_of``: name of a process group -> name of the mesh axis.

    Sorted by axis, kind and phase. An op that communicates inside (a vocabulary-parallel loss) counts as one
    all-reduce of its result.
    """
    found: Counter[tuple[str, str, str]] = Counter()
    size: Counter[tuple[str, str, str]] = Counter()

    def add(graph: fx.GraphModule, grads: set[str], phases: tuple[str, str], repeats: tuple[int, int]) -> None:
        for kind, group, nbytes, backward in _sends(graph, grads):
            key = (axis_of[group], kind, phases[backward])
            found[key] += repeats[backward]
            size[key] += repeats[backward] * nbytes

    microbatches = _microbatches(local)
    for rows, graph in local.body.items():
        names = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
        trainable = {name for name, use in zip(names, local.parameters, strict=False) if use.trainable}
        times = microbatches[rows]
        add(graph, trainable, (FORWARD, BACKWARD), (times, times))
    if local.prologue is not None:
        add(local.prologue, set(), (PROLOGUE, PROLOGUE), (1, 0))
    count = sum(microbatches.values())
    for use in local.parameters:
        if use.fqn not in local.enter:
            continue
        graph = local.enter[use.fqn]
        grads = {n.name for n in graph.graph.nodes if n.op == "placeholder"} if use.trainable else set()
        add(graph, grads, (GATHERED, REDUCED), (1, count if use.reduce == "microbatch" else 1))
    return tuple(
        Collective(k, axis, found[axis, k, p], size[axis, k, p], p) for axis, k, p in sorted(found) if found[axis, k, p]
    )


def counted(plan: Plan, prepared: Prepared) -> Plan:
    """The plan with the collectives of its first rank's program filled in; needs no process group.

    Raises AutoparError where the plan, made elsewhere or edited, does not fit the model.
    """
    axes = {axis.name: axis.name for axis in plan.axes}
    local = lower(with_changes(apply(plan, prepared)), 0, axes)
    return replace(plan, predicted=replace(plan.predicted, collectives=count_collectives(local, axes)))


def _microbatches(local: Local) -> Counter[int]:
    """How many microbatches run each body, by rows as `Local.body` has them."""
    time = local.mesh.time
    return Counter({0: 1}) if time is None else Counter(local.mesh.axes[time].rows)


def _sends(graph: fx.GraphModule, grads: set[str]) -> Iterator[tuple[str, str, int, bool]]:
    """(kind, group, bytes, in backward) of every collective of a graph; ``grads``: placeholders that need a
    gradient."""
    needs: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if (node.op == "placeholder" and node.name in grads) or (
            node.op == "call_function"
            and node.target is not torch.ops.aten.detach.default
            and any(n in needs for n in node.all_input_nodes)
        ):
            needs.add(node)
        if node.op != "call_function" or getattr(node.target, "namespace", "") != "autopar":
            continue
        arguments = _arguments(node)
        group = arguments.get("group")
        if not isinstance(group, str):
            continue
        op = OPS.get(node.target._schema.name.split("::")[1], Sends(("all_reduce",)))
        nbytes = _nbytes(node) * (_ranks(group, arguments) if op.times else 1)
        for kind in op.forward:
            yield kind, group, nbytes, False
        if node in needs:
            for kind in op.back(str(arguments.get("dual", ""))):
                yield kind, group, nbytes, True


def _arguments(node: fx.Node) -> dict[str, object]:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    names = [a.name for a in target._schema.arguments]
    found: dict[str, object] = dict(zip(names, node.args, strict=False))
    return {**found, **node.kwargs}


def _ranks(group: str, arguments: Mapping[str, object]) -> int:
    n = arguments["n"]
    assert isinstance(n, int), f"the size of group {group} is no number"
    return n


def _nbytes(node: fx.Node) -> int:
    value = node.meta["val"]
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
