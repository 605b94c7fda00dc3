"""From priced units to a whole step: stages and chunks, collectives of the data axes, optimizer, bytes by owner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.errors import AutoparError
from autopar.pricing.kernels import Beside, Elements, UnitCost
from autopar.pricing.recipe import Recipe
from autopar.solver.cost.device import Device
from autopar.solver.cost.network import Network
from autopar.solver.simulate.step import Chunk, Step, UnitTimes
from autopar.solver.work import Move

Stage = list[tuple[UnitCost, int]]
GATHER = ("never", "step", "use", "use")  # weights, by ZeRO stage
RING = 2  # backward of ring attention sends keys, values and their gradients


class Copies(NamedTuple):
    """Weights that ``ranks`` ranks hold alike, ``stride`` apart."""

    elements: float
    ranks: int
    stride: int


@dataclass(frozen=True)
class Layout:
    """How a model lies on the ranks: tensor innermost, then context, data, pipeline stages outermost. Ranks of experts
    are neighbours among those of context and data.

    ``rows``: of a microbatch on a rank; ``recompute``: "none", "full", "attention" (its core) or "ops" (all but
    attention and every second matmul), of ``recomputed`` layers of each chunk (0: of all). ``zero``: 0 to 3;
    ``reshard``: whether ZeRO-3 lets go of weights after forward.
    """

    layers: int
    tp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1
    vp: int = 1
    rows: int = 1
    microbatches: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    reshard: bool = True
    recompute: str = "none"
    recomputed: int = 0
    schedule: str = "1f1b"
    tied: bool = False

    @property
    def shards(self) -> int:
        """Ranks that hold the same weights, but for experts, and different data."""
        return self.cp * self.dp

    def copies(self, elements: Elements) -> tuple[Copies, Copies]:
        """Which ranks hold the same of a rank's parameters.

        >>> Layout(2, tp=2, dp=8, ep=4).copies(Elements(10.0, 30.0))[1]
        Copies(elements=30.0, ranks=2, stride=8)
        """
        experts = Copies(elements.experts, self.shards // self.ep, self.tp * self.ep)
        return Copies(elements.shared, self.shards, self.tp), experts


@dataclass(frozen=True)
class Priced:
    """The costs of what a model is made of, and the figures they were made with. ``boundary``: bytes of the activation
    between two layers, whole over ``tp``; ``beside``: the rate of computation left while a collective runs;
    ``table``: elements of the token embedding on a rank."""

    prefix: UnitCost
    layer: UnitCost
    suffix: UnitCost
    boundary: float
    recipe: Recipe
    device: Device
    network: Network
    beside: float = 1.0
    table: float = 0.0


def layers_of_chunks(layers: int, pp: int, vp: int) -> list[int]:
    """Layers of each chunk, in the order of the model. Where they do not divide, the first and the last chunk, which
    hold embedding and head, have one fewer; else the first ones have one more.

    >>> layers_of_chunks(30, 8, 1), layers_of_chunks(9, 4, 1)
    ([3, 4, 4, 4, 4, 4, 4, 3], [3, 2, 2, 2])
    """
    chunks = pp * vp
    if layers % chunks and not (layers + 2) % chunks:
        each = (layers + 2) // chunks
        return [each - 1, *[each] * (chunks - 2), each - 1]
    if layers < chunks:
        raise AutoparError(f"pp={pp} vp={vp}: {layers} layers make no {chunks} chunks. Take at most {layers}.")
    each, more = divmod(layers, chunks)
    return [each + (i < more) for i in range(chunks)]


def step_of(layout: Layout, priced: Priced) -> Step:
    """The step that the simulator runs."""
    stages = stages_of(layout, priced)
    timed = {u.name: times(u, layout, priced) for u in (priced.prefix, priced.layer, priced.suffix)}
    kept = times(priced.layer, replace(layout, recompute="none"), priced) if layout.recomputed else None

    def units(stage: Stage) -> Iterator[tuple[UnitTimes, int]]:
        for unit, count in stage:
            again = min(count, layout.recomputed or count)
            yield timed[unit.name], again
            if kept is not None and again < count:
                yield kept, count - again

    send, last = send_seconds(layout, priced), len(stages) - 1
    chunks = [Chunk(tuple(units(stage)), send_s=send if i < last else 0.0) for i, stage in enumerate(stages)]
    elements = [held_elements(stages[rank :: layout.pp], layout, priced) for rank in range(layout.pp)]
    return Step(
        chunks=tuple(tuple(chunks[rank :: layout.pp]) for rank in range(layout.pp)),
        microbatches=layout.microbatches,
        schedule=layout.schedule,
        gather=GATHER[layout.zero],
        reduce=("microbatch" if layout.zero >= 2 else "step") if layout.shards > 1 else "never",
        overlap_gather=priced.recipe.overlap_gather,
        overlap_reduce=priced.recipe.overlap_reduce,
        overlap_p2p=priced.recipe.overlap_send,
        optimizer_s=tuple(optimizer_seconds(e, layout, priced) for e in elements),
        static=tuple(tuple(static_bytes(e, layout, priced.recipe).items()) for e in elements),
        reshard_after_forward=layout.reshard and layout.zero >= 3,
        tied_s=tied_seconds(layout, priced),
    )


def stages_of(layout: Layout, priced: Priced) -> list[Stage]:
    """The units of each chunk with how often each repeats, in the order of the model."""
    stages: list[Stage] = [[(priced.layer, n)] for n in layers_of_chunks(layout.layers, layout.pp, layout.vp)]
    stages[0].insert(0, (priced.prefix, 1))
    stages[-1].append((priced.suffix, 1))
    return stages


def held_elements(stages: Iterable[Stage], layout: Layout, priced: Priced) -> Elements:
    """Parameters of a rank that holds some stages; a table that is embedding and head at once counts once."""
    units = [unit for stage in stages for unit in stage]
    shared = sum(u.elements.shared * count for u, count in units)
    twice = priced.table if layout.tied and layout.pp == 1 else 0.0
    return Elements(shared - twice, sum(u.elements.experts * count for u, count in units))


def times(cost: UnitCost, layout: Layout, priced: Priced) -> UnitTimes:
    """A unit's seconds and bytes under a layout's collectives and recomputation. What computes while a collective of
    every microbatch runs beside it is slower."""
    forward_comm, backward_comm = inside_seconds(cost, layout, priced)
    saved, working, again = _recomputed(cost, layout, forward_comm)
    gather, reduce = data_seconds(cost.elements, layout, priced)
    slower = 1 / priced.beside - 1 if layout.zero >= 2 else 0.0
    gathered, laid_out = copy_seconds(cost.elements, layout, priced)
    whole = cost.elements.total if layout.zero >= 2 else 0.0  # what is whole only at its use
    return UnitTimes(
        name=cost.name,
        forward_s=cost.forward_s + slower * gather + gathered,
        backward_input_s=cost.backward_input_s + slower * (gather + reduce) + gathered + laid_out,
        backward_weight_s=cost.backward_weight_s,
        recompute_s=again,
        forward_comm_s=forward_comm,
        backward_comm_s=backward_comm,
        gather_s=gather,
        reduce_s=reduce,
        gathered_bytes=whole * priced.recipe.weight,
        gradient_bytes=whole * priced.recipe.gradient,
        saved_bytes=saved,
        weight_bytes=min(saved, sum(cost.for_weights.values())),
        recompute_bytes=working if again else 0.0,
        working_bytes=0.0 if again else working,
        comm="+".join(axis for axis in ("tp", "cp", "ep") if getattr(layout, axis) > 1) or "tp",
    )


def _recomputed(cost: UnitCost, layout: Layout, forward_comm: float) -> tuple[float, float, float]:
    """(bytes kept, working bytes, seconds of the second forward) of a unit."""
    saved, core, inputs = (sum(x.values()) for x in (cost.saved, cost.core, cost.inputs))
    if layout.recompute == "none" or not cost.name.startswith("layer"):
        return saved, cost.working, 0.0
    if layout.recompute == "full":
        return inputs, saved - inputs + cost.working, cost.forward_s + forward_comm
    if layout.recompute == "attention":
        return saved - core, core + cost.working, cost.attention_s
    if layout.recompute == "ops":
        kept = inputs + cost.attended + sum(nbytes for nbytes, _ in cost.matmuls[::2])
        known = cost.attention_s + sum(seconds for _, seconds in cost.matmuls[::2])
        return kept, max(0.0, saved - kept) + cost.working, cost.forward_s - known + forward_comm / 2
    raise AutoparError(f"recompute {layout.recompute!r} is not known. Legal: none, full, attention, ops.")


def inside_seconds(cost: UnitCost, layout: Layout, priced: Priced) -> tuple[float, float]:
    """Exposed seconds, forward and backward, of the collectives of activations inside a unit."""
    forward = backward = ring_forward = ring_backward = 0.0
    for move, beside in cost.moves:
        if move.weight:
            continue
        there = _seconds(move.kind, move.piece.nbytes, move, layout, priced)
        back = 0.0
        if move.backward and move.backward_piece is not None:
            back = _seconds(move.backward, move.backward_piece.nbytes, move, layout, priced)
        if move.axis == "ep":
            forward, backward = forward + there, backward + back
        elif move.axis == "cp":
            ring_forward, ring_backward = ring_forward + there, ring_backward + max(back, there) * RING
        else:
            one, other = exposed(move, beside, there, back, layout.tp, priced.recipe)
            forward, backward = forward + one, backward + other
    if layout.cp > 1:
        hidden = cost.attention_s * (layout.cp - 1) / layout.cp
        forward += max(0.0, ring_forward - hidden)
        backward += max(0.0, ring_backward - 2 * hidden)
    return forward, backward


def exposed(move: Move, beside: Beside, there: float, back: float, ranks: int, recipe: Recipe) -> tuple[float, float]:
    """What of a tensor-parallel collective's seconds forward and backward is waited for.

    Cut in as many pieces as there are ranks and run beside the matmul that makes or reads them (``overlap_tensor``),
    one piece is. Run as a whole (``overlap_backward``), the sum of gradients hides behind the weight gradients, a
    second gather behind the gradients of activations.
    """
    again = there if move.again else 0.0
    after, before = beside.after, beside.before
    if recipe.overlap_tensor:
        gathers = move.kind == "all_gather"
        forward = _piecewise(there, after.forward if gathers else before.forward, ranks)
        backward = _piecewise(back, after.backward_input if gathers else before.backward_input, ranks)
        return forward, backward + max(0.0, again - after.backward_weight)
    if recipe.overlap_backward:
        summed = move.backward in ("all_reduce", "reduce_scatter")
        rest = max(0.0, back - after.backward_weight) if summed else back
        return there, rest + max(0.0, again - after.backward_input)
    return there, back + again


def _piecewise(seconds: float, beside: float, pieces: int) -> float:
    return seconds / pieces + max(0.0, seconds * (1 - 1 / pieces) - beside)


def _seconds(kind: str, nbytes: float, move: Move, layout: Layout, priced: Priced) -> float:
    if not kind:
        return 0.0
    size = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep}[move.axis]
    stride = 1 if move.axis == "tp" else layout.tp
    return float(priced.network.seconds(kind, float(nbytes), size, stride))


def data_seconds(elements: Elements, layout: Layout, priced: Priced) -> tuple[float, float]:
    """Seconds of gathering a unit's weights and of reducing its gradients over the ranks that hold the same."""
    seconds, r = priced.network.seconds, priced.recipe
    gather = reduce = 0.0
    for held, ranks, stride in layout.copies(elements):
        if ranks == 1 or not held:
            continue
        gather += float(seconds("all_gather", r.weight * held, ranks, stride)) if layout.zero else 0.0
        kind = "reduce_scatter" if layout.zero else "all_reduce"
        reduce += float(seconds(kind, r.gradient * held, ranks, stride))
    return gather, reduce


