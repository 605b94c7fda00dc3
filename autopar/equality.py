"""What equal means: one definition (``docs/design.md`` section 9) for ``verify`` and every test.

A distance is ``max|a - b|`` over the tensor, divided by its scale: the largest value of the reference, for gradients
and buffers at least 1e-3 of the largest one of any tensor (a gradient that is zero but for rounding has no digits to
agree in), and for parameters at least the learning rate. Integers, shapes, names and ``grad is None`` are equal or not.

fp64 is the judge, against the captured graph run op by op in one process. fp32 is compared with eager; where eager is
itself far from the fp64 reference, the plan may be at most twice as far from it as eager is. A plan that computes in
half precision may be 1.5 times as far from it, in the norm of its tensors, as one process in that precision is.

>>> import torch
>>> one = Run(torch.tensor(2.0), {"w": torch.tensor([1.0, 3.0])}, {}, {"w": torch.tensor([5.0])})
>>> two = Run(torch.tensor(2.0), {"w": torch.tensor([1.0, 3.3])}, {}, {"w": torch.tensor([5.0])})
>>> worst = distances(two, one, lr=0.1)[0]
>>> worst.name, worst.kind, round(worst.rel, 3)
('w', 'grad', 0.1)
>>> judge(distances(two, one, lr=0.1), FP32)
(False, ('fp32 loss 1.0e-05', 'fp32 grad 1.0e-05', 'fp32 param 1.0e-05'))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 1 << 22  # elements compared at a time, in float64
FLOOR = 1e-3  # of the largest gradient (buffer) of any tensor
KINDS = ("loss", "grad", "buffer", "param")
HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}
FACTOR = 1.5  # times one process's own distance from float64: what a plan in half precision may have


@dataclass(frozen=True)
class Size:
    """How large a tensor is: ``of`` one piece of it, and of ``both`` where those of two pieces are known."""

    of: Callable[[Tensor], float]
    both: Callable[[float, float], float]

    def whole(self, t: Tensor) -> float:
        """Of what is finite in a tensor, piece by piece."""
        total = 0.0
        for piece in _pieces(t):
            if piece.numel():
                total = self.both(total, self.of(piece.abs().double().nan_to_num(0.0, 0.0, 0.0)))
        return total


LARGEST = Size(lambda piece: float(piece.max()), max)
NORM = Size(lambda piece: float(torch.linalg.vector_norm(piece)), math.hypot)


@dataclass(frozen=True)
class Run:
    """What three steps of one model leave: loss, gradients and buffers after the first, parameters after the third.

    All tensors are whole. ``names``: all that a user may look up, ties included, in order.
    """

    loss: Tensor
    grads: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    params: Mapping[str, Tensor]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difference:
    """How far one tensor is from its reference: ``abs`` in the tensor's unit, ``rel`` in its scale. A difference that
    no limit forgives (a name, a shape, None, an integer) has ``rel`` inf and says why in ``name``."""

    name: str
    kind: str
    abs: float
    rel: float


@dataclass(frozen=True)
class Limits:
    """The largest relative distance by kind. Where one is exceeded, a limit may grow to ``factor`` times the
    reference's own uncertainty (``why``), if that is above ``trusted``."""

    precision: str
    limits: Mapping[str, float]
    factor: float
    trusted: float
    why: str


@dataclass(frozen=True)
class Doubt:
    """How uncertain the reference is, by kind; and the distances that a grown limit is held against, where others."""

    own: Mapping[str, float]
    instead: Sequence[Difference] | None = None


FP64 = Limits(
    "fp64",
    {"loss": 1e-10, "grad": 1e-10, "buffer": 1e-10, "param": 1e-9},
    factor=10.0,
    trusted=0.0,
    why="what a permutation of the rows moves",
)
FP32 = Limits("fp32", dict.fromkeys(KINDS, 1e-5), factor=2.0, trusted=5e-6, why="eager's own distance from fp64")


def distances(candidate: Run, reference: Run, *, lr: float, size: Size | None = None) -> list[Difference]:
    """Every tensor's distance from its reference, the farthest first. ``lr``: of the optimizer that made ``params``;
    ``size``: of tensors and their differences, `LARGEST` (default) or `NORM`."""
    size = size or LARGEST
    found = [_difference("loss", "loss", candidate.loss, reference.loss, 0.0, size)]
    if candidate.names != reference.names:
        odd = sorted(set(candidate.names) ^ set(reference.names)) or ["their order"]
        found.append(_unlike(f"names ({', '.join(odd[:3])})", "param"))
    for kind, mine, theirs, floor in (
        ("grad", candidate.grads, reference.grads, FLOOR * _largest_of(reference.grads, size)),
        ("buffer", candidate.buffers, reference.buffers, FLOOR * _largest_of(reference.buffers, size)),
        ("param", candidate.params, reference.params, lr),
    ):
        for name in sorted(mine.keys() ^ theirs.keys()):
            found.append(_unlike(f"{name} (only in {'the plan' if name in mine else 'one process'})", kind))
        found += [_difference(n, kind, mine[n], theirs[n], floor, size) for n in theirs if n in mine]
    return sorted(found, key=lambda d: -d.rel)


