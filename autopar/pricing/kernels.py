"""The kernels that a unit's ops become under a recipe, and what they take: from `Unit` and hardware to `UnitCost`.

Matmuls and attention are kernels of their own. Between them, memory-bound ops of one *level* (the same number of such
kernels before them on their longest way) are joined along the data: within a module where a kernel was written for
it, across modules where a compiler did. A joined kernel reads what comes from outside and writes what is used outside;
its backward recomputes the inside from what it read, so that the inside is not kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar.pricing.recipe import FLASH, Recipe
from autopar.solver.cost.device import Device
from autopar.solver.work import Attend, Move, Op, Piece, Unit

HEAVY = ("matmul", "attention", "conv")
EXPERTS = ".mlp.experts."  # in the path of a parameter of experts
CASTS = 4  # bytes an element: 2 read, 1 written and 1 more, transposed (Transformer Engine's cast_transpose)
SMALL = 16  # statistics: a kept tensor with so many times fewer elements than the largest


class Ways(NamedTuple):
    """Seconds of matmuls: forward, gradients of activations, gradients of weights."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    @staticmethod
    def sum(ways: Iterable[Ways]) -> Ways:
        """Of several."""
        return Ways(*map(sum, zip(Ways(), *ways, strict=True)))


class Beside(NamedTuple):
    """What a collective may run beside: the matmuls ``before`` it, which make what it moves, and those ``after`` it."""

    before: Ways
    after: Ways


class Elements(NamedTuple):
    """Of a rank's parameters: of those that all data ranks hold alike, and of the rank's share of the ``experts``."""

    shared: float = 0.0
    experts: float = 0.0

    @staticmethod
    def of(unit: Unit) -> Elements:
        """Those of a unit."""
        pieces = [(EXPERTS in name, float(piece.elements)) for name, piece in unit.parameters]
        return Elements(sum(n for e, n in pieces if not e), sum(n for e, n in pieces if e))

    @property
    def total(self) -> float:
        """All of them."""
        return self.shared + self.experts


@dataclass
class UnitCost:
    """Seconds of one unit and one microbatch on one rank, and bytes that it keeps for backward.

    ``forward_s``, ``backward_input_s`` and ``backward_weight_s``: compute; ``attention_s``: of the forward, what the
    attention core takes. ``saved``: bytes by storage; ``core``: what of them lies inside the attention core;
    ``inputs``: activations that come from other units. ``working``: the most that gradients of one kernel's operands
    and results take.
    """

    name: str
    forward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    attention_s: float = 0.0
    saved: dict[Any, float] = field(default_factory=dict)
    core: dict[Any, float] = field(default_factory=dict)
    inputs: dict[Any, float] = field(default_factory=dict)
    matmuls: list[tuple[float, float]] = field(default_factory=list)  # bytes of each result, seconds of its forward
    attended: float = 0.0  # bytes of the results of attention
    for_weights: dict[Any, float] = field(default_factory=dict)  # of what is saved, what weight gradients read
    working: float = 0.0
    elements: Elements = field(default_factory=Elements)
    moves: tuple[tuple[Move, Beside], ...] = ()

    def add(self, forward: float, backward: float, weight: float = 0.0) -> None:
        """Seconds of one kernel."""
        self.forward_s += forward
        self.backward_input_s += backward
        self.backward_weight_s += weight


def unit_cost(unit: Unit, recipe: Recipe, device: Device) -> UnitCost:
    """What a unit with numeric sizes takes."""
    cost = UnitCost(unit.name, elements=Elements.of(unit))
    matmuls: list[tuple[Op, Ways]] = []
    for op in unit.ops:
        if op.kind == "attention":
            _attention(op, recipe, device, cost)
        elif op.kind in HEAVY:
            matmuls.append((op, _matmul(op, recipe, device, cost)))
    cost.moves = tuple((move, _beside(move, matmuls)) for move in unit.moves)
    for group in groups(unit, recipe):
        _kernel(group, unit, device, cost)
    if recipe.holds_outputs and any(op.kind == "loss" for op in unit.ops):
        _keep(cost, _outputs(unit))
    outside = (p for op in unit.ops for p in (*op.reads, *op.kept) if p.key not in unit.made)
    cost.inputs = {k: float(p.nbytes) for k, p in _largest(p for p in outside if p.floating and not p.weight).items()}
    return cost


def _outputs(unit: Unit) -> list[Piece]:
    """The logits that a loss reads, and what they were cast from."""
    made = {p.key: op for op in unit.ops for p in op.writes}
    read = [p for op in unit.ops if op.kind == "loss" for p in op.reads if p.floating]
    return [*read, *(p for r in read if r.key in made for p in made[r.key].reads if not p.weight)]


def _elements(piece: Piece) -> float:
    return float(piece.elements)


