"""The collectives of a step, counted in the program that a rank runs: what `Plan.predicted.collectives` and
``explain`` say.

Phases ``parameters`` and ``gradients`` are those of weights, from rest to use and back; they run beside compute. The
others are waited for.

Each library op that communicates is listed with what its forward and its backward send. Bytes are counted as nccl-tests
counts sizes: the whole tensor (a gather's result, a scatter's input, what every rank of an all-reduce holds).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.passes.layout import Mesh
from autopar.passes.lower import Local
from autopar.plan import Collective
from autopar.runtime.buckets import Alone, Bucket
from autopar.runtime.run import units_of
from autopar.runtime.units import Explicit, Unit
from autopar.runtime.weights import ways_of

aten = torch.ops.aten

FORWARD, BACKWARD, PROLOGUE, GATHERED, REDUCED = "forward", "backward", "prologue", "parameters", "gradients"
HIDDEN = (GATHERED, REDUCED)


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
    "start_scatter": Sends(("reduce_scatter",), times=True),  # this and the next: in backward only
    "start_swap": Sends(("all_to_all",)),
    "shard": Sends((), {"all_gather": ("all_gather",)}, times=True),
    "replicate": Sends((), ("all_reduce",)),
    "pad": Sends(),
}


PASSING = {
    *(aten.narrow.default, aten.slice.Tensor, aten.select.int, aten.clone.default, aten.view.default),
    *(aten.expand.default, aten.permute.default, aten.transpose.int, aten.unflatten.int, aten.movedim.int),
    *(aten.add.Tensor, aten.cat.default, aten._unsafe_view.default, aten.t.default),
}  # what lies between the collective of a weight's gradient and that


@dataclass(frozen=True)
class Sent:
    """One collective of a graph: over ``group``, in the backward or not, of a weight or not; ``inside`` of an op that
    is no change of layout."""

    kind: str
    group: str
    nbytes: int
    backward: bool = False
    weight: bool = False
    inside: bool = False

    def phase(self, forward: str, backward: str) -> str:
        """One of these two, or that of a weight."""
        if self.weight:
            return REDUCED if self.backward else GATHERED
        return backward if self.backward else forward


def count_collectives(
    local: Local, axis_of: Mapping[str, str], mesh: Mesh | None = None, *, train: bool = True, parted: bool = False
) -> tuple[Collective, ...]:
    """What one rank takes part in during one step. ``axis_of``: name of a process group -> name of the mesh axis;
    ``mesh``: the wires by which seconds are counted (None: they are not); ``train``: with the backward, ``parted`` in
    that of inputs and that of weights.

    Sorted by axis, kind and phase.
    """
    found: Counter[tuple[str, str, str]] = Counter()
    size: Counter[tuple[str, str, str]] = Counter()

    def add(every: Iterable[Sent], phases: tuple[str, str], there: int, back: int) -> None:
        for sent in every:
            key, times = (axis_of[sent.group], sent.kind, sent.phase(*phases)), back if sent.backward else there
            found[key] += times
            size[key] += times * sent.nbytes

    rows, units = microbatches(local), units_of(local)
    for r, run in units.items():
        of = [list(sends_of_unit(unit, train=train)) for unit in run.units]
        for call in run.program.calls:
            add(of[call.kind], (FORWARD, BACKWARD), rows[r], rows[r])
    if local.prologue is not None:
        add(sends(local.prologue, {}), (PROLOGUE, PROLOGUE), 1, 0)
    for bucket, there, back in ways_of(local, units, parted=parted).moves(sum(rows.values()), train=train):
        add(sends_of(bucket, local), HIDDEN, there, back)
    return tuple(_row(key, found[key], size[key], mesh) for key in sorted(found) if found[key])


def summed(every: Iterable[Sequence[Collective]]) -> tuple[Collective, ...]:
    """Rows of several programs that one rank runs, those of one kind, axis and phase added up."""
    found: dict[tuple[str, str, str], Collective] = {}
    for c in (row for rows in every for row in rows):
        key = (c.axis, c.kind, c.phase)
        if (old := found.get(key)) is not None:
            seconds = None if c.seconds is None or old.seconds is None else old.seconds + c.seconds
            c = replace(c, count=old.count + c.count, bytes=old.bytes + c.bytes, seconds=seconds)
        found[key] = c
    return tuple(found[key] for key in sorted(found))


def _row(key: tuple[str, str, str], count: int, nbytes: int, mesh: Mesh | None) -> Collective:
    axis, kind, phase = key
    if mesh is None:
        return Collective(kind, axis, count, nbytes, phase)
    latency, per_byte = mesh.wire(mesh.index(axis)).of(kind)
    return Collective(kind, axis, count, nbytes, phase, count * latency + nbytes * per_byte, phase in HIDDEN)


def microbatches(local: Local) -> Counter[int]:
    """How many microbatches run each body, by rows as `Local.body` has them."""
    time = local.mesh.time
    return Counter({0: 1}) if time is None else Counter(local.mesh.axes[time].rows)


def sends_of(bucket: Bucket, local: Local) -> list[Sent]:
    """The collectives of a bucket: each carries the bytes of all members that take part."""
    every: list[Sent] = []
    for use in (local.parameters[i] for i in bucket.members):
        graph, v = local.enter[use.fqn], use.value
        for sent in sends(graph, {n.name: use.trainable for n in graph.graph.nodes if n.op == "placeholder"}):
            dtype = v.reduced.dtype if sent.backward else v.dtype
            every.append(replace(sent, nbytes=sent.nbytes * dtype.itemsize // v.dtype.itemsize))
    if any(isinstance(link, Alone) for link in bucket.chains[0]):
        return every
    size: Counter[Sent] = Counter()
    for sent in every:
        size[replace(sent, nbytes=0)] += sent.nbytes
    return [replace(sent, nbytes=nbytes) for sent, nbytes in size.items()]


def sends_of_unit(unit: Unit, *, train: bool) -> Iterator[Sent]:
    """What one call of a unit sends, as it is run: what backward makes again of forward, it sends again."""
    kind = unit.kind
    if not (train and unit.grads):
        yield from sends(kind.graph, _weights(kind.graph, kind.kinds, ()))
    elif isinstance(unit, Explicit):
        yield from sends(unit.made.forward, _weights(unit.made.forward, kind.kinds, ()))
        backward = unit.made.backward
        assert backward is not None
        for node, sent in _each(backward, _weights(backward, [kind.kinds[i] for i in unit.made.keeps], ())):
            if sent.weight:
                yield sent  # a weight's way to another layout, made again
            else:
                yield replace(sent, backward=True, weight=_is_of_weights(node, unit))
    else:
        every = list(sends(kind.graph, _weights(kind.graph, kind.kinds, kind.needs)))
        yield from every
        if kind.recompute != "none":
            yield from (replace(sent, backward=not sent.weight) for sent in every if not sent.backward)


def _weights(graph: fx.GraphModule, kinds: Sequence[str], needs: Sequence[bool]) -> dict[str, bool]:
    """The placeholders that are parameters, and (``needs``, by argument) whether each needs a gradient."""
    holders = zip(graph.graph.find_nodes(op="placeholder"), kinds, strict=False)
    return {n.name: i < len(needs) and needs[i] for i, (n, kind) in enumerate(holders) if kind == "parameter"}


def _is_of_weights(node: fx.Node, unit: Explicit) -> bool:
    """Whether a collective of backward is that of a weight's gradient: only changes of layout come after it."""
    (ends,) = node.graph.output_node().args
    at_end = {n for n, i in zip(ends, unit.made.grads, strict=True) if unit.kind.kinds[i] == "parameter"}  # type: ignore[arg-type]
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        n = waiting.pop()
        if n in seen:
            continue
        seen.add(n)
        if n is not node and getattr(n.target, "namespace", "") != "autopar" and n.target not in PASSING:
            return False
        waiting += [user for user in n.users if user.op != "output"]
        if any(user.op == "output" for user in n.users) and n not in at_end:
            return False
    return True