def judge(
    found: Sequence[Difference], limits: Limits, doubt: Callable[[], Doubt] | None = None
) -> tuple[bool, tuple[str, ...]]:
    """Whether all distances are within the limits, and which limit applied to each kind, in words.

    ``doubt`` is asked only where a limit is exceeded by a number.
    """
    farthest = farthest_by_kind(found)
    exceeded = [kind for kind, distance in farthest.items() if distance > limits.limits[kind]]
    doubted = doubt() if doubt is not None and any(math.isfinite(farthest[k]) for k in exceeded) else Doubt({})
    instead = farthest if doubted.instead is None else farthest_by_kind(doubted.instead)
    ok, said = True, []
    for kind, distance in farthest.items():
        limit, words, own = limits.limits[kind], "", doubted.own.get(kind, 0.0)
        if kind in exceeded and own > limits.trusted and limits.factor * own > limit:
            limit, distance = limits.factor * own, instead.get(kind, 0.0)
            words = f" ({limits.factor:g} times {limits.why}, {own:.1e})"
        ok = ok and distance <= limit
        said.append(f"{limits.precision} {kind} {limit:.1e}{words}")
    return ok, tuple(said)


def judge_low(
    found: Sequence[Difference],
    dtype: torch.dtype,
    own: Mapping[str, float],
    unit: Callable[[Difference], float],
    doubt: Callable[[], Mapping[str, float]] | None = None,
) -> tuple[bool, tuple[str, ...]]:
    """The same of a plan that computes in half precision: its farthest tensor of a kind may be `FACTOR` times as far
    from float64, in norm, as that of one process in this precision.

    ``own``: of one process, by kind; ``unit``: the unit roundoff of what a tensor is kept in, under which no distance
    means anything; ``doubt``: how far other runs of one process are, asked only where a limit is exceeded by a number.
    """
    meant = [d for d in found if d.rel > FACTOR * unit(d)]
    farthest = dict.fromkeys(farthest_by_kind(found), 0.0) | farthest_by_kind(meant)
    limits = {kind: FACTOR * own.get(kind, 0.0) for kind in farthest}
    if doubt is not None and any(limits[kind] < rel < math.inf for kind, rel in farthest.items()):
        more = doubt()
        limits = {kind: max(limit, FACTOR * more.get(kind, 0.0)) for kind, limit in limits.items()}
    words = f"({FACTOR:g} times one process's own distance from fp64"
    said = tuple(f"{HALF[dtype]} {kind} {limit:.1e} {words}, {limit / FACTOR:.1e})" for kind, limit in limits.items())
    return all(rel <= limits[kind] for kind, rel in farthest.items()), said


def farthest_by_kind(found: Sequence[Difference]) -> dict[str, float]:
    """The largest relative distance of each kind that there is."""
    return {kind: max(d.rel for d in found if d.kind == kind) for kind in KINDS if any(d.kind == kind for d in found)}


def _difference(
    name: str, kind: str, mine: Tensor | None, theirs: Tensor | None, floor: float, size: Size
) -> Difference:
    if mine is None or theirs is None:
        if mine is theirs:
            return Difference(name, kind, 0.0, 0.0)
        return _unlike(f"{name} ({'None' if mine is None else 'not None'}, unlike one process)", kind)
    if mine.shape != theirs.shape:
        return _unlike(f"{name} (shape {tuple(mine.shape)}, not {tuple(theirs.shape)})", kind)
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return Difference(name, kind, 0.0, 0.0) if torch.equal(mine, theirs) else _unlike(f"{name} (integers)", kind)
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    distance = whole = 0.0
    for a, b in zip(_pieces(mine), _pieces(theirs), strict=True):
        a, b = a.to(wide), b.to(wide)
        agree = (a == b) | (a.isnan() & b.isnan())
        gap = (a - b).abs().masked_fill(agree, 0.0).nan_to_num(math.inf, math.inf)
        distance = size.both(distance, size.of(gap) if gap.numel() else 0.0)
        whole = size.both(whole, size.whole(b))
    scale = max(whole, size.of(torch.full_like(theirs, floor, dtype=torch.float64)) if kind == "param" else floor)
    return Difference(name, kind, distance, distance / scale if scale else 0.0 if distance == 0 else math.inf)


def _unlike(what: str, kind: str) -> Difference:
    return Difference(what, kind, math.inf, math.inf)


def _largest_of(tensors: Mapping[str, Tensor | None], size: Size) -> float:
    return max((size.whole(t) for t in tensors.values() if t is not None and t.is_floating_point()), default=0.0)


def _pieces(t: Tensor) -> Iterator[Tensor]:
    return iter(t.detach().reshape(-1).split(PIECE))  # type: ignore[no-untyped-call]