def _beside(move: Move, matmuls: Sequence[tuple[Op, Ways]]) -> Beside:
    """The matmuls that make what a collective moves, and those that read it."""
    before = [ways for op, ways in matmuls if move.source.key in {p.key for p in op.writes}]
    after = [ways for op, ways in matmuls if move.result.key in {p.key for p in op.reads}]
    return Beside(Ways.sum(before), Ways.sum(after))


def _matmul(op: Op, recipe: Recipe, device: Device, cost: UnitCost) -> Ways:
    """Seconds of its three ways. Gradients of weights are added to what is there: inside the matmul or by a kernel."""
    ways = [sum(device.matmul_s(p.batch, p.m, p.n, p.k, p.dtype) for p in way) for way in
            (op.forward, op.backward_input, op.backward_weight)]  # fmt: skip
    forward, backward, weight = (float(w) for w in ways)
    elements = sum(_elements(p) for p in op.reads if p.weight) if op.backward_weight else 0.0
    added = 2 * recipe.gradient * elements
    if recipe.fused_accumulation:
        weight = max(weight, device.memory_s(added)) if added else weight
    else:
        weight += device.memory_s(added + recipe.weight * elements) if added else 0.0
    biased = any(p.weight and len(p.shape) == 1 for p in op.reads)
    if biased and op.backward_weight:
        weight += device.memory_s(sum(float(p.nbytes) for p in op.writes))
    casts, casts_back = _casts(op, device)
    cost.add(forward + casts, backward + casts_back, weight)
    _keep(cost, op.kept)
    if op.backward_weight:
        cost.for_weights |= {p.key: float(p.nbytes) for p in op.kept if not p.weight}
    cost.matmuls.append((sum(float(p.nbytes) for p in op.writes), forward))
    both = sum(float(p.nbytes) for p in (*op.reads, *op.writes) if not p.weight)
    cost.working = max(cost.working, both)
    return Ways(forward, backward, weight)


def _casts(op: Op, device: Device) -> tuple[float, float]:
    """Seconds, forward and backward, of casting an fp8 matmul's activation and its result's gradient."""
    if not any(p.dtype == "fp8" for p in op.forward):
        return 0.0, 0.0
    read = sum(_elements(p) for p in op.reads if not p.weight)
    written = sum(_elements(p) for p in op.writes)
    return float(device.memory_s(CASTS * read)), float(device.memory_s(CASTS * written))


def _keep(cost: UnitCost, kept: Iterable[Piece]) -> None:
    for piece in kept:
        if not piece.weight:
            cost.saved[piece.key] = max(cost.saved.get(piece.key, 0.0), float(piece.nbytes))


def _attention(op: Op, recipe: Recipe, device: Device, cost: UnitCost) -> None:
    assert op.attend is not None
    if recipe.attention in FLASH:
        a = op.attend
        forward = float(device.attention_s(recipe.attention, a, backward=False))
        backward = float(device.attention_s(recipe.attention, a, backward=True))
        _keep(cost, op.kept)
        core = [p for p in op.kept if p.key in {w.key for w in op.writes}]
        cost.core |= {p.key: float(p.nbytes) for p in core}
    else:
        forward, backward = _scores(op, op.attend, recipe, device, cost)
    cost.add(forward, backward)
    cost.attention_s += forward
    cost.attended += sum(float(p.nbytes) for p in op.writes)


def _scores(op: Op, a: Attend, recipe: Recipe, device: Device, cost: UnitCost) -> tuple[float, float]:
    """Attention whose scores are written out: two matmuls, and between them softmax and dropout over all scores.

    A fused softmax scales, masks and normalises in one kernel; else each does so alone, the softmax in fp32.
    """
    size = 2 if a.dtype in ("bf16", "fp16") else 4
    scores = float(a.batch * a.heads * a.queries * a.keys)
    heads = a.batch * a.heads
    mixed = device.matmul_s(heads, a.queries, a.head, a.keys, a.dtype)
    scored = device.matmul_s(heads, a.queries, a.keys, a.head, a.dtype)
    scored = max(scored, 2 * scores * a.head / (device.rates[a.dtype] * device.sustained * device.scores))
    fused = recipe.attention == "fused_softmax"
    passes = [2 * size] if fused else [2 * size, 2 * size, size + 4, 8, 4 + size]  # scale, mask, cast, softmax, cast
    back = [3 * size] if fused else [4 + size, 12, size + 4, 2 * size, 2 * size]
    kept = {"probabilities": size * scores} if fused else {"probabilities": 4 * scores, "cast": size * scores}
    if recipe.dropout:
        passes.append(2 * size + 1)
        back.append(2 * size + 1)
        kept |= {"mask": scores, "dropped": size * scores}
        kept.pop("cast", None)
    forward = scored + mixed + sum(device.memory_s(n * scores) for n in passes)
    backward = 2 * scored + 2 * mixed + sum(device.memory_s(n * scores) for n in back)
    cost.core |= {(op.module, name): nbytes for name, nbytes in kept.items()}
    cost.saved |= cost.core
    read = {p.key for p in op.reads}
    _keep(cost, (p for p in op.kept if p.key in read))
    cost.working = max(cost.working, 2 * size * scores)
    return float(forward), float(backward)