def sends(graph: fx.GraphModule, weights: Mapping[str, bool]) -> Iterator[Sent]:
    """Every collective of a graph. ``weights``: the placeholders that are parameters, and whether each needs a
    gradient."""
    return (sent for _, sent in _each(graph, weights))


def _each(graph: fx.GraphModule, weights: Mapping[str, bool]) -> Iterator[tuple[fx.Node, Sent]]:
    """Every collective, and the op that sends it."""
    needs: set[fx.Node] = set()
    of_weights: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder" and node.name in weights:
            of_weights.add(node)
            if weights[node.name]:
                needs.add(node)
        if node.op != "call_function":
            continue
        if node.target is not torch.ops.aten.detach.default and any(n in needs for n in node.all_input_nodes):
            needs.add(node)
        weight = bool(node.all_input_nodes) and all(n in of_weights for n in node.all_input_nodes)
        if weight:
            of_weights.add(node)
        if getattr(node.target, "namespace", "") == "autopar":
            yield from ((node, sent) for sent in _sends(node, node in needs, weight))


def _sends(node: fx.Node, needs: bool, weight: bool) -> Iterator[Sent]:
    arguments = _arguments(node)
    group = arguments.get("group")
    if not isinstance(group, str):
        return
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    if name in ("cross_entropy_sum_sharded", "vocabulary_cross_entropy"):
        for nbytes in _of_vocabulary(arguments):
            yield Sent("all_reduce", group, nbytes, inside=True)
        return
    op = OPS[name]
    nbytes = _nbytes(node) * (_ranks(group, arguments) if op.times else 1)
    for kind in op.forward:
        yield Sent(kind, group, nbytes, weight=weight)
    for kind in op.back(str(arguments.get("dual", ""))) if needs else ():
        yield Sent(kind, group, nbytes, backward=True, weight=weight)


def _of_vocabulary(arguments: Mapping[str, object]) -> tuple[int, int]:
    """Bytes of the two all-reduces inside the vocabulary-parallel loss: the largest logit of each row; sums of
    exponentials, the target's logit and (smoothed) the sum of the row."""
    logits = arguments["logits"]
    assert isinstance(logits, fx.Node)
    val = logits.meta["val"]
    rows = val.numel() // val.shape[-1] if val.shape[-1] else 0
    each = rows * max(val.element_size(), 4)
    return each, each * (3 if arguments["smoothing"] else 2)


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