def copy_seconds(elements: Elements, layout: Layout, priced: Priced) -> tuple[float, float]:
    """Seconds of copying a unit's weights once gathered and its gradients before they are reduced, at each use."""
    each = sum(held for held, ranks, _ in layout.copies(elements) if ranks > 1) if layout.zero >= 2 else 0.0
    copies = (each * priced.recipe.gather_copies, each * priced.recipe.reduce_copies)
    gather, reduce = (float(priced.device.memory_s(nbytes)) if nbytes else 0.0 for nbytes in copies)
    return gather, reduce


def send_seconds(layout: Layout, priced: Priced) -> float:
    """Seconds of an activation's way to the next stage."""
    if layout.pp == 1:
        return 0.0
    stride = layout.tp * layout.shards
    parted = layout.sequence_parallel or priced.recipe.scatter_send
    nbytes = priced.boundary / (layout.tp if parted else 1)
    seconds = float(priced.network.seconds("send", nbytes, 2, stride))
    if priced.recipe.scatter_send and not layout.sequence_parallel and layout.tp > 1:
        seconds += float(priced.network.seconds("all_gather", priced.boundary, layout.tp, 1))
    return seconds


def tied_seconds(layout: Layout, priced: Priced) -> float:
    """Seconds of adding the gradients of a table that the first and the last stage both hold."""
    if not layout.tied or layout.pp == 1:
        return 0.0
    stride = layout.tp * layout.shards * (layout.pp - 1)
    return float(priced.network.seconds("all_reduce", priced.recipe.gradient * priced.table, 2, stride))