def groups(unit: Unit, recipe: Recipe) -> list[list[Op]]:
    """The memory-bound ops, joined to kernels; views make none."""
    ops = list(unit.ops)
    level, owner = _levels(ops)
    home: dict[int, int] = {}

    def find(i: int) -> int:
        while home.setdefault(i, i) != i:
            i = home[i]
        return i

    for i, op in enumerate(ops):
        if op.kind in HEAVY:
            continue
        for j in _sources(ops, owner, i):
            if ops[j].kind in HEAVY or level[i] != level[j]:
                continue
            if recipe.compiled or op.module == ops[j].module or "view" in (op.kind, ops[j].kind):
                home[find(i)] = find(j)
    joined: dict[int, list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        if op.kind not in HEAVY and op.kind != "view":
            joined[find(i)].append(i)
    found: list[list[Op]] = []
    for members in joined.values():
        group = [ops[i] for i in members]
        kind = _class(group)
        if kind in recipe.fused or (recipe.compiled and (kind != "loss" or recipe.compiled_loss)):
            found.append(group)
        else:
            found += [[op] for op in group]
    return found


def _class(group: Sequence[Op]) -> str:
    kinds = {op.kind for op in group}
    if "loss" in kinds:
        return "loss"
    return "norm" if kinds & {"reduction", "norm"} else "pointwise"


def _levels(ops: Sequence[Op]) -> tuple[list[int], dict[int, list[int]]]:
    """How many heavy kernels lie before each op on its longest way; and who writes each storage, in order."""
    level: list[int] = []
    owner: dict[int, list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        before = _sources(ops, owner, i)
        level.append(max((level[j] + (ops[j].kind in HEAVY) for j in before), default=0))
        for piece in op.writes:
            owner[piece.key].append(i)
    return level, owner


def _sources(ops: Sequence[Op], owner: Mapping[int, list[int]], i: int) -> list[int]:
    """The ops before ``i`` that wrote what it reads."""
    found = []
    for piece in ops[i].reads:
        earlier = [j for j in owner.get(piece.key, ()) if j < i]
        if earlier:
            found.append(earlier[-1])
    return found


def _kernel(group: Sequence[Op], unit: Unit, device: Device, cost: UnitCost) -> None:
    """One kernel forward and one backward of a group of memory-bound ops."""
    members = {id(op) for op in group}
    written = {p.key: p for op in group for p in op.writes}
    outside = {p.key for op in unit.ops if id(op) not in members for p in op.reads}
    reads = _largest(p for op in group for p in op.reads if p.key not in written)
    used = {p.key for op in group for p in op.reads}
    leaves = {k: p for k, p in written.items() if k in outside or k not in used}
    forward = sum(float(p.nbytes) for p in reads.values()) + sum(float(p.nbytes) for p in leaves.values())
    kept = _kept(group, reads, written, leaves)
    cost_backward = 0.0
    if any(op.grad for op in group):
        gradients = [float(p.nbytes) for p in (*leaves.values(), *reads.values()) if p.floating]
        cost_backward = sum(gradients) + sum(float(p.nbytes) for p in kept)
        inside = max(gradients, default=0.0) if group[0].kind == "loss" and len(group) == 1 else 0.0
        cost.working = max(cost.working, sum(gradients) + inside)  # a loss in two steps has a gradient between them
    _keep(cost, kept)
    cost.add(device.memory_s(forward), device.memory_s(cost_backward) if cost_backward else 0.0)


def _largest(pieces: Iterable[Piece]) -> dict[int, Piece]:
    found: dict[int, Piece] = {}
    for piece in pieces:
        if piece.key not in found or float(piece.nbytes) > float(found[piece.key].nbytes):
            found[piece.key] = piece
    return found


def _kept(
    group: Sequence[Op], reads: Mapping[int, Piece], written: Mapping[int, Piece], leaves: Mapping[int, Piece]
) -> list[Piece]:
    """What a kernel keeps: of one op, what autograd does; of several, tensors from outside, statistics and masks."""
    kept = _largest(p for op in group for p in op.kept)
    if len(group) == 1:
        return list(kept.values())
    most = max((_elements(p) for p in (*reads.values(), *written.values())), default=0.0)
    found: list[Piece] = []
    lost = False
    for key, piece in kept.items():
        inside = key not in reads and key not in leaves
        if inside and piece.floating and _elements(piece) * SMALL > most:
            lost = True
        else:
            found.append(piece)
    if lost:
        known = {p.key for p in found}
        found += [p for k, p in reads.items() if p.floating and k not in known]
    return found