def optimizer_seconds(elements: Elements, layout: Layout, priced: Priced) -> float:
    """Adam with fp32 states: gradients are read twice (their norm, the update), states and master copy read and
    written, the weight written."""
    r = priced.recipe
    update = r.optimizer_traffic or r.gradient + 2 * r.optimizer + r.weight
    return float(priced.device.memory_s((r.gradient + update) * parted(elements, layout, 1)))


def parted(elements: Elements, layout: Layout, stage: int) -> float:
    """Elements of parameters that a rank holds of what ZeRO parts from ``stage`` on.

    >>> parted(Elements(80.0, 40.0), Layout(2, dp=8, ep=4, zero=1), stage=1)
    30.0
    """
    return sum(held / (ranks if layout.zero >= stage else 1) for held, ranks, _ in layout.copies(elements))


def static_bytes(elements: Elements, layout: Layout, recipe: Recipe) -> Mapping[str, float]:
    """Bytes by owner that a rank holds all the time."""
    return {
        "parameters": recipe.weight * elements.total if layout.zero < 2 else 0.0,
        "gradients": (recipe.gradient + recipe.gradient_scratch) * parted(elements, layout, 2),
        "optimizer": recipe.optimizer * parted(elements, layout, 1),
    }


__all__ = ["Layout", "Priced", "layers_of_chunks", "static_bytes", "step_of"]
